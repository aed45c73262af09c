"""Exchanges of amaxes between two ranks."""

import torch

from fp4adam import NVFP4Quantizer
from fp4adam.distributed.scale_exchange import AmaxExchange, Exchanged, ShardInfo
from fp4adam.tensors.storage import GlobalSpec
from ranks import all_ranks, home, run


def exchange_amaxes(rank: int) -> None:
    spec, info = GlobalSpec((32, 16), NVFP4Quantizer(), 16), ShardInfo.in_mesh(all_ranks())
    amaxes = [torch.tensor([float(n * (rank + 1))], device=home()) for n in (1, 3, 2, 5, 4, 6)]
    shards = [
        (info, Exchanged(spec, amax, [], key)) for amax, key in zip(amaxes, "aaabbc", strict=True)
    ]
    AmaxExchange(info.group, info.device, shards)()
    assert torch.cat(amaxes).tolist() == [6, 6, 6, 10, 10, 12]


def test_groups_of_any_sizes_share_an_amax():
    run(exchange_amaxes, 2)
