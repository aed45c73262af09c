"""MXFP8: quantize, dequantize, and the fused Adam step that writes the quantized weight."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.adam import (
    SIGNALS,
    adam_step_tile,
    load_scalars,
    round_through,
    round_to,
    state_pointers,
)
from fp4adam.kernels.launch.launch import Launch, on_its_device
from fp4adam.kernels.launch.tensor_table import (
    COLS,
    COLUMNWISE_DATA,
    COLUMNWISE_GEMM_SCALE,
    COLUMNWISE_SCALE,
    ROWS,
    ROWWISE_DATA,
    ROWWISE_GEMM_SCALE,
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
from fp4adam.kernels.swizzle import store_swizzled
from fp4adam.kernels.tiles.bfloat16 import to_float32
from fp4adam.kernels.tiles.e4m3 import e4m3_value, e4m3_words
from fp4adam.kernels.tiles.e8m0 import e8m0_code_up, e8m0_reciprocal, e8m0_value
from fp4adam.kernels.tiles.state import has_scales
from fp4adam.kernels.tiles.words import (
    insert_tile,
    store_words,
    word_launcher,
    word_offsets,
    word_positions,
)

BLOCK = 32
# Tiles of the fused step, taken in parts of so many columns; edges are covered by single blocks.
# Encoding states needs registers, hence the smaller parts of states with scales.
STEP_TILE, STEP_PART = Tile(32, 256, 1, 4, 3), {False: 64, True: 32}  # by scaled_states
EDGE_TILE, EDGE_PART = Tile(32, 32, 1, 4, 1), 32
# Left alone, the compiler saves registers for edges, of which there are few, and spills.
EDGE_REGISTERS = 128


@triton.jit
def mxfp8_scale(amax):
    """E8M0 scales (int32) of blocks with the given float32 amaxes, and their reciprocals."""
    # 1 / 448 rounded to float32; dividing instead gives the same scales.
    scale = e8m0_code_up(amax * 0.0022321429569274187)
    return scale, e8m0_reciprocal(scale)


@triton.jit
def scale_blocks(blocks, AXIS: tl.constexpr):
    """Float32 blocks that lie along AXIS, divided by their E8M0 scales; and the scales (uint8)."""
    amax = tl.max(tl.abs(blocks), AXIS)
    amax = tl.where(amax == amax, amax, 0.0)  # all elements NaN
    scale, factor = mxfp8_scale(amax)
    return blocks * tl.expand_dims(factor, AXIS), scale.to(tl.uint8)


@triton.jit
def mxfp8_tile(
    x,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    BC: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Quantize the float32 tile [32, BC]; for HARDWARE see :func:`e4m3_words`.

    Returns words of codes (uint32 [32, BC / 4]) and scales (uint8) of the rows ([32, BC / 32]), and
    the same of the columns ([1, BC]); zeros in place of what is not wanted.
    """
    row_words = tl.zeros((32, BC // 4), tl.uint32)
    row_scale = tl.zeros((32, BC // 32), tl.uint8)
    column_words = tl.zeros((32, BC // 4), tl.uint32)
    column_scale = tl.zeros((1, BC), tl.uint8)
    if ROWWISE:
        scaled, row_scale = scale_blocks(tl.reshape(x, (32, BC // 32, 32)), 2)
        row_words = e4m3_words(tl.reshape(scaled, (32, BC)), 32, BC, HARDWARE)
    if COLUMNWISE:
        scaled, column_scale = scale_blocks(tl.reshape(x, (1, 32, BC)), 1)
        column_words = e4m3_words(tl.reshape(scaled, (32, BC)), 32, BC, HARDWARE)
    return row_words, row_scale, column_words, column_scale


@triton.jit
def store_tile(
    row_words,
    row_scale,
    column_words,
    column_scale,
    row,
    col,
    cols,
    rowwise_data,
    rowwise_scale,
    columnwise_data,
    columnwise_scale,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    BC: tl.constexpr,
):
    """Store what :func:`mxfp8_tile` gives for the tile [32, BC] at (row, col)."""
    if ROWWISE:
        store_words(rowwise_data, row, col // 4, cols // 4, row_words, 32, BC // 4)
        width = (cols // 32 + 3) // 4 * 4
        grid = rowwise_scale + tile_start(row, col // 32, width)
        tl.store(grid + tile_offsets(width, 32, BC // 32), row_scale)
    if COLUMNWISE:
        store_words(columnwise_data, row, col // 4, cols // 4, column_words, 32, BC // 4)
        width = (cols + 127) // 128 * 128
        grid = columnwise_scale + tile_start(row // 32, col, width)
        tl.store(grid + tile_offsets(width, 1, BC), column_scale)


@triton.jit
def store_gemm_scales(
    row_scale,
    column_scale,
    row,
    col,
    rows,
    cols,
    rowwise_gemm_scale,
    columnwise_gemm_scale,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    BC: tl.constexpr,
):
    """Store the scales of the tile [32, BC] at (row, col) in the order of the GEMM."""
    if ROWWISE:
        store_swizzled(rowwise_gemm_scale, row, col // 32, cols // 32, row_scale, 32, BC // 32)
    if COLUMNWISE:
        scale = tl.trans(column_scale)
        store_swizzled(columnwise_gemm_scale, col, row // 32, rows // 32, scale, BC, 1)


@triton.jit
def _quantize_kernel(
    x_ptr,
    rowwise_data,
    rowwise_scale,
    columnwise_data,
    columnwise_scale,
    cols,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    BC: tl.constexpr,
):
    """Quantize a matrix.

    Grid: (n_tiles,). Tile: [32, BC], dividing the matrix. Reads x (2 or 4 bytes per element),
    writes one byte per element and direction, and the scales.
    """
    tile, tiles_per_row = tl.program_id(0), cols // BC
    row, col = tile // tiles_per_row * 32, tile % tiles_per_row * BC
    x = to_float32(tl.load(x_ptr + tile_start(row, col, cols) + tile_offsets(cols, 32, BC)))
    # The storage may have any alignment, so words are taken apart into bytes: no hardware codes.
    row_words, row_scale, column_words, column_scale = mxfp8_tile(x, ROWWISE, COLUMNWISE, BC, False)
    store_tile(
        row_words,
        row_scale,
        column_words,
        column_scale,
        row,
        col,
        cols,
        rowwise_data,
        rowwise_scale,
        columnwise_data,
        columnwise_scale,
        ROWWISE,
        COLUMNWISE,
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


@triton.jit
def _dequantize_words_kernel(
    data_ptr,
    scale_ptr,
    out_ptr,
    n_words,
    words_per_row,
    stride_scale_row,
    ROWWISE: tl.constexpr,
    N: tl.constexpr,
):
    """Decode N groups of eight codes of a matrix; as the kernel above.

    Grid: (ceil(n_words / N),). A thread reads 8 bytes and writes their values, 16 bytes of BF16.
    """
    word, inside, row, i = word_positions(n_words, words_per_row, N)
    offs = word_offsets(word)
    code = tl.load(data_ptr + offs, inside[:, None], 0)
    if ROWWISE:
        scales = scale_ptr + row.to(tl.int64) * stride_scale_row + i // 4
        scale = e8m0_value(tl.load(scales, inside, 0))[:, None]
    else:
        scales = (row // 32).to(tl.int64)[:, None] * stride_scale_row
        column = tl.multiple_of(8 * i, 8)[:, None] + tl.arange(0, 8)[None, :]
        scale = e8m0_value(tl.load(scale_ptr + scales + column, inside[:, None], 0))
    value = round_to(e4m3_value(code) * scale, out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs, value, inside[:, None])


_dequantize_words = word_launcher(_dequantize_words_kernel)


@triton.jit
def _side_by_side(tiles):
    """Tiles [n, R, C] as one [R, n * C]."""
    n: tl.constexpr = tiles.shape[0]
    R: tl.constexpr = tiles.shape[1]
    C: tl.constexpr = tiles.shape[2]
    return tl.reshape(tl.permute(tiles, (1, 0, 2)), (R, n * C))


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
    VALUE_CODEC: tl.constexpr,
    EXP_AVG_CODEC: tl.constexpr,
    EXP_AVG_SQ_CODEC: tl.constexpr,
    ADAM_W: tl.constexpr,
    AMSGRAD: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BC: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adam and re-quantization of one tile of one tensor, each byte moved once.

    Grid: (n_tiles,). Tile: [32, BC] in parts of [32, PART], codes and scales of which are kept and
    stored together. table: int64 [n_tensors, 18]. scalars: float32 [n, 12]. tiles: int32
    [n_tiles, 4].
    Reads gradient (2 bytes if BF16) and three FP32 tensors, writes these, codes and scales:
    28 + 1/16 bytes per element with both directions; 1/16 more if SWIZZLED.
    """
    tensor, row, first_col = load_tile(tiles, 32)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    cols = size(table, tensor, COLS, 32)
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    pointers = state_pointers(
        table, tensor, GRAD_DTYPE, None, VALUE_CODEC, EXP_AVG_CODEC, EXP_AVG_SQ_CODEC
    )
    rowwise_data = pointer(table, tensor, ROWWISE_DATA, tl.uint32)
    rowwise_scale = pointer(table, tensor, ROWWISE_SCALE, tl.uint8)
    columnwise_data = pointer(table, tensor, COLUMNWISE_DATA, tl.uint32)
    columnwise_scale = pointer(table, tensor, COLUMNWISE_SCALE, tl.uint8)
    PARTS: tl.constexpr = BC // PART
    row_words = tl.zeros((PARTS, 32, PART // 4), tl.uint32)
    row_scale = tl.zeros((PARTS, 32, PART // 32), tl.uint8)
    column_words = tl.zeros((PARTS, 32, PART // 4), tl.uint32)
    column_scale = tl.zeros((PARTS, 1, PART), tl.uint8)
    for i in tl.range(0, PARTS, num_stages=STAGES):
        value = adam_step_tile(
            pointers,
            tile_start(row, first_col + i * PART, cols),
            cols,
            None,
            constants,
            VALUE_CODEC,
            EXP_AVG_CODEC,
            EXP_AVG_SQ_CODEC,
            ADAM_W,
            AMSGRAD,
            True,
            32,
            PART,
        )
        x = round_through(value, WRITE_DTYPE)
        words, scale, words_of_columns, scale_of_columns = mxfp8_tile(
            x, ROWWISE, COLUMNWISE, PART, True
        )
        row_words = insert_tile(row_words, words, i)
        row_scale = insert_tile(row_scale, scale, i)
        column_words = insert_tile(column_words, words_of_columns, i)
        column_scale = insert_tile(column_scale, scale_of_columns, i)
    row_scale, column_scale = _side_by_side(row_scale), _side_by_side(column_scale)
    store_tile(
        _side_by_side(row_words),
        row_scale,
        _side_by_side(column_words),
        column_scale,
        row,
        first_col,
        cols,
        rowwise_data,
        rowwise_scale,
        columnwise_data,
        columnwise_scale,
        ROWWISE,
        COLUMNWISE,
        BC,
    )
    if SWIZZLED:
        store_gemm_scales(
            row_scale,
            column_scale,
            row,
            first_col,
            size(table, tensor, ROWS, 32),
            cols,
            pointer(table, tensor, ROWWISE_GEMM_SCALE, tl.uint8),
            pointer(table, tensor, COLUMNWISE_GEMM_SCALE, tl.uint8),
            ROWWISE,
            COLUMNWISE,
            BC,
        )


@on_its_device
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
        cols,
        ROWWISE=rowwise_data is not None,
        COLUMNWISE=columnwise_data is not None,
        BC=BLOCK,
        enable_fp_fusion=False,
    )


@on_its_device
def dequantize(data: Tensor, scale: Tensor, rowwise: bool, dtype: torch.dtype) -> Tensor:
    """Decode E4M3 codes [rows, cols] with scales per 1x32 (``rowwise``) or 32x1 block."""
    rows, cols = data.shape
    out = torch.empty_like(data, dtype=dtype)
    if not out.numel():
        return out
    if data.data_ptr() % 16 == 0:
        _dequantize_words(data, scale, out=out, strides=(scale.stride(0),), ROWWISE=rowwise)
    else:
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
    value_codec: str,
    exp_avg_codec: str,
    exp_avg_sq_codec: str,
    adam_w_mode: bool,
    amsgrad: bool,
    rowwise: bool,
    columnwise: bool,
    optimize_for_gemm: bool,
) -> list[Launch]:
    """The pass over all tensors of a table, to be called with ``grad_scale, clip, found_inf``.

    ``tiles``: the lists for STEP_TILE and for EDGE_TILE.
    """
    scaled_states = has_scales(value_codec, exp_avg_codec, exp_avg_sq_codec)
    forms = (
        (STEP_TILE, STEP_PART[scaled_states], None),
        (EDGE_TILE, EDGE_PART, EDGE_REGISTERS),
    )
    return [
        Launch(
            _adam_step_kernel,
            listed.shape[0],
            (table, scalars, listed),
            dict(
                GRAD_DTYPE=TRITON_DTYPES[grad_dtype],
                WRITE_DTYPE=TRITON_DTYPES[write_dtype],
                VALUE_CODEC=value_codec,
                EXP_AVG_CODEC=exp_avg_codec,
                EXP_AVG_SQ_CODEC=exp_avg_sq_codec,
                ADAM_W=adam_w_mode,
                AMSGRAD=amsgrad,
                ROWWISE=rowwise,
                COLUMNWISE=columnwise,
                SWIZZLED=optimize_for_gemm,
                BC=tile.cols,
                PART=part,
                STAGES=tile.num_stages,
            ),
            num_warps=tile.num_warps,
            maxnreg=registers,
        )
        for listed, (tile, part, registers) in zip(tiles, forms, strict=True)
    ]
