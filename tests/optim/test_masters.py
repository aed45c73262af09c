"""Masters and parameters: who wrote last, wherever their memory is and whatever went wrong."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn import Parameter
from torch.optim import SGD, AdamW
from torch.testing import assert_close

from fp4adam import FP4Adam, FusedAdam, MasterWeightOptimizer, QuantizedTensor, quantize_model
from fp4adam.tensors import backend
from helpers import (
    RECIPES,
    all_params,
    assert_identical,
    make_mlp,
    make_weight,
    random,
    set_grads,
    snapshot,
    stored,
    take_steps,
)
from master_reference import Twin, rounded, value_of

NVFP4 = RECIPES["nvfp4"]
SHAPE = (32, 32)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["operators", "kernels"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where tensors are, once with plain operators and once with kernels."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if request.param == "operators":
        return "cpu"
    monkeypatch.setattr(backend, "uses_kernels", lambda d: d.type == device)
    return device


def formats(device: str) -> list[str]:
    """All; in Triton's interpreter, which is slow, one."""
    in_interpreter = device == "cpu" and backend.uses_kernels(torch.device(device))
    return ["nvfp4"] if in_interpreter else [*RECIPES]


class Net(nn.Module):
    """Quantized weights, a BF16 and an FP32 parameter."""

    def __init__(self, device: str, seed: int = 0) -> None:
        super().__init__()
        for i, name in enumerate(formats(device)):
            layer = nn.Linear(*SHAPE, bias=False, device=device)
            layer.weight = Parameter(random(SHAPE, seed + i, device, scale=0.1))
            setattr(self, name, layer)
        self.narrow = Parameter(random((33,), seed + 3, device).bfloat16())
        self.wide = Parameter(random((7,), seed + 4, device))


def make_net(device: str, seed: int = 0) -> Net:
    model = Net(device, seed)
    for only in formats(device):
        quantize_model(model, RECIPES[only], lambda _, name, only=only: name == only)
    return model


def make_pair(device: str, **options: Any) -> tuple[Net, FP4Adam]:
    """A model and its optimizer after two steps."""
    model = make_net(device)
    optimizer = FP4Adam(model.parameters(), lr=1e-2, **options)
    take_steps(optimizer, range(2))
    return model, optimizer


def start_of(param: Tensor) -> Tensor:
    """What a master restarts from: what other code has written, before it was rounded."""
    written = getattr(param, "_high_precision_init_val", None)
    return value_of(param) if written is None else written.to(param.device, torch.float32)


def masters(optimizer: FP4Adam) -> list[Tensor]:
    """What training continues from, in FP32."""
    return [
        optimizer.state.get(param, {}).get("master_param", param).detach().clone()
        for param in all_params(optimizer)
    ]


def assert_continues(
    optimizer: FP4Adam, starts: list[Tensor] | None = None, seed: int = 9, clip: float | None = None
) -> None:
    """The next step is AdamW's from ``starts``, by default from the values of the parameters now.

    Moments and step counts go on, and parameters become what their masters round to.
    """
    params = all_params(optimizer)
    starts = [*map(start_of, params)] if starts is None else starts
    twins = [Twin.of(optimizer, param) for param in params]
    set_grads(params, seed)
    if clip is not None:
        optimizer.clip_grad_norm_(clip)
    for param, twin, start in zip(params, twins, starts, strict=True):
        twin.value = start.detach().to(param.device, torch.float32, copy=True)
        group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
        twin.update(param.grad, group)
    optimizer.step()
    assert_identical(masters(optimizer), [twin.value for twin in twins])
    for param, twin in zip(params, twins, strict=True):
        assert optimizer.state[param]["step"] == twin.step
        assert_identical(stored(param), rounded(param, twin.value))


def key_of(optimizer: FP4Adam, param: Tensor) -> int:
    """Of a parameter in the state dict."""
    return next(i for i, other in enumerate(all_params(optimizer)) if other is param)


# Memory that is exchanged


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param"])
@pytest.mark.parametrize("wrong", ["smaller", "larger", "elsewhere"])
def test_state_that_does_not_fit_is_refused(name: str, wrong: str, device: str) -> None:
    """Before anything else has been stepped: kernels would write past its end."""
    model, optimizer = make_pair(device, amsgrad=True)
    for param in (model.nvfp4.weight, model.narrow):
        value = optimizer.state[param][name]
        rows = value.shape[0] // 2 if wrong == "smaller" else 2 * value.shape[0]
        # In larger memory, so that a kernel that takes it corrupts nothing else.
        state = torch.zeros(4 * value.shape[0], *value.shape[1:], device=device)[:rows]
        optimizer.state[param][name] = value.to("meta") if wrong == "elsewhere" else state
        params = [p.detach().clone() for p in all_params(optimizer)]
        others = {p: copy.deepcopy(s) for p, s in optimizer.state.items() if p is not param}
        set_grads(all_params(optimizer), 2)
        with pytest.raises((RuntimeError, ValueError), match="shape"):
            optimizer.step()
        assert_identical([p.detach() for p in all_params(optimizer)], params)
        for other, state in others.items():
            assert_identical(dict(optimizer.state[other]), dict(state))
        optimizer.state[param][name] = value
    assert_continues(optimizer, masters(optimizer))


def transpose_state(optimizer: FP4Adam, param: Parameter) -> None:
    optimizer.state[param]["exp_avg"].t_()


def transpose_param(optimizer: FP4Adam, param: Parameter) -> None:
    param.data = param.data.t()


def reinterpret_state(optimizer: FP4Adam, param: Parameter) -> None:
    state = optimizer.state[param]
    state["exp_avg_sq"].data = state["exp_avg_sq"].view(-1).flip(0).view(SHAPE).t()


@pytest.mark.parametrize("change", [transpose_state, transpose_param, reinterpret_state])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_layouts_at_old_addresses_are_used(
    change: Callable[..., None], dtype: torch.dtype, device: str
) -> None:
    """Neither the address of a tensor nor the object says how its memory is read."""
    param = Parameter(random(SHAPE, 0, device).to(dtype))
    optimizer = FP4Adam([param], lr=1e-2)
    take_steps(optimizer, range(2))
    address = param.data_ptr()
    change(optimizer, param)
    assert param.data_ptr() == address
    assert_continues(optimizer, None if change is transpose_param else masters(optimizer))


def test_states_that_shrink_in_place_are_refused(device: str) -> None:
    """Kernels would write past their end."""
    param = Parameter(random(SHAPE, 0, device))
    optimizer = FP4Adam([param], lr=1e-2)
    take_steps(optimizer, range(2))
    value = param.detach().clone()
    optimizer.state[param]["exp_avg"].resize_(SHAPE[0] // 2, SHAPE[1])
    set_grads([param], 2)
    with pytest.raises((RuntimeError, ValueError), match="shape"):
        optimizer.step()
    assert_identical(param.detach(), value)


def test_other_memory_at_an_old_address_counts_as_written(device: str) -> None:
    """As an allocator gives it, between two steps, to a parameter that was somewhere else."""
    if device != "cpu":
        pytest.skip("places a parameter in memory of Python")
    memory = bytearray(2 * 32 * 32)

    def values_in_memory() -> Tensor:
        return torch.frombuffer(memory, dtype=torch.bfloat16).view(SHAPE)

    param = Parameter(values_in_memory())
    with torch.no_grad():
        param.copy_(random(SHAPE, 0))
    optimizer = FP4Adam([param], lr=1e-2)
    take_steps(optimizer, range(2))
    address, number = param.data_ptr(), param._version
    param.data = param.data.clone()
    values_in_memory().copy_(random(SHAPE, 1))
    param.data = values_in_memory()
    assert (param.data_ptr(), param._version) == (address, number)
    assert_continues(optimizer)


def test_other_part_of_the_same_storage_counts_as_written(device: str) -> None:
    """As if two sets of weights took turns in one buffer."""
    both = random((2, 64), 0, device).bfloat16()
    param = Parameter(both[0])
    optimizer = FP4Adam([param], lr=1e-2)
    take_steps(optimizer, range(2))
    param.data = both[1]
    assert_continues(optimizer)


# Who wrote last


def test_a_reset_before_the_first_step_keeps_the_value_before_quantization(device: str) -> None:
    weight = make_weight(RECIPES["nvfp4"], device, keeps_value=True)
    optimizer = FP4Adam([weight])
    optimizer.reset_master_weights()
    assert weight.get_high_precision_init_val() is not None


@pytest.mark.parametrize("kind", [FP4Adam, partial(MasterWeightOptimizer, optimizer_class=SGD)])
def test_a_reset_takes_values_that_bytes_do_not_show(kind: Callable, device: str) -> None:
    """A step does not compare them: these are FP32, and a master is rounded to BF16 first."""
    weight = make_weight(RECIPES["nvfp4"], device, keeps_value=True)
    optimizer = kind([weight], lr=0.0, quantize_from="param_dtype")
    take_steps(optimizer, [0])
    value = random(tuple(weight.shape), 1, device)
    with torch.no_grad():
        weight.copy_(value)
    optimizer.reset_master_weights()
    take_steps(optimizer, [1])
    assert_identical(optimizer.state[weight]["master_param"], value)


def test_only_a_step_and_a_reset_free_the_value_before_quantization(device: str) -> None:
    weight = make_weight(RECIPES["nvfp4"], device, keeps_value=True)
    optimizer = FP4Adam([weight], lr=1e-30)
    take_steps(optimizer, [0])
    for free in (lambda: take_steps(optimizer, [1]), optimizer.reset_master_weights):
        value = random(tuple(weight.shape), 1, device)
        with torch.no_grad():
            weight.copy_(value)
        weight.requires_grad_(False).requires_grad_()
        assert_identical(weight.get_high_precision_init_val(), value)
        free()
        assert not hasattr(weight, "get_high_precision_init_val")
        assert_identical(masters(optimizer), [value])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("back", ["nvfp4", "plain"])
def test_training_by_adamw_in_between_is_kept(dtype: torch.dtype, back: str, device: str) -> None:
    """AdamW carries master_param along, and saves it again, while it trains the parameters."""
    model = make_mlp(NVFP4 if back == "nvfp4" else None, device, dtype)
    optimizer = FP4Adam(model.parameters(), lr=1e-2)
    take_steps(optimizer, range(2))
    middle = make_mlp(None, device, dtype)
    adamw = AdamW(middle.parameters(), lr=1e-2)
    plain = {
        name: value.dequantize(dtype) if isinstance(value, QuantizedTensor) else value
        for name, value in model.state_dict().items()
    }
    middle.load_state_dict(plain)
    adamw.load_state_dict(optimizer.state_dict())
    take_steps(adamw, range(2, 4))
    trained = copy.deepcopy([param.detach() for param in middle.parameters()])
    last = make_mlp(None, device, dtype)
    if back == "nvfp4":
        quantize_model(last, NVFP4)
    resumed = FP4Adam(last.parameters(), lr=1e-2)
    last.load_state_dict(middle.state_dict())
    values = [value_of(param) for param in last.parameters()]
    resumed.load_state_dict(adamw.state_dict())
    assert_identical([value_of(param) for param in last.parameters()], values)
    starts = values
    if back == "nvfp4":  # which a weight that has just been loaded before any step still has
        starts = [value.float() for value in trained]
    assert_continues(resumed, starts)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "float8block"])
def test_a_quantized_checkpoint_gives_an_fp32_model_its_masters(recipe: str, device: str) -> None:
    model = make_mlp(RECIPES[recipe], device)
    optimizer = FP4Adam(model.parameters(), lr=1e-2)
    take_steps(optimizer, range(2))
    expected = masters(optimizer)
    plain = make_mlp(None, device)
    resumed = FP4Adam(plain.parameters())
    plain.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_identical([param.detach() for param in plain.parameters()], expected)
    assert all("master_param" not in state for state in resumed.state.values())
    assert_continues(resumed, expected)


@pytest.mark.parametrize("save", [FP4Adam.state_dict, FP4Adam.compact_state_dict])
def test_an_fp32_model_takes_masters_that_have_scales(save: Callable, device: str) -> None:
    model, optimizer = make_pair(device, master_weight_dtype=torch.float16)
    master = optimizer.get_unscaled_state(model.narrow, "master_param")
    plain = copy.deepcopy(model)
    plain.narrow = Parameter(model.narrow.detach().float())
    resumed = FP4Adam(plain.parameters(), master_weight_dtype=torch.float16)
    resumed.load_state_dict(copy.deepcopy(save(optimizer)))
    assert_identical(plain.narrow.detach(), master)
    assert sorted(resumed.state[plain.narrow]) == ["exp_avg", "exp_avg_sq", "step"]


def test_bfloat16_model_gets_masters_after_fp32_steps(device: str) -> None:
    param = Parameter(torch.ones(40, device=device))
    module = nn.ParameterList([param])
    optimizer = FP4Adam(module.parameters(), lr=1e-4, weight_decay=0.0, betas=(0.0, 0.0))
    set_grads([param], 0)
    optimizer.step()
    module.bfloat16()
    start = value_of(param)
    steps = 20
    for _ in range(steps):
        param.grad = torch.ones_like(param)
        optimizer.step()
    master = optimizer.state[param]["master_param"]
    assert_close(master, start - steps * 1e-4, rtol=0, atol=1e-6)
    assert_identical(param.detach(), master.bfloat16())


def test_float_model_continues_after_bfloat16_steps(device: str) -> None:
    """It needs no master any more, and the value is that of the parameter."""
    model, optimizer = make_pair(device)
    model.float()
    starts = [
        master if isinstance(param, QuantizedTensor) else value_of(param)
        for param, master in zip(all_params(optimizer), masters(optimizer), strict=True)
    ]
    params = all_params(optimizer)
    twins = [Twin.of(optimizer, param) for param in params]
    set_grads(params, 3)
    for param, twin, start in zip(params, twins, starts, strict=True):
        twin.value = start
        twin.update(param.grad, optimizer.param_groups[0])
    optimizer.step()
    for param, twin in zip(params, twins, strict=True):
        assert_identical(stored(param), rounded(param, twin.value))
    assert "master_param" not in optimizer.state_dict()["state"][key_of(optimizer, model.narrow)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_state_of_a_parameter_without_master_has_none(dtype: torch.dtype, device: str) -> None:
    """An FP32 model that loads it would take a master that its parameter has left."""
    model, optimizer = make_pair(device, master_weight_dtype=dtype)
    model.float()
    saved = optimizer.state_dict()["state"][key_of(optimizer, model.narrow)]
    assert sorted(saved) == ["exp_avg", "exp_avg_sq", "step"]


def test_replaced_parameters_are_freed(device: str) -> None:
    optimizer = make_pair(device)[1]  # the model is gone
    group = optimizer.param_groups[0]
    gone = []
    for i, param in enumerate(group["params"]):
        gone += [weakref.ref(param), *(weakref.ref(t) for t in optimizer.state[param].values())]
        group["params"][i] = Parameter(param.detach().clone())
        del optimizer.state[param]
    del param
    take_steps(optimizer, [2])
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


# Refusals that change nothing


@pytest.fixture
def mesh() -> Iterator[Any]:
    """One rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "master_param"])
def test_sharded_state_of_a_plain_parameter_changes_nothing(
    name: str, mesh: Any, device: str
) -> None:
    if device == "cuda":
        pytest.skip("the mesh is one of CPUs")
    model, optimizer = make_pair(device)
    saved = copy.deepcopy(optimizer.state_dict())
    key = key_of(optimizer, model.nvfp4.weight)
    saved["state"][key][name] = distribute_tensor(saved["state"][key][name], mesh, [Shard(0)])
    saved["param_groups"][0]["lr"] = 7.0
    before = snapshot(optimizer)
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        optimizer.load_state_dict(saved)
    assert_identical(snapshot(optimizer), before)
    assert_continues(optimizer, masters(optimizer))


def test_remainder_of_a_scalar_is_kept(device: str) -> None:
    values = [random((), 0, device).bfloat16(), random((3, 5), 1, device).bfloat16()]
    pairs = [[Parameter(value.clone()) for value in values] for _ in range(2)]
    exact, split = (
        FP4Adam(pairs[0], lr=1e-2),
        FP4Adam(pairs[1], lr=1e-2, store_param_remainders=True),
    )
    for seed in range(3):
        take_steps(exact, [seed])
        take_steps(split, [seed])
    states = [optimizer.state_dict()["state"] for optimizer in (exact, split)]
    assert_identical(
        *([state[i]["master_param"] for i in range(2)] for state in states),
    )


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.float], ids=["half", "float"])
def test_a_remainder_is_of_bfloat16_alone(device: str, cast: Callable) -> None:
    """Of a parameter that has another dtype now, it says nothing."""
    model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16, device=device)
    optimizer = FP4Adam(model.parameters(), lr=1e-2, store_param_remainders=True)
    take_steps(optimizer, [0])
    model.weight.grad = None
    cast(model)
    for saved in (optimizer.state_dict(), optimizer.compact_state_dict()):
        assert not {"master_param", "param_remainder"} & saved["state"][0].keys()


def test_reset_forgets_a_loaded_master_of_a_remainder(device: str) -> None:
    models = [nn.Linear(8, 8, bias=False, dtype=torch.bfloat16, device=device) for _ in range(2)]
    exact = FP4Adam(models[0].parameters(), lr=1e-2)
    split = FP4Adam(models[1].parameters(), lr=1e-2, store_param_remainders=True)
    take_steps(exact, [0, 1])
    models[1].load_state_dict(models[0].state_dict())
    split.load_state_dict(exact.state_dict())
    split.reset_master_weights()
    saved = split.state_dict()["state"][0]
    value = models[1].weight.detach().float()
    assert torch.equal(saved.get("master_param", value), value)


def test_wrong_state_counts_once_there_is_a_gradient(device: str) -> None:
    weights = [make_weight(RECIPES["nvfp4"], device, seed=seed) for seed in range(2)]
    other = Parameter(torch.ones(3, device=device))
    optimizer = FP4Adam([*weights, other], scale_groups=[weights])
    take_steps(optimizer, [0])
    for weight in weights:
        optimizer.state[weight]["exp_avg"] = torch.zeros(2, 2, device=device)
    before = [weight.detach().clone() for weight in weights]
    set_grads([other], 1)
    for weight in weights:
        weight.grad = None
    optimizer.step()
    assert_identical([weight.detach() for weight in weights], before)
    set_grads(weights, 1)
    with pytest.raises(RuntimeError, match="the state must have the shape"):
        optimizer.step()


def test_wrong_state_of_a_late_parameter_changes_nothing(device: str) -> None:
    """Found before the parameters in front of it are stepped."""
    model, optimizer = make_pair(device, store_param_remainders=True)
    states = [optimizer._whole.states[param] for param in (model.narrow, model.wide)]
    states[0]["master_param"] = model.narrow.detach().float()  # just loaded, beside the remainder
    for state, name, value in [(s, name, s[name]) for s in states for name in s if name != "step"]:
        state[name] = torch.zeros(2, 2, dtype=value.dtype, device=device)
        before = [p.detach().clone() for p in all_params(optimizer)]
        steps = [optimizer.state[p]["step"].item() for p in all_params(optimizer)]
        set_grads(all_params(optimizer), 2)
        with pytest.raises((RuntimeError, ValueError), match="shape"):
            optimizer.step()
        assert_identical([p.detach() for p in all_params(optimizer)], before)
        assert steps == [optimizer.state[p]["step"].item() for p in all_params(optimizer)]
        state[name] = value


# Numbers


def test_narrow_states_resume_above_steps_that_fp32_counts(device: str) -> None:
    options = dict(exp_avg_dtype=torch.float8_e4m3fn, exp_avg_sq_dtype=torch.float8_e4m3fn)
    params = [Parameter(random((3, 32), 0, device))]
    optimizer = FusedAdam(params, **options)
    take_steps(optimizer, [0])
    optimizer.state[params[0]]["step"].fill_(2**24 - 1)
    optimizer.load_state_dict(optimizer.compact_state_dict())
    for seed in range(1, 4):
        take_steps(optimizer, [seed])
    twins = copy.deepcopy(params)
    resumed = FusedAdam(twins, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.compact_state_dict()))
    for seed in range(4, 7):
        for each in (optimizer, resumed):
            take_steps(each, [seed])
    assert_identical(snapshot(resumed), snapshot(optimizer))


def test_stationary_e4m3_moments_are_not_biased() -> None:
    """Over steps too, and not just from one to the next: dithers of an element are independent."""
    n, steps, skipped = 2048, 400, 100
    param = Parameter(torch.zeros(n))
    options = dict(exp_avg_dtype=torch.float8_e4m3fn, exp_avg_sq_dtype=torch.float8_e4m3fn)
    optimizer = FusedAdam([param], lr=0.0, betas=(0.9, 0.9), bias_correction=False, **options)
    grad = random((n,), 0).abs() + 0.5
    sums = {"exp_avg": torch.zeros(n), "exp_avg_sq": torch.zeros(n)}
    for step in range(steps):
        param.grad = grad
        optimizer.step()
        if step >= skipped:
            state = optimizer.state_dict()["state"][0]
            for name, total in sums.items():
                total += state[name]
    means = {name: total / (steps - skipped) for name, total in sums.items()}
    for name, exact in (("exp_avg", grad), ("exp_avg_sq", grad.square())):
        bias = ((means[name] - exact) / exact).mean().item()
        assert abs(bias) < 2e-3, f"{name}: {bias:.2%}"


# Around the state


def test_state_may_be_asked_for_by_two_threads_at_once() -> None:
    optimizer = make_pair("cpu")[1]
    expected = copy.deepcopy(optimizer.state_dict())
    found: list[dict[str, Any]] = []

    def ask() -> None:
        found.append(optimizer.state_dict())

    other = threading.Thread(target=ask)

    def hook(optimizer: FP4Adam, saved: dict[str, Any]) -> None:
        """One thread is here when the other one asks; it may have to wait."""
        if threading.current_thread() is threading.main_thread():
            other.start()
            other.join(timeout=0.2)

    optimizer.register_state_dict_post_hook(hook)
    optimizer.register_state_dict_post_hook(lambda optimizer, saved: None)
    ask()
    other.join()
    assert len(found) == 2
    for saved in found:
        assert_identical(saved["state"], expected["state"])


def test_global_state_travels_in_a_compact_state_dict() -> None:
    params = [Parameter(random((5, 7), i).bfloat16()) for i in range(2)]
    optimizer = FusedAdam(params, exp_avg_dtype=torch.bfloat16)
    take_steps(optimizer, range(2))
    optimizer.state["seen"] = 17
    for saved in (optimizer.state_dict(), optimizer.compact_state_dict()):
        assert saved["state"]["seen"] == 17
        resumed = FusedAdam(copy.deepcopy(params), exp_avg_dtype=torch.bfloat16)
        resumed.load_state_dict(copy.deepcopy(saved))
        assert resumed.state["seen"] == 17


def test_optimizer_with_a_rule_for_scale_groups_can_be_pickled() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    optimizer = FP4Adam(
        quantize_model(model, NVFP4).named_parameters(), scale_groups=lambda name: "all"
    )
    take_steps(optimizer, [0])
    twin = pickle.loads(pickle.dumps(optimizer))
    for each in (optimizer, twin):
        take_steps(each, [1])
    assert_identical(snapshot(twin)["params"], snapshot(optimizer)["params"])
    amaxes = [param.detach().storage_tensors()["_amax"] for param in all_params(twin)]
    assert_identical(*amaxes)


@needs_cuda
def test_deferred_masters_are_decoded_a_piece_at_a_time() -> None:
    """Those of FP16 that share an amax, and so are written in a second pass."""
    shape, n = (2048, 2048), 8
    params = []
    for seed in range(n):
        param = Parameter(NVFP4.quantize(random(shape, seed, "cuda").bfloat16()))
        param.grad = torch.ones(shape, dtype=torch.bfloat16, device="cuda")
        params.append(param)
    optimizer = FP4Adam(params, master_weight_dtype=torch.float16, scale_groups=[params])
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    # One in FP32 is 16 MiB.
    assert torch.cuda.max_memory_allocated() - before < n // 2 * 4 * math.prod(shape)
