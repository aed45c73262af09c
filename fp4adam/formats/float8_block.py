"""Float8Block: E4M3 codes with one FP32 scale per 128x128 block, or per 128 elements."""

import dataclasses
import math

import torch
from torch import Tensor

from fp4adam.formats import minifloat
from fp4adam.tensors.layout import Direction, Inner, Layout, ScaleRule
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer

BLOCK = 128


class Float8BlockTensor(QuantizedTensor):
    """A tensor in Float8Block, 8 bits per element and direction.

    ``rowwise_data``: uint8 (E4M3) [rows, cols]; ``columnwise_data``: uint8 (E4M3) [cols, rows].
    Scales are float32. "to 4" means padded with zeros to a multiple of 4. 128x128 blocks:
    ``rowwise_scale_inv`` [ceil(rows / 128), ceil(cols / 128) to 4], ``columnwise_scale_inv``
    [ceil(cols / 128), ceil(rows / 128) to 4]. 1x128 blocks: ``rowwise_scale_inv``
    [ceil(cols / 128), rows to 4], ``columnwise_scale_inv`` [ceil(rows / 128), cols to 4].
    """


def encode_scale(amax: Tensor, largest: float, epsilon: float, force_pow_2_scales: bool) -> Tensor:
    """Factors that map magnitudes up to ``amax`` to those of E4M3, float32.

    Args:
        amax: Amaxes, float32.
        largest: The factor where 448 / amax overflows.
        epsilon: Lower bound of amaxes.
        force_pow_2_scales: Whether to round factors down to powers of two.
    """
    amax = amax.clamp(min=epsilon)
    # torch computes number / tensor as number * (1 / tensor), which rounds twice.
    scale = torch.full_like(amax, minifloat.E4M3_MAX) / amax
    scale = torch.where(scale.isinf(), largest, scale)
    scale = torch.where((amax == 0) | (amax <= minifloat.FP32_MAX).logical_not(), 1.0, scale)
    if force_pow_2_scales:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


@dataclasses.dataclass(frozen=True)
class Float8BlockQuantizer(Quantizer[Float8BlockTensor]):
    """Quantize to :class:`Float8BlockTensor`; any rows and columns (blocks at edges are partial).

    Scale = 448 / max(block_amax, amax_epsilon), or 1 for a block of zeros; code = E4M3(x * scale).
    The decode scale, 1 / scale, is stored.

    Args:
        rowwise: Keep codes with blocks along the last dimension.
        columnwise: Keep transposed codes with blocks along the first dimension.
        two_dimensional: One scale per 128x128 block (weights) instead of one per 128 elements.
        force_pow_2_scales: Round scales down to powers of two.
        amax_epsilon: Lower bound of block amaxes, >= 0.

    Source: DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.2.
    """

    two_dimensional: bool = True
    force_pow_2_scales: bool = True
    amax_epsilon: float = 0.0

    tensor_class = Float8BlockTensor
    kernels = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimize_for_gemm:
            raise ValueError(
                "optimize_for_gemm must be False for Float8Block, got True: its GEMM reads scales "
                "as rowwise_scale_inv and columnwise_scale_inv have them; leave it out"
            )
        if not (self.amax_epsilon >= 0 and math.isfinite(self.amax_epsilon)):
            raise ValueError(
                f"amax_epsilon must be finite and >= 0, got {self.amax_epsilon}; 0 turns it off"
            )

    def full_layout(self) -> Layout:
        if self.two_dimensional:
            rowwise = Inner(BLOCK, BLOCK, padding=(1, 4))
            columnwise = Inner(BLOCK, BLOCK, True, (1, 4))
        else:
            rowwise = Inner(1, BLOCK, True, (1, 4))
            columnwise = Inner(BLOCK, 1, padding=(1, 4))
        return Layout(
            block=BLOCK,
            code_type=minifloat.E4M3,
            scale_type="float32",
            rowwise=Direction(Inner(1, 1), rowwise),
            columnwise=Direction(Inner(1, 1, True), columnwise),
            is_square=self.two_dimensional,
            scale_rule=ScaleRule(self.force_pow_2_scales, self.amax_epsilon),
        )

    def encode(
        self, amaxes: Tensor, tensor_amax: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        # The largest finite value of the dtype where 448 / amax overflows.
        options = torch.finfo(dtype).max, self.amax_epsilon, self.force_pow_2_scales
        factors = encode_scale(amaxes, *options)
        return 1.0 / factors, factors

    def factors(self, scales: Tensor, tensor_amax: Tensor | None) -> Tensor:
        return 1.0 / scales

    def decode(self, scales: Tensor, tensor_amax: Tensor | None) -> Tensor:
        return scales


torch.serialization.add_safe_globals([Float8BlockTensor, Float8BlockQuantizer])
