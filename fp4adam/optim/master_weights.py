"""Master weights, and the one rule that decides whether they still match their parameters.

After each of its own writes the optimizer marks the memory and the versions of a parameter. If both
are unchanged at the next step, the master is valid. Otherwise, or without a mark, the parameter is
compared once with its rounded master: if they are equal the master is valid, else it restarts from
the parameter. Nothing else decides.

A weight that was restored from a plain state dict holds the rounded master's values, quantized a
second time, possibly with different bytes. It counts as equal. So does a weight that the master
completes by int8 remainders: rounding these may have moved a scale since the weight was quantized.
"""

import logging
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp4adam.distributed.cast import cast
from fp4adam.distributed.dtensor import is_dtensor, local, sharding_groups
from fp4adam.distributed.shards import settle_shard
from fp4adam.optim.parameter import Parameter, QuantizedParameter, State
from fp4adam.optim.remainder import is_completed
from fp4adam.tensors import rows
from fp4adam.tensors.quantized_tensor import QuantizedTensor

_logger = logging.getLogger("fp4adam")


def find_stale(
    parameters: Sequence[Parameter], states: dict[Tensor, State], all_ranks: bool = False
) -> tuple[dict[Parameter, QuantizedTensor | None], dict[QuantizedParameter, QuantizedTensor]]:
    """The parameters that do not equal their rounded masters; marks all others.

    A step cannot communicate here: FSDP2 may reallocate the shards of some ranks only, so not every
    rank gets to this comparison. Then each rank compares its own rows, under the scales that these
    have.

    Args:
        parameters: All parameters; some have a master in ``states``.
        states: The optimizer states by parameter.
        all_ranks: Whether every rank calls this with the same parameters. Shards are then compared
            as a whole, with the scales of their masters.

    Returns:
        Two dictionaries from parameter to rounded master: those that other code has written (None
        if the rounded master was not computed), and those that hold the rounded master's values in
        other bytes.
    """
    unsure = [
        p
        for p in parameters
        if p.has_master
        and "master_param" in states.get(p.owner, {})
        and not p.owner.is_meta
        and not p.is_unwritten()
    ]
    if not unsure:
        return {}, {}
    known = {p: p.owns(states[p.owner]) for p in unsure}
    if all_ranks:
        said = {p: owns for p, owns in known.items() if p.completes}
        agreed = _agreed({p: owns is not False for p, owns in said.items()})
        certain = _agreed({p: owns is True for p, owns in said.items()})
        known |= {p: certain[p] or (None if agreed[p] else False) for p in said}
    answers: dict[Parameter, bool] = {}
    quantized = []
    for p, owns in known.items():
        if owns is not None:
            answers[p] = owns
            continue
        infos = p.shard_infos() if isinstance(p, QuantizedParameter) else ()
        if infos and all_ranks:
            settle_shard(p.param, infos)
        # With a history, the bytes of a master depend on more than its value; with other rows in
        # the same storage, they depend on these as well. A shard has a storage of its own, also one
        # without rows.
        by_value = (
            isinstance(p, QuantizedParameter)
            and p.param.quantizer.layout.tensor_scale != "delayed"
            and bool(infos or rows.is_all(p.param))
        )
        if by_value and (not infos or all_ranks):
            quantized.append(p)
        else:
            master = p.master(states[p.owner])
            answers[p] = p.was_written(master) or p.is_rounded(master) or _is_completed(p, master)
    rounded = _rounded(quantized, parameters, states)
    answers |= {p: p.holds(rounded[p]) for p in quantized}
    here = answers
    answers = _agreed(here) if all_ranks else here
    # Also equal: values that were rounded, saved in the nominal dtype and quantized again, and
    # values loaded in high precision next to their masters. On some ranks the bytes may be the same
    # nevertheless, and if only others have quantized again, the amax is neither's.
    others = [p for p in quantized if not answers[p]]
    master_of = {p: p.master(states[p.owner]) for p in others}
    exactly = {
        p: here[p] or p.holds(twin) or p.was_written(master_of[p])
        for p, twin in _requantized(others, rounded)
    }
    again = {p: exactly[p] or _has_codes_of(p, master_of[p]) for p in others}
    # Other code that writes a member of a scale group leaves the others with the amax before.
    kept = {p: p.scales is not p.owner and p.is_rounded(master_of[p]) for p in others}
    if all_ranks:
        exactly, again, kept = map(_agreed, (exactly, again, kept))
    again = {p: exactly[p] or (again[p] and not kept[p]) for p in others}
    same = {p for p in unsure if answers[p] or again.get(p) or kept.get(p)}
    completed = {p: _is_completed(p, master_of[p]) for p in others if p not in same}
    completed = _agreed(completed) if all_ranks else completed
    same |= {p for p, is_one in completed.items() if is_one}
    for p in same:
        p.record()
    left = {p: rounded.get(p) for p in unsure if p not in same}
    dropped = [
        p
        for p in left
        if p.completes and local(states[p.owner]["master_param"]).dtype == torch.int8
    ]
    if dropped:
        _logger.warning(
            "the int8 remainders of %d weights are dropped, as other code has written or moved the "
            "weights: these masters restart from the weights",
            len(dropped),
        )
    return left, {p: rounded[p] for p in others if again[p]}


def adopt(parameters: Sequence[Parameter], states: dict[Tensor, State]) -> None:
    """Give parameters with the values of their rounded masters the exact bytes of these.

    Every rank has to call it with the same parameters. Others keep their bytes, but get those of
    the master if plain values of these bytes are loaded next.
    """
    for some in batches(parameters):
        stale, rounded = find_stale(some, states, all_ranks=True)
        for p, bytes_of_master in rounded.items():
            p.param.copy_(bytes_of_master)
            p.record()
        for p, bytes_of_master in stale.items():
            if bytes_of_master is not None:
                p.param._shared.rounded_master = bytes_of_master


def batches(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """Divide parameters so that what is computed of a batch is not larger than that of one weight.

    Members of a scale group stay together. All ranks get the same batches of shards.
    """
    together: dict[Hashable, list[Parameter]] = defaultdict(list)
    for p in parameters:
        together[p.scales].append(p)
    sizes = [sum(p.owner.numel() for p in members) for members in together.values()]
    found: list[list[Parameter]] = []
    left = 0
    for members, size in zip(together.values(), sizes, strict=True):
        if not found or size > left:
            found.append([])
            left = max(sizes)
        found[-1] += members
        left -= size
    return found


def _is_completed(parameter: Parameter, master: Tensor) -> bool:
    """Whether a weight is one that remainders have completed to ``master``."""
    own = parameter.param
    return isinstance(own, QuantizedTensor) and is_completed(own, master.view(own.shape))


def _has_codes_of(parameter: QuantizedParameter, master: Tensor) -> bool:
    """Whether a shard has the codes of a master, under an amax that may differ from its."""
    has_amax = parameter.param.quantizer.layout.tensor_scale == "current"
    return bool(parameter.shard_infos()) and has_amax and parameter.is_rounded(master)


def _rounded(
    unsure: Sequence[QuantizedParameter],
    parameters: Sequence[Parameter],
    states: dict[Tensor, dict[str, Any]],
) -> dict[QuantizedParameter, QuantizedTensor]:
    """The rounded masters of quantized parameters, as new tensors."""
    groups = {p.scales for p in unsure}
    # The amax of a scale group needs all of its members.
    members = [v for v in parameters if isinstance(v, QuantizedParameter) and v.scales in groups]
    twins = [p.param.twin() for p in members]
    masters = [p.master(states.get(p.owner, {})) for p in members]
    values = [v.value() if m is None else m for v, m in zip(members, masters, strict=True)]
    infos, scales = [p.shard_infos() for p in members], [p.scales for p in members]
    cast(twins, values, [p.write_dtype for p in members], infos, scales)
    return dict(zip(members, twins, strict=True))


def _requantized(
    parameters: Sequence[QuantizedParameter], rounded: dict[QuantizedParameter, QuantizedTensor]
) -> list[tuple[QuantizedParameter, QuantizedTensor]]:
    """Rounded masters that were decoded to their nominal dtype and quantized again.

    Each by itself, also in scale groups: so does ``load_state_dict`` of the model.
    """
    values = [rounded[p].dequantize(p.param.dtype) for p in parameters]
    twins = [p.param.twin() for p in parameters]
    infos = [p.shard_infos() for p in parameters]
    cast(twins, values, [torch.float32] * len(twins), infos, [p.owner for p in parameters])
    return [*zip(parameters, twins, strict=True)]


def _agreed(answers: dict[Parameter, bool]) -> dict[Parameter, bool]:
    """Answers that are true only if they are true on all ranks that have a part; communicates."""
    shared: dict[Any, list[Parameter]] = defaultdict(list)
    for p in answers:
        if is_dtensor(p.owner):
            for group in sharding_groups(p.owner):
                shared[group].append(p)
    agreed = dict(answers)
    for (group, device_type), parameters in shared.items():
        no = torch.tensor([float(not agreed[p]) for p in parameters], device=device_type)
        dist.all_reduce(no, dist.ReduceOp.MAX, group)
        agreed |= {p: not n for p, n in zip(parameters, no.tolist(), strict=True)}
    return agreed
