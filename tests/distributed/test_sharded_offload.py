"""Offloaded states of FSDP2's shards: the bits of resident ones, and their checkpoints."""

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from fp4adam import FP4Adam, check_shards, hf_scale_groups, quantize_model
from fp4adam.distributed.dtensor import local
from helpers import assert_identical
from late_link import LateLink, offload_to
from ranks import all_ranks, home, run
from test_sharded_release import Layer, backward
from twins import OPTIONS, gathered_bytes


def make(recipe: str, offloads: bool, **options: Any) -> tuple[nn.Sequential, FP4Adam]:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer()).to(home(), torch.bfloat16)
    quantize_model(model, recipe, filter=lambda *_: True, scale_groups=hf_scale_groups)
    for layer in model:
        fully_shard(layer, mesh=all_ranks())
    fully_shard(model, mesh=all_ranks())
    return model, FP4Adam(model.named_parameters(), **OPTIONS, offload_states=offloads, **options)


def assert_same_states(offloaded: Any, resident: Any) -> None:
    """The state dicts of this rank."""
    a, b = (optimizer.state_dict()["state"] for optimizer in (offloaded, resident))
    assert a.keys() == b.keys()
    for key, state in b.items():
        assert_identical(*([{n: local(x).cpu() for n, x in s.items()}] for s in (a[key], state)))


def train_shards(rank: int, recipe: str, releases: bool, states: str) -> None:
    with offload_to(LateLink(), 12 * 64 * 32):
        (model, optimizer), (other, resident) = (
            make(recipe, offloads, states=states) for offloads in (True, False)
        )
        if releases:
            for one in (optimizer, resident):
                one.enable_gradient_release()
        for step in range(4):
            for module, one in ((model, optimizer), (other, resident)):
                backward(module, step)
                if not releases and step % 2:
                    one.clip_grad_norm_(0.05)
                if step == 2 and rank == 1:  # a foreign write that one rank sees
                    state = [*one.state.values()][0]
                    exp_avg = local(state["exp_avg"])  # or its codes
                    exp_avg.zero_() if states == "8bit" else exp_avg.mul_(0.5)
                one.step()
                one.zero_grad()
        for state in optimizer.state.values():
            assert all(local(value).device.type == "cpu" for value in state.values())
        assert_same_states(optimizer, resident)
        both = (gathered_bytes(m) for m in (model, other))
        assert_identical(*both)
        check_shards(model)


@pytest.mark.parametrize(
    "recipe, releases, world_size, states",
    [
        ("nvfp4", False, 3, "32bit"),
        ("nvfp4", True, 2, "8bit"),
        pytest.param("nvfp4", True, 2, "32bit", marks=pytest.mark.exhaustive),
        pytest.param("float8block", False, 3, "32bit", marks=pytest.mark.exhaustive),
        pytest.param("mxfp8", True, 2, "32bit", marks=pytest.mark.exhaustive),
    ],
)
def test_the_bits_of_resident_states(
    recipe: str, releases: bool, world_size: int, states: str
) -> None:
    run(train_shards, world_size, recipe, releases, states)


def save_and_load(rank: int, folder: str) -> None:
    with offload_to(LateLink(), 12 * 64 * 32):
        pairs = [make("nvfp4", offloads) for offloads in (True, False, True, False)]
        for step in range(2):
            for model, optimizer in pairs[:2]:
                backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
        whole = []
        for i, (source, target) in enumerate([(0, 3), (1, 2)]):  # each into the other kind
            names = ("model", "optimizer")
            saved = dict(zip(names, get_state_dict(*pairs[source]), strict=True))
            dcp.save(saved, checkpoint_id=f"{folder}/{i}")
            loaded = dict(zip(names, get_state_dict(*pairs[target]), strict=True))
            dcp.load(loaded, checkpoint_id=f"{folder}/{i}")
            parts = {f"{name}_state_dict": loaded[key] for key, name in
                     (("model", "model"), ("optimizer", "optim"))}  # fmt: skip
            set_state_dict(*pairs[target], **parts)
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            whole.append(get_optimizer_state_dict(*pairs[source], options=options))
        if rank == 0:  # the others get nothing
            for name, state in whole[1]["state"].items():
                assert_identical([whole[0]["state"][name]], [state])
        for model, optimizer in pairs:
            backward(model, 2)
            optimizer.step()
        for _, optimizer in pairs[1:]:
            assert_same_states(pairs[0][1], optimizer)


def test_distributed_checkpoints_go_both_ways(tmp_path: Any) -> None:
    run(save_and_load, 2, str(tmp_path))
