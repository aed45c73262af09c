"""Tensor parallelism: layers and their operands, beside what the rank table sees of steps."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fp4adam import FP4Adam, NVFP4Quantizer, Recipe, check_shards, quantize_model
from fp4adam.distributed import tensor_parallel
from fp4adam.distributed.dtensor import like, local, part_for
from fp4adam.distributed.torch_patches import wrap_shard_tensor
from fp4adam.optim.offload import _state_bytes
from helpers import value_of
from ranks import home, run, run_cases
from twins import OPTIONS, RECIPES, Twin, fixed_grads, set_grads, take_step


class Block(nn.Module):
    """A norm, and two layers with a bias each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build(recipe: Any, width: int) -> Block:
    torch.manual_seed(0)
    model = Block(width).to(home(), torch.bfloat16)
    return quantize_model(model, RECIPES.get(recipe, recipe)) if recipe is not None else model


PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}
IN_SEQUENCE = {
    "norm": SequenceParallel,
    "up": lambda: ColwiseParallel(input_layouts=Shard(1)),
    "down": lambda: RowwiseParallel(output_layouts=Shard(1)),
}


def distribute(model: Block, plan: dict[str, Callable] = PLAN) -> Block:
    """In two parts; on four ranks they are sharded."""
    shape = dist.get_world_size() // 2, 2
    mesh = init_device_mesh(home().type, shape, mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {name: style() for name, style in plan.items()})
    return fully_shard(model, mesh=mesh["dp"]) if shape[0] > 1 else model


def follow_remainders(rank: int, recipe: str, rows: int, cols: int) -> None:
    """Parts round their remainders with another dither, so they follow one process closely."""
    twin = Twin("parallel", recipe, rows, cols, "int8")
    for step in range(4):
        for model, optimizer in zip(twin.models, twin.optimizers, strict=True):
            take_step(model, optimizer, fixed_grads(twin.whole, step))
    for i in range(3):
        whole, own = (
            optimizer.get_unscaled_state(param, "master_param")
            for optimizer, param in zip(twin.optimizers, twin.params(i), strict=True)
        )
        # Eight units. Without remainders it would be half a gap, 119.5.
        assert (own - part_for(twin.params(i)[1], whole)).abs().max() < 0.012 * whole.abs().max()
    check_shards(twin.model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size, cases",
    [(2, [("nvfp4", 64, 32), ("mxfp8", 128, 64)]), (4, [("nvfp4", 64, 16)])],  # cut by FSDP2
)
def test_remainders_of_parts(world_size, cases):
    run_cases(follow_remainders, world_size, cases)


def loss_of(model: nn.Module, in_sequence: bool = False) -> Tensor:
    """The loss of one batch; with sequence parallelism this rank has a part of the tokens."""
    generator = torch.Generator().manual_seed(10)
    width = model.norm.weight.shape[0]
    x = torch.randn(2, 128, width, generator=generator).to(home(), torch.bfloat16)
    if in_sequence:
        x = x.chunk(2, dim=1)[dist.get_rank() % 2]
    y = local(model(x))
    return (y.float() - 1).square().sum() / x.numel()


def train_beside_plain(rank: int, recipe: str, width: int, in_sequence: bool) -> None:
    """Forward and backward are torch's tensor parallelism with the decoded weights."""
    plan = IN_SEQUENCE if in_sequence else PLAN
    model, decoded = build(recipe, width), build(None, width)
    with torch.no_grad():
        for param, value in zip(decoded.parameters(), model.parameters(), strict=True):
            param.copy_(value)
    losses = [loss_of(distribute(m, plan), in_sequence) for m in (model, decoded)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for a, b in zip(model.parameters(), decoded.parameters(), strict=True):
        assert getattr(a.grad, "placements", 0) == getattr(b.grad, "placements", 0)
        assert torch.equal(local(a.grad), local(b.grad))
    optimizer = FP4Adam(model.parameters(), **OPTIONS)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, in_sequence).backward()
    check_shards(model)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("in_sequence", [False, True])
def test_layers_are_those_of_torch_with_decoded_weights(world_size, in_sequence):
    # Under FSDP2 weights for GEMMs are gathered as quantized tensors.
    widths = {"nvfp4": 32, "mxfp8": 64, "float8block": 256, "nvfp4-gemm": 32, "mxfp8-gemm": 64}
    cases = [(*each, in_sequence) for each in widths.items()]
    run_cases(train_beside_plain, world_size, cases)


def multiply_codes(rank: int, weights: str, width: int, activations: bool, gradients: bool) -> None:
    """Operands are quantized as by a layer with the part of a rank as its weight."""
    recipe = Recipe(weights, activations=activations, gradients=gradients, emulate=True)
    whole, model = build(recipe, width), distribute(build(recipe, width))
    plain = distribute(build(weights, width))
    for name, dim in (("up", 0), ("down", 1)):
        layer, of_whole = getattr(model, name), getattr(whole, name)
        weight = local(layer.weight).detach()
        shape = tuple(weight.shape)
        part = nn.Parameter(type(weight)(shape, weight.dtype, weight.quantizer, weight.inner))
        # Where the parts of a sum are added, torch gives each its share of the bias.
        bias = of_whole.bias.chunk(2)[rank] if dim == 0 else of_whole.bias / 2
        x, g = (torch.randn(128, n, dtype=torch.bfloat16, device=home()) for n in shape[::-1])
        for value in (x, g) if name == "up" else (g,):
            dist.broadcast(value, 0)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        y, expected = layer(inputs[0]), F.linear(inputs[1], part, bias)
        outputs = expected.detach().clone()
        for output in (expected, y):
            torch.manual_seed(rank)  # gradients in NVFP4 are rounded at random
            output.backward(g)
        grad = inputs[1].grad
        dist.all_reduce(outputs if dim else grad)
        assert torch.equal(y, outputs), name
        assert torch.equal(inputs[0].grad, grad), name
        # torch multiplies the gradient of a weight in high precision here.
        assert torch.equal(local(layer.weight.grad), (g.t() @ x).to(part.dtype))
        if activations:
            assert not torch.equal(getattr(plain, name)(x), y)
        if gradients:
            again = x.clone().requires_grad_()
            getattr(plain, name)(again).backward(g)
            assert not torch.equal(again.grad, grad)


def test_quantized_operands():
    both = [("nvfp4", 64, True, True), ("mxfp8", 64, True, True), ("float8", 64, True, True)]
    one = [("float8block", 256, True, False), ("float8block", 256, False, True)]
    run_cases(multiply_codes, 2, [*both, *one])


@torch.no_grad()
def write_one_part(rank: int) -> None:
    """A part that one rank has written, next to its state: the master restarts there."""
    model = distribute(build("nvfp4", 32))
    optimizer = FP4Adam(model.parameters(), **OPTIONS)
    grads = fixed_grads(build(None, 32), 0)
    take_step(model, optimizer, grads)
    saved = copy.deepcopy(optimizer.state_dict())
    values = {n: like(p, value_of(local(p))) for n, p in model.named_parameters()}
    if rank == 3:
        local(values["up.weight"]).neg_()
    model.load_state_dict(values)
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 0.0
    set_grads(model, grads)
    optimizer.step()
    check_shards(model)
    if rank == 3:
        master = local(optimizer.state[model.up.weight]["master_param"])
        assert torch.equal(master, local(values["up.weight"]))
    part = local(model.up.weight)
    part.copy_(-local(values["up.weight"]) if rank == 3 else part.detach())  # its own bytes
    optimizer.step()
    assert not part._shared.unsettled  # or other ranks would wait
    if rank == 3:
        local(values["up.weight"]).mul_(4)
    model.load_state_dict(values)
    loss_of(model)  # gathers what has been written
    model.reshard()
    check_shards(model)
    if rank % 2:  # as the other shard of its part, and not as the other part
        local(model.up.weight)._amax.add_(8)
    with pytest.raises(RuntimeError, match="parameter 'up.weight' must have the same scales"):
        check_shards(model)


def test_a_part_that_one_rank_has_written_counts_on_all():
    run(write_one_part, 4, timeout=60.0)


def misuse(rank: int) -> None:
    mesh = init_device_mesh(home().type, (2,))
    for recipe, width, message in [
        ("nvfp4", 48, "'up.weight' must be whole.*multiple of 2 parts of 16.*Shard"),
        ("mxfp8", 32, "multiple of 2 parts of 32"),
        ("float8block", 128, "multiple of 2 parts of 128"),
        (NVFP4Quantizer(two_dimensional=False), 32, "'up.weight' must have rowwise=True, and"),
    ]:
        for plan in (ColwiseParallel(), RowwiseParallel()):
            layer = nn.ModuleDict({"up": nn.Linear(width, width, device=home())})
            quantize_model(layer, recipe)
            with pytest.raises(ValueError, match=message):
                parallelize_module(layer, mesh, {"up": plan})
    model = distribute(build(Recipe("float8block", activations="fake"), 256))
    with pytest.raises(NotImplementedError, match="under tensor parallelism"):
        loss_of(model)
    with pytest.raises(NotImplementedError, match="to have factored second moments, got .*Shard"):
        FP4Adam(model.parameters(), states="factored")
    copied = copy.deepcopy(local(distribute(build("nvfp4", 32)).up.weight))
    with pytest.raises(NotImplementedError, match="must not be compiled"), FakeTensorMode() as mode:
        mode.from_tensor(copied)  # as a compiler does with each parameter
    with torch.no_grad():
        copied.copy_(torch.ones(copied.shape))
    with pytest.raises(RuntimeError, match="by parallelize_module"):
        copied.t()
    with pytest.raises(ValueError, match="must be whole"):  # one dimension is cut once
        grid = init_device_mesh(home().type, (1, 2))
        distribute_tensor(build("nvfp4", 64).up.weight, grid, [Shard(1), Shard(0)])
    plain = distribute_tensor(torch.ones(4, 4), grid, [Shard(1), Shard(0)])
    assert _state_bytes(plain) == 12 * local(plain).numel()
    dist.barrier()


def test_what_does_not_fit_is_refused_on_every_rank():
    run(misuse, 2)


def test_a_torch_that_divides_tensors_otherwise_is_refused():
    with pytest.raises(NotImplementedError, match="got none in torch"):
        wrap_shard_tensor(type("Shard", (), {}), tensor_parallel._shard_tensor)
    # Tensors are divided by the function that is wrapped, on each rank.
    assert "._shard_tensor(" in inspect.getsource(Shard._make_shard_tensor)
