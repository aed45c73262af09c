"""Step counts and scalars of a capturable optimizer, which stay on the device.

The host neither knows nor computes them, so a CUDA graph can replay the step. Each parameter has a
row of scalars of its own, because only the device knows which counts are equal.
"""

from collections.abc import Sequence
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from fp4adam.kernels.launch.device_tables import DeviceTables
from fp4adam.optim.hyper_parameters import is_on_device
from fp4adam.optim.launch_group import LaunchGroup
from fp4adam.optim.target import Target


class DeviceCounter:
    """Counts the steps of parameters on their devices; the counterpart of ``StepCounter``.

    Args:
        parts: The tables of each device, with the launches that read them.
        empty: Members without elements, which no launch steps.

    Attributes:
        groups: The parameter groups of the members that take part.
        rows: For each member its row of scalars: its own row of the tensor table.
        launches: The launch that computes the scalars of each device.
    """

    def __init__(
        self, parts: list[tuple[DeviceTables, list[LaunchGroup]]], empty: list[Target]
    ) -> None:
        launched = [[m for group in groups for m in group.members] for _, groups in parts]
        self._members = [*chain.from_iterable(launched), *empty]
        self._first_empty = len(self._members) - len(empty)
        self._groups = hyper_groups(self._members)
        rows = {id(group): row for row, group in enumerate(self._groups)}
        self.launches = [
            _scalars_launch(tables, members, [rows[id(m.group)] for m in members])
            for (tables, _), members in zip(parts, launched, strict=True)
        ]
        self.rows = [*chain.from_iterable(map(range, map(len, launched))), *[0] * len(empty)]
        self.groups: list[dict[str, Any]] = []
        self._present: list[bool] = []

    def fits(self) -> bool:
        """True: the device reads the counts at every step, whoever wrote them."""
        return True

    def latest(self) -> dict[int, Tensor]:
        """The step count of one member of each parameter group, by the id of the group."""
        return {id(m.group): m.state["step"] for m in reversed(self._members)}

    def regroup(self, present: list[bool]) -> None:
        """Set which members take part from this step on; may be repeated if it is interrupted."""
        self._present = present
        self.groups = hyper_groups([*compress(self._members, present)])

    def numbers(self) -> list[float]:
        """The hyper-parameters of all groups, one row each; 0 where a tensor holds one."""
        numbers: list[float] = []
        for group in self._groups:
            values = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
            numbers += [0.0 if is_on_device(x) else float(x) for x in values]
            numbers.append(-1.0 if group["maximize"] else 1.0)
            numbers += float(group["bias_correction"]), float(group["decoupled_weight_decay"])
        return numbers

    def count(self, part: int, tables: DeviceTables, found_inf: Tensor) -> None:
        """Count one step on a device unless ``found_inf`` is not 0, and compute its scalars there.

        Args:
            part: The number of the device among ``parts``.
            tables: Its tables, with the gradients and :meth:`numbers` of this step.
            found_inf: float32 [1] on the device.
        """
        for row, group in zip(tables.hyper, self._groups, strict=True):
            values = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
            for slot, value in zip(row[: len(values)].unbind(), values, strict=True):
                if is_on_device(value):
                    slot.copy_(value.reshape(()), non_blocking=True)
        self.launches[part](found_inf)

    def count_empty(self, found_inf: Tensor | None) -> None:
        """Count one step for members without elements that take part."""
        for member in compress(
            self._members[self._first_empty :], self._present[self._first_empty :]
        ):
            step = member.tensors["step"]
            if found_inf is None:
                step += 1
            else:
                step += found_inf.reshape(()).to(step.device, non_blocking=True) == 0


def hyper_groups(members: Sequence[Target]) -> list[dict[str, Any]]:
    """The parameter groups of these members, each once."""
    return [*{id(m.group): m.group for m in members}.values()]


def _scalars_launch(tables: DeviceTables, members: list[Target], rows: list[int]) -> Any:
    """The launch that counts the steps of ``members``, whose groups have these rows."""
    from fp4adam.kernels.step_scalars import step_scalars  # Triton is slow to import

    device = tables.device
    firsts = [m.first_element if m.is_dithered else 0 for m in members]
    launch = step_scalars(
        tables.table,
        tables.hyper,
        torch.tensor(rows, dtype=torch.int32, device=device),
        torch.tensor(firsts, dtype=torch.int64, device=device),
        torch.tensor([m.tensors["step"].data_ptr() for m in members], device=device),
        tables.scalars,
    )
    if device.type == "cuda":
        with torch.cuda.device(device):
            launch.compile(*tables.signals(None, None, None)[2:])
    return launch
