"""Weights that a model has exchanged for others, and the optimizers that would go on with them.

Every optimizer of torch's is looked at, before its next step; those of this package look themselves
as well.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fp4adam.tensors.quantized_tensor import QuantizedTensor

# How many weights have been exchanged, and how many had been when an optimizer was looked at.
_retirements = 0
_looked_at: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def retire(weight: nn.Parameter, module: nn.Module) -> None:
    """Let optimizers notice that still have ``weight``, which ``module`` no longer has."""
    # Not the new parameter: model.to() exchanges only tensors that have no weak references.
    weight._replaced_in = module
    global _retirements
    if not _retirements:
        register_optimizer_step_pre_hook(_check_optimizer)
    _retirements += 1
    weight.grad = None  # it has gone along
    if not weight.is_inference():
        # An optimizer that has stepped it looks again at what has another version.
        torch.autograd.graph.increment_version(weight)
        if isinstance(weight, QuantizedTensor):
            weight._shared.mark_written()


def check_in_use(param: Tensor) -> None:
    """Raise RuntimeError if a module has another weight in the place of ``param`` since.

    For parameters without a gradient. Something else that uses it would give it one.
    """
    layer = getattr(param, "_replaced_in", None)
    is_frozen = param.is_floating_point() and not param.requires_grad  # codes may be integers
    if layer is None or is_frozen:
        return
    if all(own is not param for own in layer._parameters.values()):
        raise RuntimeError(
            f"parameters must be those of the model, got one of shape {tuple(param.shape)} that "
            "quantize_model, dequantize_model, import_checkpoint or make_trainable has replaced by "
            "another one, which gets the gradients now; create the optimizer after that call"
        )


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise RuntimeError if it would step weights that its model no longer has."""
    if _looked_at.get(optimizer) == _retirements:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                check_in_use(param)
    _looked_at[optimizer] = _retirements
