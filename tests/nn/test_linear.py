"""Linear layers with quantized weights alone, or fake-quantized activations as well."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import format_reference as reference
import helpers
from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    Recipe,
    quantize_model,
)
from fp4adam.nn import fake_quantize
from fp4adam.tensors import backend

# Weights, and the format of fake-quantized activations in the reference.
FORMATS = {"nvfp4": "nvfp4_1d", "mxfp8": "mxfp8", "float8block": "fp8block_1d_pow2"}
FORMATS["float8"] = "float8_fp32"
OUT, IN = 64, 128

every_format = pytest.mark.parametrize("recipe", FORMATS)
# The compiler imports parts of torch that torch has deprecated, and gives advice on its settings.
compiles = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:TensorFloat32 tensor cores"
)


def layer_in(recipe="nvfp4", bias=True, dtype=None, device="cpu") -> nn.Linear:
    torch.manual_seed(0)
    return quantize_model(nn.Linear(IN, OUT, bias, device=device, dtype=dtype), recipe)


def two_layers_in(recipe: str) -> nn.Sequential:
    return nn.Sequential(layer_in(recipe), nn.ReLU(), quantize_model(nn.Linear(OUT, OUT), recipe))


def randn(*shape, dtype=torch.float32, device="cpu", requires_grad=True) -> Tensor:
    return helpers.randn(*shape, device=device, dtype=dtype).requires_grad_(requires_grad)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_and_bias_are_read_in_the_dtype_of_the_input(dtype, weight_dtype, device):
    layer = layer_in(dtype=weight_dtype, device=device)
    x = randn(3, IN, dtype=dtype, device=device)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, F.linear(x, layer.weight.dequantize(dtype), layer.bias.to(dtype)))
    assert (y.dtype, x.grad.dtype) == (dtype, dtype)
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == weight_dtype


def test_integers_are_refused_and_quantized_input_is_dequantized():
    layer = layer_in()
    with pytest.raises(TypeError, match="input must be floating point .* got torch.int64; convert"):
        layer(torch.ones(3, IN, dtype=torch.int64))
    x = NVFP4Quantizer().quantize(torch.randn(16, IN))
    assert torch.equal(layer(x), layer(x.dequantize(torch.float32)))
    dense = torch.randn(OUT, IN)
    assert torch.equal(F.linear(x, dense), F.linear(x.dequantize(torch.float32), dense))


@every_format
def test_double_backward_is_that_of_the_dense_layer(recipe):
    layer, x = layer_in(recipe), randn(2, 1, 3, IN, dtype=torch.float64)
    values = layer.weight.dequantize(torch.float32), layer.bias, x
    weight, bias, twin = (value.detach().to(x, copy=True).requires_grad_() for value in values)
    for inputs, y in ((x, layer(x)), (twin, F.linear(twin, weight, bias))):
        (grad,) = torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)
        grad.pow(2).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(layer.weight.grad, weight.grad.float())
    torch.testing.assert_close(layer.bias.grad, bias.grad.float())


@every_format
@pytest.mark.parametrize("autocast", [True, False])
def test_dequantized_weight_is_freed_at_once(recipe, autocast, monkeypatch):
    model, saved, references, read = two_layers_in(recipe), [], [], QuantizedTensor._read

    def watched(*args, **kwargs) -> Tensor:
        value = read(*args, **kwargs)
        references.append(weakref.ref(value.untyped_storage()))
        return value

    monkeypatch.setattr(QuantizedTensor, "_read", watched)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), hooks:
        y = model(randn(3, IN))
    gc.collect()
    assert len(references) == 2 and all(reference() is None for reference in references)
    weights = [t for t in saved if t.shape in [(OUT, IN), (OUT, OUT)]]
    assert len(weights) == 2 and all(isinstance(t, QuantizedTensor) for t in weights)
    y.sum().backward(retain_graph=True)
    gc.collect()
    assert len(references) == 4 and all(reference() is None for reference in references)


@pytest.mark.slow
@compiles
@pytest.mark.parametrize(
    "recipe", [*FORMATS, *(Recipe(name, activations="fake") for name in FORMATS)], ids=str
)
def test_compiled_training_needs_one_graph_that_keeps_no_dequantized_weight(recipe, device):
    torch._dynamo.reset()
    model = two_layers_in(recipe).to(device)
    eager, backend, saved = copy.deepcopy(model), CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizers = [FP4Adam(m.parameters(), lr=1e-2) for m in (model, eager)]
    steps = torch.compile(optimizers[0].step, backend="aot_eager"), optimizers[1].step
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        compiled(randn(3, IN, device=device))
    assert max(t.numel() for t in saved if t.dtype != torch.uint8) <= 3 * IN
    codes = model[0].weight.rowwise_data
    assert any(t.shape == codes.shape and t.dtype == codes.dtype for t in saved)
    for _ in range(3):
        for module, optimizer, step in zip((compiled, eager), optimizers, steps, strict=True):
            module(randn(3, IN, device=device)).pow(2).sum().backward()
            step()
            optimizer.zero_grad()
    assert backend.frame_count == 1
    for param, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(param.detach() * 1, expected.detach() * 1)


def test_transforms_of_parameters_and_inputs():
    layer, x = layer_in(), randn(3, IN, requires_grad=False)
    params, dense = dict(layer.named_parameters()), torch.randn(OUT, IN)
    assert torch.equal(functional_call(layer, params, (x,)), layer(x))
    expected = F.linear(x, dense, layer.bias)
    assert torch.equal(functional_call(layer, {"weight": dense}, (x,)), expected)

    def loss(params: dict[str, Tensor]) -> Tensor:
        return functional_call(layer, params, (x,)).pow(2).sum()

    grads = torch.func.grad(loss)({name: p.detach() for name, p in params.items()})
    loss(params).backward()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, params[name].grad)
    y, vjp = torch.func.vjp(layer, x)
    assert torch.equal(y, layer(x))
    torch.testing.assert_close(vjp(torch.ones_like(y))[0], torch.ones(3, OUT) @ layer.weight)
    torch.testing.assert_close(torch.func.vmap(layer)(x), y)
    jacobian = torch.func.jacrev(layer)(x[0].bfloat16())
    assert torch.equal(jacobian, layer.weight.dequantize(torch.bfloat16))


@pytest.mark.slow
@compiles
@pytest.mark.parametrize(
    "use", ["dynamic", "autocast", "checkpoint", "dequantize", "frozen", "inductor"]
)
def test_compiles_in_one_graph(use, device):
    torch._dynamo.reset()
    # Without pointwise operators there is nothing that takes a C++ compiler its time.
    layer = layer_in(bias=use != "inductor", device=device)
    if use == "frozen":
        layer.weight.requires_grad_(False)

    def run(x: Tensor) -> Tensor:
        if use == "checkpoint":
            return checkpoint(layer, x, use_reentrant=False)
        if use == "dequantize":
            return x @ layer.weight.dequantize(x.dtype).t()
        with torch.autocast(device, torch.bfloat16, enabled=use == "autocast"):
            return layer(x)

    backend = "inductor" if use == "inductor" else "aot_eager"
    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=use == "dynamic")
    for n in (3, 5) if use == "dynamic" else (3, 3):
        x, twin = (randn(n, IN, device=device) for _ in range(2))
        y, expected = compiled(x), run(twin)
        y.backward(torch.ones_like(y))
        expected.backward(torch.ones_like(y))
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(x.grad, twin.grad)
        layer.weight.quantize_(layer.weight.detach() * 2)


def rounded(x: Tensor, recipe: str) -> Tensor:
    """The values that the format has for ``x``, by the reference; rows are padded with zeros."""
    matrix = x.detach().reshape(-1, x.shape[-1])
    padded = F.pad(matrix, (0, 0, 0, -len(matrix) % 32)).float().numpy()
    fields = reference.quantize(FORMATS[recipe], padded)
    values = torch.from_numpy(reference.dequantize(FORMATS[recipe], fields))
    return values[: len(matrix)].to(x.dtype).view(x.shape)


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3), (), (32,)])
def test_layers_read_rounded_activations_and_gradients_pass_straight_through(recipe, dtype, shape):
    layer = layer_in(Recipe(recipe, activations="fake"))
    x = randn(*shape, IN, dtype=dtype)
    weight, bias = layer.weight.dequantize(dtype), layer.bias.detach().to(dtype)
    twin, weight = rounded(x, recipe).requires_grad_(), weight.detach().requires_grad_()
    grad = helpers.randn(*shape, OUT, dtype=dtype)
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
    x = helpers.randn(21, cols, dtype=dtype) * torch.logspace(-6, 3, 21, dtype=dtype)[:, None]
    x[1] = 0
    if special:
        x[3, 7], x[5, :32], x[9, 8] = float("nan"), float("nan"), float("inf")
        x[11], x[20, 4] = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    expected = fake_quantize.fake_quantize(x, quantizer)
    monkeypatch.setattr(backend, "uses_kernels", lambda d: d.type == device)
    made = fake_quantize.fake_quantize(x.to(device), quantizer)
    # The sign and the payload of NaN are those of the processor.
    helpers.assert_identical(made.cpu(), expected, any_nan=True)


def test_what_fake_quantization_refuses(monkeypatch):
    for error, match, arguments in (
        (TypeError, "gradients must be True or False, got 'fake'", ("nvfp4", False, "fake")),
        (ValueError, 'gradients must be False with activations="fake"', ("nvfp4", "fake", True)),
        (ValueError, 'emulate must be False with activations="', ("mxfp8", "fake", False, True)),
        (ValueError, "weights are of nvfp4, mxfp8, float8block, float8, got", ("mxfp4", "fake")),
    ):
        with pytest.raises(error, match=match):
            Recipe(*arguments)
    layer = layer_in(Recipe("nvfp4", activations="fake"))
    monkeypatch.setattr("fp4adam.kernels.cast.fake_quantize", None)
    layer(randn(2, IN))  # needs no kernel on the CPU
    with pytest.raises(TypeError, match="fake-quantized activations must be float32, .*float64"):
        fake_quantize.fake_quantize(randn(1, IN, dtype=torch.float64), layer.weight.quantizer)
    with pytest.raises(NotImplementedError, match="must be quantized alone for torch.func"):
        torch.func.vmap(layer)(randn(2, IN, requires_grad=False))
