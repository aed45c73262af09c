"""What kernels read of the tensor table, and of the list of tiles.

The table has one int64 row of addresses and sizes per tensor, with the columns of ``schema``. The
list has one int32 row per tile: (tensor, first row, first column, rows << 16 | columns). So one
launch covers any number of tensors of any shape, with tiles that never reach past an edge.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fp4adam.kernels.launch import schema

WIDTH = tl.constexpr(schema.TABLE_WIDTH)
column = triton.constexpr_function(schema.column)

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def field(
    table, tensor, COLUMN: tl.constexpr, DTYPE: tl.constexpr = tl.int64, MULTIPLE: tl.constexpr = 1
):
    """The entry of a tensor, or of a tile of tensors, in the column of this name, as DTYPE.

    MULTIPLE divides it.
    """
    entry = tl.load(table + tensor.to(tl.int64) * WIDTH + column(COLUMN)).to(DTYPE)
    # The hint is in here, because a hint on the result of a call is lost by inlining.
    return tl.multiple_of(entry, MULTIPLE) if MULTIPLE > 1 else entry


@triton.jit
def pointer(table, tensor, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr = 16):
    """Pointer from the table; the hint that it is aligned allows accesses of 16 bytes."""
    address = field(table, tensor, COLUMN).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(address, ALIGNMENT)


@triton.jit
def takes_part(table, tensor, found_inf_ptr):
    """Whether the step updates the tensor: it has a gradient, and found_inf (float32 [1]) is 0."""
    return (field(table, tensor, "grad") != 0) & (tl.load(found_inf_ptr) == 0)


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
def tile_offsets(stride, BR: tl.constexpr, BC: tl.constexpr, LANES: tl.constexpr = 0):
    """Element offsets [BR, BC] from the start of a tile of a matrix with rows ``stride`` apart.

    LANES: neighbours per thread, for gradients and states; 0 leaves them to Triton. Four are 16
    bytes of FP32. Without the hint, Triton would also load 16 bytes of a BF16 gradient per thread,
    eight neighbours, and then compute the moments twice, once in each layout.
    """
    offs = tl.arange(0, BR)[:, None] * stride + tl.arange(0, BC)[None, :]
    if LANES != 0:
        offs = tl.max_contiguous(offs, (1, LANES))
    return offs


class Storage(NamedTuple):
    """Pointers to codes and scales of a quantized weight; None for those that are not written."""

    rowwise_data: Any
    rowwise_scale: Any
    columnwise_data: Any
    columnwise_scale: Any
    rowwise_gemm_scale: Any
    columnwise_gemm_scale: Any


@triton.jit
def storage_pointers(
    table, tensor, CODES: tl.constexpr, SCALES: tl.constexpr, ALIGNMENT: tl.constexpr = 16
):
    """The :class:`Storage` of a tensor; load it before a loop, not in it. ALIGNMENT: of codes."""
    return Storage(
        pointer(table, tensor, "rowwise_data", CODES, ALIGNMENT),
        pointer(table, tensor, "rowwise_scale", SCALES),
        pointer(table, tensor, "columnwise_data", CODES, ALIGNMENT),
        pointer(table, tensor, "columnwise_scale", SCALES),
        pointer(table, tensor, "rowwise_gemm_scale", tl.uint8),
        pointer(table, tensor, "columnwise_gemm_scale", tl.uint8),
    )


class Form(NamedTuple):
    """The tile of one program, the parts that it works on in turn, and launch options."""

    rows: int
    cols: int
    part_rows: int
    part_cols: int
    num_warps: int
    num_stages: int
    registers: int | None
