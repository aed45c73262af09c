"""Local tensors of DTensors, and back."""

import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fp4adam.interop.adapter import unwrapped


def dtensor_class() -> type | tuple[()]:
    """The class DTensor for ``isinstance``, or () as long as no DTensor can exist.

    Importing torch.distributed.tensor takes a second, so this does not import it. Code that makes
    DTensors has imported it.
    """
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def is_dtensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor; does not import torch.distributed.tensor."""
    return isinstance(tensor, dtensor_class())


def local(tensor: Any) -> Any:
    """The local tensor of a DTensor, without a wrapper of :func:`unwrapped`; else itself."""
    # dtensor_class() inlined, because this runs for every gradient in every step.
    module = sys.modules.get("torch.distributed.tensor")
    is_sharded = isinstance(tensor, getattr(module, "DTensor", ()))
    return unwrapped(tensor._local_tensor if is_sharded else tensor)


def like(param: Tensor, value: Tensor) -> Tensor:
    """Wrap a local tensor as a DTensor placed like ``param``; return it as it is for plain ones."""
    if not is_dtensor(param):
        return value
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    n = value.dim()  # fewer of a vector by row
    stride = param.stride() if n == param.dim() else value.stride()
    meta = TensorMeta(param.shape[:n], stride, value.dtype)
    spec = DTensorSpec(param.device_mesh, param.placements, tensor_meta=meta)
    # from_local() would communicate to learn the global shape of uneven shards.
    return DTensor(value, spec, requires_grad=False)


def sharded_dims(tensor: Tensor) -> list[int]:
    """The mesh dimensions that a DTensor is not replicated along; empty for any other tensor."""
    placements = tensor.placements if is_dtensor(tensor) else ()
    return [dim for dim, place in enumerate(placements) if not place.is_replicate()]


def rows_dim(tensor: Tensor) -> int | None:
    """The mesh dimension that rows are divided along; None unless nothing else is divided."""
    sharded = sharded_dims(tensor)
    if len(sharded) != 1:
        return None
    from torch.distributed.tensor import Shard

    place = tensor.placements[sharded[0]]
    return sharded[0] if type(place) is Shard and place.dim == 0 else None


def first_element(param: Tensor) -> int:
    """Index of the first local element in the flattened parameter.

    0 unless the parameter is sharded once and along its first dimension: the elements of any other
    shard are not contiguous.
    """
    dim = rows_dim(param)
    if dim is None:
        return 0
    mesh, rows = param.device_mesh, param.shape[0]
    first = mesh.get_local_rank(dim) * -(-rows // mesh.size(dim))
    return min(first, rows) * param.shape[1:].numel()


def shard_size(tensor: Tensor) -> int | None:
    """Rows of all shards but the last ones, of another package's tensor; None if not sharded."""
    if not sharded_dims(tensor):
        return None
    dim = rows_dim(tensor)
    if dim is None:
        raise NotImplementedError(
            "quantized parameters of other packages must be replicated, or sharded by fully_shard "
            f"along one dimension of the mesh, got placements {tensor.placements}; leave "
            "parameters with other placements in high precision"
        )
    return -(-tensor.shape[0] // tensor.device_mesh.size(dim))


def sharding_groups(tensor: Tensor) -> tuple[tuple[dist.ProcessGroup, str], ...]:
    """The process groups that a DTensor is sharded over, each with the device type of its mesh."""
    return tuple(
        (tensor.device_mesh.get_group(dim), tensor.device_mesh.device_type)
        for dim in sharded_dims(tensor)
    )


def part_for(param: Tensor, value: Tensor) -> Tensor:
    """The part of a saved value that belongs to the local tensor of ``param``.

    Raises:
        ValueError: If ``value`` is a DTensor with other placements.
    """
    if is_dtensor(value):
        if is_dtensor(param) and (value.device_mesh, value.placements) == (
            param.device_mesh,
            param.placements,
        ):
            return value._local_tensor
        if not all(place.is_replicate() for place in value.placements):
            raise ValueError(
                "a saved state must be whole, or distributed like its parameter, got placements "
                f"{value.placements}; load it with torch.distributed.checkpoint, or call "
                "full_tensor() on every rank"
            )
        value = value._local_tensor
    n = value.dim()
    if not (is_dtensor(param) and n and value.shape == param.shape[:n]):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Every rank has the whole value, so no communication is needed.
    mesh, placements = param.device_mesh, param.placements
    return distribute_tensor(value, mesh, placements, src_data_rank=None)._local_tensor
