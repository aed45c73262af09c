"""Quantized copies of weights that are trained in high precision, written again after a step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import is_dtensor
from fp4adam.interop.adapter import is_foreign
from fp4adam.interop.borrowed_tensor import BorrowedTensor, ScaleWriteback, borrow
from fp4adam.tensors import backend
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import HIGH_PRECISION_DTYPES

Weight = Tensor | Sequence[Tensor]


@torch._disable_dynamo
@torch.no_grad()
def cast(copies: Sequence[Tensor], weights: Sequence[Weight]) -> None:
    """Quantize weights to copies of them, in place.

    The bytes are those of ``quantizer.quantize(weight)``, for Transformer Engine's tensors those of
    its own quantizers, swizzled scales included. Addresses stay, and nothing waits for the device
    but adaptive scales. Call it after steps of any optimizer, and after other writes to weights::

        copies, weights = fp4adam.workspaces_of(model)  # of Transformer Engine's modules
        fp4adam.cast(copies, weights)

    Args:
        copies: :class:`QuantizedTensor` s, or other packages' quantized tensors with a
            :class:`TensorAdapter`.
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
        targets = [borrow(copy) if is_foreign(copy) else copy for copy in copies]
        borrowed = [each for each in targets if isinstance(each, BorrowedTensor)]
        tensors = [each.tensor if isinstance(each, BorrowedTensor) else each for each in targets]
        with ScaleWriteback(borrowed):
            for tensor, of_one in zip(tensors, parts, strict=True):
                tensor.quantize_(of_one[0] if len(of_one) == 1 else torch.cat(of_one))
        torch.autograd.graph.increment_version([*tensors, *(each.source for each in borrowed)])


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
    is_shard = is_dtensor(copy) or is_own and copy.global_spec is not None
    if is_shard or not (is_own or is_foreign(copy)):
        raise ValueError(
            f"copies must be whole quantized tensors, got a {type(copy).__name__}"
            f"{' that is a shard' if is_shard else ''}; make one with quantizer.quantize(weight)"
        )
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    is_there = all(part.device == copy.device for part in parts)
    if not is_there or flat_shape(shape) != flat_shape(tuple(copy.shape)):
        raise ValueError(
            f"copies must have the shape and device of their weight, {shape} on "
            f"{parts[0].device}, got {tuple(copy.shape)} on {copy.device}; quantize the weight "
            "again after moving or replacing it"
        )
