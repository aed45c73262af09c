"""States in pinned host memory, which stream through the GPU while a step runs.

Parameters are stepped in chunks, each by an :class:`Engine`. The states of a chunk lie together in
pinned memory and move in one copy, into one of two buffers on the GPU, and back. Each direction has
a stream of its own, so one chunk comes in while the one before is stepped or goes out.

``optimizer.state`` holds the tensors on the host. Whatever else is found there, because it is new,
loaded or exchanged, is copied once without overlap, and gets pinned memory after the step.
"""

import contextlib
import mmap
import weakref
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import is_dtensor, like, local, sharded_dims
from fp4adam.distributed.shards import settle_written, sharded_weights
from fp4adam.optim.engine import Engine, Group, Signals
from fp4adam.optim.memory_layout import is_dense
from fp4adam.optim.state_dict import TENSOR_NAMES
from fp4adam.optim.target import State, Targets
from fp4adam.tensors.fingerprint import version

CHUNK_BYTES = 2**28  # of FP32 states that a chunk is filled up to
_BYTES_PER_ELEMENT = 12
_ALIGNMENT = 256  # of every state within its chunk; more than any kernel needs


class OffloadedEngine(Engine):
    """Steps the parameters of an optimizer with states that stay on the host."""

    on_host = True

    def __init__(
        self, targets: Targets, groups: Sequence[Group], states: dict[Tensor, State]
    ) -> None:
        super().__init__(targets, groups, states)
        self._parts: list[Engine] = []
        self._known: list = []
        self._sharded: list[Tensor] = []
        self._chunks: weakref.WeakKeyDictionary[Engine, _Chunk] = weakref.WeakKeyDictionary()
        self._links: dict[torch.device, Link] = {}

    def forget(self) -> None:
        super().forget()
        self._wait()
        self._parts, self._known, self._sharded = [], [], []
        self._chunks.clear()

    def drop_plan(self) -> None:
        for part in self._parts:
            part.drop_plan()

    def settle(self) -> None:
        self._wait()
        for part in self._chunks:
            part.settle()

    def _wait(self) -> None:
        """Wait until the host has the states of the last step."""
        for link in self._links.values():
            link.wait()

    def placed(self, param: Tensor, state: State) -> State:
        return _moved(param, state, "cpu")

    def step(self, signals: Signals, captures: bool = False) -> None:
        """Step the chunks that have gradients; what cannot be stepped is refused before that."""
        self.check_call()
        known = self.membership()
        if known != self._known:
            self.targets.keep_only(self.params)
            self._parts = self.parts(chunks(self.together()))
            self._known, self._sharded = known, sharded_weights(self.params)
        settle_written(self._sharded)
        active = [part for part in self._parts if part.grads()]
        self.check()
        self.check_clip()
        for part in active:
            self._link(part.device)
        clipping = self.clipping
        try:
            for part in active:
                part.clipping = clipping
                self.step_part(part, signals)
        except BaseException:
            self.targets.forget_marks()
            self.forget()
            self.clipping = clipping
            raise
        self.clipping = None

    def step_part(self, part: Engine, signals: Signals) -> None:
        link, chunk = self._link(part.device), self._chunks.get(part)
        if chunk is None or not chunk.holds(part.params, self.states):
            link.wait()
            part.drop_plan()
            found = [param for param in part.params if param in self.states]
            part.states = {p: _moved(p, self.states[p], local(p).device) for p in found}
            try:
                part.step(signals)
            finally:
                self._keep(part, link)
            return
        self._take_buffer(chunk, link)
        part.states = chunk.staged(link.buffers[chunk.number], self.states)
        if chunk.was_written():
            part.drop_plan()
        link.copy_in(chunk)
        try:
            part.step(signals)
        finally:
            if chunk.is_staged(part.states):
                link.copy_out(chunk)
                for param, state in part.states.items():
                    self.states[param].update(_others(state))
            else:  # a master has restarted, for one
                self._keep(part, link)

    def _keep(self, part: Engine, link: "Link") -> None:
        """Give the states that a part has on the GPU new pinned memory, and let go of them."""
        new = part.states
        self._chunks.pop(part, None)
        link.wait()
        try:
            chunk = _Chunk(link, new)
        except BaseException:
            # Not in a buffer, until the next step tries again.
            for param, state in new.items():
                copies = {n: v.clone() for n, v in state.items() if _is_offloaded(n, v)}
                self.states[param] = {**state, **copies}
            raise
        self.states |= chunk.on_host(new)
        self._chunks[part] = chunk
        self._let_go(part)

    def _let_go(self, part: Engine) -> None:
        part.drop_plan()
        self.targets.unbind(part.states)
        part.states = {}

    def _take_buffer(self, chunk: "_Chunk", link: "Link") -> None:
        """Give a chunk without a buffer one, and all chunks new ones if it fits into neither."""
        if chunk.number is None and not link.has_space(chunk):
            link.wait()
            alike = {part: each for part, each in self._chunks.items() if each.link is link}
            for part, each in alike.items():  # which keep the old buffers alive
                each.leave_buffer()
                self._let_go(part)
            link.make_buffers([*alike.values()])

    def _link(self, device: torch.device) -> "Link":
        if device not in self._links:
            self._links[device] = Link(device)
        return self._links[device]


def chunks(units: Iterable[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Divide parameters into chunks of at most ``CHUNK_BYTES`` of FP32 states.

    A larger parameter is a chunk of its own. Those of a unit stay together, and those of different
    devices apart. All ranks get the same chunks of sharded parameters.
    """
    found: list[list[Tensor]] = []
    last: dict[torch.device, tuple[list[Tensor], int]] = {}
    for unit in units:
        device, size = local(unit[0]).device, sum(map(_state_bytes, unit))
        chunk, filling = last.get(device, (None, 0))
        if chunk is None or filling + size > CHUNK_BYTES:
            chunk, filling = [], 0
            found.append(chunk)
        chunk += unit
        last[device] = chunk, filling + size
    return found


def _state_bytes(param: Tensor) -> int:
    n_shards = 1
    for dim in sharded_dims(param):
        n_shards *= param.device_mesh.size(dim)
    return -(-param.numel() // n_shards) * _BYTES_PER_ELEMENT


def _is_offloaded(name: str, value: Any) -> bool:
    # Step counts are on the host anyway.
    return name in TENSOR_NAMES and isinstance(value, Tensor)


def _others(state: State) -> State:
    return {name: value for name, value in state.items() if not _is_offloaded(name, value)}


def _moved(param: Tensor, state: State, device: torch.device | str) -> State:
    def move(value: Tensor) -> Tensor:
        own = local(value).to(device)
        return like(param, own) if is_dtensor(value) else own

    return {n: move(value) if _is_offloaded(n, value) else value for n, value in state.items()}


def _entries(states: dict[Tensor, State]) -> dict[tuple[Tensor, str], Tensor]:
    """Adam's tensors by parameter and name."""
    return {
        (param, name): value
        for param, state in states.items()
        for name, value in state.items()
        if _is_offloaded(name, value)
    }


def _are_same(found: dict, expected: dict) -> bool:
    """True if both have the same objects under the same keys."""
    return found.keys() == expected.keys() and all(found[k] is v for k, v in expected.items())


class _Chunk:
    """Copies of the states of some parameters in one block of pinned memory.

    Attributes:
        link: The link to the GPU.
        nbytes: Size of the block.
        block: The block, uint8.
        number: The buffer of the link that it moves to, or None.
        staged_block: Its bytes in the buffer, uint8.

    Raises:
        MemoryError: If there is not as much memory that can be pinned.
    """

    def __init__(self, link: "Link", states: dict[Tensor, State]) -> None:
        self.link, self.nbytes = link, 0
        self._params, self._starts = [*states], []
        values = _entries(states)
        for value in values.values():
            self._starts.append(self.nbytes)
            self.nbytes += -(-local(value).nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = _pinned(link, self.nbytes, self)
        self.block = _tensor(memory, 0, self.nbytes, torch.uint8)
        self._host: dict[tuple[Tensor, str], Tensor] = {}
        for start, (key, value) in zip(self._starts, values.items(), strict=True):
            own = local(value)
            own = own if is_dense(own) else own.contiguous()
            # A storage of its own, so that saving or copying it does not take the block.
            host = _tensor(memory, start, own.nbytes, own.dtype)
            host = host.as_strided(own.shape, own.stride()).copy_(own)
            self._host[key] = like(key[0], host) if is_dtensor(value) else host
        self._addresses = self._read_addresses()
        self._versions = self._read_versions()
        self.number: int | None = None
        self.leave_buffer()

    def _read_addresses(self) -> list[int]:
        return [local(value).data_ptr() for value in self._host.values()]

    def _read_versions(self) -> list[int]:
        values = self._host.values()
        return [*map(version, values), *map(version, map(local, values))]

    def was_written(self) -> bool:
        """True if other code has written to the tensors on the host since the last call."""
        before, self._versions = self._versions, self._read_versions()
        return before != self._versions

    def on_host(self, states: dict[Tensor, State]) -> dict[Tensor, State]:
        """``states`` with the tensors on the host."""
        found = {param: _others(state) for param, state in states.items()}
        for (param, name), value in self._host.items():
            found[param][name] = value
        return found

    def holds(self, params: Iterable[Tensor], states: dict[Tensor, State]) -> bool:
        """True if ``states`` has the tensors on the host for the parameters, and no others."""
        found = {param: states[param] for param in params if param in states}
        is_same = found.keys() == {*self._params} and _are_same(_entries(found), self._host)
        return is_same and self._read_addresses() == self._addresses

    def staged(self, buffer: Tensor, states: dict[Tensor, State]) -> dict[Tensor, State]:
        """The states as views of a buffer; the same objects as at the last step."""
        if not self._staged:
            # Two aliases with versions of their own: copies are no foreign writes, and chunks that
            # take turns do not count each other's.
            self.staged_block, alias = (buffer.data[: self.nbytes] for _ in range(2))
            self._staged = {param: {} for param in self._params}
            for start, ((param, name), value) in zip(self._starts, self._host.items(), strict=True):
                own = local(value)
                view = alias[start : start + own.nbytes].view(own.dtype)
                view = view.as_strided(own.shape, own.stride())
                self._staged[param][name] = like(param, view) if is_dtensor(value) else view
            self._views = _entries(self._staged)
        for param, state in self._staged.items():
            state.update(_others(states[param]))
        return self._staged

    def is_staged(self, states: dict[Tensor, State]) -> bool:
        """True if these are the states of :meth:`staged`, stepped in place."""
        return _are_same(_entries(states), self._views)

    def leave_buffer(self) -> None:
        """Drop all views of the buffer."""
        self.staged_block = self.block[:0]
        self._views: dict[tuple[Tensor, str], Tensor] = {}
        self._staged: dict[Tensor, State] = {}


def _pinned(link: "Link", nbytes: int, owner: object) -> mmap.mmap:
    """Host memory that is pinned while ``owner`` lives; tensors in it outlive that."""
    try:
        # Of exactly this size; torch's pinned memory comes in powers of two.
        memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise no_memory(nbytes, link, str(error)) from error
    with contextlib.suppress(OSError):  # larger pages are pinned faster
        memory.madvise(mmap.MADV_HUGEPAGE)
    if nbytes:
        whole = _tensor(memory, 0, nbytes, torch.uint8)
        link.pin(whole)
        # The memory is an argument so that it lives until it has been unpinned.
        weakref.finalize(owner, link.unpin, whole).atexit = False
    return memory


def _tensor(memory: mmap.mmap, start: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    if not nbytes:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=start)


class Link:
    """Two buffers on one GPU, and the streams that copy between them and pinned memory.

    Attributes:
        buffers: The buffers, uint8.

    Raises:
        RuntimeError: If the device is the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.buffers: list[Tensor] = []
        self._last = 0
        self._free: list[Any] = [None, None]  # the events after which buffers may be written
        self.pinned_bytes = 0
        self._open(device)

    def _open(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise RuntimeError(
                f"parameters must be on a GPU with offload_states, got one on {device}, where its "
                "states are on the host already; move the model, or leave offload_states False"
            )
        self._device = device
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def has_space(self, chunk: _Chunk) -> bool:
        """Give a chunk one of the buffers, if it fits."""
        for number in (1 - self._last, self._last) if self.buffers else ():
            if chunk.nbytes <= len(self.buffers[number]):
                chunk.number = self._last = number
                return True
        return False

    def make_buffers(self, chunks: list[_Chunk]) -> None:
        """Make new buffers for chunks, which take turns; few that are large share the first."""
        sizes = sorted(chunk.nbytes for chunk in chunks)
        usual = sizes[sum(2 * seen < sum(sizes) for seen in accumulate(sizes))]
        self.buffers = []  # frees the old ones first
        for chunk in chunks:
            chunk.number = self._last = 0 if chunk.nbytes > usual else 1 - self._last
        for number in range(2):
            own = [chunk.nbytes for chunk in chunks if chunk.number == number]
            self.buffers.append(self.empty(max(own, default=0)))

    def copy_in(self, chunk: _Chunk) -> None:
        """Copy a chunk to its buffer, and make the current stream wait for it."""
        self.to_gpu(chunk.block, chunk.staged_block, self._free[chunk.number])

    def copy_out(self, chunk: _Chunk) -> None:
        """Copy a chunk to the host, after what the current stream has been given."""
        self._free[chunk.number] = self.to_host(chunk.staged_block, chunk.block)

    # What stand-ins for a GPU do in another way

    def pin(self, memory: Tensor) -> None:
        memory.zero_()  # so that all threads touch the pages, in place of one
        cudart, portable = torch.cuda.cudart(), 1
        code = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, portable)
        if int(code):
            # The CUDA runtime would report this error once more, at the next launch.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self._device).add_(1)
            raise no_memory(memory.nbytes, self, cudart.cudaGetErrorString(code))
        self.pinned_bytes += memory.nbytes

    def unpin(self, memory: Tensor) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        self.pinned_bytes -= memory.nbytes

    def empty(self, nbytes: int) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # What had this memory before may still be in use there.
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        return memory

    def to_gpu(self, host: Tensor, staged: Tensor, after: Any) -> None:
        if after is not None:
            self._in.wait_event(after)
        with torch.cuda.stream(self._in):
            staged.copy_(host, non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._in)

    def to_host(self, staged: Tensor, host: Tensor) -> Any:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host.copy_(staged, non_blocking=True)
        return self._out.record_event()

    def wait(self) -> None:
        """Make the host wait for all copies to it."""
        self._out.synchronize()


def no_memory(nbytes: int, link: Link, reason: str) -> MemoryError:
    """The error if states do not fit into pinned memory."""
    return MemoryError(
        f"offloaded states must fit into pinned host memory, got none for {nbytes:,} bytes beyond "
        f"the {link.pinned_bytes:,} that are pinned ({reason}); use narrower states, such as "
        "exp_avg_dtype=torch.bfloat16, or more ranks, or raise the limits (ulimit -l, the memory "
        "of the container)"
    )
