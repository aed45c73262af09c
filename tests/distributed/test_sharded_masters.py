"""MasterWeightOptimizer with FSDP2 and DDP: the bits of one process, and checkpoints."""

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer

with warnings.catch_warnings():  # it compiles functions with torch.jit.script
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

from fp4adam import MasterWeightOptimizer, QuantizedTensor, check_shards, quantize_model
from fp4adam.distributed.dtensor import local
from helpers import assert_identical
from ranks import all_ranks, device_for, home, run, run_ranks, use_kernels
from test_fsdp import (
    CASES_OF,
    FORMATS,
    build,
    fixed_grads,
    full,
    gathered_bytes,
    set_grads,
    whole_bytes,
)

OPTIONS = dict(lr=1e-2, weight_decay=0.1)


def step_in_parallel(rank: int, rows: int, cols: int, recipe: str) -> None:
    whole, sharded = (build(rows, cols, recipe, torch.bfloat16) for _ in range(2))
    fully_shard(sharded, mesh=all_ranks())
    pairs = [
        (model, MasterWeightOptimizer(model.parameters(), AdamW, **OPTIONS))
        for model in (whole, sharded)
    ]
    for step in range(4):
        grads = fixed_grads(whole, step)
        for model, optimizer in pairs:
            set_grads(model, grads)
            if step == 2:  # frozen for a step
                model[0].weight.grad = None
            optimizer.step()
        assert_identical(gathered_bytes(sharded), whole_bytes(whole))
    check_shards(sharded)
    (_, expected), (_, optimizer) = pairs
    for a, b in zip(optimizer.state.values(), expected.state.values(), strict=True):
        assert a.keys() == b.keys()
        for name in sorted(b.keys() - {"step"}):
            assert_identical([{name: full(a[name])}], [{name: b[name]}])


@pytest.mark.parametrize("recipe", CASES_OF)
@pytest.mark.parametrize(
    "world_size, rows, cols",
    [
        (3, 64, 32),  # boundaries cut blocks
        pytest.param(2, 256, 128, marks=pytest.mark.exhaustive),  # whole blocks
        pytest.param(2, 288, 64, marks=pytest.mark.exhaustive),
    ],
)
def test_shards_have_the_bits_of_one_process(world_size, rows, cols, recipe):
    run(step_in_parallel, world_size, rows, cols, recipe)


def step_by_kernels(rank: int, *args: Any) -> None:
    """:func:`step_in_parallel` with the kernels of a GPU, in Triton's interpreter on a CPU."""
    use_kernels()
    step_in_parallel(rank, *args)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", FORMATS)
def test_kernels_quantize_shards(recipe):
    run(step_by_kernels, 3, 64, 32, recipe)


def test_a_rank_without_rows():
    run(step_in_parallel, 4, 5, 16, "float8block")


def make_muon(seed: int = 0) -> tuple[nn.Module, Optimizer, Optimizer]:
    """Muon for the matrices, AdamW for the bias."""
    model = build(64, 32, "nvfp4", torch.bfloat16)
    fully_shard(model, mesh=all_ranks())
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim != 2]
    return (
        model,
        MasterWeightOptimizer(matrices, Muon, lr=0.02),
        MasterWeightOptimizer(others, AdamW, lr=1e-2),
    )


def train(model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    """Three steps, with batches of this rank."""
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(8, 32, generator=generator).to(home())
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_with_muon(rank: int, folder: str) -> None:
    model, muon, adamw = make_muon()
    alone = build(64, 32, "nvfp4", torch.bfloat16)
    params = [param for param in alone.parameters() if param.ndim == 2]
    expected = MasterWeightOptimizer(params, Muon, lr=0.02)
    for step in range(3):
        grads = fixed_grads(alone, step)
        for one in (model, alone):
            set_grads(one, grads)
        for optimizer in (muon, adamw, expected):
            optimizer.step()
        if step == 1:
            state = get_state_dict(model, [muon, adamw])
            dcp.save(dict(zip(("model", "optimizers"), state, strict=True)), checkpoint_id=folder)
    check_shards(model)
    for param, whole in zip(muon.state, params, strict=True):
        master = full(muon.state[param]["master_param"])
        # Sums over ranks have another order than those of one process.
        torch.testing.assert_close(master, expected.state[whole]["master_param"], rtol=0, atol=2e-3)
    by_name = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    for found, param in zip(gathered_bytes(model)[::2], by_name.values(), strict=True):
        master = full(muon.state[param]["master_param"])
        codes = local(param)._shared.global_spec.quantizer.quantize(master)
        torch.testing.assert_close(
            found["value"], codes.dequantize(torch.bfloat16).to(found["value"]), rtol=0, atol=0
        )
    resumed, again, adamw_again = make_muon(seed=1)
    model_state, optimizer_state = get_state_dict(resumed, [again, adamw_again])
    state = {"model": model_state, "optimizers": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        resumed,
        [again, adamw_again],
        model_state_dict=state["model"],
        optim_state_dict=state["optimizers"],
    )
    set_grads(resumed, fixed_grads(alone, 2))
    again.step()
    adamw_again.step()
    assert_identical(gathered_bytes(resumed), gathered_bytes(model))
    for a, b in zip(again.state.values(), muon.state.values(), strict=True):
        assert_identical([{k: full(v) for k, v in a.items()}], [{k: full(v) for k, v in b.items()}])


def test_muon_on_shards(tmp_path: Path) -> None:
    run(train_with_muon, 2, str(tmp_path))


def train_replicas(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).to(home())
    quantize_model(model, "nvfp4")
    replica = DistributedDataParallel(model)
    optimizer = MasterWeightOptimizer(model.parameters(), AdamW, **OPTIONS)
    train(replica, optimizer, rank)
    found = {}
    for name, param in model.named_parameters():
        inner = param.storage_tensors() if isinstance(param, QuantizedTensor) else {"": param}
        found |= {name + part: value.detach() for part, value in inner.items()}
    return found


def test_replicas_stay_equal() -> None:
    first, second = run_ranks(train_replicas, 2, device=device_for(2))
    assert_identical([first], [second])


def whole_states(rank: int) -> None:
    """A state of whole parameters, such as one process saves, is cut into shards."""
    whole, sharded = (build(64, 32, "nvfp4", torch.bfloat16) for _ in range(2))
    fully_shard(sharded, mesh=all_ranks())
    one, optimizer = (
        MasterWeightOptimizer(model.parameters(), AdamW, **OPTIONS) for model in (whole, sharded)
    )
    set_grads(whole, fixed_grads(whole, 0))
    one.step()
    optimizer.load_state_dict(one.state_dict())
    for a, b in zip(optimizer.state.values(), one.state.values(), strict=True):
        names = b.keys() - {"step"}
        values: list[dict[str, Tensor]] = [{n: full(s[n]) for n in sorted(names)} for s in (a, b)]
        assert_identical(values[:1], values[1:])


def test_states_of_whole_parameters_are_cut() -> None:
    run(whole_states, 2)


def train_variant(rank: int, recipe: str, variant: str) -> None:
    """Whatever a shard is, its bytes are those of the whole rounded master."""
    options: dict[str, Any] = {"mesh": all_ranks()}
    if variant == "hybrid":
        names = ("replicate", "shard")
        options["mesh"] = init_device_mesh(home().type, (2, 2), mesh_dim_names=names)
    elif variant == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    elif variant == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=home().type == "cuda")
    model = build(64, 32, recipe)
    if variant == "replicated":
        replicate(model, mesh=all_ranks())
    else:
        fully_shard(model, **options)
    optimizer = MasterWeightOptimizer(model.parameters(), AdamW, **OPTIONS)
    train(model, optimizer, rank)
    check_shards(model)
    for param in model.parameters():
        own = local(param)
        if isinstance(own, QuantizedTensor):
            spec = own._shared.global_spec
            quantizer = own.quantizer if spec is None else spec.quantizer
            master = full(optimizer.state[param]["master_param"])
            expected = quantizer.quantize(master).dequantize(torch.float32)
            assert_identical([{"value": full(param.detach()).float()}], [{"value": expected}])


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["nvfp4", "float8block"])
@pytest.mark.parametrize(
    "variant, world_size", [("hybrid", 4), ("bfloat16", 2), ("offloaded", 2), ("replicated", 2)]
)
def test_variants_of_fully_shard(variant, world_size, recipe):
    run(train_variant, world_size, recipe, variant)


def train_with_zero(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = quantize_model(build(64, 32, None), "nvfp4")
    replica = DistributedDataParallel(model)
    make_optimizer = functools.partial(MasterWeightOptimizer, optimizer_class=AdamW)
    optimizer = ZeroRedundancyOptimizer(replica.parameters(), make_optimizer, **OPTIONS)
    train(replica, optimizer, rank)
    return {name: param.detach().float() for name, param in model.named_parameters()}


@pytest.mark.exhaustive
def test_zero_redundancy_optimizer():
    first, second = run_ranks(train_with_zero, 2)
    assert_identical([first], [second])
