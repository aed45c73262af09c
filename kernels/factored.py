"""Second moments that are factored: how a step reads them, and what renews their means after it.

``fp4adam.distributed.row_sums`` and ``fp4adam.optim.factor_renewal`` launch the passes, or do the
same in torch operators, in the same order.
"""

import triton
import triton.language as tl

from fp4adam.kernels.adam import SIGNALS, load_scalars
from fp4adam.kernels.launch.tensor_table import field, load_tile, pointer, takes_part, tile_start
from fp4adam.kernels.tiles.codes import to_float32

# Sums are of 2**LEVELS neighbours by pairs, then TURNS running sums of these, then pairs again.
LEVELS_OF_COLUMNS, LEVELS_OF_ROWS, TURNS = tl.constexpr(3), tl.constexpr(7), tl.constexpr(32)
_LEVELS_OF_TURNS = tl.constexpr(5)
STRIP = tl.constexpr(64)  # rows of a program, which are no part of the order
_WIDTH = tl.constexpr(TURNS.value << LEVELS_OF_COLUMNS.value)
_ALL = tl.constexpr(TURNS.value << LEVELS_OF_ROWS.value)


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
def _pairs(x, LEVELS: tl.constexpr):
    """Sums [n, m >> LEVELS] of neighbours in the rows of ``x`` [n, m]."""
    for _ in tl.static_range(LEVELS):
        first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        x = first + second
    return x


@triton.jit
def _renewed(ptr, mask, sums, count, constants):
    """Store and return the means at ``ptr``, of ``count`` squares each, after a step."""
    new = tl.div_rn(sums, count.to(tl.float32)) * constants.factor * constants.factor
    means = tl.load(ptr, mask, 0.0) * constants.beta2 + new * constants.one_minus_beta2
    tl.store(ptr, means, mask)
    return means


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def strips_kernel(
    grad_scale_ptr, clip_ptr, found_inf_ptr, nodes, table, scalars, tiles, GRAD: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Add squares of a gradient to the means by row, and up over 2**LEVELS rows in each column.

    Grid: (n_tiles,). Tile: STRIP whole rows. tiles: int32 [n_tiles, 4], with the place in ``nodes``
    of its sums, over 32, for a column. Reads the gradient, and writes 4 / 2**LEVELS bytes per
    element. Here, because in the step sums would take registers, and memory until all are known.
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
    nodes += place.to(tl.int64) * 32 + node * cols
    has_rows = (node << LEVELS) < rows - row
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
        tl.store(nodes + j[:, None], down, has_rows & (j < cols)[:, None])
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    sums = tl.reshape(_pairs(by_row, _LEVELS_OF_TURNS), (NEAR, FAR))
    means = pointer(table, tensor, "exp_avg_sq", tl.float32) + row
    i = tl.reshape(i, (NEAR, FAR))
    _renewed(means + i, i < rows - row, sums, cols, constants)


@triton.jit
def sums_kernel(nodes, sums, matrices, tiles, stride, LEVELS: tl.constexpr, COLS: tl.constexpr):
    """Sums by column of ``nodes``, each over 2**LEVELS rows, those of a rank ``stride`` long.

    Grid: (n_tiles,). Tile: COLS columns. tiles: int32 [n_tiles, 4]. matrices: int32 [n, 5], the
    place in ``nodes`` over 32, columns, nodes of a rank, and of all, and the place in ``sums``.
    """
    matrix, _, col = load_tile(tiles, 1)
    matrices += 5 * matrix
    cols, of_rank, of_all = tl.load(matrices + 1), tl.load(matrices + 2), tl.load(matrices + 3)
    j = col + tl.arange(0, COLS)[:, None]
    nodes += tl.load(matrices).to(tl.int64) * 32
    MORE: tl.constexpr = LEVELS_OF_ROWS - LEVELS
    turns = tl.zeros((COLS, TURNS), tl.float32)
    for first in range(0, of_all, TURNS << MORE):
        i = first + tl.arange(0, TURNS << MORE)[None, :]
        offs = (i // of_rank).to(tl.int64) * stride + i % of_rank * cols.to(tl.int64)
        x = tl.load(nodes + offs + j, (i < of_all) & (j < cols), 0.0)
        turns += tl.reshape(
            _pairs(tl.reshape(x, (COLS * TURNS, _ALL // TURNS >> LEVELS)), MORE), (COLS, TURNS)
        )
    tl.store(sums + tl.load(matrices + 4) + j, _pairs(turns, _LEVELS_OF_TURNS), j < cols)


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def renew_kernel(grad_scale_ptr, clip_ptr, found_inf_ptr, sums, table, scalars, tiles):
    """Add a step's sums to the means by column, and renew one over the mean of all.

    Grid: (n_tensors,). tiles: int32 [n_tensors, 4], with the rows of all ranks and the place in
    ``sums``.
    """
    tensor, rows, place = load_tile(tiles, 1)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    cols = field(table, tensor, "cols", tl.int32, 32)
    means = pointer(table, tensor, "exp_avg_sq_scale", tl.float32)
    turns = tl.zeros((TURNS, 1), tl.float32)
    for first in range(0, cols, _ALL):
        j = first + tl.arange(0, _ALL)
        new = tl.load(sums + place + j, j < cols, 0.0)
        new = _renewed(means + j, j < cols, new, rows, constants)
        turns += _pairs(tl.reshape(new, (TURNS, _ALL // TURNS)), LEVELS_OF_ROWS)
    mean = tl.div_rn(_pairs(tl.trans(turns), _LEVELS_OF_TURNS), cols.to(tl.float32))
    # NaN of Inf, too. Below normal means there is nothing, and one over them may be infinite.
    inverse = tl.where(mean < 2.0**-126, 0.0, tl.div_rn(1.0, mean + (mean - mean)))
    tl.store(means + cols + tl.zeros((1, 1), tl.int32), inverse)
