"""Fake quantization of activations: rounded to a format, and multiplied in high precision."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4adam.formats.float8 import Float8Quantizer
from fp4adam.formats.float8_block import Float8BlockQuantizer
from fp4adam.formats.mxfp8 import MXFP8Quantizer
from fp4adam.formats.nvfp4 import NVFP4Quantizer
from fp4adam.tensors.backend import runs_eagerly
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.quantizer import Quantizer, check_dtype

# The quantizers of activations, with blocks along the last dimension.
ACTIVATIONS: dict[str, Quantizer] = {
    quantizer.name: quantizer
    for quantizer in (
        NVFP4Quantizer(columnwise=False, two_dimensional=False),
        MXFP8Quantizer(columnwise=False),
        Float8BlockQuantizer(columnwise=False, two_dimensional=False),
        Float8Quantizer(columnwise=False),
    )
}


def check_fake_quantizes(quantizer: Quantizer) -> None:
    """Raise ValueError unless activations can be quantized for weights of this format."""
    # A format of one's own may encode in another way.
    if not (quantizer.has_kernels and quantizer.name in ACTIVATIONS):
        raise ValueError(
            f'activations="fake" must have weights in one of {", ".join(ACTIVATIONS)}, got '
            f"{quantizer}; quantize the weights alone"
        )


def fake_quantize(x: Tensor, quantizer: Quantizer) -> Tensor:
    """``x`` as matmuls with quantized activations read it, in its own dtype.

    Values are quantized to the format of the weights and decoded: NVFP4 in blocks of 1x16 under
    the amax of ``x``, MXFP8 1x32, Float8Block 1x128, Float8 under the amax of ``x``. The gradient
    passes straight through, also where values saturate.

    Args:
        x: [..., in_features], float32, bfloat16 or float16.
        quantizer: That of the weight to multiply with.
    """
    check_dtype("input of a linear layer with fake-quantized activations", x.dtype)
    return _FakeQuantize.apply(x, quantizer)


class _FakeQuantize(torch.autograd.Function):
    # One function, because autograd inspects the signature at every call of two.
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer) -> Tensor:
        run = _fake_quantize if runs_eagerly(x) else _fake_quantize_op
        rule = quantizer.layout.scale_rule
        matrix = x.detach().reshape(flat_shape(x.shape)).contiguous()
        made = run(matrix, quantizer.name, rule.force_pow_2_scales, rule.amax_epsilon)
        return made.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _fake_quantize(
    x: Tensor, weight_format: str, force_pow_2_scales: bool, amax_epsilon: float
) -> Tensor:
    if not x.numel():
        return torch.empty_like(x)
    quantizer = ACTIVATIONS[weight_format]
    if quantizer.layout.scale_rule[:2] != (force_pow_2_scales, amax_epsilon):
        options = dict(force_pow_2_scales=force_pow_2_scales, amax_epsilon=amax_epsilon)
        quantizer = dataclasses.replace(quantizer, **options)
    if quantizer.uses_kernels(x.device):
        from fp4adam.kernels import cast

        return cast.fake_quantize(x, quantizer.layout)
    rows = x.shape[0]
    # Rows of zeros change no scale.
    missing = -rows % quantizer.layout.multiple
    padded = F.pad(x, (0, 0, 0, missing)) if missing else x
    return quantizer.quantize(padded).dequantize(x.dtype)[:rows]


_fake_quantize_op = torch.library.custom_op("fp4adam::fake_quantize", mutates_args=())(
    _fake_quantize
)


@_fake_quantize_op.register_fake
def _(x: Tensor, weight_format: str, force_pow_2_scales: bool, amax_epsilon: float) -> Tensor:
    return torch.empty_like(x)
