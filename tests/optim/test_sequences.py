"""Random programs of what users do around an optimizer; benchmarks/sequences.py runs many more."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from torch.nn import Parameter
from torch.optim import AdamW
from torch.testing import assert_close

from fp4adam import FP4Adam
from group_programs import GroupTraining
from helpers import random, set_grads
from master_reference import Twin
from training_programs import KernelTraining, OffloadedTraining, OperatorTraining, Training


@pytest.mark.filterwarnings("ignore:values written to a copy of a model are rounded")
@pytest.mark.parametrize(
    ("machine", "programs", "length"),
    [
        (OperatorTraining, 20, 20),
        (KernelTraining, 2, 12),
        (OffloadedTraining, 6, 20),
        (GroupTraining, 20, 12),
        pytest.param(OperatorTraining, 60, 20, marks=pytest.mark.exhaustive),
        pytest.param(KernelTraining, 10, 12, marks=pytest.mark.exhaustive),
        pytest.param(OffloadedTraining, 60, 20, marks=pytest.mark.exhaustive),
        pytest.param(GroupTraining, 200, 12, marks=pytest.mark.exhaustive),
    ],
    ids=["operators", "kernels", "offloaded", "scale groups"] + 4 * ["more"],
)
def test_programs_do_what_the_model_says(
    machine: type[Training | GroupTraining], programs: int, length: int
) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=programs,
            stateful_step_count=length,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=[*HealthCheck],
        ),
    )


@pytest.mark.parametrize("failing", range(5))
def test_a_released_step_that_fails_half_way(failing: int) -> None:
    training = OperatorTraining()
    training.start(options="adamw")
    training.released_step(seed=1, absent=set(), failing=failing)
    training.teardown()


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
@pytest.mark.parametrize("options", ["int8 masters", "no masters"])
def test_a_step_that_is_interrupted_anywhere(options: str, apart: int) -> None:
    # Values that live between the update and the codes alone belong to that step.
    for at in range(0, 200, apart):
        training = OperatorTraining()
        training.start(options=options)
        training.step(seed=1, absent=set())
        training.interrupted_step(seed=2, at=at)
        training.step(seed=3, absent=set())
        training.teardown()
