"""What a bare machine gets: the package without Triton, and names without surprises."""

import subprocess
import sys
from pathlib import Path

import pytest

import fp4adam

API = Path(__file__).resolve().parents[1] / "docs" / "api.md"

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
"""


def test_training_on_a_cpu_needs_no_triton():
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True)


def test_public_names_are_those_of_the_readme():
    names = {
        "Float8BlockQuantizer",
        "Float8BlockTensor",
        "FP4Adam",
        "FusedAdam",
        "MXFP8Quantizer",
        "MXFP8Tensor",
        "NVFP4Quantizer",
        "NVFP4Tensor",
        "QuantizedTensor",
        "quantize_model",
        "quantized_init",
        "register_adapter",
        "TensorAdapter",
    }
    assert names <= vars(fp4adam).keys()
    assert fp4adam.__version__.count(".") == 2


@pytest.mark.skipif(not API.is_file(), reason="there is no docs/ beside this copy of tests/")
def test_api_reference_has_every_public_name():
    documented = {
        line.rpartition(".")[2] for line in API.read_text().splitlines() if line.startswith("::: ")
    }
    public = {
        name
        for name, value in vars(fp4adam).items()
        if getattr(value, "__module__", "").startswith("fp4adam.") and not name.startswith("_")
    }
    assert documented - {"fp4_utils"} == public
