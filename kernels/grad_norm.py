"""The norm of any number of tensors: one sum per span of a tensor, then the sum of those sums."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.launch.tensor_table import ALIGNMENT, TRITON_DTYPES
from fp4adam.kernels.tiles.bfloat16 import to_float32

# Keeps the coefficient's denominator away from zero, as in torch.nn.utils.clip_grad_norm_.
EPS = tl.constexpr(1e-6)


@triton.jit
def magnitude(x, NORM_TYPE: tl.constexpr):
    """The contribution of each element to the norm: x * x for the 2-norm, else |x|.

    x: any floating tile. Returns float64, exact except for squares of float64; for the infinity
    norm float32, or float64 if x is float64.
    """
    if x.dtype != tl.float64:
        x = to_float32(x)
    if NORM_TYPE == 1.0:
        y = tl.abs(x).to(tl.float64)
    elif NORM_TYPE == 2.0:
        wide = x.to(tl.float64)
        y = wide * wide
    else:
        y = tl.abs(x)
    return y


@triton.jit
def combine(a, b, NORM_TYPE: tl.constexpr):
    """The sum, or for the infinity norm the maximum; NaN if either is NaN."""
    if NORM_TYPE == 1.0 or NORM_TYPE == 2.0:
        y = a + b
    else:
        # Keeps a NaN on either side, since comparisons with NaN are False.
        y = tl.where((b > a) | (b != b), b, a)
    return y


@triton.jit
def fold(lanes, NORM_TYPE: tl.constexpr):
    """Combine neighbours until one is left. lanes: tile [power of two], >= 0. Returns a scalar."""
    if NORM_TYPE == 1.0 or NORM_TYPE == 2.0:
        # In explicit pairs, because the order of one tl.sum depends on layout and Triton version.
        if lanes.shape[0] == 1:
            y = tl.sum(lanes)
        else:
            pairs = tl.reshape(lanes, (lanes.shape[0] // 2, 2))
            y = fold(tl.sum(pairs, 1), NORM_TYPE)
    else:
        # The bits of non-negative floats order as integers do, with NaN on top.
        BITS: tl.constexpr = tl.int64 if lanes.dtype == tl.float64 else tl.int32
        y = tl.max(lanes.to(BITS, bitcast=True)).to(lanes.dtype, bitcast=True)
    return y


@triton.jit
def add_span(
    address,
    start,
    count,
    DTYPE: tl.constexpr,
    NORM_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Lane l combines elements start + l, start + l + LANES, ... of ``count``, in this order.

    address: int64, of a tensor read flat. ALIGNED: it is a multiple of 16. Returns a tile [LANES].
    """
    ptr = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        # The hint is on a pointer made in this function, so it does not leak to the other branch.
        ptr = tl.multiple_of(ptr, ALIGNMENT)
    lane = tl.arange(0, LANES)
    lanes = magnitude(tl.zeros((LANES,), DTYPE), NORM_TYPE)
    # A mask makes every access scalar, so only the last elements of a tensor are masked.
    whole = count // LANES * LANES
    for offset in tl.range(0, whole, LANES, loop_unroll_factor=4):
        x = tl.load(ptr + (start + offset) + lane)
        lanes = combine(lanes, magnitude(x, NORM_TYPE), NORM_TYPE)
    if whole < count:
        x = tl.load(ptr + (start + whole) + lane, whole + lane < count, 0.0)
        lanes = combine(lanes, magnitude(x, NORM_TYPE), NORM_TYPE)
    return lanes


@triton.jit
def _span_sums_kernel(
    addresses,
    spans,
    sums,
    DTYPE: tl.constexpr,
    NORM_TYPE: tl.constexpr,
    SPAN: tl.constexpr,
    LANES: tl.constexpr,
):
    """Combine the elements of one span of one tensor, read flat.

    Grid: (n_spans,). Tile: LANES elements, repeated over the span. addresses: int64 [n_tensors], 0
    for a tensor that counts as zeros. spans: int32 [n_spans, 4], (tensor, span of that tensor,
    elements in it, index in sums). sums: float64 [all spans]. Reads each element once.
    """
    span = spans + 4 * tl.program_id(0)
    address = tl.load(addresses + tl.load(span))
    start = tl.load(span + 1).to(tl.int64) * SPAN
    count = tl.where(address == 0, 0, tl.load(span + 2))
    # Gradients that are views into a flat buffer may be unaligned.
    if address % ALIGNMENT == 0:
        lanes = add_span(address, start, count, DTYPE, NORM_TYPE, True, LANES)
    else:
        lanes = add_span(address, start, count, DTYPE, NORM_TYPE, False, LANES)
    tl.store(sums + tl.load(span + 3), fold(lanes, NORM_TYPE).to(tl.float64))


@triton.jit
def _total_norm_kernel(
    sums, n_sums, max_norm, total, result, NORM_TYPE: tl.constexpr, LANES: tl.constexpr
):
    """Combine all sums to the total, the norm, and the coefficient that clips to ``max_norm``.

    Grid: (1,). Tile: LANES sums, repeated over all. sums: float64 [n_sums]. total: float64 [1].
    result: float32 [2], the norm and min(max_norm / (norm + 1e-6), 1).
    """
    lane = tl.arange(0, LANES)
    lanes = tl.zeros((LANES,), tl.float64)
    for offset in tl.range(0, n_sums, LANES, loop_unroll_factor=4):
        x = tl.load(sums + offset + lane, offset + lane < n_sums, 0.0)
        lanes = combine(lanes, x, NORM_TYPE)
    norm = fold(lanes, NORM_TYPE)
    tl.store(total, norm)
    if NORM_TYPE == 2.0:
        norm = tl.sqrt(norm)  # correctly rounded in float64
    norm = norm.to(tl.float32)
    # A reciprocal and a product, because torch divides a number by a tensor like this.
    coefficient = tl.div_rn(1.0, norm + EPS) * max_norm
    tl.store(result, norm)
    tl.store(result + 1, tl.where(coefficient > 1.0, 1.0, coefficient))


def span_sums(
    addresses: Tensor,
    spans: Tensor,
    sums: Tensor,
    *,
    dtype: torch.dtype,
    norm_type: float,
    span: int,
    lanes: int,
) -> None:
    """Launch :func:`_span_sums_kernel`; all tables are on the device."""
    _span_sums_kernel[(spans.shape[0],)](
        addresses,
        spans,
        sums,
        DTYPE=tl.float64 if dtype == torch.float64 else TRITON_DTYPES[dtype],
        NORM_TYPE=norm_type,
        SPAN=span,
        LANES=lanes,
        num_warps=4,
        enable_fp_fusion=False,
    )


def total_norm(
    sums: Tensor, total: Tensor, result: Tensor, *, max_norm: float, norm_type: float, lanes: int
) -> None:
    """Launch :func:`_total_norm_kernel`."""
    _total_norm_kernel[(1,)](
        sums,
        sums.shape[0],
        max_norm,
        total,
        result,
        NORM_TYPE=norm_type,
        LANES=lanes,
        num_warps=16,
        enable_fp_fusion=False,
    )
