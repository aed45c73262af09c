"""A link that copies as late as it may, for tests of offloaded states without a GPU.

Copies to the host happen when somebody waits for them. Memory that is read too early, or written
while it is still to be copied, gives other bits than resident states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

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


class LateLink(offload.Link):
    """A link for parameters on a CPU.

    Attributes:
        moved: Bytes copied to the device, and to the host.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__(torch.device("cpu"))
        self.moved = [0, 0]
        self._limit = limit
        self._out = Lane()

    def _open(self, device: torch.device) -> None:
        pass

    def pin(self, memory: Tensor) -> None:
        if self.pinned_bytes + memory.nbytes > self._limit:
            raise offload.no_memory(memory.nbytes, self, "there is a limit")
        self.pinned_bytes += memory.nbytes

    def unpin(self, memory: Tensor) -> None:
        self.pinned_bytes -= memory.nbytes

    def empty(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 0xA5, dtype=torch.uint8, device="cpu")

    def to_gpu(self, chunk: offload._Chunk) -> None:
        if self._free[chunk.number] is not None:
            self._free[chunk.number]()
        self.moved[0] += chunk.nbytes
        chunk.staged_block.copy_(chunk.block)

    def to_host(self, chunk: offload._Chunk) -> None:
        self.moved[1] += chunk.nbytes
        staged, host = chunk.staged_block, chunk.block
        self._free[chunk.number] = self._out.add(lambda: host.copy_(staged))

    def wait(self) -> None:
        self._out.run()


def offload_to(link: LateLink, chunk_bytes: int) -> contextlib.ExitStack:
    """Until it is closed, use small chunks and, for parameters on the CPU, this link."""
    names = "Link", "CHUNK_BYTES", "LARGE_BYTES"
    before = {name: vars(offload)[name] for name in names}
    stack = contextlib.ExitStack()
    stack.callback(lambda: vars(offload).update(before))
    offload.CHUNK_BYTES = offload.LARGE_BYTES = chunk_bytes
    offload.Link = lambda device: link if device.type == "cpu" else before["Link"](device)
    return stack
