"""What a kernel for one matrix needs of its inner tensors and their ``Layout``."""

from typing import Any

from torch import Tensor


def inputs(stored: Any, layout: Any) -> tuple[Tensor, Tensor | None, bool]:
    """The codes to decode, their scales, and whether they are those of the transposed matrix."""
    usage = "columnwise" if stored.rowwise_data is None else "rowwise"
    name = "block_scale_inv" if layout.is_square else f"{usage}_scale_inv"
    transposed = getattr(layout, usage).codes.transposed
    return getattr(stored, f"{usage}_data"), getattr(stored, name), transposed


def outputs(out: Any, layout: Any) -> tuple[Tensor | None, ...]:
    """Rowwise codes and scales, then columnwise ones; the scales of square blocks are rowwise."""
    scales = out.block_scale_inv if layout.is_square else out.rowwise_scale_inv
    return out.rowwise_data, scales, out.columnwise_data, out.columnwise_scale_inv
