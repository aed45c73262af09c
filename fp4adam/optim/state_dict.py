"""Saved optimizer states: FP32 under torch's names, or the stored codes (compact).

Saving only reads. Loading builds all new states before it touches an old one. Names have a fixed
order, because ranks gather the tensors of a state one after the other: the order of a set depends
on the hash seed of each process.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import (
    dtensor_class,
    is_dtensor,
    like,
    local,
    part_for,
    sharded_dims,
)
from fp4adam.optim import checks, te_layout
from fp4adam.optim.engine import Engine
from fp4adam.optim.factor_renewal import encoded
from fp4adam.optim.hyper_parameters import check_numbers, is_on_device
from fp4adam.optim.master_weights import adopt, find_stale, on_all_ranks, warn_of_restarts
from fp4adam.optim.masters import DIGEST, ENTRIES, MASTER, REST
from fp4adam.optim.remainder import complete, digest
from fp4adam.optim.state_codec import (
    CODES,
    FACTORED,
    FLOAT32,
    INT8,
    PLAIN,
    codec_of_codes,
    join_master,
)
from fp4adam.optim.state_tensor import SCALES, StateTensor, restored, state_like, step_count
from fp4adam.optim.target import State, Target, is_own_master, together
from fp4adam.tensors.quantized_tensor import QuantizedTensor

STATE_NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", MASTER)
# Codes and scales of an ``exp_avg_sq`` that is their product.
MEANS = ("exp_avg_sq_rows", "exp_avg_sq_columns")
# The tensors of a state, beside its count.
TENSOR_NAMES = (
    *(n for state in STATE_NAMES for n in (state, SCALES[state])), *MEANS, REST, DIGEST
)  # fmt: skip

Groups = list[dict[str, Any]]


def saved_keys(groups: Groups, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, Any]]:
    """Pairs of a parameter with a state in ``state_dict`` and the key of that state."""
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        for param, key in zip(group["params"], saved["params"], strict=True):
            if key in state_dict["state"]:
                yield param, key


# Saving


def check_compact(states: dict[Any, Any]) -> None:
    for state in (x for param, x in states.items() if is_dtensor(param) and isinstance(x, dict)):
        found = [name for name in SCALES.values() if name in state]
        if MASTER in state and state[MASTER].dtype == torch.int8:
            found.append("int8 masters")
        if found:
            raise NotImplementedError(
                "states of sharded parameters must have no scales and no int8 masters to be saved "
                f"as they are, got {', '.join(found)}, which fit the shards of this number of "
                "ranks only; save state_dict(), or store moments in bfloat16"
            )


@torch.no_grad()
def saved(engine: Engine, compact: bool, as_te: bool) -> dict[str, Any]:
    """``compact``: Keep codes and scales. ``as_te``: Else in Transformer Engine's layout."""
    keys: dict[Tensor, int] = {}
    groups: Groups = []
    for group, params in engine.groups:
        numbers = [keys.setdefault(param, len(keys)) for param in params]
        groups.append({**_options(group), "params": numbers})
    own, stale = _stale(engine, engine.params)
    states = {keys.get(owner, owner): state for owner, state in engine.states.items()}
    for group, params in engine.groups:
        for owner in params:
            state, member = own.get(owner), engine.targets[owner]
            # Of a run that has begun, also where those start that no step has used yet.
            is_new = bool(own) and member.start_value is not None and _is_on_all_ranks(owner)
            if state is not None:  # as of AdamW; every rank has one, with values or without
                has_master = member.master.name is not None and checks.is_quantized(owner)
                is_new = has_master and not {*state} & {*ENTRIES}
            if is_new:
                state = own[owner] = member.completed(state or {}, group["amsgrad"])
            if state is not None:
                is_stale = is_new or member in stale
                states[keys[owner]] = saved_state(member, state, is_stale, compact, as_te)
    state_dict = {"state": states, "param_groups": groups}
    if as_te and compact:
        for group in groups:
            group.pop("step", None)  # every state has its own
    elif as_te:
        te_layout.encode(state_dict, [keys[owner] for owner in own])
    if engine.targets.options.capturable:
        # As a number, which optimizers with and without capturable load.
        for group in groups:
            group["lr"] = float(group["lr"])
    return state_dict


def _is_on_all_ranks(owner: Tensor) -> bool:
    # A rank without rows does not know whether there is a value before quantization.
    rows = owner.shape[0]
    for dim in sharded_dims(owner):
        if owner.placements[dim].is_shard(0):
            n = owner.device_mesh.size(dim)
            rows -= -(-rows // n) * (n - 1)
    return rows > 0


def _stale(engine: Engine, params: list[Tensor]) -> tuple[dict[Tensor, State], set[Target]]:
    own = {param: te_layout.stored_state(engine.states.get(param)) for param in params}
    own = {param: state for param, state in own.items() if isinstance(state, dict)}
    with torch._C.DisableTorchFunctionSubclass():
        return own, find_stale([engine.targets[param] for param in own], own)


@torch.no_grad()
def current_master(engine: Engine, param: Tensor) -> Tensor | None:
    """The ``master_param`` that ``state_dict()`` has of a parameter; None if there is none."""
    own, stale = _stale(engine, [param])
    if param not in own:
        return None  # of another optimizer, or before the first step
    with torch._C.DisableTorchFunctionSubclass():
        state = {name: x for name, x in own[param].items() if name in ENTRIES}
        return saved_state(engine.targets[param], state, bool(stale), False).get(MASTER)


def saved_state(
    member: Target, state: State, is_stale: bool, compact: bool, as_te: bool = False
) -> State:
    """The state of a parameter in a checkpoint; if stale, with its value in the master's place."""
    state = dict(state)
    if is_stale:
        member.master.store(state, member.value())
        if member.master.name == MASTER and not compact:
            StateTensor(PLAIN, member.value(), None).store(state, MASTER, member.owner)
    saved = {name: value for name, value in state.items() if name not in ENTRIES}
    for name, codec in member.codecs.items():
        if name in saved and not (compact or codec.exact):
            stored = StateTensor.of(saved, name, codec)
            StateTensor(PLAIN, stored.decode(), None).store(saved, name, member.owner)
            if codec is FACTORED:
                saved[MEANS[0]], saved[MEANS[1]] = like(member.owner, stored.codes), stored.scales
    saved |= member.master.saved(state, compact, as_te)
    return dict(sorted(saved.items()))


@torch.no_grad()
def for_copies(engine: Engine) -> dict[Any, Any]:
    """The states as they are stored, by parameter; copies know nothing of who wrote what."""
    own, stale = _stale(engine, engine.params)
    members = {owner: engine.targets[owner] for owner in own}
    saved = {o: saved_state(m, own[o], m in stale, True) for o, m in members.items()}
    return defaultdict(dict, {**engine.states, **saved})


# Loading


@torch.no_grad()
def loaded(
    engine: Engine, state_dict: dict[str, Any], defaults: dict[str, Any]
) -> tuple[dict[Any, Any], Groups, dict[Tensor, State]]:
    """New states without masters, groups, and the saved states, for :func:`load_masters`."""
    check_is_state_dict(state_dict)
    groups, options = [group for group, _ in engine.groups], engine.targets.options
    check_groups(groups, state_dict)
    owners = {key: owner for owner, key in saved_keys(groups, state_dict)}
    own_masters = {key for key, owner in owners.items() if is_own_master(owner)}
    names = (MASTER, REST) if options.store_param_remainders else (MASTER,)
    state_dict = with_steps(state_dict, dict.fromkeys(own_masters, names))
    for i, (owner, key) in enumerate(saved_keys(groups, state_dict)):
        _check_state(i, owner, state_dict["state"][key])
    new_groups = [defaults | new for new in deepcopy([*map(_options, state_dict["param_groups"])])]
    for group, new in zip(groups, new_groups, strict=True):
        check_numbers(new)
        checks.check_options(options, new)
        new["params"] = group["params"]
        if "param_names" in group:
            new.setdefault("param_names", group["param_names"])
    states: dict[Any, Any] = {}
    given: dict[Tensor, State] = {}
    means = _means(engine, {o: state_dict["state"][k] for k, o in owners.items()})
    for key, saved in state_dict["state"].items():
        owner = owners.get(key, key)
        states[owner] = saved
        if key in owners and isinstance(saved, dict):
            given[owner] = saved
            others = {n: x for n, x in saved.items() if n not in TENSOR_NAMES}
            state = _moments(engine.targets[owner], saved, means.get(engine.targets[owner]))
            states[owner] = {**others, **engine.placed(owner, state)}
    complete_groups(new_groups, defaults, options.capturable)
    return with_counts(states, options.capturable), new_groups, given


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def complete_groups(groups: Groups, defaults: dict[str, Any], capturable: bool) -> None:
    """Give groups that were loaded, copied or unpickled what this optimizer needs."""
    for group in groups:
        for name, value in defaults.items():
            group.setdefault(name, value)
        # A checkpoint of torch.optim carries the flags of the implementation that wrote it.
        group["capturable"], group["differentiable"] = capturable, False
        if capturable and not is_on_device(group["lr"]):
            group["lr"] = float(group["lr"])


def with_counts(states: dict[Any, Any], capturable: bool) -> dict[Any, Any]:
    """States that were loaded, copied or unpickled, with counts of their own."""
    new = defaultdict(dict)
    for param, state in states.items():
        new[param] = state = dict(state) if isinstance(state, dict) else state
        if isinstance(state, dict) and "step" in state:
            state["step"] = step_count(state["step"], param, capturable).clone()
    return new


def with_steps(state_dict: dict[str, Any], unused: dict[Any, tuple[str, ...]]) -> dict[str, Any]:
    """A state dict with a ``step`` in every state; Transformer Engine keeps it in the group.

    The count of a state holds; that of the group is for states without one. Where there is none at
    all, as in states that Megatron allocates, no step has been taken. ``unused``: Entries that say
    nothing there. The master of an FP32 parameter is its first value, or memory of Megatron's.
    """
    groups, states = [], dict(state_dict["state"])
    has_steps = any("step" in state for state in states.values() if isinstance(state, dict))
    for group in state_dict["param_groups"]:
        given = group.get("step")
        for key in group["params"]:
            state = states.get(key) or {}
            if not state or given is None and (has_steps or "exp_avg" not in state):
                continue
            state = te_layout.with_remainder(state)
            if "step" not in state:
                state = {n: x for n, x in state.items() if n not in unused.get(key, ())}
                # Moments that Megatron allocates for FP8, in uint8, are numbers.
                coded = [n for n, x in state.items() if getattr(x, "dtype", None) == torch.uint8]
                state = {**state, **{n: state[n].float() for n in coded}, "step": given or 0}
            states[key] = state
        groups.append({name: value for name, value in group.items() if name != "step"})
    return {**state_dict, "state": states, "param_groups": groups}


def _moments(member: Target, saved: State, means: StateTensor | None) -> State:
    owner, param = member.owner, member.param
    saved, state = _local_part(owner, saved), {}
    for name in STATE_NAMES[:-1]:
        if name in saved:
            codec = member.codecs.get(name, FLOAT32)  # the maximum is never narrow
            given = means if codec is FACTORED else StateTensor.of_saved(saved, name)
            restored(given, codec, param).store(state, name, owner)
    return state


def _means(engine: Engine, saved: dict[Tensor, State]) -> dict[Target, StateTensor]:
    """Factored second moments; those of saved means if these are what their product says."""
    members = [engine.targets[owner] for owner in engine.params if saved.get(owner)]
    found, values, fit = {}, {}, []
    for m in (m for m in members if m.codecs["exp_avg_sq"] is FACTORED):
        own = _local_part(m.owner, saved[m.owner])
        found[m] = StateTensor.of_saved(own, "exp_avg_sq")
        values[m] = found[m].decode()
        if MEANS[1] in own:
            found[m] = StateTensor(FACTORED, *(own[name] for name in MEANS))
        # Steps of another optimizer would have left them behind.
        fit.append(found[m].codec is FACTORED and torch.equal(found[m].decode(), values[m]))
    agreed = zip(values.items(), on_all_ranks([*values], fit), strict=True)
    return found | encoded({m: state_like(m.param).copy_(x) for (m, x), fits in agreed if not fits})


@torch.no_grad()
def load_masters(engine: Engine, given: dict[Tensor, State]) -> None:
    """Take the masters of saved states that belong to the weights, and warn of all others.

    These stay in the states in FP32, as the model may be loaded later: the next step asks again.
    """
    members = [engine.targets[owner] for owner in engine.params if not owner.is_meta]
    kept, n_other = [], 0
    for member in members:
        owner, saved = member.owner, given.get(member.owner, {})
        if REST in saved and member.master.name == REST:
            zeros = torch.zeros_like(member.param, dtype=torch.int16)
            rest = zeros.copy_(part_for(owner, saved[REST]))
            engine.states[owner][REST] = like(owner, rest)
            member.forget()
        elif member.master.name and (MASTER in saved or REST in saved):
            kept.append(member)
        elif MASTER in saved and is_own_master(owner):
            n_other += not adopt_master(member, given_master(member, saved)[MASTER])
    for peers in together(kept):
        masters = [given_master(member, given[member.owner]) for member in peers]
        stand = adopt(peers, masters)
        n_other += stand.count(False)
        for member, master, stands in zip(peers, masters, stand, strict=True):
            value = local(master[MASTER])
            if stands and value.dtype != torch.int8:
                member.take_master(master, value)
                if member.master.codec is INT8:
                    # FSDP2 may move shards before the first step.
                    master[DIGEST] = digest(member.param)
            elif not stands:
                master[MASTER] = like(member.owner, value)
            engine.states[member.owner] |= engine.placed(member.owner, master)
    # torch drops the states of frozen parameters; a state of AdamW has no masters at all.
    lacking = [m for m in members if checks.is_quantized(m.owner) and m.master.name]
    n_lacking = len({*lacking} - {*kept}) if kept else 0
    cure = (
        "load the model of the same checkpoint before the next step, or call "
        "reset_master_weights() if that is intended"
    )
    warn_of_restarts(
        (n_other, f"are not those of the loaded masters; {cure}"),
        (n_lacking, f"the loaded state has no masters for; {cure}"),
    )


def given_master(member: Target, saved: State) -> State:
    """A copy of the local part of a saved master: in FP32, or a remainder and its digest."""
    owner, param = member.owner, member.param
    saved = _local_part(owner, {name: saved[name] for name in ENTRIES if name in saved})
    if MASTER not in saved:
        return {MASTER: join_master(param, saved[REST].to(param.device))}
    given = StateTensor.of_saved(saved, MASTER)
    if given.codec is not INT8:
        return {MASTER: state_like(param).copy_(given.decode())}
    remainder = torch.empty_like(param, dtype=torch.int8).copy_(given.codes)
    if member.master.codec is INT8:
        return {MASTER: remainder, DIGEST: saved[DIGEST].clone()}
    if isinstance(param, QuantizedTensor) and torch.equal(saved[DIGEST].cpu(), digest(param)):
        return {MASTER: complete(param, remainder)}
    # Nobody can tell what it was, so it belongs to nothing.
    return {MASTER: torch.full_like(param, torch.nan, dtype=torch.float32)}


def adopt_master(member: Target, master: Tensor) -> bool:
    """Copy a master into an FP32 parameter that has been rounded to 16 bits since; else False."""
    param, master = member.param.detach(), master.to(member.param.device)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if not any(torch.equal(param, master.to(dtype).float()) for dtype in dtypes):
        return False
    param.copy_(master)
    return True


def _local_part(owner: Tensor, saved: State) -> State:
    """The local part of a saved state; ValueError if it is placed otherwise than its parameter."""
    kind = dtensor_class()
    if not isinstance(owner, kind):
        parts = {n: part_for(owner, value) for n, value in saved.items() if isinstance(value, kind)}
        return saved | parts
    # The saved scales are those of the whole tensor, so decode before cutting.
    given = {n: StateTensor.of_saved(saved, n) for n in STATE_NAMES if n in saved}
    numbers = {n: each.decode() for n, each in given.items()}
    if (means := given.get("exp_avg_sq")) and means.codec is FACTORED:
        numbers |= dict(zip(MEANS, means[1:], strict=True))
    return {
        name: part_for(owner, value) if isinstance(value, Tensor) and name != MEANS[1] else value
        for name, value in {**saved, **numbers}.items()
        if name not in SCALES.values()
    }


# Checking


def check_is_state_dict(state_dict: dict[str, Any]) -> None:
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"state_dict must have state and param_groups, got {sorted(map(str, state_dict))[:3]}; "
            "pass what optimizer.state_dict() returned, a model's goes to the model"
        )


def check_groups(groups: Groups, state_dict: dict[str, Any]) -> None:
    """Raises ValueError with the messages of torch.optim."""
    saved = state_dict["param_groups"]
    if len(groups) != len(saved):
        raise ValueError("loaded state dict has a different number of parameter groups")
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of "
            "optimizer's group"
        )


def check_masters(groups: Groups, state_dict: dict[str, Any]) -> None:
    for i, (param, key) in enumerate(saved_keys(groups, state_dict)):
        saved, what = state_dict["state"][key], f"master_param of parameter {i}"
        if saved.keys() & {*SCALES.values(), REST}:
            raise ValueError(
                f"{what} must be whole, as all of its state, got {sorted(saved)}; save "
                "state_dict() instead of compact_state_dict()"
            )
        if MASTER in saved:
            _check_tensor(what, saved[MASTER], param)


def _check_state(i: int, param: Tensor, saved: Any) -> None:
    if not saved:
        return
    if not {"step", "exp_avg", "exp_avg_sq"} <= saved.keys():
        raise ValueError(
            f"state of parameter {i} must hold step, exp_avg and exp_avg_sq, got "
            f"{sorted(saved)}; it was saved by another kind of optimizer"
        )
    if not _is_number(saved["step"], param):
        raise ValueError(
            f"step of parameter {i} must be one number >= 0, got {saved['step']!r}; the "
            "checkpoint is damaged"
        )
    for name in (name for name in STATE_NAMES if name in saved):
        what, value, scales = f"{name} of parameter {i}", saved[name], saved.get(SCALES[name])
        if name == MASTER and DIGEST in saved:
            if is_dtensor(param):
                raise ValueError(
                    f"{what} must be floating point for a sharded parameter, got int8 remainders "
                    "of a whole weight; save state_dict() instead of compact_state_dict()"
                )
            _check_tensor(what, value, param, torch.int8)
            _check_tensor(f"{DIGEST} of parameter {i}", saved[DIGEST], param, torch.int64, (1,))
        elif scales is not None:
            codec = codec_of_codes(name, getattr(value, "dtype", None)) or CODES
            shape, of_scales = codec.shapes(param.shape)
            _check_tensor(what, value, param, codec.dtype, shape)
            _check_tensor(f"the scales of {what}", scales, param, codec.scale_dtype, of_scales)
        else:
            _check_tensor(what, value, param)
    of_means = FACTORED.shapes(param.shape) if saved.keys() & {*MEANS} else ()
    for name, shape in zip(MEANS, of_means, strict=False):
        _check_tensor(f"{name} of parameter {i}", saved.get(name), param, shape=shape)
    if REST in saved:
        _check_tensor(f"{REST} of parameter {i}", saved[REST], param, torch.int16)
        if param.dtype != torch.bfloat16:
            raise ValueError(
                f"{REST} of parameter {i} must belong to a bfloat16 parameter, got {param.dtype}; "
                "save state_dict(), which has whole masters, to change the dtype"
            )


def _check_tensor(
    what: str,
    value: Any,
    param: Tensor,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
) -> None:
    """Raise unless it is a dense tensor of this shape (that of ``param``) and dtype (floating)."""
    got, is_right = type(value).__name__, False
    if isinstance(value, Tensor):
        got = f"{value.dtype}, {value.layout} on {value.device}"
        is_right = value.dtype == dtype or dtype is None and value.is_floating_point()
        is_right &= value.layout == torch.strided and (param.is_meta or not value.is_meta)
    if not is_right:
        wanted = str(dtype).removeprefix("torch.") if dtype else "a floating point tensor"
        raise ValueError(
            f"{what} must be {wanted}, got {got}; the checkpoint is damaged, or must be made dense "
            "or converted first"
        )
    shape = param.shape if shape is None else shape
    if value.shape != shape:
        raise ValueError(
            f"{what} must have shape {tuple(shape)}, got {tuple(value.shape)}; load it into the "
            "model that it was saved from"
        )


def _is_number(step: Any, param: Tensor) -> bool:
    if isinstance(step, Tensor) and step.numel() == 1:
        if step.is_meta:
            return param.is_meta
        step = step.item()
    return isinstance(step, (int, float)) and 0 <= step < math.inf
