"""FP4Adam and FusedAdam behave as torch.optim.AdamW: errors, steps, state dicts and hooks.

The behaviours are those of ``TestOptimRenewed``, PyTorch's tests of each of its own optimizers,
with the inputs that torch ships for AdamW (``torch.testing._internal.common_optimizers``). Where
PyTorch allows a tolerance between two implementations, these optimizers are bit-identical. What
quantized weights add is in ``test_step_table.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.testing._internal.common_optimizers import optim_db

import helpers
from fp4adam import FP4Adam, FusedAdam, MasterWeightOptimizer, MXFP8Quantizer, NVFP4Quantizer
from helpers import random, set_grads, take_steps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REFUSED_FLAGS = ("capturable", "differentiable")
ADAMW = next(info for info in optim_db if info.optim_cls is AdamW)
# Processors differ in the payload of NaN.
assert_identical = functools.partial(helpers.assert_identical, any_nan=True)


def is_taken(kwargs: dict[str, Any]) -> bool:
    return not any(kwargs.get(flag) for flag in REFUSED_FLAGS)


# Every configuration that PyTorch constructs AdamW with, less those with a refused flag.
INPUTS = {
    entry.desc: entry.kwargs
    for entry in ADAMW.optim_inputs_func(device=DEVICE)
    if is_taken(entry.kwargs)
} | {
    "betas and eps": dict(lr=0.1, betas=(0.6, 0.9), eps=3e-6),
    "amsgrad, ascending": dict(amsgrad=True, maximize=True),
}  # fmt: skip
CONFIGURATIONS = [
    pytest.param(functools.partial(kind, **kwargs, fused=fused), id=f"{kind.__name__}-{name}-{way}")
    for kind in (FusedAdam, FP4Adam)
    for name, kwargs in INPUTS.items()
    for fused, way in ((False, "operators"), (True, "fused"))
]
Make = Callable[..., Optimizer]
every_configuration = pytest.mark.parametrize("make", CONFIGURATIONS)
every_optimizer = pytest.mark.parametrize("make", (FusedAdam, FP4Adam))


def make_params(
    device: str,
    dtype: torch.dtype = torch.float32,
    shapes: Iterable[tuple[int, ...]] = ((2, 3), (5,), ()),
) -> list[Parameter]:
    return [Parameter(random(shape, i, device).to(dtype)) for i, shape in enumerate(shapes)]


def assert_same_optimization(actual: Optimizer, expected: Optimizer) -> None:
    """Parameters and state are equal bit for bit; hyper-parameters may differ."""
    for group, other in zip(actual.param_groups, expected.param_groups, strict=True):
        assert_identical(group["params"], other["params"])
        for param, twin in zip(group["params"], other["params"], strict=True):
            assert_identical(dict(actual.state[param]), dict(expected.state[twin]))


def step_by_kernels(optimizer: Optimizer) -> None:
    """A step that takes the kernels for fused=True on a CPU too, in Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if optimizer.defaults["fused"] and DEVICE == "cpu":
            patch.setattr("fp4adam.tensors.backend.uses_kernels", lambda device: True)
        optimizer.step()


# Construction


# What torch's own tests expect to be refused, and more.
MISUSES = [
    (error.optimizer_error_input.params, error.optimizer_error_input.kwargs)
    for error in ADAMW.optim_error_inputs_func(device=DEVICE, dtype=torch.float32)
    if issubclass(error.error_type, Exception) and is_taken(error.optimizer_error_input.kwargs)
] + [
    ([torch.ones(3)], kwargs)
    for kwargs in (
        dict(eps=-1e-8),
        dict(betas=(0.9, 1.0)),
        dict(betas=(-0.1, 0.9)),
        dict(foreach=True, fused=True),
    )
]


@every_optimizer
@pytest.mark.table
@pytest.mark.parametrize(("params", "kwargs"), MISUSES)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_misuse_has_the_exception_and_text_of_adamw(make, params, kwargs):
    try:
        AdamW(params, **kwargs)
    except Exception as torchs:
        with pytest.raises(type(torchs)) as ours:
            make(params, **kwargs)
        assert str(torchs).rstrip(".") in str(ours.value)


# Hyper-parameters


@every_configuration
def test_tensors_equal_the_same_floats(make: Make, device: str) -> None:
    for n_dims, where in ((0, "cpu"), (1, device), (2, device)):
        one = functools.partial(torch.full, (1,) * n_dims)
        lr = one(1e-3, device=where)
        tensors = dict(lr=lr, betas=(one(0.75), one(0.875)))
        floats = dict(lr=lr.item(), betas=(0.75, 0.875))
        optimizers = [make(make_params(device), **each) for each in (tensors, floats)]
        for optimizer in optimizers:
            scheduler = StepLR(optimizer, gamma=0.5, step_size=1)
            for seed in range(3):
                take_steps(optimizer, [seed])
                scheduler.step()
        assert_same_optimization(*optimizers)
        assert optimizers[0].param_groups[0]["lr"] is lr  # which the scheduler fills


# The step


@every_configuration
def test_layout_in_memory_changes_no_value(make: Make, device: str) -> None:
    plain = make_params(device, shapes=[(6, 4), (10, 5), (2, 3, 4, 4), (7,)])
    laid_out = [
        Parameter(plain[0].detach().t().contiguous().t()),
        Parameter(torch.stack([plain[1].detach()] * 2, dim=-1)[..., 0]),
        Parameter(plain[2].detach().to(memory_format=torch.channels_last)),
        # An odd offset: no 16-byte access is possible.
        Parameter(torch.cat([torch.zeros(1, device=device), plain[3].detach()])[1:]),
    ]
    optimizers = [make(params) for params in (plain, laid_out)]
    for seed in range(3):
        set_grads(plain, seed)
        plain[3].grad = plain[3].grad[:1].expand(7)
        for param, twin in zip(plain, laid_out, strict=True):
            twin.grad = torch.empty_like(twin).copy_(param.grad)
        laid_out[0].grad = plain[0].grad.clone()
        laid_out[3].grad = plain[3].grad[:1].clone().expand(7)
        for optimizer in optimizers:
            step_by_kernels(optimizer)
    assert_identical(plain, laid_out)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.usefixtures("through_the_kernels")
def test_autograd_sees_that_a_step_changed_the_parameters(fused: bool, device: str) -> None:
    quantizers = NVFP4Quantizer(), MXFP8Quantizer()
    weights = [Parameter(q.quantize(torch.ones(32, 64, device=device))) for q in quantizers]
    params = make_params(device, shapes=[(3,), (5,)])
    optimizer = FP4Adam([*weights, *params], fused=fused, states="factored")
    x = torch.ones(2, 64, device=device, requires_grad=True)
    losses = [(param * param).sum() for param in params]
    losses += [torch.nn.functional.linear(x, weight).sum() for weight in weights]
    set_grads([*weights, *params], 0)
    weights[1].grad = weights[0].grad
    optimizer.step()
    states = optimizer.state_dict()["state"]
    assert_identical(*(states[i]["exp_avg_sq"] for i in (0, 1)))  # of two launches
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    params[0].data, params[0].grad = params[0].data.to(torch.float8_e4m3fn), None
    optimizer.step()  # which no kernel could do with a gradient


# State dicts


@every_optimizer
@pytest.mark.parametrize("names", [(False, False), (True, False), (False, True)], ids=str)
def test_names_survive_if_either_side_has_them(make: Make, names: tuple, device: str) -> None:
    """Of states as torch and other code have saved them."""

    def named(params: list[Parameter], has_names: bool) -> list[Any]:
        return [(f"name{i}", param) for i, param in enumerate(params)] if has_names else params

    params = make_params(device) + make_params(device, torch.bfloat16)
    optimizer, resumed = (make(named(params, has_names)) for has_names in names)
    take_steps(optimizer, range(2))
    old = deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:  # of older versions
        for flag in ADAMW.not_og_supported_flags:
            group.pop(flag, None)
    for state, number in zip(old["state"].values(), (int, float), strict=False):
        if "step" in state:
            state["step"] = number(state["step"])
    resumed.param_groups[0]["own"] = 1  # groups are those of the checkpoint
    resumed.load_state_dict(old)
    group = resumed.param_groups[0]
    assert "own" not in group
    assert set(ADAMW.not_og_supported_flags) <= group.keys()
    assert not any(group[flag] for flag in REFUSED_FLAGS)
    assert_same_optimization(resumed, optimizer)
    kept = resumed.state_dict()["param_groups"][0].get("param_names")
    assert kept == ([f"name{i}" for i in range(6)] if any(names) else None)
    # One parameter in two groups must have one index.
    resumed.param_groups.extend(resumed.param_groups)
    first, last = resumed.state_dict()["param_groups"]
    assert first == last


# On GPUs


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs in one machine")
@every_configuration
def test_one_group_may_span_two_gpus(make: Make) -> None:
    params, others = (make_params(f"cuda:{i}", torch.bfloat16) for i in range(2))
    spread = [Parameter(params[0].detach().clone()), *others[1:]]
    for each in (params, spread):
        take_steps(make(each), range(3))
    assert_identical(*([param.cpu() for param in each] for each in (params, spread)))


# Hooks


@pytest.mark.parametrize(
    "make", [FusedAdam, FP4Adam, functools.partial(MasterWeightOptimizer, optimizer_class=AdamW)]
)
def test_hooks_run_around_state_dicts(make: Make, device: str) -> None:
    """Two of each kind."""

    def adding(rate: float) -> Callable[..., dict[str, Any]]:
        def replace(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            state_dict = deepcopy(state_dict)
            state_dict["param_groups"][-1]["lr"] += rate
            return state_dict

        return replace

    groups, noted, handles = [{"params": [p]} for p in make_params(device)], [], []
    optimizer = make(groups, lr=0.0)
    for key, rate in (("first", 1.0), ("second", 2.0)):
        optimizer.register_state_dict_pre_hook(lambda o, key=key: o.state.update({key: 1}))
        optimizer.register_state_dict_post_hook(adding(rate))
        handles.append(optimizer.register_load_state_dict_pre_hook(adding(10 * rate)))
        optimizer.register_load_state_dict_post_hook(
            lambda optimizer: noted.append(optimizer.param_groups[-1]["lr"])
        )
    saved = optimizer.state_dict()
    assert saved["state"]["first"] == saved["state"]["second"] == 1
    optimizer.load_state_dict(saved)
    handles[0].remove()
    optimizer.load_state_dict(saved)
    assert noted == [33.0, 33.0, 23.0, 23.0]
