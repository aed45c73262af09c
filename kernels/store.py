"""Storing the codes and scales of a tile, in both directions, plain and swizzled."""

import triton
import triton.language as tl

from fp4adam.kernels.format import bits_of, blocks_per_row
from fp4adam.kernels.launch.tensor_table import tile_offsets, tile_start
from fp4adam.kernels.swizzle import store_swizzled
from fp4adam.kernels.tiles.words import store_words, transpose_words


@triton.jit
def edge_mask(row, col, rows, cols, MASKED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Mask [BR, BC] of a tile's elements that are inside the matrix, or None unless MASKED."""
    if MASKED:
        mask = (row + tl.arange(0, BR) < rows)[:, None] & (col + tl.arange(0, BC) < cols)[None, :]
    else:
        mask = None
    return mask


@triton.jit
def store_codes(
    part, row, col, rows, cols, mask, storage, F: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr,
):  # fmt: skip
    """Store the codes of a tile [TR, TC] at (row, col).

    storage: pointers to uint32; or to uint8, which may be unaligned. mask: bool [TR, TC], of the
    elements to write; None for all.
    """
    BITS: tl.constexpr = bits_of(F.code)
    N: tl.constexpr = 32 // BITS
    if F.rowwise:
        if mask is None:
            store_words(storage.rowwise_data, row, col // N, cols // N, part.rows, TR, TC // N)
        else:
            _store_masked(storage.rowwise_data, part.rows, row, col, cols, mask, BITS, TR, TC)
    if F.columnwise:
        words = part.rows if F.square else part.columns
        if F.transposes:
            if mask is None:
                words = transpose_words(words, BITS, TR, TC)
                store_words(storage.columnwise_data, col, row // N, rows // N, words, TC, TR // N)
            else:
                ptr = storage.columnwise_data.to(tl.pointer_type(tl.uint8))
                ptr += tile_start(col, row, rows) + tile_offsets(rows, TC, TR)
                tl.store(ptr, tl.trans(_bytes(words, TR, TC)), tl.trans(mask))
        elif not F.square:
            if mask is None:
                store_words(storage.columnwise_data, row, col // N, cols // N, words, TR, TC // N)
            else:
                _store_masked(storage.columnwise_data, words, row, col, cols, mask, BITS, TR, TC)


@triton.jit
def _bytes(words, R: tl.constexpr, C: tl.constexpr):
    """The bytes, uint8 [R, C], of words [R, C / 4]."""
    code = (words[:, :, None] >> (8 * tl.arange(0, 4).to(tl.uint32))[None, None, :]) & 0xFF
    return tl.reshape(code.to(tl.uint8), (R, C))


@triton.jit
def _store_masked(
    data, words, row, col, cols, mask, BITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Store the codes of a tile [R, C] that are in the mask, byte by byte; other nibbles stay."""
    PER_BYTE: tl.constexpr = 8 // BITS
    data = data.to(tl.pointer_type(tl.uint8))
    data += tile_start(row, col // PER_BYTE, cols // PER_BYTE)
    data += tile_offsets(cols // PER_BYTE, R, C // PER_BYTE)
    code = _bytes(words, R, C // PER_BYTE)
    if BITS == 8:
        tl.store(data, code, mask)
    else:
        low, high = tl.split(tl.reshape(mask.to(tl.int32), (R, C // 2, 2)))
        own = low * 0x0F | high * 0xF0
        old = tl.load(data, (own == 0x0F) | (own == 0xF0), 0).to(tl.int32)
        tl.store(data, ((code & own) | (old & (0xFF - own))).to(tl.uint8), own != 0)


@triton.jit
def store_row_scales(
    scale, row, col, rows, cols, storage, F: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr
):
    """Store the scales of the square or rowwise blocks of a tile [TR, TC], one per block."""
    B: tl.constexpr = F.block
    if F.scale == "" or not (F.rowwise or F.square):
        pass
    elif F.square:
        width = blocks_per_row(cols, F)
        grid = storage.rowwise_scale + tile_start(row // B, col // B, width)
        tl.store(grid + tile_offsets(width, (TR + B - 1) // B, TC // B), scale)
    elif F.scale == "float32":
        down = row + tl.arange(0, TR)[:, None]
        grid = storage.rowwise_scale + tile_start(col // B, 0, (rows + 3) // 4 * 4)
        tl.store(grid + down, scale, down < rows)
    else:
        width = (cols // B + 3) // 4 * 4
        grid = storage.rowwise_scale + tile_start(row, col // B, width)
        tl.store(grid + tile_offsets(width, TR, TC // B), scale)


@triton.jit
def store_column_scales(
    scale, row, col, rows, cols, storage, F: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr
):
    """Store the scales of the columnwise blocks of a tile [TR, TC], one per block."""
    B: tl.constexpr = F.block
    if F.square or not F.columnwise:
        pass
    elif F.scale == "e4m3":
        width = (rows // B + 3) // 4 * 4
        grid = storage.columnwise_scale + tile_start(col, row // B, width)
        tl.store(grid + tile_offsets(width, TC, TR // B), tl.trans(scale))
    elif F.scale == "e8m0":
        width = (cols + 127) // 128 * 128
        grid = storage.columnwise_scale + tile_start(row // B, col, width)
        tl.store(grid + tile_offsets(width, TR // B, TC), scale)
    else:
        across = col + tl.arange(0, TC)[None, :]
        grid = storage.columnwise_scale + tile_start(row // B, 0, (cols + 3) // 4 * 4)
        tl.store(grid + across, scale, across < cols)


@triton.jit
def store_gemm_scales(
    part, row, col, rows, cols, gemm_scales, F: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr
):
    """Store the scales of a tile [TR, TC] in the swizzled layout of GEMMs."""
    B: tl.constexpr = F.block
    if F.rowwise:
        scale = _for_rows(part.row_scale, F, TR)
        store_swizzled(gemm_scales.rowwise, row, col // B, cols // B, scale, TR, TC // B)
    if F.columnwise:
        if F.square:
            scale = _for_rows(tl.trans(part.row_scale), F, TC)
        else:
            scale = tl.trans(part.column_scale)
        store_swizzled(gemm_scales.columnwise, col, row // B, rows // B, scale, TC, TR // B)


@triton.jit
def _for_rows(scale, F: tl.constexpr, R: tl.constexpr):
    """Scales of square blocks [R / B, n], each for all of its rows: [R, n]. Others as they are."""
    if F.square:
        N: tl.constexpr = scale.shape[1]
        spread = tl.broadcast_to(scale[:, None, :], (R // F.block, F.block, N))
        scale = tl.reshape(spread, (R, N))
    return scale


@triton.jit
def store_tile(
    part, row, col, rows, cols, mask, storage, gemm_scales, F: tl.constexpr, TR: tl.constexpr,
    TC: tl.constexpr,
):  # fmt: skip
    """Store codes and scales of a tile [TR, TC]; arguments as for :func:`store_codes`."""
    store_codes(part, row, col, rows, cols, mask, storage, F, TR, TC)
    store_row_scales(part.row_scale, row, col, rows, cols, storage, F, TR, TC)
    store_column_scales(part.column_scale, row, col, rows, cols, storage, F, TR, TC)
    if F.swizzled:
        store_gemm_scales(part, row, col, rows, cols, gemm_scales, F, TR, TC)
