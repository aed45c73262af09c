"""Training with Megatron-LM's distributed optimizer: save, resume and reshard."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ranks import run_ranks

pytest.importorskip("megatron.core", reason="needs megatron-core, or a clone of Megatron-LM")

import megatron_on_cpu

# Histories of delayed scaling are no part of such a checkpoint.
RECIPES = ("nvfp4", "tensorwise", "blockwise", "mxfp8", None)


def start(recipe: str | None) -> megatron_on_cpu.Trainer:
    megatron_on_cpu.prepare()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    return megatron_on_cpu.Trainer(recipe)


def train(rank: int, recipe: str | None, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    trainer = start(recipe)
    losses = trainer.train(3)
    trainer.save(folder)
    return losses + trainer.train(3), trainer.weights()


def resume(rank: int, recipe: str | None, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    trainer = start(recipe)
    trainer.load(folder)
    return trainer.train(3), trainer.weights()


@pytest.mark.parametrize(
    ("recipe", "world_sizes"), [("nvfp4", (2, 4)), *((recipe, (1,)) for recipe in RECIPES[1:])]
)
def test_resumed_training_is_that_of_one_run_on_any_number_of_ranks(recipe, world_sizes, tmp_path):
    (tmp_path / "saved").mkdir()
    runs = run_ranks(train, 2, recipe, tmp_path / "saved")
    losses, weights = runs[0]
    assert losses[-1] < losses[0]
    for world_size in world_sizes:
        for again, resumed in run_ranks(resume, world_size, recipe, tmp_path / "saved"):
            assert again == losses[3:], world_size
            assert resumed.keys() == weights.keys()
            for name, value in weights.items():
                assert torch.equal(resumed[name], value), (world_size, name)
