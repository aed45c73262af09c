"""Second moments that are factored: how a step reads them, and what renews their means after it.

``fp4adam.tensors.sums`` and ``fp4adam.optim.state_codec.Factored`` do the same in torch
operators, in the same order.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from fp4adam.kernels.adam import SIGNALS, load_scalars, step_variant
from fp4adam.kernels.launch.launch import Launch
from fp4adam.kernels.launch.tensor_table import field, load_tile, pointer, takes_part, tile_start
from fp4adam.kernels.launch.tile_lists import tile_grid
from fp4adam.kernels.tiles.codes import to_float32

# Sums are of 2**LEVELS neighbours by pairs, then TURNS running sums of these, then pairs again.
LEVELS_OF_COLUMNS, LEVELS_OF_ROWS, TURNS = tl.constexpr(3), tl.constexpr(7), tl.constexpr(32)
_LEVELS_OF_TURNS = tl.constexpr(5)
_WIDTH = tl.constexpr(TURNS.value << LEVELS_OF_COLUMNS.value)
_ALL = tl.constexpr(TURNS.value << LEVELS_OF_ROWS.value)


@triton.jit
def load_factors(pointers, row, col, mask, rows, cols, BR: tl.constexpr, BC: tl.constexpr):
    """Means of a tile's squares by row, [BR, 1], over that of all, and by column, [1, BC]; then one
    over the roots of both means, [BR] and [BC], nearly."""
    i, j = row + tl.arange(0, BR), col + tl.arange(0, BC)
    if mask is not None:
        i, j = tl.minimum(i, rows - 1), tl.minimum(j, cols - 1)
    by_row, by_column = tl.load(pointers.exp_avg_sq + i), tl.load(pointers.exp_avg_sq_scale + j)
    part = by_row * tl.load(pointers.exp_avg_sq_scale + cols)
    return part[:, None], by_column[None, :], tl.rsqrt(by_row), tl.rsqrt(by_column)


@triton.jit
def _pairs(x, LEVELS: tl.constexpr):
    """Sums [n, m >> LEVELS] of neighbours in the rows of ``x`` [n, m]."""
    for _ in tl.static_range(LEVELS):
        first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        x = first + second
    return x


@triton.jit
def _renew(ptr, mask, sums, count, constants):
    """Store and return the means at ``ptr``, of ``count`` squares each, after a step."""
    new = tl.div_rn(sums, count.to(tl.float32)) * constants.factor * constants.factor
    means = tl.load(ptr, mask, 0.0) * constants.beta2 + new * constants.one_minus_beta2
    tl.store(ptr, means, mask)
    return means


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _strips_kernel(
    grad_scale_ptr, clip_ptr, found_inf_ptr, nodes, table, scalars, tiles, stride,
    GRAD: tl.constexpr, LEVELS: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Renew means by row with the squares of a gradient, and add these up to nodes by column.

    Grid: (n_tiles,). Tile: STRIP whole rows, whatever the order. tiles: int32 [n_tiles, 4], with
    the first column in ``nodes``, float32 [n, stride], each of 2**LEVELS rows. Reads the gradient,
    and writes 4 / 2**LEVELS bytes per element. Here: in the step sums would take registers.
    """
    tensor, row, place = load_tile(tiles, 1)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    rows, cols = field(table, tensor, "rows", tl.int32), field(table, tensor, "cols", tl.int32, 32)
    grads = pointer(table, tensor, "grad", GRAD) + tile_start(row, 0, cols)
    # A thread adds up to 16 neighbouring rows, since the first dimension is in its registers.
    INNER: tl.constexpr = min(LEVELS, 4)
    NEAR: tl.constexpr = 1 << INNER
    FAR: tl.constexpr = STRIP // NEAR
    i = tl.arange(0, FAR)[None, :, None] * NEAR + tl.arange(0, NEAR)[:, None, None]
    node = tl.arange(0, STRIP >> LEVELS)[None, :]
    nodes += tile_start(row >> LEVELS, place, stride) + node * stride
    by_row = tl.zeros((STRIP, TURNS), tl.float32)
    for left in range(0, cols, _WIDTH):
        j = left + tl.arange(0, _WIDTH)
        mask = tl.max_constancy((i < rows - row) & (j < cols)[None, None, :], (1, 1, 32))
        offs = tl.max_contiguous(i * cols + j[None, None, :], (1, 1, 8))
        x = to_float32(tl.load(grads + offs, mask, 0.0))
        x = x * x
        near = tl.reshape(x, (STRIP * TURNS, _WIDTH // TURNS))
        by_row += tl.reshape(_pairs(near, LEVELS_OF_COLUMNS), (STRIP, TURNS))
        down = _pairs(tl.reshape(tl.permute(x, (1, 2, 0)), (FAR * _WIDTH, NEAR)), INNER)
        down = _pairs(tl.trans(tl.reshape(down, (FAR, _WIDTH))), LEVELS - INNER)
        tl.store(nodes + j[:, None], down, (node << LEVELS < rows - row) & (j < cols)[:, None])
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    sums = tl.reshape(_pairs(by_row, _LEVELS_OF_TURNS), (NEAR, FAR))
    i = tl.reshape(i, (NEAR, FAR)) + row
    _renew(pointer(table, tensor, "exp_avg_sq", tl.float32) + i, i < rows, sums, cols, constants)


@triton.jit
def _sums_kernel(nodes, sums, n, cols, LEVELS: tl.constexpr, COLS: tl.constexpr):
    """Sums by column of nodes, float32 [n, cols], each of 2**LEVELS rows.

    Grid: (cols / COLS,), rounded up.
    """
    j = tl.program_id(0) * COLS + tl.arange(0, COLS)[:, None]
    MORE: tl.constexpr = LEVELS_OF_ROWS - LEVELS
    NEAR: tl.constexpr = _ALL // TURNS >> LEVELS
    turns = tl.zeros((COLS, TURNS), tl.float32)
    for first in range(0, n, TURNS * NEAR):
        i = first + tl.arange(0, TURNS * NEAR)[None, :]
        x = tl.load(nodes + i.to(tl.int64) * cols + j, (i < n) & (j < cols), 0.0)
        turns += tl.reshape(_pairs(tl.reshape(x, (COLS * TURNS, NEAR)), MORE), (COLS, TURNS))
    tl.store(sums + j, _pairs(turns, _LEVELS_OF_TURNS), j < cols)


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _columns_kernel(grad_scale_ptr, clip_ptr, found_inf_ptr, sums, table, scalars, tiles, rows):
    """Renew means by column with ``sums`` over rows of all ranks, and one over the mean of all.

    Grid: (n_tiles,), of which the first of each tensor works.
    """
    tensor, row, place = load_tile(tiles, 1)
    if (row > 0) | ~takes_part(table, tensor, found_inf_ptr):
        return
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    cols = field(table, tensor, "cols", tl.int32, 32)
    means = pointer(table, tensor, "exp_avg_sq_scale", tl.float32)
    turns = tl.zeros((TURNS, 1), tl.float32)
    for first in range(0, cols, _ALL):
        j = first + tl.arange(0, _ALL)
        new = tl.load(sums + place + j, j < cols, 0.0)
        new = _renew(means + j, j < cols, new, rows, constants)
        turns += _pairs(tl.reshape(new, (TURNS, _ALL // TURNS)), LEVELS_OF_ROWS)
    mean = tl.div_rn(_pairs(tl.trans(turns), _LEVELS_OF_TURNS), cols.to(tl.float32))
    # NaN of Inf, too. Below normal means there is nothing, and one over them may be infinite.
    inverse = tl.where(mean < 2.0**-126, 0.0, tl.div_rn(1.0, mean + (mean - mean)))
    tl.store(means + cols + tl.zeros((1, 1), tl.int32), inverse)


def renewal(
    key: Any, tensors: tuple, places: dict[int, int], rows: int, cols: int, levels: int
) -> tuple[Launch, Launch]:
    """The launches that read gradients, and the sums over ``rows``.

    ``key``, ``tensors``: As for ``adam.StepLaunch``. ``places``: Of some, in ``cols`` columns.
    """
    (shapes, _, table, scalars), strip = tensors, 64 if levels else 32  # or ptxas spills on sm_100
    tiles = [tile_grid((i, 0, shapes[i][0], at, at + 1), (strip, 1)) for i, at in places.items()]
    tiles = torch.cat(tiles).to(table.device)
    n, given = len(tiles), (table, scalars, tiles)
    constexprs = dict(GRAD=step_variant(key).grad_dtype, LEVELS=levels, STRIP=strip)
    warps = 4 if levels > 3 else 8
    strips = Launch(_strips_kernel, n, (*given, cols), constexprs, num_warps=warps)
    return strips, Launch(_columns_kernel, n, (*given, rows), {}, num_warps=8)


def sums_launch(n: int, cols: int, levels: int) -> Launch:
    """The launch that adds nodes [n, cols]."""
    width = max(2, min(32, 2 << levels))
    return Launch(_sums_kernel, -(-cols // width), (n, cols), dict(LEVELS=levels, COLS=width))
