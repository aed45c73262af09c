"""Flags of the units of a weight that a step changes, for exports of what has changed.

A unit is 32 consecutive codes of a row-major matrix, with the scales of their blocks; its flag is a
byte. ``fp4adam.tensors.changes`` does the same in torch operators.
"""

import triton
import triton.language as tl

from fp4adam.kernels.launch.tensor_table import tile_offsets, tile_start


@triton.jit
def flag_units(flags, row, col, stride, differs, PER_UNIT: tl.constexpr):
    """Set the flags of units with entries that differ; others stay as they are.

    differs: bool [R, C], of entries at (row, col) of a matrix with ``stride`` entries per row, of
    which PER_UNIT make a unit. Programs that share a unit store the same byte.
    """
    R: tl.constexpr = differs.shape[0]
    C: tl.constexpr = differs.shape[1]
    unit = (tile_start(row, col, stride) + tile_offsets(stride, R, C)) // PER_UNIT
    tl.store(flags + unit, tl.full((R, C), 1, tl.uint8), differs)


@triton.jit
def flag_words(flags, data, row, col, stride, words, BITS: tl.constexpr):
    """Flag the units whose words of codes, before they are stored, differ from those in memory.

    words: uint32 [R, C]; col and stride are in words. BITS: of a code, so many words are a unit.
    """
    R: tl.constexpr = words.shape[0]
    C: tl.constexpr = words.shape[1]
    old = tl.load(data + tile_start(row, col, stride) + tile_offsets(stride, R, C))
    flag_units(flags, row, col, stride, old != words, BITS)


@triton.jit
def flag_codes(flags, data, row, col, stride, codes, mask):
    """Flag the units whose codes of 8 bits, before they are stored, differ from those in memory.

    codes: uint8 [R, C]. mask: bool [R, C], of those that are inside the matrix.
    """
    R: tl.constexpr = codes.shape[0]
    C: tl.constexpr = codes.shape[1]
    old = tl.load(data + tile_start(row, col, stride) + tile_offsets(stride, R, C), mask, 0)
    flag_units(flags, row, col, stride, (old != codes) & mask, 32)
