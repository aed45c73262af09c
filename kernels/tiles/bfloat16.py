"""Rounding of FP32 tiles to BF16 and other parameter dtypes, and widening to FP32."""

import triton
import triton.language as tl

from fp4adam.kernels.tiles.target import is_compiled


@triton.jit
def round_to_bfloat16(x):
    """Round an FP32 tile to the nearest BF16, ties to even; NaN becomes 0x7FFF, as in PTX.

    x: float32. Returns bfloat16. Inf stays Inf, and values past the largest BF16 round to Inf.
    """
    if is_compiled():
        y = x.to(tl.bfloat16)
    else:
        # On the bits, because the interpreter's cast truncates (Triton 3.6 to 3.9).
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FFF)
        y = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return y


@triton.jit
def to_float32(x):
    """Widen a tile of any floating type up to FP32, exactly."""
    if x.dtype == tl.bfloat16:
        if is_compiled():
            y = x.to(tl.float32)
        else:
            # On the bits, because the interpreter's cast loses subnormals (Triton 3.6 to 3.9).
            y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def pairs_to_float32(x):
    """Like :func:`to_float32`, in fewer instructions where threads have pairs of neighbours."""
    if (x.dtype == tl.bfloat16) and is_compiled():
        # Compilers move the second of a pair down before they move it up again.
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        y = to_float32(x)
    return y


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Round a float32 tile to DTYPE, to nearest with ties to even."""
    if DTYPE == tl.bfloat16:
        y = round_to_bfloat16(x)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def round_through(x, DTYPE: tl.constexpr):
    """Round a float32 tile to DTYPE and widen it to float32 again."""
    return to_float32(round_to(x, DTYPE))
