"""Checkpoints: training resumes bit for bit, and what does not fit is refused untouched."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Adam, AdamW

from fp4adam import FP4Adam, Quantizer, quantize_model
from helpers import (
    RECIPES,
    all_params,
    assert_identical,
    make_mlp,
    make_params,
    mlp_loss,
    random,
    snapshot,
    take_steps,
    through_a_file,
    train,
)

every_recipe = pytest.mark.parametrize("quantizer", RECIPES.values(), ids=RECIPES.keys())
half_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def reseeded(quantizer: Quantizer | None, device: str, dtype: torch.dtype) -> nn.Module:
    """A model built from scratch, with other weights than those of ``make_mlp``."""
    model = make_mlp(None, device, dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    return model if quantizer is None else quantize_model(model, quantizer)


# Resuming


# What is in a checkpoint


def test_checkpoint_of_a_fresh_optimizer_loads(device: str) -> None:
    params = make_params(RECIPES["nvfp4"], device)
    twins = copy.deepcopy(params)
    resumed, expected = FP4Adam(params), FP4Adam(twins)
    resumed.load_state_dict(through_a_file(FP4Adam(copy.deepcopy(params)).state_dict()))
    for each in (resumed, expected):
        take_steps(each, range(2))
    assert_identical(snapshot(resumed), snapshot(expected))


# To and from torch.optim


@every_recipe
@half_dtypes
@pytest.mark.parametrize("torch_class", [AdamW, Adam])
def test_quantized_training_continues_from_adamw(
    quantizer: Quantizer, dtype: torch.dtype, torch_class: type, device: str
) -> None:
    """Moments as saved, masters from the parameters, modes of the new optimizer."""
    values = [random((64, 96), 1, device).to(dtype), random((7,), 2, device).to(dtype)]
    theirs = torch_class([Parameter(value.clone()) for value in values], foreach=True)
    take_steps(theirs, range(2))
    saved = through_a_file(theirs.state_dict())
    weights = [param.detach() for param in all_params(theirs)]
    params = [Parameter(quantizer.quantize(weights[0])), Parameter(weights[1].clone())]
    params[0]._high_precision_init_val = weights[0]
    ours = FP4Adam(params, lr=0.0)
    ours.load_state_dict(saved)
    assert ours.param_groups[0]["decoupled_weight_decay"] is (torch_class is AdamW)
    ours.param_groups[0]["lr"] = 0.0
    for i, param in enumerate(params):
        state = ours.state[param]
        assert_identical(state["exp_avg"], saved["state"][i]["exp_avg"].float())
        assert "master_param" not in state
    take_steps(ours, [2])
    for param, weight in zip(params, weights, strict=True):
        assert ours.state[param]["step"] == 3
        assert_identical(ours.state[param]["master_param"], weight.float())
    assert params[0]._high_precision_init_val is None


@every_recipe
def test_quantized_training_resumes_from_a_plain_model(quantizer: Quantizer, device: str) -> None:
    """FP32 training first, then the same weights in few bits: masters start unrounded."""
    model = make_mlp(None, device)
    before = FP4Adam(model.parameters(), lr=1e-2)
    train(before, (mlp_loss(model, seed) for seed in range(3)))
    saved = through_a_file({"model": model.state_dict(), "optimizer": before.state_dict()})
    fresh = reseeded(quantizer, device, torch.float32)
    resumed = FP4Adam(fresh.parameters())
    resumed.load_state_dict(saved["optimizer"])
    fresh.load_state_dict(saved["model"])
    resumed.param_groups[0]["lr"] = 0.0
    take_steps(resumed, [0])
    for i in (0, 2):
        master = resumed.state[fresh[i].weight]["master_param"]
        assert_identical(master, saved["model"][f"{i}.weight"])


# What does not fit


def test_refused_flags_of_a_checkpoint_are_dropped(device: str) -> None:
    params = make_params(RECIPES["nvfp4"], device)
    optimizer = FP4Adam(params)
    take_steps(optimizer, [0])
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(capturable=True, differentiable=True)
    for state in saved["state"].values():
        state["step"] = state["step"].to(device)
    resumed = FP4Adam(copy.deepcopy(params))
    resumed.load_state_dict(saved)
    group = resumed.param_groups[0]
    assert (group["capturable"], group["differentiable"]) == (False, False)
    for each in (optimizer, resumed):
        take_steps(each, [1])
    assert_identical(snapshot(resumed)["state"], snapshot(optimizer)["state"])
    assert {state["step"].device.type for state in resumed.state.values()} == {"cpu"}
