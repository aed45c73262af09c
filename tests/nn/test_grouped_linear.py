"""Stacks of expert weights: values, gradients, and a mixture of experts that trains."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Recipe,
    grouped_linear,
)
from fp4adam.nn.recipe import resolve_recipe

EXPERTS, OUT, IN = 3, 64, 32
every_format = pytest.mark.parametrize(
    "quantizer", [NVFP4Quantizer(), MXFP8Quantizer(), Float8BlockQuantizer(), Float8Quantizer()]
)


def stack_in(quantizer) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(quantizer.quantize(torch.randn(EXPERTS, OUT, IN) / IN**0.5))


def ends(*counts: int, device: str = "cpu") -> Tensor:
    return torch.tensor(counts, device=device).cumsum(0).int()


@every_format
@pytest.mark.parametrize("counts", [(4, 0, 6), (16, 16, 16), (0, 0, 0)])
def test_it_is_a_dense_layer_per_expert(quantizer, counts, device):
    weight = nn.Parameter(stack_in(quantizer).detach().to(device))
    dense = weight.dequantize(torch.bfloat16).detach().requires_grad_()
    x, grad = (torch.randn(sum(counts), n, dtype=torch.bfloat16, device=device) for n in (IN, OUT))
    twin = x.clone().requires_grad_()
    x.requires_grad_()
    y = grouped_linear(x, weight, ends(*counts, device=device))
    groups = zip(twin.split(counts), dense.unbind(), strict=True)
    expected = torch.cat([F.linear(tokens, of_expert) for tokens, of_expert in groups])
    y.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(weight.grad, dense.grad.float())


def test_gradients_may_lie_in_any_way():
    weight, x = stack_in(NVFP4Quantizer()), torch.randn(10, IN, requires_grad=True)
    # The gradient of a sum is one number with strides of zero, which torch's grouped_mm refuses.
    grouped_linear(x, weight, ends(4, 0, 6)).sum().backward()
    dense = weight.dequantize(torch.float32).detach().sum(1)
    torch.testing.assert_close(
        x.grad, torch.cat([dense[:1].expand(4, -1), dense[2:].expand(6, -1)])
    )


@pytest.mark.parametrize(
    "recipe",
    ["nvfp4", "mxfp8", "float8block"]
    + [Recipe(w, activations=True, gradients=True, emulate=True) for w in ("nvfp4", "mxfp8")],
)
def test_mixture_of_experts_trains(recipe, device):
    torch.manual_seed(0)
    quantizer, inner = resolve_recipe(recipe), 128
    up = nn.Parameter(quantizer.quantize(torch.randn(EXPERTS, inner, inner, device=device) / 11))
    down = nn.Parameter(quantizer.quantize(torch.randn(EXPERTS, inner, inner, device=device) / 11))
    router = nn.Linear(inner, EXPERTS, device=device)
    optimizer = FP4Adam([up, down, *router.parameters()], lr=1e-2)
    x = torch.randn(96, inner, device=device)
    target = torch.roll(x, 1, 1)
    losses = []
    for _ in range(20):
        gate, expert = router(x).softmax(1).max(1)
        order = expert.argsort(stable=True)
        offsets = torch.bincount(expert, minlength=EXPERTS).cumsum(0).int()
        with torch.autocast(device, torch.bfloat16):
            hidden = grouped_linear(x[order], up, offsets).relu()
            made = grouped_linear(hidden, down, offsets)
        loss = F.mse_loss(made.float() * gate[order, None], target[order])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiles_in_one_graph():
    torch._dynamo.reset()
    weight, offsets = stack_in(NVFP4Quantizer()), ends(4, 0, 6)
    compiled = torch.compile(grouped_linear, backend="aot_eager", fullgraph=True)
    x = torch.randn(10, IN, dtype=torch.bfloat16)
    y = compiled(x, weight, offsets)
    assert torch.equal(y, grouped_linear(x, weight, offsets))
    y.sum().backward()
    assert weight.grad.shape == weight.shape


@pytest.mark.parametrize("recipe", [Recipe("nvfp4"), Recipe("nvfp4", True, True, emulate=True)])
def test_input_may_lie_in_memory_otherwise(recipe):
    torch.manual_seed(0)
    weight = nn.Parameter(recipe.quantizer.quantize(torch.randn(2, 128, 128)))
    for x in (torch.randn(1, 128).expand(5, 128), torch.randn(5, 129)[:, 1:]):
        x, twin = x.requires_grad_(), x.detach().clone(memory_format=torch.contiguous_format)
        grouped_linear(x, weight, ends(3, 2)).sum().backward()
        grad, weight.grad = weight.grad, None
        grouped_linear(twin.requires_grad_(), weight, ends(3, 2)).sum().backward()
        assert torch.equal(grad, weight.grad) and torch.equal(x.grad, twin.grad)
        weight.grad = None


def test_bad_input_is_refused():
    weight, x = stack_in(NVFP4Quantizer()), torch.randn(10, IN)
    with pytest.raises(ValueError, match=r"got \(2, 5, 32\) and \(3, 64, 32\); flatten the tokens"):
        grouped_linear(x.view(2, 5, IN), weight, ends(4, 0, 6))
    with pytest.raises(ValueError, match=r"one entry per expert, 3, got \(2,\)"):
        grouped_linear(x, weight, ends(4, 6))
    with pytest.raises(TypeError, match="offsets must be int32, got torch.int64"):
        grouped_linear(x, weight, ends(4, 0, 6).long())
    with pytest.raises(ValueError, match=r"multiples of 8 .* got \(12, 32\); pad"):
        grouped_linear(x.bfloat16(), torch.randn(3, 12, IN), ends(4, 0, 6))
