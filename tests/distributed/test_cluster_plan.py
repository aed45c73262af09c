"""The sizes that benchmarks/cluster_plan.py plans with are those that real ranks move and keep."""

import importlib
import sys
from pathlib import Path

import pytest

from ranks import run_ranks

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


def check(rank: int) -> list[str]:
    sys.path.append(BENCHMARKS)
    return importlib.import_module("cluster_plan").run_check("cpu")


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", [2, 3])
def test_planned_bytes_are_those_that_are_counted(world_size):
    for lines in run_ranks(check, world_size):
        assert len(lines) == 4 * 7


def test_plans_of_large_models(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    plans = importlib.import_module("cluster_plan")
    few, many = (plans.plan(plans.MODELS["8b"], plans.FORMATS["NVFP4"], n) for n in (8, 64))
    # Shards of whole blocks: memory goes down with the number of ranks, nothing else goes up.
    assert few.weights == pytest.approx(8 * many.weights, rel=0.01)
    assert few.exchanged == many.exchanged == 4 * 224
    assert few.messages == many.messages == 3 * 33 + 1
    # Past that, ranks exchange the amaxes of the blocks that they share.
    assert plans.plan(plans.MODELS["8b"], plans.FORMATS["NVFP4"], 128).exchanged > 1e6
    for model in plans.MODELS:
        assert len(plans.table(model, [8])) == 2 + len(plans.FORMATS)
