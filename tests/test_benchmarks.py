"""The programs in benchmarks/: every optimizer is measured, and what must move is counted right."""

import contextlib
import importlib.util
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from late_link import LateLink, offload_to

pytestmark = pytest.mark.exhaustive  # whole programs

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"

ONLY = "torch AdamW;FusedAdam, FP32;FusedAdam, BF16;FP4Adam;Unfused;MasterWeight;FlashAdamW"
BROKEN = "flashoptim FlashAdamW, 24-bit masters"
# "gpt" with its sides divided by 64 and rounded down to multiples of 32.
SHAPES = [(32, 32), (32, 32), (128, 32), (128, 32), (32, 128)]
TIMES = (
    "ms", "ms_min", "ms_max", "host_ms", "host_idle_ms", "host_new_grads_ms", "floor_ms",
    "share_of_copy",
)  # fmt: skip


def run(program, *options, path=(), processes=None):
    places = os.pathsep.join(map(str, (*path, *sys.path)))
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes else ()), str(BENCHMARKS / program)]
    command += map(str, options)
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def report(program, *options):
    """What a program prints that only reads files, and so needs no process of its own."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", [program, *map(str, options)])
        patch.syspath_prepend(BENCHMARKS)
        patch.delitem(sys.modules, "report", raising=False)  # the examples have one as well
        runpy.run_path(str(BENCHMARKS / program), run_name="__main__")
        sys.modules.pop("report", None)
    return out.getvalue()


def read(path):
    return json.loads(path.read_text())["results"]


def weight_bytes(name, rows, cols):
    """Codes of both directions and their scales, padding included."""
    numel, blocks = rows * cols, -(-rows // 128) * -(-cols // 128)
    return {
        "FP32": 4 * numel,
        "BF16": 2 * numel,
        "NVFP4": numel + numel // 256 + 4,
        "NVFP4 rowwise": numel // 2 + numel // 256 + 4,
        "MXFP8": 2 * (numel + 128 * 4 * blocks),
        "Float8Block": 2 * numel + 4 * blocks,
    }[name]


# By optimizer: weights, and bytes of a gradient and of states per parameter.
MOVED = {
    "torch AdamW fused, FP32": ("FP32", 4, 8),
    "torch AdamW fused, BF16 (no masters)": ("BF16", 2, 4),
    "FusedAdam, FP32": ("FP32", 4, 8),
    "FusedAdam, BF16 + FP32 masters": ("BF16", 2, 12),
    "FP4Adam, NVFP4 rowwise": ("NVFP4 rowwise", 2, 12),
    "MasterWeightOptimizer, Muon, NVFP4": ("NVFP4", 2, 8),
    "MasterWeightOptimizer, Muon, BF16 + FP32 masters": ("BF16", 2, 8),
    **{
        f"{optimizer}, {name}": (name, 2, 12)
        for optimizer in ("FP4Adam", "Unfused", "MasterWeightOptimizer, AdamW")
        for name in ("NVFP4", "MXFP8", "Float8Block")
    },
}


def test_every_optimizer_is_measured_and_its_bytes_are_counted(tmp_path):
    (tmp_path / "flashoptim.py").write_text("raise OSError('a broken\\nbuild')")
    path = tmp_path / "new" / "step.json"
    options = "--device cpu --scale 64 --repeats 1 --model gpt".split()
    run("step.py", *options, "--only", ONLY, "--json", path, path=[tmp_path])
    results = {row["name"]: row for row in read(path)}
    numel = sum(m * n for m, n in SHAPES)
    for name, (kind, grad, states) in MOVED.items():
        row, weights = results[name], sum(weight_bytes(kind, m, n) for m, n in SHAPES)
        is_read = "masters" not in name and kind in ("FP32", "BF16") or "no masters" in name
        moved = (grad + 2 * states) * numel + (1 + is_read) * weights
        assert (row["tensors"], row["parameters"]) == (len(SHAPES), numel)
        assert row["bytes_per_param"] == pytest.approx(moved / numel, rel=1e-12), name
        assert row["weight_bytes_per_param"] == pytest.approx(weights / numel, rel=1e-12)
        assert row["state_bytes_per_param"] == states
    of_engine = [r for r in results.values() if r["kind"] == "Transformer Engine"]
    assert all("error" in row for row in of_engine)  # it is not installed
    assert (len(results), len(of_engine)) == (50, 5)
    for row in results.values():
        if row not in of_engine and row["name"] != BROKEN:
            assert all(row[key] > 0 for key in TIMES), row
            assert row["ms_min"] <= row["ms"] <= row["ms_max"]
    out = report("report.py", path, "--model", "gpt", "--only", "FP4Adam, NVFP4;FlashAdamW")
    title, rule, nvfp4, *others = out.splitlines()
    assert nvfp4.startswith("| FP4Adam, NVFP4 | ")
    assert nvfp4.count("|") == title.count("|") == rule.count("|")
    assert f"{results['FP4Adam, NVFP4']['bytes_per_param']:.2f}" in nvfp4
    assert f"{BROKEN}: not measured (a broken build)" in others


@pytest.mark.nightly
def test_steps_of_several_processes(tmp_path):
    """Bytes between processes; bits do not depend on their number, nor on replicas."""
    path = tmp_path / "new" / "scaling.json"
    names = "masters;=FP4Adam, NVFP4;=FP4Adam, MXFP8;=FP4Adam, Float8Block"
    for processes, only, *options in (
        (2, f"{names};=FP4Adam, Float8, quantized matmuls", "--repeats", 1),
        (None, names, "--exact", 3),
        (2, names, "--exact", 3),
        (2, "FP32 masters;NVFP4", "--exact", 3, "--ddp"),
    ):
        common = ("--device", "cpu", "--layers", 1, "--out", path, "--only", only)
        run("scaling.py", *common, *options, processes=processes)
    content = json.loads(path.read_text())
    rows, one, two, replicas = (each["results"] for each in content["runs"])
    assert len(rows) == 6
    for row in rows:
        assert row["processes"] == 2 and row["step_ms"] > 0 and row["train_ms"] > 0
        # Half of all FP32 gradients is sent away; what is not in the root is gathered once more.
        root = row["forward_all_gather_MB"] - row["backward_all_gather_MB"]
        assert root == pytest.approx((2 * 256 * 128 + 128) * 2 / 2 / 1e6)
        assert row["backward_reduce_scatter_MB"] == row["parameters"] * 4 / 2 / 1e6
        # Scales of less than a block per process are not in the formula.
        assert row["forward_all_gather_MB"] == pytest.approx(row["formula_MB"], rel=0.01)
    assert rows[0]["forward_all_gather_MB"] == rows[0]["parameters"] * 2 / 2 / 1e6
    # In Float8Block, 384 rows on two processes cut a block of 128.
    reducing = [row["name"].removeprefix("FP4Adam, ") for row in rows if "reduce_ms" in row]
    assert reducing == ["NVFP4", "Float8Block", "Float8, quantized matmuls"]

    named = {row["name"]: row for row in one}
    for replica in replicas:
        alone = named[replica["name"].removesuffix(" (DDP)")]
        assert replica == {**alone, "name": replica["name"], "processes": 2}
    assert two == [{**row, "processes": 2} for row in one]
    assert all(len(set(row["losses"])) == 3 for row in one)
    states = [set(row["digests"]) - {"step", "exp_avg", "exp_avg_sq", "weights"} for row in one]
    expected = [set() if row["name"].startswith("torch") else {"master_param"} for row in one]
    assert states == expected and len({row["digests"]["weights"] for row in one}) == 5

    two[0]["losses"][1], two[0]["digests"]["exp_avg"] = "0x0p+0", "changed"
    (tmp_path / "changed.json").write_text(json.dumps(content))
    out = report("scaling_report.py", tmp_path / "changed.json")
    assert f"{rows[2]['forward_all_gather_MB']:.1f}" in out
    assert out.count("| all 3 | ") == 4
    assert "| differ from step 2 | differ: exp_avg |" in out


SMALL = "--layers 1 --heads 2 --dim 64 --batch 2"
# Linear layers of a block of training.py.
TRAINED = [(384, 128), (128, 128), (384, 128), (384, 128), (128, 384)]
ONLY_OF = {
    "numerics.py": "=BF16 + AdamW, seed 0;=BF16 + AdamW, seed 1;=NVFP4 2D;=NVFP4 without masters",
    "training.py": "torch AdamW;FusedAdam, BF16;TE FusedAdam;NVFP4",
}


@pytest.mark.parametrize(
    ("program", "options", "rows"),
    [
        pytest.param("matmul.py", "--repeats 1", 34, marks=pytest.mark.nightly),
        ("numerics.py", f"{SMALL} --context 32 --lr 4e-3 --tokens 5120", 4),
        ("qat.py", f"{SMALL} --context 16 --steps 10", 8),
        ("refit.py", "--format nvfp4 --steps 1 --batch 1", 2),
        ("training.py", "--layers 1 --accumulate 2 --checkpoint", 7),
        ("lora_memory.py", "--checkpoint", 5),
    ],
)
def test_others_run_and_their_figures_are_numbers(program, options, rows, tmp_path):
    out = tmp_path / "out.json"
    options = ["--device", "cpu", *options.split()]
    options += ["--out" if program == "numerics.py" else "--json", out]
    if program in ONLY_OF:
        options += ["--only", ONLY_OF[program]]
    run(program, *options)
    content = json.loads(out.read_text())
    found = content.get("results") or content.get("rows") or content["runs"]
    found = [*found[0].values()] if program == "qat.py" else [r for r in found if "error" not in r]
    assert len(found) == rows
    numbers = re.findall(r"[:,\[] *([-\w.]+)(?=[,\n\]])", json.dumps(found, indent=1))
    assert len(numbers) > 2 * rows and not {"NaN", "Infinity", "-Infinity"} & {*numbers}
    if program == "training.py":
        row = next(row for row in found if row["name"] == "FP4Adam, NVFP4")
        linear = sum(m * n for m, n in TRAINED)
        weights = sum(weight_bytes("NVFP4 rowwise", m, n) for m, n in TRAINED)
        weights += 2 * (row["parameters"] - linear)
        assert row["weight_B"] * row["parameters"] == pytest.approx(weights, rel=1e-12)
        assert row["state_B"] == 12
        text = report("training_report.py", out)
        assert f"| FP4Adam, NVFP4 | {row['weight_B']:.2f} | 12.00 | - |" in text
    if program == "numerics.py" and importlib.util.find_spec("matplotlib") is not None:
        text = report("numerics_report.py", out, "--png", out.with_suffix(".png"))
        ends = [sum(trained["last_validation_losses"]) / 64 for trained in found]
        gap = ends[2] - (ends[0] + ends[1]) / 2
        assert f"| {ends[2]:.4f} | {gap:+.4f} ± " in text
        assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_offload_counts_the_model_and_compares_bytes(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("offload")
    sizes = [(math.prod(shape), quantized) for shape, quantized in benchmark.shapes(32)]
    assert sum(numel for numel, _ in sizes) == 8_030_261_248  # as published
    assert sum(numel for numel, quantized in sizes if not quantized) < 1.06e9
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = ["--device", device, "--layers", "1", "--scale", "64", "--repeats", "1"]
    with offload_to(LateLink(), 2**16):
        assert benchmark.main([*small, "--exact", "3", "--states", "bf16"]) == 0
        path = tmp_path / "new" / "offload.json"
        benchmark.main([*small, "--resident", "--json", str(path)])
        rows = read(path)
        assert [row["offloaded"] for row in rows] == [True, False]
        assert all(row["state_B"] == pytest.approx(12, rel=1e-2) for row in rows)
        assert rows[0]["share_of_link"] > 0
        benchmark.main([*small, "--train", "32", "--json", str(path)])
        ways = [(row["offloaded"], row["gradient_release"]) for row in read(path)]
        assert ways == [(False, False), (True, False), (True, True)]
    assert "PASS" in capsys.readouterr().out
