"""Transpose the 4- or 8-bit codes of any number of matrices."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.launch.launch import Launch
from fp4adam.kernels.launch.tensor_table import (
    field,
    load_tile,
    pointer,
    tile_offsets,
    tile_start,
)
from fp4adam.kernels.store import edge_mask, store_words
from fp4adam.kernels.tiles.codes import transpose_words

# Side of a whole tile by bits, 64 bytes in either direction; and side of a tile at an edge.
TILE = {4: 128, 8: 64}
EDGE = 32


@triton.jit
def _transpose_kernel(table, tiles, BITS: tl.constexpr, WHOLE: tl.constexpr, SIDE: tl.constexpr):
    """Transpose one tile, in words if it is WHOLE: inside of a matrix of whole words.

    Else it may reach past an edge, and is transposed byte by byte, at any alignment. With 4 bits,
    rows and columns are even.

    Grid: (n_tiles,). Tile: [SIDE, SIDE]. table: int64 [n_tensors, 20]. tiles: int32 [n_tiles, 4].
    Reads and writes BITS / 8 bytes per element.
    """
    tensor, row, col = load_tile(tiles, SIDE)
    ALIGNMENT: tl.constexpr = 16 if WHOLE else 1
    DTYPE: tl.constexpr = tl.uint32 if WHOLE else tl.uint8
    N: tl.constexpr = (32 if WHOLE else 8) // BITS
    rows = field(table, tensor, "rows", tl.int32, ALIGNMENT)
    cols = field(table, tensor, "cols", tl.int32, ALIGNMENT)
    source = pointer(table, tensor, "rowwise_data", DTYPE, ALIGNMENT)
    target = pointer(table, tensor, "columnwise_data", DTYPE, ALIGNMENT)
    source += tile_start(row, col // N, cols // N) + tile_offsets(cols // N, SIDE, SIDE // N)
    if WHOLE:
        words = transpose_words(tl.load(source), BITS, SIDE, SIDE)
        store_words(target, words, col, row, rows, None, BITS, SIDE, SIDE)
    else:
        mask = edge_mask(row, col // N, rows, cols // N, True, SIDE, SIDE // N)
        code = tl.load(source, mask, 0)
        if BITS == 4:
            code = tl.trans(tl.interleave(code & 0xF, code >> 4))
            low, high = tl.split(tl.reshape(code, (SIDE, SIDE // 2, 2)))
            code = low | (high << 4)
        else:
            code = tl.trans(code)
        mask = edge_mask(col, row // N, cols, rows // N, True, SIDE, SIDE // N)
        target += tile_start(col, row // N, rows // N) + tile_offsets(rows // N, SIDE, SIDE // N)
        tl.store(target, code, mask)


def transpose(table: Tensor, tiles: Sequence[Tensor], *, bits: int) -> list[Launch]:
    """The launches that write ``columnwise_data`` of a table from its ``rowwise_data``.

    ``tiles``: the list of whole tiles (side TILE[bits]) and the list of edge tiles (side EDGE).
    """
    kinds = zip(tiles, (True, False), (TILE[bits], EDGE), strict=True)
    return [
        Launch(
            _transpose_kernel, len(listed), (table, listed), dict(BITS=bits, WHOLE=whole, SIDE=side)
        )
        for listed, whole, side in kinds
    ]
