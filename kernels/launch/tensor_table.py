"""The tensor table of a launch: addresses and sizes, in one int64 row per tensor.

A separate list has one int32 row (tensor, first row, first column, 0) per tile. So one launch
covers any number of tensors of any shape, with tiles that never reach past an edge.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.launch.schema import STEP, TABLE_WIDTH

GRAD = tl.constexpr(STEP.index("grad"))
SCALARS = tl.constexpr(STEP.index("scalars"))
VALUE = tl.constexpr(STEP.index("value"))
EXP_AVG = tl.constexpr(STEP.index("exp_avg"))
EXP_AVG_SQ = tl.constexpr(STEP.index("exp_avg_sq"))
MAX_EXP_AVG_SQ = tl.constexpr(STEP.index("max_exp_avg_sq"))
ROWWISE_DATA = tl.constexpr(STEP.index("rowwise_data"))
ROWWISE_SCALE = tl.constexpr(STEP.index("rowwise_scale"))
COLUMNWISE_DATA = tl.constexpr(STEP.index("columnwise_data"))
COLUMNWISE_SCALE = tl.constexpr(STEP.index("columnwise_scale"))
AMAX = tl.constexpr(STEP.index("amax"))
ROWS = tl.constexpr(STEP.index("rows"))
COLS = tl.constexpr(STEP.index("cols"))
VALUE_EXTRA = tl.constexpr(STEP.index("value_extra"))
EXP_AVG_SCALE = tl.constexpr(STEP.index("exp_avg_scale"))
EXP_AVG_SQ_SCALE = tl.constexpr(STEP.index("exp_avg_sq_scale"))
ROWWISE_GEMM_SCALE = tl.constexpr(STEP.index("rowwise_gemm_scale"))
COLUMNWISE_GEMM_SCALE = tl.constexpr(STEP.index("columnwise_gemm_scale"))
AMAX_HISTORY = tl.constexpr(STEP.index("amax_history"))
WIDTH = tl.constexpr(TABLE_WIDTH)

# Every address in the table is a multiple of this many bytes.
ALIGNMENT = tl.constexpr(16)

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def pointer(table, tensor, COLUMN: tl.constexpr, DTYPE: tl.constexpr):
    """Pointer from the table; the hint that it is aligned to ALIGNMENT allows 16-byte accesses."""
    address = tl.load(table + tensor.to(tl.int64) * WIDTH + COLUMN)
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), ALIGNMENT)


@triton.jit
def size(table, tensor, COLUMN: tl.constexpr, MULTIPLE: tl.constexpr):
    """Number of rows or columns from the table, int32, with the hint that MULTIPLE divides it."""
    # The hint is in here, because a hint on the result of a call is lost by inlining.
    return tl.multiple_of(
        tl.load(table + tensor.to(tl.int64) * WIDTH + COLUMN).to(tl.int32), MULTIPLE
    )


@triton.jit
def takes_part(table, tensor, found_inf_ptr):
    """Whether the step updates the tensor: it has a gradient, and found_inf (float32 [1]) is 0."""
    grad = tl.load(table + tensor.to(tl.int64) * WIDTH + GRAD)
    return (grad != 0) & (tl.load(found_inf_ptr) == 0)


@triton.jit
def load_tile(tiles, MULTIPLE: tl.constexpr):
    """This program's (tensor, first row, first column); MULTIPLE divides the last two."""
    tile = tiles + 4 * tl.program_id(0)
    row, col = tl.load(tile + 1), tl.load(tile + 2)
    return tl.load(tile), tl.multiple_of(row, MULTIPLE), tl.multiple_of(col, MULTIPLE)


@triton.jit
def tile_start(row, col, cols):
    """Element offset, int64, of the tile that begins at (row, col) of a row-major matrix."""
    return row.to(tl.int64) * cols + col


@triton.jit
def tile_offsets(stride, BR: tl.constexpr, BC: tl.constexpr):
    """Element offsets [BR, BC] from the start of a tile of a matrix with rows ``stride`` apart."""
    return tl.arange(0, BR)[:, None] * stride + tl.arange(0, BC)[None, :]


def divisor_tile(n: int, largest: int, smallest: int) -> int:
    """The largest power-of-two tile within the bounds that divides ``n``."""
    tile = largest
    while tile > smallest and n % tile:
        tile //= 2
    return tile


# Columns of a band. Tiles follow each other down a band before the next one begins, so that short
# pieces of transposed rows meet their neighbours in L2, however wide the matrix is. Tiles of 128
# rows store whole lines, and tiles without transposed rows have no such pieces: they are slower in
# bands.
BAND = 8192


def tile_grid(
    tensor: int,
    rows: tuple[int, int, int],
    cols: tuple[int, int, int],
    band: int | None = None,
) -> Tensor:
    """Tiles (tensor, first row, first column, 0) of a region; bounds are (start, stop, step).

    ``band``: The columns after which tiles go on with the next rows; None: all of them.
    """
    starts = torch.cartesian_prod(
        *(torch.arange(*bounds, dtype=torch.int32, device="cpu") for bounds in (rows, cols))
    ).view(-1, 2)
    if band is not None:
        starts = starts[torch.argsort(starts[:, 1] // band, stable=True)]
    tiles = torch.zeros(len(starts), 4, dtype=torch.int32, device="cpu")
    tiles[:, 0], tiles[:, 1:3] = tensor, starts
    return tiles


class Storage(NamedTuple):
    """Pointers to codes and scales of a quantized weight; None for those that are not written."""

    rowwise_data: Any
    rowwise_scale: Any
    columnwise_data: Any
    columnwise_scale: Any


class GemmScales(NamedTuple):
    """Pointers to the swizzled scales of a quantized weight."""

    rowwise: Any
    columnwise: Any


@triton.jit
def storage_pointers(table, tensor, CODES: tl.constexpr, SCALES: tl.constexpr):
    """The :class:`Storage` of a tensor; load it before a loop, not in it."""
    return Storage(
        pointer(table, tensor, ROWWISE_DATA, CODES),
        pointer(table, tensor, ROWWISE_SCALE, SCALES),
        pointer(table, tensor, COLUMNWISE_DATA, CODES),
        pointer(table, tensor, COLUMNWISE_SCALE, SCALES),
    )


@triton.jit
def gemm_scale_pointers(table, tensor):
    """The :class:`GemmScales` of a tensor."""
    return GemmScales(
        pointer(table, tensor, ROWWISE_GEMM_SCALE, tl.uint8),
        pointer(table, tensor, COLUMNWISE_GEMM_SCALE, tl.uint8),
    )


class Tile(NamedTuple):
    """The work of one program: ``loop`` tiles [rows, cols] down the rows, and launch options."""

    rows: int
    cols: int
    loop: int
    num_warps: int
    num_stages: int
