"""Casts: matrices, and spans of any number of matrices, to codes and scales.

A span is a run of elements of a row-major matrix and may begin and end inside a block, a row or a
byte. Tiles inside the span need no masks. Tiles that it cuts are masked, element by element, and
preserve what is not part of it. Each block, and each byte, belongs to a single tile.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.format import (
    Format,
    amax_of_blocks,
    decode_factor,
    encode,
    form_of,
    format_of,
    in_blocks,
    per_element,
    scale_of_amax,
)
from fp4adam.kernels.launch.launch import Launch, on_its_device
from fp4adam.kernels.launch.schema import CAST
from fp4adam.kernels.launch.tensor_table import (
    AMAX,
    COLS,
    COLUMNWISE_DATA,
    COLUMNWISE_SCALE,
    ROWS,
    ROWWISE_DATA,
    ROWWISE_SCALE,
    TRITON_DTYPES,
    VALUE,
    WIDTH,
    Storage,
    Tile,
    divisor_tile,
    load_tile,
    pointer,
    size,
    storage_pointers,
    tile_offsets,
    tile_start,
)
from fp4adam.kernels.store import edge_mask, store_codes, store_tile
from fp4adam.kernels.tiles.bfloat16 import round_through, round_to, to_float32

# Addresses of values and codes are extrapolated to the first element of the matrix.
START = tl.constexpr(CAST.index("start"))
STOP = tl.constexpr(CAST.index("stop"))
TENSOR_AMAX = tl.constexpr(CAST.index("tensor_amax"))
ROWWISE_AMAX = tl.constexpr(CAST.index("rowwise_amax"))
COLUMNWISE_AMAX = tl.constexpr(CAST.index("columnwise_amax"))

AMAX_TILE = 4096
MASKED_REGISTERS = 255
# Block scales that one program writes.
SCALES = 1024


@triton.jit
def _raise(amax_ptr, amax):
    """Raise the non-negative float32 at ``amax_ptr`` to ``amax``."""
    # The bits of non-negative floats order as integers do; an integer maximum is one atomic, a
    # float maximum two.
    bits = tl.where(amax == amax, amax, 0.0).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), bits, sem="relaxed")


@triton.jit
def _amax_kernel(x_ptr, amax_ptr, numel, N: tl.constexpr):
    """Largest magnitude of x. Grid: (ceil(numel / N),). Reads 2 or 4 bytes per element."""
    offs = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    _raise(amax_ptr, tl.max(tl.abs(to_float32(tl.load(x_ptr + offs, offs < numel, 0.0))), 0))


@on_its_device
def measure(x: Tensor, amax: Tensor) -> None:
    """Overwrite ``amax``, float32 [1], with the largest magnitude of ``x``, contiguous."""
    amax.zero_()
    _amax_kernel[(triton.cdiv(x.numel(), AMAX_TILE),)](x, amax, x.numel(), N=AMAX_TILE)


@triton.jit
def _quantize_kernel(
    x_ptr, rowwise_data, rowwise_scale, columnwise_data, columnwise_scale, amax_ptr, out_ptr, rows,
    cols, tiles_per_row, epsilon, F: tl.constexpr, MASKED: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Quantize a matrix, into codes and scales, or to what these decode to.

    Grid: (n_tiles,). Tile: [BR, BC], whole blocks. MASKED: it may reach past an edge. amax_ptr:
    float32 [1], of formats that scale tensors. out_ptr: memory for values in place of codes, or
    None. Reads x (2 or 4 bytes per element), writes half a byte or one per element and direction,
    and the scales.
    """
    tile = tl.program_id(0)
    row, col = tile // tiles_per_row * BR, tile % tiles_per_row * BC
    mask = edge_mask(row, col, rows, cols, MASKED, BR, BC)
    offs = tile_start(row, col, cols) + tile_offsets(cols, BR, BC)
    x = tl.load(x_ptr + offs) if mask is None else tl.load(x_ptr + offs, mask, 0.0)
    amax = tl.load(amax_ptr) if F.tensor_amax != "" else 0.0
    # The storage may be unaligned, so it is written in bytes.
    FAKES: tl.constexpr = out_ptr is not None
    part, value = encode(to_float32(x), None, None, amax, epsilon, F, FAKES, False)
    if FAKES:
        FORM: tl.constexpr = form_of(F.scale, F.square)
        factor, _ = decode_factor(part.row_scale, amax, epsilon, F)
        value = in_blocks(value, F.block, FORM) * per_element(factor, FORM)
        value = round_to(tl.reshape(value, (BR, BC)), out_ptr.dtype.element_ty)
        tl.store(out_ptr + offs, value, mask)
    else:
        storage = Storage(rowwise_data, rowwise_scale, columnwise_data, columnwise_scale)
        store_tile(part, row, col, rows, cols, mask, storage, None, F, BR, BC)


def _launch_quantize(
    x: Tensor,
    storage: Sequence[Tensor | None],
    amax: Tensor | None,
    out: Tensor | None,
    F: Format,
    epsilon: float,
    tile: tuple[int, int],
    masked: bool,
) -> None:
    (rows, cols), (br, bc) = x.shape, tile
    across = triton.cdiv(cols, bc)
    _quantize_kernel[(triton.cdiv(rows, br) * across,)](
        x, *storage, amax, out, rows, cols, across, epsilon, F=F, MASKED=masked, BR=br, BC=bc,
        num_warps=max(1, min(8, br * bc // 1024)), enable_fp_fusion=False,
    )  # fmt: skip


@on_its_device
def quantize(x: Tensor, out: Any, layout: Any) -> None:
    """Quantize the contiguous matrix ``x`` into a ``Storage`` whose amax is known."""
    F = _format(layout, x.dtype)
    masked = F.block == 128  # may be cut at edges
    # Else the largest tile that divides the matrix.
    least, most = max(F.block, 16), 32 if F.block == 32 else 64
    tile = divisor_tile(x.shape[0], most, least), divisor_tile(x.shape[1], 64, least)
    square = out.block_scale_inv
    scale = out.rowwise_scale_inv if square is None else square
    storage = out.rowwise_data, scale, out.columnwise_data, out.columnwise_scale_inv
    epsilon = layout.scale_rule.amax_epsilon
    _launch_quantize(x, storage, out.amax, None, F, epsilon, (128, 128) if masked else tile, masked)


@on_its_device
def fake_quantize(x: Tensor, layout: Any) -> Tensor:
    """What ``x`` decodes to when it is quantized in blocks along rows, in its dtype.

    ``x``: a contiguous matrix; blocks at the end of rows are filled up with zeros.
    """
    out, amax = torch.empty_like(x), None
    if layout.tensor_scale is not None:
        amax = x.new_empty(1, dtype=torch.float32)
        measure(x, amax)
    F, epsilon = _format(layout, x.dtype), layout.scale_rule.amax_epsilon
    _launch_quantize(x, (None,) * 4, amax, out, F, epsilon, (16, 128), True)
    return out


def _format(layout: Any, dtype: torch.dtype) -> Format:
    return format_of(layout, dtype, tensor_amax="stored" if layout.tensor_scale else "")


@triton.jit
def _load(table, tensor, COLUMN: tl.constexpr):
    """An int64 entry of the table."""
    return tl.load(table + tensor.to(tl.int64) * WIDTH + COLUMN)


@triton.jit
def _pointer(table, tensor, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer from the table, with the alignment hint only if ALIGNED."""
    if ALIGNED:
        ptr = pointer(table, tensor, COLUMN, DTYPE)
    else:
        ptr = _load(table, tensor, COLUMN).to(tl.pointer_type(DTYPE))
    return ptr


@triton.jit
def _span_mask(
    table, tensor, row, col, cols, WHOLE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Mask [BR, BC] of a tile's elements that belong to the span; None if all do (WHOLE)."""
    if WHOLE:
        mask = None
    else:
        index = tile_start(row, col, cols) + tile_offsets(cols, BR, BC)
        mask = (index >= _load(table, tensor, START)) & (index < _load(table, tensor, STOP))
        mask = mask & (col + tl.arange(0, BC) < cols)[None, :]
    return mask


@triton.jit
def _load_value(
    ptr, row, col, cols, mask, WRITE_DTYPE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Load a float32 tile [BR, BC], rounded to WRITE_DTYPE; zeros outside of the span."""
    ptr += tile_start(row, col, cols) + tile_offsets(cols, BR, BC)
    x = tl.load(ptr) if mask is None else tl.load(ptr, mask, 0.0)
    return round_through(to_float32(x), WRITE_DTYPE)


@triton.jit
def _amax_pointers(
    table, tensor, row, col, cols, FORM: tl.constexpr, F: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Pointers to the amaxes of a tile's blocks, one per block, and which of them exist."""
    COLUMN: tl.constexpr = COLUMNWISE_AMAX if FORM == "column" else ROWWISE_AMAX
    HEIGHT: tl.constexpr = 1 if FORM == "row" else F.block
    WIDE: tl.constexpr = 1 if FORM == "column" else F.block
    R: tl.constexpr = (BR + HEIGHT - 1) // HEIGHT
    width = tl.cdiv(cols, WIDE)
    grid = _load(table, tensor, COLUMN).to(tl.pointer_type(tl.float32))
    grid += tile_start(row // HEIGHT, col // WIDE, width)
    inside = (col // WIDE + tl.arange(0, BC // WIDE) < width)[None, :]
    return grid + tile_offsets(width, R, BC // WIDE), inside & (tl.zeros((R, 1), tl.int32) == 0)


@triton.jit
def _span_amax_kernel(
    table, tiles, VALUE_DTYPE: tl.constexpr, WRITE_DTYPE: tl.constexpr, F: tl.constexpr,
    WHOLE: tl.constexpr, PARTS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The amaxes of a span in one tile: of blocks, and of the tensor if scales need it.

    Grid: (n_tiles,). Tile: PARTS times [BR, BC] down the rows, one row of blocks. table: int64
    [n_tensors, 19]. tiles: int32 [n_tiles, 4]. WHOLE: the span contains the whole tile, so there
    are no masks. Reads the span (2 or 4 bytes per element), writes 4 bytes per block.
    """
    tensor, first_row, col = load_tile(tiles, 16)
    cols = size(table, tensor, COLS, 16 if WHOLE else 1)
    ptr = _pointer(table, tensor, VALUE, VALUE_DTYPE, WHOLE)
    largest = tl.zeros((BR, BC), tl.float32)
    for i in tl.range(0, PARTS, num_stages=STAGES):
        row = first_row + i * BR
        mask = _span_mask(table, tensor, row, col, cols, WHOLE, BR, BC)
        x = _load_value(ptr, row, col, cols, mask, WRITE_DTYPE, BR, BC)
        if F.code != "e4m3":
            largest = tl.abs(x)  # one part; NaN stays
        else:
            largest = tl.maximum(largest, tl.abs(x))
    FORM: tl.constexpr = form_of(F.scale, F.square)
    if F.scale != "" and F.rowwise:
        amax = amax_of_blocks(in_blocks(largest, F.block, FORM), F, FORM)
        grid, inside = _amax_pointers(table, tensor, first_row, col, cols, FORM, F, BR, BC)
        tl.store(grid, amax, inside)
    if F.columnwise and not F.square:
        amax = amax_of_blocks(in_blocks(largest, F.block, "column"), F, "column")
        grid, inside = _amax_pointers(table, tensor, first_row, col, cols, "column", F, BR, BC)
        tl.store(grid, amax, inside)
    if F.tensor_amax != "":
        _raise(
            _load(table, tensor, TENSOR_AMAX).to(tl.pointer_type(tl.float32)),
            tl.max(tl.max(largest, 1), 0),
        )


@triton.jit
def _scales_kernel(table, chunks, epsilon, F: tl.constexpr, CHUNK: tl.constexpr):
    """The scales of all blocks of the matrices, including blocks outside of the spans.

    Also the amaxes of tensors, where scales need them.

    Grid: (n_chunks,). Tile: CHUNK blocks. table: int64 [n_tensors, 19]. chunks: int32
    [n_chunks, 4], (tensor, first block, 1 for columnwise blocks, 0). Reads 4 bytes per block,
    writes 1 or 4.
    """
    chunk = chunks + 4 * tl.program_id(0)
    tensor, first = tl.load(chunk), tl.load(chunk + 1)
    columnwise = tl.load(chunk + 2) == 1
    amax = 0.0
    if F.tensor_amax != "":
        amax = tl.load(_load(table, tensor, TENSOR_AMAX).to(tl.pointer_type(tl.float32)))
        if first == 0:
            tl.store(_load(table, tensor, AMAX).to(tl.pointer_type(tl.float32)), amax)
    if F.scale != "":
        rows, cols = _load(table, tensor, ROWS), _load(table, tensor, COLS)
        block = first.to(tl.int64) + tl.arange(0, CHUNK)
        grid, out = _load(table, tensor, ROWWISE_AMAX), _load(table, tensor, ROWWISE_SCALE)
        if F.square:
            width = tl.cdiv(cols, F.block)
            numel = tl.cdiv(rows, F.block) * width
            at = block
        else:
            width = tl.where(columnwise, cols, cols // F.block)
            numel = rows // F.block * cols  # in either direction
            grid = tl.where(columnwise, _load(table, tensor, COLUMNWISE_AMAX), grid)
            out = tl.where(columnwise, _load(table, tensor, COLUMNWISE_SCALE), out)
            padded = tl.where(columnwise, (width + 127) // 128 * 128, (width + 3) // 4 * 4)
            at = block // width * padded + block % width
        inside = block < numel
        amaxes = tl.load(grid.to(tl.pointer_type(tl.float32)) + block, inside, 0.0)
        scale, _ = scale_of_amax(amaxes, amax, epsilon, F)
        tl.store(out.to(tl.pointer_type(scale.dtype)) + at, scale, inside)


@triton.jit
def _span_codes_kernel(
    table, tiles, epsilon, VALUE_DTYPE: tl.constexpr, WRITE_DTYPE: tl.constexpr, F: tl.constexpr,
    WHOLE: tl.constexpr, PARTS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The codes of a span in one tile, by known amaxes; preserves what the span does not have.

    Grid, tile and tables as for the amaxes. Reads the span (2 or 4 bytes per element) and amaxes,
    writes half a byte or one per element and direction.
    """
    tensor, first_row, col = load_tile(tiles, 16)
    cols = size(table, tensor, COLS, 16 if WHOLE else 1)
    ptr = _pointer(table, tensor, VALUE, VALUE_DTYPE, WHOLE)
    amax = 0.0
    if F.tensor_amax != "":
        amax = tl.load(_load(table, tensor, AMAX).to(tl.pointer_type(tl.float32)))
    if WHOLE:
        storage = storage_pointers(table, tensor, tl.uint32, tl.uint8)
    else:
        storage = Storage(
            _pointer(table, tensor, ROWWISE_DATA, tl.uint8, False),
            None,
            _pointer(table, tensor, COLUMNWISE_DATA, tl.uint8, False),
            None,
        )
    FORM: tl.constexpr = form_of(F.scale, F.square)
    row_amax, column_amax = None, None
    if F.scale != "" and F.rowwise:
        grid, inside = _amax_pointers(table, tensor, first_row, col, cols, FORM, F, BR, BC)
        row_amax = tl.load(grid, inside, 0.0)
    if F.columnwise and not F.square:
        grid, inside = _amax_pointers(table, tensor, first_row, col, cols, "column", F, BR, BC)
        column_amax = tl.load(grid, inside, 0.0)
    for i in tl.range(0, PARTS, num_stages=STAGES):
        row = first_row + i * BR
        mask = _span_mask(table, tensor, row, col, cols, WHOLE, BR, BC)
        x = _load_value(ptr, row, col, cols, mask, WRITE_DTYPE, BR, BC)
        part, _ = encode(x, row_amax, column_amax, amax, epsilon, F, False, WHOLE)
        store_codes(part, row, col, 0, cols, mask, storage, F, BR, BC)


def span_tile(layout: Any) -> tuple[int, int]:
    """Rows and columns of the tiles of spans."""
    tile, _ = _tiles_of(layout)
    return tile.rows * tile.loop, tile.cols


def _tiles_of(layout: Any) -> tuple[Tile, Tile]:
    """Unmasked and masked tiles, processed in parts of ``rows`` rows; masks need registers."""
    if layout.block == 16:
        return (Tile(16, 128, 1, 4, 1),) * 2
    if layout.block == 32:
        return (Tile(32, 64, 1, 4, 1),) * 2
    return Tile(16, 128, 8, 4, 3), Tile(8, 128, 16, 4, 1)


def span_format(layout: Any, write_dtype: torch.dtype) -> Format:
    """The format of the codes that spans write: rowwise ones, and columnwise ones of their own."""
    F = _format(layout, write_dtype)
    return F._replace(columnwise=F.columnwise and not F.square)


def measure_spans(
    table: Tensor,
    tiles: Sequence[Tensor],
    layout: Any,
    value_dtype: torch.dtype,
    write_dtype: torch.dtype,
) -> list[Launch]:
    """The launches that write the amaxes of all blocks in the given tiles.

    ``tiles``: the list of unmasked tiles and the list of masked tiles. Tensor amaxes must be zero
    before.
    """
    return _span_launches(_span_amax_kernel, (table,), tiles, layout, value_dtype, write_dtype)


def write_codes(
    table: Tensor,
    tiles: Sequence[Tensor],
    layout: Any,
    value_dtype: torch.dtype,
    write_dtype: torch.dtype,
) -> list[Launch]:
    """The launches that write the codes of spans, using amaxes; arguments as before."""
    return _span_launches(_span_codes_kernel, (table,), tiles, layout, value_dtype, write_dtype)


def write_scales(table: Tensor, chunks: Tensor, layout: Any, write_dtype: torch.dtype) -> Launch:
    """The launch that writes scales, and amaxes of tensors, from amaxes.

    ``chunks``: of SCALES blocks each.
    """
    epsilon = layout.scale_rule.amax_epsilon
    constexprs = dict(F=span_format(layout, write_dtype), CHUNK=SCALES)
    return Launch(_scales_kernel, len(chunks), (table, chunks, epsilon), constexprs)


def _span_launches(
    kernel: Any,
    fixed: tuple,
    tiles: Sequence[Tensor],
    layout: Any,
    value_dtype: torch.dtype,
    write_dtype: torch.dtype,
) -> list[Launch]:
    launches = []
    for listed, tile, whole in zip(tiles, _tiles_of(layout), (True, False), strict=True):
        if not len(listed):
            continue
        constexprs = dict(
            VALUE_DTYPE=TRITON_DTYPES[value_dtype],
            WRITE_DTYPE=TRITON_DTYPES[write_dtype],
            F=span_format(layout, write_dtype),
            WHOLE=whole,
            PARTS=tile.loop,
            BR=tile.rows,
            BC=tile.cols,
            STAGES=tile.num_stages,
        )
        given = (*fixed, listed)
        if kernel is _span_codes_kernel:
            given += (layout.scale_rule.amax_epsilon,)
        # Without a limit, ptxas saves registers for masked tiles and spills.
        options = dict(num_warps=tile.num_warps, maxnreg=None if whole else MASKED_REGISTERS)
        launches.append(Launch(kernel, len(listed), given, constexprs, **options))
    return launches
