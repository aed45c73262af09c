"""Linear layers whose activations and gradients are quantized as well: values, layouts, errors."""

import copy
import functools
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Recipe,
    quantize_model,
)
from fp4adam.formats import minifloat, nvfp4_gradients
from fp4adam.nn import operand
from fp4adam.nn.linear import _QuantizedLinear
from fp4adam.tensors import backend
from fp4adam.tensors.quantizer import Operands
from helpers import assert_identical, randn, through_a_file

# Weights, and the quantizers of what they are multiplied with.
FORMATS = {
    "float8block": Float8BlockQuantizer(two_dimensional=False),
    "mxfp8": MXFP8Quantizer(),
    "nvfp4": NVFP4Quantizer(two_dimensional=False),
    "float8": Float8Quantizer(force_pow_2_scales=True),
}
OUT, IN = 256, 384
FLOAT8 = Recipe("float8", activations=True, gradients=True)
every_format = pytest.mark.parametrize("weights", FORMATS)
compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def layer_in(recipe: Recipe, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return quantize_model(nn.Linear(IN, OUT, bias), recipe)


def rounded(
    x: Tensor, weights: str, along_tokens: bool = False, is_gradient: bool = False
) -> Tensor:
    """What a matmul reads of ``x`` [tokens, n]: quantized, with blocks along either dimension."""
    padded = F.pad(x, (0, 0, 0, -len(x) % 128))
    if is_gradient and weights == "float8":
        scale = 2.0 ** math.floor(math.log2(57344 / x.abs().max()))
        return (x * scale).to(torch.float8_e5m2).float() / scale
    if not along_tokens:
        return FORMATS[weights].quantize(padded).dequantize(torch.float32)[: len(x)]
    columns = padded.t().contiguous()
    columns = nvfp4_gradients.hadamard(columns) if weights == "nvfp4" else columns
    return FORMATS[weights].quantize(columns).dequantize(torch.float32).t()


@pytest.fixture
def nearest(monkeypatch):
    """Gradients in NVFP4 are rounded to nearest."""
    monkeypatch.setattr(nvfp4_gradients, "e2m1_stochastic_code", minifloat.e2m1_code)


def backward_values(layer: nn.Linear) -> Tensor:
    """The weight as the backward pass reads it."""
    weight = copy.deepcopy(layer.weight)
    if isinstance(weight.quantizer, MXFP8Quantizer):
        weight.update_usage(rowwise_usage=False)
    return weight.dequantize()


@every_format
@pytest.mark.parametrize("tokens", [1, 130])
@pytest.mark.parametrize("quantized", ["activations", "gradients", "both"])
def test_operands_are_those_of_the_quantizers(weights, quantized, tokens, nearest):
    both = quantized == "both"
    activations, gradients = (both or quantized == name for name in ("activations", "gradients"))
    layer = layer_in(Recipe(weights, activations, gradients), bias=True)
    x, grad = randn(tokens, IN).requires_grad_(), randn(tokens, OUT)
    y = layer(x)
    y.backward(grad)

    weight = layer.weight.dequantize(torch.float32)
    read = rounded(x.detach(), weights) if activations else x
    torch.testing.assert_close(y, F.linear(read, weight, layer.bias))
    read = rounded(grad, weights, is_gradient=True) if gradients else grad
    dense = backward_values(layer) if gradients else weight
    torch.testing.assert_close(x.grad, read @ dense)
    if both and weights != "mxfp8":
        dy = rounded(grad, weights, True, is_gradient=True)
        of_x = rounded(x.detach(), weights, True)
        expected = dy[: len(of_x)].t() @ of_x[: len(dy)]
    else:
        expected = grad.t() @ x
    torch.testing.assert_close(layer.weight.grad, expected)
    torch.testing.assert_close(layer.bias.grad, grad.sum(0))


@pytest.mark.parametrize("directions", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("tokens", "dtype", "options"),
    [
        (130, torch.bfloat16, dict(amax_epsilon=1e-3)),
        (128, torch.bfloat16, {}),
        (130, torch.float32, {}),
        (128, torch.float16, dict(force_pow_2_scales=False)),
    ],
)
def test_kernel_makes_the_operands_of_the_torch_path(
    directions, tokens, dtype, options, monkeypatch, device
):
    x = randn(tokens, 256, dtype=dtype) * torch.logspace(-6, 3, tokens, dtype=dtype)[:, None]
    x[3, 7], x[5], x[tokens - 1, 4] = float("nan"), 0, torch.finfo(dtype).max
    x[9, 8], x[:, 9] = float("inf"), torch.finfo(dtype).tiny
    quantizer = Float8BlockQuantizer(**options)
    quantizer.register()
    expected = operand.quantize(x, quantizer, *directions)
    monkeypatch.setattr(backend, "uses_kernels", lambda d: d.type == device)
    made = operand.quantize(x.to(device), quantizer, *directions)
    for one, other in zip(made, expected, strict=True):
        assert_identical(one and (one.codes, one.scales), other and (other.codes, other.scales))


def fake_weight(weights: str | Float8BlockQuantizer, shape=(OUT, IN)) -> QuantizedTensor:
    return Recipe(weights, True, True).quantizer.make_empty(shape, torch.bfloat16, "cuda")


@pytest.mark.parametrize(
    ("weights", "capability"),
    [
        ("float8", (8, 9)),
        ("float8block", (9, 0)),
        (Float8BlockQuantizer(two_dimensional=False), (9, 0)),
        ("mxfp8", (10, 0)),
        ("nvfp4", (10, 3)),
        ("nvfp4", (12, 0)),
    ],
)
@pytest.mark.parametrize("tokens", [50, 128])
@pytest.mark.parametrize("shape", [(OUT, IN), (128, 128), (1024, 512)])
def test_native_matmuls_pass_the_checks_of_torch(weights, capability, tokens, shape, monkeypatch):
    monkeypatch.setattr(operand, "_capability", lambda device: capability)
    where, name = (torch, "_scaled_mm") if weights == "float8" else (F, "scaled_mm")
    product = mock.patch.object(where, name, wraps=getattr(where, name))
    with FakeTensorMode(), product as scaled_mm:
        weight = fake_weight(weights, shape)
        x = torch.empty(2, tokens, shape[1], dtype=torch.bfloat16, device="cuda")
        # Autograd itself would look for a stream of the GPU.
        ctx = SimpleNamespace(needs_input_grad=(True, True, False))
        ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
        y = _QuantizedLinear.forward(ctx, x, weight, None)
        grad_x, grad_weight, _ = _QuantizedLinear.backward(ctx, torch.empty_like(y))
        assert (y.shape, y.dtype, y.device.type) == ((2, tokens, shape[0]), x.dtype, "cuda")
        assert grad_x.shape == x.shape and grad_weight.shape == shape
    assert scaled_mm.call_count == (2 if weights == "mxfp8" else 3)


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 1000])
def test_native_matmuls_give_what_the_emulation_gives(weights, dtype, tokens):
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    needed = operand.FORMATS[type(FORMATS[weights])]
    if not needed.is_met_by(capability):
        pytest.skip(f"needs a GPU of compute capability {needed.capability}")
    results = []
    for emulate in (False, True):
        recipe = Recipe(weights, activations=True, gradients=True, emulate=emulate)
        layer = layer_in(recipe, bias=True).cuda()
        x = randn(tokens, IN, dtype=dtype).cuda().requires_grad_()
        y = F.linear(x, layer.weight, layer.bias)
        y.backward(randn(tokens, OUT, dtype=dtype).cuda())
        results.append((y.detach(), x.grad, layer.weight.grad))
    for native, emulated in zip(*results, strict=True):
        # The same products, summed in another order and by adders of fewer bits.
        largest = emulated.abs().max().item()
        torch.testing.assert_close(native, emulated, rtol=0, atol=0.01 * largest)


@pytest.mark.parametrize(
    ("weights", "missing", "needed"),
    [
        ("float8", (8, 0), r"8\.9 or later"),
        ("float8block", (10, 0), r"9\.0"),
        ("mxfp8", (9, 0), r"10\.0 or later"),
        ("nvfp4", (9, 0), r"10\.0 or later"),
    ],
)
def test_capabilities_are_named(weights, missing, needed, monkeypatch):
    monkeypatch.setattr(operand, "_capability", lambda device: missing)
    match = f"need CUDA compute capability {needed}, got"
    with FakeTensorMode(), pytest.raises(RuntimeError, match=match):
        x = torch.empty(128, IN, dtype=torch.bfloat16, device="cuda")
        F.linear(x, fake_weight(weights))


BLOCKS = Recipe("float8block", activations=True)
X = randn(3, IN).requires_grad_()
REFUSED = {
    "float64": (TypeError, "must be float32, .*float64", lambda layer: layer(X.double())),
    "vmap": (NotImplementedError, "alone for", lambda layer: torch.func.vmap(layer)(X.detach())),
    "rows of a weight": (
        ValueError,
        r"whole tensor .* got rows of one, \(128, 384\)",
        lambda layer: F.linear(X, layer.weight[:128]),
    ),
    "a width without blocks": (
        ValueError,
        r"multiples of 128 .* got \(128, 96\); weights alone",
        lambda layer: F.linear(randn(3, 96), BLOCKS.quantizer.quantize(randn(128, 96))),
    ),
    "a width that is no multiple of 16": (
        ValueError,
        r"multiples of 16 .* got \(20, 32\); weights alone",
        lambda _: quantize_model(nn.Linear(32, 20), FLOAT8, lambda module, name: True),
    ),
    "dW of one quantized operand": (
        ValueError,
        "weight_gradients must be True unless .* got False",
        lambda _: Recipe("float8", activations=True, weight_gradients=False),
    ),
    "a second derivative": (
        RuntimeError,
        "once_differentiable|does not require grad",
        lambda layer: torch.autograd.grad(layer(X).sum(), X, create_graph=True)[0].sum().backward(),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_multiplied_is_refused(case):
    error, match, call = REFUSED[case]
    with pytest.raises(error, match=match):
        call(layer_in(BLOCKS))


@pytest.mark.parametrize("weights", ["float8", "float8block", "nvfp4"])
def test_gradients_of_weights_in_high_precision(weights, nearest):
    """Layers keep their inputs then, and not the codes of these."""
    grads = []
    for weight_gradients in (True, False):
        layer, saved = layer_in(Recipe(weights, True, True, weight_gradients=weight_gradients)), []
        x = randn(130, IN)
        keep = functools.partial(lambda kept, t: kept.append(t) or t, saved)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = layer(x)
        y.backward(grad := randn(130, OUT))
        grads.append(layer.weight.grad)
        assert (saved[0] is x) == (not weight_gradients)
        assert (saved[0].element_size() == 1) == weight_gradients
    assert torch.equal(grads[1], grad.t() @ x)
    torch.testing.assert_close(grads[0], grads[1], rtol=0.2, atol=0.2 * grads[1].abs().max().item())


def test_scales_of_float8_operands_are_the_largest_powers_of_two():
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    near = torch.tensor([1.75, 448.0, 57344.0, 1.0, 3e-39])
    amaxes = torch.cat([near, torch.nextafter(near, 2 * near), torch.tensor([tiny, huge, 1e-45])])
    for is_gradient, top in ((False, 448.0), (True, 57344.0)):
        for amax in amaxes.tolist():
            x = torch.zeros(16, 16)
            x[3, 5] = -amax
            made, _ = operand.quantize(x, FORMATS["float8"], True, is_gradient=is_gradient)
            scale = min(2.0 ** math.floor(math.log2(top / amax)), 2.0**127)
            assert made.scales.item() == 1 / scale
            assert made.codes.float().max().item() == 0 and made.codes[3, 5].float() >= -top
    for value, code in ((-torch.nan, 0x7F), (torch.inf, 0x7E)):
        x[0, 0] = value
        made, _ = operand.quantize(x, FORMATS["float8"], True)
        assert made.codes[0, 0].view(torch.uint8) == code
    assert made.scales.item() == 1
    nvfp4, _ = operand.quantize(randn(128, 64), FORMATS["nvfp4"], True)
    _, (_, scale), *_ = operand.FORMATS[NVFP4Quantizer].for_torch(nvfp4)
    torch.testing.assert_close(scale * 6 * 448, nvfp4.amax)


def test_recipe_stays_with_the_weight():
    weight = layer_in(Recipe("nvfp4", activations=True)).weight
    for other in (copy.deepcopy(weight), through_a_file(weight), weight.detach()):
        assert other.quantizer.operands == weight.quantizer.operands == Operands(True)
        assert other.quantizer.optimize_for_gemm
    assert layer_in(Recipe("nvfp4")).weight.quantizer.operands == Operands()


@pytest.mark.slow
@compiles
@every_format
def test_compiles_in_one_graph_without_opaque_operators(weights):
    """So that Inductor fuses all casts but Float8Block's, which would read activations twice."""
    torch._dynamo.reset()
    layer, targets = layer_in(Recipe(weights, activations=True, gradients=True)), []
    eager = copy.deepcopy(layer)

    def record(graph: torch.fx.GraphModule, inputs: list):
        targets.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph)

    compiled = torch.compile(
        layer, backend=aot_autograd(fw_compiler=record), fullgraph=True, dynamic=True
    )
    for tokens in (130, 300):
        for module in (compiled, eager):
            torch.manual_seed(tokens)
            module(randn(tokens, IN)).pow(2).sum().backward()
    torch.testing.assert_close(layer.weight.grad, eager.weight.grad)
    assert len(targets) == 2  # forward and backward, once
    for target in (target for graph in targets for target in graph):
        is_operator = isinstance(target, torch._ops.OpOverload)
        is_cast = weights == "float8block" and target is operand._traced_vectors
        assert not is_operator or target.namespace in ("aten", "prims") or is_cast, target


@compiles
def test_compiled_code_knows_the_recipe():
    torch._dynamo.reset()
    plain, scaled = (layer_in(Recipe("float8block", activations=a)) for a in (False, True))
    assert plain.weight.quantizer == scaled.weight.quantizer
    compiled = torch.compile(F.linear, backend="aot_eager", fullgraph=True)
    x = randn(3, IN)
    for layer in (plain, scaled):
        torch.testing.assert_close(compiled(x, layer.weight), layer(x), rtol=0, atol=1e-6)
