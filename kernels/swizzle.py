"""Block scales in the swizzled layout of block-scaled GEMMs: tiles of 128 rows by 4 blocks.

A row of a tile is a word of 4 bytes, and rows that are 32 apart are adjacent in memory.
"""

import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.launch.launch import Launch
from fp4adam.kernels.launch.tensor_table import field, load_tile

# Rows and blocks per program: eight tiles that are adjacent in memory.
TILE = (128, 32)


@triton.jit
def _swizzle_kernel(table, tiles, UNDO: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Copy one tile of scales from a plain matrix to a swizzled one, or back if UNDO.

    Grid: (n_tiles,). Tile: [BR, BC], BR = 128. table: int64 [n_tensors, 20]. tiles: int32
    [n_tiles, 4]. Reads and writes a byte per scale; padding of swizzled ones becomes zero.
    """
    tensor, row, block = load_tile(tiles, BC)
    rows = field(table, tensor, "scale_rows").to(tl.int32)
    blocks = field(table, tensor, "scale_cols").to(tl.int32)
    offs = tl.arange(0, BR * BC)
    i, j = row + offs // 4 % 4 * 32 + offs // 16 % 32, block + offs // 512 * 4 + offs % 4
    inside = (i < rows) & (j < blocks)
    plain = field(table, tensor, "plain").to(tl.pointer_type(tl.uint8))
    plain += i // field(table, tensor, "repeats") * field(table, tensor, "row_stride")
    plain += j * field(table, tensor, "col_stride")
    swizzled = field(table, tensor, "swizzled").to(tl.pointer_type(tl.uint8))
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
