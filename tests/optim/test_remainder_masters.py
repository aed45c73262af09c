"""Training with masters that are int8 remainders: what happens to them between and around steps."""

import copy
import dataclasses

import pytest
import torch
from torch.nn import Parameter

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    FusedAdam,
    MasterWeightOptimizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from fp4adam.optim import master_weights
from fp4adam.optim.masters import DIGEST
from fp4adam.optim.remainder import complete, units
from fp4adam.tensors import backend

FP8 = torch.float8_e4m3fn
SMALL = dict(master_weight_dtype=torch.int8, exp_avg_dtype=FP8, exp_avg_sq_dtype=FP8)
QUANTIZERS = {
    "nvfp4": NVFP4Quantizer(),
    "nvfp4 1d": NVFP4Quantizer(two_dimensional=False),
    "mxfp8": MXFP8Quantizer(),
    "float8 block": Float8BlockQuantizer(),
    "float8": Float8Quantizer(),
    "float8 delayed": Float8Quantizer(scaling="delayed", amax_history_len=3),
}
by_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
SHAPES = (64, 64), (32, 96)


def values(seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 0.02 for shape in shapes]


def make(device, quantizer=QUANTIZERS["nvfp4"], scale_groups=None, **options):
    params = [Parameter(quantizer.quantize(v.to(device))) for v in values()]
    options = {"lr": 1e-3, **SMALL, **options}
    if scale_groups:
        options["scale_groups"] = [params]
    return FP4Adam(params, **options)


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def step(optimizer, seed, present=(0, 1)):
    for i, (param, grad) in enumerate(zip(params_of(optimizer), values(seed), strict=True)):
        param.grad = grad.to(param.device) if i in present else None
    optimizer.step()


def masters(optimizer):
    """FP32 masters, which nothing but the state and the weight's bytes decides."""
    state = optimizer.state
    return [complete(p.detach(), state[p]["master_param"]) for p in params_of(optimizer)]


def weights(optimizer):
    return [p.detach().dequantize() for p in params_of(optimizer)]


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def assert_same(actual, expected):
    assert_equal(weights(actual), weights(expected))
    for a, b in zip(params_of(actual), params_of(expected), strict=True):
        a, b = actual.state[a], expected.state[b]
        assert a.keys() == b.keys()
        for name, value in b.items():
            assert a[name].dtype == value.dtype and torch.equal(a[name], value), name


@by_quantizer
@pytest.mark.parametrize("scale_groups", [False, True])
def test_kernels_and_operators_agree(quantizer, scale_groups, device, monkeypatch):
    if scale_groups and quantizer.layout.tensor_scale != "current":
        pytest.skip("only amaxes of current values are shared")
    optimizers = []
    for kernels in (True, False):
        uses = lambda d, kernels=kernels: kernels and d.type == device  # noqa: E731
        monkeypatch.setattr(backend, "uses_kernels", uses)
        optimizer = make(device, quantizer, scale_groups)
        # With all gradients, and with one, which leaves members of a group to operators.
        for seed, present in ((1, (0, 1)), (2, (0,)), (3, (0, 1))):
            step(optimizer, seed, present)
        optimizers.append(optimizer)
    assert_same(*optimizers)
    assert all(
        optimizers[0].state[p]["master_param"].dtype == torch.int8 for p in params_of(optimizers[0])
    )


@by_quantizer
@pytest.mark.parametrize("model_first", [True, False])
def test_a_resumed_run_may_keep_one_direction(quantizer, model_first, device):
    optimizer = make(device, quantizer)
    other = make(device, dataclasses.replace(quantizer, columnwise=False))
    step(optimizer, 1)

    def load_model():
        with torch.no_grad():
            for param, value in zip(params_of(other), params_of(optimizer), strict=True):
                param.copy_(value)

    loads = [load_model, lambda: other.load_state_dict(optimizer.compact_state_dict())]
    for load in loads if model_first else reversed(loads):
        load()
    step(optimizer, 2)
    step(other, 2)
    assert_same(other, optimizer)


def test_state_dicts_have_whole_masters(device):
    optimizer = make(device)
    step(optimizer, 1)
    states = optimizer.state_dict()["state"]
    for state, master in zip(states.values(), masters(optimizer), strict=True):
        assert state["master_param"].dtype == torch.float32
        assert torch.equal(state["master_param"], master)
        assert DIGEST not in state
    compact = optimizer.compact_state_dict()["state"][0]
    assert compact["master_param"].dtype == torch.int8 and compact[DIGEST].dtype == torch.int64


def test_from_fp32_masters_and_back(device):
    full = make(device, master_weight_dtype=torch.float32)
    for seed in (1, 2):
        step(full, seed)
    small = make(device)
    _copy_weights(small, full)
    small.load_state_dict(full.state_dict())
    small.param_groups[0]["lr"] = 1e-9
    step(small, 3)
    for a, p in zip(masters(small), params_of(full), strict=True):
        expected = full.state[p]["master_param"]
        assert (a - expected).abs().max() < 2e-3 * expected.abs().max()
    step(small, 4)
    back = make(device, master_weight_dtype=torch.float32)
    _copy_weights(back, small)
    back.load_state_dict(small.state_dict())
    expected = masters(small)
    back.param_groups[0]["lr"] = 1e-12
    step(back, 5)
    for p, master in zip(params_of(back), expected, strict=True):
        assert (back.state[p]["master_param"] - master).abs().max() < 1e-7


@by_quantizer
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("of", ["float32", "float16", "any optimizer"])
def test_other_masters_continue_from_remainders(quantizer, model_first, of):
    small = make("cpu", quantizer)
    for seed in range(6):  # scales have moved by then
        step(small, seed)
    options = {"lr": 1e-12, "weight_decay": 0.0}
    if of == "any optimizer":
        params = [Parameter(quantizer.quantize(v)) for v in values(9)]
        other = MasterWeightOptimizer(params, torch.optim.AdamW, **options)
    else:
        other = make("cpu", quantizer, master_weight_dtype=getattr(torch, of), **options)
    saved = copy.deepcopy(small.state_dict())
    for group in saved["param_groups"]:
        group.update(options)
    loads = [lambda: _copy_weights(other, small), lambda: other.load_state_dict(saved)]
    for load in loads if model_first else reversed(loads):
        load()
    for param, expected in zip(params_of(other), params_of(small), strict=True):
        assert torch.equal(param.dequantize(), expected.dequantize())
    step(other, 7)
    close = {"rtol": 2**-10, "atol": 0} if of == "float16" else {"rtol": 0, "atol": 1e-7}
    states = other.state_dict()["state"].values()
    for state, master in zip(states, masters(small), strict=True):
        torch.testing.assert_close(state["master_param"], master, **close)


def _copy_weights(target, source):
    with torch.no_grad():
        for a, b in zip(params_of(target), params_of(source), strict=True):
            a.copy_(b.detach())


def test_masters_that_are_set_decide(device):
    optimizer = make(device, lr=1e-12)
    step(optimizer, 1)
    param, new = params_of(optimizer)[0], values(9)[0].to(device)
    optimizer.set_scaled_state(param, "master_param", new)
    assert torch.equal(optimizer.get_unscaled_state(param, "master_param"), new)
    step(optimizer, 2)
    read = optimizer.get_unscaled_state(param, "master_param")
    assert read.dtype == torch.float32 and (read - new).abs().max() < 2e-3 * new.abs().max()


def test_what_cannot_be_is_refused():
    plain = [Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))]
    # Beside quantized weights, BF16 ones have whole masters, or remainders of their own.
    for options, name in (
        ({}, "master_param"),
        ({"store_param_remainders": True}, "param_remainder"),
    ):
        optimizer = FP4Adam(plain, master_weight_dtype=torch.int8, **options)
        plain[0].grad = torch.ones_like(plain[0])
        optimizer.step()
        assert name in optimizer.state[plain[0]]


@pytest.mark.parametrize(
    "states, dtypes",
    [
        ("8bit", (torch.int8, torch.uint8, torch.uint8)),
        ("16bit", (torch.float16, torch.bfloat16, torch.bfloat16)),
        ("32bit", (torch.float32, torch.float32, torch.float32)),
    ],
)
def test_one_word_chooses_the_storage(states, dtypes):
    names = "master_param", "exp_avg", "exp_avg_sq"
    param = Parameter(NVFP4Quantizer().quantize(values()[0]))
    half = Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
    optimizer = FP4Adam([param, half], states=states)
    param.grad, half.grad = torch.ones(param.shape), torch.ones_like(half)
    optimizer.step()
    assert tuple(optimizer.state[param][name].dtype for name in names) == dtypes
    kept = "param_remainder" if states == "8bit" else "master_param"
    assert kept in optimizer.state[half]
    # A single option goes before the word.
    optimizer = FP4Adam([param], states=states, exp_avg_dtype=torch.bfloat16)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].dtype == torch.bfloat16
    assert optimizer.state[param]["master_param"].dtype == dtypes[0]


def test_words_that_do_not_exist():
    with pytest.raises(ValueError, match="'8bit', got '4bit'|got '4bit'"):
        FP4Adam([Parameter(torch.zeros(4))], states="4bit")
    plain = Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    assert FusedAdam([plain], states="8bit").store_param_remainders
    assert FusedAdam([plain], states="8bit", master_weights=False).store_param_remainders
    options = {"master_weights": False, "store_param_remainders": False}
    assert not FusedAdam([plain], states="8bit", **options).store_param_remainders


def test_bytes_of_all_states(device):
    optimizer = make(device, NVFP4Quantizer(columnwise=False))
    step(optimizer, 1)
    numel = sum(p.numel() for p in params_of(optimizer))
    states = optimizer.compact_state_dict()["state"].values()
    stored = [t for s in states for name, t in s.items() if t.dim() and name != DIGEST]
    weights_too = [t for p in params_of(optimizer) for t in p.detach().storage_tensors().values()]
    assert sum(t.nbytes for t in stored) / numel == 1 + 2 * (1 + 1 / 32)
    assert sum(t.nbytes for t in [*stored, *weights_too]) / numel < 3.58


@by_quantizer
def test_loaded_remainders_of_other_codes_are_dropped(quantizer, device, monkeypatch):
    optimizer, other = make(device, quantizer), make(device, quantizer)
    step(optimizer, 1)
    with torch.no_grad():
        for param, value in zip(params_of(other), values(5), strict=True):
            param.copy_(value.to(device))
    other.load_state_dict(optimizer.compact_state_dict())
    other.param_groups[0]["lr"] = 0.0
    before = weights(other)
    logged = []
    monkeypatch.setattr(
        master_weights._logger, "warning", lambda *message: logged.append(message[1])
    )
    step(other, 2)
    assert logged == [len(before)]
    for master, param, value in zip(masters(other), params_of(other), values(5), strict=True):
        assert ((master - value.to(device)).abs() <= units(param.detach())).all()
