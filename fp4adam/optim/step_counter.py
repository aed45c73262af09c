"""Step counts of parameters, and the scalars that follow from them.

Parameters of one group with the same step count share their scalars. The ``step`` tensors in the
state are views of one tensor, so one operator increments them all. If the device skips a step, the
count is taken back later.
"""

from collections.abc import Sequence
from itertools import compress
from operator import is_, itemgetter, not_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4adam.optim.adam import Scalars, adam_scalars
from fp4adam.optim.state_codec import dither_origin
from fp4adam.optim.target import Target
from fp4adam.optim.update_bound import largest_update, next_ratio

_step = itemgetter("step")


class StepGroup:
    """Parameters of one group with the same step count, which share the scalars of a step.

    Attributes:
        group: The parameter group.
        step: The number of steps counted so far.
        first_element: Index of the first local element in the flattened parameter if the states are
            dithered, else 0.
        ratio: The bound on their moments; see ``update_bound``.
        members: Indices of the parameters.
        scalars: The scalars of the last step.
    """

    def __init__(self, group: dict[str, Any], step: float, first_element: int) -> None:
        self.group = group
        self.first_element = first_element
        self.step = step
        self.ratio = 0.0
        self.members: list[int] = []
        self.scalars: Scalars

    def advance(self) -> None:
        """Count one step and work out its scalars."""
        # Stop where the float32 counter in the state stops, so that resumed runs count alike.
        self.step = min(self.step + 1, 2.0**24)
        self.scalars = adam_scalars(self.group, self.step)
        self.ratio = next_ratio(self.ratio, self.scalars)


class _Skip(NamedTuple):
    """A step that the device may have skipped: its ``found_inf`` on the host, and what to undo."""

    found_inf: Tensor
    arrival: "torch.cuda.Event | None"
    groups: list[StepGroup]
    counted: Tensor


class StepCounter:
    """Counts the steps of parameters.

    Args:
        members: The parameters; their states get new counters, equal to the old ones.
        ratios: The bound on the moments of each parameter; see ``update_bound``.

    Attributes:
        groups: The step groups of the members that take part.
        rows: For each member its row of scalars: the index of its group in ``groups``.
    """

    def __init__(self, members: Sequence[Target], ratios: Sequence[float]) -> None:
        self._members = members
        self._states = [member.state for member in members]
        self._step_of = [member.state["step"].item() for member in members]
        self._ratio_of = list(ratios)
        self._steps = torch.tensor(self._step_of, dtype=torch.float32, device="cpu")
        self._views = list(self._steps)
        for member, step in zip(members, self._views, strict=True):
            member.state["step"] = step
        self._version = self._steps._version
        self._counted = torch.zeros(0, dtype=torch.float32, device="cpu")
        self.groups: list[StepGroup] = []
        self.rows: list[int] = [0] * len(members)
        self._skip: _Skip | None = None
        # The largest count of the members of a parameter group while they took no part, by its id.
        self._absent: dict[int, float] = {}

    def fits(self) -> bool:
        """Whether the states still hold these counters, and no other code has written to them."""
        self.settle()
        return self._steps._version == self._version and all(
            map(is_, map(_step, self._states), self._views)
        )

    def regroup(self, present: list[bool]) -> None:
        """Set which members take part from this step on; may be repeated if it is interrupted."""
        self._catch_up()
        self._counted = torch.tensor(present, dtype=torch.float32, device="cpu")
        groups: dict[tuple[int, float, int], StepGroup] = {}
        for i in compress(range(len(present)), present):
            member = self._members[i]
            first_element = member.first_element if member.is_dithered else 0
            key = id(member.group), self._step_of[i], first_element
            if key not in groups:
                groups[key] = StepGroup(member.group, self._step_of[i], first_element)
            groups[key].members.append(i)
            groups[key].ratio = max(groups[key].ratio, self._ratio_of[i])
        self.groups = list(groups.values())
        for i in compress(range(len(present)), map(not_, present)):
            key = id(self._members[i].group)
            self._absent[key] = max(self._absent.get(key, 0.0), self._step_of[i])
        self.rows = [0] * len(present)
        for row, group in enumerate(self.groups):
            for i in group.members:
                self.rows[i] = row

    def latest(self) -> dict[int, float]:
        """The largest count of the members of each parameter group, by the id of the group."""
        latest = dict(self._absent)
        for group in self.groups:
            key = id(group.group)
            latest[key] = max(latest.get(key, 0.0), group.step)
        return latest

    def _catch_up(self) -> None:
        """Copy step counts and bounds from the groups to their members."""
        for group in self.groups:
            for i in group.members:
                self._step_of[i] = group.step
                self._ratio_of[i] = group.ratio

    def advance(self) -> None:
        """Count one step for the members that take part."""
        for group in self.groups:
            group.advance()
        self._steps += self._counted
        self._version = self._steps._version

    def numbers(self) -> list[float]:
        """The scalars of all groups, one row each, with the update bounds and the dither origin."""
        rows: list[float] = []
        for group in self.groups:
            scalars = group.scalars
            decay = abs(scalars.decay) if group.group["decoupled_weight_decay"] else 1.0
            dither = dither_origin(group.first_element, int(scalars.dither_step))
            # Two 16-bit halves, which float32 represents exactly.
            rows += *scalars[:8], dither >> 16
            rows += largest_update(scalars, group.ratio), decay, dither & 0xFFFF
        return rows

    def may_have_skipped(self, found_inf: Tensor) -> None:
        """Record that the device skips the step just counted if ``found_inf`` is not 0."""
        arrival = None
        if found_inf.is_cuda:
            on_host = torch.empty(1, dtype=torch.float32, device="cpu", pin_memory=True)
            on_host.copy_(found_inf.reshape(1), non_blocking=True)
            arrival = torch.cuda.Event()
            arrival.record(torch.cuda.current_stream(found_inf.device))
        else:
            on_host = found_inf.clone()
        self._skip = _Skip(on_host, arrival, self.groups, self._counted)

    def settle(self) -> None:
        """Wait for the last ``found_inf``, and take back the step count if the step was skipped."""
        if self._skip is None:
            return
        skip, self._skip = self._skip, None
        if skip.arrival is not None:
            skip.arrival.synchronize()
        if skip.found_inf.item():
            for group in skip.groups:
                group.step -= 1
            self._steps -= skip.counted
            self._version = self._steps._version
