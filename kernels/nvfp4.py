"""NVFP4: quantize, dequantize, and the fused Adam step that writes the quantized weight."""

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
    AMAX,
    COLS,
    COLUMNWISE_DATA,
    COLUMNWISE_GEMM_SCALE,
    COLUMNWISE_SCALE,
    ROWS,
    ROWWISE_DATA,
    ROWWISE_GEMM_SCALE,
    ROWWISE_SCALE,
    TRITON_DTYPES,
    WIDTH,
    Tile,
    cover,
    divisor_tile,
    load_tile,
    pointer,
    size,
    takes_part,
    tile_offsets,
    tile_start,
)
from fp4adam.kernels.swizzle import store_swizzled
from fp4adam.kernels.tiles.bfloat16 import to_float32
from fp4adam.kernels.tiles.e2m1 import e2m1_code, e2m1_value
from fp4adam.kernels.tiles.e4m3 import e4m3_code, e4m3_value
from fp4adam.kernels.tiles.state import has_scales, most_registers
from fp4adam.kernels.tiles.words import (
    insert_tile,
    pack_words,
    store_words,
    transpose_words,
    word_launcher,
    word_offsets,
    word_positions,
)

BLOCK = 16
FP32_MAX = tl.constexpr(3.4028234663852886e38)

# Tiles of the fused step. The loop keeps loads of the next tile
# in flight; the edges of a matrix are covered by single blocks.
STEP_TILE = {True: Tile(16, 64, 4, 4, 4), False: Tile(16, 64, 4, 4, 3)}  # by two_dimensional
EDGE_TILE = {False: Tile(16, 16, 1, 4, 1), True: Tile(16, 32, 1, 4, 1)}  # by scaled_states


@triton.jit
def nvfp4_scale(block_amax, amax):
    """E4M3 block scales (uint8) and the factors that take values to codes (float32).

    block_amax: float32 tile. amax: float32 scalar, of the whole tensor.
    """
    encode = tl.div_rn(2688.0, amax)
    encode = tl.where((amax == 0) | (encode == 0), 1.0, tl.minimum(encode, FP32_MAX))
    decode = tl.div_rn(1.0, encode)
    scale = e4m3_code(block_amax * (encode * 0.16666666666666666), HARDWARE=False)
    factor = tl.minimum(tl.div_rn(1.0, e4m3_value(scale) * decode), FP32_MAX)
    return scale, factor


@triton.jit
def _amax(x, AXIS: tl.constexpr):
    """Largest magnitude along an axis, ignoring NaN, 0 where all is NaN."""
    amax = tl.max(tl.abs(x), AXIS)
    return tl.where(amax == amax, amax, 0.0)


@triton.jit
def nvfp4_tile(
    x,
    amax,
    row,
    col,
    cols,
    rowwise_data,
    rowwise_scale,
    rowwise_gemm_scale,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    SQUARE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Quantize the float32 tile [BR, BC] at (row, col) and store the rowwise part.

    SQUARE: one scale per 16x16 block, in the grid at rowwise_scale, for both directions; else one
    per 16 elements of each direction, in padded rows. SWIZZLED: also in the order of the GEMM, but
    for those of square blocks, which :func:`store_square_scales` takes.
    Returns amaxes of its blocks, words of codes [BR, BC / 8], and scales [BR / 16, BC / 16] if
    SQUARE, else columnwise ones [BR / 16, BC]; codes and columnwise scales, of no use without
    COLUMNWISE, are what :func:`store_columnwise` takes.
    """
    if SQUARE:
        blocks = tl.reshape(x, (BR // 16, 16, BC // 16, 16))
        block_amax = _amax(_amax(blocks, 3), 1)
        scale, factor = nvfp4_scale(block_amax, amax)
        code = e2m1_code(blocks * factor[:, None, :, None])
        words = pack_words(tl.reshape(code, (BR, BC)), 4, BR, BC)
        grid = rowwise_scale + tile_start(row // 16, col // 16, cols // 16)
        tl.store(grid + tile_offsets(cols // 16, BR // 16, BC // 16), scale)
        if ROWWISE:
            store_words(rowwise_data, row, col // 8, cols // 8, words, BR, BC // 8)
    else:
        if ROWWISE:
            blocks = tl.reshape(x, (BR, BC // 16, 16))
            block_amax = _amax(blocks, 2)
            scale, factor = nvfp4_scale(block_amax, amax)
            code = e2m1_code(blocks * factor[:, :, None])
            words = pack_words(tl.reshape(code, (BR, BC)), 4, BR, BC)
            store_words(rowwise_data, row, col // 8, cols // 8, words, BR, BC // 8)
            width = (cols // 16 + 3) // 4 * 4
            grid = rowwise_scale + tile_start(row, col // 16, width)
            tl.store(grid + tile_offsets(width, BR, BC // 16), scale)
            if SWIZZLED:
                store_swizzled(rowwise_gemm_scale, row, col // 16, cols // 16, scale, BR, BC // 16)
        if COLUMNWISE:
            blocks = tl.reshape(x, (BR // 16, 16, BC))
            column_amax = _amax(blocks, 1)
            scale, factor = nvfp4_scale(column_amax, amax)
            if not ROWWISE:
                block_amax = column_amax
            code = e2m1_code(blocks * factor[:, None, :])
            words = pack_words(tl.reshape(code, (BR, BC)), 4, BR, BC)
    return block_amax, words, scale


@triton.jit
def store_columnwise(
    words,
    scale,
    row,
    col,
    rows,
    columnwise_data,
    columnwise_scale,
    columnwise_gemm_scale,
    SQUARE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Store columnwise codes of R rows and C columns at (row, col), and scales if not SQUARE."""
    words = transpose_words(words, 4, R, C)
    store_words(columnwise_data, col, row // 8, rows // 8, words, C, R // 8)
    if not SQUARE:
        width = (rows // 16 + 3) // 4 * 4
        grid = columnwise_scale + tile_start(col, row // 16, width)
        tl.store(grid + tile_offsets(width, C, R // 16), tl.trans(scale))
        if SWIZZLED:
            store_swizzled(
                columnwise_gemm_scale, col, row // 16, rows // 16, tl.trans(scale), C, R // 16
            )


@triton.jit
def _store_repeated(out, row, col, cols, scale, R: tl.constexpr, C: tl.constexpr):
    """Store the scales [R / 16, C / 16] of 16x16 blocks at (row, col), each for 16 rows."""
    scale = tl.broadcast_to(scale[:, None, :], (R // 16, 16, C // 16))
    store_swizzled(out, row, col // 16, cols // 16, tl.reshape(scale, (R, C // 16)), R, C // 16)


@triton.jit
def store_square_scales(
    scale,
    row,
    col,
    rows,
    cols,
    rowwise_gemm_scale,
    columnwise_gemm_scale,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Store the scales [R / 16, C / 16] of 16x16 blocks at (row, col) in the order of the GEMM."""
    if ROWWISE:
        _store_repeated(rowwise_gemm_scale, row, col, cols, scale, R, C)
    if COLUMNWISE:
        _store_repeated(columnwise_gemm_scale, col, row, rows, tl.trans(scale), C, R)


@triton.jit
def _atomic_amax(amax_ptr, x):
    """Raise the non-negative float32 at amax_ptr to the largest magnitude of x; NaN is ignored."""
    # The bits of non-negative floats order as integers do, and integers take one atomic, not two.
    bits = _amax(x, 0).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), bits, sem="relaxed")


@triton.jit
def _amax_kernel(x_ptr, amax_ptr, cols, tiles_per_row, BR: tl.constexpr, BC: tl.constexpr):
    """Largest magnitude of a matrix. Grid: (n_tiles,). Reads 2 or 4 bytes per element."""
    tile = tl.program_id(0)
    row, col = tile // tiles_per_row * BR, tile % tiles_per_row * BC
    x = to_float32(tl.load(x_ptr + tile_start(row, col, cols) + tile_offsets(cols, BR, BC)))
    _atomic_amax(amax_ptr, tl.reshape(x, (BR * BC,)))


@triton.jit
def _quantize_kernel(
    x_ptr,
    rowwise_data,
    rowwise_scale,
    columnwise_data,
    columnwise_scale,
    amax_ptr,
    rows,
    cols,
    tiles_per_row,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    SQUARE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Quantize a matrix with a known amax.

    Grid: (n_tiles,). Tile: [BR, BC], dividing the matrix. Reads x (2 or 4 bytes per element),
    writes half a byte per element and direction, and the scales.
    """
    tile = tl.program_id(0)
    row, col = tile // tiles_per_row * BR, tile % tiles_per_row * BC
    x = to_float32(tl.load(x_ptr + tile_start(row, col, cols) + tile_offsets(cols, BR, BC)))
    _, words, scale = nvfp4_tile(
        x,
        tl.load(amax_ptr),
        row,
        col,
        cols,
        rowwise_data,
        rowwise_scale,
        None,
        ROWWISE,
        COLUMNWISE,
        SQUARE,
        False,
        BR,
        BC,
    )
    if COLUMNWISE:
        store_columnwise(
            words,
            scale,
            row,
            col,
            rows,
            columnwise_data,
            columnwise_scale,
            None,
            SQUARE,
            False,
            BR,
            BC,
        )


@triton.jit
def _dequantize_kernel(
    data_ptr,
    scale_ptr,
    amax_ptr,
    out_ptr,
    cols,
    tiles_per_row,
    stride_scale_row,
    stride_scale_col,
    stride_out_row,
    stride_out_col,
    SQUARE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Decode packed codes [rows, cols / 2].

    Grid: (n_tiles,). Tile: [BR, BC], dividing the matrix. Reads half a byte per element and the
    scales, writes 2 or 4 bytes per element.
    """
    tile = tl.program_id(0)
    row, col = tile // tiles_per_row * BR, tile % tiles_per_row * BC
    r, c = row + tl.arange(0, BR), col + tl.arange(0, BC)
    start = tile_start(row, col // 2, cols // 2)
    packed = tl.load(data_ptr + start + tile_offsets(cols // 2, BR, BC // 2))
    code = tl.interleave(packed & 0xF, packed >> 4)
    block = (col // 16 + tl.arange(0, BC // 16)).to(tl.int64)
    scale_row = (r // 16 if SQUARE else r).to(tl.int64)
    scale_ptrs = scale_row[:, None] * stride_scale_row + block[None, :] * stride_scale_col
    scale = tl.load(scale_ptr + scale_ptrs)
    factor = (e4m3_value(scale) * tl.load(amax_ptr)) * 0.00037202380952380951
    value = tl.reshape(e2m1_value(code), (BR, BC // 16, 16)) * factor[:, :, None]
    out = r.to(tl.int64)[:, None] * stride_out_row + c.to(tl.int64)[None, :] * stride_out_col
    value = tl.reshape(value, (BR, BC))
    tl.store(out_ptr + out, round_to(value, out_ptr.dtype.element_ty))


@triton.jit
def _dequantize_words_kernel(
    data_ptr,
    scale_ptr,
    amax_ptr,
    out_ptr,
    n_words,
    words_per_row,
    stride_scale_row,
    SQUARE: tl.constexpr,
    N: tl.constexpr,
):
    """Decode N words of packed codes of a matrix, eight codes each; as the kernel above.

    Grid: (ceil(n_words / N),). A thread reads a word and writes its values, 16 bytes of BF16.
    """
    word, inside, row, i = word_positions(n_words, words_per_row, N)
    packed = tl.load(data_ptr.to(tl.pointer_type(tl.uint32)) + word, inside, 0)
    scale_row = (row // 16 if SQUARE else row).to(tl.int64)
    scale = tl.load(scale_ptr + scale_row * stride_scale_row + i // 2, inside, 0)
    factor = (e4m3_value(scale) * tl.load(amax_ptr)) * 0.00037202380952380951
    code = (packed[:, None] >> (4 * tl.arange(0, 8))[None, :]) & 0xF
    value = round_to(e2m1_value(code) * factor[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + word_offsets(word), value, inside[:, None])


_dequantize_words = word_launcher(_dequantize_words_kernel)


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _adam_step_kernel(
    grad_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    table,
    scalars,
    tiles,
    slots,
    amaxes,
    next_amaxes,
    tile_amaxes,
    exceeding,
    GRAD_DTYPE: tl.constexpr,
    WRITE_DTYPE: tl.constexpr,
    VALUE_CODEC: tl.constexpr,
    EXP_AVG_CODEC: tl.constexpr,
    EXP_AVG_SQ_CODEC: tl.constexpr,
    ADAM_W: tl.constexpr,
    AMSGRAD: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    SQUARE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    LOOP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adam and re-quantization of one column of tiles of one tensor, each byte moved once.

    Grid: (n_tiles,). Tile: LOOP times [BR, BC] down the rows. table: int64 [n_tensors, 18].
    scalars: float32 [n, 12]. tiles: int32 [n_tiles, 4]. slots: int32 [n_tensors], where the amax of
    each tensor is; several may share one. amaxes: float32 [n_slots], of the updated weights;
    next_amaxes: the same of the next step, set to zero. tile_amaxes: float32 [n_tiles], written: no
    weight of the tile is larger. exceeding: float32 [n_slots], raised to the amax of a tensor that
    is larger than amaxes says.
    Reads gradient (2 bytes if BF16) and three FP32 tensors, writes these and the codes: 27 bytes
    per element with both directions, and 1/256 for the scales of 16x16 blocks, 1/8 more if
    SWIZZLED.
    """
    tensor, first_row, col = load_tile(tiles, 16)
    first_of_tensor = (first_row == 0) & (col == 0)
    if first_of_tensor:
        tl.store(next_amaxes + tl.load(slots + tensor), 0.0)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    rows = size(table, tensor, ROWS, 16)
    cols = size(table, tensor, COLS, 16)
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    pointers = state_pointers(
        table, tensor, GRAD_DTYPE, None, VALUE_CODEC, EXP_AVG_CODEC, EXP_AVG_SQ_CODEC
    )
    amax = tl.load(amaxes + tl.load(slots + tensor))
    if first_of_tensor:
        amax_ptr = tl.load(table + tensor.to(tl.int64) * WIDTH + AMAX)
        tl.store(amax_ptr.to(tl.pointer_type(tl.float32)), amax)
    SCALE_ROWS: tl.constexpr = BR if ROWWISE and not SQUARE else BR // 16
    SCALE_COLS: tl.constexpr = BC if not (ROWWISE or SQUARE) else BC // 16
    largest = tl.zeros((SCALE_ROWS, SCALE_COLS), tl.float32)
    column_words = tl.zeros((LOOP, BR, BC // 8), tl.uint32)
    # Scales that are stored last, one tile's in each byte.
    KEEPS_SCALE: tl.constexpr = SWIZZLED if SQUARE else COLUMNWISE
    kept_scale = tl.zeros((BR // 16, BC // 16 if SQUARE else BC), tl.uint32)
    rowwise_data = pointer(table, tensor, ROWWISE_DATA, tl.uint32)
    rowwise_scale = pointer(table, tensor, ROWWISE_SCALE, tl.uint8)
    columnwise_data = pointer(table, tensor, COLUMNWISE_DATA, tl.uint32)
    columnwise_scale = pointer(table, tensor, COLUMNWISE_SCALE, tl.uint8)
    rowwise_gemm_scale = pointer(table, tensor, ROWWISE_GEMM_SCALE, tl.uint8)
    columnwise_gemm_scale = pointer(table, tensor, COLUMNWISE_GEMM_SCALE, tl.uint8)
    for i in tl.range(0, LOOP, num_stages=STAGES):
        row = first_row + i * BR
        value = adam_step_tile(
            pointers,
            tile_start(row, col, cols),
            cols,
            None,
            constants,
            VALUE_CODEC,
            EXP_AVG_CODEC,
            EXP_AVG_SQ_CODEC,
            ADAM_W,
            AMSGRAD,
            True,
            BR,
            BC,
        )
        block_amax, words, scale = nvfp4_tile(
            round_through(value, WRITE_DTYPE),
            amax,
            row,
            col,
            cols,
            rowwise_data,
            rowwise_scale,
            rowwise_gemm_scale,
            ROWWISE,
            COLUMNWISE,
            SQUARE,
            SWIZZLED,
            BR,
            BC,
        )
        largest = tl.maximum(largest, block_amax)
        if COLUMNWISE:
            column_words = insert_tile(column_words, words, i)
        if KEEPS_SCALE:
            kept_scale |= scale.to(tl.uint32) << (8 * i)
    tl.static_assert(LOOP <= 4)
    kept_scale = kept_scale[None, :, :] >> (8 * tl.arange(0, LOOP))[:, None, None]
    kept_scale = (kept_scale & 0xFF).to(tl.uint8)
    kept_scale = tl.reshape(kept_scale, (LOOP * BR // 16, kept_scale.shape[2]))
    if COLUMNWISE:
        store_columnwise(
            tl.reshape(column_words, (LOOP * BR, BC // 8)),
            kept_scale,
            first_row,
            col,
            rows,
            columnwise_data,
            columnwise_scale,
            columnwise_gemm_scale,
            SQUARE,
            SWIZZLED,
            LOOP * BR,
            BC,
        )
    if SQUARE and SWIZZLED:
        store_square_scales(
            kept_scale,
            first_row,
            col,
            rows,
            cols,
            rowwise_gemm_scale,
            columnwise_gemm_scale,
            ROWWISE,
            COLUMNWISE,
            LOOP * BR,
            BC,
        )
    tile_amax = tl.max(tl.max(largest, 1), 0)
    if tile_amax > amax:
        bits = tile_amax.to(tl.int32, bitcast=True)
        exceeding_ptr = exceeding + tl.load(slots + tensor)
        tl.atomic_max(exceeding_ptr.to(tl.pointer_type(tl.int32)), bits, sem="relaxed")
    if WRITE_DTYPE != tl.float32:
        # The master may be larger than what it is rounded to, by half a step of a 16-bit format.
        tile_amax = tile_amax * 1.0078125 + 6e-8
    tl.store(tile_amaxes + tl.program_id(0), tile_amax)


@on_its_device
def measure(x: Tensor, amax: Tensor) -> None:
    """Overwrite ``amax`` [1] with the largest magnitude of ``x`` (as for :func:`quantize`)."""
    rows, cols = x.shape
    tile_rows, tile_cols = divisor_tile(rows, 64, BLOCK), divisor_tile(cols, 64, BLOCK)
    grid = (rows // tile_rows * (cols // tile_cols),)
    amax.zero_()
    _amax_kernel[grid](x, amax, cols, cols // tile_cols, BR=tile_rows, BC=tile_cols)


@on_its_device
def quantize(
    x: Tensor,
    *,
    rowwise_data: Tensor | None,
    columnwise_data: Tensor | None,
    rowwise_scale: Tensor | None,
    columnwise_scale: Tensor | None,
    amax: Tensor,
    two_dimensional: bool,
) -> None:
    """Quantize the matrix ``x`` [rows, cols] (contiguous, multiples of 16) into storage.

    ``rowwise_scale`` is the grid of 16x16 blocks if ``two_dimensional``. ``amax``: [1], known.
    """
    rows, cols = x.shape
    tile_rows, tile_cols = divisor_tile(rows, 64, BLOCK), divisor_tile(cols, 64, BLOCK)
    grid = (rows // tile_rows * (cols // tile_cols),)
    _quantize_kernel[grid](
        x,
        rowwise_data,
        rowwise_scale,
        columnwise_data,
        columnwise_scale,
        amax,
        rows,
        cols,
        cols // tile_cols,
        ROWWISE=rowwise_data is not None,
        COLUMNWISE=columnwise_data is not None,
        SQUARE=two_dimensional,
        BR=tile_rows,
        BC=tile_cols,
        enable_fp_fusion=False,
    )


@on_its_device
def dequantize(
    data: Tensor,
    scale: Tensor,
    amax: Tensor,
    two_dimensional: bool,
    transposed: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Decode packed codes [rows, cols / 2]; the result is transposed if they are."""
    rows, cols = data.shape[0], data.shape[1] * 2
    out = torch.empty((cols, rows) if transposed else (rows, cols), dtype=dtype, device=data.device)
    tile_rows, tile_cols = divisor_tile(rows, 64, BLOCK), divisor_tile(cols, 64, BLOCK)
    grid = (rows // tile_rows * (cols // tile_cols),)
    if not out.numel():
        return out
    if not transposed and data.data_ptr() % 16 == 0:
        _dequantize_words(
            data, scale, amax, out=out, strides=(scale.stride(0),), SQUARE=two_dimensional
        )
        return out
    scale = scale.t() if two_dimensional and transposed else scale
    _dequantize_kernel[grid](
        data,
        scale,
        amax,
        out,
        cols,
        cols // tile_cols,
        *scale.stride(),
        *(out.stride() if not transposed else out.t().stride()),
        SQUARE=two_dimensional,
        BR=tile_rows,
        BC=tile_cols,
        enable_fp_fusion=False,
    )
    return out


def step_tiles(
    shapes: list[tuple[int, int]], two_dimensional: bool, scaled_states: bool
) -> tuple[Tensor, int]:
    """Tiles for :func:`adam_step`, those of STEP_TILE first, and the number of these.

    ``scaled_states``: Whether states have scales; columns must be multiples of 32 then.
    """
    forms = STEP_TILE[two_dimensional], EDGE_TILE[scaled_states]
    whole, edge = cover(shapes, *forms)
    for tiles, tile in zip((whole, edge), forms, strict=True):
        tiles[:, 3] = (tile.rows * tile.loop) << 16 | tile.cols
    return torch.cat((whole, edge)), len(whole)


def step_registers(
    codecs: tuple[str, str, str], two_dimensional: bool, optimize_for_gemm: bool
) -> tuple[int | None, int | None]:
    """The most registers per thread of STEP_TILE and of edges; None leaves it to ptxas.

    128 let a fourth program run on each multiprocessor of an H200. So ptxas takes no more where it
    can, and for sm_120 spills a few to get there, unless it is told.
    """
    limit = 128 if two_dimensional and optimize_for_gemm else None
    of_codecs = most_registers(*codecs)
    return (limit, limit) if of_codecs is None else (None, of_codecs)


def adam_step(
    table: Tensor,
    scalars: Tensor,
    tiles: Tensor,
    n_whole: int,
    slots: Tensor,
    amaxes: Tensor,
    next_amaxes: Tensor,
    tile_amaxes: Tensor,
    exceeding: Tensor,
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
    two_dimensional: bool,
    optimize_for_gemm: bool,
) -> list[Launch]:
    """The pass over all tensors of a table, to be called with ``grad_scale, clip, found_inf``.

    ``tiles``, ``n_whole``: from :func:`step_tiles`. ``slots``: where the amax of each tensor is.
    ``amaxes``: of the updated weights, from ``amax_preview``. ``next_amaxes``: zeroed.
    ``tile_amaxes``: float32 [n_tiles], written. ``exceeding``: zero, raised for tensors that have
    to be written again.
    """
    parts = (slice(0, n_whole), slice(n_whole, tiles.shape[0]))
    codecs = value_codec, exp_avg_codec, exp_avg_sq_codec
    edge_tile = EDGE_TILE[has_scales(*codecs)]
    registers = step_registers(codecs, two_dimensional, optimize_for_gemm)
    return [
        Launch(
            _adam_step_kernel,
            part.stop - part.start,
            (
                table,
                scalars,
                tiles[part],
                slots,
                amaxes,
                next_amaxes,
                tile_amaxes[part],
                exceeding,
            ),  # fmt: skip
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
                SQUARE=two_dimensional,
                SWIZZLED=optimize_for_gemm,
                BR=tile.rows,
                BC=tile.cols,
                LOOP=tile.loop,
                STAGES=tile.num_stages,
            ),
            num_warps=tile.num_warps,
            maxnreg=most,
        )
        for part, tile, most in zip(
            parts, (STEP_TILE[two_dimensional], edge_tile), registers, strict=True
        )
    ]
