"""Slices and shards: tensors with some of the rows that their inner tensors hold.

The inner tensors hold a matrix of whole blocks. A window shares them: some rows, or columns in
whole blocks. So a slice costs nothing, and a shard may begin within a block.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp4adam.tensors import encoding
from fp4adam.tensors.blocks import flat_shape, round_up
from fp4adam.tensors.storage import GlobalSpec, Storage
from fp4adam.tensors.swizzle import build_gemm_scales
from fp4adam.tensors.transpose import build_columnwise

if TYPE_CHECKING:
    from fp4adam.tensors.quantized_tensor import QuantizedTensor
    from fp4adam.tensors.quantizer import Quantizer


def matrix_shape(tensor: QuantizedTensor) -> tuple[int, int]:
    """Rows and columns of the matrix that a tensor is quantized as."""
    *leading, last = tensor.shape
    if leading:
        return math.prod(leading), last
    # FSDP2 keeps shards flat.
    cols = tensor.global_spec.shape[-1]
    return last // max(cols, 1), cols


def stored_shape(tensor: QuantizedTensor) -> tuple[int, int]:
    """Rows and columns of the matrix that the inner tensors hold."""
    return tensor.quantizer.decoded_shape(tensor.inner)


def _has_all_columns(tensor: QuantizedTensor) -> bool:
    return matrix_shape(tensor)[1] == stored_shape(tensor)[1]


def is_all(tensor: QuantizedTensor) -> bool:
    """Whether a tensor has all values in its storage."""
    if tensor._start:
        return False
    rows, (stored, cols) = tensor._shared.rows, stored_shape(tensor)
    return matrix_shape(tensor) == (stored if rows is None else rows, cols)


def is_whole_blocks(tensor: QuantizedTensor) -> bool:
    """Whether a tensor has its whole storage, and shares no block with another shard."""
    is_cut = tensor.global_spec is not None and tensor.global_spec.is_cut
    return not (tensor._shared.first_row or is_cut) and is_all(tensor)


def own_blocks(tensor: QuantizedTensor) -> QuantizedTensor:
    """The tensor on views of the blocks that hold its rows alone; itself if it has all values.

    Inner tensors that can be derived are left out. Blocks of some columns are copied.
    """
    if is_all(tensor):
        return tensor
    (rows, _), block = matrix_shape(tensor), tensor.quantizer.layout.block
    first = tensor._first_row
    low = first // block * block
    high = max(min(round_up(first + rows, block), stored_shape(tensor)[0]), low)
    pending = tensor._shared.pending
    pending = None if pending is None else rows_of(tensor, pending)
    tensors = _stored_between(tensor, low, high)
    shared = tensor._shared.on(tensors, pending=pending, rows=rows, first_row=first - low)
    quantizer = tensor.quantizer.without_derived()
    return type(tensor)(tuple(tensor.shape), tensor.dtype, quantizer, shared)


def _stored_between(tensor: QuantizedTensor, low: int, high: int) -> Storage:
    """Inner tensors on stored rows ``low`` to ``high``, without derived ones, all contiguous."""
    tensors, views = tensor.inner, {}
    for name, rows in tensor.quantizer.layout.rows_per_entry.items():
        views[name] = _columns_of(tensor, name)[low // rows : -(-high // rows)].contiguous()
    return Storage(amax=tensors.amax, amax_history=tensors.amax_history, **views)


def own_entries(tensor: QuantizedTensor) -> dict[str, Tensor]:
    """The inner tensors that exist; of a shard what codes and scales its rows have, to compare.

    The others differ: casts write the scales of blocks without rows, copies leave them out.
    """
    if tensor.global_spec is None:
        return tensor.inner.existing()
    first, n_rows = tensor._first_row, matrix_shape(tensor)[0]
    entries = _stored_between(tensor, first, first + n_rows).existing()
    return entries if n_rows else {name: inner[:0] for name, inner in entries.items()}


def _columns_of(tensor: QuantizedTensor, name: str) -> Tensor:
    """The window's columns of an inner tensor, without padding unless it has all columns."""
    inner, per_entry = getattr(tensor.inner, name), tensor.quantizer.layout.inner[name].cols
    if _has_all_columns(tensor):
        return inner
    first, stop = tensor._start_col, tensor._start_col + matrix_shape(tensor)[1]
    return inner[:, first // per_entry : -(-stop // per_entry)]


def read(tensor: QuantizedTensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    """Decode a tensor to a plain matrix of ``dtype``; ``after`` as in :meth:`Quantizer.read`."""
    pending = tensor._shared.pending
    if pending is not None:
        return rows_of(tensor, pending).to(dtype, copy=True)
    part, rows = own_blocks(tensor), matrix_shape(tensor)[0]
    values = part.quantizer.read(part.inner, dtype, after)
    # Cloned, so that it starts at the beginning of its own memory: it may become a DTensor's state.
    return values if len(values) == rows else values[part._first_row :][:rows].clone()


def write(tensor: QuantizedTensor, value: Tensor, amax: Tensor | None = None) -> None:
    """Overwrite a tensor with plain values on its device; ``amax`` as for ``Quantizer.write``.

    Loaders write shards row by row. Values that share scales with other rows, of the shard or of
    other ranks, are pending until all are there.
    """
    shared, has_all = tensor._shared, is_all(tensor)
    shares_scales = shared.rows_share_scales
    # Runs of whole blocks of rows, the last of which may be cut by the end of the shard.
    block, first, rows = tensor.quantizer.layout.block, tensor._first_row, stored_shape(tensor)[0]
    stop = first + matrix_shape(tensor)[0]
    is_cut = first % block or (stop % block and stop < rows)
    in_blocks = has_all or (_has_all_columns(tensor) and not is_cut)
    if not has_all and shared.global_spec is None:
        raise RuntimeError(
            f"a {type(tensor).__name__} must be written as a whole, got values for a slice of "
            f"shape {tuple(tensor.shape)}, whose scales depend on other rows: write the whole "
            "weight, or load into plain weights and quantize those"
        )
    waits = shares_scales or not in_blocks or shared.pending is not None
    shared.unsettled |= waits
    if tensor.is_meta or not value.numel():
        return
    matrix = value.reshape(matrix_shape(tensor))
    if has_all and shares_scales:
        shared.pending = matrix.clone()
    elif has_all or not waits:
        shared.pending = None
        _quantize(tensor, matrix.contiguous(), {} if amax is None else {"amax": amax})
    elif shared.pending is None:
        shared.pending = _with_rows(tensor, matrix)
    else:
        if shared.pending.dtype != matrix.dtype:
            shared.pending = shared.pending.float()
        rows_of(tensor, shared.pending).copy_(matrix)


def _quantize(tensor: QuantizedTensor, matrix: Tensor, options: dict[str, Any]) -> None:
    first, rows = tensor._first_row, len(matrix)
    if rows == stored_shape(tensor)[0]:
        tensor.quantizer.write(matrix, tensor.inner, **options)
        build_gemm_scales([tensor])
    else:
        storage = _stored_between(tensor, first, first + rows)
        tensor.quantizer.without_derived().write(matrix, storage, **options)
        _build_derived(every_row(tensor))


def _with_rows(tensor: QuantizedTensor, value: Tensor) -> Tensor:
    """All rows of a storage as a new, unrounded matrix, in which a window has these values."""
    init_val = tensor._shared.init_val
    if init_val is None or init_val.is_meta:
        every = read(every_row(tensor), value.dtype)
    else:
        every = init_val.reshape(-1, stored_shape(tensor)[1]).to(tensor.device, copy=True)
    every = every.to(torch.promote_types(every.dtype, value.dtype))
    rows_of(tensor, every).copy_(value.reshape(matrix_shape(tensor)))
    return every


def copy_bytes(tensor: QuantizedTensor, source: QuantizedTensor, non_blocking: bool) -> bool:
    """Copy codes and scales of ``source`` if the formats allow it; False if nothing was copied."""
    shared, other, layout = tensor._shared, source._shared, tensor.quantizer.layout
    in_parts = tensor.global_spec is not None or source.global_spec is not None
    # What is left out is derived from these.
    names = [*layout.rows_per_entry] or [name for name in layout.inner if "gemm" not in name]
    if (
        not tensor.quantizer.writes_codes_of(source.quantizer)
        or not (layout.rows_per_entry if in_parts else is_all(tensor) and is_all(source))
        or any(getattr(source.inner, name) is None for name in names)
    ):
        return False
    if shared.first_row is None:
        _become_shard(tensor, source, non_blocking)
    to, start, rows = tensor._first_row, source._first_row, matrix_shape(tensor)[0]
    waits = other.pending is not None or (shared.pending is not None and not is_all(tensor))
    if waits or (to - start) % layout.block:
        return False
    shared.pending = None
    for name in names:
        targets, values = _columns_of(tensor, name), _columns_of(source, name)
        if in_parts:
            step = layout.rows_per_entry[name]
            targets = targets[to // step : -(-(to + rows) // step)]
            values = values[start // step : -(-(start + rows) // step)]
            width = min(targets.shape[-1], values.shape[-1])
            targets, values = targets[..., :width], values[..., :width]
        targets.copy_(values, non_blocking)
    _take_amax(tensor, source, non_blocking)
    _build_derived(every_row(tensor))
    return True


def _become_shard(tensor: QuantizedTensor, source: QuantizedTensor, non_blocking: bool) -> None:
    """Take over from ``source`` what an unwritten shard lacks besides codes and scales."""
    shared, other, left = tensor._shared, source._shared, None
    if source.global_spec is not None:  # FSDP2 moves the shard, with what a step has left there
        keep_left(source)
        left = None if other.left is None else tensor.twin()
    shared.first_row = source._first_row % tensor.quantizer.layout.block
    shared.rows = matrix_shape(tensor)[0]
    shared.init_val = other.init_val
    if other.init_val is not None and not other.init_val.is_meta:
        shared.init_val = rows_of(source, other.init_val).reshape(tensor.shape).clone()
    shared.stepped_by = shared.stepped_by or other.stepped_by
    if left is not None:
        sent = other.left._alias(tuple(source.shape), source._start, source._start_col)
        copy_bytes(left, sent, non_blocking=False)
        shared.left = every_row(left)
    _take_amax(tensor, source, non_blocking)  # delayed scaling quantizes with those of before


def _take_amax(tensor: QuantizedTensor, source: QuantizedTensor, non_blocking: bool) -> None:
    """Copy the amax of a whole tensor, and its history, unless the shard has no rows."""
    for name in ("amax", "amax_history") if tensor.numel() else ():
        own = getattr(tensor.inner, name)
        if own is not None:
            own.copy_(getattr(source.inner, name), non_blocking)


def _build_derived(tensor: QuantizedTensor) -> None:
    if tensor.quantizer.layout.is_square and tensor.quantizer.rowwise:
        build_columnwise([tensor])
    build_gemm_scales([tensor])


def is_of(tensor: QuantizedTensor, value: Tensor, slack: int = 0) -> bool:
    """Whether a tensor's codes are those of ``value`` under its own scales, but for ``slack``."""
    pending, part = tensor._shared.pending, own_blocks(tensor)
    own = slice(part._first_row, part._first_row + matrix_shape(tensor)[0])
    layout = part.quantizer.layout

    def codes(matrix: Tensor) -> Tensor:
        values = torch.zeros(stored_shape(part), dtype=torch.float32, device=tensor.device)
        values[own] = matrix.view(matrix_shape(tensor))
        return encoding.recode(part.quantizer, values, part.inner)[own].short()

    actual = part.inner.codes[own].short() if pending is None else codes(rows_of(tensor, pending))
    if layout.scale_type == "float32" and not layout.scale_rule.force_pow_2_scales:
        slack = 1  # the reciprocal of a stored scale is not always its encode scale
    return bool(((codes(value) - actual).abs() <= slack).all())


def make_shard(tensor: QuantizedTensor, shape: tuple, device: torch.device) -> QuantizedTensor:
    """A new, unwritten shard of ``tensor``, or of the whole tensor that it is a shard of."""
    spec = tensor.global_spec
    if spec is None:
        spec = GlobalSpec(tuple(tensor.shape), tensor.quantizer, shape[0])
    elif spec.is_parallel and spec.chunk == spec.shape[0]:
        spec = dataclasses.replace(spec, chunk=shape[0])
    quantizer = spec.quantizer.without_derived()
    what = _check_can_be_sharded(tensor, spec.quantizer)
    if tuple(shape[1:]) != tuple(spec.shape[1:]):
        raise ValueError(
            f"{what} must be sharded along its first dimension, got shards {tuple(shape)} of "
            f"{tuple(spec.shape)}; use Shard(0), or ask for plain zeros (dtype=...)"
        )
    block, rows = quantizer.layout.block, math.prod(shape[:-1])
    if spec.is_cut:
        # Enough blocks for any first row within a block.
        rows = round_up(rows + block - 1, block)
    unwritten = dict(rows=None, first_row=None, unsettled=True, is_copy=False)
    zeros = quantizer.zeros(rows, shape[-1], device)
    shared = tensor._shared.on(zeros, global_spec=spec, **unwritten)
    return type(tensor)(tuple(shape), tensor.dtype, quantizer, shared)


def parallel_part(
    tensor: QuantizedTensor, dim: int, number: int, n_parts: int, info: Any
) -> QuantizedTensor:
    """One of equal parts, which :func:`check_parallel` allows: a tensor with the weight's bytes."""
    quantizer, size = tensor.quantizer, tensor.shape[dim] // n_parts
    window = tensor.narrow(dim, number * size, size)
    shape = tuple(window.shape)
    spec = GlobalSpec(shape, quantizer, shape[0], is_parallel=True)
    unwritten = dict(rows=None, first_row=None, unsettled=False, is_copy=False)
    zeros = quantizer.zeros(*flat_shape(shape), tensor.device)
    shared = tensor._shared.on(zeros, global_spec=spec, parallel=info, **unwritten)
    part = type(tensor)(shape, tensor.dtype, quantizer, shared)
    if tensor.is_meta:
        shared.first_row, shared.unsettled = 0, shared.rows_share_scales
        shared.init_val = tensor._shared.init_val
    else:
        copy_bytes(part, window, non_blocking=False)
    return part


def check_parallel(tensor: QuantizedTensor, dim: int, n_parts: int) -> None:
    """Raise ValueError unless a weight has that many equal parts of whole blocks."""
    what = _check_can_be_sharded(tensor, tensor.quantizer)
    block, last = tensor.quantizer.layout.block, tensor.dim() - 1
    dim = dim % tensor.dim()
    indices = tensor.shape[dim]
    rows_per_index = math.prod(tensor.shape[1:-1]) if dim == 0 else 1
    is_cut = indices % n_parts or indices * rows_per_index % (n_parts * block)
    is_whole = is_all(tensor) and tensor.global_spec is None
    if is_cut or dim not in (0, last) or not is_whole:
        raise ValueError(
            f"{what} must be whole, and the dimension that is divided the first or last one and a "
            f"multiple of {n_parts} parts of {block} (the side of a block) for tensor parallelism, "
            f"got shape {tuple(tensor.shape)} and Shard({dim}); use a mesh of another size, or "
            "leave the layer in high precision (filter=...)"
        )


def _check_can_be_sharded(tensor: QuantizedTensor, quantizer: Quantizer) -> str:
    """The tensor's name for errors; raises ValueError if its format has no shards."""
    name = tensor.parameter_name
    what = type(tensor).__name__ if name is None else f"parameter {name!r}"
    if not quantizer.without_derived().layout.rows_per_entry:
        raise ValueError(
            f"{what} must have rowwise=True, and where there is the option two_dimensional=True to "
            f"be sharded, got {quantizer}; quantize it that way, leave it in high precision "
            "(filter=...), or ask for plain zeros (dtype=...)"
        )
    return what


def keep_left(tensor: QuantizedTensor) -> None:
    """Keep what a step has left, before other code writes."""
    shared, targets = tensor._shared, tensor._shared.stepped_by
    is_kept = shared.left is not None or tensor._high_precision_init_val is not None
    if targets and not (is_kept or tensor.is_meta) and all(t.has_left(shared) for t in targets):
        shared.left = every_row(tensor).twin()


def replace_init_val(tensor: QuantizedTensor, value: Tensor | None) -> None:
    """Update the high-precision initial value after a write, if it is kept; None if unknown."""
    shared = tensor._shared
    keeps = shared.init_val is not None or shared.stepped_by
    if is_all(tensor):
        if keeps:
            kept = None if value is None else value.to(tensor.device, copy=True)
            tensor._high_precision_init_val = kept
    elif shared.pending is None:
        has_init_val = shared.init_val is not None and not shared.init_val.is_meta
        if has_init_val or (keeps and value is not None):
            # The other rows keep their values.
            value = tensor._read(torch.float32) if value is None else value
            shared.init_val = _with_rows(tensor, value)


def rows_of(tensor: QuantizedTensor, value: Tensor) -> Tensor:
    """Cut the window [rows, cols] out of a value for all of its storage."""
    rows, cols = matrix_shape(tensor)
    every_row = value.reshape(-1, stored_shape(tensor)[1])[tensor._start : tensor._start + rows]
    return every_row[:, tensor._start_col : tensor._start_col + cols]


def every_row(tensor: QuantizedTensor) -> QuantizedTensor:
    """A window on all of the storage, as a matrix."""
    rows, (stored, cols) = tensor._shared.rows, stored_shape(tensor)
    shape = (stored if rows is None else rows, cols)
    return tensor._alias(shape, -tensor._start, -tensor._start_col)
