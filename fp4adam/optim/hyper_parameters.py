"""Checks of hyper-parameters, with the error messages of ``torch.optim``."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from fp4adam.tensors import backend

_NUMBERS = (float, Tensor, Real)  # the most frequent first


def check_hyper_parameters(name: str, options: Mapping[str, Any]) -> None:
    """Check the options of a group (merged with the defaults) of the optimizer class ``name``.

    Raises:
        ValueError: If a number is out of range, or a tensor has more than one element or comes
            with ``foreach=True``.
        TypeError: If a value is not a number or a tensor.
        NotImplementedError: For ``differentiable``.
        RuntimeError: If ``fused`` and ``foreach`` are both True.
    """
    lr, betas, foreach = options["lr"], options["betas"], options["foreach"]
    if options["fused"] and options["differentiable"]:
        raise NotImplementedError("`fused` does not support `differentiable`")
    if options["fused"] and foreach:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    if options["differentiable"]:
        raise NotImplementedError(
            f"differentiable must be False for {name}, got True: the step is one in-place update "
            "outside autograd; torch.optim.AdamW can be differentiated"
        )
    if isinstance(lr, Tensor):
        if foreach and not options["capturable"]:
            raise ValueError(
                "lr as a Tensor is not supported for capturable=False and foreach=True"
            )
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
    _check_at_least(0.0, "learning rate", lr)
    check_numbers(options)
    if len(betas) != 2 or len({isinstance(beta, Tensor) for beta in betas}) != 1:
        raise ValueError("betas must be either both floats or both Tensors")
    for i, beta in enumerate(betas):
        if isinstance(beta, Tensor) and foreach and not options["capturable"]:
            raise ValueError(
                f"betas[{i}] as a Tensor is not supported for capturable=False and foreach=True"
            )
        if isinstance(beta, Tensor) and beta.numel() != 1:
            raise ValueError(f"Tensor betas[{i}] must be 1-element")


def check_numbers(options: Mapping[str, Any], may_wait: bool = True) -> None:
    """Check the numbers of a group, which user code may change or a checkpoint may bring.

    A negative learning rate is allowed and ascends, as in ``torch.optim``: schedules may end just
    below zero. With ``may_wait=False`` tensors on a device are not checked, because reading them
    would sync.

    Raises:
        ValueError: If a number is NaN or out of range.
        TypeError: If a value is not a number or a tensor.
    """
    if not may_wait:
        options = {name: _on_host(options[name]) for name in ("lr", "eps", "betas", "weight_decay")}
    _check_at_least(-math.inf, "learning rate", options["lr"])
    _check_at_least(0.0, "epsilon value", options["eps"])
    if not isinstance(options["betas"], Iterable):
        raise TypeError(f"betas must be two numbers, got {options['betas']!r}; pass (0.9, 0.999)")
    if len(betas := [*options["betas"]]) != 2:
        raise ValueError(f"betas must be two numbers, got {options['betas']!r}; pass (0.9, 0.999)")
    for i, beta in enumerate(betas):
        _check_number(f"beta parameter at index {i}", beta)
        if not 0.0 <= beta < 1.0:
            raise ValueError(
                f"Invalid beta parameter at index {i}: {beta}; it must be at least 0 and below 1"
            )
    _check_at_least(0.0, "weight_decay value", options["weight_decay"])


def check_saved_numbers(options: Mapping[str, Any]) -> None:
    """:func:`check_numbers` for those of a checkpoint, where tensors must have one element.

    Raises:
        ValueError: Also if a tensor has another number of elements.
        TypeError: As :func:`check_numbers`.
    """
    betas = options["betas"] if isinstance(options["betas"], Iterable) else ()
    for value in (options["lr"], options["eps"], options["weight_decay"], *betas):
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"hyper-parameters must be numbers or tensors of one element, got {value!r}; "
                "the checkpoint is damaged"
            )
    check_numbers(options)


def is_on_device(value: Any) -> bool:
    """Whether kernels can read a hyper-parameter at every step, because it is a tensor there."""
    return isinstance(value, Tensor) and backend.uses_kernels(value.device)


def _on_host(value: Any) -> Any:
    """The value, with 0 in place of each tensor that is not on the CPU."""
    if type(value) is tuple:
        return tuple(map(_on_host, value))
    return 0.0 if isinstance(value, Tensor) and value.device.type != "cpu" else value


def _check_at_least(least: float, what: str, value: float | Tensor) -> None:
    _check_number(what, value)
    if not least <= value:
        raise ValueError(f"Invalid {what}: {value}; it must be a number >= 0")


def _check_number(what: str, value: float | Tensor) -> None:
    if not isinstance(value, _NUMBERS):
        raise TypeError(f"Invalid {what}: {value!r}; it must be a number, or a one-element tensor")
