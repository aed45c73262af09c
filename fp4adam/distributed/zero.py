"""ZeRO: quantized weights with sharded masters, for optimizers such as Megatron's."""

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fp4adam.distributed.cast import CastSpan, Out, PartialCast, as_pair
from fp4adam.interop.adapter import adapter_of, is_foreign
from fp4adam.interop.borrowed_tensor import BorrowedTensor, ScaleWriteback, borrow
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import HIGH_PRECISION_DTYPES
from fp4adam.tensors.rows import is_all
from fp4adam.tensors.transpose import build_columnwise

Found = tuple[list[Tensor], dict[int, BorrowedTensor]]


def quantize_master_weights(
    model_weights: Sequence[Tensor],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup | None,
    fsdp_shard_model_weights: Sequence[Out] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Quantize this rank's slices of the masters into weights that every rank has in full.

    Masters are rounded to the nominal dtype of their weight, then quantized with scales that all
    ranks of ``group`` agree on in one all-reduce. Afterwards every rank has all scales
    and amaxes, and the codes of its own slices. The caller then all-gathers ``rowwise_data`` (for
    MXFP8 also ``columnwise_data``) and calls :func:`post_all_gather_processing`. The result equals
    that of ``FP4Adam(quantize_from="param_dtype")`` on one process, bit for bit.

    The high-precision initial value of a weight, if any, is freed. All ranks have to pass the same
    weights in the same order.

    Args:
        model_weights: NVFP4, MXFP8, Float8 or Float8Block tensors on one device, of any shape, of
            this package, Transformer Engine or a class with a :class:`TensorAdapter`; NVFP4 and
            Float8Block with square blocks. With delayed scaling the amax that ranks agree on
            becomes part of the history.
        master_weights: Per weight this rank's slice of the flattened master, contiguous, of any
            shape, float32, bfloat16 or float16; None if the rank has no slice of it.
        start_offsets: Per weight the index of the slice's first element; ignored without a slice.
        group: The ranks that share the weights; None means all ranks.
        fsdp_shard_model_weights: Per weight the memory for the codes of its slice, contiguous
            uint8, or None to write to the weight itself. NVFP4: bytes [start // 2, (start + size +
            1) // 2) of the flat ``rowwise_data``; nibbles of other ranks are preserved. MXFP8: a
            pair, rowwise and columnwise. A tensor of another package stands for its codes.
        manual_post_all_gather_processing: True keeps columnwise storage, which is stale until
            :func:`post_all_gather_processing`. False drops it, except for MXFP8: quantizers become
            rowwise-only, and Transformer Engine's tensors build it again in the next forward pass.
            MXFP8 keeps both directions, and both are written.

    Raises:
        ValueError: If an argument is not as described; raised before any communication.
        TypeError: If a weight is of another package's class without an adapter.
        NotImplementedError: If columnwise codes of another package's tensor cannot be dropped.
        RuntimeError: Without a process group. In both cases nothing has changed.
    """
    # Else torch would call Python for each attribute of each weight.
    with torch._C.DisableTorchFunctionSubclass():
        plan, values, outs = _plan_for(
            model_weights, master_weights, start_offsets, fsdp_shard_model_weights
        )
    drops = not manual_post_all_gather_processing
    derived = [
        drops and one.layout.is_square and one.weight.quantizer.columnwise
        for one in plan.cast.spans
    ]
    for i, one in plan.borrowed.items():
        if derived[i] and one.adapter.drop_columnwise is None:
            raise NotImplementedError(
                f"drop_columnwise must be defined by {type(one.adapter).__name__} to drop "
                "columnwise codes, got none; or pass manual_post_all_gather_processing=True"
            )
    if not model_weights:
        return
    if not dist.is_initialized():
        raise RuntimeError(
            "quantize_master_weights must be called on the ranks of a process group, got none; "
            "call torch.distributed.init_process_group first, on a single process as well"
        )
    for i, weight in enumerate(model_weights):
        plan.borrowed.get(i, weight).clear_high_precision_init_val()
    with plan.scales_of_others:
        plan.cast.measure(values, outs)
        # As integers, which order as these floats do, NaN is the largest on every rank.
        dist.all_reduce(plan.cast.amaxes.view(torch.int32), dist.ReduceOp.MAX, group)
        plan.cast.write(values, outs)
    torch.autograd.graph.increment_version(model_weights)
    for i in compress(range(len(derived)), derived):
        if i in plan.borrowed:
            plan.borrowed[i].adapter.drop_columnwise(model_weights[i])
        else:
            model_weights[i].update_usage(columnwise_usage=False)


class CastPlan(NamedTuple):
    """A cast of slices into weights. Its amaxes and launches are kept while ``known`` holds.

    It keeps the codes of all weights while the first of them is alive, but no values.
    """

    known: list
    borrowed: dict[int, BorrowedTensor]
    cast: PartialCast
    scales_of_others: ScaleWriteback


_plans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by their first weights


def cast_plan(
    weights: Sequence[Tensor],
    found: Found,
    starts: list[int],
    values: Sequence[Tensor],
    dtypes: list[torch.dtype],
) -> CastPlan:
    """The plan to cast slices of flattened weights, from values that are rounded to ``dtypes``: the
    one of the last call for the first weight, if all is where it was. ``found``: their tensors.
    """
    tensors, borrowed = found
    sizes = [value.numel() for value in values]
    known = [borrowed, [tensor._shared.tensors for tensor in tensors], starts, sizes, dtypes]
    plan = _plans.get(weights[0]) if weights else None
    if plan is None or plan.known != known:
        aliases = [one if i in borrowed else one._alias() for i, one in enumerate(tensors)]
        cast = PartialCast(aliases, starts, sizes, dtypes)
        plan = CastPlan(known, borrowed, cast, ScaleWriteback([*borrowed.values()]))
        if weights:
            _plans[weights[0]] = plan
    return plan


def _plan_for(
    model_weights: Sequence[Tensor],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    outs: Sequence[Out] | None,
) -> tuple[CastPlan, list[Tensor], Sequence[Out] | None]:
    """The cast for the arguments of :func:`quantize_master_weights`, its values and memory."""
    lists = dict(master_weights=master_weights, start_offsets=start_offsets)
    if outs is not None:
        lists["fsdp_shard_model_weights"] = outs = [*map(_codes, outs)]
    for name, given in lists.items():
        if len(given) != len(model_weights):
            raise ValueError(
                f"{name} must have one entry per weight, {len(model_weights)}, got {len(given)}; "
                "pass None for a weight that this rank has no part of"
            )
    tensors, borrowed = quantized(model_weights)
    for i, weight in enumerate(tensors):
        _check_weight(i, weight)
        if weight.device != tensors[0].device:
            raise ValueError(
                f"model_weights[{i}] must be on the device of the others, {tensors[0].device}, got "
                f"{weight.device}; cast the weights of each device separately"
            )
        if master_weights[i] is not None:
            _check_master(i, weight, master_weights[i], start_offsets[i])
    empty = torch.empty(0, device=tensors[0].device if tensors else None)
    values = [empty if master is None else master for master in master_weights]
    starts = [0 if one is empty else start_offsets[i] for i, one in enumerate(values)]
    dtypes = [weight.dtype for weight in model_weights]
    plan = cast_plan(model_weights, (tensors, borrowed), starts, values, dtypes)
    for i, (one, out) in enumerate(zip(plan.cast.spans, outs or (), strict=False)):
        _check_out(i, one, out)
    return plan, values, outs


def _check_weight(i: int, weight: Tensor) -> None:
    kind = type(weight).__name__
    if not isinstance(weight, QuantizedTensor):
        raise ValueError(
            f"model_weights[{i}] must be an NVFP4, MXFP8, Float8 or Float8Block tensor, got a "
            f"{kind}; quantize_model makes such parameters"
        )
    if not is_all(weight):
        got = f"got a slice of shape {tuple(weight.shape)}"
        raise ValueError(f"model_weights[{i}] must be whole, {got}; pass the weight itself")
    if not weight.quantizer.layout.rows_per_entry:
        raise ValueError(
            f"model_weights[{i}] must have square blocks and rowwise data to be cast in shards, "
            f"got a {kind} with {weight.quantizer}: its columnwise codes need whole columns; make "
            "it with two_dimensional=True and rowwise=True"
        )


def _check_master(i: int, weight: QuantizedTensor, master: Tensor, start: int | None) -> None:
    if not isinstance(master, Tensor) or start is None:
        raise ValueError(
            f"master_weights[{i}] must be a tensor with a start_offsets[{i}], got a "
            f"{type(master).__name__} and {start}; pass None for both without a slice"
        )
    if (
        isinstance(master, QuantizedTensor)
        or master.dtype not in HIGH_PRECISION_DTYPES
        or not master.is_contiguous()
        or master.device != weight.device
    ):
        raise ValueError(
            f"master_weights[{i}] must be a contiguous float32, bfloat16 or float16 tensor on "
            f"{weight.device}, got {_describe(master)}; pass this rank's slice of the flattened "
            "master"
        )
    if start < 0 or start + master.numel() > weight.numel():
        raise ValueError(
            f"master_weights[{i}] must lie inside its weight of {weight.numel()} elements, got "
            f"[{start}, {start + master.numel()}); count elements of the flattened weight"
        )


def _check_out(i: int, one: CastSpan, out: Out) -> None:
    if out is None:
        return
    name, bounds = f"fsdp_shard_model_weights[{i}]", [one.span.start, one.span.stop]
    is_pair, is_square = isinstance(out, tuple | list), one.layout.is_square
    if (len(out) != 2 or (is_square and out[1] is not None)) if is_pair else not is_square:
        raise ValueError(
            f"{name} must be one tensor, or for MXFP8 a pair (rowwise, columnwise), got a "
            f"{type(out).__name__} for {type(one.weight).__name__}; columnwise codes of other "
            "formats are built from the rowwise ones"
        )
    for part in as_pair(out):
        if part is not None:
            cure = f"slice the flat codes at the bytes of elements {bounds}"
            _check_codes(name, part, one.nbytes, one.weight.device, cure)


def _check_codes(name: str, x: Tensor, n: int, device: torch.device, cure: str) -> None:
    is_like = (x.dtype, x.numel(), x.device) == (torch.uint8, n, device)
    if not (is_like and x.is_contiguous()):
        raise ValueError(
            f"{name} must be contiguous uint8 of {n} bytes on {device}, got {_describe(x)}; {cure}"
        )


def _describe(x: Tensor) -> str:
    return f"{tuple(x.shape)} of {x.dtype} with strides {x.stride()} on {x.device}"


def quantized(weights: Sequence[Tensor]) -> Found:
    """The weights as this package's tensors, and by index those borrowed from other packages."""
    foreign = (i for i, w in enumerate(weights) if isinstance(w, Tensor) and is_foreign(w))
    borrowed = {i: borrow(weights[i]) for i in foreign}
    return [borrowed[i].tensor if i in borrowed else w for i, w in enumerate(weights)], borrowed


def _codes(out: Out) -> Out:
    """The memory of codes; a tensor of another package stands for its rowwise codes."""
    if isinstance(out, Tensor) and is_foreign(out):
        return adapter_of(out).fields(out)["rowwise_data"]
    return out


# Transformer Engine's older names.
cast_master_weights_to_fp8 = cast_master_weights_to_nvfp4 = quantize_master_weights


def post_all_gather_processing(model_weights: Tensor | Sequence[Tensor]) -> None:
    """Update columnwise codes after the all-gather of rowwise codes.

    For NVFP4, Float8 and Float8Block the rowwise codes are transposed into the columnwise ones, in
    one or two launches per code width. MXFP8 needs nothing, as its columnwise codes are
    gathered too. Plain tensors and those without columnwise codes are skipped; those of Transformer
    Engine make them when they need them.

    Args:
        model_weights: One tensor or a sequence, after :func:`quantize_master_weights`.

    Raises:
        ValueError: If columnwise codes cannot be derived from rowwise ones
            (``two_dimensional=False``).
    """
    given = [model_weights] if isinstance(model_weights, Tensor) else model_weights
    weights = [w for w in given if isinstance(w, QuantizedTensor) or is_foreign(w)]
    tensors, borrowed = quantized(weights)
    for i, tensor in enumerate(tensors):
        if tensor.quantizer.columnwise:
            _check_weight(i, tensor)
    build_columnwise([one for one in tensors if one.quantizer.layout.is_square])
    for one in borrowed.values():
        for target, codes in one.mirrors:  # second copies of the codes
            target.copy_(codes)
    torch.autograd.graph.increment_version(weights)


def replace_raw_data(tensor: Tensor, new_raw_data: Tensor) -> None:
    """Move the rowwise codes of a tensor to other memory, such as a slice of a parameter buffer.

    Args:
        tensor: A quantized tensor, of this package or of Transformer Engine; its codes are in
            ``new_raw_data`` afterwards.
        new_raw_data: Contiguous uint8 of as many bytes, on the same device; overwritten. The fused
            kernels can only step it if it is aligned to 16 bytes.

    Raises:
        ValueError: If an argument is not as above.
        NotImplementedError: If the tensor has no rowwise codes, or columnwise ones, as MXFP8 in
            both directions, that do not follow from those that such a buffer gathers.
    """
    (own,), _ = quantized([tensor])
    if not isinstance(own, QuantizedTensor):
        raise ValueError(
            f"tensor must be a quantized tensor, got a {type(tensor).__name__}; set the data of a "
            "plain one"
        )
    quantizer = own.quantizer
    if not quantizer.rowwise or quantizer.columnwise and not quantizer.layout.is_square:
        raise NotImplementedError(
            f"a {type(tensor).__name__} must have rowwise codes, alone or of square blocks, to be "
            f"moved to a buffer, got {quantizer}; keep it in memory of its own, and gather its "
            "values"
        )
    name = "_rowwise_data" if hasattr(tensor, "_rowwise_data") else "_data"
    old, cure = getattr(tensor, name), "slice as many bytes out of the buffer"
    _check_codes("new_raw_data", new_raw_data, old.numel(), old.device, cure)
    new = new_raw_data.view(old.shape)
    new.copy_(old)
    setattr(tensor, name, new)
