"""MasterWeightOptimizer with FSDP2 and an optimizer that communicates."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Muon, Optimizer

from fp4adam import MasterWeightOptimizer, check_shards
from fp4adam.distributed.dtensor import local
from helpers import assert_identical
from ranks import all_ranks, run
from twins import (
    build,
    fixed_grads,
    full,
    gathered_bytes,
    set_grads,
)


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
