"""vLLM reads exports: its loader, names, config and fusing; the products are replaced.

vLLM pins other versions of transformers and compressed-tensors, so it lives in an environment of
its own and runs as a program: serve_with_vllm.py says what is replaced.
"""

import json
import math
import os
import subprocess
from pathlib import Path

import models
import pytest
import torch

from fp4adam import export_checkpoint

PYTHON = os.environ.get("VLLM_PYTHON", "")

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="needs vLLM; run make test-engines, or set VLLM_PYTHON"
)

CASES = [
    ("nvfp4", "compressed-tensors"),
    ("nvfp4", "modelopt"),
    ("mxfp8", "compressed-tensors"),
    ("mxfp8", "modelopt"),
    ("float8block", "fp8"),
]


def run(script: str, *args: object, timeout: int, **options: object) -> dict:
    """What a program of this folder prints last, in vLLM's environment."""
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name(script), *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        **options,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("weight_format", ["nvfp4", "float8block"])
@pytest.mark.parametrize("way", ["dense", "changes"])
def test_vllm_takes_new_weights_while_it_runs(way, weight_format, tmp_path):
    answer = run("refit_vllm.py", way, weight_format, tmp_path, timeout=900)
    assert answer["served"] == answer["trained"] and answer["is_equal"]
    for row in answer["steps"]:
        assert row["is_equal"] and row["text"] != answer["served"]
    if way == "changes":
        # All at first, then what has changed, then all again, as an update is missing.
        assert [row["is_full"] for row in answer["steps"]] == [True, False, True]


@pytest.mark.filterwarnings("ignore:MXFP8 weights in layout 'modelopt':UserWarning")
@pytest.mark.parametrize(("weight_format", "layout"), CASES)
@pytest.mark.parametrize("name", models.CONFIGS)
def test_vllm_serves_what_was_trained(name, weight_format, layout, tmp_path, record):
    model = models.trained(name, weight_format)
    export_checkpoint(model, tmp_path, layout)
    prompts = models.text()[:, : models.PROMPT].tolist()
    request = dict(prompts=prompts, written=models.WRITTEN, vocabulary=models.VOCABULARY)
    answer = run("serve_with_vllm.py", tmp_path, timeout=600, input=json.dumps(request))
    assert len(answer["decoded"]) == 4 * model.config.num_hidden_layers  # q, k, v are one there
    values = models.quantized_weights(model).values()
    assert sum(map(math.prod, answer["decoded"])) == sum(value.numel() for value in values)
    error, bf16 = models.errors(torch.tensor(answer["logs"]), model)
    assert error < 0.3, (error, bf16)  # both round every result to BF16
    assert answer["texts"] == models.greedy(model)
    version = f"vLLM {answer['version']}, products replaced"
    result = f"{error:.3f} (BF16 {bf16:.3f})"
    record(version, name, weight_format, layout, len(values), result, f"{len(prompts)} equal")
