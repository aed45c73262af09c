"""The optimizers behave as torch.optim.AdamW does: errors, steps, groups, state dicts and hooks.

The behaviours are those that PyTorch tests for each of its own optimizers, with the same inputs.
Where PyTorch allows a tolerance between two implementations, these optimizers are bit-identical.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from copy import deepcopy
from io import BytesIO
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing import assert_close

import optimizer_contract_inputs as inputs
from fp4adam import FP4Adam, FusedAdam, Quantizer
from optimizer_contract_inputs import (
    LeastSquares,
    assert_identical,
    assert_same_optimization,
    copies,
    make_params,
    make_quantized_params,
    set_grads,
    take_steps,
)

every_quantizer = pytest.mark.parametrize(
    "quantizer", inputs.QUANTIZERS, ids=lambda quantizer: quantizer.tensor_class.__name__
)
FP32_EPS = torch.finfo(torch.float32).eps

OptimizerClass = type[Optimizer]
every_optimizer = pytest.mark.parametrize("optimizer_class", inputs.OPTIMIZERS)
every_input = pytest.mark.parametrize("kwargs", inputs.adamw_inputs())
both_paths = pytest.mark.parametrize("fused", [False, True], ids=["operators", "fused"])
every_dtype = pytest.mark.parametrize("dtype", inputs.DTYPES, ids=str)
needs_cuda = pytest.mark.skipif(inputs.DEVICE != "cuda", reason="needs a CUDA device")
needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices in one machine"
)


def step_by_kernels(optimizer: Optimizer) -> None:
    """A step that takes the kernels for fused=True on a CPU too, in Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if optimizer.defaults["fused"] and inputs.DEVICE == "cpu":
            patch.setattr("fp4adam.tensors.backend.uses_kernels", lambda device: True)
        optimizer.step()


# Construction


@every_input
def test_torch_leaves_the_choice_of_implementation_to_the_test(kwargs: dict[str, Any]) -> None:
    assert not {"foreach", "fused", "differentiable"} & kwargs.keys()


@every_optimizer
@pytest.mark.parametrize("error", inputs.adamw_error_inputs())
def test_misuse_raises_what_adamw_raises(optimizer_class: OptimizerClass, error: Any) -> None:
    misuse = error.optimizer_error_input
    assert error.error_on.name == "CONSTRUCTION_ERROR"
    if issubclass(error.error_type, Warning):
        with pytest.warns(error.error_type, match=error.error_regex):
            optimizer_class(misuse.params, **misuse.kwargs)
    else:
        with pytest.raises(error.error_type, match=error.error_regex):
            optimizer_class(misuse.params, **misuse.kwargs)


@every_optimizer
@pytest.mark.parametrize(
    "kwargs",
    [
        dict(lr=-1e-3),
        dict(eps=-1e-8),
        dict(betas=(0.9, 1.0)),
        dict(betas=(-0.1, 0.9)),
        dict(weight_decay=-0.1),
        dict(foreach=True, fused=True),
        dict(lr=torch.tensor([1e-3, 1e-3])),
        dict(betas=(torch.tensor([0.9, 0.9]), torch.tensor(0.99))),
        dict(betas=(0.9, torch.tensor(0.99))),
    ],
    ids=lambda kwargs: ", ".join(kwargs) + "=" + str(list(kwargs.values())[-1]),
)
def test_misuse_has_the_exception_and_text_of_adamw(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any]
) -> None:
    with pytest.raises((ValueError, RuntimeError)) as torchs:
        AdamW(make_params("cpu"), **kwargs)
    with pytest.raises(torchs.type) as ours:
        optimizer_class(make_params("cpu"), **kwargs)
    assert str(torchs.value).rstrip(".") in str(ours.value)


@every_optimizer
@pytest.mark.parametrize("others", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_refused_flag_is_named_at_construction(
    optimizer_class: OptimizerClass, others: dict[str, bool]
) -> None:
    with pytest.raises(NotImplementedError, match="differentiable"):
        optimizer_class(make_params("cpu"), differentiable=True, **others)


@every_optimizer
def test_foreach_is_accepted_and_changes_nothing(
    optimizer_class: OptimizerClass, device: str
) -> None:
    plain = optimizer_class(make_params(device))
    for foreach in (False, True):
        optimizer = optimizer_class(make_params(device), foreach=foreach)
        take_steps(optimizer, 2)
        if not foreach:
            take_steps(plain, 2)
        assert_same_optimization(optimizer, plain)


@every_optimizer
@both_paths
def test_sparse_gradients_are_refused(
    optimizer_class: OptimizerClass, fused: bool, device: str
) -> None:
    param = Parameter(torch.ones(4, 2, device=device))
    param.grad = torch.ones(4, 2, device=device).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer_class([param], fused=fused).step()


@every_optimizer
def test_parameters_may_be_frozen_integers(optimizer_class: OptimizerClass, device: str) -> None:
    counter = torch.tensor([1, 1], device=device)
    param = make_params(device, shapes=[(3,)])[0]
    param.grad = torch.ones_like(param)
    optimizer_class([counter, param]).step()
    assert counter.tolist() == [1, 1]


@every_optimizer
@every_input
@both_paths
def test_repr_shows_the_class_and_every_group(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool
) -> None:
    weight, bias = make_params("cpu", shapes=[(2, 3), (2,)])
    groups = [{"params": [weight], "lr": 0.25}, {"params": [bias]}]
    text = repr(optimizer_class(groups, **kwargs, fused=fused))
    assert text.startswith(optimizer_class.__name__)
    assert "lr: 0.25" in text
    assert "Parameter Group 1" in text


# The right direction, groups, schedulers


def descend(optimizer: Optimizer, problem: LeastSquares, schedulers: list[Any]) -> float:
    """The change of the loss over 20 steps."""
    closure = problem.closure(optimizer)
    start = closure().item()
    for _ in range(20):
        loss = optimizer.step(closure)
        for scheduler in schedulers:
            scheduler.step(*([loss.detach()] if isinstance(scheduler, ReduceLROnPlateau) else []))
    return closure().item() - start


@every_optimizer
def test_one_cycle_schedule_moves_lr_and_beta1(
    optimizer_class: OptimizerClass, device: str
) -> None:
    problem = LeastSquares(device)
    optimizer = optimizer_class(problem.params)
    adamw_problem = LeastSquares(device)
    adamw = AdamW(adamw_problem.params)
    for scheduled, data in ((optimizer, problem), (adamw, adamw_problem)):
        descend(scheduled, data, [OneCycleLR(scheduled, max_lr=0.01, total_steps=21)])
    assert optimizer.param_groups[0]["betas"] == adamw.param_groups[0]["betas"]
    assert optimizer.param_groups[0]["betas"] != (0.9, 0.999)
    assert_close(problem.params, adamw_problem.params, rtol=1e-5, atol=1e-6)


@needs_two_gpus
@every_optimizer
@every_input
@both_paths
@pytest.mark.parametrize("scheduled", [False, True], ids=["constant lr", "schedulers"])
def test_one_group_may_span_two_gpus(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, scheduled: bool
) -> None:
    problem = LeastSquares("cuda:0")
    weight, bias = problem.params[0], copies(problem.params[1:], "cuda:1")[0]
    together = LeastSquares("cuda:0").params
    optimizer = optimizer_class([weight, bias], **kwargs, fused=fused)
    twin = optimizer_class(together, **kwargs, fused=fused)
    for each in (optimizer, twin):
        schedulers = [StepLR(each, gamma=0.9, step_size=1)] if scheduled else []
        for seed in range(5):
            set_grads(each.param_groups[0]["params"], seed)
            each.step()
            for scheduler in schedulers:
                scheduler.step()
    assert_same_optimization(optimizer, twin)


@needs_two_gpus
@every_optimizer
@every_input
def test_one_group_may_mix_dtypes_and_devices(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any]
) -> None:
    def optimized(fused: bool) -> Optimizer:
        params = [
            param
            for device in ("cuda:0", "cuda:1")
            for dtype in inputs.DTYPES
            for param in make_params(device, dtype, [(2, 3)])
        ]
        frozen = torch.zeros(2, 3, dtype=torch.int64, device="cuda:1")
        optimizer = optimizer_class([*params, frozen], **kwargs, fused=fused)
        for seed in range(3):
            set_grads(params, seed)
            optimizer.step()
        return optimizer

    assert_same_optimization(optimized(True), optimized(False))


@every_optimizer
@every_input
@both_paths
def test_one_group_may_mix_dtypes(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, device: str
) -> None:
    apart = [make_params(device, dtype) for dtype in inputs.DTYPES]
    together = [param for params in apart for param in copies(params)]
    optimizer = optimizer_class(together, **kwargs, fused=fused)
    take_steps(optimizer, 3)
    for index, params in enumerate(apart):
        twins = together[index * len(params) :][: len(params)]
        alone = optimizer_class(params, **kwargs, fused=fused)
        for seed in range(100, 103):
            set_grads(together, seed)
            for param, twin in zip(params, twins, strict=True):
                param.grad = twin.grad.clone()
            alone.step()
        assert_identical(params, twins)


@every_optimizer
@every_input
@both_paths
@pytest.mark.parametrize("n_dims", [0, 1, 2])
@pytest.mark.parametrize("on_params_device", [False, True], ids=["cpu lr", "device lr"])
def test_tensor_lr_equals_the_same_float(
    optimizer_class: OptimizerClass,
    kwargs: dict[str, Any],
    fused: bool,
    n_dims: int,
    on_params_device: bool,
    device: str,
) -> None:
    lr = torch.full((1,) * n_dims, 1e-3, device=device if on_params_device else "cpu")
    problems = LeastSquares(device), LeastSquares(device)
    for problem, rate in zip(problems, (lr, lr.item()), strict=True):
        optimizer = optimizer_class(problem.params, **{**kwargs, "lr": rate}, fused=fused)
        for _ in range(5):
            optimizer.step(problem.closure(optimizer))
    assert_identical(problems[0].params, problems[1].params)
    assert lr.item() == torch.tensor(1e-3).item()


@every_optimizer
@both_paths
def test_scheduler_changes_a_tensor_lr_in_place(
    optimizer_class: OptimizerClass, fused: bool, device: str
) -> None:
    lr = torch.tensor(0.5)
    tensor_lr = optimizer_class(make_params(device), lr=lr, fused=fused)
    float_lr = optimizer_class(make_params(device), lr=0.5, fused=fused)
    for optimizer in (tensor_lr, float_lr):
        scheduler = StepLR(optimizer, gamma=0.5, step_size=1)
        for seed in range(3):
            take_steps(optimizer, 1, seed)
            scheduler.step()
    assert tensor_lr.param_groups[0]["lr"] is lr
    assert lr.item() == 0.5**4
    assert_same_optimization(tensor_lr, float_lr)


@every_optimizer
@both_paths
@pytest.mark.parametrize("shapes", [((), ()), ((1, 1, 1), (1, 1))], ids=str)
def test_tensor_betas_equal_the_same_floats(
    optimizer_class: OptimizerClass, fused: bool, shapes: tuple[tuple[int, ...], ...], device: str
) -> None:
    betas = torch.full(shapes[0], 0.75), torch.full(shapes[1], 0.875)
    tensor_betas = optimizer_class(make_params(device), betas=betas, fused=fused)
    float_betas = optimizer_class(make_params(device), betas=(0.75, 0.875), fused=fused)
    for optimizer in (tensor_betas, float_betas):
        take_steps(optimizer, 3)
    assert_same_optimization(tensor_betas, float_betas)


@every_optimizer
@every_input
@both_paths
def test_groups_have_their_own_weight_decay(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, device: str
) -> None:
    problem = LeastSquares(device)
    weight, bias = problem.params
    twins = copies(problem.params)
    grouped = optimizer_class(
        [
            {"params": [weight], **kwargs, "fused": fused},
            {"params": [bias], **{**kwargs, "weight_decay": 0.0}, "fused": fused},
        ]
    )
    apart = [
        optimizer_class([twins[0]], **kwargs, fused=fused),
        optimizer_class([twins[1]], **{**kwargs, "weight_decay": 0.0}, fused=fused),
    ]
    start = problem.loss().item()
    for _ in range(20):
        grouped.step(problem.closure(grouped))
        for twin, param, optimizer in zip(twins, problem.params, apart, strict=True):
            twin.grad = param.grad.clone()
            optimizer.step()
    assert_identical(problem.params, twins)
    change = problem.loss().item() - start
    assert change > 0 if kwargs.get("maximize") else change < 0


@every_optimizer
@every_input
@both_paths
def test_groups_have_their_own_lr(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, device: str
) -> None:
    problem = LeastSquares(device)
    irrelevant, without_grad = make_params(device, shapes=[(2,), (3,)])
    before = irrelevant.detach().clone(), without_grad.detach().clone()
    optimizer = optimizer_class(
        [
            {"params": [*problem.params, without_grad], **{"lr": 1e-3, **kwargs}},
            {"params": [irrelevant]},
        ],
        lr=1e-28,
        fused=fused,
    )
    start = problem.loss().item()
    for seed in range(20):
        problem.closure(optimizer)()
        set_grads([irrelevant], seed)
        optimizer.step()
    change = problem.loss().item() - start
    assert change > 0 if kwargs.get("maximize") else change < 0
    assert_identical((irrelevant.detach(), without_grad.detach()), before)
    assert without_grad not in optimizer.state


@every_optimizer
@every_input
@both_paths
def test_group_added_later_starts_at_step_one(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, device: str
) -> None:
    first, second = make_params(device, shapes=[(2, 3), (5,)])
    twins = copies([first, second])
    optimizer = optimizer_class([first], **kwargs, fused=fused)
    take_steps(optimizer, 3)
    optimizer.add_param_group({"params": second, "lr": 0.25})
    for seed in range(200, 203):
        set_grads([second], seed)
        first.grad = None
        optimizer.step()
    apart = [
        optimizer_class([twins[0]], **kwargs, fused=fused),
        optimizer_class([twins[1]], **{**kwargs, "lr": 0.25}, fused=fused),
    ]
    take_steps(apart[0], 3)
    take_steps(apart[1], 3, first_seed=200)
    assert_identical([first, second], twins)
    assert optimizer.state[second]["step"].item() == 3
    assert optimizer.param_groups[1]["eps"] == optimizer.defaults["eps"]
    with pytest.raises(ValueError, match="some parameters appear in more than one"):
        optimizer.add_param_group({"params": [first]})


@every_optimizer
def test_step_counts_per_parameter(optimizer_class: OptimizerClass, device: str) -> None:
    early, late = make_params(device, shapes=[(4,), (4,)])
    optimizer = optimizer_class([early, late])
    for seed in range(5):
        set_grads([early, late], seed)
        if seed < 3:
            late.grad = None
        optimizer.step()
    assert optimizer.state[early]["step"].item() == 5
    assert optimizer.state[late]["step"].item() == 2
    assert optimizer.state[late]["step"].dtype == torch.float32
    assert optimizer.state[late]["step"].shape == ()


# The step


@every_optimizer
@every_input
@every_dtype
def test_fused_equals_operators(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    x = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], dtype=dtype, device=device).reshape(3, 2)
    networks = [inputs.small_network(device, dtype) for _ in range(2)]
    scalars = [make_params(device, dtype, [()])[0] for _ in range(2)]
    optimizers = [
        optimizer_class([*network.parameters(), scalar], **kwargs, fused=fused)
        for network, scalar, fused in zip(networks, scalars, (False, True), strict=True)
    ]
    for i in range(7):
        for network, scalar, optimizer in zip(networks, scalars, optimizers, strict=True):
            optimizer.zero_grad()
            network[2].requires_grad_(i not in (3, 4))
            if i != 2:
                network(x).sum().backward()
                set_grads([scalar], seed=i)
            step_by_kernels(optimizer)
        assert_same_optimization(*optimizers)
    steps = [optimizers[1].state[param]["step"] for param in networks[1].parameters()]
    assert [step.item() for step in steps] == [6, 6, 4, 4]
    assert {step.dtype for step in steps} == {torch.float32}


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shapes=st.lists(SHAPES | st.sampled_from([(1025,), (33, 65)]), min_size=1, max_size=4),
    dtypes=st.lists(st.sampled_from(inputs.DTYPES), min_size=4, max_size=4),
    lr=st.just(0.0) | st.floats(1e-12, 10),
    betas=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
    eps=st.sampled_from([0.0, 1e-8, 0.1]),
    weight_decay=st.sampled_from([0.0, 1e-2, 1.0, 3.0]),
    flags=st.fixed_dictionaries(
        {
            name: st.booleans()
            for name in (
                "amsgrad",
                "maximize",
                "adam_w_mode",
                "bias_correction",
                "master_weights",
            )
        }
    ),
    scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e4]),
    seed=st.integers(0, 2**16),
)
def test_fused_equals_operators_for_any_hyper_parameters(
    shapes: list[tuple[int, ...]],
    dtypes: list[torch.dtype],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    flags: dict[str, bool],
    scale: float,
    seed: int,
) -> None:
    kwargs = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **flags)

    def optimized(fused: bool) -> Optimizer:
        params = [
            make_params(inputs.DEVICE, dtype, [shape], seed)[0]
            for shape, dtype in zip(shapes, dtypes, strict=False)
        ]
        optimizer = inputs.OPTIMIZERS[0](params, **kwargs, fused=fused)
        for step in range(2):
            set_grads(params, seed + step, scale)
            params[step % len(params)].grad = None
            step_by_kernels(optimizer)
        return optimizer

    assert_same_optimization(optimized(True), optimized(False))


@every_optimizer
@every_input
@both_paths
def test_layout_in_memory_changes_no_value(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, device: str
) -> None:
    plain = make_params(device, shapes=[(6, 4), (10, 5), (2, 3, 4, 4), (7,)])
    laid_out = [
        Parameter(plain[0].detach().t().contiguous().t()),
        Parameter(torch.stack([plain[1].detach()] * 2, dim=-1)[..., 0]),
        Parameter(plain[2].detach().to(memory_format=torch.channels_last)),
        # An odd offset: no 16-byte access is possible.
        Parameter(torch.cat([torch.zeros(1, device=device), plain[3].detach()])[1:]),
    ]
    optimizers = [optimizer_class(params, **kwargs, fused=fused) for params in (plain, laid_out)]
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


@every_optimizer
def test_meta_parameters_are_refused_until_they_have_storage(
    optimizer_class: OptimizerClass, device: str
) -> None:
    with torch.device("meta"):
        network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        optimizer = optimizer_class(network.parameters(), fused=True)
        for param in network.parameters():
            param.grad = torch.rand_like(param)
    refusal = "`fused=True` requires all the params to be floating point Tensors"
    with pytest.raises(RuntimeError, match=refusal):
        optimizer.step()
    assert not any(optimizer.state.values())
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    network.to_empty(device=device)
    optimizer = optimizer_class(network.parameters(), fused=True)
    for param in network.parameters():
        torch.nn.init.ones_(param)
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all((param < 1).all() for param in network.parameters())


@every_optimizer
@every_input
@both_paths
def test_step_without_gradients_does_nothing(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, device: str
) -> None:
    params = [*make_params(device), torch.ones(2, 3, device=device)]
    before = [param.detach().clone() for param in params]
    optimizer = optimizer_class(params, **kwargs, fused=fused)
    loss = torch.tensor([1.0], device=device)
    assert optimizer.step(lambda: loss) is loss
    assert optimizer.step() is None
    assert_identical([param.detach() for param in params], before)
    assert not any(optimizer.state[param] for param in params)


@every_optimizer
def test_closure_runs_with_gradients_enabled(optimizer_class: OptimizerClass, device: str) -> None:
    problem = LeastSquares(device)
    optimizer = optimizer_class(problem.params)
    with torch.no_grad():
        loss = optimizer.step(problem.closure(optimizer))
    assert loss.requires_grad
    assert all(param.is_leaf and param.requires_grad for param in problem.params)


@every_optimizer
@every_input
@both_paths
def test_zero_gradients_only_decay(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, device: str
) -> None:
    params = make_params(device)
    before = [param.detach().clone() for param in params]
    optimizer = optimizer_class(params, **kwargs, fused=fused)
    lr, weight_decay = (optimizer.defaults[name] for name in ("lr", "weight_decay"))
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for param, old in zip(params, before, strict=True):
        assert_close(param.detach(), old * (1 - lr * weight_decay), rtol=2 * FP32_EPS, atol=0)
    undecayed = copies(params)
    before = [param.detach().clone() for param in params]
    optimizer = optimizer_class(undecayed, **{**kwargs, "weight_decay": 0.0}, fused=fused)
    for param in undecayed:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert_identical([param.detach() for param in undecayed], before)


@every_optimizer
@every_input
@both_paths
@every_dtype
def test_gradients_are_never_written(
    optimizer_class: OptimizerClass,
    kwargs: dict[str, Any],
    fused: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    params = make_params(device, dtype)
    optimizer = optimizer_class(params, **kwargs, fused=fused)
    set_grads(params, seed=0)
    grads = [param.grad for param in params]
    versions, values = [grad._version for grad in grads], [grad.clone() for grad in grads]
    for _ in range(2):
        optimizer.step()
    assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))
    assert [grad._version for grad in grads] == versions
    assert_identical(grads, values)


@every_optimizer
@both_paths
@pytest.mark.usefixtures("through_the_kernels")
def test_autograd_sees_that_a_step_changed_the_parameters(
    optimizer_class: OptimizerClass, fused: bool, device: str
) -> None:
    params = make_params(device, shapes=[(3,), (5,)])
    optimizer = optimizer_class(params, fused=fused)
    losses = [(param * param).sum() for param in params]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@every_optimizer
@every_input
def test_state_is_filled_by_the_first_step(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], device: str
) -> None:
    params = make_params(device)
    optimizer = optimizer_class(params, **kwargs)
    take_steps(optimizer, 1)
    # FusedAdam counts in the group, as Transformer Engine's; the count is there by name.
    shown = {"step", "exp_avg", "exp_avg_sq"} - (
        {"step"} if optimizer_class is FusedAdam else set()
    )
    if kwargs.get("amsgrad"):
        shown.add("max_exp_avg_sq")
    names = shown | {"step"}
    for param in params:
        state = optimizer.state[param]
        assert state.keys() == shown
        assert {state[name].dtype for name in names} == {torch.float32}
        assert {state[name].device.type for name in names - {"step"}} == {device}
        assert state["step"].device.type == "cpu"
        assert {state[name].shape for name in names - {"step"}} == {param.shape}


@every_optimizer
@every_input
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_parameters_are_their_rounded_fp32_masters(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    params = make_params(device, dtype, [(33, 17), (5,), ()])
    twins = [Parameter(param.detach().float()) for param in params]
    optimizer, in_fp32 = optimizer_class(params, **kwargs), optimizer_class(twins, **kwargs)
    for seed in range(5):
        set_grads(params, seed)
        for param, twin in zip(params, twins, strict=True):
            twin.grad = param.grad.float()
        optimizer.step()
        in_fp32.step()
    for param, twin in zip(params, twins, strict=True):
        assert_identical(optimizer.state[param]["master_param"], twin.detach())
        assert_identical(param.detach(), twin.detach().to(dtype))
        assert "master_param" not in in_fp32.state[twin]


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@both_paths
def test_without_masters_each_step_starts_from_the_parameter(
    optimizer_class: OptimizerClass, dtype: torch.dtype, fused: bool, device: str
) -> None:
    params = make_params(device, dtype, [(33, 17), ()])
    optimizer = optimizer_class(params, master_weights=False, fused=fused, lr=0.1)
    twins = [Parameter(param.detach().float()) for param in params]
    in_fp32 = optimizer_class(twins, fused=fused, lr=0.1)
    for seed in range(3):
        set_grads(params, seed)
        for param, twin in zip(params, twins, strict=True):
            twin.data.copy_(param.detach())
            twin.grad = param.grad.float()
        optimizer.step()
        in_fp32.step()
        assert_identical([p.detach() for p in params], [t.detach().to(dtype) for t in twins])
    assert all("master_param" not in optimizer.state[param] for param in params)


# Gradient scaling


@every_optimizer
@every_input
@both_paths
@pytest.mark.parametrize("scaled", [False, True], ids=["no grad_scale", "grad_scale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_found_inf_changes_nothing(
    optimizer_class: OptimizerClass,
    kwargs: dict[str, Any],
    fused: bool,
    scaled: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    params = make_params(device, dtype)
    before = [param.detach().clone() for param in params]
    optimizer = optimizer_class(params, **kwargs, fused=fused)
    optimizer.grad_scale = torch.ones(1, device=device) if scaled else None
    optimizer.found_inf = torch.ones((), device=device)
    take_steps(optimizer, 2)
    assert_identical([param.detach() for param in params], before)
    for param in params:
        state = optimizer.state[param]
        assert all(not value.any() for name, value in state.items() if name != "master_param")
    optimizer.found_inf = torch.zeros((), device=device)
    take_steps(optimizer, 2)
    never_interrupted = optimizer_class(
        [Parameter(tensor) for tensor in before], **kwargs, fused=fused
    )
    take_steps(never_interrupted, 2)
    assert_same_optimization(optimizer, never_interrupted)

    optimizer.found_inf = torch.ones((), device=device)
    for param in params:
        param.grad = torch.full_like(param, math.inf)
    optimizer.step()
    assert_same_optimization(optimizer, never_interrupted)


@every_optimizer
@every_input
@both_paths
def test_grad_scale_divides_the_gradients(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, device: str
) -> None:
    scaled = optimizer_class(make_params(device), **kwargs, fused=fused)
    unscaled = optimizer_class(make_params(device), **kwargs, fused=fused)
    scaled.grad_scale = torch.full((), 2.0**16, device=device)
    scaled.found_inf = torch.zeros((), device=device)
    params = scaled.param_groups[0]["params"]
    for seed in range(3):
        set_grads(params, seed, scale=2.0**16)
        scaled.step()
        take_steps(unscaled, 1, seed)
    assert_same_optimization(scaled, unscaled)


@every_optimizer
@both_paths
def test_grad_scaler_skips_overflows_and_unscales_the_rest(
    optimizer_class: OptimizerClass, fused: bool, device: str
) -> None:
    problem, unscaled = LeastSquares(device), LeastSquares(device)
    optimizer = optimizer_class(problem.params, fused=fused)
    twin = optimizer_class(unscaled.params, fused=fused)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=100)
    for i in range(4):
        optimizer.zero_grad()
        scaler.scale(problem.loss() * (math.inf if i == 1 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        if i != 1:
            twin.step(unscaled.closure(twin))
    assert scaler.get_scale() == 2.0**9
    assert_same_optimization(optimizer, twin)
    assert optimizer.state[problem.params[0]]["step"].item() == 3


# State dicts


def named(params: list[Parameter], names: bool) -> list[Any]:
    return [(f"name{i}", param) for i, param in enumerate(params)] if names else params


def without_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    state_dict = deepcopy(state_dict)
    for group in state_dict["param_groups"]:
        group.pop("param_names", None)
    return state_dict


@every_optimizer
@every_input
@both_paths
@pytest.mark.parametrize("saved_names", [False, True], ids=["", "saved with names"])
@pytest.mark.parametrize("loaded_names", [False, True], ids=["", "loaded with names"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loaded_optimizer_continues_bit_for_bit(
    optimizer_class: OptimizerClass,
    kwargs: dict[str, Any],
    fused: bool,
    saved_names: bool,
    loaded_names: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    params = make_params(device, dtype)
    optimizer = optimizer_class(named(params, saved_names), **kwargs, fused=fused)
    take_steps(optimizer, 3)
    twins = copies(params)
    resumed = optimizer_class(named(twins, loaded_names), **kwargs, fused=fused)
    saved = deepcopy(optimizer.state_dict())
    untouched = deepcopy(saved)
    resumed.load_state_dict(saved)
    assert_identical(saved, untouched)
    assert_same_optimization(resumed, optimizer)
    for seed in range(10, 13):
        for each in (optimizer, resumed):
            take_steps(each, 1, seed)
        assert_same_optimization(resumed, optimizer)
    assert_identical(saved, untouched)
    assert_identical(without_names(resumed.state_dict()), without_names(optimizer.state_dict()))
    # One parameter in two groups must have one index.
    resumed.param_groups.extend(resumed.param_groups)
    repeated = without_names(resumed.state_dict())["param_groups"][-1]
    assert repeated == without_names(optimizer.state_dict())["param_groups"][-1]


@every_optimizer
@every_input
@both_paths
def test_state_dict_without_newer_flags_loads(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, device: str
) -> None:
    network = inputs.convolution(device)
    optimizer = optimizer_class(network.parameters(), **kwargs, fused=fused)
    take_steps(optimizer, 3)
    old = deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        for flag in inputs.ADAMW.not_og_supported_flags:
            group.pop(flag, None)
    optimizer.load_state_dict(old)
    take_steps(optimizer, 1)
    group = optimizer.param_groups[0]
    assert set(inputs.ADAMW.not_og_supported_flags) <= group.keys()
    assert not any(group[flag] for flag in inputs.REFUSED_FLAGS)


@every_optimizer
@every_input
@pytest.mark.parametrize("saved_names", [False, True], ids=["", "saved with names"])
@pytest.mark.parametrize("loaded_names", [False, True], ids=["", "loaded with names"])
def test_names_survive_a_load_if_either_side_has_them(
    optimizer_class: OptimizerClass,
    kwargs: dict[str, Any],
    saved_names: bool,
    loaded_names: bool,
    device: str,
) -> None:
    def make(names: bool) -> Optimizer:
        network = inputs.convolution(device)
        params = network.named_parameters() if names else network.parameters()
        return optimizer_class(params, **kwargs)

    optimizer, loaded = make(saved_names), make(loaded_names)
    take_steps(optimizer, 3)
    loaded.load_state_dict(deepcopy(optimizer.state_dict()))
    take_steps(loaded, 1)
    group = loaded.state_dict()["param_groups"][0]
    expected = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert group.get("param_names") == (expected if saved_names or loaded_names else None)


@every_optimizer
@every_input
@both_paths
@pytest.mark.parametrize("names", [False, True], ids=["", "names"])
@pytest.mark.parametrize("weights_only", [False, True], ids=["pickle", "weights only"])
def test_saved_state_dict_is_read_back_unchanged(
    optimizer_class: OptimizerClass,
    kwargs: dict[str, Any],
    fused: bool,
    names: bool,
    weights_only: bool,
    device: str,
) -> None:
    params = make_params(device, torch.bfloat16) + make_params(device)
    optimizer = optimizer_class(named(params, names), **kwargs, fused=fused)
    take_steps(optimizer, 2)
    file = BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)
    assert_identical(loaded, optimizer.state_dict())


@every_input
@both_paths
@pytest.mark.parametrize("number", [int, float])
def test_step_may_be_a_number_in_the_state_dict(
    kwargs: dict[str, Any],
    fused: bool,
    number: type,
    device: str,
) -> None:
    optimizer = FP4Adam(make_params(device), **kwargs, fused=fused)
    take_steps(optimizer, 3)
    state_dict = deepcopy(optimizer.state_dict())
    for state in state_dict["state"].values():
        state["step"] = number(state["step"].item())
    loaded = FP4Adam(copies(optimizer.param_groups[0]["params"], device), **kwargs, fused=fused)
    loaded.load_state_dict(state_dict)
    for each in (loaded, optimizer):
        take_steps(each, 1)
    assert_same_optimization(loaded, optimizer)


@needs_cuda
@every_optimizer
@every_input
@both_paths
@every_dtype
def test_state_dict_moves_from_cpu_to_cuda(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, dtype: torch.dtype
) -> None:
    params = make_params("cpu", dtype)
    optimizer = optimizer_class(params, **kwargs)
    take_steps(optimizer, 3)
    on_cuda = optimizer_class(copies(params, "cuda"), **kwargs, fused=fused)
    state_dict = deepcopy(optimizer.state_dict())
    for group in state_dict["param_groups"]:
        group["fused"] = fused
    untouched = deepcopy(state_dict)
    on_cuda.load_state_dict(state_dict)
    assert_identical(state_dict, untouched)
    for seed in range(5):
        for each in (optimizer, on_cuda):
            take_steps(each, 1, seed)
        assert_same_optimization(on_cuda, optimizer)
    for state in on_cuda.state_dict()["state"].values():
        devices = {name: value.device.type for name, value in state.items()}
        assert devices == {name: "cpu" if name == "step" else "cuda" for name in state}


@needs_cuda
@every_optimizer
@every_input
@both_paths
@every_dtype
def test_cpu_equals_cuda(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, dtype: torch.dtype
) -> None:
    shapes = [(3, 2), (3,), (), (0,), (129, 67), (4096,)]
    optimizers = [
        optimizer_class(make_params(device, dtype, shapes), **kwargs, fused=fused)
        for device in ("cpu", "cuda")
    ]
    for seed in range(7):
        for optimizer in optimizers:
            params = optimizer.param_groups[0]["params"]
            set_grads(params, seed)
            if seed == 2:
                params[0].grad = None
            optimizer.step()
        if dtype != torch.float64:
            assert_same_optimization(*optimizers)
    if dtype == torch.float64:
        # torch's float64 square roots on the CPU and on the GPU differ in the last bit.
        found, expected = (o.param_groups[0]["params"] for o in optimizers)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15, check_device=False)


@needs_cuda
@pytest.mark.skipif(
    inputs.DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 90 * 2**30,
    reason="needs 90 GiB of free GPU memory",
)
def test_every_element_of_a_tensor_beyond_32_bit_indices_is_updated() -> None:
    n = 2**32 + 3
    marks = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, n - 1]
    param = Parameter(torch.ones(n, device="cuda", dtype=torch.float16))
    param.grad = torch.zeros_like(param)
    param.grad[marks] = torch.arange(1.0, 8.0, device="cuda", dtype=torch.float16)
    twin = Parameter(torch.ones(len(marks), device="cuda", dtype=torch.float16))
    twin.grad = param.grad[marks]
    optimizers = [
        inputs.OPTIMIZERS[0]([each], lr=0.1, weight_decay=0.0, fused=True) for each in (param, twin)
    ]
    for optimizer in optimizers:
        optimizer.step()
    assert_identical(param[marks].detach(), twin.detach())
    assert int((param != 1).sum()) == len(marks)


# Hooks


def put_key(optimizer: Optimizer) -> None:
    optimizer.state["test"] = 1


def report_key(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state_dict["found"] = state_dict["state"].pop("test", None) is not None
    return state_dict


@every_optimizer
@every_input
@both_paths
def test_state_dict_hooks_run_around_it(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, device: str
) -> None:
    def make() -> Optimizer:
        return optimizer_class(make_params(device), **kwargs, fused=fused)

    before = make()
    before.register_state_dict_pre_hook(put_key)
    assert before.state_dict()["state"]["test"] == 1
    after = make()
    after.register_state_dict_post_hook(report_key)
    assert after.state_dict()["found"] is False
    both = make()
    both.register_state_dict_pre_hook(put_key)
    both.register_state_dict_post_hook(report_key)
    state_dict = both.state_dict()
    assert state_dict["found"] is True
    assert "test" not in state_dict["state"]


@every_optimizer
@every_input
@both_paths
def test_load_state_dict_hooks_run_around_it(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, device: str
) -> None:
    def set_lr(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"][0]["lr"] = 0.002

    def replace(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state_dict = deepcopy(state_dict)
        state_dict["param_groups"][0]["lr"] = 0.003
        return state_dict

    def note_lr(optimizer: Optimizer) -> None:
        optimizer.state["lr when loaded"] = optimizer.param_groups[0]["lr"]

    def make() -> Optimizer:
        optimizer = optimizer_class(make_params(device), **kwargs, fused=fused)
        take_steps(optimizer, 1)
        return optimizer

    optimizer = make()
    optimizer.register_load_state_dict_pre_hook(set_lr)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.002
    # Prepended, so its change is overwritten by the hook that was there first.
    optimizer.register_load_state_dict_pre_hook(replace, prepend=True)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.002

    optimizer = make()
    optimizer.register_load_state_dict_post_hook(note_lr)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["lr when loaded"] == optimizer.defaults["lr"]

    optimizer = make()
    optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.register_load_state_dict_post_hook(note_lr)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["lr when loaded"] == 0.003


Hook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]


@every_optimizer
@every_input
@both_paths
def test_step_hooks_run_in_order_until_removed(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, device: str
) -> None:
    calls: list[str] = []

    def note(name: str) -> Hook:
        return lambda optimizer, args, kwargs: calls.append(name)

    counter = torch.tensor([1, 1], device=device)
    optimizer = optimizer_class([counter, *make_params(device)], **kwargs, fused=fused)
    handles = [
        optimizer.register_step_pre_hook(note("pre")),
        optimizer.register_step_post_hook(note("post")),
    ]
    optimizer.step()
    optimizer.step()
    assert calls == ["pre", "post"] * 2
    calls.clear()

    other = torch.optim.SGD([counter])
    handles += [
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
        other.register_step_pre_hook(note("pre")),
        other.register_step_post_hook(note("post")),
    ]
    try:
        for each in (optimizer, other, optimizer):
            each.step()
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["global pre", "pre", "post", "global post"] * 3
    for each in (optimizer, other):
        each.step()
    assert len(calls) == 12


def public_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Attributes without an underscore, less the three that hold tensors."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_") and name not in ("defaults", "param_groups", "state")
    }


def pickled(optimizer: Optimizer) -> Optimizer:
    return pickle.loads(pickle.dumps(optimizer))


@every_optimizer
@every_input
@both_paths
@pytest.mark.parametrize("copy", [deepcopy, pickled])
def test_copy_of_the_optimizer_is_complete_and_independent(
    optimizer_class: OptimizerClass,
    kwargs: dict[str, Any],
    fused: bool,
    copy: Callable[[Optimizer], Optimizer],
    device: str,
) -> None:
    params = make_params(device) + make_params(device, torch.bfloat16)
    optimizer = optimizer_class(params, **kwargs, fused=fused, master_weights=False)
    take_steps(optimizer, 3)
    copied = copy(optimizer)
    assert public_attributes(copied) == public_attributes(optimizer)
    assert_same_optimization(copied, optimizer)
    before = [param.detach().clone() for param in params]
    take_steps(copied, 2)
    assert_identical([param.detach() for param in params], before)
    take_steps(optimizer, 2)
    assert_same_optimization(copied, optimizer)


# In place of torch.optim.AdamW and torch.optim.Adam

N_STEPS = 12
SHAPES_TO_COMPARE = [(64, 33), (257,), ()]


def trajectory(
    optimizer_class: OptimizerClass, device: str, dtype: torch.dtype, **kwargs: Any
) -> Optimizer:
    """N_STEPS steps with gradients over several orders of magnitude, equal for all dtypes."""
    params = [
        Parameter(param.detach().to(dtype))
        for param in make_params(device, shapes=SHAPES_TO_COMPARE)
    ]
    optimizer = optimizer_class(params, **kwargs)
    for seed in range(N_STEPS):
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            grad, exponent = torch.randn((2, *param.shape), generator=generator)
            param.grad = (grad * exponent.exp2()).to(device, dtype)
        optimizer.step()
    return optimizer


def flat(optimizer: Optimizer) -> Tensor:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return torch.cat([param.detach().double().reshape(-1) for param in params])


def assert_as_accurate(actual: Tensor, torchs: Tensor, exact: Tensor) -> None:
    """The largest and the mean error stay near those of torch's float32 optimizer."""
    error, torch_error = (actual - exact).abs(), (torchs - exact).abs()
    ulp = FP32_EPS * exact.abs()
    assert error.max() <= 1.5 * torch_error.max() + 2 * ulp.max()
    assert error.mean() <= 1.5 * torch_error.mean() + 0.5 * ulp.mean()
    # Element by element as well, with the slack of the largest value.
    assert (error <= torch_error.max() * 1.5 + 2 * ulp).all()


ADAM_INPUTS = pytest.mark.parametrize(
    "kwargs",
    [
        *inputs.adamw_inputs(),
        pytest.param(dict(lr=0.1, betas=(0.6, 0.9), eps=3e-6), id="betas and eps"),
        pytest.param(dict(amsgrad=True, maximize=True), id="amsgrad, maximize"),
        pytest.param(dict(weight_decay=0.0), id="no weight_decay"),
    ],
)


@every_optimizer
@ADAM_INPUTS
@both_paths
def test_steps_are_as_accurate_as_adamw(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, device: str
) -> None:
    ours = trajectory(optimizer_class, device, torch.float32, **kwargs, fused=fused)
    adamw = trajectory(AdamW, device, torch.float32, **kwargs)
    exact = trajectory(AdamW, device, torch.float64, **kwargs)
    assert_close(flat(ours), flat(adamw), rtol=4e-6, atol=4e-6)
    assert_as_accurate(flat(ours), flat(adamw), flat(exact))


@every_optimizer
@ADAM_INPUTS
@both_paths
def test_l2_mode_is_as_accurate_as_adam(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, device: str
) -> None:
    kwargs = {"weight_decay": 0.0, **kwargs}
    ours = trajectory(
        optimizer_class, device, torch.float32, **kwargs, adam_w_mode=False, fused=fused
    )
    adam = trajectory(Adam, device, torch.float32, **kwargs)
    exact = trajectory(Adam, device, torch.float64, **kwargs)
    assert_close(flat(ours), flat(adam), rtol=4e-6, atol=4e-6)
    assert_as_accurate(flat(ours), flat(adam), flat(exact))


@every_optimizer
@both_paths
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["AdamW", "L2"])
def test_bias_correction_can_be_turned_off(
    optimizer_class: OptimizerClass, fused: bool, adam_w_mode: bool, device: str
) -> None:
    lr, (beta1, beta2), eps, weight_decay = 0.05, (0.8, 0.95), 1e-6, 0.1
    params = make_params(device, shapes=[(17, 5), ()])
    expected = [param.detach().double() for param in params]
    moments = [(torch.zeros_like(param), torch.zeros_like(param)) for param in expected]
    optimizer = optimizer_class(
        params,
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        bias_correction=False,
        adam_w_mode=adam_w_mode,
        fused=fused,
    )
    for seed in range(10):
        set_grads(params, seed)
        for param, value, (m, v) in zip(params, expected, moments, strict=True):
            grad = param.grad.double()
            if adam_w_mode:
                value.mul_(1 - lr * weight_decay)
            else:
                grad = grad + weight_decay * value
            m.mul_(beta1).add_((1 - beta1) * grad)
            v.mul_(beta2).add_((1 - beta2) * grad**2)
            value.sub_(lr * m / (v.sqrt() + eps))
        optimizer.step()
    for param, value in zip(params, expected, strict=True):
        assert_close(param.detach().double(), value, rtol=2e-6, atol=2e-6)


@every_optimizer
@every_input
@both_paths
def test_non_finite_gradients_spread_as_with_adamw(
    optimizer_class: OptimizerClass, kwargs: dict[str, Any], fused: bool, device: str
) -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1e-30, 1e30, 3e38], device=device)
    params = make_params(device, shapes=[(7,)])
    twins = copies(params)
    optimizer, adamw = optimizer_class(params, **kwargs, fused=fused), AdamW(twins, **kwargs)
    for step in range(3):
        params[0].grad = values if step == 0 else torch.ones_like(values)
        twins[0].grad = params[0].grad.clone()
        optimizer.step()
        adamw.step()
        assert_close(params[0], twins[0], equal_nan=True)


@every_optimizer
@both_paths
def test_decoupled_gradients_are_read_instead_of_grad(
    optimizer_class: OptimizerClass, fused: bool, device: str
) -> None:
    params = make_params(device, torch.bfloat16)
    twins = copies(params)
    optimizer = optimizer_class(params, use_decoupled_grad=True, fused=fused)
    twin = optimizer_class([Parameter(each.detach().float()) for each in twins], fused=fused)
    for seed in range(3):
        take_steps(twin, 1, seed)
        for param, other in zip(params, twin.param_groups[0]["params"], strict=True):
            # A float32 gradient cannot be assigned to .grad of a bfloat16 parameter.
            param.decoupled_grad = other.grad.clone()
            param.grad = torch.full_like(param, math.nan)
        optimizer.step()
    for param, other in zip(params, twin.param_groups[0]["params"], strict=True):
        assert_identical(optimizer.state[param]["master_param"], other.detach())
    optimizer.zero_grad()
    assert all(param.decoupled_grad is None for param in params)
    before = [param.detach().clone() for param in params]
    optimizer.step()
    assert_identical([param.detach() for param in params], before)


@every_optimizer
@every_input
@both_paths
@pytest.mark.parametrize(
    "saved_with",
    [
        {},
        {"fused": True},
        {"foreach": True},
        pytest.param({"capturable": True}, marks=needs_cuda),
        pytest.param({"capturable": True, "fused": True}, marks=needs_cuda),
    ],
    ids=str,
)
def test_adamw_checkpoint_continues(
    optimizer_class: OptimizerClass,
    kwargs: dict[str, Any],
    fused: bool,
    saved_with: dict[str, bool],
    device: str,
) -> None:
    params = make_params(device, shapes=SHAPES_TO_COMPARE)
    adamw = AdamW(params, **kwargs, **saved_with)
    take_steps(adamw, 5)
    optimizer = optimizer_class(copies(params), **kwargs, fused=fused)
    optimizer.load_state_dict(deepcopy(adamw.state_dict()))
    assert flat(optimizer).equal(flat(adamw))
    for each in (adamw, optimizer):
        take_steps(each, 5, first_seed=200)
    assert_close(flat(optimizer), flat(adamw), rtol=2e-6, atol=2e-6)
    for param, twin in zip(params, optimizer.param_groups[0]["params"], strict=True):
        assert optimizer.state[twin]["step"].item() == adamw.state[param]["step"].item() == 10


@every_input
@both_paths
def test_adamw_continues_from_our_checkpoint(
    kwargs: dict[str, Any], fused: bool, device: str
) -> None:
    params = make_params(device, shapes=SHAPES_TO_COMPARE)
    optimizer = FP4Adam(params, **kwargs, fused=fused)
    take_steps(optimizer, 5)
    adamw = AdamW(copies(params), **kwargs)
    adamw.load_state_dict(deepcopy(optimizer.state_dict()))
    for each in (adamw, optimizer):
        take_steps(each, 5, first_seed=200)
    assert_close(flat(adamw), flat(optimizer), rtol=2e-6, atol=2e-6)


# With quantized parameters


@every_input
@both_paths
@every_quantizer
@pytest.mark.parametrize("scheduled", [False, True], ids=["constant lr", "schedulers"])
def test_loss_through_quantized_weights_goes_in_the_right_direction(
    kwargs: dict[str, Any], fused: bool, quantizer: Quantizer, scheduled: bool, device: str
) -> None:
    weight, bias = (
        make_quantized_params(device, quantizer)[2],
        make_params(device, shapes=[(64,)])[0],
    )
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).to(device)
    optimizer = FP4Adam([weight, bias], **{**kwargs, "lr": 0.03}, fused=fused)
    schedulers = [StepLR(optimizer, gamma=0.9, step_size=10)] if scheduled else []

    def loss() -> Tensor:
        return torch.nn.functional.linear(x, weight, bias).square().mean()

    start = loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    change = loss().item() - start
    assert change > 0 if kwargs.get("maximize") else change < 0


@every_input
@both_paths
@every_quantizer
def test_masters_of_quantized_weights_follow_adamw(
    kwargs: dict[str, Any], fused: bool, quantizer: Quantizer, device: str
) -> None:
    params = make_quantized_params(device, quantizer)
    plain = [Parameter(param.detach().dequantize(torch.float32)) for param in params[::2]]
    optimizer, adamw = FP4Adam(params, **kwargs, fused=fused), AdamW(plain, **kwargs)
    for seed in range(N_STEPS):
        set_grads(params, seed)
        for param, twin in zip(params[::2], plain, strict=True):
            twin.grad = param.grad.float()
        optimizer.step()
        adamw.step()
    for param, twin in zip(params[::2], plain, strict=True):
        master = optimizer.state[param]["master_param"]
        assert_close(master, twin.detach(), rtol=4e-6, atol=4e-6)
        expected = quantizer.quantize(master)
        assert_identical(param.detach().storage_tensors(), expected.storage_tensors())


@every_quantizer
def test_fused_equals_operators_with_quantized_weights(quantizer: Quantizer, device: str) -> None:
    optimizers = [
        FP4Adam(make_quantized_params(device, quantizer), amsgrad=True, maximize=True, fused=fused)
        for fused in (False, True)
    ]
    for i in range(2):
        for optimizer in optimizers:
            params = optimizer.param_groups[0]["params"]
            set_grads(params, seed=i)
            if i == 0:
                params[0].grad = None
            step_by_kernels(optimizer)
        assert_same_optimization(*optimizers)
    steps = [optimizers[1].state[p]["step"].item() for p in optimizers[1].param_groups[0]["params"]]
    assert steps == [1, 2, 2]


@needs_cuda
@every_input
@both_paths
@every_quantizer
def test_cpu_equals_cuda_with_quantized_weights(
    kwargs: dict[str, Any], fused: bool, quantizer: Quantizer
) -> None:
    optimizers = [
        FP4Adam(make_quantized_params(device, quantizer), **kwargs, fused=fused)
        for device in ("cpu", "cuda")
    ]
    for seed in range(5):
        for optimizer in optimizers:
            take_steps(optimizer, 1, seed)
        assert_same_optimization(*optimizers)


@every_input
@both_paths
@every_quantizer
def test_quantized_weights_keep_their_bytes_without_an_update(
    kwargs: dict[str, Any], fused: bool, quantizer: Quantizer, device: str
) -> None:
    params = make_quantized_params(device, quantizer)
    before = [param.detach().clone() for param in params]
    optimizer = FP4Adam(params, **{**kwargs, "weight_decay": 0.0}, fused=fused)
    optimizer.step()
    assert not any(optimizer.state[param] for param in params)
    for param in params:
        param.grad = torch.zeros(param.shape, dtype=param.dtype, device=device)
    optimizer.found_inf = torch.ones((), device=device)
    optimizer.step()
    assert_identical([param.detach() for param in params], before)
    optimizer.found_inf = None
    set_grads(params, seed=0)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert_identical([param.detach() for param in params], before)


@every_input
@both_paths
@every_quantizer
def test_gradients_of_quantized_weights_are_never_written(
    kwargs: dict[str, Any], fused: bool, quantizer: Quantizer, device: str
) -> None:
    params = make_quantized_params(device, quantizer)
    optimizer = FP4Adam(params, **kwargs, fused=fused)
    set_grads(params, seed=0)
    versions = [param.grad._version for param in params]
    values = [param.grad.clone() for param in params]
    optimizer.step()
    assert [param.grad._version for param in params] == versions
    assert_identical([param.grad for param in params], values)


@both_paths
@every_quantizer
def test_autograd_sees_that_a_step_changed_quantized_weights(
    fused: bool, quantizer: Quantizer, device: str
) -> None:
    weight = make_quantized_params(device, quantizer)[2]
    x = torch.ones(2, 32, device=device, requires_grad=True)
    loss = torch.nn.functional.linear(x, weight).sum()
    optimizer = FP4Adam([weight], fused=fused)
    take_steps(optimizer, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@both_paths
@every_quantizer
def test_groups_of_quantized_weights_have_their_own_hyper_parameters(
    fused: bool, quantizer: Quantizer, device: str
) -> None:
    params = make_quantized_params(device, quantizer)
    twins = copies(params)
    own = [{"lr": 0.1}, {"weight_decay": 0.5}, {"lr": torch.tensor(0.25), "weight_decay": 0.0}]
    groups = [{"params": [param], **each} for param, each in zip(params, own, strict=True)]
    grouped = FP4Adam(groups[:2], fused=fused)
    grouped.add_param_group(groups[2])
    apart = [FP4Adam([twin], **each, fused=fused) for twin, each in zip(twins, own, strict=True)]
    for seed in range(3):
        set_grads(params, seed)
        for param, twin, optimizer in zip(params, twins, apart, strict=True):
            twin.grad = param.grad.clone()
            optimizer.step()
        grouped.step()
    assert_identical(params, twins)


@every_input
@both_paths
@every_quantizer
def test_grad_scaling_works_with_quantized_weights(
    kwargs: dict[str, Any], fused: bool, quantizer: Quantizer, device: str
) -> None:
    scaled = FP4Adam(make_quantized_params(device, quantizer), **kwargs, fused=fused)
    unscaled = FP4Adam(make_quantized_params(device, quantizer), **kwargs, fused=fused)
    scaled.grad_scale = torch.full((1,), 2.0**16, device=device)
    params = scaled.param_groups[0]["params"]
    for seed in range(4):
        scaled.found_inf = torch.tensor(float(seed == 1), device=device)
        set_grads(params, seed, scale=math.inf if seed == 1 else 2.0**16)
        scaled.step()
        if seed != 1:
            take_steps(unscaled, 1, seed)
    assert_same_optimization(scaled, unscaled)


@every_input
@both_paths
@every_quantizer
@pytest.mark.parametrize("names", [False, True], ids=["", "names"])
def test_saved_quantized_training_continues_bit_for_bit(
    kwargs: dict[str, Any], fused: bool, quantizer: Quantizer, names: bool, device: str
) -> None:
    params = make_quantized_params(device, quantizer)
    optimizer = FP4Adam(named(params, names), **kwargs, fused=fused)
    take_steps(optimizer, 3)
    file = BytesIO()
    torch.save((optimizer.state_dict(), [param.detach() for param in params]), file)
    file.seek(0)
    state_dict, values = torch.load(file, weights_only=True)
    assert_identical(state_dict, optimizer.state_dict())
    resumed = FP4Adam(named([Parameter(value) for value in values], names), **kwargs, fused=fused)
    resumed.load_state_dict(state_dict)
    assert_same_optimization(resumed, optimizer)
    for seed in range(10, 13):
        for each in (optimizer, resumed):
            take_steps(each, 1, seed)
        assert_same_optimization(resumed, optimizer)


@every_input
@both_paths
@every_quantizer
def test_deep_copy_with_quantized_weights_is_independent(
    kwargs: dict[str, Any], fused: bool, quantizer: Quantizer, device: str
) -> None:
    params = make_quantized_params(device, quantizer)
    optimizer = FP4Adam(params, **kwargs, fused=fused, quantize_from="param_dtype")
    take_steps(optimizer, 2)
    copied = deepcopy(optimizer)
    assert copied.quantize_from == "param_dtype"
    before = [param.detach().clone() for param in params]
    take_steps(copied, 2)
    assert_identical([param.detach() for param in params], before)
    take_steps(optimizer, 2)
    assert_same_optimization(copied, optimizer)


@both_paths
@every_quantizer
def test_closure_and_decoupled_gradients_work_with_quantized_weights(
    fused: bool, quantizer: Quantizer, device: str
) -> None:
    params = make_quantized_params(device, quantizer)
    twins = copies(params)
    optimizer = FP4Adam(params, fused=fused)
    decoupled = FP4Adam(twins, fused=fused, use_decoupled_grad=True)
    for seed in range(2):
        set_grads(params, seed)
        for param, twin in zip(params, twins, strict=True):
            twin.decoupled_grad = param.grad.float()
        assert optimizer.step(lambda: 2.5) == decoupled.step(lambda: 2.5) == 2.5
    assert_same_optimization(decoupled, optimizer)
