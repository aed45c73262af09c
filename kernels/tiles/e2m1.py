"""E2M1, the 4-bit float of NVFP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign bit (codes 0..15)."""

import triton
import triton.language as tl


@triton.jit
def e2m1_code(x):
    """Code of the nearest E2M1 value, ties to the even code.

    x: float32. Returns int32 in 0..15. Magnitudes above 6, and Inf, saturate to 6 with their sign.
    NaN becomes +6, and zero keeps its sign.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.abs(x)
    # Half the code is min(a, a/2 + 1, a/4 + 2, 3.5), lines that meet at 2, 4 and 6. Adding 2^22,
    # where FP32 has a spacing of 0.5, rounds each to even and leaves the code in the low bits.
    # Choosing a line by comparisons first would take fewer instructions, but more of the slow kind.
    low = (magnitude + 4194304.0).to(tl.uint32, bitcast=True)
    middle = (magnitude * 0.5 + 4194305.0).to(tl.uint32, bitcast=True)
    high = (magnitude * 0.25 + 4194306.0).to(tl.uint32, bitcast=True)
    # An unsigned integer minimum, because the interpreter's float minimum treats NaN differently.
    code = tl.minimum(tl.minimum(low, middle), tl.minimum(high, 0x4A800007)).to(tl.int32) & 7
    # As signed integers, -Inf and all negative numbers are below the negative NaNs, so this
    # comparison drops the sign of NaN.
    return code | tl.where(bits <= -0x800000, 8, 0)


@triton.jit
def e2m1_round(x):
    """The codes of :func:`e2m1_code`, and their values, float32, with the sign of x."""
    bits = x.to(tl.int32, bitcast=True)
    # Adding 2^22 times a number's power of two leaves a multiple of half of that, ties to even.
    rounder = tl.maximum(bits & 0x7F800000, 0x3F800000) + (22 << 23)
    rounder = rounder.to(tl.float32, bitcast=True)
    value = (tl.abs(x) + rounder) - rounder
    # As unsigned integers, all NaN are above 6.
    value = tl.minimum(value.to(tl.uint32, bitcast=True), 0x40C00000).to(tl.float32, bitcast=True)
    # The reverse of :func:`e2m1_value`.
    code = (value * 1.1754943508222875e-38).to(tl.int32, bitcast=True) >> 22
    code |= tl.where(bits <= -0x800000, 8, 0)
    signed = value.to(tl.int32, bitcast=True) | (bits & -0x80000000)
    return code, signed.to(tl.float32, bitcast=True)


@triton.jit
def e2m1_value(code):
    """Value of an E2M1 code. code: an integer type, 0..15. Returns float32, exact."""
    code = code.to(tl.int32)
    # Moves exponent and mantissa to FP32's fields, even for exponent zero, then multiplies by 2^126
    # to correct the bias: the smallest normal number is 2^-126 in FP32 and 1 in E2M1.
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
