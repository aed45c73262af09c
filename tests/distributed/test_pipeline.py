"""Stages of torch.distributed.pipelining have the bits of one process."""

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from fp4adam import FP4Adam
from helpers import assert_identical
from ranks import home, run_cases
from twins import FORMATS, OPTIONS, build, whole_bytes

MICROBATCHES = 4


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train_stages(rank: int, recipe: str, schedule_class: type) -> None:
    stages = [[model[:2], model[2]] for model in (build(128, 64, recipe) for _ in range(2))]
    own, whole = stages[0][rank], [param for stage in stages[1] for param in stage.parameters()]
    optimizer, expected = FP4Adam(own.parameters(), **OPTIONS), FP4Adam(whole, **OPTIONS)
    schedule = schedule_class(PipelineStage(own, rank, 2, home()), MICROBATCHES, loss_fn=loss_of)
    for step in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(home())
        target, losses, wanted = x.roll(1, 1), [], []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=losses)
        for part, of_part in zip(*(each.chunk(MICROBATCHES) for each in (x, target)), strict=True):
            wanted.append(loss_of(stages[1][1](stages[1][0](part)), of_part))
            wanted[-1].backward()
        for param in whole:
            param.grad.div_(MICROBATCHES)
        if rank == 1:
            assert torch.equal(torch.stack(losses), torch.stack(wanted))
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
    assert_identical(whole_bytes(own), whole_bytes(stages[1][rank]))
    for param, same in zip(own.parameters(), stages[1][rank].parameters(), strict=True):
        assert_identical(dict(optimizer.state[param]), dict(expected.state[same]))


@pytest.mark.parametrize(
    "recipe", ["nvfp4", *(pytest.param(r, marks=pytest.mark.exhaustive) for r in FORMATS[1:])]
)
def test_two_stages(recipe):
    run_cases(train_stages, 2, [(recipe, kind) for kind in (ScheduleGPipe, Schedule1F1B)])
