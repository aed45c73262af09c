"""States in 8 and 16 bits: bytes, statistics, and what is no sequence of the step table."""

import copy
import dataclasses

import pytest
import torch
from torch.nn import Parameter
from torch.optim import AdamW

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    FusedAdam,
    MasterWeightOptimizer,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from fp4adam.optim.remainder import NAN, complete, is_in_reach, largest_values, split_off, units
from fp4adam.optim.state_codec import dither_bits, round_to_codes_
from helpers import RECIPES, all_params, assert_identical, random, snapshot, take_steps, value_of
from te_stand_ins import assert_bytes, te_tensor

FP8 = torch.float8_e4m3fn
MOMENTS = dict(exp_avg_dtype=FP8, exp_avg_sq_dtype=FP8)


def weight(quantizer, seed=0, shape=(64, 96)):
    return Parameter(quantizer.quantize(random(shape, seed, scale=0.02)))


# Which storage


@pytest.mark.table
@pytest.mark.parametrize(
    ("options", "dtypes", "of_bfloat16"),
    [
        (dict(states="8bit"), (torch.int8, torch.uint8, torch.uint8), torch.int16),
        (dict(states="16bit"), (torch.float16, torch.bfloat16, torch.bfloat16), torch.float16),
        (dict(states="32bit"), (torch.float32,) * 3, torch.float32),
        (
            dict(states="8bit", master_weight_dtype=torch.float16),
            (torch.float16, torch.uint8, torch.uint8),
            torch.float16,
        ),
        (dict(states="factored"), (torch.int8, torch.uint8, torch.float32), torch.int16),
        # Single options go before the word; BF16 parameters have remainders of their own.
        (
            dict(states="8bit", exp_avg_dtype=torch.bfloat16),
            (torch.int8, torch.bfloat16, torch.uint8),
            torch.int16,
        ),
        (dict(master_weight_dtype=torch.int8), (torch.int8, *[torch.float32] * 2), torch.float32),
    ],
    ids=str,
)
def test_options_choose_the_storage(options, dtypes, of_bfloat16):
    param, plain = weight(NVFP4Quantizer()), Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
    double = Parameter(torch.ones(40, dtype=torch.float64))
    optimizer = FP4Adam([param, plain, double], **options)
    take_steps(optimizer, [0])
    found = [optimizer.state[param][n].dtype for n in ("master_param", "exp_avg", "exp_avg_sq")]
    assert tuple(found) == dtypes
    state = optimizer.state[plain]
    assert state.get("param_remainder", state.get("master_param")).dtype == of_bfloat16
    assert optimizer.state[double]["exp_avg"].dtype == torch.float64
    plain.data, state = plain.data.half(), optimizer.state[param]
    state["param_remainder"] = state.pop("master_param").short()  # as if it had been BF16
    take_steps(optimizer, [1])
    assert not any("param_remainder" in state for state in optimizer.state.values())


# What is refused


def test_amsgrad_needs_float32_second_moments():
    params = [Parameter(torch.zeros(n)) for n in (2, 3)]
    optimizer = FusedAdam([{"params": [p]} for p in params], exp_avg_sq_dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="got torch.bfloat16"):
        optimizer.add_param_group({"params": [torch.zeros(2)], "amsgrad": True})
    assert len(optimizer.param_groups) == 2
    other = AdamW([{"params": [p], "amsgrad": p is params[1]} for p in params])
    with pytest.raises(NotImplementedError, match="with amsgrad"):
        optimizer.load_state_dict(other.state_dict())
    optimizer.param_groups[1]["amsgrad"] = True
    with pytest.raises(NotImplementedError, match="with amsgrad"):
        take_steps(optimizer, [0])
    assert not params[1].any()


def test_factored_second_moments_are_of_quantized_matrices():
    shapes = (64, 96), (32, 64), (2, 16, 32)
    params = [weight(NVFP4Quantizer(), 0, shape) for shape in shapes]
    optimizer = FP4Adam([*params, Parameter(torch.ones(64, 96))], states="factored")
    take_steps(optimizer, [0, 1])
    found = [state["exp_avg_sq"] for state in optimizer.state.values()]
    assert [tuple(each.shape) for each in found] == [(64,), (32,), (2, 16, 32), (64, 96)]
    assert optimizer.state_nbytes()[params[0]] == 64 * 96 * 2 + 64 * 3 + 4 * (64 + 96 + 1)
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg_sq_rows"] = found[0].repeat_interleave(2)[::2]
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[params[0]]["exp_avg_sq"], found[0])
    for state in saved["state"].values():
        state["exp_avg_sq"].mul_(4)  # another optimizer's, of which these are no factors
    optimizer.load_state_dict(saved)
    for param, before in zip(params[:2], found, strict=False):
        torch.testing.assert_close(optimizer.state[param]["exp_avg_sq"], 4 * before)
    optimizer.param_groups[0]["params"] = [Parameter(torch.ones(2, 16, 32))]  # of one of them
    take_steps(optimizer, [2])


OTHERS = {
    "nvfp4": NVFP4Quantizer(),
    "mxfp4": MXFP4Quantizer(),
    "float8": Float8Quantizer(force_pow_2_scales=True),
    "float8 block, any scale": Float8BlockQuantizer(force_pow_2_scales=False),
}


@pytest.mark.parametrize("quantizer", OTHERS.values(), ids=OTHERS)
def test_other_formats_need_masters(quantizer):
    with pytest.raises(ValueError, match=r"E4M3 codes and scales that are powers of two"):
        FP4Adam([weight(quantizer)], master_weights=False)
    if isinstance(quantizer, NVFP4Quantizer):
        with pytest.raises(ValueError, match=r"master_weights must be True for .*NVFP4Tensor"):
            FP4Adam([te_tensor(quantizer, random((64, 96), 0).bfloat16())], master_weights=False)


# Masters that are int8 remainders


def test_remainders_keep_what_is_not_finite():
    values = random((64, 128), 0, scale=0.02)
    param = NVFP4Quantizer().quantize(values)
    values[3, 5], values[4, 6] = torch.nan, torch.inf
    remainder = split_off(param, values)
    assert (remainder == NAN).nonzero().tolist() == [[3, 5], [4, 6]]
    assert complete(param, remainder)[remainder == NAN].isnan().all()
    assert not is_in_reach(param, param.dequantize(torch.float32) - 128 * units(param))
    assert largest_values(NVFP4Quantizer().quantize(torch.zeros(16, 32))).isinf().all()


@pytest.mark.parametrize("rounding", ["floor", "even", "up"])
def test_remainders_reach_the_masters_of_saturated_codes(rounding):
    """With "floor" weights up to 8 times the scale have the code of 6 times."""
    values = torch.linspace(-1.999, 1.999, 128).view(2, 64)[:, torch.randperm(64)]
    values = values.repeat(16, 1)
    weight = MXFP4Quantizer(scale_rounding=rounding).quantize(values)
    master = complete(weight, split_off(weight, values))
    # Half a gap of 2 is 119.5 units, and scales are at most 1/2.
    assert (master - values).abs().max() <= 0.5 * 0.5 * 2 / 119.5
    assert units(weight).max().item() == pytest.approx(2 / 478)


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("quantizer", RECIPES.values(), ids=RECIPES)
def test_remainders_go_to_one_direction_and_to_any_optimizer(quantizer, model_first):
    small = FP4Adam([weight(quantizer)], lr=1e-3, states="8bit")
    take_steps(small, range(6))  # scales have moved by then
    one_way = weight(dataclasses.replace(quantizer, columnwise=False), 1)
    other = FP4Adam([one_way], lr=1e-3, states="8bit")
    still = dict(lr=1e-12, weight_decay=0.0)
    any_kind = MasterWeightOptimizer([weight(quantizer, 2)], AdamW, **still)
    whole = copy.deepcopy(small.state_dict())
    whole["param_groups"][0].update(still)
    for optimizer, saved in ((other, small.compact_state_dict()), (any_kind, whole)):
        for loads_model in (model_first, not model_first):
            if loads_model:
                with torch.no_grad():
                    all_params(optimizer)[0].copy_(all_params(small)[0].detach())
            else:
                optimizer.load_state_dict(saved)
    take_steps(any_kind, [7])
    found = any_kind.state_dict()["state"][0]["master_param"]
    torch.testing.assert_close(found, whole["state"][0]["master_param"], rtol=0, atol=1e-7)
    for optimizer in (small, other):
        take_steps(optimizer, [8])
    assert_identical(snapshot(other)["state"], snapshot(small)["state"])


@pytest.mark.filterwarnings("error:the masters of")
def test_loaded_remainders_of_another_scale_are_dropped_aloud():
    """Codes and scales of blocks are the same; the last of what they complete is not."""
    value = random((64, 96), 0, scale=0.02)
    params = [Parameter(NVFP4Quantizer().quantize(value * factor)) for factor in (1, 2)]
    optimizer = FP4Adam(params[:1], lr=0.0, states="8bit")
    take_steps(optimizer, [1])
    for states in ("8bit", "32bit"):
        other = FP4Adam(params[1:], states=states)
        with pytest.warns(UserWarning, match="the masters of 1 weights restart"):
            other.load_state_dict(optimizer.compact_state_dict())
            take_steps(other, [2])
            other.load_state_dict(optimizer.compact_state_dict())
        other.reset_master_weights()
        assert "weight_digest" not in other.state[params[1]]
        take_steps(other, [2])


# Weights in 8 bits without masters


def test_rounding_of_weights_keeps_what_is_not_finite():
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, -1.0])
    dither = dither_bits(0, special.numel(), 1).master
    assert_identical(round_to_codes_(special.clone(), dither), special)


@pytest.mark.parametrize("quantizer", [MXFP8Quantizer(columnwise=False), Float8BlockQuantizer()])
def test_tensors_of_transformer_engine_have_the_same_bits(quantizer, path_device):
    value = random((128, 128), 0, path_device, scale=0.05).bfloat16()
    own, theirs = Parameter(quantizer.quantize(value)), te_tensor(quantizer, value)
    for param in (own, theirs):
        take_steps(FP4Adam([param], lr=1e-3, master_weights=False, **MOMENTS), range(3))
    assert_bytes(theirs, te_tensor(quantizer, own.detach().dequantize(torch.float32).bfloat16()))


@pytest.mark.parametrize("states", ["32bit", "16bit", "8bit"])
def test_masters_come_and_go_with_a_checkpoint(states):
    """A loaded master is dropped, or starts from the weight; moments stay."""
    param = weight(MXFP8Quantizer())
    with_masters = FP4Adam([param], lr=1e-3, states=states)
    take_steps(with_masters, [0])
    before = value_of(param)
    without = FP4Adam([param], lr=1e-3, states=states, master_weights=False)
    assert without.store_param_remainders  # or small updates would never move BF16 parameters
    without.load_state_dict(copy.deepcopy(with_masters.state_dict()))
    assert_identical(value_of(param), before)
    take_steps(without, [1])
    assert without.state[param]["step"] == 2 and "master_param" not in without.state[param]
    now = value_of(param)
    again = FP4Adam([param], states=states)
    again.load_state_dict(without.state_dict())
    again.param_groups[0]["lr"] = 0.0
    take_steps(again, [2])
    assert torch.equal(again.get_unscaled_state(param, "master_param"), now)
