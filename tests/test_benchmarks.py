"""The programs in benchmarks/: every optimizer is measured, and what must move is counted right."""

import contextlib
import importlib.util
import io
import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp4adam.tensors import backend
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


def load(name):
    """A program as a module."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        spec.loader.exec_module(module)
    return module


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


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark")
    (folder / "flashoptim.py").write_text("raise OSError('a broken\\nbuild')")
    path = folder / "new" / "step.json"
    options = "--device cpu --scale 64 --repeats 1 --model gpt".split()
    return path, run("step.py", *options, "--only", ONLY, "--json", path, path=[folder])


def rows(measured):
    return {row["name"]: row for row in json.loads(measured[0].read_text())["results"]}


def padded(n, multiple):
    return -(-n // multiple) * multiple


def weight_bytes(name, rows, cols):
    """Codes of both directions and their scales, padding included."""
    numel = rows * cols
    return {
        "FP32": 4 * numel,
        "BF16": 2 * numel,
        "NVFP4": numel + numel // 256 + 4,
        "NVFP4 rowwise": numel // 2 + numel // 256 + 4,
        "MXFP8": 2 * numel
        + padded(rows, 128) * padded(cols // 32, 4)
        + padded(rows // 32, 4) * padded(cols, 128),
        "Float8Block": 2 * numel + 4 * padded(rows, 128) // 128 * padded(cols, 128) // 128,
    }[name]


@pytest.mark.parametrize(
    ("name", "weight", "grad", "states", "reads_weight"),
    [
        ("torch AdamW fused, FP32", "FP32", 4, 8, True),
        ("torch AdamW fused, BF16 (no masters)", "BF16", 2, 4, True),
        ("FusedAdam, FP32", "FP32", 4, 8, True),
        ("FusedAdam, BF16 + FP32 masters", "BF16", 2, 12, False),
        ("FP4Adam, NVFP4", "NVFP4", 2, 12, False),
        ("FP4Adam, NVFP4 rowwise", "NVFP4 rowwise", 2, 12, False),
        ("FP4Adam, MXFP8", "MXFP8", 2, 12, False),
        ("FP4Adam, Float8Block", "Float8Block", 2, 12, False),
        ("Unfused, NVFP4", "NVFP4", 2, 12, False),
        ("Unfused, MXFP8", "MXFP8", 2, 12, False),
        ("Unfused, Float8Block", "Float8Block", 2, 12, False),
        ("MasterWeightOptimizer, AdamW, NVFP4", "NVFP4", 2, 12, False),
        ("MasterWeightOptimizer, Muon, NVFP4", "NVFP4", 2, 8, False),
        ("MasterWeightOptimizer, Muon, BF16 + FP32 masters", "BF16", 2, 8, False),
        ("MasterWeightOptimizer, AdamW, MXFP8", "MXFP8", 2, 12, False),
        ("MasterWeightOptimizer, AdamW, Float8Block", "Float8Block", 2, 12, False),
    ],
)
def test_bytes(name, weight, grad, states, reads_weight, measured):
    row = rows(measured)[name]
    numel = sum(m * n for m, n in SHAPES)
    weights = sum(weight_bytes(weight, m, n) for m, n in SHAPES)
    moved = (grad + 2 * states) * numel + (2 if reads_weight else 1) * weights
    assert (row["tensors"], row["parameters"]) == (len(SHAPES), numel)
    assert row["bytes_per_param"] == pytest.approx(moved / numel, rel=1e-12)
    assert row["weight_bytes_per_param"] == pytest.approx(weights / numel, rel=1e-12)
    assert row["state_bytes_per_param"] == states


def test_every_optimizer_is_measured(measured):
    results = rows(measured)
    of_engine = [r for r in results.values() if r["kind"] == "Transformer Engine"]
    assert all("error" in row for row in of_engine)  # it is not installed
    results = {name: r for name, r in results.items() if r not in of_engine}
    assert (len(results), len(of_engine)) == (42, 5)
    for row in [r for name, r in results.items() if name != BROKEN]:
        assert all(row[key] > 0 for key in TIMES), row
        assert row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert "kernels" not in row  # counted on a GPU only


def test_what_cannot_run_says_why_and_the_rest_goes_on(measured):
    assert rows(measured)[BROKEN]["error"] == "a broken build"
    assert measured[1].count(f"{BROKEN:40s}   not measured: a broken build\n") == 1


def test_markdown_and_pictures(measured):
    path, _ = measured
    if importlib.util.find_spec("matplotlib") is not None:
        for name in ("step.png", "step_memory.png"):
            assert path.with_name(name).read_bytes().startswith(b"\x89PNG")
    out = report("report.py", path, "--model", "gpt", "--only", "FP4Adam, NVFP4;FlashAdamW")
    title, rule, nvfp4, *others = out.splitlines()
    assert title.startswith("| gpt: 0 M parameters in 5 tensors | ms | bytes per parameter |")
    assert nvfp4.startswith("| FP4Adam, NVFP4 | ")
    assert nvfp4.count("|") == title.count("|") == rule.count("|")
    assert f"{rows(measured)['FP4Adam, NVFP4']['bytes_per_param']:.2f}" in nvfp4
    assert f"{BROKEN}: not measured (a broken build)" in others
    assert not any("MXFP8" in line for line in others[:-1])


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    """A file of times on two processes, and of bits on one and on two, and on two replicas."""
    path = tmp_path_factory.mktemp("scaling") / "new" / "scaling.json"
    names = "masters;=FP4Adam, NVFP4;=FP4Adam, MXFP8;=FP4Adam, Float8Block"
    for processes, only, *options in (
        (2, f"{names};=FP4Adam, Float8, quantized matmuls", "--repeats", 1),
        (None, names, "--exact", 3),
        (2, names, "--exact", 3),
        (2, "FP32 masters;NVFP4", "--exact", 3, "--ddp"),
    ):
        common = ("--device", "cpu", "--layers", 1, "--out", path, "--only", only)
        run("scaling.py", *common, *options, processes=processes)
    return path, [run["results"] for run in json.loads(path.read_text())["runs"]]


def test_bytes_between_processes(scaled):
    rows = scaled[1][0]
    assert len(rows) == 6
    for row in rows:
        assert row["processes"] == 2
        assert row["step_ms"] > 0
        assert row["train_ms"] > 0
        # Half of all FP32 gradients is sent away; what is not in the root is gathered once more.
        root = row["forward_all_gather_MB"] - row["backward_all_gather_MB"]
        assert root == pytest.approx((2 * 256 * 128 + 128) * 2 / 2 / 1e6)
        assert row["backward_reduce_scatter_MB"] == row["parameters"] * 4 / 2 / 1e6
        # Scales of less than a block per process are not in the formula.
        assert row["forward_all_gather_MB"] == pytest.approx(row["formula_MB"], rel=0.01)
    assert rows[0]["forward_all_gather_MB"] == rows[0]["parameters"] * 2 / 2 / 1e6
    # In Float8Block, 384 rows on two processes cut a block of 128.
    reducing = [row["name"] for row in rows if "reduce_ms" in row]
    names = "NVFP4", "Float8Block", "Float8, quantized matmuls"
    assert reducing == [f"FP4Adam, {name}" for name in names]


def test_bits_do_not_depend_on_the_number_of_processes(scaled):
    _, one, two, replicas = scaled[1]
    named = {row["name"]: row for row in one}
    for replica in replicas:
        alone = named[replica["name"].removesuffix(" (DDP)")]
        assert replica == {**alone, "name": replica["name"], "processes": 2}
    for alone, shared in zip(one, two, strict=True):
        assert (alone.pop("processes"), shared.pop("processes")) == (1, 2)
        assert alone == shared
        assert len(set(alone["losses"])) == 3
        expected = {"step", "exp_avg", "exp_avg_sq", "weights"}
        expected |= set() if alone["name"].startswith("torch") else {"master_param"}
        assert alone["digests"].keys() == expected
    assert len({row["digests"]["weights"] for row in one}) == 5


def test_tables_of_several_processes(scaled, tmp_path):
    path, runs = scaled
    content = json.loads(path.read_text())
    row = content["runs"][2]["results"][0]
    row["losses"][1], row["digests"]["exp_avg"] = "0x0p+0", "changed"
    (tmp_path / "changed.json").write_text(json.dumps(content))
    out = report("scaling_report.py", tmp_path / "changed.json")
    assert f"{runs[0][2]['forward_all_gather_MB']:.1f}" in out
    assert out.count("| all 3 | ") == 4
    assert "| differ from step 2 | differ: exp_avg |" in out


def test_layers_and_what_they_are_made_of(tmp_path):
    path = tmp_path / "new" / "matmul.json"
    run("matmul.py", "--device", "cpu", "--repeats", 1, "--json", path)
    rows = json.loads(path.read_text())["results"]
    assert not [row for row in rows if "error" in row]
    by_name = {(row["kind"], row["name"]): row for row in rows}
    assert by_name["kernel", "nvfp4 to bfloat16"]["bytes"] == 128 * 128 * 5 // 2 + 64 + 4
    assert by_name["kernel", "mxfp8 to float32"]["bytes"] == 128 * 128 * 5 + 128 * 4
    both = by_name["kernel", "float8block operands, 2 ways"]
    assert both["bytes"] == 128 * 128 * 4 + 2 * 4 * 128
    layers = [row for row in rows if row["kind"] == "layer"]
    assert [(row["out"], row["in"]) for row in layers[::10]] == [(128, 128), (512, 128), (128, 512)]
    for row in rows:
        assert row["ms"] > 0
        if row["name"].endswith("native"):
            # A CPU emulates twice the same, but gradients in NVFP4 are rounded at random.
            assert row["error_y"] == 0
            if "nvfp4" not in row["name"].lower():
                assert row["error_dx"] == row["error_dw"] == 0


def test_predicted_times_are_those_of_the_ceilings():
    """FP8 halves products and moves more; a faster memory shortens what is moved alone."""
    roofline = load("roofline")
    predicted_ms = roofline.predicted_ms
    shape = roofline.GPTConfig(5, 32, 4096, 1024), 8 * 1024
    bf16, fp8 = (predicted_ms("NVIDIA H100 80GB HBM3", *shape, is_fp8, 28.0) for is_fp8 in (0, 1))
    assert 0.5 * bf16 < fp8 < 0.75 * bf16 and 60 < bf16 < 94
    assert predicted_ms("NVIDIA H200", *shape, True, 28.0) < fp8
    assert predicted_ms("CPU", *shape, True, 28.0) is None


def test_training_steps(tmp_path):
    path = tmp_path / "new" / "training.json"
    options = ["--device", "cpu", "--layers", 1, "--accumulate", 2, "--checkpoint"]
    run(
        "training.py",
        *options,
        "--only",
        "torch AdamW;FusedAdam, BF16;TE FusedAdam;NVFP4",
        "--json",
        path,
    )
    rows = {row["name"]: row for row in json.loads(path.read_text())["results"]}
    linear = [(384, 128), (128, 128), (384, 128), (384, 128), (128, 384)]
    high_precision = 2 * 256 * 128 + 3 * 128
    numel = sum(m * n for m, n in linear) + high_precision
    nvfp4 = sum(weight_bytes("NVFP4 rowwise", m, n) for m, n in linear) + 2 * high_precision
    expected = {
        "torch AdamW fused, FP32, BF16 autocast": (4 * numel, 8),
        "torch AdamW fused, BF16 (no masters)": (2 * numel, 4),
        "FusedAdam, BF16 + FP32 masters": (2 * numel, 12),
        "FP4Adam, NVFP4": (nvfp4, 12),
        "FusedAdam, BF16 + FP32 masters, released": (2 * numel, 12),
        "FP4Adam, NVFP4, released": (nvfp4, 12),
    }
    for name, (weights, states) in expected.items():
        row = rows[name]
        assert row["parameters"] == numel
        assert row["weight_B"] * numel == pytest.approx(weights, rel=1e-12)
        assert row["state_B"] == states
        assert row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["tokens_per_second"] * row["ms"] == pytest.approx(2 * 2 * 128 * 1e3)
        assert not {"steady_B", "gpu_ms"} & row.keys()  # on a GPU only
    of_engine = {name for name in rows if "TE's layers" in name}
    assert len(of_engine) == 6 and all("error" in rows[name] for name in of_engine)
    assert rows.keys() - expected.keys() - of_engine == {"FP4Adam, NVFP4, quantized matmuls"}
    assert "ms" in rows["FP4Adam, NVFP4, quantized matmuls"]  # emulated on a CPU
    out = report("training_report.py", path)
    assert "1 layers of 128, 2 x 256 tokens, eager, checkpointed | training step, ms |" in out
    assert f"| FP4Adam, NVFP4 | {nvfp4 / numel:.2f} | 12.00 | - |" in out


TRAINED = ("BF16 + AdamW, seed 0", "BF16 + AdamW, seed 1", "NVFP4 2D", "NVFP4 without masters")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A file of four runs."""
    path = tmp_path_factory.mktemp("numerics") / "new" / "numerics.json"
    small = "--device cpu --layers 1 --heads 2 --dim 64 --context 32 --batch 4 --lr 4e-3".split()
    options = ("--tokens", 5120, "--only", ";".join(f"={name}" for name in TRAINED), "--out", path)
    run("numerics.py", *small, *options)
    return path, json.loads(path.read_text())


def test_losses_beside_bf16(trained):
    runs = trained[1]["runs"]
    assert [run["name"] for run in runs] == [*TRAINED]
    for trained_run in runs:
        losses = trained_run["train_loss"]
        assert len(losses) == 40
        assert losses[-1] < losses[0] - 1
        assert [*trained_run["validation_loss"]] == [str(step) for step in range(2, 41, 2)]
        # Means over the same text, of a quarter of it and of all.
        first = sum(trained_run["last_validation_losses"][:16]) / 16
        assert trained_run["validation_loss"]["40"] == pytest.approx(first)
    # Seeds differ from the start; masters have been forgotten after the first step.
    seed_0, seed_1, nvfp4, without_masters = (run["train_loss"] for run in runs)
    assert seed_0[0] != seed_1[0]
    assert nvfp4[0] == without_masters[0] and nvfp4[2:] != without_masters[2:]


def test_table_and_picture_of_losses(trained, tmp_path):
    pytest.importorskip("matplotlib")
    path, content = trained
    picture = tmp_path / "numerics.png"
    out = report("numerics_report.py", path, "--png", picture, "--drawn", "NVFP4 2D")
    held_out = [sum(run["last_validation_losses"]) / 64 for run in content["runs"]]
    line = next(line for line in out.splitlines() if line.startswith("| NVFP4 2D | "))
    gap = held_out[2] - (held_out[0] + held_out[1]) / 2
    assert f"| {held_out[2]:.4f} | {gap:+.4f} ± " in line
    assert f"two seeds: {abs(held_out[0] - held_out[1]):.4f} nats" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


# Quantization-aware training, and updates of engines


def test_ways_to_quantized_weights(tmp_path):
    small = "--device cpu --layers 1 --heads 2 --dim 64 --context 16 --batch 2 --steps 10".split()
    out = run("qat.py", *small, "--json", tmp_path / "qat.json")
    (runs,) = json.loads((tmp_path / "qat.json").read_text())["runs"]
    assert len(runs) == 8 and all(set(runs[name]) == {"a16", "a4"} for name in [*runs][1:])
    losses = [each["loss"] for row in runs.values() for each in row.values()]
    assert all(map(math.isfinite, losses))
    assert out.count("| QA") == 4 and "held-out loss, W4A4" in out


def test_updates_are_measured(tmp_path):
    options = ("--device", "cpu", "--format", "nvfp4", "--steps", 1, "--batch", 1)
    run("refit.py", *options, "--json", tmp_path / "refit.json")
    rows = json.loads((tmp_path / "refit.json").read_text())["rows"]
    assert [row["lr"] for row in rows] == [1e-5, 1e-6]
    sizes = [row["changed_bytes"] for row in rows]
    assert sizes[1] < sizes[0] < rows[0]["full_bytes"]


# Captured steps


def test_captures_are_measured_and_compared(tmp_path, monkeypatch, capsys):
    pytest.importorskip("triton")
    benchmark = load("capture")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(backend, "uses_kernels", lambda d: d.type == device)
    if device == "cpu":  # in place of a graph, the step itself
        monkeypatch.setattr(benchmark, "capture", lambda step: step)
    monkeypatch.setattr(benchmark, "model_shapes", lambda *given: [(32, 32)])
    monkeypatch.setattr(benchmark.Clock, "host_running", benchmark.Clock.host)
    small = f"--device {device} --scale 64 --repeats 1".split()
    path = tmp_path / "new" / "capture.json"
    assert benchmark.main([*small, "--json", str(path)]) == 0
    rows = read(path)
    assert not [row for row in rows if "error" in row]
    moved = {row["name"]: row["bytes_per_param"] for row in rows}
    assert moved == pytest.approx(dict(zip(moved, (28, 28, 20, 26, 28, 14), strict=True)))
    assert all(row["share_of_copy"] > 0 and row["ms"] > 0 for row in rows)
    assert "| FusedAdam, FP32 | " in capsys.readouterr().out
    for name in [*benchmark.OURS][1:]:
        monkeypatch.delitem(benchmark.OURS, name)
    assert benchmark.main([*small, "--exact", "2"]) == 0
    assert capsys.readouterr().out.count("PASS: ") == 1
    args = benchmark.parse_args(small)
    monkeypatch.setattr(benchmark, "capture", lambda step: lambda: None)  # replays do nothing
    wrong, count = benchmark.differing("FusedAdam, FP32", [(32, 32)], args, [1e-3])
    assert wrong == count > 0


# LoRA


def test_frozen_bases_are_measured(tmp_path):
    path = tmp_path / "lora.json"
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "bitsandbytes.py").write_text("raise OSError('a broken\\nbuild')")
    run("lora_memory.py", "--device", "cpu", "--checkpoint", "--json", path, path=[broken])
    found = {row["name"]: row for row in json.loads(path.read_text())["results"]}
    plain, *ours = (row for row in found.values() if "error" not in row)
    assert [row["name"] for row in found.values() if "error" in row] == [
        "bitsandbytes NF4",
        "bitsandbytes NF4, double (QLoRA)",
    ]
    assert (plain["base_B"], plain["base_error"]) == (2, 0)
    expected = {
        "NVFP4, rowwise": 0.5 + 1 / 256,
        "NVFP4": 1 + 1 / 256,
        "MXFP8, rowwise": 1 + 1 / 32,
        "Float8Block, rowwise": 1,
    }
    for row in ours:
        assert row["base_B"] == pytest.approx(expected.pop(row["name"]), rel=1e-3)
        assert 0.02 < row["base_error"] < 0.12
        assert abs(row["loss"] - plain["loss"]) < 0.01 and row["loss"] < 5.4
    assert not expected


# Transformer Engine


def test_offload_counts_the_model_and_compares_bytes(tmp_path, capsys):
    benchmark = load("offload")
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


def read(path):
    return json.loads(path.read_text())["results"]
