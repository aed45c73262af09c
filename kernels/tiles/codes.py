"""Number formats on tiles, with the same bits everywhere: codes, values and words of codes."""

from typing import Any

import triton
import triton.language as tl

# Four numbers to a word of E4M3 codes, and back.
_FOUR_CODES = tl.constexpr(
    "{ .reg .b16 low, high;"
    " cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
    " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
    " mov.b32 $0, {low, high}; }"
)
_CODE = tl.constexpr(
    "{ .reg .b16 code; cvt.rn.satfinite.e4m3x2.f32 code, 0f00000000, $1; cvt.u32.u16 $0, code; }"
)
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


def capability(_semantic: Any = None) -> int | tl.constexpr:
    """The compute capability that the kernel is compiled for, 90 for 9.0; 0 if it is interpreted.

    Triton calls a builtin with the code generator's ``_semantic``, whose options describe the
    target of this compilation, which need not be the GPU of this machine; the interpreter without.
    Triton's cache key does not include builtins: after a change here, clear Triton's cache.
    """
    if _semantic is None:
        return 0
    return tl.constexpr(int(_semantic.builder.options.arch.removeprefix("sm")))


# The attribute that Triton's code generator looks for. The decorator `triton.language.core.builtin`
# would set it too, but it refuses calls from the interpreter.
capability.__triton_builtin__ = True


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Round a float32 tile to DTYPE, to nearest with ties to even; NaN in BF16 is 0x7FFF."""
    if DTYPE == tl.bfloat16 and capability() == 0:
        # On the bits, because the interpreter's cast truncates (Triton 3.6 to 3.9).
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FFF)
        y = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def to_float32(x):
    """Widen a tile of any floating type up to FP32, exactly."""
    if x.dtype == tl.bfloat16 and capability() == 0:
        # On the bits, because the interpreter's cast loses subnormals (Triton 3.6 to 3.9).
        y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def _larger(x, y):
    """The larger one of two numbers; NaN if any is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax(x, AXIS: tl.constexpr, KEEPS_NAN: tl.constexpr):
    """Largest magnitude along an axis; NaN if any is NaN (KEEPS_NAN), or 0 if all are."""
    if not KEEPS_NAN:
        if capability() == 0:
            x = tl.where(x == x, x, 0.0)  # NumPy warns of NaN alone
        largest = tl.max(tl.abs(x), AXIS)
        largest = tl.maximum(largest, 0.0)  # the number, if the other one is NaN
    elif capability() > 0:
        largest = tl.reduce(tl.abs(x), AXIS, _larger)
    else:
        # As integers NaN is the largest; the interpreter reduces by a function element by element.
        bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), AXIS)
        largest = bits.to(tl.float32, bitcast=True)
    return largest


@triton.jit
def e2m1_code(x, VALUES: tl.constexpr):
    """Code of the nearest E2M1 value, ties to the even code; and that value if VALUES.

    E2M1 has 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign bit, codes 0 to 15. x: float32. Returns int32,
    and float32 with the sign of x.
    Magnitudes above 6, and Inf, saturate to 6 with their sign. NaN becomes +6, and zero keeps its
    sign.
    """
    magnitude, bits, value = tl.abs(x), x.to(tl.int32, bitcast=True), x
    if VALUES:
        # Adding 2^22 times a number's power of two leaves a multiple of half of that, ties to even.
        # For Inf and NaN the sum is negative, so the maximum is 2^22, which changes neither.
        rounder = tl.maximum((bits & 0x7F800000) + (22 << 23), 0x3F800000 + (22 << 23))
        rounder = rounder.to(tl.float32, bitcast=True)
        value = ((magnitude + rounder) - rounder).to(tl.uint32, bitcast=True)
        # As unsigned integers, all NaN are above 6.
        value = tl.minimum(value, 0x40C00000).to(tl.float32, bitcast=True)
        # The reverse of :func:`e2m1_value`.
        code = (value * 1.1754943508222875e-38).to(tl.int32, bitcast=True) >> 22
        value = value.to(tl.int32, bitcast=True) | (bits & -0x80000000)
        value = value.to(tl.float32, bitcast=True)
    else:
        # Half the code is min(a, a/2 + 1, a/4 + 2, 3.5), lines that meet at 2, 4 and 6. Adding
        # 2^22, where FP32 has a spacing of 0.5, rounds each to even and leaves the code in the low
        # bits. Choosing a line by comparisons first would take fewer instructions, but slower ones.
        low = (magnitude + 4194304.0).to(tl.uint32, bitcast=True)
        middle = (magnitude * 0.5 + 4194305.0).to(tl.uint32, bitcast=True)
        high = (magnitude * 0.25 + 4194306.0).to(tl.uint32, bitcast=True)
        # An unsigned integer minimum: the interpreter's float minimum treats NaN differently.
        code = tl.minimum(tl.minimum(low, middle), tl.minimum(high, 0x4A800007)).to(tl.int32) & 7
    # As signed integers, -Inf and all negative numbers are below the negative NaNs.
    return code | tl.where(bits <= -0x800000, 8, 0), value


@triton.jit
def e2m1_value(code):
    """Value of an E2M1 code in the highest bits of ``code``, an int32. Returns float32, exact."""
    # Moves exponent and mantissa to FP32's fields, even for exponent zero, then multiplies by 2^126
    # to correct the bias: the smallest normal number is 2^-126 in FP32 and 1 in E2M1.
    bits = (code >> 6) & -0x7E400000  # the arithmetic shift keeps the sign
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


# Conversions to and from E4M3 are instructions from compute capability 9.0 on. 8.0 has none, for
# 8.9 Triton rounds twice (3.6, 3.7), and its interpreter gets ties, carries and subnormals wrong
# (3.6 to 3.9). They convert words here, or numbers alone: ptxas 12.9, which Triton 3.6 to 3.8 ship,
# mixes up the bytes of values converted in pairs that are stored twice (plain and transposed) or
# packed into words (triton issue 11111; seen on an H200 with Triton 3.6).


@triton.jit
def e4m3_code(x, WHOLE: tl.constexpr = False, ALONE: tl.constexpr = False):
    """Bits, uint8, of the nearest E4M3 value (at most 448), ties to even.

    x: float32. Overflow and Inf saturate to 448 with their sign, NaN becomes 0x7F, and zero keeps
    its sign. WHOLE: bytes are stored once and in words. ALONE: they never become words.
    """
    if WHOLE and capability() >= 90:
        code = tl.inline_asm_elementwise(
            _FOUR_CODES, "=r,f,f,f,f", [x], dtype=tl.uint8, is_pure=True, pack=4
        )
    elif ALONE and capability() >= 90:
        code = tl.inline_asm_elementwise(
            _CODE, "=r,f", [x], dtype=tl.uint32, is_pure=True, pack=1
        ).to(tl.uint8)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # at most 448, even for Inf and NaN
        # Below 2^-6 the spacing is 2^-9. Adding 2^14 rounds to it and leaves the code in the low
        # bits.
        subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
        normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        code = tl.where(magnitude < 0x3C800000, subnormal - 0x46800000, normal - (120 << 3))
        code = tl.where(x == x, code, 0x7F)
        # As signed integers, -Inf and all negative numbers are below the negative NaNs.
        code = (code | tl.where(bits <= -0x800000, 0x80, 0)).to(tl.uint8)
    return code


@triton.jit
def e4m3_words(x, R: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr = True):
    """Codes of neighbouring columns packed in words, as by :func:`pack_words`.

    x: float32 [R, C]. Returns uint32 [R, C / 4]. WHOLE: words are not split into bytes again.
    """
    if WHOLE and capability() >= 90:
        even, odd = tl.split(tl.reshape(x, (R, C // 4, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        words = tl.inline_asm_elementwise(
            _FOUR_CODES, "=r,f,f,f,f", [x0, x1, x2, x3], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        words = pack_words(e4m3_code(x), 8, R, C)
    return words


@triton.jit
def e4m3_word_values(words, R: tl.constexpr, C: tl.constexpr):
    """The float32 values [R, C] of codes in words [R, C / 4] by :func:`e4m3_words`."""
    if capability() >= 90:
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
        values = e4m3_value(bytes_of(words, R, C))
    return tl.reshape(values, (R, C))


@triton.jit
def e4m3_value(bits):
    """Value of E4M3 bits. bits: uint8. Returns float32, exact; NaN for 0x7F and 0xFF."""
    if capability() >= 90:
        value = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        code = bits.to(tl.int32)
        # As of E2M1; times 2^120.
        value = (((code & 0x80) << 24) | ((code & 0x7F) << 20)).to(tl.float32, bitcast=True)
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), value * 1.329227995784916e36)
    return value


@triton.jit
def e8m0_code_up(x):
    """Byte of the smallest E8M0 value that is not below x; byte b means 2^(b-127), 255 is NaN.

    x: float32, x >= 0 (the sign is ignored). Returns int32 in 0..255: 0 up to 2^-127, 254 above
    2^126 including Inf, and 255 for NaN.
    """
    magnitude = x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    # Rounds up: any mantissa bit carries into the exponent. Only NaN carries to 256.
    code = ((magnitude + 0x7FFFFF) >> 23).to(tl.int32)
    code = tl.where(magnitude <= 0x400000, 0, code)
    return tl.where(code == 256, 255, tl.minimum(code, 254))


@triton.jit
def e8m0_value(code, INVERTED: tl.constexpr = False):
    """2^(code-127), exactly, or one over that. code: integers, 0..255. NaN for 255."""
    code = code.to(tl.int32)
    exponent = 254 - code if INVERTED else code
    # 2^-127 is subnormal in FP32, so it cannot be built from the exponent field.
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    return tl.where(code == 255, 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def pack_words(code, BITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Pack the codes of neighbouring columns into words, the first code in the lowest bits.

    code: integers [R, C] below 2^BITS, 4 or 8. Returns uint32 [R, C * BITS / 32].
    """
    PER_WORD: tl.constexpr = 32 // BITS
    fields = tl.reshape(code.to(tl.uint32), (R, C // PER_WORD, PER_WORD))
    shifts = BITS * tl.arange(0, PER_WORD).to(tl.uint32)
    return tl.sum(fields << shifts[None, None, :], 2)


@triton.jit
def bytes_of(words, R: tl.constexpr, C: tl.constexpr):
    """The bytes, uint8 [R, C], of words [R, C / 4], or of what is bytes already."""
    code = words
    if words.dtype != tl.uint8:
        code = (words[:, :, None] >> (8 * tl.arange(0, 4).to(tl.uint32))[None, None, :]) & 0xFF
        code = tl.reshape(code.to(tl.uint8), (R, C))
    return code


@triton.jit
def _exchange(pairs, SHIFT: tl.constexpr, LOW: tl.constexpr):
    """Swap the fields in the high bits of the first word with those in the low bits of the second.

    pairs: uint32 [..., 2]. LOW: mask of the fields that lie SHIFT bits below their partners.
    """
    HIGH: tl.constexpr = LOW << SHIFT
    first, second = tl.split(pairs)
    return tl.join(
        (first & LOW) | ((second & LOW) << SHIFT), ((first & HIGH) >> SHIFT) | (second & HIGH)
    )


@triton.jit
def transpose_words(words, BITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Transpose packed codes: words of neighbouring columns to words of neighbouring rows.

    words: uint32 [R, C * BITS / 32] of codes [R, C]. Returns uint32 [C, R * BITS / 32].
    In the transposed matrix a tile covers only a short piece of each row, and stores of such pieces
    take far more time than their size suggests. So several tiles are transposed together.
    """
    # Within a square of codes, the bits of the row index and of the column index are swapped one
    # pair at a time. Each permute moves the row bit to the last dimension for the exchange.
    if BITS == 4:
        x = tl.reshape(words, (R // 8, 2, 2, 2, C // 8))
        x = _exchange(tl.permute(x, (0, 4, 1, 2, 3)), 4, 0x0F0F0F0F)
        x = _exchange(tl.permute(x, (0, 1, 2, 4, 3)), 8, 0x00FF00FF)
        x = _exchange(tl.permute(x, (0, 1, 3, 4, 2)), 16, 0x0000FFFF)
        x = tl.reshape(tl.permute(x, (1, 4, 3, 2, 0)), (C, R // 8))
    else:
        x = tl.reshape(words, (R // 4, 2, 2, C // 4))
        x = _exchange(tl.permute(x, (0, 3, 1, 2)), 8, 0x00FF00FF)
        x = _exchange(tl.permute(x, (0, 1, 3, 2)), 16, 0x0000FFFF)
        x = tl.reshape(tl.permute(x, (1, 3, 2, 0)), (C, R // 4))
    return x
