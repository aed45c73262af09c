"""Loading is all or nothing, and takes little memory."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import AdamW

from fp4adam import FP4Adam, MasterWeightOptimizer, quantize_model
from fp4adam.tensors import rows
from helpers import (
    QUANTIZERS,
    RECIPES,
    all_params,
    assert_identical,
    make_params,
    random,
    take_steps,
)


def bits(optimizer: Any) -> dict[str, Any]:
    """A copy of the optimizer's states, by parameter and name."""
    states = [optimizer.state.get(param, {}) for param in all_params(optimizer)]
    return {f"{i} {name}": v.clone() for i, state in enumerate(states) for name, v in state.items()}


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def damaged(name: str, value: Any) -> Callable[[dict], None]:
    def damage(saved: dict) -> None:
        if value is None:
            del saved["state"][1][name]
            saved["param_groups"][0].pop(name, None)
        else:
            saved["state"][1][name] = value

    return damage


def with_option(name: str, value: Any) -> Callable[[dict], None]:
    return lambda saved: saved["param_groups"][0].update({name: value})


BAD: dict[str, tuple[Callable[[dict], None], str]] = {
    "step on meta": (damaged("step", torch.zeros((), device="meta")), "step of parameter 1 must"),
    "no step": (damaged("step", None), "parameter 1 must hold step"),
    "one beta": (with_option("betas", (0.9,)), "betas must be two numbers, got"),
    "three betas": (with_option("betas", (0.9, 0.9, 0.9)), "betas must be two numbers, got"),
    "two rates": (with_option("lr", torch.ones(2)), "numbers or tensors of one element, got"),
}


@pytest.mark.parametrize(("damage", "words"), BAD.values(), ids=BAD)
def test_what_cannot_be_stepped_is_not_loaded(damage: Callable, words: str) -> None:
    optimizer = FP4Adam(make_params(RECIPES["mxfp8"], "cpu"))
    take_steps(optimizer, range(2))
    saved, before = copy.deepcopy(optimizer.state_dict()), bits(optimizer)
    take_steps(optimizer, [2])
    before, groups = bits(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    damage(saved)
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(saved)
    assert_identical(bits(optimizer), before)
    assert optimizer.state_dict()["param_groups"] == groups


def test_a_refusal_of_the_inner_optimizer_changes_nothing() -> None:
    params = make_params(RECIPES["nvfp4"], "cpu")
    optimizer = MasterWeightOptimizer(params, AdamW, lr=1e-3)
    take_steps(optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        del state["step"]
    take_steps(optimizer, [2])
    saved["param_groups"][0]["lr"] = 5.0
    before = bits(optimizer)
    with pytest.raises(KeyError, match="step"):
        optimizer.load_state_dict(saved)
    assert_identical(bits(optimizer), before)
    assert [g["lr"] for g in (*optimizer.param_groups, *optimizer.inner.param_groups)] == [1e-3] * 2


def peak_bytes(function: Callable[[], object]) -> int:
    """The most memory that a call has allocated at a time."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11
def test_loading_takes_the_memory_of_the_states_and_of_one_weight() -> None:
    """To compare masters with their weights; not of all weights at a time."""
    numel, more = 128 * 256, []
    for count in (2, 12):
        values = [random((128, 256), seed=i) for i in range(count)]
        params = [Parameter(QUANTIZERS["nvfp4"].quantize(value)) for value in values]
        optimizer = FP4Adam(params)
        take_steps(optimizer, range(2))
        saved = optimizer.state_dict()
        peak = peak_bytes(functools.partial(optimizer.load_state_dict, saved))
        more.append(peak - 12 * numel * count)
    assert more[0] < 22 * numel  # a weight, decoded, with its gaps, and what that takes on a CPU
    assert more[1] - more[0] < numel, more  # a byte per element of one weight


def test_members_of_scale_groups_keep_their_masters_after_plain_values() -> None:
    """The model's load_state_dict quantizes each member with an amax of its own."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32, dtype=torch.bfloat16) for _ in range(3)))
        for i, layer in enumerate(model):
            layer.weight.data *= i + 1
        models.append(quantize_model(model, "nvfp4", filter=lambda *_: True))
    groups = [["0.weight", "1.weight", "2.weight"]]
    trained, loaded = (
        FP4Adam(model.named_parameters(), lr=1e-2, scale_groups=groups) for model in models
    )
    take_steps(trained, range(3))
    plain = {n: p.detach().to(p.dtype, copy=True) for n, p in models[0].named_parameters()}
    for name in groups[0]:
        plain[name] = models[0].get_parameter(name).dequantize()
    models[1].load_state_dict(plain)
    loaded.load_state_dict(trained.state_dict())
    for optimizer in (trained, loaded):
        take_steps(optimizer, [3])
    assert_identical(bits(loaded), bits(trained))


@pytest.mark.parametrize("recipe", ["nvfp4", "float8"])
def test_a_clipped_weight_is_not_its_master(recipe: str) -> None:
    """It has the master's codes under its own scales, as codes saturate; the scales are others."""
    param = Parameter(QUANTIZERS[recipe].quantize(random((128, 256), seed=0)))
    optimizer = FP4Adam([param])
    take_steps(optimizer, range(2))
    saved = optimizer.state_dict()
    master = saved["state"][0]["master_param"].clone()
    limit = master.abs().amax().item() / 4
    param.data.quantize_(master.clamp(-limit, limit))
    assert rows.is_of(param.detach(), master)
    optimizer.load_state_dict(saved)
    restarted = optimizer.state_dict()["state"][0]["master_param"]
    assert torch.equal(restarted, master.clamp(-limit, limit))
