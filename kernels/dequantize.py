"""Decoding: one kernel for codes and scales of every format, in any orientation."""

import functools
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.format import code_values, decode_factor, format_of
from fp4adam.kernels.launch.launch import alignment, kind_of, launch_of, on_its_device
from fp4adam.kernels.tiles.codes import round_to

# Groups of eight codes per program: two per thread.
GROUPS = 256


@triton.jit
def _dequantize_kernel(
    data_ptr, scale_ptr, amax_ptr, out_ptr, n_groups, groups_per_row, cols, stride_scale_row,
    stride_scale_col, stride_out_row, stride_out_col, rows_per_part, data_gap, scale_part, epsilon,
    F: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, PARTED: tl.constexpr,
    PLAIN: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Decode N groups of up to eight neighbouring codes of a row.

    Grid: (ceil(n_groups / N),). A thread reads a group, 4 or 8 bytes, and writes its values, 16
    bytes if BF16. BLOCK_ROWS, BLOCK_COLS: of a block. PLAIN: codes are aligned, eight divides their
    columns, and values lie as the codes do; else ``out`` has any strides. PARTED: codes are a stack
    of parts with ``rows_per_part`` rows, ``data_gap`` bytes between them, and scales ``scale_part``
    numbers apart; a block that a part cuts has a scale in both.
    """
    # The hint puts neighbouring groups in different threads; each writes its own 16 bytes of BF16.
    group = tl.program_id(0) * N + tl.max_contiguous(tl.arange(0, N), 1)
    inside = group < n_groups
    row = group // groups_per_row
    i = group - row * groups_per_row
    part = row // rows_per_part if PARTED else tl.zeros_like(row)
    scale_row = (row // BLOCK_ROWS - part * rows_per_part // BLOCK_ROWS).to(tl.int64)
    part = part.to(tl.int64)
    lane = tl.arange(0, 8)[None, :]
    if PLAIN:
        # The hints let a thread access the eight elements of a group at once.
        offs = group.to(tl.int64)[:, None] * 8 + lane
        offs = tl.max_contiguous(tl.multiple_of(offs, (1, 8)), (1, 8))
        mask = inside[:, None]
    else:
        offs = row.to(tl.int64)[:, None] * cols + (8 * i)[:, None] + lane
        mask = inside[:, None] & ((8 * i)[:, None] + lane < cols)
    start = part * data_gap
    if F.bits == 8:
        code = tl.load(data_ptr + start[:, None] + offs, mask, 0)
    elif PLAIN:
        words = tl.load((data_ptr + start).to(tl.pointer_type(tl.uint32)) + group, inside, 0)
        code = words.to(tl.int32, bitcast=True)[:, None] << (28 - 4 * lane)
    else:
        code = tl.load(data_ptr + start[:, None] + offs // 2, mask, 0).to(tl.int32)
        code = code << (28 - 4 * (lane % 2))
    CODE: tl.constexpr = F.code
    value = code_values(code, CODE)
    scale = 0
    if F.scale != "":
        grid = scale_ptr + part * scale_part + scale_row * stride_scale_row
        if BLOCK_COLS >= 8:
            column = (8 * i // BLOCK_COLS).to(tl.int64)
            scale = tl.load(grid + column * stride_scale_col, inside, 0)[:, None]
        else:
            column = tl.multiple_of(8 * i, 8)[:, None] + lane
            scale = tl.load(grid[:, None] + column * stride_scale_col, mask, 0)
    amax = tl.load(amax_ptr) if F.tensor_amax != "" else 0.0
    factor, _ = decode_factor(scale, amax, epsilon, F)
    value = round_to(value * factor, out_ptr.dtype.element_ty)
    if PLAIN:
        tl.store(out_ptr + offs, value, mask)
    else:
        out = row.to(tl.int64)[:, None] * stride_out_row
        out += ((8 * i)[:, None] + lane).to(tl.int64) * stride_out_col
        tl.store(out_ptr + out, value, mask)


def decoder(out: Tensor, tensors: Any, layout: Any) -> Callable[[], None]:
    """A function that decodes a ``Storage`` into ``out`` [rows, cols] whenever it is called.

    The memory of all tensors may have been reallocated since, with the same alignment. Rowwise
    codes and scales may be stacks [parts, ...] of consecutive parts of the rows, which may have
    gaps between parts.
    """
    usage = "columnwise" if tensors.rowwise_data is None else "rowwise"
    direction = getattr(layout, usage)
    data, transposed = getattr(tensors, f"{usage}_data"), direction.codes.transposed
    scale, block = None, (1, 1)
    if layout.scale_type is not None:
        name = "block_scale_inv" if layout.is_square else f"{usage}_scale_inv"
        scale, inner = getattr(tensors, name), layout.inner[name]
        block = inner.rows, inner.cols
        # As the codes lie: one row per row of blocks.
        scale = scale.transpose(-2, -1) if inner.transposed != transposed else scale
        block = block[::-1] if transposed else block
    target = out.t() if transposed else out
    parts = 0, 0, 0
    if data.dim() == 3:
        _, rows, row_bytes = data.shape
        parts = rows, data.stride(0) - rows * row_bytes, 0 if scale is None else scale.stride(0)
    plain = not transposed and out.shape[1] % 8 == 0
    # Words of codes are read, of all parts.
    plain = plain and alignment(data)[0] and (data.dim() == 2 or data.stride(0) % 16 == 0)
    F = format_of(layout, tensor_amax="stored" if layout.tensor_scale else "")
    given = data, data if scale is None else scale, data if tensors.amax is None else tensors.amax
    strides = (0, 0) if scale is None else scale.stride()[-2:]
    rows, cols = target.shape
    across = -(-cols // 8)
    fixed = rows * across, across, cols, *strides, *target.stride(), *parts
    launch = launch_of(
        _dequantize_kernel, -(-rows * across // GROUPS),
        (*fixed, layout.scale_rule.amax_epsilon), (F, *block, parts[0] > 0, plain, GROUPS), 4,
        *kind_of(out, *given),
    )  # fmt: skip
    return functools.partial(launch, *given, out)


@on_its_device
def dequantize(out: Tensor, tensors: Any, layout: Any) -> None:
    """Decode a ``Storage`` into ``out`` [rows, cols]."""
    if out.numel():
        decoder(out, tensors, layout)()
