"""Renews factored second moments after a step, from gradients whose rows ranks may share."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from fp4adam.distributed.row_sums import RowSums
from fp4adam.distributed.scale_exchange import ShardInfo
from fp4adam.optim.launch_group import LaunchGroup
from fp4adam.optim.state_codec import FACTORED
from fp4adam.optim.state_tensor import StateTensor
from fp4adam.optim.target import Target, together
from fp4adam.tensors.blocks import round_up
from fp4adam.tensors.sums import pairs

# Elements of all ranks whose sums exist at a time, or those of one parameter.
_AT_A_TIME = 2**29
# Means that operators renew, from a gradient by weights of old and new ones and a factor of the
# gradient; without weights from squares.
Given = tuple[StateTensor, Tensor, tuple]


class FactorRenewal:
    """Renews the means of parameters of as many rows; every rank that has some calls it."""

    def __init__(self, members: list[Target], groups: Sequence[LaunchGroup]) -> None:
        shards, self._rows = ShardInfo.of_rows(members[0].owner), members[0].owner.shape[0]
        self._device = members[0].param.device if shards is None else shards.device
        *places, cols = accumulate((round_up(m.owner.shape[1], 32) for m in members), initial=0)
        self._sums = RowSums(self._rows, cols, shards, self._device)
        self._by_operators = dict(zip(members, places, strict=True))
        self._launches = []
        for group in groups:
            found = [self._by_operators.pop(member, None) for member in group.members]
            own = {i: place for i, place in enumerate(found) if place is not None}
            if own:
                from fp4adam.kernels.factored import renewal

                given = group.tensors, own, self._rows, cols, self._sums.levels
                self._launches.append(renewal(group.key, *given))
        if self._device.type == "cuda" and self._launches:
            one = torch.ones(1, dtype=torch.float32, device=self._device)
            with torch.cuda.device(self._device):  # before a step that could not end
                for launch in chain.from_iterable(self._launches):
                    launch.compile(one, one, one, one)
                self._sums.launch.compile(one, one)

    def run(self, signals: Mapping[torch.device, tuple], given: Mapping[Target, Given]) -> None:
        """Renew means: by launches, whose ``signals`` are by device, and what is ``given``."""
        # Zeros where other ranks have more rows.
        nodes = torch.zeros(self._sums.shape, dtype=torch.float32, device=self._device)
        operated = {m: place for m, place in self._by_operators.items() if m in given}
        with torch.cuda.device_of(nodes):
            for strips, _ in self._launches:
                strips(*signals[self._device], nodes)
            for member, place in operated.items():
                means, x, weights = given[member]
                squares = x.float().square() if weights else x
                FACTORED.add_rows(means.codes, squares, *weights)
                found = pairs(squares, self._sums.levels)
                nodes[: len(found), place : place + squares.shape[1]] = found
            sums = self._sums(nodes)
            for _, renew in self._launches:
                renew(*signals[self._device], sums)
        for member, place in operated.items():
            (_, _, scales), _, weights = given[member]
            own = sums[place : place + len(scales) - 1].to(scales.device)
            FACTORED.add_columns(scales, own, self._rows, *weights)


def renewals(members: Sequence[Target], groups: Sequence[LaunchGroup]) -> list[FactorRenewal]:
    """Those of all members, in the same order on all ranks."""
    own = [m for m in members if m.codecs["exp_avg_sq"] is FACTORED]
    ends = dict(zip(own, accumulate(m.owner.numel() for m in own), strict=True))

    def key(m: Target) -> tuple:
        of_rows = m.owner.shape[0], ShardInfo.of_rows(m.owner)
        return m.param.device, *of_rows, ends[m] // _AT_A_TIME

    return [FactorRenewal(alike, groups) for alike in together(own, key)]


def encoded(values: Mapping[Target, Tensor]) -> dict[Target, StateTensor]:
    """The means of second moments, float32 of local shapes; all ranks call it for the same ones."""
    given = {m: (StateTensor(FACTORED, *FACTORED.zeros_like(x)), x, ()) for m, x in values.items()}
    for renewal in renewals([*values], ()):
        renewal.run({}, given)
    return {member: means for member, (means, *_) in given.items()}
