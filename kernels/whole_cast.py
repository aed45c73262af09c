"""Quantize any number of whole matrices, in as few passes over their values as a format allows.

Float8Block and MXFP8 take one, and so does Float8 with delayed scaling. Current scaling takes
another one before, for the amaxes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels import float8_block_step
from fp4adam.kernels.float8 import tensor_scale
from fp4adam.kernels.float8_block import (
    decode_scale,
    float8_scale,
    load_rows,
    store_rows,
    tile_mask,
)
from fp4adam.kernels.launch.launch import Launch
from fp4adam.kernels.launch.tensor_table import (
    AMAX,
    AMAX_HISTORY,
    COLS,
    COLUMNWISE_DATA,
    ROWS,
    ROWWISE_DATA,
    ROWWISE_SCALE,
    TRITON_DTYPES,
    VALUE,
    Tile,
    Usage,
    cover,
    gemm_scale_pointers,
    load_tile,
    pointer,
    size,
    storage_pointers,
    tile_offsets,
    tile_start,
)
from fp4adam.kernels.mxfp8 import mxfp8_tile, store_gemm_scales, store_tile
from fp4adam.kernels.tiles.bfloat16 import to_float32
from fp4adam.kernels.tiles.e4m3 import e4m3_word

WARPS = 4  # of the kernels for blocks
MXFP8_TILE, MXFP8_EDGE = Tile(32, 128, 1, 4, 1), Tile(32, 32, 1, 4, 1)


@triton.jit
def _load_block(table, tensor, row, col, rows, cols, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    """The values of a block [128, 128], as four tiles of every fourth row: float32 [32, 128] each.

    Zeros outside of the matrix.
    """
    ptr = pointer(table, tensor, VALUE, DTYPE)
    rows_left = (rows - row + 3) // 4  # as many of each tile, as rows are a multiple of four
    mask = tile_mask(row * 0, col, rows_left, cols, MASKED, 32, 128)
    return (
        load_rows(ptr, row, col, cols, mask),
        load_rows(ptr, row + 1, col, cols, mask),
        load_rows(ptr, row + 2, col, cols, mask),
        load_rows(ptr, row + 3, col, cols, mask),
    )


@triton.jit
def _largest(x):
    """The largest magnitude of a block by :func:`_load_block`, which is not NaN."""
    magnitude = tl.join(tl.join(tl.abs(x[0]), tl.abs(x[1])), tl.join(tl.abs(x[2]), tl.abs(x[3])))
    magnitude = tl.where(magnitude == magnitude, magnitude, 0.0)
    return tl.max(tl.max(tl.max(tl.max(magnitude, 3), 2), 1), 0)


@triton.jit
def _raise_amax(table, tensor, COLUMN: tl.constexpr, amax):
    """Raise the amax at an address of the table to that of a block."""
    # The bits of non-negative floats order as integers do; an integer maximum is one atomic, a
    # float maximum two.
    bits = amax.to(tl.int32, bitcast=True)
    tl.atomic_max(pointer(table, tensor, COLUMN, tl.int32), bits, sem="relaxed")


@triton.jit
def _amax_kernel(table, tiles, VALUE_DTYPE: tl.constexpr, MASKED: tl.constexpr):
    """Raise the amax of a tensor to that of one block.

    Grid: (n_tiles,). Tile: [128, 128]. table: int64 [n_tensors, 19]. tiles: int32 [n_tiles, 4].
    MASKED: the block may reach past an edge. Reads the values (2 or 4 bytes per element).
    """
    tensor, row, col = load_tile(tiles, 128)
    rows, cols = size(table, tensor, ROWS, 16), size(table, tensor, COLS, 16)
    x = _load_block(table, tensor, row, col, rows, cols, VALUE_DTYPE, MASKED)
    _raise_amax(table, tensor, AMAX, _largest(x))


@triton.jit
def _square_kernel(
    table,
    tiles,
    epsilon,
    VALUE_DTYPE: tl.constexpr,
    SCALES_BLOCKS: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    LARGEST: tl.constexpr,
    POW_2: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Quantize one block of a Float8Block tensor (SCALES_BLOCKS) or of a Float8 tensor.

    Grid: (n_tiles,). Tile: [128, 128]. Tables as above. HAS_HISTORY: raise entry 0 of the tensor's
    history to the amax of the block. MASKED: the block may reach past an edge. Reads the values (2
    or 4 bytes per element), writes one byte per element and direction, and the scales of blocks.

    The block is held as four tiles of every fourth row. So four rows of a column, whose codes make
    a word, are in the same thread, and only whole words are exchanged between threads.
    """
    tensor, row, col = load_tile(tiles, 128)
    rows, cols = size(table, tensor, ROWS, 16), size(table, tensor, COLS, 16)
    x = _load_block(table, tensor, row, col, rows, cols, VALUE_DTYPE, MASKED)
    if SCALES_BLOCKS:
        scale = float8_scale(_largest(x), epsilon, LARGEST, POW_2)
        scale_ptr = pointer(table, tensor, ROWWISE_SCALE, tl.float32)
        scale_ptr += tile_start(row // 128, col // 128, tl.cdiv(cols, 128))
        tl.store(scale_ptr, decode_scale(scale, POW_2))
    else:
        if HAS_HISTORY:
            # Before the scale is loaded, so that values and products are not both kept.
            _raise_amax(table, tensor, AMAX_HISTORY, _largest(x))
        scale = tensor_scale(tl.load(pointer(table, tensor, AMAX, tl.float32)), epsilon, POW_2)
    x0, x1, x2, x3 = x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale
    data = pointer(table, tensor, ROWWISE_DATA, tl.uint32)
    mask = tile_mask(row * 0, col // 4, (rows - row + 3) // 4, cols // 4, MASKED, 32, 32)
    store_rows(x0, data, row, col, cols, mask)
    store_rows(x1, data, row + 1, col, cols, mask)
    store_rows(x2, data, row + 2, col, cols, mask)
    store_rows(x3, data, row + 3, col, cols, mask)
    if COLUMNWISE:
        data = pointer(table, tensor, COLUMNWISE_DATA, tl.uint32)
        data += tile_start(col, row // 4, rows // 4)
        mask = tile_mask(col, row // 4, cols, rows // 4, MASKED, 128, 32)
        tl.store(data + tile_offsets(rows // 4, 128, 32), tl.trans(e4m3_word(x0, x1, x2, x3)), mask)


@triton.jit
def _mxfp8_kernel(table, tiles, VALUE_DTYPE: tl.constexpr, USAGE: tl.constexpr, BC: tl.constexpr):
    """Quantize one tile of an MXFP8 tensor.

    Grid: (n_tiles,). Tile: [32, BC], inside the matrix. Tables as above. Reads the values (2 or 4
    bytes per element), writes one byte per element and direction, and the scales, swizzled ones too
    if USAGE.swizzled.
    """
    tensor, row, col = load_tile(tiles, 32)
    rows, cols = size(table, tensor, ROWS, 32), size(table, tensor, COLS, 32)
    ptr = pointer(table, tensor, VALUE, VALUE_DTYPE) + tile_start(row, col, cols)
    x = to_float32(tl.load(ptr + tile_offsets(cols, 32, BC)))
    storage = storage_pointers(table, tensor, tl.uint32, tl.uint8)
    row_words, row_scale, column_words, column_scale = mxfp8_tile(x, USAGE, BC, True)
    store_tile(row_words, row_scale, column_words, column_scale, row, col, cols, storage, USAGE, BC)
    if USAGE.swizzled:
        store_gemm_scales(
            row_scale, column_scale, row, col, rows, cols, gemm_scale_pointers(table, tensor),
            USAGE, BC,
        )  # fmt: skip


def measure(table: Tensor, shapes: list[tuple[int, int]], dtype: torch.dtype) -> list[Launch]:
    """The launches that raise the amaxes of Float8 tensors to those of values of ``dtype``.

    ``shapes``: [rows, cols] of each tensor of the table.
    """
    return [
        Launch(
            _amax_kernel,
            len(tiles),
            (table, tiles),
            dict(VALUE_DTYPE=TRITON_DTYPES[dtype], MASKED=masked),
            num_warps=WARPS,
        )
        for tiles, masked in _blocks(shapes, table.device)
    ]


def quantize_square(
    table: Tensor,
    shapes: list[tuple[int, int]],
    dtype: torch.dtype,
    *,
    scales_blocks: bool,
    has_history: bool,
    columnwise: bool,
    force_pow_2_scales: bool,
    amax_epsilon: float,
) -> list[Launch]:
    """The launches that quantize Float8 tensors with known amaxes, or Float8Block tensors.

    Arguments as for :func:`measure`, and properties of the tensors' quantizer.
    """
    return [
        Launch(
            _square_kernel,
            len(tiles),
            (table, tiles, amax_epsilon),
            dict(
                VALUE_DTYPE=TRITON_DTYPES[dtype],
                SCALES_BLOCKS=scales_blocks,
                HAS_HISTORY=has_history,
                LARGEST=torch.finfo(dtype).max,
                POW_2=force_pow_2_scales,
                COLUMNWISE=columnwise,
                MASKED=masked,
            ),
            num_warps=WARPS,
        )
        for tiles, masked in _blocks(shapes, table.device)
    ]


def quantize_mxfp8(
    table: Tensor, shapes: list[tuple[int, int]], dtype: torch.dtype, usage: Usage
) -> list[Launch]:
    """The launches that quantize MXFP8 tensors; arguments as for :func:`measure`."""
    forms = MXFP8_TILE, MXFP8_EDGE
    return [
        Launch(
            _mxfp8_kernel,
            len(tiles),
            (table, tiles.to(table.device)),
            dict(VALUE_DTYPE=TRITON_DTYPES[dtype], USAGE=usage, BC=tile.cols),
            num_warps=tile.num_warps,
        )
        for tiles, tile in zip(cover(shapes, *forms), forms, strict=True)
    ]


def _blocks(shapes: list[tuple[int, int]], device: torch.device) -> list[tuple[Tensor, bool]]:
    """The blocks inside the matrices, and those at their edges, which are masked."""
    whole, masked = float8_block_step.step_tiles(shapes)
    return [(whole.to(device), False), (masked.to(device), True)]
