"""Tensor parallelism: the parts of quantized weights that ``parallelize_module`` distributes.

Its plans call ``distribute_tensor`` with ``Shard(0)`` (ColwiseParallel) or ``Shard(1)``
(RowwiseParallel). Parts consist of whole blocks, so each is a quantized tensor of its own with the
bytes of the whole weight. All that parts share is the amax of NVFP4, and the optimizer's step
exchanges that as it does for shards of FSDP2, whose shards these parts may be divided into.
"""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fp4adam.distributed.dtensor import sharded_dims
from fp4adam.distributed.fsdp import gather_codes
from fp4adam.distributed.scale_exchange import ShardInfo
from fp4adam.distributed.shards import settle_shard
from fp4adam.distributed.torch_patches import wrap_shard_tensor
from fp4adam.tensors.quantized_tensor import QuantizedTensor, implements_function
from fp4adam.tensors.rows import check_parallel, copy_bytes, parallel_part
from fp4adam.tensors.storage import SharedStorage, Storage

# The storage of the parameter that distribute_tensor has been called with last; of values that it
# divides for load_state_dict it is None.
_parameter: weakref.ref[SharedStorage] | None = None


# distribute_tensor asks for it before it divides a tensor. torch.distributed.tensor takes a second
# to import; whoever divides a tensor has imported it.
@implements_function(torch.Tensor.is_leaf.__get__)
def _is_leaf(tensor: Tensor) -> bool:
    global _parameter
    _parameter = weakref.ref(tensor._shared) if isinstance(tensor, nn.Parameter) else None
    module = sys.modules.get("torch.distributed.tensor.placement_types")
    if module is not None:
        wrap_shard_tensor(module.Shard, _shard_tensor)
    return torch.Tensor.is_leaf.__get__(tensor)


def _is_of_parameter(tensor: Tensor) -> bool:
    """Whether a tensor that is divided is a quantized parameter, or a part of one."""
    if not isinstance(tensor, QuantizedTensor):
        return False
    spec = tensor.global_spec
    is_part = spec is not None and spec.is_parallel
    return is_part or (_parameter is not None and _parameter() is tensor._shared)


def _shard_tensor(
    shard_tensor: Callable[..., Tensor],
    self: Any,
    tensor: Tensor,
    mesh: DeviceMesh,
    mesh_dim: int,
    src_data_rank: int | None = 0,
) -> Tensor:
    """``Shard._shard_tensor``, with parts of quantized parameters that stay quantized."""
    if not _is_of_parameter(tensor) or mesh.get_coordinate() is None:
        return shard_tensor(self, tensor, mesh, mesh_dim, src_data_rank)
    number, n_parts = mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim)
    info = ShardInfo.in_parallel(mesh, mesh_dim)
    check_parallel(tensor, self.dim, n_parts)  # on all ranks, before they wait for each other
    if src_data_rank is not None and not tensor.is_meta and n_parts > 1:
        if number != src_data_rank:
            own, tensor = tensor, torch.empty_like(tensor)
            tensor.parameter_name, tensor.scale_group = own.parameter_name, own.scale_group
        dist.broadcast(tensor, group=info.group, group_src=src_data_rank)
    return parallel_part(tensor, self.dim, number, n_parts, info)


def gather_whole(weight: Tensor) -> QuantizedTensor:
    """The whole of a quantized DTensor with its bytes; a collective call.

    Raises:
        NotImplementedError: As :meth:`ShardInfo.of`.
    """
    infos, part = ShardInfo.of(weight), weight._local_tensor
    settle_shard(part, infos)
    mesh, sharded, spec = weight.device_mesh, sharded_dims(weight), part.global_spec
    is_parallel = spec is not None and spec.is_parallel
    for dim in sharded[:-1] if is_parallel else sharded:
        one = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[dim]]
        part = gather_codes(part, one, weight.dtype)
    return _gather_parts(weight, part, sharded[-1]) if is_parallel else part


def _gather_parts(weight: Tensor, part: QuantizedTensor, mesh_dim: int) -> QuantizedTensor:
    """The whole weight from the parts of tensor parallelism, along a dimension of its mesh."""
    mesh, dim = weight.device_mesh, weight.placements[mesh_dim].dim
    tensors, shape = part.inner, tuple(part.shape)
    compact = part.quantizer.without_derived()
    inner = {name: getattr(tensors, name) for name in compact.layout.rows_per_entry}
    shared = SharedStorage(Storage(amax=tensors.amax, **inner), global_spec=part.global_spec)
    own = type(part)(shape, weight.dtype, compact, shared)
    parts = [torch.empty_like(own) for _ in range(mesh.size(mesh_dim))]
    dist.all_gather(parts, own, mesh.get_group(mesh_dim))
    whole = part.quantizer.make_empty(tuple(weight.shape), weight.dtype, part.device)
    for number, one in enumerate(parts):
        window = whole.narrow(dim, number * shape[dim], shape[dim])
        copy_bytes(window, one, non_blocking=False)
    return whole
