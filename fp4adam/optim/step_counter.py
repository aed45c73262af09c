"""Step counts of parameters and the scalars that follow from them, on the host or on the device.

Both counters have the same methods: :class:`StepCounter` for all optimizers, and
:class:`DeviceCounter` for capturable ones, whose steps a CUDA graph replays without the host.
"""

import dataclasses
from collections.abc import Sequence
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from fp4adam.kernels.launch.device_tables import DeviceTables
from fp4adam.optim.adam import Scalars, adam_scalars
from fp4adam.optim.hyper_parameters import is_on_device
from fp4adam.optim.launch_group import LaunchGroup
from fp4adam.optim.state_codec import dither_origin
from fp4adam.optim.target import Target
from fp4adam.optim.update_bound import largest_update, next_ratio


@dataclasses.dataclass(eq=False)
class StepGroup:
    """Members of one parameter group with the same step count, so with the same scalars."""

    group: dict[str, Any]
    step: float
    row: int
    scalars: Scalars | None = None  # of the last step

    def advance(self) -> None:
        # Stop where the float32 counter in the state stops, so that resumed runs count alike.
        self.step = min(self.step + 1, 2.0**24)
        self.scalars = adam_scalars(self.group, self.step)

    def numbers(self, ratio: float) -> list[float]:
        """A row of scalars, with the bound of the update and the dither origin."""
        decay = abs(self.scalars.decay) if self.group["decoupled_weight_decay"] else 1.0
        dither = dither_origin(0, int(self.scalars.dither_step))
        # Two 16-bit halves, which float32 represents exactly.
        bounds = largest_update(self.scalars, ratio), decay
        return [*self.scalars[:8], dither >> 16, *bounds, dither & 0xFFFF]


class StepCounter:
    """Counts the steps of parameters on the host.

    The ``step`` tensors of the states become views of one tensor, so one operator increments them
    all. If the device skips a step, the count is taken back later.

    ``ratio``: The bound on the moments of all members; see ``update_bound``.
    """

    launches = ()

    def __init__(self, members: Sequence[Target], ratio: float) -> None:
        self._members = members
        steps = [member.state["step"].item() for member in members]
        self._steps = torch.tensor(steps, dtype=torch.float32, device="cpu")
        for member, step in zip(members, self._steps, strict=True):
            member.state["step"] = step
        self._version = self._steps._version
        self._ratio = ratio
        self.groups: list[StepGroup] = []  # what takes part
        self.rows: list[int] = []  # for each member the index of its group there
        # ``found_inf`` of the last step on the host, and the event of its arrival.
        self._skip: tuple[Tensor, torch.cuda.Event | None] | None = None
        # The largest count of members that take no part, by the id of their parameter group.
        self._absent: dict[int, float] = {}

    def fits(self) -> bool:
        """Whether no other code has written to the counters."""
        self.settle()
        return self._steps._version == self._version

    def regroup(self, present: list[bool]) -> None:
        """Set which members take part from this step on; may be repeated if it is interrupted."""
        self._counted = torch.tensor(present, dtype=torch.float32, device="cpu")
        groups: dict[tuple[int, float], StepGroup] = {}
        self.rows, self._absent = [0] * len(present), {}
        for i, (member, step) in enumerate(zip(self._members, self._steps.tolist(), strict=True)):
            own = id(member.group)
            if not present[i]:
                self._absent[own] = max(self._absent.get(own, step), step)
                continue
            new = StepGroup(member.group, step, len(groups))
            self.rows[i] = groups.setdefault((own, step), new).row
        self.groups = list(groups.values())

    def latest(self) -> dict[int, Any]:
        """The largest count of the members of each parameter group, by the id of the group."""
        latest = dict(self._absent)
        for group in self.groups:
            key = id(group.group)
            latest[key] = max(latest.get(key, group.step), group.step)
        return latest

    def advance(self, found_inf: Tensor | None) -> None:
        """Count one step for the members that take part, unless ``found_inf`` is not 0."""
        for group in self.groups:
            group.advance()
        # It never falls, as it is that of members without a gradient, too.
        ratios = (next_ratio(self._ratio, group.scalars) for group in self.groups)
        self._ratio = max(self._ratio, *ratios)
        self._steps += self._counted
        self._version = self._steps._version
        if found_inf is None:
            return
        on_host, arrival = torch.empty(1, device="cpu", pin_memory=found_inf.is_cuda), None
        on_host.copy_(found_inf.reshape(1), non_blocking=True)
        if found_inf.is_cuda:
            arrival = torch.cuda.Event()
            arrival.record(torch.cuda.current_stream(found_inf.device))
        self._skip = on_host, arrival

    def settle(self) -> None:
        """Wait for the last ``found_inf``, and take back the step count if the step was skipped."""
        if self._skip is None:
            return
        (found_inf, arrival), self._skip = self._skip, None
        if arrival is not None:
            arrival.synchronize()
        if found_inf.item():
            for group in self.groups:
                group.step -= 1
            self._steps -= self._counted
            self._version = self._steps._version

    def numbers(self) -> list[float]:
        """The rows of scalars that the tables take."""
        return [*chain.from_iterable(group.numbers(self._ratio) for group in self.groups)]

    def launch(self, part: int, tables: DeviceTables, found_inf: Tensor) -> None:
        """Count and compute scalars on a device, unless ``found_inf`` is not 0 or the host does."""


class DeviceCounter:
    """Counts the steps of parameters on their devices.

    Each has a row of scalars of its own, because only the device knows which counts are equal. No
    launch steps ``empty`` members; ``parts`` are the tables, with the launches that read them.
    """

    def __init__(
        self, parts: list[tuple[DeviceTables, list[LaunchGroup]]], empty: list[Target]
    ) -> None:
        launched = [[m for group in groups for m in group.members] for _, groups in parts]
        self._members = [*chain.from_iterable(launched), *empty]
        self._empty: list[Target] = []  # of those that take part
        self._groups = hyper_groups(self._members)
        rows = {id(group): row for row, group in enumerate(self._groups)}
        self.launches = [
            _scalars_launch(tables, members, [rows[id(m.group)] for m in members])
            for (tables, _), members in zip(parts, launched, strict=True)
        ]
        self.rows = [*chain.from_iterable(map(range, map(len, launched))), *[0] * len(empty)]
        self.groups: list[dict[str, Any]] = []

    def fits(self) -> bool:
        return True  # the device reads the counts at every step, whoever wrote them

    def latest(self) -> dict[int, Any]:
        return {id(m.group): m.state["step"] for m in reversed(self._members)}

    def regroup(self, present: list[bool]) -> None:
        stepped = [*compress(self._members, present)]
        self.groups = hyper_groups(stepped)
        self._empty = [m for m in stepped if not m.param.numel()]

    def advance(self, found_inf: Tensor | None) -> None:
        for member in self._empty:  # launches count the others
            step = member.tensors["step"]
            if found_inf is None:
                step += 1
            else:
                step += found_inf.reshape(()).to(step.device, non_blocking=True) == 0

    def settle(self) -> None:
        """Nothing: the device does not count a step that it skips."""

    def numbers(self) -> list[float]:
        numbers: list[float] = []
        for group in self._groups:
            numbers += [0.0 if is_on_device(x) else float(x) for x in _hyper_parameters(group)]
            numbers.append(-1.0 if group["maximize"] else 1.0)
            numbers += float(group["bias_correction"]), float(group["decoupled_weight_decay"])
        return numbers

    def launch(self, part: int, tables: DeviceTables, found_inf: Tensor) -> None:
        for row, group in zip(tables.hyper, self._groups, strict=True):
            for slot, value in zip(row, _hyper_parameters(group), strict=False):
                if is_on_device(value):
                    slot.copy_(value.reshape(()), non_blocking=True)
        self.launches[part](found_inf)


def hyper_groups(members: Sequence[Target]) -> list[dict[str, Any]]:
    """The parameter groups of these members, each once."""
    return [*{id(m.group): m.group for m in members}.values()]


def _hyper_parameters(group: dict[str, Any]) -> tuple:
    return group["lr"], *group["betas"], group["eps"], group["weight_decay"]


def _scalars_launch(tables: DeviceTables, members: list[Target], rows: list[int]) -> Any:
    from fp4adam.kernels.step_scalars import step_scalars  # Triton is slow to import

    device = tables.device
    launch = step_scalars(
        tables.table,
        tables.hyper,
        torch.tensor(rows, dtype=torch.int32, device=device),
        torch.tensor([m.tensors["step"].data_ptr() for m in members], device=device),
        tables.scalars,
    )
    if device.type == "cuda":
        with torch.cuda.device(device):
            launch.compile(*tables.signals(None, None, None)[2:])
    return launch
