"""Quantize flat shards of any number of matrices: block amaxes, scales, and codes.

A shard is a run of elements of a row-major matrix and may begin and end inside a block, a row or a
byte. Tiles inside the shard need no masks. Tiles that it cuts are masked, element by element, and
preserve what is not part of the shard. Each block, and each byte, belongs to a single tile.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.float8 import tensor_scale
from fp4adam.kernels.float8_block import float8_scale
from fp4adam.kernels.four_over_six import adaptive_scale, choose
from fp4adam.kernels.launch.launch import Launch
from fp4adam.kernels.launch.schema import INDEX
from fp4adam.kernels.launch.tensor_table import (
    AMAX,
    COLS,
    COLUMNWISE_DATA,
    COLUMNWISE_SCALE,
    ROWS,
    ROWWISE_DATA,
    ROWWISE_SCALE,
    TRITON_DTYPES,
    VALUE,
    WIDTH,
    Tile,
    load_tile,
    pointer,
    size,
    tile_offsets,
    tile_start,
)
from fp4adam.kernels.mxfp4 import mxfp4_scale
from fp4adam.kernels.mxfp8 import mxfp8_scale
from fp4adam.kernels.nvfp4 import nvfp4_scale
from fp4adam.kernels.tiles.bfloat16 import round_through, to_float32
from fp4adam.kernels.tiles.e2m1 import e2m1_code
from fp4adam.kernels.tiles.e4m3 import e4m3_code, e4m3_words
from fp4adam.kernels.tiles.e8m0 import e8m0_reciprocal
from fp4adam.kernels.tiles.words import pack_words, store_words

# Addresses of values and codes are extrapolated to the first element of the matrix.
START = tl.constexpr(INDEX["start"])
STOP = tl.constexpr(INDEX["stop"])
TENSOR_AMAX = tl.constexpr(INDEX["tensor_amax"])
ROWWISE_AMAX = tl.constexpr(INDEX["rowwise_amax"])
COLUMNWISE_AMAX = tl.constexpr(INDEX["columnwise_amax"])
CHOICES = tl.constexpr(INDEX["choices"])

# Unmasked and masked tiles, processed in parts of ``rows`` rows; masks need registers.
TILES = {
    "nvfp4": (Tile(16, 128, 1, 4, 1), Tile(16, 128, 1, 4, 1)),
    "mxfp8": (Tile(32, 64, 1, 4, 1), Tile(32, 64, 1, 4, 1)),
    "mxfp8_2d": (Tile(32, 64, 1, 4, 1), Tile(32, 64, 1, 4, 1)),
    "mxfp4": (Tile(32, 64, 1, 4, 1), Tile(32, 64, 1, 4, 1)),
    "float8": (Tile(16, 128, 8, 4, 3), Tile(8, 128, 16, 4, 1)),
    "float8_block": (Tile(16, 128, 8, 4, 3), Tile(8, 128, 16, 4, 1)),
}
# Block scales that one program writes.
SCALES = 1024


@triton.jit
def _load(table, tensor, COLUMN: tl.constexpr):
    """An int64 entry of the table."""
    return tl.load(table + tensor.to(tl.int64) * WIDTH + COLUMN)


@triton.jit
def _pointer(table, tensor, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer from the table, with the alignment hint only if ALIGNED."""
    if ALIGNED:
        ptr = pointer(table, tensor, COLUMN, DTYPE)
    else:
        ptr = _load(table, tensor, COLUMN).to(tl.pointer_type(DTYPE))
    return ptr


@triton.jit
def _bounds(table, tensor):
    """Index of the shard's first element, and of the element after its last."""
    return _load(table, tensor, START), _load(table, tensor, STOP)


@triton.jit
def _own(bounds, row, col, cols, WHOLE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Mask [BR, BC] of a tile's elements that belong to the shard; None if all do (WHOLE)."""
    if WHOLE:
        mask = None
    else:
        index = tile_start(row, col, cols) + tile_offsets(cols, BR, BC)
        mask = (index >= bounds[0]) & (index < bounds[1])
        mask = mask & (col + tl.arange(0, BC) < cols)[None, :]
    return mask


@triton.jit
def _load_value(
    ptr, row, col, cols, mask, WRITE_DTYPE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Load a float32 tile [BR, BC], rounded to WRITE_DTYPE; zeros outside of the shard."""
    ptr += tile_start(row, col, cols) + tile_offsets(cols, BR, BC)
    if mask is None:
        x = tl.load(ptr)
    else:
        x = tl.load(ptr, mask, 0.0)
    return round_through(to_float32(x), WRITE_DTYPE)


@triton.jit
def _magnitude(x):
    """|x|, or 0 for NaN, which amaxes ignore."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def _square_amax_kernel(
    table,
    tiles,
    VALUE_DTYPE: tl.constexpr,
    WRITE_DTYPE: tl.constexpr,
    OF_BLOCKS: tl.constexpr,
    OF_TENSOR: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The shard's amaxes in one tile: of square blocks if OF_BLOCKS, of the tensor if OF_TENSOR.

    Grid: (n_tiles,). Tile: [BLOCK, BC] in parts of [BR, BC]. table: int64 [n_tensors, 19]. tiles:
    int32 [n_tiles, 4]. WHOLE: the shard contains the whole tile, so there are no masks. Reads the
    shard (2 or 4 bytes per element), writes 4 bytes per block.
    """
    tensor, first_row, col = load_tile(tiles, 16)
    cols = size(table, tensor, COLS, 16 if WHOLE else 1)
    ptr = _pointer(table, tensor, VALUE, VALUE_DTYPE, WHOLE)
    bounds = _bounds(table, tensor)
    largest = tl.zeros((BR, BC), tl.float32)
    for i in tl.range(0, BLOCK // BR, num_stages=STAGES):
        row = first_row + i * BR
        mask = _own(bounds, row, col, cols, WHOLE, BR, BC)
        x = _load_value(ptr, row, col, cols, mask, WRITE_DTYPE, BR, BC)
        largest = tl.maximum(largest, _magnitude(x))
    amax = tl.max(tl.reshape(tl.max(largest, 0), (BC // BLOCK, BLOCK)), 1)
    if OF_BLOCKS:
        blocks_per_row = tl.cdiv(cols, BLOCK)
        block = col // BLOCK + tl.arange(0, BC // BLOCK)
        grid = _pointer(table, tensor, ROWWISE_AMAX, tl.float32, False)
        grid += tile_start(first_row // BLOCK, 0, blocks_per_row)
        tl.store(grid + block, amax, block < blocks_per_row)
    if OF_TENSOR:
        # The bits of non-negative floats order as integers do; an integer maximum is one atomic, a
        # float maximum two.
        bits = tl.max(amax, 0).to(tl.int32, bitcast=True)
        ptr = _pointer(table, tensor, TENSOR_AMAX, tl.int32, False)
        tl.atomic_max(ptr, bits, sem="relaxed")


@triton.jit
def _mxfp8_amax_kernel(
    table,
    tiles,
    VALUE_DTYPE: tl.constexpr,
    WRITE_DTYPE: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    WHOLE: tl.constexpr,
    BC: tl.constexpr,
):
    """The shard's amaxes of the 1x32 and 32x1 blocks of one tile.

    Grid: (n_tiles,). Tile: [32, BC]. Tables as in :func:`_square_amax_kernel`. Reads the shard (2
    or 4 bytes per element), writes 4 bytes per block.
    """
    tensor, row, col = load_tile(tiles, 32)
    cols = size(table, tensor, COLS, 32)
    ptr = _pointer(table, tensor, VALUE, VALUE_DTYPE, WHOLE)
    bounds = _bounds(table, tensor)
    mask = _own(bounds, row, col, cols, WHOLE, 32, BC)
    magnitude = _magnitude(_load_value(ptr, row, col, cols, mask, WRITE_DTYPE, 32, BC))
    if ROWWISE:
        amax = tl.max(tl.reshape(magnitude, (32, BC // 32, 32)), 2)
        grid = _pointer(table, tensor, ROWWISE_AMAX, tl.float32, False)
        grid += tile_start(row, col // 32, cols // 32) + tile_offsets(cols // 32, 32, BC // 32)
        tl.store(grid, amax, (col // 32 + tl.arange(0, BC // 32) < cols // 32)[None, :])
    if COLUMNWISE:
        amax = tl.max(magnitude, 0)
        grid = _pointer(table, tensor, COLUMNWISE_AMAX, tl.float32, False)
        grid += tile_start(row // 32, col, cols) + tl.arange(0, BC)
        tl.store(grid, amax, col + tl.arange(0, BC) < cols)


@triton.jit
def _scales_kernel(
    table,
    chunks,
    epsilon,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    POW_2: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    BOUND: tl.constexpr,
    ROUNDING: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The scales of all blocks of the matrices, including blocks outside of the shards.

    Also the amaxes of NVFP4 and Float8 tensors; the latter have no scales of blocks.

    Grid: (n_chunks,). Tile: CHUNK blocks. table: int64 [n_tensors, 19]. chunks: int32
    [n_chunks, 4], (tensor, first block, 1 for columnwise blocks, 0). epsilon, LARGEST, POW_2: for
    Float8Block. ADAPTIVE, BOUND: for NVFP4. ROUNDING: for MXFP4. Reads 4 bytes per block, or 8,
    writes 1 or 4.
    """
    chunk = chunks + 4 * tl.program_id(0)
    tensor, first = tl.load(chunk), tl.load(chunk + 1)
    columnwise = tl.load(chunk + 2) == 1
    rows, cols = _load(table, tensor, ROWS), _load(table, tensor, COLS)
    block = first.to(tl.int64) + tl.arange(0, CHUNK)
    grid, out = _load(table, tensor, ROWWISE_AMAX), _load(table, tensor, ROWWISE_SCALE)
    if FORMAT == "nvfp4" or FORMAT == "float8":
        tensor_amax = tl.load(_pointer(table, tensor, TENSOR_AMAX, tl.float32, False))
        if first == 0:
            tl.store(_pointer(table, tensor, AMAX, tl.float32, False), tensor_amax)
    if FORMAT == "float8":
        return
    if FORMAT == "mxfp8" or FORMAT == "mxfp4":
        width = tl.where(columnwise, cols, cols // 32)
        numel = rows // 32 * cols  # in either direction
        grid = tl.where(columnwise, _load(table, tensor, COLUMNWISE_AMAX), grid)
        out = tl.where(columnwise, _load(table, tensor, COLUMNWISE_SCALE), out)
    else:
        BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32 if FORMAT == "mxfp8_2d" else 128
        width = tl.cdiv(cols, BLOCK)
        numel = tl.cdiv(rows, BLOCK) * width
    inside = block < numel
    amax = tl.load(grid.to(tl.pointer_type(tl.float32)) + block, inside, 0.0)
    if FORMAT == "nvfp4":
        if ADAPTIVE is None:
            scale, _ = nvfp4_scale(amax, tensor_amax)
        else:
            choices = _pointer(table, tensor, CHOICES, tl.float32, False)
            four = tl.load(choices + block, inside, 0.0) > 0
            scale, _ = adaptive_scale(amax, tensor_amax, four, BOUND)
        tl.store(out.to(tl.pointer_type(tl.uint8)) + block, scale, inside)
    elif FORMAT == "mxfp8" or FORMAT == "mxfp4":
        if FORMAT == "mxfp8":
            scale, _ = mxfp8_scale(amax)
        else:
            scale = mxfp4_scale(amax, ROUNDING)
        stored_width = tl.where(columnwise, (width + 127) // 128 * 128, (width + 3) // 4 * 4)
        at = block // width * stored_width + block % width
        tl.store(out.to(tl.pointer_type(tl.uint8)) + at, scale.to(tl.uint8), inside)
    elif FORMAT == "mxfp8_2d":
        scale, _ = mxfp8_scale(amax)
        tl.store(out.to(tl.pointer_type(tl.uint8)) + block, scale.to(tl.uint8), inside)
    elif FORMAT == "float8_block":
        scale = tl.div_rn(1.0, float8_scale(amax, epsilon, LARGEST, POW_2))
        tl.store(out.to(tl.pointer_type(tl.float32)) + block, scale, inside)


@triton.jit
def _nvfp4_blocks(table, tensor, row, col, cols, BC: tl.constexpr):
    """A row of 16x16 blocks: their amaxes [BC / 16], their offsets, and which of them exist."""
    block = col // 16 + tl.arange(0, BC // 16)
    inside = block < cols // 16
    offs = tile_start(row // 16, 0, cols // 16) + block
    amax = tl.load(_pointer(table, tensor, ROWWISE_AMAX, tl.float32, False) + offs, inside, 0.0)
    return amax, offs, inside


@triton.jit
def _nvfp4_choices_kernel(
    table,
    tiles,
    VALUE_DTYPE: tl.constexpr,
    WRITE_DTYPE: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    BOUND: tl.constexpr,
    WHOLE: tl.constexpr,
    BC: tl.constexpr,
):
    """Which of two scales each block has: 1 where the amax of the block maps to 4, else 0.

    Grid: (n_tiles,). Tile: [16, BC]. table: int64 [n_tensors, 19]. tiles: int32 [n_tiles, 4]. Reads
    a shard of whole blocks (2 or 4 bytes per element) and amaxes, writes 4 bytes per block.
    """
    tensor, row, col = load_tile(tiles, 16)
    cols = size(table, tensor, COLS, 16)
    ptr = _pointer(table, tensor, VALUE, VALUE_DTYPE, WHOLE)
    mask = _own(_bounds(table, tensor), row, col, cols, WHOLE, 16, BC)
    x = _load_value(ptr, row, col, cols, mask, WRITE_DTYPE, 16, BC)
    amax, offs, inside = _nvfp4_blocks(table, tensor, row, col, cols, BC)
    tensor_amax = tl.load(_pointer(table, tensor, TENSOR_AMAX, tl.float32, False))
    blocks = tl.reshape(x, (1, 16, BC // 16, 16))
    four, _, _ = choose(blocks, amax[None, :], tensor_amax, "square", ADAPTIVE, BOUND)
    four = tl.reshape(four.to(tl.int32), (BC // 16,)).to(tl.float32)
    tl.store(_pointer(table, tensor, CHOICES, tl.float32, False) + offs, four, inside)


@triton.jit
def _nvfp4_codes_kernel(
    table,
    tiles,
    VALUE_DTYPE: tl.constexpr,
    WRITE_DTYPE: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    BOUND: tl.constexpr,
    WHOLE: tl.constexpr,
    BC: tl.constexpr,
):
    """The shard's E2M1 codes of one tile; preserves the other nibble of a byte that the shard cuts.

    Grid: (n_tiles,). Tile: [16, BC]. table: int64 [n_tensors, 19]. tiles: int32 [n_tiles, 4]. Reads
    the shard (2 or 4 bytes per element) and amaxes, writes half a byte per element.
    """
    tensor, row, col = load_tile(tiles, 16)
    cols = size(table, tensor, COLS, 16)
    ptr = _pointer(table, tensor, VALUE, VALUE_DTYPE, WHOLE)
    mask = _own(_bounds(table, tensor), row, col, cols, WHOLE, 16, BC)
    x = _load_value(ptr, row, col, cols, mask, WRITE_DTYPE, 16, BC)
    amax, offs, inside = _nvfp4_blocks(table, tensor, row, col, cols, BC)
    tensor_amax = tl.load(_pointer(table, tensor, TENSOR_AMAX, tl.float32, False))
    if ADAPTIVE is None:
        _, factor = nvfp4_scale(amax, tensor_amax)
    else:
        choices = _pointer(table, tensor, CHOICES, tl.float32, False)
        four = tl.load(choices + offs, inside, 0.0) > 0
        _, factor = adaptive_scale(amax, tensor_amax, four, BOUND)
    code = e2m1_code(tl.reshape(x, (16, BC // 16, 16)) * factor[None, :, None])
    code = tl.reshape(code, (16, BC))
    _store_e2m1(code, table, tensor, row, col, cols, mask, WHOLE, 16, BC)


@triton.jit
def _store_e2m1(
    code,
    table,
    tensor,
    row,
    col,
    cols,
    mask,
    WHOLE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Store the codes of the tile [BR, BC] at (row, col); nibbles outside of ``mask`` stay."""
    if WHOLE:
        data = pointer(table, tensor, ROWWISE_DATA, tl.uint32)
        words = pack_words(code, 4, BR, BC)
        store_words(data, row, col // 8, cols // 8, words, BR, BC // 8)
    else:
        data = _pointer(table, tensor, ROWWISE_DATA, tl.uint8, False)
        data += tile_start(row, col // 2, cols // 2) + tile_offsets(cols // 2, BR, BC // 2)
        low, high = tl.split(tl.reshape(code, (BR, BC // 2, 2)))
        own_low, own_high = tl.split(tl.reshape(mask.to(tl.int32), (BR, BC // 2, 2)))
        own = own_low * 0x0F | own_high * 0xF0
        old = tl.load(data, (own == 0x0F) | (own == 0xF0), 0).to(tl.int32)
        new = ((low | (high << 4)) & own) | (old & (0xFF - own))
        tl.store(data, new.to(tl.uint8), own != 0)


@triton.jit
def _mxfp4_codes_kernel(
    table,
    tiles,
    VALUE_DTYPE: tl.constexpr,
    WRITE_DTYPE: tl.constexpr,
    ROUNDING: tl.constexpr,
    WHOLE: tl.constexpr,
    BC: tl.constexpr,
):
    """The shard's E2M1 codes of one tile.

    Grid: (n_tiles,). Tile: [32, BC]. Tables as for NVFP4. Reads the shard (2 or 4 bytes per
    element) and amaxes, writes half a byte per element.
    """
    tensor, row, col = load_tile(tiles, 32)
    cols = size(table, tensor, COLS, 32)
    ptr = _pointer(table, tensor, VALUE, VALUE_DTYPE, WHOLE)
    mask = _own(_bounds(table, tensor), row, col, cols, WHOLE, 32, BC)
    x = _load_value(ptr, row, col, cols, mask, WRITE_DTYPE, 32, BC)
    grid = _pointer(table, tensor, ROWWISE_AMAX, tl.float32, False)
    grid += tile_start(row, col // 32, cols // 32) + tile_offsets(cols // 32, 32, BC // 32)
    inside = (col // 32 + tl.arange(0, BC // 32) < cols // 32)[None, :]
    factor = e8m0_reciprocal(mxfp4_scale(tl.load(grid, inside, 0.0), ROUNDING))
    code = e2m1_code(tl.reshape(x, (32, BC // 32, 32)) * factor[:, :, None])
    code = tl.reshape(code, (32, BC))
    _store_e2m1(code, table, tensor, row, col, cols, mask, WHOLE, 32, BC)


@triton.jit
def _store_e4m3(
    x,
    data,
    row,
    col,
    cols,
    mask,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Store the codes of the scaled tile [BR, BC] at (row, col). data: uint32; uint8 if masked."""
    if mask is None:
        store_words(data, row, col // 4, cols // 4, e4m3_words(x, BR, BC), BR, BC // 4)
    else:
        data += tile_start(row, col, cols) + tile_offsets(cols, BR, BC)
        tl.store(data, e4m3_code(x, HARDWARE=False), mask)


@triton.jit
def _mxfp8_codes_kernel(
    table,
    tiles,
    VALUE_DTYPE: tl.constexpr,
    WRITE_DTYPE: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    SQUARE: tl.constexpr,
    WHOLE: tl.constexpr,
    BC: tl.constexpr,
):
    """The shard's E4M3 codes of one tile, in both directions; SQUARE: one scale per 32x32 block.

    Grid: (n_tiles,). Tile: [32, BC]. Tables as for NVFP4. Reads the shard (2 or 4 bytes per
    element) and amaxes, writes one byte per element and direction.
    """
    tensor, row, col = load_tile(tiles, 32)
    cols = size(table, tensor, COLS, 32)
    ptr = _pointer(table, tensor, VALUE, VALUE_DTYPE, WHOLE)
    bounds = _bounds(table, tensor)
    mask = _own(bounds, row, col, cols, WHOLE, 32, BC)
    x = _load_value(ptr, row, col, cols, mask, WRITE_DTYPE, 32, BC)
    CODES: tl.constexpr = tl.uint32 if WHOLE else tl.uint8
    if ROWWISE:
        grid = _pointer(table, tensor, ROWWISE_AMAX, tl.float32, False)
        if SQUARE:
            grid += tile_start(row // 32, col // 32, cols // 32)
            grid += tl.zeros((32, 1), tl.int32) + tl.arange(0, BC // 32)[None, :]
        else:
            grid += tile_start(row, col // 32, cols // 32) + tile_offsets(cols // 32, 32, BC // 32)
        inside = (col // 32 + tl.arange(0, BC // 32) < cols // 32)[None, :]
        _, factor = mxfp8_scale(tl.load(grid, inside, 0.0))
        scaled = tl.reshape(x, (32, BC // 32, 32)) * factor[:, :, None]
        scaled = tl.reshape(scaled, (32, BC))
        data = _pointer(table, tensor, ROWWISE_DATA, CODES, WHOLE)
        _store_e4m3(scaled, data, row, col, cols, mask, 32, BC)
    if COLUMNWISE:
        grid = _pointer(table, tensor, COLUMNWISE_AMAX, tl.float32, False)
        grid += tile_start(row // 32, col, cols) + tl.arange(0, BC)
        _, factor = mxfp8_scale(tl.load(grid, col + tl.arange(0, BC) < cols, 0.0))
        data = _pointer(table, tensor, COLUMNWISE_DATA, CODES, WHOLE)
        _store_e4m3(x * factor[None, :], data, row, col, cols, mask, 32, BC)


@triton.jit
def _float8_codes_kernel(
    table,
    tiles,
    epsilon,
    VALUE_DTYPE: tl.constexpr,
    WRITE_DTYPE: tl.constexpr,
    SCALES_BLOCKS: tl.constexpr,
    LARGEST: tl.constexpr,
    POW_2: tl.constexpr,
    WHOLE: tl.constexpr,
    BR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The shard's E4M3 codes of one 128x128 tile, which is a block if SCALES_BLOCKS.

    Otherwise its scale is that of the tensor's amax, which is stored already.

    Grid: (n_tiles,). Tile: [128, 128] in parts of [BR, 128]. Tables as for NVFP4. Reads the shard
    (2 or 4 bytes per element) and one amax, writes one byte per element.
    """
    tensor, first_row, col = load_tile(tiles, 128)
    cols = size(table, tensor, COLS, 16 if WHOLE else 1)
    ptr = _pointer(table, tensor, VALUE, VALUE_DTYPE, WHOLE)
    bounds = _bounds(table, tensor)
    if SCALES_BLOCKS:
        grid = _pointer(table, tensor, ROWWISE_AMAX, tl.float32, False)
        grid += tile_start(first_row // 128, col // 128, tl.cdiv(cols, 128))
        scale = float8_scale(tl.load(grid), epsilon, LARGEST, POW_2)
    else:
        amax = tl.load(_pointer(table, tensor, AMAX, tl.float32, False))
        scale = tensor_scale(amax, epsilon, POW_2)
    data = _pointer(table, tensor, ROWWISE_DATA, tl.uint32 if WHOLE else tl.uint8, WHOLE)
    for i in tl.range(0, 128 // BR, num_stages=STAGES):
        row = first_row + i * BR
        mask = _own(bounds, row, col, cols, WHOLE, BR, 128)
        x = _load_value(ptr, row, col, cols, mask, WRITE_DTYPE, BR, 128) * scale
        _store_e4m3(x, data, row, col, cols, mask, BR, 128)


def measure(
    table: Tensor,
    tiles: Sequence[Tensor],
    *,
    format: str,
    value_dtype: torch.dtype,
    write_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
) -> list[Launch]:
    """The launches that write the amaxes of all blocks in the given tiles.

    ``tiles``: the list of unmasked tiles and the list of masked tiles. ``format``: a key of TILES.
    ``rowwise``, ``columnwise``: the directions of MXFP8. Tensor amaxes must be zero before.
    """

    def launch(listed: Tensor, tile: Tile, whole: bool) -> Launch:
        constexprs = _dtypes(value_dtype, write_dtype)
        if format in ("mxfp8", "mxfp4"):
            kernel = _mxfp8_amax_kernel
            constexprs |= dict(ROWWISE=rowwise, COLUMNWISE=columnwise, WHOLE=whole, BC=tile.cols)
        else:
            kernel = _square_amax_kernel
            constexprs |= dict(
                OF_BLOCKS=format != "float8",
                OF_TENSOR=format in ("nvfp4", "float8"),
                WHOLE=whole,
                BLOCK=tile.rows * tile.loop,
                BR=tile.rows,
                BC=tile.cols,
                STAGES=tile.num_stages,
            )
        return Launch(kernel, len(listed), (table, listed), constexprs, num_warps=tile.num_warps)

    return _launches(launch, tiles, format)


def write_scales(
    table: Tensor,
    chunks: Tensor,
    *,
    format: str,
    write_dtype: torch.dtype,
    force_pow_2_scales: bool,
    amax_epsilon: float,
    adaptive: str | None,
    bound: int,
    rounding: int,
) -> Launch:
    """The launch that writes scales, and amaxes of tensors, from amaxes.

    ``chunks``: of SCALES blocks each.
    """
    constexprs = dict(
        FORMAT=format,
        LARGEST=torch.finfo(write_dtype).max,
        POW_2=force_pow_2_scales,
        ADAPTIVE=adaptive,
        BOUND=bound,
        ROUNDING=rounding,
        CHUNK=SCALES,
    )
    return Launch(_scales_kernel, len(chunks), (table, chunks, amax_epsilon), constexprs)


def write_choices(
    table: Tensor,
    tiles: Sequence[Tensor],
    *,
    value_dtype: torch.dtype,
    write_dtype: torch.dtype,
    adaptive: str,
    bound: int,
) -> list[Launch]:
    """The launches that write which of two scales the blocks of NVFP4 shards have.

    ``tiles``: as for `measure`.
    """

    def launch(listed: Tensor, tile: Tile, whole: bool) -> Launch:
        constexprs = _dtypes(value_dtype, write_dtype)
        constexprs |= dict(ADAPTIVE=adaptive, BOUND=bound, WHOLE=whole, BC=tile.cols)
        fixed = (table, listed)
        return Launch(
            _nvfp4_choices_kernel, len(listed), fixed, constexprs, num_warps=tile.num_warps
        )

    return _launches(launch, tiles, "nvfp4")


def write_codes(
    table: Tensor,
    tiles: Sequence[Tensor],
    *,
    format: str,
    value_dtype: torch.dtype,
    write_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    force_pow_2_scales: bool,
    amax_epsilon: float,
    adaptive: str | None,
    bound: int,
    rounding: int,
) -> list[Launch]:
    """The launches that write the codes of shards, using amaxes.

    Arguments as in `measure` and `write_scales`.
    """

    def launch(listed: Tensor, tile: Tile, whole: bool) -> Launch:
        constexprs = _dtypes(value_dtype, write_dtype)
        is_float8 = format.startswith("float8")
        fixed = (table, listed, amax_epsilon) if is_float8 else (table, listed)
        if format == "nvfp4":
            kernel = _nvfp4_codes_kernel
            constexprs |= dict(ADAPTIVE=adaptive, BOUND=bound, WHOLE=whole, BC=tile.cols)
        elif format == "mxfp4":
            kernel = _mxfp4_codes_kernel
            constexprs |= dict(ROUNDING=rounding, WHOLE=whole, BC=tile.cols)
        elif format.startswith("mxfp8"):
            square = format == "mxfp8_2d"
            kernel = _mxfp8_codes_kernel
            constexprs |= dict(ROWWISE=rowwise, COLUMNWISE=columnwise and not square)
            constexprs |= dict(SQUARE=square, WHOLE=whole, BC=tile.cols)
        else:
            kernel = _float8_codes_kernel
            constexprs |= dict(
                SCALES_BLOCKS=format == "float8_block",
                LARGEST=torch.finfo(write_dtype).max,
                POW_2=force_pow_2_scales,
                WHOLE=whole,
                BR=tile.rows,
                STAGES=tile.num_stages,
            )
        return Launch(kernel, len(listed), fixed, constexprs, num_warps=tile.num_warps)

    return _launches(launch, tiles, format)


def _launches(
    launch: Callable[[Tensor, Tile, bool], Launch], tiles: Sequence[Tensor], format: str
) -> list[Launch]:
    """What ``launch`` returns for the lists of unmasked and of masked tiles that are not empty."""
    whole = zip(tiles, TILES[format], (True, False), strict=True)
    return [launch(*given) for given in whole if len(given[0])]


def _dtypes(value_dtype: torch.dtype, write_dtype: torch.dtype) -> dict[str, Any]:
    return dict(VALUE_DTYPE=TRITON_DTYPES[value_dtype], WRITE_DTYPE=TRITON_DTYPES[write_dtype])
