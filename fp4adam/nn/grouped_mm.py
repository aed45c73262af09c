"""torch's ``grouped_mm`` of quantized stacks of experts, as models of transformers call it.

A stack is decoded for one product and never kept: :func:`quantized_grouped_mm` saves the quantized
stack for the backward pass, and ``stack.transpose(1, 2)``, which models pass, stays quantized.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from fp4adam.nn.fake_quantize import fake_quantize
from fp4adam.nn.operand import has_quantized_operands
from fp4adam.tensors.backend import runs_eagerly
from fp4adam.tensors.quantized_tensor import Dequantize, QuantizedTensor, implements_function


class _GroupedProduct(torch.autograd.Function):
    """y = x W_e of the tokens of each expert e, or x W_e^T, W dequantized to the dtype of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stack: QuantizedTensor, offsets: Tensor, transposed: bool
    ) -> Tensor:
        x_needs_grad, stack_needs_grad, *_ = ctx.needs_input_grad
        saved = x if stack_needs_grad else None, stack if x_needs_grad else None
        ctx.save_for_backward(*saved, offsets)
        ctx.dtype, ctx.transposed = stack.dtype, transposed
        dense = stack._read(x.dtype)
        return F.grouped_mm(x, dense.transpose(1, 2) if transposed else dense, offs=offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, stack, offsets = ctx.saved_tensors
        grad_x = grad_stack = None
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            read = Dequantize.apply if torch.is_grad_enabled() else QuantizedTensor._read
            dense = read(stack, grad.dtype, grad)
            dense = dense if ctx.transposed else dense.transpose(1, 2)
            grad_x = F.grouped_mm(grad, dense, offs=offsets)
        if ctx.needs_input_grad[1]:
            rows, cols = (grad, x) if ctx.transposed else (x, grad)
            grad_stack = F.grouped_mm(rows.t(), cols, offs=offsets).to(ctx.dtype)
        return grad_x, grad_stack, None, None


class _TransposedStack(torch.Tensor):
    """``stack.transpose(1, 2)``, which ``grouped_mm`` is called with; others see its values."""

    def __new__(cls, stack: QuantizedTensor) -> "_TransposedStack":
        experts, out_features, in_features = stack.shape
        return torch.Tensor._make_wrapper_subclass(
            cls,
            (experts, in_features, out_features),
            strides=(out_features * in_features, 1, in_features),
            dtype=stack.dtype,
            device=stack.device,
            requires_grad=stack.requires_grad and torch.is_grad_enabled(),
        )

    def __init__(self, stack: QuantizedTensor) -> None:
        self.stack = stack

    def values(self) -> Tensor:
        """The values as a plain tensor of the nominal dtype; differentiable."""
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.transpose(self.stack, 1, 2)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _GROUPED_MM:
            return quantized_grouped_mm(*args, **kwargs)
        if getattr(func, "__name__", "") != "__get__":  # attributes, such as its shape
            args, kwargs = pytree.tree_map_only(cls, cls.values, (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(cls, cls.values, (args, kwargs or {}))
        return func(*args, **kwargs)


_GROUPED_MM = {F.grouped_mm, torch._grouped_mm}


@implements_function(torch.Tensor.transpose)
def _transpose(tensor: QuantizedTensor, dim0: int, dim1: int) -> Tensor:
    is_stack = tensor.dim() == 3 and {dim0 % 3, dim1 % 3} == {1, 2}
    # Compiled graphs decide by themselves what they keep.
    is_traced = not runs_eagerly(tensor.inner.present[0])
    if is_stack and not (is_traced or torch._C._are_functorch_transforms_active()):
        return _TransposedStack(tensor)
    return torch.Tensor.transpose(tensor, dim0, dim1)


@implements_function(F.grouped_mm)
@implements_function(torch._grouped_mm)
def quantized_grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``torch.nn.functional.grouped_mm`` of tokens and a quantized stack; others are decoded.

    Args:
        mat_a: [tokens, in_features], sorted by expert. Under autocast it is cast first.
        mat_b: [experts, in_features, out_features], a quantized stack or a transposed one.
        offs: int32 [experts], where the tokens of each expert end.
        bias: As in torch, which does not take one yet.
        out_dtype: The dtype of the result, by default that of ``mat_a``.

    Raises:
        NotImplementedError: If the recipe of the stack quantizes operands.
    """
    transposed = isinstance(mat_b, _TransposedStack)
    stack = mat_b.stack if transposed else mat_b
    is_product = isinstance(stack, QuantizedTensor) and stack.dim() == 3 and mat_a.dim() == 2
    is_plain = not isinstance(mat_a, QuantizedTensor | _TransposedStack)
    # torch.func has rules for every operator, but none for an autograd function without them.
    is_plain &= not torch._C._are_functorch_transforms_active()
    if not (is_product and is_plain and offs is not None and bias is None):
        a, b = (x.values() if isinstance(x, _TransposedStack) else x for x in (mat_a, mat_b))
        return F.grouped_mm(a, b, offs=offs, bias=bias, out_dtype=out_dtype)
    if has_quantized_operands(stack.quantizer):
        raise NotImplementedError(
            f"a stack of experts must be quantized alone, got one with {stack.quantizer.operands}: "
            "there are no products of quantized operands for stacks; make it with Recipe(weights)"
        )
    if torch.is_autocast_enabled(mat_a.device.type):
        mat_a = mat_a.to(torch.get_autocast_dtype(mat_a.device.type))
    # Rows have to start at multiples of 16 bytes, which some products find out too late:
    # in the backward pass.
    mat_a = mat_a.contiguous()
    if stack.quantizer.operands.fake_activations:
        mat_a = fake_quantize(mat_a, stack.quantizer)
    y = _GroupedProduct.apply(mat_a, stack, offs, transposed)
    return y if out_dtype is None else y.to(out_dtype)
