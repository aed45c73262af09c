"""MXFP8: E4M3 codes with one power-of-two (E8M0) scale per 32 elements of each direction."""

import dataclasses

import torch
from torch import Tensor

from fp4adam.formats import minifloat
from fp4adam.formats.mx import MXQuantizer, layout
from fp4adam.tensors.layout import Layout
from fp4adam.tensors.quantized_tensor import QuantizedTensor


class MXFP8Tensor(QuantizedTensor):
    """A tensor in MXFP8, 8.25 bits per element and direction; with square blocks, 8.01 for both.

    ``rowwise_data``, ``columnwise_data``: uint8 (E4M3) [rows, cols]; neither is transposed.
    ``rowwise_scale_inv``: uint8 (E8M0) [rows padded to 128, cols / 32 padded to 4].
    ``columnwise_scale_inv``: uint8 (E8M0) [rows / 32 padded to 4, cols padded to 128].
    ``rowwise_gemm_scale_inv``: ``rowwise_scale_inv``, swizzled for the GEMM.
    ``columnwise_gemm_scale_inv``: uint8 (E8M0) [cols padded to 128, rows / 32 padded to 4],
    swizzled for the GEMM.

    Padding of scales is 0. With square blocks one copy of codes and one grid of scales [rows / 32,
    cols / 32] are stored: ``rowwise_data`` and ``columnwise_data`` are the same memory, and the
    scales of each direction repeat those of the grid.
    """


@dataclasses.dataclass(frozen=True)
class MXFP8Quantizer(MXQuantizer[MXFP8Tensor]):
    """Quantize to :class:`MXFP8Tensor`; rows and columns must be multiples of 32.

    Scale = 2**ceil(log2(block_amax / 448)), so no code saturates; code = E4M3(x / scale).

    Args:
        rowwise: Keep codes with blocks of 1x32.
        columnwise: Keep codes with blocks of 32x1.
        two_dimensional: Use square blocks of 32x32, whose codes serve both directions. Needs
            ``rowwise``.
        optimize_for_gemm: Keep ``rowwise_gemm_scale_inv`` and ``columnwise_gemm_scale_inv``, which
            are written with the tensor and take 1/32 byte per weight and direction.

    Source: OCP Microscaling Formats (MX) v1.0; the scale rounds up as in Transformer Engine, and
    square blocks are its ``with_2d_quantization``.
    """

    two_dimensional: bool = False

    tensor_class = MXFP8Tensor
    kernels = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.two_dimensional and not self.rowwise:
            raise ValueError(
                "rowwise must be True with two_dimensional=True, got False: one copy of codes "
                "serves both directions; leave rowwise out"
            )

    def full_layout(self) -> Layout:
        return layout(minifloat.E4M3, is_square=self.two_dimensional)

    def encode(
        self, amaxes: Tensor, tensor_amax: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        scales = minifloat.e8m0_code_up(amaxes * (1 / minifloat.E4M3_MAX))
        return scales, minifloat.e8m0_reciprocal(scales)


torch.serialization.add_safe_globals([MXFP8Tensor, MXFP8Quantizer])
