"""Weights in 8 bits without masters: each update rounds their codes stochastically."""

import copy

import pytest
import torch
from torch.nn import Parameter

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from fp4adam.optim.state_codec import dither_bits, round_to_codes_
from helpers import random, set_grads
from te_stand_ins import assert_bytes, te_tensor

FP8 = dict(exp_avg_dtype=torch.float8_e4m3fn, exp_avg_sq_dtype=torch.float8_e4m3fn)
QUANTIZERS = {
    "mxfp8": MXFP8Quantizer(),
    "mxfp8 2d": MXFP8Quantizer(two_dimensional=True, columnwise=False),
    "float8 block": Float8BlockQuantizer(),
    "float8 block 1d": Float8BlockQuantizer(two_dimensional=False),
}
OTHERS = {
    "nvfp4": NVFP4Quantizer(),
    "mxfp4": MXFP4Quantizer(),
    "float8": Float8Quantizer(force_pow_2_scales=True),
    "float8 block, any scale": Float8BlockQuantizer(force_pow_2_scales=False),
}
by_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)


def weight(quantizer, seed=0, shape=(64, 96)):
    return Parameter(quantizer.quantize(random(shape, seed, scale=0.05).bfloat16()))


def rounded(x, step):
    return round_to_codes_(x.clone(), dither_bits(0, x.numel(), step).master.view(x.shape))


def step(optimizer, seed):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    set_grads(params, seed)
    optimizer.step()


@by_quantizer
def test_codes_hold_what_values_are_rounded_to(quantizer):
    x = random((64, 128), 0) * 10.0 ** -torch.arange(4.0).repeat_interleave(32)
    new = rounded(x, 1)
    steps = x.abs().log2().floor().exp2() / 8
    assert ((new - x).abs() < steps).all() and not torch.equal(new, x)
    assert torch.equal(rounded(new, 2), new)
    # All but those that are subnormal in their block.
    is_normal = x.abs() >= x.abs().max() * 2.0**-14
    assert is_normal.float().mean() > 0.9
    for dtype in (torch.float32, torch.bfloat16):
        decoded = quantizer.quantize(new.to(dtype)).dequantize(torch.float32)
        assert torch.equal(decoded[is_normal], new[is_normal])


def test_rounding_is_right_on_average_and_keeps_what_is_not_finite():
    x = random((4096,), 0)
    mean = sum(rounded(x, i) for i in range(256)) / 256
    error = (mean - x) / (x.abs().log2().floor().exp2() / 8)
    assert error.abs().mean() < 0.04 and error.mean().abs() < 4e-3
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, -1.0])
    bits = rounded(special, 1).view(torch.int32)
    assert torch.equal(bits, special.view(torch.int32))


def test_small_updates_move_weights():
    # 1/400 of the gap between codes per step, which rounding to nearest never makes.
    quantizer = MXFP8Quantizer(columnwise=False)
    param = Parameter(quantizer.quantize(torch.full((256, 256), 1.5)))
    optimizer = FP4Adam([param], lr=0.125 / 400, weight_decay=0.0, master_weights=False, **FP8)
    for _ in range(80):
        param.grad = torch.ones(256, 256)
        optimizer.step()
    moved = 1.5 - param.detach().dequantize(torch.float32).mean().item()
    assert moved == pytest.approx(0.125 / 400 * 80, rel=0.05)


def test_states_take_the_bytes_of_moments_alone():
    param = weight(MXFP8Quantizer(columnwise=False))
    optimizer = FP4Adam([param], master_weights=False, states="8bit")
    step(optimizer, 0)
    states = optimizer.compact_state_dict()["state"][0].values()
    assert sum(t.nbytes for t in states if t.dim()) == param.numel() * (2 + 2 / 32)
    with pytest.raises(ValueError, match="without a master"):
        optimizer.get_unscaled_state(param, "master_param")


@pytest.mark.parametrize("quantizer", OTHERS.values(), ids=OTHERS)
def test_other_formats_need_masters(quantizer):
    own = weight(quantizer)
    with pytest.raises(ValueError, match=r"E4M3 codes and scales that are powers of two"):
        FP4Adam([own], master_weights=False)
    if isinstance(quantizer, NVFP4Quantizer):
        with pytest.raises(ValueError, match=r"master_weights must be True for .*NVFP4Tensor"):
            FP4Adam([te_tensor(quantizer, random((64, 96), 0).bfloat16())], master_weights=False)


@pytest.mark.parametrize(
    "quantizer",
    [MXFP8Quantizer(columnwise=False), Float8BlockQuantizer()],
    ids=["mxfp8", "float8 block"],
)
def test_tensors_of_transformer_engine_have_the_same_bits(quantizer, path_device):
    value = random((128, 128), 0, path_device, scale=0.05).bfloat16()
    own, theirs = Parameter(quantizer.quantize(value)), te_tensor(quantizer, value)
    optimizers = [FP4Adam([p], lr=1e-3, master_weights=False, **FP8) for p in (own, theirs)]
    for seed in range(3):
        for optimizer in optimizers:
            step(optimizer, seed)
    assert_bytes(theirs, te_tensor(quantizer, own.detach().dequantize(torch.float32).bfloat16()))


@pytest.mark.parametrize("states", ["32bit", "16bit", "8bit"])
def test_masters_come_and_go_with_a_checkpoint(states):
    """A loaded master is dropped, or starts from the weight; moments stay."""
    param = weight(MXFP8Quantizer())
    with_masters = FP4Adam([param], lr=1e-3, states=states)
    step(with_masters, 0)
    codes = param.detach().clone()
    without = FP4Adam([param], lr=1e-3, states=states, master_weights=False)
    without.load_state_dict(copy.deepcopy(with_masters.state_dict()))
    assert torch.equal(param.dequantize(torch.float32), codes.dequantize(torch.float32))
    step(without, 1)
    assert without.state[param]["step"] == 2 and "master_param" not in without.state[param]
    now = param.detach().dequantize(torch.float32)
    again = FP4Adam([param], lr=0.0, states=states)
    again.load_state_dict(without.state_dict())
    again.param_groups[0]["lr"] = 0.0
    step(again, 2)
    assert torch.equal(again.get_unscaled_state(param, "master_param"), now)
