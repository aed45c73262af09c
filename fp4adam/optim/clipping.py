"""Clipping within the step: the total norm of gradients, and the coefficients made from it."""

from collections import defaultdict
from collections.abc import Sequence
from numbers import Real

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import get_total_norm

from fp4adam.distributed.dtensor import is_dtensor


def total_norm(grads: Sequence[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """``torch.nn.utils.get_total_norm`` as a plain tensor, of DTensors on any meshes."""
    by_mesh = defaultdict(list)
    for grad in grads:
        by_mesh[grad.device_mesh if is_dtensor(grad) else None].append(grad)
    how = norm_type, error_if_nonfinite
    norms = [get_total_norm(alike, *how) for alike in by_mesh.values()]
    norms = [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]
    return norms[0] if len(norms) == 1 else get_total_norm(norms, *how)


class Clipping:
    """The coefficients that clip some gradients, which it does not keep alive.

    Args:
        grads: The local gradients, None where there is none.
        norm: Their total norm.
        max_norm: The norm that they are clipped to.

    Attributes:
        coefficients: min(max_norm / (norm + 1e-6), 1), float32 [1], by the device of gradients.
    """

    def __init__(self, grads: Sequence[Tensor | None], norm: Tensor, max_norm: float) -> None:
        coefficient = (max_norm / (norm.float().view(1) + 1e-6)).clamp(max=1.0)
        devices = {grad.device for grad in grads if grad is not None}
        self.coefficients = {d: coefficient.to(d, non_blocking=True) for d in devices}
        # To the memory: references to gradients would keep Module.to() from swapping them.
        self._alive = [g if g is None else StorageWeakRef(g.untyped_storage()) for g in grads]
        self._known = [g if g is None else (g.data_ptr(), g._version) for g in grads]

    def check(self, grads: Sequence[Tensor | None]) -> None:
        """Raise unless the gradients that there are now are those of the norm, and unwritten."""
        same = [
            known == (grad.data_ptr(), grad._version) and not alive.expired()
            for known, alive, grad in zip(self._known, self._alive, grads, strict=True)
            if grad is not None and grad.numel()
        ]
        if not all(same):
            raise RuntimeError(
                "gradients must not change between clip_grad_norm_() and step(), got "
                f"{same.count(False)} of {len(same)} that have: the coefficient is that of the "
                "gradients before; call clip_grad_norm_() after the last backward pass, or "
                "optimizer.zero_grad() to begin anew"
            )


def check_max_norm(max_norm: float) -> None:
    """Raise if gradients cannot be clipped to this norm."""
    if not isinstance(max_norm, Real | Tensor):
        raise TypeError(f"max_norm must be a number, got {max_norm!r}; inf is allowed")
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be >= 0, got {max_norm}; pass inf to measure only")
