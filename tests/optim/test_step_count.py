"""Step counts of parameters, and of groups as Transformer Engine and Megatron save them."""

import pytest
from torch import Tensor, nn
from torch.optim import AdamW

from fp4adam import FP4Adam
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
    # AdamW carries the group's entry along without counting.
    optimizer.load_state_dict(adamw.state_dict())
    assert optimizer.state[params[0]]["step"] == 5


def test_saved_groups_have_the_steps_of_the_optimizer():
    assert "step" not in FP4Adam([nn.Parameter(randn(4))]).state_dict()["param_groups"][0]
    optimizer, params = stepped((3, 1))
    saved = optimizer.state_dict()
    assert [group["step"] for group in saved["param_groups"]] == [3, 3]
    optimizer.load_state_dict(saved)
    # What differs between parameters stays, and live groups have no second count.
    assert [optimizer.state[param]["step"] for param in params] == [3, 1]
    assert not any("step" in group for group in optimizer.param_groups)
    even, _ = stepped()
    assert [group["step"] for group in even.te_state_dict()["param_groups"]] == [3, 3]


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


def test_a_group_that_was_edited_decides():
    """Megatron puts the saved count of a group beside states that it has just allocated."""
    optimizer, params = stepped()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["step"] = 9
    optimizer.load_state_dict(saved)
    assert [optimizer.state[param]["step"] for param in params] == [9, 9]
