"""The amax that weights are going to have after a step, found by looking at few of their tiles.

NVFP4 needs the largest magnitude of the *updated* tensor before its first block can be written.
Adam's updates are bounded, so only tiles whose magnitudes come near the tensor's largest can hold
the new one. These are updated here, without storing. The pass over all tiles then compares what it
writes with what was found here, and :func:`requantize` writes a tensor again for which it was too
small. So the bytes are right whatever the bound is worth: NaN may have taken the largest weight, or
someone else may have written to the state since the last step.
"""

import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.adam import (
    LARGEST_DECAY,
    LARGEST_UPDATE,
    SCALARS_WIDTH,
    SIGNALS,
    Variant,
    adam_step_tile,
    load_scalars,
    state_pointers,
)
from fp4adam.kernels.launch.launch import Launch
from fp4adam.kernels.launch.tensor_table import (
    AMAX,
    COLS,
    GRAD,
    ROWS,
    SCALARS,
    WIDTH,
    Usage,
    gemm_scale_pointers,
    size,
    storage_pointers,
    tile_start,
)
from fp4adam.kernels.nvfp4 import nvfp4_tile, store_columnwise, store_square_scales
from fp4adam.kernels.tiles.bfloat16 import round_through
from fp4adam.kernels.tiles.state import has_scales, load_value, master_pointers, max_registers

# Tiles whose amax one program compares at once.
SCAN = 64
# What a program updates at once of a tile that it looks into.
PART = (8, 64)
# How near a tile must come to the old amax; rounding is far smaller.
SLACK = tl.constexpr(0.9998)
# Programs that look for tensors to write again: enough for any GPU, few enough to cost nothing.
N_REQUANTIZE = 512


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _amax_preview_kernel(
    grad_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    table,
    scalars,
    tiles,
    slots,
    tile_amaxes,
    old_amaxes,
    amaxes,
    exceeding,
    n_tiles,
    VARIANT: tl.constexpr,
    AGAIN: tl.constexpr,
    SCAN: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """The largest magnitude that the likely tiles of each tensor are going to hold.

    AGAIN: look at those that have been left out and can be larger than what has been found, because
    the weight that was the largest has become NaN.

    Grid: (cdiv(n_tiles, SCAN),). table: int64 [n_tensors, 18]. scalars: float32 [n, 12], with
    the largest change of a weight (Inf if unknown) and the factor of its decay. tiles: int32
    [n_tiles, 4], (tensor, row, column, rows << 16 | columns). slots: int32 [n_tensors], where the
    amax of each tensor is; tensors that share one take part together. tile_amaxes: float32
    [n_tiles], old_amaxes: float32 [n_slots], before the step. amaxes: float32 [n_slots], zero at
    first; that of a tensor that takes no part stays the old one. exceeding: float32 [n_slots], set
    to 0.
    Reads 4 bytes per tile, and 14 per element of the tiles that are looked at (BF16 gradient).
    """
    index = tl.program_id(0) * SCAN + tl.arange(0, SCAN)
    inside = index < n_tiles
    tensors = tl.load(tiles + 4 * index, inside, 0)
    rows = table + tensors.to(tl.int64) * WIDTH
    slot = tl.load(slots + tensors, inside, 0)
    # Loaded once per lane, because the interpreter (Triton 3.7) cannot broadcast a boolean.
    takes_part = tl.load(found_inf_ptr + 0 * tensors) == 0
    takes_part &= tl.load(rows + GRAD, inside, 0) != 0
    old_amax = tl.load(old_amaxes + slot, inside, 0.0)
    first = inside & (tl.load(tiles + 4 * index + 1, inside, 1) == 0)
    first &= tl.load(tiles + 4 * index + 2, inside, 1) == 0
    if not AGAIN:
        tl.store(amaxes + slot, old_amax, first & ~takes_part)
        tl.store(exceeding + slot, tl.zeros((SCAN,), tl.float32), first)

    # A weight of the size of old_amax, and any that could overtake it, is not below the threshold.
    scalars_row = scalars + tl.load(rows + SCALARS, inside, 0) * SCALARS_WIDTH
    largest_update = tl.load(scalars_row + LARGEST_UPDATE, inside, 0.0)
    decay = tl.load(scalars_row + LARGEST_DECAY, inside, 1.0)
    threshold = old_amax * SLACK - tl.div_rn(2.0 * largest_update, decay)
    # A comparison with NaN takes the tile in.
    tile_amax = tl.load(tile_amaxes + index, inside, 0.0)
    wanted = ~(tile_amax < threshold) & takes_part & inside
    if AGAIN:
        # A little more than that, for rounding to a 16-bit format.
        reach = (tile_amax * decay + largest_update) * 1.01
        found = tl.load(amaxes + slot, inside, 0.0)
        wanted = ~wanted & ~(reach < found) & takes_part & inside

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
        pointers = state_pointers(table, tensor, VARIANT)
        amax = tl.zeros((BR, BC), tl.float32)
        for done in range(0, height, BR):
            rows_left = height - done
            mask = (tl.arange(0, BR) < rows_left)[:, None] & (tl.arange(0, BC) < width)[None, :]
            start = tile_start(first_row + done, col, cols)
            value = adam_step_tile(pointers, start, cols, mask, constants, VARIANT, False, BR, BC)
            magnitude = tl.abs(round_through(value, VARIANT.write_dtype))
            # Also drops NaN, which no amax counts.
            amax = tl.where(mask & (magnitude > amax), magnitude, amax)
        # The bits of non-negative floats order as integers do: one atomic instead of two.
        bits = tl.max(tl.max(amax, 1), 0).to(tl.int32, bitcast=True)
        amax_ptr = amaxes + tl.load(slots + tensor)
        tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), bits, sem="relaxed")


@triton.jit
def _requantize_kernel(
    table,
    tiles,
    slots,
    amaxes,
    exceeding,
    n_tiles,
    n_slots,
    WRITE_DTYPE: tl.constexpr,
    VALUE_CODEC: tl.constexpr,
    USAGE: tl.constexpr,
    BC: tl.constexpr,
):
    """Write tensors again that turned out to exceed the amax they were written with.

    Grid: any. Tile: [16, BC]. slots: int32 [n_tensors], where the amax of each tensor is. amaxes:
    float32 [n_slots], corrected. exceeding: float32 [n_slots], the amax of such a tensor and of
    those that share it, 0 of others. Usually reads 4 bytes per slot and program.
    """
    n_exceeding = 0
    for start in range(0, n_slots, 1024):
        index = start + tl.arange(0, 1024)
        found = tl.load(exceeding + index, index < n_slots, 0.0)
        n_exceeding += tl.sum((found > 0).to(tl.int32))
    if n_exceeding > 0:
        for i in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
            tensor = tl.load(tiles + 4 * i)
            slot = tl.load(slots + tensor)
            amax = tl.load(exceeding + slot)
            if amax > 0:
                first_row, first_col = tl.load(tiles + 4 * i + 1), tl.load(tiles + 4 * i + 2)
                extent = tl.load(tiles + 4 * i + 3)
                height, width = extent >> 16, extent & 0xFFFF
                rows = size(table, tensor, ROWS, 16)
                cols = size(table, tensor, COLS, 16)
                if (first_row == 0) & (first_col == 0):
                    address = tl.load(table + tensor.to(tl.int64) * WIDTH + AMAX)
                    tl.store(address.to(tl.pointer_type(tl.float32)), amax)
                    tl.store(amaxes + slot, amax)
                value_ptr, extra_ptr = master_pointers(table, tensor, VALUE_CODEC)
                storage = storage_pointers(table, tensor, tl.uint32, tl.uint8)
                gemm_scales = gemm_scale_pointers(table, tensor)
                for block in range(height // 16 * (width // BC)):
                    row = first_row + block // (width // BC) * 16
                    col = first_col + block % (width // BC) * BC
                    block_start = tile_start(row, col, cols)
                    value = load_value(
                        value_ptr, extra_ptr, block_start, cols, None, VALUE_CODEC, 16, BC
                    )
                    x = round_through(value, WRITE_DTYPE)
                    _, words, scale = nvfp4_tile(
                        x, amax, row, col, cols, storage, gemm_scales, USAGE, 16, BC
                    )
                    if USAGE.columnwise:
                        store_columnwise(
                            words, scale, row, col, rows, storage, gemm_scales, USAGE, 16, BC
                        )
                    if USAGE.square and USAGE.swizzled:
                        store_square_scales(scale, row, col, rows, cols, gemm_scales, USAGE, 16, BC)


def candidates(
    table: Tensor,
    scalars: Tensor,
    tiles: Tensor,
    slots: Tensor,
    tile_amaxes: Tensor,
    old_amaxes: Tensor,
) -> Tensor:
    """Which tiles :func:`_amax_preview_kernel` looks into if all take part, bool [n_tiles]."""
    rows = scalars.view(-1, SCALARS_WIDTH.value)[table[:, SCALARS.value]]
    reach = 2 * rows[:, LARGEST_UPDATE.value] / rows[:, LARGEST_DECAY.value]
    threshold = old_amaxes[slots] * SLACK.value - reach
    return ~(tile_amaxes < threshold[tiles[:, 0].long()])


def preview_amax(
    table: Tensor,
    scalars: Tensor,
    tiles: Tensor,
    slots: Tensor,
    tile_amaxes: Tensor,
    old_amaxes: Tensor,
    amaxes: Tensor,
    exceeding: Tensor,
    variant: Variant,
    *,
    again: bool,
) -> Launch:
    """What finds ``amaxes`` (zero before), to be called with ``grad_scale, clip, found_inf``.

    ``again``: A second look makes them certain, if the bound of the update is.
    """
    n_tiles = tiles.shape[0]
    br, bc = PART
    return Launch(
        _amax_preview_kernel,
        triton.cdiv(n_tiles, SCAN),
        (table, scalars, tiles, slots, tile_amaxes, old_amaxes, amaxes, exceeding, n_tiles),
        dict(VARIANT=variant, AGAIN=again, SCAN=SCAN, BR=br, BC=bc),
        num_warps=4,
        maxnreg=max_registers(*variant.codecs),
    )


def requantize(
    table: Tensor,
    tiles: Tensor,
    slots: Tensor,
    amaxes: Tensor,
    exceeding: Tensor,
    variant: Variant,
    usage: Usage,
) -> Launch:
    """What writes the tensors again whose slot of ``exceeding`` is not zero."""
    n_tiles = tiles.shape[0]
    return Launch(
        _requantize_kernel,
        min(n_tiles, N_REQUANTIZE),
        (table, tiles, slots, amaxes, exceeding, n_tiles, amaxes.shape[0]),
        dict(
            # Not all of the variant, so that moments make no difference.
            WRITE_DTYPE=variant.write_dtype,
            VALUE_CODEC=variant.value_codec,
            USAGE=usage,
            BC=32 if has_scales(variant.value_codec) else 16,
        ),
        num_warps=1,
    )
