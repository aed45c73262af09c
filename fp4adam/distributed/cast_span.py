"""Spans of the weights that a cast writes, and the memory for their codes and scales."""

import dataclasses

import torch
from torch import Tensor

from fp4adam.tensors import encoding
from fp4adam.tensors.blocks import Span
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
    """

    weight: QuantizedTensor
    span: Span
    dtype: torch.dtype
    amax: Tensor | None = None
    grids: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """The layout of the weight."""
        return self.weight.quantizer.layout

    @property
    def nbytes(self) -> int:
        """Number of bytes that hold codes of the span, in one direction."""
        per_byte, (_, start, stop) = 8 // self.layout.code_type.bits, self.span
        return -(-stop // per_byte) - start // per_byte if stop > start else 0

    def targets(self, out: Out) -> dict[str, encoding.FlatCodes]:
        """By direction, the flat memory to write codes to, and the code byte that it starts at."""
        tensors, first_byte = self.weight.inner, self.span.start * self.layout.code_type.bits
        given = dict(zip(("rowwise", "columnwise"), as_pair(out), strict=True))
        return {
            usage: (getattr(tensors, f"{usage}_data").view(-1), 0)
            if given[usage] is None
            else (given[usage].view(-1), first_byte // 8)
            for usage in self.layout.blocks
        }

    def write(self, value: Tensor, out: Out) -> None:
        """Write all scales of the weight, and the codes of the span, by operators."""
        quantizer, layout, tensors = self.weight.quantizer, self.layout, self.weight.inner
        if self.amax is not None:
            quantizer.take_amaxes([tensors], [self.amax])
        factors = {}
        for usage in layout.blocks:
            grid = self.grids.get(usage, tensors.amax)
            scales, factors[usage] = quantizer.encode(grid, tensors.amax, self.dtype)
            if layout.scale_type is not None:
                stored = encoding.stored_scales(layout, tensors, usage, self.span.shape)
                stored.copy_(scales)
        targets = self.targets(out)
        encoding.write_codes(quantizer, value, self.span, self.dtype, factors, targets)


def as_pair(out: Out) -> tuple[Tensor | None, Tensor | None]:
    """The memory for rowwise and for columnwise codes."""
    return tuple(out) if isinstance(out, tuple | list) else (out, None)
