"""The amax that weights are going to have after a step, found by looking at few of their tiles.

NVFP4 needs the largest magnitude of the *updated* tensor before its first block can be written. An
update moves no weight by more than a bound that the host knows, so only tiles whose magnitudes come
near the tensor's largest can hold the new one. These tiles are updated here, without storing. If
what they hold turns out below what any other tile could reach (a NaN took the largest weight), the
program that finishes last looks at the others too, so the result is exact whatever happens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import Launch
from .adam import (
    LARGEST_DECAY,
    LARGEST_UPDATE,
    SCALARS_WIDTH,
    SIGNALS,
    adam_step_tile,
    load_scalars,
    round_through,
    state_pointers,
)
from .tensor_table import (
    COLS,
    GRAD,
    SCALARS,
    TRITON_DTYPES,
    WIDTH,
    size,
    tile_offsets,
    tile_start,
)

# Tiles whose amax one program compares at once.
SCAN = 64
# What a program updates at once of a tile that it looks into.
PART = (32, 64)


def slack(write_dtype: torch.dtype) -> float:
    """How far below the old amax the search begins, so that rounding leaves no tensor open.

    The amax of weights that are rounded to 16 bits is half a step from the masters' at most.
    """
    return 0.9998 if write_dtype == torch.float32 else 0.99


@triton.jit
def _threshold(table, scalars, tensors, inside, old_amaxes, SLACK: tl.constexpr):
    """Tile amaxes below it cannot hold the new amax, and what such a weight can become.

    A weight of this size decays and moves to at most `reach`; only above it can the new amax be.
    Any threshold is right, since what it leaves out is checked; comparisons with NaN take all in.
    """
    row = tl.load(table + tensors.to(tl.int64) * WIDTH + SCALARS, inside, 0) * SCALARS_WIDTH
    largest_update = tl.load(scalars + row + LARGEST_UPDATE, inside, 0.0)
    decay = tl.load(scalars + row + LARGEST_DECAY, inside, 1.0)
    threshold = tl.load(old_amaxes + tensors, inside, 0.0) * SLACK
    threshold -= tl.div_rn(2.0 * largest_update, decay)
    return threshold, (threshold * decay + largest_update) * 1.0001


@triton.jit
def _tensors_taking_part(table, tensors, inside, found_inf_ptr):
    """As ``takes_part``, of several tensors."""
    grads = tl.load(table + tensors.to(tl.int64) * WIDTH + GRAD, inside, 0)
    # Loaded once per lane, because the interpreter (Triton 3.7) cannot broadcast a boolean.
    return (grads != 0) & (tl.load(found_inf_ptr + 0 * tensors) == 0)


@triton.jit
def _look_into(
    wanted,
    index,
    grad_scale_ptr,
    clip_ptr,
    table,
    scalars,
    tiles,
    amaxes,
    GRAD_DTYPE: tl.constexpr,
    WRITE_DTYPE: tl.constexpr,
    ADAM_W: tl.constexpr,
    AMSGRAD: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Raise the amax of each tensor to the largest magnitude in its updated ``wanted`` tiles."""
    left = tl.where(wanted, index, 2147483647)
    for _ in range(tl.sum(wanted.to(tl.int32))):
        chosen = tl.min(left)
        left = tl.where(left == chosen, 2147483647, left)
        tile = tiles + 4 * chosen
        tensor, first_row, col = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        extent = tl.load(tile + 3)
        height, width = extent >> 16, extent & 0xFFFF
        cols = size(table, tensor, COLS, 16)
        constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
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


@triton.jit
def _look_into_the_rest(
    grad_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    table,
    scalars,
    tiles,
    tile_amaxes,
    old_amaxes,
    amaxes,
    n_tiles,
    n_tensors,
    GRAD_DTYPE: tl.constexpr,
    WRITE_DTYPE: tl.constexpr,
    ADAM_W: tl.constexpr,
    AMSGRAD: tl.constexpr,
    SLACK: tl.constexpr,
    SCAN: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Look into the tiles that were left out, of tensors whose amax so far does not exclude them.

    Where all candidates lost their largest weights, which takes a NaN. One program does it all.
    """
    n_open = 0
    for start in range(0, n_tensors, 1024):
        tensors = start + tl.arange(0, 1024)
        inside = tensors < n_tensors
        part = _tensors_taking_part(table, tensors, inside, found_inf_ptr)
        threshold, reach = _threshold(table, scalars, tensors, inside, old_amaxes, SLACK)
        found = tl.load(amaxes + tensors, inside, 0.0)
        # Below a threshold that is not positive nothing has been left out.
        is_open = (threshold > 0) & ~(found >= round_through(reach, WRITE_DTYPE))
        n_open += tl.sum((is_open & part & inside).to(tl.int32))
    if n_open > 0:
        for start in range(0, n_tiles, SCAN):
            index = start + tl.arange(0, SCAN)
            valid = index < n_tiles
            owners = tl.load(tiles + 4 * index, valid, 0)
            taking = _tensors_taking_part(table, owners, valid, found_inf_ptr)
            lowest, most = _threshold(table, scalars, owners, valid, old_amaxes, SLACK)
            so_far = tl.load(amaxes + owners, valid, 0.0)
            wanted = tl.load(tile_amaxes + index, valid, 0.0) < lowest
            wanted &= ~(so_far >= round_through(most, WRITE_DTYPE))
            _look_into(
                wanted & taking & valid, index, grad_scale_ptr, clip_ptr, table, scalars, tiles,
                amaxes, GRAD_DTYPE, WRITE_DTYPE, ADAM_W, AMSGRAD, BR, BC,
            )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _amax_preview_kernel(
    grad_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    table,
    scalars,
    tiles,
    tile_amaxes,
    old_amaxes,
    amaxes,
    n_finished,
    n_tiles,
    n_tensors,
    GRAD_DTYPE: tl.constexpr,
    WRITE_DTYPE: tl.constexpr,
    ADAM_W: tl.constexpr,
    AMSGRAD: tl.constexpr,
    SLACK: tl.constexpr,
    SCAN: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """The largest magnitude that each tensor is going to hold.

    Grid: (cdiv(n_tiles, SCAN),). table: int64 [n_tensors, 16]. scalars: float32 [n, 10], the last
    two the largest change of a weight (Inf if unknown) and the factor of its decay. tiles: int32
    [n_tiles, 4], (tensor, row, column, rows << 16 | columns). tile_amaxes: float32 [n_tiles],
    old_amaxes: float32 [n_tensors], before the step. amaxes: float32 [n_tensors], zero at first;
    that of a tensor that takes no part stays the old one. n_finished: int32 [1], zero before and
    after.
    Reads 4 bytes per tile, and 14 per element of the tiles that are looked at (BF16 gradient).
    """
    index = tl.program_id(0) * SCAN + tl.arange(0, SCAN)
    inside = index < n_tiles
    tensors = tl.load(tiles + 4 * index, inside, 0)
    part = _tensors_taking_part(table, tensors, inside, found_inf_ptr)
    first = (tl.load(tiles + 4 * index + 1, inside, 1) == 0) & inside
    first &= tl.load(tiles + 4 * index + 2, inside, 1) == 0
    old = tl.load(old_amaxes + tensors, first & ~part, 0.0)
    tl.store(amaxes + tensors, old, first & ~part)

    threshold, _ = _threshold(table, scalars, tensors, inside, old_amaxes, SLACK)
    tile_amax = tl.load(tile_amaxes + index, inside, 0.0)
    wanted = ~(tile_amax < threshold) & part & inside
    _look_into(
        wanted, index, grad_scale_ptr, clip_ptr, table, scalars, tiles, amaxes,
        GRAD_DTYPE, WRITE_DTYPE, ADAM_W, AMSGRAD, BR, BC,
    )  # fmt: skip

    if tl.atomic_add(n_finished, 1) == tl.num_programs(0) - 1:
        tl.store(n_finished, 0)
        _look_into_the_rest(
            grad_scale_ptr, clip_ptr, found_inf_ptr, table, scalars, tiles, tile_amaxes, old_amaxes,
            amaxes, n_tiles, n_tensors,
            GRAD_DTYPE, WRITE_DTYPE, ADAM_W, AMSGRAD, SLACK, SCAN, BR, BC,
        )  # fmt: skip


def preview_amax(
    table: Tensor,
    scalars: Tensor,
    tiles: Tensor,
    tile_amaxes: Tensor,
    old_amaxes: Tensor,
    amaxes: Tensor,
    n_finished: Tensor,
    *,
    grad_dtype: torch.dtype,
    write_dtype: torch.dtype,
    adam_w_mode: bool,
    amsgrad: bool,
) -> Launch:
    """What fills ``amaxes`` (zero before) with the amaxes that the step of all tensors will give.

    It is to be called with ``grad_scale, clip, found_inf``. ``n_finished``: int32 [1], zero.
    """
    n_tiles = tiles.shape[0]
    known = (tile_amaxes, old_amaxes, amaxes, n_finished)
    return Launch(
        _amax_preview_kernel,
        triton.cdiv(n_tiles, SCAN),
        (table, scalars, tiles, *known, n_tiles, table.shape[0]),
        dict(
            GRAD_DTYPE=TRITON_DTYPES[grad_dtype],
            WRITE_DTYPE=TRITON_DTYPES[write_dtype],
            ADAM_W=adam_w_mode,
            AMSGRAD=amsgrad,
            SLACK=slack(write_dtype),
            SCAN=SCAN,
            BR=PART[0],
            BC=PART[1],
        ),
        num_warps=4,
    )
