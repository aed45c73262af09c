"""torch.set_default_dtype, which frameworks change around models in BF16, changes no bits."""

import pytest
import torch
from torch.nn import Parameter

from fp4adam import FP4Adam
from fp4adam.tensors import backend
from helpers import QUANTIZERS, RECIPES, assert_identical, make_weight, random, set_grads, snapshot

NARROW = dict(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.float8_e4m3fn)


@pytest.fixture(autouse=True)
def default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


def train(default_dtype, quantizer, device, **options):
    torch.set_default_dtype(torch.float32)
    params = [
        make_weight(quantizer, device, (32, 32)),
        Parameter(random((5, 3), 0, device).bfloat16()),
    ]
    set_grads(params, seed=0)
    torch.set_default_dtype(default_dtype)
    optimizer = FP4Adam(params, **options)
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return snapshot(optimizer), norm, params[0].dequantize(torch.float32).detach()


PATHS = [("operators", q, NARROW) for q in QUANTIZERS.values()]
PATHS += [("kernels", q, {}) for q in RECIPES.values()]


@pytest.mark.parametrize(("path", "quantizer", "options"), PATHS)
def test_bits_stay(path, quantizer, options, device, monkeypatch):
    monkeypatch.setattr(backend, "uses_kernels", lambda d: path == "kernels" and d.type == device)
    actual = train(torch.bfloat16, quantizer, device, **options)
    assert_identical(actual, train(torch.float32, quantizer, device, **options))
