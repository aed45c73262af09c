"""What the MX formats have in common: blocks of 32 elements of a row or column, E8M0 scales."""

from torch import Tensor

from fp4adam.formats import minifloat
from fp4adam.tensors.layout import CodeType, Direction, Inner, Layout
from fp4adam.tensors.quantizer import Quantizer, T

BLOCK = 32


class MXQuantizer(Quantizer[T]):
    """A format with one E8M0 scale per 32 elements.

    Source: OCP Microscaling Formats (MX) v1.0.
    """

    def factors(self, scales: Tensor, tensor_amax: Tensor | None) -> Tensor:
        return minifloat.e8m0_reciprocal(scales)

    def decode(self, scales: Tensor, tensor_amax: Tensor | None) -> Tensor:
        return minifloat.e8m0_value(scales)


def layout(code_type: CodeType, **options: object) -> Layout:
    """The layout of an MX format with these codes."""
    per_byte = 8 // code_type.bits
    return Layout(
        block=BLOCK,
        code_type=code_type,
        scale_type="e8m0",
        rowwise=Direction(Inner(1, per_byte), Inner(1, BLOCK, padding=(128, 4))),
        columnwise=Direction(Inner(1, per_byte), Inner(BLOCK, 1, padding=(4, 128))),
        multiple=BLOCK,
        **options,
    )
