"""Any optimizer on quantized weights: the same bits as on FP32 parameters, rounded afterwards.

What users do around its steps is a path of the step table.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adadelta, Adafactor, Adagrad, AdamW, Muon, Optimizer

from fp4adam import MasterWeightOptimizer, MXFP8Quantizer, QuantizedTensor, Quantizer
from helpers import (
    QUANTIZERS,
    RECIPES,
    all_params,
    assert_bytes_are_of_masters,
    assert_identical,
    make_mlp,
    make_params,
    make_weight,
    mlp_loss,
    set_grads,
    take_steps,
    value_of,
)

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {}),
    "adamw, amsgrad": (AdamW, dict(amsgrad=True)),
    "sgd": (SGD, {}),
    "sgd, momentum": (SGD, dict(momentum=0.9)),
    "adafactor": (Adafactor, {}),
    "adagrad": (Adagrad, {}),
    "adadelta": (Adadelta, {}),
}


def fp32_twins(params: list[Tensor]) -> list[Tensor]:
    """FP32 parameters with the values that master weights start from."""
    values = (getattr(param, "_high_precision_init_val", None) for param in params)
    pairs = zip(params, values, strict=True)
    return [Parameter(value_of(p) if value is None else value.float()) for p, value in pairs]


def assert_follows(optimizer: MasterWeightOptimizer, twins: list[Tensor]) -> None:
    """Masters are the twins, rounded to the parameters."""
    assert_bytes_are_of_masters(optimizer)
    for param, value in zip(all_params(optimizer), twins, strict=True):
        if not isinstance(param, QuantizedTensor):
            assert_identical(param.detach(), value.detach().to(param.dtype))
        if param.dtype != torch.float32:
            assert_identical(optimizer.state[param]["master_param"], value.detach())


def step_with(optimizer: Optimizer, params: list[Tensor], twin: Optimizer, seed: int) -> None:
    """A step of both with the same gradients."""
    set_grads(params, seed)
    for param, copied in zip(params, all_params(twin), strict=True):
        copied.grad = None if param.grad is None else param.grad.float()
    optimizer.step()
    twin.step()


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS.keys())
def test_the_bits_of_the_optimizer_on_fp32(quantizer, kind, options, device):
    params = make_params(quantizer, device)
    twins = fp32_twins(params)
    optimizer = MasterWeightOptimizer(params, kind, lr=1e-2, **options)
    twin = kind(twins, lr=1e-2, **options)
    for seed in range(3):
        step_with(optimizer, params, twin, seed)
        assert_follows(optimizer, twins)
        assert all(a is b for a, b in zip(all_params(optimizer.inner), params, strict=True))
    assert all(param.grad is not None for param in params)
    masters = [state.get("master_param") for state in optimizer.state.values()]
    assert all(master is None or master.grad is None for master in masters)


@pytest.mark.parametrize("quantizer", RECIPES.values(), ids=RECIPES.keys())
def test_muon(quantizer: Quantizer, path_device: str) -> None:
    params = [make_weight(quantizer, path_device, seed=seed) for seed in range(2)]
    twins = fp32_twins(params)
    optimizer = MasterWeightOptimizer(params, Muon, lr=1e-2, quantize_from="param_dtype")
    twin = Muon(twins, lr=1e-2)
    for seed in range(3):
        step_with(optimizer, params, twin, seed)
    assert_follows(optimizer, twins)
    with pytest.raises(ValueError, match="Muon only supports 2D"):
        MasterWeightOptimizer(make_params(quantizer, path_device), Muon)


def test_closures_see_the_parameters_of_their_masters(device: str) -> None:
    """LBFGS evaluates the model several times a step."""
    model = make_mlp(MXFP8Quantizer(), device)
    optimizer = MasterWeightOptimizer(model.parameters(), torch.optim.LBFGS, lr=0.1, max_iter=4)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        if losses:
            assert_bytes_are_of_masters(optimizer)
        loss = mlp_loss(model)
        loss.backward()
        losses.append(loss.item())
        return loss

    assert [optimizer.step(closure) for _ in range(4)][0] == losses[0]
    assert len(losses) > 8 and losses[-1] < 0.9 * losses[0]
    weight, versions = model[0].weight, [model[0].weight._version]
    optimizer.step(lambda: versions.append(weight._version) or 0.0)
    assert versions[0] == versions[1] < versions[2]  # nothing is written twice


def test_options_that_the_inner_optimizer_changes(device: str) -> None:
    class Counting(SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1

    named = [("weight", make_weight(RECIPES["nvfp4"], device))]
    optimizer = MasterWeightOptimizer(named, Counting, lr=0.1)
    take_steps(optimizer, range(3))
    assert optimizer.param_groups[0]["k"] == 3
    assert optimizer.state_dict()["param_groups"][0]["k"] == 3
    copied = copy.deepcopy(optimizer)  # which knows the values that its weights are given
    (param,) = all_params(copied)
    with torch.no_grad():
        param.copy_(value := value_of(param) * 1.01)
    copied.reset_master_weights()
    assert_identical(copied.state[param]["master_param"], value)
    optimizer.param_groups = [{**optimizer.param_groups[0], "k": 7}]  # by other code
    take_steps(optimizer, range(1))
    assert optimizer.param_groups[0]["k"] == 8


def test_hooks_may_replace_what_is_loaded() -> None:
    params = make_params(RECIPES["nvfp4"], "cpu")
    optimizer = MasterWeightOptimizer(params, AdamW, lr=1.0)
    take_steps(optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] |= {"first": 1, "second": 2, 0: saved["state"][0] | {"n": 3}}  # no tensors
    take_steps(optimizer, range(1, 2))
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, state_dict: saved)
    optimizer.load_state_dict(optimizer.state_dict())
    state = optimizer.state_dict()["state"]
    for key in range(len(params)):
        assert_identical(state[key]["exp_avg"], saved["state"][key]["exp_avg"])
    assert (optimizer.inner.state["first"], optimizer.inner.state["second"]) == (1, 2)
    # The weights are still those of the second step, so their masters restart.
    assert_identical(state[1]["master_param"], value_of(params[1]))
    kept = copy.deepcopy(saved)
    take_steps(optimizer, [2])
    assert_identical(saved, kept)  # nothing is shared


def test_masters_changed_by_other_code_are_written_back(device: str) -> None:
    param, unused = (make_weight(RECIPES["nvfp4"], device, keeps_value=True) for _ in range(2))
    optimizer = MasterWeightOptimizer([{"params": [p]} for p in (unused, param)], SGD, lr=0.1)
    for _ in range(2):
        set_grads([param], 0)
        optimizer.step()
        with optimizer.masters(), torch.no_grad():
            first, second = (group["params"][0] for group in optimizer.inner.param_groups)
            assert first is unused and second is optimizer._masters[param]
            second.mul_(2)
        assert param.has_bytes_of(param.quantizer.quantize(optimizer.state[param]["master_param"]))
        assert optimizer.param_groups[1]["params"][0] is param
    assert unused not in optimizer.state
    with torch.no_grad():
        param.copy_(value := value_of(param) * 1.01)
    with optimizer.masters(), torch.no_grad():
        assert_identical(optimizer._masters[param].detach(), value)


def test_an_interrupted_step_leaves_masters_in_charge(device: str) -> None:
    class Broken(SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            raise KeyboardInterrupt

    param = make_weight(RECIPES["nvfp4"], device)
    optimizer = MasterWeightOptimizer([param], Broken, lr=0.1)
    set_grads([param], 0)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert optimizer.state[param]["master_param"].grad is None
    with optimizer.masters():
        pass
    assert_bytes_are_of_masters(optimizer)


def test_a_master_that_was_never_written_restarts_as_well(device: str) -> None:
    params = [Parameter(torch.ones(3, device=device, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = MasterWeightOptimizer(params, AdamW, lr=0.0)
    set_grads(params[:2], 0)
    optimizer.step(lambda: set_grads(params[:2], 0))
    optimizer.zero_grad()
    set_grads(params[2:], 0)
    optimizer.step()
    for param in params:
        param.detach().add_(2**-7)  # the next number, to which a loaded master would belong
    with pytest.warns(UserWarning, match="masters of 3 weights restart"):
        take_steps(optimizer, [1])


# What is refused


def test_arguments_are_checked(device: str) -> None:
    param = make_weight(RECIPES["nvfp4"], device)
    meta = Parameter(torch.empty(3, device="meta"))
    for bad, options, error, words in (
        (SGD, dict(quantize_from="bf16"), ValueError, "must be one of master, param_dtype, got"),
        (SGD, dict(states="8bit"), TypeError, "unexpected keyword argument 'states'"),
        (lambda groups: groups, {}, TypeError, "must make a torch.optim.Optimizer"),
        ("lion", {}, TypeError, "optimizer_class must be a class .*got 'lion'; pass"),
        (SGD([param]), {}, TypeError, "optimizer_class must be a class .*SGD'>; pass the class"),
    ):
        with pytest.raises(error, match=words):
            MasterWeightOptimizer([param], bad, **options)
    with pytest.raises(RuntimeError, match="on the meta device; materialize"):
        MasterWeightOptimizer([meta], SGD)
    with pytest.raises(ValueError, match="parameters must be real and dense"):
        MasterWeightOptimizer([param, torch.ones(3, dtype=torch.complex64)], SGD)
    optimizer = MasterWeightOptimizer([param], SGD, lr=0.1)
    with pytest.raises(ValueError, match="params must be parameters of this optimizer, got number"):
        optimizer.reset_master_weights([meta])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [param]})
    assert len(optimizer.inner.param_groups) == 1
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match="step.. must not be called in inference mode"),
    ):
        optimizer.step()


def test_bad_steps_change_nothing(device: str) -> None:
    params = make_params(RECIPES["nvfp4"], device)
    optimizer = MasterWeightOptimizer(params, SGD, lr=0.1)
    take_steps(optimizer, range(1))
    before = copy.deepcopy([param.detach() for param in params])
    set_grads(params, 1)
    params[0].grad = params[0].grad.to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    kept, params[2].data = params[2].data, torch.zeros(3, dtype=params[2].dtype, device=device)
    params[0].grad, params[2].grad = None, torch.zeros_like(params[2])
    with pytest.raises(RuntimeError, match="the state must have the shape and device of its"):
        optimizer.step()
    params[2].data = kept
    optimizer.param_groups[0]["params"] = [*params, params[0]]
    with pytest.raises(ValueError, match="twice"):
        optimizer.step()
    assert_identical([param.detach() for param in params], before)


def test_bad_states_change_nothing(device: str) -> None:
    params = make_params(RECIPES["nvfp4"], device)
    optimizer = MasterWeightOptimizer(params, AdamW, lr=0.1)
    take_steps(optimizer, range(1))
    bad = copy.deepcopy(optimizer.state_dict())
    bad["param_groups"][0]["lr"] = 5.0
    take_steps(optimizer, [1])
    before = copy.deepcopy(optimizer.state_dict())
    steps = [state.pop("step") for state in bad["state"].values()]
    with pytest.raises(KeyError, match="step"):  # in the inner optimizer
        optimizer.load_state_dict(bad)
    for state, count in zip(bad["state"].values(), steps, strict=True):
        state["step"] = count
    bad["state"][1]["master_param"] = torch.zeros(3)
    with pytest.raises(ValueError, match="master_param of parameter 1 must have shape"):
        optimizer.load_state_dict(bad)
    bad["state"][1]["master_param_scale"] = torch.zeros(3)
    with pytest.raises(ValueError, match="master_param of parameter 1 must be whole"):
        optimizer.load_state_dict(bad)
    with pytest.raises(ValueError, match="state_dict must have state and param_groups"):
        optimizer.load_state_dict({"0.weight": params[0]})
    bad["param_groups"] = []
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(bad)
    assert_identical(optimizer.state_dict(), before)
