"""Stacks of expert weights with quantized activations and gradients: values, layouts, errors."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from fp4adam import (
    FP4Adam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Recipe,
    grouped_linear,
    kept_weights,
    unswizzle_scales,
)
from fp4adam.formats import minifloat, nvfp4_gradients
from fp4adam.nn import grouped_matmul, hardware
from fp4adam.nn.grouped_linear import _ScaledGroupedLinear
from fp4adam.nn.operand import quantize
from fp4adam.tensors import backend
from fp4adam.tensors.storage import Storage
from helpers import randn, train
from ranks import all_ranks, run_ranks
from waits import refusing_waits

EXPERTS, OUT, IN = 3, 128, 256
# What activations and gradients are quantized by.
FORMATS = {"mxfp8": MXFP8Quantizer(), "nvfp4": NVFP4Quantizer(two_dimensional=False)}
BLOCK = {"mxfp8": 32, "nvfp4": 16}
every_format = pytest.mark.parametrize("weights", FORMATS)


def stack_in(recipe: Recipe) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(recipe.quantizer.quantize(torch.randn(EXPERTS, OUT, IN) / IN**0.5))


def both(weights, **options) -> Recipe:
    return Recipe(weights, activations=True, gradients=True, **options)


def ends(*counts: int) -> Tensor:
    return torch.tensor(counts).cumsum(0).int()


def rounded(x: Tensor, weights: str) -> Tensor:
    padded = F.pad(x, (0, 0, 0, -len(x) % 32))
    return FORMATS[weights].quantize(padded).dequantize(torch.float32)[: len(x)] if len(x) else x


def by_expert(x: Tensor, dense: Tensor, counts: tuple[int, ...]) -> Tensor:
    groups = zip(x.split(counts), dense.unbind(), strict=True)
    return torch.cat([tokens @ of_expert for tokens, of_expert in groups])


def backward_values(stack: nn.Parameter) -> Tensor:
    """The weights as the backward pass reads them."""
    if not isinstance(stack.quantizer, MXFP8Quantizer):
        return stack.dequantize(torch.float32)
    storage = Storage(
        columnwise_data=stack._columnwise_data, columnwise_scale_inv=stack._columnwise_scale_inv
    )
    columnwise = MXFP8Quantizer(rowwise=False)
    return type(stack)(stack.shape, torch.float32, columnwise, storage).dequantize(torch.float32)


@every_format
@pytest.mark.parametrize("counts", [(4, 0, 130), (128, 128, 1), (0, 0, 0)])
@pytest.mark.parametrize("quantized", ["activations", "gradients", "both"])
def test_operands_are_those_of_the_quantizers(weights, quantized, counts, monkeypatch):
    at_random = []

    def to_nearest(*args: Any) -> Tensor:
        at_random.append(args)
        return minifloat.e2m1_code(*args)

    monkeypatch.setattr(nvfp4_gradients, "e2m1_stochastic_code", to_nearest)
    activations, gradients = (quantized in (name, "both") for name in ("activations", "gradients"))
    stack = stack_in(Recipe(weights, activations, gradients))
    x, grad = randn(sum(counts), IN).requires_grad_(), randn(sum(counts), OUT)
    y = grouped_linear(x, stack, ends(*counts))
    assert not at_random
    y.backward(grad)
    assert bool(at_random) == (gradients and weights == "nvfp4")

    weight = stack.dequantize(torch.float32).detach()
    read = rounded(x.detach(), weights) if activations else x.detach()
    torch.testing.assert_close(y, by_expert(read, weight.transpose(1, 2), counts))
    read = rounded(grad, weights) if gradients else grad
    dense = backward_values(stack).detach() if gradients else weight
    torch.testing.assert_close(x.grad, by_expert(read, dense, counts))
    groups = zip(grad.split(counts), x.detach().split(counts), strict=True)
    torch.testing.assert_close(stack.grad, torch.stack([dy.t() @ of_x for dy, of_x in groups]))


def row_by_row(swizzled: Tensor, rows: int, blocks: int) -> Tensor:
    return unswizzle_scales([swizzled.view(math.ceil(rows / 128) * 128, -1)], [(rows, blocks)])[0]


@every_format
def test_each_expert_has_tiles_of_its_own(weights):
    counts, blocks = (4, 0, 129), IN // BLOCK[weights]
    x = randn(sum(counts), IN)
    tokens, _ = quantize(x, both(weights).quantizer, True, offsets=ends(*counts))
    plain = FORMATS[weights].quantize(F.pad(x, (0, 0, 0, 27)))._rowwise_scale_inv[:, :blocks]
    # Experts without tokens have no tiles, and room for the worst case follows.
    starts = {0: (0, 4), 128: (4, 133)}
    for start, (first, last) in starts.items():
        rows = last - first
        scales = tokens.scales[start : start + math.ceil(rows / 128) * 128]
        assert torch.equal(row_by_row(scales, rows, blocks), plain[first:last])

    stack = stack_in(both(weights))
    for usage, sides in (("rowwise", (OUT, IN)), ("columnwise", (IN, OUT))):
        operand = grouped_matmul.stack_operand(stack, usage)
        blocks = sides[1] // BLOCK[weights]
        plain = getattr(stack, f"{usage}_scale_inv")
        if weights == "mxfp8" and usage == "columnwise":
            plain = plain.t()
        for e, scales in enumerate(operand.scales):
            rows, cols = (e * OUT, 0) if usage == "rowwise" else (0, e * blocks)
            expected = plain[rows : rows + sides[0], cols : cols + blocks]
            assert torch.equal(row_by_row(scales, sides[0], blocks), expected)


@every_format
def test_kernels_make_the_operands_of_the_torch_path(weights, monkeypatch, device):
    quantizer, offsets, x = both(weights).quantizer, ends(4, 0, 66), randn(70, IN)
    stack = stack_in(both(weights))
    expected = quantize(x, quantizer, True, offsets=offsets)[:1]
    expected += [grouped_matmul.stack_operand(stack, use) for use in ("rowwise", "columnwise")]
    monkeypatch.setattr(backend, "uses_kernels", lambda d: d.type == device)
    stack = stack.detach().to(device)
    made = quantize(x.to(device), quantizer, True, offsets=offsets.to(device))[:1]
    made += [grouped_matmul.stack_operand(stack, use) for use in ("rowwise", "columnwise")]
    for one, other in zip(made, expected, strict=True):
        assert torch.equal(one.codes.cpu(), other.codes)
        assert torch.equal(one.scales.cpu(), other.scales)


def checked_grouped_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, **rest):
    """What torch checks on a GPU, in C++ for NVFP4, where it has no fake kernel to ask."""
    offsets, dtype = rest.pop("offs"), rest.pop("output_dtype")
    (rows, k), (experts, _, n), packed = a.shape, b.shape, 2 if a.element_size() == 1 else 1
    assert not rest and dtype == torch.bfloat16
    assert offsets.dtype == torch.int32 and offsets.shape == (experts,)
    assert a.is_contiguous() and b.transpose(1, 2).is_contiguous()
    assert b.shape[1] == k and k % 16 == 0 and n % 16 == 0
    types, orders = F.ScalingType, F.SwizzleType
    if a.dtype == torch.float4_e2m1fn_x2:
        block, kind = 16, torch.float8_e4m3fn
        assert recipe_a == recipe_b == [types.BlockWise1x16, types.TensorWise]
        assert swizzle_a == swizzle_b == [orders.SWIZZLE_32_4_4, orders.NO_SWIZZLE]
        # The product of the two is read per expert.
        whole = scale_a[1] * scale_b[1]
        assert whole.dtype == torch.float32 and whole.shape == (experts,) and whole.is_contiguous()
    else:
        block, packed, kind = 32, 1, torch.float8_e8m0fnu
        assert recipe_a == recipe_b == [types.BlockWise1x32]
        assert swizzle_a == swizzle_b == [orders.SWIZZLE_32_4_4]
        torch._scaled_grouped_mm(a, b, scale_a[0], scale_b[0], offsets, out_dtype=dtype)
    assert a.dtype == b.dtype and scale_a[0].dtype == scale_b[0].dtype == kind
    assert scale_a[0].is_contiguous() and scale_b[0].is_contiguous()
    blocks = math.ceil(k * packed / block / 4) * 4
    # No more than 127 rows of padding per expert.
    assert scale_a[0].shape[0] >= rows + 127 * experts and scale_a[0].shape[1] == blocks
    assert scale_b[0].shape == (experts, math.ceil(n / 128) * 128 * blocks)
    return a.new_empty(rows, n, dtype=dtype)


@pytest.mark.parametrize(("weights", "capability"), [("mxfp8", (10, 0)), ("nvfp4", (10, 3))])
@pytest.mark.parametrize("tokens", [0, 50, 256])
@pytest.mark.parametrize("shape", [(4, 256, 128), (1, 128, 384)])
@pytest.mark.parametrize("transposed", [False, True])
def test_native_matmuls_pass_the_checks_of_torch(
    weights, capability, tokens, shape, transposed, monkeypatch
):
    experts, out_features, in_features = shape
    if transposed:
        out_features, in_features = in_features, out_features
    monkeypatch.setattr(hardware, "_capability", lambda device: capability)
    monkeypatch.setattr(grouped_matmul, "_multiply_op", grouped_matmul._multiply)
    calls = []

    def checked(*args, **kwargs):
        calls.append(checked_grouped_mm(*args, **kwargs))
        return calls[-1]

    monkeypatch.setattr(F, "scaled_grouped_mm", checked)
    with FakeTensorMode():
        stack = both(weights).quantizer.make_empty(shape, torch.bfloat16, "cuda")
        x = torch.empty(tokens, in_features, dtype=torch.bfloat16, device="cuda")
        offsets = torch.empty(experts, dtype=torch.int32, device="cuda")
        # Autograd itself would look for a stream of the GPU.
        ctx = SimpleNamespace(needs_input_grad=(True, True, False, False))
        ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
        y = _ScaledGroupedLinear.forward(ctx, x, stack, offsets, transposed)
        grad_x, grad_stack, *_ = _ScaledGroupedLinear.backward(ctx, torch.empty_like(y))
    assert (y.shape, y.dtype, y.device.type) == ((tokens, out_features), x.dtype, "cuda")
    assert grad_x.shape == x.shape and grad_stack.shape == shape and len(calls) == 2


@every_format
def test_native_matmuls_give_what_the_emulation_gives(weights):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10:
        pytest.skip("needs a GPU of compute capability 10.x")
    offsets, results = ends(4, 0, 1000).cuda(), []
    for emulate in (False, True):
        stack = nn.Parameter(stack_in(both(weights, emulate=emulate)).detach().cuda())
        x = randn(1004, IN, dtype=torch.bfloat16).cuda().requires_grad_()
        y = grouped_linear(x, stack, offsets)
        y.backward(randn(1004, OUT, dtype=torch.bfloat16).cuda())
        results.append((y.detach(), x.grad, stack.grad))
    for native, emulated in zip(*results, strict=True):
        # The same products, summed in another order and by adders of fewer bits.
        largest = emulated.abs().max().item()
        torch.testing.assert_close(native, emulated, rtol=0, atol=0.01 * largest)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_format
def test_host_does_not_wait_for_the_offsets(weights):
    recipe, x = both(weights), randn(70, IN, dtype=torch.bfloat16).cuda()
    stack, offsets = stack_in(recipe).detach().cuda(), ends(4, 0, 66).cuda()
    plain = Recipe(weights).quantizer.quantize(torch.randn(EXPERTS, OUT, IN, device="cuda"))

    def run() -> None:
        quantize(x, recipe.quantizer, True, offsets=offsets)
        for usage in ("rowwise", "columnwise"):
            grouped_matmul.stack_operand(stack, usage)
        if torch.cuda.get_device_capability()[0] in (9, 10):
            grouped_linear(x, plain, offsets)
        if torch.cuda.get_device_capability()[0] == 10:
            grouped_linear(x, stack, offsets)

    run()
    with refusing_waits():
        run()


def test_what_cannot_be_multiplied_is_refused(monkeypatch):
    x, offsets = randn(10, IN), ends(4, 0, 6)
    with pytest.raises(NotImplementedError, match="must be MXFP8 or NVFP4 .* got Float8Block"):
        grouped_linear(x, stack_in(both("float8block")), offsets)
    with pytest.raises(ValueError, match=r"multiples of 128 for grouped .* got \(3, 256, 96\)"):
        narrow = both("mxfp8").quantizer.make_empty((3, 256, 96))
        grouped_linear(x[:, :96], narrow, offsets)
    for capability in ((9, 0), (12, 0)):
        monkeypatch.setattr(hardware, "_capability", lambda device, found=capability: found)
        with FakeTensorMode(), pytest.raises(RuntimeError, match=r"need CUDA .* 10\.x, got"):
            grouped_linear(*fake_arguments(torch.bfloat16))
    monkeypatch.setattr(hardware, "_capability", lambda device: (10, 0))
    with FakeTensorMode(), pytest.raises(TypeError, match="must be bfloat16 .* got torch.float16"):
        grouped_linear(*fake_arguments(torch.float16))


def fake_arguments(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    stack = both("nvfp4").quantizer.make_empty((EXPERTS, OUT, IN), dtype, "cuda")
    x = torch.empty(10, IN, dtype=dtype, device="cuda")
    return x, stack, torch.empty(EXPERTS, dtype=torch.int32, device="cuda")


class Experts(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.stack = stack_in(both(weights))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return grouped_linear(x, self.stack, offsets)


@every_format
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiles_in_one_graph_for_any_offsets(weights):
    torch._dynamo.reset()
    experts, twin = Experts(weights), Experts(weights)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(experts, backend=counter, fullgraph=True, dynamic=True)
    for counts in ((4, 0, 6), (130, 2, 3)):
        x, x_twin = (randn(sum(counts), IN, dtype=torch.bfloat16) for _ in range(2))
        y = compiled(x.requires_grad_(), ends(*counts))
        expected = twin(x_twin.requires_grad_(), ends(*counts))
        y.sum().backward()
        expected.sum().backward()
        assert torch.equal(y, expected) and torch.equal(x.grad, x_twin.grad)
        torch.testing.assert_close(experts.stack.grad, twin.stack.grad)
    assert counter.frame_count == 1


def test_output_may_be_written_in_place():
    stack, (x, twin) = stack_in(both("mxfp8")), (randn(10, IN).requires_grad_() for _ in range(2))
    grouped_linear(x, stack, ends(4, 0, 6)).relu_().sum().backward()
    grouped_linear(twin, stack, ends(4, 0, 6)).relu().sum().backward()
    assert torch.equal(x.grad, twin.grad)


def test_activation_checkpointing_and_autocast():
    stack, offsets = stack_in(both("nvfp4")), ends(4, 0, 6)
    twin = copy.deepcopy(stack)
    x, x_twin = (randn(10, IN).requires_grad_() for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(grouped_linear, x, stack, offsets, use_reentrant=False)
        expected = grouped_linear(x_twin, twin, offsets)
    y.sum().backward()
    expected.sum().backward()
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    assert torch.equal(x.grad, x_twin.grad) and torch.equal(stack.grad, twin.grad)


@every_format
def test_operands_of_a_stack_are_kept(weights, monkeypatch):
    made, original = [], grouped_matmul._stack_operand
    monkeypatch.setattr(
        grouped_matmul, "_stack_operand", lambda *args: made.append(args[1]) or original(*args)
    )
    stack = stack_in(both(weights))
    with kept_weights():
        for _ in range(2):
            x = randn(10, IN).requires_grad_()
            grouped_linear(x, stack, ends(4, 0, 6)).sum().backward()
        assert made == ["rowwise", "columnwise"]
        with torch.no_grad():
            stack.quantize_(randn(EXPERTS, OUT, IN))
        grouped_linear(x, stack, ends(4, 0, 6))
    assert made == ["rowwise", "columnwise", "rowwise"]


def train_shards(rank: int) -> None:
    for weights in FORMATS:
        losses = []
        for sharded in (True, False):
            experts = Experts(weights)
            if sharded:
                fully_shard(experts, mesh=all_ranks())
            optimizer = FP4Adam(experts.parameters(), lr=1e-2)
            x = randn(20, IN)
            errors = (experts(x, ends(4, 0, 16)) - x[:, :OUT] for _ in range(2))
            losses += train(optimizer, (error.pow(2).mean() for error in errors))
        assert losses[:2] == losses[2:] and losses[1] < losses[0]


def test_gathered_stacks_are_multiplied_as_whole_ones():
    run_ranks(train_shards, 2)
