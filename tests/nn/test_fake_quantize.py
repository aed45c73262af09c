"""Fake-quantized activations: values, gradients, the kernel's bits, and what refuses them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import format_reference as reference
from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    Recipe,
    quantize_model,
)
from fp4adam.nn import fake_quantize
from fp4adam.tensors import backend
from helpers import assert_identical, randn

# Weights, and the activations' format in the reference.
FORMATS = {
    "nvfp4": "nvfp4_1d",
    "mxfp8": "mxfp8",
    "float8block": "fp8block_1d_pow2",
    "float8": "float8_fp32",
}
OUT, IN = 32, 96
every_format = pytest.mark.parametrize("weights", FORMATS)


def layer_in(weights: str) -> nn.Linear:
    torch.manual_seed(0)
    return quantize_model(nn.Linear(IN, OUT), Recipe(weights, activations="fake"))


def rounded(x: Tensor, weights: str) -> Tensor:
    """The values that the format has for ``x``, by the reference; rows are padded with zeros."""
    matrix = x.detach().reshape(-1, x.shape[-1])
    padded = F.pad(matrix, (0, 0, 0, -len(matrix) % 32)).float().numpy()
    fields = reference.quantize(FORMATS[weights], padded)
    values = torch.from_numpy(reference.dequantize(FORMATS[weights], fields))
    return values[: len(matrix)].to(x.dtype).view(x.shape)


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3), (), (32,)])
def test_layers_read_rounded_activations_and_gradients_pass_straight_through(weights, dtype, shape):
    layer, x = layer_in(weights), randn(*shape, IN, dtype=dtype).requires_grad_()
    weight, bias = layer.weight.dequantize(dtype), layer.bias.detach().to(dtype)
    twin, weight = rounded(x, weights).requires_grad_(), weight.detach().requires_grad_()
    grad = randn(*shape, OUT, dtype=dtype)
    y, expected = layer(x), F.linear(twin, weight, bias)
    y.backward(grad)
    expected.backward(grad)
    assert torch.equal(y, expected) and not torch.equal(twin, x)
    assert torch.equal(x.grad, twin.grad)
    assert torch.equal(layer.weight.grad.view_as(weight), weight.grad.float())
    assert layer(x[:0].reshape(0, IN)).shape == (0, OUT)
    x = x.detach().reshape(-1, IN)
    assert torch.equal(layer(x.t().contiguous().t()), layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("quantizer", "cols"),
    [
        (NVFP4Quantizer(), 48),
        (Recipe("mxfp8").quantizer, 160),
        (Float8BlockQuantizer(), 133),
        (Float8BlockQuantizer(force_pow_2_scales=False, amax_epsilon=1e-3), 300),
        (Float8Quantizer(force_pow_2_scales=True), 48),
        (Float8Quantizer(amax_epsilon=1e-3), 160),
        (Float8Quantizer(scaling="delayed"), 48),
    ],
)
@pytest.mark.parametrize("special", [True, False])
def test_the_kernel_has_the_bits_of_the_operators(
    quantizer: Quantizer, cols, dtype, special, monkeypatch, device
):
    x = randn(21, cols, dtype=dtype) * torch.logspace(-6, 3, 21, dtype=dtype)[:, None]
    x[1] = 0
    if special:
        x[3, 7], x[5, 1:16], x[9, 8] = float("nan"), float("nan"), float("inf")
        x[11], x[20, 4] = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    expected = fake_quantize.fake_quantize(x, quantizer)
    monkeypatch.setattr(backend, "uses_kernels", lambda d: d.type == device)
    made = fake_quantize.fake_quantize(x.to(device), quantizer)
    # The sign and the payload of NaN are those of the processor.
    assert_identical(made.cpu(), expected, any_nan=True)


def test_refused():
    for error, match, arguments in (
        (TypeError, "gradients must be True or False, got 'fake'", (False, "fake")),
        (ValueError, 'gradients must be False with activations="fake"', ("fake", True)),
        (ValueError, 'emulate must be False with activations="fake"', ("fake", False, True)),
    ):
        with pytest.raises(error, match=match):
            Recipe("nvfp4", *arguments)
    with pytest.raises(ValueError, match="unless weights are of .* got MXFP4"):
        Recipe("mxfp4", activations="fake")
    layer = layer_in("nvfp4")
    with pytest.raises(TypeError, match="fake-quantized activations must be float32, .*float64"):
        fake_quantize.fake_quantize(randn(1, IN, dtype=torch.float64), layer.weight.quantizer)
    with pytest.raises(NotImplementedError, match="must be quantized alone for torch.func"):
        torch.func.vmap(layer)(randn(2, IN))
    with pytest.raises(ValueError, match="must not be quantized by another recipe"):
        quantize_model(layer, "nvfp4")
