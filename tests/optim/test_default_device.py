"""torch.set_default_device leaves steps alone: what helps them is made where it is needed."""

import pytest
import torch
from torch.nn import Parameter

from fp4adam import FP4Adam
from fp4adam.tensors import backend
from helpers import RECIPES, assert_identical, make_weight, random, set_grads, snapshot

NARROW = dict(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.float8_e4m3fn)


def train(default_device, quantizer, device):
    params = [
        make_weight(quantizer, device, (32, 32)),
        Parameter(random((5, 3), 0, device).bfloat16()),
    ]
    set_grads(params, seed=0)
    torch.set_default_device(default_device)
    try:
        optimizer = FP4Adam(params, **NARROW)
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        return snapshot(optimizer), norm, params[0].dequantize(torch.float32).detach()
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("kernels", [False, True], ids=["operators", "kernels"])
@pytest.mark.parametrize("quantizer", RECIPES.values(), ids=RECIPES)
def test_helpers_of_a_step_are_on_real_devices(quantizer, kernels, device, monkeypatch):
    monkeypatch.setattr(backend, "uses_kernels", lambda d: False)
    expected = train(None, quantizer, device)
    monkeypatch.setattr(backend, "uses_kernels", lambda d: kernels and d.type == device)
    assert_identical(train("meta", quantizer, device), expected)
