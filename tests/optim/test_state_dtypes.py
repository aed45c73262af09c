"""Moments and masters in 8 and 16 bits: their sizes, checkpoints, and that training gets on."""

import copy
import io

import pytest
import torch
from torch.optim import AdamW

from fp4adam import FP4Adam, FusedAdam, NVFP4Quantizer
from helpers import (
    all_params,
    assert_identical,
    make_params,
    quantized,
    take_steps,
)

QUANTIZER = NVFP4Quantizer()
MOMENTS = ("exp_avg", "exp_avg_sq")
NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
by_dtype = pytest.mark.parametrize("dtype", NARROW, ids=str)


def options(dtype, dtype_sq=None):
    return dict(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype_sq or dtype)


def make(dtype, device, params=None, **kwargs):
    params = make_params(QUANTIZER, device) if params is None else params
    return FP4Adam(params, lr=1e-2, **options(dtype), **kwargs)


def assert_same_states(actual, expected):
    for a, b in zip(all_params(actual), all_params(expected), strict=True):
        assert_identical(dict(actual.state[a]), dict(expected.state[b]))


def assert_same_params(actual, expected):
    for a, b in zip(all_params(actual), all_params(expected), strict=True):
        a, b = a.detach(), b.detach()
        if quantized([b]):
            a, b = a.dequantize(torch.float32), b.dequantize(torch.float32)
        assert torch.equal(a, b)


def test_float64_parameters_keep_float64_moments():
    param = torch.nn.Parameter(torch.ones(40, dtype=torch.float64))
    optimizer = make(torch.float8_e4m3fn, "cpu", [param])
    take_steps(optimizer, range(2))
    assert all(optimizer.state[param][name].dtype == torch.float64 for name in MOMENTS)
    fresh = make(torch.float8_e4m3fn, "cpu", [param])
    fresh.load_state_dict(optimizer.state_dict())
    assert_same_states(fresh, optimizer)


@by_dtype
def test_adamw_checkpoint_loads(dtype, device):
    param = torch.nn.Parameter(torch.linspace(-1, 1, 100, device=device).view(4, 25))
    theirs = AdamW([param])
    take_steps(theirs, range(3))
    ours = FP4Adam([param], **options(dtype))
    ours.load_state_dict(theirs.state_dict())
    saved = ours.state_dict()["state"][0]
    for name in MOMENTS:
        tolerance = 2.0**-3 * theirs.state[param][name].abs().max().item()
        torch.testing.assert_close(saved[name], theirs.state[param][name], rtol=0, atol=tolerance)
    theirs.load_state_dict(ours.state_dict())
    take_steps(theirs, [3])


def test_channels_last_parameters_have_blocks_in_the_order_of_memory(device):
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(4, 8, 3, 3, generator=generator).to(device)
    results = []
    for fused in (None, False):
        param = torch.nn.Parameter(value.to(memory_format=torch.channels_last))
        optimizer = make(torch.float8_e4m3fn, device, [param], fused=fused)
        take_steps(optimizer, range(3))
        assert optimizer.state[param]["exp_avg"].stride() == param.stride()
        results.append(optimizer)
        resumed = make(torch.float8_e4m3fn, device, [param])
        resumed.load_state_dict(optimizer.state_dict())
        for name in MOMENTS:
            expected = optimizer.state_dict()["state"][0][name]
            assert torch.equal(resumed.state_dict()["state"][0][name], expected)
    assert_same_states(*results)


def test_amsgrad_needs_float32_second_moments(device):
    param = torch.nn.Parameter(torch.zeros(3, device=device))
    with pytest.raises(NotImplementedError, match="exp_avg_sq_dtype must be float32 with amsgrad"):
        FusedAdam([param], amsgrad=True, exp_avg_sq_dtype=torch.bfloat16)
    optimizer = FusedAdam([param], exp_avg_sq_dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="got torch.bfloat16"):
        optimizer.add_param_group({"params": [torch.zeros(2)], "amsgrad": True})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(NotImplementedError, match="with amsgrad"):
        optimizer.load_state_dict(AdamW([param], amsgrad=True).state_dict())
    optimizer.param_groups[0]["amsgrad"] = True
    param.grad = torch.ones_like(param)
    with pytest.raises(NotImplementedError, match="with amsgrad"):
        optimizer.step()
    assert not param.any()
    FusedAdam([param], amsgrad=True, exp_avg_dtype=torch.bfloat16).step()


def test_states_of_another_storage_are_refused(device):
    """Kernels take addresses and would misread them."""
    param = torch.nn.Parameter(torch.ones(64, device=device))
    optimizer = make(torch.float8_e4m3fn, device, [param])
    take_steps(optimizer, [0])
    state = optimizer.state[param]
    codes, scale = state["exp_avg"], state.pop("exp_avg_scale")
    with pytest.raises(RuntimeError, match="exp_avg_scale must be contiguous .* got None"):
        take_steps(optimizer, [1])
    state["exp_avg_scale"], state["exp_avg"] = scale, torch.zeros(64, device=device)
    with pytest.raises(RuntimeError, match="exp_avg must be dense and stored as torch.uint8"):
        take_steps(optimizer, [1])
    state["exp_avg"] = codes
    take_steps(optimizer, [1])


@pytest.mark.parametrize("target", [torch.float32, *NARROW], ids=str)
@by_dtype
def test_compact_checkpoint_loads_into_any_storage(dtype, target, device):
    optimizer = make(dtype, device)
    take_steps(optimizer, range(2))
    file = io.BytesIO()
    torch.save(optimizer.compact_state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = make(target, device, copy.deepcopy(all_params(optimizer)))
    resumed.load_state_dict(saved)
    if target == dtype:
        assert_same_states(resumed, optimizer)
        take_steps(optimizer, [4, 5])
        take_steps(resumed, [4, 5])
        assert_same_states(resumed, optimizer)
        assert_same_params(resumed, optimizer)
    else:
        # As if the numbers had been saved.
        again = make(target, device, copy.deepcopy(all_params(optimizer)))
        again.load_state_dict(optimizer.state_dict())
        assert_same_states(resumed, again)


def test_compact_checkpoint_takes_the_promised_bytes(device):
    param = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16, device=device))
    for dtype, size in (
        (torch.bfloat16, 4),
        (torch.float16, 4 + 2 / 32),
        (torch.uint8, 2 + 2 / 32),
    ):
        optimizer = make(dtype, device, [param], store_param_remainders=True)
        take_steps(optimizer, [0])
        values = optimizer.compact_state_dict()["state"][0]
        del values["step"]
        assert sum(t.nbytes for t in values.values()) == (size + 2) * param.numel()


DAMAGE = {
    "scales lost": (lambda v: v.pop("exp_avg_scale"), "floating point tensor, got torch.uint8"),
    "scales cut": (
        lambda v: v.update(exp_avg_scale=v["exp_avg_scale"][1:]),
        "scales of exp_avg of",
    ),
    "scales cast": (
        lambda v: v.update(exp_avg_scale=v["exp_avg_scale"].float()),
        "uint8 scales, got torch.float32",
    ),
    "codes cast": (lambda v: v.update(exp_avg=v["exp_avg"].int()), "known dtype beside exp_avg_sc"),
    "codes cut": (lambda v: v.update(exp_avg_sq=v["exp_avg_sq"][1:]), "must have shape"),
    "remainder cast": (
        lambda v: v.update(param_remainder=v["param_remainder"].float()),
        "param_remainder of parameter 0 must be int16, got torch.float32",
    ),
    "remainder cut": (
        lambda v: v.update(param_remainder=v["param_remainder"][1:]),
        "param_remainder of parameter 0 must have shape",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_compact_checkpoint_changes_nothing(damage, message, device):
    optimizer = make(
        torch.float8_e4m3fn, device, bfloat16_params(device, 1), store_param_remainders=True
    )
    take_steps(optimizer, [0])
    before = copy.deepcopy(optimizer)
    wrong = copy.deepcopy(optimizer.compact_state_dict())
    damage(wrong["state"][0])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(wrong)
    assert_same_states(optimizer, before)


def bfloat16_params(device, n=2):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(40, 3, generator=generator).bfloat16().to(device))
        for _ in range(n)
    ]


def masters(optimizer):
    return [values["master_param"] for values in optimizer.state_dict()["state"].values()]


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("source", [True, False], ids=["from remainders", "from masters"])
@pytest.mark.parametrize("target", [True, False], ids=["to remainders", "to masters"])
def test_masters_survive_a_checkpoint_in_float32(model_first, source, target, device):
    params = bfloat16_params(device)
    optimizer = FP4Adam(params, lr=1e-2, store_param_remainders=source)
    take_steps(optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [param.detach().clone() for param in params]
    fresh = [torch.nn.Parameter(torch.ones_like(param)) for param in params]
    resumed = FP4Adam(fresh, lr=1e-2, store_param_remainders=target)
    for is_model in (model_first, not model_first):
        if is_model:
            for param, weight in zip(fresh, weights, strict=True):
                param.data.copy_(weight)
        else:
            resumed.load_state_dict(saved)
    if target and model_first:  # as small as before at once
        saved = resumed.compact_state_dict()["state"].values()
        assert all("master_param" not in state for state in saved)
        for param, twin in zip(fresh, params, strict=True):
            remainder = optimizer.state[twin].get("param_remainder")
            if remainder is not None:
                assert torch.equal(resumed.state[param]["param_remainder"], remainder)
    take_steps(optimizer, [9])
    take_steps(resumed, [9])
    saved = resumed.compact_state_dict()["state"].values()
    assert all(("master_param" in state) != target for state in saved)
    assert_identical(masters(resumed), masters(optimizer))


def narrow_masters(device, params=None, dtype=torch.float16, **kwargs):
    params = make_params(QUANTIZER, device) if params is None else params
    return FP4Adam(params, lr=1e-2, master_weight_dtype=dtype, **kwargs)


@pytest.mark.parametrize("target", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("compact", [True, False])
def test_masters_go_from_one_storage_to_another(compact, source, target, device):
    optimizer = narrow_masters(device, dtype=source)
    take_steps(optimizer, range(2))
    saved = optimizer.compact_state_dict() if compact else optimizer.state_dict()
    resumed = narrow_masters(device, copy.deepcopy(all_params(optimizer)), target)
    resumed.load_state_dict(copy.deepcopy(saved))
    mine, theirs = (o.state_dict()["state"] for o in (resumed, optimizer))
    for key, values in theirs.items():
        if "master_param" in values:
            exact = source == torch.float16 or target == torch.float32
            torch.testing.assert_close(
                mine[key]["master_param"],
                values["master_param"],
                rtol=0 if exact else 2**-11,
                atol=0,
            )
    if source == target:
        take_steps(optimizer, [5])
        take_steps(resumed, [5])
        assert_same_params(resumed, optimizer)
        if compact:
            assert_same_states(resumed, optimizer)
