"""Rounding to BF16 and other dtypes of parameters, and widening."""

import triton
import triton.language as tl

from fp4adam.kernels.tiles.target import is_compiled


@triton.jit
def round_to_bfloat16(x):
    """Nearest BF16 value of an FP32 tile, ties to even; NaN becomes 0x7FFF, as in PTX.

    x: float32. Returns bfloat16. Inf stays, values past the largest BF16 round to Inf.
    """
    if is_compiled():
        y = x.to(tl.bfloat16)
    else:
        # The interpreter's cast truncates (Triton 3.6 to 3.9).
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FFF)
        y = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return y


@triton.jit
def to_float32(x):
    """FP32 values of a tile of any floating type, exact."""
    if x.dtype == tl.bfloat16:
        if is_compiled():
            y = x.to(tl.float32)
        else:
            # The interpreter's cast loses subnormals (Triton 3.6 to 3.9).
            y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Round a float32 tile to DTYPE, to nearest even."""
    if DTYPE == tl.bfloat16:
        y = round_to_bfloat16(x)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def round_through(x, DTYPE: tl.constexpr):
    """Round a float32 tile to DTYPE and widen it again."""
    return to_float32(round_to(x, DTYPE))
