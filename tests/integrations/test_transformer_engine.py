"""FP4Adam beside Transformer Engine itself, on GPUs; see benchmarks/te_check.py and te_fsdp.py."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

needs_gpus = [
    pytest.mark.skipif(
        torch.cuda.device_count() < count, reason=f"needs {count} CUDA devices for its ranks"
    )
    for count in range(3)
]


@needs_gpus[1]
@pytest.mark.parametrize(
    "part", "bytes modules workspaces zero checkpoints reference resume graphs".split()
)
def test_all_rows_are_as_they_should_be(part, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import te_check

    rows = te_check.run([part])
    assert rows and all(row["ok"] for row in rows), rows


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=needs_gpus[1]), pytest.param(2, marks=needs_gpus[2])]
)
def test_fsdp_trains_transformer_engines_modules(ranks):
    command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    program = str(BENCHMARKS / "te_fsdp.py")
    done = subprocess.run(
        [sys.executable, "-m", *command, program, "--steps=5"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
