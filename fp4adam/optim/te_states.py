"""Optimizer states by name, as Transformer Engine's ``FusedAdam`` reads and writes them."""

from typing import Any

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import local
from fp4adam.optim import checks
from fp4adam.optim.engine import Engine
from fp4adam.optim.factor_renewal import encoded
from fp4adam.optim.masters import MASTER, REST
from fp4adam.optim.state_codec import FACTORED, INT8, PLAIN
from fp4adam.optim.state_dict import adopt_master
from fp4adam.optim.state_tensor import StateTensor
from fp4adam.optim.target import State, Target, is_own_master

NAMES = ("exp_avg", "exp_avg_sq", MASTER)


@torch.no_grad()
def initialize_state(self: Any, param: Tensor, store_param_remainders: bool | None = None) -> None:
    """Create the state of a parameter before its first step, or start it anew.

    ``store_param_remainders`` must be that of the optimizer or of the parameter, or None.
    """
    engine = self._engine
    target, options = _target(engine, param), engine.targets.options
    is_half = target.master.name == REST
    if store_param_remainders not in (None, options.store_param_remainders, is_half):
        raise ValueError(
            f"store_param_remainders must be that of the optimizer, got {store_param_remainders}; "
            "set it at construction"
        )
    checks.check_steppable(options.name, param)
    engine.drop_plan()
    group = next(g for g, params in engine.groups if any(param is one for one in params))
    with torch._C.DisableTorchFunctionSubclass():
        state = target.completed({}, group["amsgrad"])
        engine.states[param] = engine.placed(param, state)
        if target.master.name == MASTER:
            target.record()


@torch.no_grad()
def get_unscaled_state(
    self: Any, param: Tensor, state_name: str, skip_unscale: bool = False
) -> Tensor:
    """The local part of a state of a parameter, in FP32.

    It is the state itself if that is stored in FP32, or in BF16 with ``skip_unscale``, else a
    decoded copy. ``master_param`` is the int16 remainder of a BF16 parameter with
    ``store_param_remainders``, and an FP32 parameter itself.
    """
    engine = self._engine
    target = _target(engine, param, state_name)
    if state_name == MASTER and not target.master.name:
        return target.param.detach()
    state = engine.states.get(param, {})
    is_remainder = state_name == MASTER and target.master.name == REST
    if (REST if is_remainder else state_name) not in state:
        raise ValueError(
            f"param must have a state to read {state_name} from, got none; call "
            "initialize_state(param) or step() first"
        )
    if is_remainder:
        return local(state[REST])
    if state_name == MASTER:
        value = target.master.read(state)
    else:
        stored = StateTensor.of(state, state_name, target.codecs[state_name])
        if skip_unscale and stored.codes.dtype == torch.bfloat16:
            return stored.codes
        value = stored.decode()
    return value if value.dtype == torch.float64 else value.float()


@torch.no_grad()
def set_scaled_state(self: Any, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
    """Set a state of a parameter from FP32 values of its local shape, or from an int16 remainder.

    A master is authoritative: the next step continues from it, whatever the parameter holds. The
    state is created first if there is none. An FP32 parameter is stepped itself, and takes a
    master only if it equals it rounded: Transformer Engine saves its first value.
    """
    engine = self._engine
    target = _target(engine, param, state_name)
    value = local(unscaled_state)
    _check_value(target, state_name, value)
    if not {"step", "exp_avg", "exp_avg_sq"} <= engine.states.get(param, {}).keys():
        initialize_state(self, param)
    with torch._C.DisableTorchFunctionSubclass():
        known = target.is_unwritten()
        state = {**engine.states[param]}
        _write_state(target, state, state_name, value)
        engine.states[param] = engine.placed(param, state)
        if target.master.name == MASTER and (known or state_name == MASTER):
            target.record()


def _target(engine: Engine, param: Tensor, state_name: str | None = None) -> Target:
    """What is stepped of ``param``; raises ValueError unless it can have a state of this name."""
    checks.check_known([param], engine.params)
    target = engine.targets[param]
    if state_name not in (None, *NAMES):
        raise ValueError(
            f"state_name must be one of {', '.join(NAMES)}, got {state_name!r}; read other entries "
            "from optimizer.state[param], which shows these three alone with FusedAdam"
        )
    if state_name == MASTER and not (target.master.name or is_own_master(param)):
        raise ValueError(
            f"state_name must not be 'master_param' for a {param.dtype} parameter without a "
            f"master, got master_weights={target.options.master_weights}; make the optimizer with "
            "master_weights=True"
        )
    return target


def _check_value(target: Target, name: str, value: Tensor) -> None:
    wanted = torch.float64 if target.param.dtype == torch.float64 else torch.float32
    if name == MASTER and target.master.name == REST:
        wanted = torch.int16
    found = getattr(value, "dtype", type(value).__name__)
    if found != wanted:
        raise TypeError(f"unscaled_state must be {wanted} for {name}, got {found}; convert it")
    if value.shape != target.param.shape:
        raise ValueError(
            f"unscaled_state must have the shape of the local parameter, "
            f"{tuple(target.param.shape)}, got {tuple(value.shape)}; pass this rank's part"
        )


def _write_state(target: Target, state: State, name: str, value: Tensor) -> None:
    if name == MASTER and target.master.name == REST:
        local(state[REST]).copy_(value)
        return
    if name == MASTER and target.master.name != MASTER:
        adopt_master(target, value)
        return
    plain = torch.empty_like(target.param, dtype=value.dtype).copy_(value)
    if name != MASTER and target.codecs[name] is FACTORED:
        encoded({target: plain})[target].store(state, name, target.owner)
    elif name != MASTER:
        StateTensor.encode(target.codecs[name], plain).store(state, name, target.owner)
    elif target.master.codec is INT8:
        # In FP32, as after loading: the weight may not have its codes.
        StateTensor(PLAIN, plain, None).store(state, name, target.owner)
    else:
        target.master.store(state, plain)
