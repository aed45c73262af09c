"""Quantized copies of weights that are trained in high precision, written again after a step."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import is_dtensor
from fp4adam.distributed.zero import cast_plan, quantized
from fp4adam.interop.adapter import is_foreign
from fp4adam.interop.borrowed_tensor import ScaleWriteback
from fp4adam.tensors import backend
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import HIGH_PRECISION_DTYPES
from fp4adam.tensors.rows import is_all
from fp4adam.tensors.transpose import build_columnwise

Weight = Tensor | Sequence[Tensor]


@torch._disable_dynamo
@torch.no_grad()
def cast(copies: Sequence[Tensor], weights: Sequence[Weight]) -> None:
    """Quantize weights to copies of them, in place.

    The bytes are those of ``quantizer.quantize(weight)``, for Transformer Engine's tensors those of
    its own quantizers, swizzled scales included. Addresses stay, and nothing waits for the device.
    The number of launches does not depend on that of weights, but for fused ones and for columnwise
    codes with scales of their own; a call with the same tensors takes the tables of the last one.
    Call it after steps of any optimizer, and after other writes to weights::

        copies, weights = fp4adam.workspaces_of(model)  # of Transformer Engine's modules
        fp4adam.cast(copies, weights)

    Args:
        copies: :class:`QuantizedTensor` s, or other packages' quantized tensors with a
            :class:`TensorAdapter`. They keep no values from before quantization.
        weights: Per copy its weight, BF16, FP16 or FP32, of the same shape and device; or the parts
            of a fused one along the first dimension.

    Raises:
        TypeError: If a quantized tensor has no adapter.
        ValueError: If a weight is sharded, quantized itself, or not of a supported dtype, or a copy
            does not fit its weight; nothing is written then.
        RuntimeError: In the capture of a CUDA graph.
    """
    if backend.is_capturing():
        raise RuntimeError(
            "copies must not be written in the capture of a CUDA graph, got a call in one; call "
            "cast() after each replay: graphs read copies at their addresses"
        )
    if len(copies) != len(weights):
        raise ValueError(
            f"weights must be one per copy, got {len(weights)} for {len(copies)}; pass the parts "
            "of a fused weight as one entry"
        )
    with torch._C.DisableTorchFunctionSubclass():
        parts = [(each,) if isinstance(each, Tensor) else tuple(each) for each in weights]
        for copy, of_one in zip(copies, parts, strict=True):
            _check(copy, of_one)
        if len({id(getattr(copy, "_shared", copy)) for copy in copies}) < len(copies):
            raise ValueError("copies must be different tensors, got one twice; name it once")
        tensors, borrowed = quantized(copies)
        alone: list[int] = []
        by_device: dict[torch.device, list[int]] = defaultdict(list)
        for i, (tensor, of_one) in enumerate(zip(tensors, parts, strict=True)):
            # Columnwise codes of their own need whole columns, and joined parts memory.
            is_alone = len(of_one) > 1 or not tensor.quantizer.layout.rows_per_entry
            (alone if is_alone else by_device[tensor.device]).append(i)
        for which in by_device.values():
            values = [parts[i][0].contiguous() for i in which]
            own = {k: borrowed[i] for k, i in enumerate(which) if i in borrowed}
            found, dtypes = ([tensors[i] for i in which], own), [value.dtype for value in values]
            plan = cast_plan([copies[i] for i in which], found, [0] * len(which), values, dtypes)
            with plan.scales_of_others:
                plan.cast.measure(values)
                plan.cast.write(values)
                build_columnwise([s.weight for s in plan.cast.spans if s.layout.is_square])
        with ScaleWriteback([borrowed[i] for i in alone if i in borrowed]):
            for i in alone:
                tensors[i].quantize_(parts[i][0] if len(parts[i]) == 1 else torch.cat(parts[i]))
        torch.autograd.graph.increment_version(copies)
        for i, copy in enumerate(copies):
            borrowed.get(i, copy).clear_high_precision_init_val()


def _check(copy: Tensor, parts: tuple[Tensor, ...]) -> None:
    for part in parts:
        is_plain = not (isinstance(part, QuantizedTensor) or is_foreign(part) or is_dtensor(part))
        if not is_plain or part.dtype not in HIGH_PRECISION_DTYPES:
            raise ValueError(
                "weights must be whole plain float32, bfloat16 or float16 tensors to have a "
                f"quantized copy, got a {type(part).__name__} of {part.dtype}; FP4Adam steps "
                "quantized weights themselves, also under fully_shard"
            )
    is_own = isinstance(copy, QuantizedTensor)
    is_part = is_dtensor(copy) or is_own and (copy.global_spec is not None or not is_all(copy))
    if is_part or not (is_own or is_foreign(copy)):
        raise ValueError(
            f"copies must be whole quantized tensors, got a {type(copy).__name__}"
            f"{' that is a shard or a slice' if is_part else ''}; make one with "
            "quantizer.quantize(weight)"
        )
    n_rows = sum(part.shape[0] for part in parts if part.dim())
    shapes = {(n_rows, *part.shape[1:]) for part in parts}
    if shapes != {tuple(copy.shape)} or any(part.device != copy.device for part in parts):
        found = ", ".join(f"{tuple(part.shape)} on {part.device}" for part in parts)
        raise ValueError(
            f"copies must have the shape and device of their weight, {found or 'without parts'}, "
            f"got {tuple(copy.shape)} on {copy.device}; quantize the weight again after moving or "
            "replacing it"
        )
