"""NVFP4: kernels that quantize and dequantize matrices, and their tile functions."""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.four_over_six import adaptive_codes, per_element
from fp4adam.kernels.launch.launch import on_its_device
from fp4adam.kernels.launch.stored import inputs, outputs
from fp4adam.kernels.launch.tensor_table import (
    Storage,
    Usage,
    divisor_tile,
    tile_offsets,
    tile_start,
)
from fp4adam.kernels.swizzle import store_swizzled
from fp4adam.kernels.tiles.bfloat16 import round_to, to_float32
from fp4adam.kernels.tiles.changes import flag_units, flag_words
from fp4adam.kernels.tiles.e2m1 import e2m1_code, e2m1_round, e2m1_value
from fp4adam.kernels.tiles.e4m3 import e4m3_code, e4m3_value
from fp4adam.kernels.tiles.remainder import complete, split_off, unit_of_one
from fp4adam.kernels.tiles.words import (
    are_aligned,
    pack_words,
    part_of,
    store_words,
    transpose_words,
    word_decoder,
    word_offsets,
    word_positions,
)

BLOCK = 16
# Largest tiles of `quantize`, by whether scales are adaptive, which takes more registers.
QUANTIZE_TILE = {False: (64, 64), True: (32, 64)}
AMAX_TILE = 4096
FP32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def nvfp4_scale(block_amax, amax):
    """E4M3 block scales (uint8), and the factors that map values to codes (float32).

    block_amax: float32 tile. amax: float32 scalar, of the whole tensor.
    """
    # The same float32 operations in the same order as ``formats.nvfp4.block_scales``.
    encode = tl.div_rn(2688.0, amax)
    encode = tl.where((amax == 0) | (encode == 0), 1.0, tl.minimum(encode, FP32_MAX))
    decode = tl.div_rn(1.0, encode)
    scale = e4m3_code(block_amax * (encode * 0.16666666666666666), HARDWARE=False)
    factor = tl.minimum(tl.div_rn(1.0, e4m3_value(scale) * decode), FP32_MAX)
    return scale, factor


@triton.jit
def _codes(
    blocks, block_amax, amax, FORM: tl.constexpr, USAGE: tl.constexpr, VALUES: tl.constexpr = False
):
    """Scales (uint8) and codes of blocks, and the codes' values if VALUES.

    FORM: as for :func:`adaptive_codes`.
    """
    value = blocks
    if USAGE.adaptive is not None:
        ERROR: tl.constexpr = USAGE.adaptive
        scale, code = adaptive_codes(blocks, block_amax, amax, FORM, ERROR, USAGE.bound)
        if VALUES:
            value = e2m1_value(code)
    else:
        scale, factor = nvfp4_scale(block_amax, amax)
        scaled = blocks * per_element(factor, FORM)
        if VALUES:
            code, value = e2m1_round(scaled)
        else:
            code = e2m1_code(scaled)
    return scale, code, value


@triton.jit
def _amax(x, AXIS: tl.constexpr):
    """Largest magnitude along an axis, ignoring NaN; 0 if all elements are NaN."""
    amax = tl.max(tl.abs(x), AXIS)
    return tl.where(amax == amax, amax, 0.0)


@triton.jit
def decode_factors(scale, amax, BOUND: tl.constexpr):
    """What uint8 block scales decode with: the factor, and the remainder's unit and its inverse."""
    per_scale = 1.0 / (6.0 * BOUND)
    factor = (e4m3_value(scale) * amax) * per_scale
    # In blocks with smaller scales codes may saturate, or all decode to 0.
    least = tl.maximum(scale.to(tl.int32), 4).to(tl.uint8)
    unit, inverse = unit_of_one((e4m3_value(least) * amax) * per_scale, 4)
    return factor, unit, inverse


@triton.jit
def _in_blocks(x, USAGE: tl.constexpr):
    """A tile [BR, BC] as blocks of rowwise codes: [m, 16, n, 16] if square, else [BR, n, 16]."""
    BR: tl.constexpr = x.shape[0]
    BC: tl.constexpr = x.shape[1]
    if USAGE.square:
        blocks = tl.reshape(x, (BR // 16, 16, BC // 16, 16))
    else:
        blocks = tl.reshape(x, (BR, BC // 16, 16))
    return blocks


@triton.jit
def nvfp4_master(
    storage,
    remainder,
    row,
    col,
    cols,
    amax,
    USAGE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    LANES: tl.constexpr,
):
    """The float32 masters of a tile from its rowwise codes and int8 remainders [BR, BC].

    amax: that the codes were quantized with. LANES: neighbours per thread, 4 or 8.
    """
    FORM: tl.constexpr = "square" if USAGE.square else "row"
    if USAGE.square:
        grid = storage.rowwise_scale + tile_start(row // 16, col // 16, cols // 16)
        scale = tl.load(grid + tile_offsets(cols // 16, BR // 16, BC // 16))
    else:
        width = (cols // 16 + 3) // 4 * 4
        grid = storage.rowwise_scale + tile_start(row, col // 16, width)
        scale = tl.load(grid + tile_offsets(width, BR, BC // 16))
    WORD: tl.constexpr = tl.uint16 if LANES == 4 else tl.uint32
    ptr = storage.rowwise_data.to(tl.pointer_type(WORD))
    ptr += tile_start(row, col // LANES, cols // LANES)
    words = tl.load(ptr + tl.max_contiguous(tile_offsets(cols // LANES, BR, BC // LANES), (1, 1)))
    code = (words[:, :, None].to(tl.int32) >> (4 * tl.arange(0, LANES))[None, None, :]) & 0xF
    value = _in_blocks(tl.reshape(e2m1_value(code), (BR, BC)), USAGE)
    factor, unit, _ = decode_factors(scale, amax, USAGE.bound)
    master = complete(
        value,
        per_element(factor, FORM),
        per_element(unit, FORM),
        _in_blocks(remainder, USAGE),
        4,
    )
    return tl.reshape(master, (BR, BC))


@triton.jit
def _remainder(
    master, dither, value, scale, amax, USAGE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """The int8 remainders [BR, BC] of masters. value: of their rowwise codes, in blocks."""
    FORM: tl.constexpr = "square" if USAGE.square else "row"
    factor, _, inverse = decode_factors(scale, amax, USAGE.bound)
    remainder = split_off(
        _in_blocks(master, USAGE),
        value,
        per_element(factor, FORM),
        per_element(inverse, FORM),
        _in_blocks(dither, USAGE),
        4,
    )
    return tl.reshape(remainder, (BR, BC))


@triton.jit
def nvfp4_tile(
    x,
    amax,
    row,
    col,
    cols,
    storage,
    gemm_scales,
    USAGE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    master=None,
    dither=None,
):
    """Quantize the float32 tile [BR, BC] at (row, col) and store the rowwise part.

    USAGE.square: one scale per 16x16 block for both directions, in the grid at
    storage.rowwise_scale; else one per 16 elements of each direction, in padded rows.
    USAGE.adaptive, USAGE.bound: how scales are chosen.
    USAGE.swizzled: also store swizzled scales, except for square blocks, whose scales the caller
    passes to :func:`store_square_scales`.
    Returns block amaxes, words of codes [BR, BC / 8], and scales: [BR / 16, BC / 16] of square
    blocks, else the columnwise ones [BR / 16, BC]. With USAGE.columnwise the caller passes codes
    and scales to :func:`store_columnwise`; otherwise ignore them. Last come the int8 remainders
    that complete rowwise codes to ``master``, float32, rounded with ``dither``; or zeros.
    Square blocks with masters are left to :func:`store_square`.
    """
    remainder = tl.zeros((BR, BC), tl.int8)
    if USAGE.square:
        blocks = tl.reshape(x, (BR // 16, 16, BC // 16, 16))
        block_amax = _amax(_amax(blocks, 3), 1)
        scale, code, value = _codes(blocks, block_amax, amax, "square", USAGE, master is not None)
        if master is not None:
            remainder = _remainder(master, dither, value, scale, amax, USAGE, BR, BC)
        words = pack_words(tl.reshape(code, (BR, BC)), 4, BR, BC)
        if master is None:
            store_square(words, scale, row, col, cols, storage, USAGE, BR, BC)
    else:
        if USAGE.rowwise:
            blocks = tl.reshape(x, (BR, BC // 16, 16))
            block_amax = _amax(blocks, 2)
            scale, code, value = _codes(blocks, block_amax, amax, "row", USAGE, master is not None)
            if master is not None:
                remainder = _remainder(master, dither, value, scale, amax, USAGE, BR, BC)
            words = pack_words(tl.reshape(code, (BR, BC)), 4, BR, BC)
            width = (cols // 16 + 3) // 4 * 4
            grid = storage.rowwise_scale + tile_start(row, col // 16, width)
            grid += tile_offsets(width, BR, BC // 16)
            if USAGE.records:
                differs = tl.load(grid) != scale
                flag_units(storage.changed, row, col // 16, cols // 16, differs, 2)
                data = storage.rowwise_data
                flag_words(storage.changed, data, row, col // 8, cols // 8, words, 4)
                tl.debug_barrier()  # warps may share bytes that others overwrite
            store_words(storage.rowwise_data, row, col // 8, cols // 8, words, BR, BC // 8)
            tl.store(grid, scale)
            if USAGE.swizzled:
                store_swizzled(gemm_scales.rowwise, row, col // 16, cols // 16, scale, BR, BC // 16)
        if USAGE.columnwise:
            blocks = tl.reshape(x, (BR // 16, 16, BC))
            column_amax = _amax(blocks, 1)
            scale, code, _ = _codes(blocks, column_amax, amax, "column", USAGE)
            if not USAGE.rowwise:
                block_amax = column_amax
            words = pack_words(tl.reshape(code, (BR, BC)), 4, BR, BC)
    return block_amax, words, scale, remainder


@triton.jit
def store_square(
    words,
    scale,
    row,
    col,
    cols,
    storage,
    USAGE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Store the rowwise codes of a tile [R, C] at (row, col), and the scales of its blocks."""
    grid = storage.rowwise_scale + tile_start(row // 16, col // 16, cols // 16)
    grid += tile_offsets(cols // 16, R // 16, C // 16)
    if USAGE.records:
        differs = tl.broadcast_to((tl.load(grid) != scale)[:, None, :], (R // 16, 16, C // 16))
        differs = tl.reshape(differs, (R, C // 16))
        flag_units(storage.changed, row, col // 16, cols // 16, differs, 2)
        flag_words(storage.changed, storage.rowwise_data, row, col // 8, cols // 8, words, 4)
        tl.debug_barrier()  # warps may share bytes that others overwrite
    tl.store(grid, scale)
    if USAGE.rowwise:
        store_words(storage.rowwise_data, row, col // 8, cols // 8, words, R, C // 8)


@triton.jit
def store_columnwise(
    words,
    scale,
    row,
    col,
    rows,
    storage,
    gemm_scales,
    USAGE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Store the columnwise codes of a tile [R, C] at (row, col), and its scales if not square."""
    words = transpose_words(words, 4, R, C)
    store_words(storage.columnwise_data, col, row // 8, rows // 8, words, C, R // 8)
    if not USAGE.square:
        width = (rows // 16 + 3) // 4 * 4
        grid = storage.columnwise_scale + tile_start(col, row // 16, width)
        tl.store(grid + tile_offsets(width, C, R // 16), tl.trans(scale))
        if USAGE.swizzled:
            store_swizzled(
                gemm_scales.columnwise, col, row // 16, rows // 16, tl.trans(scale), C, R // 16
            )


@triton.jit
def _store_repeated(out, row, col, cols, scale, R: tl.constexpr, C: tl.constexpr):
    """Store scales [R / 16, C / 16] of 16x16 blocks at (row, col), swizzled, each for 16 rows."""
    scale = tl.broadcast_to(scale[:, None, :], (R // 16, 16, C // 16))
    store_swizzled(out, row, col // 16, cols // 16, tl.reshape(scale, (R, C // 16)), R, C // 16)


@triton.jit
def store_square_scales(
    scale,
    row,
    col,
    rows,
    cols,
    gemm_scales,
    USAGE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Store scales [R / 16, C / 16] of 16x16 blocks at (row, col) in the swizzled GEMM layout."""
    if USAGE.rowwise:
        _store_repeated(gemm_scales.rowwise, row, col, cols, scale, R, C)
    if USAGE.columnwise:
        _store_repeated(gemm_scales.columnwise, col, row, rows, tl.trans(scale), C, R)


@triton.jit
def _atomic_amax(amax_ptr, x):
    """Raise the non-negative float32 at amax_ptr to the largest magnitude of x; NaN is ignored."""
    # The bits of non-negative floats order as integers do; an integer maximum is one atomic, a
    # float maximum two.
    bits = _amax(x, 0).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), bits, sem="relaxed")


@triton.jit
def _amax_kernel(x_ptr, amax_ptr, numel, N: tl.constexpr):
    """Largest magnitude of x. Grid: (ceil(numel / N),). Reads 2 or 4 bytes per element."""
    offs = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    _atomic_amax(amax_ptr, to_float32(tl.load(x_ptr + offs, offs < numel, 0.0)))


@triton.jit
def _quantize_kernel(
    x_ptr,
    rowwise_data,
    rowwise_scale,
    columnwise_data,
    columnwise_scale,
    amax_ptr,
    rows,
    cols,
    tiles_per_row,
    USAGE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Quantize a matrix with a known amax.

    Grid: (n_tiles,). Tile: [BR, BC], which divides the matrix. Reads x (2 or 4 bytes per element),
    writes half a byte per element and direction, and the scales.
    """
    tile = tl.program_id(0)
    row, col = tile // tiles_per_row * BR, tile % tiles_per_row * BC
    x = to_float32(tl.load(x_ptr + tile_start(row, col, cols) + tile_offsets(cols, BR, BC)))
    storage = Storage(rowwise_data, rowwise_scale, columnwise_data, columnwise_scale, None)
    amax = tl.load(amax_ptr)
    _, words, scale, _ = nvfp4_tile(x, amax, row, col, cols, storage, None, USAGE, BR, BC)
    if USAGE.columnwise:
        store_columnwise(words, scale, row, col, rows, storage, None, USAGE, BR, BC)


@triton.jit
def _dequantize_kernel(
    data_ptr,
    scale_ptr,
    amax_ptr,
    out_ptr,
    cols,
    tiles_per_row,
    stride_scale_row,
    stride_scale_col,
    stride_out_row,
    stride_out_col,
    SQUARE: tl.constexpr,
    BOUND: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Decode packed codes [rows, cols / 2].

    Grid: (n_tiles,). Tile: [BR, BC], which divides the matrix. Reads half a byte per element and
    the scales, writes 2 or 4 bytes per element.
    """
    tile = tl.program_id(0)
    row, col = tile // tiles_per_row * BR, tile % tiles_per_row * BC
    r, c = row + tl.arange(0, BR), col + tl.arange(0, BC)
    start = tile_start(row, col // 2, cols // 2)
    packed = tl.load(data_ptr + start + tile_offsets(cols // 2, BR, BC // 2))
    code = tl.interleave(packed & 0xF, packed >> 4)
    block = (col // 16 + tl.arange(0, BC // 16)).to(tl.int64)
    scale_row = (r // 16 if SQUARE else r).to(tl.int64)
    scale_ptrs = scale_row[:, None] * stride_scale_row + block[None, :] * stride_scale_col
    scale = tl.load(scale_ptr + scale_ptrs)
    factor = (e4m3_value(scale) * tl.load(amax_ptr)) * (1.0 / (6.0 * BOUND))
    value = tl.reshape(e2m1_value(code), (BR, BC // 16, 16)) * factor[:, :, None]
    out = r.to(tl.int64)[:, None] * stride_out_row + c.to(tl.int64)[None, :] * stride_out_col
    value = tl.reshape(value, (BR, BC))
    tl.store(out_ptr + out, round_to(value, out_ptr.dtype.element_ty))


@triton.jit
def _dequantize_words_kernel(
    data_ptr,
    scale_ptr,
    amax_ptr,
    out_ptr,
    n_words,
    words_per_row,
    stride_scale_row,
    rows_per_part,
    data_gap,
    scale_part,
    SQUARE: tl.constexpr,
    BOUND: tl.constexpr,
    PARTED: tl.constexpr,
    N: tl.constexpr,
):
    """Decode N words of eight packed codes each, with the arithmetic of the kernel above.

    Grid: (ceil(n_words / N),). A thread reads a word and writes its values, 16 bytes if BF16.
    """
    word, inside, row, i = word_positions(n_words, words_per_row, N)
    part, scale_row = part_of(row, rows_per_part, 16 if SQUARE else 1, PARTED)
    words = (data_ptr + part * data_gap).to(tl.pointer_type(tl.uint32)) + word
    packed = tl.load(words, inside, 0)
    scales = scale_ptr + part * scale_part + scale_row * stride_scale_row + i // 2
    scale = tl.load(scales, inside, 0)
    factor = (e4m3_value(scale) * tl.load(amax_ptr)) * (1.0 / (6.0 * BOUND))
    code = (packed[:, None] >> (4 * tl.arange(0, 8))[None, :]) & 0xF
    value = round_to(e2m1_value(code) * factor[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + word_offsets(word), value, inside[:, None])


_words_decoder = word_decoder(_dequantize_words_kernel)


@on_its_device
def measure(x: Tensor, amax: Tensor) -> None:
    """Overwrite ``amax``, float32 [1], with the largest magnitude of ``x``, contiguous."""
    amax.zero_()
    _amax_kernel[(triton.cdiv(x.numel(), AMAX_TILE),)](x, amax, x.numel(), N=AMAX_TILE)


@on_its_device
def quantize(x: Tensor, out: Any, layout: Any) -> None:
    """Quantize the matrix ``x`` [rows, cols] (contiguous, multiples of 16) into storage."""
    rows, cols = x.shape
    most_rows, most_cols = QUANTIZE_TILE[False]
    tile_rows = divisor_tile(rows, most_rows, BLOCK)
    tile_cols = divisor_tile(cols, most_cols, BLOCK)
    grid = (rows // tile_rows * (cols // tile_cols),)
    _quantize_kernel[grid](
        x,
        *outputs(out, layout),
        out.amax,
        rows,
        cols,
        cols // tile_cols,
        USAGE=Usage(
            out.rowwise_data is not None, out.columnwise_data is not None, layout.is_square
        ),
        BR=tile_rows,
        BC=tile_cols,
        enable_fp_fusion=False,
    )


def decoder(out: Tensor, stored: Any, layout: Any) -> Callable[[], None] | None:
    """A function that decodes packed codes [rows, cols / 2] into ``out`` whenever it is called.

    None if codes are transposed or unaligned. A stack of codes [parts, rows, cols / 2] with scales
    [parts, ...] holds consecutive parts of the rows; both have the scales of a block that is cut.
    """
    data, scale, transposed = inputs(stored, layout)
    if transposed or not are_aligned(data):
        return None
    options = dict(SQUARE=layout.is_square, BOUND=448)
    strides = (scale.stride(-2),)
    return _words_decoder(data, scale, stored.amax, out=out, strides=strides, **options)


@on_its_device
def dequantize(out: Tensor, stored: Any, layout: Any) -> None:
    """Decode packed codes [rows, cols / 2] into ``out``; transposed codes give [cols, rows]."""
    if not out.numel():
        return
    if decode := decoder(out, stored, layout):
        return decode()
    data, scale, transposed = inputs(stored, layout)
    rows, cols = (out.t() if transposed else out).shape
    tile_rows, tile_cols = divisor_tile(rows, 64, BLOCK), divisor_tile(cols, 64, BLOCK)
    grid = (rows // tile_rows * (cols // tile_cols),)
    scale = scale.t() if layout.is_square and transposed else scale
    _dequantize_kernel[grid](
        data,
        scale,
        stored.amax,
        out,
        cols,
        cols // tile_cols,
        *scale.stride(),
        *(out.stride() if not transposed else out.t().stride()),
        SQUARE=layout.is_square,
        BOUND=448,
        BR=tile_rows,
        BC=tile_cols,
        enable_fp_fusion=False,
    )
