"""Forward and backward of a linear layer whose weight is quantized."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4adam.nn.fake_quantize import fake_quantize
from fp4adam.nn.operand import (
    Operand,
    check_weight,
    has_quantized_operands,
    has_weight_gradient,
    matmul,
    quantize,
    weight_operand,
    without_padding,
)
from fp4adam.tensors.quantized_tensor import Dequantize, QuantizedTensor, implements_function


class _QuantizedLinear(torch.autograd.Function):
    """y = x W^T + b with W dequantized to the dtype of x, or with quantized operands.

    The backward pass has the quantized weight, and x or, if it multiplies codes for the gradient of
    the weight, those of x. A dequantized weight lives as long as the matmul that reads it.
    """

    # One function, because autograd inspects the signature at every call of two.
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
        quantizer = weight.quantizer
        x_needs_grad, weight_needs_grad, _ = ctx.needs_input_grad
        ctx.is_scaled = has_quantized_operands(quantizer)
        ctx.weight_of_codes = weight_needs_grad and has_weight_gradient(quantizer)
        if quantizer.operands.activations:
            tokens = x.reshape(-1, x.shape[-1])
            rows, columns = quantize(tokens, quantizer, True, ctx.weight_of_codes)
            of_weight = weight_operand(weight, "rowwise")
            y = matmul(rows, of_weight, quantizer, x.dtype)
            y = without_padding(y, quantizer, (*x.shape[:-1], weight.shape[0]))
            y = y if bias is None else y + bias
        else:
            y = F.linear(x, weight._read(x.dtype), bias)
        saved = x if weight_needs_grad else None, None, None
        if ctx.weight_of_codes:
            saved = columns.codes, columns.scales, columns.amax
        ctx.save_for_backward(*saved, weight if x_needs_grad else None)
        ctx.quantizer, ctx.weight_dtype = quantizer, weight.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return (_scaled_backward if ctx.is_scaled else _backward)(ctx, grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, scales, amax, weight = ctx.saved_tensors
    rows = grad.reshape(-1, grad.shape[-1])
    row_codes = ctx.needs_input_grad[0] and ctx.quantizer.operands.gradients
    grad_x = grad_weight = grad_bias = along = across = None
    if row_codes or ctx.weight_of_codes:
        wanted = row_codes, ctx.weight_of_codes
        along, across = quantize(rows, ctx.quantizer, *wanted, is_gradient=True)
    if row_codes:
        of_weight = weight_operand(weight, "columnwise")
        grad_x = matmul(along, of_weight, ctx.quantizer, grad.dtype)
        # Not a shape kept by the forward pass: torch 2.11 cannot trace one that varies.
        grad_x = grad_x.narrow(0, 0, rows.shape[0]).view(*grad.shape[:-1], grad_x.shape[1])
    elif ctx.needs_input_grad[0]:
        # Without a dependence on grad, torch.compile would take the dequantized weight of the
        # forward pass and keep it until here.
        read = Dequantize.apply if torch.is_grad_enabled() else QuantizedTensor._read
        grad_x = grad @ read(weight, grad.dtype, grad)
    if ctx.weight_of_codes:
        of_x = Operand(x, scales, amax)
        grad_weight = matmul(across, of_x, ctx.quantizer, grad.dtype)
    elif ctx.needs_input_grad[1]:
        grad_weight = rows.t() @ x.reshape(-1, x.shape[-1])
    if grad_weight is not None:
        grad_weight = grad_weight.to(ctx.weight_dtype)
    if ctx.needs_input_grad[2]:
        grad_bias = rows.sum(0)
    return grad_x, grad_weight, grad_bias


# Rounding has no derivative.
_scaled_backward = once_differentiable(_backward)


@implements_function(F.linear)
def quantized_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` for a :class:`QuantizedTensor` weight, whose recipe says what is quantized.

    Weight and bias are read in the dtype of ``input``, which autocast casts first.

    Raises:
        TypeError: If ``input`` is not floating point, or is float64 and has to be quantized.
        ValueError: If ``weight`` or ``input`` cannot be an operand of the recipe's matmuls.
        RuntimeError: If the GPU does not have the matmuls of the recipe.
        NotImplementedError: If a transform of torch.func meets quantized activations or gradients.
    """
    if isinstance(input, QuantizedTensor):
        input = input.dequantize(input.dtype)
    if not isinstance(weight, QuantizedTensor):
        return F.linear(input, weight, bias)
    if not input.is_floating_point():
        raise TypeError(
            f"input must be floating point for a linear layer, got {input.dtype}; convert it first"
        )
    device_type = input.device.type
    # As for torch's own operators, autocast leaves float64 alone.
    if torch.is_autocast_enabled(device_type) and input.dtype != torch.float64:
        input = input.to(torch.get_autocast_dtype(device_type))
    bias = None if bias is None else bias.to(input.dtype)
    is_scaled = has_quantized_operands(weight.quantizer)
    is_fake = weight.quantizer.operands.fake_activations
    if torch._C._are_functorch_transforms_active():
        if is_scaled or is_fake:
            raise NotImplementedError(
                "weight must be quantized alone for torch.func transforms, got one with "
                f"{weight.quantizer.operands}; quantize the model with Recipe(weights)"
            )
        # torch.func has rules for every operator, but none for an autograd function without them.
        return F.linear(input, weight.to(input.dtype), bias)
    if is_scaled:
        check_weight(weight)
        # Otherwise errors about blocks and padding would come before the one about the shape.
        if input.shape[-1:] != weight.shape[1:]:
            raise ValueError(
                f"input must be [..., {weight.shape[1]}] for a weight {tuple(weight.shape)}, got "
                f"{tuple(input.shape)}; it is to end with in_features"
            )
    if is_fake:
        input = fake_quantize(input, weight.quantizer)
    return _QuantizedLinear.apply(input, weight, bias)
