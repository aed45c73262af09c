"""The update: roots are exact, any number counts."""

import numpy as np
import pytest
import torch
from torch.optim import Adam, AdamW

from fp4adam import FP4Adam, FusedAdam, NVFP4Quantizer
from fp4adam.kernels.launch.schema import SCALAR_COLUMNS
from fp4adam.optim import adam, update_bound
from fp4adam.optim.adam import adam_, adam_scalars
from fp4adam.tensors import backend

OPTIONS = dict(
    lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, maximize=False,
    bias_correction=True, decoupled_weight_decay=True,
)  # fmt: skip


def test_rates_below_those_of_float32_change_no_parameter():
    sizes = [adam_scalars({**OPTIONS, "lr": lr}, 1).step_size for lr in (2.0**-149, 2.0**-148)]
    assert sizes[0] == 0 < sizes[1]


@pytest.mark.parametrize(
    "first",
    [1.0, 2.0, 2.0**-149]
    + [pytest.param(x, marks=pytest.mark.exhaustive) for x in (2.0**-126, 2.0**127)],
)
def test_denominators_are_roots_to_the_nearest_float32(first):
    # The roots of [1, 4) are those of every normal number but for a power of two.
    start = torch.tensor(first).view(torch.int32)
    x = torch.arange(2**23 - 1, dtype=torch.int32).add_(start).view(torch.float32)
    value, exp_avg = torch.zeros_like(x), torch.ones_like(x)
    scalars = adam_scalars({**OPTIONS, "eps": 0.0}, 1)._replace(
        lerp_weight=0.25, beta2=1.0, one_minus_beta2=0.0, rsqrt_bias_correction2=1.0, step_size=-1.0
    )
    adam_(value, torch.ones_like(x), exp_avg, x.clone(), None, scalars, True)
    assert torch.equal(value, 1 / torch.from_numpy(np.sqrt(x.numpy())))


def test_rows_of_scalars_begin_as_the_schema_says():
    assert adam.Scalars._fields[:8] == SCALAR_COLUMNS[:8]


@pytest.fixture(params=[False, True], ids=["operators", "kernels"])
def where(request, monkeypatch, device):
    """The device of tensors that take one path or the other."""
    monkeypatch.setattr(backend, "uses_kernels", lambda d: request.param and d.type == device)
    return device if request.param else "cpu"


def train(optimizer_class, lr, device, quantizer=None, **options):
    """What a weight is after a small step and two of ``lr``."""
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(4, 32, 64, generator=generator).to(device)
    start[0, 0] = 0.0
    weight = start if quantizer is None else quantizer.quantize(start)
    param = torch.nn.Parameter(weight)
    optimizer = optimizer_class([param], lr=1e-3, **options)
    for i, grad in enumerate(grads):
        optimizer.param_groups[0]["lr"] = 1e-3 if i == 0 else lr
        param.grad = grad.clone()
        optimizer.step()
    return optimizer.state[param].get("master_param", param).detach().cpu()


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [-0.1, -1e-9, -(2.0**-149), 0.0, torch.inf, -torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_any_learning_rate_does_what_it_does_in_adamw(lr, weight_decay, decoupled, where):
    """One below zero ascends, one that is infinite leaves infinite values."""
    torchs = train(AdamW if decoupled else Adam, lr, "cpu", weight_decay=weight_decay)
    ours = train(FusedAdam, lr, where, weight_decay=weight_decay, decoupled_weight_decay=decoupled)
    torch.testing.assert_close(ours, torchs, rtol=2e-6, atol=1e-7, equal_nan=True)
    if lr == -0.1:
        assert not torch.allclose(ours, train(FusedAdam, 0.0, where, weight_decay=weight_decay))


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_quantized_weights_ascend_with_the_bits_of_the_other_path(
    weight_decay, monkeypatch, device
):
    """The amax of weights that grow with their decay is found where it is."""
    weights = []
    for kernels, there in ((True, device), (False, "cpu")):
        monkeypatch.setattr(backend, "uses_kernels", lambda d, kernels=kernels: kernels)
        weights.append(train(FP4Adam, -0.1, there, NVFP4Quantizer(), weight_decay=weight_decay))
    assert torch.equal(*weights)
    still = train(FP4Adam, 0.0, "cpu", NVFP4Quantizer(), weight_decay=weight_decay)
    assert ((weights[0] - still).abs() > 0.01).double().mean() > 0.9


def test_a_step_up_can_take_the_largest_weight_as_far_as_a_step_down():
    up, down = (update_bound.largest_update(adam_scalars(OPTIONS | {"lr": lr}, 3), 1.0)
                for lr in (-1e-2, 1e-2))  # fmt: skip
    assert up == down > 0


@pytest.mark.parametrize("number", [np.float32, np.float64, np.float16])
def test_numbers_of_numpy_are_numbers(number, where):
    options = dict(betas=(0.5, 0.75), eps=2.0**-10, weight_decay=0.125)
    of_numpy = dict(
        betas=(number(0.5), number(0.75)), eps=number(2.0**-10), weight_decay=number(0.125)
    )
    expected = train(FusedAdam, 2.0**-6, where, **options)
    assert torch.equal(train(FusedAdam, number(2.0**-6), where, **of_numpy), expected)
    FusedAdam([torch.nn.Parameter(torch.zeros(1))], lr=number(0.5))
