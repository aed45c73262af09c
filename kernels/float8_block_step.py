"""The fused Adam step that writes Float8Block weights."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels import adam
from fp4adam.kernels.adam import (
    SIGNALS,
    Variant,
    adam_master_tile,
    adam_step_tile,
    load_scalars,
    state_lanes,
    state_pointers,
)
from fp4adam.kernels.float8_block import (
    BLOCK,
    float8_scale,
    store_codes,
    store_columnwise_scale,
    store_rowwise_scale,
    tile_mask,
)
from fp4adam.kernels.launch.launch import Launch, compute_capability
from fp4adam.kernels.launch.tensor_table import (
    CHANGED,
    COLS,
    COLUMNWISE_DATA,
    COLUMNWISE_SCALE,
    ROWS,
    ROWWISE_DATA,
    ROWWISE_SCALE,
    Tile,
    Usage,
    load_tile,
    pointer,
    size,
    takes_part,
    tile_grid,
    tile_offsets,
    tile_start,
)
from fp4adam.kernels.plain_step import update_scaled
from fp4adam.kernels.tiles.bfloat16 import round_through
from fp4adam.kernels.tiles.changes import flag_codes, flag_words
from fp4adam.kernels.tiles.e4m3 import e4m3_code, e4m3_value, e4m3_word_values, e4m3_words
from fp4adam.kernels.tiles.layout import state_offsets
from fp4adam.kernels.tiles.remainder import (
    complete,
    load_remainder,
    split_off,
    store_remainder,
    unit_of_one,
)
from fp4adam.kernels.tiles.state import (
    OF_MASTERS,
    are_narrow,
    element_hash,
    load_master,
    master_pointers,
    max_registers,
    starts_from_codes,
)
from fp4adam.kernels.tiles.words import extract_tile, insert_tile, store_words, transpose_words

# Whether the step flags the units of weights that it changes.
RECORDS_CHANGES = True
# The parts that the fused step divides whole blocks into.
STEP_PART = Tile(16, BLOCK, 8, 4, 3)
# Those of blocks that need masks. Only states in FP32 are read ahead, in a kernel of its own.
MASKED_PARTS = {  # by two_dimensional and whether states are narrow
    (True, False): Tile(4, BLOCK, 32, 4, 4),
    (True, True): Tile(16, 32, 32, 4, 1),
    (False, False): Tile(4, BLOCK, 32, 8, 1),
    (False, True): Tile(4, BLOCK, 32, 8, 1),
}


@triton.jit
def _put_words(words, data, changed, row, col, cols, BR: tl.constexpr, BC: tl.constexpr):
    """Store rowwise words of a part [BR, BC], and flag the units that change in ``changed``."""
    words_ptr = data.to(tl.pointer_type(tl.uint32))
    if changed is not None:
        flag_words(changed, words_ptr, row, col // 4, cols // 4, words, 8)
        tl.debug_barrier()  # warps may share bytes that others overwrite
    store_words(words_ptr, row, col // 4, cols // 4, words, BR, BC // 4)


@triton.jit
def _put_bytes(
    code,
    rowwise_data,
    columnwise_data,
    changed,
    row,
    col,
    rows,
    cols,
    mask,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """``store_codes``, which flags the units whose rowwise codes change in ``changed``."""
    if ROWWISE and changed is not None:
        flag_codes(changed, rowwise_data, row, col, cols, code, mask)
        tl.debug_barrier()
    store_codes(
        code, rowwise_data, columnwise_data, row, col, rows, cols, mask, ROWWISE, COLUMNWISE, BR, BC
    )


@triton.jit
def _put_codes(
    x,
    column_words,
    i,
    rowwise_data,
    columnwise_data,
    changed,
    row,
    col,
    rows,
    cols,
    mask,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Store the codes of ``x``, part ``i`` of a block; keep columnwise words for later.

    column_words: uint32 [parts, BR, BC / 4], for :func:`_store_column_words`. Returns them, with
    this part's words inserted if COLUMNWISE. Words need rows whose size is a multiple of four
    bytes, so masked parts are stored byte by byte, in both directions.
    """
    if mask is None:
        words = e4m3_words(x, BR, BC, HARDWARE=not COLUMNWISE)
        if ROWWISE:
            _put_words(words, rowwise_data, changed, row, col, cols, BR, BC)
        if COLUMNWISE:
            column_words = insert_tile(column_words, words, i)
    else:
        code = e4m3_code(x, HARDWARE=not (ROWWISE and COLUMNWISE))
        _put_bytes(
            code, rowwise_data, columnwise_data, changed, row, col, rows, cols, mask,
            ROWWISE, COLUMNWISE, BR, BC,
        )  # fmt: skip
    return column_words


@triton.jit
def _store_column_words(column_words, columnwise_data, row, col, rows):
    """Store the transposed codes of the block at (row, col). column_words: uint32 [n, R, 32]."""
    words = transpose_words(tl.reshape(column_words, (128, 32)), 8, 128, 128)
    words_ptr = columnwise_data.to(tl.pointer_type(tl.uint32))
    store_words(words_ptr, col, row // 4, rows // 4, words, 128, 32)


@triton.jit
def _square_block(table, tensor, row, col, cols):
    """Pointers to the codes of a tensor and to the scale of its block at (row, col).

    Returns the rowwise codes, the columnwise ones, the scale's pointer, and the encode scale that
    is stored there.
    """
    scale_ptr = pointer(table, tensor, ROWWISE_SCALE, tl.float32)
    scale_ptr += tile_start(row // 128, col // 128, tl.cdiv(cols, 128))
    return (
        pointer(table, tensor, ROWWISE_DATA, tl.uint8),
        pointer(table, tensor, COLUMNWISE_DATA, tl.uint8),
        scale_ptr,
        tl.div_rn(1.0, tl.load(scale_ptr)),
    )


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _adam_step_square_kernel(
    grad_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    table,
    scalars,
    tiles,
    epsilon,
    VARIANT: tl.constexpr,
    USAGE: tl.constexpr,
    LARGEST: tl.constexpr,
    POW_2: tl.constexpr,
    MASKED: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adam and re-quantization of one 128x128 block of one tensor.

    Grid: (n_tiles,). Tile: [128, 128] in parts of [BR, BC]. table: int64 [n_tensors, 19]. scalars:
    float32 [n, 12]. tiles: int32 [n_tiles, 4]. MASKED: the block may reach past an edge.
    A power-of-two scale seldom changes, so each part is quantized with the stored scale right away.
    Columnwise words are kept and stored transposed, for the whole block at once. If the new amax
    needs another scale, the block is read and quantized again; without POW_2 that is always so.
    Reads gradient (2 bytes if BF16) and three FP32 tensors, writes these three and the codes: 28
    bytes per element with both directions, and 4 to 6 more from L2 if the block is repeated.
    """
    tensor, first_row, first_col = load_tile(tiles, 128)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    MULTIPLE: tl.constexpr = 1 if MASKED else 16
    rows, cols = size(table, tensor, ROWS, MULTIPLE), size(table, tensor, COLS, MULTIPLE)
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    pointers = state_pointers(table, tensor, VARIANT)
    rowwise_data, columnwise_data, scale_ptr, stored_scale = _square_block(
        table, tensor, first_row, first_col, cols
    )
    changed = pointer(table, tensor, CHANGED, tl.uint8) if USAGE.records else None
    PARTS_PER_ROW: tl.constexpr = 128 // BC
    PARTS: tl.constexpr = (128 // BR) * PARTS_PER_ROW
    VALUE: tl.constexpr = VARIANT.value_codec

    # Reduced over each thread's four neighbours, the maximum takes a quarter of the registers.
    largest = tl.zeros((BR, BC // 4), tl.float32)
    column_words = tl.zeros((PARTS, BR, BC // 4), tl.uint32)
    # Counted apart from ``i``, which the loop is ahead with when it prefetches.
    part = 0
    for i in tl.range(0, PARTS, num_stages=STAGES):
        row, col = first_row + i // PARTS_PER_ROW * BR, first_col + i % PARTS_PER_ROW * BC
        start = tile_start(row, col, cols)
        row, col = first_row + part // PARTS_PER_ROW * BR, first_col + part % PARTS_PER_ROW * BC
        mask = tile_mask(row, col, rows, cols, MASKED, BR, BC)
        value = adam_step_tile(
            pointers,
            start,
            tile_start(row, col, cols),
            cols,
            mask,
            constants,
            VARIANT,
            True,
            BR,
            BC,
        )
        x = round_through(value, VARIANT.write_dtype)
        if MASKED:
            x = tl.where(mask, x, 0.0)
        magnitude = tl.reshape(tl.abs(x), (BR, BC // 4, 4))
        largest = tl.maximum(largest, tl.max(magnitude, 2))
        if POW_2:
            # Speculates that the scale of the last step still holds.
            column_words = _put_codes(
                x * stored_scale, column_words, part, rowwise_data, columnwise_data, changed,
                row, col, rows, cols, mask, USAGE.rowwise, USAGE.columnwise, BR, BC,
            )  # fmt: skip
        part += 1

    scale = float8_scale(tl.max(tl.max(largest, 1), 0), epsilon, LARGEST, POW_2)
    if (not POW_2) | (scale != stored_scale):
        # A barrier, because the threads that read a part back are not those that wrote it.
        tl.debug_barrier()
        for i in range(PARTS):
            row, col = first_row + i // PARTS_PER_ROW * BR, first_col + i % PARTS_PER_ROW * BC
            mask = tile_mask(row, col, rows, cols, MASKED, BR, BC)
            value_ptr, extra_ptr = master_pointers(table, tensor, VALUE)
            start = tile_start(row, col, cols)
            value = load_master(value_ptr, extra_ptr, start, cols, mask, VALUE, BR, BC)
            x = round_through(value, VARIANT.write_dtype)
            column_words = _put_codes(
                x * scale, column_words, i, rowwise_data, columnwise_data, changed,
                row, col, rows, cols, mask, USAGE.rowwise, USAGE.columnwise, BR, BC,
            )  # fmt: skip
        tl.store(scale_ptr, tl.div_rn(1.0, scale))
    if USAGE.columnwise and not MASKED:
        _store_column_words(column_words, columnwise_data, first_row, first_col, rows)


@triton.jit
def _copy_codes(source, target, row, end_row, col, rows, cols, BC: tl.constexpr):
    """Copy codes of BC columns from ``row`` to ``end_row``, [BC], up to four, transposed."""
    r = row[None, :] + tl.arange(0, 4)[:, None]
    c = (col + tl.arange(0, BC))[None, :]
    mask = (r < end_row[None, :]) & (c < cols)
    code = tl.load(source + r.to(tl.int64) * cols + c, mask)
    tl.store(target + c.to(tl.int64) * rows + r, code, mask)


@triton.jit
def _transpose_block(source, target, first_row, col, rows, cols, BC: tl.constexpr):
    """Transpose the codes [128, BC] at (first_row, col) of a matrix of any size.

    Words of four codes are stored where they are aligned, which begins at another row in each
    column, and single codes at either end.
    """
    c = col + tl.arange(0, BC)
    end = tl.minimum(first_row + 128, rows)
    # The product may wrap: only its lowest bits count.
    begin = first_row + (-(c * rows + first_row) & 3)
    words_end = begin + tl.maximum(end - begin, 0) // 4 * 4
    _copy_codes(source, target, 0 * c + first_row, tl.minimum(begin, end), col, rows, cols, BC)
    for i in range(4):
        first = begin + 32 * i
        r = first[None, :] + tl.arange(0, 32)[:, None]
        offs = r.to(tl.int64) * cols + c[None, :]
        # The hint puts neighbouring columns in neighbouring threads; their rows are close to each
        # other. Nothing is known to be aligned, so accesses are of single codes all the same.
        offs = tl.max_contiguous(offs, (1, BC))
        code = tl.load(source + offs, (r < words_end[None, :]) & (c < cols)[None, :])
        fields = tl.reshape(code.to(tl.uint32), (8, 4, BC))
        words = tl.sum(fields << (8 * tl.arange(0, 4)).to(tl.uint32)[None, :, None], 1)
        word = tl.arange(0, 8)[None, :]
        ptr = (
            target.to(tl.pointer_type(tl.uint32)) + ((c.to(tl.int64) * rows + first) >> 2)[:, None]
        )
        mask = (first[:, None] + 4 * word < words_end[:, None]) & (c < cols)[:, None]
        tl.store(ptr + word, tl.trans(words), mask)
    _copy_codes(source, target, words_end, 0 * c + end, col, rows, cols, BC)


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _adam_step_odd_square_kernel(
    grad_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    table,
    scalars,
    tiles,
    epsilon,
    VARIANT: tl.constexpr,
    USAGE: tl.constexpr,
    LARGEST: tl.constexpr,
    POW_2: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Like the square kernel, for blocks that may reach past an edge, of matrices of any size.

    Grid, tile and tables are the same; BC is 128. Every access is one of single elements, with
    neighbouring columns in neighbouring threads. Those of four bytes can still be asynchronous
    copies. The gradient of two bytes cannot, so each turn loads that of the next part. Rowwise
    codes are read again, from L2, and transposed; without them, values are.
    """
    tensor, first_row, col = load_tile(tiles, 128)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    rows, cols = size(table, tensor, ROWS, 1), size(table, tensor, COLS, 1)
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    pointers = state_pointers(table, tensor, VARIANT)
    rowwise_data, columnwise_data, scale_ptr, stored_scale = _square_block(
        table, tensor, first_row, col, cols
    )
    changed = pointer(table, tensor, CHANGED, tl.uint8) if USAGE.records else None
    VALUE: tl.constexpr = VARIANT.value_codec
    # A column that is outside has no rows, so one comparison masks an element.
    offs, r = state_offsets(cols, BR, BC), tl.arange(0, BR)[:, None]
    ends = tl.where(col + tl.arange(0, BC) < cols, rows, 0)[None, :]
    parts = tl.cdiv(tl.minimum(rows - first_row, 128), BR)

    largest = tl.zeros((BC,), tl.float32)
    if not VARIANT.is_updated:
        next_grad = tl.load(
            pointers.grad + tile_start(first_row, col, cols) + offs, first_row + r < ends
        )
    # Counted apart from ``i``, which the loop is ahead with when it prefetches.
    row = first_row
    for i in tl.range(0, parts, num_stages=STAGES):
        ahead = first_row + i * BR
        mask, grad, next_row = row + r < ends, None, row + BR
        if not VARIANT.is_updated:
            grad = next_grad
            next_grad = tl.load(
                pointers.grad + tile_start(next_row, col, cols) + offs, next_row + r < ends
            )
        value = adam_step_tile(
            pointers, tile_start(ahead, col, cols), tile_start(row, col, cols), cols,
            ahead + r < ends, constants, VARIANT, True, BR, BC, mask, grad,
        )  # fmt: skip
        x = tl.where(mask, round_through(value, VARIANT.write_dtype), 0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 0))
        if POW_2 and USAGE.rowwise:
            # Speculates that the scale of the last step still holds.
            _put_bytes(
                e4m3_code(x * stored_scale), rowwise_data, rowwise_data, changed, row, col, rows,
                cols, mask, True, False, BR, BC,
            )  # fmt: skip
        row = next_row

    scale = float8_scale(tl.max(largest, 0), epsilon, LARGEST, POW_2)
    # Barriers, because the threads that read a part back may not be those that wrote it.
    if (not POW_2) | (not USAGE.rowwise) | (scale != stored_scale):
        tl.debug_barrier()
        for i in range(parts):
            row = first_row + i * BR
            value_ptr, extra_ptr = master_pointers(table, tensor, VALUE)
            start, mask = tile_start(row, col, cols), row + r < ends
            value = load_master(value_ptr, extra_ptr, start, cols, mask, VALUE, BR, BC)
            _put_bytes(
                e4m3_code(round_through(value, VARIANT.write_dtype) * scale), rowwise_data,
                columnwise_data, changed, row, col, rows, cols, mask, USAGE.rowwise,
                not USAGE.rowwise, BR, BC,
            )  # fmt: skip
        tl.store(scale_ptr, tl.div_rn(1.0, scale))
    if USAGE.rowwise and USAGE.columnwise:
        tl.debug_barrier()
        _transpose_block(rowwise_data, columnwise_data, first_row, col, rows, cols, BC)


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _adam_step_vector_kernel(
    grad_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    table,
    scalars,
    tiles,
    epsilon,
    VARIANT: tl.constexpr,
    USAGE: tl.constexpr,
    LARGEST: tl.constexpr,
    POW_2: tl.constexpr,
    MASKED: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Like the square kernel, with one scale per 128 elements of each direction.

    Grid, tile and tables are the same; BC is 128. Rowwise codes are written with the update.
    Columnwise scales are known only after the last row, so the block is then read again, from L2,
    with prefetches as well.
    """
    tensor, first_row, col = load_tile(tiles, 128)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    MULTIPLE: tl.constexpr = 1 if MASKED else 16
    rows, cols = size(table, tensor, ROWS, MULTIPLE), size(table, tensor, COLS, MULTIPLE)
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    pointers = state_pointers(table, tensor, VARIANT)
    rowwise_data = pointer(table, tensor, ROWWISE_DATA, tl.uint8)
    columnwise_data = pointer(table, tensor, COLUMNWISE_DATA, tl.uint8)
    changed = pointer(table, tensor, CHANGED, tl.uint8) if USAGE.records else None

    PARTS: tl.constexpr = 128 // BR
    VALUE: tl.constexpr = VARIANT.value_codec
    largest = tl.zeros((BC,), tl.float32)
    column_words = tl.zeros((PARTS, BR, BC // 4), tl.uint32)
    row = first_row  # counted apart from ``i``, as in the square kernel
    for i in tl.range(0, PARTS, num_stages=STAGES):
        start, target = tile_start(first_row + i * BR, col, cols), tile_start(row, col, cols)
        mask = tile_mask(row, col, rows, cols, MASKED, BR, BC)
        value = adam_step_tile(
            pointers, start, target, cols, mask, constants, VARIANT, True, BR, BC
        )
        x = round_through(value, VARIANT.write_dtype)
        if MASKED:
            x = tl.where(mask, x, 0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 0))
        if USAGE.rowwise:
            scale = float8_scale(tl.max(tl.abs(x), 1), epsilon, LARGEST, POW_2)
            store_rowwise_scale(
                scale, pointer(table, tensor, ROWWISE_SCALE, tl.float32), row, col, rows,
                row + tl.arange(0, BR) < rows, BR,
            )  # fmt: skip
            column_words = _put_codes(
                x * scale[:, None], column_words, i, rowwise_data, columnwise_data, changed,
                row, col, rows, cols, mask, True, False, BR, BC,
            )  # fmt: skip
        row += BR

    if USAGE.columnwise:
        scale = float8_scale(largest, epsilon, LARGEST, POW_2)
        store_columnwise_scale(
            scale, pointer(table, tensor, COLUMNWISE_SCALE, tl.float32), first_row, col, cols,
            col + tl.arange(0, BC) < cols, BC,
        )  # fmt: skip
        # A barrier, because the threads that read a row back are not those that wrote it.
        tl.debug_barrier()
        for i in tl.range(0, PARTS, num_stages=STAGES):
            row = first_row + i * BR
            mask = tile_mask(row, col, rows, cols, MASKED, BR, BC)
            value_ptr, extra_ptr = master_pointers(table, tensor, VALUE)
            start = tile_start(row, col, cols)
            value = load_master(value_ptr, extra_ptr, start, cols, mask, VALUE, BR, BC)
            x = round_through(value, VARIANT.write_dtype)
            column_words = _put_codes(
                x * scale[None, :], column_words, i, rowwise_data, columnwise_data, None,
                row, col, rows, cols, mask, False, True, BR, BC,
            )  # fmt: skip
        if not MASKED:
            _store_column_words(column_words, columnwise_data, first_row, col, rows)


@triton.jit
def _update_codes(
    table,
    tensor,
    pointers,
    rowwise_data,
    row,
    col,
    rows,
    cols,
    mask,
    constants,
    VARIANT: tl.constexpr,
    USAGE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """The updated masters of a part [BR, BC], decoded from its codes; its moments are stored."""
    LANES: tl.constexpr = state_lanes(VARIANT)
    start = tile_start(row, col, cols)
    ptr = pointer(table, tensor, ROWWISE_SCALE, tl.float32)
    if USAGE.square:
        factor = tl.load(ptr + tile_start(row // 128, col // 128, tl.cdiv(cols, 128)))
    else:
        ptr += tile_start(col // 128, row, (rows + 3) // 4 * 4) + tl.arange(0, BR)
        factor = tl.load(ptr, row + tl.arange(0, BR) < rows, 1.0)[:, None]
    unit, _ = unit_of_one(factor, 8)
    remainder = None
    if VARIANT.value_codec == "int8":
        remainder = load_remainder(pointers.value, start, cols, mask, BR, BC, LANES)
    code = tl.load(rowwise_data + start + state_offsets(cols, BR, BC, LANES), mask)
    master = complete(e4m3_value(code), factor, unit, remainder, 8)
    master, _, _ = adam_master_tile(
        pointers, start, start, cols, mask, master, constants, VARIANT, True, BR, BC
    )
    return master


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _adam_step_decoded_kernel(
    grad_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    table,
    scalars,
    tiles,
    epsilon,
    VARIANT: tl.constexpr,
    USAGE: tl.constexpr,
    LARGEST: tl.constexpr,
    POW_2: tl.constexpr,
    MASKED: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adam and re-quantization of one 128x128 block, with remainders or without masters.

    Grid, tile and tables as for the square kernel; BC is 128. The new masters, which are stored
    nowhere, stay in registers until the scales of the block are known.
    """
    tensor, first_row, col = load_tile(tiles, 128)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    MULTIPLE: tl.constexpr = 1 if MASKED else 16
    rows, cols = size(table, tensor, ROWS, MULTIPLE), size(table, tensor, COLS, MULTIPLE)
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    pointers = state_pointers(table, tensor, VARIANT)
    rowwise_data = pointer(table, tensor, ROWWISE_DATA, tl.uint8)
    columnwise_data = pointer(table, tensor, COLUMNWISE_DATA, tl.uint8)
    rowwise_scale = pointer(table, tensor, ROWWISE_SCALE, tl.float32)
    changed = pointer(table, tensor, CHANGED, tl.uint8) if USAGE.records else None
    PARTS: tl.constexpr = 128 // BR
    LANES: tl.constexpr = state_lanes(VARIANT)
    masters = tl.zeros((PARTS, BR, BC), tl.int32)
    for i in tl.range(0, PARTS, num_stages=STAGES):
        row = first_row + i * BR
        mask = tile_mask(row, col, rows, cols, MASKED, BR, BC)
        master = _update_codes(
            table, tensor, pointers, rowwise_data, row, col, rows, cols, mask, constants,
            VARIANT, USAGE, BR, BC,
        )  # fmt: skip
        if MASKED:
            master = tl.where(mask, master, 0.0)
        masters = insert_tile(masters, master.to(tl.int32, bitcast=True), i)
    # All codes and scales are read before any is written.
    tl.debug_barrier()
    if USAGE.square or USAGE.columnwise:
        block = round_through(masters.to(tl.float32, bitcast=True), VARIANT.write_dtype)
        largest = tl.max(tl.max(tl.abs(block), 0), 0)
    if USAGE.square:
        column_scale = float8_scale(tl.max(largest, 0), epsilon, LARGEST, POW_2)
        tl.store(
            rowwise_scale + tile_start(first_row // 128, col // 128, tl.cdiv(cols, 128)),
            tl.div_rn(1.0, column_scale),
        )
    elif USAGE.columnwise:
        column_scale = float8_scale(largest, epsilon, LARGEST, POW_2)
        store_columnwise_scale(
            column_scale, pointer(table, tensor, COLUMNWISE_SCALE, tl.float32), first_row, col,
            cols, col + tl.arange(0, BC) < cols, BC,
        )  # fmt: skip
    for i in range(PARTS):
        row = first_row + i * BR
        start = tile_start(row, col, cols)
        mask = tile_mask(row, col, rows, cols, MASKED, BR, BC)
        master = extract_tile(masters, i).to(tl.float32, bitcast=True)
        x = round_through(master, VARIANT.write_dtype)
        if USAGE.square:
            scale = column_scale
            factor = tl.div_rn(1.0, scale)
        else:
            scale = float8_scale(tl.max(tl.abs(x), 1), epsilon, LARGEST, POW_2)
            inside = row + tl.arange(0, BR) < rows
            store_rowwise_scale(scale, rowwise_scale, row, col, rows, inside, BR)
            factor, scale = tl.div_rn(1.0, scale)[:, None], scale[:, None]
        if MASKED:
            code = e4m3_code(x * scale, HARDWARE=False)
            value = e4m3_value(code)
            _put_bytes(
                code, rowwise_data, columnwise_data, changed, row, col, rows, cols, mask,
                True, USAGE.square and USAGE.columnwise, BR, BC,
            )  # fmt: skip
        else:
            code = e4m3_words(x * scale, BR, BC)
            value = e4m3_word_values(code, BR, BC)
            _put_words(code, rowwise_data, changed, row, col, cols, BR, BC)
        if MASKED and USAGE.columnwise and not USAGE.square:
            _put_bytes(
                e4m3_code(x * column_scale[None, :], HARDWARE=False), rowwise_data,
                columnwise_data, None, row, col, rows, cols, mask, False, True, BR, BC,
            )  # fmt: skip
        if VARIANT.value_codec == "int8":
            _, inverse = unit_of_one(factor, 8)
            dither = element_hash(start, cols, constants.dither, BR, BC, LANES) * OF_MASTERS
            remainder = split_off(master, value, factor, inverse, dither, 8)
            store_remainder(pointers.value, start, cols, mask, remainder, BR, BC, LANES)
    if USAGE.columnwise and not MASKED:
        if USAGE.square:
            # The words of all parts, read back, because they would take registers in the loop.
            tl.debug_barrier()
            words_ptr = rowwise_data.to(tl.pointer_type(tl.uint32))
            words_ptr += tile_start(first_row, col // 4, cols // 4)
            words = tl.load(words_ptr + tile_offsets(cols // 4, 128, BC // 4))
        else:
            words = e4m3_words(
                tl.reshape(block, (128, BC)) * column_scale[None, :], 128, BC, HARDWARE=False
            )
        _store_column_words(words, columnwise_data, first_row, col, rows)


def step_tiles(shapes: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """The blocks of all tensors: whole blocks of aligned matrices, and blocks that need masks."""
    whole, masked = [], []
    for i, (rows, cols) in enumerate(shapes):
        tiles = tile_grid(i, (0, rows, BLOCK), (0, cols, BLOCK))
        inside = (tiles[:, 1] + BLOCK <= rows) & (tiles[:, 2] + BLOCK <= cols)
        # Unless rows and columns are multiples of 16, vector accesses would be unaligned.
        inside &= rows % 16 == 0 and cols % 16 == 0
        whole.append(tiles[inside])
        masked.append(tiles[~inside])
    return torch.cat(whole), torch.cat(masked)


class Form(NamedTuple):
    """A kernel of the step, the constexprs that only it has, its parts, and its register limit."""

    kernel: Any
    constexprs: dict[str, bool]
    tile: Tile
    registers: int | None


def decoded_part(
    two_dimensional: bool, masked: bool, value_codec: str, records: bool, sm: int
) -> Tile:
    """The parts of blocks whose masters are decoded from codes, as large as registers allow.

    The masters of the block take 64 of a thread. With remainders, parts of 32 rows are fastest on
    an H200; all other code takes more registers.
    """
    if masked or not two_dimensional:
        return Tile(8, BLOCK, 16, 8, 1)
    rows = 32 if sm == 90 and value_codec == "int8" and not records else 16
    return Tile(rows, BLOCK, BLOCK // rows, 8, 1)


def step_forms(
    two_dimensional: bool, codecs: tuple[str, str, str], records: bool, sm: int
) -> tuple[Form, Form]:
    """What updates whole blocks, and what those that need masks, for states in these codecs.

    ``sm``: The compute capability without its point.

    Whole blocks with one scale per 128 elements may have all registers: shared memory limits how
    many programs run at once.
    """
    narrow, registers = are_narrow(*codecs), max_registers(*codecs)
    if starts_from_codes(codecs[0]):
        return tuple(
            Form(
                _adam_step_decoded_kernel,
                {"MASKED": masked},
                decoded_part(two_dimensional, masked, codecs[0], records, sm),
                registers,
            )
            for masked in (False, True)
        )
    kernel = _adam_step_square_kernel if two_dimensional else _adam_step_vector_kernel
    parts = STEP_PART, MASKED_PARTS[two_dimensional, narrow]
    whole = Form(kernel, {"MASKED": False}, parts[0], registers if two_dimensional else 255)
    masked = Form(kernel, {"MASKED": True}, parts[1], registers)
    if two_dimensional and not narrow:
        masked = masked._replace(kernel=_adam_step_odd_square_kernel, constexprs={})
    return whole, masked


def adam_step(
    table: Tensor,
    scalars: Tensor,
    tiles: tuple[Tensor, ...],
    variant: Variant,
    usage: Usage,
    *,
    largest: float,
    force_pow_2_scales: bool,
    amax_epsilon: float,
) -> list[Launch]:
    """The launches of the pass over all tensors; call each with ``grad_scale, clip, found_inf``.

    ``tiles``: from :func:`step_tiles`. ``largest``: the largest finite number of the
    dtype that values are rounded to.
    """
    sm = compute_capability(table.device)
    forms = step_forms(usage.square, variant.codecs, usage.records, sm)
    return [
        Launch(
            form.kernel,
            part.shape[0],
            (table, scalars, part, amax_epsilon),
            dict(
                VARIANT=variant,
                USAGE=usage,
                LARGEST=largest,
                POW_2=force_pow_2_scales,
                **form.constexprs,
                BR=form.tile.rows,
                BC=form.tile.cols,
                STAGES=form.tile.num_stages,
            ),
            num_warps=form.tile.num_warps,
            maxnreg=form.registers,
        )
        for part, form in zip(tiles, forms, strict=True)
    ]


class StepLaunch(adam.StepLaunch):
    """One pass over Float8Block tensors."""

    def __init__(self, kind: Any, tensors: tuple) -> None:
        shapes, _, table, scalars = tensors
        updates, variant = update_scaled(table, scalars, shapes, kind.variant())
        tiles = tuple(part.to(table.device) for part in step_tiles(shapes))
        passes = adam_step(
            table,
            scalars,
            tiles,
            variant,
            kind.usage(),
            largest=torch.finfo(kind.write_dtype).max,
            force_pow_2_scales=kind.quantizer.force_pow_2_scales,
            amax_epsilon=kind.quantizer.amax_epsilon,
        )
        self._launches = [*updates, *passes]
