"""Step counts: of parameters, which are no tensors of their state, and of groups."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from fp4adam import FP4Adam
from fp4adam.optim.step_count import StepCount
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


def test_tensors_of_a_state_have_the_shape_of_its_parameter():
    optimizer, params = stepped()
    state = optimizer.state[params[0]]
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    assert tensors.keys() == {"exp_avg", "exp_avg_sq"}
    # As Megatron does, also to values of another optimizer.
    other, _ = stepped()
    for name, value in tensors.items():
        other.state[other.param_groups[0]["params"][0]][name].copy_(value)


def test_a_step_count_behaves_as_the_tensor_it_holds():
    optimizer, params = stepped()
    step = optimizer.state[params[0]]["step"]
    assert isinstance(step, StepCount) and step == 3 and float(step) == int(step) == 3.0
    assert step + 1 == 4 == 1 + step and step < 4 and not step != 3 and 2 - step == -1
    assert (step.dtype, step.shape, step.device.type) == (torch.float32, (), "cpu")
    assert torch.equal(step, torch.tensor(3.0)) and repr(step) == "tensor(3.)"
    for copied in (copy.deepcopy(step), pickle.loads(pickle.dumps(step)), step.clone()):
        step.fill_(7)
        assert copied == 3
        step.fill_(3)
    buffer = io.BytesIO()
    torch.save(optimizer.state[params[0]], buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True)["step"] == 3
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 4


def test_saved_states_have_tensors_as_those_of_adamw():
    optimizer, params = stepped()
    saved = optimizer.state_dict()
    assert all(type(state["step"]) is Tensor for state in saved["state"].values())
    adamw = AdamW([{"params": params}, {"params": []}])
    adamw.load_state_dict(saved)
    assert adamw.state[params[0]]["step"] == 3
    optimizer.load_state_dict(adamw.state_dict())
    assert optimizer.state[params[0]]["step"] == 3


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
