"""NVFP4 of gradients, as Transformer Engine's recipe rounds them, in plain torch operators.

The gradient of a weight contracts tokens. Its operands are transformed along them, 16 at a time, by
a Hadamard matrix with fixed random signs, which spreads outliers and cancels in the product.
Gradients are rounded up or down at random, so that they are right on average.

Sources: "Pretraining Large Language Models with NVFP4", arXiv:2509.25149, section 4; the signs and
the order of operations are those of Transformer Engine.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4adam.formats import minifloat
from fp4adam.formats.nvfp4 import BLOCK, NVFP4Quantizer
from fp4adam.tensors.encoding import amax_over

# Bit i is set if row i of the Hadamard matrix is negative.
SIGNS = 0b1101_0111_1110_1000


def hadamard(x: Tensor) -> Tensor:
    """The randomized Hadamard transform of every 16 elements along the rows of a matrix.

    It is orthonormal. Sums are taken in float32, by fixed pairs, and rounded to the dtype of ``x``.
    """
    # Computed: a table would be copied from the host in every call.
    negative = SIGNS >> torch.arange(BLOCK, device=x.device) & 1
    y = x.float().unflatten(1, (-1, BLOCK)) * (1 - 2 * negative)
    for distance in (1, 2, 4, 8):
        first, second = y.unflatten(2, (-1, 2, distance)).unbind(3)
        y = torch.stack((first + second, first - second), 3).flatten(2)
    return (y * 0.25).flatten(1).to(x.dtype)


def quantize(x: Tensor, *, at_random: bool) -> tuple[Tensor, Tensor, Tensor]:
    """NVFP4 in blocks of 1x16, as ``NVFP4Quantizer(two_dimensional=False)`` gives it.

    Args:
        x: [rows, cols] with cols a multiple of 16.
        at_random: Round codes up or down by torch's default generator: a value between two of them
            becomes either with the probability that keeps its mean.

    Returns:
        Packed codes [rows, cols / 2], scales [rows to 128, cols / 16 to 4] and the amax [1].
    """
    blocks = x.float().unflatten(1, (-1, BLOCK))
    amaxes = amax_over(blocks, (2,), keeps_nan=True)
    amax = amax_over(blocks, (0, 1, 2)).view(1)
    scales, factors = NVFP4Quantizer().encode(amaxes, amax, torch.float32)
    code = e2m1_stochastic_code if at_random else minifloat.e2m1_code
    codes = minifloat.pack_e2m1(code(blocks * factors.unsqueeze(2))).flatten(1)
    rows, width = scales.shape
    return codes, F.pad(scales, (0, -width % 4, 0, -rows % 128)), amax


def e2m1_stochastic_code(x: Tensor) -> Tensor:
    """Round float32 to E2M1 at random; values of the format stay, and NaN becomes +6; uint8."""
    x = x.nan_to_num(minifloat.E2M1_MAX)
    a = x.abs().clamp(max=minifloat.E2M1_MAX)
    # Codes are linear in magnitudes up to 2, from there to 4, and beyond.
    code = torch.minimum(torch.minimum(2 * a, a + 2), a / 2 + 4)
    low = code.floor()
    low = low + ((code - low) > torch.rand_like(code))
    return low.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)
