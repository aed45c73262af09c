"""Adaptive block scales of NVFP4 (4over6): map the amax of each block to 4 or to 6.

Both candidates are rounded, and the one with the smaller error is kept; 6 if the errors are equal.
E2M1 has nothing between 4 and 6, so some blocks lose less if their amax maps to 4. Operations and
sums are in the order of Transformer Engine's, because errors that are nearly equal depend on it.

Source: "Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling",
arXiv:2512.02010.
"""

import torch
from torch import Tensor

from fp4adam.formats import minifloat


def block_scales(
    block_amax: Tensor, four: Tensor | bool, encode: Tensor, decode: Tensor
) -> tuple[Tensor, Tensor]:
    """E4M3 scales (uint8), and the float32 factors that map values to codes.

    Args:
        block_amax: float32, one per block.
        four: Whether the amax of a block maps to 4 instead of 6.
        encode: float32 [1], the scale of the tensor.
        decode: Its reciprocal.
    """
    # By a tensor, because torch divides by a number by multiplying with its reciprocal.
    base = block_amax / torch.full_like(block_amax, minifloat.E2M1_MAX) * encode
    # 1.0 leaves the number as it is, NaN aside, which amaxes are not.
    expansion = torch.where(torch.as_tensor(four, device=base.device), 1.5, 1.0)
    scale = minifloat.e4m3_code(base * expansion)
    factor = 1.0 / (minifloat.e4m3_value(scale) * decode)
    return scale, factor.clamp(max=minifloat.FP32_MAX)


def maps_to_four(
    blocks: Tensor,
    block_amax: Tensor,
    amax: Tensor,
    encode: Tensor,
    decode: Tensor,
    error: str,
    bound: int,
) -> Tensor:
    """Whether the error of each block is smaller if its amax maps to 4 instead of 6, bool [m, n].

    Args:
        blocks: float32 [m, rows, n, cols], with blocks of 16x16, 1x16 or 16x1.
        block_amax: Their amaxes, float32 [m, n].
        amax: That of the tensor, float32 [1].
        encode, decode: As for :func:`block_scales`.
        error: "mae" or "mse".
        bound: The block scale that ``amax`` maps to.
    """
    errors = []
    for four in (True, False):
        scale, factor = block_scales(block_amax, four, encode, decode)
        magnitude = blocks.abs().mul_(factor[:, None, :, None])
        product = _round_to_e2m1(magnitude).mul_(minifloat.e4m3_value(scale)[:, None, :, None])
        product.mul_(amax).div_(torch.full_like(amax, minifloat.E2M1_MAX * bound))
        difference = product.sub_(blocks.abs()).abs_()
        errors.append(_sum(difference.square_() if error == "mse" else difference))
    return errors[0] < errors[1]


def _round_to_e2m1(magnitude: Tensor) -> Tensor:
    """Round non-negative numbers to E2M1, in place; NaN becomes 6."""
    bits = magnitude.view(torch.int32).clamp_(max=0x40C00000)  # 6.0, also for NaN
    # Adding a number with the spacing wanted leaves a multiple of it.
    rounder = (bits & 0x7F800000).clamp_(min=0x3F800000).view(torch.float32).mul_(2.0**22)
    return magnitude.add_(rounder).sub_(rounder)


def _sum(errors: Tensor) -> Tensor:
    """The sums [m, n] of errors [m, rows, n, cols]: along rows first to last, then as a tree."""
    along = 3 if errors.shape[3] > 1 else 1
    first, *others = errors.unbind(along)
    total = first.clone()
    for other in others:
        total += other
    if along == 1:
        return total.squeeze(2)
    while total.shape[1] > 1:  # rows 8 apart, then 4, 2 and 1
        total = torch.add(*total.chunk(2, 1))
    return total.squeeze(1)
