"""The program in examples/: every format learns, and a resumed run goes on with the same bits."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from fp4adam import QuantizedTensor

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
if not EXAMPLES.is_dir():
    pytest.skip("there is no examples/ beside this copy of tests/", allow_module_level=True)
sys.path.insert(0, str(EXAMPLES))

import train_gpt  # noqa: E402
from stdlib_text import cut_batch, load_text  # noqa: E402

FORMATS = ("nvfp4", "mxfp8", "float8block", "bf16", "fp32")
TINY = (
    "--size tiny --device cpu --layers 1 --heads 2 --dim 64 --context 32 --batch 4 --lr 1e-2"
).split()


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(out, *options):
    return train_gpt.main([*TINY, "--out", str(out), *map(str, options)])


def load(path):
    return torch.load(path, weights_only=True)


def assert_same_bits(actual, expected):
    if isinstance(expected, QuantizedTensor):
        actual, expected = actual.storage_tensors(), expected.storage_tensors()
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_same_bits(actual[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    else:
        assert actual == expected


@pytest.mark.parametrize("name", FORMATS)
def test_loss_falls(name, tmp_path):
    (result,) = run(tmp_path, "--format", name, "--steps", 20)
    losses = result["train_loss"]
    assert all(map(math.isfinite, losses))
    assert losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert sum(losses[-5:]) / 5 < losses[0] - 1
    assert result["final_validation_loss"] < losses[0] - 1


@pytest.mark.parametrize("name", FORMATS)
def test_resumed_run_has_the_bits_of_an_uninterrupted_one(name, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    options = ("--format", name, "--steps", 6, "--eval-every", 6, "--accumulate", 2)
    run(whole, *options, "--checkpoint-every", 3)
    middle, end = (f"{name}-fp4adam-step{step:06d}.pt" for step in (3, 6))
    train_gpt.main(["--resume", str(whole / middle), "--out", str(resumed)])
    assert sorted(path.name for path in whole.glob("*.*")) == [middle, end, "results.json"]
    expected, actual = load(whole / end), load(resumed / end)
    for part in ("model", "optimizer", "scheduler"):
        assert_same_bits(actual[part], expected[part])
    assert actual["history"][:2] == expected["history"][:2]


def test_resuming_keeps_the_settings(tmp_path, capsys):
    run(tmp_path, "--steps", 2, "--checkpoint-every", 1)
    checkpoint = str(tmp_path / "nvfp4-fp4adam-step000001.pt")
    with pytest.raises(SystemExit):
        train_gpt.main(["--resume", checkpoint, "--weight-decay", "0"])
    assert "--weight-decay must be 0.1 to resume, got 0.0" in capsys.readouterr().err


def test_compare_writes_numbers_and_curves(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run(tmp_path, "--compare", "--format", "nvfp4,mxfp8", "--baseline", "fp32,bf16", "--steps", 4)
    report = json.loads((tmp_path / "results.json").read_text())
    adamw, fp4adam = ("fp32 adamw", "bf16 adamw"), ("nvfp4 fp4adam", "mxfp8 fp4adam")
    assert [f"{r['format']} {r['optimizer']}" for r in report["runs"]] == [*adamw, *fp4adam]
    assert report["settings"]["seed"] == 0
    assert report["versions"]["torch"] == torch.__version__
    firsts = [r["train_loss"][0] for r in report["runs"]]
    assert max(firsts) - min(firsts) < 0.05  # the same batch, nearly the same weights
    fp32, bf16, nvfp4, mxfp8 = (r["weight_bytes_per_parameter"] for r in report["runs"])
    assert (fp32, bf16) == (4, 2)
    assert nvfp4 < mxfp8 < fp32
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "weight B/param" in capsys.readouterr().out


def test_compare_without_matplotlib_says_so_before_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        run(tmp_path / "out", "--compare")
    assert "pip install fp4adam[demo]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--optimizer", "adamw"], "--optimizer adamw needs bf16 or fp32, got --format nvfp4"),
        (["--format", "nvfp4,mxfp8"], "--format must be one name, got nvfp4,mxfp8; add --compare"),
        (["--format", "fp8"], "must be of nvfp4, mxfp8, float8block, bf16, fp32, got 'fp8'"),
        (["--baseline", "nvfp4"], "--baseline must be of bf16, fp32, got nvfp4"),
        (["--steps", "0"], "must be a whole number from 1, got '0'"),
        (["--resume", "nothing.pt"], "must be a file that exists, got 'nothing.pt'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, *options)
    assert message in capsys.readouterr().err


def test_sample_is_printable(tmp_path, capsys):
    run(tmp_path, "--steps", 1, "--sample", 40)
    written = capsys.readouterr().out.split("nvfp4-fp4adam writes:")[1].split("\nformat ")[0]
    assert written.startswith("\ndef ")
    assert len(written) >= len("\ndef ") + 40
    assert all(line.isprintable() and line.isascii() for line in written.split("\n"))


def test_batches_depend_on_their_seed_alone():
    text, held_out = load_text()
    assert text.dtype == held_out.dtype == torch.uint8
    assert len(text) > 5 * len(held_out) > 0
    inputs, targets = cut_batch(text, batch=3, context=8, seed=2**40 + 5)
    torch.manual_seed(1)
    again, _ = cut_batch(text, batch=3, context=8, seed=2**40 + 5)
    other, _ = cut_batch(text, batch=3, context=8, seed=2**40 + 6)
    assert inputs.shape == targets.shape == (3, 8)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other)
