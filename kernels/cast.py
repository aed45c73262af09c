"""Casts: matrices, and spans of any number of matrices, to codes and scales.

A span is a run of elements of a row-major matrix and may begin and end inside a block, a row or a
byte. Tiles inside the span need no masks. Tiles that it cuts are masked, element by element, and
preserve what is not part of it. Each block, and each byte, belongs to a single tile.
"""

import math
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
    format_of,
    in_blocks,
    per_element,
    scale_of_amax,
)
from fp4adam.kernels.launch.launch import Launch, kind_of, launch_of, on_its_device
from fp4adam.kernels.launch.tensor_table import (
    TRITON_DTYPES,
    Form,
    Storage,
    field,
    load_tile,
    pointer,
    storage_pointers,
    tile_offsets,
    tile_start,
)
from fp4adam.kernels.store import edge_mask, store_block_scales, store_codes
from fp4adam.kernels.tiles.codes import amax as amax_of
from fp4adam.kernels.tiles.codes import raise_amax, round_to, to_float32

AMAX_TILE = 4096
# Block scales that one program writes.
SCALES = 1024


@triton.jit
def _amax_kernel(x_ptr, amax_ptr, numel, N: tl.constexpr):
    """Largest magnitude of x. Grid: (ceil(numel / N),). Reads 2 or 4 bytes per element."""
    offs = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    x = to_float32(tl.load(x_ptr + offs, offs < numel, 0.0))
    raise_amax(amax_ptr, amax_of(x, 0, False))


@on_its_device
def measure(x: Tensor) -> Tensor:
    """The largest magnitude of ``x``, contiguous, float32 [1]."""
    amax = x.new_zeros(1, dtype=torch.float32)
    n_programs, fixed = -(-x.numel() // AMAX_TILE), (x.numel(),)
    launch_of(_amax_kernel, n_programs, fixed, (AMAX_TILE,), 4, *kind_of(x))(x, amax)
    return amax


@triton.jit
def _quantize_kernel(
    x_ptr, rowwise_data, rowwise_scale, columnwise_data, columnwise_scale, amax_ptr, out_ptr, rows,
    cols, tiles_per_row, epsilon, F: tl.constexpr, DECODES: tl.constexpr, MASKED: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Quantize a matrix, into codes and scales, or to what these decode to (DECODES), at out_ptr.

    Grid: (n_tiles,). Tile: [BR, BC], whole blocks. MASKED: it may reach past an edge. amax_ptr:
    float32 [1], of formats that scale tensors. Pointers that are not needed may be any. Reads x (2
    or 4 bytes per element), writes half a byte or one per element and direction, and the scales.
    """
    tile = tl.program_id(0)
    row, col = tile // tiles_per_row * BR, tile % tiles_per_row * BC
    mask = edge_mask(row, col, rows, cols, MASKED, BR, BC)
    offs = tile_start(row, col, cols) + tile_offsets(cols, BR, BC)
    x = tl.load(x_ptr + offs) if mask is None else tl.load(x_ptr + offs, mask, 0.0)
    amax = tl.load(amax_ptr) if F.tensor_amax != "" else 0.0
    # The storage may be unaligned, so it is written in bytes.
    part, value = encode(to_float32(x), None, None, amax, epsilon, F, False)
    if DECODES:
        FORM: tl.constexpr = F.form
        factor, _ = decode_factor(part.row_scale, amax, epsilon, F)
        value = in_blocks(value, F.block, FORM) * per_element(factor, FORM)
        value = round_to(tl.reshape(value, (BR, BC)), out_ptr.dtype.element_ty)
        tl.store(out_ptr + offs, value, mask)
    else:
        storage = Storage(
            rowwise_data, rowwise_scale, columnwise_data, columnwise_scale, None, None
        )
        store_codes(part, row, col, rows, cols, mask, storage, F, BR, BC)
        store_block_scales(part, row, col, rows, cols, storage, F, BR, BC)


def _quantize(layout: Any, constants: tuple[Any, ...], x: Tensor, *others: Tensor | None) -> None:
    """Launch the kernel with its seven tensors, and constants after its format."""
    given = x, *(x if tensor is None else tensor for tensor in others)
    (rows, cols), (*_, br, bc) = x.shape, constants
    across = -(-cols // bc)
    fixed = rows, cols, across, layout.scale_rule.amax_epsilon
    launch_of(
        _quantize_kernel, -(-rows // br) * across, fixed,
        (_format(layout, x.dtype), *constants), max(1, min(8, br * bc // 1024)), *kind_of(*given),
    )(*given)  # fmt: skip


@on_its_device
def quantize(x: Tensor, out: Any, layout: Any) -> None:
    """Quantize the contiguous matrix ``x`` into a ``Storage`` whose amax is known."""
    block = layout.block
    masked = block == 128  # may be cut at edges
    least, most = max(block, 16), 32 if block == 32 else 64
    # The largest powers of two that divide the sides.
    tile = max(least, math.gcd(x.shape[0], most)), max(least, math.gcd(x.shape[1], 64))
    square = out.block_scale_inv
    scale = out.rowwise_scale_inv if square is None else square
    storage = out.rowwise_data, scale, out.columnwise_data, out.columnwise_scale_inv
    constants = False, masked, *((128, 128) if masked else tile)
    _quantize(layout, constants, x, *storage, out.amax, None)


@on_its_device
def fake_quantize(x: Tensor, layout: Any) -> Tensor:
    """What ``x`` decodes to when it is quantized in blocks along rows, in its dtype.

    ``x``: a contiguous matrix; blocks at the end of rows are filled up with zeros.
    """
    out = torch.empty_like(x)
    amax = None if layout.tensor_scale is None else measure(x)
    _quantize(layout, (True, True, 16, 128), x, *(None,) * 4, amax, out)
    return out


def _format(layout: Any, dtype: torch.dtype) -> Format:
    return format_of(layout, dtype, tensor_amax="stored" if layout.tensor_scale else "")


@triton.jit
def _span_mask(
    table, tensor, row, col, cols, WHOLE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Mask [BR, BC] of a tile's elements that belong to the span; None if all do (WHOLE)."""
    mask = None
    if not WHOLE:
        index = tile_start(row, col, cols) + tile_offsets(cols, BR, BC)
        mask = (index >= field(table, tensor, "start")) & (index < field(table, tensor, "stop"))
        mask = mask & (col + tl.arange(0, BC) < cols)[None, :]
    return mask


@triton.jit
def _amax_grid(
    grid, row, col, cols, FORM: tl.constexpr, F: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Pointers to the amaxes of a tile's blocks, one per block, and which of them exist."""
    HEIGHT: tl.constexpr = 1 if FORM == "row" else F.block
    WIDE: tl.constexpr = 1 if FORM == "column" else F.block
    R: tl.constexpr = (BR + HEIGHT - 1) // HEIGHT
    width = tl.cdiv(cols, WIDE)
    grid += tile_start(row // HEIGHT, col // WIDE, width)
    inside = (col // WIDE + tl.arange(0, BC // WIDE) < width)[None, :]
    return grid + tile_offsets(width, R, BC // WIDE), inside & (tl.zeros((R, 1), tl.int32) == 0)


@triton.jit
def _span_kernel(
    table, tiles, epsilon, MEASURES: tl.constexpr, VALUE_DTYPE: tl.constexpr,
    WRITE_DTYPE: tl.constexpr, F: tl.constexpr, WHOLE: tl.constexpr, TR: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The amaxes of a span in one tile (MEASURES), of blocks and of the tensor if scales need it;
    or its codes, by known amaxes, which preserve what the span does not have.

    Grid: (n_tiles,). Tile: [TR, BC], one row of blocks, in parts of BR rows. table: int64
    [n_tensors, 20]. tiles: int32 [n_tiles, 4]. WHOLE: the span contains the whole tile, so there
    are no masks. Reads the span (2 or 4 bytes per element), and reads or writes 4 bytes per block;
    writes half a byte or one per element and direction.
    """
    ALIGNMENT: tl.constexpr = 16 if WHOLE else 1
    FORM: tl.constexpr = F.form
    ROWWISE: tl.constexpr = F.scale != "" and F.rowwise
    COLUMNWISE: tl.constexpr = F.columnwise and not F.square
    tensor, first_row, col = load_tile(tiles, 16)
    cols = field(table, tensor, "cols", tl.int32, ALIGNMENT)
    values = pointer(table, tensor, "value", VALUE_DTYPE, ALIGNMENT)
    tensor_amax = pointer(table, tensor, "tensor_amax" if MEASURES else "amax", tl.float32, 4)
    row_amax, column_amax, amax = None, None, 0.0
    if ROWWISE:
        grid = pointer(table, tensor, "rowwise_amax", tl.float32, 4)
        grid, inside = _amax_grid(grid, first_row, col, cols, FORM, F, BR, BC)
        if not MEASURES:
            row_amax = tl.load(grid, inside, 0.0)
    if COLUMNWISE:
        grid_t = pointer(table, tensor, "columnwise_amax", tl.float32, 4)
        grid_t, inside_t = _amax_grid(grid_t, first_row, col, cols, "column", F, BR, BC)
        if not MEASURES:
            column_amax = tl.load(grid_t, inside_t, 0.0)
    if MEASURES:
        largest = tl.zeros((BR, BC), tl.float32)
    else:
        if F.tensor_amax != "":
            amax = tl.load(tensor_amax)
        CODES: tl.constexpr = tl.uint32 if WHOLE else tl.uint8
        storage = storage_pointers(table, tensor, CODES, tl.uint8, ALIGNMENT)
    for i in tl.range(0, TR // BR, num_stages=STAGES):
        row = first_row + i * BR
        mask = _span_mask(table, tensor, row, col, cols, WHOLE, BR, BC)
        ptr = values + tile_start(row, col, cols) + tile_offsets(cols, BR, BC)
        x = tl.load(ptr) if mask is None else tl.load(ptr, mask, 0.0)
        x = to_float32(round_to(to_float32(x), WRITE_DTYPE))
        if not MEASURES:
            part, _ = encode(x, row_amax, column_amax, amax, epsilon, F, WHOLE)
            store_codes(part, row, col, 0, cols, mask, storage, F, BR, BC)
        elif TR == BR:
            largest = tl.abs(x)  # NaN stays
        else:
            largest = tl.maximum(largest, tl.abs(x))
    if MEASURES and ROWWISE:
        tl.store(grid, amax_of_blocks(largest, F, FORM), inside)
    if MEASURES and COLUMNWISE:
        tl.store(grid_t, amax_of_blocks(largest, F, "column"), inside_t)
    if MEASURES and F.tensor_amax != "":
        raise_amax(tensor_amax, amax_of(amax_of(largest, 1, False), 0, False))


@triton.jit
def _scales_kernel(table, chunks, epsilon, F: tl.constexpr, CHUNK: tl.constexpr):
    """The scales of all blocks of the matrices, including blocks outside of the spans.

    Also the amaxes of tensors, where scales need them.

    Grid: (n_chunks,). Tile: CHUNK blocks. table: int64 [n_tensors, 20]. chunks: int32
    [n_chunks, 4], (tensor, first block, 1 for columnwise blocks, 0). Reads 4 bytes per block,
    writes 1 or 4.
    """
    chunk = chunks + 4 * tl.program_id(0)
    tensor, first = tl.load(chunk), tl.load(chunk + 1)
    columnwise = tl.load(chunk + 2) == 1
    amax = 0.0
    if F.tensor_amax != "":
        amax = tl.load(pointer(table, tensor, "tensor_amax", tl.float32, 4))
        if first == 0:
            tl.store(pointer(table, tensor, "amax", tl.float32, 4), amax)
    if F.scale != "":
        rows, cols = field(table, tensor, "rows"), field(table, tensor, "cols")
        block = first.to(tl.int64) + tl.arange(0, CHUNK)
        grid, out = field(table, tensor, "rowwise_amax"), field(table, tensor, "rowwise_scale")
        if F.square:
            width = tl.cdiv(cols, F.block)
            numel = tl.cdiv(rows, F.block) * width
            at = block
        else:
            width = tl.where(columnwise, cols, cols // F.block)
            numel = rows // F.block * cols  # in either direction
            grid = tl.where(columnwise, field(table, tensor, "columnwise_amax"), grid)
            out = tl.where(columnwise, field(table, tensor, "columnwise_scale"), out)
            padded = tl.where(columnwise, (width + 127) // 128 * 128, (width + 3) // 4 * 4)
            at = block // width * padded + block % width
        inside = block < numel
        amaxes = tl.load(grid.to(tl.pointer_type(tl.float32)) + block, inside, 0.0)
        scale, _ = scale_of_amax(amaxes, amax, epsilon, F)
        tl.store(out.to(tl.pointer_type(scale.dtype)) + at, scale, inside)


def span_forms(layout: Any) -> tuple[Form, Form]:
    """The forms of unmasked and of masked tiles of spans; masks need registers.

    Without a limit, ptxas saves registers for masked tiles and spills.
    """
    if layout.block == 16:
        form = Form(16, 128, 16, 128, 4, 1, None)
    elif layout.block == 32:
        form = Form(32, 64, 32, 64, 4, 1, None)
    else:
        masked = Form(128, 128, 8, 128, 4, 1, 255)
        return Form(128, 128, 16, 128, 4, 3, None), masked
    return form, form._replace(registers=255)


def span_format(layout: Any, write_dtype: torch.dtype) -> Format:
    """The format of the codes that spans write: rowwise ones, and columnwise ones of their own."""
    F = _format(layout, write_dtype)
    return F._replace(columnwise=F.columnwise and not F.square)


def write_spans(
    table: Tensor,
    tiles: Sequence[Tensor],
    layout: Any,
    value_dtype: torch.dtype,
    write_dtype: torch.dtype,
    *,
    measures: bool,
) -> list[Launch]:
    """The launches that write the amaxes of all blocks in the given tiles; else codes, by amaxes.

    ``tiles``: the list of unmasked tiles and the list of masked tiles. ``measures``: amaxes, of
    which those of tensors must be zero before.
    """
    launches = []
    for listed, form, whole in zip(tiles, span_forms(layout), (True, False), strict=True):
        constexprs = dict(
            MEASURES=measures,
            VALUE_DTYPE=TRITON_DTYPES[value_dtype],
            WRITE_DTYPE=TRITON_DTYPES[write_dtype],
            F=span_format(layout, write_dtype),
            WHOLE=whole,
            TR=form.rows,
            BR=form.part_rows,
            BC=form.cols,
            STAGES=form.num_stages,
        )
        given = table, listed, layout.scale_rule.amax_epsilon
        options = dict(num_warps=form.num_warps, maxnreg=form.registers)
        launches.append(Launch(_span_kernel, len(listed), given, constexprs, **options))
    return launches


def write_scales(table: Tensor, chunks: Tensor, layout: Any, write_dtype: torch.dtype) -> Launch:
    """The launch that writes scales, and amaxes of tensors, from amaxes.

    ``chunks``: of SCALES blocks each.
    """
    constexprs = dict(F=span_format(layout, write_dtype), CHUNK=SCALES)
    given = table, chunks, layout.scale_rule.amax_epsilon
    return Launch(_scales_kernel, len(chunks), given, constexprs)
