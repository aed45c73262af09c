"""E8M0, the power-of-two block scale of MX formats: byte b means 2^(b-127), 255 is NaN."""

import triton
import triton.language as tl


@triton.jit
def e8m0_code_up(x):
    """Byte of the smallest E8M0 value that is not below x.

    x: float32, x >= 0 (the sign is ignored). Returns int32 in 0..255: 0 up to 2^-127, 254 above
    2^126 including Inf, and 255 for NaN.
    """
    magnitude = x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    # Rounds up: any mantissa bit carries into the exponent. Only NaN carries to 256.
    code = ((magnitude + 0x7FFFFF) >> 23).to(tl.int32)
    code = tl.where(magnitude <= 0x400000, 0, code)
    return tl.where(code == 256, 255, tl.minimum(code, 254))


@triton.jit
def e8m0_value(code):
    """2^(code-127), exactly. code: an integer type, 0..255. Returns float32; NaN for 255."""
    code = code.to(tl.int32)
    # 2^-127 is subnormal in FP32, so it cannot be built from the exponent field.
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_reciprocal(code):
    """2^(127-code), exactly. code: an integer type, 0..255. Returns float32; NaN for 255."""
    code = code.to(tl.int32)
    bits = tl.where(code == 254, 0x00400000, (254 - code) << 23)
    return tl.where(code == 255, 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
