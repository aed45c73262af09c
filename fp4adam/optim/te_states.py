"""Optimizer states by name, as Transformer Engine's ``FusedAdam`` reads and writes them.

Its accessors exchange local FP32 tensors: ``exp_avg``, ``exp_avg_sq`` and ``master_param``, or the
int16 remainder in place of the last.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import local
from fp4adam.optim import checks
from fp4adam.optim.engine import Engine
from fp4adam.optim.masters import MASTER, REST
from fp4adam.optim.state_codec import INT8, PLAIN
from fp4adam.optim.state_dict import adopt_master
from fp4adam.optim.state_tensor import StateTensor
from fp4adam.optim.target import State, Target, is_own_master

if TYPE_CHECKING:
    from fp4adam.optim.fused_adam import FusedAdam

NAMES = ("exp_avg", "exp_avg_sq", "master_param")


@torch.no_grad()
def initialize_state(
    self: "FusedAdam", param: Tensor, store_param_remainders: bool | None = None
) -> None:
    """Create the state of a parameter before its first step, or start it anew.

    ``store_param_remainders`` must be that of the optimizer, or None; it may be False for a
    parameter without a remainder.
    """
    engine = self._engine
    member, options = _member(engine, param), engine.targets.options
    is_half = member.master.name == REST
    if store_param_remainders not in (None, options.store_param_remainders, is_half):
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
        if member.master.name == MASTER:
            member.record()


@torch.no_grad()
def get_unscaled_state(
    self: "FusedAdam", param: Tensor, state_name: str, skip_unscale: bool = False
) -> Tensor:
    """The local part of a state of a parameter, in FP32.

    It is the state itself if that is stored in FP32, or in BF16 with ``skip_unscale``, else a
    decoded copy. ``master_param`` is the int16 remainder of a BF16 parameter with
    ``store_param_remainders``, and an FP32 parameter itself.
    """
    engine = self._engine
    _check_name(state_name)
    engine.settle()
    member, state = _member(engine, param), engine.states.get(param, {})
    if state_name == "master_param":
        _check_has_master(member)
    kept = REST if member.master.name == REST else state_name
    kept = kept if state_name == "master_param" else state_name
    is_param = state_name == "master_param" and not member.master.name
    if not is_param and kept not in state:
        raise ValueError(
            f"param must have a state to read {state_name} from, got none; call "
            "initialize_state(param) or step() first"
        )
    return _read_state(member, state, state_name, skip_unscale)


@torch.no_grad()
def set_scaled_state(
    self: "FusedAdam", param: Tensor, state_name: str, unscaled_state: Tensor
) -> None:
    """Set a state of a parameter from FP32 values, converted to its storage dtype.

    A master is authoritative: the next step continues from it, whatever the parameter holds. The
    state is created first if there is none. An FP32 parameter is stepped itself, and takes a
    master only if it equals it rounded: Transformer Engine saves its first value.

    Args:
        param: A parameter of this optimizer.
        state_name: "exp_avg", "exp_avg_sq" or "master_param".
        unscaled_state: Float32 of the shape of the local part of ``param``, on any device. For
            ``master_param`` with ``store_param_remainders``, the int16 remainder.
    """
    engine = self._engine
    _check_name(state_name)
    member = _member(engine, param)
    if state_name == "master_param":
        _check_has_master(member)
    value = local(unscaled_state) if isinstance(unscaled_state, Tensor) else unscaled_state
    _check_value(member, state_name, value)
    engine.settle()
    if not {"step", "exp_avg", "exp_avg_sq"} <= engine.states.get(param, {}).keys():
        initialize_state(self, param)
    engine.drop_plan()
    with torch._C.DisableTorchFunctionSubclass():
        known = member.is_unwritten()
        _write_state(member, engine.states[param], state_name, value)
        engine.states[param] = engine.placed(param, engine.states[param])
        if member.master.name == MASTER and (known or state_name == "master_param"):
            member.record()


def _member(engine: Engine, param: Tensor) -> Target:
    if not any(param is one for one in engine.params):
        raise ValueError(
            f"param must be a parameter of this optimizer, got one of shape "
            f"{tuple(param.shape)}, which is in none of its groups; pass tensors from "
            "param_groups"
        )
    return engine.targets[param]


def _check_name(state_name: str) -> None:
    """Raise ValueError unless ``state_name`` is one of the three."""
    if state_name not in NAMES:
        raise ValueError(
            f"state_name must be one of {', '.join(NAMES)}, got {state_name!r}; read other entries "
            "from optimizer.state[param], which shows these three alone with FusedAdam"
        )


def _check_has_master(member: Target) -> None:
    """Raise ValueError if the parameter has no master at all, and is not one itself."""
    if not (member.master.name or is_own_master(member.owner)):
        raise ValueError(
            f"state_name must not be 'master_param' for a {member.param.dtype} parameter without a "
            f"master, got master_weights={member.options.master_weights}; make the optimizer with "
            "master_weights=True"
        )


def _read_state(member: Target, state: State, name: str, skip_unscale: bool) -> Tensor:
    """A state of a parameter in FP32; no copy if it is stored so."""
    if name == "master_param" and member.master.name != MASTER:
        return local(state[REST]) if member.master.name == REST else member.param.detach()
    if name == "master_param":
        value = member.master.read(state)
        return value if value.dtype == torch.float64 else value.float()
    stored = StateTensor.of(state, name, member.codecs[name])
    if skip_unscale and stored.codes.dtype == torch.bfloat16:
        return stored.codes
    value = stored.decode()
    return value if value.dtype == torch.float64 else value.float()


def _check_value(member: Target, name: str, value: Tensor) -> None:
    """Raise unless ``value`` can become the state ``name`` of a parameter."""
    wanted = torch.float32
    if name == "master_param" and member.master.name == REST:
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


def _write_state(member: Target, state: State, name: str, value: Tensor) -> None:
    """Store a copy of ``value`` as the state ``name`` of a parameter, in its own storage dtype."""
    with torch.no_grad():
        value = value.detach()
        if name == "master_param" and member.master.name == REST:
            local(state[REST]).copy_(value)
            return
        if name == "master_param" and member.master.name != MASTER:
            adopt_master(member, value)
            return
        plain = torch.empty_like(member.param, dtype=value.dtype).copy_(value)
        if name == "master_param" and member.master.codec is INT8:
            # In FP32, as after loading: the weight may not have its codes.
            StateTensor(PLAIN, plain, None).store(state, name, member.owner)
            return
        if name == "master_param":
            member.master.store(state, plain.contiguous())
            return
        encoded = StateTensor.encode(member.codecs[name], plain.contiguous())
        encoded.store(state, name, member.owner)
