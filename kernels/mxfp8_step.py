"""The fused Adam step that writes MXFP8 weights."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels import adam
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
from fp4adam.kernels.launch.launch import Launch
from fp4adam.kernels.launch.tensor_table import (
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
from fp4adam.kernels.mxfp8 import (
    mxfp8_master,
    mxfp8_remainder,
    mxfp8_tile,
    store_gemm_scales,
    store_tile,
)
from fp4adam.kernels.plain_step import update_scaled
from fp4adam.kernels.tiles.bfloat16 import round_through
from fp4adam.kernels.tiles.remainder import load_remainder, store_remainder
from fp4adam.kernels.tiles.state import are_narrow, has_scales, load_scale, starts_from_codes
from fp4adam.kernels.tiles.words import insert_tile

# Whether the step flags the units of weights that it changes.
RECORDS_CHANGES = True
# Tiles of the fused step, and the columns of the parts that they are processed in. Edges are
# covered by single blocks. Encoding states in BF16 needs registers, hence smaller parts.
STEP_TILE, STEP_PART = Tile(32, 256, 1, 4, 3), {False: 64, True: 32}  # by encodes_states()
EDGE_TILE, EDGE_PART = Tile(32, 32, 1, 4, 1), 32
# Without a limit, ptxas saves registers for edge tiles and spills. There are few edge tiles, so
# their occupancy does not matter.
EDGE_REGISTERS = 128


@triton.jit
def _side_by_side(tiles):
    """Concatenate tiles [n, R, C] along their columns to one [R, n * C]."""
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
    VARIANT: tl.constexpr,
    USAGE: tl.constexpr,
    BC: tl.constexpr,
    PART: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adam and re-quantization of one tile of one tensor; moves each byte once.

    Grid: (n_tiles,). Tile: [32, BC] in parts of [32, PART], whose codes and scales are kept and
    stored together. table: int64 [n_tensors, 19]. scalars: float32 [n, 12]. tiles: int32
    [n_tiles, 4].
    Reads gradient (2 bytes if BF16) and three FP32 tensors, writes these three, codes and scales:
    28 + 1/16 bytes per element with both directions, 27 + 1/1024 with square blocks; 1/16 more if
    USAGE.swizzled.
    """
    tensor, row, first_col = load_tile(tiles, 32)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    cols = size(table, tensor, COLS, 32)
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    pointers = state_pointers(table, tensor, VARIANT)
    storage = storage_pointers(table, tensor, tl.uint32, tl.uint8)
    # The update takes registers for one part only. Codes and scales of all parts wait in words, so
    # that whole rows of the tile are written as long segments.
    PARTS: tl.constexpr = BC // PART
    row_words = tl.zeros((PARTS, 32, PART // 4), tl.uint32)
    row_scale = tl.zeros((PARTS, 32, PART // 32), tl.uint8)
    column_words = tl.zeros((PARTS, 32, PART // 4), tl.uint32)
    column_scale = tl.zeros((PARTS, 1, PART), tl.uint8)
    # Counted apart from ``i``, which the loop is ahead with when it prefetches.
    col = first_col
    first = tile_start(row, col, cols)
    VALUE: tl.constexpr = VARIANT.value_codec
    FROM_CODES: tl.constexpr = starts_from_codes(VALUE)
    LANES: tl.constexpr = state_lanes(VARIANT)
    next_scale = load_scale(pointers.value_extra, first, cols, None, VALUE, 32, PART)
    for i in tl.range(0, PARTS, num_stages=STAGES):
        start, target = tile_start(row, first_col + i * PART, cols), tile_start(row, col, cols)
        value_scale, col = next_scale, col + PART
        # Single bytes cannot be prefetched. After the last part, these are the first one's again.
        after = first if col == first_col + BC else target + PART
        next_scale = load_scale(pointers.value_extra, after, cols, None, VALUE, 32, PART)
        if FROM_CODES:
            remainder = None
            if VALUE == "int8":
                remainder = load_remainder(pointers.value, start, cols, None, 32, PART, LANES)
            value = mxfp8_master(
                storage, remainder, row, col - PART, cols, USAGE.square, PART, LANES
            )
            value, dither, _ = adam_master_tile(
                pointers, start, target, cols, None, value, constants, VARIANT, True, 32, PART
            )
        else:
            value = adam_step_tile(
                pointers, start, target, cols, None, constants, VARIANT, True, 32, PART,
                value_scale=value_scale,
            )  # fmt: skip
        x = round_through(value, VARIANT.write_dtype)
        words, scale, words_of_columns, scale_of_columns = mxfp8_tile(x, USAGE, PART, True)
        if VALUE == "int8":
            remainder = mxfp8_remainder(value, words, scale, dither, PART)
            store_remainder(pointers.value, target, cols, None, remainder, 32, PART, LANES)
        row_words = insert_tile(row_words, words, i)
        row_scale = insert_tile(row_scale, scale, i)
        column_words = insert_tile(column_words, words_of_columns, i)
        column_scale = insert_tile(column_scale, scale_of_columns, i)
    if FROM_CODES:
        # All codes and scales of the tile are read before any is written.
        tl.debug_barrier()
    row_scale, column_scale = _side_by_side(row_scale), _side_by_side(column_scale)
    row_words, column_words = _side_by_side(row_words), _side_by_side(column_words)
    store_tile(
        row_words, row_scale, column_words, column_scale, row, first_col, cols, storage, USAGE, BC
    )
    if USAGE.swizzled:
        rows = size(table, tensor, ROWS, 32)
        gemm_scales = gemm_scale_pointers(table, tensor)
        store_gemm_scales(
            row_scale, column_scale, row, first_col, rows, cols, gemm_scales, USAGE, BC
        )


def step_tiles(shapes: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """The tile lists for :func:`adam_step`: of STEP_TILE and, at the edges, of EDGE_TILE."""
    return cover(shapes, STEP_TILE, EDGE_TILE)


def encodes_states(codecs: tuple[str, str, str]) -> bool:
    """Whether the pass encodes narrow states; those with scales are updated before it."""
    return are_narrow(*codecs) and not has_scales(*codecs)


def step_part(variant: Variant) -> int:
    """The columns of the parts of STEP_TILE."""
    completes = starts_from_codes(variant.value_codec) and lanes_of_states(variant) < 8
    return STEP_PART[completes or encodes_states(variant.codecs)]


def step_registers(codecs: tuple[str, str, str]) -> int | None:
    """The register limit per thread of STEP_TILE; None leaves it to ptxas."""
    # ptxas aims for 168 with states in BF16, and for sm_120 spills unless a limit is given.
    return 168 if encodes_states(codecs) else None


def adam_step(
    table: Tensor, scalars: Tensor, tiles: tuple[Tensor, Tensor], variant: Variant, usage: Usage
) -> list[Launch]:
    """The launches of the pass over all tensors; call each with ``grad_scale, clip, found_inf``.

    ``tiles``: from :func:`step_tiles`.
    """
    part = step_part(variant)
    registers = 255 if usage.records else step_registers(variant.codecs)
    forms = (
        (STEP_TILE, part, registers),
        (EDGE_TILE, EDGE_PART, EDGE_REGISTERS),
    )
    return [
        Launch(
            _adam_step_kernel,
            listed.shape[0],
            (table, scalars, listed),
            dict(VARIANT=variant, USAGE=usage, BC=tile.cols, PART=part, STAGES=tile.num_stages),
            num_warps=tile.num_warps,
            maxnreg=registers,
        )
        for listed, (tile, part, registers) in zip(tiles, forms, strict=True)
    ]


class StepLaunch(adam.StepLaunch):
    """One pass over MXFP8 tensors."""

    def __init__(self, kind: Any, tensors: tuple) -> None:
        shapes, _, table, scalars = tensors
        tiles = tuple(part.to(table.device) for part in step_tiles(shapes))
        updates, variant = update_scaled(table, scalars, shapes, kind.variant())
        self._launches = [*updates, *adam_step(table, scalars, tiles, variant, kind.usage())]
