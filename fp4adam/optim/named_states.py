"""Optimizer states by name, as Transformer Engine's ``FusedAdam`` reads and writes them.

Its accessors exchange local FP32 tensors: ``exp_avg``, ``exp_avg_sq`` and ``master_param``, or the
int16 remainder in place of the last.
"""

from typing import Any

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import like, local
from fp4adam.optim import checks
from fp4adam.optim import state_dict as saving
from fp4adam.optim.param_view import ParamView
from fp4adam.optim.stored_state import StoredState

NAMES = ("exp_avg", "exp_avg_sq", "master_param")
# The options of a group in Transformer Engine's state dict, besides ``step``.
GROUP_OPTIONS = ("lr", "bias_correction", "betas", "eps", "weight_decay")


class NamedStates:
    """The accessors, as a part of ``FusedAdam``; the attributes that they use are its own."""

    def _named_view(self, param: Tensor) -> ParamView:
        if not any(param is one for one in self._params()):
            raise ValueError(
                f"param must be a parameter of this optimizer, got one of shape "
                f"{tuple(param.shape)}, which is in none of its groups; pass tensors from "
                "param_groups"
            )
        return self._view(param)

    @torch.no_grad()
    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Create the state of a parameter before its first step, or start it anew.

        Moments and step count become zero. The master starts as it does in the first step; the
        parameter keeps a high-precision initial value until then.

        Args:
            param: A parameter of this optimizer.
            store_param_remainders: That of the optimizer, or None; also False for a parameter
                that has no remainder.

        Raises:
            ValueError: If ``param`` is none of its parameters, or ``store_param_remainders`` is
                another one.
        """
        view = self._named_view(param)
        if store_param_remainders not in (None, self.store_param_remainders, view.has_remainder):
            raise ValueError(
                "store_param_remainders must be that of the optimizer, "
                f"{self.store_param_remainders}, got {store_param_remainders}; set it at "
                "construction"
            )
        checks.check_steppable(type(self).__name__, param)
        self._drop_plan()
        group = next(g for g in self.param_groups if any(param is one for one in g["params"]))
        self.state.pop(param, None)
        with torch._C.DisableTorchFunctionSubclass():
            state = self._complete_state(group, view, restart=False, frees=False)
            self.state[param] = self._offloaded(param, state)
            self._masters.note([view] if view.has_master else [])

    @torch.no_grad()
    def get_unscaled_state(
        self, param: Tensor, state_name: str, skip_unscale: bool = False
    ) -> Tensor:
        """The local part of a state of a parameter, in FP32.

        Args:
            param: A parameter of this optimizer with a state.
            state_name: "exp_avg", "exp_avg_sq" or "master_param".
            skip_unscale: Return a BF16 state as it is.

        Returns:
            The state itself if it is stored in FP32, else a decoded copy. For ``master_param`` with
            ``store_param_remainders``, the int16 remainder of a BF16 parameter. An FP32 parameter
            is its own master.

        Raises:
            ValueError: If ``param`` is none of its parameters or has no state yet, or there is no
                such state.
        """
        _check_name(state_name)
        view, state = self._named_view(param), self.state.get(param, {})
        if state_name == "master_param":
            _check_has_master(view, self.master_weights)
        kept = "param_remainder" if view.has_remainder else state_name
        kept = kept if state_name == "master_param" else state_name
        is_param = state_name == "master_param" and not (view.has_master or view.has_remainder)
        if not is_param and kept not in state:
            raise ValueError(
                f"param must have a state to read {state_name} from, got none; call "
                "initialize_state(param) or step() first"
            )
        return _read_state(view, state, state_name, skip_unscale)

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Set a state of a parameter from FP32 values, converted to its storage dtype.

        A master is authoritative: the next step continues from it, whatever the parameter holds.
        The state is created first if there is none; ``unscaled_state`` is only read.

        Args:
            param: A parameter of this optimizer.
            state_name: "exp_avg", "exp_avg_sq" or "master_param".
            unscaled_state: Float32 of the shape of the local part of ``param``, on any device. For
                ``master_param`` with ``store_param_remainders``, the int16 remainder.

        Raises:
            ValueError: If ``param`` is none of its parameters, there is no such state, or the shape
                differs.
            TypeError: If the dtype differs.
        """
        _check_name(state_name)
        view = self._named_view(param)
        if state_name == "master_param":
            _check_has_master(view, self.master_weights)
        value = local(unscaled_state) if isinstance(unscaled_state, Tensor) else unscaled_state
        _check_value(view, state_name, value)
        if not {"step", "exp_avg", "exp_avg_sq"} <= self.state.get(param, {}).keys():
            self.initialize_state(param)
        self._drop_plan()
        with torch._C.DisableTorchFunctionSubclass():
            known = self._masters.is_known(view)
            _write_state(view, self.state[param], state_name, value)
            self.state[param] = self._offloaded(param, self.state[param])
            if view.has_master and (known or state_name == "master_param"):
                self._masters.note([view])

    def te_state_dict(self) -> dict[str, Any]:
        """The state as ``transformer_engine.pytorch.optimizers.FusedAdam`` saves and loads it.

        Groups hold ``step``, and the options that its groups have. States hold ``exp_avg``,
        ``exp_avg_sq`` and ``master_param`` (FP32, or the int16 remainder with
        ``store_param_remainders``). :meth:`load_state_dict` takes it as well.

        Raises:
            ValueError: If parameters of one group have taken different numbers of steps, or a group
                has ``amsgrad`` or ``maximize``, which Transformer Engine's optimizer has not.
        """
        for i, group in enumerate(self.param_groups):
            for name in ("amsgrad", "maximize"):
                if group[name]:
                    raise ValueError(
                        f"{name} must be False for a state dict of Transformer Engine, got True in "
                        f"group {i}; save state_dict() instead"
                    )
        saved = self.state_dict()
        groups, states = [], dict(saved["state"])
        keys = dict(saving.saved_keys(self.param_groups, saved))
        for i, (group, listed) in enumerate(
            zip(self.param_groups, saved["param_groups"], strict=True)
        ):
            own = [states[keys[param]] for param in group["params"] if param in keys]
            step = _group_step([state for state in own if "step" in state], i)
            groups.append(_group_of(group, listed, step))
        for param, key in keys.items():
            state = {name: states[key][name] for name in NAMES if name in states[key]}
            if "param_remainder" in self.state[param]:
                state["master_param"] = self.state[param]["param_remainder"]
            states[key] = state
        return {"state": states, "param_groups": groups}


def _check_name(state_name: str) -> None:
    """Raise ValueError unless ``state_name`` is one of the three."""
    if state_name not in NAMES:
        raise ValueError(
            f"state_name must be one of {', '.join(NAMES)}, got {state_name!r}; read other entries "
            "from optimizer.state[param]"
        )


def _check_has_master(view: ParamView, master_weights: bool) -> None:
    """Raise ValueError if the parameter has no master at all, and is not one itself."""
    if not (view.has_master or view.has_remainder or view.param.dtype == torch.float32):
        raise ValueError(
            f"state_name must not be 'master_param' for a {view.param.dtype} parameter without a "
            f"master, got master_weights={master_weights}; make the optimizer with "
            "master_weights=True"
        )


def _read_state(view: ParamView, state: dict[str, Any], name: str, skip_unscale: bool) -> Tensor:
    """A state of a parameter in FP32; no copy if it is stored so."""
    if name == "master_param" and not view.has_master:
        return local(state["param_remainder"]) if view.has_remainder else view.param.detach()
    own = {key: local(value) for key, value in state.items()}
    stored = StoredState.of(own, name, view.codecs[name])
    if skip_unscale and stored.codes.dtype == torch.bfloat16:
        return stored.codes
    value = stored.decode()
    return value if value.dtype == torch.float64 else value.float()


def _check_value(view: ParamView, name: str, value: Tensor) -> None:
    """Raise unless ``value`` can become the state ``name`` of a parameter."""
    wanted = torch.float32
    if name == "master_param" and view.has_remainder:
        wanted = torch.int16
    elif view.param.dtype == torch.float64:
        wanted = torch.float64
    if not isinstance(value, Tensor) or value.dtype != wanted:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"unscaled_state must be {wanted} for {name}, got {kind}; convert it first")
    if value.shape != view.param.shape:
        raise ValueError(
            f"unscaled_state must have the shape of the local parameter, "
            f"{tuple(view.param.shape)}, got {tuple(value.shape)}; pass this rank's part"
        )


def _write_state(view: ParamView, state: dict[str, Any], name: str, value: Tensor) -> None:
    """Store a copy of ``value`` as the state ``name`` of a parameter, in its own storage dtype."""
    with torch.no_grad():
        value = value.detach()
        if name == "master_param" and not view.has_master:
            target = local(state["param_remainder"]) if view.has_remainder else view.param
            target.copy_(value)
            return
        plain = torch.empty_like(view.param, dtype=value.dtype).copy_(value)
        new: dict[str, Any] = {}
        StoredState.encode(view.codecs[name], plain.contiguous()).put_into(new, name)
    state.pop(f"{name}_scale", None)
    for key, stored in new.items():
        # Scales follow each rank's memory order, not the shape of the parameter: no DTensors.
        state[key] = stored if key.endswith("_scale") else like(view.owner, stored)


def _group_step(states: list[dict[str, Any]], number: int) -> int:
    """The step that all parameters of a group have in common; 0 without states.

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
    return steps.pop() if steps else 0


def _group_of(group: dict[str, Any], saved: dict[str, Any], step: int) -> dict[str, Any]:
    """A parameter group of a state dict with Transformer Engine's entries."""
    options = {name: group[name] for name in GROUP_OPTIONS}
    if isinstance(options["lr"], Tensor):
        options["lr"] = options["lr"].item()
    return {**options, "params": saved["params"], "step": step}
