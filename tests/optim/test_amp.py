"""FP4Adam under automatic mixed precision: scaled gradients, overflows, clipping, autocast."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from fp4adam import FP4Adam, QuantizedTensor, Quantizer
from helpers import (
    RECIPES,
    assert_bytes_are_of_masters,
    assert_identical,
    make_mlp,
    make_params,
    mlp_loss,
    quantized,
    set_grads,
    snapshot,
    take_steps,
)

every_recipe = pytest.mark.parametrize("quantizer", RECIPES.values(), ids=RECIPES.keys())
half_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SCALE = 2.0**10


def scaler_takes(dtype: torch.dtype, device: str) -> bool:
    """On a GPU, torch 2.11 has no check of BF16 gradients; on a CPU it has."""
    grad = torch.zeros(1, dtype=dtype, device=device)
    one, found_inf = (torch.full((1,), x, device=device) for x in (1.0, 0.0))
    try:
        torch._amp_foreach_non_finite_check_and_unscale_([grad], found_inf, one)
    except NotImplementedError:
        return False
    return True


def skip_unless_scaler_takes(dtype: torch.dtype, device: str) -> None:
    if not scaler_takes(dtype, device):
        pytest.skip(f"torch {torch.__version__} does not scale {dtype} gradients on this device")


def make_scalable_params(quantizer: Quantizer, device: str, dtype: torch.dtype) -> list[Parameter]:
    skip_unless_scaler_takes(dtype, device)
    params = make_params(quantizer, device, dtype)
    return [param for param in params if scaler_takes(param.dtype, device)]


def make_scaler(device: str, **options: Any) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler(device, init_scale=SCALE, **options)
    # A scaler has its scale on the device once it has scaled something.
    scaler.scale(torch.zeros((), device=device))
    return scaler


def assert_unchanged(optimizer: FP4Adam, before: dict[str, Any]) -> None:
    """All is as in the snapshot, or as before a first step where there was no state yet."""
    after = snapshot(optimizer)
    for name in ("params", "sizes", "options", "defaults"):
        assert_identical(after[name], before[name])
    for initial, old, new in zip(before["values"], before["state"], after["state"], strict=True):
        if old:
            assert_identical(new, old)
            continue
        assert new["step"] == 0
        assert not new["exp_avg"].any() and not new["exp_avg_sq"].any()
        if initial is not None:
            assert_identical(new["master_param"], initial.float())


# Scaled gradients


@every_recipe
@half_dtypes
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("first", [True, False], ids=["at the first step", "later"])
def test_overflow_changes_nothing_at_all(
    quantizer: Quantizer, dtype: torch.dtype, bad: float, first: bool, device: str
) -> None:
    params = make_scalable_params(quantizer, device, dtype)
    optimizer = FP4Adam(params)
    if not first:
        take_steps(optimizer, range(2))
    before = snapshot(optimizer)
    scaler = make_scaler(device)
    set_grads(params, seed=2)
    params[-1].grad.view(-1)[17] = bad
    scaler.step(optimizer)
    scaler.update()
    assert_unchanged(optimizer, before)
    assert scaler.get_scale() == SCALE / 2
    set_grads(params, seed=2)
    scaler.step(optimizer)
    assert all(optimizer.state[param]["step"] == (1 if first else 3) for param in params)


@every_recipe
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("on_device", [True, False], ids=["device", "cpu"])
def test_grad_scale_may_be_any_one_element_tensor(
    quantizer: Quantizer, shape: tuple[int, ...], on_device: bool, device: str
) -> None:
    params = make_params(quantizer, device)
    scaled, expected = FP4Adam(params), FP4Adam(copy.deepcopy(params))
    scale = torch.full(shape, 2.0**6, dtype=torch.float64, device=device if on_device else "cpu")
    for seed in range(2):
        set_grads(params, seed, scale=2.0**6)
        grads = [param.grad.clone() for param in params]
        scaled.grad_scale, scaled.found_inf = scale, torch.zeros_like(scale)
        scaled.step()
        assert_identical([param.grad for param in params], grads)
        take_steps(expected, [seed])
    assert_identical(snapshot(scaled), snapshot(expected))


def test_gradients_out_of_reach_of_fp16_are_unscaled_in_fp32(device: str) -> None:
    """Dividing by the scale in FP16 would flush them to zero."""
    params = quantized(make_params(RECIPES["mxfp8"], device, torch.float16))
    optimizer = FP4Adam(params, betas=(0.0, 0.0), eps=0.0)
    optimizer.grad_scale = torch.tensor([2.0**16], device=device)
    for param in params:
        param.grad = torch.full(param.shape, 2.0**-20, dtype=torch.float16, device=device)
    optimizer.step()
    for param in params:
        state = optimizer.state[param]
        assert (state["exp_avg"] == 2.0**-36).all()
        assert (state["exp_avg_sq"] == 2.0**-72).all()


# Whole loops


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_training_with_scaler_learns(
    quantizer: Quantizer, dtype: torch.dtype, device: str
) -> None:
    """One overflow on the way costs one step."""
    skip_unless_scaler_takes(dtype, device)
    model = make_mlp(quantizer, device, dtype)
    optimizer = FP4Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=SCALE, growth_interval=10)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = mlp_loss(model, seed=step % 4)
        losses.append(loss.item())
        scaler.scale(loss * (math.inf if step == 5 else 1.0)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert losses[-1] < 0.6 * losses[0]
    assert scaler.get_scale() == SCALE  # halved once, doubled once
    for param in model.parameters():
        assert optimizer.state[param]["step"] == 19
        assert param.grad.dtype == param.dtype == dtype
        assert isinstance(param, QuantizedTensor) or param.dim() == 1
    assert_bytes_are_of_masters(optimizer)
