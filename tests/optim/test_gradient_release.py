"""Gradient release: the bits of a step after the backward pass, and one gradient at a time."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from fp4adam import FP4Adam, FusedAdam, Quantizer, hf_scale_groups, quantize_model
from fp4adam.tensors import backend
from helpers import (
    RECIPES,
    all_params,
    assert_bytes_are_of_masters,
    assert_identical,
    make_mlp,
    mlp_loss,
    random,
    set_grads,
    snapshot,
)

every_recipe = pytest.mark.parametrize("quantizer", RECIPES.values(), ids=RECIPES.keys())
OPTIONS = dict(lr=1e-2, weight_decay=0.1)


def pair(
    quantizer: Quantizer | None, device: str, **options: Any
) -> list[tuple[nn.Module, FP4Adam]]:
    """Two equal models with their optimizers."""
    models = [make_mlp(quantizer, device, torch.bfloat16) for _ in range(2)]
    return [(m, FP4Adam(m.named_parameters(), **{**OPTIONS, **options})) for m in models]


def assert_same_training(released: Any, plain: Any) -> None:
    assert_identical(snapshot(released)["params"], snapshot(plain)["params"])
    assert_identical(released.state_dict(), plain.state_dict())


def has_no_gradients(optimizer: FusedAdam) -> bool:
    return all(param.grad is None for param in all_params(optimizer))


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("quantizer", [*RECIPES.values(), None], ids=[*RECIPES, "bfloat16"])
@pytest.mark.parametrize("states", ["32bit", "8bit"])
def test_the_bits_of_a_plain_step(
    states: str,
    quantizer: Quantizer | None,
    kernels: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (model, optimizer), (other, plain) = pair(quantizer, device, states=states)
    release = optimizer.enable_gradient_release()
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (optimizer, plain)]
    for step in range(3):
        if kernels:
            monkeypatch.setattr(
                backend, "uses_kernels", lambda d, on=step == 1: on and d.type == device
            )
        for one, loss_of in ((optimizer, model), (plain, other)):
            mlp_loss(loss_of, step).backward()
            assert has_no_gradients(one) == (one is optimizer)
            one.step()
            one.zero_grad()
        for schedule in schedules:
            schedule.step()
    assert_same_training(optimizer, plain)
    release.remove()
    for model_, one in ((model, optimizer), (other, plain)):
        mlp_loss(model_, 5).backward()
        assert not has_no_gradients(one)
        one.step()
    assert_same_training(optimizer, plain)


def deep_model(device: str, layers: int = 6) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers)))
    return quantize_model(model.to(device, torch.bfloat16), "nvfp4")


@pytest.mark.parametrize("releases", [False, True])
def test_one_gradient_is_alive_at_a_time(releases: bool, device: str) -> None:
    """Bytes of gradients that are in memory together, whenever one becomes complete."""
    model = deep_model(device)
    params = [*model.parameters()]
    seen: list[tuple[StorageWeakRef, int]] = []

    def alive() -> int:
        return sum(size for memory, size in seen if not memory.expired())

    most = 0

    def watch(param: Tensor) -> None:
        nonlocal most
        memory = param.grad.untyped_storage()
        seen.append((StorageWeakRef(memory), memory.nbytes()))
        most = max(most, alive())

    for param in params:
        param.register_post_accumulate_grad_hook(watch)
    optimizer = FP4Adam(params, lr=1e-3)
    if releases:
        optimizer.enable_gradient_release()
    model(random((8, 64), 0, device).bfloat16()).square().mean().backward()
    one = 64 * 64 * 2
    assert len(seen) == len(params)
    assert most == (one if releases else len(params) * one)
    assert alive() == (0 if releases else len(params) * one)


def test_microbatches_are_accumulated(device: str) -> None:
    (model, optimizer), (other, plain) = pair(RECIPES["nvfp4"], device)
    release = optimizer.enable_gradient_release()
    for step in range(2):
        with release.accumulate():
            with release.accumulate():
                mlp_loss(model, 10 * step).backward()
            mlp_loss(model, 10 * step + 1).backward()
        assert not has_no_gradients(optimizer)
        mlp_loss(model, 10 * step + 2).backward()
        assert has_no_gradients(optimizer)
        optimizer.step()
        for part in range(3):
            mlp_loss(other, 10 * step + part).backward()
        plain.step()
        plain.zero_grad()
        assert_same_training(optimizer, plain)


def test_two_backward_passes_need_a_step_between(device: str) -> None:
    (model, optimizer), (other, plain) = pair(RECIPES["nvfp4"], device)
    optimizer.enable_gradient_release()
    loss = mlp_loss(model)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"once per step\(\), got one of shape \(32, 64\) twice"):
        mlp_loss(model, 1).backward()
    optimizer.zero_grad()
    mlp_loss(other).backward()
    plain.step()
    assert_same_training(optimizer, plain)


def test_a_graph_that_is_kept_has_lost_its_weights(device: str) -> None:
    """A second pass through the same graph would multiply weights that are newer than the graph."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    optimizer.enable_gradient_release()
    loss = model(random((2, 8), 0, device)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    (quantized, optimizer), _ = pair(RECIPES["nvfp4"], device)
    optimizer.enable_gradient_release()
    loss = mlp_loss(quantized)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_has_no_gradient_is_left_alone(device: str) -> None:
    (model, optimizer), (other, plain) = pair(RECIPES["nvfp4"], device)
    optimizer.enable_gradient_release()
    for step in range(3):
        for one, module in ((optimizer, model), (plain, other)):
            module[2].requires_grad_(step != 1)
            mlp_loss(module, step).backward()
            one.step()
            one.zero_grad()
    assert plain.state[other[2].weight]["step"] == 2
    assert_same_training(optimizer, plain)


def test_parameters_unfrozen_later_and_gradients_set_by_hand(device: str) -> None:
    (model, optimizer), (other, plain) = pair(RECIPES["nvfp4"], device)
    for module in (model, other):
        module[0].requires_grad_(False)
    optimizer.enable_gradient_release()
    for step in range(3):
        for one, module in ((optimizer, model), (plain, other)):
            module[0].requires_grad_(step > 0)
            if step == 2:
                set_grads(module.parameters(), 3)
            else:
                mlp_loss(module, step).backward()
            one.step()
            one.zero_grad()
    assert_same_training(optimizer, plain)
    mlp_loss(model).backward()
    assert has_no_gradients(optimizer)


@pytest.mark.parametrize("has_all", [True, False])
def test_scale_groups_are_stepped_together(has_all: bool, device: str) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = (nn.Linear(32, 32, bias=False) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.q_proj(x) * self.k_proj(x) if has_all else self.q_proj(x)

    optimizers = []
    for releases in (True, False):
        torch.manual_seed(0)
        model = quantize_model(Attention().to(device), "nvfp4", filter=lambda *_: True)
        optimizer = FP4Adam(model.named_parameters(), **OPTIONS, scale_groups=hf_scale_groups)
        if releases:
            optimizer.enable_gradient_release()
        for step in range(2):
            model(random((4, 32), step, device)).square().mean().backward()
            assert has_no_gradients(optimizer) == (releases and has_all)
            optimizer.step()
            optimizer.zero_grad()
        assert_bytes_in_group(optimizer)
        optimizers.append(optimizer)
    assert_same_training(*optimizers)


@pytest.mark.parametrize("way", ["to none", "to zero", "of the model"])
def test_gradients_of_a_group_that_were_reset_do_not_count(way: str, device: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(32, 32, bias=False) for name in ("q_proj", "k_proj")})
    quantize_model(model.to(device), "nvfp4", filter=lambda *_: True, scale_groups=hf_scale_groups)
    optimizer = FP4Adam(model.parameters(), **OPTIONS)
    optimizer.enable_gradient_release()
    x = random((4, 32), 0, device)
    model["q_proj"](x).square().mean().backward()
    (model if way == "of the model" else optimizer).zero_grad(set_to_none=way != "to zero")
    model["k_proj"](x).square().mean().backward()
    assert not optimizer.state and model["k_proj"].weight.grad is not None
    model["q_proj"](x).square().mean().backward()
    assert has_no_gradients(optimizer) and len(optimizer.state) == 2


def assert_bytes_in_group(optimizer: FP4Adam) -> None:
    amaxes = [param.amax_rowwise for param in all_params(optimizer)]
    assert_identical(amaxes[0], amaxes[1])


def test_shared_parameters_are_released_once(device: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Linear(32, 32, bias=False) for _ in range(2))
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh())

    optimizers = []
    for releases in (True, False):
        torch.manual_seed(0)
        model = Tied().to(device)
        optimizer = FP4Adam(model.parameters(), **OPTIONS)
        if releases:
            optimizer.enable_gradient_release()
        for step in range(2):
            model(random((4, 32), step, device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizers.append(optimizer)
    assert_same_training(*optimizers)


def test_closures(device: str) -> None:
    (model, optimizer), (other, plain) = pair(RECIPES["mxfp8"], device)
    optimizer.enable_gradient_release()
    for step in range(2):
        losses = []
        for one, module in ((optimizer, model), (plain, other)):

            def closure(one: FP4Adam = one, module: nn.Module = module, step: int = step) -> Tensor:
                one.zero_grad()
                loss = mlp_loss(module, step)
                loss.backward()
                return loss

            losses.append(one.step(closure).detach())
        assert_identical(*losses)
    assert_same_training(optimizer, plain)


def recomputing(function: Callable[..., Tensor], reentrant: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(function, x, use_reentrant=reentrant)


def test_checkpointed_layers(device: str) -> None:
    (model, optimizer), (other, plain) = pair(RECIPES["nvfp4"], device)
    optimizer.enable_gradient_release()
    for one, module in ((optimizer, model), (plain, other)):
        x = random((4, 32), 0, device).bfloat16()
        recomputing(module, False)(x).square().mean().backward()
        one.step()
        one.zero_grad()
    assert_same_training(optimizer, plain)
    # Reentrant ones complete the gradient of a shared layer twice.
    x = random((4, 32), 0, device).bfloat16().requires_grad_()
    y = recomputing(model, True)(recomputing(model, True)(x))
    with pytest.raises(RuntimeError, match="use non-reentrant checkpoints"):
        y.square().mean().backward()


@pytest.mark.parametrize("way", ["deepcopy", "state_dict"])
def test_copies_and_checkpoints(way: str, device: str) -> None:
    (model, optimizer), (other, plain) = pair(RECIPES["nvfp4"], device)
    optimizer.enable_gradient_release()
    mlp_loss(model).backward()
    if way == "deepcopy":
        copied, one = copy.deepcopy((model, optimizer))
        assert not one._is_releasing
    else:
        copied, one = other, plain
        copied.load_state_dict(copy.deepcopy(model.state_dict()))
        one.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    mlp_loss(copied, 1).backward()
    assert not has_no_gradients(one)  # the copy does not release
    one.step()
    mlp_loss(model, 1).backward()
    optimizer.step()
    assert_same_training(optimizer, one)
    # A state that is loaded goes on being released, with its options.
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    mlp_loss(model, 2).backward()
    optimizer.step()
    saved[1]["param_groups"][0]["lr"] = 5e-3
    for loaded, module in ((optimizer, model), (one, copied)):
        module.load_state_dict(saved[0])
        loaded.load_state_dict(saved[1])
        loaded.zero_grad()
        mlp_loss(module, 3).backward()
        loaded.step()
    assert has_no_gradients(optimizer) and optimizer.param_groups[0]["lr"] == 5e-3
    assert_same_training(optimizer, one)


def test_a_parameter_is_stepped_with_the_options_of_its_group_now(device: str) -> None:
    (model, optimizer), (other, plain) = pair(RECIPES["nvfp4"], device)
    optimizer.enable_gradient_release()
    for step in range(2):
        for module, one in ((model, optimizer), (other, plain)):
            mlp_loss(module, step).backward()
            one.step()
            one.zero_grad()
            if step == 0:
                first = one.param_groups[0]
                second = {**first, "lr": 0.5}
                one.param_groups.append(second)
                for name in ("params", "param_names"):
                    second[name] = [first[name].pop(0)]
    assert_same_training(optimizer, plain)


def test_new_groups_are_released_too(device: str) -> None:
    (model, optimizer), (other, plain) = pair(RECIPES["nvfp4"], device)
    optimizer.enable_gradient_release()
    for module, one in ((model, optimizer), (other, plain)):
        extra = Parameter(random((32,), 3, device))
        one.add_param_group({"params": [("extra", extra)], "lr": 0.5})
        (mlp_loss(module) + extra.square().sum()).backward()
        assert has_no_gradients(one) == (one is optimizer)
        one.step()
    assert_same_training(optimizer, plain)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [("again", model[0].weight)]})
    mlp_loss(model).backward()
    assert all(param.grad is None for param in model.parameters())


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    st.lists(
        st.sampled_from(["train", "save", "load", "write", "toggle", "zero", "move", "reset"]),
        max_size=8,
    ),
    st.sampled_from([*RECIPES]),
)
def test_programs_train_alike(actions: list[str], recipe: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (model, optimizer), (other, plain) = pair(RECIPES[recipe], device)
    handle: Any = optimizer.enable_gradient_release()
    for step, action in enumerate(["train", *actions, "train"]):
        for one, module in ((optimizer, model), (plain, other)):
            if action == "train":
                mlp_loss(module, step).backward()
                one.step()
                one.zero_grad()
            elif action == "load":
                one.load_state_dict(copy.deepcopy(one.state_dict()))
            elif action == "write":
                with torch.no_grad():
                    module[0].weight.copy_(random((64, 32), step))
            elif action == "zero":
                one.zero_grad()
            elif action == "move":
                for param in module.parameters():
                    param.data = param.data.clone()
            elif action == "reset":
                one.reset_master_weights()
        if action == "toggle" and handle is None:
            handle = optimizer.enable_gradient_release()
        elif action == "toggle":
            handle.remove()
            handle.remove()
            handle = None
        elif action == "save":
            assert_identical(optimizer.state_dict(), plain.state_dict())
    assert_same_training(optimizer, plain)
    assert_bytes_are_of_masters(optimizer)


# What is refused


@pytest.fixture
def released(device: str) -> Iterator[tuple[nn.Module, FP4Adam]]:
    model = make_mlp(RECIPES["nvfp4"], device)
    optimizer = FP4Adam(model.parameters(), **OPTIONS)
    optimizer.enable_gradient_release()
    yield model, optimizer


def test_arguments_are_checked(released: tuple[nn.Module, FP4Adam]) -> None:
    model, optimizer = released
    with pytest.raises(RuntimeError, match="each parameter must be released by one optimizer"):
        optimizer.enable_gradient_release()
    with pytest.raises(RuntimeError, match="clip_grad_norm_ must not be called while"):
        optimizer.clip_grad_norm_(1.0)
    decoupled = FP4Adam(model.parameters(), use_decoupled_grad=True)
    with pytest.raises(NotImplementedError, match="use_decoupled_grad must be False"):
        decoupled.enable_gradient_release()


def test_a_parameter_is_released_by_one_optimizer(device: str) -> None:
    model = make_mlp(RECIPES["nvfp4"], device)
    first, second = (FP4Adam(model.parameters(), **OPTIONS) for _ in range(2))
    handle = first.enable_gradient_release()
    with pytest.raises(RuntimeError, match="each parameter must be released by one optimizer"):
        second.enable_gradient_release()
    assert not second._is_releasing
    # One that is gone releases nothing, whoever keeps its handle.
    del first
    mlp_loss(model).backward()
    assert not has_no_gradients(second)
    handle.remove()
    second.zero_grad()
    second.enable_gradient_release()
    mlp_loss(model).backward()
    assert has_no_gradients(second)
    assert_bytes_are_of_masters(second)


def test_scaled_gradients_are_refused(released: tuple[nn.Module, FP4Adam], device: str) -> None:
    model, optimizer = released
    scaler = torch.amp.GradScaler(device)
    scaler.scale(mlp_loss(model)).backward()
    with pytest.raises(RuntimeError, match="gradients must not be scaled with gradient release"):
        scaler.step(optimizer)
    optimizer.step()  # and is not stuck


def test_errors_of_the_step_come_out_of_backward(released: tuple[nn.Module, FP4Adam]) -> None:
    model, optimizer = released
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="Invalid learning rate: nan"):
        mlp_loss(model).backward()
    assert_identical([param.detach().clone() for param in model.parameters()], before)


# What goes wrong in between


def test_zero_grad_begins_anew_after_a_backward_pass_that_failed(device: str) -> None:
    """As a loop that skips the batch after an out-of-memory error does."""
    (model, optimizer), (other, plain) = pair(RECIPES["nvfp4"], device)
    optimizer.enable_gradient_release()

    def fail(grad: Tensor) -> None:
        raise RuntimeError("out of memory")

    hook = model[0].bias.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        mlp_loss(model, 0).backward()
    hook.remove()
    assert model[0].bias.grad is None
    # What has been released by then is stepped in the other model as well.
    released = [p for p in all_params(optimizer) if optimizer.state.get(p)]
    assert 0 < len(released) < len(all_params(optimizer))
    mlp_loss(other, 0).backward()
    for param, same in zip(all_params(optimizer), all_params(plain), strict=True):
        if not any(param is one for one in released):
            same.grad = None
    plain.step()
    for one in (optimizer, plain):
        one.zero_grad()
    for step in range(1, 3):
        for trained, one in ((model, optimizer), (other, plain)):
            mlp_loss(trained, step).backward()
            one.step()
            one.zero_grad()
    assert_same_training(optimizer, plain)


def test_step_refuses_before_any_parameter_moves(device: str) -> None:
    _, optimizer = pair(None, device)[0]
    optimizer.enable_gradient_release()
    params = all_params(optimizer)
    set_grads(params, 0)
    params[-1].grad = params[-1].grad.to_sparse()
    before = [param.detach().clone() for param in params]
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    assert_identical([param.detach() for param in params], before)
    params[-1].grad = params[-1].grad.to_dense()
    optimizer.add_param_group({"params": [("last", Parameter(torch.ones(3, device=device)))]})
    set_grads(optimizer.param_groups[1]["params"], 0)
    optimizer.param_groups[1]["lr"] = math.nan
    with pytest.raises(ValueError, match="Invalid learning rate: nan"):
        optimizer.step()
    assert_identical([param.detach() for param in params], before)
    optimizer.param_groups[1]["lr"] = 1e-3
    optimizer.step()
    assert all(param.grad is None for param in all_params(optimizer))


@pytest.mark.parametrize("quantizer", [RECIPES["mxfp8"], None], ids=["mxfp8", "bfloat16"])
def test_release_goes_on_after_the_model_has_moved(
    quantizer: Quantizer | None, device: str
) -> None:
    """``Module.to()`` may swap tensors, and their hooks with them."""
    model, optimizer = pair(quantizer, device)[0]
    optimizer.enable_gradient_release()

    def swap() -> None:
        for param in model.parameters():
            torch.utils.swap_tensors(param, Parameter(param.detach().clone()))

    moves = lambda: model._apply(torch.clone), lambda: model.half().bfloat16(), swap
    for move in moves:
        mlp_loss(model, 0).backward()
        optimizer.step()
        move()
        mlp_loss(model, 1).backward()
        optimizer.step()
        mlp_loss(model, 2).backward()
        assert has_no_gradients(optimizer)
        optimizer.step()


def test_a_removed_release_keeps_no_parameters_alive(device: str) -> None:
    model, optimizer = pair(None, device)[0]
    release = optimizer.enable_gradient_release()
    mlp_loss(model, 0).backward()
    optimizer.step()
    release.remove()
    assert not any(param._post_accumulate_grad_hooks for param in all_params(optimizer))
    group, gone = optimizer.param_groups[0], weakref.ref(model[0].weight)
    group["params"][0] = Parameter(random((64, 32), 1, device).bfloat16())
    optimizer.state.pop(model[0].weight)
    del model
    set_grads(group["params"], 1)
    optimizer.step()
    gc.collect()
    assert gone() is None
