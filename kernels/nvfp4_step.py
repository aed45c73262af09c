"""The fused Adam step that writes NVFP4 weights."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels import amax_preview
from fp4adam.kernels.adam import (
    SIGNALS,
    Variant,
    adam_master_tile,
    adam_step_tile,
    lanes_of_states,
    load_scalars,
    state_lanes,
    state_pointers,
)
from fp4adam.kernels.amax_preview import previewed_amax, report_amax, report_completed
from fp4adam.kernels.launch.launch import Launch, compute_capability
from fp4adam.kernels.launch.tensor_table import (
    BAND,
    COLS,
    ROWS,
    Tile,
    Usage,
    cover,
    gemm_scale_pointers,
    load_tile,
    size,
    storage_pointers,
    takes_part,
    tile_start,
)
from fp4adam.kernels.nvfp4 import (
    nvfp4_master,
    nvfp4_tile,
    store_columnwise,
    store_square,
    store_square_scales,
)
from fp4adam.kernels.tiles.bfloat16 import round_through
from fp4adam.kernels.tiles.remainder import load_remainder, store_remainder
from fp4adam.kernels.tiles.state import are_narrow, has_scales, load_scale_words, max_registers
from fp4adam.kernels.tiles.words import insert_tile

# Whether the step flags the units of weights that it changes.
RECORDS_CHANGES = True
# Tiles of the fused step. The loop prefetches the next tile; the edges of a matrix are covered by
# small tiles, with few warps, so that many of them wait for memory at once.
STEP_TILE = {True: Tile(16, 64, 4, 4, 4), False: Tile(16, 64, 4, 4, 3)}  # by two_dimensional
# Of adaptive scales of 16 elements: one warp, whose threads each have one block, so that none of
# its numbers is computed twice. Narrow states leave too few registers for this.
ADAPTIVE_TILE = Tile(16, 32, 4, 1, 3)
EDGE_TILE = {False: Tile(16, 16, 1, 1, 1), True: Tile(16, 32, 1, 2, 1)}  # by scaled_states


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
    tile_ratios,
    stored_amaxes,
    VARIANT: tl.constexpr,
    USAGE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    LOOP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adam and re-quantization of one column of tiles of one tensor; moves each byte once.

    Grid: (n_tiles,). Tile: LOOP times [BR, BC] down the rows. table: int64 [n_tensors, 19].
    scalars: float32 [n, 12]. tiles: int32 [n_tiles, 4]. slots: int32 [n_tensors], the amax slot of
    each tensor; several may share one. amaxes: float32 [n_slots], of the updated weights.
    next_amaxes: float32 [n_slots] for the next step, set to zero. tile_amaxes: float32 [n_tiles],
    written; an upper bound of each tile's magnitudes. exceeding: float32 [n_slots], raised to the
    true amax of a tensor if that exceeds its entry in amaxes. tile_ratios, stored_amaxes: of
    masters with remainders, as in ``amax_preview``; the former are written.
    Reads gradient (2 bytes if BF16) and three FP32 tensors, writes these three and the codes: 27
    bytes per element with both directions, plus 1/256 for the scales of 16x16 blocks, plus 1/8 if
    USAGE.swizzled.
    """
    tensor, first_row, col = load_tile(tiles, 16)
    first_of_tensor = (first_row == 0) & (col == 0)
    if first_of_tensor:
        # Even without a gradient: the next preview raises every slot from zero.
        tl.store(next_amaxes + tl.load(slots + tensor), 0.0)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    rows = size(table, tensor, ROWS, 16)
    cols = size(table, tensor, COLS, 16)
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    pointers = state_pointers(table, tensor, VARIANT)
    # The preview has found it already, so no program has to wait for another.
    amax = previewed_amax(table, tensor, slots, amaxes, first_of_tensor)
    # One running maximum per block amax of a tile; one per weight would take more registers.
    SCALE_ROWS: tl.constexpr = BR if USAGE.rowwise and not USAGE.square else BR // 16
    SCALE_COLS: tl.constexpr = BC if not (USAGE.rowwise or USAGE.square) else BC // 16
    largest = tl.zeros((SCALE_ROWS, SCALE_COLS), tl.float32)
    # Square blocks that remainders complete are stored after the loop. Until then all of them can
    # be read, and prefetched, which a barrier in the loop would prevent.
    VALUE: tl.constexpr = VARIANT.value_codec
    COMPLETES: tl.constexpr = VALUE == "int8"
    STORES_LATER: tl.constexpr = COMPLETES and USAGE.square
    # The tiles of the loop are transposed together, because one alone gives rows of only 8 bytes.
    kept_words = tl.zeros((LOOP, BR, BC // 8), tl.uint32)
    # Scales that are stored after the loop; each byte of a word holds those of one tile.
    KEEPS_SCALE: tl.constexpr = USAGE.swizzled or STORES_LATER if USAGE.square else USAGE.columnwise
    kept_scale = tl.zeros((BR // 16, BC // 16 if USAGE.square else BC), tl.uint32)
    storage = storage_pointers(table, tensor, tl.uint32, tl.uint8)
    gemm_scales = gemm_scale_pointers(table, tensor)
    first = tile_start(first_row, col, cols)
    LANES: tl.constexpr = state_lanes(VARIANT)
    value_scales = load_scale_words(pointers.value_extra, first, cols, VALUE, LOOP, BR, BC)
    # Reduced over each thread's neighbours, which takes fewer registers.
    ratio = tl.full((BR, BC // LANES), -0x7FFFFFFF, tl.int32)
    stored_amax = tl.load(stored_amaxes + tensor) if COMPLETES else amax
    # Counted apart from ``i``, which the loop is ahead with when it prefetches.
    row = first_row
    for i in tl.range(0, LOOP, num_stages=STAGES):
        start, target = tile_start(first_row + i * BR, col, cols), tile_start(row, col, cols)
        master, dither = None, None
        if COMPLETES:
            remainder = load_remainder(pointers.value, start, cols, None, BR, BC, LANES)
            master = nvfp4_master(
                storage, remainder, row, col, cols, stored_amax, USAGE, BR, BC, LANES
            )
            if not STORES_LATER:
                # All codes and scales of the tile are read before any is written.
                tl.debug_barrier()
            master, dither, new_ratio = adam_master_tile(
                pointers, start, target, cols, None, master, constants, VARIANT, True, BR, BC
            )
            new_ratio = tl.max(tl.reshape(new_ratio, (BR, BC // LANES, LANES)), 2)
            value, ratio = master, tl.maximum(ratio, new_ratio)
        else:
            value = adam_step_tile(
                pointers, start, target, cols, None, constants, VARIANT, True, BR, BC,
                value_scale=((value_scales >> (8 * i)) & 0xFF).to(tl.uint8),
            )  # fmt: skip
        x = round_through(value, VARIANT.write_dtype)
        block_amax, words, scale, remainder = nvfp4_tile(
            x, amax, row, col, cols, storage, gemm_scales, USAGE, BR, BC, master, dither
        )
        if COMPLETES:
            store_remainder(pointers.value, target, cols, None, remainder, BR, BC, LANES)
        largest = tl.maximum(largest, block_amax)
        if USAGE.columnwise or STORES_LATER:
            kept_words = insert_tile(kept_words, words, i)
        if KEEPS_SCALE:
            kept_scale |= scale.to(tl.uint32) << (8 * i)
        row += BR
    # Pointers that are needed from here on are loaded again, to take no registers in the loop.
    storage = storage_pointers(table, tensor, tl.uint32, tl.uint8)
    gemm_scales = gemm_scale_pointers(table, tensor)
    tl.static_assert(LOOP <= 4)
    kept_scale = kept_scale[None, :, :] >> (8 * tl.arange(0, LOOP))[:, None, None]
    kept_scale = (kept_scale & 0xFF).to(tl.uint8)
    kept_scale = tl.reshape(kept_scale, (LOOP * BR // 16, kept_scale.shape[2]))
    kept_words = tl.reshape(kept_words, (LOOP * BR, BC // 8))
    if STORES_LATER:
        tl.debug_barrier()
        store_square(kept_words, kept_scale, first_row, col, cols, storage, USAGE, LOOP * BR, BC)
    if USAGE.columnwise:
        store_columnwise(
            kept_words, kept_scale, first_row, col, rows, storage, gemm_scales, USAGE,
            LOOP * BR, BC,
        )  # fmt: skip
    if USAGE.square and USAGE.swizzled:
        store_square_scales(
            kept_scale, first_row, col, rows, cols, gemm_scales, USAGE, LOOP * BR, BC
        )
    tile_amax = tl.max(tl.max(largest, 1), 0)
    if COMPLETES:
        tile_ratio = tl.max(tl.max(ratio, 1), 0)
        report_completed(tile_amax, tile_ratio, amax, tile_amaxes, tile_ratios, VARIANT.write_dtype)
    else:
        report_amax(tile_amax, amax, tensor, slots, tile_amaxes, exceeding, VARIANT.write_dtype)


def step_tiles(shapes: list[tuple[int, int]], large: Tile, small: Tile) -> tuple[Tensor, int]:
    """Tiles for :func:`adam_step`, the large ones first, and the number of those.

    ``large``, ``small``: as :func:`cover` takes them, from :func:`step_forms`.

    Returns:
        int32 [n_tiles, 4], (tensor, first row, first column, rows << 16 | columns), and a count.
    """
    forms = large, small
    whole, edge = cover(shapes, *forms, BAND)
    for tiles, tile in zip((whole, edge), forms, strict=True):
        tiles[:, 3] = (tile.rows * tile.loop) << 16 | tile.cols
    return torch.cat((whole, edge)), len(whole)


def step_forms(variant: Variant, usage: Usage) -> tuple[Tile, Tile]:
    """The tile for most of a matrix, and that for its edges.

    They have the shapes that the preview's variant gives them, in a pass after the update, too.
    """
    scaled = has_scales(*variant.codecs) or variant.is_updated
    narrow = are_narrow(*variant.codecs) or scaled
    large = STEP_TILE[usage.square]
    if not usage.square and usage.adaptive is not None:
        large = large._replace(num_stages=2) if narrow else ADAPTIVE_TILE
    elif not usage.square and narrow and not scaled:
        # Two stages take 128 registers instead of 168, for which ptxas spills a few on sm_100.
        large = large._replace(num_stages=2)
    if usage.square and usage.adaptive is None:
        # With two warps, more elements per thread repeat less of what a block has in common.
        if lanes_of_states(variant) == 8:
            large = large._replace(num_warps=2, num_stages=3)
        elif variant.is_updated:
            large = large._replace(num_warps=2)
    return large, EDGE_TILE[scaled]


def step_registers(
    codecs: tuple[str, str, str], usage: Usage, sm: int
) -> tuple[int | None, int | None]:
    """The register limits per thread of STEP_TILE and of edge tiles; None leaves it to ptxas.

    With up to 128 registers, four programs fit on each multiprocessor of an H200; with 168, three.
    States in BF16 are faster with four if scales are square. Others take what ptxas gives them.

    ``sm``: The compute capability without its point.
    """
    narrow, scaled, edge = are_narrow(*codecs), has_scales(*codecs), max_registers(*codecs)
    if usage.adaptive is not None:
        return None if usage.square and not narrow else 255, edge
    if codecs[0] == "int8" or usage.records:
        return 255, edge
    if narrow and not scaled:
        return 128 if usage.square and sm == 90 else 168, edge
    return None, edge


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
    tile_ratios: Tensor,
    stored_amaxes: Tensor,
    variant: Variant,
    usage: Usage,
) -> list[Launch]:
    """The launches of the pass over all tensors; call each with ``grad_scale, clip, found_inf``.

    ``tiles``, ``n_whole``: from :func:`step_tiles`. ``slots``: int32 [n_tensors], the amax slot of
    each tensor. ``amaxes``: float32 [n_slots] of the updated weights, from ``amax_preview``.
    ``next_amaxes``: float32 [n_slots], zeroed. ``tile_amaxes``: float32 [n_tiles], written.
    ``exceeding``: float32 [n_slots], zero before; raised for tensors that must be written again.
    ``tile_ratios``, ``stored_amaxes``: as in ``amax_preview``.
    """
    forms = step_forms(variant, usage)
    parts = slice(0, n_whole), slice(n_whole, tiles.shape[0])
    most = step_registers(variant.codecs, usage, compute_capability(table.device))
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
                tile_ratios[part],
                stored_amaxes,
            ),
            dict(
                VARIANT=variant,
                USAGE=usage,
                BR=tile.rows,
                BC=tile.cols,
                LOOP=tile.loop,
                STAGES=tile.num_stages,
            ),
            num_warps=tile.num_warps,
            maxnreg=registers,
        )
        for part, tile, registers in zip(parts, forms, most, strict=True)
    ]


class StepLaunch(amax_preview.StepLaunch):
    """A preview of the tiles that can hold the new amaxes, then one pass over NVFP4 tensors."""

    def tiles(self, kind: Any, shapes: list[tuple[int, int]]) -> tuple[Tensor, int]:
        return step_tiles(shapes, *step_forms(kind.variant(), kind.usage()))

    def passes(self, kind: Any, variant: Variant, *tensors: Any) -> list[Launch]:
        return adam_step(*tensors, variant, kind.usage())
