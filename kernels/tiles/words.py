"""Codes packed in 32-bit words: stored, collected over several tiles, and transposed.

In the transposed matrix a tile covers only a short piece of each row. Stores of such short pieces
take far more time than their size suggests. So the words of several tiles are kept in registers,
transposed together, and written as segments of 32 bytes or more.
"""

import triton
import triton.language as tl

from fp4adam.kernels.launch.tensor_table import tile_offsets, tile_start


@triton.jit
def pack_words(code, BITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Pack the codes of neighbouring columns into words, the first code in the lowest bits.

    code: integers [R, C] below 2^BITS, 4 or 8. Returns uint32 [R, C * BITS / 32].
    """
    PER_WORD: tl.constexpr = 32 // BITS
    fields = tl.reshape(code.to(tl.uint32), (R, C // PER_WORD, PER_WORD))
    shifts = BITS * tl.arange(0, PER_WORD).to(tl.uint32)
    return tl.sum(fields << shifts[None, None, :], 2)


@triton.jit
def store_words(data, row, col, stride, words, R: tl.constexpr, C: tl.constexpr):
    """Store words [R, C] at (row, col) of a matrix; col and stride are in words.

    data: pointer to uint32, or to uint8 with any alignment, which is written byte by byte.
    """
    if data.dtype.element_ty == tl.uint32:
        tl.store(data + tile_start(row, col, stride) + tile_offsets(stride, R, C), words)
    else:
        code_bytes = (words[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]) & 0xFF
        ptr = data + tile_start(row, 4 * col, 4 * stride) + tile_offsets(4 * stride, R, 4 * C)
        tl.store(ptr, tl.reshape(code_bytes.to(tl.uint8), (R, 4 * C)))


@triton.jit
def insert_tile(tiles, tile, i):
    """The tiles [n, R, C] with tile ``i`` replaced by ``tile`` [R, C]."""
    number = tl.arange(0, tiles.shape[0])[:, None, None]
    return tl.where(number == i, tile[None, :, :], tiles)


@triton.jit
def extract_tile(tiles, i):
    """Tile ``i`` [R, C] of integers [n, R, C]."""
    number = tl.arange(0, tiles.shape[0])[:, None, None]
    return tl.sum(tl.where(number == i, tiles, 0), 0)


@triton.jit
def _exchange(pairs, SHIFT: tl.constexpr, LOW: tl.constexpr):
    """Swap the fields in the high bits of the first word with those in the low bits of the second.

    pairs: uint32 [..., 2]. LOW: mask of the fields that lie SHIFT bits below their partners.
    """
    HIGH: tl.constexpr = LOW << SHIFT
    first, second = tl.split(pairs)
    return tl.join(
        (first & LOW) | ((second & LOW) << SHIFT), ((first & HIGH) >> SHIFT) | (second & HIGH)
    )


@triton.jit
def transpose_words(words, BITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Transpose packed codes: words of neighbouring columns to words of neighbouring rows.

    words: uint32 [R, C * BITS / 32] of codes [R, C]. Returns uint32 [C, R * BITS / 32].
    """
    # Within a square of codes, the bits of the row index and of the column index are swapped one
    # pair at a time. Each permute moves the row bit to the last dimension for the exchange.
    if BITS == 4:
        x = tl.reshape(words, (R // 8, 2, 2, 2, C // 8))
        x = _exchange(tl.permute(x, (0, 4, 1, 2, 3)), 4, 0x0F0F0F0F)
        x = _exchange(tl.permute(x, (0, 1, 2, 4, 3)), 8, 0x00FF00FF)
        x = _exchange(tl.permute(x, (0, 1, 3, 4, 2)), 16, 0x0000FFFF)
        x = tl.reshape(tl.permute(x, (1, 4, 3, 2, 0)), (C, R // 8))
    else:
        x = tl.reshape(words, (R // 4, 2, 2, C // 4))
        x = _exchange(tl.permute(x, (0, 3, 1, 2)), 8, 0x00FF00FF)
        x = _exchange(tl.permute(x, (0, 1, 3, 2)), 16, 0x0000FFFF)
        x = tl.reshape(tl.permute(x, (1, 3, 2, 0)), (C, R // 4))
    return x
