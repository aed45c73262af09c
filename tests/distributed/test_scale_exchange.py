"""Exchanges of amaxes and of magnitudes between two ranks."""

import torch
import torch.distributed as dist

from fp4adam import NVFP4Quantizer
from fp4adam.distributed.scale_exchange import (
    AmaxExchange,
    CutStrips,
    Exchanged,
    ShardInfo,
    exchange_strips,
)
from fp4adam.tensors.storage import GlobalSpec
from ranks import all_ranks, home, run


def exchange_amaxes(rank: int) -> None:
    spec, info = GlobalSpec((32, 16), NVFP4Quantizer(), 16), ShardInfo.in_mesh(all_ranks())
    amaxes = [torch.tensor([float(n * (rank + 1))], device=home()) for n in (1, 3, 2, 5, 4, 6)]
    shards = [
        Exchanged(spec, info, amax, [], key) for amax, key in zip(amaxes, "aaabbc", strict=True)
    ]
    AmaxExchange(info.group, info.device, shards)()
    assert torch.cat(amaxes).tolist() == [6, 6, 6, 10, 10, 12]


def test_groups_of_any_sizes_share_an_amax():
    run(exchange_amaxes, 2)


def exchange_in_two_groups(rank: int) -> None:
    quantizer, cut = NVFP4Quantizer(adaptive="mae"), []
    own = ShardInfo.in_mesh(all_ranks())
    for group in (own.group, dist.new_group()):
        shard = quantizer.make_empty((16, 16), device=home())
        shard._shared.global_spec = GlobalSpec((16, 16), quantizer, 8)
        strip = torch.full((256,), float(rank), device=home())
        cut.append((shard, [own._replace(group=group)], CutStrips((1, 256), {0: strip})))
    exchange_strips(cut)
    assert all(strips[0].eq(1).all() for *_, strips in cut)


def test_strips_are_completed_in_every_group():
    run(exchange_in_two_groups, 2)
