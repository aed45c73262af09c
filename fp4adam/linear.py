"""Forward and backward of a linear layer whose weight is quantized."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4adam.quantized_tensor import QuantizedTensor, implements_function


class _QuantizedLinear(torch.autograd.Function):
    """y = x W^T + b with W dequantized to the dtype of x, once forward and once backward.

    Only the quantized weight is kept for the backward pass: the dequantized one lives as long as
    the matmul that reads it.
    """

    @staticmethod
    def forward(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.quantizer_read(x.dtype), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, weight, bias = inputs
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight.quantizer_read(grad.dtype)
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            grad_weight = (rows.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias


@implements_function(F.linear)
def quantized_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` for a :class:`QuantizedTensor` weight.

    Args:
        input: [..., in_features] of any dtype that a matmul takes; under autocast it is cast first.
        weight: Quantized [out_features, in_features].
        bias: [out_features] or None.
    """
    if isinstance(input, QuantizedTensor):
        input = input.dequantize(input.dtype)
    if not isinstance(weight, QuantizedTensor):
        return F.linear(input, weight, bias)
    if weight.dim() != 2:
        raise ValueError(
            f"weight must be 2-dimensional for a linear layer, got {tuple(weight.shape)}; dequantize "
            "a stack of expert weights first"
        )
    device_type = input.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        input = input.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return _QuantizedLinear.apply(input, weight, bias)
