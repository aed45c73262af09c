"""The fused Adam step that writes MXFP4 weights."""

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
    load_scalars,
    state_lanes,
    state_pointers,
)
from fp4adam.kernels.launch.launch import Launch
from fp4adam.kernels.launch.tensor_table import (
    COLS,
    Tile,
    cover,
    load_tile,
    size,
    storage_pointers,
    takes_part,
    tile_start,
)
from fp4adam.kernels.mxfp4 import mxfp4_master, mxfp4_remainder, mxfp4_tile, store_tile
from fp4adam.kernels.plain_step import update_scaled
from fp4adam.kernels.tiles.bfloat16 import round_through
from fp4adam.kernels.tiles.remainder import load_remainder, store_remainder
from fp4adam.kernels.tiles.state import load_scale

# Whether the step flags the units of weights that it changes.
RECORDS_CHANGES = True
STEP_TILE, EDGE_TILE = Tile(32, 64, 1, 4, 1), Tile(32, 32, 1, 4, 1)


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _adam_step_kernel(
    grad_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    table,
    scalars,
    tiles,
    VARIANT: tl.constexpr,
    ROUNDING: tl.constexpr,
    RECORDS: tl.constexpr,
    BC: tl.constexpr,
):
    """Adam and re-quantization of one tile of one tensor; moves each byte once.

    Grid: (n_tiles,). Tile: [32, BC]. table: int64 [n_tensors, 19]. scalars: float32 [n, 12]. tiles:
    int32 [n_tiles, 4]. Reads gradient (2 bytes if BF16) and three FP32 tensors, writes these three,
    codes and scales: 26.5 + 1/32 bytes per element.
    """
    tensor, row, col = load_tile(tiles, 32)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    cols = size(table, tensor, COLS, 32)
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    pointers = state_pointers(table, tensor, VARIANT)
    storage = storage_pointers(table, tensor, tl.uint32, tl.uint8)
    start = tile_start(row, col, cols)
    VALUE: tl.constexpr = VARIANT.value_codec
    LANES: tl.constexpr = state_lanes(VARIANT)
    CAPS: tl.constexpr = ROUNDING == 0
    if VALUE == "int8":
        remainder = load_remainder(pointers.value, start, cols, None, 32, BC, LANES)
        value = mxfp4_master(storage, remainder, row, col, cols, CAPS, 32, BC)
        # All codes and scales of the tile are read before any is written.
        tl.debug_barrier()
        value, dither, _ = adam_master_tile(
            pointers, start, start, cols, None, value, constants, VARIANT, True, 32, BC
        )
    else:
        value = adam_step_tile(
            pointers, start, start, cols, None, constants, VARIANT, True, 32, BC,
            value_scale=load_scale(pointers.value_extra, start, cols, None, VALUE, 32, BC),
        )  # fmt: skip
    x = round_through(value, VARIANT.write_dtype)
    words, decoded, scale = mxfp4_tile(x, ROUNDING, 32, BC)
    if VALUE == "int8":
        remainder = mxfp4_remainder(value, decoded, scale, dither, CAPS, 32, BC)
        store_remainder(pointers.value, start, cols, None, remainder, 32, BC, LANES)
    store_tile(words, scale, row, col, cols, storage, RECORDS, 32, BC)


def step_registers(records: bool) -> int | None:
    """The register limit; that of the hardware keeps ptxas from spilling what flags take."""
    return 255 if records else None


def adam_step(
    table: Tensor,
    scalars: Tensor,
    tiles: tuple[Tensor, Tensor],
    variant: Variant,
    rounding: int,
    records: bool,
) -> list[Launch]:
    """The launches of the pass over all tensors; call each with ``grad_scale, clip, found_inf``.

    ``tiles``: the lists of STEP_TILE and of EDGE_TILE. ``records``: whether to flag changes.
    """
    return [
        Launch(
            _adam_step_kernel,
            listed.shape[0],
            (table, scalars, listed),
            dict(VARIANT=variant, ROUNDING=rounding, RECORDS=records, BC=tile.cols),
            num_warps=tile.num_warps,
            maxnreg=step_registers(records),
        )
        for listed, tile in zip(tiles, (STEP_TILE, EDGE_TILE), strict=True)
    ]


class StepLaunch(adam.StepLaunch):
    """One pass over MXFP4 tensors."""

    def __init__(self, kind: Any, tensors: tuple) -> None:
        shapes, _, table, scalars = tensors
        tiles = tuple(part.to(table.device) for part in cover(shapes, STEP_TILE, EDGE_TILE))
        updates, variant = update_scaled(table, scalars, shapes, kind.variant())
        rounding = kind.quantizer.layout.scale_rule.rounding
        passes = adam_step(table, scalars, tiles, variant, rounding, False)
        self._launches = [*updates, *passes]
