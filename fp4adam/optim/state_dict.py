"""Saved optimizer states: FP32 under torch's names, or the stored codes (compact).

Saving only reads. Loading builds all new states before it touches an old one. Names have a fixed
order, because ranks gather the tensors of a state one after the other: the order of a set depends
on the hash seed of each process.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import is_dtensor, like, local, part_for
from fp4adam.formats.roundings import known_roundings
from fp4adam.optim.param_view import ParamView, are_equal
from fp4adam.optim.state_codec import PLAIN, STATE_BLOCK, codec_of_codes, join_master
from fp4adam.optim.stored_state import StoredState, restored, state_like

STATE_NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param")
_ORDER = (
    "step",
    *(name for state in STATE_NAMES for name in (state, f"{state}_scale")),
    "param_remainder",
)
# The tensors of a state; ``step`` is a count.
TENSOR_NAMES = frozenset(_ORDER[1:])

Groups = list[dict[str, Any]]
State = dict[str, Any]


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


def saved_state(view: ParamView, state: State, left: bool, compact: bool) -> State:
    """The state of a parameter in the form of a checkpoint, in torch's order of names.

    Args:
        view: The parameter.
        state: Its state in the optimizer.
        left: Whether the parameter no longer equals its rounded master. Its own value is saved as
            the master then.
        compact: Keep codes and scales as they are stored.
    """
    saved = dict(state)
    waits = view.has_remainder and "param_remainder" not in state
    if not view.has_master and not waits:
        # The parameter has been converted to FP32 and needs no master any more.
        saved.pop("master_param", None)
        saved.pop("master_param_scale", None)
    elif (
        waits
        and "master_param" in state
        and not view.is_rounded(local(state["master_param"]).to(view.param.device))
    ):
        saved["master_param"] = like(view.owner, view.value())
    if not view.has_remainder:
        # The parameter is no longer the upper half of a master.
        saved.pop("param_remainder", None)
    own = {name: local(value) for name, value in state.items()}
    if left:
        value = StoredState.encode(view.codecs["master_param"], view.value())
        value.put_into(own, "master_param")
        saved["master_param"] = like(view.owner, own["master_param"])
        if "master_param_scale" in own:
            saved["master_param_scale"] = own["master_param_scale"]
    if not compact:
        for name, codec in view.codecs.items():
            if name in saved and not codec.exact:
                saved[name] = like(view.owner, StoredState.of(own, name, codec).decode())
                saved.pop(f"{name}_scale", None)
        if "param_remainder" in saved:
            remainder = local(saved.pop("param_remainder"))
            master = join_master(view.param.detach().to(remainder.device), remainder)
            saved["master_param"] = like(view.owner, master)
    return ordered(saved)


def ordered(state: State) -> State:
    """The same state with its names in an order that is equal on all ranks."""
    known = [name for name in _ORDER if name in state]
    return {name: state[name] for name in (*known, *sorted(state.keys() - set(_ORDER)))}


# Loading


def with_steps(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict with a ``step`` in every state; Transformer Engine keeps it in the group.

    Raises:
        ValueError: If ``state_dict`` is not the state dict of an optimizer.
    """
    check_is_state_dict(state_dict)
    groups, states = [], dict(state_dict["state"])
    for group in state_dict["param_groups"]:
        if "step" in group:
            for key in group["params"]:
                if isinstance(states.get(key), dict) and states[key]:
                    states[key] = {"step": group["step"], **_with_remainder(states[key])}
            group = {name: value for name, value in group.items() if name != "step"}
        groups.append(group)
    return {**state_dict, "state": states, "param_groups": groups}


def _with_remainder(state: State) -> State:
    """A state of Transformer Engine, whose int16 ``master_param`` is a remainder."""
    master = state.get("master_param")
    if isinstance(master, Tensor) and master.dtype == torch.int16:
        others = {name: value for name, value in state.items() if name != "master_param"}
        return {**others, "param_remainder": master}
    return state


def new_state(view: ParamView, saved: State) -> State:
    """A copy of a saved state in the optimizer's own formats.

    If the state has a master but the parameter keeps none, ``master_param`` stays in the result.

    Raises:
        ValueError: If the placements of the state differ from those of its parameter.
    """
    saved = _local_part(view.owner, saved)
    param, state = view.param, {}
    for name in STATE_NAMES:
        if name not in saved:
            continue
        if name in view.codecs:
            given = StoredState.of_saved(saved, name)
            stored = restored(given, view.codecs[name], param)
            if name == "master_param" and not _is_exact(given, stored):
                # Keep it in FP32: the parameter may equal the rounded original, but not the rounded
                # narrow copy.
                stored = StoredState(PLAIN, state_like(param).copy_(given.decode()), None)
            stored.put_into(state, name)
        else:
            state[name] = state_like(param).copy_(saved[name])
    remainder = saved.get("param_remainder")
    if remainder is not None and view.has_remainder:
        zeros = torch.zeros_like(param, dtype=torch.int16)
        state["param_remainder"] = zeros.copy_(remainder)
    elif remainder is not None:
        master = join_master(param.detach(), remainder.to(param.device))
        master = state_like(param).copy_(master)
        StoredState.encode(view.codecs["master_param"], master).put_into(state, "master_param")
    return {
        # Scales follow each rank's memory order, not the shape of the parameter: no DTensors.
        name: value if name.endswith("_scale") else like(view.owner, value)
        for name, value in state.items()
    }


def _is_exact(given: StoredState, stored: StoredState) -> bool:
    """Whether ``stored`` holds the values of the loaded master ``given`` without rounding."""
    if stored.codec.exact or given.codec.name == stored.codec.name:
        return True
    return are_equal(stored.decode(), given.decode().to(stored.codes.device, torch.float32))


def adopt_master(view: ParamView, state: State) -> None:
    """Copy a loaded master into a parameter without a master of its own, if it rounds to its value.

    With remainders the next step decides, because the model may be loaded later.
    """
    if view.has_remainder:
        return
    master = local(state.pop("master_param")).to(view.param.device, torch.float32)
    state.pop("master_param_scale", None)
    if view.param.dtype.itemsize >= 4 and _is_rounding(view, master):
        with torch.no_grad():
            view.param.copy_(master)


def _is_rounding(view: ParamView, master: Tensor) -> bool:
    """Whether an FP32 parameter equals ``master`` rounded to 16 bits or to a quantized format.

    If not, the parameter has been trained since, and the master is out of date.
    """
    value = view.param.detach().to(torch.float32)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if any(are_equal(value, master.to(dtype).float()) for dtype in dtypes):
        return True
    if is_dtensor(view.owner) or master.dim() < 2:
        return False
    return any(are_equal(value, rounded) for rounded in known_roundings(master))


def _local_part(owner: Tensor, saved: State) -> State:
    """The local part of a saved state, as a new dictionary."""
    if not is_dtensor(owner):
        if any(is_dtensor(value) for value in saved.values()):
            return {
                name: part_for(owner, value) if isinstance(value, Tensor) else value
                for name, value in saved.items()
            }
        return dict(saved)
    # The saved scales are those of the whole tensor, so decode before cutting.
    names = [name for name in STATE_NAMES if name in saved]
    numbers = {name: StoredState.of_saved(saved, name).decode() for name in names}
    return {
        name: part_for(owner, value) if isinstance(value, Tensor) and name != "step" else value
        for name, value in {**saved, **numbers}.items()
        if not name.endswith("_scale")
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
        if "master_param_scale" in saved or "param_remainder" in saved:
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
        if saved and not _is_number(saved["step"]):
            raise ValueError(
                f"step of parameter {i} must be one number >= 0, got {saved['step']!r}; the "
                "checkpoint is damaged"
            )
        for name in (name for name in STATE_NAMES if name in saved):
            what = f"{name} of parameter {i}"
            if f"{name}_scale" in saved:
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
    codes, scales = saved[name], saved[f"{name}_scale"]
    dtype = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
    if not isinstance(codes, Tensor) or codec_of_codes(name, dtype) is None:
        raise ValueError(
            f"{what} must be codes of a known dtype beside {name}_scale, got {dtype}; the "
            "checkpoint is damaged"
        )
    _check_shape(what, codes, param.shape)
    n_blocks = -(-param.numel() // STATE_BLOCK)
    if not isinstance(scales, Tensor) or scales.dtype != torch.uint8:
        kind = scales.dtype if isinstance(scales, Tensor) else type(scales).__name__
        raise ValueError(f"{what} must have uint8 scales, got {kind}; the checkpoint is damaged")
    _check_shape(f"the scales of {what}", scales, (n_blocks,))


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


def _is_number(step: Any) -> bool:
    if isinstance(step, Tensor):
        if step.numel() != 1 or step.is_complex():
            return False
        return step.is_meta or 0 <= step.item() < math.inf
    return isinstance(step, (int, float)) and 0 <= step < math.inf
