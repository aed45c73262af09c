"""The operators that keep a quantized tensor quantized, each with its callers.

All other operators see the dequantized values; in-place ones are refused.
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp4adam.tensors import rows
from fp4adam.tensors.quantized_tensor import (
    QuantizedTensor,
    implements_function,
    implements_operator,
    mark_written,
)
from fp4adam.tensors.quantizer import HIGH_PRECISION_DTYPES

aten = torch.ops.aten


# nn.Parameter, state_dict and .data share the storage of the tensor that they wrap.
implements_operator(aten.detach.default, aten.alias.default)(lambda func, x: x._alias())
implements_operator(aten.clone.default)(lambda func, x, **how: x._map_storage(torch.clone))
# torch.load and data loaders ask whether memory is pinned; FSDP2's CPU offload pins it.
implements_operator(aten.is_pinned.default)(
    lambda func, x, *device, **how: all(inner.is_pinned() for inner in x.inner.present)
)
implements_operator(aten._pin_memory.default)(
    lambda func, x, *device: x._map_storage(torch.Tensor.pin_memory, keeps_init_val=True)
)


@implements_operator(aten.record_stream.default)
def _record_stream(func: Callable, tensor: QuantizedTensor, stream: torch.Stream) -> None:
    for inner in tensor.inner.present:
        func(inner, stream)


# p.detach().float() and p.detach().to(dtype) ask for values, such as a master weight; parameters
# stay quantized, for Module.float() and Module.to(dtype).
def _values_as(dtype: torch.dtype, tensor: QuantizedTensor, **kwargs: Any) -> Tensor:
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return tensor.to(dtype) if is_parameter else tensor.dequantize(dtype)


for _method, _dtype in zip(("float", "bfloat16", "half"), HIGH_PRECISION_DTYPES, strict=True):
    implements_function(getattr(torch.Tensor, _method))(functools.partial(_values_as, _dtype))


@implements_function(torch.Tensor.to)
def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    moved = torch.Tensor.to(tensor, *args, **kwargs)
    is_value = isinstance(moved, QuantizedTensor) and not isinstance(tensor, torch.nn.Parameter)
    return moved.dequantize() if is_value and moved.dtype != tensor.dtype else moved


# Module.to, .cuda, .cpu, .bfloat16: the bytes move, the nominal dtype changes, nothing is rounded.
@implements_operator(aten._to_copy.default)
def _to_copy(
    func: Callable,
    tensor: QuantizedTensor,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **options: Any,
) -> Tensor:
    if dtype is not None and dtype not in HIGH_PRECISION_DTYPES:
        return tensor._read(dtype).to(device=device)

    def move(inner: Tensor) -> Tensor:
        return inner.to(device=device, non_blocking=non_blocking, copy=True)

    return tensor._map_storage(move, dtype, keeps_init_val=True)


# Under inference_mode torch does not make _to_copy of it, as FSDP2 needs for offloaded shards.
implements_operator(aten.to.device, aten.to.dtype, aten.to.dtype_layout)(
    lambda func, *args, **kwargs: func.decompose(*args, **kwargs)
)


# Module.to_empty; an explicit dtype asks for a plain tensor, as for optimizer state.
@implements_operator(aten.empty_like.default)
def _empty_like(
    func: Callable, tensor: QuantizedTensor, dtype: Any = None, device: Any = None, **options: Any
) -> Tensor:
    device = tensor.device if device is None else device
    if dtype is not None:
        return torch.empty(tensor.shape, dtype=dtype, device=device)
    if tensor.global_spec is not None or not rows.is_all(tensor):
        empty = tensor._map_storage(lambda inner: torch.zeros_like(inner, device=device))
    else:
        empty = tensor.quantizer.make_empty(tuple(tensor.shape), tensor.dtype, device)
    if tensor._shared.init_val is not None:
        empty._shared.init_val = torch.empty(tensor.shape, device="meta")
    return empty


# FSDP2 splits a parameter and allocates each shard; resharding of checkpoints slices.
@implements_operator(aten.split.Tensor)
def _split(func: Callable, tensor: QuantizedTensor, size: int, dim: int = 0) -> Any:
    length = tensor.shape[dim]
    starts = range(0, max(length, 1), max(size, 1))
    pieces = [_piece(tensor, dim, start, min(start + size, length)) for start in starts]
    is_decoded = any(piece is None for piece in pieces)
    return func(tensor._read(), size, dim) if is_decoded else pieces


@implements_operator(aten.slice.Tensor)
def _slice(
    func: Callable,
    tensor: QuantizedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    start, end, step = slice(start, end, step).indices(tensor.shape[dim])
    if (start, step) == (0, 1) and end >= tensor.shape[dim]:
        return tensor._alias()
    piece = _piece(tensor, dim, start, max(start, end)) if step == 1 else None
    return func(tensor._read(), dim, start, end, step) if piece is None else piece


def _piece(tensor: QuantizedTensor, dim: int, start: int, end: int) -> QuantizedTensor | None:
    """A window on these indices of a dimension: any rows, or columns in whole blocks; or None."""
    dim, block = dim % tensor.dim(), tensor.quantizer.layout.block
    shape = (*tensor.shape[:dim], end - start, *tensor.shape[dim + 1 :])
    if not tensor.quantizer.layout.rows_per_entry:
        return None
    if dim == 0:
        return tensor._alias(shape, start * math.prod(tensor.shape[1:-1]))
    is_blocks = start % block == 0 and (end % block == 0 or end == tensor.shape[-1])
    return tensor._alias(shape, 0, start) if dim == tensor.dim() - 1 and is_blocks else None


@implements_function(torch.Tensor.new_empty)
def _new_empty(tensor: Tensor, size: Any, *args: Any, **kwargs: Any) -> Tensor:
    if isinstance(tensor, QuantizedTensor) and size == [] and kwargs == {"device": "cpu"}:
        # Asynchronous checkpoints then give the result a copied storage and copied attributes.
        shape, dtype = tuple(tensor.shape), tensor.dtype
        return torch.Tensor._make_wrapper_subclass(type(tensor), shape, dtype=dtype, device="cpu")
    return torch.Tensor.new_empty(tensor, size, *args, **kwargs)


# Weights that are frozen before they have an optimizer, such as the base of adapters, get no master
# that would start from the value.
@implements_function(torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)
def _requires_grad_(tensor: QuantizedTensor, requires_grad: bool = True) -> QuantizedTensor:
    is_frozen_now = tensor.requires_grad and not requires_grad
    torch.Tensor.requires_grad.__set__(tensor, requires_grad)
    # Not for aliases: nn.Parameter(weight.detach(), False) makes one.
    is_base = isinstance(tensor, torch.nn.Parameter) and not tensor._shared.stepped_by
    if is_frozen_now and is_base:
        tensor.clear_high_precision_init_val()
    return tensor


@implements_operator(aten.new_zeros.default, aten.new_empty.default)
def _new_zeros(
    func: Callable,
    tensor: QuantizedTensor,
    size: tuple[int, ...],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **kwargs: Any,
) -> Tensor:
    device = tensor.device if device is None else torch.device(device)
    # FSDP2 allocates shards with such a call: the whole tensor's shape, cut in one dimension. To
    # get plain zeros of that size, pass a dtype.
    whole = tuple(tensor.shape) if tensor.global_spec is None else tensor.global_spec.shape
    is_cut = len(size) == len(whole) and all(map(int.__le__, size, whole))
    if dtype is None and is_cut and sum(map(int.__ne__, size, whole)) <= 1:
        return rows.make_shard(tensor, tuple(size), device)
    return torch.zeros(size, dtype=dtype or tensor.dtype, device=device)


# FSDP2 keeps shards flat, and applies size and strides to gathered tensors.
@implements_operator(aten.view.default)
def _view(func: Callable, tensor: QuantizedTensor, shape: tuple[int, ...]) -> Tensor:
    is_shard = tensor.global_spec is not None
    if is_shard and tuple(shape) == tuple(tensor.shape):  # DTensor.to_local()
        return tensor._alias()
    if is_shard and tuple(shape) in ((-1,), (tensor.numel(),)):
        # FSDP2 makes this call on every rank, also after loading a checkpoint.
        tensor._shared.unsettled = True
        return tensor._alias((tensor.numel(),))
    return func(tensor._read(), shape)


@implements_operator(aten.as_strided.default)
def _as_strided(
    func: Callable, tensor: QuantizedTensor, size: Any, stride: Any, storage_offset: Any = None
) -> Tensor:
    is_same = (tuple(size), tuple(stride)) == (tuple(tensor.shape), tuple(tensor.stride()))
    if is_same and not storage_offset:
        return tensor._alias()
    return func(tensor._read(), size, stride, storage_offset)


# Optimizer states and gradients are plain tensors in the shape of the parameter.
@implements_operator(
    *(getattr(aten, f"{kind}_like").default for kind in ("zeros", "ones", "full", "rand", "randn"))
)
def _plain_like(func: Callable, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Tensor:
    like = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return func(like, *args, **kwargs)


# load_state_dict, in both directions and between formats.
@implements_operator(aten.copy_.default)
def _copy_(func: Callable, out: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(out, QuantizedTensor):
        # Averages that are swapped in for validation are swapped out as they were.
        written = None if source._shared.left is None else source._high_precision_init_val
        return out.copy_(source._read(out.dtype) if written is None else written, non_blocking)
    if source.dtype not in HIGH_PRECISION_DTYPES:
        source = source.float()
    source = source.expand(out.shape) if source.shape != out.shape else source
    value = source.pending_value() if isinstance(source, QuantizedTensor) else source
    shared = out._shared
    if value is None:
        out._write(source, non_blocking)
    elif not _reads_as(out, value):
        if shared.is_copy and not isinstance(out, torch.nn.Parameter):
            shared.is_copy = False  # warns once, of values that come as averages do, by detach()
            warnings.warn(
                f"values written to a copy of a model are rounded to {type(out).__name__} each "
                "time, so that a moving average of weights stands still: call "
                "dequantize_model(copy) before you average, or use "
                "torch.optim.swa_utils.AveragedModel, whose copy is plain",
                stacklevel=2,
            )
        if shared.left is not None:
            left = shared.left._alias(tuple(out.shape), out._start, out._start_col)
            source = left if _reads_as(left, value) else source
        out._write(source, non_blocking)
    elif shared.rows_share_scales:
        # Other ranks may write theirs, and then these rows are quantized again.
        rows.keep_left(out)
        if shared.stepped_by and out._high_precision_init_val is None:
            rows.replace_init_val(out, value)
        shared.unsettled = True
        mark_written([out])
    return out


def _reads_as(tensor: QuantizedTensor, value: Tensor) -> bool:
    # Then its bytes are kept: quantizing the values again could change the scales.
    shared = tensor._shared
    # Reading would quantize pending rows too early.
    if shared.first_row is None or shared.pending is not None or tensor.is_meta or value.is_meta:
        return False
    bits = torch.int32 if value.dtype == torch.float32 else torch.int16
    values = value.detach().to(tensor.device), tensor.detach()._read(value.dtype)
    return torch.equal(*(x.view(bits) for x in values))


@implements_operator(aten._foreach_copy_.default)
def _foreach_copy_(
    func: Callable, outs: list[Tensor], sources: list[Tensor], non_blocking: bool = False
) -> None:
    for out, source in zip(outs, sources, strict=True):
        out.copy_(source, non_blocking)
    # Raised here, because autograd, which would raise the version, runs above this level.
    plain = [out for out in outs if not isinstance(out, QuantizedTensor)]
    torch.autograd.graph.increment_version(plain)


# torch.nn.init on a quantized parameter: overwrites all values and rounds once.
@implements_operator(
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.normal_.default,
    aten.uniform_.default,
)
def _overwrite(func: Callable, out: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    values = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    func(values, *args, **kwargs)
    return _copy_(aten.copy_.default, out, values)


# It reads values back between draws, so it runs on a plain tensor, and the result is written once.
_trunc_normal_ = torch.nn.init._no_grad_trunc_normal_


@functools.wraps(_trunc_normal_)
def _trunc_normal_at_once(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # The local tensor of a DTensor may be quantized.
    if not isinstance(getattr(tensor, "_local_tensor", tensor), QuantizedTensor):
        return _trunc_normal_(tensor, *args, **kwargs)
    with torch.no_grad():
        values = torch.empty_like(tensor, dtype=tensor.dtype)
        return tensor.copy_(_trunc_normal_(values, *args, **kwargs))


torch.nn.init._no_grad_trunc_normal_ = _trunc_normal_at_once
