"""FP4Adam in the loops people write: learning, mixed precision, averages; shapes and sizes."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from torch.optim import Adam, AdamW
from torch.testing import assert_close

from fp4adam import FP4Adam, FusedAdam, NVFP4Quantizer, Quantizer
from fp4adam.kernels.launch.schema import SCALAR_COLUMNS
from fp4adam.optim import adam
from helpers import (
    QUANTIZERS,
    RECIPES,
    all_params,
    assert_bytes_are_of_masters,
    assert_identical,
    make_mlp,
    make_weight,
    random,
    set_grads,
    snapshot,
    take_steps,
)
from step_reference import GROUP, adamw_
from waits import refusing_waits

every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS.keys())
every_recipe = pytest.mark.parametrize("quantizer", RECIPES.values(), ids=RECIPES.keys())
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# Learning


def test_averages_in_copies_of_other_code_are_warned_of() -> None:
    """As Lightning's StochasticWeightAveraging makes them; loading a copy is no average."""
    model = make_mlp(NVFP4Quantizer(), "cpu")
    average = copy.deepcopy(model)
    average.load_state_dict({n: torch.zeros(p.shape) for n, p in model.named_parameters()})
    ours, others = (m[0].weight for m in (average, model))
    with torch.no_grad():
        ours.copy_(torch.zeros(ours.shape))
        others.detach().copy_(random(tuple(others.shape), 0))
        with pytest.warns(UserWarning, match="a moving average of weights stands still"):
            ours.detach().copy_(ours.detach() * 0.9 + others.detach() * 0.1)
        ours.detach().copy_(ours.detach() * 0.9 + others.detach() * 0.1)


# The update


@pytest.mark.parametrize(
    "options",
    [
        dict(lr=1e-2, weight_decay=0.1),
        dict(lr=1e-2, betas=(0.4, 0.99), amsgrad=True),
        dict(lr=1e-3, maximize=True, eps=1e-4),
        dict(lr=1e-3, weight_decay=0.1, adam_w_mode=False),
    ],
    ids=str,
)
def test_the_oracle_of_the_step_table_follows_torch(options: dict) -> None:
    of_torch = {name: value for name, value in options.items() if name != "adam_w_mode"}
    param = Parameter(random((9, 5), 0))
    torchs = (AdamW if of_torch == options else Adam)([param], **of_torch)
    value, moments = param.detach().clone(), {}
    for seed in range(10):
        take_steps(torchs, [seed])
        adamw_(value, moments, seed + 1, param.grad, {**GROUP, **options})
        assert_close(value, param.detach(), rtol=4e-6, atol=4e-6)


def test_rates_below_those_of_float32_change_no_parameter() -> None:
    sizes = [adam.adam_scalars({**GROUP, "lr": lr}, 1).step_size for lr in (2.0**-149, 2.0**-148)]
    assert sizes[0] == 0 < sizes[1]
    assert adam.Scalars._fields[:8] == SCALAR_COLUMNS[:8]


@pytest.mark.parametrize(
    "first",
    [1.0, 2.0, 2.0**-149]
    + [pytest.param(x, marks=pytest.mark.exhaustive) for x in (2.0**-126, 2.0**127)],
)
def test_denominators_are_roots_to_the_nearest_float32(first: float) -> None:
    # The roots of [1, 4) are those of every normal number but for a power of two.
    start = torch.tensor(first).view(torch.int32)
    x = torch.arange(2**23 - 1, dtype=torch.int32).add_(start).view(torch.float32)
    value, exp_avg = torch.zeros_like(x), torch.ones_like(x)
    scalars = adam.adam_scalars({**GROUP, "eps": 0.0}, 1)._replace(
        lerp_weight=0.25, beta2=1.0, one_minus_beta2=0.0, rsqrt_bias_correction2=1.0, step_size=-1.0
    )
    adam.adam_(
        value, torch.ones_like(x), exp_avg, x.clone(), None, scalars, True, scalars.grad_factor
    )
    assert torch.equal(value, 1 / torch.from_numpy(np.sqrt(x.numpy())))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("lr", [-0.1, -1e-9, -(2.0**-149), 0.0, torch.inf, -torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_any_learning_rate_does_what_it_does_in_adamw(lr, decoupled, path_device):
    """One below zero ascends, one that is infinite leaves infinite values."""
    value = random((32, 64), 0)
    value[0, 0] = 0.0
    params = [Parameter(value.to(d, copy=True)) for d in (path_device, "cpu")]
    torchs = AdamW if decoupled else Adam
    options = dict(lr=1e-3, weight_decay=0.1)
    ours = FusedAdam(params[:1], adam_w_mode=decoupled, **options)
    for optimizer in (ours, torchs(params[1:], **options)):
        take_steps(optimizer, [1])
        optimizer.param_groups[0]["lr"] = lr
        take_steps(optimizer, [2, 3])
    assert_close(params[0].detach().cpu(), params[1].detach(), rtol=2e-6, atol=1e-7, equal_nan=True)


# Odd shapes, and models that move


@every_quantizer
def test_empty_parameters_are_harmless(quantizer: Quantizer, device: str) -> None:
    empties = [make_weight(quantizer, device, shape) for shape in ((0, 32), (32, 0))]
    weight = make_weight(quantizer, device)
    optimizer = FP4Adam([empties[0], weight, empties[1]])
    alone = FP4Adam([copy.deepcopy(weight)])
    for seed in range(2):
        set_grads(all_params(optimizer), seed)
        all_params(alone)[0].grad = weight.grad
        optimizer.step()
        alone.step()
    assert_identical(weight.detach(), all_params(alone)[0].detach())
    optimizer.load_state_dict(optimizer.state_dict())
    take_steps(optimizer, [2])
    assert_bytes_are_of_masters(optimizer)


@needs_cuda
def test_state_follows_a_moved_model_when_it_is_loaded_again() -> None:
    model = make_mlp(RECIPES["nvfp4"], "cpu")
    optimizer = FP4Adam(model.parameters())
    take_steps(optimizer, range(2))
    twin = copy.deepcopy(optimizer)
    model.cuda()
    with pytest.raises(RuntimeError, match="load_state_dict.*moves it"):
        take_steps(optimizer, [2])
    optimizer.load_state_dict(optimizer.state_dict())
    for each in (optimizer, twin):
        take_steps(each, [2])
    assert_identical(snapshot(optimizer)["params"], snapshot(twin)["params"])


# On a GPU


@needs_cuda
@pytest.mark.parametrize("quantizer", [None, *QUANTIZERS.values()], ids=["plain", *QUANTIZERS])
def test_a_step_waits_for_nothing_allocates_next_to_nothing_and_launches_little(quantizer, device):
    """With 64 Mi elements, whose gradients would take 256 MiB in FP32."""
    params = []
    for shape in [(2048, 2048)] * 12 + [(4096, 4096)]:
        value = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        params.append(Parameter(value if quantizer is None else quantizer.quantize(value)))
        params[-1].grad = torch.randn_like(value)
    optimizer = FP4Adam(params, lr=1e-2)
    found_inf = torch.zeros(1, device=device)

    def step() -> None:
        optimizer.grad_scale, optimizer.found_inf = found_inf + 1, found_inf
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with refusing_waits():
        step()
    assert torch.cuda.max_memory_allocated() - before <= 2**20
    assert torch.cuda.memory_allocated() - before <= 2**16
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if not e.is_user_annotation]
    on_device = [e.name for e in events if e.device_type.name == "CUDA"]
    kernels = [name for name in on_device if not name.startswith(("Memcpy", "Memset"))]
    assert 1 <= len(kernels) <= 4, kernels


@needs_cuda
@every_recipe
def test_the_first_step_compiles_all_that_others_need(quantizer: Quantizer, device: str) -> None:
    import triton

    params = [make_weight(quantizer, device, (96, 64), seed=i) for i in range(3)]
    optimizer = FP4Adam(params)
    compiled: list[str] = []
    take_steps(optimizer, [0])
    triton.knobs.runtime.jit_post_compile_hook = lambda *_, fn, **__: compiled.append(fn.name)
    try:
        take_steps(optimizer, range(1, 4))
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert compiled == []


@needs_cuda
@pytest.mark.parametrize("quantizer", [None, *RECIPES.values()], ids=["plain", *RECIPES])
def test_elements_beyond_32_bit_indices_are_updated(quantizer, device):
    shape = (2**16 + 128, 2**15)
    needed = 20 * math.prod(shape)
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory")
    start = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    if quantizer is None:
        param = Parameter(start)
    else:
        param = Parameter(quantizer.make_empty(shape, torch.bfloat16, device))
        param._high_precision_init_val = start
    param.grad = torch.zeros_like(start)
    # In the last tile, so that only an index without overflow finds it.
    edge = random((128, 128), 0, device).sign()
    param.grad[-128:, -128:] = edge
    optimizer = FP4Adam([param], lr=1.0)
    optimizer.step()
    master = optimizer.state[param]["master_param"]
    expected = torch.zeros(256, 256, device=device)
    expected[-128:, -128:] = -edge
    assert_close(master[-256:, -256:], expected, rtol=1e-5, atol=0)
    assert not master[: 2**15].any()
    if quantizer is None:
        assert_identical(param.detach()[-256:, -256:], master[-256:, -256:].bfloat16())
    else:
        decoded = quantizer.quantize(master[-256:, -256:])
        rows = param.rowwise_data[-256:, -decoded.rowwise_data.shape[1] :]
        assert torch.equal(rows, decoded.rowwise_data)
