"""Optimizer states in 8 or 16 bits: codes, scales of 32 neighbours in a row, and dither.

The codecs of ``fp4adam.optim.state_codec``, which describes them, bit for bit.
"""

import triton
import triton.language as tl

from fp4adam.kernels.launch.tensor_table import VALUE, VALUE_EXTRA, pointer, tile_offsets
from fp4adam.kernels.tiles.bfloat16 import to_float32
from fp4adam.kernels.tiles.e4m3 import e4m3_bytes, e4m3_value
from fp4adam.kernels.tiles.e8m0 import e8m0_reciprocal, e8m0_value
from fp4adam.kernels.tiles.layout import state_offsets

# Constants of the hashes in ``fp4adam.optim.state_codec``.
FACTOR_1 = tl.constexpr(0x7FEB352D)
FACTOR_2 = tl.constexpr(0x846CA68B)
OF_ELEMENTS = tl.constexpr(0xC2B2AE35)
SHIFT = tl.constexpr(13)
OF_MASTERS = tl.constexpr(0x1B56C4E9)
OF_EXP_AVG = tl.constexpr(0x846CA68B)
OF_EXP_AVG_SQ = tl.constexpr(0x93D765DD)


@triton.constexpr_function
def is_scaled(codec: str) -> bool:
    """Whether a codec shares scales between 32 neighbours in a row, which tiles must not cut."""
    return codec not in ("plain", "remainder", "int8", "codes", "float32", "bfloat16")


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
def mixed(x):
    """The hash of uint32 step numbers that ``dither_origin`` uses."""
    x = (x ^ (x >> 16)) * FACTOR_1
    x = (x ^ (x >> 15)) * FACTOR_2
    return x ^ (x >> 16)


@triton.jit
def element_hash(
    start, stride, origin, BR: tl.constexpr, BC: tl.constexpr, LANES: tl.constexpr = 4
):
    """Hashes, uint32 [BR, BC], of a tile of elements from ``start`` on, with rows ``stride`` apart.

    start: int64. origin: the dither origin of the tensor's first element; only 32 bits count. Each
    state's dither is the hash times a factor: OF_MASTERS, OF_EXP_AVG or OF_EXP_AVG_SQ.
    """
    # Sums wrap modulo 2**32, as in ``dither_bits``.
    element = start.to(tl.uint32) + origin.to(tl.uint32)
    x = (element + state_offsets(stride, BR, BC, LANES).to(tl.uint32)) * OF_ELEMENTS
    return x ^ (x >> SHIFT)


@triton.jit
def _block_scale(magnitude, CARRY: tl.constexpr, TOP: tl.constexpr):
    """Scales, int32 [BR, BC / 32], of the bits [BR, BC / 32, 32] of magnitudes.

    TOP, CARRY: as ``top`` and ``carry`` of a ``BlockCodec``.
    """
    # The bits of magnitudes order as integers do, with Inf and NaN on top; both give scale 255.
    amax = tl.max(magnitude, 2)
    exponent = tl.maximum(((amax + CARRY) >> 23) - TOP, 0)
    return tl.where(amax >= 0x7F800000, 255, exponent)


@triton.jit
def _factor(scale):
    """1 over the value of scales, float32; 0 for 255, which makes zeros and NaN of a block."""
    return tl.where(scale == 255, 0.0, e8m0_reciprocal(scale))


@triton.jit
def _above(magnitude, scale, NOT_FINITE: tl.constexpr):
    """The bits [BR, BC / 32, 32] of magnitudes that exceed the least exponent of their scale.

    NOT_FINITE: the result for blocks of scale 255.
    """
    not_finite = scale == 255
    least = tl.where(not_finite, 0x7FFFFFFF, scale << 23)
    floor = tl.where(not_finite, NOT_FINITE, 0)
    return tl.maximum(magnitude - least[:, :, None], floor[:, :, None])


@triton.jit
def _rounded(x, dither, DROPPED: tl.constexpr, LEAST: tl.constexpr):
    """Float32 numbers without their lowest DROPPED bits, which the dither rounds up or down.

    Magnitudes below LEAST, and NaN, become zero.
    """
    bits = x.to(tl.int32, bitcast=True) + (dither >> (32 - DROPPED)).to(tl.int32)
    bits = tl.where(tl.abs(x) >= LEAST, bits & -(1 << DROPPED), 0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_to_e4m3(x, dither):
    """Float32 numbers with the four significant bits of E4M3, which uint32 dither rounds."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + (dither >> 12).to(tl.int32)) & -(1 << 20)
    return tl.where(tl.abs(x) < float("inf"), rounded, bits).to(tl.float32, bitcast=True)


@triton.jit
def encode_blocks(
    x, dither, CODEC: tl.constexpr, WHOLE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Encode a float32 tile with uint32 dither.

    WHOLE: whether the codes are stored without a mask. Returns codes [BR, BC], scales, uint8
    [BR, BC / 32], and the numbers that these decode to.
    """
    x = tl.reshape(x, (BR, BC // 32, 32))
    dither = tl.reshape(dither, (BR, BC // 32, 32))
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # All codecs: add the dither below the bits that are kept, so that a carry increments the code
    # (into the exponent if need be), then drop the bits below. Blocks with Inf or NaN, of scale
    # 255, differ in factors and bounds alone, which takes no instructions per element.
    if CODEC == "ue4m4":
        scale = _block_scale(magnitude, 0x7FFFF, 15)
        code = _above(magnitude, scale, 8 << 19)
        code = ((code + (dither >> 13).to(tl.int32)) >> 19).to(tl.uint8)
    elif CODEC == "ue5m11":
        scale = _block_scale(magnitude, 0xFFF, 31)
        code = _above(magnitude, scale, 0x400 << 12)
        code = ((code + (dither >> 20).to(tl.int32)) >> 12).to(tl.uint16)
    elif CODEC == "e4m3":
        scale = _block_scale(magnitude, 0x1FFFFF, 8)
        rounded = _rounded(x * _factor(scale)[:, :, None], dither, 20, 2.0**-6)
        code = e4m3_bytes(tl.reshape(rounded, (BR, BC)), WHOLE)
    else:
        tl.static_assert(CODEC == "float16", "CODEC must be one with scales")
        scale = _block_scale(magnitude, 0x1FFF, 15)
        rounded = _rounded(x * _factor(scale)[:, :, None], dither, 13, 2.0**-14)
        code = rounded.to(tl.float16)
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
    if CODEC == "ue4m4":
        bits = (scale.to(tl.int32) << 23)[:, :, None] + (code.to(tl.int32) << 19)
        x = bits.to(tl.float32, bitcast=True)
    elif CODEC == "ue5m11":
        bits = (scale.to(tl.int32) << 23)[:, :, None] + (code.to(tl.int32) << 12)
        x = bits.to(tl.float32, bitcast=True)
    else:
        if CODEC == "e4m3":
            value = e4m3_value(code)
        else:
            value = code.to(tl.float32)
        x = value * e8m0_value(scale)[:, :, None]
    return tl.reshape(x, (BR, BC))


@triton.jit
def encode_bfloat16(x, dither):
    """Round a float32 tile to BF16 with uint32 dither; any NaN becomes 0x7FFF."""
    bits = (x.to(tl.uint32, bitcast=True) + (dither >> 16)) >> 16
    bits = tl.where(x == x, bits, 0x7FFF)
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def state_pointer(table, tensor, COLUMN: tl.constexpr, CODEC: tl.constexpr):
    """Pointer to the codes of a state, from the table."""
    if CODEC == "float32":
        ptr = pointer(table, tensor, COLUMN, tl.float32)
    elif CODEC == "bfloat16":
        ptr = pointer(table, tensor, COLUMN, tl.bfloat16)
    elif CODEC == "float16":
        ptr = pointer(table, tensor, COLUMN, tl.float16)
    elif CODEC == "ue5m11":
        ptr = pointer(table, tensor, COLUMN, tl.uint16)
    else:
        tl.static_assert((CODEC == "e4m3") | (CODEC == "ue4m4"), "CODEC must be that of a state")
        ptr = pointer(table, tensor, COLUMN, tl.uint8)
    return ptr


@triton.jit
def _block_mask(mask, BR: tl.constexpr, BC: tl.constexpr):
    """Mask [BR, BC / 32] of the blocks with any element in the mask [BR, BC]; None stays None."""
    if mask is None:
        blocks = None
    else:
        blocks = tl.max(tl.reshape(mask.to(tl.int32), (BR, BC // 32, 32)), 2) > 0
    return blocks


@triton.jit
def load_scale(
    scale_ptr, start, stride, mask, CODEC: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """The scales, uint8 [BR, BC / 32], of a tile of a state; zeros if the codec has none.

    start: int64 offset of the tile. stride: distance of its rows. There is one scale per 32
    elements of the flattened tensor, so start, stride and BC must be multiples of 32. mask: [BR,
    BC] or None.
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
def load_scale_words(
    scale_ptr, start, step, stride, CODEC: tl.constexpr, LOOP: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """The scales of LOOP tiles, ``step`` elements apart, a byte of a word each: [BR, BC / 32].

    For a pipelined loop over the tiles. Bytes are too short for asynchronous copies, so the loop
    would wait for the scales in every turn.
    """
    tl.static_assert(LOOP <= 4)
    words = tl.zeros((BR, (BC + 31) // 32), tl.uint32)
    for i in tl.static_range(LOOP):
        scale = load_scale(scale_ptr, start + i * step, stride, None, CODEC, BR, BC)
        words |= scale.to(tl.uint32) << (8 * i)
    return words


@triton.jit
def store_scale_words(
    scale_ptr, start, stride, words, CODEC: tl.constexpr, LOOP: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Store what :func:`load_scale_words` loads."""
    if is_scaled(CODEC):
        scale = words[None, :, :] >> (8 * tl.arange(0, LOOP))[:, None, None]
        scale = tl.reshape((scale & 0xFF).to(tl.uint8), (LOOP * BR, BC // 32))
        store_scale(scale_ptr, start, stride, None, scale, CODEC, LOOP * BR, BC)


@triton.jit
def load_state(
    ptr, start, stride, mask, scale, CODEC: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    LANES: tl.constexpr = 4,
):  # fmt: skip
    """Load a tile of a state as float32 [BR, BC], with LANES neighbours per thread.

    start: int64 offset of the tile. stride: distance of its rows. mask: [BR, BC] or None. scale:
    from :func:`load_scale`.
    """
    code = tl.load(ptr + start + state_offsets(stride, BR, BC, LANES), mask)
    if CODEC == "float32":
        x = code
    elif CODEC == "bfloat16":
        x = to_float32(code)
    else:
        x = decode_blocks(code, scale, CODEC, BR, BC)
    return x


@triton.jit
def store_state(
    ptr, start, stride, mask, x, dither, CODEC: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    STORE: tl.constexpr = True, LANES: tl.constexpr = 4,
):  # fmt: skip
    """Store a float32 tile of a state, but not its scales.

    STORE: False stores nothing. dither: uint32 [BR, BC], the dither of this state (see
    :func:`element_hash`); ignored for float32.
    Returns what :func:`load_state` would read back, and the scales for :func:`store_scale`.
    """
    ptr = ptr + start + state_offsets(stride, BR, BC, LANES)
    scale = tl.zeros((BR, (BC + 31) // 32), tl.uint8)
    if CODEC == "float32":
        if STORE:
            tl.store(ptr, x, mask)
        stored = x
    elif CODEC == "bfloat16":
        code = encode_bfloat16(x, dither)
        if STORE:
            tl.store(ptr, code, mask)
        stored = to_float32(code)
    else:
        if mask is not None:
            x = tl.where(mask, x, 0.0)
        code, scale, stored = encode_blocks(x, dither, CODEC, mask is None, BR, BC)
        if STORE:
            tl.store(ptr, code, mask)
    return stored, scale


@triton.jit
def split_master(master):
    """Split a float32 tile into BF16 and an INT16 remainder; NaN gives (0x7FC0, 0)."""
    bits = master.to(tl.int32, bitcast=True)
    bits = tl.where(master == master, bits, 0x7FC00000)
    upper = (bits + 0x8000) >> 16
    remainder = (bits - (upper << 16)).to(tl.int16)
    return upper.to(tl.int16).to(tl.bfloat16, bitcast=True), remainder


@triton.jit
def join_master(param, remainder):
    """Undo :func:`split_master`. param: bfloat16, remainder: int16. Returns float32."""
    upper = param.to(tl.int16, bitcast=True).to(tl.int32)
    return ((upper << 16) + remainder.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def load_value(
    ptr, extra_ptr, start, stride, mask, scale, CODEC: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Load a tile of the value that Adam updates, as float32 [BR, BC].

    CODEC: "plain" for numbers of any floating type; "remainder" for BF16 with the int16 remainder
    of :func:`split_master` at extra_ptr; or a codec of a state. scale: its scales, from
    :func:`load_scale`.
    """
    offs = state_offsets(stride, BR, BC)
    if CODEC == "plain":
        x = to_float32(tl.load(ptr + start + offs, mask))
    elif CODEC == "remainder":
        remainder = tl.load(extra_ptr + start + offs, mask)
        x = join_master(tl.load(ptr + start + offs, mask), remainder)
    else:
        x = load_state(ptr, start, stride, mask, scale, CODEC, BR, BC)
    return x


@triton.jit
def load_master(
    ptr, extra_ptr, start, stride, mask, CODEC: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Load a tile of a master weight with its scales, as float32 [BR, BC]."""
    scale = load_scale(extra_ptr, start, stride, mask, CODEC, BR, BC)
    return load_value(ptr, extra_ptr, start, stride, mask, scale, CODEC, BR, BC)


@triton.jit
def value_pointers(table, tensor, DTYPE: tl.constexpr, CODEC: tl.constexpr):
    """Pointers to the value that Adam updates and to its remainder or scales."""
    if CODEC == "remainder":
        extra_ptr = pointer(table, tensor, VALUE_EXTRA, tl.int16)
    else:
        extra_ptr = pointer(table, tensor, VALUE_EXTRA, tl.uint8)
    return pointer(table, tensor, VALUE, DTYPE), extra_ptr


@triton.jit
def master_pointers(table, tensor, CODEC: tl.constexpr):
    """:func:`value_pointers` of a master weight: FP32 if plain, int8 remainders, or FP16."""
    if CODEC == "plain":
        pointers = value_pointers(table, tensor, tl.float32, CODEC)
    elif CODEC == "int8":
        pointers = value_pointers(table, tensor, tl.int8, CODEC)
    else:
        pointers = value_pointers(table, tensor, tl.float16, CODEC)
    return pointers
