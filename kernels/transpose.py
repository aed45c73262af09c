"""Transpose the 4- or 8-bit codes of any number of matrices."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.launch.launch import Launch
from fp4adam.kernels.launch.tensor_table import (
    COLS,
    COLUMNWISE_DATA,
    ROWS,
    ROWWISE_DATA,
    WIDTH,
    load_tile,
    pointer,
    size,
    tile_offsets,
    tile_start,
)
from fp4adam.kernels.tiles.words import store_words, transpose_words

# Side of a whole tile by bits, 64 bytes in either direction; and side of a tile at an edge.
TILE = {4: 128, 8: 64}
EDGE = 32


@triton.jit
def _transpose_kernel(table, tiles, BITS: tl.constexpr, SIDE: tl.constexpr):
    """Transpose one whole tile of a matrix whose rows and columns consist of whole words.

    Grid: (n_tiles,). Tile: [SIDE, SIDE]. table: int64 [n_tensors, 19]. tiles: int32 [n_tiles, 4].
    Reads and writes BITS / 8 bytes per element.
    """
    tensor, row, col = load_tile(tiles, SIDE)
    rows, cols = size(table, tensor, ROWS, 16), size(table, tensor, COLS, 16)
    N: tl.constexpr = 32 // BITS
    source = pointer(table, tensor, ROWWISE_DATA, tl.uint32) + tile_start(row, col // N, cols // N)
    words = tl.load(source + tile_offsets(cols // N, SIDE, SIDE // N))
    words = transpose_words(words, BITS, SIDE, SIDE)
    target = pointer(table, tensor, COLUMNWISE_DATA, tl.uint32)
    store_words(target, col, row // N, rows // N, words, SIDE, SIDE // N)


@triton.jit
def _transpose_edge_kernel(table, tiles, BITS: tl.constexpr, SIDE: tl.constexpr):
    """Transpose one tile that may reach past an edge, byte by byte, at any alignment.

    Grid, tile and tables as for whole tiles. With 4 bits, rows and columns are even.
    """
    tensor, row, col = load_tile(tiles, SIDE)
    columns = table + tensor.to(tl.int64) * WIDTH
    rows, cols = tl.load(columns + ROWS).to(tl.int32), tl.load(columns + COLS).to(tl.int32)
    source = tl.load(columns + ROWWISE_DATA).to(tl.pointer_type(tl.uint8))
    target = tl.load(columns + COLUMNWISE_DATA).to(tl.pointer_type(tl.uint8))
    N: tl.constexpr = 8 // BITS
    lane, byte = tl.arange(0, SIDE), N * tl.arange(0, SIDE // N)
    mask = (row + lane < rows)[:, None] & (col + byte < cols)[None, :]
    source += tile_start(row, col // N, cols // N) + tile_offsets(cols // N, SIDE, SIDE // N)
    code = tl.load(source, mask, 0)
    if BITS == 4:
        code = tl.trans(tl.interleave(code & 0xF, code >> 4))
        low, high = tl.split(tl.reshape(code, (SIDE, SIDE // 2, 2)))
        code = low | (high << 4)
    else:
        code = tl.trans(code)
    mask = (col + lane < cols)[:, None] & (row + byte < rows)[None, :]
    target += tile_start(col, row // N, rows // N) + tile_offsets(rows // N, SIDE, SIDE // N)
    tl.store(target, code, mask)


def transpose(table: Tensor, tiles: Sequence[Tensor], *, bits: int) -> list[Launch]:
    """The launches that write ``columnwise_data`` of a table from its ``rowwise_data``.

    ``tiles``: the list of whole tiles (side TILE[bits]) and the list of edge tiles (side EDGE).
    """
    kinds = zip((_transpose_kernel, _transpose_edge_kernel), tiles, (TILE[bits], EDGE), strict=True)
    return [
        Launch(kernel, len(listed), (table, listed), dict(BITS=bits, SIDE=side))
        for kernel, listed, side in kinds
        if len(listed)
    ]
