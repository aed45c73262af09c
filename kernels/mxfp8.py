"""MXFP8: quantize, dequantize, and the fused Adam step that writes the quantized weight."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._bfloat16 import to_float32
from ._e4m3 import e4m3_code, e4m3_value
from ._e8m0 import e8m0_code_up, e8m0_reciprocal, e8m0_value
from ._launch import Launch
from .adam import SIGNALS, adam_step_tile, load_scalars, round_through, round_to, state_pointers
from .tensor_table import (
    COLS,
    COLUMNWISE_DATA,
    COLUMNWISE_SCALE,
    ROWS,
    ROWWISE_DATA,
    ROWWISE_SCALE,
    TRITON_DTYPES,
    Tile,
    load_tile,
    pointer,
    size,
    takes_part,
    tile_offsets,
    tile_start,
)

BLOCK = 32
# Tiles of the fused step; edges are covered by single blocks.
STEP_TILE = Tile(32, 32, 4, 4, 4)
EDGE_TILE = Tile(32, 32, 1, 4, 1)


@triton.jit
def mxfp8_codes(blocks, AXIS: tl.constexpr):
    """E4M3 codes (uint8) and E8M0 scales (uint8) of float32 blocks that lie along AXIS."""
    amax = tl.max(tl.abs(blocks), AXIS)
    amax = tl.where(amax == amax, amax, 0.0)  # all elements NaN
    # 1 / 448 rounded to float32; dividing instead gives the same scales.
    scale = e8m0_code_up(amax * 0.0022321429569274187)
    factor = tl.expand_dims(e8m0_reciprocal(scale), AXIS)
    return e4m3_code(blocks * factor), scale.to(tl.uint8)


@triton.jit
def mxfp8_tile(
    x,
    row,
    col,
    rows,
    cols,
    rowwise_data,
    rowwise_scale,
    columnwise_data,
    columnwise_scale,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Quantize the float32 tile [BR, BC] at (row, col) and store codes and scales."""
    start, offs = tile_start(row, col, cols), tile_offsets(cols, BR, BC)
    if ROWWISE:
        code, scale = mxfp8_codes(tl.reshape(x, (BR, BC // 32, 32)), 2)
        tl.store(rowwise_data + start + offs, tl.reshape(code, (BR, BC)))
        width = (cols // 32 + 3) // 4 * 4
        grid = rowwise_scale + tile_start(row, col // 32, width)
        tl.store(grid + tile_offsets(width, BR, BC // 32), scale)
    if COLUMNWISE:
        code, scale = mxfp8_codes(tl.reshape(x, (BR // 32, 32, BC)), 1)
        tl.store(columnwise_data + start + offs, tl.reshape(code, (BR, BC)))
        width = (cols + 127) // 128 * 128
        grid = columnwise_scale + tile_start(row // 32, col, width)
        tl.store(grid + tile_offsets(width, BR // 32, BC), scale)


@triton.jit
def _quantize_kernel(
    x_ptr,
    rowwise_data,
    rowwise_scale,
    columnwise_data,
    columnwise_scale,
    rows,
    cols,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Quantize a matrix.

    Grid: (n_tiles,). Tile: [BR, BC], dividing the matrix. Reads x (2 or 4 bytes per element),
    writes one byte per element and direction, and the scales.
    """
    tile, tiles_per_row = tl.program_id(0), cols // BC
    row, col = tile // tiles_per_row * BR, tile % tiles_per_row * BC
    x = to_float32(tl.load(x_ptr + tile_start(row, col, cols) + tile_offsets(cols, BR, BC)))
    mxfp8_tile(
        x,
        row,
        col,
        rows,
        cols,
        rowwise_data,
        rowwise_scale,
        columnwise_data,
        columnwise_scale,
        ROWWISE,
        COLUMNWISE,
        BR,
        BC,
    )


@triton.jit
def _dequantize_kernel(
    data_ptr,
    scale_ptr,
    out_ptr,
    cols,
    stride_scale_row,
    ROWWISE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Decode E4M3 codes [rows, cols].

    Grid: (n_tiles,). Tile: [BR, BC], dividing the matrix. Reads one byte per element and the
    scales, writes 2 or 4 bytes per element.
    """
    tile, tiles_per_row = tl.program_id(0), cols // BC
    row, col = tile // tiles_per_row * BR, tile % tiles_per_row * BC
    offs = tile_start(row, col, cols) + tile_offsets(cols, BR, BC)
    value = e4m3_value(tl.load(data_ptr + offs))
    r, c = row + tl.arange(0, BR), col + tl.arange(0, BC)
    if ROWWISE:
        scale_row, scale_col = r, c // 32
    else:
        scale_row, scale_col = r // 32, c
    at = scale_row.to(tl.int64)[:, None] * stride_scale_row + scale_col[None, :]
    value = value * e8m0_value(tl.load(scale_ptr + at))
    tl.store(out_ptr + offs, round_to(value, out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _adam_step_kernel(
    grad_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    table,
    scalars,
    tiles,
    GRAD_DTYPE: tl.constexpr,
    WRITE_DTYPE: tl.constexpr,
    ADAM_W: tl.constexpr,
    AMSGRAD: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    LOOP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adam and re-quantization of one column of tiles of one tensor, each byte moved once.

    Grid: (n_tiles,). Tile: LOOP times [BR, BC] down the rows. table: int64 [n_tensors, 16].
    scalars: float32 [n, 10]. tiles: int32 [n_tiles, 4].
    Reads gradient (2 bytes if BF16) and three FP32 tensors, writes these, codes and scales:
    28 + 1/16 bytes per element with both directions.
    """
    tensor, first_row, col = load_tile(tiles, 32)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    rows = size(table, tensor, ROWS, 32)
    cols = size(table, tensor, COLS, 32)
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    pointers = state_pointers(table, tensor, GRAD_DTYPE, tl.float32)
    rowwise_data = pointer(table, tensor, ROWWISE_DATA, tl.uint8)
    rowwise_scale = pointer(table, tensor, ROWWISE_SCALE, tl.uint8)
    columnwise_data = pointer(table, tensor, COLUMNWISE_DATA, tl.uint8)
    columnwise_scale = pointer(table, tensor, COLUMNWISE_SCALE, tl.uint8)
    for i in tl.range(0, LOOP, num_stages=STAGES):
        row = first_row + i * BR
        value = adam_step_tile(
            pointers,
            tile_start(row, col, cols),
            tile_offsets(cols, BR, BC),
            None,
            constants,
            tl.float32,
            ADAM_W,
            AMSGRAD,
            True,
        )
        mxfp8_tile(
            round_through(value, WRITE_DTYPE),
            row,
            col,
            rows,
            cols,
            rowwise_data,
            rowwise_scale,
            columnwise_data,
            columnwise_scale,
            ROWWISE,
            COLUMNWISE,
            BR,
            BC,
        )


def quantize(
    x: Tensor,
    *,
    rowwise_data: Tensor | None,
    columnwise_data: Tensor | None,
    rowwise_scale: Tensor | None,
    columnwise_scale: Tensor | None,
) -> None:
    """Quantize the matrix ``x`` [rows, cols] (contiguous, multiples of 32) into storage."""
    rows, cols = x.shape
    _quantize_kernel[(rows // BLOCK * (cols // BLOCK),)](
        x,
        rowwise_data,
        rowwise_scale,
        columnwise_data,
        columnwise_scale,
        rows,
        cols,
        ROWWISE=rowwise_data is not None,
        COLUMNWISE=columnwise_data is not None,
        BR=BLOCK,
        BC=BLOCK,
        enable_fp_fusion=False,
    )


def dequantize(data: Tensor, scale: Tensor, rowwise: bool, dtype: torch.dtype) -> Tensor:
    """Decode E4M3 codes [rows, cols] with scales per 1x32 (``rowwise``) or 32x1 block."""
    rows, cols = data.shape
    out = torch.empty_like(data, dtype=dtype)
    if out.numel():
        _dequantize_kernel[(rows // BLOCK * (cols // BLOCK),)](
            data,
            scale,
            out,
            cols,
            scale.stride(0),
            ROWWISE=rowwise,
            BR=BLOCK,
            BC=BLOCK,
            enable_fp_fusion=False,
        )
    return out


def adam_step(
    table: Tensor,
    scalars: Tensor,
    tiles: tuple[Tensor, Tensor],
    *,
    grad_dtype: torch.dtype,
    write_dtype: torch.dtype,
    adam_w_mode: bool,
    amsgrad: bool,
    rowwise: bool,
    columnwise: bool,
) -> list[Launch]:
    """The pass over all tensors of a table, to be called with ``grad_scale, clip, found_inf``.

    ``tiles``: the lists for STEP_TILE and for EDGE_TILE.
    """
    return [
        Launch(
            _adam_step_kernel,
            part.shape[0],
            (table, scalars, part),
            dict(
                GRAD_DTYPE=TRITON_DTYPES[grad_dtype],
                WRITE_DTYPE=TRITON_DTYPES[write_dtype],
                ADAM_W=adam_w_mode,
                AMSGRAD=amsgrad,
                ROWWISE=rowwise,
                COLUMNWISE=columnwise,
                BR=tile.rows,
                BC=tile.cols,
                LOOP=tile.loop,
                STAGES=tile.num_stages,
            ),
            num_warps=tile.num_warps,
        )
        for part, tile in zip(tiles, (STEP_TILE, EDGE_TILE), strict=True)
    ]
