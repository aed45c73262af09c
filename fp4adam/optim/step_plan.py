"""The plan of a step: built once, and reused until something that it depends on changes.

Most steps repeat the one before, with the same parameters and states at the same addresses and new
gradients. :meth:`StepPlan.fits` checks this on the tensors themselves, without running Python code
per parameter. Then only the scalars and the addresses of the gradients are new.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from itertools import chain, compress, islice
from operator import not_

import torch
from torch import Tensor

from fp4adam.interop.borrowed_tensor import ScaleWriteback
from fp4adam.optim.adam import adam_scalars
from fp4adam.optim.checks import check_capturable, check_in_use
from fp4adam.optim.device_counter import DeviceCounter, hyper_groups
from fp4adam.optim.launch_group import LaunchGroup, make_launches
from fp4adam.optim.memory_note import WriteNote, version
from fp4adam.optim.operators import step_by_operators
from fp4adam.optim.param_state import ParamState
from fp4adam.optim.shared_amaxes import SharedAmaxes, quantized_after_step
from fp4adam.optim.step_counter import StepCounter
from fp4adam.optim.update_bound import measured_ratio, ratio_after
from fp4adam.optim.watch import Watch
from fp4adam.tensors.quantized_tensor import QuantizedTensor

ReadGrad = Callable[[Tensor], Tensor | None]


class StepPlan:
    """The launches of a step, and the parameters that are stepped by torch operators.

    Args:
        members: The parameters that the step may update, with gradients or without.
        outsiders: All other parameters; they have no gradients while the plan holds.
        structure: Everything else that the step depends on; see :meth:`fits`.
        read_grad: Returns a parameter's gradient, or None.
        grads_vary: Whether a gradient's shape or device may differ from its parameter's.
        takes_kernels: Whether kernels should step a member if they can.
        capturable: Whether step counts and scalars stay on the device, so that a CUDA graph can
            replay the step.

    Raises:
        RuntimeError: If ``capturable`` and kernels cannot step a member.
    """

    def __init__(
        self,
        members: list[ParamState],
        outsiders: list[Tensor],
        structure: list,
        read_grad: ReadGrad,
        grads_vary: bool,
        takes_kernels: Callable[[ParamState], bool],
        capturable: bool = False,
    ) -> None:
        self._outsiders = outsiders
        self._structure = structure
        self._read_grad = read_grad
        self._takes_kernels = takes_kernels
        peers: dict[Hashable, list[ParamState]] = defaultdict(list)
        for member in members:
            peers[member.scales].append(member)
        later = {s for s, p in peers.items() if quantized_after_step(p, read_grad, takes_kernels)}
        members = [m._replace(quantized_after_step=m.scales in later) for m in members]
        kinds: dict[tuple, list[ParamState]] = defaultdict(list)
        self._by_operators: list[ParamState] = []
        for member in members:
            grad = read_grad(member.owner)
            if takes_kernels(member) and member.fits_a_launch(grad):
                kinds[member.launch_key(grad)].append(member)
            else:
                self._by_operators.append(member)
        by_device: dict[torch.device, list[LaunchGroup]] = defaultdict(list)
        for (device, kind, _), alike in kinds.items():
            by_device[device].append(LaunchGroup(kind, alike, read_grad, grads_vary))
        if capturable:
            for member in self._by_operators:
                check_capturable(member.param, read_grad(member.owner))
        n_hyper = len(hyper_groups(members)) if capturable else 0
        self._parts = [
            (make_launches(device, groups, len(members), n_hyper), groups)
            for device, groups in by_device.items()
        ]
        self._groups = [group for _, groups in self._parts for group in groups]
        launched = chain.from_iterable(group.members for group in self._groups)
        self.members = [*launched, *self._by_operators]
        self._scales_of_others = ScaleWriteback([])
        self._amaxes = SharedAmaxes(members, self._groups, read_grad)
        # Other ranks rely on these bounds, so they are measured again after any foreign write to
        # the moments.
        self._bounded = [
            m.tensors[name]
            for group in self._groups
            if group.kind.groups and group.kind.quantizer.layout.tensor_scale == "current"
            for m in group.members
            for name in ("exp_avg", "exp_avg_sq")
        ]
        self._bounded_versions = list(map(version, self._bounded))
        self._capturable, self._has_run = capturable, False
        self._counter: StepCounter | DeviceCounter
        if capturable:
            self._counter = DeviceCounter(self._parts, self._by_operators)
        else:
            self._counter = StepCounter(self.members, list(map(_ratio, self.members)))
        self._watch = Watch(self.members, ("step",) if capturable else ())
        self._rows_of_parts: list[list[int]] = [[] for _ in self._parts]
        self._rows_by_operators: list[int] = []
        self._present: list[bool] = []

    def notes(self) -> dict[Tensor, WriteNote]:
        """The memory and versions of all members, as the last step left them."""
        return self._watch.notes()

    def settle(self) -> None:
        """Wait for the last ``found_inf``, and take back the step count if the step was skipped."""
        if isinstance(self._counter, StepCounter):
            self._counter.settle()

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph can record the step: it has run, so all its kernels are loaded."""
        return self._capturable and self._has_run

    @functools.cached_property
    def memory_of_replays(self) -> list:
        """What a captured step reads besides parameters, states and gradients, to keep it alive."""
        launches = [group.launch for group in self._groups]
        return [[tables for tables, _ in self._parts], launches, self._counter.launches]

    def fits(self, structure: list) -> bool:
        """Whether the plan is still valid for the current parameters, states and gradients.

        Args:
            structure: Everything else that the step depends on; compared with the plan's.
        """
        return (
            structure == self._structure
            and self._watch.is_unchanged()
            and self._counter.fits()
            and list(map(version, self._bounded)) == self._bounded_versions
            and all(grad is None for grad in map(self._read_grad, self._outsiders))
            and all(group.takes_grads() for group in self._groups)
            and not any(map(self._could_take_kernels, self._by_operators))
        )

    def _could_take_kernels(self, member: ParamState) -> bool:
        return self._takes_kernels(member) and member.fits_a_launch(self._read_grad(member.owner))

    def gradients_for_operators(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters that torch operators step now, each with its gradient."""
        params = [m.owner for m in self._by_operators]
        pairs = zip(params, map(self._read_grad, params), strict=True)
        return [(param, grad) for param, grad in pairs if grad is not None]

    def run(
        self,
        grad_scale: Tensor | None,
        clip: dict[torch.device, Tensor],
        found_inf: Tensor | None,
        captures: bool = False,
    ) -> None:
        """Run the step; call :meth:`fits` right before, and only if it is true.

        Args:
            grad_scale: One-element tensor that divides the gradients, or None.
            clip: One-element tensor per device that multiplies them after that.
            found_inf: One-element tensor, or None; if it is not 0, nothing changes. The kernels
                read it on the device; only the torch operators make the host wait for it.
            captures: Whether a CUDA graph records the step.
        """
        grads = [self._read_grad(m.owner) for m in self._by_operators]
        self._regroup(grads)
        if not self._counter.groups:
            return
        if isinstance(self._counter, DeviceCounter):
            self._launch_all(grad_scale, clip, found_inf, captures)
            self._counter.count_empty(found_inf)
        else:
            self._run_counted(self._counter, grads, grad_scale, clip, found_inf)
        # Kernel writes do not raise versions, which autograd and other observers rely on.
        self._watch.note_own_write(self._present)
        self._bounded_versions = list(map(version, self._bounded))
        self._has_run = True

    def _run_counted(
        self,
        counter: StepCounter,
        grads: list[Tensor | None],
        grad_scale: Tensor | None,
        clip: dict[torch.device, Tensor],
        found_inf: Tensor | None,
    ) -> None:
        """Run a step that the host counts; ``grads`` are those for torch operators."""
        waits = found_inf is not None and any(grad is not None for grad in grads)
        skipped = waits and bool(found_inf.item())
        counter.advance()
        self._scales_of_others.read()
        launches = self._launch_all(grad_scale, clip, found_inf)
        for member, grad, row in zip(
            self._by_operators, grads, self._rows_by_operators, strict=True
        ):
            if grad is not None and not skipped:
                scalars = counter.groups[row].scalars
                step_by_operators(member, grad, scalars, grad_scale, clip.get(grad.device))
        self._amaxes.finish(launches, skipped)
        self._scales_of_others()
        if found_inf is not None:
            counter.may_have_skipped(found_inf)

    def _launch_all(
        self,
        grad_scale: Tensor | None,
        clip: dict[torch.device, Tensor],
        found_inf: Tensor | None,
        captures: bool = False,
    ) -> list[tuple]:
        """Upload what has changed and launch the kernels on all devices.

        Returns:
            The launches that wait for other ranks, each with its signals.
        """
        numbers = self._counter.numbers()
        launches = []
        for i, (tables, groups) in enumerate(self._parts):
            addresses = [*chain.from_iterable(group.grads for group in groups)]
            tables.upload(addresses, self._rows_of_parts[i], numbers, captures)
            with torch.cuda.device_of(tables.table):
                signals = tables.signals(grad_scale, clip.get(tables.device), found_inf)
                if isinstance(self._counter, DeviceCounter):
                    self._counter.count(i, tables, signals[2])
                for group in groups:
                    if group.kind.groups:
                        group.launch.prepare(*signals)
                        launches.append((group.launch, signals))
                    else:
                        group.launch(*signals)
        return launches

    def _regroup(self, grads_for_operators: list[Tensor | None]) -> None:
        """Update everything that depends on which members take part, if that has changed."""
        present: list[bool] = []
        for group in self._groups:
            present += group.present or [True] * len(group.members)
        present += [grad is not None for grad in grads_for_operators]
        if present != self._present:
            for member in compress(self.members, map(not_, present)):
                check_in_use(member.owner)
        if not self._counter.regroup(present):
            return
        self._present = present
        written = [m.borrowed for m in compress(self.members, present) if m.updates]
        self._scales_of_others = ScaleWriteback(
            [borrowed for borrowed in written if borrowed is not None]
        )
        sizes = [sum(len(group.members) for group in groups) for _, groups in self._parts]
        rows = iter(self._counter.rows)
        self._rows_of_parts = [[*islice(rows, size)] for size in sizes]
        self._rows_by_operators = [*rows]


def _ratio(member: ParamState) -> float:
    """The bound on a member's moments; measured if other ranks rely on it, which syncs the device.

    See ``update_bound``. Inf if it has to be certain but the moments are stored rounded.
    """
    step = member.state["step"].item()
    previews = (
        isinstance(member.param, QuantizedTensor)
        and member.param.quantizer.layout.tensor_scale == "current"
    )
    if step == 0 or not (member.shards and previews) or member.quantized_after_step:
        return ratio_after(step, adam_scalars(member.group, 1))
    _, exp_avg, exp_avg_sq = member.codecs
    if not (exp_avg.exact and exp_avg_sq.exact):
        return math.inf
    moments = member.tensors["exp_avg"], member.tensors["exp_avg_sq"]
    return measured_ratio(*moments, float(member.group["eps"]))
