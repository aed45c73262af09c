"""The engine of a step: it checks, plans and runs updates of some parameters.

It knows no ``torch.optim.Optimizer``. An optimizer has one engine for all of its parameters. With
gradient release there is one for each parameter or scale group besides, with offloaded states one
for each chunk; they share parameters, options and states.
"""

from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import get_total_norm

from fp4adam.distributed.dtensor import is_dtensor, like, local
from fp4adam.distributed.shards import settle_written, sharded_weights
from fp4adam.formats.scale_groups import ScaleGroup
from fp4adam.optim import checks
from fp4adam.optim.adam import updates_params
from fp4adam.optim.hyper_parameters import check_numbers
from fp4adam.optim.master_weights import find_restarting
from fp4adam.optim.masters import ENTRIES
from fp4adam.optim.step_plan import StepPlan
from fp4adam.optim.target import State, Targets, scales_of, together
from fp4adam.tensors import backend


class Group(NamedTuple):
    """A parameter group, and those of its parameters that an engine steps."""

    options: dict[str, Any]
    params: list[Tensor]


class Signals(NamedTuple):
    """What a ``GradScaler`` sets: one-element tensors, or None."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


class Clipping:
    """The coefficients that clip some local gradients, which it does not keep alive.

    ``coefficient``: min(max_norm / (norm + 1e-6), 1), float32 [1].
    """

    def __init__(self, grads: Sequence[Tensor | None], norm: Tensor, max_norm: float) -> None:
        self.coefficient = (max_norm / (norm.float().view(1) + 1e-6)).clamp(max=1.0)
        # To the memory: references to gradients would keep Module.to() from swapping them.
        self._alive = [g if g is None else StorageWeakRef(g.untyped_storage()) for g in grads]
        self._known = [g if g is None else (g.data_ptr(), g._version) for g in grads]

    def check(self, grads: Sequence[Tensor | None]) -> None:
        """Raise unless the gradients that there are now are those of the norm, and unwritten."""
        same = [
            known == (grad.data_ptr(), grad._version) and not alive.expired()
            for known, alive, grad in zip(self._known, self._alive, grads, strict=True)
            if grad is not None and grad.numel()
        ]
        if not all(same):
            raise RuntimeError(
                "gradients must not change between clip_grad_norm_() and step(), got "
                f"{same.count(False)} of {len(same)} that have: the coefficient is that of the "
                "gradients before; call clip_grad_norm_() after the last backward pass, or "
                "optimizer.zero_grad() to begin anew"
            )


class Engine:
    """Steps parameters together: those of ``groups``, with all members of a scale group, or none.

    New states are added to ``states``.
    """

    clipping: Clipping | None = None  # what clips the next step
    shown_steps: Sequence[Any] = ()  # by groups; others there have been set by other code
    is_part = False  # whether the optimizer has more parameters
    on_host = False  # whether states may be on the host

    def __init__(
        self, targets: Targets, groups: Sequence[Group], states: dict[Tensor, State]
    ) -> None:
        self.targets = targets
        self.groups = list(groups)
        self.states = states
        self.plan: StepPlan | None = None
        # Groups, parameters, states, structure and sharded weights of the plan.
        self._planned: tuple[list, ...] = ()
        self.parts: dict[Tensor, Engine] = {}  # by parameter; see divide
        self._divided: list = []

    def divide(self, join: Callable[[list[list[Tensor]]], list[list[Tensor]]] = list) -> None:
        """Make ``parts``: an engine per scale group or other parameter, or for what is joined.

        They are kept as long as parameters, their groups, scales and devices are.
        """
        members = [
            (id(g), id(p), id(scales_of(p)), local(p).device) for g, ps in self.groups for p in ps
        ]
        if [join, *members] == self._divided:
            return
        self.drop_plan()  # what was stepped may still have to take back counts, or to copy states
        self.targets.keep_only(self.params)
        self._divided, self.parts = [join, *members], {}
        group_of = {param: group for group, params in self.groups for param in params}
        for params in join(together(self.params, scales_of)):
            own: dict[int, Group] = {}
            for param in params:
                group = group_of[param]
                own.setdefault(id(group), Group(group, [])).params.append(param)
            part = Engine(self.targets, [*own.values()], self.states)
            part.is_part = True
            self.parts |= dict.fromkeys(params, part)

    @property
    def params(self) -> list[Tensor]:
        return [param for _, params in self.groups for param in params]

    def all_grads(self) -> list[Tensor | None]:
        """The local gradients of all parameters; None for those that have none."""
        params = self.params
        return [*map(self.targets.grad_reader(params), params)]

    def check_call(self) -> None:
        """Raise if a step is impossible here and now, whatever the parameters are."""
        checks.check_mode()
        for group, _ in self.groups:
            check_numbers(group, may_wait=False)
            checks.check_group_names(self.targets.options, group)

    # What engines with offloaded states do in another way

    def forget(self) -> None:
        """Drop plan, counts and parts, after states have been loaded."""
        self.settle()
        self.plan, self._planned = None, ()
        self.parts, self._divided = {}, []

    def placed(self, param: Tensor, state: State) -> State:
        """A state that has just been made, where states are kept."""
        return state

    def step_part(self, part: "Engine", signals: Signals) -> None:
        """Step one of the ``parts``."""
        part.step(signals)

    def measure(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """The total norm of all gradients, which the next step clips; as ``clip_grad_norm_``."""
        if backend.is_capturing():
            raise RuntimeError(
                "clip_grad_norm_ must not be called while a CUDA graph is captured, got a call in "
                "a capture: the step would multiply by the coefficient of that moment at every "
                "replay; capture torch.nn.utils.clip_grad_norm_, which scales the gradients"
            )
        if not isinstance(max_norm, Real | Tensor):
            raise TypeError(f"max_norm must be a number, got {max_norm!r}; inf is allowed")
        if not max_norm >= 0:
            raise ValueError(f"max_norm must be >= 0, got {max_norm}; pass inf to measure only")
        with torch._C.DisableTorchFunctionSubclass():
            grads = self.all_grads()
            pairs = zip(self.params, grads, strict=True)
            present = [like(param, grad) for param, grad in pairs if grad is not None]
            norm = _total_norm(present, norm_type, error_if_nonfinite)
            self.clipping = Clipping(grads, norm, max_norm)
        return norm

    # The step

    def step(self, signals: Signals, captures: bool = False) -> None:
        """Step all parameters that have a gradient.

        Nothing changes if it raises before the first launch, and pending clipping stays. If a CUDA
        graph ``captures`` the step, the plan has to fit.
        """
        self.check_call()
        try:
            if captures or self.has_fitting_plan():
                self.plan.check_gradients()
                self.check_clip()
            else:
                self._make_plan()
        except Exception:
            self.drop_plan()
            raise
        self.plan.run(self.clipping and self.clipping.coefficient, *signals, captures)
        self.clipping = None

    def check_clip(self) -> None:
        """Raise if the gradients are no longer those that the next step clips."""
        if self.clipping and not self.is_part:
            self.clipping.check(self.all_grads())

    def has_fitting_plan(self) -> bool:
        """Whether the plan of the last step is valid for this one; a collective call, as a step."""
        if self.plan is None:
            return False
        params, states, structure, sharded = self._planned
        if structure != self._structure() or not _are_same(self.params, params):
            return False
        settle_written(sharded)
        return _are_same(self._own_states(), states) and self.plan.fits(self.targets.are_shown)

    def _own_states(self) -> Iterable:
        # Tensors are hashed in Python, so not one by one unless there are others' states.
        return map(self.states.get, self.params) if self.is_part else self.states.values()

    def _structure(self) -> list:
        names = "amsgrad", "decoupled_weight_decay", "fused"
        return [
            *((id(group), len(params), self.updates(group)) for group, params in self.groups),
            *(group[name] for group, _ in self.groups for name in names),
        ]

    def updates(self, group: dict[str, Any]) -> bool:
        """Whether steps may change the parameters of a group, and not just the moments."""
        # Otherwise only the device knows the learning rate.
        return self.targets.options.capturable or updates_params(group)

    def settle(self) -> None:
        """Take back the counts of a step that the device has skipped, which waits for it."""
        if self.plan is not None:
            self.plan.counter.settle()

    def drop_plan(self) -> None:
        self.settle()
        for member in self.plan.members if self.plan is not None else ():
            member.unbind()
        # Lists that would keep parameters alive.
        self.plan, self._planned = None, ()

    def _make_plan(self) -> None:
        self.drop_plan()
        options, params = self.targets.options, self.params
        sharded = sharded_weights(params)
        settle_written(sharded)
        if not self.is_part:
            self.targets.keep_only(params)
        stepped, moving = self.check()
        self.check_clip()
        pairs = [(group, p) for group, own in self.groups for p in own if p in stepped]
        members = [self.targets[param] for _, param in pairs]
        stale = find_restarting(members, self.states)
        for (group, param), member in zip(pairs, members, strict=True):
            old = self.states.get(param, {})
            # In one assignment, so that an interrupt leaves either the old state or the new one.
            self.states[param] = state = member.completed(old, group["amsgrad"], member in stale)
            member.free_initial_value(self.updates(group))
            member.record()  # if no kernel can be compiled, the next step goes on with this master
            member.bind(group, state, param in moving, self.targets.places.get(param, 0))
        outsiders = [param for param in params if param not in stepped]
        plan = StepPlan(members, outsiders, self.targets.grad_reader(params), options)
        self._planned = params, [*self._own_states()], self._structure(), sharded
        self.plan = plan  # whole, wherever an interrupt comes
        if not plan.fits(self.targets.are_shown):
            raise RuntimeError("a step plan must fit what it was made from; please report this")

    def check(self) -> tuple[set[Tensor], set[Tensor]]:
        """Check everything before it changes; returns the parameters that are stepped, and those
        that can change.
        """
        options, params = self.targets.options, self.params
        name, read_grad = options.name, self.targets.grad_reader(params)
        for group, _ in self.groups:
            checks.check_options(options, group)
        checks.check_distinct(params)
        for param in params:
            grad = read_grad(param)
            if grad is not None:
                checks.check_gradient(name, param, grad)
                self._check_state(param)
        # A new amax changes every tensor that shares it, even those without a gradient.
        updated = {p for group, own in self.groups if self.updates(group) for p in own}
        stepped: set[Tensor] = set()
        moving: set[Tensor] = set()
        for members in together(self.params, scales_of):
            if any(read_grad(p) is not None or self._is_in_training(p) for p in members):
                stepped.update(members)
                scales = scales_of(members[0])
                if isinstance(scales, ScaleGroup):
                    checks.check_scale_group(members, scales)
                    for param in members:
                        checks.check_steppable(name, param)
                        self._check_state(param)
            if not updated.isdisjoint(members):
                moving.update(members)
        return stepped, moving

    def _check_state(self, param: Tensor) -> None:
        state = self.states.get(param, {})
        checks.check_state(param, state, self.targets.options, self.on_host)

    def _is_in_training(self, param: Tensor) -> bool:
        if not {"step", "exp_avg", "exp_avg_sq"} <= self.states.get(param, {}).keys():
            return False
        try:
            checks.check_steppable(self.targets.options.name, param)
            self._check_state(param)
        except (RuntimeError, TypeError, NotImplementedError):
            return False  # the error is raised once the parameter has a gradient
        return True

    # Masters

    @torch.no_grad()
    def reset_masters(self, chosen: Iterable[Tensor] | None) -> None:
        params = self.params if chosen is None else [*chosen]
        checks.check_known(params, self.params)
        with torch._C.DisableTorchFunctionSubclass():
            settle_written(sharded_weights(params))
            for member in [self.targets[param] for param in params]:
                state, master = self.states.get(member.owner, {}), {}
                if member.master.name and state.keys() & {*ENTRIES}:
                    member.master.store(master, member.value())
                    for name in ENTRIES:
                        state.pop(name, None)
                    state.update(self.placed(member.owner, master))
                    member.free_initial_value()
                    member.record()


def _total_norm(grads: Sequence[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """``torch.nn.utils.get_total_norm`` as a plain tensor, of DTensors on any meshes."""
    by_mesh = together(grads, lambda grad: grad.device_mesh if is_dtensor(grad) else None)
    how = norm_type, error_if_nonfinite
    norms = [get_total_norm(alike, *how) for alike in by_mesh]
    norms = [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]
    return norms[0] if len(norms) == 1 else get_total_norm(norms, *how)


def _are_same(actual: Iterable, expected: Sequence) -> bool:
    actual = list(actual)
    return len(actual) == len(expected) and all(map(is_, actual, expected))
