"""FP32 master weights of quantized parameters for any optimizer of torch's interface.

The inner optimizer shares groups and states with this one. During a step, masters with FP32
gradients take the place of the parameters there; between steps they are entries of the states.
"""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from fp4adam.distributed.dtensor import is_dtensor, like, local, part_for
from fp4adam.distributed.shards import settle_written, sharded_weights
from fp4adam.interop.borrowed_tensor import ScaleWriteback
from fp4adam.optim import checks, master_weights
from fp4adam.optim import state_dict as saving
from fp4adam.optim.engine import Engine, Group
from fp4adam.optim.masters import MASTER
from fp4adam.optim.options import Options
from fp4adam.optim.target import Target, Targets
from fp4adam.tensors.quantized_tensor import QuantizedTensor


class MasterWeightOptimizer(Optimizer):
    """Trains quantized parameters with any optimizer, such as ``torch.optim.Muon``.

    Quantized, BF16 and FP16 parameters get FP32 masters, which the inner optimizer steps with FP32
    copies of the gradients. Then all masters are rounded to their parameters, in the same number of
    launches for one weight as for all: the bytes are those of
    ``param.quantizer.quantize(master_param)``. A step with lr = 0 leaves them alone. FP32 and FP64
    parameters are stepped themselves.

    Use it like the optimizer itself. Groups and states are those of the inner optimizer, with
    ``master_param`` beside, as in :class:`FP4Adam`; over ``torch.optim.AdamW``, either loads the
    other's checkpoints. A master is made in the first step with a gradient, and restarts when other
    code has overwritten the parameter. Masters of sharded parameters are DTensors, so the inner
    optimizer has to work with these, and every rank has to take part in every step.

    Args:
        params: Parameters, (name, parameter) pairs or dicts of parameter groups, with any options
            that ``optimizer_class`` takes.
        optimizer_class: A subclass of ``torch.optim.Optimizer``, or a function that makes such an
            optimizer of parameter groups and options.
        quantize_from: "master" quantizes the FP32 master itself; "param_dtype" rounds it to the
            parameter's nominal dtype first, as Megatron's distributed optimizer does.
        options: Further arguments of ``optimizer_class``, such as ``lr``.

    Attributes:
        inner: The optimizer that steps the masters.

    Raises:
        TypeError: If ``optimizer_class`` does not make a ``torch.optim.Optimizer``, or a parameter
            is of another package's class without an adapter.
        ValueError: For an unknown ``quantize_from`` and for parameters that cannot be trained.
        RuntimeError: For parameters on the meta device.
    """

    inner: Optimizer

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: Callable[..., Optimizer],
        *,
        quantize_from: Literal["master", "param_dtype"] = "master",
        **options: Any,
    ) -> None:
        checks.check_quantize_from(quantize_from)
        if not callable(optimizer_class):
            given = optimizer_class if isinstance(optimizer_class, str) else type(optimizer_class)
            raise TypeError(
                f"optimizer_class must be a class such as torch.optim.Muon, got {given!r}; pass "
                "the class, and its options as keywords"
            )
        self._set_up(quantize_from)
        super().__init__(params, {})
        # Some optimizers check parameters, or make states, at once.
        self._enter(self._new_masters(self._params()))
        inner = optimizer_class([{**group} for group in self.param_groups], **options)
        if not isinstance(inner, Optimizer):
            raise TypeError(
                "optimizer_class must make a torch.optim.Optimizer, got a "
                f"{type(inner).__name__}; pass a class such as torch.optim.Muon"
            )
        self.inner, self.defaults = inner, inner.defaults
        self._leave(keeps=False)

    def _set_up(self, quantize_from: str) -> None:
        self.quantize_from = quantize_from
        self._targets = Targets(Options(type(self).__name__, quantize_from=quantize_from))
        self._masters: dict[Tensor, Tensor] = {}  # while they are in the place of parameters

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "inner": self.inner, "quantize_from": self.quantize_from}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_up(state["quantize_from"])
        super().__setstate__(state)
        self._targets.meet(self._params())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        count = len(self.param_groups)
        try:
            add_to = self.inner if "inner" in vars(self) else super()
            add_to.add_param_group(param_group)
            for param in self.param_groups[-1]["params"]:
                checks.check_param(self._targets.options, param)
                if param.is_meta:
                    raise RuntimeError(
                        f"parameters must have values for {type(self).__name__}, got one of shape "
                        f"{tuple(param.shape)} on the meta device; materialize the model first"
                    )
        except Exception:
            del self.param_groups[count:]
            raise

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _with_masters(self) -> list[Target]:
        targets = [self._targets[p] for p in self._params() if MASTER in self.state.get(p, {})]
        return [target for target in targets if target.master.name]

    # Masters in the place of parameters

    def _new_masters(self, params: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            targets = [self._targets[param] for param in params]
            return {t.owner: like(t.owner, t.value()) for t in targets if t.master.name}

    def _enter(self, masters: dict[Tensor, Tensor]) -> None:
        self._masters = masters
        if "inner" in vars(self):  # other code may have replaced these
            self.inner.param_groups, self.inner.state = self.param_groups, self.state
        with torch._C.DisableTorchFunctionSubclass():
            for param, master in masters.items():
                if param.grad is not None:
                    master.grad = like(param, local(param.grad).to(torch.float32))
        self._exchange(masters)

    def _leave(self, keeps: bool = True) -> None:
        masters, self._masters = self._masters, {}
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self._exchange({master: param for param, master in masters.items()})
        for param, master in masters.items() if keeps else ():
            master.grad = None
            self.state.setdefault(param, {})[MASTER] = master

    def _exchange(self, by: Mapping[Tensor, Tensor]) -> None:
        for group in self.param_groups:
            group["params"][:] = [by.get(param, param) for param in group["params"]]
        states = [*self.state.items()]
        self.state.clear()
        for key, state in states:
            self.state[by.get(key, key) if isinstance(key, Tensor) else key] = state

    def _enter_step(self, params: Iterable[Tensor] = ()) -> None:
        masters = {t.owner: self.state[t.owner][MASTER] for t in self._with_masters()}
        new = self._new_masters(param for param in params if param not in masters)
        for param in new:
            self._targets[param].record()
        for param in self._params():
            state = self.state.get(param, {})
            if state.pop(MASTER, None) is not None and not state:
                del self.state[param]  # which tells many optimizers that it is the first step
        self._enter(masters | new)

    @contextlib.contextmanager
    def masters(self) -> Iterator[None]:
        """Show the inner optimizer masters in a ``with`` block, and round them afterwards.

        For what optimizers do between steps, such as schedule-free ones::

            with optimizer.masters():
                optimizer.inner.eval()

        Only parameters that have been stepped have a master. With sharded parameters, call it on
        every rank.
        """
        self._prepare()
        try:
            self._enter_step()
            yield
        finally:
            self._leave()
        self._write(self._params())

    # The step

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the masters, and round them to their parameters.

        Args:
            closure: Re-evaluates the model and returns the loss, or None. If the inner optimizer
                calls it several times, the parameters are written before every further call.

        Raises:
            RuntimeError: If a gradient is sparse, a parameter has another shape or device than its
                master, or the call is in inference mode. Nothing has changed then.
        """
        checks.check_mode()
        chosen, calls = self._prepare(), 0

        def evaluate() -> float:
            nonlocal chosen, calls
            self._leave()
            if calls:
                self._finish(*chosen)
            calls += 1
            with torch.enable_grad():
                loss = closure()
            chosen = self._check()
            self._enter_step(chosen[0])
            return loss

        try:
            self._enter_step(chosen[0])
            result = self.inner.step() if closure is None else self.inner.step(evaluate)
        finally:
            self._leave()
        self._finish(*chosen)
        return result

    @torch.no_grad()
    def _prepare(self) -> tuple[set[Tensor], set[Tensor]]:
        """:meth:`_check`; then masters restart whose parameters other code has written."""
        params = self._params()
        with torch._C.DisableTorchFunctionSubclass():
            self._targets.keep_only(params)
            chosen = self._check()
            settle_written(sharded_weights(params))
            restarting = master_weights.find_restarting(self._with_masters(), self.state)
            self.reset_master_weights([target.owner for target in restarting])
        return chosen

    def _check(self) -> tuple[set[Tensor], set[Tensor]]:
        # What else is in the states is the inner optimizer's affair.
        states = ((param, self.state.get(param, {})) for param in self._params())
        masters = {param: {MASTER: state[MASTER]} for param, state in states if MASTER in state}
        return self._engine(masters).check()

    def _engine(self, states: dict[Tensor, Any]) -> Engine:
        groups = [Group(group, group["params"]) for group in self.param_groups]
        return Engine(self._targets, groups, states)

    def _finish(self, stepped: set[Tensor], moving: set[Tensor]) -> None:
        for param in stepped:
            self._targets[param].free_initial_value(param in moving)
        self._write(stepped & moving)

    @torch.no_grad()
    def _write(self, params: Iterable[Tensor]) -> None:
        """Round masters to those of ``params`` that have one; a scale group is written whole."""
        with torch._C.DisableTorchFunctionSubclass():
            chosen = {self._targets[param].scales for param in params}
            targets = [target for target in self._with_masters() if target.scales in chosen]
            quantized = [each for each in targets if isinstance(each.param, QuantizedTensor)]
            borrowed = [each.borrowed for each in targets if each.borrowed is not None]
            with ScaleWriteback(borrowed):
                masters = [local(self.state[each.owner][MASTER]) for each in quantized]
                master_weights.quantize(quantized, masters)
            for target in targets:
                if target not in quantized:
                    target.write(local(self.state[target.owner][MASTER]))
            # Of DTensors as well, whose local tensors were written.
            torch.autograd.graph.increment_version([target.owner for target in targets])
            for target in targets:
                target.record()

    def reset_master_weights(self, params: Iterable[Tensor] | None = None) -> None:
        """Restart master weights from the current values of their parameters.

        See :meth:`FP4Adam.reset_master_weights`.
        """
        self._engine(self.state).reset_masters(params)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The states of the inner optimizer, and ``master_param`` for each parameter with a master.

        As in ``torch.optim``, tensors are the optimizer's own, not copies. If other code has
        written to a parameter, its value replaces the outdated master.
        """
        state_dict = super().state_dict()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            engine = self._engine(self.state)
            for param, key in saving.saved_keys(self.param_groups, state_dict):
                if (master := saving.current_master(engine, param)) is not None:
                    state_dict["state"][key] = {**state_dict["state"][key], MASTER: master}
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
        saving.check_groups(self.param_groups, state_dict)
        saving.check_masters(self.param_groups, state_dict)
        with torch._C.DisableTorchFunctionSubclass():
            self._load(state_dict)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        states, given = dict(state_dict["state"]), {}
        for param, key in saving.saved_keys(self.param_groups, state_dict):
            given[param] = saved = states[key]
            states[key] = {n: _own_part(param, x) for n, x in saved.items() if n != MASTER}
        groups, before = self.param_groups, self.state
        self.state = defaultdict(dict)
        try:
            self._enter(self._new_masters(given))
            self.inner.load_state_dict({**state_dict, "state": states})
        except BaseException:
            self._leave()  # also of these groups, whose lists of parameters go on
            self.param_groups, self.state = groups, before
            self.inner.param_groups, self.inner.state = groups, before
            raise
        self._leave()
        saving.load_masters(self._engine(self.state), given)


def _own_part(param: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)  # such as lists of tensors, which torch.optim would share
    if is_dtensor(param) and value.shape == param.shape:
        return like(param, part_for(param, value).clone())
    return value.clone()
