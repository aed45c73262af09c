"""Gradient release: each parameter is stepped and its gradient freed during the backward pass.

Each parameter, or scale group, has an engine of its own, so the same code steps it, with the same
bits. Hooks that autograd and FSDP2 call with complete gradients run these engines.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fp4adam.distributed.dtensor import is_dtensor
from fp4adam.optim.engine import Engine, Signals

if TYPE_CHECKING:
    from fp4adam.optim.fused_adam import FusedAdam


class GradientRelease:
    """The handle that :meth:`FP4Adam.enable_gradient_release` returns."""

    def __init__(self, optimizer: "FusedAdam") -> None:
        engine = optimizer._stepped
        options = engine.targets.options
        if options.use_decoupled_grad or options.capturable:
            raise NotImplementedError(
                "use_decoupled_grad and capturable must be False for gradient release, got "
                f"{options.use_decoupled_grad} and {options.capturable}: autograd calls hooks for "
                "param.grad only, and these step parameters one by one; leave the former out, or "
                "capture backward() and step() in one graph instead"
            )
        # Neither this nor the hooks keep the optimizer alive: without it, nothing is released.
        self._optimizer = weakref.ref(optimizer)
        self._accumulates = False
        self._implementations: list[int] | None = None
        self._hooks: list[RemovableHandle] = []
        self._arrived: set[Tensor] = set()
        self._released: set[Tensor] = set()
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
        for hook in self._hooks:
            hook.remove()
        self.drop_gradients()
        if _is_in_use(self):
            optimizer = self._optimizer()
            optimizer._stepped.forget()
            optimizer._release = None

    # What the optimizer calls

    def attach(self, engine: Engine) -> None:
        trained = [param for param in engine.params if param.requires_grad]
        implementations = [param._cdata for param in trained]
        if implementations != self._implementations:
            for param in trained:
                self._check_param(param)
            for old in self._hooks:
                old.remove()
            hook = functools.partial(_release, weakref.ref(self))
            self._hooks = [param.register_post_accumulate_grad_hook(hook) for param in trained]
            for param in trained:
                # swap_tensors, which Module.to() may use, exchanges what autograd looks into.
                param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
            self._implementations = implementations
        engine.divide()

    def _check_param(self, param: Tensor) -> None:
        hooks = (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()
        found = [h.args[0]() for h in hooks if getattr(h, "func", None) is _release]
        if any(other is not self and _is_in_use(other) for other in found):
            raise RuntimeError(
                "each parameter must be released by one optimizer, got one of shape "
                f"{tuple(param.shape)} that is released already; remove() that handle first"
            )
        if is_dtensor(param) and param.device.type != param.device_mesh.device_type:
            raise NotImplementedError(
                "parameters must be where their gradients are reduced with gradient release, got "
                f"one on {param.device.type} of a mesh of {param.device_mesh.device_type} (CPU "
                "offload): the gradient may still be on its way; leave out the offload"
            )

    def finish_step(self, signals: Signals, engine: Engine) -> None:
        """Step what still has gradients, all or nothing, and end the step."""
        if any(signal is not None for signal in signals):
            raise RuntimeError(
                "gradients must not be scaled with gradient release, got a GradScaler: parameters "
                "are stepped before it knows of overflows, and have been stepped with scaled "
                "gradients in this pass; train in bfloat16, or remove() the handle and load a "
                "checkpoint"
            )
        self.attach(engine)
        waiting = dict.fromkeys(u for param, u in engine.parts.items() if param.grad is not None)
        again = [param for param in self._released if param.grad is not None]
        if again:
            self.drop_gradients()
            raise RuntimeError(
                f"parameters must get no gradient after their release, got {len(again)} that have "
                "one again: DistributedDataParallel averages gradients after the hooks, when "
                "parameters have been stepped with those of one rank; use fully_shard, or remove() "
                "the handle, and load a checkpoint"
            )
        engine.check_call()
        for unit in waiting:
            unit.check()
        for unit in waiting:
            self._step(unit, engine)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Begin anew, after a step or after all gradients have been reset."""
        self._released.clear()
        self._arrived.clear()

    # The hook

    @torch.no_grad()
    @torch._disable_dynamo
    def release(self, param: Tensor) -> None:
        """Step the unit of a parameter if all of its gradients are complete."""
        if self._accumulates or param.grad is None:
            return
        engine = self._optimizer()._stepped
        if not self._arrived and not self._released:
            engine.divide()
        unit = engine.parts.get(param)
        if unit is None:  # taken out of the groups
            return
        if param in self._released:
            raise RuntimeError(
                "each parameter must be released once per step(), got one of shape "
                f"{tuple(param.shape)} twice; call step() after each backward pass, wrap all but "
                "the last microbatch of a step in accumulate() (transformers' Trainer cannot: "
                "leave gradient_accumulation_steps 1), and use non-reentrant checkpoints"
            )
        self._arrived.add(param)
        if all(p in self._arrived and p.grad is not None for p in unit.params if p.requires_grad):
            with torch._C.DisableTorchFunctionSubclass():
                self._step(unit, engine)

    def _step(self, unit: Engine, engine: Engine) -> None:
        engine.step_part(unit, Signals())
        self._released |= {param for param in unit.params if param.grad is not None}
        for param in unit.params:
            param.grad = None


def _is_in_use(release: GradientRelease | None) -> bool:
    optimizer = None if release is None else release._optimizer()
    return optimizer is not None and optimizer._release is release


def _release(release: "weakref.ref[GradientRelease]", param: Tensor) -> None:
    if _is_in_use(release()):
        release().release(param)
