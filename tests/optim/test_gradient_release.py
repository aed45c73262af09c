"""Gradient release: one gradient at a time, of models, and what is refused.

That it has the bits of a step after the backward pass is a path of the step table.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from fp4adam import FP4Adam, FusedAdam, Quantizer, hf_scale_groups, quantize_model
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

OPTIONS = dict(lr=1e-2, weight_decay=0.1)
NVFP4 = RECIPES["nvfp4"]


def pair(quantizer: Quantizer | None = NVFP4) -> list[tuple[nn.Module, FP4Adam]]:
    """Two equal models with their optimizers, of which the first releases gradients."""
    models = [make_mlp(quantizer, "cpu", torch.bfloat16) for _ in range(2)]
    found = [(m, FP4Adam(m.named_parameters(), **OPTIONS)) for m in models]
    found[0][1].enable_gradient_release()
    return found


def assert_same_training(released: Any, plain: Any) -> None:
    assert_identical(snapshot(released)["params"], snapshot(plain)["params"])
    assert_identical(released.state_dict(), plain.state_dict())


def has_no_gradients(optimizer: FusedAdam) -> bool:
    return all(param.grad is None for param in all_params(optimizer))


@pytest.mark.parametrize("releases", [False, True])
def test_one_gradient_is_alive_at_a_time(releases: bool, device: str) -> None:
    """Bytes of gradients that are in memory together, whenever one becomes complete."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    params = [*quantize_model(model.to(device, torch.bfloat16), "nvfp4").parameters()]
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


def accumulated(model: nn.Module, release: Any, seed: int) -> None:
    with release.accumulate():
        with release.accumulate():
            mlp_loss(model, seed).backward()
        mlp_loss(model, seed + 1).backward()
    assert model[0].weight.grad is not None
    mlp_loss(model, seed + 2).backward()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def test_microbatches_are_accumulated() -> None:
    (model, optimizer), (other, plain) = pair()
    for step in range(2):
        accumulated(model, optimizer._release, 10 * step)
        assert has_no_gradients(optimizer)
        for part in range(3):
            mlp_loss(other, 10 * step + part).backward()
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    assert_same_training(optimizer, plain)


def test_two_backward_passes_need_a_step_between() -> None:
    (model, optimizer), (other, plain) = pair()
    mlp_loss(model).backward()
    with pytest.raises(RuntimeError, match=r"once per step\(\), got one of shape \(32, 64\) twice"):
        mlp_loss(model, 1).backward()
    optimizer.zero_grad()
    mlp_loss(other).backward()
    plain.step()
    assert_same_training(optimizer, plain)


@pytest.mark.parametrize("quantizer", [NVFP4, None], ids=["nvfp4", "bfloat16"])
def test_a_graph_that_is_kept_has_lost_its_weights(quantizer: Quantizer | None) -> None:
    """A second pass through the same graph would multiply weights that are newer than the graph."""
    model, optimizer = pair(quantizer)[0]
    loss = mlp_loss(model)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_frozen_unfrozen_and_set_by_hand() -> None:
    (model, optimizer), (other, plain) = pair()
    for step in range(4):
        for one, module in ((optimizer, model), (plain, other)):
            module[0].requires_grad_(step > 0)
            module[2].requires_grad_(step != 1)
            if step == 2:
                set_grads(module.parameters(), 3)
            else:
                mlp_loss(module, step).backward()
            one.step()
            one.zero_grad()
    assert_same_training(optimizer, plain)
    mlp_loss(model).backward()
    assert has_no_gradients(optimizer)


@pytest.mark.parametrize("way", ["to none", "to zero", "of the model"])
def test_gradients_of_a_group_that_were_reset_do_not_count(way: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(32, 32, bias=False) for name in ("q_proj", "k_proj")})
    quantize_model(model, "nvfp4", filter=lambda *_: True, scale_groups=hf_scale_groups)
    optimizer = FP4Adam(model.parameters(), **OPTIONS)
    optimizer.enable_gradient_release()
    x = random((4, 32), 0)
    model["q_proj"](x).square().mean().backward()
    (model if way == "of the model" else optimizer).zero_grad(set_to_none=way != "to zero")
    model["k_proj"](x).square().mean().backward()
    assert not optimizer.state and model["k_proj"].weight.grad is not None
    model["q_proj"](x).square().mean().backward()
    assert has_no_gradients(optimizer) and len(optimizer.state) == 2


def recomputing(function: Callable[..., Tensor], reentrant: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(function, x, use_reentrant=reentrant)


def test_shared_and_checkpointed_layers_are_released_once() -> None:
    optimizers = []
    for releases in (True, False):
        torch.manual_seed(0)
        model = Tied()
        optimizer = FP4Adam(model.parameters(), **OPTIONS)
        if releases:
            optimizer.enable_gradient_release()
        for step in range(2):
            recomputing(model, False)(random((4, 32), step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizers.append(optimizer)
    assert_same_training(*optimizers)
    # Reentrant ones complete the gradient of a shared layer twice.
    model, _ = pair()[0]
    x = random((4, 32), 0).bfloat16().requires_grad_()
    y = recomputing(model, True)(recomputing(model, True)(x))
    with pytest.raises(RuntimeError, match="use non-reentrant checkpoints"):
        y.square().mean().backward()


def test_copies_do_not_release_and_loaded_states_go_on() -> None:
    (model, optimizer), (other, plain) = pair()
    mlp_loss(model).backward()
    copied, one = copy.deepcopy((model, optimizer))
    assert not one._is_releasing
    optimizer.step()
    for module in (copied, model):
        mlp_loss(module, 1).backward()
    assert has_no_gradients(optimizer) and not has_no_gradients(one)
    for each in (one, optimizer):
        each.step()
        each.zero_grad()
    assert_same_training(optimizer, one)
    # A state that is loaded goes on being released, with its options.
    saved = copy.deepcopy((copied.state_dict(), one.state_dict()))
    saved[1]["param_groups"][0]["lr"] = 5e-3
    for loaded, module in ((optimizer, model), (one, copied)):
        module.load_state_dict(saved[0])
        loaded.load_state_dict(saved[1])
        mlp_loss(module, 3).backward()
        loaded.step()
    assert has_no_gradients(optimizer) and optimizer.param_groups[0]["lr"] == 5e-3
    assert_same_training(optimizer, one)


def test_new_groups_are_released_too() -> None:
    (model, optimizer), (other, plain) = pair()
    for module, one in ((model, optimizer), (other, plain)):
        extra = Parameter(random((32,), 3))
        one.add_param_group({"params": [("extra", extra)], "lr": 0.5})
        (mlp_loss(module) + extra.square().sum()).backward()
        assert has_no_gradients(one) == (one is optimizer)
        one.step()
    assert_same_training(optimizer, plain)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [("again", model[0].weight)]})
    mlp_loss(model).backward()
    assert all(param.grad is None for param in model.parameters())


# What is refused


@pytest.fixture
def released() -> Iterator[tuple[nn.Module, FP4Adam]]:
    model = make_mlp(NVFP4, "cpu")
    optimizer = FP4Adam(model.parameters(), **OPTIONS)
    optimizer.enable_gradient_release()
    yield model, optimizer


def test_what_cannot_be_released_is_refused(released: tuple[nn.Module, FP4Adam]) -> None:
    model, optimizer = released
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match="each parameter must be released by one optimizer"):
        optimizer.enable_gradient_release()
    with pytest.raises(RuntimeError, match="clip_grad_norm_ must not be called while"):
        optimizer.clip_grad_norm_(1.0)
    decoupled = FP4Adam(model.parameters(), use_decoupled_grad=True)
    with pytest.raises(NotImplementedError, match="use_decoupled_grad must be False"):
        decoupled.enable_gradient_release()
    # Errors of the step come out of the backward pass.
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="Invalid learning rate: nan"):
        mlp_loss(model).backward()
    assert_identical([param.detach().clone() for param in model.parameters()], before)
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(mlp_loss(model)).backward()
    with pytest.raises(RuntimeError, match="gradients must not be scaled with gradient release"):
        scaler.step(optimizer)
    optimizer.step()  # and is not stuck


def test_a_parameter_is_released_by_one_optimizer() -> None:
    model = make_mlp(NVFP4, "cpu")
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


def test_step_refuses_before_any_parameter_moves() -> None:
    _, optimizer = pair(None)[0]
    params = all_params(optimizer)
    set_grads(params, 0)
    params[-1].grad = params[-1].grad.to_sparse()
    before = [param.detach().clone() for param in params]
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    params[-1].grad = params[-1].grad.to_dense()
    optimizer.add_param_group({"params": [("last", Parameter(torch.ones(3)))]})
    set_grads(optimizer.param_groups[1]["params"], 0)
    optimizer.param_groups[1]["lr"] = math.nan
    with pytest.raises(ValueError, match="Invalid learning rate: nan"):
        optimizer.step()
    assert_identical([param.detach() for param in params], before)
    optimizer.param_groups[1]["lr"] = 1e-3
    optimizer.step()
    assert has_no_gradients(optimizer)


@pytest.mark.parametrize("quantizer", [RECIPES["mxfp8"], None], ids=["mxfp8", "bfloat16"])
def test_release_goes_on_after_the_model_has_moved(quantizer: Quantizer | None) -> None:
    """``Module.to()`` may swap tensors, and their hooks with them."""
    model, optimizer = pair(quantizer)[0]

    def swap() -> None:
        for param in model.parameters():
            torch.utils.swap_tensors(param, Parameter(param.detach().clone()))

    for move in (lambda: model._apply(torch.clone), lambda: model.half().bfloat16(), swap):
        mlp_loss(model, 0).backward()
        optimizer.step()
        move()
        mlp_loss(model, 1).backward()
        optimizer.step()
        mlp_loss(model, 2).backward()
        assert has_no_gradients(optimizer)
        optimizer.step()


def test_a_removed_release_keeps_no_parameters_alive() -> None:
    model, optimizer = pair(None)[0]
    mlp_loss(model, 0).backward()
    optimizer.step()
    optimizer._release.remove()
    optimizer._release.remove()
    assert not any(param._post_accumulate_grad_hooks for param in all_params(optimizer))
    group, gone = optimizer.param_groups[0], weakref.ref(model[0].weight)
    group["params"][0] = Parameter(random((64, 32), 1).bfloat16())
    optimizer.state.pop(model[0].weight)
    del model
    set_grads(group["params"], 1)
    optimizer.step()
    gc.collect()
    assert gone() is None
