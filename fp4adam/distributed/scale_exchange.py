"""Exchange of the scales that shards on different ranks share, in one MAX all-reduce for all.

NVFP4 scales a whole tensor by its amax, and a block that is cut by a shard boundary has one scale
on both sides. The maximum of the ranks' local amaxes is the amax of the whole tensor. An adaptive
scale depends on all values of its block, so ranks exchange those of blocks that are cut as well.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import chain, product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fp4adam.distributed.dtensor import is_dtensor, sharded_dims
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.rows import matrix_shape
from fp4adam.tensors.storage import GlobalSpec


class ShardInfo(NamedTuple):
    """The position of a shard among the shards of its tensor, and the ranks that hold them.

    Attributes:
        group: The ranks that hold the shards.
        number: The index of this shard.
        n_shards: The number of shards.
        device_type: The type of device that the ranks communicate with.
        part: The index of the part under tensor parallelism that this is a shard of.
        n_parts: The number of such parts whose shards ``group`` holds.
    """

    group: dist.ProcessGroup
    number: int
    n_shards: int
    device_type: str
    part: int = 0
    n_parts: int = 1

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
    def in_parallel(cls, mesh: DeviceMesh, dim: int = 0) -> "ShardInfo":
        """The part of this rank under tensor parallelism: whole blocks that share an amax."""
        return cls.in_mesh(mesh, dim)._replace(number=0, n_shards=1)

    @classmethod
    def of(cls, param: Tensor, own: Tensor | None = None) -> "tuple[ShardInfo, ...]":
        """The positions of a parameter's shard, one for each dimension that shares scales.

        That of ``fully_shard`` is first, then that of tensor parallelism. They are one if their
        mesh has all ranks, which then exchange all amaxes in one collective.

        Args:
            param: The parameter.
            own: The tensor that is written for it, if that is not its local tensor.

        Raises:
            NotImplementedError: If it is a quantized tensor that is sharded in another way than by
                ``fully_shard`` along one dimension, tensor parallelism along one, or both.
        """
        if not is_dtensor(param):
            return ()
        own = param._local_tensor if own is None else own
        if not isinstance(own, QuantizedTensor):
            return ()
        sharded = sharded_dims(param)
        if not sharded:
            return ()
        from torch.distributed.tensor import Shard

        spec = own._shared.global_spec
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
        if len(infos) == 2 and mesh.size() == dist.get_world_size():
            of_part = dict(part=mesh.get_local_rank(parallel[0]), n_parts=mesh.size(parallel[0]))
            return (infos[0]._replace(group=dist.group.WORLD, **of_part),)
        return tuple(infos)


def cut_blocks(spec: GlobalSpec, n_shards: int) -> list[int]:
    """Indices of the block rows that shard boundaries cut."""
    block = spec.quantizer.layout.block
    ends = range(spec.chunk_rows, min(n_shards * spec.chunk_rows, spec.rows), spec.chunk_rows)
    return sorted({end // block for end in ends if end % block})


def own_cut_blocks(spec: GlobalSpec, info: ShardInfo) -> tuple[int, ...]:
    """Those of them that a shard has rows of, counted from its first block."""
    first = info.number * spec.chunk_rows
    last = min(first + spec.chunk_rows, spec.rows) - 1
    block = spec.quantizer.layout.block
    own = range(first // block, last // block + 1) if first <= last else ()
    return tuple(
        number - first // block for number in cut_blocks(spec, info.n_shards) if number in own
    )


@dataclasses.dataclass(frozen=True)
class CutStrips:
    """The magnitudes in a shard's rows of blocks, only of those that boundaries cut.

    Attributes:
        shape: As if it were a tensor with all of them.
        strips: By row of blocks, float32.
    """

    shape: tuple[int, int]
    strips: dict[int, Tensor]

    def __getitem__(self, row: int) -> Tensor:
        return self.strips[row]


class Exchanged(NamedTuple):
    """The amaxes of a shard that ranks exchange.

    Attributes:
        spec: The whole tensor.
        info: The position of the shard.
        amax: The amax of the tensor, float32 [1] on any device, or None.
        grids: Block amaxes, one grid per kind of block that can be cut; float32 on any device.
        scales: A key that is equal for shards of tensors that share one amax.
    """

    spec: GlobalSpec
    info: ShardInfo
    amax: Tensor | None
    grids: Sequence[Tensor | CutStrips]
    scales: Hashable


class AmaxExchange:
    """Replaces amaxes by their maximum over the ranks of a group, in one all-reduce.

    Every rank of the group has to call it, even one without rows.

    Args:
        group: The ranks.
        device: The device that this rank communicates with.
        shards: Shards of the same tensors in the same order on every rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, shards: Sequence[Exchanged]
    ) -> None:
        self._group = group
        self._amaxes: list[Tensor] = []
        spans: list[tuple[int, int]] = []
        peers: dict[Hashable, list[int]] = defaultdict(list)
        size = 0
        for spec, info, amax, grids, scales in shards:
            if spec.quantizer.layout.tensor_scale is not None:
                self._amaxes.append(amax)
                spans.append((size, size + 1))
                peers[scales].append(size)
                size += 1
            first_block = info.number * spec.chunk_rows // spec.quantizer.layout.block
            own = own_cut_blocks(spec, info)
            for number in cut_blocks(spec, info.n_shards):
                for part, grid in product(range(info.n_parts), grids):
                    width = grid.shape[1]
                    if part == info.part and number - first_block in own:
                        self._amaxes.append(grid[number - first_block])
                        spans.append((size, size + width))
                    size += width
        self._buffer = torch.zeros(size, dtype=torch.float32, device=device)
        self._slots = [self._buffer[start:stop] for start, stop in spans]
        # For each tensor that shares its amax: its slot, and the slots of its group, padded to
        # equal length.
        shared = [slots for slots in peers.values() if len(slots) > 1]
        most = max(map(len, shared), default=0)
        rows = [slots + slots[:1] * (most - len(slots)) for slots in shared for _ in slots]
        self._shared = torch.tensor([*chain(*shared)], dtype=torch.int64, device=device)
        self._peers = torch.tensor(rows, dtype=torch.int64, device=device)

    def largest(self) -> Tensor:
        """The maximum of each amax, in a flat float32 tensor that is valid until the next call."""
        # -Inf in slots that this rank has no part of.
        self._buffer.fill_(-math.inf)
        if self._slots:
            torch._foreach_copy_(self._slots, self._amaxes)
        dist.all_reduce(self._buffer, dist.ReduceOp.MAX, self._group)
        if len(self._shared):
            self._buffer[self._shared] = self._buffer[self._peers].amax(1)
        return self._buffer

    def __call__(self) -> None:
        """Exchange the amaxes, in place."""
        self.largest()
        if self._slots:
            torch._foreach_copy_(self._amaxes, self._slots)


def exchange_strips(
    cut: Sequence[tuple[QuantizedTensor, Sequence[ShardInfo], CutStrips | None]],
) -> None:
    """Complete the magnitudes in rows of blocks that boundaries cut.

    Every rank that has shards of these tensors has to call it for the same ones.

    Args:
        cut: Per shard with adaptive scales the tensor, its positions, and its strips from
            ``PartialCast.cut_strips``; None if it has no rows in such blocks.
    """
    exchanged: dict[tuple[dist.ProcessGroup, torch.device], list[Exchanged]] = defaultdict(list)
    for shard, infos, strips in cut:
        spec, cols = shard._shared.global_spec, matrix_shape(shard)[1]
        for info in infos:
            if cut_blocks(spec, info.n_shards):
                grid = strips or CutStrips((0, spec.quantizer.layout.block * cols), {})
                amax = torch.zeros(1, device=shard.device)  # it has been exchanged already
                exchanged[info.group, info.device].append(
                    Exchanged(spec, info, amax, [grid], shard)
                )
    for (group, device), shards in exchanged.items():
        AmaxExchange(group, device, shards)()


def groups_of(infos: Sequence[ShardInfo]) -> tuple[dist.ProcessGroup, ...]:
    """The groups of ranks that share the scales of a shard."""
    return tuple(info.group for info in infos)
