"""MXFP4: E2M1 codes with one power-of-two (E8M0) scale per 32 elements of a row."""

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from fp4adam.formats import minifloat
from fp4adam.formats.mx import MXQuantizer, layout
from fp4adam.tensors.layout import Layout, ScaleRule
from fp4adam.tensors.quantized_tensor import QuantizedTensor

# What is added to the bits of an amax, so that its exponent is that of the rounded amax: with
# "even" from 1.75 on the next power of two, with "up" above 1.5, so that 6 times the scale holds
# the amax.
ROUNDINGS = {"floor": 0, "even": 0x200000, "up": 0x3FFFFF}


class MXFP4Tensor(QuantizedTensor):
    """A tensor in MXFP4, 4.25 bits per element.

    ``rowwise_data``: uint8 [rows, cols / 2], even elements in the low nibble.
    ``rowwise_scale_inv``: uint8 (E8M0) [rows padded to 128, cols / 32 padded to 4]; padding is 0.
    """


@dataclasses.dataclass(frozen=True)
class MXFP4Quantizer(MXQuantizer[MXFP4Tensor]):
    """Quantize to :class:`MXFP4Tensor`; rows and columns must be multiples of 32.

    Scale = 2**floor(log2(rounded block_amax)) / 4; code = E2M1(x / scale), which saturates at 6.
    Weights have rowwise codes alone, and matmuls read their decoded values.

    Args:
        scale_rounding: How the amax of a block is rounded: "floor" to its power of two, as in the
            specification and torchao's default; "even" to E2M1's precision first, as
            compressed-tensors does, which has the smallest largest error; "up" so that no code
            saturates, as in the kernels of gpt-oss and torchao's RCEIL.

    Source: OCP Microscaling Formats (MX) v1.0, section 6.3.
    """

    columnwise: bool = False
    scale_rounding: Literal["floor", "even", "up"] = "even"

    tensor_class = MXFP4Tensor
    kernels = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columnwise or self.optimize_for_gemm:
            raise ValueError(
                "columnwise and optimize_for_gemm must be False for MXFP4, whose matmuls read "
                f"decoded values, got {self.columnwise} and {self.optimize_for_gemm}; leave them "
                "out"
            )
        if self.scale_rounding not in ROUNDINGS:
            raise ValueError(
                f"scale_rounding must be one of {', '.join(ROUNDINGS)}, got "
                f"{self.scale_rounding!r}; 'floor' is that of the OCP specification"
            )

    def full_layout(self) -> Layout:
        rule = ScaleRule(rounding=ROUNDINGS[self.scale_rounding])
        return layout(minifloat.E2M1, is_square=False, scale_rule=rule)

    def encode(
        self, amaxes: Tensor, tensor_amax: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        rounded = amaxes.view(torch.int32) + self.layout.scale_rule.rounding
        scales = rounded.bitwise_right_shift_(23).sub_(2).clamp_(min=0)
        scales = torch.where(amaxes.isnan(), 255, scales).to(torch.uint8)
        return scales, minifloat.e8m0_reciprocal(scales)


torch.serialization.add_safe_globals([MXFP4Tensor, MXFP4Quantizer])
