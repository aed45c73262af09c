"""MasterWeightOptimizer with FSDP2: the bits of one process, and checkpoints."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Muon, Optimizer

from fp4adam import MasterWeightOptimizer, check_shards
from fp4adam.distributed.dtensor import local
from helpers import assert_identical
from ranks import all_ranks, by_world_size, run, run_cases, use_kernels
from test_fsdp import (
    FORMATS,
    build,
    fixed_grads,
    full,
    gathered_bytes,
    set_grads,
    whole_bytes,
)

OPTIONS = dict(lr=1e-2, weight_decay=0.1)


def step_in_parallel(
    rank: int, rows: int, cols: int, recipe: str, by_kernels: bool = False
) -> None:
    if by_kernels:
        use_kernels()
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


STEPS = [
    *((3, 64, 32, recipe) for recipe in FORMATS),  # boundaries cut blocks
    (4, 5, 16, "float8block"),  # one rank has no rows
]
MORE_STEPS = [
    *((2, rows, cols, recipe) for rows, cols in ((256, 128), (288, 64)) for recipe in FORMATS),
    *((3, 64, 32, recipe, True) for recipe in FORMATS),
]


@pytest.mark.parametrize("world_size, cases", by_world_size(STEPS, MORE_STEPS))
def test_shards_have_the_bits_of_one_process(world_size, cases):
    run_cases(step_in_parallel, world_size, cases)


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
        codes = local(param).global_spec.quantizer.quantize(master)
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
