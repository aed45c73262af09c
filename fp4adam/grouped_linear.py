"""Linear layers of many experts whose weights are one quantized stack."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4adam.linear import dequantized
from fp4adam.matmul import has_quantized_operands
from fp4adam.quantized_tensor import Dequantize, QuantizedTensor


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
        if ctx.needs_input_grad[0]:
            dense = Dequantize.apply if torch.is_grad_enabled() else dequantized
            grad_x = F.grouped_mm(grad, dense(weight, grad.dtype, grad), offs=offsets)
        if ctx.needs_input_grad[1]:
            grad_weight = F.grouped_mm(grad.t(), x, offs=offsets).to(ctx.weight_dtype)
        return grad_x, grad_weight, None


def grouped_linear(input: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The linear layers of a mixture of experts, each for its own tokens, without biases.

    Tokens ``offsets[e - 1]`` to ``offsets[e]`` are multiplied by ``weight[e]``, in one
    ``torch.nn.functional.grouped_mm``; the host does not wait for the offsets.

    Args:
        input: [tokens, in_features], sorted by expert: bfloat16 on a GPU, float32 too on a CPU.
            Under autocast it is cast first.
        weight: [experts, out_features, in_features], quantized or not.
        offsets: int32 [experts], where the tokens of each expert end; the last one is ``tokens``.

    Returns:
        [tokens, out_features] in the dtype of ``input``.

    Raises:
        ValueError: If shapes do not fit, or sides of the weights are no multiples of 16 bytes.
        TypeError: If ``offsets`` is not int32.
        NotImplementedError: If the recipe of ``weight`` quantizes activations or gradients.
    """
    if weight.dim() != 3 or input.dim() != 2 or input.shape[1] != weight.shape[2]:
        raise ValueError(
            "input and weight must be [tokens, in_features] and [experts, out_features, "
            f"in_features], got {tuple(input.shape)} and {tuple(weight.shape)}; flatten the tokens"
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
    if not isinstance(weight, QuantizedTensor):
        return F.grouped_mm(input, weight.to(input.dtype).transpose(1, 2), offs=offsets)
    if has_quantized_operands(weight):
        raise NotImplementedError(
            "weight must be quantized alone for grouped matmuls, got one with "
            f"{weight.quantizer.operands}; make the stack with Recipe(weights)"
        )
    return _GroupedLinear.apply(input, weight, offsets)
