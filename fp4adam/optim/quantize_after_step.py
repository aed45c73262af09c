"""Parameters whose scales depend on other tensors: a scale group, or shards on other ranks.

If one launch steps every tensor that shares an amax, that launch finds the amax. Otherwise the
tensors are quantized after the step: update the values, measure and exchange the amaxes, then write
the codes.
"""

from collections.abc import Sequence
from itertools import chain, compress

import torch
from torch import Tensor

from fp4adam.distributed.cast import LocalCast
from fp4adam.distributed.scale_exchange import Exchanged, exchanges
from fp4adam.optim.launch_group import LaunchGroup
from fp4adam.optim.master_weights import quantize
from fp4adam.optim.target import ReadGrad, Target, together


def quantized_after_step(peers: Sequence[Target], read_grad: ReadGrad) -> bool:
    """Whether parameters that share an amax must all be updated before any of them is quantized.

    This is so unless a single launch steps all of them and finds the amax on the way.
    """
    if not peers[0].shards and len(peers) == 1 or not peers[0].updates:
        return False
    grads = [read_grad(member.owner) for member in peers]
    return not (
        all(map(Target.fits_a_launch, peers, grads))
        and len({*map(Target.launch_key, peers, grads)}) == 1
        and len({grad is None for grad in grads}) == 1
    )


class QuantizeAfterStep:
    """Exchanges shared amaxes, in one order on all ranks, and quantizes what waits for them."""

    def __init__(
        self, members: Sequence[Target], groups: Sequence[LaunchGroup], read_grad: ReadGrad
    ) -> None:
        self._read_grad = read_grad
        later = [member for member in members if member.quantized_after_step]
        self._scale_groups = together(member for member in later if not member.shards)
        # Narrow masters are decoded one parameter at a time, to bound the FP32 copies.
        shards = together(
            (member for member in later if member.shards),
            lambda member: member.param.device if member.master.codec.exact else member.owner,
        )
        self._casts: list[tuple[LocalCast, list[Target]]] = []
        amaxes: dict[Tensor, tuple] = {}
        for alike in shards:
            one = LocalCast([m.param for m in alike], [m.write_dtype for m in alike])
            self._casts.append((one, alike))
            amaxes.update(zip((m.owner for m in alike), one.exchanged, strict=True))
        for group in groups:
            if group.key.groups:
                for member, slot in zip(group.members, group.slots, strict=True):
                    amaxes[member.owner] = group.launch.amaxes[slot : slot + 1], []
        self._exchanges = exchanges(
            (m.shards, Exchanged(m.param.global_spec, *amaxes[m.owner], m.scales))
            for m in members
            if m.shards
        )

    def finish(self, launches: list[tuple], skipped: bool) -> None:
        """Exchange amaxes, then write the weights that depend on them.

        Only those with a gradient, and all members of a scale group if one has a gradient. If the
        host knows that the step is ``skipped``, the exchange happens anyway, because other ranks
        may not have checked on the host.
        """
        if not skipped:
            for peers in self._scale_groups:
                if any(self._read_grad(m.owner) is not None for m in peers):
                    quantize(peers, _values(peers))
                    for member in peers:
                        member.settle_master()
            for one, members in self._casts:
                one.measure([m.whole_value() for m in members])
        for exchange in self._exchanges:
            exchange()
        for launch, signals in launches:
            with torch.cuda.device_of(launch.amaxes):
                launch(*signals)
        if not skipped:
            own = chain.from_iterable(members for _, members in self._casts)
            moved = {m.scales for m in own if self._read_grad(m.owner) is not None}
            for one, members in self._casts:
                chosen = [m.scales in moved for m in members]
                written = [*compress(members, chosen)]
                if written:
                    one.part(chosen).write(_values(written))
                for member in written:
                    member.settle_master()


def _values(members: Sequence[Target]) -> list[Tensor]:
    values = [m.whole_value() for m in members]
    for member, value in zip(members, values, strict=True):
        if member.new_master is None:
            member.hold_master(value)
    return values
