"""What a step does, worked out once and kept while nothing that it depends on changes.

Most steps are like the one before: the same parameters and states at the same addresses, and new
gradients. :meth:`StepPlan.fits` finds that out by comparing lists that builtins make, without
Python code per parameter. Then only the scalars and the gradients' addresses are new.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from itertools import chain, compress, islice
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp4adam.distributed.dtensor import local
from fp4adam.distributed.scale_exchange import AmaxExchange, Exchanged, ShardCast
from fp4adam.formats.scale_groups import write_together
from fp4adam.interop.borrowed_tensor import ScaleWriteback
from fp4adam.kernels.launch.device_tables import DeviceTables
from fp4adam.optim.adam import Scalars, adam_scalars
from fp4adam.optim.launch_group import FusedBatch, Member
from fp4adam.optim.state_codec import dither_origin
from fp4adam.optim.step_kernels import Listed, NVFP4Launch, fused_launch
from fp4adam.optim.update_bound import largest_update, measured_ratio, next_ratio, ratio_after
from fp4adam.tensors.quantized_tensor import QuantizedTensor

_version = attrgetter("_version")
_storage = attrgetter("_shared.tensors")
_local = attrgetter("_local_tensor")
_noted = attrgetter("writes")

# How a member without kernels is stepped: the member, its gradient, scalars and signals.
Operators = Callable[[Member, Tensor, Scalars, Tensor | None, Tensor | None], None]


def _writes(param: QuantizedTensor) -> int:
    return sum(inner._version for inner in _storage(param).existing().values())


class Cohort:
    """Members of one group with as many steps behind them: they share the scalars of a step.

    Attributes:
        first_element: Index of the first one of each in its flattened parameter, if that matters.
        ratio: Bounds their moments; see ``update_bound``.
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
        self.step += 1
        self.scalars = adam_scalars(self.group, self.step)
        self.ratio = next_ratio(self.ratio, self.scalars)


class Skip(NamedTuple):
    """A step that the device may have left out: where it says so, and what has been counted."""

    found_inf: Tensor
    arrival: "torch.cuda.Event | None"
    cohorts: list[Cohort]
    counted: Tensor


class StepPlan:
    """The launches of a step, and the parameters that take plain operators.

    Args:
        members: What the step may update, with gradients or without.
        outsiders: All other parameters; they have no gradients while the plan holds.
        structure: What else the step depends on; see :meth:`fits`.
        read_grad: Gives a parameter's gradient or None.
        grads_vary: Whether gradients may be of other shapes and devices than their parameters.
        takes_kernels: Whether kernels are to step a member, provided they can.
    """

    def __init__(
        self,
        members: list[Member],
        outsiders: list[Tensor],
        structure: list,
        read_grad: Callable[[Tensor], Tensor | None],
        grads_vary: bool,
        takes_kernels: Callable[[Member], bool],
    ) -> None:
        self._outsiders = outsiders
        self._structure = structure
        self._read_grad = read_grad
        self._takes_kernels = takes_kernels
        mates: dict[Hashable, list[Member]] = defaultdict(list)
        for member in members:
            mates[member.scales].append(member)
        apart = {scales for scales, group in mates.items() if self._cast_apart(group)}
        members = [m._replace(casts_apart=m.scales in apart) for m in members]
        kinds: dict[tuple, list[Member]] = defaultdict(list)
        self._unfused: list[Member] = []
        for member in members:
            grad = read_grad(member.owner)
            if takes_kernels(member) and member.fits_a_launch(grad):
                kinds[_launch_key(member, grad)].append(member)
            else:
                self._unfused.append(member)
        by_device: dict[torch.device, list[FusedBatch]] = defaultdict(list)
        for (device, kind, _), alike in kinds.items():
            by_device[device].append(FusedBatch(kind, alike, read_grad, grads_vary))
        self._parts = [
            (_make_launches(device, batches, len(members)), batches)
            for device, batches in by_device.items()
        ]
        self._batches = [batch for _, batches in self._parts for batch in batches]
        fused = chain.from_iterable(batch.members for batch in self._batches)
        self.members = [*fused, *self._unfused]
        self._owners = [m.owner for m in self.members]
        self._borrowed = {m.owner: m.borrowed for m in self.members if m.borrowed is not None}
        self._publish = ScaleWriteback([])
        quantized = [
            isinstance(m.param, QuantizedTensor) and m.borrowed is None for m in self.members
        ]
        # What tells that something else has written to a parameter that has a master.
        self._quantized = [*compress((m.param for m in self.members), quantized)]
        self._storages = list(map(_storage, self._quantized))
        self._quantized_owners = [*compress(self._owners, quantized)]
        self._with_master = [
            m.owner
            for m, is_quantized in zip(self.members, quantized, strict=True)
            if m.has_master and not is_quantized and m.borrowed is None
        ]
        sharded = [m for m in self.members if isinstance(m.owner, DTensor)]
        self._sharded, self._locals = [m.owner for m in sharded], [m.param for m in sharded]
        self._bounded = [
            m.tensors[name]
            for batch in self._batches
            if batch.kind.group is not None
            for m in batch.members
            for name in ("exp_avg", "exp_avg_sq")
        ]
        self._share_scales(members)
        self._share_step_counters()
        self._present: list[bool] = []
        self._counted = torch.zeros(0, dtype=torch.float32)
        self._cohorts: list[Cohort] = []
        self._rows_of_parts: list[list[int]] = [[] for _ in self._parts]
        self._rows_of_unfused: list[int] = []
        self._skip: Skip | None = None

    def _cast_apart(self, mates: list[Member]) -> bool:
        """Whether members that share an amax have to be updated first, for it to be known.

        No launch can find it unless it steps all of them.
        """
        if mates[0].place is None and len(mates) == 1 or not mates[0].moves:
            return False
        grads = [self._read_grad(m.owner) for m in mates]
        return not (
            all(map(self._takes_kernels, mates))
            and all(map(Member.fits_a_launch, mates, grads))
            and len({*map(_launch_key, mates, grads)}) == 1
            and len({grad is None for grad in grads}) == 1
        )

    def _share_scales(self, members: list[Member]) -> None:
        """Make what agrees on scales with other ranks; the same, in the same order, on each."""
        together: dict[Hashable, list[Member]] = defaultdict(list)
        for member in members:
            if member.casts_apart and member.place is None:
                together[member.scales].append(member)
        self._together = [*together.values()]
        sharing = [m for m in members if m.place is not None]
        apart: dict[torch.device, list[Member]] = defaultdict(list)
        for member in sharing:
            if member.casts_apart:
                apart[member.param.device].append(member)
        self._casts = []
        exchanged: dict[int, tuple] = {}
        for alike in apart.values():
            cast = ShardCast([m.param for m in alike], [m.write_dtype for m in alike])
            self._casts.append((cast, alike))
            for member, amaxes in zip(alike, cast.exchanged, strict=True):
                exchanged[id(member.owner)] = amaxes
        for batch in self._batches:
            if batch.kind.group is not None:
                for member, slot in zip(batch.members, batch.slots, strict=True):
                    exchanged[id(member.owner)] = (batch.launch.amaxes[slot : slot + 1], [])
        groups: dict[tuple, list[Exchanged]] = defaultdict(list)
        for m in sharing:
            told = Exchanged(
                m.param._shared.global_spec, m.place, *exchanged[id(m.owner)], m.scales
            )
            groups[m.place.group, m.place.device].append(told)
        self._exchanges = [
            AmaxExchange(group, device, shards) for (group, device), shards in groups.items()
        ]

    def _share_step_counters(self) -> None:
        """Make the counters in the state views of one tensor, which one operator counts up."""
        self._step_of = [m.state["step"].item() for m in self.members]
        self._ratio_of = list(map(_ratio, self.members, self._step_of))
        self._steps = torch.tensor(self._step_of, dtype=torch.float32)
        self._step_views = list(self._steps)
        for member, step in zip(self.members, self._step_views, strict=True):
            member.state["step"] = member.tensors["step"] = step
        for batch in self._batches:
            batch.hold()
        self._note_versions()

    def _note_versions(self) -> None:
        self._master_versions = list(map(_version, self._with_master))
        self._written = list(map(_writes, self._quantized))
        for borrowed in self._borrowed.values():
            borrowed.note()
        self._bounded_versions = list(map(_version, self._bounded))
        self._steps_version = self._steps._version

    def known_writes(self) -> dict[Tensor, int]:
        """How often parameters that have masters had been written to when the last step ended."""
        plain = zip(self._with_master, self._master_versions, strict=True)
        quantized = zip(self._quantized_owners, self._written, strict=True)
        borrowed = zip(self._borrowed, map(_noted, self._borrowed.values()), strict=True)
        return dict(chain(plain, quantized, borrowed))

    def fits(self, structure: list) -> bool:
        """Whether the plan holds for parameters, states and gradients as they are now.

        Args:
            structure: Everything else that the step depends on; compared with that of the plan.
        """
        return (
            structure == self._structure
            and list(map(_storage, self._quantized)) == self._storages
            and self._steps._version == self._steps_version
            and list(map(_version, self._with_master)) == self._master_versions
            and list(map(_writes, self._quantized)) == self._written
            and list(map(_version, self._bounded)) == self._bounded_versions
            and all(map(is_, map(_local, self._sharded), self._locals))
            and all(borrowed.is_current() for borrowed in self._borrowed.values())
            and all(grad is None for grad in map(self._read_grad, self._outsiders))
            and all(batch.fits() for batch in self._batches)
            and all(map(self._fits_unfused, self._unfused, self._unfused_steps()))
        )

    def _unfused_steps(self) -> list[Tensor]:
        return self._step_views[len(self.members) - len(self._unfused) :]

    def _fits_unfused(self, member: Member, step: Tensor) -> bool:
        state = member.state
        return (
            state.get("step") is step
            and local(state.get("master_param", member.owner)) is member.value
            and state.keys() >= set(member.state_names)
            and not (
                self._takes_kernels(member) and member.fits_a_launch(self._read_grad(member.owner))
            )
        )

    def unfused_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters that take plain operators in this step, and their gradients."""
        params = [m.owner for m in self._unfused]
        pairs = zip(params, map(self._read_grad, params), strict=True)
        return [(param, grad) for param, grad in pairs if grad is not None]

    def run(
        self,
        operators: Operators,
        grad_scale: Tensor | None,
        clip: dict[torch.device, Tensor],
        found_inf: Tensor | None,
    ) -> None:
        """Make the step; :meth:`fits` has just been true.

        Args:
            operators: Steps a member without kernels.
            grad_scale: One-element tensor that gradients are divided by, or None.
            clip: By device, one-element tensors that gradients are multiplied by after that.
            found_inf: One-element tensor; if it is not 0, the device does nothing. None if members
                take operators, which cannot be skipped so.
        """
        grads = [self._read_grad(m.owner) for m in self._unfused]
        self._regroup(grads)
        if not self._cohorts:
            return
        for cohort in self._cohorts:
            cohort.advance()
        self._steps += self._counted
        rows = self._scalars_rows()
        launches = []
        for (tables, batches), rows_of_part in zip(self._parts, self._rows_of_parts, strict=True):
            addresses = [*chain.from_iterable(batch.grads for batch in batches)]
            tables.upload(addresses, rows_of_part, rows)
            with torch.cuda.device_of(tables.table):
                signals = tables.signals(grad_scale, clip.get(tables.device), found_inf)
                for batch in batches:
                    if batch.kind.group is None:
                        batch.launch(*signals)
                    else:
                        batch.launch.prepare(*signals)
                        launches.append((batch.launch, signals))
        for member, grad, row in zip(self._unfused, grads, self._rows_of_unfused, strict=True):
            if grad is not None:
                operators(
                    member, grad, self._cohorts[row].scalars, grad_scale, clip.get(grad.device)
                )
        self._finish(launches)
        # Autograd does not see what kernels write.
        changed = [*compress(self._owners, self._present), *self._locals]
        for param in self._quantized:
            changed += _storage(param).existing().values()
        torch.autograd.graph.increment_version(changed)
        self._publish()
        self._note_versions()
        if found_inf is not None:
            self._skip = _skip(found_inf, self._cohorts, self._counted)

    def _finish(self, launches: list[tuple[NVFP4Launch, tuple[Tensor, ...]]]) -> None:
        """Write what had to wait for others: of its group, and on other ranks."""
        for mates in self._together:
            if any(self._read_grad(m.owner) is not None for m in mates):
                values = [m.whole_value().to(m.write_dtype) for m in mates]
                write_together([m.param for m in mates], values)
        for cast, members in self._casts:
            cast.measure([m.whole_value() for m in members])
        for exchange in self._exchanges:
            exchange()
        for launch, signals in launches:
            with torch.cuda.device_of(launch.amaxes):
                launch(*signals)
        for cast, members in self._casts:
            cast.write([m.whole_value() for m in members])

    def _regroup(self, unfused_grads: list[Tensor | None]) -> None:
        """Make the cohorts of this step, unless those of the last one are together again."""
        present: list[bool] = []
        for batch in self._batches:
            present += batch.present or [True] * len(batch.members)
        present += [grad is not None for grad in unfused_grads]
        if present == self._present:
            return
        self._catch_up()
        self._present = present
        written = [m.borrowed for m in compress(self.members, present) if m.moves]
        self._publish = ScaleWriteback([borrowed for borrowed in written if borrowed is not None])
        self._counted = torch.tensor(present, dtype=torch.float32)
        cohorts: dict[tuple[int, float, int], Cohort] = {}
        row_of = [0] * len(present)
        for i in compress(range(len(present)), present):
            member = self.members[i]
            first_element = member.first_element if member.is_dithered else 0
            key = id(member.group), self._step_of[i], first_element
            if key not in cohorts:
                cohorts[key] = Cohort(member.group, self._step_of[i], first_element)
            cohorts[key].members.append(i)
            cohorts[key].ratio = max(cohorts[key].ratio, self._ratio_of[i])
        self._cohorts = list(cohorts.values())
        for row, cohort in enumerate(self._cohorts):
            for i in cohort.members:
                row_of[i] = row
        sizes = [sum(len(batch.members) for batch in batches) for _, batches in self._parts]
        rows = iter(row_of)
        self._rows_of_parts = [[*islice(rows, size)] for size in sizes]
        self._rows_of_unfused = [*rows]

    def _catch_up(self) -> None:
        """Write the cohorts' step counts to their members."""
        for cohort in self._cohorts:
            for i in cohort.members:
                self._step_of[i] = cohort.step
                self._ratio_of[i] = cohort.ratio

    def _scalars_rows(self) -> list[float]:
        """The rows of scalars of all cohorts, with what bounds the update and begins the dither."""
        rows: list[float] = []
        for cohort in self._cohorts:
            scalars = cohort.scalars
            decay = abs(scalars.decay) if cohort.group["adam_w_mode"] else 1.0
            dither = dither_origin(cohort.first_element, int(scalars.dither_step))
            # In two halves, which float32 holds.
            rows += *scalars[:8], dither >> 16
            rows += largest_update(scalars, cohort.ratio), decay, dither & 0xFFFF
        return rows

    def settle(self) -> None:
        """Take back the step count if the device has left out the last step."""
        if self._skip is None:
            return
        skip, self._skip = self._skip, None
        if skip.arrival is not None:
            skip.arrival.synchronize()
        if skip.found_inf.item():
            for cohort in skip.cohorts:
                cohort.step -= 1
            self._steps -= skip.counted
            self._steps_version = self._steps._version


def _ratio(member: Member, step: float) -> float:
    """What bounds the moments of a member so far; exact where other ranks rely on it."""
    if step == 0 or member.place is None or member.casts_apart:
        return ratio_after(step, adam_scalars(member.group, 1))
    if not (member.exp_avg_codec.exact and member.exp_avg_sq_codec.exact):
        return math.inf
    moments = member.tensors["exp_avg"], member.tensors["exp_avg_sq"]
    return measured_ratio(*moments, float(member.group["eps"]))


def _launch_key(member: Member, grad: Tensor | None) -> Hashable:
    """What is equal among members of a launch."""
    return member.param.device, member.kind(grad), member.state_names


def _make_launches(device: torch.device, batches: list[FusedBatch], n_members: int) -> DeviceTables:
    rows = [batch.table_rows() for batch in batches]
    tables = DeviceTables(device, [*chain.from_iterable(rows)], n_members)
    parts = tables.table.split([len(part) for part in rows])
    for batch, part in zip(batches, parts, strict=True):
        listed = Listed(batch.shapes, batch.slots, part, tables.scalars)
        batch.launch = fused_launch(batch.kind, listed)
    return tables


def _skip(found_inf: Tensor, cohorts: list[Cohort], counted: Tensor) -> Skip:
    """Send ``found_inf`` to the host without waiting for it."""
    if not found_inf.is_cuda:
        return Skip(found_inf.clone(), None, cohorts, counted)
    on_host = torch.empty(1, dtype=torch.float32, pin_memory=True)
    on_host.copy_(found_inf.reshape(1), non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record(torch.cuda.current_stream(found_inf.device))
    return Skip(on_host, arrival, cohorts, counted)
