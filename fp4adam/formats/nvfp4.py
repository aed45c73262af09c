"""NVFP4: E2M1 codes, an E4M3 scale per 16 elements or 16x16 block, an FP32 amax per tensor."""

import dataclasses

import torch
from torch import Tensor

from fp4adam.formats import minifloat
from fp4adam.tensors.layout import Direction, Inner, Layout
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer

BLOCK = 16
SIXTH = 1 / minifloat.E2M1_MAX
# The largest code times the largest scale of a block.
LARGEST = minifloat.E2M1_MAX * minifloat.E4M3_MAX


class NVFP4Tensor(QuantizedTensor):
    """A tensor in NVFP4, 4.5 bits per element and direction (4 + 1/32 with 16x16 blocks).

    ``rowwise_data``: uint8 [rows, cols / 2], even elements in the low nibble.
    ``columnwise_data``: uint8 [cols, rows / 2], the transposed matrix packed the same way.
    ``rowwise_scale_inv``: uint8 (E4M3) [rows padded to 128, cols / 16 padded to 4].
    ``columnwise_scale_inv``: uint8 (E4M3) [cols padded to 128, rows / 16 padded to 4].
    ``rowwise_gemm_scale_inv``, ``columnwise_gemm_scale_inv``: the same, swizzled for the GEMM.

    Padding of scales is 0.
    """

    @property
    def amax_rowwise(self) -> Tensor | None:
        """The amax that the values were quantized with, float32 [1]; None without rowwise usage."""
        return self._amax if self.quantizer.rowwise else None

    @property
    def amax_columnwise(self) -> Tensor | None:
        """Equal to ``amax_rowwise``; None without columnwise usage."""
        return self._amax if self.quantizer.columnwise else None


@dataclasses.dataclass(frozen=True)
class NVFP4Quantizer(Quantizer[NVFP4Tensor]):
    """Quantize to :class:`NVFP4Tensor`; rows and columns must be multiples of 16.

    Block scale = E4M3(block_amax * S / 6) with S = 2688 / amax(tensor); code = E2M1(x / decoded
    scale). Every step is one float32 operation, in the same order as in Transformer Engine.

    Args:
        rowwise: Keep codes with blocks along the last dimension.
        columnwise: Keep transposed codes with blocks along the first dimension.
        two_dimensional: One scale per 16x16 block for both directions (the recipe for weights),
            instead of one per 16 elements of each direction.
        optimize_for_gemm: Keep ``rowwise_gemm_scale_inv`` and ``columnwise_gemm_scale_inv``, which
            are written with the tensor and take 1/16 byte per weight and direction.

    Source: "Pretraining Large Language Models with NVFP4", arXiv:2509.25149, section 4.
    """

    two_dimensional: bool = True

    tensor_class = NVFP4Tensor
    kernels = True
    largest_value = LARGEST

    def full_layout(self) -> Layout:
        padding = (128, 4)
        return Layout(
            block=BLOCK,
            code_type=minifloat.E2M1,
            scale_type="e4m3",
            rowwise=Direction(Inner(1, 2), Inner(1, BLOCK, padding=padding)),
            columnwise=Direction(Inner(2, 1, True), Inner(BLOCK, 1, True, padding)),
            is_square=self.two_dimensional,
            tensor_scale="current",
            multiple=BLOCK,
        )

    def per_tensor_scale(self, amax: Tensor) -> Tensor:
        # By a tensor, because torch divides by a number by multiplying with its reciprocal.
        return amax / torch.full_like(amax, self.largest_value)

    def encode(
        self, amaxes: Tensor, tensor_amax: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        scales = minifloat.e4m3_code(amaxes * (_encode_scale(tensor_amax) * SIXTH))
        return scales, self.factors(scales, tensor_amax)

    def factors(self, scales: Tensor, tensor_amax: Tensor) -> Tensor:
        decoded = minifloat.e4m3_value(scales) * _encode_scale(tensor_amax).reciprocal()
        return decoded.reciprocal_().clamp_(max=minifloat.FP32_MAX)

    def decode(self, scales: Tensor, tensor_amax: Tensor) -> Tensor:
        return (minifloat.e4m3_value(scales) * tensor_amax) * (1 / LARGEST)


def _encode_scale(amax: Tensor) -> Tensor:
    """The factor that maps the values of a tensor to the range of codes times block scales."""
    scale = (torch.full_like(amax, LARGEST) / amax).clamp_(max=minifloat.FP32_MAX)
    return torch.where((amax == 0) | amax.isinf(), 1.0, scale)


torch.serialization.add_safe_globals([NVFP4Tensor, NVFP4Quantizer])
