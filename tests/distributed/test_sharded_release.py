"""Gradient release on several ranks: with FSDP2 the bits of a plain step; DDP is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fp4adam import FP4Adam, check_shards, hf_scale_groups, quantize_model
from fp4adam.distributed.dtensor import local
from helpers import assert_identical
from ranks import all_ranks, home, run
from twins import FORMATS, OPTIONS, gathered_bytes


class Layer(nn.Module):
    """Two matrices of one scale group, which FSDP2 gathers together, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = (nn.Linear(32, 64, bias=i == 0) for i in range(2))
        self.out = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.q_proj(x) * self.k_proj(x).tanh())


def make(recipe: str, groups: bool, variant: str = "") -> tuple[nn.Sequential, FP4Adam]:
    options: dict[str, Any] = {"mesh": all_ranks()}
    if variant == "hybrid":
        names = ("replicate", "shard")
        options["mesh"] = init_device_mesh(home().type, (2, 2), mesh_dim_names=names)
    elif variant == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    elif variant == "kept":
        options["reshard_after_forward"] = False
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer()).to(home(), torch.bfloat16)
    rule = hf_scale_groups if groups else ()
    quantize_model(model, recipe, filter=lambda *_: True, scale_groups=rule)
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    states = "8bit" if variant == "8bit" else "32bit"
    return model, FP4Adam(model.named_parameters(), **OPTIONS, states=states)


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randn(4, 32, generator=generator).to(home(), torch.bfloat16)
    model(x).square().mean().backward()


def release_on_shards(rank: int, recipe: str, groups: bool, variant: str = "") -> None:
    (model, optimizer), (other, plain) = (make(recipe, groups, variant) for _ in range(2))
    release = optimizer.enable_gradient_release()
    for step in range(4):
        for module, one in ((model, optimizer), (other, plain)):
            if step == 1:  # accumulated, reduced in the last pass only
                module.set_requires_gradient_sync(False)
                backward(module, 5)
                module.set_requires_gradient_sync(True)
            if step == 2:  # accumulated after each reduction
                with release.accumulate():
                    backward(module, 6)
            backward(module, step)
            released = all(param.grad is None for param in module.parameters())
            assert released == (one is optimizer)
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
        assert_identical(gathered_bytes(model), gathered_bytes(other))
    check_shards(model)
    for param, same in zip(model.parameters(), other.parameters(), strict=True):
        a, b = optimizer.state[param], plain.state[same]
        for name in sorted(b):
            assert_identical([{name: local(a[name])}], [{name: local(b[name])}])


@pytest.mark.parametrize(
    "recipe, groups, world_size",
    [
        ("nvfp4", True, 2),
        *(
            pytest.param(recipe, False, 3, marks=pytest.mark.exhaustive)  # cuts blocks
            for recipe in FORMATS
        ),
    ],
)
def test_the_bits_of_a_plain_step(recipe, groups, world_size):
    run(release_on_shards, world_size, recipe, groups)


@pytest.mark.parametrize(
    "variant, world_size",
    [
        ("8bit", 2),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in [("hybrid", 4), ("bfloat16", 2), ("kept", 2)]
        ),
    ],
)
def test_variants_of_fully_shard(variant, world_size):
    run(release_on_shards, world_size, "nvfp4", True, variant)


def release_in_replicas(rank: int) -> None:
    model = quantize_model(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)).to(home()), "nvfp4")
    optimizer = FP4Adam(model.parameters())
    optimizer.enable_gradient_release()
    replica = DistributedDataParallel(model)
    replica(torch.randn(4, 32, device=home())).sum().backward()
    with pytest.raises(RuntimeError, match="4 that have one again: DistributedDataParallel aver"):
        optimizer.step()


def test_replicas_are_refused():
    run(release_in_replicas, 2)
