"""Forward and backward of a linear layer whose weight is quantized."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4adam.quantized_tensor import Dequantize, QuantizedTensor, implements_function


class _QuantizedLinear(torch.autograd.Function):
    """y = x W^T + b with W dequantized to the dtype of x, once forward and once backward.

    Only the quantized weight is kept for the backward pass: the dequantized one lives as long as
    the matmul that reads it.
    """

    # One function, because autograd inspects the signature at every call of two.
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
        x_needs_grad, weight_needs_grad, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if weight_needs_grad else None, weight if x_needs_grad else None)
        ctx.weight_dtype = weight.dtype
        return F.linear(x, weight._read(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            # Without a dependence on grad, torch.compile would take the dequantized weight of the
            # forward pass and keep it until here.
            grad_x = grad @ Dequantize.apply(weight, grad.dtype, grad)
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            grad_weight = (rows.t() @ x.reshape(-1, x.shape[-1])).to(ctx.weight_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias


@implements_function(F.linear)
def quantized_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` for a :class:`QuantizedTensor` weight.

    Args:
        input: [..., in_features], floating point; weight and bias are read in its dtype. Under
            autocast it is cast first.
        weight: Quantized [out_features, in_features].
        bias: [out_features] or None.

    Raises:
        TypeError: If ``input`` is not floating point.
        ValueError: If ``weight`` is not a matrix.
    """
    if isinstance(input, QuantizedTensor):
        input = input.dequantize(input.dtype)
    if not isinstance(weight, QuantizedTensor):
        return F.linear(input, weight, bias)
    if not input.is_floating_point():
        raise TypeError(
            f"input must be floating point for a linear layer, got {input.dtype}; convert it first"
        )
    if weight.dim() != 2:
        raise ValueError(
            f"weight must be 2-dimensional for a linear layer, got {tuple(weight.shape)}; "
            "dequantize a stack of expert weights first"
        )
    device_type = input.device.type
    # As for torch's own operators, autocast leaves float64 alone.
    if torch.is_autocast_enabled(device_type) and input.dtype != torch.float64:
        input = input.to(torch.get_autocast_dtype(device_type))
    bias = None if bias is None else bias.to(input.dtype)
    if torch._C._are_functorch_transforms_active():
        # torch.func has rules for every operator, but none for an autograd function without them.
        return F.linear(input, weight.to(input.dtype), bias)
    return _QuantizedLinear.apply(input, weight, bias)
