"""E4M3, the 8-bit float of MXFP8 and Float8Block codes and of NVFP4 block scales (at most 448)."""

import triton
import triton.language as tl

from fp4adam.kernels.tiles.target import is_compiled_for_sm90
from fp4adam.kernels.tiles.words import pack_words

# float8e4nv is used only if compiled for sm_90 or later: sm_80 does not support it, sm_89 rounds
# twice (Triton 3.6, 3.7), and the interpreter gets ties, carries and subnormals wrong (3.6 to 3.9).

# Converts four numbers, in pairs, to one word.
_FOUR_CODES = tl.constexpr(
    "{ .reg .b16 low, high;"
    " cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
    " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
    " mov.b32 $0, {low, high}; }"
)


# Values of the four codes of a word.
_FOUR_VALUES = tl.constexpr(
    "{ .reg .b16 low, high, h0, h1, h2, h3; .reg .b32 a, b;"
    " mov.b32 {low, high}, $4;"
    " cvt.rn.f16x2.e4m3x2 a, low;"
    " cvt.rn.f16x2.e4m3x2 b, high;"
    " mov.b32 {h0, h1}, a;"
    " mov.b32 {h2, h3}, b;"
    " cvt.f32.f16 $0, h0;"
    " cvt.f32.f16 $1, h1;"
    " cvt.f32.f16 $2, h2;"
    " cvt.f32.f16 $3, h3; }"
)


@triton.jit
def e4m3_code(x, HARDWARE: tl.constexpr = True):
    """Bits of the nearest E4M3 value, ties to even.

    x: float32. Returns uint8. Overflow and Inf saturate to 448 with their sign, NaN becomes 0x7F,
    and zero keeps its sign. HARDWARE: use the conversion instruction on targets where it is right.

    Codes that are stored twice (plain and transposed) or packed into words need HARDWARE=False:
    otherwise ptxas 12.9, which Triton 3.6 to 3.8 ship, mixes up the bytes of converted values
    (triton issue 11111; seen on an H200 with Triton 3.6).
    """
    if HARDWARE and is_compiled_for_sm90():
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # at most 448, even for Inf and NaN
        # Below 2^-6 the spacing is 2^-9. Adding 2^14 rounds to it and leaves the code in the low
        # bits.
        subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
        normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        code = tl.where(magnitude < 0x3C800000, subnormal - 0x46800000, normal - (120 << 3))
        code = tl.where(x == x, code, 0x7F)
        # As signed integers, -Inf and all negative numbers are below the negative NaNs, so this
        # comparison drops the sign of NaN.
        code = (code | tl.where(bits <= -0x800000, 0x80, 0)).to(tl.uint8)
    return code


@triton.jit
def e4m3_word(x0, x1, x2, x3, HARDWARE: tl.constexpr = True):
    """Codes of four float32 tiles packed in words, those of ``x0`` in the lowest bits.

    Returns a uint32 tile. HARDWARE: use the conversion instruction on targets where it is right;
    only for words that are not split into bytes again, because of the ptxas error described in
    :func:`e4m3_code`.
    """
    if HARDWARE and is_compiled_for_sm90():
        # Converts pairs and joins them in one asm block, so the codes never exist as single bytes.
        words = tl.inline_asm_elementwise(
            _FOUR_CODES,
            "=r,f,f,f,f",
            [x0, x1, x2, x3],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        low = e4m3_code(x0, False).to(tl.uint32) | (e4m3_code(x1, False).to(tl.uint32) << 8)
        high = e4m3_code(x2, False).to(tl.uint32) | (e4m3_code(x3, False).to(tl.uint32) << 8)
        words = low | (high << 16)
    return words


@triton.jit
def e4m3_words(x, R: tl.constexpr, C: tl.constexpr, HARDWARE: tl.constexpr = True):
    """Codes of neighbouring columns packed in words, as by ``pack_words``.

    x: float32 [R, C]. Returns uint32 [R, C / 4]. HARDWARE: as for :func:`e4m3_word`.
    """
    if HARDWARE and is_compiled_for_sm90():
        even, odd = tl.split(tl.reshape(x, (R, C // 4, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        words = e4m3_word(x0, x1, x2, x3)
    else:
        words = pack_words(e4m3_code(x, HARDWARE=False), 8, R, C)
    return words


@triton.jit
def e4m3_word_values(words, R: tl.constexpr, C: tl.constexpr):
    """The float32 values [R, C] of codes in words [R, C / 4] by :func:`e4m3_words`."""
    if is_compiled_for_sm90():
        # The codes never exist as single bytes, as in :func:`e4m3_word`.
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            _FOUR_VALUES,
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        values = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    else:
        code = (words[:, :, None] >> (8 * tl.arange(0, 4).to(tl.uint32))[None, None, :]) & 0xFF
        values = e4m3_value(code.to(tl.uint8))
    return tl.reshape(values, (R, C))


@triton.jit
def e4m3_bytes(x, HARDWARE: tl.constexpr):
    """Codes of float32 numbers that E4M3 has as zero or as normal numbers.

    x: float32 [R, C]. Returns uint8 [R, C]. HARDWARE: use the conversion instruction on targets
    where it is right; only for bytes that are stored once and in words, because of the ptxas error
    described in :func:`e4m3_code`.
    """
    if HARDWARE and is_compiled_for_sm90():
        # Four at a time, so that the codes never exist as single bytes.
        code = tl.inline_asm_elementwise(
            _FOUR_CODES,
            "=r,f,f,f,f",
            [x],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = tl.maximum(((bits >> 20) & 0x7FF) - (120 << 3), 0)
        code = (magnitude | ((bits >> 24) & 0x80)).to(tl.uint8)
    return code


@triton.jit
def e4m3_value(bits):
    """Value of E4M3 bits. bits: uint8. Returns float32, exact; NaN for 0x7F and 0xFF."""
    if is_compiled_for_sm90():
        value = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        code = bits.to(tl.int32)
        # Moves exponent and mantissa to FP32's fields, even for exponent zero, then multiplies by
        # 2^120 to correct the bias.
        value = (((code & 0x80) << 24) | ((code & 0x7F) << 20)).to(tl.float32, bitcast=True)
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), value * 1.329227995784916e36)
    return value
