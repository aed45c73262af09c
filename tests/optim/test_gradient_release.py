"""Gradient release: one gradient at a time, of models, and what is refused.

That it has the bits of a step after the backward pass is a path of the step table.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils import swap_tensors
from torch.utils.checkpoint import checkpoint

from fp4adam import FP4Adam, FusedAdam, Quantizer, hf_scale_groups, quantize_model
from helpers import (
    RECIPES,
    all_params,
    assert_identical,
    assert_same_training,
    make_mlp,
    mlp_loss,
    random,
    set_grads,
)

OPTIONS = dict(lr=1e-2, weight_decay=0.1, states="8bit")
NVFP4 = RECIPES["nvfp4"]


def pair(quantizer: Quantizer | None = NVFP4) -> list[tuple[nn.Module, FP4Adam]]:
    """Two equal models with their optimizers, of which the first releases gradients."""
    models = [make_mlp(quantizer, "cpu", torch.bfloat16) for _ in range(2)]
    found = [(m, FP4Adam(m.named_parameters(), **OPTIONS)) for m in models]
    found[0][1].enable_gradient_release()
    return found


def has_no_gradients(optimizer: FusedAdam) -> bool:
    return all(param.grad is None for param in all_params(optimizer))


@pytest.mark.parametrize("releases", [False, True])
def test_one_gradient_is_alive_at_a_time(releases: bool, device: str) -> None:
    """Bytes of gradients that are in memory together, whenever one becomes complete."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    params = [*quantize_model(model.to(device, torch.bfloat16), "nvfp4").parameters()]
    seen: list[tuple[StorageWeakRef, int]] = []
    sizes: list[int] = []

    def alive() -> int:
        return sum(size for memory, size in seen if not memory.expired())

    def watch(param: Tensor) -> None:
        memory = param.grad.untyped_storage()
        seen.append((StorageWeakRef(memory), memory.nbytes()))
        sizes.append(alive())

    for param in params:
        param.register_post_accumulate_grad_hook(watch)
    optimizer = FP4Adam(params, lr=1e-3)
    if releases:
        optimizer.enable_gradient_release()
    model(random((8, 64), 0, device).bfloat16()).square().mean().backward()
    one = 64 * 64 * 2
    assert len(seen) == len(params)
    assert max(sizes) == (one if releases else len(params) * one)
    assert alive() == (0 if releases else len(params) * one)


def test_microbatches_are_accumulated() -> None:
    (model, optimizer), (other, plain) = pair()
    release = optimizer._release
    hooks = [[*param._post_accumulate_grad_hooks] for param in all_params(optimizer)]
    for seed in (0, 10):
        with release.accumulate():
            with release.accumulate():
                mlp_loss(model, seed).backward()
            mlp_loss(model, seed + 1).backward()
        assert model[0].weight.grad is not None
        mlp_loss(model, seed + 2).backward()
        assert has_no_gradients(optimizer)
        for part in range(3):
            mlp_loss(other, seed + part).backward()
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
            one.param_groups = [{**group, "lr": 1e-3} for group in one.param_groups]
    assert_same_training(optimizer, plain)
    assert hooks == [[*param._post_accumulate_grad_hooks] for param in all_params(optimizer)]


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


def test_shared_and_checkpointed_layers_are_released_once() -> None:
    optimizers = []
    for releases in (True, False):
        torch.manual_seed(0)
        layer = nn.Linear(32, 32, bias=False)
        optimizer = FP4Adam(layer.parameters(), **OPTIONS)
        if releases:
            optimizer.enable_gradient_release()
        for step in range(2):
            x = random((4, 32), step)
            y = checkpoint(lambda x: layer(layer(x).tanh()), x, use_reentrant=False)  # noqa: B023
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizers.append(optimizer)
    assert_same_training(*optimizers)
    # Reentrant ones complete the gradient of a shared layer twice.
    model, _ = pair()[0]
    x = random((4, 32), 0).bfloat16().requires_grad_()
    y = checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True)
    words = r"once per step\(\), got one of shape \(\d+.*\) twice; .*use non-reentrant checkpoints"
    with pytest.raises(RuntimeError, match=words):
        y.square().mean().backward()


def test_copies_do_not_release() -> None:
    (model, optimizer), _ = pair()
    copied, one = copy.deepcopy((model, optimizer))
    mlp_loss(copied).backward()
    assert one._release is None and not has_no_gradients(one)


# What is refused


def test_what_cannot_be_released_is_refused() -> None:
    model, optimizer = pair()[0]
    before = [param.detach().clone() for param in model.parameters()]
    next(model.parameters()).register_post_accumulate_grad_hook(lambda param: None)
    for other in (optimizer, FP4Adam(model.parameters())):
        with pytest.raises(RuntimeError, match="each parameter must be released by one optimizer"):
            other.enable_gradient_release()
    with pytest.raises(RuntimeError, match="clip_grad_norm_ must not be called while"):
        optimizer.clip_grad_norm_(1.0)
    decoupled = FP4Adam(model.parameters(), use_decoupled_grad=True)
    with pytest.raises(NotImplementedError, match="use_decoupled_grad .*got True and False"):
        decoupled.enable_gradient_release()
    # Errors of the step come out of the backward pass.
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="Invalid learning rate: nan"):
        mlp_loss(model).backward()
    optimizer.zero_grad()
    # Those of any group come before the first update.
    with optimizer._release.accumulate():
        mlp_loss(model).backward()
    optimizer.add_param_group({"params": [("late", late := Parameter(torch.ones(3)))]})
    late.grad = torch.ones(3)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 1e-3, math.nan
    with pytest.raises(ValueError, match="Invalid learning rate: nan"):
        optimizer.step()
    optimizer.param_groups[1]["lr"], late.grad = 1e-3, torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    assert_identical([param.detach() for param in model.parameters()], before)
    optimizer.zero_grad()
    for signal in ("grad_scale", "found_inf"):  # of a GradScaler, before and after unscale_
        setattr(optimizer, signal, torch.ones(1))
        with pytest.raises(RuntimeError, match="gradients must not be scaled with gradient releas"):
            optimizer.step()
    mlp_loss(model).backward()
    set_grads(model.parameters(), 0)
    with pytest.raises(RuntimeError, match="got 4 that have one again"):
        optimizer.step()
    optimizer.step()  # and is not stuck


def test_an_optimizer_that_is_gone_releases_nothing() -> None:
    """Whoever keeps its handle."""
    model = make_mlp(NVFP4, "cpu")
    first, second = (FP4Adam(model.parameters(), **OPTIONS) for _ in range(2))
    handle = first.enable_gradient_release()
    del first
    mlp_loss(model).backward()
    assert not has_no_gradients(second)
    handle.remove()
    second.zero_grad()
    second.enable_gradient_release()
    mlp_loss(model).backward()
    assert has_no_gradients(second)


def test_a_removed_release_keeps_no_parameters_alive() -> None:
    model, optimizer = pair(None)[0]
    swap_tensors(bias := model[2].bias, Parameter(bias.detach().clone()))
    optimizer.add_param_group({"params": [("late", late := Parameter(torch.ones(3)))]})
    (mlp_loss(model, 0) + late.sum()).backward()
    assert has_no_gradients(optimizer)
    handle = optimizer._release
    for _ in range(2):
        handle.remove()
    assert not any(param._post_accumulate_grad_hooks for param in all_params(optimizer))
    gone = weakref.ref(model[0].weight)
    optimizer.state.pop(model[0].weight)
    optimizer.param_groups[0]["params"][0] = Parameter(random((64, 32), 1).bfloat16())
    del model
    set_grads(all_params(optimizer), 1)
    optimizer.step()
    gc.collect()
    assert gone() is None
