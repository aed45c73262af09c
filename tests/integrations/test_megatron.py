"""Training with Megatron-LM's distributed optimizer: save, resume and reshard."""

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4adam import FP4Adam, FusedAdam, fp4_utils, fp8_utils
from helpers import assert_identical
from ranks import run_ranks
from test_names import table_of_names

CLONE = Path(__file__).parents[2] / "build/Megatron-LM"
if CLONE.exists():
    sys.path.insert(0, str(CLONE))
pytest.importorskip("megatron.core", reason=f"needs a clone of Megatron-LM in {CLONE}")

import megatron_on_cpu  # noqa: E402

# Histories of delayed scaling are no part of such a checkpoint.
RECIPES = ("nvfp4", "tensorwise", "blockwise", "mxfp8", None)
# What the optimizer itself keeps for BF16 weights, with ``use_precision_aware_optimizer``.
# Those with remainders, and what is dithered by a parameter's place, are for one number of ranks.
NARROW: tuple[tuple[type, tuple[int, ...], dict[str, Any]], ...] = (
    (FP4Adam, (1,), {"store_param_remainders": False}),
    (FusedAdam, (2,), {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}),
    (FP4Adam, (2,), {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16}),
    (FusedAdam, (2,), {"main_params_dtype": torch.float16, "store_param_remainders": False}),
)


def precision_aware(**options: Any) -> dict[str, Any]:
    return dict(use_precision_aware_optimizer=True, **options)


@pytest.fixture(scope="module", autouse=True)
def loads_states_of_others():
    from megatron.core import __version__
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    loads = inspect.getsource(DistributedOptimizer._set_main_param_and_optimizer_states)
    if "isinstance" not in loads:
        pytest.skip(f"megatron-core {__version__} takes every entry of a state for a tensor")


def run(
    rank: int, resumes: bool, adam: type, recipe: str | None, folder: Path, options: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of six steps, after three of which a checkpoint is written; or of those after it."""
    megatron_on_cpu.prepare(adam)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    trainer, losses = megatron_on_cpu.Trainer(recipe, **options), []
    if resumes:
        trainer.load(folder)
    else:
        losses = trainer.train(3)
        trainer.save(folder)
    return losses + trainer.train(3), trainer.weights()


@pytest.mark.parametrize(
    ("adam", "recipe", "world_sizes", "options"),
    [
        (FP4Adam, "nvfp4", (2, 4), {}),
        *((FusedAdam, recipe, (1,), {}) for recipe in RECIPES[1:]),
        *((adam, None, sizes, precision_aware(**options)) for adam, sizes, options in NARROW),
    ],
)
def test_resumed_training_is_that_of_one_run_on_any_number_of_ranks(
    adam, recipe, world_sizes, options, tmp_path
):
    (tmp_path / "saved").mkdir()
    arguments = adam, recipe, tmp_path / "saved", options
    losses, weights = run_ranks(run, 2, False, *arguments)[0]
    assert losses[-1] < losses[0]
    for world_size in world_sizes:
        for again, resumed in run_ranks(run, world_size, True, *arguments):
            assert again == losses[3:], world_size
            assert_identical(resumed, weights, str(world_size))


@pytest.mark.parametrize("own", [fp8_utils, fp4_utils], ids=lambda module: module.__name__)
def test_the_table_of_names_has_all_functions_of_megatron(own):
    module = importlib.import_module(f"megatron.core.{own.__name__.split('.')[-1]}")
    functions = inspect.getmembers(module, inspect.isfunction)
    names = {name for name, value in functions if value.__module__ == module.__name__}
    listed = set().union(*table_of_names()[own.__name__])
    assert {name for name in names if not name.startswith("_")} <= listed
