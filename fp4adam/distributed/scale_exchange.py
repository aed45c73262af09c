"""Exchange of the scales that shards on different ranks share, in one MAX all-reduce for all.

NVFP4 scales a whole tensor by its amax, and a block that is cut by a shard boundary has one scale
on both sides. The maximum of the ranks' local amaxes is the amax of the whole tensor.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import chain, compress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fp4adam.distributed.dtensor import is_dtensor, sharded_dims
from fp4adam.distributed.partial_cast import PartialCast
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.rows import matrix_shape, stored_rows
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
    def of(cls, param: Tensor) -> "ShardInfo | None":
        """The position of a parameter's shard, or None if it shares no scales with others.

        Raises:
            NotImplementedError: If it is a quantized tensor that is sharded in another way than by
                ``fully_shard``.
        """
        if not is_dtensor(param) or not isinstance(param._local_tensor, QuantizedTensor):
            return None
        sharded = sharded_dims(param)
        if not sharded:
            return None
        from torch.distributed.tensor import Shard

        spec = param._local_tensor._shared.global_spec
        if len(sharded) > 1 or type(param.placements[sharded[0]]) is not Shard or spec is None:
            raise NotImplementedError(
                "quantized parameters must be replicated, or sharded by fully_shard along one "
                f"dimension of the mesh, got placements {param.placements}; leave parameters with "
                "other placements in high precision (filter=...)"
            )
        return cls.in_mesh(param.device_mesh, sharded[0]) if spec.shares_scales else None


def cut_blocks(spec: GlobalSpec, n_shards: int) -> list[int]:
    """Indices of the block rows that shard boundaries cut."""
    block = spec.quantizer.block_rows
    ends = range(spec.chunk_rows, min(n_shards * spec.chunk_rows, spec.rows), spec.chunk_rows)
    return sorted({end // block for end in ends if end % block})


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
    grids: Sequence[Tensor]
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
            if spec.quantizer.scales_tensor:
                self._amaxes.append(amax)
                spans.append((size, size + 1))
                peers[scales].append(size)
                size += 1
            first = info.number * spec.chunk_rows
            last = min(first + spec.chunk_rows, spec.rows) - 1
            block = spec.quantizer.block_rows
            for number in cut_blocks(spec, info.n_shards):
                for grid in grids:
                    width = grid.shape[1]
                    if first // block <= number <= last // block and first <= last:
                        self._amaxes.append(grid[number - first // block])
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


class ShardCast:
    """Quantizes shards that share scales; together they equal the whole tensor's cast, bit for bit.

    Args:
        shards: Local tensors on one device.
        dtypes: The dtypes that values are rounded to first.

    Attributes:
        exchanged: Per shard its tensor amax and its block amaxes, for :class:`Exchanged`.
    """

    def __init__(self, shards: Sequence[QuantizedTensor], dtypes: Sequence[torch.dtype]) -> None:
        self._shards = list(shards)
        matrices, starts, sizes = [], [], []
        for shard in shards:
            rows, cols = matrix_shape(shard)
            shape = (stored_rows(shard), cols)
            matrix = type(shard)(shape, shard.dtype, shard.quantizer, shard._shared.tensors)
            matrices.append(matrix)
            starts.append(shard._first_row * cols)
            sizes.append(rows * cols)
        self._cast = PartialCast(matrices, starts, sizes, dtypes)
        columnwise = self._cast.columnwise_amaxes
        square = [m._block_scale_inv is not None for m in matrices]
        # Shards consist of whole rows, so 1x32 blocks are never cut.
        self.exchanged = [
            (amax, [rowwise] if is_square else [] if column is None else [column])
            for amax, rowwise, column, is_square in zip(
                self._cast.tensor_amaxes, self._cast.rowwise_amaxes, columnwise, square, strict=True
            )
        ]

    def measure(self, values: Sequence[Tensor]) -> None:
        """Compute the amaxes of ``values``: one contiguous tensor per shard, in its shape."""
        self._cast.measure([value.view(-1) for value in values])

    def write(self, values: Sequence[Tensor]) -> None:
        """Write scales and codes; call it after the exchange."""
        self._cast.write([value.view(-1) for value in values])
        for shard in self._shards:
            shared = shard._shared
            shared.pending, shared.unsettled = None, False
            if shared.first_row is None:
                shared.first_row = 0


def write_shards(
    shards: Sequence[QuantizedTensor],
    infos: Sequence[ShardInfo],
    values: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype],
    scales: Sequence[Hashable],
) -> None:
    """Quantize new values of shards that share scales; every rank has to call it for the same ones.

    Args:
        shards: Local tensors on one device.
        infos: The position of each shard.
        values: Per shard a contiguous tensor of its shape, or None if this rank has no new value.
            If another rank has one, this rank quantizes its old value again.
        dtypes: The dtypes that values are rounded to first.
        scales: As in :class:`Exchanged`. If one tensor has a new value, all that share its amax are
            quantized.
    """
    groups: dict[tuple[dist.ProcessGroup, torch.device], list[int]] = defaultdict(list)
    for i, info in enumerate(infos):
        groups[info.group, info.device].append(i)
    for (group, device), members in groups.items():
        # A write may have happened on some ranks only, without the others knowing.
        written = torch.tensor([values[i] is not None for i in members], device=device).float()
        dist.all_reduce(written, dist.ReduceOp.MAX, group)
        concerned = {scales[i] for i in compress(members, written.tolist())}
        chosen = [i for i in members if scales[i] in concerned]
        if not chosen:
            continue
        new = [shards[i]._read(torch.float32) if values[i] is None else values[i] for i in chosen]
        cast_together(
            [shards[i] for i in chosen],
            [infos[i] for i in chosen],
            new,
            [dtypes[i] for i in chosen],
            [scales[i] for i in chosen],
        )


def cast_together(
    tensors: Sequence[QuantizedTensor],
    infos: Sequence[ShardInfo | None],
    values: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    scales: Sequence[Hashable],
) -> None:
    """Quantize new values of shards and whole tensors in as many launches as one tensor takes.

    If some are shards, every rank that has shards of these tensors has to call it for the same
    ones. Columnwise codes that can be derived are not written.

    Args:
        tensors: Local tensors on one device, of formats that can be cast in shards.
        infos: The position of each shard; None for tensors that share no scales with other ranks.
        values: Per tensor a contiguous tensor of its shape.
        dtypes: The dtypes that values are rounded to first.
        scales: As in :class:`Exchanged`; ``tensors`` has all that share an amax.
    """
    cast = ShardCast(tensors, dtypes)
    cast.measure(values)
    exchanged: dict[tuple[dist.ProcessGroup, torch.device], list[Exchanged]] = defaultdict(list)
    shared: dict[Hashable, list[Tensor]] = defaultdict(list)
    for tensor, info, amaxes, key in zip(tensors, infos, cast.exchanged, scales, strict=True):
        if info is not None:
            spec = tensor._shared.global_spec
            exchanged[info.group, info.device].append(Exchanged(spec, info, *amaxes, key))
        elif amaxes[0] is not None:
            shared[key].append(amaxes[0])
    for peers in shared.values():
        if len(peers) > 1:
            largest = torch.cat(peers).amax(0, keepdim=True)
            torch._foreach_copy_(peers, [largest] * len(peers))
    for (group, device), shards in exchanged.items():
        AmaxExchange(group, device, shards)()
    cast.write(values)


def settle_shard(shard: QuantizedTensor, info: ShardInfo) -> None:
    """Quantize pending writes to a shard that shares scales; every rank has to call it."""
    shared = shard._shared
    if not shared.unsettled:
        return
    written = shared.pending
    write_shards([shard], [info], [written], [torch.float32], [shard])
    shared.unsettled = False
    if written is not None and (shared.init_val is not None or shared.keeps_init_val):
        # The master weight must start from the written value.
        shared.init_val, shared.keeps_init_val = written.view(shard.shape), False


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
        info = ShardInfo.of(param)
        if info is None:
            continue
        shard = param._local_tensor
        settle_shard(shard, info)
        tensors = shard._shared.tensors
        grids = [
            getattr(tensors, name).float()
            for name, rows in shard.quantizer.rows_per_entry.items()
            if rows == shard.quantizer.block_rows
        ]
        found = []
        for sign in (1, -1):
            amax = tensors.amax
            if amax is not None:
                # A rank without rows does not count: nothing reads its scales.
                amax = amax * sign if shard.numel() else torch.full_like(amax, -math.inf)
            signed = [grid * sign for grid in grids]
            exchanged = Exchanged(shard._shared.global_spec, info, amax, signed, shard)
            found.append(AmaxExchange(info.group, info.device, [exchanged]).largest() * sign)
        if not torch.equal(*found):
            raise RuntimeError(
                f"shards of parameter {name!r} must have the same scales on all ranks, got up to "
                f"{found[0].max().item()} and down to {found[1].min().item()}; write to sharded "
                "weights on every rank, as load_state_dict does"
            )
