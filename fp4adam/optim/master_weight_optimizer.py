"""FP32 master weights of quantized parameters for any optimizer of torch's interface.

The inner optimizer has the parameters of the model in its groups and states, beside each of these
``master_param``. During a step, masters with FP32 gradients take their place.
"""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from fp4adam.distributed.cast import cast
from fp4adam.distributed.dtensor import is_dtensor, like, local, part_for
from fp4adam.distributed.shards import settle_written, sharded_weights
from fp4adam.formats.scale_groups import ScaleGroup
from fp4adam.interop.borrowed_tensor import ScaleWriteback
from fp4adam.optim import checks
from fp4adam.optim import state_dict as saving
from fp4adam.optim.adam import updates_params
from fp4adam.optim.engine import Engine
from fp4adam.optim.master_weights import adopt, find_stale
from fp4adam.optim.options import Options
from fp4adam.optim.parameter import Parameter as Target
from fp4adam.optim.parameter import Parameters

MASTER = "master_param"


class _OfInner:
    """An attribute of the inner optimizer, which a new one has itself until that is made."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: "MasterWeightOptimizer", owner: type) -> Any:
        own = vars(optimizer)
        return getattr(own["inner"], self._name) if "inner" in own else own[self._name]

    def __set__(self, optimizer: "MasterWeightOptimizer", value: Any) -> None:
        own = vars(optimizer)
        if "inner" in own:
            setattr(own["inner"], self._name, value)
        else:
            own[self._name] = value


class MasterWeightOptimizer(Optimizer):
    """Trains quantized parameters with any optimizer, such as ``torch.optim.Muon``.

    Quantized, BF16 and FP16 parameters get FP32 masters, which the inner optimizer steps with FP32
    copies of the gradients. Then all masters are rounded to their parameters: quantized ones in one
    pass that takes the same number of launches for one weight as for all. FP32 and FP64 parameters
    are stepped themselves. After every step the bytes of a quantized parameter are those of
    ``param.quantizer.quantize(master_param)``. A step with lr = 0 leaves them alone.

    Use it like the optimizer itself: schedulers, clipping, ``GradScaler``, DDP, FSDP2 and
    ``torch.distributed.checkpoint`` see the parameters of the model. Groups and states are those of
    the inner optimizer, with ``master_param`` beside, as in :class:`FP4Adam`; over
    ``torch.optim.AdamW``, either loads the other's checkpoints.

    A master is made in the first step with a gradient, from the high-precision initial value if the
    parameter still has it, otherwise from its decoded values. If other code overwrites the
    parameter later, the master restarts from the new value at the next step. With sharded
    parameters the masters are DTensors, so the inner optimizer has to work with these, and every
    rank has to take part in every step.

    Args:
        params: Parameters, (name, parameter) pairs or dicts of parameter groups, with any options
            that ``optimizer_class`` takes.
        optimizer_class: A subclass of ``torch.optim.Optimizer``, or a function that makes such an
            optimizer of parameter groups and options.
        quantize_from: "master" quantizes the FP32 master itself; "param_dtype" rounds it to the
            parameter's nominal dtype first, as Megatron's distributed optimizer does.
        states: "32bit". The inner optimizer has options of its own for its states; FP4Adam stores
            all of them in 8 or 16 bits.
        options: Further arguments of ``optimizer_class``, such as ``lr``.

    Attributes:
        inner: The optimizer that steps the masters.

    Raises:
        TypeError: If ``optimizer_class`` does not make a ``torch.optim.Optimizer``, or a parameter
            is of another package's class without an adapter.
        ValueError: For an unknown ``quantize_from``, ``states`` other than "32bit", and for
            parameters that cannot be trained.
        RuntimeError: For parameters on the meta device.
    """

    inner: Optimizer
    param_groups, state, defaults = _OfInner(), _OfInner(), _OfInner()

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: Callable[..., Optimizer],
        *,
        quantize_from: Literal["master", "param_dtype"] = "master",
        states: Literal["32bit"] = "32bit",
        **options: Any,
    ) -> None:
        checks.check_quantize_from(quantize_from)
        checks.check_whole_masters(type(self).__name__, states)
        if not callable(optimizer_class):
            given = optimizer_class if isinstance(optimizer_class, str) else type(optimizer_class)
            raise TypeError(
                f"optimizer_class must be a class such as torch.optim.Muon, got {given!r}; pass "
                "the class, and its options as keywords"
            )
        self._set_up(quantize_from)
        super().__init__(params, {})
        self._enter(self._params())  # some optimizers make states at once
        inner = optimizer_class([{**group} for group in self.param_groups], **options)
        if not isinstance(inner, Optimizer):
            raise TypeError(
                "optimizer_class must make a torch.optim.Optimizer, got a "
                f"{type(inner).__name__}; pass a class such as torch.optim.Muon"
            )
        self.inner = inner
        self._leave()
        for param, state in [*self.state.items()]:
            if state.pop(MASTER, None) is not None and not state:
                del self.state[param]

    def _set_up(self, quantize_from: str) -> None:
        self.quantize_from = quantize_from
        options = Options(type(self).__name__, quantize_from=quantize_from)
        self._parameters = Parameters(options)
        # While masters are in the place of their parameters.
        self._masters: dict[Tensor, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner, "quantize_from": self.quantize_from}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_up(state["quantize_from"])
        super().__setstate__(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group."""
        count = len(self.param_groups)
        try:
            if "inner" in vars(self):
                self.inner.add_param_group(param_group)
            else:
                super().add_param_group(param_group)
            for param in self.param_groups[-1]["params"]:
                checks.check_param(self._parameters.options, param)
                if param.is_meta:
                    raise RuntimeError(
                        f"parameters must have values for {type(self).__name__}, got one of shape "
                        f"{tuple(param.shape)} on the meta device; materialize the model first"
                    )
        except Exception:
            del self.param_groups[count:]
            raise

    @property
    def _engine(self) -> Engine:
        """What resets masters; it steps nothing."""
        return Engine(self._parameters, [], self.state)

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    # Masters in the place of parameters

    @contextlib.contextmanager
    def masters(self) -> Iterator[None]:
        """Show the inner optimizer masters in a ``with`` block, and round them afterwards.

        For what optimizers do between steps, such as schedule-free ones::

            with optimizer.masters():
                optimizer.inner.eval()

        Only parameters that have been stepped have a master. With sharded parameters, call it on
        every rank.
        """
        self._check()
        self._restart()
        try:
            self._enter()
            yield
        finally:
            self._leave()
        self._write({*self._params()}, even_frozen=True)

    @torch.no_grad()
    def _enter(self, others: Iterable[Tensor] = ()) -> None:
        """Put masters with FP32 gradients in the place of parameters that have either.

        ``others``: Parameters that get a master as well.
        """
        others = {*others}
        with torch._C.DisableTorchFunctionSubclass():
            for param in self._params():
                target, state, grad = self._parameters[param], self.state.get(param), param.grad
                master = state.pop(MASTER, None) if state else None
                if master is None and target.has_master and (grad is not None or param in others):
                    master = like(param, target.value())
                    target.record()
                if master is None:
                    continue
                if grad is not None:
                    checks.check_gradient(type(self).__name__, param, local(grad))
                    master.grad = like(param, local(grad).to(torch.float32))
                self._masters[param] = master
                if state is not None and not state:
                    del self.state[param]
            self._exchange(self._masters)

    def _leave(self) -> None:
        """Put parameters back, and the masters into their states."""
        masters, self._masters = self._masters, {}
        self._exchange({master: param for param, master in masters.items()})
        for param, master in masters.items():
            master.grad = None
            self.state.setdefault(param, {})[MASTER] = master

    def _exchange(self, by: Mapping[Tensor, Tensor]) -> None:
        """Exchange tensors in groups and states, whose lists and dictionaries stay the same."""
        for group in self.param_groups:
            group["params"][:] = [by.get(param, param) for param in group["params"]]
        states = [*self.state.items()]
        self.state.clear()
        for key, state in states:
            self.state[by.get(key, key) if isinstance(key, Tensor) else key] = state

    # The step

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the masters, and round them to their parameters.

        Args:
            closure: Re-evaluates the model and returns the loss, or None. If the inner optimizer
                calls it several times, the parameters are written before every further call.

        Returns:
            What the inner optimizer returns.

        Raises:
            RuntimeError: If a gradient is sparse, a parameter has another shape, dtype or device
                than its master, or the call is in inference mode. Nothing has changed then.
        """
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "step() must not be called in inference mode, got torch.inference_mode(): state "
                "created there cannot be updated outside; call it outside inference mode"
            )
        self._check()
        self._restart()
        calls = 0

        def evaluate() -> float:
            nonlocal calls
            self._leave()
            if calls:
                self._write({param for param in self._params() if param.grad is not None})
            calls += 1
            with torch.enable_grad():
                loss = closure()
            self._enter()
            return loss

        try:
            self._enter()
            result = self.inner.step() if closure is None else self.inner.step(evaluate)
        finally:
            self._leave()
        self._write({param for param in self._params() if param.grad is not None})
        return result

    def _check(self) -> None:
        """Raise if a parameter does not fit its master, its gradient or its scale group."""
        name, params = type(self).__name__, self._params()
        checks.check_distinct(params)
        sharing: dict[Hashable, list[Tensor]] = defaultdict(list)
        with torch._C.DisableTorchFunctionSubclass():
            for param in params:
                if param.grad is not None:
                    checks.check_gradient(name, param, local(param.grad))
                target, own = self._parameters[param], local(param)
                sharing[target.scales].append(param)
                if MASTER not in self.state.get(param, {}):
                    continue
                kept = local(self.state[param][MASTER])
                is_same = (kept.shape, kept.device) == (own.shape, own.device)
                if not (target.has_master and is_same):
                    raise RuntimeError(
                        f"parameters must keep shape, device and kind of dtype for {name}, got one "
                        f"of shape {tuple(own.shape)} and {param.dtype} on {own.device}, stepped "
                        f"as {tuple(kept.shape)} of {kept.dtype} on {kept.device}; "
                        "optimizer.load_state_dict(optimizer.state_dict()) moves the state to the "
                        "parameter's device, for another shape or dtype create a new optimizer"
                    )
            for scales, peers in sharing.items():
                if isinstance(scales, ScaleGroup):
                    checks.check_scale_group(peers, scales)

    def _stale(self) -> set[Target]:
        targets = [self._parameters[param] for param in self._params()]
        return {*find_stale([each for each in targets if each.has_master], self.state)[0]}

    @torch.no_grad()
    def _restart(self) -> None:
        """Restart the masters of parameters that other code has written."""
        with torch._C.DisableTorchFunctionSubclass():
            settle_written(sharded_weights(self._params()))
            self._engine.reset_masters([target.owner for target in self._stale()])

    @torch.no_grad()
    def _write(self, params: set[Tensor], even_frozen: bool = False) -> None:
        """Round the masters of ``params`` to them; a new amax changes all that share it."""
        moving = {
            param
            for group in self.param_groups
            for param in group["params"]
            if even_frozen or "lr" not in group or updates_params(group)
        }
        with torch._C.DisableTorchFunctionSubclass():
            targets = [self._parameters[p] for p in self._params() if p in self.state]
            targets = [each for each in targets if MASTER in self.state[each.owner]]
            stepped = [each for each in targets if each.owner in params]
            for target in stepped:
                target.free_initial_value(target.owner in moving)
            scales = {each.scales for each in stepped if each.owner in moving}
            written = [each for each in targets if each.scales in scales]
            borrowed = [each.borrowed for each in written if each.borrowed is not None]
            scales_of_others = ScaleWriteback(borrowed)
            scales_of_others.read()
            quantized = [each for each in written if type(each) is not Target]
            cast(
                [each.param for each in quantized],
                [local(self.state[each.owner][MASTER]) for each in quantized],
                [each.write_dtype for each in quantized],
                [each.shard_infos() for each in quantized],
                [each.scales for each in quantized],
            )
            for target in written:
                if target not in quantized:
                    target.write(local(self.state[target.owner][MASTER]))
            scales_of_others()
            sources = [one.source for one in borrowed]
            torch.autograd.graph.increment_version([*(t.owner for t in quantized), *sources])
            for target in {*stepped, *written}:
                target.record()

    @torch.no_grad()
    def reset_master_weights(self, params: Iterable[Tensor] | None = None) -> None:
        """Restart master weights from the current values of their parameters.

        A step does this by itself if it finds other bytes in a parameter than it left there; see
        :meth:`FP4Adam.reset_master_weights`.

        Args:
            params: The parameters to restart; None for all.

        Raises:
            ValueError: If one is not a parameter of this optimizer.
        """
        params = self._params() if params is None else [*params]
        checks.check_known(params, self._params())
        with torch._C.DisableTorchFunctionSubclass():
            self._engine.reset_masters(params)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The states of the inner optimizer, and ``master_param`` for each parameter with a master.

        As in ``torch.optim``, tensors are the optimizer's own, not copies. If other code has
        written to a parameter, its value replaces the outdated master.
        """
        state_dict = super().state_dict()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            stale = {target.owner: target for target in self._stale()}
            for param, key in saving.saved_keys(self.param_groups, state_dict):
                if param in stale:
                    value = like(param, stale[param].value())
                    state_dict["state"][key] = {**state_dict["state"][key], MASTER: value}
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved by this class with the same ``optimizer_class``, or by that itself.

        States are not rounded to the dtype of their parameters, and nothing is shared with
        ``state_dict``. Masters that it lacks start from the parameters. Load the model first; see
        :meth:`FP4Adam.load_state_dict`. With sharded parameters, call it on every rank, with states
        of its shards or, for tensors of the shape of their parameter, whole ones.

        Raises:
            ValueError: If groups or masters do not fit; nothing has changed then.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        saving.check_is_state_dict(state_dict)
        if not saving.has_groups_of(self.param_groups, state_dict):
            return self.inner.load_state_dict(state_dict)  # raises
        saving.check_masters(self.param_groups, state_dict)
        states, masters = dict(state_dict["state"]), {}
        keys = dict(saving.saved_keys(self.param_groups, state_dict))
        with torch._C.DisableTorchFunctionSubclass():
            for param, key in keys.items():
                own = {name: _own_part(param, value) for name, value in states[key].items()}
                masters[param], states[key] = own.pop(MASTER, None), own
            self._load({**state_dict, "state": states}, masters)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _load(self, saved: dict[str, Any], masters: dict[Tensor, Tensor | None]) -> None:
        before = dict(vars(self.inner))
        self.state = defaultdict(dict)
        try:
            self._enter(masters)
            self.inner.load_state_dict(saved)
        except BaseException:
            self._leave()
            vars(self.inner).update(before)
            raise
        self._leave()
        kept = []
        for param, value in masters.items():
            target = self._parameters[param]
            if target.has_master and value is not None:
                local(self.state[param][MASTER]).copy_(local(value))
                target.mark = None
                kept.append(target)
            elif value is not None:
                saving.adopt_master(target, {MASTER: value})
        adopt(kept, self.state)


def _own_part(param: Tensor, value: Any) -> Any:
    """A copy of a saved value for the inner optimizer; the shard of a whole one of this shape."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)  # such as lists of tensors, which torch.optim would share
    if is_dtensor(param) and value.shape == param.shape:
        return like(param, part_for(param, value).clone())
    return value.detach().clone()
