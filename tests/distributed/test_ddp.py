"""Replicas: what is refused, and what they resume; the rank table trains them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from fp4adam import FP4Adam, quantize_model
from helpers import assert_identical
from ranks import home, run
from twins import OPTIONS, build, fixed_grads, take_step, whole_bytes, zero_redundancy_optimizer


def backward(model: nn.Module) -> None:
    model(torch.ones(8, 32, device=home())).square().mean().backward()


def release_in_replicas(rank: int) -> None:
    model = build(64, 32, "nvfp4")
    optimizer = FP4Adam(model.parameters(), **OPTIONS)
    optimizer.enable_gradient_release()
    replica = DistributedDataParallel(model)
    backward(replica)
    with pytest.raises(RuntimeError, match="that have one again: DistributedDataParallel aver"):
        optimizer.step()


def quantize_differently(rank: int) -> None:
    model = build(64, 32, None)
    quantize_model(model, "nvfp4", filter=lambda module, name: rank == 0 or name != "2")
    with pytest.raises(RuntimeError, match="same shape, dtype and quantizer on all ranks"):
        DistributedDataParallel(model)


def misuse_wrappers(rank: int) -> None:
    for flags in ({}, {"use_orig_params": True}):
        with pytest.raises(NotImplementedError, match="got FullyShardedDataParallel, which would"):
            FullyShardedDataParallel(build(64, 32, "nvfp4"), device_id=home(), **flags)
    for flags, error, match in (
        ({"parameters_as_bucket_view": True}, NotImplementedError, "bucket_view must be False"),
        ({"overlap_with_ddp": True}, ValueError, "FP4Adam"),
    ):
        model = DistributedDataParallel(build(64, 32, "mxfp8"))
        with pytest.raises(error, match=match):
            optimizer = zero_redundancy_optimizer()(model.parameters(), FP4Adam, **OPTIONS, **flags)
            backward(model)
            optimizer.step()


@pytest.mark.parametrize("function", [release_in_replicas, quantize_differently, misuse_wrappers])
def test_what_replicas_cannot_do_is_refused_on_every_rank(function):
    run(function, 2)


def resume(rank: int) -> list[Any]:
    """A model and an optimizer that rank 0 has loaded, then sent to the others."""
    first, model = build(64, 32, "nvfp4"), build(64, 32, "nvfp4", seed=rank)
    trained = FP4Adam(first.parameters(), **OPTIONS)
    take_step(first, trained, fixed_grads(first, 0))
    if rank == 0:
        model.load_state_dict(first.state_dict())
    replica = DistributedDataParallel(model)
    optimizer = FP4Adam(model.parameters(), **OPTIONS)
    saved = [trained.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    optimizer.load_state_dict(saved[0])
    backward(replica)
    optimizer.step()
    backward(first)
    trained.step()
    for one, expected in ((model, first), (optimizer.state_dict(), trained.state_dict())):
        if isinstance(one, nn.Module):
            one, expected = whole_bytes(one), whole_bytes(expected)
        assert_identical(one, expected)


def test_resuming_needs_the_state_of_the_optimizer_on_all_ranks():
    run(resume, 2)
