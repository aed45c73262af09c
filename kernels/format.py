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

from fp4adam.kernels.launch.tensor_table import tile_offsets, tile_start
from fp4adam.kernels.tiles.e2m1 import e2m1_code, e2m1_round, e2m1_value
from fp4adam.kernels.tiles.e4m3 import e4m3_code, e4m3_value, e4m3_word_values, e4m3_words
from fp4adam.kernels.tiles.e8m0 import e8m0_code_up, e8m0_reciprocal, e8m0_value
from fp4adam.kernels.tiles.layout import state_offsets
from fp4adam.kernels.tiles.remainder import (
    FP32_MAX,
    complete,
    load_remainder,
    split_off,
    unit_of_one,
)
from fp4adam.kernels.tiles.target import is_compiled
from fp4adam.kernels.tiles.words import pack_words

CODE_BITS = {"e2m1": 4, "e4m3": 8}


class Format(NamedTuple):
    """A format, and what is written of a weight, as one compile-time argument.

    Only strings, numbers and flags, all of which are in Triton's cache key.

    Attributes:
        code: The number format of codes, "e2m1" or "e4m3".
        scale: That of block scales, "e4m3", "e8m0" or "float32"; "" if only tensors have one.
        block: Side of a square block, or length of one along a row or column.
        rowwise: Whether to write codes with blocks along rows.
        columnwise: Whether to write codes with blocks along columns.
        square: Whether one scale per square block serves both directions.
        transposes: Whether columnwise codes are those of the transposed matrix. Square blocks
            whose codes need no transposition are stored once.
        swizzled: Whether to write swizzled scales too.
        tensor_amax: Where the amax of the tensor is: "preview" (in the slots of a preview, which
            gets reports), "stored", "history" (stored, and the next one is raised), "" if no scale
            needs it.
        given: Whether the amaxes of blocks are read from grids in memory; else they are measured.
        rounding: What is added to the bits of an amax before its power of two is taken, for E8M0
            scales of E2M1 codes.
        pow_2: Whether float32 scales are rounded down to powers of two.
        largest: The float32 scale to use where 448 / amax overflows.
    """

    code: str
    scale: str
    block: int
    rowwise: bool
    columnwise: bool
    square: bool
    transposes: bool
    swizzled: bool = False
    tensor_amax: str = ""
    given: bool = False
    rounding: int = 0
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


@triton.constexpr_function
def bits_of(code):
    """Bits of a code."""
    return CODE_BITS[code]


@triton.constexpr_function
def form_of(scale, square):
    """The form of the blocks of rowwise codes."""
    return "tensor" if scale == "" else "square" if square else "row"


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
def _larger(x, y):
    """The larger one of two numbers; NaN if any is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _amax(x, AXIS: tl.constexpr, KEEPS_NAN: tl.constexpr):
    """Largest magnitude along an axis; NaN if any is NaN (KEEPS_NAN), or 0 if all are."""
    if not KEEPS_NAN:
        if not is_compiled():
            x = tl.where(x == x, x, 0.0)  # NumPy warns of NaN alone
        amax = tl.max(tl.abs(x), AXIS)
        amax = tl.where(amax == amax, amax, 0.0)
    elif is_compiled():
        amax = tl.reduce(tl.abs(x), AXIS, _larger)
    else:
        # As integers NaN is the largest; the interpreter reduces by a function element by element.
        bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), AXIS)
        amax = bits.to(tl.float32, bitcast=True)
    return amax


@triton.jit
def amax_of_blocks(blocks, F: tl.constexpr, FORM: tl.constexpr):
    """The largest magnitudes of float32 blocks by :func:`in_blocks`.

    NaN does not count if codes have it. Else it is that of the block, whose scale shows it.
    """
    KEEPS: tl.constexpr = F.code != "e4m3"
    if FORM == "square":
        amax = _amax(_amax(blocks, 3, KEEPS), 1, KEEPS)
    elif FORM == "row":
        amax = _amax(blocks, 2, KEEPS)
    else:
        amax = _amax(blocks, 1, KEEPS)
    return amax


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
        scale = e4m3_code(amax * (encode * 0.16666666666666666), HARDWARE=False)
        factor = tl.div_rn(1.0, e4m3_value(scale) * decode)
        factor = tl.where(factor > FP32_MAX, FP32_MAX, factor)  # NaN stays
    elif F.scale == "e8m0":
        if F.code != "e4m3":
            exponent = (amax.to(tl.int32, bitcast=True) + F.rounding) >> 23
            scale = tl.where(amax == amax, tl.maximum(exponent - 2, 0), 255)
        else:
            # 1 / 448 rounded to float32; a division would give the same scales.
            scale = e8m0_code_up(amax * 0.0022321429569274187)
        factor = e8m0_reciprocal(scale)
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
def code_words(x, CODE: tl.constexpr, VALUES: tl.constexpr, HARDWARE: tl.constexpr):
    """Words of the codes nearest to a float32 tile [R, C], and their values if VALUES.

    HARDWARE: as for :func:`e4m3_words`.
    """
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    value = x
    if CODE == "e2m1":
        if VALUES:
            code, value = e2m1_round(x)
        else:
            code = e2m1_code(x)
        words = pack_words(code, 4, R, C)
    else:
        tl.static_assert(CODE == "e4m3", "CODE must be a number format of codes")
        words = e4m3_words(x, R, C, HARDWARE)
        if VALUES:
            value = e4m3_word_values(words, R, C)
    return words, value


@triton.jit
def code_values(code, CODE: tl.constexpr):
    """The float32 values of codes, one per element."""
    if CODE == "e2m1":
        value = e2m1_value(code)
    else:
        tl.static_assert(CODE == "e4m3", "CODE must be a number format of codes")
        value = e4m3_value(code)
    return value


@triton.jit
def encode_blocks(
    x, amax, tensor_amax, epsilon, F: tl.constexpr, FORM: tl.constexpr, VALUES: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Encode a float32 part [BR, BC] in blocks of one form.

    amax: of the blocks; None to measure them. VALUES: whether the values of codes are wanted.
    HARDWARE: as for :func:`e4m3_words`. Returns words of codes, uint32 [BR, BC * bits / 32]; scales
    by :func:`scale_of_amax`; and the values of codes, [BR, BC].
    """
    BR: tl.constexpr = x.shape[0]
    BC: tl.constexpr = x.shape[1]
    blocks = in_blocks(x, F.block, FORM)
    if amax is None and FORM != "tensor":
        amax = amax_of_blocks(blocks, F, FORM)
    scale, factor = scale_of_amax(amax, tensor_amax, epsilon, F)
    scaled = tl.reshape(blocks * per_element(factor, FORM), (BR, BC))
    CODE: tl.constexpr = F.code  # Triton 3.6 takes no plain strings as arguments
    words, value = code_words(scaled, CODE, VALUES, HARDWARE)
    return words, scale, value


@triton.jit
def encode(
    x, row_amax, column_amax, tensor_amax, epsilon, F: tl.constexpr, VALUES: tl.constexpr,
    WORDS: tl.constexpr = True,
):  # fmt: skip
    """Encode a float32 part [BR, BC] in all directions. Returns a :class:`Part`, and the values.

    row_amax, column_amax: of blocks in either direction; None to measure them. VALUES: whether the
    values of rowwise codes are wanted. WORDS: whether words are stored as they are, not as bytes.
    """
    FORM: tl.constexpr = form_of(F.scale, F.square)
    ONCE: tl.constexpr = WORDS and not (F.square and F.columnwise and F.transposes)
    none = tl.zeros((1, 1), tl.uint32)
    rows, row_scale, columns, column_scale = none, none.to(tl.uint8), none, none.to(tl.uint8)
    value = x
    if F.rowwise or F.square:
        rows, row_scale, value = encode_blocks(
            x, row_amax, tensor_amax, epsilon, F, FORM, VALUES, ONCE
        )
    if F.columnwise and not F.square:
        columns, column_scale, _ = encode_blocks(
            x, column_amax, tensor_amax, epsilon, F, "column", False, WORDS and not F.transposes
        )
    return Part(rows, row_scale, columns, column_scale), value


@triton.jit
def split_off_part(master, value, scale, tensor_amax, epsilon, dither, F: tl.constexpr):
    """The int8 remainders [BR, BC] of float32 masters.

    value, scale: of their codes, by :func:`encode`. dither: uint32 [BR, BC].
    """
    BR: tl.constexpr = master.shape[0]
    BC: tl.constexpr = master.shape[1]
    FORM: tl.constexpr = form_of(F.scale, F.square)
    BITS: tl.constexpr = bits_of(F.code)
    factor, of_units = decode_factor(scale, tensor_amax, epsilon, F)
    if F.scale == "e8m0":
        # The inverse of the unit is a power of two times that of 1, so nothing has to be divided.
        _, inverse = unit_of_one(1.0, BITS)
        inverse = tl.minimum(inverse * e8m0_reciprocal(scale), FP32_MAX)
    else:
        _, inverse = unit_of_one(of_units, BITS)
    remainder = split_off(
        in_blocks(master, F.block, FORM),
        in_blocks(value, F.block, FORM),
        per_element(factor, FORM),
        per_element(inverse, FORM),
        in_blocks(dither, F.block, FORM),
        BITS,
        F.tensor_amax == "history",
        caps(F.code, F.scale, F.rounding),
    )
    return tl.reshape(remainder, (BR, BC))


@triton.constexpr_function
def caps(code, scale, rounding):
    """Whether the largest code stands for magnitudes up to the next power of two."""
    return code == "e2m1" and scale == "e8m0" and rounding == 0


@triton.jit
def blocks_per_row(cols, F: tl.constexpr):
    """Square blocks in a row of a matrix."""
    if F.scale == "float32":
        blocks = tl.cdiv(cols, F.block)  # the last one may be cut
    else:
        blocks = cols // F.block
    return blocks


@triton.jit
def load_row_scales(
    scales, row, col, rows, cols, F: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """The scales of the rowwise blocks of a part [BR, BC] at (row, col), one number per block."""
    if F.square:
        width = blocks_per_row(cols, F)
        grid = scales + tile_start(row // F.block, col // F.block, width)
        scale = tl.load(grid + tile_offsets(width, (BR + F.block - 1) // F.block, BC // F.block))
    elif F.scale == "float32":
        down = row + tl.arange(0, BR)
        scale = tl.load(scales + tile_start(col // F.block, 0, (rows + 3) // 4 * 4) + down,
                        down < rows, 1.0)[:, None]  # fmt: skip
    else:
        width = (cols // F.block + 3) // 4 * 4
        grid = scales + tile_start(row, col // F.block, width)
        scale = tl.load(grid + tile_offsets(width, BR, BC // F.block))
    return scale


@triton.jit
def load_masters(
    storage, remainders, start, row, col, rows, cols, mask, tensor_amax, epsilon, F: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The float32 masters [BR, BC] that rowwise codes and int8 remainders make.

    remainders: pointer, read at ``start``; None for none. tensor_amax: of the stored codes. LANES:
    neighbours per thread.
    """
    FORM: tl.constexpr = form_of(F.scale, F.square)
    CODE: tl.constexpr = F.code
    BITS: tl.constexpr = bits_of(CODE)
    if BITS == 4:
        WORD: tl.constexpr = tl.uint16 if LANES == 4 else tl.uint32
        ptr = storage.rowwise_data.to(tl.pointer_type(WORD))
        ptr += tile_start(row, col // LANES, cols // LANES)
        offs = tl.max_contiguous(tile_offsets(cols // LANES, BR, BC // LANES), (1, 1))
        code = (tl.load(ptr + offs)[:, :, None].to(tl.int32) >> (4 * tl.arange(0, LANES))) & 0xF
        value = tl.reshape(code_values(code, CODE), (BR, BC))
    else:
        ptr = storage.rowwise_data.to(tl.pointer_type(tl.uint8)) + tile_start(row, col, cols)
        code = tl.load(ptr + state_offsets(cols, BR, BC, LANES), mask)
        value = code_values(code, CODE)
    scale = 0
    if F.scale != "":
        scale = load_row_scales(storage.rowwise_scale, row, col, rows, cols, F, BR, BC)
    factor, of_units = decode_factor(scale, tensor_amax, epsilon, F)
    unit, _ = unit_of_one(of_units, BITS)
    remainder = None
    if remainders is not None:
        remainder = load_remainder(remainders, start, cols, mask, BR, BC, LANES)
        remainder = in_blocks(remainder, F.block, FORM)
    master = complete(
        in_blocks(value, F.block, FORM), per_element(factor, FORM), per_element(unit, FORM),
        remainder, BITS, caps(F.code, F.scale, F.rounding),
    )  # fmt: skip
    return tl.reshape(master, (BR, BC))


def format_of(layout: Any, dtype: Any = torch.float32, **others: Any) -> Format:
    """The format of a ``Layout``, for values that have been rounded to ``dtype``."""
    scale, code = layout.scale_type or "", layout.code_type.name
    rule = layout.scale_rule
    return Format(
        code,
        scale,
        layout.block,
        "rowwise" in layout.kept,
        "columnwise" in layout.kept,
        layout.is_square,
        layout.columnwise.codes.transposed,
        rounding=rule.rounding,
        pow_2=rule.force_pow_2_scales,
        # Of tensors, the largest float32 for all dtypes.
        largest=torch.finfo(dtype).max if scale == "float32" else FP32_MAX.value,
        **others,
    )
