"""Renews factored second moments after a step, from gradients whose rows ranks may share."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4adam.distributed.row_sums import Nodes, RowSums, nodes_of, pairs
from fp4adam.distributed.scale_exchange import ShardInfo
from fp4adam.optim.launch_group import LaunchGroup
from fp4adam.optim.state_codec import FACTORED, Weights
from fp4adam.optim.state_tensor import SCALES, StateTensor
from fp4adam.optim.target import Target, together

# Sums at a time, which bounds their memory, but for those of a single parameter.
_AT_A_TIME = 2**23


class Means(NamedTuple):
    """What is renewed by operators: means, from squares of this rank's rows."""

    codes: Tensor
    scales: Tensor
    squares: Callable[[], Tensor]
    weights: Weights = Weights()

    @classmethod
    def of_step(cls, member: Target, grad: Tensor, *weights: Any) -> "Means":
        own = member.tensors["exp_avg_sq"], member.tensors[SCALES["exp_avg_sq"]]
        return cls(*own, lambda: grad.float().square(), Weights(*weights))


class FactorRenewal:
    """Renews the means of some parameters; all ranks that share their rows have to call it."""

    def __init__(self, members: list[Target], groups: Sequence[LaunchGroup]) -> None:
        shards, device = ShardInfo.of_rows(members[0].owner), members[0].param.device
        device = device if shards is None else shards.device
        self._sums = RowSums([tuple(m.owner.shape) for m in members], shards, device)
        self._by_operators = dict(zip(members, self._sums.matrices, strict=True))
        self._launches = []
        for group in groups:
            found = [self._by_operators.pop(member, None) for member in group.members]
            own = [(i, nodes) for i, nodes in enumerate(found) if nodes is not None]
            if own:
                self._launches.append((group.key.device, *_launches(group, own)))

    def compile(self, *signals: Tensor) -> None:
        """Compile all kernels, for ``signals`` as for a step."""
        for _, strips, renew in self._launches:
            for launch in (*strips, renew):
                launch.compile(*signals, signals[0])
        for launch in self._sums.launches:
            launch.compile(signals[0], signals[0])

    def run(self, signals: Mapping[torch.device, tuple], given: Mapping[Target, Means]) -> None:
        """Renew means: by launches, whose ``signals`` are by device, and what is ``given``."""

        def add(memory: Tensor) -> None:
            for device, strips, _ in self._launches:
                with torch.cuda.device_of(memory):
                    for launch in strips:
                        launch(*signals[device], memory)
            for means, nodes in own:
                squares = means.squares()
                FACTORED.add_rows(means.codes, squares, means.weights)
                found = pairs(squares, nodes.levels)
                nodes.of(memory)[: len(found)] = found

        pairs_of = self._by_operators.items()
        own = [(given[member], nodes) for member, nodes in pairs_of if member in given]
        sums = self._sums(add)
        for device, _, renew in self._launches:
            with torch.cuda.device_of(sums):
                renew(*signals[device], sums)
        for means, nodes in own:
            of_rows = sums[nodes.place_of_sums :][: nodes.cols].to(means.scales.device)
            FACTORED.add_columns(means.scales, of_rows, nodes.rows, means.weights)


def renewals(members: Sequence[Target], groups: Sequence[LaunchGroup]) -> list[FactorRenewal]:
    """Those of all members, by the ranks that share rows, and in parts of a bounded size."""
    factored = [m for m in members if m.codecs["exp_avg_sq"] is FACTORED]
    found = []
    for alike in together(factored, lambda m: (m.param.device, ShardInfo.of_rows(m.owner))):
        shards = ShardInfo.of_rows(alike[0].owner)
        n = 1 if shards is None else shards.n_shards
        sizes = (nodes_of(m.owner.shape[0], n)[1] * m.owner.shape[1] for m in alike)
        places = dict(zip(alike, accumulate(sizes), strict=True))
        parts = together(alike, lambda m, places=places: places[m] // _AT_A_TIME)
        found += [FactorRenewal(part, groups) for part in parts]
    return found


def encoded(values: Mapping[Target, Tensor]) -> dict[Target, StateTensor]:
    """The means of second moments, float32 of local shapes; all ranks call it for the same ones."""
    means = {member: Means(*FACTORED.zeros_like(x), lambda x=x: x) for member, x in values.items()}
    for renewal in renewals([*values], ()):
        renewal.run({}, means)
    return {member: StateTensor(FACTORED, *each[:2]) for member, each in means.items()}


def _launches(group: LaunchGroup, own: list[tuple[int, Nodes]]) -> tuple[list[Any], Any]:
    """Launches over a gradient, and over its sums, of some members of a group."""
    from fp4adam.kernels import factored
    from fp4adam.kernels.launch.launch import Launch
    from fp4adam.kernels.launch.tensor_table import TRITON_DTYPES
    from fp4adam.kernels.launch.tile_lists import tile_grid

    (shapes, _, table, scalars), strips = group.tensors, []
    for levels in sorted({nodes.levels for _, nodes in own}):
        tiles = []
        for i, nodes in own:
            if nodes.levels == levels:
                tiles.append(tile_grid((i, 0, shapes[i][0], 0, 1), (factored.STRIP.value, 1)))
                tiles[-1][:, 2] = (nodes.place + (tiles[-1][:, 1] >> levels) * nodes.cols) // 32
        given = table, scalars, torch.cat(tiles).to(table.device)
        constexprs = dict(GRAD=TRITON_DTYPES[group.key.grad_dtype], LEVELS=levels)
        strips.append(Launch(factored.strips_kernel, len(given[2]), given, constexprs))
    fields = [(i, nodes.rows, nodes.place_of_sums, 0) for i, nodes in own]
    given = table, scalars, torch.tensor(fields, dtype=torch.int32, device=table.device)
    return strips, Launch(factored.renew_kernel, len(own), given, {}, num_warps=8)
