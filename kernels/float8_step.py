"""The fused Adam step that writes Float8 weights, with current or delayed scaling."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels import adam, amax_preview
from fp4adam.kernels.adam import (
    SIGNALS,
    Variant,
    adam_master_tile,
    adam_step_tile,
    load_scalars,
    state_lanes,
    state_pointers,
)
from fp4adam.kernels.amax_preview import previewed_amax, report_amax, report_completed
from fp4adam.kernels.float8 import float8_master, float8_tile, store_columnwise, tensor_scale
from fp4adam.kernels.launch.launch import Launch
from fp4adam.kernels.launch.tensor_table import (
    AMAX,
    AMAX_HISTORY,
    BAND,
    COLS,
    ROWS,
    Tile,
    cover,
    load_tile,
    pointer,
    size,
    storage_pointers,
    takes_part,
    tile_start,
)
from fp4adam.kernels.plain_step import update_scaled
from fp4adam.kernels.tiles.bfloat16 import round_through
from fp4adam.kernels.tiles.e4m3 import e4m3_word_values
from fp4adam.kernels.tiles.remainder import (
    load_remainder,
    split_off,
    store_remainder,
    unit_of_one,
)
from fp4adam.kernels.tiles.state import has_scales, load_scale_words, max_registers
from fp4adam.kernels.tiles.words import insert_tile

# Tiles of the fused step. The loop prefetches the next tile; the edges of a matrix are covered by
# small tiles, with few warps, so that many of them wait for memory at once.
STEP_TILE = Tile(16, 64, 4, 4, 3)
EDGE_TILE = {False: Tile(16, 16, 1, 1, 1), True: Tile(16, 32, 1, 2, 1)}  # by scaled_states


@triton.jit
def _update_tiles(
    table,
    tensor,
    first_row,
    col,
    scale,
    stored_scale,
    constants,
    VARIANT: tl.constexpr,
    USAGE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    LOOP: tl.constexpr,
    STAGES: tl.constexpr,
    SATURATES: tl.constexpr = False,
):
    """Adam and re-quantization of LOOP tiles [BR, BC] down the rows.

    scale: float32, the encode scale. stored_scale: that of the stored codes, which masters with
    remainders are completed from. constants: from ``load_scalars``. SATURATES: as for
    :func:`split_off`. Returns the amax of the tiles,
    and of such masters the largest ratio as ``report_completed`` takes it.
    """
    rows = size(table, tensor, ROWS, 16)
    cols = size(table, tensor, COLS, 16)
    pointers = state_pointers(table, tensor, VARIANT)
    storage = storage_pointers(table, tensor, tl.uint32, tl.uint8)
    # Reduced over each thread's four neighbours, the maximum takes a quarter of the registers.
    largest = tl.zeros((BR, BC // 4), tl.float32)
    # The tiles of the loop are transposed together, because one alone gives rows of only 16 bytes.
    column_words = tl.zeros((LOOP, BR, BC // 4), tl.uint32)
    first = tile_start(first_row, col, cols)
    VALUE: tl.constexpr = VARIANT.value_codec
    COMPLETES: tl.constexpr = VALUE == "int8"
    LANES: tl.constexpr = state_lanes(VARIANT)
    value_scales = load_scale_words(pointers.value_extra, first, cols, VALUE, LOOP, BR, BC)
    # Reduced over each thread's neighbours, which takes fewer registers.
    ratio = tl.full((BR, BC // LANES), -0x7FFFFFFF, tl.int32)
    factor = tl.div_rn(1.0, scale)
    _, inverse = unit_of_one(factor, 8)
    # Counted apart from ``i``, which the loop is ahead with when it prefetches.
    row = first_row
    for i in tl.range(0, LOOP, num_stages=STAGES):
        start, target = tile_start(first_row + i * BR, col, cols), tile_start(row, col, cols)
        if COMPLETES:
            remainder = load_remainder(pointers.value, start, cols, None, BR, BC, LANES)
            master = float8_master(storage, remainder, row, col, cols, stored_scale, BR, BC, LANES)
            # All codes of the tile are read before any is written.
            tl.debug_barrier()
            value, dither, new_ratio = adam_master_tile(
                pointers, start, target, cols, None, master, constants, VARIANT, True, BR, BC
            )
            new_ratio = tl.max(tl.reshape(new_ratio, (BR, BC // LANES, LANES)), 2)
            ratio = tl.maximum(ratio, new_ratio)
        else:
            value = adam_step_tile(
                pointers, start, target, cols, None, constants, VARIANT, True, BR, BC,
                value_scale=((value_scales >> (8 * i)) & 0xFF).to(tl.uint8),
            )  # fmt: skip
        x = round_through(value, VARIANT.write_dtype)
        magnitude = tl.reshape(tl.where(x == x, tl.abs(x), 0.0), (BR, BC // 4, 4))
        largest = tl.maximum(largest, tl.max(magnitude, 2))
        words = float8_tile(x, scale, row, col, cols, storage, USAGE, BR, BC)
        if COMPLETES:
            remainder = split_off(
                value, e4m3_word_values(words, BR, BC), factor, inverse, dither, 8, SATURATES
            )
            store_remainder(pointers.value, target, cols, None, remainder, BR, BC, LANES)
        if USAGE.columnwise:
            column_words = insert_tile(column_words, words, i)
        row += BR
    if USAGE.columnwise:
        words = tl.reshape(column_words, (LOOP * BR, BC // 4))
        store_columnwise(words, first_row, col, rows, storage, LOOP * BR, BC)
    return tl.max(tl.max(largest, 1), 0), tl.max(tl.max(ratio, 1), 0)


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _current_step_kernel(
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
    tile_ratios,
    stored_amaxes,
    epsilon,
    VARIANT: tl.constexpr,
    USAGE: tl.constexpr,
    POW_2: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    LOOP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adam and re-quantization of one column of tiles of one tensor; moves each byte once.

    Grid: (n_tiles,). Tile: LOOP times [BR, BC] down the rows. Tables and amaxes as in
    ``nvfp4_step``. Reads gradient (2 bytes if BF16) and three FP32 tensors, writes these three and
    the codes: 28 bytes per element with both directions.
    """
    tensor, first_row, col = load_tile(tiles, 16)
    is_first = (first_row == 0) & (col == 0)
    if is_first:
        # Even without a gradient: the next preview raises every slot from zero.
        tl.store(next_amaxes + tl.load(slots + tensor), 0.0)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    amax = previewed_amax(table, tensor, slots, amaxes, is_first)
    scale = tensor_scale(amax, epsilon, POW_2)
    COMPLETES: tl.constexpr = VARIANT.value_codec == "int8"
    stored_scale = scale
    if COMPLETES:
        stored_scale = tensor_scale(tl.load(stored_amaxes + tensor), epsilon, POW_2)
    tile_amax, ratio = _update_tiles(
        table, tensor, first_row, col, scale, stored_scale, constants, VARIANT, USAGE, BR, BC, LOOP,
        STAGES,
    )  # fmt: skip
    if COMPLETES:
        report_completed(tile_amax, ratio, amax, tile_amaxes, tile_ratios, VARIANT.write_dtype)
    else:
        report_amax(tile_amax, amax, tensor, slots, tile_amaxes, exceeding, VARIANT.write_dtype)


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _delayed_amax_kernel(
    grad_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    table,
    stored_amaxes,
    factor,
    IS_MAX: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take the amax of each tensor from its history, and make room there for the next one.

    Grid: (n_tensors,). table: int64 [n_tensors, 19]. factor: 2**margin. LENGTH: entries of a
    history; BLOCK: the power of two above. The entries move down by one, the first becomes the
    last; entry 0 is set to zero, for the pass to raise. stored_amaxes: float32 [n_tensors], set to
    the amaxes of the stored codes; or None.
    """
    tensor = tl.program_id(0)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    history = pointer(table, tensor, AMAX_HISTORY, tl.float32)
    index = tl.arange(0, BLOCK)
    inside = index < LENGTH
    entries = tl.load(history + index, inside, 0.0)
    known = tl.max(entries, 0) if IS_MAX else tl.load(history)
    known = known * factor
    amax_ptr = pointer(table, tensor, AMAX, tl.float32)
    if stored_amaxes is not None:
        tl.store(stored_amaxes + tensor, tl.load(amax_ptr))
    if (known > 0) & (known < float("inf")):
        tl.store(amax_ptr, known)
    # A barrier, because threads write entries that others read.
    tl.debug_barrier()
    target = tl.where(index == 0, LENGTH - 1, index - 1)
    tl.store(history + target, tl.where(target == 0, 0.0, entries), inside)


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _delayed_step_kernel(
    grad_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    table,
    scalars,
    tiles,
    stored_amaxes,
    VARIANT: tl.constexpr,
    USAGE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    LOOP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Like the kernel above, with the scale of the stored amax; raises entry 0 of the history.

    stored_amaxes: float32 [n_tensors], of the codes before the step.
    """
    tensor, first_row, col = load_tile(tiles, 16)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    scale = tensor_scale(tl.load(pointer(table, tensor, AMAX, tl.float32)), 0.0, False)
    stored_scale = scale
    if VARIANT.value_codec == "int8":
        stored_scale = tensor_scale(tl.load(stored_amaxes + tensor), 0.0, False)
    tile_amax, _ = _update_tiles(
        table, tensor, first_row, col, scale, stored_scale, constants, VARIANT, USAGE, BR, BC, LOOP,
        STAGES, SATURATES=True,
    )  # fmt: skip
    # The bits of non-negative floats order as integers do.
    latest = pointer(table, tensor, AMAX_HISTORY, tl.int32)
    tl.atomic_max(latest, tile_amax.to(tl.int32, bitcast=True), sem="relaxed")


def step_tiles(shapes: list[tuple[int, int]], scaled_states: bool) -> tuple[Tensor, int]:
    """Tiles of a pass, those of STEP_TILE first, and the number of those.

    ``scaled_states``: Whether states have scales; columns must be multiples of 32 then.

    Returns:
        int32 [n_tiles, 4], (tensor, first row, first column, rows << 16 | columns), and a count.
    """
    forms = STEP_TILE, EDGE_TILE[scaled_states]
    whole, edge = cover(shapes, *forms, BAND)
    for tiles, tile in zip((whole, edge), forms, strict=True):
        tiles[:, 3] = (tile.rows * tile.loop) << 16 | tile.cols
    return torch.cat((whole, edge)), len(whole)


def _passes(
    kernel: Any,
    tensors: tuple,
    n_tiles: int,
    n_whole: int,
    variant: Variant,
    of_tiles: Callable[[slice], tuple],
    constexprs: dict[str, Any],
) -> list[Launch]:
    """The launches over large tiles and over tiles at edges."""
    forms = STEP_TILE, EDGE_TILE[has_scales(*variant.codecs) or variant.is_updated]
    parts = slice(0, n_whole), slice(n_whole, n_tiles)
    return [
        Launch(
            kernel,
            part.stop - part.start,
            (*tensors, *of_tiles(part)),
            dict(
                VARIANT=variant,
                **constexprs,
                BR=tile.rows,
                BC=tile.cols,
                LOOP=tile.loop,
                STAGES=tile.num_stages,
            ),
            num_warps=tile.num_warps,
            maxnreg=max_registers(*variant.codecs),
        )
        for part, tile in zip(parts, forms, strict=True)
    ]


class CurrentStepLaunch(amax_preview.StepLaunch):
    """A preview of the tiles that can hold the new amaxes, then one pass over Float8 tensors."""

    def tiles(self, kind: Any, shapes: list[tuple[int, int]]) -> tuple[Tensor, int]:
        return step_tiles(shapes, kind.has_scaled_states)

    def passes(self, kind: Any, variant: Variant, *tensors: Any) -> list[Launch]:
        (
            table, scalars, tiles, n_whole, slots, amaxes, next_amaxes, tile_amaxes, exceeding,
            tile_ratios, stored_amaxes,
        ) = tensors  # fmt: skip
        rule = kind.quantizer.layout.scale_rule
        epsilon = rule.amax_epsilon
        return _passes(
            _current_step_kernel,
            (table, scalars),
            len(tiles),
            n_whole,
            variant,
            lambda part: (
                tiles[part], slots, amaxes, next_amaxes, tile_amaxes[part], exceeding,
                tile_ratios[part], stored_amaxes, epsilon
            ),
            dict(USAGE=kind.usage(), POW_2=rule.force_pow_2_scales),
        )  # fmt: skip


class DelayedStepLaunch(adam.StepLaunch):
    """The amaxes of all histories, then one pass over Float8 tensors."""

    def __init__(self, kind: Any, tensors: tuple) -> None:
        shapes, _, table, scalars = tensors
        tiles, n_whole = step_tiles(shapes, kind.has_scaled_states)
        tiles = tiles.to(table.device)
        quantizer = kind.quantizer
        updates, variant = update_scaled(table, scalars, shapes, kind.variant())
        stored_amaxes = torch.zeros(len(shapes), dtype=torch.float32, device=table.device)
        self._launches = [
            delayed_amaxes(table, quantizer, stored_amaxes),
            *updates,
            *_passes(
                _delayed_step_kernel,
                (table, scalars),
                len(tiles),
                n_whole,
                variant,
                lambda part: (tiles[part], stored_amaxes),
                dict(USAGE=kind.usage()),
            ),
        ]


def delayed_amaxes(table: Tensor, quantizer: Any, stored_amaxes: Tensor | None = None) -> Launch:
    """The launch that takes amaxes from histories; call with ``grad_scale, clip, found_inf``.

    ``stored_amaxes``: float32 [n_tensors], set to the amaxes before.
    """
    length = quantizer.amax_history_len
    return Launch(
        _delayed_amax_kernel,
        table.shape[0],
        (table, stored_amaxes, 2.0**quantizer.margin),
        dict(
            IS_MAX=quantizer.amax_compute_algo == "max",
            LENGTH=length,
            BLOCK=triton.next_power_of_2(length),
        ),
        num_warps=4,
    )


def StepLaunch(kind: Any, tensors: tuple) -> adam.StepLaunch:
    """The step of Float8 tensors; arguments as for ``adam.StepLaunch``."""
    is_delayed = kind.quantizer.layout.tensor_scale == "delayed"
    launch = DelayedStepLaunch if is_delayed else CurrentStepLaunch
    return launch(kind, tensors)
