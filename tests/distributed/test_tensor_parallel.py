"""Tensor parallelism gives the bits of one process, alone and under FSDP2."""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fp4adam import (
    Float8BlockQuantizer,
    FP4Adam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Recipe,
    check_shards,
    quantize_model,
)
from fp4adam.distributed import tensor_parallel
from fp4adam.distributed.dtensor import like, local, part_for
from fp4adam.distributed.torch_patches import wrap_shard_tensor
from fp4adam.tensors.swizzle import new_gemm_scale
from fp4adam.tensors.transpose import transposed_codes
from helpers import value_of
from ranks import home, run_ranks
from twins import OPTIONS, fixed_grads

RECIPES: dict[str, tuple[Any, int]] = {
    "nvfp4": ("nvfp4", 32),
    "nvfp4, cut by FSDP2": ("nvfp4", 16),
    "nvfp4, rowwise": (NVFP4Quantizer(columnwise=False), 32),
    "nvfp4, for GEMMs": (NVFP4Quantizer(optimize_for_gemm=True), 32),
    "mxfp8": ("mxfp8", 64),
    "mxfp8, rowwise": (MXFP8Quantizer(columnwise=False), 64),
    "mxfp8, for GEMMs": (MXFP8Quantizer(optimize_for_gemm=True), 64),
    "float8block": ("float8block", 256),
    "float8": ("float8", 32),
    "float8block, fp32 scales": (Float8BlockQuantizer(force_pow_2_scales=False), 256),
}


class Block(nn.Module):
    """A norm, and two layers with a bias each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build(recipe: Any, width: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Block:
    torch.manual_seed(seed)
    model = Block(width).to(home(), dtype)
    return quantize_model(model, recipe) if recipe is not None else model


def mesh_of(parallel: int) -> DeviceMesh:
    shape = dist.get_world_size() // parallel, parallel
    return init_device_mesh(home().type, shape, mesh_dim_names=("dp", "tp"))


PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}
IN_SEQUENCE = {
    "norm": SequenceParallel,
    "up": lambda: ColwiseParallel(input_layouts=Shard(1)),
    "down": lambda: RowwiseParallel(output_layouts=Shard(1)),
}


def distribute(model: Block, parallel: int, plan: dict[str, Callable] = PLAN, **fsdp: Any) -> Block:
    mesh = mesh_of(parallel)
    parallelize_module(model, mesh["tp"], {name: style() for name, style in plan.items()})
    if dist.get_world_size() > parallel:
        fully_shard(model, mesh=mesh["dp"], **fsdp)
    return model


def part_of(param: Tensor, whole: Tensor) -> Tensor:
    """The part of a whole plain value that belongs to the local tensor of ``param``."""
    return part_for(param, whole) if local(param) is not param else whole


def set_grads(model: nn.Module, grads: list[Tensor]) -> None:
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = like(param, part_of(param, grad).contiguous())


def assert_parts(model: nn.Module, whole: nn.Module) -> None:
    """Local tensors have the bytes of their parts of the whole parameters."""
    for (name, param), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        own, value = local(param).detach(), expected.detach()
        if isinstance(value, QuantizedTensor):
            assert isinstance(own, QuantizedTensor), name
            if not own.numel():
                continue
            if own._amax is not None:
                assert torch.equal(own._amax, value._amax), name
            # All that a part has beside its rowwise codes follows from them, or is decoded too.
            for part in (own, value) if own.quantizer == value.quantizer else ():
                assert_directions_agree(part)
            own, value = own.dequantize(torch.float32), value.dequantize(torch.float32)
        assert torch.equal(own, part_of(param, value)), name


def assert_directions_agree(weight: QuantizedTensor) -> None:
    """Columnwise codes and swizzled scales are those of the rowwise ones."""
    if weight.quantizer.layout.is_square and weight.columnwise_data is not None:
        bits = weight.quantizer.layout.code_type.bits
        assert torch.equal(weight.columnwise_data, transposed_codes(weight.rowwise_data, bits))
    compact = dataclasses.replace(weight.quantizer, optimize_for_gemm=False)
    for usage in ("rowwise", "columnwise"):
        stored = getattr(weight, f"_{usage}_gemm_scale_inv")
        if stored is not None:
            plain = type(weight)(tuple(weight.shape), weight.dtype, compact, weight.inner)
            assert torch.equal(stored, new_gemm_scale(plain, usage))


def assert_equal_state(optimizer: FP4Adam, expected: FP4Adam) -> None:
    for (param, a), b in zip(optimizer.state.items(), expected.state.values(), strict=True):
        for name in sorted(b.keys() - {"step"}):
            assert torch.equal(local(a[name]), part_of(param, b[name])), name


def complete_parts(rank: int, names: list[str], parallel: int) -> None:
    """Parts round their remainders with another dither, so they follow one process closely."""
    for name in names:
        recipe, width = RECIPES[name]
        whole = build(recipe, width)
        model = distribute(build(recipe, width), parallel)
        small = dict(OPTIONS, master_weight_dtype=torch.int8)
        expected, optimizer = (FP4Adam(m.parameters(), **small) for m in (whole, model))
        for step in range(4):
            grads = fixed_grads(whole, step)
            for pair in ((whole, expected), (model, optimizer)):
                set_grads(pair[0], grads)
                pair[1].step()
        for param, same in zip(model.parameters(), whole.parameters(), strict=True):
            a, b = (
                o.get_unscaled_state(p, "master_param")
                for o, p in ((optimizer, param), (expected, same))
            )
            # Eight units. Without remainders it would be half a gap, 119.5.
            assert (a - part_of(param, b)).abs().max() < 0.012 * b.abs().max()
        check_shards(model)


@pytest.mark.parametrize("world_size", [2, 4])
def test_remainders_of_parts(world_size):
    names = ["nvfp4", "mxfp8"] if world_size == 2 else ["nvfp4, cut by FSDP2"]
    run_ranks(complete_parts, world_size, names, 2)


def loss_of(model: nn.Module, width: int, in_sequence: bool, step: int = 0) -> Tensor:
    """The loss of one batch; with sequence parallelism this rank has a part of the tokens."""
    generator = torch.Generator().manual_seed(10 + step)
    x = torch.randn(2, 128, width, generator=generator).to(home(), torch.bfloat16)
    if in_sequence:
        x = x.chunk(2, dim=1)[dist.get_rank() % 2]
    y = model(x)
    y = y.to_local() if local(y) is not y else y
    return (y.float() - 1).square().sum() / x.numel()


def train_beside_plain(rank: int, names: list[str], parallel: int) -> None:
    """Forward and backward are torch's tensor parallelism with the decoded weights."""
    for name in names:
        recipe, width = RECIPES[name]
        for plan in (PLAN, IN_SEQUENCE):
            whole = build(recipe, width)
            decoded = build(None, width)
            with torch.no_grad():
                for param, value in zip(decoded.parameters(), whole.parameters(), strict=True):
                    param.copy_(value)
            model = distribute(whole, parallel, plan)
            distribute(decoded, parallel, plan)
            losses = [loss_of(m, width, plan is IN_SEQUENCE) for m in (model, decoded)]
            assert torch.equal(*losses), name
            for loss in losses:
                loss.backward()
            for a, b in zip(model.parameters(), decoded.parameters(), strict=True):
                assert getattr(a.grad, "placements", 0) == getattr(b.grad, "placements", 0)
                assert torch.equal(local(a.grad), local(b.grad)), name
            optimizer = FP4Adam(model.parameters(), **OPTIONS)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss_of(model, width, plan is IN_SEQUENCE).backward()
            check_shards(model)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_layers_are_those_of_torch_with_decoded_weights(world_size):
    # Under FSDP2 weights for GEMMs are gathered as quantized tensors.
    names = ["nvfp4", "mxfp8", "float8block", "nvfp4, for GEMMs", "mxfp8, for GEMMs"]
    run_ranks(train_beside_plain, world_size, names, 2)


def multiply_codes(rank: int) -> None:
    """Operands are quantized as by a layer with the part of a rank as its weight."""
    cases = [
        ("nvfp4", 64, True, True),
        ("mxfp8", 64, True, True),
        ("float8", 64, True, True),
        ("float8block", 256, True, True),
        ("float8block", 256, True, False),
        ("float8block", 256, False, True),
    ]
    for weights, width, activations, gradients in cases:
        recipe = Recipe(weights, activations=activations, gradients=gradients, emulate=True)
        torch.manual_seed(0)
        whole = build(recipe, width)
        model = distribute(build(recipe, width), 2)
        plain = distribute(build(weights, width), 2)
        for name, dim in (("up", 0), ("down", 1)):
            layer, of_whole = getattr(model, name), getattr(whole, name)
            weight = local(layer.weight).detach()
            storage, shape = weight.inner, tuple(weight.shape)
            part = nn.Parameter(type(weight)(shape, weight.dtype, weight.quantizer, storage))
            # Where the parts of a sum are added, torch gives each its share of the bias.
            bias = of_whole.bias.chunk(2)[rank] if dim == 0 else of_whole.bias / 2
            x = torch.randn(128, weight.shape[1], dtype=torch.bfloat16)
            g = torch.randn(128, weight.shape[0], dtype=torch.bfloat16)
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
            assert torch.equal(y, outputs), (weights, name)
            assert torch.equal(inputs[0].grad, grad), (weights, name)
            # torch multiplies the gradient of a weight in high precision here.
            assert torch.equal(local(layer.weight.grad), (g.t() @ x).to(part.dtype)), weights
            if activations:
                assert not torch.equal(getattr(plain, name)(x), y)
            if gradients:
                again = x.clone().requires_grad_()
                getattr(plain, name)(again).backward(g)
                assert not torch.equal(again.grad, grad)


def test_quantized_operands():
    run_ranks(multiply_codes, 2)


def count_collectives(rank: int, parallel: int) -> None:
    model = distribute(build("nvfp4", 32), parallel)
    check_shards(model)  # scales that wait for other ranks take a collective of their own
    optimizer = FP4Adam(model.parameters(), **OPTIONS)
    for step in range(2):
        set_grads(model, fixed_grads(build(None, 32), step))
        with CommDebugMode() as mode:
            optimizer.step()
        # Among the shards of a part, and among the parts.
        count = 1 if dist.get_world_size() == parallel else 2
        assert dict(mode.get_comm_counts()) == {torch.ops.c10d.allreduce_: count}
    model = distribute(build("mxfp8", 64), parallel)
    optimizer = FP4Adam(model.parameters(), **OPTIONS)
    set_grads(model, fixed_grads(build(None, 64), 0))
    with CommDebugMode() as mode:
        optimizer.step()
    assert not mode.get_total_counts()


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_collectives_of_a_step(world_size):
    run_ranks(count_collectives, world_size, 2)


@torch.no_grad()
def forward_alone(model: nn.Module, width: int) -> None:
    loss_of(model, width, False)
    if isinstance(model, FSDPModule):
        model.reshard()


@torch.no_grad()
def write_one_part(rank: int) -> None:
    model = distribute(build("nvfp4", 32), 2)
    if rank == 3:
        local(model.up.weight).copy_(torch.full((16, 32), 7.0))
    forward_alone(model, 32)
    assert local(model.up.weight)._amax == 7
    check_shards(model)
    # Next to a state, where the master of what has been written restarts.
    optimizer = FP4Adam(model.parameters(), **OPTIONS)
    set_grads(model, fixed_grads(build(None, 32), 0))
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    values = {n: like(p, value_of(local(p))) for n, p in model.named_parameters()}
    if rank == 3:
        local(values["up.weight"]).neg_()
    model.load_state_dict(values)
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    check_shards(model)
    if rank == 3:
        master = local(optimizer.state[model.up.weight]["master_param"])
        assert torch.equal(master, local(values["up.weight"]))


def test_a_part_that_one_rank_has_written_counts_on_all():
    """In both directions of the mesh."""
    run_ranks(write_one_part, 4, timeout=60.0)


def misuse(rank: int) -> None:
    mesh = mesh_of(2)["tp"]
    cases = [
        ("nvfp4", 48, "'up.weight' must be whole.*multiple of 2 parts of 16.*Shard"),
        ("mxfp8", 32, "multiple of 2 parts of 32"),
        ("float8block", 128, "multiple of 2 parts of 128"),
    ]
    for recipe, width, message in cases:
        # 2 * width fits in each case, width does not.
        layer = quantize_model(nn.ModuleDict({"up": nn.Linear(width, width)}), recipe)
        for plan in (ColwiseParallel(), RowwiseParallel()):
            with pytest.raises(ValueError, match=message):
                parallelize_module(layer, mesh, {"up": plan})
    vectors = build(NVFP4Quantizer(two_dimensional=False), 32)
    with pytest.raises(ValueError, match="'up.weight' must have rowwise=True, and"):
        parallelize_module(vectors, mesh, {"up": ColwiseParallel()})
    model = distribute(build(Recipe("float8block", activations="fake"), 256), 2)
    with pytest.raises(NotImplementedError, match="under tensor parallelism"):
        loss_of(model, 256, False)
    compiled = distribute(build("nvfp4", 32), 2)
    compiled.compile(backend="aot_eager")
    with pytest.raises(Exception, match="must not be compiled"):
        loss_of(compiled, 32, False)
    copied = copy.deepcopy(local(distribute(build("nvfp4", 32), 2).up.weight))
    with torch.no_grad():
        copied.copy_(torch.ones(copied.shape))
    with pytest.raises(RuntimeError, match="by parallelize_module"):
        copied.t()
    # One dimension is cut once.
    weight = build("nvfp4", 64).up.weight
    grid = init_device_mesh(home().type, (1, 2))
    with pytest.raises(ValueError, match="must be whole"):
        distribute_tensor(weight, grid, [Shard(1), Shard(0)])
    dist.barrier()


def test_a_torch_that_divides_tensors_otherwise_is_refused():
    with pytest.raises(NotImplementedError, match="got none in torch"):
        wrap_shard_tensor(type("Shard", (), {}), tensor_parallel._shard_tensor)
    # Tensors are divided by the function that is wrapped, on each rank.
    assert "._shard_tensor(" in inspect.getsource(Shard._make_shard_tensor)


def test_what_does_not_fit_is_refused_on_every_rank():
    run_ranks(misuse, 2)
