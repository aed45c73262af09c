"""Linear layers of many experts whose weights are one quantized stack.

torch's own ``grouped_mm`` takes quantized stacks as well, so that models that call it, such as
those of transformers, train them unchanged.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from fp4adam.nn import grouped_matmul
from fp4adam.nn.fake_quantize import fake_quantize
from fp4adam.nn.linear import dequantized
from fp4adam.nn.operand import has_quantized_operands, quantize
from fp4adam.nn.scaled_matmul import without_padding
from fp4adam.tensors.backend import runs_eagerly
from fp4adam.tensors.quantized_tensor import Dequantize, QuantizedTensor, implements_function


class _GroupedLinear(torch.autograd.Function):
    """y = x W_e^T for the tokens of each expert e, W dequantized to the dtype of x.

    As for a single layer, the dequantized stack lives as long as the matmul that reads it. With
    ``transposed`` the stack is [experts, in_features, out_features], and y = x W_e.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: QuantizedTensor, offsets: Tensor, transposed: bool
    ) -> Tensor:
        x_needs_grad, weight_needs_grad, *_ = ctx.needs_input_grad
        saved = x if weight_needs_grad else None, weight if x_needs_grad else None
        ctx.save_for_backward(*saved, offsets)
        ctx.weight_dtype, ctx.transposed = weight.dtype, transposed
        dense = dequantized(weight, x.dtype, None)
        return F.grouped_mm(x, dense if transposed else dense.transpose(1, 2), offs=offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, offsets = ctx.saved_tensors
        grad_x = grad_weight = None
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            dense = Dequantize.apply if torch.is_grad_enabled() else dequantized
            dense = dense(weight, grad.dtype, grad)
            dense = dense.transpose(1, 2) if ctx.transposed else dense
            grad_x = F.grouped_mm(grad, dense, offs=offsets)
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_gradient(ctx, grad, x, offsets)
        return grad_x, grad_weight, None, None


class _ScaledGroupedLinear(torch.autograd.Function):
    """The same with quantized activations, gradients or both.

    The gradient of the weights stays in high precision: it would take blocks along the tokens,
    which must not cross from one expert to the next.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: QuantizedTensor, offsets: Tensor, transposed: bool
    ) -> Tensor:
        quantizer = weight.quantizer
        x_needs_grad, weight_needs_grad, *_ = ctx.needs_input_grad
        ctx.native = grouped_matmul.runs_natively(quantizer, x)
        saved = x if weight_needs_grad else None, weight if x_needs_grad else None
        ctx.save_for_backward(*saved, offsets)
        ctx.weight_dtype, ctx.transposed = weight.dtype, transposed
        if quantizer.operands.activations:
            usage = "columnwise" if transposed else "rowwise"
            return _product(x, weight, usage, offsets, ctx.native)
        dense = dequantized(weight, x.dtype, None)
        return F.grouped_mm(x, dense if transposed else dense.transpose(1, 2), offs=offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, offsets = ctx.saved_tensors
        grad_x = grad_weight = None
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            if weight.quantizer.operands.gradients:
                usage = "rowwise" if ctx.transposed else "columnwise"
                grad_x = _product(grad, weight, usage, offsets, ctx.native, is_gradient=True)
            else:
                dense = dequantized(weight, grad.dtype, grad)
                dense = dense.transpose(1, 2) if ctx.transposed else dense
                grad_x = F.grouped_mm(grad, dense, offs=offsets)
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_gradient(ctx, grad, x, offsets)
        return grad_x, grad_weight, None, None


def _weight_gradient(ctx: Any, grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    rows, cols = (x, grad) if ctx.transposed else (grad, x)
    return F.grouped_mm(rows.t(), cols, offs=offsets).to(ctx.weight_dtype)


def _product(
    x: Tensor,
    weight: QuantizedTensor,
    usage: str,
    offsets: Tensor,
    native: bool,
    is_gradient: bool = False,
) -> Tensor:
    """Multiply activations or gradients by the weights of their experts, both quantized."""
    tokens, _ = quantize(x, weight.quantizer, True, offsets=offsets, is_gradient=is_gradient)
    stack = grouped_matmul.stack_operand(weight, usage)
    y = grouped_matmul.grouped_matmul(tokens, stack, offsets, x.dtype, native)
    return without_padding(y, (x.shape[0], stack.codes.shape[1]))


def grouped_linear(input: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The linear layers of a mixture of experts, each for its own tokens, without biases.

    Tokens ``offsets[e - 1]`` to ``offsets[e]`` are multiplied by ``weight[e]``, all in one
    ``torch.nn.functional.grouped_mm``, or in one ``scaled_grouped_mm`` of quantized operands if the
    recipe of ``weight`` asks for them. On GPUs of compute capability 9.0 and 10.x both read the
    offsets on the device, in BF16 and lower precision: the host does not wait for them.

    Args:
        input: [tokens, in_features], sorted by expert: bfloat16 on a GPU, float32 too on a CPU.
            Under autocast it is cast first.
        weight: [experts, out_features, in_features], quantized or not. With quantized activations
            or gradients it is MXFP8 or NVFP4, and both sides are multiples of 128.
        offsets: int32 [experts], where the tokens of each expert end; the last one is ``tokens``.

    Returns:
        [tokens, out_features] in the dtype of ``input``.

    Raises:
        ValueError: If shapes do not fit, or sides of the weights are not multiples of 16 bytes, or
            of 128 with quantized operands.
        TypeError: If ``offsets`` is not int32, ``input`` is not floating point, or operands to be
            quantized are not bfloat16 on a GPU.
        RuntimeError: If the GPU does not have the matmuls of the recipe.
        NotImplementedError: If the recipe quantizes Float8Block operands, which torch has no
            grouped matmul for, or torch was built without those of the other formats (MSLK).
    """
    return _grouped_linear(input, weight, offsets, transposed=False)


def _grouped_linear(input: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """:func:`grouped_linear`; ``transposed``: weight is [experts, in_features, out_features]."""
    if (
        weight.dim() != 3
        or input.dim() != 2
        or input.shape[1] != weight.shape[1 if transposed else 2]
    ):
        sides = "in_features, out_features" if transposed else "out_features, in_features"
        raise ValueError(
            f"input and weight must be [tokens, in_features] and [experts, {sides}], got "
            f"{tuple(input.shape)} and {tuple(weight.shape)}; flatten the tokens, and let "
            "in_features agree"
        )
    if not input.is_floating_point():
        raise TypeError(f"input must be floating point, got {input.dtype}; convert it first")
    if not isinstance(offsets, Tensor):
        raise TypeError(
            f"offsets must be an int32 tensor, got a {type(offsets).__name__}; make one with "
            "torch.tensor"
        )
    if offsets.shape != weight.shape[:1]:
        raise ValueError(
            f"offsets must have one entry per expert, {weight.shape[0]}, got "
            f"{tuple(offsets.shape)}; give where the tokens of each expert end"
        )
    if offsets.dtype != torch.int32:
        raise TypeError(f"offsets must be int32, got {offsets.dtype}; convert them first")
    device_type = input.device.type
    if torch.is_autocast_enabled(device_type):
        input = input.to(torch.get_autocast_dtype(device_type))
    multiple = 16 // input.element_size()
    if any(n % multiple for n in weight.shape[1:]):
        raise ValueError(
            f"out_features and in_features must be multiples of {multiple} for grouped matmuls in "
            f"{input.dtype}, got {tuple(weight.shape[1:])}; pad the weights"
        )
    # Rows have to start at multiples of 16 bytes, which some products find out too late:
    # in the backward pass.
    input = input.contiguous()
    if not isinstance(weight, QuantizedTensor):
        dense = weight.to(input.dtype)
        return F.grouped_mm(input, dense if transposed else dense.transpose(1, 2), offs=offsets)
    if has_quantized_operands(weight.quantizer):
        grouped_matmul.check_stack(weight, transposed)
        return _ScaledGroupedLinear.apply(input, weight, offsets, transposed)
    if weight.quantizer.operands.fake_activations:
        input = fake_quantize(input, weight.quantizer)
    return _GroupedLinear.apply(input, weight, offsets, transposed)


class _TransposedStack(torch.Tensor):
    """``stack.transpose(1, 2)``, which ``grouped_mm`` is called with; others see its values.

    Decoded values would be kept for the backward pass, in high precision. ``grouped_mm`` takes the
    quantized stack instead; for any other function the values are decoded then.
    """

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
    is_traced = not runs_eagerly(tensor._shared.tensors.present[0])
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
    """``torch.nn.functional.grouped_mm`` of tokens and a quantized stack; see ``grouped_linear``.

    Args:
        mat_a: [tokens, in_features], sorted by expert.
        mat_b: [experts, in_features, out_features], a quantized stack or a transposed one.
        offs: int32 [experts], where the tokens of each expert end.
        bias: As in torch, which does not take one yet.
        out_dtype: The dtype of the result, by default that of ``mat_a``.

    Other operands are decoded.
    """
    transposed = not isinstance(mat_b, _TransposedStack)
    stack = mat_b if transposed else mat_b.stack
    is_linear = isinstance(stack, QuantizedTensor) and stack.dim() == 3 and mat_a.dim() == 2
    is_plain = not isinstance(mat_a, QuantizedTensor | _TransposedStack)
    # torch.func has rules for every operator, but none for an autograd function without them.
    is_plain &= not torch._C._are_functorch_transforms_active()
    if is_linear and is_plain and offs is not None and bias is None:
        y = _grouped_linear(mat_a, stack, offs, transposed)
        return y if out_dtype is None else y.to(out_dtype)
    # The operator decodes quantized operands.
    a, b = (x.values() if isinstance(x, _TransposedStack) else x for x in (mat_a, mat_b))
    return F.grouped_mm(a, b, offs=offs, bias=bias, out_dtype=out_dtype)
