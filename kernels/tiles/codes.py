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
_FOUR_E5M2 = tl.constexpr(_FOUR_CODES.value.replace("e4m3", "e5m2"))
# Likewise from numbers scaled by 2^-8, cut in FP16 to the bits of a mask. What is subnormal there
# becomes zero.
_FOUR_CUT_CODES = tl.constexpr(
    "{ .reg .b32 a, b, c; .reg .b16 low, high; mov.b32 c, 0x5C005C00;"
    " cvt.rz.f16x2.f32 a, $2, $1; and.b32 a, a, $5; mul.rn.ftz.f16x2 a, a, c;"
    " cvt.rz.f16x2.f32 b, $4, $3; and.b32 b, b, $7; mul.rn.ftz.f16x2 b, b, c;"
    " cvt.rn.satfinite.e4m3x2.f16x2 low, a; cvt.rn.satfinite.e4m3x2.f16x2 high, b;"
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


def _remainder_assembly(powers: int) -> str:
    """PTX for four E2M1 codes with int8 remainders, by :func:`e2m1_with_remainders`.

    Operands are values, products, the codes, and the remainders. Numbers are made in FP16, of whose
    zeros and powers of two ``powers`` has the upper bytes, by code: 2^10 times as much.
    """
    lines = [
        ".reg .b32 c, v, p, x, y, z, n; .reg .b16 low, high;",
        "cvt.u32.u16 c, $8; prmt.b32 n, 0x80808080, 0x80808080, c; shl.b32 n, n, 7;",
        "and.b32 c, c, 0x7777; prmt.b32 v, 0x3E3C3800, 0x46444240, c;",
        "lop3.b32 v, v, n, 0x80808080, 0xD8;",
        f"prmt.b32 p, 0x64646464, {powers}, c; xor.b32 y, $9, 0x80808080;",
    ]
    for i, value, product in ((0, "0x1404", "0x5140"), (2, "0x3424", "0x7362")):
        lines += [
            f"prmt.b32 x, v, 0, {value}; mov.b32 {{low, high}}, x;",
            f"cvt.f32.f16 ${i}, low; cvt.f32.f16 ${i + 1}, high;",
            # 1024 + byte, less 1152; NaN if the byte is zero.
            f"prmt.b32 x, y, p, {product}; and.b32 z, x, 0xFF00FF00;",
            "set.eq.u32.f16x2 n, x, z; or.b32 z, z, 0x80808080; add.rn.f16x2 x, x, z;",
            "or.b32 x, x, n; mov.b32 {low, high}, x;",
            f"cvt.f32.f16 ${i + 4}, low; cvt.f32.f16 ${i + 5}, high;",
        ]
    return "{ " + " ".join(lines) + " }"


_REMAINDERS = tl.constexpr(_remainder_assembly(0x6C6C6868))
_CAPPED_REMAINDERS = tl.constexpr(_remainder_assembly(0x706C6868))


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
    elif capability() != 0:
        largest = tl.reduce(tl.abs(x), AXIS, _larger)
    else:
        # As integers NaN is the largest; the interpreter reduces by a function element by element.
        bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), AXIS)
        largest = bits.to(tl.float32, bitcast=True)
    return largest


@triton.jit
def raise_amax(amax_ptr, amax):
    """Raise the float32 number at ``amax_ptr`` to ``amax``; neither is negative or NaN."""
    # The bits of such numbers order as integers do; an integer maximum is one atomic, a float
    # maximum two.
    amax_ptr = amax_ptr.to(tl.pointer_type(tl.int32))
    tl.atomic_max(amax_ptr, amax.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def e2m1_code(x):
    """Code of the nearest E2M1 value, ties to the even code; and that value.

    E2M1 has 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign bit, codes 0 to 15. x: float32. Returns int32,
    and float32 with the sign of x.
    Magnitudes above 6, and Inf, saturate to 6 with their sign. NaN becomes +6, and zero keeps its
    sign.
    """
    magnitude, bits = tl.abs(x), x.to(tl.int32, bitcast=True)
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
    # As signed integers, -Inf and all negative numbers are below the negative NaNs.
    return code | tl.where(bits <= -0x800000, 8, 0), value.to(tl.float32, bitcast=True)


@triton.jit
def e2m1_words(x, R: tl.constexpr, C: tl.constexpr):
    """Codes packed in words, as by :func:`pack_words`, and their values; of products [R, C].

    Products, because NaN has no sign then, on a GPU.
    """
    code, value = e2m1_code(x)
    if capability() >= 90:
        # E5M2 has the bits of E2M1, but for the sign's place, if its least power of two means 1.
        even, odd = tl.split(tl.reshape(value * 6.103515625e-05, (R, C // 2, 2)))
        even = _float8_words(even, _FOUR_E5M2, R, C // 2)
        odd = _float8_words(odd, _FOUR_E5M2, R, C // 2)
        low = (even >> 1) & 0x07070707 | (even >> 4) & 0x08080808
        words = low | (odd << 3) & 0x70707070 | odd & 0x80808080
    else:
        words = pack_words(code, 4, R, C)
    return words, value


@triton.jit
def e2m1_value(code):
    """Value of an E2M1 code in the highest bits of ``code``, an int32. Returns float32, exact."""
    # Moves exponent and mantissa to FP32's fields, even for exponent zero, then multiplies by 2^126
    # to correct the bias: the smallest normal number is 2^-126 in FP32 and 1 in E2M1.
    bits = (code >> 6) & -0x7E400000  # the arithmetic shift keeps the sign
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _joined(x0, x1, x2, x3, R: tl.constexpr, C: tl.constexpr):
    """Every fourth column each, as [R, C]."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (R, C))


@triton.jit
def e2m1_with_remainders(words, remainders, CAPS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Values of E2M1 codes, and their powers of two times int8 remainders; compiled only.

    words: uint16 [R, C / 4], of codes. remainders: uint32 [R, C / 4], of bytes; -128 gives NaN.
    CAPS: whether the power of 6 is 8. Returns float32 [R, C] twice.
    """
    assembly: tl.constexpr = _CAPPED_REMAINDERS if CAPS else _REMAINDERS
    v0, v1, v2, v3, p0, p1, p2, p3 = tl.inline_asm_elementwise(
        assembly, "=f,=f,=f,=f,=f,=f,=f,=f,h,r", [words, remainders], dtype=(tl.float32,) * 8,
        is_pure=True, pack=1,
    )  # fmt: skip
    return _joined(v0, v1, v2, v3, R, C), _joined(p0, p1, p2, p3, R, C)


# Conversions to and from E4M3 are instructions from compute capability 9.0 on. 8.0 has none, for
# 8.9 Triton rounds twice (3.6, 3.7), and its interpreter gets ties, carries and subnormals wrong
# (3.6 to 3.9). They convert words here, or numbers alone: ptxas 12.9, which Triton 3.6 to 3.8 ship,
# mixes up the bytes of values converted in pairs that are stored twice (plain and transposed) or
# packed into words (triton issue 11111; seen on an H200 with Triton 3.6).


@triton.jit
def e4m3_code(x, ALONE: tl.constexpr = False):
    """Bits, uint8, of the nearest E4M3 value (at most 448), ties to even.

    x: float32. Overflow and Inf saturate to 448 with their sign, NaN becomes 0x7F, and zero keeps
    its sign. ALONE: bytes never become words.
    """
    if ALONE and capability() >= 90:
        code = tl.inline_asm_elementwise(
            _CODE, "=r,f", [x], dtype=tl.uint32, is_pure=True, pack=1
        ).to(tl.uint8)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # at most 448, even for Inf and NaN
        # Below 2^-6 the spacing is 2^-9. Adding 2^14 rounds to it and leaves the code in the low
        # byte, which is all that is kept in the end.
        subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
        normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        code = tl.where(magnitude < 0x3C800000, subnormal, normal - (120 << 3))
        code = tl.where(x == x, code, 0x7F)
        # As signed integers, -Inf and all negative numbers are below the negative NaNs.
        code = (code | tl.where(bits <= -0x800000, 0x80, 0)).to(tl.uint8)
    return code


@triton.jit
def cut_e4m3_code(x, keep):
    """Bits, uint8, of 2^8 times float32 numbers, cut to E4M3, or zero below its least power of two.

    keep: -(1 << 7) twice, as int32, or 0 for code 0. For compute capability 9.0 on, where bytes are
    stored once and in words.
    """
    return tl.inline_asm_elementwise(
        _FOUR_CUT_CODES, "=r,f,f,f,f,r,r,r,r", [x, keep], dtype=tl.uint8, is_pure=True, pack=4
    )


@triton.jit
def _float8_words(x, ASSEMBLY: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Words of codes of four neighbouring columns."""
    even, odd = tl.split(tl.reshape(x, (R, C // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return tl.inline_asm_elementwise(
        ASSEMBLY, "=r,f,f,f,f", [x0, x1, x2, x3], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def e4m3_words(x, R: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr = True):
    """Codes of neighbouring columns packed in words, as by :func:`pack_words`.

    x: float32 [R, C]. Returns uint32 [R, C / 4]. WHOLE: words are not split into bytes again.
    """
    if WHOLE and capability() >= 90:
        words = _float8_words(x, _FOUR_CODES, R, C)
    else:
        words = pack_words(e4m3_code(x), 8, R, C)
    return words


@triton.jit
def e4m3_word_values(words, R: tl.constexpr, C: tl.constexpr):
    """The float32 values [R, C] of codes in words [R, C / 4] by :func:`e4m3_words`."""
    if capability() >= 90:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            _FOUR_VALUES, "=f,=f,=f,=f,r", [words], dtype=(tl.float32,) * 4, is_pure=True, pack=1
        )
        values = _joined(x0, x1, x2, x3, R, C)
    else:
        values = e4m3_value(bytes_of(words, R, C))
    return values


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


@triton.constexpr_function
def _byte_assembly(FIRST, FLIPS):
    """PTX for four numbers of :func:`byte_at`."""
    select, shift = 0x5410 + FIRST // 8 * 0x1111, FIRST % 8
    return (
        f"{{ .reg .b32 low, high; prmt.b32 low, $1, $2, {select}; prmt.b32 high, $3, $4, {select};"
        f" shr.u32 low, low, {shift}; shr.u32 high, high, {shift};"
        f" prmt.b32 low, low, high, 0x6420; xor.b32 $0, low, {FLIPS * 0x01010101}; }}"
    )


@triton.jit
def byte_at(x, FIRST: tl.constexpr, FLIPS: tl.constexpr = 0):
    """Eight bits of int32 numbers from bit FIRST on, uint8, with those of FLIPS inverted."""
    if capability() != 0:
        assembly: tl.constexpr = _byte_assembly(FIRST, FLIPS)
        byte = tl.inline_asm_elementwise(
            assembly, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4
        )
    else:
        byte = ((x >> FIRST) ^ FLIPS).to(tl.uint8)
    return byte


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
