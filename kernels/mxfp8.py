"""MXFP8: kernels that quantize and dequantize matrices, and their tile functions."""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.launch.launch import on_its_device
from fp4adam.kernels.launch.stored import inputs, outputs
from fp4adam.kernels.launch.tensor_table import Storage, Usage, tile_offsets, tile_start
from fp4adam.kernels.swizzle import store_swizzled
from fp4adam.kernels.tiles.bfloat16 import round_to, to_float32
from fp4adam.kernels.tiles.changes import flag_units, flag_words
from fp4adam.kernels.tiles.e4m3 import e4m3_value, e4m3_word_values, e4m3_words
from fp4adam.kernels.tiles.e8m0 import e8m0_code_up, e8m0_reciprocal, e8m0_value
from fp4adam.kernels.tiles.layout import state_offsets
from fp4adam.kernels.tiles.mx import (
    amax_of_blocks,
    complete_blocks,
    scale_pointers,
    split_off_blocks,
)
from fp4adam.kernels.tiles.remainder import FP32_MAX, unit_of_one
from fp4adam.kernels.tiles.words import (
    are_aligned,
    part_of,
    store_words,
    word_decoder,
    word_offsets,
    word_positions,
)

BLOCK = 32


@triton.jit
def mxfp8_scale(amax):
    """E8M0 scales (int32) of blocks with the given float32 amaxes, and their reciprocals."""
    # The factor is 1 / 448 rounded to float32; a division would give the same scales.
    scale = e8m0_code_up(amax * 0.0022321429569274187)
    return scale, e8m0_reciprocal(scale)


@triton.jit
def scale_blocks(blocks, AXIS: tl.constexpr):
    """Divide float32 blocks along AXIS by their E8M0 scales; returns them and scales (uint8)."""
    scale, factor = mxfp8_scale(amax_of_blocks(blocks, AXIS))
    return blocks * tl.expand_dims(factor, AXIS), scale.to(tl.uint8)


@triton.jit
def mxfp8_tile(x, USAGE: tl.constexpr, BC: tl.constexpr, HARDWARE: tl.constexpr):
    """Quantize the float32 tile [32, BC]; for HARDWARE see :func:`e4m3_words`.

    Returns rowwise words of codes (uint32 [32, BC / 4]) and scales (uint8 [32, BC / 32]), then
    columnwise words (uint32 [32, BC / 4]) and scales (uint8 [1, BC]); zeros for a direction that is
    not in USAGE. With USAGE.square the scales of both directions are those of 32x32 blocks, and
    the rowwise words serve both.
    """
    row_words = tl.zeros((32, BC // 4), tl.uint32)
    row_scale = tl.zeros((32, BC // 32), tl.uint8)
    column_words = tl.zeros((32, BC // 4), tl.uint32)
    column_scale = tl.zeros((1, BC), tl.uint8)
    if USAGE.square:
        blocks = tl.reshape(x, (32, BC // 32, 32))
        amax = tl.max(amax_of_blocks(blocks, 2), 0)[None, :]
        scale, factor = mxfp8_scale(amax)
        row_words = e4m3_words(tl.reshape(blocks * factor[:, :, None], (32, BC)), 32, BC, HARDWARE)
        row_scale += scale.to(tl.uint8)
        columns = tl.zeros((1, BC // 32, 32), tl.uint8) + scale.to(tl.uint8)[:, :, None]
        column_scale = tl.reshape(columns, (1, BC))
    elif USAGE.rowwise:
        scaled, row_scale = scale_blocks(tl.reshape(x, (32, BC // 32, 32)), 2)
        row_words = e4m3_words(tl.reshape(scaled, (32, BC)), 32, BC, HARDWARE)
    if USAGE.columnwise and not USAGE.square:
        scaled, column_scale = scale_blocks(tl.reshape(x, (1, 32, BC)), 1)
        column_words = e4m3_words(tl.reshape(scaled, (32, BC)), 32, BC, HARDWARE)
    return row_words, row_scale, column_words, column_scale


@triton.jit
def mxfp8_master(
    storage,
    remainder,
    row,
    col,
    cols,
    SQUARE: tl.constexpr,
    BC: tl.constexpr,
    LANES: tl.constexpr,
):
    """The float32 masters of a tile [32, BC] from its rowwise codes and int8 remainders.

    remainder: None for none.
    """
    ptr = storage.rowwise_data.to(tl.pointer_type(tl.uint8)) + tile_start(row, col, cols)
    value = e4m3_value(tl.load(ptr + state_offsets(cols, 32, BC, LANES)))
    if SQUARE:
        grid = storage.rowwise_scale + tile_start(row // 32, col // 32, cols // 32)
        grid += tl.zeros((32, 1), tl.int32) + tl.arange(0, BC // 32)[None, :]
    else:
        grid = scale_pointers(storage.rowwise_scale, row, col, cols, 32, BC)
    factor = e8m0_value(tl.load(grid))
    return complete_blocks(value, factor, remainder, 8, 32, BC)


@triton.jit
def mxfp8_remainder(master, words, scale, dither, BC: tl.constexpr):
    """The int8 remainders [32, BC] of masters with these rowwise words and scales."""
    factor = e8m0_value(scale)
    # The inverse of the unit is a power of two times that of 1, so nothing has to be divided.
    _, inverse = unit_of_one(1.0, 8)
    inverse = tl.minimum(inverse * e8m0_reciprocal(scale), FP32_MAX)
    value = e4m3_word_values(words, 32, BC)
    return split_off_blocks(master, value, factor, inverse, dither, 8, 32, BC)


@triton.jit
def store_tile(
    row_words,
    row_scale,
    column_words,
    column_scale,
    row,
    col,
    cols,
    storage,
    USAGE: tl.constexpr,
    BC: tl.constexpr,
):
    """Store the results of :func:`mxfp8_tile` for the tile [32, BC] at (row, col)."""
    if USAGE.records:
        data = storage.rowwise_data
        flag_words(storage.changed, data, row, col // 4, cols // 4, row_words, 8)
    if USAGE.square:
        grid = storage.rowwise_scale + tile_start(row // 32, col // 32, cols // 32)
        grid += tl.arange(0, BC // 32)
        scale = tl.max(row_scale.to(tl.int32), 0).to(tl.uint8)
        if USAGE.records:
            differs = tl.broadcast_to((tl.load(grid) != scale)[None, :], (32, BC // 32))
            flag_units(storage.changed, row, col // 32, cols // 32, differs, 1)
            tl.debug_barrier()  # warps may share bytes that others overwrite
        store_words(storage.rowwise_data, row, col // 4, cols // 4, row_words, 32, BC // 4)
        tl.store(grid, scale)
    elif USAGE.rowwise:
        grid = scale_pointers(storage.rowwise_scale, row, col, cols, 32, BC)
        if USAGE.records:
            differs = tl.load(grid) != row_scale
            flag_units(storage.changed, row, col // 32, cols // 32, differs, 1)
            tl.debug_barrier()
        store_words(storage.rowwise_data, row, col // 4, cols // 4, row_words, 32, BC // 4)
        tl.store(grid, row_scale)
    if USAGE.columnwise and not USAGE.square:
        store_words(storage.columnwise_data, row, col // 4, cols // 4, column_words, 32, BC // 4)
        width = (cols + 127) // 128 * 128
        grid = storage.columnwise_scale + tile_start(row // 32, col, width)
        tl.store(grid + tile_offsets(width, 1, BC), column_scale)


@triton.jit
def store_gemm_scales(
    row_scale,
    column_scale,
    row,
    col,
    rows,
    cols,
    gemm_scales,
    USAGE: tl.constexpr,
    BC: tl.constexpr,
):
    """Store the scales of the tile [32, BC] at (row, col) in the swizzled GEMM layout."""
    if USAGE.rowwise:
        store_swizzled(gemm_scales.rowwise, row, col // 32, cols // 32, row_scale, 32, BC // 32)
    if USAGE.columnwise:
        scale = tl.trans(column_scale)
        store_swizzled(gemm_scales.columnwise, col, row // 32, rows // 32, scale, BC, 1)


@triton.jit
def _quantize_kernel(
    x_ptr,
    rowwise_data,
    rowwise_scale,
    columnwise_data,
    columnwise_scale,
    cols,
    USAGE: tl.constexpr,
    BC: tl.constexpr,
):
    """Quantize a matrix.

    Grid: (n_tiles,). Tile: [32, BC], dividing the matrix. Reads x (2 or 4 bytes per element),
    writes one byte per element and direction, and the scales.
    """
    tile, tiles_per_row = tl.program_id(0), cols // BC
    row, col = tile // tiles_per_row * 32, tile % tiles_per_row * BC
    x = to_float32(tl.load(x_ptr + tile_start(row, col, cols) + tile_offsets(cols, 32, BC)))
    storage = Storage(rowwise_data, rowwise_scale, columnwise_data, columnwise_scale, None)
    # The storage may be unaligned, so words are split into bytes, which rules out HARDWARE (see
    # e4m3_code).
    row_words, row_scale, column_words, column_scale = mxfp8_tile(x, USAGE, BC, False)
    store_tile(row_words, row_scale, column_words, column_scale, row, col, cols, storage, USAGE, BC)


@triton.jit
def _dequantize_kernel(
    data_ptr,
    scale_ptr,
    out_ptr,
    cols,
    stride_scale_row,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Decode E4M3 codes [rows, cols] with a scale per block.

    Grid: (n_tiles,). Tile: [BR, BC], dividing the matrix. Reads one byte per element and the
    scales, writes 2 or 4 bytes per element.
    """
    tile, tiles_per_row = tl.program_id(0), cols // BC
    row, col = tile // tiles_per_row * BR, tile % tiles_per_row * BC
    offs = tile_start(row, col, cols) + tile_offsets(cols, BR, BC)
    value = e4m3_value(tl.load(data_ptr + offs))
    r, c = row + tl.arange(0, BR), col + tl.arange(0, BC)
    scale_row, scale_col = r // BLOCK_ROWS, c // BLOCK_COLS
    at = scale_row.to(tl.int64)[:, None] * stride_scale_row + scale_col[None, :]
    value = value * e8m0_value(tl.load(scale_ptr + at))
    tl.store(out_ptr + offs, round_to(value, out_ptr.dtype.element_ty))


@triton.jit
def _dequantize_words_kernel(
    data_ptr,
    scale_ptr,
    out_ptr,
    n_words,
    words_per_row,
    stride_scale_row,
    rows_per_part,
    data_gap,
    scale_part,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    PARTED: tl.constexpr,
    N: tl.constexpr,
):
    """Decode N groups of eight codes each, with the arithmetic of the kernel above.

    Grid: (ceil(n_words / N),). A thread reads 8 bytes and writes their values, 16 bytes if BF16.
    """
    word, inside, row, i = word_positions(n_words, words_per_row, N)
    part, scale_row = part_of(row, rows_per_part, BLOCK_ROWS, PARTED)
    offs = word_offsets(word)
    code = tl.load(data_ptr + (part * data_gap)[:, None] + offs, inside[:, None], 0)
    scale_ptr += part * scale_part
    if BLOCK_COLS == 32:
        scales = scale_ptr + scale_row * stride_scale_row + i // 4
        scale = e8m0_value(tl.load(scales, inside, 0))[:, None]
    else:
        scales = scale_row[:, None] * stride_scale_row
        column = tl.multiple_of(8 * i, 8)[:, None] + tl.arange(0, 8)[None, :]
        scale = e8m0_value(tl.load(scale_ptr[:, None] + scales + column, inside[:, None], 0))
    value = round_to(e4m3_value(code) * scale, out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs, value, inside[:, None])


_words_decoder = word_decoder(_dequantize_words_kernel)


@on_its_device
def quantize(x: Tensor, out: Any, layout: Any) -> None:
    """Quantize the matrix ``x`` [rows, cols] (contiguous, multiples of 32) into storage."""
    rows, cols = x.shape
    _quantize_kernel[(rows // BLOCK * (cols // BLOCK),)](
        x,
        *outputs(out, layout),
        cols,
        USAGE=Usage(
            out.rowwise_data is not None, out.columnwise_data is not None, layout.is_square
        ),
        BC=BLOCK,
        enable_fp_fusion=False,
    )


def decoder(out: Tensor, stored: Any, layout: Any) -> Callable[[], None] | None:
    """A function that decodes E4M3 codes [rows, cols] into ``out`` whenever it is called.

    None if codes are unaligned. Blocks are 1x32, 32x1 or 32x32. A stack of codes
    [parts, rows, cols] with scales [parts, ...] holds consecutive parts of the rows.
    """
    data, scale, _ = inputs(stored, layout)
    if not are_aligned(data):
        return None
    strides = (scale.stride(-2),)
    return _words_decoder(data, scale, out=out, strides=strides, **_block(stored, layout))


@on_its_device
def dequantize(out: Tensor, stored: Any, layout: Any) -> None:
    """Decode E4M3 codes [rows, cols] with scales per 1x32, 32x1 or 32x32 block."""
    if not out.numel():
        return
    if decode := decoder(out, stored, layout):
        return decode()
    data, scale, _ = inputs(stored, layout)
    rows, cols = out.shape
    _dequantize_kernel[(rows // BLOCK * (cols // BLOCK),)](
        data,
        scale,
        out,
        cols,
        scale.stride(0),
        **_block(stored, layout),
        BR=BLOCK,
        BC=BLOCK,
        enable_fp_fusion=False,
    )


def _block(stored: Any, layout: Any) -> dict[str, int]:
    rows, cols = layout.blocks["columnwise" if stored.rowwise_data is None else "rowwise"]
    return dict(BLOCK_ROWS=rows, BLOCK_COLS=cols)
