"""MXFP4: kernels that quantize and dequantize matrices, and their tile functions."""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.launch.launch import on_its_device
from fp4adam.kernels.launch.stored import inputs
from fp4adam.kernels.launch.tensor_table import Storage, divisor_tile, tile_offsets, tile_start
from fp4adam.kernels.tiles.bfloat16 import round_to, to_float32
from fp4adam.kernels.tiles.changes import flag_units, flag_words
from fp4adam.kernels.tiles.e2m1 import e2m1_round, e2m1_value
from fp4adam.kernels.tiles.e8m0 import e8m0_reciprocal, e8m0_value
from fp4adam.kernels.tiles.mx import (
    amax_of_blocks,
    complete_blocks,
    scale_pointers,
    split_off_blocks,
)
from fp4adam.kernels.tiles.remainder import unit_of_one
from fp4adam.kernels.tiles.words import (
    are_aligned,
    pack_words,
    part_of,
    store_words,
    word_decoder,
    word_offsets,
    word_positions,
)

BLOCK = 32
MOST_ROWS, MOST_COLS = 32, 64  # of a tile


@triton.jit
def mxfp4_scale(amax, ROUNDING: tl.constexpr):
    """E8M0 scales (int32) of blocks with these float32 amaxes, to whose bits ROUNDING is added."""
    return tl.maximum(((amax.to(tl.int32, bitcast=True) + ROUNDING) >> 23) - 2, 0)


@triton.jit
def mxfp4_tile(x, ROUNDING: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Quantize the float32 tile [BR, BC].

    Returns words of codes (uint32 [BR, BC / 8]), the values of codes [BR, BC / 32, 32], and scales
    (uint8 [BR, BC / 32]).
    """
    blocks = tl.reshape(x, (BR, BC // 32, 32))
    scale = mxfp4_scale(amax_of_blocks(blocks, 2), ROUNDING)
    code, value = e2m1_round(blocks * e8m0_reciprocal(scale)[:, :, None])
    return pack_words(tl.reshape(code, (BR, BC)), 4, BR, BC), value, scale.to(tl.uint8)


@triton.jit
def mxfp4_master(
    storage, remainder, row, col, cols, CAPS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """The float32 masters of a tile [BR, BC] from its codes and int8 remainders."""
    data = storage.rowwise_data + tile_start(row, col // 8, cols // 8)
    words = tl.load(data + tile_offsets(cols // 8, BR, BC // 8))
    code = (words[:, :, None].to(tl.int32) >> (4 * tl.arange(0, 8))[None, None, :]) & 0xF
    grid = scale_pointers(storage.rowwise_scale, row, col, cols, BR, BC)
    factor = e8m0_value(tl.load(grid))
    return complete_blocks(e2m1_value(code), factor, remainder, 4, BR, BC, CAPS)


@triton.jit
def mxfp4_remainder(
    master, value, scale, dither, CAPS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """The int8 remainders [BR, BC] of masters with these values of codes and scales."""
    factor = e8m0_value(scale)
    _, inverse = unit_of_one(factor, 4)
    return split_off_blocks(master, value, factor, inverse, dither, 4, BR, BC, CAPS)


@triton.jit
def store_tile(
    words,
    scale,
    row,
    col,
    cols,
    storage,
    RECORDS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Store words and scales of the tile [BR, BC] at (row, col).

    RECORDS: whether to flag the units that change.
    """
    if RECORDS:
        data = storage.rowwise_data
        flag_words(storage.changed, data, row, col // 8, cols // 8, words, 4)
        differs = tl.load(scale_pointers(storage.rowwise_scale, row, col, cols, BR, BC)) != scale
        flag_units(storage.changed, row, col // 32, cols // 32, differs, 1)
        tl.debug_barrier()  # warps may share bytes that others overwrite
    store_words(storage.rowwise_data, row, col // 8, cols // 8, words, BR, BC // 8)
    tl.store(scale_pointers(storage.rowwise_scale, row, col, cols, BR, BC), scale)


@triton.jit
def _quantize_kernel(
    x_ptr,
    data,
    scales,
    cols,
    tiles_per_row,
    ROUNDING: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Quantize a matrix.

    Grid: (n_tiles,). Tile: [BR, BC], which divides the matrix. Reads x (2 or 4 bytes per element),
    writes half a byte per element, and the scales.
    """
    tile = tl.program_id(0)
    row, col = tile // tiles_per_row * BR, tile % tiles_per_row * BC
    x = to_float32(tl.load(x_ptr + tile_start(row, col, cols) + tile_offsets(cols, BR, BC)))
    words, _, scale = mxfp4_tile(x, ROUNDING, BR, BC)
    storage = Storage(data, scales, None, None, None)
    store_tile(words, scale, row, col, cols, storage, False, BR, BC)


@triton.jit
def _dequantize_kernel(
    data_ptr,
    scale_ptr,
    out_ptr,
    cols,
    tiles_per_row,
    stride_scale_row,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Decode packed codes [rows, cols / 2].

    Grid: (n_tiles,). Tile: [BR, BC], which divides the matrix. Reads half a byte per element and
    the scales, writes 2 or 4 bytes per element.
    """
    tile = tl.program_id(0)
    row, col = tile // tiles_per_row * BR, tile % tiles_per_row * BC
    packed = tl.load(
        data_ptr + tile_start(row, col // 2, cols // 2) + tile_offsets(cols // 2, BR, BC // 2)
    )
    value = e2m1_value(tl.interleave(packed & 0xF, packed >> 4))
    grid = scale_ptr + tile_start(row, col // 32, stride_scale_row)
    factor = e8m0_value(tl.load(grid + tile_offsets(stride_scale_row, BR, BC // 32)))
    value = tl.reshape(value, (BR, BC // 32, 32)) * factor[:, :, None]
    out = out_ptr + tile_start(row, col, cols) + tile_offsets(cols, BR, BC)
    tl.store(out, round_to(tl.reshape(value, (BR, BC)), out_ptr.dtype.element_ty))


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
    PARTED: tl.constexpr,
    N: tl.constexpr,
):
    """Decode N words of eight packed codes each, with the arithmetic of the kernel above.

    Grid: (ceil(n_words / N),). A thread reads a word and writes its values, 16 bytes if BF16.
    """
    word, inside, row, i = word_positions(n_words, words_per_row, N)
    part, scale_row = part_of(row, rows_per_part, 1, PARTED)
    words = (data_ptr + part * data_gap).to(tl.pointer_type(tl.uint32)) + word
    packed = tl.load(words, inside, 0)
    scales = scale_ptr + part * scale_part + scale_row * stride_scale_row + i // 4
    factor = e8m0_value(tl.load(scales, inside, 0))
    code = (packed[:, None] >> (4 * tl.arange(0, 8))[None, :]) & 0xF
    value = round_to(e2m1_value(code) * factor[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + word_offsets(word), value, inside[:, None])


_words_decoder = word_decoder(_dequantize_words_kernel)


@on_its_device
def quantize(x: Tensor, out: Any, layout: Any) -> None:
    """Quantize the matrix ``x`` [rows, cols] (contiguous, multiples of 32) into storage."""
    rows, cols = x.shape
    br, bc = divisor_tile(rows, MOST_ROWS, 1), divisor_tile(cols, MOST_COLS, BLOCK)
    _quantize_kernel[(rows // br * (cols // bc),)](
        x,
        out.rowwise_data,
        out.rowwise_scale_inv,
        cols,
        cols // bc,
        ROUNDING=layout.scale_rule.rounding,
        BR=br,
        BC=bc,
        enable_fp_fusion=False,
    )


def decoder(out: Tensor, stored: Any, layout: Any) -> Callable[[], None] | None:
    """A function that decodes packed codes [rows, cols / 2] into ``out`` whenever it is called.

    None if codes are unaligned. A stack of codes [parts, rows, cols / 2] with scales [parts, ...]
    holds consecutive parts of the rows.
    """
    data, scale, _ = inputs(stored, layout)
    if not are_aligned(data):
        return None
    return _words_decoder(data, scale, out=out, strides=(scale.stride(-2),))


@on_its_device
def dequantize(out: Tensor, stored: Any, layout: Any) -> None:
    """Decode packed codes [rows, cols / 2] with scales per 1x32 block."""
    if not out.numel():
        return
    if decode := decoder(out, stored, layout):
        return decode()
    data, scale, _ = inputs(stored, layout)
    rows, cols = out.shape
    br, bc = divisor_tile(rows, MOST_ROWS, 1), divisor_tile(cols, MOST_COLS, BLOCK)
    _dequantize_kernel[(rows // br * (cols // bc),)](
        data, scale, out, cols, cols // bc, scale.stride(0), BR=br, BC=bc, enable_fp_fusion=False
    )
