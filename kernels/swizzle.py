"""Block scales in the swizzled layout of block-scaled GEMMs: tiles of 128 rows by 4 blocks.

A row of a tile is a word of 4 bytes, and rows that are 32 apart are adjacent in memory.
"""

import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.launch.launch import Launch
from fp4adam.kernels.launch.schema import SWIZZLE
from fp4adam.kernels.launch.tensor_table import WIDTH, load_tile

PLAIN, SWIZZLED, ROWS, BLOCKS, ROW_STRIDE, BLOCK_STRIDE, REPEATS = map(
    tl.constexpr, range(len(SWIZZLE))
)

# Rows and blocks per program: eight tiles that are adjacent in memory.
TILE = (128, 32)


@triton.jit
def store_swizzled(out, row, block, blocks, scale, R: tl.constexpr, C: tl.constexpr):
    """Store scales (uint8 [R, C]) at (row, block) of a matrix with ``blocks`` blocks per row.

    C is a power of two, and ``block`` a multiple of it. out: aligned to 4 bytes.
    """
    i, j = row + tl.arange(0, R)[:, None], block + tl.arange(0, C)[None, :]
    # Shifts take fewer registers than divisions, which handle negative numbers too.
    tile = (i >> 7).to(tl.int64) * ((blocks + 3) >> 2) + (j >> 2)
    offs = tile * 512 + ((i & 31) * 16 + ((i >> 5) & 3) * 4 + (j & 3))
    # Up to four blocks of a row are adjacent and aligned, so the hint allows stores of whole words.
    WORD: tl.constexpr = min(C, 4)
    tl.store(out + tl.max_contiguous(tl.multiple_of(offs, (1, WORD)), (1, WORD)), scale)


@triton.jit
def _swizzle_kernel(table, tiles, UNDO: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Copy one tile of scales from a plain matrix to a swizzled one, or back if UNDO.

    Grid: (n_tiles,). Tile: [BR, BC], BR = 128. table: int64 [n_tensors, 19]. tiles: int32
    [n_tiles, 4]. Reads and writes a byte per scale; padding of swizzled ones becomes zero.
    """
    tensor, row, block = load_tile(tiles, BC)
    fields = table + tensor.to(tl.int64) * WIDTH
    rows, blocks = tl.load(fields + ROWS).to(tl.int32), tl.load(fields + BLOCKS).to(tl.int32)
    offs = tl.arange(0, BR * BC)
    i, j = row + offs // 4 % 4 * 32 + offs // 16 % 32, block + offs // 512 * 4 + offs % 4
    inside = (i < rows) & (j < blocks)
    plain = tl.load(fields + PLAIN).to(tl.pointer_type(tl.uint8))
    plain += i // tl.load(fields + REPEATS) * tl.load(fields + ROW_STRIDE)
    plain += j * tl.load(fields + BLOCK_STRIDE)
    swizzled = tl.load(fields + SWIZZLED).to(tl.pointer_type(tl.uint8))
    first_tile = (row // 128).to(tl.int64) * ((blocks + 3) // 4) + block // 4
    swizzled += first_tile * 512 + offs
    if UNDO:
        tl.store(plain, tl.load(swizzled, inside), inside)
    else:
        tl.store(swizzled, tl.load(plain, inside, 0), j < (blocks + 3) // 4 * 4)


def swizzle(table: Tensor, tiles: Tensor, *, undo: bool) -> Launch:
    """The launch that writes swizzled matrices from plain ones; with ``undo`` the reverse."""
    constexprs = dict(UNDO=undo, BR=TILE[0], BC=TILE[1])
    return Launch(_swizzle_kernel, len(tiles), (table, tiles), constexprs)
