"""Master weights that have been loaded, and those of weights that other code has written.

Two questions decide what a step continues from. Is the weight unwritten since the optimizer's last
write? Its mark tells. If not: does the master stand? Between steps it does if what the step has
left came back; a master from elsewhere has to belong to the weight, see ``masters``. Otherwise the
weight wins, and its master restarts from it.
"""

import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fp4adam.distributed.cast import cast
from fp4adam.distributed.dtensor import is_dtensor, sharding_groups
from fp4adam.distributed.shards import settle_written, sharded_weights
from fp4adam.formats.scale_groups import ScaleGroup
from fp4adam.optim.masters import MASTER
from fp4adam.optim.state_codec import INT8
from fp4adam.optim.target import QuantizedTarget, State, Target


def find_stale(targets: Sequence[Target], states: Mapping[Tensor, State]) -> set[Target]:
    """The targets whose masters in ``states`` restart.

    Each rank compares its own rows: not every one gets here, as FSDP2 may reallocate some shards.
    """
    return {
        p
        for p in targets
        if p.master.name and MASTER in states.get(p.owner, {})
        if not (p.owner.is_meta or p.is_unwritten() or p.stands(states[p.owner]))
    }


def find_restarting(targets: Sequence[Target], states: Mapping[Tensor, State]) -> set[Target]:
    """:func:`find_stale` in a step, which warns of the values that it drops."""
    stale = find_stale(targets, states)
    lost = [p for p in targets if p.has_lost_start and MASTER not in states.get(p.owner, {})]
    warn_of_restarts(
        (len(stale), "other code has written or moved since the last step or load; "
            "reset_master_weights() does so on purpose, without a warning"),
        (len(lost), "another optimizer has stepped, so that their values before quantization are "
            "gone; load its state_dict(), or load the weights in high precision"),
    )  # fmt: skip
    return stale


def warn_of_restarts(*reasons: tuple[int, str]) -> None:
    """Warn of each reason for which masters of some number of weights restart."""
    for count, why in reasons:
        if count:
            text = f"the masters of {count} weights restart from the weights, which {why}"
            warnings.warn(text, stacklevel=3)


def quantize(
    targets: Sequence[Target], masters: Sequence[Tensor], to: Sequence[Tensor] | None = None
) -> None:
    """Quantize FP32 masters to their weights, or to other tensors; every rank has to call it."""
    dtypes, infos = [p.write_dtype for p in targets], [p.shard_infos() for p in targets]
    to = [p.param for p in targets] if to is None else to
    cast(to, masters, dtypes, infos, [p.scales for p in targets])


def adopt(peers: Sequence[Target], states: Sequence[State]) -> list[bool | None]:
    """Decide which loaded masters in ``states`` stand; every rank has to call it.

    Weights that were loaded as plain values get the exact bytes of masters that stand. ``peers``
    are those that share scales. None: It would stand on what a step has left, with other bytes; as
    the model may be loaded later, the next step decides.
    """
    scales = peers[0].scales
    is_whole = not isinstance(scales, ScaleGroup) or len(peers) == len(scales.names)
    give_bytes = is_whole and all(map(_gives_bytes, peers, states))
    are_left = give_bytes and all(
        p.is_unwritten() and p.param._shared.init_val is None for p in peers
    )
    for p in peers:
        p.forget()
    settle_written(sharded_weights(p.owner for p in peers))
    answers = [p.stands(state) for p, state in zip(peers, states, strict=True)]
    answers += [give_bytes and all(map(_has_bytes, peers, states)), are_left]
    *stand, have_bytes, are_left = on_all_ranks(peers, answers)
    # If the model is loaded later, plain values of these masters get their bytes.
    is_apart = are_left or give_bytes and not any(stand)
    written = [p.param.twin() if is_apart else p.param for p in peers]
    if is_apart or give_bytes and not have_bytes and all(stand):
        masters = [p.master.read(state) for p, state in zip(peers, states, strict=True)]
        quantize(peers, masters, written)
    if is_apart:
        same = [p.param.has_bytes_of(left) for p, left in zip(peers, written, strict=True)]
        for i, is_same in enumerate(on_all_ranks(peers, same)):
            if not is_same:
                peers[i].param._shared.left = written[i]
                stand[i] = stand[i] and None
    for p, stands in zip(peers, stand, strict=True):
        if stands:
            p.free_initial_value()
    return stand


def on_all_ranks(peers: Sequence[Target], answers: list[bool]) -> list[bool]:
    """Which answers are yes on every rank that has a shard; all of these have to call it."""
    groups = dict.fromkeys(
        g for p in peers if is_dtensor(p.owner) for g in sharding_groups(p.owner)
    )
    for group, device_type in groups:
        yes = torch.tensor(answers, dtype=torch.float32, device=device_type)
        dist.all_reduce(yes, dist.ReduceOp.MIN, group)
        answers = yes.bool().tolist()
    return answers


def _gives_bytes(p: Target, state: State) -> bool:
    is_own = isinstance(p, QuantizedTarget)
    is_remainder = p.master.codec is INT8 and p.master.is_stored(state)
    return is_own and not is_remainder and p.param.quantizer.layout.tensor_scale != "delayed"


def _has_bytes(p: Target, state: State) -> bool:
    """True if a weight was not loaded as other plain values, or its remainders reach the master.

    These complete the codes that are there, and would not give the same scales again.
    """
    master, start = p.master.read(state), p.start_value
    if p.master.codec is INT8:
        return p.master.can_hold(master)
    if (init_val := p.param._shared.init_val) is not None and init_val.is_meta:
        return False  # no step has changed it since it was loaded
    return start is None or torch.equal(start.to(master).view(master.shape), master)
