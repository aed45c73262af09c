"""FP4Adam beside Transformer Engine itself, on a GPU it runs on; see benchmarks/te_check.py."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import te_check


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Transformer Engine needs a CUDA device")
@pytest.mark.parametrize("part", ["bytes", "modules", "checkpoints"])
def test_all_rows_are_as_they_should_be(part):
    rows = te_check.run([part])
    assert rows and all(row["ok"] for row in rows), rows
