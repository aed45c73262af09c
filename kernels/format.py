"""A format on tiles: scales and codes of blocks, and back.

Formats differ in four things: the number format of codes, that of scales, the size of blocks, and
what is stored of both directions. A :class:`Format` names them, and the functions here dispatch on
the names, so that steps, casts, previews and fake quantization are one kernel each for all formats.

None of these functions stores anything; ``store.py`` does.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fp4adam.kernels.tiles.codes import (
    amax,
    byte_at,
    capability,
    e2m1_value,
    e2m1_words,
    e4m3_code,
    e4m3_value,
    e4m3_word_values,
    e4m3_words,
    e8m0_code_up,
    e8m0_value,
)

CODE_BITS = {"e2m1": 4, "e4m3": 8}
FP32_MAX = tl.constexpr(3.4028234663852886e38)


class Format(NamedTuple):
    """A format, and what is written of a weight, as one compile-time argument.

    Only strings, numbers and flags, all of which are in Triton's cache key.

    Attributes:
        code: The number format of codes, "e2m1" or "e4m3".
        scale: That of block scales, "e4m3", "e8m0" or "float32"; "" if only tensors have one.
        block: Side of a square block, or length of one along a row or column.
        bits: Of a code.
        form: The form of the blocks of rowwise codes, for :func:`in_blocks`.
        rowwise: Whether to write codes with blocks along rows.
        columnwise: Whether to write codes with blocks along columns.
        square: Whether one scale per square block serves both directions.
        transposes: Whether columnwise codes are those of the transposed matrix. Square blocks
            whose codes need no transposition are stored once.
        swizzled: Whether to write swizzled scales too.
        tensor_amax: Where the amax of the tensor is: "preview" (in the slots of a preview, which
            gets reports), "stored", "history" (stored, and the next one is raised), "" if no scale
            needs it.
        rounding: What is added to the bits of an amax before its power of two is taken, for E8M0
            scales of E2M1 codes.
        caps: Whether the largest code, 6, stands for magnitudes up to 8.
        pow_2: Whether float32 scales are rounded down to powers of two.
        largest: The float32 scale to use where 448 / amax overflows.
    """

    code: str
    scale: str
    block: int
    bits: int
    form: str
    rowwise: bool
    columnwise: bool
    square: bool
    transposes: bool
    swizzled: bool = False
    tensor_amax: str = ""
    rounding: int = 0
    caps: bool = False
    pow_2: bool = False
    largest: float = FP32_MAX.value


class Part(NamedTuple):
    """Words of codes (uint32) and scales of a part of a tile, in both directions.

    Scales: uint8, or float32. Those of a square block are in ``row_scale`` alone. What a format
    does not have is a [1, 1] of zeros.
    """

    rows: Any
    row_scale: Any
    columns: Any
    column_scale: Any


@triton.jit
def in_blocks(x, B: tl.constexpr, FORM: tl.constexpr):
    """A tile [R, C] in blocks of ``B``, or of part of the rows of square ones.

    FORM: "square" gives [m, B, n, B], "row" [R, n, B], "column" [m, B, C], "tensor" [R, C].
    """
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    H: tl.constexpr = min(B, R)
    if FORM == "square":
        x = tl.reshape(x, (R // H, H, C // B, B))
    elif FORM == "row":
        x = tl.reshape(x, (R, C // B, B))
    elif FORM == "column":
        x = tl.reshape(x, (R // H, H, C))
    return x


@triton.jit
def per_element(factor, FORM: tl.constexpr):
    """One number per block, to be broadcast over blocks by :func:`in_blocks`."""
    if FORM == "square":
        factor = factor[:, None, :, None]
    elif FORM == "row":
        factor = factor[:, :, None]
    elif FORM == "column":
        factor = factor[:, None, :]
    return factor


@triton.jit
def amax_of_blocks(x, F: tl.constexpr, FORM: tl.constexpr):
    """The largest magnitudes of a float32 tile's blocks by :func:`in_blocks`.

    NaN does not count if codes have it. Else it is that of the block, whose scale shows it.
    """
    blocks = in_blocks(x, F.block, FORM)
    KEEPS: tl.constexpr = F.code != "e4m3"
    if FORM == "square":
        if blocks.shape[0] == 1 and blocks.shape[2] == 1:
            # At once, so that each thread reduces its own elements first. Triton 3.6 cannot so with
            # several blocks: it shuffles neighbouring lanes, which are not always of one block.
            x = tl.reshape(blocks, (1, 1, blocks.shape[1] * blocks.shape[3]))
            largest = amax(x, 2, KEEPS)
        else:
            largest = amax(amax(blocks, 3, KEEPS), 1, KEEPS)
    else:
        largest = amax(blocks, 2 if FORM == "row" else 1, KEEPS)
    return largest


@triton.jit
def float32_scale(amax, epsilon, LARGEST: tl.constexpr, POW_2: tl.constexpr):
    """Float32 factors from values to E4M3 codes, of blocks or tensors with these float32 amaxes.

    LARGEST: the factor to use if 448 / amax overflows. POW_2: round down to powers of two.
    """
    amax = tl.where(amax >= epsilon, amax, epsilon)  # epsilon also if all elements are NaN
    if POW_2:
        # 448 is 1.75 * 2^8, so the exponent of 448 / amax is 8 less that of amax, and one less if
        # amax has a larger mantissa than 1.75, which then carries into its exponent.
        bits = amax.to(tl.int32, bitcast=True)
        scale = (((127 + 8 + 127) << 23) - 2**32) - ((bits + 0x1FFFFF) & 0x7F800000)
        largest = tl.full((), LARGEST, tl.float32).to(tl.int32, bitcast=True) & 0x7F800000
        scale = tl.where(bits <= 0x3E00000, largest, scale)
        is_special = (bits - 1).to(tl.uint32, bitcast=True) >= 0x7F7FFFFF  # 0 or Inf
        scale = tl.where(is_special, 0x3F800000, scale).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(448.0, amax)
        scale = tl.where(scale == float("inf"), LARGEST, scale)
        scale = tl.where((amax == 0) | (amax == float("inf")), 1.0, scale)
    return scale


@triton.jit
def inverse_scale(scale, POW_2: tl.constexpr):
    """Reciprocals of factors by :func:`float32_scale`."""
    if POW_2:
        bits = 0x7F000000 - scale.to(tl.int32, bitcast=True)
        inverse = tl.maximum(bits, 0x400000).to(tl.float32, bitcast=True)  # at least 2^-127
    else:
        inverse = tl.div_rn(1.0, scale)
    return inverse


@triton.jit
def scale_of_amax(amax, tensor_amax, epsilon, F: tl.constexpr):
    """The scales that blocks with these float32 amaxes store, and the factors of their values.

    tensor_amax: float32 scalar, for E4M3 scales and where tensors alone have one. Each operation is
    one of ``encode`` of the quantizer.
    """
    if F.scale == "e4m3":
        encode = tl.div_rn(2688.0, tensor_amax)
        encode = tl.where((tensor_amax == 0) | (encode == 0), 1.0, tl.minimum(encode, FP32_MAX))
        decode = tl.div_rn(1.0, encode)
        scale = e4m3_code(amax * (encode * 0.16666666666666666))
        factor = tl.div_rn(1.0, e4m3_value(scale) * decode)
        factor = tl.where(factor > FP32_MAX, FP32_MAX, factor)  # NaN stays
    elif F.scale == "e8m0":
        if F.code != "e4m3":
            exponent = (amax.to(tl.int32, bitcast=True) + F.rounding) >> 23
            scale = tl.where(amax == amax, tl.maximum(exponent - 2, 0), 255)
        else:
            # 1 / 448 rounded to float32; a division would give the same scales.
            scale = e8m0_code_up(amax * 0.0022321429569274187)
        factor = e8m0_value(scale, True)
        scale = scale.to(tl.uint8)
    elif F.scale == "float32":
        factor = float32_scale(amax, epsilon, F.largest, F.pow_2)
        scale = inverse_scale(factor, F.pow_2)
    else:
        factor = float32_scale(tensor_amax, epsilon, F.largest, F.pow_2)
        scale = factor
    return scale, factor


@triton.jit
def decode_factor(scale, tensor_amax, epsilon, F: tl.constexpr):
    """What stored scales decode codes with: the factor, and that of the units of remainders."""
    of_units = scale
    if F.scale == "e4m3":
        factor = (e4m3_value(scale) * tensor_amax) * (1.0 / 2688.0)
        # In blocks with smaller scales codes may saturate, or all decode to 0.
        least = tl.maximum(scale.to(tl.int32), 4).to(tl.uint8)
        of_units = (e4m3_value(least) * tensor_amax) * (1.0 / 2688.0)
    else:
        if F.scale == "e8m0":
            factor = e8m0_value(scale)
        elif F.scale == "float32":
            factor = scale
        else:
            encode = float32_scale(tensor_amax, epsilon, F.largest, F.pow_2)
            factor = tl.div_rn(1.0, encode)
        of_units = factor
    return factor, of_units


@triton.jit
def code_words(x, CODE: tl.constexpr, WHOLE: tl.constexpr, WORDS: tl.constexpr):
    """Words of the codes nearest to a float32 tile [R, C], and their values.

    WHOLE: as for :func:`e4m3_words`. WORDS: if not, codes of 8 bits are bytes, uint8 [R, C].
    """
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    if CODE == "e2m1":
        words, value = e2m1_words(x, R, C)
    else:
        tl.static_assert(CODE == "e4m3", "CODE must be a number format of codes")
        words = e4m3_words(x, R, C, WHOLE) if WORDS else e4m3_code(x, ALONE=True)
        value = e4m3_word_values(words, R, C) if WORDS else e4m3_value(words)
    return words, value


@triton.jit
def code_values(code, CODE: tl.constexpr):
    """The float32 values of codes, one per element; of 4 bits in the highest of int32."""
    if CODE == "e2m1":
        value = e2m1_value(code)
    else:
        tl.static_assert(CODE == "e4m3", "CODE must be a number format of codes")
        value = e4m3_value(code)
    return value


@triton.jit
def encode_blocks(
    x, amax, tensor_amax, epsilon, F: tl.constexpr, FORM: tl.constexpr, WHOLE: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Encode a float32 part [BR, BC] in blocks of one form.

    amax: of the blocks; None to measure them. WHOLE, WORDS: as for :func:`code_words`. Returns
    words of codes, uint32 [BR, BC * bits / 32], or bytes; scales by :func:`scale_of_amax`; and the
    values of codes, [BR, BC].
    """
    blocks = in_blocks(x, F.block, FORM)
    if amax is None and FORM != "tensor":
        amax = amax_of_blocks(x, F, FORM)
    scale, factor = scale_of_amax(amax, tensor_amax, epsilon, F)
    scaled = tl.reshape(blocks * per_element(factor, FORM), (x.shape[0], x.shape[1]))
    CODE: tl.constexpr = F.code  # Triton 3.6 takes no plain strings as arguments
    words, value = code_words(scaled, CODE, WHOLE, WORDS)
    return words, scale, value


@triton.jit
def encode(
    x, row_amax, column_amax, tensor_amax, epsilon, F: tl.constexpr, WORDS: tl.constexpr = True
):
    """Encode a float32 part [BR, BC] in all directions.

    row_amax, column_amax: of blocks in either direction; None to measure them. WORDS: whether codes
    are stored in words; else those of 8 bits are bytes. Returns a :class:`Part`, and the values of
    rowwise codes, which the compiler removes where nothing uses them.
    """
    FORM: tl.constexpr = F.form
    # ``store_codes`` reads the words of rowwise codes again if it has to transpose them.
    WHOLE: tl.constexpr = F.rowwise or not (F.columnwise and F.transposes)
    none = tl.zeros((1, 1), tl.uint32)
    rows, row_scale, columns, column_scale = none, none.to(tl.uint8), none, none.to(tl.uint8)
    value = x
    if F.rowwise or F.square:
        rows, row_scale, value = encode_blocks(
            x, row_amax, tensor_amax, epsilon, F, FORM, WHOLE, WORDS
        )
    if F.columnwise and not F.square:
        columns, column_scale, _ = encode_blocks(
            x, column_amax, tensor_amax, epsilon, F, "column", not F.transposes, WORDS
        )
    return Part(rows, row_scale, columns, column_scale), value


# int8 remainders are what codes lack of a master, in units of the codes: the arithmetic of
# ``fp4adam.optim.remainder``, which describes it, bit for bit.

# The bits of the smallest power of two of a code, and the units per power of two, by bits of codes.
_LEAST_E2M1, _PER_E2M1 = tl.constexpr(0x3F800000), tl.constexpr(478)
_LEAST_E4M3, _PER_E4M3 = tl.constexpr(0x3C800000), tl.constexpr(1912)
# 2^23 + 128 more than four int8 numbers: each plus 128 in the lowest byte of 2^23.
_FOUR_FLOATS = tl.constexpr(
    "{ .reg .b32 x; xor.b32 x, $4, 0x80808080;"
    " prmt.b32 $0, x, 0x4B000000, 0x7440;"
    " prmt.b32 $1, x, 0x4B000000, 0x7441;"
    " prmt.b32 $2, x, 0x4B000000, 0x7442;"
    " prmt.b32 $3, x, 0x4B000000, 0x7443; }"
)


@triton.jit
def split_off(master, value, scale, tensor_amax, epsilon, dither, F: tl.constexpr):
    """The int8 remainders [BR, BC] of float32 masters, rounded with uint32 dither [BR, BC].

    value, scale: of their codes, by :func:`encode`.
    """
    FORM: tl.constexpr = F.form
    PER_POWER: tl.constexpr = _PER_E2M1 if F.bits == 4 else _PER_E4M3
    factor, of_units = decode_factor(scale, tensor_amax, epsilon, F)
    # Half of one over the unit of codes with the power of two 1.
    if F.scale == "e8m0":
        # A power of two times that of scale 1, so nothing has to be divided.
        inverse = tl.div_rn(0.5, 1.0 * (1.0 / PER_POWER))
        inverse = tl.minimum(inverse * e8m0_value(scale, True), FP32_MAX * 0.5)
    else:
        inverse = tl.minimum(tl.div_rn(0.5, of_units * (1.0 / PER_POWER)), FP32_MAX * 0.5)
    value = in_blocks(value, F.block, FORM)
    steps = in_blocks(master, F.block, FORM) - value * per_element(factor, FORM)
    inverse = per_element(inverse, FORM)
    bits = value.to(tl.uint32, bitcast=True) & 0x7F800000
    if F.bits == 4:
        # Twice the inverse over the power of two of the code, on the bits; no exponent overflows.
        of_one = inverse.to(tl.uint32, bitcast=True)
        power = tl.minimum(of_one + (128 << 23) - bits, of_one + (1 << 23))
        if F.caps:
            power = tl.where(tl.abs(value) == 6.0, of_one - (2 << 23), power)
        steps *= power.to(tl.float32, bitcast=True)
    else:
        power = tl.minimum(0x7F800000 - bits, 0x7F800000 - _LEAST_E4M3)
        steps *= inverse * power.to(tl.float32, bitcast=True)
    if F.tensor_amax == "history":
        # The scale is that of other values, which codes may not reach.
        inside = tl.minimum(tl.maximum(steps, -127.0), 127.0)
        steps = tl.where(tl.abs(steps) < float("inf"), inside, steps)
    # From 1/2 to 1, 512 times as much has 15 bits below the point, which the dither rounds up or
    # down. The lowest byte of its integer part is the remainder plus 128; of 0 and 1 it is 0.
    if capability() > 0:
        # Inf gives 1, -Inf and NaN give 0. The product is exact, so its sum rounds once either way.
        steps = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, 0f3B000000, 0f3F400000;", "=f,f", [steps],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        steps = tl.where(steps == steps, steps * (1.0 / 512.0) + 0.75, 0.0)
        steps = tl.minimum(tl.maximum(steps, 0.0), 1.0)
    bits = steps.to(tl.int32, bitcast=True)
    bits += (in_blocks(dither, F.block, FORM) >> 17).to(tl.int32)
    remainder = byte_at(bits, 15, 0x80).to(tl.int8, bitcast=True)
    return tl.reshape(remainder, (master.shape[0], master.shape[1]))


@triton.jit
def complete(value, scale, tensor_amax, epsilon, remainder, product, F: tl.constexpr):
    """The float32 masters [BR, BC] that rowwise codes and int8 remainders make.

    value, scale: of the codes. product: of remainders and powers of two of their codes; else
    remainder: these; None for none.
    """
    FORM: tl.constexpr = F.form
    PER_POWER: tl.constexpr = _PER_E2M1 if F.bits == 4 else _PER_E4M3
    LEAST: tl.constexpr = _LEAST_E2M1 if F.bits == 4 else _LEAST_E4M3
    factor, of_units = decode_factor(scale, tensor_amax, epsilon, F)
    blocks = in_blocks(value, F.block, FORM)
    master = blocks * per_element(factor, FORM)
    unit = per_element(of_units * (1.0 / PER_POWER), FORM)
    if product is not None:
        master += in_blocks(product, F.block, FORM) * unit
    elif remainder is not None:
        if capability() > 0:
            steps = tl.inline_asm_elementwise(
                _FOUR_FLOATS, "=f,=f,=f,=f,r", [remainder], dtype=tl.float32, is_pure=True, pack=4
            )
            steps -= 8388736.0
        else:
            steps = remainder.to(tl.float32)
        steps = in_blocks(tl.where(steps == -128.0, float("nan"), steps), F.block, FORM)
        power = tl.maximum(blocks.to(tl.int32, bitcast=True) & 0x7F800000, LEAST)
        if F.caps:
            power = tl.where(tl.abs(blocks) == 6.0, 0x41000000, power)
        master += steps * (power.to(tl.float32, bitcast=True) * unit)
    return tl.reshape(master, (value.shape[0], value.shape[1]))


def format_of(layout: Any, dtype: Any = torch.float32, **others: Any) -> Format:
    """The format of a ``Layout``, for values that have been rounded to ``dtype``."""
    scale, code = layout.scale_type or "", layout.code_type.name
    rule = layout.scale_rule
    return Format(
        code,
        scale,
        layout.block,
        CODE_BITS[code],
        "tensor" if scale == "" else "square" if layout.is_square else "row",
        "rowwise" in layout.kept,
        "columnwise" in layout.kept,
        layout.is_square,
        layout.columnwise.codes.transposed,
        rounding=rule.rounding,
        caps=code == "e2m1" and scale == "e8m0" and rule.rounding == 0,
        pow_2=rule.force_pow_2_scales,
        # Of tensors, the largest float32 for all dtypes.
        largest=torch.finfo(dtype).max if scale == "float32" else FP32_MAX.value,
        **others,
    )
