"""What a bare machine gets: the package without Triton, and names without surprises."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fp4adam
from fp4adam import __main__, plan
from fp4adam.tensors import backend

ROOT = Path(__file__).resolve().parents[1]
API, CITATION = ROOT / "docs" / "api", ROOT / "CITATION.cff"
SETUP = ROOT / "setup.py"

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # as if it were not installed: importing it raises ImportError
import torch
import fp4adam

model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
fp4adam.quantize_model(model, "nvfp4")
optimizer = fp4adam.FP4Adam(model.parameters(), lr=1e-2)
losses = []
for _ in range(20):
    loss = (model(torch.eye(32)) - torch.eye(32)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
import runpy
runpy.run_module("fp4adam", run_name="__main__")
"""


def python(*arguments, **options):
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


@pytest.mark.exhaustive  # starts Python
def test_training_and_the_report_need_no_triton_and_no_gpu():
    for arguments in (["-m", "fp4adam"], ["-c", WITHOUT_TRITON]):
        said = python(*arguments)
        assert said.startswith(f"fp4adam {fp4adam.__version__}, torch {torch.__version__}")
        assert re.search(r"cpu: .*Float8Block +emulated +emulated +deq\w+ +emul", said, re.DOTALL)
    assert "triton missing" in said and "could not be imported" in said


IMPORTS = "import sys, torch; x = {*sys.modules}; import fp4adam; print(*{*sys.modules} - x)"
SLOW_MODULES = {
    "mpmath", "numpy.random", "safetensors", "sympy", "torch._dynamo", "torch._inductor",
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes", "torch.onnx", "triton",
}  # fmt: skip


@pytest.mark.exhaustive  # starts Python
def test_import_loads_little_beyond_torch():
    """Each of these takes a tenth of a second up to seconds; they wait until something needs them.

    DTensors are recognized without an import (``dtensor.is_dtensor``).
    """
    loaded = python("-c", IMPORTS).split()
    assert "fp4adam.optim.fused_adam" in loaded
    assert not SLOW_MODULES.intersection(loaded)


def test_a_star_import_replaces_no_modules():
    names: dict[str, object] = {}
    exec("from torch import nn, optim, distributed\nbefore = nn, optim, distributed", names)
    exec("from fp4adam import *", names)
    assert names["before"] == (names["nn"], names["optim"], names["distributed"])
    assert names["FP4Adam"] is fp4adam.FP4Adam and names["Recipe"] is fp4adam.Recipe
    assert not {"torchao", "linear", "operators", "collectives"} & names.keys()


@pytest.mark.parametrize("problem", [None, "they need Triton"])
@pytest.mark.parametrize(
    ("capability", "float8", "float8_block", "others"),
    [
        ((8, 0), "8.9 or later", "9.0", "10.0 or later"),
        ((8, 9), None, "9.0", "10.0 or later"),
        ((9, 0), None, None, "10.0 or later"),
        ((10, 0), None, "9.0", None),
        ((12, 0), None, "9.0", None),
    ],
)
def test_report_of_a_gpu(problem, capability, float8, float8_block, others, monkeypatch):
    word, verdict = "native", "native kernels"
    if problem:
        word, verdict = "emulated", f"torch operators: {problem}"
    major, minor = capability
    gpu = SimpleNamespace(name="NVIDIA X", major=major, minor=minor, total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpu)
    monkeypatch.setattr(__main__, "_triton", lambda: ("3.7.1", ""))
    monkeypatch.setattr(backend, "why_no_kernels", lambda i: problem)
    of_cpu, of_gpu = __main__.report().split("cuda:0: ")
    assert of_gpu.startswith(f"NVIDIA X, capability {major}.{minor}, 141.0 GiB\n  {verdict}\n")
    kinds = {"NVFP4": others, "MXFP8": others, "Float8Block": float8_block, "Float8": float8}
    for name, needed in kinds.items():
        matmul = f"missing: needs capability {needed}" if needed and not problem else word
        assert re.search(rf"{name} +{word} +{word} +dequantized +{matmul}\n", of_gpu)
        assert re.search(rf"{name} +emulated +emulated +dequantized +emulated\n", of_cpu)
    # A line says why for each of the words.
    assert all(f"\n{why}: " in of_gpu for why in (word, "emulated", "dequantized"))


@pytest.mark.skipif(not API.is_dir(), reason="there is no docs/ beside this copy of tests/")
def test_api_reference_has_every_public_name():
    lines = [line for page in API.glob("*.md") for line in page.read_text().splitlines()]
    documented = {line.rpartition(".")[2] for line in lines if line.startswith("::: ")}
    listed = set(re.findall(r"\[`(\w+)`\]\[fp4adam\.\1\]", (API / "index.md").read_text()))
    assert listed == documented - {"zero"}
    public = {
        name
        for name, value in vars(fp4adam).items()
        if getattr(value, "__module__", "").startswith("fp4adam.") and not name.startswith("_")
    }
    assert documented - {"fp8_utils", "fp4_utils", "zero"} == public


@pytest.mark.skipif(not CITATION.is_file(), reason="there is none beside this copy of tests/")
def test_the_citation_names_the_version():
    assert fp4adam.__version__.count(".") == 2
    assert f"\nversion: {fp4adam.__version__}\n" in CITATION.read_text()


@pytest.fixture
def clone(tmp_path):
    """What setuptools reads of a clone; modules without their functions."""
    pytest.importorskip("setuptools")
    if not SETUP.is_file():
        pytest.skip("there is none beside this copy of tests/")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for package in ("fp4adam", "kernels"):
        for path in (ROOT / package).rglob("__init__.py"):
            if "kernels" not in path.relative_to(ROOT / package).parts:
                (tmp_path / path.relative_to(ROOT)).parent.mkdir()
                (tmp_path / path.relative_to(ROOT)).touch()
    (tmp_path / "fp4adam" / "__init__.py").write_text('__version__ = "0.0.0"\n')
    (tmp_path / "fp4adam" / "py.typed").touch()
    return tmp_path


def build(clone, kind):
    """The wheel that pip asks setuptools for."""
    script = f"from setuptools import build_meta; print(build_meta.build_{kind}('dist'))"
    said = python("-W", "ignore", "-c", script, cwd=clone)
    return zipfile.ZipFile(clone / "dist" / said.split()[-1])


@pytest.mark.exhaustive  # starts Python
def test_editable_install_is_a_folder_that_type_checkers_find(clone):
    """An import hook would hide the types, and the clone itself would offer its kernels/."""
    wheel = build(clone, "editable")
    (pth,) = (name for name in wheel.namelist() if ".dist-info/" not in name)
    assert pth.endswith(".pth")
    folder = Path(wheel.read(pth).decode().strip())
    assert [path.name for path in folder.iterdir()] == ["fp4adam"]
    (clone / "kernels" / "new.py").touch()
    assert (folder / "fp4adam" / "py.typed").is_file()
    assert (folder / "fp4adam" / "kernels" / "new.py").is_file()


@pytest.mark.exhaustive  # starts Python
def test_clone_has_its_kernels_after_an_install(clone):
    """``python -m fp4adam`` in the clone imports what lies there, not what is installed."""
    names = build(clone, "wheel").namelist()
    assert "fp4adam/py.typed" in names and "fp4adam/kernels/launch/__init__.py" in names
    assert not any(name.startswith(("build/", "kernels/")) for name in names)
    assert (clone / "fp4adam" / "kernels" / "launch" / "__init__.py").is_file()


def test_plans_count_what_is_stored():
    lines = plan.table(8e9).splitlines()
    eight = next(line for line in lines if line.startswith("FP4Adam, NVFP4, 8bit states"))
    weights, *fits, size, _ = eight.removeprefix("FP4Adam, NVFP4, 8bit states").split()
    # Codes 1/2 + 1/256, a remainder of a byte, two moments of 1 + 1/32.
    assert float(weights) == round(1 / 2 + 1 / 256 + 1 + 2 * (1 + 1 / 32), 2)
    assert fits == ["yes" if float(size) <= card else "-" for card in plan.CARDS]
    setup = plan.SETUPS[-1]
    assert plan.needed(setup, plan.largest(setup, 80) * 1.01) > 80e9
    quantized, plain = plan.bytes_per_parameter(plan.SETUPS[1])
    assert quantized == plain == 6
    with pytest.raises(ValueError, match="must be between 1e6 and 1e13, got 5; write 8e9"):
        plan.table(5)


def test_plans_on_the_command_line(capsys):
    __main__.main(["--plan", "8e9"])
    printed = capsys.readouterr().out
    assert "8.00 billion parameters" in printed and "2,048 tokens" in printed
    with pytest.raises(SystemExit):
        __main__.main(["--plan", "many"])
    assert "invalid float value: 'many'" in capsys.readouterr().err
