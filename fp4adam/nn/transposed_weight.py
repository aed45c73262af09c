"""Products with transposed quantized weights: stacks of experts, and DTensors.

Models call ``grouped_mm`` with ``stack.transpose(1, 2)``, and ``F.linear`` of DTensors is a
transposition and a product, which torch computes on local tensors below autograd. The transposed
weight stays quantized: each product decodes it or multiplies its codes, and autograd keeps no
decoded weight. Products of the backward pass read the weight itself, transposed once more.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from fp4adam.distributed.shards import parallel_infos, settle_shard
from fp4adam.nn.fake_quantize import fake_quantize
from fp4adam.nn.operand import (
    check_weight,
    has_quantized_operands,
    matmul,
    quantize,
    weight_operand,
)
from fp4adam.tensors.backend import runs_eagerly
from fp4adam.tensors.quantized_tensor import (
    QuantizedTensor,
    implements_function,
    implements_operator,
)

aten = torch.ops.aten


class TransposedWeight(torch.Tensor):
    """A quantized weight with its last two dimensions exchanged; operators see its values."""

    weight: QuantizedTensor

    def __new__(cls, weight: QuantizedTensor) -> "TransposedWeight":
        *experts, rows, cols = weight.shape
        shape, strides = (*experts, cols, rows), (rows * cols, 1, cols)[-weight.dim() :]
        options = dict(strides=strides, dtype=weight.dtype, device=weight.device)
        return torch.Tensor._make_wrapper_subclass(cls, shape, **options)

    def __init__(self, weight: QuantizedTensor) -> None:
        self.weight = weight

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            func = quantized_grouped_mm if func in (F.grouped_mm, torch._grouped_mm) else func
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.t.default or func is aten.transpose.int and _exchanges_last(*args):
            return args[0].weight._alias()
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].weight)
        dtype = args[0].dtype if func is aten._grouped_mm.default else None
        if func in (aten.mm.default, aten.addmm.default) and isinstance(args[-1], cls):
            *bias, x, other = args
            dtype = x.dtype
            if other.weight.quantizer.operands.activations:
                y = _product_of_codes(x, other.weight, "rowwise")
                return torch.add(y, *bias, alpha=kwargs.get("beta", 1)) if bias else y
        args, kwargs = pytree.tree_map_only(
            cls, lambda t: t.weight._read(dtype).transpose(-2, -1), (args, kwargs)
        )
        return func(*args, **kwargs)


def _exchanges_last(tensor: Tensor, dim0: int, dim1: int) -> bool:
    n = tensor.dim()
    return {dim0 % n, dim1 % n} == {n - 2, n - 1}


# Stacks of experts


@implements_operator(aten.transpose.int)
def _transpose(func: Callable, tensor: QuantizedTensor, dim0: int, dim1: int) -> Tensor:
    # Compiled graphs decide by themselves what they keep.
    is_traced = not runs_eagerly(tensor.inner.present[0])
    if tensor.dim() == 3 and _exchanges_last(tensor, dim0, dim1) and not is_traced:
        return TransposedWeight(tensor)
    return func(tensor._read(), dim0, dim1)


@implements_operator(aten._grouped_mm.default)
def _grouped_mm(func: Callable, x: Tensor, stack: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    dense = (t._read(x.dtype) if isinstance(t, QuantizedTensor) else t for t in (x, stack))
    return func(*dense, *args, **kwargs)


@implements_function(F.grouped_mm)
@implements_function(torch._grouped_mm)
def quantized_grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``torch.nn.functional.grouped_mm`` of tokens and a stack; under autocast tokens are cast.

    Raises:
        NotImplementedError: If the recipe of the stack quantizes operands.
    """
    stack = mat_b.weight if isinstance(mat_b, TransposedWeight) else mat_b
    if isinstance(stack, QuantizedTensor):
        if has_quantized_operands(stack.quantizer):
            raise NotImplementedError(
                f"a stack of experts must be quantized alone, got {stack.quantizer.operands}, for "
                "which there are no products of stacks; make it with Recipe(weights)"
            )
        if torch.is_autocast_enabled(mat_a.device.type):
            mat_a = mat_a.to(torch.get_autocast_dtype(mat_a.device.type))
        # Rows have to start at multiples of 16 bytes, which some products find out too late:
        # in the backward pass.
        mat_a = mat_a.contiguous()
        if stack.quantizer.operands.fake_activations:
            mat_a = fake_quantize(mat_a, stack.quantizer)
    return F.grouped_mm(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)


# Matrices under tensor parallelism


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
    return matmul(rows, weight_operand(weight, usage), weight.quantizer, x.dtype)[: len(x)]
