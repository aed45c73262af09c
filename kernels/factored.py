"""Second moments that are factored: how a step reads them, and what renews their means after it.

``fp4adam.optim.state_codec.Factored`` does the same in torch operators, in the same order.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from fp4adam.kernels.adam import SIGNALS, load_scalars
from fp4adam.kernels.launch.launch import Launch
from fp4adam.kernels.launch.tensor_table import (
    TRITON_DTYPES,
    field,
    load_tile,
    pointer,
    takes_part,
    tile_offsets,
    tile_start,
)
from fp4adam.kernels.launch.tile_lists import tile_grid
from fp4adam.kernels.tiles.codes import to_float32

# Running sums of each row or column, which the order of additions follows from, and a program's
# rows or columns.
LEVELS, ITEMS = tl.constexpr(8), tl.constexpr(32)
SUMS = tl.constexpr(2**LEVELS.value)
# Below the smallest normal mean there is nothing to share, and one over it would be infinite.
LEAST = tl.constexpr(2.0**-126)


@triton.jit
def load_factors(pointers, row, col, mask, rows, cols, BR: tl.constexpr, BC: tl.constexpr):
    """Means of a tile's squares by row, [BR, 1], over that of all, and by column, [1, BC]."""
    i, j = row + tl.arange(0, BR), col + tl.arange(0, BC)
    if mask is not None:
        i, j = tl.minimum(i, rows - 1), tl.minimum(j, cols - 1)
    inverse = tl.load(pointers.exp_avg_sq_scale + cols)
    by_row = tl.load(pointers.exp_avg_sq + i) * inverse
    return by_row[:, None], tl.load(pointers.exp_avg_sq_scale + j)[None, :]


@triton.jit
def _means(sums, count):
    """Means, float32 [n], of ``count`` numbers each, of which there are sums [n, SUMS]."""
    for _ in tl.static_range(LEVELS):
        pairs = tl.reshape(sums, (sums.shape[0], sums.shape[1] // 2, 2))
        first, second = tl.split(pairs)
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
    by_row = pointer(table, tensor, "exp_avg_sq", tl.float32)
    by_column = pointer(table, tensor, "exp_avg_sq_scale", tl.float32)
    BR: tl.constexpr = ITEMS if BY_ROW else SUMS
    BC: tl.constexpr = SUMS if BY_ROW else ITEMS
    sums = tl.zeros((BR, BC), tl.float32)
    for i in range(tl.cdiv(cols if BY_ROW else rows, SUMS)):
        top, left = (row, col + i * SUMS) if BY_ROW else (row + i * SUMS, col)
        mask = (top + tl.arange(0, BR) < rows)[:, None] & (left + tl.arange(0, BC) < cols)[None, :]
        mask = tl.max_constancy(mask, (1, 32))
        ptr = grads + tile_start(top, left, cols) + tile_offsets(cols, BR, BC, 8)
        g = to_float32(tl.load(ptr, mask, 0.0)) * constants.factor
        sums += tl.where(mask, g * g, 0.0)
    if BY_ROW:
        item = row + tl.arange(0, ITEMS)
        inside, ptr, new = item < rows, by_row + item, _means(sums, cols)
    else:
        item = col + tl.arange(0, ITEMS)
        inside, ptr, new = item < cols, by_column + item, _means(tl.trans(sums), rows)
    old = tl.load(ptr, inside, 0.0) * constants.beta2
    tl.store(ptr, old + new * constants.one_minus_beta2, inside)
    if BY_ROW and row == 0:
        of_all = tl.zeros((1, SUMS), tl.float32)
        for first in range(0, cols, SUMS):
            j = first + tl.arange(0, SUMS)[None, :]
            of_all += tl.load(by_column + j, j < cols, 0.0)
        mean = tl.max(_means(of_all, cols), 0)
        # NaN for Inf, as for NaN: no mean that is not finite stands for anything.
        inverse = tl.div_rn(1.0, mean + (mean - mean))
        tl.store(by_column + cols, tl.where(mean < LEAST, 0.0, inverse))


def renewal(key: Any, tensors: tuple) -> list[Launch]:
    """The launches after a step, by column and by row; arguments as for ``adam.StepLaunch``."""
    shapes, _, table, scalars = tensors
    made = []
    for by_row in (False, True):
        tiles = [
            tile_grid((i, 0, n, 0, m), (ITEMS.value, m) if by_row else (n, ITEMS.value))
            for i, (n, m) in enumerate(shapes)
        ]
        tiles = torch.cat(tiles).to(table.device)
        constexprs = dict(GRAD=TRITON_DTYPES[key.grad_dtype], BY_ROW=by_row)
        given = table, scalars, tiles
        made.append(Launch(_means_kernel, len(tiles), given, constexprs, num_warps=8))
    return made
