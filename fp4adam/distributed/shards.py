"""Shards that share scales: when they are quantized, and whether ranks agree."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp4adam.distributed.cast import cast
from fp4adam.distributed.dtensor import dtensor_class, local
from fp4adam.distributed.scale_exchange import Exchanged, ShardInfo, exchanges
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.rows import replace_init_val


def parallel_infos(shard: QuantizedTensor) -> tuple[ShardInfo, ...]:
    """The position of a local tensor under tensor parallelism, if that shares scales.

    Raises:
        RuntimeError: If it is a copy, which does not know its ranks, and has to be quantized.
    """
    shared = shard._shared
    spec = shared.global_spec
    if spec is None or not (spec.is_parallel and spec.quantizer.layout.tensor_scale is not None):
        return ()
    if shared.parallel is None and shared.unsettled:
        raise RuntimeError(
            "a weight must have been distributed by parallelize_module for its ranks to agree on "
            f"an amax, got a copy of shape {tuple(shard.shape)} that has been written; load values "
            "into the model that parallelize_module returned"
        )
    return () if shared.parallel is None else (shared.parallel,)


def settle_shard(shard: QuantizedTensor, infos: Sequence[ShardInfo]) -> None:
    """Quantize pending writes to a shard; every rank that it shares scales with has to call it.

    If only other ranks have written, this rank quantizes again what its masters start from.
    """
    shared = shard._shared
    if not shared.unsettled:
        return
    is_written = shared.pending is not None
    # A write may have happened on some ranks only, without the others knowing.
    for info in infos:
        number = torch.full((1,), float(is_written), device=info.device)
        dist.all_reduce(number, dist.ReduceOp.MAX, info.group)
        is_written = bool(number.item())
    if is_written:
        value = shard.written_value()
        value = shard._read(torch.float32) if value is None else value
        cast([shard], [value], [torch.float32], [infos])
        shared.pending = None
        replace_init_val(shard, value)  # a master starts from what has been quantized
    shared.unsettled = False


def sharded_weights(params: Iterable[Tensor]) -> list[Tensor]:
    """Those that are shards of quantized weights, for :func:`settle_written`."""
    kind = dtensor_class()
    return [p for p in params if isinstance(p, kind) and isinstance(local(p), QuantizedTensor)]


@torch.no_grad()
def settle_written(sharded: Iterable[Tensor]) -> None:
    """Quantize what has been written to shards; every rank has to call it."""
    for param in sharded:
        shard = param._local_tensor
        if shard._shared.unsettled:
            settle_shard(shard, ShardInfo.of(param))


@torch.no_grad()
def check_shards(model: nn.Module) -> None:
    """Check that all ranks agree on the scales that their shards share.

    For diagnosis. Every rank has to call it, between a step and the next backward pass; it waits
    for all ranks. Codes written with different scales decode to a wrong tensor; the optimizers of
    this package never write any.

    Raises:
        RuntimeError: On every rank, naming the first parameter whose scales differ.
    """
    for name, param in model.named_parameters():
        infos = ShardInfo.of(param)
        if not infos:
            continue
        shard = param._local_tensor
        settle_shard(shard, infos)
        layout, tensors = shard.quantizer.layout, shard.inner
        scales = [
            getattr(tensors, name).float()
            for name, rows in layout.rows_per_entry.items()
            if rows == layout.block and name.endswith("_scale_inv")
        ]
        amax = tensors.amax
        if not (amax is None or shard.numel()):
            amax = torch.zeros_like(amax)  # nothing reads the one of a rank without rows
        own = scales if amax is None else [amax, *scales]
        largest = [each.clone() for each in own]
        spec, n = shard.global_spec, int(amax is not None)
        exchanged = Exchanged(spec, largest[0] if n else None, largest[n:], shard)
        for exchange in exchanges([(infos, exchanged)]):
            exchange()
        pairs = zip(own, largest, strict=True)
        is_same = all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)
        is_same = is_same or not shard.numel()
        differs = torch.tensor([float(not is_same)], device=infos[0].device)
        for info in infos:
            dist.all_reduce(differs, dist.ReduceOp.MAX, info.group)
        if differs:
            raise RuntimeError(
                f"shards of parameter {name!r} must have the same scales on all ranks, got others "
                "on another rank; write to sharded weights on every rank, as load_state_dict does"
            )
