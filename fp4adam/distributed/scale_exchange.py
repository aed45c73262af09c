"""Exchange of the scales that shards on different ranks share, in one MAX all-reduce for all.

NVFP4 scales a whole tensor by its amax, and a block that is cut by a shard boundary has one scale
on both sides. The maximum of the ranks' local amaxes is the amax of the whole tensor.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fp4adam.distributed.dtensor import rows_dim, sharded_dims
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.storage import GlobalSpec


class ShardInfo(NamedTuple):
    """The position of a shard among the shards of its tensor, and the ranks that hold them.

    Attributes:
        group: The ranks that hold the shards.
        number: The index of this shard.
        n_shards: The number of shards.
        device_type: The type of device that the ranks communicate with.
    """

    group: dist.ProcessGroup
    number: int
    n_shards: int
    device_type: str

    @property
    def device(self) -> torch.device:
        """The device that this rank communicates from."""
        index = torch.cuda.current_device() if self.device_type == "cuda" else None
        return torch.device(self.device_type, index)

    @classmethod
    def in_mesh(cls, mesh: DeviceMesh, dim: int = 0) -> "ShardInfo":
        """The shard of this rank along a one-dimensional mesh."""
        return cls(mesh.get_group(dim), mesh.get_local_rank(dim), mesh.size(dim), mesh.device_type)

    @classmethod
    def of_rows(cls, param: Tensor) -> "ShardInfo | None":
        """The shard of a parameter whose rows are divided; None if it is whole."""
        dim = rows_dim(param)
        return None if dim is None else cls.in_mesh(param.device_mesh, dim)

    @classmethod
    def in_parallel(cls, mesh: DeviceMesh, dim: int = 0) -> "ShardInfo":
        """The part of this rank under tensor parallelism: whole blocks that share an amax."""
        return cls.in_mesh(mesh, dim)._replace(number=0, n_shards=1)

    @classmethod
    def of(cls, param: Tensor, own: Tensor | None = None) -> "tuple[ShardInfo, ...]":
        """The positions of a parameter's shard, one for each dimension that shares scales.

        That of ``fully_shard`` is first, then that of tensor parallelism.

        Args:
            param: The parameter.
            own: The tensor that is written for it, if that is not its local tensor.

        Raises:
            NotImplementedError: If it is a quantized tensor that is sharded in another way than by
                ``fully_shard`` along one dimension, tensor parallelism along one, or both.
        """
        sharded = sharded_dims(param)
        own = param._local_tensor if sharded and own is None else own
        if not (sharded and isinstance(own, QuantizedTensor)):
            return ()
        from torch.distributed.tensor import Shard

        spec = own.global_spec
        is_parallel = spec is not None and spec.is_parallel
        by_rows, parallel = (sharded[:-1], sharded[-1:]) if is_parallel else (sharded, [])
        # Beside Shard(0) of tensor parallelism, fully_shard has a strided kind of it.
        is_known = is_parallel or type(param.placements[sharded[0]]) is Shard
        if spec is None or len(by_rows) > 1 or not is_known:
            raise NotImplementedError(
                "quantized parameters must be replicated, or sharded by fully_shard or "
                "parallelize_module, each along one dimension of the mesh, got placements "
                f"{param.placements}; leave parameters with other placements in high precision "
                "(filter=...)"
            )
        if not spec.shares_scales:
            return ()
        mesh = param.device_mesh
        infos = [cls.in_mesh(mesh, dim) for dim in by_rows]
        if spec.quantizer.layout.tensor_scale is not None:
            infos += [cls.in_parallel(mesh, dim) for dim in parallel]
        return tuple(infos)


def cut_blocks(spec: GlobalSpec, n_shards: int) -> list[int]:
    """Indices of the block rows that shard boundaries cut."""
    block = spec.quantizer.layout.block
    ends = range(spec.chunk_rows, min(n_shards * spec.chunk_rows, spec.rows), spec.chunk_rows)
    return sorted({end // block for end in ends if end % block})


class Exchanged(NamedTuple):
    """The amaxes of a shard that ranks exchange, in place.

    Attributes:
        spec: The whole tensor.
        amax: The amax of the tensor, float32 [1] on any device, or None.
        grids: Block amaxes, one grid per kind of block that can be cut; float32 on any device.
        scales: A key that is equal for shards of tensors that share one amax.
    """

    spec: GlobalSpec
    amax: Tensor | None
    grids: Sequence[Tensor]
    scales: Hashable


class AmaxExchange:
    """Replaces amaxes by their maximum over the ranks of a group, in one all-reduce.

    Every rank of the group has to call it, even one without rows.

    Args:
        device: The device that this rank communicates with.
        shards: Shards of the same tensors in the same order on every rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        shards: Sequence[tuple[ShardInfo, Exchanged]],
    ) -> None:
        self._group = group
        self._amaxes: list[Tensor] = []
        slots: list[Tensor] = []  # of each amax
        slot_of: dict[Hashable, int] = {}  # of tensors that share one
        size = 0
        for info, (spec, amax, grids, scales) in shards:
            if spec.quantizer.layout.tensor_scale is not None:
                if scales not in slot_of:
                    slot_of[scales], size = size, size + 1
                self._amaxes.append(amax)
                slots.append(torch.tensor([slot_of[scales]]))
            block, first = spec.quantizer.layout.block, info.number * spec.chunk_rows
            first_block, end = first // block, min(first + spec.chunk_rows, spec.rows)
            own = range(first_block, -(-end // block) if first < end else 0)
            for number, grid in product(cut_blocks(spec, info.n_shards), grids):
                if number in own:
                    self._amaxes.append(grid[number - first_block])
                    slots.append(torch.arange(size, size + grid.shape[1]))
                size += grid.shape[1]
        self._buffer = torch.zeros(size, dtype=torch.float32, device=device)
        self._slots = torch.cat([torch.arange(0), *slots]).to(device)
        self._sizes = [len(each) for each in slots]

    def __call__(self) -> None:
        """Exchange the amaxes, in place."""
        own = self._buffer.new_empty(len(self._slots))
        if self._amaxes:
            torch._foreach_copy_(own.split(self._sizes), self._amaxes)
        self._buffer.zero_().scatter_reduce_(0, self._slots, own, "amax")
        # As integers, which order as these floats do, NaN is the largest on every rank.
        dist.all_reduce(self._buffer.view(torch.int32), dist.ReduceOp.MAX, self._group)
        if self._amaxes:
            torch._foreach_copy_(self._amaxes, self._buffer[self._slots].split(self._sizes))


def exchanges(
    shards: Iterable[tuple[Sequence[ShardInfo], Exchanged]],
) -> list[AmaxExchange]:
    """One exchange for each group of ranks; shards are in the same order on every rank."""
    by_group: dict[tuple[dist.ProcessGroup, torch.device], list] = defaultdict(list)
    for infos, exchanged in shards:
        for info in infos:
            by_group[info.group, info.device].append((info, exchanged))
    return [AmaxExchange(group, device, alike) for (group, device), alike in by_group.items()]
