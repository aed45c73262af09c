"""Saved optimizer states: FP32 under torch's names, or the stored codes (compact).

Saving only reads. Loading builds all new states before it touches an old one. Names have a fixed
order, because ranks gather the tensors of a state one after the other: the order of a set depends
on the hash seed of each process.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import dtensor_class, is_dtensor, like, local, part_for
from fp4adam.formats.roundings import known_roundings
from fp4adam.optim import checks, te_layout
from fp4adam.optim.engine import Engine
from fp4adam.optim.hyper_parameters import check_numbers, is_on_device
from fp4adam.optim.master_weights import adopt, find_stale, warn_of_loaded
from fp4adam.optim.masters import DIGEST, ENTRIES, MASTER, REST, CodeRemainder
from fp4adam.optim.remainder import complete, digest
from fp4adam.optim.state_codec import INT8, PLAIN, STATE_BLOCK, codec_of_codes, join_master
from fp4adam.optim.state_tensor import SCALES, StateTensor, restored, state_like
from fp4adam.optim.target import State, Target, is_own_master
from fp4adam.tensors.quantized_tensor import QuantizedTensor

STATE_NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", MASTER)
_ORDER = (
    "step",
    *(name for state in STATE_NAMES for name in (state, SCALES[state])),
    REST,
    DIGEST,
)
# The tensors of a state; ``step`` is a count.
TENSOR_NAMES = frozenset(_ORDER[1:])

Groups = list[dict[str, Any]]


def saved_states(groups: Groups, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, State]]:
    """Pairs of a parameter of ``groups`` and its state in ``state_dict``."""
    for param, key in saved_keys(groups, state_dict):
        yield param, state_dict["state"][key]


def saved_keys(groups: Groups, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, Any]]:
    """Pairs of a parameter with a state in ``state_dict`` and the key of that state."""
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for param, key in zip(group["params"], saved["params"], strict=True):
            if key in state_dict["state"]:
                yield param, key


# Saving


def check_compact(states: dict[Any, Any]) -> None:
    """Raise NotImplementedError if sharded states have scales."""
    for param, state in states.items():
        if not (isinstance(state, dict) and is_dtensor(param)):
            continue
        master = state.get("master_param")
        if master is not None and master.dtype == torch.int8:
            raise NotImplementedError(
                "masters of sharded parameters must not be int8 to be saved as they are: "
                "remainders fit the shards of this number of ranks only; save state_dict()"
            )
        scaled = SCALES.values() & state.keys()
        if scaled:
            raise NotImplementedError(
                "states of sharded parameters must have no scales to be saved as they are, got "
                f"{', '.join(sorted(scaled))}, which fit the shards of this number of ranks only; "
                "save state_dict(), or store moments in bfloat16"
            )


@torch.no_grad()
def saved(engine: Engine, compact: bool, as_te: bool) -> dict[str, Any]:
    """The state dict of an optimizer.

    Args:
        engine: The engine of all parameters.
        compact: Keep codes and scales as they are stored.
        as_te: Use the layout of Transformer Engine, unless compact.
    """
    keys: dict[Tensor, int] = {}
    groups = []
    for group, params in engine.groups:
        numbers = [keys.setdefault(param, len(keys)) for param in params]
        groups.append({name: x for name, x in group.items() if name != "params"})
        groups[-1]["params"] = numbers
    members = {
        param: engine.targets[param] for param in keys if isinstance(_state(engine, param), dict)
    }
    with torch._C.DisableTorchFunctionSubclass():
        stale = find_stale([*members.values()], engine.states)
    states = {}
    for owner, state in engine.states.items():
        if owner in members:
            member = members[owner]
            state = saved_state(member, _state(engine, owner), member in stale, compact, as_te)
        states[keys.get(owner, owner)] = state
    for group, params in engine.groups:
        for owner in params if members else ():
            # Of a run that has begun, also where those start that no step has used yet.
            if owner not in members and (member := engine.targets[owner]).start_value is not None:
                state = member.completed({}, group["amsgrad"], restart=False)
                states[keys[owner]] = saved_state(member, state, True, compact, as_te)
                members[owner] = member
    state_dict = {"state": states, "param_groups": groups}
    if as_te and compact:
        for group in groups:
            group.pop("step", None)  # every state has its own
    elif as_te:
        te_layout.encode(state_dict, [keys[owner] for owner in members])
    if engine.targets.options.capturable:
        # As a number, which optimizers with and without capturable load.
        for group in groups:
            group["lr"] = float(group["lr"])
    return state_dict


def _state(engine: Engine, owner: Tensor) -> Any:
    return te_layout.stored_state(engine.states.get(owner))


@torch.no_grad()
def current_masters(engine: Engine) -> Callable[[Tensor], Tensor | None]:
    """A function that returns the ``master_param`` that ``state_dict()`` has of a parameter.

    It decodes one at a time: all states in FP32 may be more than there is memory for.
    """
    members = {param: engine.targets[param] for param in engine.params if param in engine.states}
    with torch._C.DisableTorchFunctionSubclass():
        stale = find_stale([*members.values()], engine.states)

    def master_of(param: Tensor) -> Tensor | None:
        if param not in members:
            return None
        state = {name: x for name, x in _state(engine, param).items() if name in ENTRIES}
        member = members[param]
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return saved_state(member, state, member in stale, False).get(MASTER)

    return master_of


def saved_state(
    parameter: Target, state: State, is_stale: bool, compact: bool, as_te: bool = False
) -> State:
    """The state of a parameter in the form of a checkpoint, in torch's order of names.

    Args:
        parameter: The parameter.
        state: Its state in the optimizer.
        is_stale: True if the master restarts from the parameter, whose value is saved in its place.
        compact: Keep codes and scales as they are stored.
        as_te: Keep int16 remainders as they are.
    """
    state = dict(state)
    if is_stale:
        parameter.master.store(state, parameter.value())
        if parameter.has_master and not compact:
            StateTensor(PLAIN, parameter.value(), None).store(state, MASTER, parameter.owner)
    saved = {name: value for name, value in state.items() if name not in ENTRIES}
    for name, codec in parameter.codecs.items():
        if name in saved and not (compact or codec.exact):
            values = StateTensor.of(saved, name, codec).decode()
            StateTensor(PLAIN, values, None).store(saved, name, parameter.owner)
    return ordered(saved | parameter.master.saved(state, compact, as_te))


@torch.no_grad()
def with_digests(engine: Engine, states: dict[Any, Any]) -> dict[Any, Any]:
    """States in which remainders say which codes they belong to, as far as this is certain."""
    new = defaultdict(dict, states)
    for owner in engine.params:
        if isinstance(states.get(owner), dict):
            member = engine.targets[owner]
            if isinstance(member.master, CodeRemainder) and member.is_unwritten():
                new[owner] = {**states[owner], DIGEST: digest(member.param)}
    return new


def ordered(state: State) -> State:
    """The same state with its names in an order that is equal on all ranks."""
    known = [name for name in _ORDER if name in state]
    return {name: state[name] for name in (*known, *sorted(state.keys() - set(_ORDER)))}


# Loading


@torch.no_grad()
def loaded(
    engine: Engine, state_dict: dict[str, Any], defaults: dict[str, Any]
) -> tuple[dict[Any, Any], Groups, dict[Tensor, State]]:
    """New states and groups from a state dict.

    Returns:
        The states without masters, the groups, and the saved states by parameter, from which
        :func:`load_masters` takes these.

    Raises:
        ValueError: If groups, shapes, dtypes, placements or numbers do not fit.
        TypeError: If a hyper-parameter is not a number.
    """
    check_is_state_dict(state_dict)
    groups, options = [group for group, _ in engine.groups], engine.targets.options
    check_groups(groups, state_dict)
    own_masters = set()
    if options.store_param_remainders:
        saved = saved_keys(groups, state_dict)
        own_masters = {key for owner, key in saved if is_own_master(owner)}
    state_dict = with_steps(state_dict, own_masters)
    check_state_dict(groups, state_dict)
    new_groups = deepcopy([_options(group) for group in state_dict["param_groups"]])
    for group, new in zip(groups, new_groups, strict=True):
        check_numbers({**defaults, **new})
        checks.check_options(options, new.get("amsgrad", False))
        new["params"] = group["params"]
        if "param_names" in group:
            new.setdefault("param_names", group["param_names"])
    keys = {key: owner for owner, key in saved_keys(groups, state_dict)}
    states: dict[Any, Any] = defaultdict(dict)
    given: dict[Tensor, State] = {}
    for key, saved in state_dict["state"].items():
        owner = keys.get(key)
        if owner is None or not isinstance(saved, dict):
            states[key if owner is None else owner] = saved
            continue
        given[owner] = saved
        state = engine.placed(owner, new_state(engine.targets[owner], saved))
        states[owner] = {**others(saved), **state}
    return states, new_groups, given


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def complete_groups(groups: Groups, defaults: dict[str, Any], capturable: bool) -> None:
    """Give groups that were loaded, copied or unpickled what this optimizer needs."""
    for group in groups:
        for name, value in defaults.items():
            group.setdefault(name, value)
        # A checkpoint of torch.optim carries the flags of the implementation that wrote it.
        group["capturable"], group["differentiable"] = capturable, False
        group["decoupled_weight_decay"] = group["adam_w_mode"]
        if capturable and not is_on_device(group["lr"]):
            group["lr"] = float(group["lr"])


def with_counts(states: dict[Any, Any], capturable: bool) -> dict[Any, Any]:
    """States that were loaded, copied or unpickled, with counts of their own."""
    new = defaultdict(dict)
    for param, state in states.items():
        if isinstance(state, dict):
            state = dict(state)
            if "step" in state:
                device = param.device if capturable else "cpu"
                step = torch.as_tensor(state["step"], dtype=torch.float32, device=device)
                state["step"] = step.reshape(()).clone()
        new[param] = state
    return new


@torch.no_grad()
def load_masters(engine: Engine, given: dict[Tensor, State]) -> None:
    """Take the masters of saved states that belong to the weights, and warn of all others.

    Those that do not stay in the states in FP32, as the model may be loaded after the optimizer:
    the next step asks again.
    """
    members = {owner: engine.targets[owner] for owner in engine.params if not owner.is_meta}
    masters = {}
    for owner, member in members.items():
        saved = given.get(owner, {})
        if REST in saved and member.has_remainder:
            rest = part_for(owner, saved[REST]) if is_dtensor(owner) else saved[REST]
            zeros = torch.zeros_like(member.param, dtype=torch.int16)
            engine.states[owner][REST] = like(owner, zeros.copy_(local(rest)))
        elif MASTER in saved or REST in saved:
            masters[member] = saved
    kept = [member for member in masters if member.is_kept]

    def master_of(member: Target) -> State:
        return given_master(member, masters[member])

    others = adopt(kept, master_of)
    for member in kept:
        master = master_of(member)
        if member not in others and local(master[MASTER]).dtype != torch.int8:
            value = member.master.read(master)
            member.master.store(master, value.to(member.param.device))
            if isinstance(member.master, CodeRemainder):
                # FSDP2 may move shards before the first step.
                master[DIGEST] = digest(member.param)
        engine.states[member.owner] |= engine.placed(member.owner, _copies(member, master))
    for member in masters.keys() - {*kept}:
        adopt_master(member, given_master(member, masters[member]))
    # torch drops the states of frozen parameters; a state of AdamW has no masters at all.
    quantized = [member for owner, member in members.items() if checks.is_quantized(owner)]
    lacking = [m for m in quantized if kept and m.is_kept and m not in masters]
    warn_of_loaded(len(others), len(lacking), len(kept))


def _copies(member: Target, master: State) -> State:
    """The entries of a master in new memory, like the parameter."""
    new: State = {}
    for name, value in master.items():
        value = local(value)
        if value.shape == member.param.shape:
            value = torch.empty_like(member.param, dtype=value.dtype).copy_(value)
            value = like(member.owner, value)
        new[name] = value
    return new


def given_master(member: Target, saved: State) -> State:
    """The local part of a saved master: an FP32 ``master_param``, or a remainder and its digest."""
    owner, param = member.owner, member.param
    saved = _local_part(owner, {name: saved[name] for name in ENTRIES if name in saved})
    if MASTER not in saved:
        return {MASTER: join_master(param.detach(), saved[REST].to(param.device))}
    given = StateTensor.of_saved(saved, MASTER)
    if given.codec is not INT8:
        return {MASTER: state_like(param).copy_(given.decode())}
    if isinstance(member.master, CodeRemainder):
        return {MASTER: given.codes.to(param.device), DIGEST: saved[DIGEST]}
    is_of_codes = isinstance(param, QuantizedTensor) and torch.equal(saved[DIGEST], digest(param))
    if is_of_codes:
        return {MASTER: complete(param, given.codes.to(param.device))}
    # Nobody can tell what it was, so it belongs to nothing.
    return {MASTER: torch.full_like(param, torch.nan, dtype=torch.float32)}


def with_steps(state_dict: dict[str, Any], own_masters: Collection[Any]) -> dict[str, Any]:
    """A state dict with a ``step`` in every state; Transformer Engine keeps it in the group.

    The count of a state holds; that of the group is for states without one. Where there is none at
    all, as in states that Megatron allocates, no step has been taken.

    Args:
        state_dict: One of Transformer Engine or of torch.
        own_masters: Keys of states whose parameters are their own masters. An int16
            ``master_param`` of theirs says nothing: Megatron allocates one for every parameter.
    """
    groups, states = [], dict(state_dict["state"])
    has_steps = any("step" in state for state in states.values() if isinstance(state, dict))
    for group in state_dict["param_groups"]:
        own = {key: states[key] for key in group["params"] if isinstance(states.get(key), dict)}
        given = group.get("step")
        for key, state in own.items():
            is_counted = given is not None or ("exp_avg" in state and not has_steps)
            if state and is_counted:
                state = te_layout.with_remainder(state)
                if key in own_masters:
                    state = {name: x for name, x in state.items() if name != "param_remainder"}
                states[key] = state if "step" in state else {"step": given or 0, **_numbers(state)}
        groups.append({name: value for name, value in group.items() if name != "step"})
    return {**state_dict, "state": states, "param_groups": groups}


def _numbers(state: State) -> State:
    """A state in which moments that Megatron allocates for FP8, in uint8, are numbers."""
    return {
        name: value.float() if getattr(value, "dtype", None) == torch.uint8 else value
        for name, value in state.items()
    }


def new_state(parameter: Target, saved: State) -> State:
    """A copy of a saved state in the optimizer's own formats, without its master.

    Raises:
        ValueError: If the placements of the state differ from those of its parameter.
    """
    owner, param = parameter.owner, parameter.param
    saved, state = _local_part(owner, saved), {}
    for name in STATE_NAMES[:-1]:
        if name in saved and name in parameter.codecs:
            given = StateTensor.of_saved(saved, name)
            restored(given, parameter.codecs[name], param).store(state, name, owner)
        elif name in saved:
            state[name] = like(owner, state_like(param).copy_(saved[name]))
    return state


def adopt_master(parameter: Target, given: State) -> None:
    """Copy a master into an FP32 parameter, which has none, if it rounds to its value."""
    plain = parameter.param.dtype.itemsize >= 4 and not isinstance(parameter.param, QuantizedTensor)
    if plain and _is_rounding(parameter, local(given[MASTER]).to(parameter.param.device)):
        with torch.no_grad():
            parameter.param.copy_(local(given[MASTER]))


def _is_rounding(parameter: Target, master: Tensor) -> bool:
    """Whether an FP32 parameter equals ``master`` rounded to 16 bits or to a quantized format.

    If not, the parameter has been trained since, and the master is out of date.
    """
    value = parameter.param.detach().to(torch.float32)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if any(torch.equal(value, master.to(dtype).float()) for dtype in dtypes):
        return True
    if is_dtensor(parameter.owner) or master.dim() < 2:
        return False
    return any(torch.equal(value, rounded) for rounded in known_roundings(master))


def _local_part(owner: Tensor, saved: State) -> State:
    """The local part of a saved state, as a new dictionary."""
    kind = dtensor_class()
    if not isinstance(owner, kind):
        return {
            name: part_for(owner, value) if isinstance(value, kind) else value
            for name, value in saved.items()
        }
    # The saved scales are those of the whole tensor, so decode before cutting.
    names = [name for name in STATE_NAMES if name in saved]
    numbers = {name: StateTensor.of_saved(saved, name).decode() for name in names}
    return {
        name: part_for(owner, value) if isinstance(value, Tensor) and name != "step" else value
        for name, value in {**saved, **numbers}.items()
        if name not in SCALES.values()
    }


def others(saved: State) -> State:
    """The step, and the entries of a state that are not Adam's own tensors."""
    return {name: value for name, value in saved.items() if name == "step" or name not in _ORDER}


# Checking


def check_is_state_dict(state_dict: dict[str, Any]) -> None:
    """Raise ValueError if ``state_dict`` is not the state dict of an optimizer."""
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"state_dict must have state and param_groups, got {sorted(map(str, state_dict))[:3]}; "
            "pass what optimizer.state_dict() returned, a model's goes to the model"
        )


def check_masters(groups: Groups, state_dict: dict[str, Any]) -> None:
    """Raise ValueError if ``state_dict`` holds masters that do not fit these parameters."""
    for i, (param, saved) in enumerate(saved_states(groups, state_dict)):
        if SCALES["master_param"] in saved or "param_remainder" in saved:
            raise ValueError(
                f"master_param of parameter {i} must be whole, got {sorted(saved)}; save "
                "state_dict() instead of compact_state_dict()"
            )
        if "master_param" in saved:
            _check_saved_tensor(f"master_param of parameter {i}", saved["master_param"], param)


def check_groups(groups: Groups, state_dict: dict[str, Any]) -> None:
    """Raise ValueError, as torch.optim does, if groups of parameters differ in size."""
    saved = state_dict["param_groups"]
    if len(groups) != len(saved):
        raise ValueError("loaded state dict has a different number of parameter groups")
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of "
            "optimizer's group"
        )


def check_state_dict(groups: Groups, state_dict: dict[str, Any]) -> None:
    """Raise ValueError if ``state_dict`` holds states that do not fit these parameters."""
    for i, (param, saved) in enumerate(saved_states(groups, state_dict)):
        if saved and not {"step", "exp_avg", "exp_avg_sq"} <= saved.keys():
            raise ValueError(
                f"state of parameter {i} must hold step, exp_avg and exp_avg_sq, got "
                f"{sorted(saved)}; it was saved by another kind of optimizer"
            )
        if saved and not _is_number(saved["step"], param):
            raise ValueError(
                f"step of parameter {i} must be one number >= 0, got {saved['step']!r}; the "
                "checkpoint is damaged"
            )
        for name in (name for name in STATE_NAMES if name in saved):
            what = f"{name} of parameter {i}"
            if DIGEST in saved and name == "master_param":
                _check_saved_codes_of_weight(what, saved, param)
            elif SCALES[name] in saved:
                _check_saved_codes(what, name, saved, param)
            else:
                _check_saved_tensor(what, saved[name], param)
        if "param_remainder" in saved:
            _check_saved_remainder(f"param_remainder of parameter {i}", saved, param)


def _check_saved_tensor(what: str, value: Any, param: Tensor) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"{what} must be a floating point tensor, got {kind}; such a checkpoint must be "
            "converted first"
        )
    if value.layout != torch.strided or (value.is_meta and not param.is_meta):
        raise ValueError(
            f"{what} must be a dense tensor with a value, got {value.layout} on {value.device}; "
            "the checkpoint is damaged"
        )
    _check_shape(what, value, param.shape)


def _check_saved_codes(what: str, name: str, saved: dict[str, Any], param: Tensor) -> None:
    codes, scales = saved[name], saved[SCALES[name]]
    dtype = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
    if not isinstance(codes, Tensor) or codec_of_codes(name, dtype) is None:
        raise ValueError(
            f"{what} must be codes of a known dtype beside {SCALES[name]}, got {dtype}; the "
            "checkpoint is damaged"
        )
    _check_shape(what, codes, param.shape)
    n_blocks = -(-param.numel() // STATE_BLOCK)
    if not isinstance(scales, Tensor) or scales.dtype != torch.uint8:
        kind = scales.dtype if isinstance(scales, Tensor) else type(scales).__name__
        raise ValueError(f"{what} must have uint8 scales, got {kind}; the checkpoint is damaged")
    _check_shape(f"the scales of {what}", scales, (n_blocks,))


def _check_saved_codes_of_weight(what: str, saved: dict[str, Any], param: Tensor) -> None:
    if is_dtensor(param):
        raise ValueError(
            f"{what} must be floating point for a sharded parameter, got int8 remainders of a "
            "whole weight; save state_dict() instead of compact_state_dict()"
        )
    for value, dtype, shape in (
        (saved["master_param"], torch.int8, param.shape),
        (saved[DIGEST], torch.int64, (1,)),
    ):
        if not isinstance(value, Tensor) or value.dtype != dtype:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{what} must be int8 with an int64 {DIGEST}, got {kind}; the checkpoint is damaged"
            )
        _check_shape(what, value, shape)


def _check_saved_remainder(what: str, saved: dict[str, Any], param: Tensor) -> None:
    remainder = saved["param_remainder"]
    if not isinstance(remainder, Tensor) or remainder.dtype != torch.int16:
        kind = remainder.dtype if isinstance(remainder, Tensor) else type(remainder).__name__
        raise ValueError(f"{what} must be int16, got {kind}; the checkpoint is damaged")
    if param.dtype != torch.bfloat16:
        raise ValueError(
            f"{what} must belong to a bfloat16 parameter, got {param.dtype}; save state_dict(), "
            "which has whole masters, to change the dtype"
        )
    _check_shape(what, remainder, param.shape)


def _check_shape(what: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise ValueError(
            f"{what} must have shape {tuple(shape)}, got {tuple(value.shape)}; load it into the "
            "model that it was saved from"
        )


def _is_number(step: Any, param: Tensor) -> bool:
    if isinstance(step, Tensor):
        if step.numel() != 1 or step.is_complex():
            return False
        return param.is_meta if step.is_meta else 0 <= step.item() < math.inf
    return isinstance(step, (int, float)) and 0 <= step < math.inf
