"""Second moments that are factored: how a step reads them, and what renews their means after it.

``fp4adam.optim.state_codec.Factored`` does the same in torch operators, in the same order.
"""

import torch
import triton
import triton.language as tl

from fp4adam.kernels.adam import SIGNALS, Variant, load_scalars
from fp4adam.kernels.launch.launch import Launch
from fp4adam.kernels.launch.tensor_table import (
    field,
    load_tile,
    pointer,
    takes_part,
    tile_offsets,
    tile_start,
)
from fp4adam.kernels.launch.tile_lists import tile_grid
from fp4adam.kernels.tiles.codes import to_float32

# The running sums of a row or column, whose number is part of the order, and a program's of these.
LEVELS, ITEMS = tl.constexpr(8), tl.constexpr(32)
SUMS = tl.constexpr(2**LEVELS.value)


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
def _means(sums, count):
    """Means, float32 [n], of ``count`` numbers each, of which there are sums [n, SUMS]."""
    for _ in tl.static_range(LEVELS):
        first, second = tl.split(tl.reshape(sums, (sums.shape[0], sums.shape[1] // 2, 2)))
        sums = first + second
    return tl.div_rn(tl.reshape(sums, (sums.shape[0],)), count.to(tl.float32))


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _means_kernel(
    grad_scale_ptr, clip_ptr, found_inf_ptr, table, scalars, tiles, GRAD: tl.constexpr,
    BY_ROW: tl.constexpr,
):  # fmt: skip
    """Add a step's squares to the means by column; after that BY_ROW, and one over the mean of all.

    Grid: (n_tiles,). Tile: ITEMS whole rows or columns. tiles: int32 [n_tiles, 4]. Reads the
    gradient. Here, because in the step sums would take registers, and memory until all are known.
    """
    tensor, row, col = load_tile(tiles, ITEMS)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    rows, cols = field(table, tensor, "rows", tl.int32), field(table, tensor, "cols", tl.int32, 32)
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    grads = pointer(table, tensor, "grad", GRAD)
    by_column = pointer(table, tensor, "exp_avg_sq_scale", tl.float32)
    means = pointer(table, tensor, "exp_avg_sq", tl.float32) if BY_ROW else by_column
    first, end, length = (row, rows, cols) if BY_ROW else (col, cols, rows)
    BR: tl.constexpr = ITEMS if BY_ROW else SUMS
    BC: tl.constexpr = SUMS if BY_ROW else ITEMS
    sums = tl.zeros((BR, BC), tl.float32)
    for i in range(tl.cdiv(length, SUMS)):
        top, left = (row, col + i * SUMS) if BY_ROW else (row + i * SUMS, col)
        mask = (top + tl.arange(0, BR) < rows)[:, None] & (left + tl.arange(0, BC) < cols)[None, :]
        mask = tl.max_constancy(mask, (1, 32))
        ptr = grads + tile_start(top, left, cols) + tile_offsets(cols, BR, BC, 8)
        g = to_float32(tl.load(ptr, mask, 0.0)) * constants.factor
        sums += tl.where(mask, g * g, 0.0)
    new = _means(sums if BY_ROW else tl.trans(sums), length) * constants.one_minus_beta2
    item = first + tl.arange(0, ITEMS)
    old = tl.load(means + item, item < end, 0.0)
    tl.store(means + item, old * constants.beta2 + new, item < end)
    if BY_ROW and row == 0:
        of_all = tl.zeros((1, SUMS), tl.float32)
        for left in range(0, cols, SUMS):
            j = left + tl.arange(0, SUMS)[None, :]
            of_all += tl.load(by_column + j, j < cols, 0.0)
        mean = tl.sum(_means(of_all, cols), 0)
        # NaN of Inf, too. Below normal means there is nothing, and one over them may be infinite.
        inverse = tl.div_rn(1.0, mean + (mean - mean))
        tl.store(by_column + cols, tl.where(mean < 2.0**-126, 0.0, inverse))


def renewal(variant: Variant, tensors: tuple) -> list[Launch]:
    """The launches after a step, by column and by row; tensors as for ``adam.StepLaunch``."""
    (shapes, _, table, scalars), made = tensors, []
    for by_row in (False, True) if variant.exp_avg_sq_codec == "factored" else ():
        tiles = [
            tile_grid((i, 0, n, 0, m), (ITEMS.value, m) if by_row else (n, ITEMS.value))
            for i, (n, m) in enumerate(shapes)
        ]
        given = table, scalars, torch.cat(tiles).to(table.device)
        constexprs = dict(GRAD=variant.grad_dtype, BY_ROW=by_row)
        made.append(Launch(_means_kernel, sum(map(len, tiles)), given, constexprs, num_warps=8))
    return made
