"""Stages of torch.distributed.pipelining have the bits of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from fp4adam import FP4Adam, quantize_model
from helpers import assert_identical
from ranks import home, run_ranks
from twins import OPTIONS, whole_bytes

MICROBATCHES = 4


def build(recipe: str) -> nn.Sequential:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(64, 128), nn.Tanh()), nn.Linear(128, 64)]
    return quantize_model(nn.Sequential(*stages).to(home()), recipe)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch_of(step: int) -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(home())


def train_stages(rank: int, recipe: str) -> None:
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        whole, model = build(recipe), build(recipe)
        expected = FP4Adam(whole.parameters(), **OPTIONS)
        optimizer = FP4Adam(model[rank].parameters(), **OPTIONS)
        stage = PipelineStage(model[rank], rank, dist.get_world_size(), home())
        schedule = schedule_class(stage, MICROBATCHES, loss_fn=loss_of)
        for step in range(3):
            x = batch_of(step)
            losses: list[Tensor] = []
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=x.roll(1, 1), losses=losses)
            wanted = []
            for part, target in zip(
                x.chunk(MICROBATCHES), x.roll(1, 1).chunk(MICROBATCHES), strict=True
            ):
                wanted.append(loss_of(whole(part), target))
                wanted[-1].backward()
            for param in whole.parameters():
                param.grad.div_(MICROBATCHES)
            if rank == 1:
                assert torch.equal(torch.stack(losses), torch.stack(wanted))
            for one in (optimizer, expected):
                one.step()
                one.zero_grad()
        assert_identical(whole_bytes(model[rank]), whole_bytes(whole[rank]))
        states = [optimizer.state[p] for p in model[rank].parameters()]
        for a, b in zip(states, (expected.state[p] for p in whole[rank].parameters()), strict=True):
            for name in b.keys() - {"step"}:
                assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(
    "recipe",
    ["nvfp4", *(pytest.param(r, marks=pytest.mark.exhaustive) for r in ("mxfp8", "float8block"))],
)
def test_two_stages(recipe):
    run_ranks(train_stages, 2, recipe)
