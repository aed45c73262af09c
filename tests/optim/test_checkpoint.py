"""Checkpoints: training resumes bit for bit, and what does not fit is refused untouched."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.nn import Parameter
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.testing import assert_close

from fp4adam import FP4Adam, QuantizedTensor, Quantizer, quantize_model
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


@every_recipe
def test_resuming_in_the_middle_of_a_schedule_is_bit_identical(
    quantizer: Quantizer, device: str
) -> None:
    def build(params: list[Parameter]) -> tuple[FP4Adam, LambdaLR]:
        optimizer = FP4Adam([{"params": params[:2]}, {"params": params[2:], "lr": 1e-3}])
        return optimizer, LambdaLR(optimizer, lambda step: 0.7**step)

    params = make_params(quantizer, device)
    optimizer, scheduler = build(params)
    for seed in range(3):
        take_steps(optimizer, [seed])
        scheduler.step()
    twins = copy.deepcopy(params)
    resumed, resumed_scheduler = build(twins)
    saved = through_a_file([optimizer.state_dict(), scheduler.state_dict()])
    resumed.load_state_dict(saved[0])
    resumed_scheduler.load_state_dict(saved[1])
    for each, its_scheduler in ((optimizer, scheduler), (resumed, resumed_scheduler)):
        for seed in range(3, 6):
            take_steps(each, [seed])
            its_scheduler.step()
    assert_identical(snapshot(resumed), snapshot(optimizer))


# What is in a checkpoint


@every_recipe
@pytest.mark.parametrize("amsgrad", [False, True])
def test_checkpoint_holds_fp32_moments_and_masters(
    quantizer: Quantizer, amsgrad: bool, device: str
) -> None:
    params = make_params(quantizer, device)
    optimizer = FP4Adam(params, amsgrad=amsgrad)
    take_steps(optimizer, [0])
    for param, state in zip(params, optimizer.state_dict()["state"].values(), strict=True):
        names = {"step", "exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if amsgrad else set())
        if isinstance(param, QuantizedTensor) or param.dtype != torch.float32:
            names.add("master_param")
        assert state.keys() == names
        assert all(type(value) is Tensor for value in state.values())
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert {state[name].shape for name in names - {"step"}} == {param.shape}
        assert (state["step"].shape, state["step"].device.type) == ((), "cpu")


@every_recipe
def test_loaded_state_is_unrounded_and_of_its_own(quantizer: Quantizer, device: str) -> None:
    """FP32 values survive BF16 parameters, and the loaded dictionary is neither kept nor edited."""
    params = make_params(quantizer, device)
    optimizer = FP4Adam(params)
    take_steps(optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    untouched = copy.deepcopy(saved)
    resumed = FP4Adam(copy.deepcopy(params), lr=0.3)
    resumed.load_state_dict(saved)
    # All masters have been compared; the next step compares none.
    members = [resumed._parameters[param] for param in all_params(resumed)]
    assert all(member.is_unwritten() for member in members if member.has_master)
    assert_identical(resumed.state_dict()["state"], untouched["state"])
    theirs = {t.data_ptr() for state in saved["state"].values() for t in state.values()}
    ours = {
        value.data_ptr()
        for param in all_params(resumed)
        for value in resumed.state[param].values()
        if value.numel()
    }
    assert not theirs & ours
    take_steps(resumed, range(2))
    resumed.param_groups[0]["lr"] = 7.0
    assert_identical(saved, untouched)


@every_recipe
def test_named_parameters_are_saved_by_name(quantizer: Quantizer, device: str) -> None:
    model = make_mlp(quantizer, device)
    optimizer = FP4Adam(model.named_parameters())
    train(optimizer, (mlp_loss(model, seed) for seed in range(2)))
    saved = through_a_file(optimizer.state_dict())
    names = [name for name, _ in model.named_parameters()]
    assert saved["param_groups"][0]["param_names"] == names
    for named in (True, False):
        twin = copy.deepcopy(model)
        resumed = FP4Adam(twin.named_parameters() if named else twin.parameters())
        resumed.load_state_dict(saved)
        assert resumed.state_dict()["param_groups"][0]["param_names"] == names
        assert_identical(snapshot(resumed)["state"], snapshot(optimizer)["state"])


def test_checkpoint_of_a_fresh_optimizer_loads(device: str) -> None:
    params = make_params(RECIPES["nvfp4"], device)
    twins = copy.deepcopy(params)
    resumed, expected = FP4Adam(params), FP4Adam(twins)
    resumed.load_state_dict(through_a_file(FP4Adam(copy.deepcopy(params)).state_dict()))
    for each in (resumed, expected):
        take_steps(each, range(2))
    assert_identical(snapshot(resumed), snapshot(expected))


def test_hooks_may_replace_what_is_loaded(device: str) -> None:
    params = make_params(RECIPES["nvfp4"], device)
    optimizer = FP4Adam(params)
    take_steps(optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    take_steps(optimizer, range(1, 2))
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, state_dict: saved)
    optimizer.load_state_dict(optimizer.state_dict())
    for param, state in zip(params, saved["state"].values(), strict=True):
        assert_identical(optimizer.state[param]["exp_avg"], state["exp_avg"])


@every_recipe
def test_state_dict_utilities_of_torch_distributed_change_nothing(
    quantizer: Quantizer, device: str
) -> None:
    """They fill an empty state by a step with lr = 0, and name parameters in full."""
    model = make_mlp(quantizer, device)
    optimizer = FP4Adam(model.parameters())
    before = [param.detach().clone() for param in model.parameters()]
    get_optimizer_state_dict(model, optimizer)
    assert_identical([param.detach() for param in model.parameters()], before)
    train(optimizer, (mlp_loss(model, seed) for seed in range(3)))
    saved_model, saved = copy.deepcopy(get_state_dict(model, optimizer))
    assert saved["state"]["0.weight"].keys() == {"step", "exp_avg", "exp_avg_sq", "master_param"}
    fresh = reseeded(quantizer, device, torch.float32)
    resumed = FP4Adam(fresh.parameters())
    set_state_dict(fresh, resumed, model_state_dict=saved_model, optim_state_dict=saved)
    for each, its_optimizer in ((model, optimizer), (fresh, resumed)):
        train(its_optimizer, (mlp_loss(each, seed) for seed in range(3, 5)))
    assert_identical(snapshot(resumed)["params"], snapshot(optimizer)["params"])
    assert_identical(snapshot(resumed)["state"], snapshot(optimizer)["state"])


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
    for name in ("adam_w_mode", "decoupled_weight_decay"):
        assert ours.param_groups[0][name] is True
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


def test_adamw_continues_from_our_checkpoint(device: str) -> None:
    params = [Parameter(random(shape, 0, device)) for shape in ((9, 5), ())]
    ours = FP4Adam(params, lr=1e-2, weight_decay=0.1)
    take_steps(ours, range(3))
    theirs = AdamW(copy.deepcopy(params))
    theirs.load_state_dict(through_a_file(ours.state_dict()))
    for each in (ours, theirs):
        take_steps(each, range(3, 6))
    assert_close([p.detach() for p in params], [p.detach() for p in all_params(theirs)])


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
