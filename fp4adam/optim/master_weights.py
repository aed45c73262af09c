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
from typing import Any, NamedTuple

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
    agree = _agreed if all_ranks else dict
    owned = {p: p.owns(states[p.owner]) for p in unsure if p.completes}
    owned = agree({p: (owns is not False, owns is True) for p, owns in owned.items()})
    here = {p: certain for p, (possible, certain) in owned.items() if certain or not possible}
    by_value = []
    for p in unsure:
        if p in here:
            continue
        infos = p.shard_infos() if isinstance(p, QuantizedParameter) else ()
        if infos and all_ranks:
            settle_shard(p.param, infos)
        # With a history, the bytes of a master depend on more than its value; with other rows in
        # the same storage, they depend on these as well. A shard has a storage of its own, also one
        # without rows.
        if (
            isinstance(p, QuantizedParameter)
            and p.param.quantizer.layout.tensor_scale != "delayed"
            and (all_ranks if infos else rows.is_all(p.param))
        ):
            by_value.append(p)
        else:
            master = p.master(states[p.owner])
            here[p] = p.was_written(master) or p.is_rounded(master) or _is_completed(p, master)
    rounded = _rounded(by_value, parameters, states)
    here |= {p: p.holds(rounded[p]) for p in by_value}
    same = {p for p, (is_same,) in agree({p: (here[p],) for p in here}).items() if is_same}
    others = [p for p in by_value if p not in same]
    values = [rounded[p].dequantize(p.param.dtype) for p in others]
    # Each by itself, also in scale groups: so does ``load_state_dict`` of the model.
    own_scales = [p.owner for p in others]
    again = _quantized(others, values, [torch.float32] * len(others), own_scales)
    likeness = agree(
        {
            p: _likeness(p, p.master(states[p.owner]), here[p] or p.holds(requantized))
            for p, requantized in zip(others, again, strict=True)
        }
    )
    found = {p: _Likeness(*own) for p, own in likeness.items()}
    same |= {p for p, like in found.items() if any(like)}
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
    loaded = [p for p, like in found.items() if like.values or (like.codes and not like.kept)]
    return left, {p: rounded[p] for p in loaded}


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


class _Likeness(NamedTuple):
    """In what way a weight is its rounded master, though its bytes are others."""

    values: bool  # these were rounded, saved and quantized again, or loaded unrounded beside it
    codes: bool  # of a shard: only other ranks have quantized again, so its amax is neither's
    kept: bool  # of a member of a scale group: others were written, and it has the amax before
    completed: bool  # by remainders


def _likeness(parameter: QuantizedParameter, master: Tensor, has_values: bool) -> _Likeness:
    is_member = parameter.scales is not parameter.owner
    has_amax = parameter.param.quantizer.layout.tensor_scale == "current"
    shares_amax = has_amax and bool(parameter.shard_infos())
    has_codes = (is_member or shares_amax) and parameter.is_rounded(master)
    return _Likeness(
        values=has_values or parameter.was_written(master),
        codes=shares_amax and has_codes,
        kept=is_member and has_codes,
        completed=_is_completed(parameter, master),
    )


def _rounded(
    unsure: Sequence[QuantizedParameter],
    parameters: Sequence[Parameter],
    states: dict[Tensor, dict[str, Any]],
) -> dict[QuantizedParameter, QuantizedTensor]:
    """The rounded masters of quantized parameters, as new tensors."""
    scales = {p: p.scales for p in parameters if isinstance(p, QuantizedParameter)}
    groups = {scales[p] for p in unsure}
    # The amax of a scale group needs all of its members.
    scales = {p: key for p, key in scales.items() if key in groups}
    masters = [p.master(states.get(p.owner, {})) for p in scales]
    values = [p.value() if m is None else m for p, m in zip(scales, masters, strict=True)]
    dtypes = [p.write_dtype for p in scales]
    rounded = _quantized([*scales], values, dtypes, [*scales.values()])
    return dict(zip(scales, rounded, strict=True))


def _quantized(
    parameters: Sequence[QuantizedParameter],
    values: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    scales: Sequence[Hashable],
) -> list[QuantizedTensor]:
    """Values as new tensors like the parameters, with one amax where ``scales`` are equal.

    ``dtypes``: What the values are rounded to first.
    """
    twins = [p.param.twin() for p in parameters]
    if len({*scales}) < len(twins) or any(t._shared.rows_share_scales for t in twins):
        cast(twins, values, dtypes, [p.shard_infos() for p in parameters], scales)
    else:
        for twin, value, dtype in zip(twins, values, dtypes, strict=True):
            twin._write(value.to(dtype).view(twin.shape))
    return twins


def _agreed(answers: dict[Any, tuple[bool, ...]]) -> dict[Any, tuple[bool, ...]]:
    """Answers that are true only if they are true on all ranks that have a part; communicates."""
    shared: dict[Any, list[Parameter]] = defaultdict(list)
    for p in answers:
        if is_dtensor(p.owner):
            for group in sharding_groups(p.owner):
                shared[group].append(p)
    agreed = dict(answers)
    for (group, device_type), parameters in shared.items():
        yes = torch.tensor([agreed[p] for p in parameters], dtype=torch.float32, device=device_type)
        dist.all_reduce(yes, dist.ReduceOp.MIN, group)
        agreed |= dict(zip(parameters, map(tuple, yes.bool().tolist()), strict=True))
    return agreed
