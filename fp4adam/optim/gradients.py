"""What an optimizer does with gradients besides a step: reads, resets, clips and releases them."""

from collections.abc import Callable
from operator import attrgetter

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import dtensor_class, local, sharding_groups
from fp4adam.optim.grad_norm import GradNorm
from fp4adam.optim.gradient_release import GradientRelease, check_max_norm
from fp4adam.tensors import backend


class Gradients:
    """The gradients, as a part of ``FusedAdam``; the attributes that it uses are its own."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Reset the gradients, including ``decoupled_grad`` if it is in use.

        Args:
            set_to_none: Free gradients instead of zeroing them; None means the ``set_grad_none`` of
                the constructor, or else True.

        Raises:
            ValueError: If it contradicts ``set_grad_none``.
        """
        default = getattr(self, "set_grad_none", None)
        if default is not None and set_to_none not in (None, default):
            raise ValueError(
                f"set_to_none must be {default} for an optimizer made with set_grad_none={default},"
                f" got {set_to_none}; leave set_grad_none out"
            )
        if set_to_none is None:
            set_to_none = default is None or default
        super().zero_grad(set_to_none)
        self._clip = {}
        if self._release is not None:
            self._release.drop_gradients()
        if self.use_decoupled_grad:
            for param in self._params():
                if getattr(param, "decoupled_grad", None) is not None:
                    param.decoupled_grad = None if set_to_none else param.decoupled_grad.zero_()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the total norm of all gradients in the next step.

        Like ``torch.nn.utils.clip_grad_norm_`` on all parameters, but the gradients stay unchanged:
        the step multiplies each by min(max_norm / (norm + 1e-6), 1) when it reads it, and does not
        round the product to the gradient's dtype. This costs one more read of the gradients, no
        write, and no device sync. With a ``GradScaler``, call ``scaler.unscale_(optimizer)`` first.
        With sharded parameters, call it on every rank.

        Args:
            max_norm: Largest norm that is not clipped, >= 0; infinity only measures.
            norm_type: 1, 2 or infinity.
            error_if_nonfinite: Raise if the norm is NaN or infinite; this syncs the device.

        Returns:
            The norm before clipping, a 0-dim float32 tensor on the device of the first gradient.

        Raises:
            ValueError: If an argument is out of range.
            RuntimeError: With ``error_if_nonfinite``, if the norm is not finite; with gradient
                release; while a CUDA graph is captured.
        """
        if backend.is_capturing():
            raise RuntimeError(
                "clip_grad_norm_ must not be called while a CUDA graph is captured, got a call in "
                "a capture: the step would multiply by the coefficient of that moment at every "
                "replay; capture torch.nn.utils.clip_grad_norm_, which scales the gradients"
            )
        if self._release is not None:
            raise RuntimeError(
                "clip_grad_norm_ must not be called while gradients are released, got a call after "
                "the step they were for; pass max_norm to enable_gradient_release, which clips by "
                "the norm of the previous step"
            )
        params = [param for group in self.param_groups for param in group["params"]]
        with torch._C.DisableTorchFunctionSubclass():
            groups = [*map(sharding_groups, params)]
            sizes = [*map(Tensor.numel, map(local, params))]
            known = self._grad_norm
            if known is None or (known.sizes, known.groups) != (sizes, groups):
                self._grad_norm = GradNorm(sizes, groups)
            grads = [*map(self._read_grad, params)]
            norm, self._clip = self._grad_norm(grads, max_norm, norm_type, error_if_nonfinite)
        return norm

    @property
    def _read_grad(self) -> Callable[[Tensor], Tensor | None]:
        """A function that returns the local part of a parameter's gradient, or None."""
        read = _decoupled_grad if self.use_decoupled_grad else attrgetter("grad")
        kind = dtensor_class()
        if any(isinstance(param, kind) for param in self._params()):
            return lambda param: local(read(param))
        return read

    def enable_gradient_release(self, max_norm: float | None = None) -> GradientRelease:
        """Step each parameter as soon as its gradient is complete, and free the gradient.

        The weights get the same bits as from ``step()`` after the backward pass, but gradients no
        longer exist all at once. Keep the training loop as it is: ``step()`` steps parameters that
        still have a gradient, such as one set by hand, and ends the step. It has to be called after
        each backward pass, except those in :meth:`GradientRelease.accumulate`. Members of a scale
        group are stepped once all of those that require gradients have one, or else in ``step()``.

        Works with FSDP2, which calls the hooks with reduced gradients.
        ``torch.nn.parallel.DistributedDataParallel`` averages gradients after the hooks, so
        its parameters are refused at the first gradient. ``GradScaler`` is refused by ``step()``.
        ``torch.nn.utils.clip_grad_norm_`` finds no gradients.

        Args:
            max_norm: Clip by the *previous* step's norm: every gradient of a step is multiplied by
                min(max_norm / (norm + 1e-6), 1) of the norm of all gradients of the step before, as
                its own is known only after its parameters were stepped. The first step is not
                clipped. This costs one more read of the gradients. None does not measure.

        Returns:
            A handle; ``remove()`` returns to stepping in ``step()``. Copies of the optimizer do not
            release gradients.

        Raises:
            RuntimeError: If gradients are released already.
            NotImplementedError: With ``use_decoupled_grad`` or ``capturable``, and for parameters
                that FSDP2 offloads to the CPU.
            ValueError: If ``max_norm`` is negative.
        """
        check_max_norm(max_norm)
        if self._release is not None:
            raise RuntimeError(
                "gradient release must be enabled once, got a second call; remove() the handle "
                "that the first one returned"
            )
        if self.use_decoupled_grad:
            raise NotImplementedError(
                "use_decoupled_grad must be False for gradient release, got True: autograd calls "
                "hooks for param.grad only; leave use_decoupled_grad False"
            )
        if self._is_capturable:
            raise NotImplementedError(
                "capturable must be False for gradient release, got True: its hooks step "
                "parameters one by one; capture backward() and step() in one graph instead"
            )
        self._drop_plan()
        self._clip = {}
        if self._offload is not None:
            self._offload.forget()
        self._release = GradientRelease(self, max_norm)
        return self._release


def _decoupled_grad(param: Tensor) -> Tensor | None:
    return getattr(param, "decoupled_grad", None)
