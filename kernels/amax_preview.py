"""The amax that weights are going to have after a step, found by looking at few of their tiles.

NVFP4 needs the largest magnitude of the *updated* tensor before its first block can be written. An
update moves no weight by more than a bound that the host knows, so only tiles whose magnitudes come
near the tensor's largest can hold the new one. These tiles are updated here, without storing. If
what they hold turns out below what any other tile could reach (a NaN took the largest weight), a
second launch looks at the others too, so the result is exact whatever happens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .adam import adam_step_tile, load_scalars, round_through, state_pointers
from .tensor_table import COLS, TRITON_DTYPES, size, tile_offsets, tile_start

# Tiles whose amax one program compares at once.
SCAN = 64
# What a program updates at once of a tile that it looks into.
PART = (32, 64)


@triton.jit
def _amax_preview_kernel(
    table,
    scalars,
    tiles,
    grad_scale_ptr,
    bounds,
    tile_amaxes,
    old_amaxes,
    amaxes,
    n_tiles,
    GRAD_DTYPE: tl.constexpr,
    WRITE_DTYPE: tl.constexpr,
    ADAM_W: tl.constexpr,
    AMSGRAD: tl.constexpr,
    REST: tl.constexpr,
    SCAN: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Raise the amax of each tensor to the largest magnitude that its tiles are going to hold.

    Grid: (cdiv(n_tiles, SCAN),). tiles: int32 [n_tiles, 4], (tensor, row, column, rows << 16 |
    columns). bounds: float32 [n_tensors, 2], the largest change of a weight (Inf if unknown) and
    the factor of its decay. tile_amaxes: float32 [n_tiles], old_amaxes: float32 [n_tensors], before
    the step. amaxes: float32 [n_tensors], zero at first.
    REST: look at the tiles that were left out, of tensors whose result does not exclude them.
    Reads 4 bytes per tile, and 14 per element of the tiles that are looked at (BF16 gradient).
    """
    index = tl.program_id(0) * SCAN + tl.arange(0, SCAN)
    inside = index < n_tiles
    tensors = tl.load(tiles + 4 * index, inside, 0)
    tile_amax = tl.load(tile_amaxes + index, inside, 0.0)
    largest_update = tl.load(bounds + 2 * tensors, inside, 0.0)
    decay = tl.load(bounds + 2 * tensors + 1, inside, 1.0)
    # A weight of this size decays and moves to at most `reach`; only above it can the new amax be.
    # Any threshold is right, since what it leaves out is checked; comparisons with NaN take all in.
    threshold = tl.load(old_amaxes + tensors, inside, 0.0) * 0.99999
    threshold -= tl.div_rn(2.0 * largest_update, decay)
    if REST:
        reach = round_through((threshold * decay + largest_update) * 1.0001, WRITE_DTYPE)
        found = tl.load(amaxes + tensors, inside, 0.0)
        wanted = (tile_amax < threshold) & ~(found >= reach)
    else:
        wanted = ~(tile_amax < threshold)

    left = tl.where(wanted & inside, index, 2147483647)
    for _ in range(tl.sum((wanted & inside).to(tl.int32))):
        chosen = tl.min(left)
        left = tl.where(left == chosen, 2147483647, left)
        tile = tiles + 4 * chosen
        tensor, first_row, col = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        extent = tl.load(tile + 3)
        height, width = extent >> 16, extent & 0xFFFF
        cols = size(table, tensor, COLS, 16)
        constants = load_scalars(scalars, tensor, grad_scale_ptr)
        pointers = state_pointers(table, tensor, GRAD_DTYPE, tl.float32)
        amax = tl.zeros((BR, BC), tl.float32)
        for done in range(0, height, BR):
            rows_left = height - done
            mask = (tl.arange(0, BR) < rows_left)[:, None] & (tl.arange(0, BC) < width)[None, :]
            value = adam_step_tile(
                pointers,
                tile_start(first_row + done, col, cols),
                tile_offsets(cols, BR, BC),
                mask,
                constants,
                tl.float32,
                ADAM_W,
                AMSGRAD,
                False,
            )
            magnitude = tl.abs(round_through(value, WRITE_DTYPE))
            # Also drops NaN, which no amax counts.
            amax = tl.where(mask & (magnitude > amax), magnitude, amax)
        # The bits of non-negative floats order as integers do: one atomic instead of two.
        bits = tl.max(tl.max(amax, 1), 0).to(tl.int32, bitcast=True)
        tl.atomic_max((amaxes + tensor).to(tl.pointer_type(tl.int32)), bits, sem="relaxed")


def preview_amax(
    table: Tensor,
    scalars: Tensor,
    tiles: Tensor,
    grad_scale: Tensor,
    bounds: Tensor,
    tile_amaxes: Tensor,
    old_amaxes: Tensor,
    amaxes: Tensor,
    *,
    grad_dtype: torch.dtype,
    write_dtype: torch.dtype,
    adam_w_mode: bool,
    amsgrad: bool,
) -> None:
    """Fill ``amaxes`` (zero before) with the amaxes that the step of all tensors will give."""
    n_tiles = tiles.shape[0]
    for rest in (False, True):
        _amax_preview_kernel[(triton.cdiv(n_tiles, SCAN),)](
            table,
            scalars,
            tiles,
            grad_scale,
            bounds,
            tile_amaxes,
            old_amaxes,
            amaxes,
            n_tiles,
            GRAD_DTYPE=TRITON_DTYPES[grad_dtype],
            WRITE_DTYPE=TRITON_DTYPES[write_dtype],
            ADAM_W=adam_w_mode,
            AMSGRAD=amsgrad,
            REST=rest,
            SCAN=SCAN,
            BR=PART[0],
            BC=PART[1],
            num_warps=4,
            enable_fp_fusion=False,
        )
