"""Fake quantization of activations: rounded to a format, and multiplied in high precision."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4adam.tensors.backend import runs_eagerly
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.encoding import amax_over, block_amaxes
from fp4adam.tensors.quantizer import Quantizer, check_dtype


def fake_quantize(x: Tensor, quantizer: Quantizer) -> Tensor:
    """``x`` [..., in_features] rounded as the activations of a weight of ``quantizer``.

    Values are quantized to the format of the weights and decoded: NVFP4 in blocks of 1x16 under
    the amax of ``x``, MXFP8 1x32, Float8Block 1x128, Float8 under the amax of ``x``. The gradient
    passes straight through, also where values saturate.
    """
    check_dtype("input of a linear layer with fake-quantized activations", x.dtype)
    return _FakeQuantize.apply(x, quantizer)


class _FakeQuantize(torch.autograd.Function):
    # One function, because autograd inspects the signature at every call of two.
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer) -> Tensor:
        matrix = x.detach().reshape(flat_shape(x.shape)).contiguous()
        if not x.numel():
            return torch.empty_like(x)
        if runs_eagerly(x) and quantizer.uses_kernels(x.device):
            from fp4adam.kernels import cast

            if quantizer.layout.is_square and quantizer.layout.scale_type is not None:
                quantizer = dataclasses.replace(quantizer, two_dimensional=False)
            return cast.fake_quantize(matrix, quantizer.layout).view(x.shape)
        return _rounded(matrix, quantizer).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _rounded(x: Tensor, quantizer: Quantizer) -> Tensor:
    """The kernel's values in plain operators, which ``torch.compile`` fuses."""
    layout, cols = quantizer.layout, x.shape[1]
    kind = layout.code_type
    has_blocks = layout.scale_type is not None
    size = layout.block if has_blocks else cols
    blocks = F.pad(x.float(), (0, -cols % size)).unflatten(1, (-1, size))
    amaxes = block_amaxes(layout, blocks, (2,))
    amax = amax_over(blocks, (0, 1, 2)).view(1) if layout.tensor_scale else None
    scales, factors = quantizer.encode(amaxes, amax, x.dtype)
    decoding = quantizer.decode(scales, amax)
    if has_blocks:
        factors, decoding = factors.unsqueeze(2), decoding.unsqueeze(2)
    values = kind.decode(kind.pack(kind.encode(blocks * factors)))
    return (values * decoding).flatten(1)[:, :cols].to(x.dtype)
