"""States in pinned host memory, which stream through the GPU while a step runs.

Parameters are stepped in chunks. Each chunk has an :class:`Engine`, whose states are views into a
ring of GPU memory. They are copied in before the part steps and copied out afterwards, so
one copy each way serves all that a step reads: the comparison of masters with their parameters, the
preview of amaxes, and the update. Both copies have streams of their own, so that one chunk comes in
while the one before is stepped and the one before that goes out.

``optimizer.state`` holds the tensors on the host. The states of a chunk lie together in one
:class:`_StateBlock` and move in one copy. Whatever else is found in ``optimizer.state``, because it
is new, loaded or exchanged, is copied once without overlap, into a new block. So nothing depends on
what is remembered here.
"""

import contextlib
import mmap
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import is_dtensor, like, local, sharded_dims
from fp4adam.distributed.shards import settle_written, sharded_weights
from fp4adam.optim.engine import Engine, Group, Signals
from fp4adam.optim.memory_layout import is_dense
from fp4adam.optim.parameter import Parameters, State
from fp4adam.optim.state_dict import TENSOR_NAMES
from fp4adam.tensors.fingerprint import version

# Bytes of FP32 states that a chunk is filled up to.
CHUNK_BYTES = 2**28
# Bytes of one copy. A link moves much smaller ones slower, and space in the ring that a part of a
# large chunk has left can be taken sooner.
PIECE_BYTES = 2**26
_BYTES_PER_ELEMENT = 12
# Of every state within its block; more than any kernel needs.
_ALIGNMENT = 256


class OffloadedEngine(Engine):
    """Steps the parameters of an optimizer with states that stay on the host."""

    on_host = True

    def __init__(
        self, parameters: Parameters, groups: Sequence[Group], states: dict[Tensor, State]
    ) -> None:
        super().__init__(parameters, groups, states)
        self._parts: list[Engine] = []
        self._known: list = []
        self._sharded: list[Tensor] = []
        self._blocks: weakref.WeakKeyDictionary[Engine, _StateBlock] = weakref.WeakKeyDictionary()
        self._gpus: dict[torch.device, _DeviceLink] = {}

    # What the optimizer calls

    def forget(self) -> None:
        """Drop all parts; the states keep their values and get new blocks in the next step."""
        super().forget()
        self._wait()
        self._parts, self._known, self._sharded = [], [], []
        self._blocks.clear()

    def drop_plan(self) -> None:
        for part in self._parts:
            part.drop_plan()

    def settle(self) -> None:
        """Wait for the states, and take back the counts of a step that the device skipped."""
        self._wait()
        for part in self._blocks:
            part.settle()

    def _wait(self) -> None:
        """Wait until the host has the states of the last step."""
        for gpu in self._gpus.values():
            gpu.link.wait()

    def join(self) -> None:
        for gpu in self._gpus.values():
            gpu.link.join()

    def placed(self, param: Tensor, state: State) -> State:
        return moved(param, state, "cpu")

    def step(self, signals: Signals, captures: bool = False) -> None:
        """Step part after part; what cannot be stepped is refused before the first."""
        self.check_call()
        self._update_parts()
        settle_written(self._sharded)
        active = []
        for part in self._parts:
            ready = self._is_ready(part)
            # Nothing moves for parameters that are frozen or unused in this step, unless somebody
            # has written to them or to their states.
            written = not ready and any(param in self.states for param in part.params)
            if part.grads() or (written and part.device in self._gpus):
                active.append((part, ready))
        if not all(ready for _, ready in active):
            self.check()
            for param, grad in zip(self.params, self.all_grads(), strict=True):
                if grad is not None:
                    self._gpu(local(param).device)
        self.check_clip()
        try:
            for part, _ in active:
                part.clipping = self.clipping
                self.step_part(part, signals)
        except BaseException:
            clipping = self.clipping
            self.parameters.forget_marks()
            self.forget()
            self.clipping = clipping
            raise
        self.clipping = None

    def step_part(self, part: Engine, signals: Signals) -> None:
        """Step a part with its states, from the host and back."""
        gpu = self._gpu(part.device)
        block = self._blocks.get(part)
        if block is not None and block.holds(part.params, self.states):
            self._stream(part, block, gpu, signals)
        else:
            self._place(part, gpu, signals)

    # Parts

    def _update_parts(self) -> None:
        """Divide the parameters into parts again if they are others than at the last step."""
        known = self.membership()
        if known == self._known:
            return
        self.parameters.keep_only(self.params)
        self._blocks.clear()
        self._parts = self.parts(chunks(self.together()))
        for part in self._parts:
            part.n_parts = len(self._parts)
        self._known, self._sharded = known, sharded_weights(self.params)

    def _is_ready(self, part: Engine) -> bool:
        """Whether states and plan are those of the last step, so that nothing has to be checked."""
        block = self._blocks.get(part)
        return (
            block is not None
            and block.holds(part.params, self.states)
            and part.has_fitting_plan()
            and not part.plan.has_gradients_for_operators()
        )

    # Either states stream through the ring, or they are copied once and get a block.

    def _stream(
        self, part: Engine, block: "_StateBlock", gpu: "_DeviceLink", signals: Signals
    ) -> None:
        link = gpu.link
        ring = self._ring(gpu)
        part.states = block.staged_in(ring, self.states)
        block.pass_on_foreign_writes()
        for span, host, staged in sorted(block.pieces(), key=lambda piece: ring.last_use(piece[0])):
            ready = link.copy_in(host, staged, ring.users_of(span))
        fits = False
        try:
            with link.stepping(ready, part.grads() if part.overlaps_backward else None):
                try:
                    part.step(signals)
                finally:
                    fits = block.take_back(part)
        finally:
            ring.uses += [
                (span, link.copy_out(staged, host)) for span, host, staged in block.pieces()
            ]
            if fits:
                for param, state in block.staged.items():
                    self.states[param].update(_others(state))
            else:
                link.join()
                block.unstage(part.states)
                self._settle(part, gpu)

    def _place(self, part: Engine, gpu: "_DeviceLink", signals: Signals) -> None:
        gpu.link.wait()
        part.drop_plan()
        part.states = {
            param: moved(param, self.states[param], local(param).device)
            for param in part.params
            if param in self.states
        }
        try:
            part.step(signals)
        finally:
            self._settle(part, gpu)

    def _settle(self, part: Engine, gpu: "_DeviceLink") -> None:
        """Give the states that a part has after a step a new block."""
        new = part.states
        self._blocks.pop(part, None)
        gpu.link.wait()
        try:
            block = _StateBlock(gpu.link, new)
        except BaseException:
            self.states.update(new)  # where they are now, until the next step tries again
            raise
        for param, state in new.items():
            self.states[param] = {**_others(state), **block.host.get(param, {})}
        self._blocks[part] = block
        gpu.has_new_blocks = True
        if block.nbytes:
            self._release(part)

    def _release(self, part: Engine) -> None:
        """Drop all that would keep the states of a part on the GPU alive."""
        part.drop_plan()
        self.parameters.unbind(part.states)
        part.states = {}

    def _ring(self, gpu: "_DeviceLink") -> "_Ring":
        """The ring of a GPU; a larger one in place of one that has become too small."""
        if gpu.ring is None or gpu.has_new_blocks:
            blocks = {p: block for p, block in self._blocks.items() if block.link is gpu.link}
            needed = ring_bytes([block.nbytes for block in blocks.values()])
            if gpu.ring is None or needed > len(gpu.ring.bytes):
                gpu.link.wait()
                for part, block in blocks.items():
                    if block.nbytes:  # frees the old ring
                        block.leave_ring()
                        self._release(part)
                gpu.ring = None
                gpu.ring = _Ring(gpu.link.empty(needed))
            gpu.has_new_blocks = False
        return gpu.ring

    def _gpu(self, device: torch.device) -> "_DeviceLink":
        if device not in self._gpus:
            self._gpus[device] = _DeviceLink(link_of(device))
        return self._gpus[device]


def link_of(device: torch.device) -> "Link":
    """The link between the host and a device.

    Raises:
        RuntimeError: If the device is the host.
    """
    if device.type != "cuda":
        raise RuntimeError(
            f"parameters must be on a GPU with offload_states, got one on {device}, where its "
            "states are on the host already; move the model, or leave offload_states False"
        )
    return Link(device)


def chunks(units: Iterable[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Divide parameters into chunks of at most ``CHUNK_BYTES`` of FP32 states.

    A larger parameter is a chunk of its own. Those of a unit stay together, and those of different
    devices apart. All ranks get the same chunks of sharded parameters.
    """
    found: list[list[Tensor]] = []
    filling: dict[torch.device, int] = {}
    last: dict[torch.device, list[Tensor]] = {}
    for unit in units:
        device, size = local(unit[0]).device, sum(map(_chunk_bytes, unit))
        if device not in last or filling[device] + size > CHUNK_BYTES:
            last[device], filling[device] = [], 0
            found.append(last[device])
        last[device] += unit
        filling[device] += size
    return found


def _chunk_bytes(param: Tensor) -> int:
    n_shards = 1
    for dim in sharded_dims(param):
        n_shards *= param.device_mesh.size(dim)
    return -(-param.numel() // n_shards) * _BYTES_PER_ELEMENT


# Entries of a state


def _is_offloaded(name: str, value: Any) -> bool:
    """Whether an entry of a state is one of Adam's tensors; step counts are on the host anyway."""
    return name in TENSOR_NAMES and isinstance(value, Tensor)


def _others(state: State) -> State:
    return {name: value for name, value in state.items() if not _is_offloaded(name, value)}


def _offloaded(states: dict[Tensor, State]) -> dict[Tensor, State]:
    return {
        param: {name: value for name, value in state.items() if _is_offloaded(name, value)}
        for param, state in states.items()
    }


def moved(param: Tensor, state: State, device: torch.device | str) -> State:
    """A state of ``param`` with its tensors on ``device``."""
    return {
        name: _moved(param, value, device) if _is_offloaded(name, value) else value
        for name, value in state.items()
    }


def _moved(param: Tensor, value: Tensor, device: torch.device | str) -> Tensor:
    own = local(value).to(device)
    return like(param, own) if is_dtensor(value) else own


class _BlockEntry(NamedTuple):
    """A tensor of a state in the block of its chunk."""

    param: Tensor
    name: str
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    is_sharded: bool

    def fits(self, value: Any) -> bool:
        """Whether a new value has the same layout."""
        own = local(value)
        return (own.dtype, own.shape, own.stride()) == (self.dtype, self.shape, self.stride)

    def wrap(self, value: Tensor) -> Tensor:
        """A local tensor in its place, as a DTensor if the state is one."""
        return like(self.param, value) if self.is_sharded else value

    @property
    def nbytes(self) -> int:
        """Its size in the block."""
        return self.shape.numel() * self.dtype.itemsize


class _StateBlock:
    """The place of a chunk's states on the host, and in the ring while they are stepped.

    Args:
        link: The link to the device.
        states: The states to be copied, by parameter.

    Attributes:
        link: The link to the device.
        nbytes: Size of the block.
        bytes: The block, uint8.
        host: The tensors on the host, by parameter and name.
        staged: The states whose tensors are views into the ring.
        span: The bytes of the ring that they take.
        ring_bytes: These bytes, uint8.
    """

    def __init__(self, link: "Link", states: dict[Tensor, State]) -> None:
        self._places: list[_BlockEntry] = []
        self.link, self.nbytes = link, 0
        values: list[Tensor] = []
        for param, state in states.items():
            for name, value in state.items():
                if _is_offloaded(name, value):
                    own = local(value)
                    own = own if is_dense(own) else own.contiguous()
                    values.append(own)
                    layout = own.dtype, own.shape, own.stride(), is_dtensor(value)
                    place = _BlockEntry(param, name, self.nbytes, *layout)
                    self._places.append(place)
                    self.nbytes += -(-place.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._block = _PinnedMemory(link, self.nbytes)
        self.bytes = self._block.tensor(0, self.nbytes, torch.uint8)
        # Each has a storage of its own, so that saving or copying one does not take the block.
        own = [self._block.tensor(p.offset, p.nbytes, p.dtype) for p in self._places]
        own = [t.as_strided(p.shape, p.stride) for t, p in zip(own, self._places, strict=True)]
        for tensor, value in zip(own, values, strict=True):
            tensor.copy_(value)
        self.host: dict[Tensor, State] = {param: {} for param in states}
        for place, tensor in zip(self._places, own, strict=True):
            self.host[place.param][place.name] = place.wrap(tensor)
        self._addresses = [tensor.data_ptr() for tensor in own]
        self._versions = self._read_versions()
        self.leave_ring()
        if not self.nbytes:  # nothing has to move
            self.staged, self._views = states, _offloaded(states)

    def holds(self, params: Iterable[Tensor], states: dict[Tensor, State]) -> bool:
        """Whether ``states`` has these tensors for the parameters, and no others."""
        for param in params:
            state, own = states.get(param), self.host.get(param)
            if state is None or own is None:
                if state is not own:
                    return False
                continue
            found = {name for name, value in state.items() if _is_offloaded(name, value)}
            if found != own.keys() or any(state[name] is not own[name] for name in own):
                return False
            if self.staged and self.staged[param].get("step") is not state.get("step"):
                return False
        return [local(value).data_ptr() for value in self._values()] == self._addresses

    def _values(self) -> Iterator[Tensor]:
        return (self.host[place.param][place.name] for place in self._places)

    def _read_versions(self) -> list[int]:
        values = [*self._values()]
        return [*map(version, values), *map(version, map(local, values))]

    def staged_in(self, ring: "_Ring", states: dict[Tensor, State]) -> dict[Tensor, State]:
        """The states as views into a ring; the same objects as at the last step if possible."""
        if self.nbytes and self._ring is not ring:
            self.leave_ring()
            self._ring, self.span = ring, ring.place(self.nbytes)
            # Two aliases with versions of their own: copies into the ring are no foreign writes,
            # and chunks that take turns in it do not count each other's.
            self.ring_bytes, alias = (ring.bytes.data[slice(*self.span)] for _ in range(2))
            self._views = {param: {} for param in self.host}
            for place in self._places:
                flat = alias[place.offset : place.offset + place.nbytes].view(place.dtype)
                view = place.wrap(flat.as_strided(place.shape, place.stride))
                self._views[place.param][place.name] = view
        if not self.staged:
            self.staged = {param: dict(views) for param, views in self._views.items()}
        for param, state in self.staged.items():
            state.update(_others(states[param]))
        return self.staged

    def unstage(self, states: dict[Tensor, State]) -> None:
        """Replace views into the ring by the tensors on the host, which the copies out write."""
        for param, views in self._views.items():
            for name, view in views.items():
                if states[param].get(name) is view:
                    states[param][name] = self.host[param][name]

    def pieces(self) -> list[tuple[tuple[int, int], Tensor, Tensor]]:
        """What is copied at a time: the span of the ring, the bytes on the host and in the ring."""
        starts = range(0, max(self.nbytes, 1), PIECE_BYTES)
        cuts = [slice(start, min(start + PIECE_BYTES, self.nbytes)) for start in starts]
        first = self.span[0]
        return [
            ((first + cut.start, first + cut.stop), self.bytes[cut], self.ring_bytes[cut])
            for cut in cuts
        ]

    def leave_ring(self) -> None:
        """Drop all views into the ring."""
        self._ring: _Ring | None = None
        self.span, self.ring_bytes = (0, 0), self.bytes[:0]
        self.staged: dict[Tensor, State] = {}
        self._views: dict[Tensor, State] = {}

    def pass_on_foreign_writes(self) -> None:
        """Count writes to the tensors on the host as writes to the views."""
        versions = self._read_versions()
        if versions != self._versions:
            self._versions = versions
            views = chain.from_iterable(state.values() for state in self._views.values())
            torch.autograd.graph.increment_version([*map(local, views)])

    def take_back(self, part: Engine) -> bool:
        """Take over the states that a step has left, in the ring if they have the same layout.

        Returns:
            False if they have not. Then nothing has changed.
        """
        new = part.states
        entries = _offloaded(new).items()
        found = {(param, name): state[name] for param, state in entries for name in state}
        places = {(place.param, place.name): place for place in self._places}
        if found.keys() != places.keys() or not all(
            p.fits(found[key]) for key, p in places.items()
        ):
            return False
        for (param, name), value in found.items():
            view = self._views[param][name]
            if value is not view:  # the master has restarted
                local(view).copy_(local(value))
                new[param][name] = view
        self.staged = dict(new)
        return True


class _PinnedMemory:
    """Pinned host memory; tensors in it outlive it, unpinned.

    Raises:
        MemoryError: If there is not as much.
    """

    def __init__(self, link: "Link", nbytes: int) -> None:
        try:
            # Pages of its own, of exactly this size; torch's pinned memory comes in powers of two.
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory = mmap.mmap(-1, max(nbytes, 1), flags=private)
        except OSError as error:
            raise no_memory(nbytes, link, str(error)) from error
        with contextlib.suppress(OSError):  # larger pages are pinned faster
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        if nbytes:
            memory = self.tensor(0, nbytes, torch.uint8)
            link.pin(memory)
            # The memory is an argument so that it lives until it has been unpinned.
            weakref.finalize(self, link.unpin, memory).atexit = False

    def tensor(self, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of some of the bytes, with a storage of its own."""
        if not nbytes:
            return torch.empty(0, dtype=dtype, device="cpu")
        count = nbytes // dtype.itemsize
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)


class _Ring:
    """GPU memory that chunks take turns in.

    Attributes:
        bytes: The memory, uint8.
        uses: The spans that are being copied out, each with the event after it.
    """

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory
        self.uses: list[tuple[tuple[int, int], Any]] = []
        self._next = 0

    def place(self, nbytes: int) -> tuple[int, int]:
        """The next span of ``nbytes``; after the last one begins the first."""
        start = self._next if self._next + nbytes <= len(self.bytes) else 0
        self._next = start + nbytes
        return start, start + nbytes

    def last_use(self, span: tuple[int, int]) -> int:
        """The place in ``uses`` of the last copy out of a span, -1 without any.

        Copies into a chunk come in this order. Otherwise a chunk that begins before the space that
        is free, as the first one after the end of the ring does, would wait for a whole round.
        """
        uses = [i for i, overlaps in enumerate(self._overlaps(span)) if overlaps]
        return uses[-1] if uses else -1

    def _overlaps(self, span: tuple[int, int]) -> list[bool]:
        start, stop = span
        return [start < other[1] and other[0] < stop for other, _ in self.uses]

    def users_of(self, span: tuple[int, int]) -> list[Any]:
        """The events that a copy into a span has to wait for. Later copies come after it."""
        overlaps = self._overlaps(span)
        events = [event for (_, event), here in zip(self.uses, overlaps, strict=True) if here]
        self.uses = [use for use, here in zip(self.uses, overlaps, strict=True) if not here]
        return events


def ring_bytes(sizes: Sequence[int]) -> int:
    """The size of a ring for chunks of these sizes.

    Two chunks fit in: one is stepped and goes out while the other one comes in. For that the chunk
    counts that half of all bytes are in chunks up to; a few larger ones may fill the ring alone.
    """
    total, half, usual = sum(sizes), 0, 0
    for usual in sorted(sizes):
        half += usual
        if 2 * half >= total:
            break
    return min(total, max([2 * usual, *sizes]))


class _DeviceLink:
    """The link to a device, and the ring there."""

    def __init__(self, link: "Link") -> None:
        self.link = link
        self.ring: _Ring | None = None
        # Since the size of the ring was chosen.
        self.has_new_blocks = False


class Link:
    """Copies between pinned memory and one GPU: one stream per direction, and one for steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in, self._out, self._steps = (torch.cuda.Stream(device) for _ in range(3))
        self._stepped = torch.cuda.Event()
        self.pinned_bytes = 0

    def pin(self, memory: Tensor) -> None:
        """Pin host memory.

        Raises:
            MemoryError: If the system refuses.
        """
        memory.zero_()  # so that all threads touch the pages, in place of one
        cudart = torch.cuda.cudart()
        portable = 1
        code = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, portable)
        if int(code):
            # The CUDA runtime would report this error once more, at the next launch.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self._device).add_(1)
            raise no_memory(memory.nbytes, self, cudart.cudaGetErrorString(code))
        self.pinned_bytes += memory.nbytes

    def unpin(self, memory: Tensor) -> None:
        """Undo :meth:`pin`, after all copies."""
        torch.cuda.synchronize(self._device)
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        self.pinned_bytes -= memory.nbytes

    def empty(self, nbytes: int) -> Tensor:
        """Memory on the GPU, uint8, that copies may write to right away."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # What had this memory before may still be in use there.
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        return memory

    def copy_in(self, host: Tensor, staged: Tensor, after: Iterable[Any]) -> Any:
        """Copy to the GPU after some events; returns the event after that."""
        for event in after:
            self._in.wait_event(event)
        with torch.cuda.stream(self._in):
            staged.copy_(host, non_blocking=True)
        return self._in.record_event()

    @contextlib.contextmanager
    def stepping(self, ready: Any, grads: Sequence[Tensor] | None) -> Iterator[None]:
        """Launch the steps of a ``with`` block after an event.

        Args:
            ready: The event.
            grads: If given, step on another stream, with these gradients of the current one.
        """
        self._stepped = ready  # what goes out has come in, even if nothing is launched
        stream = current = torch.cuda.current_stream(self._device)
        if grads is not None:
            stream = self._steps
            stream.wait_stream(current)
            for grad in grads:
                grad.record_stream(stream)
        stream.wait_event(ready)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            self._stepped = stream.record_event()

    def copy_out(self, staged: Tensor, host: Tensor) -> Any:
        """Copy to the host after the last step; returns the event after that."""
        self._out.wait_event(self._stepped)
        with torch.cuda.stream(self._out):
            host.copy_(staged, non_blocking=True)
        return self._out.record_event()

    def join(self) -> None:
        """Let the current stream wait for the steps on the other stream."""
        torch.cuda.current_stream(self._device).wait_stream(self._steps)

    def wait(self) -> None:
        """Let the host wait for all copies."""
        self._out.synchronize()


def no_memory(nbytes: int, link: Link, reason: str) -> MemoryError:
    """The error if states do not fit into pinned memory."""
    return MemoryError(
        f"offloaded states must fit into pinned host memory, got none for {nbytes:,} bytes beyond "
        f"the {link.pinned_bytes:,} that are pinned ({reason}); use narrower states, such as "
        "exp_avg_dtype=torch.bfloat16, or more ranks, or raise the limits (ulimit -l, the memory "
        "of the container)"
    )
