"""Training with Megatron-LM's distributed optimizer: save, resume and reshard."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from helpers import assert_identical
from ranks import run_ranks

pytest.importorskip("megatron.core", reason="needs megatron-core, or a clone of Megatron-LM")

import megatron_on_cpu

# Histories of delayed scaling are no part of such a checkpoint.
RECIPES = ("nvfp4", "tensorwise", "blockwise", "mxfp8", None)


def start(recipe: str | None, options: dict[str, Any]) -> megatron_on_cpu.Trainer:
    megatron_on_cpu.prepare()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    return megatron_on_cpu.Trainer(recipe, **options)


def train(
    rank: int, recipe: str | None, folder: Path, options: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    trainer = start(recipe, options)
    losses = trainer.train(3)
    trainer.save(folder)
    return losses + trainer.train(3), trainer.weights()


def resume(
    rank: int, recipe: str | None, folder: Path, options: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    trainer = start(recipe, options)
    trainer.load(folder)
    return trainer.train(3), trainer.weights()


@pytest.mark.parametrize(
    ("recipe", "world_sizes", "options"),
    [
        ("nvfp4", (2, 4), {}),
        *((recipe, (1,), {}) for recipe in RECIPES[1:]),
        # FP4Adam itself has the masters of BF16 shards.
        (None, (1,), dict(use_precision_aware_optimizer=True, store_param_remainders=False)),
    ],
)
def test_resumed_training_is_that_of_one_run_on_any_number_of_ranks(
    recipe, world_sizes, options, tmp_path
):
    (tmp_path / "saved").mkdir()
    arguments = recipe, tmp_path / "saved", options
    losses, weights = run_ranks(train, 2, *arguments)[0]
    assert losses[-1] < losses[0]
    for world_size in world_sizes:
        for again, resumed in run_ranks(resume, world_size, *arguments):
            assert again == losses[3:], world_size
            assert_identical(resumed, weights, str(world_size))
