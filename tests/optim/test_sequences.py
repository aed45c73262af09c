"""Random programs on weights that share a scale, and steps that stop half-way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from torch.nn import Parameter
from torch.optim import AdamW
from torch.testing import assert_close

from fp4adam import FP4Adam
from group_programs import GroupTraining
from helpers import RECIPES, all_params, make_params, random, set_grads, take_steps
from interrupts import InterruptOperators
from master_reference import Twin, value_of


@pytest.mark.filterwarnings("ignore:values written to a copy of a model are rounded")
@pytest.mark.parametrize(
    "programs", [20, pytest.param(200, marks=pytest.mark.exhaustive)], ids=["some", "more"]
)
def test_programs_with_scale_groups(programs: int) -> None:
    run_state_machine_as_test(
        GroupTraining,
        settings=settings(
            max_examples=programs,
            stateful_step_count=12,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=[*HealthCheck],
        ),
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(lr=1e-2, weight_decay=0.1),
        dict(lr=1e-2, betas=(0.4, 0.99), amsgrad=True),
        dict(lr=1e-3, maximize=True, eps=1e-4),
    ],
    ids=str,
)
def test_the_model_follows_adamw(options: dict[str, Any]) -> None:
    """What programs are compared with is AdamW in FP32."""
    param = Parameter(random((9, 5), 0))
    adamw, group = AdamW([param], **options), FP4Adam([param], **options).param_groups[0]
    twin = Twin(param.detach().clone(), {}, 0)
    for seed in range(10):
        set_grads([param], seed)
        adamw.step()
        twin.update(param.grad, group)
        assert_close(twin.value, param.detach(), rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("apart", [23, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "options", [{}, dict(states="8bit"), dict(master_weights=False, states="8bit")], ids=str
)
def test_a_step_that_is_interrupted_anywhere(options: dict[str, Any], apart: int) -> None:
    """Training goes on: at most the interrupted update is lost, or taken twice."""
    trained = FP4Adam(make_params(RECIPES["mxfp8"], "cpu"), lr=1e-3, **options)
    take_steps(trained, range(2))
    for at in range(0, 400, apart):
        stopped, twin = copy.deepcopy((trained, trained))
        set_grads(all_params(stopped), 2)
        with InterruptOperators(at) as left:
            try:
                stopped.step()
            except KeyboardInterrupt:
                pass
        for each in (stopped, twin):
            take_steps(each, [3])
        for param, expected in zip(all_params(stopped), all_params(twin), strict=True):
            gap = value_of(expected).abs().max() * 2.0**-3  # between the largest codes
            torch.testing.assert_close(value_of(param), value_of(expected), rtol=0, atol=gap)
        if left.left >= 0:
            break
    assert at > 60
