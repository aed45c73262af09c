"""The plan of a step: built once, and reused until something that it depends on changes.

Most steps repeat the one before, with the same parameters and states at the same addresses and new
gradients. :meth:`StepPlan.fits` checks this on the tensors themselves, without running Python code
per parameter. Then only the scalars and the addresses of the gradients are new.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, compress, islice
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import is_dtensor, local
from fp4adam.interop.borrowed_tensor import ScaleWriteback, source_columns
from fp4adam.optim.adam import adam_scalars, grad_factor
from fp4adam.optim.checks import check_capturable, check_gradient
from fp4adam.optim.factor_renewal import Given, renewals
from fp4adam.optim.launch_group import LaunchGroup, make_launches
from fp4adam.optim.options import Options
from fp4adam.optim.quantize_after_step import QuantizeAfterStep, quantized_after_step
from fp4adam.optim.state_codec import FACTORED, INT8
from fp4adam.optim.state_tensor import StateTensor
from fp4adam.optim.step_counter import DeviceCounter, StepCounter, hyper_groups
from fp4adam.optim.target import LaunchKey, ReadGrad, Target, together
from fp4adam.optim.update_bound import measured_ratio, ratio_after
from fp4adam.tensors.fingerprint import Column, Fingerprint
from fp4adam.tensors.quantized_tensor import QuantizedTensor

_local = attrgetter("_local_tensor")
# How to read the tensors whose versions cover a quantized tensor.
_versioned = attrgetter("_shared.tensors.versioned")


class StepPlan:
    """The launches of a step, and the parameters that are stepped by torch operators.

    The step may update ``members``, with gradients or without; ``outsiders`` have none while the
    plan holds.
    """

    has_run = False  # all kernels have been loaded then, so a CUDA graph can record them

    def __init__(
        self, members: list[Target], outsiders: list[Tensor], read_grad: ReadGrad, options: Options
    ) -> None:
        self._outsiders = outsiders
        self._read_grad = read_grad
        self._options = options
        for peers in together(members):
            later = quantized_after_step(peers, read_grad)
            for member in peers:
                member.quantized_after_step = later
        launched: dict[LaunchKey, list[Target]] = defaultdict(list)
        self._by_operators: list[Target] = []
        for member in members:
            grad = read_grad(member.owner)
            if member.fits_a_launch(grad):
                launched[member.launch_key(grad)].append(member)
            else:
                self._by_operators.append(member)
        groups = [LaunchGroup(key, alike, read_grad) for key, alike in launched.items()]
        if options.capturable:
            for member in self._by_operators:
                check_capturable(member.param, read_grad(member.owner))
        n_hyper = len(hyper_groups(members)) if options.capturable else 0
        self._parts = [
            (make_launches(alike[0].key.device, alike, len(members), n_hyper), alike)
            for alike in together(groups, attrgetter("key.device"))
        ]
        self._groups = [group for _, groups in self._parts for group in groups]
        self.members = [m for group in self._groups for m in group.members] + self._by_operators
        self._after = QuantizeAfterStep(members, self._groups, read_grad)
        self._renewals = renewals(members, self._groups)
        # Where nothing can be written again, other ranks or int8 masters rely on the bounds of the
        # previews. So these look at everything after any foreign write to a state.
        bounded = [
            m.tensors[name]
            for group in self._groups
            for m in group.members
            if (group.key.groups or m.master.codec is INT8)
            and m.param.quantizer.layout.tensor_scale == "current"
            for name in m.state_names
        ]
        self.counter: StepCounter | DeviceCounter
        if options.capturable:
            self.counter = DeviceCounter(self._parts, self._by_operators)
        else:
            ratio = max(map(_ratio, self.members), default=0.0)
            self.counter = StepCounter(self.members, ratio)
        self._fingerprint = _weights(self.members)
        self._states = _states(self.members, bounded)
        launches = [group.launch for group in self._groups]
        # What a captured step reads besides parameters, states and gradients.
        self.memory_of_replays = [[t for t, _ in self._parts], launches, self.counter.launches]
        self._present: list[bool] | None = None

    def fits(self, are_shown: bool) -> bool:
        """Whether the plan is still valid for the current parameters, states and gradients.

        ``are_shown``: Whether other code may hold the states, and so may have changed them.
        """
        return (
            self._fingerprint.unchanged()
            and (not are_shown or self._states.unchanged())
            and self.counter.fits()
            and all(grad is None for grad in map(self._read_grad, self._outsiders))
            and all(group.takes_grads() for group in self._groups)
            and not any(m.fits_a_launch(self._read_grad(m.owner)) for m in self._by_operators)
        )

    def check_gradients(self) -> None:
        """Raise if operators cannot step a parameter with its gradient; kernels never see it."""
        for member in self._by_operators:
            grad = self._read_grad(member.owner)
            if grad is not None:
                check_gradient(self._options.name, member.owner, grad)

    def run(
        self,
        clip: Tensor | None,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        captures: bool = False,
    ) -> None:
        """Run the step; call :meth:`fits` right before, and only if it is true.

        If ``found_inf`` is not 0, nothing changes. The kernels read it on the device; only the
        torch operators make the host wait for it.
        """
        grads = [self._read_grad(m.owner) for m in self._by_operators]
        self._regroup(grads)
        if not self.counter.groups:
            return
        # If the step is interrupted, parameters are compared with their masters.
        self._fingerprint.invalidate()
        # Means by column are of all ranks, also of those that have no rows.
        given = [grad is not None and (self._renewals or grad.numel()) for grad in grads]
        skipped = found_inf is not None and any(given) and bool(found_inf.item())
        self.counter.advance(found_inf)
        signals = {
            tables.device: tables.signals(grad_scale, clip, found_inf) for tables, _ in self._parts
        }
        means: dict[Target, Given] = {}
        with self._scales_of_others:
            launches = self._launch_all(signals, captures)
            by_operators = zip(self._by_operators, grads, self._rows_by_operators, strict=True)
            for member, grad, row in () if skipped else compress(by_operators, given):
                scalars = self.counter.groups[row].scalars
                factors = (x if x is None else x.to(grad.device) for x in (grad_scale, clip))
                factor = grad_factor(scalars, *factors)
                if grad.numel():
                    member.update(grad, scalars, factor)
                if member.codecs["exp_avg_sq"] is FACTORED:
                    own = StateTensor.of(member.tensors, "exp_avg_sq", FACTORED)
                    means[member] = own, grad, (scalars.beta2, scalars.one_minus_beta2, factor)
            self._after.finish(launches, skipped)
            for renewal in self._renewals:
                renewal.run(signals, means)
        # Kernel writes do not raise versions, which autograd and other observers rely on.
        loose = chain.from_iterable(_versioned(m.param) for m in self._loose)
        torch.autograd.graph.increment_version([*self._written, *loose])
        self._fingerprint.record()
        self.has_run = True

    def _launch_all(self, signals: dict[torch.device, tuple], captures: bool) -> list[tuple]:
        """Launch the kernels; returns those that wait for other ranks, with their signals."""
        launches: list[tuple] = []
        numbers = self.counter.numbers() if self._parts else []
        for i, (tables, groups) in enumerate(self._parts):
            addresses = [*chain.from_iterable(group.grads for group in groups)]
            tables.upload(addresses, self._rows_of_parts[i], numbers, captures)
            given = signals[tables.device]
            with torch.cuda.device_of(tables.table):
                self.counter.launch(i, tables, given[2])
                for group in groups:
                    if group.key.groups:
                        group.launch.prepare(*given)
                        launches.append((group.launch, given))
                    else:
                        group.launch(*given)
        return launches

    def _regroup(self, grads_for_operators: list[Tensor | None]) -> None:
        present = [*chain.from_iterable(group.present for group in self._groups)]
        present += [grad is not None for grad in grads_for_operators]
        if present == self._present:
            return
        # Known again at the end, so that an interrupted change is made once more.
        self._present = None
        self.counter.regroup(present)
        stepped = [*compress(self.members, present)]
        self._written = [m.owner for m in stepped]
        self._written += [m.param for m in stepped if m.param is not m.owner]
        quantized = [m for m in stepped if isinstance(m.param, QuantizedTensor)]
        # Read again at every step, because lists of inner tensors would keep them alive.
        self._loose = [m for m in quantized if _is_loose(m) and m.borrowed is None]
        kept = [m for m in quantized if m not in self._loose]
        self._written += chain.from_iterable(_versioned(m.param) for m in kept)
        written = [m.borrowed for m in stepped if m.updates and m.borrowed is not None]
        self._scales_of_others = ScaleWriteback(written)
        rows = iter(self.counter.rows)
        self._rows_of_parts = [[*islice(rows, len(tables.table))] for tables, _ in self._parts]
        self._rows_by_operators = [*rows]
        self._present = present


def _is_loose(member: Target) -> bool:
    """Whether inner tensors have versions of their own; they may get new memory without one."""
    return member.param._shared.tensors.counter is None


def _weights(members: Sequence[Target]) -> Fingerprint:
    """The fingerprint of all parameters; their marks follow it.

    The tensors must be where the kernels look for them. Writes matter only to parameters that have
    to agree with a master or a remainder: one that Adam updates directly is its own value, and
    the next step continues from whatever it holds.
    """
    columns: list[tuple[Column, list[Target]]] = []  # with those whose marks follow it

    def add(own: list[Target], marks: bool = True, **how: Any) -> None:
        column = Column([m.owner for m in own], versioned=marks, **how)
        columns.append((column, own if marks else []))

    for here in together(members, lambda m: is_dtensor(m.owner)):
        sharded = is_dtensor(here[0].owner)
        borrowed = [m for m in here if m.borrowed]
        for column, which in source_columns([(m.borrowed, m.owner) for m in borrowed], sharded):
            columns.append((column, [borrowed[i] for i in which if column.versioned]))
        own = [m for m in here if not m.borrowed]
        quantized = [m for m in own if isinstance(m.param, QuantizedTensor)]
        storage = "_local_tensor._shared.tensors." if sharded else "_shared.tensors."
        counter, versioned = attrgetter(storage + "counter"), attrgetter(storage + "versioned")
        # A counter belongs to one storage and holds no memory.
        add([m for m in quantized if not _is_loose(m)], read=counter, same=True)
        add([m for m in quantized if _is_loose(m)], read=versioned, chained=True, placed=True)
        plain = [m for m in own if not isinstance(m.param, QuantizedTensor)]
        noted = [m for m in plain if m.master.name]
        others = [m for m in plain if not m.master.name]
        if sharded:
            # An operation on a DTensor raises its own version, but not the local tensor's.
            add(noted)
        add(noted, read=_local if sharded else None, placed=True)
        add(others, False, read=_local if sharded else None, placed=True)
    fingerprint = Fingerprint(column for column, _ in columns)
    indices: dict[Target, list[int]] = defaultdict(list)
    for (_, own), spans in zip(columns, fingerprint.spans(), strict=True):
        for member, span in zip(own, spans, strict=True):
            indices[member] += span
    for member, found in indices.items():
        member.mark.follow(fingerprint.versions, found)
    return fingerprint


def _states(members: Sequence[Target], bounded: list[Tensor]) -> Fingerprint:
    columns = []
    for alike in together(members, lambda m: (is_dtensor(m.owner), m.state_names)):
        read = itemgetter("step", *alike[0].state_names)
        then = local if is_dtensor(alike[0].owner) else None
        columns.append(Column([m.state for m in alike], read, True, then, same=True, placed=True))
    return Fingerprint([*columns, Column(bounded, versioned=True)])  # kernels raise no versions


def _ratio(member: Target) -> float:
    """The bound on a member's moments; measured if other ranks rely on it, which syncs the device.

    See ``update_bound``. Inf if it has to be certain but the moments are stored rounded.
    """
    step, shares = member.state["step"].item(), member.shards and not member.quantized_after_step
    if step == 0 or not shares or member.param.quantizer.layout.tensor_scale != "current":
        return ratio_after(step, adam_scalars(member.group, 1))
    if not all(codec.exact for codec in member.codecs.values()):
        return math.inf
    moments = member.tensors["exp_avg"], member.tensors["exp_avg_sq"]
    return measured_ratio(*moments, float(member.group["eps"]))
