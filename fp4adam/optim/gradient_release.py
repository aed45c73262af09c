"""Gradient release: each parameter is stepped and its gradient freed during the backward pass.

Each parameter, or scale group, has an engine of its own, so the same code steps it, with the same
bits. Hooks that autograd and FSDP2 call with complete gradients run these engines.
"""

import contextlib
import gc
import math
import sys
import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fp4adam.distributed.dtensor import is_dtensor, local, sharding_groups
from fp4adam.optim.engine import Engine, Signals
from fp4adam.optim.grad_norm import GradNorm
from fp4adam.optim.options import Options
from fp4adam.optim.parameter import scales_of


class GradientRelease:
    """The handle that :meth:`FP4Adam.enable_gradient_release` returns.

    Attributes:
        grad_norm: With ``max_norm``, the norm of all gradients released before the last ``step()``,
            a 0-dim float32 tensor; it clips those released after it. None before the first step.
    """

    def __init__(self, engine: Engine, max_norm: float | None) -> None:
        _check(engine.parameters.options, max_norm)
        engine.drop_plan()
        engine.forget()
        self.grad_norm: Tensor | None = None
        # Neither this nor the hooks keep the engine alive: without it, nothing is released.
        self._engine = weakref.ref(engine)
        self._max_norm = max_norm
        self._accumulates = False
        self._is_checked = False
        self._clip: dict[torch.device, Tensor] = {}
        self._units: dict[Tensor, _Unit] = {}
        # Each with the address of what torch calls the implementation of the parameter.
        self._hooks: dict[Tensor, tuple[RemovableHandle, int]] = {}
        self._released: set[Tensor] = set()
        self.is_enabled = True
        self.attach(engine)

    # What users call

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep gradients in a ``with`` block: for all microbatches of a step but the last.

        With FSDP2, ``set_requires_gradient_sync(False)`` does the same by itself.
        """
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def remove(self) -> None:
        """Return to stepping all parameters in ``step()``. A second call does nothing."""
        for hook, _ in self._hooks.values():
            hook.remove()
        # A handle that is kept keeps no parameters alive.
        self._hooks, self._units, self._released, self.is_enabled = {}, {}, set(), False

    # What the optimizer calls

    def _check_param(self, param: Tensor) -> None:
        hooks = (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()
        if any(isinstance(hook, _Hook) and hook.is_of_another(self) for hook in hooks):
            raise RuntimeError(
                "each parameter must be released by one optimizer, got one of shape "
                f"{tuple(param.shape)} that another one releases; remove() its handle first"
            )
        if is_dtensor(param) and param.device.type != param.device_mesh.device_type:
            raise NotImplementedError(
                "parameters must be where their gradients are reduced with gradient release, got "
                f"one on {param.device.type} of a mesh of {param.device_mesh.device_type} (CPU "
                "offload): the gradient may still be on its way; leave out the offload"
            )

    def attach(self, engine: Engine) -> None:
        """Register hooks for parameters that are new, newly trainable, or have lost theirs."""
        if engine is not self._engine():
            self._engine, self._units = weakref.ref(engine), {}
        params = engine.params
        together: dict[Hashable, list[Tensor]] = defaultdict(list)
        for param in params:
            self._check_param(param)
            together[scales_of(param)].append(param)
        units = {}
        for members in together.values():
            unit = self._units.get(members[0])
            if unit is None or not unit.engine.is_part_of(engine, members):
                unit = _Unit(engine.part(members))
            units |= dict.fromkeys(members, unit)
        if units.keys() != self._units.keys():
            engine.parameters.keep_only(params)
        self._units = units
        for unit in units.values():
            unit.engine.n_parts = len(units)
        for param in params:
            if not param.requires_grad:
                continue
            hooks, (known, impl) = param._post_accumulate_grad_hooks, self._hooks.get(param, (0, 0))
            if not known or not hooks or known.id not in hooks:
                known = param.register_post_accumulate_grad_hook(_Hook(self))
            elif impl != param._cdata:
                # swap_tensors, which Module.to() may use, exchanges what autograd looks into.
                param._post_accumulate_grad_hooks = hooks
            self._hooks[param] = known, param._cdata

    def forget(self, engine: Engine) -> None:
        """Drop what is known of parameters, after a state has been loaded."""
        self._units = {}
        self.attach(engine)

    def finish_step(self, signals: Signals, engine: Engine) -> None:
        """Step what still has gradients, all or nothing, and end the step.

        Raises:
            RuntimeError: If there are signals of a ``GradScaler``, or a gradient cannot be used.
        """
        if any(signal is not None for signal in signals):
            raise RuntimeError(
                "gradients must not be scaled with gradient release, got a GradScaler: parameters "
                "are stepped before it knows of overflows, and have been stepped with scaled "
                "gradients in this pass; train in bfloat16, or remove() the handle and load a "
                "checkpoint"
            )
        self.attach(engine)
        units = dict.fromkeys(self._units.values())
        waiting = [u for u in units if any(param.grad is not None for param in u.params)]
        for unit in waiting:
            unit.engine.check_call()
            unit.engine.check()
        for unit in waiting:
            self._step(unit)
        engine.join()
        if self._max_norm is not None and self._released:
            params = [*self._units]
            sizes = [local(param).numel() for param in params]
            norm = GradNorm(sizes, [*map(sharding_groups, params)])
            sums = [self._units[param].sums.pop(param, None) for param in params]
            self.grad_norm, self._clip = norm.of_span_sums(sums, self._max_norm)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Begin anew, after a step or after all gradients have been reset."""
        self._released = set()
        for unit in self._units.values():
            unit.arrived.clear()
            unit.sums.clear()

    # The hook

    @property
    def is_alive(self) -> bool:
        """Whether it is enabled, and the optimizer still exists."""
        return self.is_enabled and self._engine() is not None

    @torch.no_grad()
    @torch._disable_dynamo
    def release(self, param: Tensor) -> None:
        """Step the unit of a parameter if all of its gradients are complete."""
        if self._accumulates or param.grad is None:
            return
        if not self._is_checked and _has_process_group():
            _check_no_replicas(self._units)
            self._is_checked = True
        if param not in self._units:  # taken out of the groups
            return
        if param in self._released:
            raise RuntimeError(
                "each parameter must be released once per step(), got one of shape "
                f"{tuple(param.shape)} twice; call step() after each backward pass, wrap all but "
                "the last microbatch of a step in accumulate(), and use non-reentrant checkpoints"
            )
        unit = self._units[param]
        unit.arrived.add(param)
        if all(p in unit.arrived and p.grad is not None for p in unit.params if p.requires_grad):
            with torch._C.DisableTorchFunctionSubclass():
                self._step(unit)

    def _step(self, unit: "_Unit") -> None:
        if self._max_norm is not None:
            unit.measure()
        unit.engine.clip = dict(self._clip)
        self._engine().step_part(unit.engine, Signals())
        self._released |= {param for param in unit.params if param.grad is not None}
        for param in unit.params:
            param.grad = None
        unit.arrived.clear()


class _Hook:
    """What autograd and FSDP2 call once the gradient of a parameter is complete."""

    def __init__(self, release: GradientRelease) -> None:
        self._release = weakref.ref(release)

    def __call__(self, param: Tensor) -> None:
        release = self._release()
        if release is not None and release.is_alive:
            release.release(param)

    def is_of_another(self, release: GradientRelease) -> bool:
        """Whether it belongs to another release, which is still in use."""
        own = self._release()
        return own is not None and own is not release and own.is_alive


class _Unit:
    """What is stepped together: one parameter, or all members of a scale group.

    Attributes:
        engine: What steps them.
        params: The parameters.
        arrived: Those with complete gradients.
        sums: Sums of squares of the gradients that were stepped, by parameter.
    """

    def __init__(self, engine: Engine) -> None:
        engine.overlaps_backward = True
        self.engine, self.params = engine, engine.params
        self.arrived: set[Tensor] = set()
        self.sums: dict[Tensor, Tensor] = {}
        self._norms: dict[Tensor, GradNorm] = {}

    def measure(self) -> None:
        """Add up the squares of the gradients."""
        for param in self.params:
            if param.grad is None:
                continue
            grad = local(param.grad)
            norm = self._norms.get(param)
            if norm is None or norm.sizes != [grad.numel()]:
                norm = self._norms[param] = GradNorm([grad.numel()])
            self.sums[param] = norm.span_sums([grad])


def _check(options: Options, max_norm: float | None) -> None:
    """Raise if gradients cannot be released with these options."""
    if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm >= 0):
        raise ValueError(
            f"max_norm must be >= 0 or None, got {max_norm!r}; {math.inf} measures only"
        )
    if options.use_decoupled_grad:
        raise NotImplementedError(
            "use_decoupled_grad must be False for gradient release, got True: autograd calls "
            "hooks for param.grad only; leave use_decoupled_grad False"
        )
    if options.capturable:
        raise NotImplementedError(
            "capturable must be False for gradient release, got True: its hooks step "
            "parameters one by one; capture backward() and step() in one graph instead"
        )


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _check_no_replicas(params: Iterable[Tensor]) -> None:
    """Raise if a parameter belongs to a wrapper that reduces gradients after the hooks.

    Parameters do not know their wrappers, so this looks at all objects, once.
    """
    kinds = tuple(
        getattr(module, name)
        for module, name in (
            (sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel"),
            (
                sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel"),
                "FullyShardedDataParallel",
            ),
        )
        if module is not None
    )
    params = set(params)
    for one in gc.get_objects():
        # Not isinstance, which asks objects for their class.
        if issubclass(type(one), kinds) and not params.isdisjoint(one.module.parameters()):
            raise NotImplementedError(
                f"parameters must not be in a {type(one).__name__} with gradient release, got one "
                "that is: it averages gradients after they have been released; call step() after "
                "backward(), or use fully_shard"
            )
