"""The tables that the kernels read; each step uploads only what has changed."""

from array import array
from typing import Any

import torch
from torch import Tensor

from fp4adam.kernels.launch.schema import COLUMNS, SCALARS_WIDTH, TABLE_WIDTH

# Up to this size the driver stages a copy of pageable memory itself, in a third of the time that
# pinned memory takes. For larger copies it would wait for the device.
_STAGED_BYTES = 64 * 1024

GRAD, SCALARS = COLUMNS.index("grad"), COLUMNS.index("scalars")


class DeviceTables:
    """The tensor table and the scalars of one device.

    Args:
        device: The device that the kernels run on.
        rows: One row per tensor, with the columns of ``schema``. The columns for gradient and
            scalars are filled in by :meth:`upload`.
        n_scalars: The maximum number of rows of scalars in a step.

    Attributes:
        table: int64 [n_tensors, 19] on the device.
        scalars: float32 on the device, rows of 12.
    """

    def __init__(self, device: torch.device, rows: list[list[int]], n_scalars: int) -> None:
        self.device = device
        self._table_words = len(rows) * TABLE_WIDTH
        # An int64 word holds two scalars.
        n_words = self._table_words + n_scalars * SCALARS_WIDTH // 2
        self._host_words = torch.zeros(n_words, dtype=torch.int64, device="cpu")
        self._host_table, self._host_scalars = self._split(self._host_words)
        self._host_table.copy_(torch.tensor(rows, dtype=torch.int64, device="cpu"))
        self._device_words = torch.zeros(n_words, dtype=torch.int64, device=device)
        self.table, self.scalars = self._split(self._device_words)
        self._uploaded: tuple[Any, ...] = (None, None, None)
        self._one = torch.ones(1, dtype=torch.float32, device=device)
        self._zero = torch.zeros(1, dtype=torch.float32, device=device)

    def _split(self, words: Tensor) -> tuple[Tensor, Tensor]:
        n = self._table_words
        return words[:n].view(-1, TABLE_WIDTH), words[n:].view(torch.float32)

    def upload(self, grads: list[int], scalars_rows: list[int], scalars: list[float]) -> None:
        """Update the device in at most one copy: of nothing, the scalars, or everything.

        Args:
            grads: Address of each tensor's gradient; 0 for a tensor that takes no part.
            scalars_rows: Index of each tensor's row of scalars. Pass a new list object if it has
                changed.
            scalars: The rows of scalars, concatenated.
        """
        old_grads, old_rows, old_scalars = self._uploaded
        if scalars_rows is not old_rows or grads != old_grads:
            self._host_table[:, GRAD] = _tensor("q", torch.int64, grads)
            self._host_table[:, SCALARS] = _tensor("q", torch.int64, scalars_rows)
            self._host_scalars[: len(scalars)] = _tensor("f", torch.float32, scalars)
            used = self._table_words + len(scalars) // 2
            upload(self._host_words[:used], self._device_words[:used])
        elif scalars != old_scalars:
            upload(_tensor("f", torch.float32, scalars), self.scalars[: len(scalars)])
        self._uploaded = grads, scalars_rows, scalars

    def signals(
        self, grad_scale: Tensor | None, clip: Tensor | None, found_inf: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The three arguments as float32 [1] on the device; None becomes the neutral value."""
        given = ((grad_scale, self._one), (clip, self._one), (found_inf, self._zero))
        return tuple(
            default if x is None else x.to(self.device, torch.float32, non_blocking=True)
            for x, default in given
        )


def upload(source: Tensor, target: Tensor) -> None:
    """Copy from the host to a device without waiting; ``source`` may be changed right away."""
    if target.is_cuda and source.nbytes > _STAGED_BYTES:
        # torch's allocator does not reuse pinned memory before the copy is done.
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)


def _tensor(typecode: str, dtype: torch.dtype, values: list) -> Tensor:
    # Several times faster than torch.tensor, which inspects every value.
    return torch.frombuffer(array(typecode, values), dtype=dtype)
