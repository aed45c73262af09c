"""MXFP4 on several ranks, and with masters behind saturated codes.

Its bytes and steps are rows of the tables of formats and steps.
"""

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fp4adam import FP4Adam, MXFP4Quantizer, QuantizedTensor, quantize_model
from fp4adam.checkpoints.export import gathered
from fp4adam.optim.remainder import complete, split_off, units
from helpers import randn, train
from ranks import all_ranks, run_ranks


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64, bias=False)).bfloat16()
    return quantize_model(model, "mxfp4", filter=lambda *_: True)


def steps(model: nn.Module, optimizer: FP4Adam, seeds: range) -> None:
    inputs = (randn(8, 64, seed=seed, dtype=torch.bfloat16) for seed in seeds)
    train(optimizer, ((model(x).float() ** 2).mean() for x in inputs))


def train_shards(rank: int, folder: str) -> None:
    mesh, plan = all_ranks(), {"0": ColwiseParallel(), "1": RowwiseParallel()}
    whole = build()
    steps(whole, FP4Adam(whole.parameters(), lr=1e-2), range(3))
    for kind in ("fsdp", "tensor parallel", "ddp"):
        model = build()
        if kind == "fsdp":
            fully_shard(model, mesh=mesh)
        elif kind == "tensor parallel":
            model = parallelize_module(model, mesh, plan)
        replica = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
        optimizer = FP4Adam(model.parameters(), lr=1e-2)
        steps(replica, optimizer, range(2))
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(saved, checkpoint_id=f"{folder}/{kind}")
        steps(replica, optimizer, range(5, 7))
        dcp.load(saved, checkpoint_id=f"{folder}/{kind}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        steps(replica, optimizer, range(2, 3))
        for name, param in whole.named_parameters():
            own = gathered(model.get_parameter(name))
            if kind == "tensor parallel":  # sums of products have another order, gradients too
                torch.testing.assert_close(
                    own.dequantize(), param.dequantize(), rtol=0.6, atol=0.02
                )
            elif isinstance(own, QuantizedTensor):
                assert own.has_bytes_of(param.detach()), name
            else:
                assert torch.equal(own, param), name


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_one(tmp_path):
    run_ranks(train_shards, 2, str(tmp_path))


@pytest.mark.parametrize("rounding", ["floor", "even", "up"])
def test_remainders_reach_the_masters_of_saturated_codes(rounding):
    """With "floor" weights up to 8 times the scale have the code of 6 times."""
    values = torch.linspace(-1.999, 1.999, 128).view(2, 64)[:, torch.randperm(64)]
    values = values.repeat(16, 1)
    weight = MXFP4Quantizer(scale_rounding=rounding).quantize(values)
    master = complete(weight, split_off(weight, values))
    # Half a gap of 2 is 119.5 units, and scales are at most 1/2.
    assert (master - values).abs().max() <= 0.5 * 0.5 * 2 / 119.5
    assert units(weight).max().item() == pytest.approx(2 / 478)
