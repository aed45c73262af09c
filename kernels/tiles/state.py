"""Optimizer states in 8, 16 or 32 bits: codes, scales of 32 neighbours in a row, and dither.

The codecs of ``fp4adam.optim.state_codec``, which describes them, bit for bit.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from fp4adam.kernels.launch.tensor_table import tile_offsets
from fp4adam.kernels.tiles.codes import (
    amax,
    byte_at,
    capability,
    cut_e4m3_code,
    e4m3_code,
    e4m3_value,
    e8m0_value,
    round_to,
    to_float32,
)

# Constants of the dither in ``fp4adam.optim.state_codec``.
OF_ELEMENTS = tl.constexpr(0xC2B2AE35)
OF_MASTERS = tl.constexpr(0x1B56C4E9)
OF_EXP_AVG = tl.constexpr(0)
OF_EXP_AVG_SQ = tl.constexpr(0x85EBCA6B)


class Codec(NamedTuple):
    """How a state is stored; those with scales round the bits of float32 numbers.

    Attributes:
        dtype: Of the codes, or of the numbers.
        dropped: Bits that are rounded away; 0 without scales.
        top: Of a scale, as ``top`` of a ``BlockCodec``.
        carry: Likewise.
        least: The smallest magnitude; 0 for codecs of positive numbers.
    """

    dtype: tl.dtype
    dropped: int = 0
    top: int = 0
    carry: int = 0
    least: float = 0.0


@triton.constexpr_function
def codec_of(name: str, field: str) -> tl.dtype | int | float:
    """An attribute of a :class:`Codec`."""
    # A table in here, because Triton refuses kernels after a change of what they read elsewhere.
    codecs = {
        "plain": Codec(tl.float32),  # unless a parameter says otherwise
        "float32": Codec(tl.float32),
        "bfloat16": Codec(tl.bfloat16),
        "remainder": Codec(tl.bfloat16),
        "int8": Codec(tl.int8),  # remainders of codes, which store the rest of a master
        "codes": Codec(tl.int8),  # no master
        "factored": Codec(tl.float32),  # means of squares by row, see ``factored``
        "ue4m4": Codec(tl.uint8, 19, 15, 0x7FFFF),
        "ue5m11": Codec(tl.uint16, 12, 31, 0xFFF),
        "e4m3": Codec(tl.uint8, 20, 8, 0x1FFFFF, 2.0**-6),
        "float16": Codec(tl.float16, 13, 15, 0x1FFF, 2.0**-14),
    }
    return getattr(codecs[name], field)


@triton.constexpr_function
def is_scaled(codec: str) -> bool:
    """Whether a codec shares scales between 32 neighbours in a row, which tiles must not cut."""
    return codec_of(codec, "dropped") != 0


@triton.constexpr_function
def starts_from_codes(codec: str) -> bool:
    """Whether a master weight is decoded from the weight: with this codec of it."""
    return codec in ("int8", "codes")


def has_scales(*codecs: str) -> bool:
    """Whether any codec has scales."""
    return any(map(is_scaled, codecs))


def are_narrow(*codecs: str) -> bool:
    """Whether any codec encodes numbers, which takes registers."""
    return not {"plain", "float32"}.issuperset(codecs)


def max_registers(*codecs: str) -> int | None:
    """The register limit for codecs that encode, or None; without it ptxas may spill a few.

    It is the hardware's maximum, and so lets ptxas take the registers that it needs.
    """
    return 255 if are_narrow(*codecs) else None


@triton.jit
def dither_of(
    start, stride, origin, STATE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    LANES: tl.constexpr = 4,
):  # fmt: skip
    """The dither, uint32 [BR, BC], of a tile from element ``start`` on, with rows ``stride`` apart.

    start: int64. origin: the dither origin of the tensor's first element; only 32 bits count.
    STATE: OF_MASTERS, OF_EXP_AVG or OF_EXP_AVG_SQ. LANES: neighbours per thread.
    """
    # Sums wrap modulo 2**32, as in ``dither_bits``. A product per row, then a sum per element.
    row = (tl.arange(0, BR) * stride).to(tl.uint32) + (start.to(tl.uint32) + origin.to(tl.uint32))
    across = tl.arange(0, BC // LANES).to(tl.uint32) * (OF_ELEMENTS * LANES % 2**32)
    x = (row * OF_ELEMENTS + STATE)[:, None] + across[None, :]
    # Neighbours' squares by one sum each: what (x + h)**2 exceeds x**2 by grows linearly.
    squares = (x * x)[:, :, None]
    for i in tl.static_range(4):
        if LANES >> i > 1:
            beyond = x + ((OF_ELEMENTS * LANES >> i + 1) % 2**32)
            growth = tl.arange(0, 1 << i).to(tl.uint32) * ((OF_ELEMENTS * LANES >> i) ** 2 % 2**32)
            more = (beyond * beyond - x * x)[:, :, None] + growth[None, None, :]
            squares = tl.reshape(tl.join(squares, squares + more), (BR, BC // LANES, 2 << i))
    return tl.reshape(squares, (BR, BC))


@triton.jit
def encode_blocks(
    x, dither, CODEC: tl.constexpr, WHOLE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Encode a float32 tile with uint32 dither, in a codec with scales.

    WHOLE: whether the codes are stored without a mask. Returns codes [BR, BC], scales, uint8
    [BR, BC / 32], and the numbers that these decode to.
    """
    DROPPED: tl.constexpr = codec_of(CODEC, "dropped")
    TOP: tl.constexpr = codec_of(CODEC, "top")
    CARRY: tl.constexpr = codec_of(CODEC, "carry")
    LEAST: tl.constexpr = codec_of(CODEC, "least")
    x = tl.reshape(x, (BR, BC // 32, 32))
    upper = (tl.reshape(dither, (BR, BC // 32, 32)) >> (32 - DROPPED)).to(tl.int32)
    # The bits of magnitudes order as integers do, with Inf and NaN on top; both give scale 255.
    if LEAST == 0:
        # As unsigned numbers, since NaN may have a sign; then signed, which takes fewer registers.
        largest = tl.max(x.to(tl.uint32, bitcast=True), 2)
        largest = tl.minimum(largest, 0x7F800000).to(tl.int32)
    else:
        largest = amax(x, 2, True).to(tl.int32, bitcast=True)
    scale = tl.maximum(((largest + CARRY) >> 23) - TOP, 0)
    scale = tl.where(largest >= 0x7F800000, 255, scale)[:, :, None]
    # Add the dither below the bits that are kept, so that a carry increments the code (into the
    # exponent if need be), then drop the bits below. Blocks with Inf or NaN, of scale 255, differ
    # in factors and bounds alone, which takes no instructions per element.
    if LEAST == 0:
        # What exceeds the least exponent of the scale; for NaN a number above all others, of which
        # the code has bit 22 alone.
        least = tl.where(scale == 255, 0x10000000, scale << 23)
        floor = tl.where(scale == 255, 0x70400000, 0)
        code = tl.maximum(x.to(tl.int32, bitcast=True) - least, floor) + upper
        code = byte_at(code, 19) if CODEC == "ue4m4" else (code >> DROPPED).to(tl.uint16)
    elif CODEC == "e4m3" and WHOLE and capability() >= 90:
        # The power of two of one over 2^8 times the scale, down to 2^-128, which is subnormal.
        factor = tl.where(scale < 246, (246 - scale) << 23, 0x400000 >> (scale - 246))
        x = x * factor.to(tl.float32, bitcast=True)
        rounded = (x.to(tl.int32, bitcast=True) + upper).to(tl.float32, bitcast=True)
        code = cut_e4m3_code(rounded, tl.where(scale == 255, 0, -0x7F0080))
    else:
        # Zeros and NaN in a block of scale 255.
        x = x * tl.where(scale == 255, 0.0, e8m0_value(scale, True))
        bits = x.to(tl.int32, bitcast=True) + upper
        is_large = tl.abs(bits.to(tl.float32, bitcast=True)) >= LEAST
        kept = tl.where(scale == 255, 0, -0x80000000)
        rounded = bits & tl.where(is_large, -(1 << DROPPED), kept)
        rounded = rounded.to(tl.float32, bitcast=True)
        if CODEC == "e4m3":
            code = e4m3_code(tl.reshape(rounded, (BR, BC)))
        else:
            code = rounded.to(tl.float16)
    scale = tl.reshape(scale, (BR, BC // 32))
    code, scale = tl.reshape(code, (BR, BC)), scale.to(tl.uint8)
    if CODEC == "float16":
        # Saves the way back from FP16.
        stored = tl.reshape(rounded * e8m0_value(scale)[:, :, None], (BR, BC))
    else:
        stored = decode_blocks(code, scale, CODEC, BR, BC)
    return code, scale, stored


@triton.jit
def decode_blocks(code, scale, CODEC: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Decode codes [BR, BC] and uint8 scales [BR, BC / 32] to float32 [BR, BC]."""
    code = tl.reshape(code, (BR, BC // 32, 32))
    if codec_of(CODEC, "least") == 0:
        DROPPED: tl.constexpr = codec_of(CODEC, "dropped")
        bits = (scale.to(tl.int32) << 23)[:, :, None] + (code.to(tl.int32) << DROPPED)
        x = bits.to(tl.float32, bitcast=True)
    else:
        value = e4m3_value(code) if CODEC == "e4m3" else code.to(tl.float32)
        x = value * e8m0_value(scale)[:, :, None]
    return tl.reshape(x, (BR, BC))


@triton.jit
def _block_mask(mask, BR: tl.constexpr, BC: tl.constexpr):
    """Mask [BR, BC / 32] of the blocks with any element in the mask [BR, BC]; None stays None."""
    blocks = None
    if mask is not None:
        blocks = tl.max(tl.reshape(mask.to(tl.int32), (BR, BC // 32, 32)), 2) > 0
    return blocks


@triton.jit
def load_scale(
    scale_ptr, start, stride, mask, CODEC: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """The scales, uint8 [BR, BC / 32], of a tile of a state; zeros if the codec has none.

    There is one scale per 32 elements of the flattened tensor, so start, stride and BC must be
    multiples of 32. Arguments as for :func:`load_state`.
    """
    scale = tl.zeros((BR, (BC + 31) // 32), tl.uint8)
    if is_scaled(CODEC):
        scale_ptr += (start >> 5) + tile_offsets(stride >> 5, BR, BC // 32)
        scale = tl.load(scale_ptr, _block_mask(mask, BR, BC))
    return scale


@triton.jit
def store_scale(
    scale_ptr, start, stride, mask, scale, CODEC: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Store what :func:`load_scale` loads."""
    if is_scaled(CODEC):
        scale_ptr += (start >> 5) + tile_offsets(stride >> 5, BR, BC // 32)
        tl.store(scale_ptr, scale, _block_mask(mask, BR, BC))


@triton.jit
def byte_of(words, i):
    """Byte ``i`` of words, uint8."""
    return ((words >> (8 * i)) & 0xFF).to(tl.uint8)


@triton.jit
def store_words(
    scale_ptr, start, step, stride, words, CODEC: tl.constexpr, LOOP: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store scales of LOOP tiles, ``step`` elements apart, which are a byte of a word each."""
    if is_scaled(CODEC):
        i = tl.arange(0, LOOP)[:, None, None]
        offs = (start >> 5) + tile_offsets(stride >> 5, BR, BC // 32)
        tl.store(scale_ptr + offs[None, :, :] + i * (step >> 5), byte_of(words[None, :, :], i))


@triton.jit
def load_state(
    ptr, extra_ptr, start, stride, mask, scale, CODEC: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr, LANES: tl.constexpr = 4,
):  # fmt: skip
    """Load a tile of a state, or of a parameter, as float32 [BR, BC].

    start: int64 offset of the tile. stride: distance of its rows. mask: [BR, BC] or None. scale:
    from :func:`load_scale`. CODEC: one with scales; "remainder" for BF16 with an int16 remainder at
    extra_ptr; else numbers of any floating type. LANES: neighbours per thread.
    """
    offs = tile_offsets(stride, BR, BC, LANES)
    code = tl.load(ptr + start + offs, mask)
    if is_scaled(CODEC):
        x = decode_blocks(code, scale, CODEC, BR, BC)
    elif CODEC == "remainder":
        remainder = tl.load(extra_ptr + start + offs, mask).to(tl.int32)
        bits = (code.to(tl.int16, bitcast=True).to(tl.int32) << 16) + remainder
        x = bits.to(tl.float32, bitcast=True)
    else:
        x = to_float32(code)
    return x


@triton.jit
def store_state(
    ptr, extra_ptr, start, stride, mask, x, dither, CODEC: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr, STORE: tl.constexpr = True, LANES: tl.constexpr = 4,
):  # fmt: skip
    """Store a float32 tile in the form that :func:`load_state` reads, but not its scales.

    STORE: False stores nothing. dither: uint32 [BR, BC], the dither of this state (see
    :func:`dither_of`); ignored for codecs that do not round.
    Returns what :func:`load_state` would read back, or ``x`` for parameters; and the scales for
    :func:`store_scale`.
    """
    offs = start + tile_offsets(stride, BR, BC, LANES)
    scale, stored = tl.zeros((BR, (BC + 31) // 32), tl.uint8), x
    if is_scaled(CODEC):
        if mask is not None:
            x = tl.where(mask, x, 0.0)
        code, scale, stored = encode_blocks(x, dither, CODEC, mask is None, BR, BC)
    elif CODEC == "bfloat16":
        bits = (x.to(tl.uint32, bitcast=True) + (dither >> 16)) >> 16
        code = tl.where(x == x, bits, 0x7FFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        stored = to_float32(code)
    elif CODEC == "remainder":
        bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
        upper = (bits + 0x8000) >> 16
        code = upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
        if STORE:
            tl.store(extra_ptr + offs, bits.to(tl.int16), mask)
    else:
        code = round_to(x, ptr.dtype.element_ty)
    if STORE:
        tl.store(ptr + offs, code, mask)
    return stored, scale
