"""Adaptive block scales of NVFP4 (4over6): map the amax of each block to 4 or to 6.

Both candidates are rounded, and the one with the smaller error is kept; 6 if the errors are equal.
E2M1 has nothing between 4 and 6, so some blocks lose less if their amax maps to 4. Operations and
sums are in the order of Transformer Engine's, because errors that are nearly equal depend on it.
"""

import triton
import triton.language as tl

from fp4adam.kernels.tiles.e2m1 import e2m1_code
from fp4adam.kernels.tiles.e4m3 import e4m3_code, e4m3_value
from fp4adam.kernels.tiles.target import is_compiled

FP32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def per_element(x, FORM: tl.constexpr):
    """A number per block, broadcast to the elements of blocks of a form of `adaptive_codes`."""
    if FORM == "square":
        x = x[:, None, :, None]
    elif FORM == "row":
        x = x[:, :, None]
    else:
        x = x[:, None, :]
    return x


@triton.jit
def adaptive_scale(block_amax, amax, four, BOUND: tl.constexpr):
    """E4M3 block scales (uint8), and the factors that map values to codes (float32).

    block_amax: float32 tile. amax: float32 scalar, of the whole tensor. four: whether the amax of a
    block maps to 4 instead of 6. BOUND: the block scale that the amax of the tensor maps to.
    """
    # The same float32 operations in the same order as ``formats.four_over_six.block_scales``.
    encode = tl.div_rn(6.0 * BOUND, amax)
    encode = tl.where((amax == 0) | (encode == 0), 1.0, tl.minimum(encode, FP32_MAX))
    decode = tl.div_rn(1.0, encode)
    base = tl.div_rn(block_amax, 6.0) * encode
    base = tl.where(four, base * 1.5, base)
    scale = e4m3_code(tl.minimum(base, 448.0), HARDWARE=False)
    factor = tl.minimum(tl.div_rn(1.0, e4m3_value(scale) * decode), FP32_MAX)
    return scale, factor


@triton.jit
def choose(blocks, block_amax, amax, FORM: tl.constexpr, ERROR: tl.constexpr, BOUND: tl.constexpr):
    """Whether the amax of each block maps to 4, and the scales and factors of that choice.

    Arguments as for :func:`adaptive_codes`.
    """
    scale4, factor4 = adaptive_scale(block_amax, amax, True, BOUND)
    scale6, factor6 = adaptive_scale(block_amax, amax, False, BOUND)
    error4 = _error(blocks, scale4, factor4, amax, FORM, ERROR, BOUND)
    error6 = _error(blocks, scale6, factor6, amax, FORM, ERROR, BOUND)
    four = error4 < error6
    return four, tl.where(four, scale4, scale6), tl.where(four, factor4, factor6)


@triton.jit
def adaptive_codes(
    blocks, block_amax, amax, FORM: tl.constexpr, ERROR: tl.constexpr, BOUND: tl.constexpr
):
    """Scales (uint8) and codes of blocks.

    blocks: float32. FORM: "square" for 16x16 blocks [m, 16, n, 16], "row" for 1x16 [m, n, 16],
    "column" for 16x1 [m, 16, n]. block_amax: float32, per block. amax: float32 scalar, of the whole
    tensor. ERROR: "mae" or "mse". BOUND: the block scale that amax maps to, 448 or 256.
    """
    if FORM == "column":
        lines = tl.permute(blocks, (0, 2, 1))
        _, scale, factor = choose(lines, block_amax, amax, "row", ERROR, BOUND)
    else:
        _, scale, factor = choose(blocks, block_amax, amax, FORM, ERROR, BOUND)
    return scale, e2m1_code(blocks * per_element(factor, FORM))


@triton.jit
def _error(
    blocks,
    scale,
    factor,
    amax,
    FORM: tl.constexpr,
    ERROR: tl.constexpr,
    BOUND: tl.constexpr,
):
    """The error of blocks with these scales and factors, float32 per block."""
    magnitude = tl.minimum(tl.abs(blocks) * per_element(factor, FORM), 6.0)
    # Rounds to E2M1: adding a number with the spacing wanted leaves a multiple of it.
    bits = magnitude.to(tl.int32, bitcast=True) & 0x7F800000
    rounder = tl.maximum(bits, 0x3F800000).to(tl.float32, bitcast=True) * 4194304.0
    magnitude = (magnitude + rounder) - rounder
    product = magnitude * per_element(e4m3_value(scale), FORM) * amax
    error = tl.abs(_quotient(product, 6.0 * BOUND) - tl.abs(blocks))
    if ERROR == "mse":
        error = error * error
    if FORM == "square":
        M: tl.constexpr = blocks.shape[0]
        N: tl.constexpr = blocks.shape[2]
        total = _sum_of_16(tl.reshape(error, (16 * M, N, 16)), 16 * M, N)
        # A tree over the rows: those 8 apart first, then 4, 2 and 1.
        total = tl.sum(tl.reshape(total, (M, 2, 8, N)), 1)
        total = tl.sum(tl.reshape(total, (M, 2, 4, N)), 1)
        total = tl.sum(tl.reshape(total, (M, 2, 2, N)), 1)
        total = tl.sum(total, 1)
    else:
        total = _sum_of_16(error, blocks.shape[0], blocks.shape[1])
    return total


@triton.jit
def _quotient(x, DIVISOR: tl.constexpr):
    """x / DIVISOR, rounded once; for 1536 and 2688.

    A product with the reciprocal and one correction give the same bits as a division in a third of
    the instructions, unless the quotient is below 2^-100.
    """
    if is_compiled():
        quotient = x * (1.0 / DIVISOR)
        quotient = tl.fma(tl.fma(quotient, -DIVISOR, x), 1.0 / DIVISOR, quotient)
    else:
        quotient = tl.div_rn(x, DIVISOR)  # the interpreter rounds an FMA twice
    return quotient


@triton.jit
def _sum_of_16(x, M: tl.constexpr, N: tl.constexpr):
    """Sums [M, N] of x [M, N, 16], from the first number to the last."""
    # Not tl.sum, whose order depends on how threads hold x. A split takes off a bit of the index.
    a, b = tl.split(tl.reshape(x, (M, N, 8, 2)))
    a0, a1 = tl.split(tl.reshape(a, (M, N, 4, 2)))
    b0, b1 = tl.split(tl.reshape(b, (M, N, 4, 2)))
    x0, x4, x8, x12 = _split_4(a0, M, N)
    x1, x5, x9, x13 = _split_4(b0, M, N)
    x2, x6, x10, x14 = _split_4(a1, M, N)
    x3, x7, x11, x15 = _split_4(b1, M, N)
    total = x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7
    total = total + x8 + x9 + x10 + x11 + x12 + x13 + x14
    # The last sum as a reduction keeps the compiler from doing all of this in the layout that the
    # result is needed in, where many threads have the same blocks.
    return tl.sum(tl.join(total, x15), 2)


@triton.jit
def _split_4(x, M: tl.constexpr, N: tl.constexpr):
    """The four tiles [M, N] of x [M, N, 4]."""
    even, odd = tl.split(tl.reshape(x, (M, N, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3
