"""torch.set_default_dtype, which frameworks change around models in BF16, changes no bits."""

import pytest
import torch
from torch.nn import Parameter

from fp4adam import FP4Adam
from fp4adam.tensors import backend
from helpers import (
    QUANTIZERS,
    RECIPES,
    assert_identical,
    make_weight,
    random,
    set_grads,
    snapshot,
)

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


@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
def test_by_operators(quantizer, device, monkeypatch):
    monkeypatch.setattr(backend, "uses_kernels", lambda d: False)
    actual = train(torch.bfloat16, quantizer, device, **NARROW)
    assert_identical(actual, train(torch.float32, quantizer, device, **NARROW))


@pytest.mark.parametrize("quantizer", RECIPES.values(), ids=RECIPES)
def test_by_kernels(quantizer, device, monkeypatch):
    monkeypatch.setattr(backend, "uses_kernels", lambda d: d.type == device)
    actual = train(torch.bfloat16, quantizer, device)
    assert_identical(actual, train(torch.float32, quantizer, device))
