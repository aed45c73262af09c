"""Saved optimizer states: FP32 under torch's names, or the stored codes (compact).

Saving only reads. Loading builds all new states before it touches an old one. Names have a fixed
order, because ranks gather the tensors of a state one after the other: the order of a set depends
on the hash seed of each process.
"""

import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import dtensor_class, is_dtensor, like, local, part_for
from fp4adam.formats.roundings import known_roundings
from fp4adam.optim import checks, te_layout
from fp4adam.optim.engine import Engine
from fp4adam.optim.hyper_parameters import check_saved_numbers, is_on_device
from fp4adam.optim.master_weights import adopt, batches, find_stale
from fp4adam.optim.parameter import DIGEST, Parameter, State, are_equal, is_own_master
from fp4adam.optim.remainder import complete, digest
from fp4adam.optim.state_codec import (
    INT8,
    PLAIN,
    STATE_BLOCK,
    codec_of_codes,
    join_master,
    split_master,
)
from fp4adam.optim.state_tensor import SCALES, StateTensor, restored, state_like
from fp4adam.tensors.quantized_tensor import QuantizedTensor

_logger = logging.getLogger("fp4adam")
STATE_NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param")
_ORDER = (
    "step",
    *(name for state in STATE_NAMES for name in (state, SCALES[state])),
    "param_remainder",
    DIGEST,
)
# The tensors of a state; ``step`` is a count.
TENSOR_NAMES = frozenset(_ORDER[1:])

Groups = list[dict[str, Any]]
# The entry that carries a new state through torch.optim's loading.
_LOADED = object()


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


@contextlib.contextmanager
def hooked(
    register: Callable[..., Any], hook: Callable[..., Any], prepend: bool = True
) -> Iterator[None]:
    """Register a hook of torch.optim for the duration of a ``with`` block."""
    hook.is_temporary = True
    handle = register(hook, prepend=prepend)
    try:
        hooks = handle.hooks_dict_ref()
        for key, other in [*hooks.items()]:
            if other is not hook and hasattr(other, "is_temporary"):
                del hooks[key]  # left behind by an interrupt
        yield
    finally:
        handle.remove()


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
def encode(engine: Engine, state_dict: dict[str, Any], compact: bool, as_te: bool) -> None:
    """Bring the states of a new state dict into the form of a checkpoint.

    Args:
        engine: The engine of all parameters.
        state_dict: The state dict of ``torch.optim.Optimizer``.
        compact: Keep codes and scales as they are stored.
        as_te: Use the layout of Transformer Engine, unless compact.
    """
    states, groups = state_dict["state"], [group for group, _ in engine.groups]
    states.update({key: te_layout.stored_state(state) for key, state in states.items()})
    keys = dict(saved_keys(groups, state_dict))
    keys = {param: key for param, key in keys.items() if isinstance(states[key], dict)}
    members = {param: engine.parameters[param] for param in keys}
    stale = _left(members, engine)
    for param, key in keys.items():
        member = members[param]
        states[key] = saved_state(member, states[key], member in stale, compact, as_te)
    if as_te and compact:
        for group in state_dict["param_groups"]:
            group.pop("step", None)  # every state has its own
    elif as_te:
        te_layout.encode(state_dict, keys.values())
    if engine.parameters.options.capturable:
        # As a number, which optimizers with and without capturable load.
        for group in state_dict["param_groups"]:
            group["lr"] = float(group["lr"])


def _left(members: dict[Tensor, Parameter], engine: Engine) -> set[Parameter]:
    """The parameters that no longer equal their rounded masters."""
    stale: set[Parameter] = set()
    with torch._C.DisableTorchFunctionSubclass():
        for some in batches(members.values()):
            stale |= find_stale(some, engine.states)[0].keys()
    return stale


@torch.no_grad()
def current_masters(engine: Engine) -> Callable[[Tensor], Tensor | None]:
    """A function that returns the ``master_param`` that ``state_dict()`` has of a parameter.

    It decodes one at a time: all states in FP32 may be more than there is memory for.
    """
    members = {param: engine.parameters[param] for param in engine.params if param in engine.states}
    stale = _left(members, engine)
    names = ("master_param", SCALES["master_param"], "param_remainder")

    def master_of(param: Tensor) -> Tensor | None:
        if param not in members:
            return None
        stored = te_layout.stored_state(engine.states[param])
        state = {name: x for name, x in stored.items() if name in names}
        member = members[param]
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return saved_state(member, state, member in stale, False).get("master_param")

    return master_of


def saved_state(
    parameter: Parameter, state: State, left: bool, compact: bool, keeps_remainder: bool = False
) -> State:
    """The state of a parameter in the form of a checkpoint, in torch's order of names.

    Args:
        parameter: The parameter.
        state: Its state in the optimizer.
        left: Whether the parameter no longer equals its rounded master. Its own value is saved as
            the master then.
        compact: Keep codes and scales as they are stored.
        keeps_remainder: Whether int16 remainders stay what they are.
    """
    saved = dict(state)
    waits = parameter.has_remainder and "param_remainder" not in state
    if not parameter.has_master and not waits:
        # The parameter has been converted to FP32 and needs no master any more.
        saved.pop("master_param", None)
        saved.pop(SCALES["master_param"], None)
    elif (
        waits
        and "master_param" in state
        and not parameter.is_rounded(local(state["master_param"]).to(parameter.param.device))
    ):
        saved["master_param"] = like(parameter.owner, parameter.value())
    if not parameter.has_remainder:
        # The parameter is no longer the upper half of a master.
        saved.pop("param_remainder", None)
    if left:
        parameter.store_master(saved, parameter.value())
    saved.pop(DIGEST, None)
    if compact:
        saved = with_digest(parameter, saved)
    if not compact:
        for name, codec in parameter.codecs.items():
            if name in saved and not codec.exact:
                values = StateTensor.of(saved, name, codec).decode()
                StateTensor(PLAIN, values, None).store(saved, name, parameter.owner)
        if "param_remainder" in saved and not keeps_remainder:
            remainder = local(saved.pop("param_remainder"))
            master = join_master(parameter.param.detach().to(remainder.device), remainder)
            saved["master_param"] = like(parameter.owner, master)
    return ordered(saved)


def with_digest(parameter: Parameter, state: State) -> State:
    """A state that says which codes its remainder, if it has one, belongs to: those of now."""
    master = local(state.get("master_param"))
    if not parameter.completes or master is None or master.dtype != torch.int8:
        return state
    return {**state, DIGEST: digest(parameter.param)}


@torch.no_grad()
def with_digests(engine: Engine, states: dict[Any, Any]) -> dict[Any, Any]:
    """States in which remainders say which codes they belong to, as far as this is certain."""
    if engine.parameters.options.master_weight_dtype != torch.int8:
        return states
    new = defaultdict(dict, states)
    for owner in engine.params:
        if isinstance(states.get(owner), dict):
            member = engine.parameters[owner]
            if member.is_unwritten():
                new[owner] = with_digest(member, states[owner])
    return new


def ordered(state: State) -> State:
    """The same state with its names in an order that is equal on all ranks."""
    known = [name for name in _ORDER if name in state]
    return {name: state[name] for name in (*known, *sorted(state.keys() - set(_ORDER)))}


# Loading


def packed(
    engine: Engine, state_dict: dict[str, Any], defaults: dict[str, Any]
) -> tuple[dict[str, Any], list[Tensor]]:
    """A state dict with new states, which torch.optim's loading leaves as they are.

    Returns:
        The state dict, and the parameters with states; :func:`unpacked` and :func:`adopt_masters`
        take them.

    Raises:
        ValueError: If groups, shapes, dtypes, placements or numbers do not fit.
        TypeError: If a hyper-parameter is not a number.
    """
    check_is_state_dict(state_dict)
    owners: list[Tensor] = []
    groups = [group for group, _ in engine.groups]
    if not has_groups_of(groups, state_dict):
        return state_dict, owners  # torch.optim raises its own error
    own_masters = set()
    if engine.parameters.options.store_param_remainders:
        saved = saved_keys(groups, state_dict)
        own_masters = {key for owner, key in saved if is_own_master(owner)}
    state_dict = with_steps(state_dict, own_masters)
    check_state_dict(groups, state_dict)
    for group in state_dict["param_groups"]:
        check_saved_numbers({**defaults, **group})
        checks.check_options(engine.parameters.options, group.get("amsgrad", False))
    states = dict(state_dict["state"])
    for owner, key in saved_keys(groups, state_dict):
        state = new_state(engine.parameters[owner], states[key])
        states[key] = {**others(states[key]), _LOADED: _Loaded(engine.placed(owner, state))}
        owners.append(owner)
    return {**state_dict, "state": states}, owners


class _Loaded:
    """A new state, which torch.optim takes for one value."""

    def __init__(self, state: State) -> None:
        self.state = state


def complete_groups(groups: Groups, defaults: dict[str, Any], capturable: bool) -> None:
    """Give groups that torch.optim has loaded, copied or unpickled what this optimizer needs."""
    for group in groups:
        for name, value in defaults.items():
            group.setdefault(name, value)
        # A checkpoint of torch.optim carries the flags of the implementation that wrote it.
        group["capturable"], group["differentiable"] = capturable, False
        group["decoupled_weight_decay"] = group["adam_w_mode"]
        if capturable and not is_on_device(group["lr"]):
            group["lr"] = float(group["lr"])


def unpacked(states: dict[Any, Any], capturable: bool) -> dict[Any, Any]:
    """The states that torch.optim has loaded, copied or unpickled, ready for use."""
    new = defaultdict(dict)
    for param, values in states.items():
        if isinstance(values, dict):
            values = dict(values)
            if _LOADED in values:
                values.update(values.pop(_LOADED).state)
            if "step" in values:
                device = param.device if capturable else "cpu"
                step = torch.as_tensor(values["step"], dtype=torch.float32, device=device)
                values["step"] = step.reshape(()).clone()
        new[param] = values
    return new


@torch.no_grad()
def adopt_masters(engine: Engine, owners: Sequence[Tensor]) -> None:
    """Give parameters with the values of their rounded loaded masters the exact bytes of these.

    All others keep their bytes; the next step compares them again, in case the model is loaded
    after the optimizer.
    """
    with torch._C.DisableTorchFunctionSubclass():
        members = {owner: engine.parameters[owner] for owner in owners if not owner.is_meta}
        for owner, member in members.items():
            state = engine.states[owner]
            if member.has_remainder and "master_param" in state:
                if not engine.on_host:
                    split_loaded_master(member, state)
            elif not member.has_master and "master_param" in state:
                adopt_master(member, state)
        adopt([member for member in members.values() if member.has_master], engine.states)


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


def new_state(parameter: Parameter, saved: State) -> State:
    """A copy of a saved state in the optimizer's own formats.

    If the state has a master but the parameter keeps none, ``master_param`` stays in the result.

    Raises:
        ValueError: If the placements of the state differ from those of its parameter.
    """
    owner, param = parameter.owner, parameter.param
    saved, state = _local_part(owner, saved), {}
    for name in STATE_NAMES:
        if name not in saved:
            continue
        if name in parameter.codecs:
            given = StateTensor.of_saved(saved, name)
            if given.codec is INT8:
                _restore_remainder(parameter, saved, state)
                continue
            # Remainders are made of whatever codes the weight has at the next step.
            codec = (
                PLAIN if name == "master_param" and parameter.completes else parameter.codecs[name]
            )
            stored = restored(given, codec, param)
            if name == "master_param" and not _is_exact(given, stored):
                # Keep it in FP32: the parameter may equal the rounded original, but not the rounded
                # narrow copy.
                stored = StateTensor(PLAIN, state_like(param).copy_(given.decode()), None)
            stored.store(state, name, owner)
        else:
            state[name] = like(owner, state_like(param).copy_(saved[name]))
    remainder = saved.get("param_remainder")
    if remainder is not None and parameter.has_remainder:
        zeros = torch.zeros_like(param, dtype=torch.int16)
        state["param_remainder"] = like(owner, zeros.copy_(remainder))
    elif remainder is not None:
        master = join_master(param, remainder.to(param.device))
        parameter.store_master(state, state_like(param).copy_(master))
    return state


def _restore_remainder(parameter: Parameter, saved: State, state: State) -> None:
    """Put a saved int8 remainder into a state, or the master that it completes the weight to.

    Without these the master starts from the weight.
    """
    remainder = saved["master_param"].to(parameter.param.device, copy=True)
    if parameter.completes:
        # The weight may be loaded after it, so the next step decides if it belongs to it.
        state["master_param"] = like(parameter.owner, remainder)
        state[DIGEST] = saved[DIGEST]
    elif isinstance(parameter.param, QuantizedTensor) and torch.equal(
        saved[DIGEST], digest(parameter.param)
    ):
        parameter.store_master(state, complete(parameter.param, remainder))
    else:
        _logger.warning(
            "int8 remainders were saved with other weights than these, and are dropped: masters "
            "start from the weights. Load the model first, or save state_dict()"
        )


def _is_exact(given: StateTensor, stored: StateTensor) -> bool:
    """Whether ``stored`` holds the values of the loaded master ``given`` without rounding."""
    if stored.codec.exact or given.codec.name == stored.codec.name:
        return True
    return are_equal(stored.decode(), given.decode().to(stored.codes.device, torch.float32))


def adopt_master(parameter: Parameter, state: State) -> None:
    """Copy a loaded master into a parameter without one of its own whose value it rounds to."""
    master = parameter.master(state).to(torch.float32)
    state.pop("master_param")
    state.pop(SCALES["master_param"], None)
    plain = parameter.param.dtype.itemsize >= 4 and not parameter.rounds_codes
    if plain and _is_rounding(parameter, master):
        with torch.no_grad():
            parameter.param.copy_(master)


def split_loaded_master(parameter: Parameter, state: State) -> None:
    """Keep only the remainder of a loaded master whose upper half the parameter is.

    Otherwise the next step decides, because the model may be loaded later.
    """
    master = parameter.master(state).to(torch.float32)
    if parameter.is_rounded(master):
        state["param_remainder"] = like(parameter.owner, split_master(master)[1])
        state.pop("master_param")
        state.pop(SCALES["master_param"], None)


def _is_rounding(parameter: Parameter, master: Tensor) -> bool:
    """Whether an FP32 parameter equals ``master`` rounded to 16 bits or to a quantized format.

    If not, the parameter has been trained since, and the master is out of date.
    """
    value = parameter.param.detach().to(torch.float32)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if any(are_equal(value, master.to(dtype).float()) for dtype in dtypes):
        return True
    if is_dtensor(parameter.owner) or master.dim() < 2:
        return False
    return any(are_equal(value, rounded) for rounded in known_roundings(master))


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


def has_groups_of(groups: Groups, state_dict: dict[str, Any]) -> bool:
    """Whether a state dict has the same number of groups, and of parameters in each."""
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    return sizes == [len(group["params"]) for group in groups]


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
