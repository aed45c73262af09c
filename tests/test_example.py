"""The program in examples/: every format learns, and a resumed run goes on with the same bits."""

import functools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from helpers import assert_identical

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import expert_parallel  # noqa: E402
import minimal  # noqa: E402
import muon  # noqa: E402
import qat  # noqa: E402
import train_gpt  # noqa: E402

import distributed  # noqa: E402

pytestmark = pytest.mark.exhaustive  # whole programs

FORMATS = ("nvfp4", "mxfp8", "float8block", "bf16", "fp32")
TINY = (
    "--size tiny --device cpu --layers 1 --heads 2 --dim 64 --context 32 --batch 4 --lr 1e-2"
).split()


def run(out, *options):
    return train_gpt.main([*TINY, "--out", str(out), *map(str, options)])


def run_program(name, *options):
    """What a program prints; torchrun starts it if the options begin with ``--nproc-per-node``."""
    command = [sys.executable, EXAMPLES / name, *options]
    if options[:1] == ("--nproc-per-node",):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, *options[:2], EXAMPLES / name, *options[2:]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command, options = [str(word) for word in command], dict(capture_output=True, text=True)
    finished = subprocess.run(command, env=environment, timeout=300, **options)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def load(path):
    """All of a checkpoint as plain tensors, without the help of the example."""
    whole = path.with_suffix(".pt")
    dcp_to_torch_save(path, whole)
    return torch.load(whole, weights_only=True) | torch.load(path / "extra.pt", weights_only=True)


def assert_learns(losses):
    assert all(map(math.isfinite, losses))
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert min(losses[-1], sum(losses[-5:]) / 5) < losses[0] - 1


QUANTIZED = "--matmul quantized --dim 128 --lr 3e-3"


@pytest.mark.parametrize(
    ("name", "more"), [*((name, "--accumulate 2") for name in FORMATS), ("float8block", QUANTIZED)]
)
def test_loss_falls_and_a_resumed_run_has_the_same_bits(name, more, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    options = ("--format", name, "--steps", 20, "--eval-every", 10, "--checkpoint-every", 10)
    (result,) = run(whole, *options, *more.split())
    assert_learns(result["train_loss"])
    assert result["final_validation_loss"] < result["train_loss"][0] - 1
    middle, end = (f"{name}-fp4adam-step{step:06d}" for step in (10, 20))
    train_gpt.main(["--resume", str(whole / middle), "--out", str(resumed)])
    assert sorted(os.listdir(whole)) == [middle, end, "results.json"]
    expected, actual = load(whole / end), load(resumed / end)
    for part in ("model", "optimizer", "scheduler"):
        assert_identical(actual[part], expected[part])
    assert actual["history"][:2] == expected["history"][:2]


def test_muon_trains_nvfp4_weights_on_any_number_of_processes():
    losses = muon.train(*muon.build(layers=1, dim=64), range(12))
    assert losses[0] > 5 and sum(losses[-3:]) / 3 < losses[0] - 1.5
    ways = (), ("--nproc-per-node", 2)
    printed = (run_program("muon.py", *way, "--steps", 20) for way in ways)
    alone, together = (float(text.split("loss ")[1]) for text in printed)
    assert together == pytest.approx(alone, abs=0.1)


# What torch.compile does by itself.
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute"
)
def test_compiled_blocks_share_their_graphs(tmp_path, monkeypatch):
    eagerly = functools.partialmethod(nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(nn.Module, "compile", eagerly)
    options = ("--layers", 3, "--steps", 3, "--sample", 5)
    (eager,) = run(tmp_path / "eager", *options)
    counters.clear()
    (compiled,) = run(tmp_path / "compiled", *options, "--compile")
    assert counters["stats"]["unique_graphs"] == 2  # with gradients and without
    assert not counters["graph_break"]
    assert compiled["train_loss"] == pytest.approx(eager["train_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (("--device", "cuda"), "device of this machine, got 'cuda' with 0 .* --device cpu works"),
        (("--device", "gpu"), "must be cpu, cuda or cuda:INDEX, got 'gpu'"),
        (("--heads", 3), "dim must be a multiple of 2 . heads = 6, got 64; change dim or heads"),
        (("--dim", 40, "--heads", 1), "layer 'blocks.0.attention.qkv': .* multiples of 16"),
        (("--matmul", "quantized", "--format", "float8block"), "multiples of 128 .* got"),
        (("--lr", 0), "argument --lr: must be above 0, got '0'"),
        (("--lr", "nan"), "argument --lr: must be a number from 0, got 'nan'"),
        (("--clip", -1), "argument --clip: "),
        (("--text", "nowhere"), "argument --text: must be folders, got 'nowhere'"),
        (("--seeds", 3), "--seeds is for --compare alone; add it, or leave"),
    ],
)
def test_mistakes_are_told_before_anything_happens(options, match, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit):
        run(tmp_path / "out", *options, "--steps", 1)
    assert re.search(match, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "float8block"])
def test_the_template_learns(recipe, capsys):
    assert_learns(minimal.main(recipe, steps=12))
    printed = capsys.readouterr().out
    assert "2 of 4 weights are quantized" in printed and "held out: loss" in printed


def test_killed_save_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    good, model = tmp_path / "good", nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    distributed.save(good, model, optimizer, {"number": 0})
    expected = load(good)

    def killed(state, checkpoint_id):
        checkpoint_id.mkdir()
        (checkpoint_id / "__0_0.distcp").write_text("half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(dcp, "save", killed)
    nn.init.zeros_(model.weight)
    with pytest.raises(KeyboardInterrupt):
        distributed.save(good, model, optimizer, {"number": 1})
    assert_identical(load(good), expected)
    monkeypatch.undo()
    distributed.save(good, model, optimizer, {"number": 1})
    assert load(good)["number"] == 1 and not load(good)["model"]["weight"].any()
    assert sorted(os.listdir(tmp_path)) == ["good", "good.pt"]


@pytest.fixture(scope="module")
def on_two_processes(tmp_path_factory):
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("two")
    options = "--batch 6 --steps 20 --eval-every 10 --checkpoint-every 10 --compare".split()
    launched = ("--nproc-per-node", 2, "--out", out)
    return out, run_program("train_gpt.py", *launched, *TINY, *options)


def results(folder):
    content = json.loads((folder / "results.json").read_text())
    return {f"{r['format']}-{r['optimizer']}": r for r in content["runs"]}


def test_torchrun_trains_and_one_process_writes(on_two_processes):
    out, printed = on_two_processes
    runs = ("fp32-adamw", "nvfp4-fp4adam")
    checkpoints = [f"{name}-step{step:06d}" for name in runs for step in (10, 20)]
    files = {*checkpoints, "comparison.png", "results.json"}
    assert set(os.listdir(out)) == files
    for name in runs:
        assert len(re.findall(rf"^{name} .* 10/20  loss ", printed, re.MULTILINE)) == 1
        assert_learns(results(out)[name]["train_loss"])


@pytest.mark.parametrize(
    ("processes", "name"),
    [
        (1, "nvfp4-fp4adam"),
        (2, "nvfp4-fp4adam"),
        pytest.param(1, "fp32-adamw", marks=pytest.mark.nightly),
        pytest.param(3, "nvfp4-fp4adam", marks=pytest.mark.nightly),
    ],
)
def test_resuming_on_any_number_of_processes(processes, name, on_two_processes, tmp_path):
    out, _ = on_two_processes
    options = ("--resume", str(out / f"{name}-step000010"))
    if processes == 1:
        train_gpt.main([*options, "--out", str(tmp_path)])
    else:
        launched = ("--nproc-per-node", processes, "--out", tmp_path)
        run_program("train_gpt.py", *launched, *options)
    expected, actual = (results(folder)[name]["train_loss"] for folder in (out, tmp_path))
    # Gradients of other parts of a batch are rounded, and added up, otherwise.
    assert actual == pytest.approx(expected, rel=0 if processes == 2 else 1e-3)


def test_compare_writes_numbers_and_curves(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run(
        *(tmp_path, "--compare", "--format", "nvfp4,mxfp8", "--baseline", "fp32,bf16"),
        *("--states", "fp32,fp8", "--steps", 4, "--seeds", 2),
    )
    written = json.loads((tmp_path / "results.json").read_text())
    runs = written["runs"]
    formats = ["fp32", "bf16", *["nvfp4"] * 2, *["mxfp8"] * 2]
    assert [r["format"] for r in runs] == formats * 2
    assert [r["seed"] for r in runs] == [0] * 6 + [1] * 6
    assert [r for r in runs if "rounded_afterwards" in r] == [runs[0], runs[6]]
    rounded = runs[0]["rounded_afterwards"]
    assert rounded.keys() == {"nvfp4", "mxfp8"}
    assert all(abs(x - runs[0]["end_loss"]) < 0.05 for x in rounded.values())
    assert written["versions"]["torch"] == torch.__version__
    compared = [runs[i] for i in (0, 1, 2, 4)]  # without those with FP8 moments
    fp32, bf16, nvfp4, mxfp8 = (r["weight_bytes_per_parameter"] for r in compared)
    assert (fp32, bf16) == (4, 2) and nvfp4 < mxfp8 < fp32
    states, masters = (compared[2][f"{x}_bytes_per_parameter"] for x in ("optimizer", "master"))
    assert 2 < masters < 4 and states - masters == pytest.approx(8, abs=0.01)
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "AdamW, FP32 weights, rounded to MXFP8 at the end" in printed and " ± " in printed


def test_expert_parallelism_gives_the_same_bits():
    expected = expert_parallel.main(["--format", "float8block", "--steps", "4"])
    assert_learns(expected["losses"])
    options = ("--format", "float8block", "--steps", 4)
    printed = run_program("expert_parallel.py", "--nproc-per-node", 2, *options)
    lines = [f"step {i + 1}: loss {loss:.4f}" for i, loss in enumerate(expected["losses"])]
    assert printed.splitlines() == [*lines, f"weights {expected['weights']}"]


@pytest.mark.nightly
def test_rollouts_by_an_engine_with_the_trained_bytes():
    small = "--device cpu --pretrain 2 --steps 2 --samples 4 --length 4".split()
    kls = {}
    for way in ("--format=nvfp4", "--format=mxfp8", "--format=float8block", "--requantize"):
        out = run_program("refit.py", *small, way)
        kls[way] = [float(kl) for kl in re.findall(r"KL +(\S+)", out)]
        sizes = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes", out)]
        assert len(kls[way]) == len(sizes) == 2
        assert ("has the bytes that were trained" in out) == (way != "--requantize")
    rounded = kls.pop("--requantize")
    assert min(rounded) > 1e-7
    assert all(abs(kl) < min(rounded) / 10 for each in kls.values() for kl in each)


def test_rounded_trained_and_distilled(capsys):
    found = qat.main(["--steps", "6", "--format", "mxfp8", "--device", "cpu"])
    assert found.keys() == {"rounded", "trained", "distilled"}
    assert all(math.isfinite(loss) and loss < 6 for losses in found.values() for loss in losses)
    assert "W8A16     W8A8" in capsys.readouterr().out


def test_notebook_runs(monkeypatch):
    pytest.importorskip("matplotlib")
    cells = json.loads((EXAMPLES / "quick_start.ipynb").read_text())["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells[3:] if "plot(" in "".join(cell["source"]))
    namespace = {}
    for code in codes:
        exec(code.replace("STEPS = 200", "STEPS = 2"), namespace)
    names = "AdamW, FP32;FP4Adam, trained in NVFP4;AdamW, rounded to NVFP4 afterwards"
    assert {*namespace["found"]} == {*names.split(";")}
