"""FP32 master weights of quantized parameters for any optimizer of torch's interface.

The inner optimizer owns the masters and steps them as if they were the parameters. Groups and
states are shown under the model's parameters, so schedulers, clipping and checkpoints see an
optimizer of the model.
"""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer, ParamsT

from fp4adam.distributed.cast import cast
from fp4adam.distributed.dtensor import is_dtensor, like, local, part_for
from fp4adam.distributed.shards import settle_written, sharded_weights
from fp4adam.formats.scale_groups import ScaleGroup
from fp4adam.interop.borrowed_tensor import ScaleWriteback
from fp4adam.optim import checks
from fp4adam.optim import state_dict as saving
from fp4adam.optim.adam import updates_params
from fp4adam.optim.master_weights import (
    adopt,
    find_stale,
    together,
    warn_of_loaded,
    warn_of_restarts,
)
from fp4adam.optim.options import Options
from fp4adam.optim.target import Target, Targets, is_own_master
from fp4adam.optim.te_layout import stored_state

_OF_GROUP = ("params", "param_names")


class MasterWeightOptimizer(Optimizer):
    """Trains quantized parameters with any optimizer, such as ``torch.optim.Muon``.

    Every quantized, BF16 or FP16 parameter gets an FP32 master weight. ``optimizer_class`` is
    constructed with the masters and steps them with FP32 copies of the gradients, which are freed
    after the step. Then all masters are rounded to their parameters: quantized parameters in one
    pass that takes the same number of launches for one weight as for all. FP32 and FP64 parameters
    have no master and are stepped themselves. After every step the bytes of a quantized parameter
    are those of ``param.quantizer.quantize(master_param)``. A step with lr = 0 leaves them alone.

    Use it like the optimizer itself: schedulers, clipping, ``GradScaler``, DDP, FSDP2 and
    ``torch.distributed.checkpoint`` see the parameters of the model. ``state_dict()`` holds the
    states of the inner optimizer and ``master_param`` for each parameter, as that of
    :class:`FP4Adam`; over ``torch.optim.AdamW``, either loads the other's.

    A master starts from the high-precision initial value if the parameter still has it, otherwise
    from its decoded values. If other code overwrites the parameter later, the master restarts
    from the new value at the next step. With sharded parameters the masters are DTensors, so the
    inner optimizer has to work with these, and every rank has to take part in every step.

    Args:
        params: Parameters, (name, parameter) pairs or dicts of parameter groups, with any options
            that ``optimizer_class`` takes.
        optimizer_class: A subclass of ``torch.optim.Optimizer``, or a function that makes such an
            optimizer of parameter groups and options.
        quantize_from: "master" quantizes the FP32 master itself; "param_dtype" rounds it to the
            parameter's nominal dtype first, as Megatron's distributed optimizer does.
        options: Further arguments of ``optimizer_class``, such as ``lr``.

    Attributes:
        inner: The optimizer of the masters.

    Raises:
        TypeError: If ``optimizer_class`` does not make a ``torch.optim.Optimizer``, or a parameter
            is of another package's class without an adapter.
        ValueError: For an unknown ``quantize_from``, and for parameters that cannot be trained.
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
        self.quantize_from = quantize_from
        self._set_up()
        # What the inner optimizer steps for each parameter: its master, or the parameter itself.
        self._stepped: dict[Tensor, Tensor] = {}
        # The parameters that have been stepped, or loaded. Only these have a state.
        self._in_use: set[Tensor] = set()
        super().__init__(params, {})
        self.inner = optimizer_class([self._inner_group(g) for g in self.param_groups], **options)
        if not isinstance(self.inner, Optimizer):
            raise TypeError(
                "optimizer_class must make a torch.optim.Optimizer, got a "
                f"{type(self.inner).__name__}; pass a class such as torch.optim.Muon"
            )
        self.defaults = self.inner.defaults
        self._take_options()

    # Parameters, their masters and groups

    def _set_up(self) -> None:
        name = type(self).__name__
        self._targets = Targets(Options(name, quantize_from=self.quantize_from))

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, here and to the inner optimizer."""
        count, known = len(self.param_groups), dict(self._stepped)
        try:
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            for param in group["params"]:
                checks.check_param(self._targets.options, param)
                if param.is_meta:
                    raise RuntimeError(
                        f"parameters must have values for {type(self).__name__}, got one of shape "
                        f"{tuple(param.shape)} on the meta device; materialize the model first"
                    )
            self._stepped |= self._make_masters(group["params"])
            if "inner" in vars(self):
                self.inner.add_param_group(self._inner_group(group))
                # Not of the others, which schedulers may have changed since the last step.
                group.update(_options(self.inner.param_groups[-1]))
        except BaseException:
            del self.param_groups[count:]
            self._stepped = known
            if "inner" in vars(self):
                del self.inner.param_groups[count:]
            raise

    def _make_masters(self, params: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """What to step for each parameter: a new master with its value, or the parameter itself."""
        stepped: dict[Tensor, Tensor] = {}
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            views = [*map(self._targets.__getitem__, params)]
            for view in views:
                stepped[view.owner] = view.owner
                if view.master.name:
                    stepped[view.owner] = Parameter(like(view.owner, view.value()))
                    view.record()
        return stepped

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """A parameter group of the inner optimizer: the same options for the masters."""
        masters: list[Any] = [self._stepped[param] for param in group["params"]]
        if "param_names" in group:
            masters = [*zip(group["param_names"], masters, strict=True)]
        return {**_options(group), "params": masters}

    def _take_options(self) -> None:
        """Copy the options of the inner optimizer's groups, which it may have changed."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_options(inner))

    def _give_options(self) -> None:
        """Copy the options of the groups, which schedulers change, to the inner optimizer's."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_options(group))

    # The state, which the inner optimizer has under the masters

    @property
    def state(self) -> Mapping[Tensor, dict[str, Any]]:
        """Read-only: the state of each parameter that has been stepped, with ``master_param``."""
        if "inner" not in vars(self):
            return MappingProxyType({})
        of_masters = self.inner.state
        states = {}
        for param, master in self._stepped.items():
            if param in self._in_use:
                states[param] = (
                    dict(stored_state(of_masters[master])) if master in of_masters else {}
                )
                if master is not param:
                    states[param]["master_param"] = master.detach()
        return MappingProxyType(states)

    @state.setter
    def state(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        if state:  # torch.optim begins with an empty one
            raise AttributeError(
                f"the state of {type(self).__name__} cannot be set, got {len(state)} entries; "
                "call load_state_dict, or change that of its inner optimizer"
            )

    def _master_states(self) -> dict[Tensor, dict[str, Any]]:
        stepped = self._stepped.items()
        return {p: {"master_param": m.detach()} for p, m in stepped if m is not p}

    def __getstate__(self) -> dict[str, Any]:
        names = ("defaults", "param_groups", "inner", "quantize_from", "_stepped", "_in_use")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A set of tensors cannot be copied by torch.optim's own loading, nor can a state be set.
        super().__setstate__({name: value for name, value in state.items() if name != "state"})
        self._set_up()
        self._targets.meet(self._params())

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
                than its master, is in none of the groups any more, or the call is in inference
                mode. Nothing has changed then.
        """
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "step() must not be called in inference mode, got torch.inference_mode(): state "
                "created there cannot be updated outside; call it outside inference mode"
            )
        views = self._checked_views()
        self._give_options()
        try:
            self._restart(views)
            if closure is None:
                self._pass_gradients()
                result = self.inner.step()
            else:
                result = self.inner.step(self._evaluation(closure))
            self._take_options()
            self._write({param for param in views if param.grad is not None})
        finally:
            for param, master in self._stepped.items():
                if master is not param:
                    master.grad = None
        return result

    def _evaluation(self, closure: Callable[[], float]) -> Callable[[], float]:
        calls = 0

        def evaluate() -> float:
            nonlocal calls
            if calls:
                self._write({param for param in self._stepped if param.grad is not None})
            calls += 1
            with torch.enable_grad():
                loss = closure()
            self._pass_gradients()
            return loss

        return evaluate

    @torch.no_grad()
    def _checked_views(self) -> dict[Tensor, Target]:
        """The views of all parameters; raises if one does not fit its master or its gradient."""
        params = self._params()
        checks.check_distinct(params)
        if {*params} != self._stepped.keys():
            raise RuntimeError(
                f"parameters of {type(self).__name__} must be those that it was made of, got "
                "others in param_groups; use add_param_group, or create a new optimizer"
            )
        with torch._C.DisableTorchFunctionSubclass():
            views = {param: self._targets[param] for param in params}
            sharing: dict[Hashable, list[Tensor]] = defaultdict(list)
            for param, view in views.items():
                self._check_view(view)
                sharing[view.scales].append(param)
            for scales, peers in sharing.items():
                if isinstance(scales, ScaleGroup):
                    checks.check_scale_group(peers, scales)
        return views

    def _check_view(self, view: Target) -> None:
        name, param, master = type(self).__name__, view.owner, self._stepped[view.owner]
        if param.grad is not None:
            checks.check_gradient(name, param, local(param.grad))
        kept = local(master)
        is_same = (kept.shape, kept.device) == (local(param).shape, local(param).device)
        if bool(view.master.name) != (master is not param) or not is_same:
            raise RuntimeError(
                f"parameters must keep shape, device and kind of dtype for {name}, got one of "
                f"shape {tuple(local(param).shape)} and {param.dtype} on {local(param).device}, "
                f"stepped as {tuple(kept.shape)} of {kept.dtype} on {kept.device}; "
                "optimizer.load_state_dict(optimizer.state_dict()) moves the state to the "
                "parameter's device, for another shape or dtype create a new optimizer"
            )

    @torch.no_grad()
    def _restart(self, views: Mapping[Tensor, Target]) -> None:
        """Restart the masters of parameters that other code has written."""
        with torch._C.DisableTorchFunctionSubclass():
            settle_written(sharded_weights(views))
            left = self._left(views.values())
            warn_of_restarts(len(left))
            for view in left:
                local(self._stepped[view.owner]).copy_(view.value())
                view.record()

    def _left(self, views: Iterable[Target]) -> set[Target]:
        masters = [view for view in views if view.master.name]
        return find_stale(masters, self._master_states())

    @torch.no_grad()
    def _pass_gradients(self) -> None:
        """Give the masters the gradients of their parameters, in FP32."""
        for param, master in self._stepped.items():
            if master is param:
                continue
            grad = param.grad
            if grad is not None:
                checks.check_gradient(type(self).__name__, param, local(grad))
                grad = like(param, local(grad).to(torch.float32))
            master.grad = grad

    def write_back(self) -> None:
        """Round all masters to their parameters, after code other than ``step()`` changed masters.

        Some optimizers do so between steps, such as schedule-free ones in ``inner.eval()``. With
        sharded parameters, call it on every rank.
        """
        self._checked_views()
        self._write({*self._stepped}, even_frozen=True)

    @torch.no_grad()
    def _write(self, params: set[Tensor], even_frozen: bool = False) -> None:
        """Round the masters of ``params`` to them; a new amax changes all that share it."""
        with torch._C.DisableTorchFunctionSubclass():
            with_masters = [p for p, master in self._stepped.items() if master is not p]
            views = {param: self._targets[param] for param in with_masters}
            moving = {
                param
                for group in self.param_groups
                for param in group["params"]
                if even_frozen or "lr" not in group or updates_params(group)
            }
            stepped = [view for param, view in views.items() if param in params]
            for view in stepped:
                view.free_initial_value(view.owner in moving)
            scales = {view.scales for view in stepped if view.owner in moving}
            written = [view for view in views.values() if view.scales in scales]
            masters = [local(self._stepped[view.owner]) for view in written]
            quantized = [i for i, view in enumerate(written) if type(view) is not Target]
            plain = [i for i, view in enumerate(written) if type(view) is Target]
            borrowed = [view.borrowed for view in written if view.borrowed is not None]
            scales_of_others = ScaleWriteback(borrowed)
            scales_of_others.read()
            cast(
                [written[i].param for i in quantized],
                [masters[i] for i in quantized],
                [written[i].write_dtype for i in quantized],
                [written[i].shard_infos() for i in quantized],
                [written[i].scales for i in quantized],
            )
            torch.autograd.graph.increment_version([written[i].owner for i in quantized])
            if plain:
                torch._foreach_copy_([written[i].param for i in plain], [masters[i] for i in plain])
            scales_of_others()
            torch.autograd.graph.increment_version([one.source for one in borrowed])
            for view in {*stepped, *written}:
                view.record()
            self._in_use |= params

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
        params = [*self._stepped] if params is None else [*params]
        checks.check_known(params, self._stepped)
        with torch._C.DisableTorchFunctionSubclass():
            settle_written(sharded_weights(params))
            views = [view for view in map(self._targets.__getitem__, params) if view.master.name]
            for view in views:
                local(self._stepped[view.owner]).copy_(view.value())
                view.free_initial_value()
                view.record()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The states of the inner optimizer, and ``master_param`` for each parameter with a master.

        As in ``torch.optim``, tensors are the optimizer's own, not copies. If other code has
        written to a parameter, its value replaces the outdated master.
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            views = [self._targets[param] for param in self._in_use if not param.is_meta]
            left = self._left(views)
            values = {v.owner: like(v.owner, v.value()) for v in views if v in left}

        def replace(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
            for param, key in saving.saved_keys(self.param_groups, state_dict):
                if param in values:
                    state_dict["state"][key]["master_param"] = values[param]

        handle = self.register_state_dict_post_hook(replace, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved by this class with the same ``optimizer_class``, or by that itself.

        States are not rounded to the dtype of their parameters, and nothing is shared with
        ``state_dict``. Masters that it lacks start from the parameters. Model and optimizer may be
        loaded in any order; parameters keep their values, except as described in
        :meth:`FP4Adam.load_state_dict`. With sharded parameters, call it on every rank, with states
        of its shards or, for tensors of the shape of their parameter, whole ones.

        Raises:
            ValueError: If groups or masters do not fit; nothing has changed then.
        """
        loaded: dict[str, Any] = {}

        def take(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            saving.check_is_state_dict(state_dict)
            saving.check_groups(self.param_groups, state_dict)
            saving.check_masters(self.param_groups, state_dict)
            loaded.update(state_dict)
            return {**state_dict, "state": {}}  # torch.optim checks the groups

        def restore(optimizer: Optimizer) -> None:
            self._restore(loaded)

        objects = (self, self.inner)
        before = [dict(vars(each)) for each in objects]
        masters = [master for param, master in self._stepped.items() if master is not param]
        values = [local(master).detach().clone() for master in masters]
        try:
            with (
                _hooked(self.register_load_state_dict_pre_hook, take, prepend=False),
                _hooked(self.register_load_state_dict_post_hook, restore),
            ):
                super().load_state_dict(state_dict)
        except BaseException:
            for each, attributes in zip(objects, before, strict=True):
                vars(each).update(attributes)
            for master, value in zip(masters, values, strict=True):
                if is_dtensor(master):
                    local(master).detach().copy_(value)
                else:
                    master.data = value  # on the device where it was
            self._targets.forget_marks()
            raise

    @torch.no_grad()
    def _restore(self, loaded: dict[str, Any]) -> None:
        keys = dict(saving.saved_keys(self.param_groups, loaded))
        states = {
            key: {name: _own_part(param, value) for name, value in loaded["state"][key].items()}
            for param, key in keys.items()
        }
        with torch._C.DisableTorchFunctionSubclass():
            self._move_masters()
            views = {param: self._targets[param] for param in self._stepped}
            masters = {param: states[key].pop("master_param", None) for param, key in keys.items()}
            others = {k: v for k, v in loaded["state"].items() if k not in states}
            groups = [
                {**_options(group), "params": saved["params"]}
                for group, saved in zip(self.param_groups, loaded["param_groups"], strict=True)
            ]
            self.inner.load_state_dict({"state": {**others, **states}, "param_groups": groups})
            n_other = 0
            for param, saved in masters.items():
                view = views[param]
                if view.master.name:
                    value = view.value() if saved is None else local(saved)
                    local(self._stepped[param]).copy_(value)
                elif saved is not None and is_own_master(param):
                    n_other += not saving.adopt_master(view, local(saved))
            self._in_use = {*keys}
            with_masters = [views[param] for param in keys if views[param].master.name]
            states = self._master_states()
            for peers in together(with_masters):
                n_other += adopt(peers, [states[view.owner] for view in peers]).count(False)
            warn_of_loaded(n_other, 0)

    def _move_masters(self) -> None:
        """Move masters to the devices of their parameters, before states are loaded."""
        for param, master in self._stepped.items():
            if master.device != param.device and not is_dtensor(param):
                master.data = master.to(param.device)


@contextlib.contextmanager
def _hooked(
    register: Callable[..., Any], hook: Callable[..., Any], prepend: bool = True
) -> Iterator[None]:
    """Register a hook of torch.optim for the duration of a ``with`` block."""
    handle = register(hook, prepend=prepend)
    try:
        yield
    finally:
        handle.remove()


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _OF_GROUP}


def _own_part(param: Tensor, value: Any) -> Any:
    """A copy of a saved value for the inner optimizer; the shard of a whole one of this shape."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)  # such as lists of tensors, which torch.optim would share
    if is_dtensor(param) and value.shape == param.shape:
        return like(param, part_for(param, value).clone())
    return value.detach().clone()
