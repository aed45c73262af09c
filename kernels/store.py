"""Where the codes and scales of a tile lie, in both directions, plain and swizzled."""

import triton
import triton.language as tl

from fp4adam.kernels.format import code_values, complete
from fp4adam.kernels.launch.tensor_table import tile_offsets, tile_start
from fp4adam.kernels.tiles.codes import (
    bytes_of,
    capability,
    e2m1_with_remainders,
    transpose_words,
)


@triton.jit
def edge_mask(row, col, rows, cols, MASKED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Mask [BR, BC] of a tile's elements that are inside the matrix, or None unless MASKED."""
    mask = None
    if MASKED:
        # Columns outside have no rows, so that one comparison masks an element.
        ends = tl.where(tl.arange(0, BC) < cols - col, rows - row, 0)[None, :]
        mask = tl.arange(0, BR)[:, None] < ends
    return mask


@triton.jit
def row_scale_pointers(
    scales, row, col, rows, cols, F: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Pointers to the scales of square or rowwise blocks of a tile [BR, BC], one per block."""
    B: tl.constexpr = F.block
    if F.square:
        width = tl.cdiv(cols, B)  # the last one may be cut
        ptr = scales + tile_start(row // B, col // B, width)
        ptr += tile_offsets(width, (BR + B - 1) // B, BC // B)
    elif F.scale == "float32":
        ptr = scales + tile_start(col // B, 0, (rows + 3) // 4 * 4)
        ptr += row + tl.arange(0, BR)[:, None]
    else:
        width = (cols // B + 3) // 4 * 4
        ptr = scales + tile_start(row, col // B, width) + tile_offsets(width, BR, BC // B)
    return ptr


@triton.jit
def load_masters(
    storage, remainders, start, row, col, rows, cols, mask, tensor_amax, epsilon, F: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, LANES: tl.constexpr, scale=None,
):  # fmt: skip
    """The float32 masters [BR, BC] that rowwise codes and int8 remainders make.

    remainders: pointer, read at ``start``; None for none. tensor_amax: of the stored codes. LANES:
    neighbours per thread. scale: of the blocks, if the caller has loaded it.
    """
    CODE: tl.constexpr = F.code
    remainder, product = None, None
    if F.bits == 4:
        ptr = storage.rowwise_data.to(tl.pointer_type(tl.uint16))
        ptr += start >> 2
        offs = tile_offsets(cols // 4, BR, BC // 4, LANES // 4)
        words = tl.load(ptr + offs)
        if remainders is not None and capability() > 0:
            ptr = remainders.to(tl.pointer_type(tl.uint32)) + (start >> 2)
            value, product = e2m1_with_remainders(words, tl.load(ptr + offs), F.caps, BR, BC)
        else:
            code = words[:, :, None].to(tl.int32) << (28 - 4 * tl.arange(0, 4))
            value = tl.reshape(code_values(code, CODE), (BR, BC))
    else:
        ptr = storage.rowwise_data.to(tl.pointer_type(tl.uint8)) + tile_start(row, col, cols)
        value = code_values(tl.load(ptr + tile_offsets(cols, BR, BC, LANES), mask), CODE)
    if scale is None and F.scale == "":
        scale = 0
    elif scale is None:
        ptr = row_scale_pointers(storage.rowwise_scale, row, col, rows, cols, F, BR, BC)
        if F.square or F.scale != "float32":
            scale = tl.load(ptr)
        else:
            scale = tl.load(ptr, (row + tl.arange(0, BR) < rows)[:, None], 1.0)
    if remainders is not None and product is None:
        remainder = tl.load(remainders + start + tile_offsets(cols, BR, BC, LANES), mask)
    return complete(value, scale, tensor_amax, epsilon, remainder, product, F)


@triton.jit
def store_codes(
    part, row, col, rows, cols, mask, storage, F: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr,
):  # fmt: skip
    """Store the codes of a tile [TR, TC] at (row, col).

    storage: pointers to uint32; or to uint8, which may be unaligned. mask: bool [TR, TC], of the
    elements to write; None for all. Only elements past an edge are masked where codes are
    transposed.
    """
    if F.rowwise:
        store_words(storage.rowwise_data, part.rows, row, col, cols, mask, F.bits, TR, TC)
    if F.columnwise and F.transposes:
        words = part.rows if F.square else part.columns
        if words.dtype == tl.uint8:
            ptr = storage.columnwise_data.to(tl.pointer_type(tl.uint8))
            ptr += tile_start(col, row, rows) + tile_offsets(rows, TC, TR)
            mask = edge_mask(col, row, cols, rows, mask is not None, TC, TR)
            tl.store(ptr, tl.trans(words), mask)
        else:
            if F.square and F.rowwise and F.bits == 8:
                # From memory, because ptxas mixes up the bytes of converted words; see e4m3_code.
                tl.debug_barrier()
                ptr = storage.rowwise_data + tile_start(row, col // 4, cols // 4)
                words = tl.load(ptr + tile_offsets(cols // 4, TR, TC // 4))
            words = transpose_words(words, F.bits, TR, TC)
            store_words(storage.columnwise_data, words, col, row, rows, None, F.bits, TC, TR)
    elif F.columnwise and not F.square:
        store_words(storage.columnwise_data, part.columns, row, col, cols, mask, F.bits, TR, TC)


@triton.jit
def store_words(
    data, words, row, col, cols, mask, BITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Store words of the codes of a tile [R, C], or their bytes; in a mask other nibbles stay.

    data: pointer to uint32, or to uint8 with any alignment, which is written byte by byte.
    """
    N: tl.constexpr = 32 // BITS
    PER_BYTE: tl.constexpr = 8 // BITS
    if mask is None and data.dtype.element_ty == tl.uint32:
        data += tile_start(row, col // N, cols // N)
        tl.store(data + tile_offsets(cols // N, R, C // N), words)
    else:
        data = data.to(tl.pointer_type(tl.uint8))
        data += tile_start(row, col // PER_BYTE, cols // PER_BYTE)
        data += tile_offsets(cols // PER_BYTE, R, C // PER_BYTE)
        code = bytes_of(words, R, C // PER_BYTE)
        if BITS == 8 or mask is None:
            tl.store(data, code, mask)
        else:
            low, high = tl.split(tl.reshape(mask.to(tl.int32), (R, C // 2, 2)))
            own = low * 0x0F | high * 0xF0
            old = tl.load(data, (own == 0x0F) | (own == 0xF0), 0).to(tl.int32)
            tl.store(data, ((code & own) | (old & (0xFF - own))).to(tl.uint8), own != 0)


@triton.jit
def _store_swizzled(
    out, row, block, blocks, scale, F: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Store scales at (row, block) of a swizzled matrix; see ``kernels/swizzle.py``.

    scale: uint8 [R, C]; of square blocks [R / B, C]. ``blocks``: per row of the matrix. C is a
    power of two, and ``block`` a multiple of it. out: aligned to 4 bytes.
    """
    if F.square:
        scale = tl.broadcast_to(scale[:, None, :], (R // F.block, F.block, C))
        scale = tl.reshape(scale, (R, C))
    i, j = row + tl.arange(0, R)[:, None], block + tl.arange(0, C)[None, :]
    # Shifts take fewer registers than divisions, which handle negative numbers too.
    tile = (i >> 7).to(tl.int64) * ((blocks + 3) >> 2) + (j >> 2)
    offs = tile * 512 + ((i & 31) * 16 + ((i >> 5) & 3) * 4 + (j & 3))
    # Up to four blocks of a row are adjacent and aligned, so the hint allows stores of whole words.
    WORD: tl.constexpr = min(C, 4)
    tl.store(out + tl.max_contiguous(tl.multiple_of(offs, (1, WORD)), (1, WORD)), scale)


@triton.jit
def store_block_scales(
    part, row, col, rows, cols, storage, F: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr
):
    """Store the scales of a tile [TR, TC] at (row, col), one per block, swizzled ones too."""
    B: tl.constexpr = F.block
    if F.scale != "" and (F.rowwise or F.square):
        ptr = row_scale_pointers(storage.rowwise_scale, row, col, rows, cols, F, TR, TC)
        if F.square or F.scale != "float32":
            tl.store(ptr, part.row_scale)
        else:
            tl.store(ptr, part.row_scale, row + tl.arange(0, TR)[:, None] < rows)
    scale = part.column_scale
    if F.square or not F.columnwise:
        scale = part.row_scale
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
    if F.swizzled and F.rowwise:
        out = storage.rowwise_gemm_scale
        _store_swizzled(out, row, col // B, cols // B, part.row_scale, F, TR, TC // B)
    if F.swizzled and F.columnwise:
        out = storage.columnwise_gemm_scale
        _store_swizzled(out, col, row // B, rows // B, tl.trans(scale), F, TC, TR // B)
