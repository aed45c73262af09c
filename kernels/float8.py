"""Float8, one scale per tensor: kernels that quantize and dequantize, and their tile functions."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels import nvfp4
from fp4adam.kernels.float8_block import float8_scale
from fp4adam.kernels.launch.launch import on_its_device
from fp4adam.kernels.launch.stored import inputs
from fp4adam.kernels.launch.tensor_table import (
    Storage,
    Usage,
    divisor_tile,
    tile_offsets,
    tile_start,
)
from fp4adam.kernels.tiles.bfloat16 import round_to, to_float32
from fp4adam.kernels.tiles.e4m3 import e4m3_value, e4m3_words
from fp4adam.kernels.tiles.layout import state_offsets
from fp4adam.kernels.tiles.remainder import complete, unit_of_one
from fp4adam.kernels.tiles.words import (
    are_aligned,
    part_of,
    store_words,
    transpose_words,
    word_decoder,
    word_offsets,
    word_positions,
)

BLOCK = 16
FP32_MAX = tl.constexpr(3.4028234663852886e38)

# The largest magnitude of a matrix is a matter of no format.
measure = nvfp4.measure


@triton.jit
def tensor_scale(amax, epsilon, POW_2: tl.constexpr):
    """The float32 encode scale of a tensor with this amax; both scalars."""
    return float8_scale(amax, epsilon, FP32_MAX, POW_2)


@triton.jit
def float8_tile(
    x, scale, row, col, cols, storage, USAGE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Quantize the float32 tile [BR, BC] at (row, col) and store the rowwise part.

    Returns words of codes [BR, BC / 4]. With USAGE.columnwise the caller passes them to
    :func:`store_columnwise`; otherwise ignore them.
    """
    words = e4m3_words(x * scale, BR, BC, HARDWARE=not USAGE.columnwise)
    if USAGE.rowwise:
        store_words(storage.rowwise_data, row, col // 4, cols // 4, words, BR, BC // 4)
    return words


@triton.jit
def float8_master(
    storage,
    remainder,
    row,
    col,
    cols,
    scale,
    BR: tl.constexpr,
    BC: tl.constexpr,
    LANES: tl.constexpr,
):
    """The float32 masters of a tile from its rowwise codes and int8 remainders [BR, BC].

    scale: the encode scale of the codes. LANES: neighbours per thread.
    """
    ptr = storage.rowwise_data.to(tl.pointer_type(tl.uint8)) + tile_start(row, col, cols)
    value = e4m3_value(tl.load(ptr + state_offsets(cols, BR, BC, LANES)))
    factor = tl.div_rn(1.0, scale)
    unit, _ = unit_of_one(factor, 8)
    return complete(value, factor, unit, remainder, 8)


@triton.jit
def store_columnwise(words, row, col, rows, storage, R: tl.constexpr, C: tl.constexpr):
    """Store the columnwise codes of a tile [R, C] at (row, col)."""
    words = transpose_words(words, 8, R, C)
    store_words(storage.columnwise_data, col, row // 4, rows // 4, words, C, R // 4)


@triton.jit
def _quantize_kernel(
    x_ptr,
    rowwise_data,
    columnwise_data,
    amax_ptr,
    rows,
    cols,
    tiles_per_row,
    epsilon,
    USAGE: tl.constexpr,
    POW_2: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Quantize a matrix with a known amax.

    Grid: (n_tiles,). Tile: [BR, BC], which divides the matrix. Reads x (2 or 4 bytes per element),
    writes one byte per element and direction.
    """
    tile = tl.program_id(0)
    row, col = tile // tiles_per_row * BR, tile % tiles_per_row * BC
    x = to_float32(tl.load(x_ptr + tile_start(row, col, cols) + tile_offsets(cols, BR, BC)))
    scale = tensor_scale(tl.load(amax_ptr), epsilon, POW_2)
    storage = Storage(rowwise_data, None, columnwise_data, None, None)
    words = float8_tile(x, scale, row, col, cols, storage, USAGE, BR, BC)
    if USAGE.columnwise:
        store_columnwise(words, row, col, rows, storage, BR, BC)


@on_its_device
def quantize(x: Tensor, out: Any, layout: Any) -> None:
    """Quantize the matrix ``x`` [rows, cols] (contiguous, multiples of 16) into storage."""
    rows, cols = x.shape
    tile_rows, tile_cols = divisor_tile(rows, 64, BLOCK), divisor_tile(cols, 64, BLOCK)
    _quantize_kernel[(rows // tile_rows * (cols // tile_cols),)](
        x,
        out.rowwise_data,
        out.columnwise_data,
        out.amax,
        rows,
        cols,
        cols // tile_cols,
        layout.scale_rule.amax_epsilon,
        USAGE=Usage(out.rowwise_data is not None, out.columnwise_data is not None),
        POW_2=layout.scale_rule.force_pow_2_scales,
        BR=tile_rows,
        BC=tile_cols,
        enable_fp_fusion=False,
    )


@triton.jit
def _dequantize_words_kernel(
    data_ptr,
    amax_ptr,
    out_ptr,
    n_words,
    words_per_row,
    rows_per_part,
    data_gap,
    scale_part,
    EPSILON: tl.constexpr,
    POW_2: tl.constexpr,
    PARTED: tl.constexpr,
    N: tl.constexpr,
):
    """Decode N groups of eight codes each.

    Grid: (ceil(n_words / N),). A thread reads 8 bytes and writes their values, 16 bytes if BF16.
    """
    word, inside, row, _ = word_positions(n_words, words_per_row, N)
    part, _ = part_of(row, rows_per_part, 1, PARTED)
    offs = word_offsets(word)
    code = tl.load(data_ptr + (part * data_gap)[:, None] + offs, inside[:, None], 0)
    scale = tl.div_rn(1.0, tensor_scale(tl.load(amax_ptr), EPSILON, POW_2))
    value = round_to(e4m3_value(code) * scale, out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs, value, inside[:, None])


_words_decoder = word_decoder(_dequantize_words_kernel)


def decoder(out: Tensor, stored: Any, layout: Any) -> Callable[[], None] | None:
    """A function that decodes E4M3 codes [rows, cols] into ``out`` whenever it is called.

    None if codes are transposed or unaligned, or columns are no multiple of eight. A
    stack of codes [parts, rows, cols] holds consecutive parts of the rows.
    """
    data, _, transposed = inputs(stored, layout)
    if transposed or data.shape[-1] % 8 or not are_aligned(data):
        return None
    return _decoder(out, data, stored.amax, layout)


def _decoder(out: Tensor, codes: Tensor, amax: Tensor, layout: Any) -> Callable[[], None]:
    rule = layout.scale_rule
    options = dict(EPSILON=rule.amax_epsilon, POW_2=rule.force_pow_2_scales)
    return _words_decoder(codes, amax, out=out, strides=(), **options)


@on_its_device
def dequantize(out: Tensor, stored: Any, layout: Any) -> None:
    """Decode E4M3 codes [rows, cols] into ``out``; transposed codes give [cols, rows]."""
    if decode := decoder(out, stored, layout):
        return decode()
    data, _, transposed = inputs(stored, layout)
    # One scale serves all, so the codes may lie in a row.
    codes = (data.t() if transposed else data).flatten()
    codes = torch.nn.functional.pad(codes, (0, -len(codes) % 8)).view(1, -1)
    values = out.new_empty(codes.shape)
    _decoder(values, codes, stored.amax, layout)()
    out.copy_(values[0, : out.numel()].view(out.shape))
