"""Master weights, and the one rule that decides whether they still match their parameters.

After each of its own writes the optimizer notes the memory and the versions of a parameter. If both
are unchanged at the next step, the master is valid. Otherwise, or without a note, the parameter is
compared once with its rounded master: if they are equal the master is valid, else it restarts from
the parameter. Nothing else decides.

A weight that was restored from a plain state dict holds the rounded master's values, quantized a
second time, possibly with different bytes. It counts as equal.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp4adam.distributed.cast import cast
from fp4adam.distributed.dtensor import is_dtensor, local, sharding_groups
from fp4adam.distributed.shards import settle_shard
from fp4adam.optim.memory_note import WriteNote
from fp4adam.optim.param_view import BorrowedView, ParamView, QuantizedView
from fp4adam.optim.stored_state import StoredState
from fp4adam.tensors.quantized_tensor import QuantizedTensor


def master_of(view: ParamView, state: dict[str, Any]) -> Tensor | None:
    """The local part of a master weight in FP32, on its parameter's device; None without one.

    Models move without the states, which follow when they are loaded.
    """
    if "master_param" not in state:
        return None
    own = {name: local(value) for name, value in state.items()}
    stored = StoredState.of(own, "master_param", view.codecs["master_param"])
    return stored.decode().to(view.param.device)


class MasterWeights:
    """The notes that an optimizer takes of its parameters after its own writes."""

    def __init__(self) -> None:
        self._notes: dict[Tensor, WriteNote] = {}

    def note(self, views: Iterable[ParamView]) -> None:
        """Record that the parameters equal their rounded masters now."""
        self._notes.update((view.owner, view.note()) for view in views)

    def update(self, notes: dict[Tensor, WriteNote]) -> None:
        """Add the notes taken by a step."""
        self._notes.update(notes)

    def notes_of(self, owners: Iterable[Tensor]) -> dict[Tensor, WriteNote]:
        """The notes of these parameters, as far as there are any."""
        return {owner: self._notes[owner] for owner in owners if owner in self._notes}

    def keep_only(self, owners: Iterable[Tensor]) -> None:
        """Forget all other parameters."""
        self._notes = self.notes_of(owners)

    def is_known(self, view: ParamView) -> bool:
        """Whether a parameter is certainly unchanged since the optimizer's last write."""
        note = self._notes.get(view.owner)
        return note is not None and note.is_same(view.note())

    def left(
        self,
        views: Sequence[ParamView],
        states: dict[Tensor, dict[str, Any]],
        all_ranks: bool = False,
    ) -> tuple[dict[ParamView, QuantizedTensor | None], dict[QuantizedView, QuantizedTensor]]:
        """The parameters that do not equal their rounded masters; records a note of all others.

        A step cannot communicate here: FSDP2 may reallocate the shards of some ranks only, so not
        every rank gets to this comparison. Then each rank compares its own rows, under the scales
        that these have.

        Args:
            views: All parameters; some have a master in ``states``.
            states: The optimizer states by parameter.
            all_ranks: Whether every rank calls this with the same parameters. Shards are then
                compared as a whole, with the scales of their masters.

        Returns:
            Two dictionaries from view to rounded master: the parameters that other code has
            written (None if the rounded master was not computed), and those that hold the rounded
            master's values in other bytes.
        """
        unsure = [
            view
            for view in views
            if view.has_master
            and "master_param" in states.get(view.owner, {})
            and not view.owner.is_meta
            and not self.is_known(view)
        ]
        if not unsure:
            return {}, {}
        answers: dict[ParamView, bool] = {}
        quantized = []
        for view in unsure:
            infos = view.shards if isinstance(view, QuantizedView) else ()
            if infos and all_ranks:
                settle_shard(view.param, infos)
            # With a history, the bytes of a master depend on more than its value.
            by_value = (
                isinstance(view, QuantizedView)
                and view.param.quantizer.layout.tensor_scale != "delayed"
            )
            if by_value and (not infos or all_ranks):
                quantized.append(view)
            else:
                master = master_of(view, states[view.owner])
                answers[view] = view.was_written(master) or view.is_rounded(master)
        rounded = _rounded(quantized, views, states)
        answers |= {view: view.holds(rounded[view]) for view in quantized}
        here = answers
        answers = _agreed(here) if all_ranks else here
        # Also equal: values that were rounded, saved in the nominal dtype and quantized again, and
        # values loaded in high precision next to their masters. On some ranks the bytes may be the
        # same nevertheless, and if only others have quantized again, the amax is neither's.
        others = [view for view in quantized if not answers[view]]
        again = {
            view: here[view]
            or view.holds(twin)
            or view.was_written(master_of(view, states[view.owner]))
            or _has_codes_of(view, master_of(view, states[view.owner]))
            for view, twin in _requantized(others, rounded)
        }
        again = _agreed(again) if all_ranks else again
        same = {view for view in unsure if answers[view] or again.get(view)}
        self.note(same)
        left = {view: rounded.get(view) for view in unsure if view not in same}
        return left, {view: rounded[view] for view in others if again[view]}

    def adopt(self, views: Sequence[ParamView], states: dict[Tensor, dict[str, Any]]) -> None:
        """Give parameters with the values of their rounded masters the exact bytes of these.

        Every rank has to call it with the same parameters. Others keep their bytes, but get those
        of the master if plain values of these bytes are loaded next.
        """
        left, rounded = self.left(views, states, all_ranks=True)
        for view, bytes_of_master in rounded.items():
            view.param.copy_(bytes_of_master)
        self.note(rounded)
        for view, bytes_of_master in left.items():
            if bytes_of_master is not None:
                view.param._shared.rounded_master = bytes_of_master


def _has_codes_of(view: QuantizedView, master: Tensor) -> bool:
    """Whether a shard has the codes of a master, under an amax that may differ from its."""
    quantizer = view.param.quantizer
    return (
        bool(view.shards) and quantizer.layout.tensor_scale == "current" and view.is_rounded(master)
    )


def quantize_together(
    views: Sequence[QuantizedView | BorrowedView],
    targets: Sequence[QuantizedTensor],
    values: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
) -> None:
    """Quantize values with the scales that their parameters share with groups and other ranks.

    The number of launches does not depend on the number of tensors, except for formats that cannot
    be cast in shards (``two_dimensional=False``) and slices of tensors.

    Args:
        views: The parameters; all members of a scale group, or none.
        targets: The tensors that are written, with the shapes and shards of the parameters.
        values: Their float32 values.
        dtypes: The dtypes that values are rounded to first.
    """
    cast(targets, values, dtypes, [view.shards for view in views], [view.scales for view in views])


def _rounded(
    unsure: Sequence[QuantizedView],
    views: Sequence[ParamView],
    states: dict[Tensor, dict[str, Any]],
) -> dict[QuantizedView, QuantizedTensor]:
    """The rounded masters of quantized parameters, as new tensors."""
    groups = {view.scales for view in unsure}
    # The amax of a scale group needs all of its members.
    members = [v for v in views if isinstance(v, QuantizedView) and v.scales in groups]
    twins = [view.param.twin() for view in members]
    masters = [master_of(view, states.get(view.owner, {})) for view in members]
    values = [v.value() if m is None else m for v, m in zip(members, masters, strict=True)]
    quantize_together(members, twins, values, [view.write_dtype for view in members])
    return dict(zip(members, twins, strict=True))


def _requantized(
    views: Sequence[QuantizedView], rounded: dict[QuantizedView, QuantizedTensor]
) -> list[tuple[QuantizedView, QuantizedTensor]]:
    """Rounded masters that were decoded to their nominal dtype and quantized again."""
    wanted = set(views)
    groups = {view.scales for view in views}
    members = [view for view in rounded if view.scales in groups]
    values = [rounded[view].dequantize(view.param.dtype) for view in members]
    twins = [view.param.twin() for view in members]
    quantize_together(members, twins, values, [torch.float32] * len(members))
    return [(view, twin) for view, twin in zip(members, twins, strict=True) if view in wanted]


def _agreed(answers: dict[ParamView, bool]) -> dict[ParamView, bool]:
    """Answers that are true only if they are true on all ranks that have a part; communicates."""
    shared: dict[Any, list[ParamView]] = defaultdict(list)
    for view in answers:
        if is_dtensor(view.owner):
            for group in sharding_groups(view.owner):
                shared[group].append(view)
    agreed = dict(answers)
    for (group, device_type), views in shared.items():
        no = torch.tensor([float(not agreed[view]) for view in views], device=device_type)
        dist.all_reduce(no, dist.ReduceOp.MAX, group)
        agreed |= {view: not n for view, n in zip(views, no.tolist(), strict=True)}
    return agreed
