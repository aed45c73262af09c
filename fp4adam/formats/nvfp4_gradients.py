"""NVFP4 of the operands of matmuls, in plain torch operators that ``torch.compile`` can fuse.

Gradients are rounded as by Transformer Engine's recipe. The gradient of a weight contracts tokens:
its operands are transformed along them, 16 at a time, by a Hadamard matrix with fixed random signs,
which spreads outliers and cancels in the product. Gradients are rounded up or down at random, so
that they are right on average.

Sources: "Pretraining Large Language Models with NVFP4", arXiv:2509.25149, section 4; the signs and
the order of operations are those of Transformer Engine.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4adam.formats import minifloat
from fp4adam.formats.nvfp4 import SIXTH

BLOCK = 16
# Bit i is set if row i of the Hadamard matrix is negative.
SIGNS = 0b1101_0111_1110_1000


def hadamard(x: Tensor) -> Tensor:
    """The randomized Hadamard transform of every 16 elements along the last dimension of a matrix.

    It is orthonormal. Sums are taken in float32, by fixed pairs, and rounded to the dtype of ``x``.
    """
    y = x.float().unflatten(1, (-1, BLOCK)) * _signs(x.device)
    for distance in (1, 2, 4, 8):
        first, second = y.unflatten(2, (-1, 2, distance)).unbind(3)
        y = torch.stack((first + second, first - second), 3).flatten(2)
    return (y * 0.25).flatten(1).to(x.dtype)


def _signs(device: torch.device) -> Tensor:
    # Computed: a table would be copied from the host in every call.
    negative = SIGNS >> torch.arange(BLOCK, device=device) & 1
    return (1 - 2 * negative).float()


def quantize(x: Tensor, *, at_random: bool) -> tuple[Tensor, Tensor, Tensor]:
    """NVFP4 in blocks of 1x16, as ``NVFP4Quantizer(two_dimensional=False)`` gives it.

    Args:
        x: [rows, cols], with cols a multiple of 16.
        at_random: Round codes up or down by torch's default generator: a value between two of them
            becomes either with the probability that keeps its mean.

    Returns:
        Packed codes [rows, cols / 2], scales [rows to 128, cols / 16 to 4] and the amax [1].
    """
    blocks = x.float().unflatten(1, (-1, BLOCK))
    magnitudes = blocks.abs()
    amaxes = torch.where(magnitudes.isnan(), 0.0, magnitudes).amax(2)
    amax = amaxes.amax().view(1)
    scales, factors = _scales(amaxes, amax)
    code = e2m1_stochastic_code if at_random else e2m1_code
    low, high = code(blocks * factors.unsqueeze(2)).unflatten(2, (-1, 2)).unbind(3)
    packed = (low | high << 4).flatten(1)
    rows, width = scales.shape
    return packed, F.pad(scales, (0, -width % 4, 0, -rows % 128)), amax


def _scales(amaxes: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Those of ``NVFP4Quantizer.scales_of_blocks``, without waiting for the device."""
    largest = torch.full_like(amax, minifloat.E2M1_MAX * minifloat.E4M3_MAX)
    encode = (largest / amax).clamp(max=minifloat.FP32_MAX)
    encode = torch.where((amax == 0) | amax.isinf(), 1.0, encode)
    scales = (amaxes * (encode * SIXTH)).clamp(max=minifloat.E4M3_MAX).to(torch.float8_e4m3fn)
    factors = (scales.float() * (1.0 / encode)).reciprocal().clamp(max=minifloat.FP32_MAX)
    return scales.view(torch.uint8), factors


def e2m1_code(x: Tensor) -> Tensor:
    """As ``minifloat.e2m1_code``: to nearest, ties to even, NaN becomes +6; uint8."""
    a, code = x.abs(), x.isnan().to(torch.uint8) * 7
    # Between two values the middle is that of the even code.
    for middle, is_even_above in (
        (0.25, 0),
        (0.75, 1),
        (1.25, 0),
        (1.75, 1),
        (2.5, 0),
        (3.5, 1),
        (5.0, 0),
    ):
        code = code + (a >= middle if is_even_above else a > middle).to(torch.uint8)
    sign = torch.where(x.isnan(), 0, x.view(torch.int32) >> 28 & 8)
    return code | sign.to(torch.uint8)


def e2m1_stochastic_code(x: Tensor) -> Tensor:
    """Round float32 to E2M1 at random; values of the format stay, and NaN becomes +6; uint8."""
    x = x.nan_to_num(minifloat.E2M1_MAX)
    a = x.abs().clamp(max=minifloat.E2M1_MAX)
    # Codes are linear in magnitudes up to 2, from there to 4, and beyond.
    code = torch.minimum(torch.minimum(2 * a, a + 2), a / 2 + 4)
    low = code.floor()
    low = low + ((code - low) > torch.rand_like(code)).float()
    return low.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def values(packed: Tensor) -> Tensor:
    """float32 values [..., 2n] of packed E2M1 codes [..., n]."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    magnitude = (codes & 7).float()
    magnitude = torch.maximum(magnitude / 2, torch.maximum(magnitude - 2, 2 * magnitude - 8))
    return torch.where(codes > 7, -magnitude, magnitude)
