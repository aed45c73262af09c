"""Stacked experts as in transformers: quantized by quantize_model, read by grouped_mm."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from fp4adam import FP4Adam, QuantizedTensor, Recipe, dequantize_model, quantize_model, summary
from fp4adam.nn.fake_quantize import fake_quantize
from fp4adam.nn.transposed_weight import TransposedWeight
from helpers import assert_identical, randn, train
from ranks import all_ranks, run_ranks

EXPERTS, DIM, TOKENS = 4, 32, 24
OFFSETS = torch.tensor([6, 6, 12, TOKENS], dtype=torch.int32)
FORMATS = ["nvfp4", "mxfp8", "mxfp4", "float8block"]


class Experts(nn.Module):
    """Two grouped matmuls with a gate; ``transposed`` stacks are [experts, in, out]."""

    def __init__(self, transposed: bool = False, dim: int = DIM) -> None:
        super().__init__()
        self.num_experts, self.transposed = EXPERTS, transposed
        up, down = torch.randn(EXPERTS, 2 * dim, dim) / 6, torch.randn(EXPERTS, dim, dim) / 6
        up, down = (x.mT.contiguous() if transposed else x for x in (up, down))
        self.gate_up_proj, self.down_proj = nn.Parameter(up), nn.Parameter(down)

    def product(self, x: Tensor, stack: Tensor, offsets: Tensor) -> Tensor:
        stack = stack if self.transposed else stack.transpose(-2, -1)
        return F.grouped_mm(x.to(stack.dtype), stack, offs=offsets)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        gate, up = self.product(x, self.gate_up_proj, offsets).chunk(2, -1)
        return self.product(F.silu(gate) * up, self.down_proj, offsets)


class MoE(nn.Module):
    """Each token goes to the expert of its largest logit; the last expert gets none."""

    def __init__(self, transposed: bool = False, dim: int = DIM) -> None:
        super().__init__()
        self.router = nn.Linear(dim, EXPERTS - 1, bias=False)
        self.experts = Experts(transposed, dim)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        offsets = torch.bincount(chosen, minlength=EXPERTS).cumsum(0).int()
        y = self.experts(x[order], offsets)[order.argsort()]
        return x + weights[:, None] * y


def not_router(module: nn.Module, name: str) -> bool:
    return name != "router"


def make(recipe="nvfp4", seed=0, dtype=torch.float32, **options) -> MoE:
    torch.manual_seed(seed)
    dim = 128 if recipe == "float8block" else DIM
    return quantize_model(MoE(**{"dim": dim} | options).to(dtype), recipe, not_router)


def tokens(model: MoE, seed=1) -> Tensor:
    generator, weight = torch.Generator().manual_seed(seed), model.router.weight
    return torch.randn(TOKENS, weight.shape[1], generator=generator).to(weight.dtype)


def decoded(model: MoE) -> MoE:
    """The same model with plain parameters of the decoded values."""
    return dequantize_model(copy.deepcopy(model))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - torch.roll(x.float(), 1, 1)).square().mean()


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_gradients_are_those_of_the_decoded_values(recipe, transposed, dtype):
    model = make(recipe, transposed=transposed, dtype=dtype)
    assert all(isinstance(param, QuantizedTensor) for param in model.experts.parameters())
    plain, runs = decoded(model), []
    for each in (model, plain, lambda x: checkpoint(model, x, use_reentrant=False)):
        x = tokens(model).requires_grad_()
        params = [*(plain if each is plain else model).parameters()]
        for param in params:
            param.grad = None
        y = each(x)
        y.float().square().sum().backward()
        runs.append([y, x.grad, *(param.grad for param in params)])
        assert not params[1].grad[-1].any()
    for run in runs[1:]:
        assert_identical(runs[0], run)


def test_activations_are_fake_quantized():
    fake = Recipe("nvfp4", activations="fake").quantizer
    stack, x = nn.Parameter(fake.quantize(randn(2, 32, 64))), randn(5, 64)
    offsets = torch.tensor([2, 5], dtype=torch.int32)
    dense = stack.dequantize(torch.float32).detach().requires_grad_()
    read, runs = fake_quantize(x, fake), []
    for rows, weight in ((x, stack), (read, dense)):
        y = F.grouped_mm(rows, weight.transpose(1, 2), offs=offsets)
        y.backward(torch.ones_like(y))
        runs.append((y, weight.grad))
    assert not torch.equal(read, x)
    torch.testing.assert_close(*runs)


def test_under_autocast_experts_multiply_in_bfloat16():
    model = make()
    x = torch.cat([tokens(model)] * 2, 1)[:, 3 : 3 + DIM]  # rows may lie in any way
    with torch.autocast("cpu", torch.bfloat16):
        y = model.experts(x, OFFSETS)
        y.square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert_identical(y, decoded(model).bfloat16().experts(x.bfloat16(), OFFSETS))
    assert model.experts.down_proj.grad.dtype == torch.float32


def test_no_decoded_stack_is_kept_for_the_backward_pass():
    model, saved = make(dtype=torch.bfloat16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        model(tokens(model).requires_grad_())
    stacks = [x for x in saved if x.dim() == 3]
    assert len(stacks) == 2 and all(isinstance(x, TransposedWeight) for x in stacks)


@pytest.mark.parametrize(
    "read",
    [
        lambda stack: stack.transpose(1, 2) * 2,
        lambda stack: stack.transpose(-1, -2).contiguous(),
        lambda stack: stack.transpose(-1, -2).sum(dtype=torch.float64),
        lambda stack: torch.bmm(torch.ones(EXPERTS, 3, DIM), stack.transpose(2, 1)),
        lambda stack: stack.transpose(1, 2).transpose(1, 2) * 2,
        lambda stack: stack.transpose(1, 2).transpose(0, 1),
        lambda stack: stack[2],
        lambda stack: F.linear(torch.ones(3, DIM), stack[torch.tensor(2)]),
        lambda stack: torch.stack([stack.transpose(1, 2)] * 2),
        lambda stack: F.grouped_mm(torch.ones(EXPERTS, 4, DIM), stack.transpose(1, 2)),
    ],
)
def test_other_operators_see_decoded_values(read):
    stack = make().experts.gate_up_proj
    plain = stack.dequantize(torch.float32).detach().requires_grad_()
    for weight in (stack, plain):
        read(weight).square().sum().backward()
    assert_identical((read(stack), stack.grad), (read(plain), plain.grad))
    with torch.no_grad():
        assert_identical(read(stack), read(plain))
    turned, expected = stack.transpose(1, 2), plain.transpose(1, 2)
    for look in ("shape", "dtype", "device", "requires_grad", "ndim"):
        assert getattr(turned, look) == getattr(expected, look)
    assert turned.stride() == expected.stride() and len(turned) == EXPERTS


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
def test_functions_of_torch_and_compiled_graphs_take_stacks(transposed):
    model = make(transposed=transposed)
    x = tokens(model)
    params = {name: p.detach() for name, p in model.named_parameters()}
    call = torch.func.functional_call
    grads, of_x = torch.func.grad(lambda p, x: call(model, p, (x,)).sum(), (0, 1))(params, x)
    twin = x.clone().requires_grad_()
    model(twin).sum().backward()
    torch.testing.assert_close(of_x, twin.grad)
    for name, param in model.named_parameters():
        torch.testing.assert_close(grads[name], param.grad)
    model, x = model.bfloat16(), x.bfloat16()  # torch traces products of BF16 alone
    compiled = torch.compile(model.experts, backend="aot_eager")
    torch.testing.assert_close(compiled(x, OFFSETS), model.experts(x, OFFSETS))


def test_recipes_for_quantized_operands_are_refused():
    for weights in ("nvfp4", "float8block"):
        recipe = Recipe(weights, activations=True)
        with pytest.raises(ValueError, match=r"experts must be quantized alone, .*filter=lambda"):
            make(recipe, dim=128)
        stack = recipe.quantizer.quantize(torch.ones(2, 128, 128))
        with pytest.raises(NotImplementedError, match="stack of experts must be quantized alone"):
            F.grouped_mm(torch.ones(TOKENS, 128), stack, offs=OFFSETS[-2:])
    model = nn.Sequential(MoE(dim=128), nn.Linear(128, 128))
    with pytest.warns(UserWarning, match="2 layers stay .*: 0.router, 0.experts"):
        quantize_model(model, recipe)  # no filter


@pytest.mark.parametrize("recipe", FORMATS)
def test_training_copying_saving_and_moving(recipe):
    model = make(recipe)
    optimizer, x = FP4Adam(model.named_parameters(), lr=1e-2), tokens(model)

    def steps(model: MoE, optimizer: FP4Adam, n: int) -> list[float]:
        return train(optimizer, (loss_of(model, x) for _ in range(n)))

    losses = steps(model, optimizer, 10)
    assert losses[-1] < 0.9 * losses[0]
    loaded = make(recipe, seed=5)
    loads = FP4Adam(loaded.named_parameters(), lr=1e-2)
    loaded.load_state_dict(model.state_dict())
    loads.load_state_dict(optimizer.state_dict())
    copied = copy.deepcopy((model, optimizer))
    pickled = pickle.loads(pickle.dumps((model, optimizer)))
    pairs = (model.cpu(), optimizer), copied, pickled, (loaded, loads)
    runs = [steps(*pair, 2) for pair in pairs]
    assert all(run == runs[0] for run in runs)
    for pair in pairs[1:]:
        assert_identical(dict(pair[0].state_dict()), dict(model.state_dict()))


def test_what_is_a_stack(recwarn):
    torch.manual_seed(0)
    model = MoE()
    model.experts.bias = nn.Parameter(torch.zeros(EXPERTS, DIM))
    model.experts.register_parameter("none", None)
    model.experts.lazy = nn.UninitializedParameter()
    model.other = nn.Module()
    model.other.cube = nn.Parameter(torch.zeros(EXPERTS, DIM, DIM))  # has no num_experts
    for _ in range(2):  # again: nothing changes
        before = dict(model.named_parameters())
        found = summary(quantize_model(model, "nvfp4", not_router))
        assert all(before[name] is param for name, param in model.named_parameters())
    names = [p.name for p in found.quantized]
    assert names == ["experts.gate_up_proj", "experts.down_proj"]
    assert "other.cube (Module: its module has no num_experts" in found.describe()
    assert "gate_up_proj=NVFP4, down_proj=NVFP4" in str(model)
    with pytest.warns(UserWarning, match="'experts': experts must have a multiple of 128 rows"):
        quantize_model(MoE(), "float8block")
    uneven = nn.Module()
    uneven.num_experts, uneven.stack = 32, nn.Parameter(torch.zeros(32, 33, 32))
    assert quantize_model(uneven, "mxfp8").stack.quantizer.layout.block == 32  # of a row
    with pytest.raises(ValueError, match="layer 'experts': rows and columns of MXFP8 must be"):
        quantize_model(MoE(dim=16), "mxfp8", not_router)


def train_model(rank: int, recipe: str, sharded: bool) -> tuple[list[float], list[Tensor]]:
    model = make(recipe)
    if sharded:
        fully_shard(model.experts, mesh=all_ranks())
        fully_shard(model, mesh=all_ranks())
    optimizer = FP4Adam(model.named_parameters(), lr=1e-2)
    losses = train(optimizer, (loss_of(model, tokens(model, seed)) for seed in range(3)))
    masters = [optimizer.state[p].get("master_param", p.detach()) for p in model.parameters()]
    return losses, [master.full_tensor() if sharded else master for master in masters]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["nvfp4", "float8block"])
def test_fsdp(recipe):
    alone = train_model(0, recipe, False)
    for losses, masters in run_ranks(train_model, 2, recipe, True):
        assert losses == alone[0]
        assert_identical(masters, alone[1])
