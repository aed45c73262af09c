"""Exchange of the scales that shards on different ranks share, in one MAX all-reduce for all.

NVFP4 scales a whole tensor by its amax, and a block that is cut by a shard boundary has one scale
on both sides. The maximum of the ranks' local amaxes is the amax of the whole tensor. An adaptive
scale depends on all values of its block, so ranks exchange those of blocks that are cut as well.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import chain, compress, product
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
from fp4adam.tensors.transpose import build_columnwise


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
        own = param._local_tensor if own is None and is_dtensor(param) else own
        if not is_dtensor(param) or not isinstance(own, QuantizedTensor):
            return ()
        sharded = sharded_dims(param)
        if not sharded:
            return ()
        from torch.distributed.tensor import Shard

        spec = own._shared.global_spec
        is_parallel = spec is not None and spec.is_parallel
        by_rows, parallel = (sharded[:-1], sharded[-1:]) if is_parallel else (sharded, [])
        # Beside Shard(0) of tensor parallelism, fully_shard has a strided kind of it.
        kinds = [] if is_parallel else [type(param.placements[dim]) for dim in by_rows]
        if spec is None or len(by_rows) > 1 or any(kind is not Shard for kind in kinds):
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
        if spec.quantizer.layout.tensor_scale == "current":
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
            if spec.quantizer.layout.tensor_scale == "current":
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

    @property
    def is_adaptive(self) -> bool:
        """Whether a shard has adaptive scales, so that :meth:`choose` is needed."""
        return self._cast.is_adaptive

    def choose(self, values: Sequence[Tensor]) -> list[CutStrips | None]:
        """Choose adaptive scales; call it after the exchange of amaxes.

        Args:
            values: As for :meth:`measure`.

        Returns:
            Per shard what :func:`exchange_strips` takes; None for shards without adaptive scales.
        """
        self._cast.choose([value.view(-1) for value in values])
        found = self._cast.cut_strips
        return [None if strips is None else CutStrips(*strips) for strips in found]

    def write(self, values: Sequence[Tensor]) -> None:
        """Write scales and codes; call it after the exchange."""
        self._cast.write([value.view(-1) for value in values])
        for shard in self._shards:
            shared = shard._shared
            shared.pending, shared.unsettled = None, False
            if shared.first_row is None:
                shared.first_row = 0
        build_columnwise([shard for shard in self._shards if shard.quantizer.layout.is_square])


def exchange_strips(
    cut: Sequence[tuple[QuantizedTensor, Sequence[ShardInfo], CutStrips | None]],
) -> None:
    """Complete the magnitudes in rows of blocks that boundaries cut.

    Every rank that has shards of these tensors has to call it for the same ones.

    Args:
        cut: Per shard with adaptive scales the tensor, its positions, and its strips from
            :meth:`ShardCast.choose`; None if it has no rows in such blocks.
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


def write_shards(
    shards: Sequence[QuantizedTensor],
    infos: Sequence[Sequence[ShardInfo]],
    values: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype],
    scales: Sequence[Hashable],
) -> None:
    """Quantize new values of shards that share scales; every rank has to call it for the same ones.

    Args:
        shards: Local tensors on one device.
        infos: The positions of each shard, as by :meth:`ShardInfo.of`.
        values: Per shard a contiguous tensor of its shape, or None if this rank has no new value.
            If another rank has one, this rank quantizes its old value again.
        dtypes: The dtypes that values are rounded to first.
        scales: As in :class:`Exchanged`. If one tensor has a new value, all that share its amax are
            quantized.
    """
    together: dict[tuple[dist.ProcessGroup, ...], list[int]] = defaultdict(list)
    for i, own in enumerate(infos):
        together[groups_of(own)].append(i)
    for groups, members in together.items():
        device = infos[members[0]][0].device
        # A write may have happened on some ranks only, without the others knowing.
        written = torch.tensor([values[i] is not None for i in members], device=device).float()
        for group in groups:
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
    infos: Sequence[Sequence[ShardInfo]],
    values: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    scales: Sequence[Hashable],
) -> None:
    """Quantize new values of shards and whole tensors in as many launches as one tensor takes.

    If some are shards, every rank that has shards of these tensors has to call it for the same
    ones.

    Args:
        tensors: Local tensors on one device, of formats that can be cast in shards.
        infos: The positions of each shard, as by :meth:`ShardInfo.of`.
        values: Per tensor a contiguous tensor of its shape.
        dtypes: The dtypes that values are rounded to first.
        scales: As in :class:`Exchanged`; ``tensors`` has all that share an amax.
    """
    cast = ShardCast(tensors, dtypes)
    cast.measure(values)
    exchanged: dict[tuple[dist.ProcessGroup, torch.device], list[Exchanged]] = defaultdict(list)
    shared: dict[Hashable, list[Tensor]] = defaultdict(list)
    for tensor, own, amaxes, key in zip(tensors, infos, cast.exchanged, scales, strict=True):
        for info in own:
            spec = tensor._shared.global_spec
            exchanged[info.group, info.device].append(Exchanged(spec, info, *amaxes, key))
        if not own and amaxes[0] is not None:
            shared[key].append(amaxes[0])
    for peers in shared.values():
        if len(peers) > 1:
            largest = torch.cat(peers).amax(0, keepdim=True)
            torch._foreach_copy_(peers, [largest] * len(peers))
    for (group, device), shards in exchanged.items():
        AmaxExchange(group, device, shards)()
    if cast.is_adaptive:
        strips = zip(tensors, infos, cast.choose(values), strict=True)
        exchange_strips([given for given in strips if given[2] is not None])
    cast.write(values)


def groups_of(infos: Sequence[ShardInfo]) -> tuple[dist.ProcessGroup, ...]:
    """The groups of ranks that share the scales of a shard."""
    return tuple(info.group for info in infos)


def parallel_infos(shard: QuantizedTensor) -> tuple[ShardInfo, ...]:
    """The position of a local tensor under tensor parallelism, if that shares scales.

    Raises:
        RuntimeError: If it is a copy, which does not know its ranks, and has to be quantized.
    """
    shared = shard._shared
    spec = shared.global_spec
    if spec is None or not (spec.is_parallel and spec.quantizer.layout.tensor_scale == "current"):
        return ()
    if shared.parallel is None and shared.unsettled:
        raise RuntimeError(
            "a weight must have been distributed by parallelize_module for its ranks to agree on "
            f"an amax, got a copy of shape {tuple(shard.shape)} that has been written; load values "
            "into the model that parallelize_module returned"
        )
    return () if shared.parallel is None else (shared.parallel,)


def settle_shard(shard: QuantizedTensor, infos: Sequence[ShardInfo]) -> None:
    """Quantize pending writes to a shard that shares scales; every rank has to call it."""
    shared = shard._shared
    if not shared.unsettled:
        return
    written = shared.pending
    write_shards([shard], [infos], [written], [torch.float32], [shard])
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
        infos = ShardInfo.of(param)
        if not infos:
            continue
        shard = param._local_tensor
        settle_shard(shard, infos)
        tensors = shard._shared.tensors
        grids = [
            getattr(tensors, name).float()
            for name, rows in shard.quantizer.layout.rows_per_entry.items()
            if rows == shard.quantizer.layout.block
        ]
        problem = "others on another rank"
        differs = torch.zeros(1, device=infos[0].device)
        for info in infos:
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
                problem = f"up to {found[0].max().item()} and down to {found[1].min().item()}"
                differs.fill_(1)
        for group in groups_of(infos):
            dist.all_reduce(differs, dist.ReduceOp.MAX, group)
        if differs:
            raise RuntimeError(
                f"shards of parameter {name!r} must have the same scales on all ranks, got "
                f"{problem}; write to sharded weights on every rank, as load_state_dict does"
            )
