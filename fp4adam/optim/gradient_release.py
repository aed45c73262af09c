"""Gradient release: each parameter is stepped and its gradient freed during the backward pass.

Each parameter, or scale group, gets an optimizer of its own that shares options and states with the
whole one, so the same code steps it, with the same bits. Hooks that autograd and FSDP2 call with
complete gradients run these optimizers.
"""

import contextlib
import gc
import math
import sys
import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fp4adam.distributed.dtensor import is_dtensor, local, sharding_groups
from fp4adam.optim.grad_norm import GradNorm
from fp4adam.optim.memory_note import WriteNote
from fp4adam.optim.optimizer_part import OptimizerPart

if TYPE_CHECKING:
    from fp4adam.optim.fused_adam import FusedAdam


class GradientRelease:
    """The handle that :meth:`FP4Adam.enable_gradient_release` returns.

    Attributes:
        grad_norm: With ``max_norm``, the norm of all gradients released before the last ``step()``,
            a 0-dim float32 tensor; it clips those released after it. None before the first step.
    """

    def __init__(self, optimizer: "FusedAdam", max_norm: float | None) -> None:
        self.grad_norm: Tensor | None = None
        # Neither this nor the hooks keep the optimizer alive: without it, nothing is released.
        self._owner = weakref.ref(optimizer)
        self._max_norm = max_norm
        self._accumulates = False
        self._is_checked = False
        self._clip: dict[torch.device, Tensor] = {}
        self._units: dict[Tensor, _Unit] = {}
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._released: set[Tensor] = set()
        self.attach()

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
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        optimizer = self._owner()
        if optimizer is not None and optimizer._release is self:
            optimizer._masters.update(self.notes())
            optimizer._release = None

    # What the optimizer calls

    @property
    def _optimizer(self) -> "FusedAdam":
        optimizer = self._owner()
        if optimizer is None:
            raise RuntimeError("the optimizer of a gradient release must exist; please report this")
        return optimizer

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

    def attach(self) -> None:
        """Register hooks for parameters that are new or newly trainable."""
        optimizer = self._optimizer
        together: dict[Hashable, list[Tensor]] = defaultdict(list)
        for param in optimizer._params():
            self._check_param(param)
            together[optimizer._scales_of(param)].append(param)
        for params in together.values():
            unit = self._units.get(params[0])
            if unit is None or not unit.is_current(params):
                unit = _Unit(optimizer, params)
            self._units |= dict.fromkeys(params, unit)
        self._units = {param: self._units[param] for param in optimizer._params()}
        for param in self._units:
            if param not in self._hooks and param.requires_grad:
                self._hooks[param] = param.register_post_accumulate_grad_hook(_Hook(self))

    def forget(self) -> None:
        """Drop what is known of parameters, after a state has been loaded."""
        self._units = {}
        self.attach()

    def notes(self) -> dict[Tensor, WriteNote]:
        """The notes that all parts have taken of their parameters."""
        notes: dict[Tensor, WriteNote] = {}
        for unit in self._units.values():
            notes |= unit.notes()
        return notes

    def check_step(self) -> None:
        """Raise if ``step()`` has been called in a way that contradicts gradient release."""
        given = [vars(self._optimizer).pop(name, None) for name in ("grad_scale", "found_inf")]
        if any(value is not None for value in given):
            raise RuntimeError(
                "gradients must not be scaled with gradient release, got a GradScaler: parameters "
                "are stepped before it knows of overflows, and have been stepped with scaled "
                "gradients in this pass; train in bfloat16, or remove() the handle and load a "
                "checkpoint"
            )

    def finish_step(self) -> None:
        """Step what still has gradients, and end the step."""
        self.check_step()
        self.attach()
        for unit in dict.fromkeys(self._units.values()):
            if any(param.grad is not None for param in unit.params):
                self._step(unit)
        if self._optimizer._offload is not None:
            self._optimizer._offload.join()
        if self._max_norm is not None and self._released:
            params = [*self._units]
            sizes = [local(param).numel() for param in params]
            norm = GradNorm(sizes, [*map(sharding_groups, params)])
            sums = [self._units[param].sums.pop(param, None) for param in params]
            self.grad_norm, self._clip = norm.of_span_sums(sums, self._max_norm)
        self._released = set()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget which gradients of scale groups are complete, after they have been reset."""
        for unit in self._units.values():
            unit.arrived.clear()

    # The hook

    @property
    def is_alive(self) -> bool:
        """Whether the optimizer still exists."""
        return self._owner() is not None

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
        unit.step(self._clip)
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


class _Unit(OptimizerPart):
    """What is stepped together: one parameter, or all members of a scale group.

    Attributes:
        arrived: Those with complete gradients.
        sums: Sums of squares of the gradients that were stepped, by parameter.
    """

    beside = True

    def __init__(self, whole: "FusedAdam", params: list[Tensor]) -> None:
        super().__init__(whole, params)
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


def check_max_norm(max_norm: float | None) -> None:
    """Raise ValueError unless ``max_norm`` is None or a number >= 0."""
    if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm >= 0):
        raise ValueError(
            f"max_norm must be >= 0 or None, got {max_norm!r}; {math.inf} measures only"
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
