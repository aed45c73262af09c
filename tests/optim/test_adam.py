"""The update: parts of a tensor give the bits of the whole, roots are exact, any number counts."""

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
    bias_correction=True, adam_w_mode=True,
)  # fmt: skip
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "gaps": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
}


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("layouts", [*[(name,) * 5 for name in LAYOUTS], (*LAYOUTS, *LAYOUTS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_tensor_in_parts_gives_the_bits_of_the_whole(dtype, layouts, amsgrad, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    shape = (67, 131)
    value, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    moments = torch.zeros(3, *shape, dtype=torch.promote_types(dtype, torch.float32))
    results = []
    # Several rows, one that is larger than a part, and the whole.
    for size, names in ((1000, layouts), (100, layouts), (2**40, ("contiguous",) * 5)):
        monkeypatch.setattr(backend, "cpu_chunk_numel", lambda size=size: size)
        tensors = [
            LAYOUTS[name](t.clone())
            for t, name in zip((value, grad, *moments), names, strict=False)
        ]
        version = tensors[0]._version
        for step in (1, 2):
            scalars = adam_scalars(OPTIONS, step)
            largest = tensors[4] if amsgrad else None
            adam_(*tensors[:4], largest, scalars, True, torch.tensor([4.0]))
        assert tensors[0]._version > version
        assert torch.equal(tensors[1], grad)
        results.append(tensors)
    for *in_parts, whole in zip(*results, strict=True):
        assert all(torch.equal(each, whole) for each in in_parts)
    assert not torch.equal(results[0][0], value)


def test_rates_below_those_of_float32_change_no_parameter():
    sizes = [adam_scalars({**OPTIONS, "lr": lr}, 1).step_size for lr in (2.0**-149, 2.0**-148)]
    assert sizes[0] == 0 < sizes[1]


def test_multiply_add_rounds_the_product():
    generator = torch.Generator().manual_seed(0)
    for n in (1, 7, 64, 40_001):
        x, y = (torch.randn(2, n, generator=generator) * 2.0 ** torch.arange(2)[:, None]).unbind()
        expected = x * 0.1 + y
        for out in (torch.empty_like(x), x.clone(), y.clone()):
            a = out if torch.equal(out, x) else x
            b = out if torch.equal(out, y) else y
            assert torch.equal(adam._multiply_add(a, 0.1, b, out=out), expected)


@pytest.fixture(params=["numpy", "torch"])
def sqrt(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(adam, "numpy", None)
    return lambda x: adam._sqrt(x, out=torch.empty_like(x))


@pytest.mark.parametrize(
    "first",
    [1.0, 2.0, 2.0**-149]
    + [pytest.param(x, marks=pytest.mark.exhaustive) for x in (2.0**-126, 2.0**127)],
)
def test_square_root_is_the_nearest_float32(first, sqrt):
    # The roots of [1, 4) are those of every normal number but for a power of two.
    start = torch.tensor(first).view(torch.int32)
    x = torch.arange(2**23 - 1, dtype=torch.int32).add_(start).view(torch.float32)
    root = sqrt(x)
    below, above = (root.view(torch.int32) + i for i in (-1, 1))
    # Ties between float32 numbers have 25 bits: their squares are exact in float64.
    low, high = ((root.double() + n.view(torch.float32)) / 2 for n in (below, above))
    assert (low * low < x).all() and (x < high * high).all()


def test_square_roots_of_special_values(sqrt):
    x = torch.tensor([0.0, -0.0, torch.inf, torch.nan, -1.0])
    assert str(sqrt(x)) == str(torch.tensor([0.0, -0.0, torch.inf, torch.nan, torch.nan]))


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
    ours = train(FusedAdam, lr, where, weight_decay=weight_decay, adam_w_mode=decoupled)
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
