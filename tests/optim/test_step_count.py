"""Step counts of parameters, and of groups as Transformer Engine and Megatron save them."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from fp4adam import FP4Adam, FusedAdam
from helpers import randn


def stepped(steps: tuple[int, ...] = (3, 3)) -> tuple[FP4Adam, list[nn.Parameter]]:
    """An optimizer with an empty group, and parameters that took these numbers of steps."""
    params = [nn.Parameter(randn(4, seed=i)) for i in range(len(steps))]
    optimizer = FP4Adam([{"params": params}, {"params": [], "lr": 0.5}])
    for step in range(max(steps)):
        for param, own in zip(params, steps, strict=True):
            param.grad = randn(4, seed=step) if step < own else None
        optimizer.step()
    return optimizer, params


def test_saved_states_have_tensors_as_those_of_adamw():
    optimizer, params = stepped()
    saved = optimizer.state_dict()
    assert all(type(state["step"]) is Tensor for state in saved["state"].values())
    adamw = AdamW([{"params": params}, {"params": []}])
    adamw.load_state_dict(saved)
    assert adamw.state[params[0]]["step"] == 3
    for step in range(2):
        params[0].grad = randn(4, seed=step)
        adamw.step()
    optimizer.load_state_dict(adamw.state_dict())
    assert optimizer.state[params[0]]["step"] == 5


def test_counts_differ_between_parameters():
    optimizer, params = stepped((3, 1))
    saved = optimizer.state_dict()
    # As torch.optim's: no count of groups.
    assert not any("step" in group for group in saved["param_groups"] + optimizer.param_groups)
    optimizer.load_state_dict(saved)
    assert [optimizer.state[param]["step"] for param in params] == [3, 1]


def test_parameters_that_come_late_and_stay_away_follow_adamw():
    params, twins = ([nn.Parameter(randn(4, seed=i)) for i in range(3)] for _ in range(2))
    options = dict(lr=0.1, weight_decay=0.01)
    optimizers = FP4Adam(params, **options), AdamW(twins, **options)
    for step, present in enumerate([(0, 2), (0, 1, 2), (1,), (0, 1)]):
        for each in (params, twins):
            for i, param in enumerate(each):
                param.grad = randn(4, seed=step) if i in present else None
        for optimizer in optimizers:
            optimizer.step()
    assert [optimizers[0].state[param]["step"] for param in params] == [3, 3, 2]
    torch.testing.assert_close(params, twins)


@pytest.mark.parametrize("step", [5, None])
def test_moments_alone_are_taken_with_the_step_of_their_group(step):
    optimizer, params = stepped()
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        del state["step"]
    for group in saved["param_groups"]:
        group["step"] = step
        if step is None:
            del group["step"]
    optimizer.load_state_dict(saved)
    assert [optimizer.state[param]["step"] for param in params] == [step or 0] * 2


def test_the_count_of_a_state_holds_beside_that_of_its_group():
    optimizer, params = stepped()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["step"] = 9
    del saved["state"][1]["step"]
    optimizer.load_state_dict(saved)
    assert [optimizer.state[param]["step"] for param in params] == [3, 9]
    assert not any("step" in group for group in optimizer.param_groups)


@pytest.mark.parametrize("kind", [FP4Adam, FusedAdam])
def test_a_new_parameter_comes_back_from_adamw_with_its_own_count(kind):
    optimizer, params = stepped((2,))
    new = nn.Parameter(randn(4, seed=7))
    optimizer.add_param_group({"params": [new]})
    adamw = AdamW([{"params": params}, {"params": []}, {"params": [new]}])
    adamw.load_state_dict(optimizer.state_dict())
    for param in (*params, new):
        param.grad = randn(4, seed=3)
    adamw.step()
    resumed = kind([{"params": params}, {"params": []}, {"params": [new]}])
    resumed.load_state_dict(adamw.state_dict())
    assert [resumed.state[param]["step"] for param in (*params, new)] == [3, 1]
    adamw.step()
    resumed.step()
    assert [resumed.state[param]["step"] for param in (*params, new)] == [4, 2]
