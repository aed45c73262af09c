"""Master weights that have been loaded, and those of weights that other code has written.

Two questions decide what a step continues from. Is the weight unwritten since the optimizer's last
write? Its mark tells. If not: does the master stand? Between steps it does if what the step has
left came back; a master from elsewhere has to belong to the weight, see ``masters``. Otherwise the
weight wins, and its master restarts from it.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp4adam.distributed.cast import cast
from fp4adam.distributed.dtensor import is_dtensor, local, sharding_groups
from fp4adam.distributed.shards import settle_written, sharded_weights
from fp4adam.formats.scale_groups import ScaleGroup
from fp4adam.optim.masters import MASTER
from fp4adam.optim.target import QuantizedTarget, State, Target
from fp4adam.tensors.quantized_tensor import QuantizedTensor

_logger = logging.getLogger("fp4adam")


def find_stale(parameters: Sequence[Target], states: Mapping[Tensor, State]) -> set[Target]:
    """The parameters whose masters in ``states`` restart; marks all others.

    A step cannot communicate here: FSDP2 may reallocate the shards of some ranks only, so not every
    rank gets to this comparison. Each rank compares its own rows.
    """
    stale = set()
    for p in parameters:
        is_new = not p.is_kept or MASTER not in states.get(p.owner, {})
        if is_new or p.owner.is_meta or p.is_unwritten():
            continue
        if p.stands(states[p.owner]):
            p.record()
        else:
            stale.add(p)
    return stale


def say_restarted(n_stale: int) -> None:
    """Log that masters restart, in the step that does it."""
    if n_stale:
        _logger.warning(
            "the masters of %d weights restart from the weights, which other code has written or "
            "moved since the last step or load; reset_master_weights() does so on purpose",
            n_stale,
        )


def adopt(parameters: Sequence[Target], master_of: Callable[[Target], State]) -> set[Target]:
    """Decide which loaded masters stand; every rank has to call it with the same parameters.

    Weights that were loaded as plain values get the exact bytes of masters that stand.

    Args:
        parameters: All parameters with a loaded master.
        master_of: Returns a state with the loaded master of one, in FP32 or as a remainder.

    Returns:
        Those whose masters do not stand.
    """
    settle_written(sharded_weights(p.owner for p in parameters))
    others = set()
    for some in batches(p for p in parameters if not p.owner.is_meta):
        standing = _agreed({p: p.stands(master_of(p)) for p in some})
        stale = [p for p, stands in standing.items() if not stands]
        others.update(stale)
        _write_loaded([p for p, stands in standing.items() if stands], master_of)
        _expect([p for p in stale if local(master_of(p)[MASTER]).dtype != torch.int8], master_of)
        for p in standing.keys() - others:
            p.free_initial_value()
            p.record()
            p.forget()  # the model may be loaded after the optimizer: the next step asks again
    return others


def _write_loaded(standing: Sequence[Target], master_of: Callable[[Target], State]) -> None:
    """Quantize masters of weights that were loaded as plain values, or out of their reach."""
    groups = _groups(standing)
    members = [p for peers in groups for p in peers]
    hold = _agreed({p: p.holds(master_of(p)) for p in members})
    written = [p for peers in groups if not all(hold[p] for p in peers) for p in peers]
    _quantize([p.param for p in written], written, master_of)


def _expect(stale: Sequence[Target], master_of: Callable[[Target], State]) -> None:
    """Let weights take the bytes of their masters if plain values of these are loaded next."""
    members = [p for peers in _groups(stale) for p in peers]
    twins = [p.param.twin() for p in members]
    _quantize(twins, members, master_of)
    for p, twin in zip(members, twins, strict=True):
        p.param._shared.left = twin


def _groups(parameters: Sequence[Target]) -> list[list[QuantizedTarget]]:
    """Those whose bytes follow from their masters, with all that share an amax.

    With delayed scaling they depend on more. Of a scale group all are there, or none.
    """
    together: dict[Hashable, list[QuantizedTarget]] = defaultdict(list)
    for p in parameters:
        if isinstance(p, QuantizedTarget):
            if p.param.quantizer.layout.tensor_scale != "delayed":
                together[p.scales].append(p)
    return [
        peers
        for scales, peers in together.items()
        if not (isinstance(scales, ScaleGroup) and len(peers) < len(scales.names))
    ]


def _quantize(
    targets: Sequence[QuantizedTensor],
    members: Sequence[QuantizedTarget],
    master_of: Callable[[Target], State],
) -> None:
    if targets:
        cast(
            targets,
            [p.master.read(master_of(p)) for p in members],
            [p.write_dtype for p in members],
            [p.shard_infos() for p in members],
            [p.scales for p in members],
        )


def warn_of_loaded(n_other: int, n_lacking: int, n_masters: int) -> None:
    """Warn of masters that a loaded state has for other weights than these, or does not have."""
    parts = []
    if n_other:
        parts.append(f"{n_other} of its {n_masters} masters do not belong to the weights")
    if n_lacking:
        parts.append(f"it has no masters for {n_lacking} quantized weights")
    if parts:
        _logger.warning(
            "masters restart from rounded weights after this state was loaded: %s; load the model "
            "of the same checkpoint before the next step, or call reset_master_weights() if that "
            "is intended",
            " and ".join(parts),
        )


def batches(parameters: Iterable[Target]) -> list[list[Target]]:
    """Divide parameters so that what is computed of a batch is not larger than that of one weight.

    Members of a scale group stay together. All ranks get the same batches of shards.
    """
    together: dict[Hashable, list[Target]] = defaultdict(list)
    for p in parameters:
        together[p.scales].append(p)
    sizes = [sum(p.owner.numel() for p in members) for members in together.values()]
    found: list[list[Target]] = []
    left = 0
    for members, size in zip(together.values(), sizes, strict=True):
        if not found or size > left:
            found.append([])
            left = max(sizes)
        found[-1] += members
        left -= size
    return found


def _agreed(answers: dict[Any, bool]) -> dict[Any, bool]:
    """Answers that are true only if they are true on all ranks that have a part; communicates."""
    shared: dict[Any, list[Target]] = defaultdict(list)
    for p in answers:
        if is_dtensor(p.owner):
            for group in sharding_groups(p.owner):
                shared[group].append(p)
    agreed = dict(answers)
    for (group, device_type), parameters in shared.items():
        yes = torch.tensor([agreed[p] for p in parameters], dtype=torch.float32, device=device_type)
        dist.all_reduce(yes, dist.ReduceOp.MIN, group)
        agreed |= dict(zip(parameters, yes.bool().tolist(), strict=True))
    return agreed
