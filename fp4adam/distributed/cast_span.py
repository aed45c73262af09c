"""Spans of the weights that a cast writes, and the memory for their codes and scales."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from fp4adam.tensors.blocks import Span
from fp4adam.tensors.encoding import Target, grid_shape
from fp4adam.tensors.layout import Layout
from fp4adam.tensors.quantized_tensor import QuantizedTensor

# Memory for codes outside of the weight: one direction, or (rowwise, columnwise).
Out = Tensor | tuple[Tensor | None, Tensor | None] | None


@dataclasses.dataclass
class CastSpan:
    """A span of the matrix of a weight, and its amaxes.

    Attributes:
        weight: The weight.
        span: The span.
        dtype: The dtype that values are rounded to first.
        amax: float32 [1], or None for formats that store none.
        grids: float32 block amaxes by direction, of formats whose blocks have scales.
        cut: For adaptive scales, 1 for rows of blocks that a boundary of spans cuts, else 0.
        choices: For adaptive scales, 1 for blocks whose amax maps to 4, else 0.
        magnitudes: By row of blocks, the magnitudes in those that are cut.
    """

    weight: QuantizedTensor
    span: Span
    dtype: torch.dtype
    amax: Tensor | None = None
    grids: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    cut: Tensor | None = None
    choices: Tensor | None = None
    magnitudes: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """The layout of the weight."""
        return self.weight.quantizer.layout

    @property
    def is_adaptive(self) -> bool:
        """Whether the scale of a block depends on all of its values."""
        return self.layout.scale_rule.adaptive is not None

    @property
    def row_numel(self) -> int:
        """Number of elements in a row of blocks."""
        return self.layout.block * self.span.shape[1]

    def grid_shape(self, usage: str) -> tuple[int, int]:
        """The number of block rows and block columns."""
        return grid_shape(self.layout.blocks[usage], self.span.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes that hold codes of the span, in one direction."""
        per_byte, (_, start, stop) = 8 // self.layout.code_bits, self.span
        return -(-stop // per_byte) - start // per_byte if stop > start else 0

    def targets(self, out: Out) -> dict[str, Target]:
        """By direction, the flat memory to write codes to, and the code byte that it starts at."""
        tensors, first_byte = self.weight._shared.tensors, self.span.start * self.layout.code_bits
        given = dict(zip(("rowwise", "columnwise"), as_pair(out), strict=True))
        return {
            usage: (getattr(tensors, f"{usage}_data").view(-1), 0)
            if given[usage] is None
            else (given[usage].view(-1), first_byte // 8)
            for usage in self.layout.blocks
        }

    def cut_rows(self) -> Iterator[tuple["CastSpan", Tensor]]:
        """The rows of blocks that boundaries cut, as spans of their own, with their magnitudes."""
        for row, magnitudes in self.magnitudes.items():
            span = self.span._replace(start=row * self.row_numel, stop=(row + 1) * self.row_numel)
            yield dataclasses.replace(self, span=span, dtype=torch.float32), magnitudes


def as_pair(out: Out) -> tuple[Tensor | None, Tensor | None]:
    """The memory for rowwise and for columnwise codes."""
    return tuple(out) if isinstance(out, tuple | list) else (out, None)
