"""Linear layers under tensor parallelism, where weights are DTensors of quantized tensors.

``F.linear`` of DTensors is a transposition and a product of DTensors, which torch computes on local
tensors below autograd. The transposed weight stays quantized: each product decodes it or multiplies
its codes, and the backward pass keeps no decoded weight. Products of the backward pass read the
weight itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fp4adam.distributed.shards import parallel_infos, settle_shard
from fp4adam.nn.operand import (
    check_weight,
    has_quantized_operands,
    has_weight_gradient,
    quantize,
    weight_operand,
)
from fp4adam.nn.scaled_matmul import matmul, runs_natively
from fp4adam.tensors.quantized_tensor import QuantizedTensor, implements_operator

aten = torch.ops.aten


class TransposedWeight(torch.Tensor):
    """A transposed quantized matrix [in_features, out_features]; other operators see its values.

    Attributes:
        weight: The matrix [out_features, in_features].
    """

    weight: QuantizedTensor

    def __new__(cls, weight: QuantizedTensor) -> "TransposedWeight":
        shape, options = weight.shape[::-1], dict(dtype=weight.dtype, device=weight.device)
        return torch.Tensor._make_wrapper_subclass(cls, shape, **options)

    def __init__(self, weight: QuantizedTensor) -> None:
        self.weight = weight

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"TransposedWeight({self.weight!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.t.default:
            return args[0].weight._alias()
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].weight)
        *_, x, other = args
        if func in (aten.mm.default, aten.addmm.default) and isinstance(other, cls):
            if other.weight.quantizer.operands.activations:
                y = _product_of_codes(x, other.weight, "rowwise")
                if func is aten.mm.default:
                    return y
                return torch.add(y, args[0], alpha=kwargs.get("beta", 1))
            dense = other.weight._read(x.dtype)
            return func(*args[:-1], dense.t(), **kwargs)
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.weight._read().t(), (args, kwargs))
        return func(*args, **kwargs)


@implements_operator(aten.t.default)
def _t(func: Callable, tensor: QuantizedTensor) -> Tensor:
    spec = tensor.global_spec
    if spec is None or not spec.is_parallel:
        return func(tensor._read())
    settle_shard(tensor, parallel_infos(tensor))
    if tensor.quantizer.operands.fake_activations:
        raise NotImplementedError(
            "weight must not have fake-quantized activations under tensor parallelism, where torch "
            "keeps the inputs of layers for the gradients of their weights, got one of a Recipe "
            'with activations="fake"; pass activations=True or False'
        )
    if has_quantized_operands(tensor.quantizer):
        check_weight(tensor)
        # For NVFP4 that product stays in high precision.
        if has_weight_gradient(tensor.quantizer) and tensor.quantizer.layout.block == 128:
            raise NotImplementedError(
                "weight must not have quantized activations and gradients in Float8Block under "
                "tensor parallelism, where torch multiplies the gradient of a weight in high "
                f"precision, got one with {tensor.quantizer.operands}; use a Recipe with "
                "gradients=False, or another format"
            )
    return TransposedWeight(tensor)


# The gradient of an input: rows of gradients times the weight.
@implements_operator(aten.mm.default)
def _mm(func: Callable, x: Tensor, weight: Tensor) -> Tensor:
    if not isinstance(x, QuantizedTensor) and isinstance(weight, QuantizedTensor):
        if weight.global_spec is not None and weight.quantizer.operands.gradients:
            return _product_of_codes(x, weight, "columnwise")
        return func(x, weight._read(x.dtype, x))
    return func(*(t._read() if isinstance(t, QuantizedTensor) else t for t in (x, weight)))


def _product_of_codes(x: Tensor, weight: QuantizedTensor, usage: str) -> Tensor:
    """The product of quantized rows and a direction of a weight, both as operands of its recipe."""
    rows, _ = quantize(x, weight.quantizer, True, is_gradient=usage == "columnwise")
    native, operand = runs_natively(weight.quantizer, x.device), weight_operand(weight, usage)
    is_forward = usage == "rowwise"
    return matmul(rows, operand, weight.quantizer, x.dtype, native, is_forward)[: len(x)]
