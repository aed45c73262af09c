"""Float8Block: kernels that quantize and dequantize matrices, and their tile functions."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.launch.launch import Launch, alignment, on_its_device
from fp4adam.kernels.launch.stored import inputs, outputs
from fp4adam.kernels.launch.tensor_table import tile_offsets, tile_start
from fp4adam.kernels.tiles.bfloat16 import pairs_to_float32, round_to, to_float32
from fp4adam.kernels.tiles.e4m3 import e4m3_code, e4m3_value, e4m3_word, e4m3_words
from fp4adam.kernels.tiles.words import (
    are_aligned,
    part_of,
    store_words,
    word_decoder,
    word_offsets,
    word_positions,
)

BLOCK = 128
# Register limit of standalone quantization. Without it, ptxas spills a few registers for sm_100.
QUANTIZE_REGISTERS = {True: None, False: 128}  # by two_dimensional
# Warps of the kernel that quantizes operands. Fewer exchange less between threads.
VECTORS_WARPS = {False: 8, True: 4}  # by columnwise


@triton.jit
def float8_scale(amax, epsilon, LARGEST: tl.constexpr, POW_2: tl.constexpr):
    """Float32 encode scales of blocks with the given float32 amaxes.

    LARGEST: the scale to use if 448 / amax overflows. POW_2: round down to powers of two.
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
def decode_scale(scale, POW_2: tl.constexpr):
    """Reciprocals of encode scales by :func:`float8_scale`."""
    if POW_2:
        bits = 0x7F000000 - scale.to(tl.int32, bitcast=True)
        inverse = tl.maximum(bits, 0x400000).to(tl.float32, bitcast=True)  # at least 2^-127
    else:
        inverse = tl.div_rn(1.0, scale)
    return inverse


@triton.jit
def tile_mask(row, col, rows, cols, MASKED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Mask [BR, BC] of a tile's elements that are inside the matrix, or None unless MASKED."""
    if MASKED:
        mask = (row + tl.arange(0, BR) < rows)[:, None] & (col + tl.arange(0, BC) < cols)[None, :]
    else:
        mask = None
    return mask


@triton.jit
def store_codes(
    code,
    rowwise_data,
    columnwise_data,
    row,
    col,
    rows,
    cols,
    mask,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Store a tile of codes [BR, BC] rowwise, columnwise (transposed), or both."""
    if ROWWISE:
        ptr = rowwise_data + tile_start(row, col, cols) + tile_offsets(cols, BR, BC)
        tl.store(ptr, code, mask)
    if COLUMNWISE:
        ptr = columnwise_data + tile_start(col, row, rows) + tile_offsets(rows, BC, BR)
        tl.store(ptr, tl.trans(code), None if mask is None else tl.trans(mask))


@triton.jit
def store_rowwise_scale(scale, rowwise_scale, row, col, rows, mask, BR: tl.constexpr):
    """Store the decode scales of BR rows in one column of 1x128 blocks; scale: encode scales."""
    ptr = rowwise_scale + tile_start(col // 128, row, (rows + 3) // 4 * 4) + tl.arange(0, BR)
    tl.store(ptr, tl.div_rn(1.0, scale), mask)


@triton.jit
def store_columnwise_scale(scale, columnwise_scale, row, col, cols, mask, BC: tl.constexpr):
    """Store the decode scales of BC columns in one row of 128x1 blocks; scale: encode scales."""
    ptr = columnwise_scale + tile_start(row // 128, col, (cols + 3) // 4 * 4) + tl.arange(0, BC)
    tl.store(ptr, tl.div_rn(1.0, scale), mask)


@triton.jit
def _quantize_kernel(
    x_ptr,
    rowwise_data,
    rowwise_scale,
    columnwise_data,
    columnwise_scale,
    rows,
    cols,
    epsilon,
    LARGEST: tl.constexpr,
    POW_2: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    SQUARE: tl.constexpr,
):
    """Quantize a matrix of any size.

    Grid: (n_blocks,). Tile: [128, 128]. Reads x (2 or 4 bytes per element), writes one byte per
    element and direction, and the scales.
    """
    block, blocks_per_row = tl.program_id(0), tl.cdiv(cols, 128)
    row, col = block // blocks_per_row * 128, block % blocks_per_row * 128
    STORED_ONCE: tl.constexpr = not (ROWWISE and COLUMNWISE)
    if SQUARE:
        # A block does not fit in registers, so strips are read again, from L2, once the amax is
        # known.
        largest = tl.zeros((32, 128), tl.float32)
        for i in range(4):
            strip = row + 32 * i
            mask = tile_mask(strip, col, rows, cols, True, 32, 128)
            ptr = x_ptr + tile_start(strip, col, cols) + tile_offsets(cols, 32, 128)
            magnitude = tl.abs(to_float32(tl.load(ptr, mask, 0.0)))
            # Not tl.maximum, which keeps NaN in the interpreter.
            largest = tl.where(magnitude > largest, magnitude, largest)
        scale = float8_scale(tl.max(tl.max(largest, 1), 0), epsilon, LARGEST, POW_2)
        tl.store(rowwise_scale + block, tl.div_rn(1.0, scale))
        for i in range(4):
            strip = row + 32 * i
            mask = tile_mask(strip, col, rows, cols, True, 32, 128)
            ptr = x_ptr + tile_start(strip, col, cols) + tile_offsets(cols, 32, 128)
            code = e4m3_code(to_float32(tl.load(ptr, mask, 0.0)) * scale, STORED_ONCE)
            store_codes(
                code, rowwise_data, columnwise_data, strip, col, rows, cols, mask,
                ROWWISE, COLUMNWISE, 32, 128,
            )  # fmt: skip
    else:
        mask = tile_mask(row, col, rows, cols, True, 128, 128)
        r, c = row + tl.arange(0, 128) < rows, col + tl.arange(0, 128) < cols
        ptr = x_ptr + tile_start(row, col, cols) + tile_offsets(cols, 128, 128)
        x = to_float32(tl.load(ptr, mask, 0.0))
        if ROWWISE:
            scale = float8_scale(tl.max(tl.abs(x), 1), epsilon, LARGEST, POW_2)
            store_rowwise_scale(scale, rowwise_scale, row, col, rows, r, 128)
            code = e4m3_code(x * scale[:, None])
            store_codes(
                code, rowwise_data, columnwise_data, row, col, rows, cols, mask,
                True, False, 128, 128,
            )  # fmt: skip
        if COLUMNWISE:
            scale = float8_scale(tl.max(tl.abs(x), 0), epsilon, LARGEST, POW_2)
            store_columnwise_scale(scale, columnwise_scale, row, col, cols, c, 128)
            code = e4m3_code(x * scale[None, :])
            store_codes(
                code, rowwise_data, columnwise_data, row, col, rows, cols, mask,
                False, True, 128, 128,
            )  # fmt: skip


@triton.jit
def load_rows(x_ptr, row, col, cols, mask):
    """Every fourth row of a block, from ``row`` on: a tile [32, 128]. Zeros outside of the mask."""
    ptr = x_ptr + tile_start(row, col, cols) + tile_offsets(4 * cols, 32, 128)
    x = tl.load(ptr) if mask is None else tl.load(ptr, mask, 0.0)
    return pairs_to_float32(x)


@triton.jit
def store_rows(x, rowwise_data, row, col, cols, mask):
    """Store the codes of a scaled tile by :func:`load_rows`; mask: of their words, [32, 32]."""
    words = e4m3_words(x, 32, 128)
    ptr = rowwise_data.to(tl.pointer_type(tl.uint32)) + tile_start(row, col // 4, cols // 4)
    # With the hint each thread stores the words that it has, and exchanges none for wider stores.
    offs = tl.arange(0, 32)[:, None] * cols + tl.arange(0, 32)[None, :]
    tl.store(ptr + tl.max_contiguous(offs, (1, 2)), words, mask)


@triton.jit
def _load_padded_rows(x_ptr, row, col, x_rows, cols, PADDED: tl.constexpr):
    """A tile by :func:`load_rows`, with zeros past ``x_rows``."""
    # The mask is constant along a row, so rows are still read 16 bytes at a time.
    inside = (row + 4 * tl.arange(0, 32) < x_rows)[:, None]
    return load_rows(x_ptr, row, col, cols, inside if PADDED else None)


@triton.jit
def _quantize_rows(
    x,
    rowwise_data,
    row,
    col,
    cols,
    epsilon,
    LARGEST: tl.constexpr,
    POW_2: tl.constexpr,
):
    """Store the rowwise codes of a tile by :func:`load_rows`; returns its encode scales [32]."""
    scale = float8_scale(tl.max(tl.abs(x), 1), epsilon, LARGEST, POW_2)
    store_rows(x * scale[:, None], rowwise_data, row, col, cols, None)
    return scale


@triton.jit
def _quantize_vectors_kernel(
    x_ptr,
    rowwise_data,
    rowwise_scale,
    columnwise_data,
    columnwise_scale,
    x_rows,
    rows,
    cols,
    epsilon,
    LARGEST: tl.constexpr,
    POW_2: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Quantize x [x_rows, cols], padded with zeros to ``rows`` rows, with a scale per 128 elements.

    Grid: (rows / 128 * cols / 128,). Tile: [128, 128], which divides rows and cols. Reads x (2 or 4
    bytes per element) once, writes one byte per element and direction, and the scales, in words.
    PADDED: whether ``rows`` is more than ``x_rows``.

    A block is held as four tiles of every fourth row. So four rows of a column, whose codes make a
    word, are in the same thread, and only whole words are exchanged between threads.
    """
    block, blocks_per_row = tl.program_id(0), cols // 128
    row, col = block // blocks_per_row * 128, block % blocks_per_row * 128
    x0 = _load_padded_rows(x_ptr, row, col, x_rows, cols, PADDED)
    x1 = _load_padded_rows(x_ptr, row + 1, col, x_rows, cols, PADDED)
    x2 = _load_padded_rows(x_ptr, row + 2, col, x_rows, cols, PADDED)
    x3 = _load_padded_rows(x_ptr, row + 3, col, x_rows, cols, PADDED)
    if ROWWISE:
        scale0 = _quantize_rows(x0, rowwise_data, row, col, cols, epsilon, LARGEST, POW_2)
        scale1 = _quantize_rows(x1, rowwise_data, row + 1, col, cols, epsilon, LARGEST, POW_2)
        scale2 = _quantize_rows(x2, rowwise_data, row + 2, col, cols, epsilon, LARGEST, POW_2)
        scale3 = _quantize_rows(x3, rowwise_data, row + 3, col, cols, epsilon, LARGEST, POW_2)
        scale = tl.join(tl.join(scale0, scale2), tl.join(scale1, scale3))
        ptr = rowwise_scale + tile_start(col // 128, row, rows) + tl.arange(0, 128)
        tl.store(ptr, decode_scale(tl.reshape(scale, (128,)), POW_2))
    if COLUMNWISE:
        magnitude = tl.join(tl.join(tl.abs(x0), tl.abs(x1)), tl.join(tl.abs(x2), tl.abs(x3)))
        largest = tl.max(tl.max(tl.max(magnitude, 3), 2), 0)
        scale = float8_scale(largest, epsilon, LARGEST, POW_2)
        ptr = columnwise_scale + tile_start(row // 128, col, cols) + tl.arange(0, 128)
        tl.store(ptr, decode_scale(scale, POW_2))
        scale = scale[None, :]
        words = e4m3_word(x0 * scale, x1 * scale, x2 * scale, x3 * scale)
        words_ptr = columnwise_data.to(tl.pointer_type(tl.uint32))
        store_words(words_ptr, col, row // 4, rows // 4, tl.trans(words), 128, 32)


@triton.jit
def _dequantize_kernel(
    data_ptr,
    scale_ptr,
    out_ptr,
    rows,
    cols,
    stride_scale_row,
    stride_scale_col,
    stride_out_row,
    stride_out_col,
    SQUARE: tl.constexpr,
    BR: tl.constexpr,
):
    """Decode E4M3 codes [rows, cols] of any size.

    Grid: (n_tiles,). Tile: [BR, 128]. Reads one byte per element and the scales, writes 2 or 4
    bytes per element.
    """
    tile, tiles_per_row = tl.program_id(0), tl.cdiv(cols, 128)
    row, col = tile // tiles_per_row * BR, tile % tiles_per_row * 128
    r, c = row + tl.arange(0, BR), col + tl.arange(0, 128)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    code = tl.load(data_ptr + tile_start(row, col, cols) + tile_offsets(cols, BR, 128), mask, 0)
    scale_row = (r // 128 if SQUARE else r).to(tl.int64)
    ptr = scale_ptr + scale_row * stride_scale_row + (col // 128).to(tl.int64) * stride_scale_col
    value = e4m3_value(code) * tl.load(ptr, r < rows, 0.0)[:, None]
    out = r.to(tl.int64)[:, None] * stride_out_row + c.to(tl.int64)[None, :] * stride_out_col
    tl.store(out_ptr + out, round_to(value, out_ptr.dtype.element_ty), mask)


@triton.jit
def _dequantize_words_kernel(
    data_ptr,
    scale_ptr,
    out_ptr,
    n_words,
    words_per_row,
    stride_scale_row,
    stride_scale_col,
    rows_per_part,
    data_gap,
    scale_part,
    SQUARE: tl.constexpr,
    PARTED: tl.constexpr,
    N: tl.constexpr,
):
    """Decode N groups of eight codes each, with the arithmetic of the kernel above.

    Grid: (ceil(n_words / N),). Columns are a multiple of eight. A thread reads 8 bytes and writes
    their values, 16 bytes if BF16.
    """
    word, inside, row, i = word_positions(n_words, words_per_row, N)
    part, scale_row = part_of(row, rows_per_part, 128 if SQUARE else 1, PARTED)
    offs = word_offsets(word)
    code = tl.load(data_ptr + (part * data_gap)[:, None] + offs, inside[:, None], 0)
    scales = scale_row * stride_scale_row + (i // 16).to(tl.int64) * stride_scale_col
    scale = tl.load(scale_ptr + part * scale_part + scales, inside, 0.0)
    value = round_to(e4m3_value(code) * scale[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs, value, inside[:, None])


_words_decoder = word_decoder(_dequantize_words_kernel)


@on_its_device
def quantize(x: Tensor, out: Any, layout: Any) -> None:
    """Quantize the contiguous matrix ``x`` of any size into storage."""
    (rows, cols), rule, square = x.shape, layout.scale_rule, layout.is_square
    _quantize_kernel[(triton.cdiv(rows, BLOCK) * triton.cdiv(cols, BLOCK),)](
        x,
        *outputs(out, layout),
        rows,
        cols,
        rule.amax_epsilon,
        LARGEST=torch.finfo(x.dtype).max,
        POW_2=rule.force_pow_2_scales,
        ROWWISE=out.rowwise_data is not None,
        COLUMNWISE=out.columnwise_data is not None,
        SQUARE=square,
        num_warps=4 if square else 8,
        maxnreg=QUANTIZE_REGISTERS[square],
        enable_fp_fusion=False,
    )


@on_its_device
def quantize_vectors(
    x: Tensor,
    *,
    rowwise_data: Tensor | None,
    columnwise_data: Tensor | None,
    rowwise_scale: Tensor | None,
    columnwise_scale: Tensor | None,
    rows: int,
    force_pow_2_scales: bool,
    amax_epsilon: float,
) -> None:
    """Quantize the contiguous matrix ``x`` with a scale per 128 elements into new storage.

    The storage has ``rows`` rows, at least as many as ``x``; missing rows of ``x`` count as zeros.
    ``rows`` and the columns of ``x`` are multiples of 128.
    """
    launch = _vectors_launch(
        tuple(x.shape),
        rows,
        x.dtype,
        x.device.index,
        rowwise_data is not None,
        columnwise_data is not None,
        alignment(x),
        force_pow_2_scales,
        amax_epsilon,
    )
    storage = (rowwise_data, rowwise_scale, columnwise_data, columnwise_scale)
    launch(x, *(x if t is None else t for t in storage))


@functools.lru_cache(maxsize=4096)
def _vectors_launch(
    shape: tuple[int, int],
    rows: int,
    dtype: torch.dtype,
    device: int | None,
    rowwise: bool,
    columnwise: bool,
    aligned: tuple[bool, ...],
    force_pow_2_scales: bool,
    amax_epsilon: float,
) -> Launch:
    """The cached launch for a shape; ``device`` and ``aligned`` only distinguish kernels."""
    return Launch(
        _quantize_vectors_kernel,
        rows // BLOCK * (shape[1] // BLOCK),
        (shape[0], rows, shape[1], amax_epsilon),
        dict(
            LARGEST=torch.finfo(dtype).max,
            POW_2=force_pow_2_scales,
            ROWWISE=rowwise,
            COLUMNWISE=columnwise,
            PADDED=shape[0] < rows,
        ),
        num_warps=VECTORS_WARPS[columnwise],
    )


def decoder(out: Tensor, stored: Any, layout: Any) -> Callable[[], None] | None:
    """A function that decodes E4M3 codes [rows, cols] into ``out`` whenever it is called.

    None if codes are transposed or unaligned. With square blocks, a stack of codes [parts, rows,
    cols] with scales [parts, ...] holds consecutive parts of the rows; both have the scales of a
    block that is cut.
    """
    data, scale, transposed = inputs(stored, layout)
    if transposed or data.shape[-1] % 8 or not are_aligned(data):
        return None
    scale = scale if layout.is_square else scale.t()
    strides = scale.stride()[-2:]
    return _words_decoder(data, scale, out=out, strides=strides, SQUARE=layout.is_square)


@on_its_device
def dequantize(out: Tensor, stored: Any, layout: Any) -> None:
    """Decode E4M3 codes [rows, cols] into ``out``; transposed codes give [cols, rows]."""
    if not out.numel():
        return
    if decode := decoder(out, stored, layout):
        return decode()
    data, scale, transposed = inputs(stored, layout)
    scale = scale if layout.is_square and not transposed else scale.t()
    rows, cols = (out.t() if transposed else out).shape
    tile_rows = 32
    _dequantize_kernel[(triton.cdiv(rows, tile_rows) * triton.cdiv(cols, BLOCK),)](
        data,
        scale,
        out,
        rows,
        cols,
        *scale.stride(),
        *(out.t() if transposed else out).stride(),
        SQUARE=layout.is_square,
        BR=tile_rows,
        enable_fp_fusion=False,
    )
