"""The previewed amax is that of the updated weight, and few tiles are read for it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4adam import Float8Quantizer, FP4Adam, NVFP4Quantizer
from fp4adam.kernels.amax_preview import PreviewedLaunch
from fp4adam.optim.adam import adam_, adam_scalars
from fp4adam.optim.update_bound import largest_update, measured_ratio, next_ratio, ratio_after
from fp4adam.tensors import backend
from helpers import assert_bytes_are_of_masters, random

pytestmark = pytest.mark.usefixtures("through_the_kernels")

NVFP4, FLOAT8_QUANTIZER = NVFP4Quantizer(), Float8Quantizer()
# Several tiles of both sizes: whole ones, and single blocks at the edges.
SHAPE = (80, 96)
OPTIONS = dict(
    lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, amsgrad=False, maximize=False,
    bias_correction=True, decoupled_weight_decay=True,
)  # fmt: skip


def make(value, device, quantizer=NVFP4, **options):
    """A parameter in training, with its optimizer."""
    param = torch.nn.Parameter(quantizer.quantize(value.to(device)))
    param._high_precision_init_val = value.to(device)
    return param, FP4Adam([param], **options)


def step(param, optimizer, grad):
    param.grad = grad.to(param.device)
    optimizer.step()


def assert_exact(param, optimizer):
    master = optimizer.state[param]["master_param"]
    finite = torch.where(master.isnan(), 0.0, master)
    assert param._amax.item() == finite.abs().max().item()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "uses_kernels", lambda d: False)
        expected = param.quantizer.quantize(master.cpu()).storage_tensors()
    for name, inner in param.storage_tensors().items():
        assert torch.equal(inner.cpu(), expected[name]), name


def randn(seed, scale=1.0, shape=SHAPE):
    return random(shape, seed, scale=scale)


VALUES = {
    "normal": randn(0, 0.02),
    "all equal": torch.full(SHAPE, 0.02),
    "zero": torch.zeros(SHAPE),
    "one outlier": randn(1, 1e-3).index_put_((torch.tensor(5), torch.tensor(7)), torch.tensor(1.0)),
    "far below the learning rate": randn(2, 1e-6),
}
CASES = {
    "adamw": dict(lr=1e-3, betas=(0.9, 0.95)),
    "lr above the weights": dict(lr=0.5, betas=(0.9, 0.95)),
    "decay that changes signs": dict(lr=1e-3, weight_decay=1500.0),
    "L2": dict(lr=1e-3, weight_decay=0.1, decoupled_weight_decay=False),
    "amsgrad, ascending, no epsilon": dict(lr=1e-3, amsgrad=True, maximize=True, eps=0.0),
    "through BF16": dict(lr=1e-3, quantize_from="param_dtype"),
}
# Every value with the usual options, and all options with an outlier.
PAIRS = [("adamw", value) for value in VALUES] + [(case, "one outlier") for case in CASES]
FLOAT8 = [("adamw", "normal"), ("lr above the weights", "zero"), ("through BF16", "normal")]


@pytest.mark.parametrize(
    ("quantizer", "case", "value"),
    [*((NVFP4, *pair) for pair in dict.fromkeys(PAIRS)), *((FLOAT8_QUANTIZER, *p) for p in FLOAT8)],
)
def test_amax_is_that_of_the_updated_weight(quantizer, case, value, device):
    value = VALUES[value]
    weight = make(value, device, quantizer, **CASES[case])
    # The last gradient pushes the largest weights down as hard as it can.
    for grad in (randn(0, 1e-2), randn(1, 1e-2), value.sign() * 1e3):
        step(*weight, grad)
        assert_exact(*weight)
        assert not exceeding(weight[1]).any()  # bounds hold, also where moments are negative


@pytest.mark.slow
@pytest.mark.parametrize("special", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("quantizer", [NVFP4, FLOAT8_QUANTIZER], ids=["nvfp4", "float8"])
def test_a_lost_maximum_is_found_elsewhere(special, quantizer, device):
    """The largest weight becomes NaN: no other candidate tells that the amax is now far lower."""
    value = VALUES["one outlier"]
    param, optimizer = make(value, device, quantizer, lr=1e-4)
    lost, *others = (randn(seed, 1e-2) for seed in (4, 3, 3, 5))
    lost[5, 7] = special
    for grad in (*others[:2], lost, others[2]):
        step(param, optimizer, grad)
        assert_exact(param, optimizer)
    # 1e30 is too large for the second moment, which freezes the weight.
    assert special == 1e30 or param._amax < 0.1


def exceeding(optimizer):
    """By how much the weights turned out to be larger than previewed, each."""
    return optimizer._whole.plan._groups[0].launch._exceeding


def test_only_tiles_near_the_maximum_are_read(device, monkeypatch):
    param, optimizer = make(VALUES["one outlier"], device, lr=1e-4)
    original, read = PreviewedLaunch.__call__, []

    def spy(launch, *signals):
        read.append(launch.candidates().float().mean().item())
        original(launch, *signals)

    monkeypatch.setattr(PreviewedLaunch, "__call__", spy)
    for seed in range(4):
        step(param, optimizer, randn(seed, 1e-2))
        assert read[-1] == 1 if seed == 0 else read[-1] < 0.1  # nothing is known at first
        assert not exceeding(optimizer).any()  # nothing is written twice
        assert_exact(param, optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    step(param, optimizer, randn(4))
    assert optimizer._whole.plan._groups[0].key.write_dtype is None  # and now nothing at all


def test_a_tile_that_may_overtake_the_largest_is_read(device):
    """Steady gradients have the largest updates, whatever those of a weight that joins late are."""
    value, grad = torch.zeros(2, 80, 16)  # two tiles
    value[5, 7], value[70, 9], grad[5, 7], grad[70, 9] = 1.0, 0.983, 1.0, -1.0
    params = [torch.nn.Parameter(NVFP4.quantize(value.to(device))) for _ in range(2)]
    for param in params:
        param._high_precision_init_val = value.to(device)
    optimizer = FP4Adam(params, betas=(0.9, 0.95), weight_decay=0.0)
    for i, optimizer.param_groups[0]["lr"] in enumerate((1e-9, 1e-9, 1e-9, 0.01)):
        params[0].grad = grad.to(device)
        params[1].grad = params[0].grad if i > 1 else None
        optimizer.step()
        assert not exceeding(optimizer).any()
    assert params[0]._amax > 0.992


def test_rounding_to_subnormal_numbers_hides_no_tile(device):
    """A master of 1.45 units, stored as 1, overtakes one of 1.55 units, stored as 2."""
    unit = 2.0**-24  # of FP16
    value = torch.zeros(SHAPE)
    value[5, 7], value[70, 90] = 1.55 * unit, 1.45 * unit
    param = torch.nn.Parameter(NVFP4.quantize(value.half().to(device)))
    param._high_precision_init_val = value.to(device)
    options = dict(betas=(0.0, 0.5), weight_decay=0.0, quantize_from="param_dtype")
    optimizer = FP4Adam([param], lr=1e-3 * unit, **options)
    for lr in (1e-3 * unit, 0.1 * unit):
        optimizer.param_groups[0]["lr"] = lr
        param.grad = torch.zeros(SHAPE, device=device, dtype=torch.float16)
        param.grad[5, 7], param.grad[70, 90] = 1.0, -1.0
        optimizer.step()
    assert optimizer.state[param]["master_param"][70, 90] > 1.5 * unit
    assert param._amax == 2 * unit
    assert not exceeding(optimizer).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("two_dimensional", "usage", "quantize_from"),
    [
        (True, dict(optimize_for_gemm=True), "master"),
        (True, dict(rowwise=False), "param_dtype"),
        (False, dict(optimize_for_gemm=True), "master"),
        (False, dict(columnwise=False), "master"),
    ],
    ids=str,
)
def test_a_tensor_is_written_again_exactly(two_dimensional, usage, quantize_from, device):
    """One weight becomes the largest where nobody looked; a second tensor stays as it is."""
    quantizer = NVFP4Quantizer(two_dimensional=two_dimensional, **usage)
    params = []
    for seed in range(2):
        value = randn(seed, 0.02, (80, 64))
        value[64:] *= 0.01  # blocks of their own, which do not come near the largest weight
        params.append(torch.nn.Parameter(quantizer.quantize(value.bfloat16().to(device))))
    optimizer = FP4Adam(params, lr=1e-5, quantize_from=quantize_from)
    for step in range(3):
        if step:
            optimizer.state[params[0]]["master_param"][70, 16 * step] = 3.0**step
        for seed, param in enumerate(params):
            grad = randn(10 * step + seed, 1e-2, (80, 64))
            param.grad = grad.bfloat16().to(device)
        optimizer.step()
        assert (exceeding(optimizer) > 0).tolist() == [step > 0, False]
        assert_bytes_are_of_masters(optimizer)


@settings(max_examples=60, deadline=None)
@given(
    beta1=st.floats(0, 0.99),
    beta2=st.floats(0.3, 0.9999),
    eps=st.sampled_from([1e-8, 1e-12, 1e-3]),
    seed=st.integers(0, 2**31),
    scales=st.lists(
        st.sampled_from([0.0, 1e-30, 1e-22, 1e-8, 1.0, 1e4, 1e12]), min_size=1, max_size=8
    ),
    corrected=st.booleans(),
)
def test_no_update_is_larger_than_its_bound(beta1, beta2, eps, seed, scales, corrected):
    group = OPTIONS | dict(
        betas=(beta1, beta2), eps=eps, weight_decay=0.0, bias_correction=corrected
    )
    generator = torch.Generator().manual_seed(seed)
    value, m, v = torch.zeros(3, 512)
    for number, scale in enumerate(scales, 1):
        # Long runs of one sign and sudden growth come closest to the bound.
        grad = (torch.rand(512, generator=generator) - 0.2) * scale
        scalars = adam_scalars(group, number)
        value.zero_()
        adam_(value, grad, m, v, None, scalars, True, scalars.grad_factor)
        assert value.abs().max() <= largest_update(scalars, ratio_after(number, scalars))


def test_bounds_hold_for_all_given_moments_and_may_be_infinite():
    """Also with NaN among them; and they are no larger than the largest update."""
    m, v = torch.zeros(100), torch.ones(100)
    m[3], m[5], m[-5] = 7.0, torch.nan, 2.0
    assert measured_ratio(m, v, 1e-8) == pytest.approx(49.0, rel=1e-3)
    assert measured_ratio(m[3:4] * 1e-6, v[:1] * 1e-12, 1e-8) == pytest.approx(49.0, rel=1e-3)
    assert measured_ratio(m[:0], v[:0], 1e-8) == measured_ratio(m[5:6], v[:1], 1e-8) == 0
    for beta1 in (0.0, 0.4, 0.9):
        scalars = adam_scalars(OPTIONS | dict(betas=(beta1, 0.99)), 1)
        expected = beta1**2 / 0.99 * 3 + (1 - beta1) ** 2 / 0.01
        assert next_ratio(3.0, scalars) == pytest.approx(expected)
        update = 2 * scalars.step_size / scalars.rsqrt_bias_correction2
        assert largest_update(scalars, 4.0) == pytest.approx(update, rel=1e-3)
        ascends = adam_scalars(OPTIONS | dict(betas=(beta1, 0.99), lr=-OPTIONS["lr"]), 1)
        assert largest_update(ascends, 4.0) == largest_update(scalars, 4.0)
        third = next_ratio(ratio_after(2, scalars), scalars)
        assert ratio_after(3, scalars) == pytest.approx(third)
    scalars = adam_scalars(OPTIONS | dict(betas=(0.5, 0.25)), 1)
    assert ratio_after(3, scalars) == pytest.approx(1.0)
    for options in (dict(eps=0.0), dict(betas=(0.9, 0.0))):
        scalars = adam_scalars(OPTIONS | options, 1)
        assert largest_update(scalars, ratio_after(1, scalars)) == math.inf
