"""What type checkers, and so editors, know of the optimizers' options."""

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from fp4adam import FP4Adam, FusedAdam, Recipe, quantize_model

model: torch.nn.Linear = quantize_model(torch.nn.Linear(16, 16), Recipe("float8", activations=True))
FP4Adam(model.parameters(), 1e-3, states="8bit", scale_groups=[["a", "b"]], weight_decay=0.1)
FP4Adam(model.named_parameters(), lr=torch.tensor(1e-3), quantize_from="param_dtype")
loss: float | None = FusedAdam([{"params": [model.weight], "lr": 1e-4}], adam_w_mode=True).step()
FP4Adam(model.parameters(), statez="8bit")  # wrong
FP4Adam(model.parameters(), states="9bit")  # wrong
FP4Adam(model.parameters(), quantize_from="weights")  # wrong
FusedAdam(model.parameters(), weight_decay="0.1")  # wrong
"""
CHECKERS = {
    "mypy": ["mypy", "--no-error-summary"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_wrong_options_and_no_others_are_reported(checker, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", *CHECKERS[checker], str(program)]
    output = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout
    lines = [line for line in output.splitlines() if "error" in line and "program.py:" in line]
    found = {int(line.split("program.py:")[1].split(":")[0]) for line in lines}
    wrong = {i for i, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    assert found == wrong, output
