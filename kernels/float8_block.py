"""Float8Block: kernels that quantize and dequantize matrices, and their tile functions."""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.launch.launch import Launch, alignment, on_its_device
from fp4adam.kernels.launch.tensor_table import tile_offsets, tile_start
from fp4adam.kernels.tiles.bfloat16 import round_to, to_float32
from fp4adam.kernels.tiles.e4m3 import e4m3_code, e4m3_value, e4m3_words
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
# Warps of the kernel that quantizes operands, which holds both directions in registers at once.
VECTORS_WARPS = {False: 16, True: 4}  # by columnwise


@triton.jit
def float8_scale(amax, epsilon, LARGEST: tl.constexpr, POW_2: tl.constexpr):
    """Float32 encode scales of blocks with the given float32 amaxes.

    LARGEST: the scale to use if 448 / amax overflows. POW_2: round down to powers of two.
    """
    amax = tl.where(amax >= epsilon, amax, epsilon)  # epsilon also if all elements are NaN
    scale = tl.div_rn(448.0, amax)
    scale = tl.where(scale == float("inf"), LARGEST, scale)
    scale = tl.where((amax == 0) | (amax == float("inf")), 1.0, scale)
    if POW_2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


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
):
    """Quantize x [x_rows, cols], padded with zeros to ``rows`` rows, with a scale per 128 elements.

    Grid: (rows / 128 * cols / 128,). Tile: [128, 128], which divides rows and cols. Reads x (2 or 4
    bytes per element) once, writes one byte per element and direction, and the scales, in words.
    """
    block, blocks_per_row = tl.program_id(0), cols // 128
    row, col = block // blocks_per_row * 128, block % blocks_per_row * 128
    # The mask is constant along a row, so rows are still read 16 bytes at a time.
    inside = (row + tl.arange(0, 128) < x_rows)[:, None]
    ptr = x_ptr + tile_start(row, col, cols) + tile_offsets(cols, 128, 128)
    x = tl.load(ptr, inside, 0.0)
    if ROWWISE:
        value = to_float32(x)
        scale = float8_scale(tl.max(tl.abs(value), 1), epsilon, LARGEST, POW_2)
        store_rowwise_scale(scale, rowwise_scale, row, col, rows, None, 128)
        words = e4m3_words(value * scale[:, None], 128, 128)
        words_ptr = rowwise_data.to(tl.pointer_type(tl.uint32))
        store_words(words_ptr, row, col // 4, cols // 4, words, 128, 32)
    if COLUMNWISE:
        # Transposes values rather than codes, because the conversion instruction returns codes
        # packed in words.
        value = to_float32(tl.trans(x))
        scale = float8_scale(tl.max(tl.abs(value), 1), epsilon, LARGEST, POW_2)
        store_columnwise_scale(scale, columnwise_scale, row, col, cols, None, 128)
        words = e4m3_words(value * scale[:, None], 128, 128)
        words_ptr = columnwise_data.to(tl.pointer_type(tl.uint32))
        store_words(words_ptr, col, row // 4, rows // 4, words, 128, 32)


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
def quantize(
    x: Tensor,
    *,
    rowwise_data: Tensor | None,
    columnwise_data: Tensor | None,
    rowwise_scale: Tensor | None,
    columnwise_scale: Tensor | None,
    two_dimensional: bool,
    force_pow_2_scales: bool,
    amax_epsilon: float,
) -> None:
    """Quantize the contiguous matrix ``x`` of any size into storage.

    ``rowwise_scale`` is the grid of 128x128 blocks if ``two_dimensional``.
    """
    rows, cols = x.shape
    _quantize_kernel[(triton.cdiv(rows, BLOCK) * triton.cdiv(cols, BLOCK),)](
        x,
        rowwise_data,
        rowwise_scale,
        columnwise_data,
        columnwise_scale,
        rows,
        cols,
        amax_epsilon,
        LARGEST=torch.finfo(x.dtype).max,
        POW_2=force_pow_2_scales,
        ROWWISE=rowwise_data is not None,
        COLUMNWISE=columnwise_data is not None,
        SQUARE=two_dimensional,
        num_warps=4 if two_dimensional else 8,
        maxnreg=QUANTIZE_REGISTERS[two_dimensional],
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
        ),
        num_warps=VECTORS_WARPS[columnwise],
    )


def decoder(
    data: Tensor, scale_inv: Tensor, two_dimensional: bool, transposed: bool, out: Tensor
) -> Callable[[], None] | None:
    """A function that decodes E4M3 codes [rows, cols] into ``out`` whenever it is called.

    None if codes are transposed or unaligned. ``scale_inv``: as for :func:`dequantize`. With square
    blocks, a stack of codes [parts, rows, cols] with scales [parts, ...] holds consecutive parts of
    the rows; both have the scales of a block that is cut.
    """
    if transposed or data.shape[-1] % 8 or not are_aligned(data):
        return None
    scale = scale_inv if two_dimensional else scale_inv.t()
    strides = scale.stride()[-2:]
    return _words_decoder(data, scale, out=out, strides=strides, SQUARE=two_dimensional)


@on_its_device
def dequantize(
    data: Tensor, scale_inv: Tensor, two_dimensional: bool, transposed: bool, out: Tensor
) -> None:
    """Decode E4M3 codes [rows, cols] into ``out``; transposed codes give [cols, rows].

    ``scale_inv``: the grid of 128x128 blocks of the untransposed matrix, or [ceil(cols / 128), rows
    padded to 4] for the codes.
    """
    if not out.numel():
        return
    if decode := decoder(data, scale_inv, two_dimensional, transposed, out):
        return decode()
    scale = scale_inv if two_dimensional and not transposed else scale_inv.t()
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
        SQUARE=two_dimensional,
        BR=tile_rows,
        enable_fp_fusion=False,
    )
