"""What the hyper-parameters of a parameter group may be, in the words of ``torch.optim``."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def check_hyper_parameters(name: str, options: Mapping[str, Any]) -> None:
    """Check the options of the optimizer class ``name``, the group's own over the defaults.

    Raises:
        ValueError: If a number is out of range, or a tensor has more than one element or comes
            with ``foreach=True``.
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
        if foreach:
            raise ValueError(
                "lr as a Tensor is not supported for capturable=False and foreach=True"
            )
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
    _check_at_least_0("learning rate", lr)
    _check_at_least_0("epsilon value", options["eps"])
    for i, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    _check_at_least_0("weight_decay value", options["weight_decay"])
    kinds = {Tensor if isinstance(beta, Tensor) else type(beta) for beta in betas}
    if len(betas) != 2 or kinds not in ({float}, {Tensor}):
        raise ValueError("betas must be either both floats or both Tensors")
    for i, beta in enumerate(betas):
        if isinstance(beta, Tensor) and foreach:
            raise ValueError(
                f"betas[{i}] as a Tensor is not supported for capturable=False and foreach=True"
            )
        if isinstance(beta, Tensor) and beta.numel() != 1:
            raise ValueError(f"Tensor betas[{i}] must be 1-element")


def _check_at_least_0(what: str, value: float | Tensor) -> None:
    if not 0.0 <= value:
        raise ValueError(f"Invalid {what}: {value}")
