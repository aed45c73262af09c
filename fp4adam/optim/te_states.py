"""Optimizer states by name, as Transformer Engine's ``FusedAdam`` reads and writes them.

Its accessors exchange local FP32 tensors: ``exp_avg``, ``exp_avg_sq`` and ``master_param``, or the
int16 remainder in place of the last.
"""

from typing import Any

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import local
from fp4adam.optim import checks
from fp4adam.optim import state_dict as saving
from fp4adam.optim.engine import Engine
from fp4adam.optim.parameter import Parameter, State
from fp4adam.optim.state_codec import PLAIN
from fp4adam.optim.state_tensor import StateTensor

NAMES = ("exp_avg", "exp_avg_sq", "master_param")
# The options of a group in Transformer Engine's state dict, besides ``step``.
GROUP_OPTIONS = ("lr", "bias_correction", "betas", "eps", "weight_decay")


def initialize(engine: Engine, param: Tensor, store_param_remainders: bool | None) -> None:
    """``FusedAdam.initialize_state``."""
    member, options = _member(engine, param), engine.parameters.options
    if store_param_remainders not in (None, options.store_param_remainders, member.has_remainder):
        raise ValueError(
            "store_param_remainders must be that of the optimizer, "
            f"{options.store_param_remainders}, got {store_param_remainders}; set it at "
            "construction"
        )
    checks.check_steppable(options.name, param)
    engine.drop_plan()
    group = next(g for g, params in engine.groups if any(param is one for one in params))
    with torch._C.DisableTorchFunctionSubclass():
        device = member.param.device if options.capturable else None
        state = member.completed({}, group["amsgrad"], restart=False, device=device)
        engine.states[param] = engine.placed(param, state)
        if member.has_master:
            member.record()


def read(engine: Engine, param: Tensor, state_name: str, skip_unscale: bool) -> Tensor:
    """``FusedAdam.get_unscaled_state``."""
    _check_name(state_name)
    engine.settle()
    member, state = _member(engine, param), engine.states.get(param, {})
    if state_name == "master_param":
        _check_has_master(member)
    kept = "param_remainder" if member.has_remainder else state_name
    kept = kept if state_name == "master_param" else state_name
    is_param = state_name == "master_param" and not (member.has_master or member.has_remainder)
    if not is_param and kept not in state:
        raise ValueError(
            f"param must have a state to read {state_name} from, got none; call "
            "initialize_state(param) or step() first"
        )
    return _read_state(member, state, state_name, skip_unscale)


def write(engine: Engine, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
    """``FusedAdam.set_scaled_state``."""
    _check_name(state_name)
    member = _member(engine, param)
    if state_name == "master_param":
        _check_has_master(member)
    value = local(unscaled_state) if isinstance(unscaled_state, Tensor) else unscaled_state
    _check_value(member, state_name, value)
    engine.settle()
    if not {"step", "exp_avg", "exp_avg_sq"} <= engine.states.get(param, {}).keys():
        initialize(engine, param, None)
    engine.drop_plan()
    with torch._C.DisableTorchFunctionSubclass():
        known = member.is_unwritten()
        _write_state(member, engine.states[param], state_name, value)
        engine.states[param] = engine.placed(param, engine.states[param])
        if member.has_master and (known or state_name == "master_param"):
            member.record()


def te_state_dict(engine: Engine, saved: dict[str, Any]) -> dict[str, Any]:
    """``FusedAdam.te_state_dict``, made of its ``state_dict()``."""
    groups, states = [], dict(saved["state"])
    own_groups = [group for group, _ in engine.groups]
    keys = dict(saving.saved_keys(own_groups, saved))
    for i, (group, listed) in enumerate(zip(own_groups, saved["param_groups"], strict=True)):
        own = [states[keys[param]] for param in group["params"] if param in keys]
        step = _group_step([state for state in own if "step" in state], listed, i)
        groups.append(_group_of(group, listed, step))
    for param, key in keys.items():
        state = {name: states[key][name] for name in NAMES if name in states[key]}
        if "param_remainder" in engine.states[param]:
            state["master_param"] = engine.states[param]["param_remainder"]
        states[key] = state
    return {"state": states, "param_groups": groups}


def check_groups(engine: Engine) -> None:
    """Raise ValueError if a group has what Transformer Engine's optimizer has not."""
    for i, (group, _) in enumerate(engine.groups):
        for name in ("amsgrad", "maximize"):
            if group[name]:
                raise ValueError(
                    f"{name} must be False for a state dict of Transformer Engine, got True in "
                    f"group {i}; save state_dict() instead"
                )


def _member(engine: Engine, param: Tensor) -> Parameter:
    if not any(param is one for one in engine.params):
        raise ValueError(
            f"param must be a parameter of this optimizer, got one of shape "
            f"{tuple(param.shape)}, which is in none of its groups; pass tensors from "
            "param_groups"
        )
    return engine.parameters[param]


def _check_name(state_name: str) -> None:
    """Raise ValueError unless ``state_name`` is one of the three."""
    if state_name not in NAMES:
        raise ValueError(
            f"state_name must be one of {', '.join(NAMES)}, got {state_name!r}; read other entries "
            "from optimizer.state[param]. With Megatron's precision-aware optimizer, keep moments "
            "in float32 or bfloat16 and masters whole (store_param_remainders=False)"
        )


def _check_has_master(member: Parameter) -> None:
    """Raise ValueError if the parameter has no master at all, and is not one itself."""
    if not (member.has_master or member.has_remainder or member.param.dtype == torch.float32):
        raise ValueError(
            f"state_name must not be 'master_param' for a {member.param.dtype} parameter without a "
            f"master, got master_weights={member.options.master_weights}; make the optimizer with "
            "master_weights=True"
        )


def _read_state(member: Parameter, state: State, name: str, skip_unscale: bool) -> Tensor:
    """A state of a parameter in FP32; no copy if it is stored so."""
    if name == "master_param" and not member.has_master:
        return local(state["param_remainder"]) if member.has_remainder else member.param.detach()
    stored = StateTensor.of(state, name, member.codecs[name])
    if skip_unscale and stored.codes.dtype == torch.bfloat16:
        return stored.codes
    value = stored.decode()
    return value if value.dtype == torch.float64 else value.float()


def _check_value(member: Parameter, name: str, value: Tensor) -> None:
    """Raise unless ``value`` can become the state ``name`` of a parameter."""
    wanted = torch.float32
    if name == "master_param" and member.has_remainder:
        wanted = torch.int16
    elif member.param.dtype == torch.float64:
        wanted = torch.float64
    if not isinstance(value, Tensor) or value.dtype != wanted:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"unscaled_state must be {wanted} for {name}, got {kind}; convert it first")
    if value.shape != member.param.shape:
        raise ValueError(
            f"unscaled_state must have the shape of the local parameter, "
            f"{tuple(member.param.shape)}, got {tuple(value.shape)}; pass this rank's part"
        )


def _write_state(member: Parameter, state: State, name: str, value: Tensor) -> None:
    """Store a copy of ``value`` as the state ``name`` of a parameter, in its own storage dtype."""
    with torch.no_grad():
        value = value.detach()
        if name == "master_param" and not member.has_master:
            target = local(state["param_remainder"]) if member.has_remainder else member.param
            target.copy_(value)
            return
        plain = torch.empty_like(member.param, dtype=value.dtype).copy_(value)
        if name == "master_param" and member.completes:
            # In FP32, as after loading: the weight may not have its codes.
            StateTensor(PLAIN, plain, None).store(state, name, member.owner)
            return
        encoded = StateTensor.encode(member.codecs[name], plain.contiguous())
        encoded.store(state, name, member.owner)


def _group_step(states: list[dict[str, Any]], saved: dict[str, Any], number: int) -> int:
    """The step that all parameters of a group have in common; without states that of the others.

    Raises:
        ValueError: If they differ.
    """
    steps = {int(state["step"]) for state in states}
    if len(steps) > 1:
        raise ValueError(
            f"all parameters of group {number} must have taken the same number of steps for a "
            f"state dict of Transformer Engine, got {min(steps)} to {max(steps)}; it counts steps "
            "per group. Save state_dict() instead"
        )
    return steps.pop() if steps else saved.get("step", 0)


def _group_of(group: dict[str, Any], saved: dict[str, Any], step: int) -> dict[str, Any]:
    """A parameter group of a state dict with Transformer Engine's entries."""
    options = {name: group[name] for name in GROUP_OPTIONS}
    if isinstance(options["lr"], Tensor):
        options["lr"] = options["lr"].item()
    return {**options, "params": saved["params"], "step": step}
