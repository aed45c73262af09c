"""Linear layers of many experts whose weights are one quantized stack."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4adam.nn import grouped_matmul
from fp4adam.nn.linear import dequantized
from fp4adam.nn.operand import has_quantized_operands, quantize
from fp4adam.nn.scaled_matmul import without_padding
from fp4adam.tensors.quantized_tensor import Dequantize, QuantizedTensor


class _GroupedLinear(torch.autograd.Function):
    """y = x W_e^T for the tokens of each expert e, W dequantized to the dtype of x.

    As for a single layer, the dequantized stack lives as long as the matmul that reads it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor, offsets: Tensor) -> Tensor:
        x_needs_grad, weight_needs_grad, _ = ctx.needs_input_grad
        saved = x if weight_needs_grad else None, weight if x_needs_grad else None
        ctx.save_for_backward(*saved, offsets)
        ctx.weight_dtype = weight.dtype
        dense = dequantized(weight, x.dtype, None)
        return F.grouped_mm(x, dense.transpose(1, 2), offs=offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, offsets = ctx.saved_tensors
        grad_x = grad_weight = None
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            dense = Dequantize.apply if torch.is_grad_enabled() else dequantized
            grad_x = F.grouped_mm(grad, dense(weight, grad.dtype, grad), offs=offsets)
        if ctx.needs_input_grad[1]:
            grad_weight = F.grouped_mm(grad.t(), x, offs=offsets).to(ctx.weight_dtype)
        return grad_x, grad_weight, None


class _ScaledGroupedLinear(torch.autograd.Function):
    """The same with quantized activations, gradients or both.

    The gradient of the weights stays in high precision: it would take blocks along the tokens,
    which must not cross from one expert to the next.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor, offsets: Tensor) -> Tensor:
        quantizer = weight.quantizer
        x_needs_grad, weight_needs_grad, _ = ctx.needs_input_grad
        ctx.native = grouped_matmul.runs_natively(quantizer, x)
        saved = x if weight_needs_grad else None, weight if x_needs_grad else None
        ctx.save_for_backward(*saved, offsets)
        ctx.weight_dtype = weight.dtype
        if quantizer.operands.activations:
            return _product(x, weight, "rowwise", offsets, ctx.native)
        return F.grouped_mm(x, dequantized(weight, x.dtype, None).transpose(1, 2), offs=offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, offsets = ctx.saved_tensors
        grad_x = grad_weight = None
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            if weight.quantizer.operands.gradients:
                grad_x = _product(grad, weight, "columnwise", offsets, ctx.native)
            else:
                grad_x = F.grouped_mm(grad, dequantized(weight, grad.dtype, grad), offs=offsets)
        if ctx.needs_input_grad[1]:
            grad_weight = F.grouped_mm(grad.t(), x, offs=offsets).to(ctx.weight_dtype)
        return grad_x, grad_weight, None


def _product(
    x: Tensor, weight: QuantizedTensor, usage: str, offsets: Tensor, native: bool
) -> Tensor:
    """Multiply activations or gradients by the weights of their experts, both quantized."""
    tokens, _ = quantize(x, weight.quantizer, rowwise=True, offsets=offsets)
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
    if weight.dim() != 3 or input.dim() != 2 or input.shape[1] != weight.shape[2]:
        raise ValueError(
            "input and weight must be [tokens, in_features] and [experts, out_features, "
            f"in_features], got {tuple(input.shape)} and {tuple(weight.shape)}; flatten the "
            "tokens, and let in_features agree"
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
        return F.grouped_mm(input, weight.to(input.dtype).transpose(1, 2), offs=offsets)
    if has_quantized_operands(weight.quantizer):
        grouped_matmul.check_stack(weight)
        return _ScaledGroupedLinear.apply(input, weight, offsets)
    return _GroupedLinear.apply(input, weight, offsets)
