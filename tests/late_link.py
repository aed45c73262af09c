"""A link that copies as late as it may, for tests of offloaded states without a GPU.

Copies happen when somebody waits for them, in the order of their direction. Memory that is read too
early, or written while it is still to be copied, gives other bits than resident states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fp4adam.optim import offload


class Lane:
    """Copies in one direction that have not happened yet."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], object]] = []
        self._done = 0

    def add(self, copy: Callable[[], object]) -> Callable[[], None]:
        """Queue a copy; returns its event, which is called to wait for it."""
        self._waiting.append(copy)
        number = self._done + len(self._waiting)
        return lambda: self.run(number - self._done)

    def run(self, count: int | None = None) -> None:
        now = self._waiting[:count] if count is None or count > 0 else []
        self._waiting = self._waiting[len(now) :]
        self._done += len(now)
        for copy in now:
            copy()


class LateLink:
    """Stands in for ``offload.Link`` on a CPU.

    Attributes:
        moved: Bytes copied to the device, and to the host.
        rings: Sizes of all rings.
        beside: How many parts were stepped beside other work.
        joined: How often it was asked to join its steps.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        self.pinned_bytes = 0
        self.moved = [0, 0]
        self.rings: list[int] = []
        self.beside = self.joined = 0
        self._limit = limit
        self._in, self._out = Lane(), Lane()

    def pin(self, memory: Tensor) -> None:
        if self.pinned_bytes + memory.nbytes > self._limit:
            raise offload.no_memory(memory.nbytes, self, "there is a limit")
        self.pinned_bytes += memory.nbytes

    def unpin(self, memory: Tensor) -> None:
        self.pinned_bytes -= memory.nbytes

    def empty(self, nbytes: int) -> Tensor:
        self.rings.append(nbytes)
        return torch.full((nbytes,), 0xA5, dtype=torch.uint8, device="cpu")

    def copy_in(self, host: Tensor, staged: Tensor, after: Iterable[Callable]) -> Callable:
        for event in after:
            event()
        self.moved[0] += host.nbytes
        return self._in.add(lambda: staged.copy_(host))

    @contextlib.contextmanager
    def stepping(self, ready: Callable, grads: Sequence[Tensor] | None) -> Iterator[None]:
        self.beside += grads is not None
        ready()
        yield

    def copy_out(self, staged: Tensor, host: Tensor) -> Callable:
        self.moved[1] += host.nbytes
        return self._out.add(lambda: host.copy_(staged))

    def join(self) -> None:
        self.joined += 1

    def wait(self) -> None:
        self._out.run()


def offload_to(
    link: LateLink, chunk_bytes: int, ring_bytes: Callable[[Sequence[int]], int] = max
) -> contextlib.ExitStack:
    """Until it is closed, use small chunks and, for parameters on the CPU, this link.

    By default the ring has space for one chunk, so that each has to wait for the one before.
    """
    names = ("link_of", "CHUNK_BYTES", "PIECE_BYTES", "ring_bytes")
    before = {name: vars(offload)[name] for name in names}
    stack = contextlib.ExitStack()
    stack.callback(lambda: vars(offload).update(before))
    offload.CHUNK_BYTES, offload.ring_bytes = chunk_bytes, ring_bytes
    offload.PIECE_BYTES = max(chunk_bytes // 3, 1)
    offload.link_of = lambda device: link if device.type == "cpu" else before["link_of"](device)
    return stack
