"""FP4Adam: masters, bytes, refusals and overwrites, for every format beside plain parameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.testing import assert_close

from fp4adam import FP4Adam, QuantizedTensor, Quantizer, quantize_model
from helpers import (
    QUANTIZERS,
    RECIPES,
    SHAPES,
    addresses,
    all_params,
    assert_bytes_are_of_masters,
    assert_identical,
    make_mlp,
    make_params,
    make_weight,
    quantized,
    random,
    set_grads,
    snapshot,
    take_steps,
)

FP32_EPS = torch.finfo(torch.float32).eps
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS.keys())
every_recipe = pytest.mark.parametrize("quantizer", RECIPES.values(), ids=RECIPES.keys())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
both_sources = pytest.mark.parametrize("quantize_from", ["master", "param_dtype"])
both_modes = pytest.mark.parametrize("adam_w_mode", [True, False], ids=["AdamW", "L2"])
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# Construction


@pytest.mark.parametrize("flag", ["capturable", "differentiable"])
def test_refused_flag_is_named_with_reason_and_cure(flag: str, device: str) -> None:
    reason = {"capturable": "CUDA graph.*outside", "differentiable": "in-place.*torch.optim.AdamW"}
    params = make_params(RECIPES["nvfp4"], device)
    message = f"(?s){flag} must be False for .*, got True: .*{reason[flag]}"
    with pytest.raises(NotImplementedError, match=message):
        FP4Adam(params, **{flag: True})
    error = NotImplementedError
    if flag == "capturable":  # of plain parameters it is possible, but for all groups alike
        error, message = ValueError, "capturable must be the same for all groups"
    with pytest.raises(error, match=message):
        FP4Adam([{"params": params[:1]}, {"params": params[1:], flag: True}])
    optimizer = FP4Adam(params[:3])
    take_steps(optimizer, [0])
    before = snapshot(optimizer)
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": params[3:], flag: True})
    assert_identical(snapshot(optimizer), before)


def test_quantized_parameters_need_masters(device: str) -> None:
    quantizer = RECIPES["nvfp4"]
    params = make_params(quantizer, device)
    message = f"master_weights must be True for {quantizer.tensor_class.__name__}.*got False"
    with pytest.raises(ValueError, match=message):
        FP4Adam(params, master_weights=False)
    optimizer = FP4Adam(params[:1], master_weights=False)
    take_steps(optimizer, [0])
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": params[1:], "lr": 0.5})
    assert_identical(snapshot(optimizer), before)
    # The refused parameters are not taken for known ones afterwards.
    optimizer.add_param_group({"params": params[2:3]})
    take_steps(optimizer, [1])


def test_unknown_quantize_from_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="quantize_from must be one of master, param_dtype, got"):
        FP4Adam(make_params(RECIPES["nvfp4"], device), quantize_from="bf16")


@pytest.mark.parametrize("kind", ["complex", "sparse"])
def test_parameters_that_adam_cannot_update_are_refused(kind: str, device: str) -> None:
    tensor = torch.zeros(4, 4, device=device)
    param = Parameter(tensor.to(torch.complex64) if kind == "complex" else tensor.to_sparse())
    weight = make_weight(RECIPES["nvfp4"], device)
    with pytest.raises(ValueError, match="view_as_real" if kind == "complex" else "SparseAdam"):
        FP4Adam([weight, param])
    optimizer = FP4Adam([weight])
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="parameters must be"):
        optimizer.add_param_group({"params": [Parameter(torch.zeros(4, device=device)), param]})
    assert_identical(snapshot(optimizer), before)


def _with_grad(param: Tensor, grad: Tensor) -> Tensor:
    param.decoupled_grad = grad
    return param


def _unusable(kind: str, device: str) -> Tensor:
    """A parameter whose gradient cannot be applied."""
    param, weight = Parameter(random((64, 96), 1, device)), make_weight(RECIPES["nvfp4"], device)
    grad = torch.ones(64, 96, device=device)
    meta = torch.ones(64, 96, device="meta")
    integer = Parameter(torch.ones(4, dtype=torch.int32, device=device), requires_grad=False)
    float8 = Parameter(torch.ones(4, device=device).to(torch.float8_e4m3fn), requires_grad=False)
    cases: dict[str, Callable[[], Tensor]] = {
        "integer gradient": lambda: _with_grad(weight, grad.int()),
        "complex gradient": lambda: _with_grad(weight, grad.to(torch.complex64)),
        "float64 gradient": lambda: _with_grad(weight, grad.double()),
        "8-bit gradient of float64": lambda: _with_grad(
            Parameter(param.double()), grad.to(torch.float8_e4m3fn)
        ),
        "quantized gradient": lambda: _with_grad(param, weight.detach()),
        "gradient of another shape": lambda: _with_grad(weight, grad[1:]),
        "gradient on another device": lambda: _with_grad(weight, meta),
        "sparse gradient": lambda: _with_grad(weight, grad.to_sparse()),
        "integer parameter": lambda: _with_grad(integer, grad[0, :4]),
        "8-bit plain parameter": lambda: _with_grad(float8, grad[0, :4]),
        "meta parameter": lambda: _with_grad(
            Parameter(RECIPES["nvfp4"].make_empty((64, 96), device="meta")), meta
        ),
    }
    return cases[kind]()


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("integer gradient", TypeError, "gradients must be float32.*got torch.int32"),
        ("complex gradient", TypeError, "gradients must be float32.*got torch.complex64"),
        ("float64 gradient", TypeError, "gradients must be float32.*got torch.float64"),
        ("8-bit gradient of float64", TypeError, "gradients must be float32.*float8_e4m3fn"),
        ("quantized gradient", TypeError, "gradients must be plain tensors.*NVFP4Tensor"),
        ("gradient of another shape", ValueError, r"shape.*\(64, 96\).*got \(63, 96\)"),
        ("gradient on another device", ValueError, "shape and device.*on meta"),
        ("sparse gradient", RuntimeError, "sparse gradients, got.*SparseAdam"),
        ("integer parameter", RuntimeError, "floating point Tensors.*got torch.int32"),
        ("8-bit plain parameter", TypeError, "parameters must be float64.*float8_e4m3fn"),
        ("meta parameter", RuntimeError, "on meta; materialize them"),
    ],
)
def test_unusable_gradient_leaves_every_parameter_alone(
    kind: str, error: type[Exception], message: str, device: str
) -> None:
    params = make_params(RECIPES["nvfp4"], device)
    optimizer = FP4Adam(params, use_decoupled_grad=True)
    set_grads(params, seed=0, dtype=torch.float32)
    optimizer.step()
    optimizer.add_param_group({"params": [_unusable(kind, device)]})
    known = FP4Adam(params)
    known.state = optimizer.state
    before = snapshot(known)
    set_grads(params, seed=1, dtype=torch.float32)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert_identical(snapshot(known), before)
    assert not optimizer.state.get(optimizer.param_groups[1]["params"][0])


def test_unusable_gradient_of_a_known_parameter(device: str) -> None:
    params = make_params(RECIPES["nvfp4"], device)
    optimizer = FP4Adam(params, use_decoupled_grad=True, fused=False)
    set_grads(params, seed=0, dtype=torch.float32)
    optimizer.step()
    before = snapshot(optimizer)
    params[-1].decoupled_grad = params[-1].decoupled_grad.int()
    with pytest.raises(TypeError, match="gradients must be float32.*got torch.int32"):
        optimizer.step()
    assert_identical(snapshot(optimizer), before)


def test_wrong_gradient_of_a_new_parameter_creates_no_state(device: str) -> None:
    params = make_params(RECIPES["mxfp8"], device)
    optimizer = FP4Adam(params, use_decoupled_grad=True)
    set_grads(params, seed=0, dtype=torch.float32)
    params[-1].decoupled_grad = torch.ones(3, device=device)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="shape and device"):
        optimizer.step()
    assert len(optimizer.state) == 0
    assert_identical(snapshot(optimizer), before)


@pytest.mark.parametrize("moved", [True, False], ids=["device", "shape"])
def test_state_that_does_not_belong_to_its_parameter_is_refused(moved: bool, device: str) -> None:
    """As after moving or resizing the model under the optimizer."""
    params = make_params(RECIPES["nvfp4"], device)
    optimizer = FP4Adam(params)
    take_steps(optimizer, [0])
    state = optimizer.state[params[-1]]
    exp_avg = state["exp_avg"]
    state["exp_avg"] = exp_avg.to("meta") if moved else exp_avg[:16].clone()
    others = FP4Adam(params[:-1])
    others.state = optimizer.state
    before = snapshot(others)
    set_grads(params, seed=1)
    with pytest.raises(RuntimeError, match="the state must have the shape and device of its param"):
        optimizer.step()
    assert_identical(snapshot(others), before)


@needs_cuda
def test_state_follows_a_moved_model_when_it_is_loaded_again() -> None:
    model = make_mlp(RECIPES["nvfp4"], "cpu")
    optimizer = FP4Adam(model.parameters())
    take_steps(optimizer, range(2))
    twin = copy.deepcopy(optimizer)
    model.cuda()
    set_grads(model.parameters(), 2)
    with pytest.raises(RuntimeError, match="load_state_dict.*moves it"):
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    for each in (optimizer, twin):
        take_steps(each, [2])
    assert_identical(snapshot(optimizer)["params"], snapshot(twin)["params"])


# Masters


@every_quantizer
@every_dtype
def test_masters_are_made_at_the_first_gradient_from_the_best_value_known(
    quantizer: Quantizer, dtype: torch.dtype, device: str
) -> None:
    kept = make_weight(quantizer, device, dtype=dtype, keeps_value=True)
    decoded = make_weight(quantizer, device, dtype=dtype, seed=1)
    idle = make_weight(quantizer, device, dtype=dtype, seed=2, keeps_value=True)
    value, codes = kept.get_high_precision_init_val(), decoded.detach().dequantize(torch.float32)
    optimizer = FP4Adam([kept, decoded, idle], lr=0.0)
    assert len(optimizer.state) == 0
    set_grads([kept, decoded], seed=0)
    optimizer.step()
    assert_identical(optimizer.state[kept]["master_param"], value.float())
    assert_identical(optimizer.state[decoded]["master_param"], codes)
    for param in (kept, decoded):
        state = optimizer.state[param]
        assert {state[n].dtype for n in ("exp_avg", "exp_avg_sq", "master_param")} == {
            torch.float32
        }
        assert all(type(state[name]) is Tensor for name in state)
        assert param._high_precision_init_val is None
    assert idle not in optimizer.state
    assert idle._high_precision_init_val is not None


def test_value_before_quantization_may_be_finer_than_the_nominal_dtype(device: str) -> None:
    param = make_weight(RECIPES["nvfp4"], device, dtype=torch.bfloat16)
    value = random(SHAPES[0], 5, device)
    param._high_precision_init_val = value
    optimizer = FP4Adam([param], weight_decay=0.0)
    param.grad = torch.zeros(SHAPES[0], dtype=torch.bfloat16, device=device)
    optimizer.step()
    assert_identical(optimizer.state[param]["master_param"], value)
    assert_bytes_are_of_masters(optimizer)


def test_training_writes_into_no_tensor_from_before_quantization(device: str) -> None:
    model = nn.Linear(64, 32, device=device)
    saved = model.state_dict()["weight"]
    before = saved.clone()
    quantize_model(model, "nvfp4")
    take_steps(FP4Adam(model.parameters(), lr=0.1), range(2))
    assert_identical(saved, before)


def test_only_parameters_that_lose_bits_have_masters(device: str) -> None:
    params = make_params(RECIPES["nvfp4"], device)
    optimizer = FP4Adam(params)
    take_steps(optimizer, [0])
    for param in params:
        narrow = isinstance(param, QuantizedTensor) or param.dtype != torch.float32
        assert ("master_param" in optimizer.state[param]) == narrow


# Arithmetic


class Trajectory:
    """Twins of quantized weights and a plain bias, stepped by an optimizer of torch."""

    def __init__(self, params: list[Parameter], torch_class: type, dtype: torch.dtype) -> None:
        self.params = [Parameter(start_of(param).to(dtype)) for param in params]
        self.torch_class = torch_class

    def optimizer(self, **options: Any) -> Any:
        return self.torch_class(self.params, **options)

    def follow(self, params: list[Parameter]) -> None:
        for twin, param in zip(self.params, params, strict=True):
            grad = getattr(param, "decoupled_grad", param.grad)
            twin.grad = None if grad is None else grad.to(twin.dtype)


def start_of(param: Tensor) -> Tensor:
    """The value that training has to start from, in FP32."""
    if not isinstance(param, QuantizedTensor):
        return param.detach().float()
    value = param._high_precision_init_val
    return param.detach().dequantize(torch.float32) if value is None else value.float()


def current(optimizer: FP4Adam) -> Tensor:
    """All masters, or parameters where there is no master, in one FP64 vector."""
    values = [optimizer.state[p].get("master_param", p) for p in all_params(optimizer)]
    return torch.cat([value.detach().double().reshape(-1) for value in values])


def assert_follows(optimizer: FP4Adam, fp32: Trajectory, exact: Trajectory) -> None:
    """Close to torch's FP32 result, and not farther from FP64 than that is."""
    ours = current(optimizer)
    torchs, exacts = (
        torch.cat([param.detach().double().reshape(-1) for param in each.params])
        for each in (fp32, exact)
    )
    assert_close(ours, torchs, rtol=4e-6, atol=4e-6)
    error, torch_error = (ours - exacts).abs(), (torchs - exacts).abs()
    ulp = FP32_EPS * exacts.abs()
    assert error.max() <= 1.5 * torch_error.max() + 2 * ulp.max()
    assert error.mean() <= 1.5 * torch_error.mean() + 0.5 * ulp.mean()


@every_quantizer
@both_modes
def test_masters_are_as_accurate_as_torch(
    quantizer: Quantizer, adam_w_mode: bool, device: str
) -> None:
    params = make_params(quantizer, device)
    torch_class = AdamW if adam_w_mode else Adam
    fp32, exact = (Trajectory(params, torch_class, d) for d in (torch.float32, torch.float64))
    options = dict(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    ours = FP4Adam(params, adam_w_mode=adam_w_mode, **options)
    twins = [each.optimizer(**options) for each in (fp32, exact)]
    for seed in range(10):
        set_grads(params, seed, scale=2.0 ** (seed - 5))
        for each, twin in zip((fp32, exact), twins, strict=True):
            each.follow(params)
            twin.step()
        ours.step()
        assert_follows(ours, fp32, exact)
        assert_bytes_are_of_masters(ours)


@every_recipe
@every_dtype
def test_gradients_of_each_dtype_are_read_without_rounding(
    quantizer: Quantizer, dtype: torch.dtype, device: str
) -> None:
    params = make_params(quantizer, device)
    fp32, exact = (Trajectory(params, AdamW, d) for d in (torch.float32, torch.float64))
    ours = FP4Adam(params, use_decoupled_grad=True)
    twins = [each.optimizer() for each in (fp32, exact)]
    for seed in range(4):
        set_grads(params, seed, dtype=dtype)
        for each, twin in zip((fp32, exact), twins, strict=True):
            each.follow(params)
            twin.step()
        ours.step()
    assert_follows(ours, fp32, exact)
    ours.zero_grad()
    assert all(param.decoupled_grad is None for param in params)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda grad: grad.t().contiguous().t(),
    "every second column": lambda grad: torch.stack((grad, grad), 2).flatten(1)[:, ::2],
    "unaligned": lambda grad: torch.cat((grad.new_zeros(1), grad.flatten()))[1:].view(grad.shape),
    "expanded": lambda grad: grad[:, :1].expand(grad.shape),
}


@every_recipe
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layout_of_gradients_changes_no_bit(
    quantizer: Quantizer, layout: Callable[[Tensor], Tensor], device: str
) -> None:
    weights = [make_weight(quantizer, device) for _ in range(2)]
    optimizers = [FP4Adam([weight], use_decoupled_grad=True) for weight in weights]
    for seed in range(2):
        grad = layout(random(SHAPES[0], seed, device).bfloat16())
        weights[0].decoupled_grad, weights[1].decoupled_grad = grad, grad.clone().contiguous()
        for optimizer in optimizers:
            optimizer.step()
    assert_identical(*(snapshot(optimizer) for optimizer in optimizers))


@every_recipe
@pytest.mark.parametrize("amsgrad", [False, True])
def test_late_and_missing_gradients_keep_their_own_bias_correction(
    quantizer: Quantizer, amsgrad: bool, device: str
) -> None:
    params = make_params(quantizer, device)
    fp32, exact = (Trajectory(params, AdamW, d) for d in (torch.float32, torch.float64))
    options = dict(lr=1e-2, amsgrad=amsgrad)
    ours = FP4Adam(params, **options)
    twins = [each.optimizer(**options) for each in (fp32, exact)]
    counts = [0] * len(params)
    for seed in range(8):
        set_grads(params, seed)
        for i, param in enumerate(params):
            # The last one has its first gradient at the sixth step.
            if (seed + i) % 3 == 0 or (i == len(params) - 1 and seed < 5):
                param.grad = None
            counts[i] += param.grad is not None
        for each, twin in zip((fp32, exact), twins, strict=True):
            each.follow(params)
            twin.step()
        ours.step()
    assert [ours.state[param]["step"].item() for param in params] == counts
    assert min(counts) < max(counts)
    assert_follows(ours, fp32, exact)
    assert_bytes_are_of_masters(ours)


@every_recipe
def test_groups_follow_their_own_schedules(quantizer: Quantizer, device: str) -> None:
    """Learning rates of 0 while warming up included."""
    params = make_params(quantizer, device)
    fp32, exact = (Trajectory(params, AdamW, d) for d in (torch.float32, torch.float64))
    own = [
        dict(lr=1e-2, weight_decay=0.1),
        dict(lr=3e-3, weight_decay=0.0, betas=(0.5, 0.9), eps=0.05),
    ]

    def grouped(optimizer_class: type, params: list[Parameter]) -> tuple[Any, LambdaLR]:
        groups = [
            dict(params=members, **options)
            for members, options in zip((params[:2], params[2:]), own, strict=True)
        ]
        optimizer = optimizer_class(groups)
        warm_up = [lambda t: min(1.0, t / 3), lambda t: 0.5**t]
        return optimizer, LambdaLR(optimizer, warm_up)

    ours, schedule = grouped(FP4Adam, params)
    twins = [grouped(AdamW, each.params) for each in (fp32, exact)]
    for seed in range(6):
        set_grads(params, seed)
        for each, (twin, twin_schedule) in zip((fp32, exact), twins, strict=True):
            each.follow(params)
            twin.step()
            twin_schedule.step()
        before = params[1].detach().clone()
        ours.step()
        schedule.step()
        if seed == 0:
            assert_identical(params[1].detach(), before)
    assert_follows(ours, fp32, exact)
    assert_bytes_are_of_masters(ours)


# Bytes


@every_quantizer
@every_dtype
@both_sources
def test_bytes_after_every_step_are_those_of_the_quantized_master(
    quantizer: Quantizer, dtype: torch.dtype, quantize_from: str, device: str
) -> None:
    params = make_params(quantizer, device, dtype)
    kinds = [(type(param), param.dtype, param.shape) for param in params]
    optimizer = FP4Adam(params, lr=0.1, quantize_from=quantize_from)
    for seed in range(4):
        before = [param.detach().clone() for param in quantized(params)]
        take_steps(optimizer, [seed])
        assert_bytes_are_of_masters(optimizer)
        for param, old in zip(quantized(params), before, strict=True):
            assert not torch.equal(
                param.detach().dequantize(torch.float32), old.dequantize(torch.float32)
            )
    assert [(type(param), param.dtype, param.shape) for param in params] == kinds
    assert all(isinstance(param, Parameter) and param.requires_grad for param in params)


@both_sources
def test_rounding_through_the_nominal_dtype_is_a_different_choice(
    quantize_from: str, device: str
) -> None:
    param = make_weight(RECIPES["mxfp8"], device)
    optimizer = FP4Adam([param], lr=0.1, quantize_from=quantize_from)
    take_steps(optimizer, range(3))
    master = optimizer.state[param]["master_param"]
    direct, rounded = (param.quantizer.quantize(x) for x in (master, master.bfloat16()))
    assert not torch.equal(direct.rowwise_data, rounded.rowwise_data)
    expected = direct if quantize_from == "master" else rounded
    assert torch.equal(param.rowwise_data, expected.rowwise_data)


@every_quantizer
@both_sources
@both_modes
def test_step_of_length_zero_leaves_the_bytes_alone(
    quantizer: Quantizer, quantize_from: str, adam_w_mode: bool, device: str
) -> None:
    params = make_params(quantizer, device)
    before = [param.detach().clone() for param in params]
    optimizer = FP4Adam(
        params, lr=0.0, weight_decay=0.1, quantize_from=quantize_from, adam_w_mode=adam_w_mode
    )
    for _ in range(2):
        for param in params:
            param.grad = torch.zeros(param.shape, dtype=param.dtype, device=device)
        optimizer.step()
    assert_identical([param.detach() for param in params], before)
    # Moments of a real gradient are gathered while the weights still rest.
    take_steps(optimizer, [0])
    assert_identical([param.detach() for param in params], before)
    assert all(optimizer.state[param]["exp_avg"].count_nonzero() for param in params)


@every_quantizer
def test_addresses_stay_over_steps(quantizer: Quantizer, device: str) -> None:
    params = make_params(quantizer, device)
    optimizer = FP4Adam(params, amsgrad=True)
    take_steps(optimizer, [0])
    before = addresses(optimizer)
    take_steps(optimizer, range(1, 4))
    assert addresses(optimizer) == before


@every_quantizer
def test_state_changed_by_hand_is_continued_from(quantizer: Quantizer, device: str) -> None:
    """Other code may reset moments, shrink masters or rewind the step between two steps."""
    params = make_params(quantizer, device)
    optimizer = FP4Adam(params, lr=1e-3)
    take_steps(optimizer, range(3))
    twin = copy.deepcopy(optimizer)
    for each in (optimizer, twin):
        for param in quantized(all_params(each)):
            state = each.state[param]
            state["exp_avg"].mul_(50.0)
            state["exp_avg_sq"].zero_()
            state["step"].fill_(1.0)
    # Only the twin starts from state that it has never seen.
    twin.load_state_dict(twin.state_dict())
    take_steps(optimizer, [3])
    take_steps(twin, [3])
    for each in (optimizer, twin):
        for param in quantized(all_params(each)):
            each.state[param]["master_param"].view(-1)[5] = 40.0
    for seed in (4, 5):
        for each in (optimizer, twin):
            take_steps(each, [seed])
            assert_bytes_are_of_masters(each)
    assert_identical(snapshot(optimizer)["state"], snapshot(twin)["state"])


@every_recipe
@pytest.mark.parametrize("scale", [1e-20, 1e4], ids=["tiny", "huge"])
def test_bytes_are_of_masters_when_updates_change_size(
    quantizer: Quantizer, scale: float, device: str
) -> None:
    """Learning rate, gradients and eps jump; the largest weight grows, shrinks and moves."""
    params = [make_weight(quantizer, device, shape, seed=i) for i, shape in enumerate(SHAPES)]
    optimizer = FP4Adam(params, lr=1e-3)
    for seed, lr in enumerate([1e-3, 10.0, 1e-6, 0.5, 0.0, 1e-2]):
        optimizer.param_groups[0].update(lr=lr, weight_decay=0.9 if lr == 0.5 else 0.0)
        for i, param in enumerate(params):
            grad = random(tuple(param.shape), seed + i, device, scale if seed % 2 else 1.0)
            grad.view(-1)[seed * 101] = 100 * scale
            param.grad = grad.to(param.dtype)
        optimizer.step()
        if lr:
            assert_bytes_are_of_masters(optimizer)


# Overwritten from outside


def _other(param: Tensor) -> Tensor:
    return random(tuple(param.shape), 77, str(param.device), scale=0.3)


OVERWRITES: dict[str, Callable[[Parameter], Any]] = {
    "copy_": lambda p: p.copy_(_other(p)),
    "copy_ of the same format": lambda p: p.copy_(p.quantizer.quantize(_other(p))),
    "detach().copy_": lambda p: p.detach().copy_(_other(p)),
    "data.copy_": lambda p: p.data.copy_(_other(p)),
    "data =": lambda p: setattr(p, "data", _other(p)),
    "quantize_": lambda p: p.quantize_(_other(p)),
    "nn.init": lambda p: nn.init.normal_(p),
    "copy_ in inference mode": torch.inference_mode()(lambda p: p.copy_(_other(p))),
}


@every_recipe
@pytest.mark.parametrize("overwrite", OVERWRITES.values(), ids=OVERWRITES.keys())
def test_overwritten_parameter_is_where_its_master_restarts(
    quantizer: Quantizer, overwrite: Callable[[Parameter], Any], device: str
) -> None:
    params = make_params(quantizer, device)
    optimizer = FP4Adam(params, lr=1e-2)
    take_steps(optimizer, range(2))
    with torch.no_grad():
        overwrite(params[1])
    # The moments go on, in the same storage.
    expected = copy.deepcopy(optimizer)
    twin = all_params(expected)[1]
    expected.state[twin]["master_param"] = params[1].detach().dequantize(torch.float32)
    for each in (optimizer, expected):
        take_steps(each, [2])
        assert_bytes_are_of_masters(each)
    assert_identical(snapshot(optimizer), snapshot(expected))


@every_recipe
def test_weights_loaded_before_the_first_step_start_the_masters_exactly(
    quantizer: Quantizer, device: str
) -> None:
    model, other = make_mlp(quantizer, device), make_mlp(None, device)
    with torch.no_grad():
        other[0].weight.copy_(random((64, 32), 3, device))
    optimizer = FP4Adam(model.parameters(), lr=0.0)
    model.load_state_dict(other.state_dict())
    take_steps(optimizer, [0])
    assert_identical(optimizer.state[model[0].weight]["master_param"], other[0].weight.detach())


@every_recipe
def test_model_loaded_after_steps_restarts_all_masters(quantizer: Quantizer, device: str) -> None:
    model, other = make_mlp(quantizer, device), make_mlp(quantizer, device)
    take_steps(FP4Adam(other.parameters(), lr=0.1), range(3))
    optimizer = FP4Adam(model.parameters(), lr=1e-3, weight_decay=0.0)
    take_steps(optimizer, range(3))
    model.load_state_dict(other.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(optimizer, [3])
    for param in quantized(model.parameters()):
        master = optimizer.state[param]["master_param"]
        assert_identical(master, param.detach().dequantize(torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_overwritten_half_precision_parameter_restarts_its_master(
    dtype: torch.dtype, device: str
) -> None:
    param = Parameter(random((33,), 0, device).to(dtype))
    optimizer = FP4Adam([param], lr=1e-3, weight_decay=0.0)
    take_steps(optimizer, range(2))
    new = random((33,), 1, device).to(dtype)
    nn.Module.load_state_dict(nn.ParameterList([param]), {"0": new})
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(optimizer, [2])
    assert_identical(optimizer.state[param]["master_param"], new.float())


@every_recipe
def test_rewriting_the_same_bytes_keeps_the_exact_master(quantizer: Quantizer, device: str) -> None:
    params = make_params(quantizer, device)
    optimizer = FP4Adam(params)
    take_steps(optimizer, range(2))
    expected = copy.deepcopy(optimizer)
    with torch.no_grad():
        for param in params:
            param.copy_(param.detach().clone())
    for each in (optimizer, expected):
        take_steps(each, [2])
    assert_identical(snapshot(optimizer), snapshot(expected))


def test_nominal_dtype_may_change_under_the_optimizer(device: str) -> None:
    model = make_mlp(RECIPES["nvfp4"], device)
    optimizer = FP4Adam([model[0].weight], weight_decay=0.0)
    take_steps(optimizer, range(2))
    before = optimizer.state[model[0].weight]["master_param"].clone()
    model.bfloat16()
    assert model[0].weight.dtype == torch.bfloat16
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(optimizer, [2])
    assert_identical(optimizer.state[model[0].weight]["master_param"], before)


# Odd shapes and groups


@every_quantizer
def test_empty_parameters_and_groups_are_harmless(quantizer: Quantizer, device: str) -> None:
    empties = [make_weight(quantizer, device, shape) for shape in ((0, 32), (32, 0))]
    empties.append(Parameter(torch.empty(0, 3, dtype=torch.bfloat16, device=device)))
    scalar = Parameter(torch.tensor(1.5, device=device))
    weight = make_weight(quantizer, device)
    optimizer = FP4Adam([empties[0], weight, *empties[1:], scalar])
    optimizer.add_param_group({"params": []})
    alone = FP4Adam([copy.deepcopy(weight)])
    for seed in range(2):
        set_grads(all_params(optimizer), seed)
        all_params(alone)[0].grad = weight.grad
        optimizer.step()
        alone.step()
    assert_identical(weight.detach(), all_params(alone)[0].detach())
    assert scalar.item() != 1.5
    optimizer.load_state_dict(optimizer.state_dict())
    take_steps(optimizer, [2])
    assert_bytes_are_of_masters(optimizer)


@every_recipe
def test_group_added_later_is_stepped_like_an_optimizer_of_its_own(
    quantizer: Quantizer, device: str
) -> None:
    params = make_params(quantizer, device)
    twins = [copy.deepcopy(params[1]), copy.deepcopy(params[4])]
    optimizer = FP4Adam(params[:2], lr=1e-2)
    take_steps(optimizer, range(2))
    optimizer.add_param_group({"params": params[2:], "lr": 1e-3})
    early, late = FP4Adam(twins[:1], lr=1e-2), FP4Adam(twins[1:], lr=1e-3)
    set_grads(params, 0)
    for seed in range(4):
        set_grads(params[:2] if seed < 2 else params, seed)
        for each, param, twin in ((early, params[1], twins[0]), (late, params[4], twins[1])):
            if each is early or seed >= 2:
                twin.grad = param.grad
                each.step()
        if seed >= 2:
            optimizer.step()
    assert optimizer.state[params[4]]["step"] == 2
    assert_identical([params[1].detach(), params[4].detach()], [t.detach() for t in twins])


def test_weights_with_more_than_two_dimensions_are_stepped(device: str) -> None:
    """Expert weights [experts, out, in]."""
    for quantizer in RECIPES.values():
        stack = make_weight(quantizer, device, (3, 32, 64))
        flat = make_weight(quantizer, device, (96, 64))
        flat.quantize_(stack.detach().dequantize(torch.float32).view(96, 64))
        for seed in range(2):
            for param in (stack, flat):
                param.grad = random((3, 32, 64), seed, device).bfloat16().view(param.shape)
        optimizers = [FP4Adam([stack]), FP4Adam([flat])]
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(stack.rowwise_data, flat.rowwise_data)
        assert_bytes_are_of_masters(optimizers[0])


# Plain parameters, as Transformer Engine tests its FusedAdam


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        pytest.param([(278011,)], {}, id="one odd vector"),
        pytest.param([(1,)], dict(lr=0.01, betas=(0.6, 0.9), eps=3e-6), id="one element"),
        pytest.param([(4096, 32), (4096,), (1,), (3232, 64), (1, 7)], {}, id="many shapes"),
        pytest.param([(33, 65), (0,)], {}, id="empty tensor last"),
    ],
)
def test_plain_parameters_equal_adam(shapes: list, options: dict, device: str) -> None:
    params = [Parameter(random(shape, i, device)) for i, shape in enumerate(shapes)]
    twins = copy.deepcopy(params)
    ours = FP4Adam(params, weight_decay=0.0, **options)
    ours.add_param_group({"params": []})
    adam = Adam(twins, **options)
    for seed in range(7):
        set_grads(params, seed)
        set_grads(twins, seed)
        ours.step()
        adam.step()
    assert_close([p.detach() for p in params], [p.detach() for p in twins])
    assert all(ours.state[param]["step"] == 7 for param in params)


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_attention_survives_a_large_lr_and_a_reload(
    dtype: torch.dtype, grad_dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    options = dict(lr=1.0, betas=(0.1, 0.25), weight_decay=0.0)
    module = nn.MultiheadAttention(64, 4, device=device).to(dtype)
    params = list(module.parameters())
    twins = [Parameter(param.detach().float()) for param in params]
    adam = Adam(twins, **options)
    ours = FP4Adam(params, adam_w_mode=False, use_decoupled_grad=True, **options)
    for seed in range(14):
        if seed == 7:
            saved = ours.state_dict()
            ours = FP4Adam(params, adam_w_mode=False, use_decoupled_grad=True)
            ours.load_state_dict(saved)
        set_grads(params, seed, dtype=grad_dtype)
        for param, twin in zip(params, twins, strict=True):
            twin.grad = param.decoupled_grad.float()
        ours.step()
        adam.step()
    for param, twin in zip(params, twins, strict=True):
        assert_close(ours.state[param].get("master_param", param), twin, check_dtype=False)
        assert_close(param.detach(), twin.detach().to(dtype))


# On a GPU


def _large_problem(quantizer: Quantizer | None, device: str) -> FP4Adam:
    """64 Mi elements, whose gradients would take 256 MiB in FP32."""
    shapes = [(2048, 2048)] * 12 + [(4096, 4096)]
    if quantizer is None:
        params = [Parameter(torch.zeros(s, dtype=torch.bfloat16, device=device)) for s in shapes]
    else:
        params = [Parameter(quantizer.make_empty(s, torch.bfloat16, device)) for s in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, dtype=torch.bfloat16, device=device)
    return FP4Adam(params, lr=1e-2)


every_kind = pytest.mark.parametrize(
    "quantizer", [None, *QUANTIZERS.values()], ids=["plain", *QUANTIZERS.keys()]
)


@needs_cuda
@every_kind
def test_step_allocates_next_to_nothing(quantizer: Quantizer | None, device: str) -> None:
    optimizer = _large_problem(quantizer, device)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before <= 2**20
    assert torch.cuda.memory_allocated() - before <= 2**16


@needs_cuda
@every_kind
def test_step_has_a_constant_number_of_launches(quantizer: Quantizer | None, device: str) -> None:
    optimizer = _large_problem(quantizer, device)
    for _ in range(3):
        optimizer.step()
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
def test_elements_beyond_32_bit_indices_are_updated(quantizer: Quantizer, device: str) -> None:
    shape = (2**16 + 128, 2**15)
    needed = 20 * math.prod(shape)
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory")
    param = Parameter(quantizer.make_empty(shape, torch.bfloat16, device))
    param._high_precision_init_val = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    param.grad = torch.zeros(shape, dtype=torch.bfloat16, device=device)
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
    decoded = quantizer.quantize(master[-256:, -256:])
    rows = param.rowwise_data[-256:, -decoded.rowwise_data.shape[1] :]
    assert torch.equal(rows, decoded.rowwise_data)
