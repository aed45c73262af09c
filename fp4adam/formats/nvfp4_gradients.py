"""NVFP4 of gradients, as Transformer Engine's recipe rounds them, in torch operators.

The gradient of a weight contracts tokens. Its operands are transformed along them, 16 at a time, by
a Hadamard matrix with fixed random signs, which spreads outliers and cancels in the product.
Gradients are rounded up or down at random, so that they are right on average.

Sources: "Pretraining Large Language Models with NVFP4", arXiv:2509.25149, section 4; the signs and
the order of operations are those of Transformer Engine.
"""

import torch
from torch import Tensor

from fp4adam.formats.nvfp4 import BLOCK, NVFP4Quantizer
from fp4adam.tensors import minifloat
from fp4adam.tensors.blocks import round_up

# Of the rows of the Hadamard matrix.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard(x: Tensor) -> Tensor:
    """The randomized Hadamard transform of every 16 elements along the last dimension.

    It is orthonormal. Sums are taken in float32, by fixed pairs, and rounded to the dtype of ``x``.
    """
    y = x.float().view(-1, BLOCK) * torch.tensor(SIGNS, dtype=torch.float32, device=x.device)
    for distance in (1, 2, 4, 8):
        first, second = y.view(-1, BLOCK // (2 * distance), 2, distance).unbind(2)
        y = torch.stack((first + second, first - second), 2)
    return (y * 0.25).view(x.shape).to(x.dtype)


def quantize_stochastically(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """NVFP4 in blocks of 1x16 with codes rounded at random, from torch's default generator.

    Scales are those of ``NVFP4Quantizer(two_dimensional=False)``, and values between two codes
    become either with the probability that keeps their mean.

    Args:
        x: [rows, cols] with cols a multiple of 16.

    Returns:
        Packed codes [rows, cols / 2], scales [rows to 128, blocks to 4] and the amax [1].
    """
    blocks = x.float().view(x.shape[0], -1, BLOCK)
    amaxes = minifloat.amax(blocks, (2,))
    amax = amaxes.amax().view(1)
    scales, factors = NVFP4Quantizer().encode(amaxes, amax, torch.float32)
    codes = e2m1_stochastic_code(blocks * factors[:, :, None]).view(x.shape)
    below, beside = (round_up(n, m) - n for n, m in zip(scales.shape, (128, 4), strict=True))
    padded = torch.nn.functional.pad(scales, (0, beside, 0, below))
    return minifloat.pack_e2m1(codes), padded, amax


def e2m1_stochastic_code(x: Tensor) -> Tensor:
    """Round float32 to E2M1 at random; values of the format stay, and NaN becomes +6; uint8."""
    x = x.nan_to_num(minifloat.E2M1_MAX)
    a = x.abs().clamp_(max=minifloat.E2M1_MAX)
    # Codes are linear in magnitudes up to 2, from there to 4, and beyond.
    code = torch.minimum(torch.minimum(2 * a, a + 2), a / 2 + 4)
    low = code.floor()
    low += (code - low) > torch.rand_like(code)
    return low.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)
