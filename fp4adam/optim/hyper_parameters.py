"""Checks of hyper-parameters, with the error messages of ``torch.optim``."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from fp4adam.tensors import backend

_WORDS = {
    "lr": "learning rate",
    "eps": "epsilon value",
    "betas[0]": "beta parameter at index 0",
    "betas[1]": "beta parameter at index 1",
    "weight_decay": "weight_decay value",
}


def check_hyper_parameters(name: str, options: Mapping[str, Any]) -> None:
    """Check the options of a group (merged with the defaults) of the optimizer class ``name``."""
    if options["fused"] and options["foreach"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    if options["differentiable"]:
        raise NotImplementedError(
            f"differentiable must be False for {name}, got True: the step is one in-place update "
            "outside autograd; torch.optim.AdamW can be differentiated"
        )
    for number, value in check_numbers(options).items():
        if isinstance(value, Tensor) and options["foreach"] and not options["capturable"]:
            raise ValueError(
                f"{number} as a Tensor is not supported for capturable=False and foreach=True"
            )
        if number == "lr" and value < 0:
            raise ValueError(f"Invalid learning rate: {value}; it must be a number >= 0")
    if len({isinstance(beta, Tensor) for beta in options["betas"]}) != 1:
        raise ValueError("betas must be either both floats or both Tensors")


def check_numbers(options: Mapping[str, Any], may_wait: bool = True) -> dict[str, Any]:
    """Check the numbers of a group, which user code or a checkpoint may bring; returns them.

    A negative learning rate is allowed and ascends, as in ``torch.optim``: schedules may end just
    below zero. With ``may_wait=False`` tensors on a device are not checked, because reading them
    would sync.
    """
    betas = options["betas"]
    if not isinstance(betas, Iterable):
        raise TypeError(f"betas must be two numbers, got {betas!r}; pass (0.9, 0.999)")
    if len(betas := [*betas]) != 2:
        raise ValueError(f"betas must be two numbers, got {betas!r}; pass (0.9, 0.999)")
    numbers = (options["lr"], options["eps"], *betas, options["weight_decay"])
    found = dict(zip(_WORDS, numbers, strict=True))
    for name, value in found.items():
        if not isinstance(value, (float, Tensor, Real)):  # the most frequent first
            raise TypeError(
                f"Invalid {_WORDS[name]}: {value!r}; it must be a number, or a one-element tensor"
            )
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"Tensor {name} must be 1-element")
            if not may_wait and value.device.type != "cpu":
                continue
        if name.startswith("betas"):
            is_right, range_ = 0.0 <= value < 1.0, "at least 0 and below 1"
        else:
            is_right, range_ = value >= (-math.inf if name == "lr" else 0.0), "a number >= 0"
        if not is_right:
            raise ValueError(f"Invalid {_WORDS[name]}: {value}; it must be {range_}")
    return found


def is_on_device(value: Any) -> bool:
    """Whether kernels can read a hyper-parameter at every step, because it is a tensor there."""
    return isinstance(value, Tensor) and backend.uses_kernels(value.device)
