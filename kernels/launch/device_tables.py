"""The tables that the kernels read; each step uploads only what has changed."""

from array import array
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fp4adam.kernels.launch.schema import HYPER_COLUMNS, SCALARS_WIDTH, STEP, TABLE_WIDTH

# Up to this size the driver stages a copy of pageable memory itself, in a third of the time that
# pinned memory takes. For larger copies it would wait for the device.
_STAGED_BYTES = 64 * 1024

GRAD, SCALARS = STEP.index("grad"), STEP.index("scalars")


class DeviceTables:
    """The tensor table and the scalars of one device.

    Args:
        device: The device that the kernels run on.
        rows: One row per tensor, with the columns of ``schema``. The columns for gradient and
            scalars are filled in by :meth:`upload`.
        n_scalars: The maximum number of rows of scalars in a step.
        n_hyper: The number of rows of hyper-parameters, if a kernel computes the scalars from them;
            0 if the host uploads scalars.

    Attributes:
        table: int64 [n_tensors, 20] on the device.
        scalars: float32 on the device, rows of 12.
        hyper: float64 [n_hyper, 8] on the device.
    """

    def __init__(
        self, device: torch.device, rows: list[list[int]], n_scalars: int, n_hyper: int = 0
    ) -> None:
        self.device = device
        self._table_words = len(rows) * TABLE_WIDTH
        # Behind the table, so that one copy takes both: an int64 word holds two scalars, or one
        # hyper-parameter.
        n_numbers = n_hyper * len(HYPER_COLUMNS) if n_hyper else n_scalars * SCALARS_WIDTH // 2
        n_words = self._table_words + n_numbers
        self._typecode, self._dtype = ("d", torch.float64) if n_hyper else ("f", torch.float32)
        words = array("q", chain(chain.from_iterable(rows), bytes(n_numbers)))
        self._host_words = torch.frombuffer(words, dtype=torch.int64)
        # Views of the same memory: assigning to them takes less time than operators on a tensor.
        view = memoryview(words)
        self._host_table, numbers = view[: self._table_words], view[self._table_words :]
        self._host_numbers = numbers.cast("B").cast(self._typecode)
        self._device_words = torch.zeros(n_words, dtype=torch.int64, device=device)
        self.table = self._device_words[: self._table_words].view(-1, TABLE_WIDTH)
        on_device = self._device_words[self._table_words :].view(self._dtype)
        self.scalars = on_device
        if n_hyper:
            self.scalars = on_device.new_zeros(n_scalars * SCALARS_WIDTH, dtype=torch.float32)
            self.hyper = on_device.view(n_hyper, len(HYPER_COLUMNS))
        self._uploaded: tuple[Any, ...] = (None, None, None)
        # Views of the words that steps upload, on the host and on the device.
        self._spans: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        # What captured copies read at every replay, and memory for the next one.
        self._captured: list[Tensor] = []
        self._next_capture = self._page_locked() if n_hyper else None
        self._one = torch.ones(1, dtype=torch.float32, device=device)
        self._zero = torch.zeros(1, dtype=torch.float32, device=device)

    def _page_locked(self) -> Tensor:
        return torch.empty_like(self._host_words, pin_memory=self.device.type == "cuda")

    def upload(
        self,
        grads: list[int],
        scalars_rows: list[int],
        numbers: list[float],
        captures: bool = False,
    ) -> None:
        """Update the device in at most one copy: of nothing, the numbers, or everything.

        Args:
            grads: Address of each tensor's gradient; 0 for a tensor that takes no part.
            scalars_rows: Index of each tensor's row of scalars. Pass a new list object if it has
                changed.
            numbers: The rows of scalars, or those of hyper-parameters, concatenated.
            captures: Whether a CUDA graph records the copy, of everything then. Replays copy the
                same again.
        """
        old_grads, old_rows, old_numbers = self._uploaded
        takes_table = captures or scalars_rows is not old_rows or grads != old_grads
        if takes_table:
            self._host_table[GRAD::TABLE_WIDTH] = array("q", grads)
            self._host_table[SCALARS::TABLE_WIDTH] = array("q", scalars_rows)
        if takes_table or numbers != old_numbers:
            self._host_numbers[: len(numbers)] = array(self._typecode, numbers)
            if captures:
                self._capture_copy()
            else:
                first = 0 if takes_table else self._table_words
                end = self._table_words + len(numbers) * self._dtype.itemsize // 8
                if (first, end) not in self._spans:
                    spans = self._host_words[first:end], self._device_words[first:end]
                    self._spans[first, end] = spans
                upload(*self._spans[first, end])
        if not self._captured:
            self._uploaded = grads, scalars_rows, numbers
        elif not captures and self._next_capture is None:
            self._next_capture = self._page_locked()

    def _capture_copy(self) -> None:
        """Copy everything from memory that nothing else writes to."""
        words = self._page_locked() if self._next_capture is None else self._next_capture
        self._device_words.copy_(words.copy_(self._host_words), non_blocking=True)
        self._captured.append(words)
        self._next_capture = None
        # From now on a replay may have written to the device between any two steps.
        self._uploaded = (None, None, None)

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
