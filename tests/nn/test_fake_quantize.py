"""Fake-quantized activations: values, gradients, the kernel's bits, and what refuses them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

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

# Weights, and the activations' format in the reference.
FORMATS = {
    "nvfp4": "nvfp4_1d",
    "mxfp8": "mxfp8",
    "float8block": "fp8block_1d_pow2",
    "float8": "float8_fp32",
}
OUT, IN = 32, 96
every_format = pytest.mark.parametrize("weights", FORMATS)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


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


def bits(x: Tensor) -> Tensor:
    return x.masked_fill(x.isnan(), float("nan")).view(torch.uint8)


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
    assert made.dtype == dtype
    # The sign and the payload of NaN are those of the processor.
    assert torch.equal(bits(made.cpu()), bits(expected))


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp8"])
def test_stacks_of_experts(weights):
    quantizer = Recipe(weights, activations="fake").quantizer
    stack = nn.Parameter(quantizer.quantize(randn(2, 32, 64)))
    x, offsets = randn(5, 64), torch.tensor([2, 5], dtype=torch.int32)
    y = F.grouped_mm(x, stack.transpose(1, 2), offs=offsets)
    y.backward(torch.ones_like(y))
    read, dense = rounded(x, weights), stack.dequantize(torch.float32).detach().requires_grad_()
    expected = torch.cat([read[:2] @ dense[0].t(), read[2:] @ dense[1].t()])
    expected.backward(torch.ones_like(expected))
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(stack.grad, dense.grad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@every_format
def test_compiled_training_needs_one_graph(weights, device):
    torch._dynamo.reset()
    model = layer_in(weights).to(device)
    eager, backend_ = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=backend_, fullgraph=True)
    x = randn(3, IN).to(device)
    for module in (compiled, eager):
        with torch.autocast(device, torch.bfloat16):
            module(x).float().square().sum().backward()
    assert backend_.frame_count == 1
    assert torch.equal(model.weight.grad, eager.weight.grad)


def test_refused():
    for error, match, arguments in (
        (TypeError, "activations must be True, False or \"fake\", got 'fakes'", ("fakes",)),
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
