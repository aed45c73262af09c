"""Sums over the rows and columns of matrices, whose rows ranks may share: the same bits on any.

Numbers are added by pairs of neighbours, up to 2**LEVELS of them, then every 32nd of these sums in
turn, then by pairs again. A shard has whole pairs up to the power of two that divides the rows of
shards. So each rank adds up to there, and ranks exchange these sums, its **nodes**. The rest is
added for a matrix by one rank, which its number chooses. ``fp4adam.kernels.factored`` has the same
order.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fp4adam.distributed.scale_exchange import ShardInfo
from fp4adam.kernels.launch import tile_lists
from fp4adam.tensors import backend
from fp4adam.tensors.blocks import round_up

# Of sums over rows, over columns, and those that a kernel takes at once.
LEVELS_OF_ROWS, LEVELS_OF_COLUMNS, _LEVELS_OF_STRIPS = 7, 3, 6
_LEVELS_OF_TURNS = 5


def pairs(x: Tensor, levels: int) -> Tensor:
    """Sums [n / 2**levels, m] over neighbouring rows of ``x`` [n, m], rounded up."""
    x = F.pad(x, (0, 0, 0, -len(x) % 2**levels))
    for _ in range(levels):
        x = x[::2] + x[1::2]
    return x


def sums(x: Tensor, levels: int = LEVELS_OF_ROWS) -> Tensor:
    """Sums [m] over the rows of ``x`` [n, m]."""
    x = pairs(x, levels)
    x = F.pad(x, (0, 0, 0, -len(x) % 2**_LEVELS_OF_TURNS)).unflatten(0, (-1, 2**_LEVELS_OF_TURNS))
    return pairs(functools.reduce(torch.add, x.unbind()), _LEVELS_OF_TURNS)[0]


class Nodes(NamedTuple):
    """Where the nodes of a matrix are, float32 [count, cols], and where its sums.

    ``levels``: Each node is of 2**levels rows. ``owner``: The rank that adds them.
    """

    levels: int
    count: int
    rows: int
    cols: int
    place: int
    place_of_sums: int
    owner: int

    def of(self, memory: Tensor) -> Tensor:
        size = self.count * self.cols
        return memory[..., self.place : self.place + size].unflatten(-1, (self.count, self.cols))


def nodes_of(rows: int, n: int) -> tuple[int, int]:
    """Levels of nodes, and how many each of n ranks has, of a matrix of so many rows."""
    chunk, levels = -(-rows // n), _LEVELS_OF_STRIPS
    if n > 1:
        levels = min(levels, (chunk & -chunk).bit_length() - 1)
    return levels, -(-chunk // 2**levels)


class RowSums:
    """Adds the rows of matrices, of which ``shards`` says how they are shared; None: not at all.

    Attributes:
        matrices: The :class:`Nodes` of each matrix.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int]], shards: ShardInfo | None, device: torch.device
    ) -> None:
        self._shards, self._device = shards, device
        self._n = n = 1 if shards is None else shards.n_shards
        sizes, found = [], []
        for rows, cols in shapes:
            found.append((*nodes_of(rows, n), rows, cols))
            sizes.append(round_up(found[-1][1] * cols, 32))
        places = [*itertools.accumulate(sizes, initial=0)]
        of_sums = [*itertools.accumulate((cols for _, cols in shapes), initial=0)]
        owners = [(places[i] + size // 2) * n // places[-1] for i, size in enumerate(sizes)]
        known = zip(found, places, of_sums, owners, strict=False)
        self.matrices = [Nodes(*each, *at) for each, *at in known]
        self._splits = [0] * n
        for owner, size in zip(owners, sizes, strict=True):
            self._splits[owner] += size
        self._n_sums = of_sums[-1]
        number = 0 if shards is None else shards.number
        first = sum(self._splits[:number])
        self._own = [m._replace(place=m.place - first) for m in self.matrices if m.owner == number]
        self._size = self._splits[number]
        self.launches = self._launches() if backend.uses_kernels(device) else None

    def __call__(self, add: Callable[[Tensor], None]) -> Tensor:
        """Sums by column of all matrices, one after the other; every rank has to call it.

        ``add``: Adds to the nodes of all matrices, which are zero, what the rows of this rank are.
        """
        nodes = torch.zeros(sum(self._splits), dtype=torch.float32, device=self._device)
        add(nodes)
        if self._shards is not None:
            sent, nodes = nodes, nodes.new_empty(self._n * self._size)
            split = [self._size] * self._n
            dist.all_to_all_single(nodes, sent, split, self._splits, group=self._shards.group)
        found = torch.zeros(self._n_sums, dtype=torch.float32, device=self._device)
        for launch in self.launches or ():
            launch(nodes, found)
        for each in self._own if self.launches is None else ():
            of_all = each.of(nodes.view(self._n, self._size)).flatten(0, 1)
            own = found[each.place_of_sums :][: each.cols]
            own.copy_(sums(of_all, LEVELS_OF_ROWS - each.levels))
        if self._shards is not None:  # of one rank each
            dist.all_reduce(found, group=self._shards.group)
        return found

    def _launches(self) -> list:
        from fp4adam.kernels.factored import sums_kernel
        from fp4adam.kernels.launch.launch import Launch

        made = []
        for levels in sorted({each.levels for each in self._own}):
            alike = [each for each in self._own if each.levels == levels]
            fields = [
                (each.place // 32, each.cols, each.count, each.count * self._n, each.place_of_sums)
                for each in alike
            ]
            cols = max(2, min(32, 2 ** (levels + 1)))
            regions = [(i, 0, 1, 0, each.cols) for i, each in enumerate(alike)]
            tiles = tile_lists.tile_list(regions, (1, cols), self._device)
            table = torch.tensor(fields, dtype=torch.int32, device=self._device)
            given = table, tiles, self._size
            constexprs = dict(LEVELS=levels, COLS=cols)
            made.append(Launch(sums_kernel, len(tiles), given, constexprs))
        return made
