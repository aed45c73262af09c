"""States and groups as Transformer Engine's ``FusedAdam`` shows and saves them.

There a state holds moments and a master, all of the shape of the parameter, and code for it takes
every entry for one of these. The steps are counted in the group. Here every parameter has a count,
and narrow states have scales, so :class:`FusedAdam` shows views, and keeps ``group["step"]`` in
agreement with the counts. All other code works on what is stored.
"""

from collections import UserDict
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp4adam.optim.engine import Engine
from fp4adam.optim.masters import DIGEST, MASTER, REST
from fp4adam.optim.state_tensor import SCALES
from fp4adam.optim.target import State, is_own_master

_HIDDEN = {"step", DIGEST, *SCALES.values()}


class StateView(MutableMapping[str, Any]):
    """A state that iterates over moments and master alone, and over ``step`` if it shows it.

    An int16 remainder is its ``master_param``. So is ``own_master``, an FP32 parameter itself, with
    ``master_weights`` and ``use_decoupled_grad``. All that is stored has its name besides.
    """

    def __init__(self, stored: State, own_master: Tensor | None, shows_step: bool) -> None:
        self.stored, self.own_master, self.shows_step = stored, own_master, shows_step

    def _stored_name(self, name: str) -> str:
        return REST if name == MASTER and REST in self.stored else name

    def _shown(self) -> State:
        shown = shown_entries(self.stored)
        if shown and self.own_master is not None:
            shown[MASTER] = self.own_master
        has_step = self.shows_step and "step" in self.stored
        return {"step": self.stored["step"], **shown} if has_step else shown

    def __getitem__(self, name: str) -> Any:
        return {**self.stored, **self._shown()}[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.stored[self._stored_name(name)] = value

    def __delitem__(self, name: str) -> None:
        del self.stored[self._stored_name(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shown())

    def __len__(self) -> int:
        return len(self._shown())

    def __repr__(self) -> str:
        return repr(self._shown())


class StatesView(UserDict):
    """The states of an optimizer as :class:`StateView`; like the dictionary, it makes new ones."""

    def __init__(self, data: dict[Any, Any], shows_own_masters: bool, shows_steps: bool) -> None:
        self.data, self.shows_own_masters, self.shows_steps = data, shows_own_masters, shows_steps

    def __getitem__(self, param: Any) -> Any:
        return self._view(param, self.data[param])

    def __setitem__(self, param: Any, state: Any) -> None:
        if isinstance(state, dict):
            # Counts, for one, are not in the states of others, so they stay.
            old = stored_state(self.get(param, {}))
            hidden = {name: value for name, value in old.items() if name in _HIDDEN}
            state = hidden | with_remainder(state)
        self.data[param] = stored_state(state)

    # Those of the base class would make a state in order to look for it.

    def get(self, param: Any, default: Any = None) -> Any:
        return self[param] if param in self.data else default

    def pop(self, param: Any, *default: Any) -> Any:
        return self._view(param, self.data.pop(param, *default))

    def _view(self, param: Any, state: Any) -> Any:
        if not isinstance(state, dict):
            return state
        is_own = self.shows_own_masters and isinstance(param, Tensor) and is_own_master(param)
        return StateView(state, param.detach() if is_own else None, self.shows_steps)


def stored_state(state: Any) -> Any:
    """The state that a :class:`StateView` shows; anything else itself."""
    return state.stored if isinstance(state, StateView) else state


def shown_entries(state: State) -> State:
    """The entries of a state that Transformer Engine's has, under its names."""
    names = {name: MASTER if name == REST else name for name in state if name not in _HIDDEN}
    return {shown: state[name] for name, shown in names.items()}


def with_remainder(state: State) -> State:
    """A state of Transformer Engine, whose int16 ``master_param`` is a remainder."""
    is_remainder = getattr(state.get(MASTER), "dtype", None) == torch.int16
    return {REST if is_remainder and name == MASTER else name: x for name, x in state.items()}


def show_steps(engine: Engine) -> list[Any]:
    """Set ``step`` of all groups: the largest count of its parameters, or else of all others.

    Returns the counts, by group; with ``capturable`` each is the tensor of one of its parameters.
    """
    counts, options = _counts(engine), engine.targets.options
    # Tensors cannot be compared without waiting for the device.
    others = [*counts.values()]
    largest = others[0] if options.capturable and others else max(others, default=None)
    engine.targets.are_shown |= options.capturable  # counts that are tensors
    for group, _ in engine.groups:
        count = counts.get(id(group), largest)
        if count is not None and (isinstance(count, Tensor) or count or "step" in group):
            group["step"] = count if isinstance(count, Tensor) else int(count)
    return [group.get("step") for group, _ in engine.groups]


def _counts(engine: Engine) -> dict[int, Any]:
    if engine.plan is not None:
        return engine.plan.counter.latest()
    counts, is_capturable = {}, engine.targets.options.capturable
    for group, params in engine.groups:
        if steps := [state["step"] for state in _counted(engine, params)]:
            counts[id(group)] = steps[0] if is_capturable else max(map(float, steps))
    return counts


def _counted(engine: Engine, params: Sequence[Tensor]) -> list[State]:
    states = (engine.states.get(param, {}) for param in params)
    return [state for state in states if "step" in state]


def take_steps(engine: Engine, shown: Sequence[Any]) -> None:
    """Let a ``step`` that other code has set in a group hold for all states of that group.

    ``shown`` is what :func:`show_steps` has returned. ValueError if it is no count.
    """
    for (group, params), before in zip(engine.groups, shown, strict=False):  # groups are added
        step = group.get("step")
        if step is None or step is before or step == before:
            continue
        if not float(step) >= 0:
            raise ValueError(f"step of a group must be a number >= 0, got {step!r}")
        engine.drop_plan()
        engine.targets.are_shown = True  # to the plans of released gradients
        for state in _counted(engine, params):
            state["step"] = torch.full_like(state["step"], float(step))


def encode(state_dict: dict[str, Any], keys: Collection[Any]) -> None:
    """Count steps in the groups of a state dict; states keep a ``step`` where it is another one.

    It has FP32 states under the names of torch.optim; those of parameters have these ``keys``.
    """
    states = state_dict["state"]
    counts = {key: int(states[key]["step"]) for key in keys if "step" in states[key]}
    for group in state_dict["param_groups"]:
        own = [counts[key] for key in group["params"] if key in counts]
        if counts:
            group["step"] = max(own or counts.values())
        for key in {*group["params"]} & {*keys}:
            differs = key in counts and counts[key] != group["step"]
            step = {"step": states[key]["step"]} if differs else {}
            states[key] = step | shown_entries(states[key])
