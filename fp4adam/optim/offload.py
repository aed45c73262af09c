"""States in pinned host memory, which stream through the GPU while a step runs.

Parameters are stepped in chunks, each by an :class:`Engine`. The states of a chunk lie together in
pinned memory and move in one copy, into one of two buffers on the GPU, and back. Each direction has
a stream of its own, so one chunk comes in while the one before is stepped or goes out.

``optimizer.state`` holds the tensors on the host. Whatever else is found there, because it is new,
loaded or exchanged, is copied once without overlap, and gets pinned memory after the step.
"""

import contextlib
import math
import mmap
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import is_dtensor, like, local, sharded_dims
from fp4adam.distributed.shards import settle_written, sharded_weights
from fp4adam.optim.engine import Engine, Signals
from fp4adam.optim.state_dict import TENSOR_NAMES
from fp4adam.optim.state_tensor import is_dense
from fp4adam.optim.target import State, Targets

CHUNK_BYTES = 2**28  # of FP32 states that a chunk is filled up to
LARGE_BYTES = 2**30  # beyond this, memory for two chunks at once is dearer than the wait for one
_ALIGNMENT = 256  # of every state within its chunk; more than any kernel needs


class OffloadedEngine(Engine):
    """Steps the parameters of an optimizer with states that stay on the host."""

    on_host = True

    def __init__(self, targets: Targets, *groups_and_states: Any) -> None:
        super().__init__(targets, *groups_and_states)
        self._chunks: weakref.WeakKeyDictionary[Engine, _Chunk] = weakref.WeakKeyDictionary()
        self._links: dict[torch.device, Link] = {}

    def settle(self) -> None:
        for part, chunk in self._chunks.items():
            chunk.link.wait()
            part.settle()

    def placed(self, param: Tensor, state: State) -> State:
        return _moved(param, state, "cpu")

    def step(self, signals: Signals, captures: bool = False) -> None:
        """Step the chunks that have gradients; what cannot be stepped is refused before that."""
        self.check_call()
        self.divide(chunks)
        settle_written(sharded_weights(self.params))
        parts = dict.fromkeys(self.parts.values())
        active = [part for part in parts if any(g is not None for g in part.all_grads())]
        self.check()
        self.check_clip()
        for part in active:
            self._link(part)
        for part in active:
            part.clipping = self.clipping
            self.step_part(part, signals)
        self.clipping = None

    def step_part(self, part: Engine, signals: Signals) -> None:
        link, chunk = self._link(part), self._chunks.get(part)
        own = {param: self.states[param] for param in part.params if param in self.states}
        is_kept = chunk is not None and chunk.holds(own)
        if is_kept:
            self._make_room(chunk)
            part.states = chunk.staged(own)
            link.to_gpu(chunk)
        else:
            part.states = {p: _moved(p, state, local(p).device) for p, state in own.items()}
        try:
            part.step(signals)
        finally:
            if is_kept and chunk.is_staged(part.states):
                link.to_host(chunk)
                for param, state in part.states.items():
                    self.states[param].update(_others(state))
            else:  # states are new, or those of others, or a master has restarted
                self._keep(part, link)

    def _keep(self, part: Engine, link: "Link") -> None:
        new, part.states = part.states, {}
        part.drop_plan()
        self._chunks.pop(part, None)
        link.wait()
        try:
            self._chunks[part] = chunk = _Chunk(link, new)
        except BaseException:
            self.states |= {param: self.placed(param, state) for param, state in new.items()}
            raise
        self.states |= {param: {**state, **chunk.host[param]} for param, state in new.items()}

    def _make_room(self, chunk: "_Chunk") -> None:
        link = chunk.link
        if chunk.nbytes <= len(link.buffers[chunk.number]):
            return
        link.wait()
        alike = {part: each for part, each in self._chunks.items() if each.link is link}
        for part, each in alike.items():  # which keep the old buffers alive
            each.leave_buffer()
            part.drop_plan()
            part.states = {}
        link.buffers = [torch.empty(0, device="cpu")] * 2
        for number in range(2):
            sizes = [each.nbytes for each in alike.values() if each.number == number]
            link.buffers[number] = link.empty(max(sizes, default=0))

    def _link(self, part: Engine) -> "Link":
        device = local(part.params[0]).device
        if device not in self._links:
            self._links[device] = Link(device)
        return self._links[device]


def chunks(units: Iterable[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Divide parameters into chunks of at most ``CHUNK_BYTES`` of FP32 states, or one unit.

    Each is on one device. All ranks get the same chunks of sharded parameters.
    """
    found: list[list[Tensor]] = []
    last: dict[torch.device, tuple[list[Tensor], float]] = {}
    for unit in units:
        device, size = local(unit[0]).device, sum(map(_state_bytes, unit))
        chunk, filling = last.get(device, ([], math.inf))
        if filling + size > CHUNK_BYTES:
            chunk, filling = [], 0
            found.append(chunk)
        chunk += unit
        last[device] = chunk, filling + size
    return found


def _state_bytes(param: Tensor) -> int:
    n_shards = math.prod(param.device_mesh.size(dim) for dim in sharded_dims(param))
    return -(-param.numel() // n_shards) * 12


def _is_offloaded(name: str, value: Any) -> bool:
    # Step counts are on the host anyway.
    return name in TENSOR_NAMES and isinstance(value, Tensor)


def _others(state: State) -> State:
    return {name: value for name, value in state.items() if not _is_offloaded(name, value)}


def _moved(param: Tensor, state: State, device: torch.device | str) -> State:
    copies = {
        name: _like(param, value, local(value).to(device, copy=True))
        for name, value in state.items()
        if _is_offloaded(name, value)
    }
    return {**state, **copies}


def _like(param: Tensor, value: Tensor, own: Tensor) -> Tensor:
    return like(param, own) if is_dtensor(value) else own  # scales are none


def _entries(states: dict[Tensor, State]) -> dict[tuple[Tensor, str], Tensor]:
    return {
        (param, name): value
        for param, state in states.items()
        for name, value in state.items()
        if _is_offloaded(name, value)
    }


def _marks(states: dict[Tensor, State]) -> dict[tuple[Tensor, str], tuple]:
    return {
        key: (id(value), local(value).data_ptr(), value._version, local(value)._version)
        for key, value in _entries(states).items()
    }


class _Chunk:
    """The states of some parameters in one block of pinned memory.

    ``host``: The states there, by parameter. ``number``: The buffer of the link that it
    moves to. ``staged_block``: Its bytes in the buffer, uint8.
    """

    def __init__(self, link: "Link", states: dict[Tensor, State]) -> None:
        self.link, self.nbytes, self._starts = link, 0, []
        values = _entries(states)
        for value in values.values():
            self._starts.append(self.nbytes)
            self.nbytes += -(-local(value).nbytes // _ALIGNMENT) * _ALIGNMENT
        self.number = link.next_number(self.nbytes)
        memory = _pinned(link, self.nbytes, self)
        self.block = _tensor(memory, 0, self.nbytes, torch.uint8)
        self.host: dict[Tensor, State] = {param: {} for param in states}
        for start, ((param, name), value) in zip(self._starts, values.items(), strict=True):
            own = local(value)
            own = own if is_dense(own) else own.contiguous()
            # A storage of its own, so that saving or copying it does not take the block.
            host = _tensor(memory, start, own.nbytes, own.dtype)
            host = host.as_strided(own.shape, own.stride()).copy_(own)
            self.host[param][name] = _like(param, value, host)
        self._known = _marks(self.host)
        self.leave_buffer()

    def holds(self, states: dict[Tensor, State]) -> bool:
        """True if states have the tensors on the host, unwritten by others, and no others."""
        return _marks(states) == self._known

    def staged(self, states: dict[Tensor, State]) -> dict[Tensor, State]:
        """The states as views of the buffer; the same objects as at the last step."""
        if not self._staged:
            # Two aliases with versions of their own: copies are no foreign writes, and chunks that
            # take turns do not count each other's.
            buffer = self.link.buffers[self.number]
            self.staged_block, alias = (buffer.data[: self.nbytes] for _ in range(2))
            staged: dict[Tensor, State] = {param: {} for param in states}
            entries = _entries(self.host).items()
            for start, ((param, name), value) in zip(self._starts, entries, strict=True):
                own = local(value)
                view = alias[start:].view(own.dtype)
                view = view.as_strided(own.shape, own.stride())
                staged[param][name] = _like(param, value, view)
            self._views, self._staged = _entries(staged), staged
        for param, state in self._staged.items():
            state.update(_others(states[param]))
        return self._staged

    def is_staged(self, states: dict[Tensor, State]) -> bool:
        """True if these are the states of :meth:`staged`, stepped in place."""
        found, views = _entries(states), self._views
        return found.keys() == views.keys() and all(found[key] is views[key] for key in views)

    def leave_buffer(self) -> None:
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
    """Two buffers on one GPU, and the streams that copy between them and pinned memory."""

    pinned_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self.buffers = [torch.empty(0, device="cpu")] * 2
        self._last = 0
        self._free: list[Any] = [None, None]  # the events after which buffers may be written
        self._open(device)

    def _open(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise RuntimeError(
                f"parameters must be on a GPU with offload_states, got one on {device}, where its "
                "states are on the host already; move the model, or leave offload_states False"
            )
        self._device = device
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def next_number(self, nbytes: int) -> int:
        """The buffer of a new chunk: they take turns, but large ones share the first."""
        self._last = 0 if nbytes > LARGE_BYTES else 1 - self._last
        return self._last

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

    def to_gpu(self, chunk: _Chunk) -> None:
        """Copy a chunk to its buffer, and make the current stream wait for it."""
        if self._free[chunk.number] is not None:
            self._in.wait_event(self._free[chunk.number])
        with torch.cuda.stream(self._in):
            chunk.staged_block.copy_(chunk.block, non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._in)

    def to_host(self, chunk: _Chunk) -> None:
        """Copy a chunk to the host, after what the current stream has been given."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            chunk.block.copy_(chunk.staged_block, non_blocking=True)
        self._free[chunk.number] = self._out.record_event()

    def wait(self) -> None:
        """Make the host wait for all copies to it."""
        self._out.synchronize()


def no_memory(nbytes: int, link: Link, reason: str) -> MemoryError:
    return MemoryError(
        f"offloaded states must fit into pinned host memory, got none for {nbytes:,} bytes beyond "
        f"the {link.pinned_bytes:,} that are pinned ({reason}); use narrower states, such as "
        "exp_avg_dtype=torch.bfloat16, or more ranks, or raise the limits (ulimit -l, the memory "
        "of the container)"
    )
