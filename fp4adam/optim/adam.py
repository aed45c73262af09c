"""The Adam update: its scalars, and its arithmetic in torch operators.

``fp4adam.kernels.adam.adam_tile`` does the same operations in the same order. Each is a single
correctly rounded float32 operation (float64 for float64 parameters), so both give the same bits.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import numpy
except ImportError:  # torch works without it
    numpy = None

from fp4adam.optim.memory_layout import memory_order
from fp4adam.tensors import backend

_ZERO, _ONE = torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu").unbind()


class Scalars(NamedTuple):
    """The scalars of one update; computed from the hyper-parameters in float64, used in float32.

    Attributes:
        grad_factor: 1, or -1 to maximize.
        decay: 1 - lr * weight_decay, or weight_decay where decay is added to the gradient (L2).
        lerp_weight: 1 - beta1 if that is below 1/2, else -beta1 (see :func:`adam_`).
        beta2: Decay rate of the second moment.
        one_minus_beta2: 1 - beta2.
        eps: Term added to the denominator.
        step_size: lr / (1 - beta1**step).
        rsqrt_bias_correction2: 1 / sqrt(1 - beta2**step).
        dither_step: Number of the update; seeds the dither of narrow states.
    """

    grad_factor: float
    decay: float
    lerp_weight: float
    beta2: float
    one_minus_beta2: float
    eps: float
    step_size: float
    rsqrt_bias_correction2: float
    dither_step: int


def updates_params(group: Mapping[str, Any]) -> bool:
    """Whether steps of a parameter group change the parameters, and not just the moments."""
    return abs(float(group["lr"])) > 2.0**-149  # the smallest float32 above zero


@functools.lru_cache(maxsize=64)
def power(base: float, exponent: int) -> float:
    """``base ** exponent`` for an exponent >= 0, by squaring.

    A sequence of products rounds alike everywhere; ``**`` of C libraries and of GPUs does not.
    ``fp4adam.kernels.step_scalars`` does the same.
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def adam_scalars(group: Mapping[str, Any], step: float) -> Scalars:
    """The scalars of a parameter group for its update number ``step`` (1 for the first).

    ``fp4adam.kernels.step_scalars`` does the same on a device.
    """
    lr = float(group["lr"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    weight_decay = float(group["weight_decay"])
    decay = weight_decay
    if group["adam_w_mode"]:
        # Infinite lr times zero decay would be NaN.
        decay = 1 - lr * weight_decay if weight_decay else 1.0
    bias_correction1 = bias_correction2 = 1.0
    if group["bias_correction"]:
        bias_correction1, bias_correction2 = (
            1 - power(beta1, int(step)),
            1 - power(beta2, int(step)),
        )
    return Scalars(
        grad_factor=-1.0 if group["maximize"] else 1.0,
        decay=decay,
        lerp_weight=1 - beta1 if 1 - beta1 < 0.5 else -beta1,
        beta2=beta2,
        one_minus_beta2=1 - beta2,
        eps=float(group["eps"]),
        step_size=lr / bias_correction1 if updates_params(group) else 0.0,
        rsqrt_bias_correction2=1 / math.sqrt(bias_correction2),
        dither_step=int(step),
    )


def adam_(
    value: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    scalars: Scalars,
    adam_w_mode: bool,
    grad_scale: Tensor | None = None,
    clip: Tensor | None = None,
) -> None:
    """Update ``value`` and the moments in place by one Adam step.

    Args:
        value: The parameter or its master copy; 16-bit values are widened and rounded back.
        grad: Gradient of the same shape, any floating dtype.
        exp_avg: First moment, float32 (float64 for float64 parameters).
        exp_avg_sq: Second moment, same dtype.
        max_exp_avg_sq: Largest second moment so far (AMSGrad), or None.
        scalars: See :class:`Scalars`.
        adam_w_mode: Whether decay shrinks the value (AdamW) or is added to the gradient (L2).
        grad_scale: float32 one-element tensor that divides the gradient, or None.
        clip: float32 one-element tensor that multiplies it after that, or None.

    Source: arXiv:1711.05101, algorithm 2; arXiv:1904.09237 for AMSGrad.
    """
    factor = None if scalars.grad_factor == 1 else scalars.grad_factor
    if grad_scale is not None:
        factor = grad_scale.reshape(()).reciprocal() * scalars.grad_factor
    if clip is not None:
        factor = clip.reshape(()) if factor is None else clip.reshape(()) * factor
    tensors = [value, grad, exp_avg, exp_avg_sq]
    if max_exp_avg_sq is not None:
        tensors.append(max_exp_avg_sq)
    parts = _cut(tensors)
    # All parts share this scratch memory. Pages that an update does not touch stay unmapped.
    shape = parts[0][0].shape
    scratch = *exp_avg.new_empty(4, *shape).unbind(), exp_avg.new_full(shape, scalars.eps)
    for part in parts:
        if part[0].shape != shape:
            scratch = tuple(t[: len(part[0])] for t in scratch)
        _update_(part, scratch, scalars, adam_w_mode, factor)


def _cut(tensors: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """Cut tensors of one shape into matching views of CPU chunk size; the last may be smaller."""
    value = tensors[0]
    size = backend.cpu_chunk_numel()
    if not value.is_cpu or value.numel() <= size:
        return [tuple(tensors)]
    order = memory_order(value)
    tensors = [t.permute(order) for t in tensors]
    if all(t.is_contiguous() for t in tensors):
        parts = [t.view(-1).split(size) for t in tensors]
    else:
        parts = [t.split(max(1, size // t[0].numel())) for t in tensors]
    return list(zip(*parts, strict=True))


def _update_(
    tensors: tuple[Tensor, ...],
    scratch: tuple[Tensor, ...],
    s: Scalars,
    adam_w_mode: bool,
    factor: float | Tensor | None,
) -> None:
    """Update one part.

    ``scratch``: Five tensors of its shape in the dtype of the moments; the last one is full of eps.
    """
    value, grad, exp_avg, exp_avg_sq, *max_exp_avg_sq = tensors
    denominator, change, g, p, eps = scratch
    dtype = exp_avg.dtype
    p = value if value.dtype == dtype else p.copy_(value)
    if grad.dtype == dtype and factor is None and adam_w_mode:
        g = grad
    else:
        g.copy_(grad)
    if factor is not None:
        g.mul_(factor)
    if not adam_w_mode and s.decay != 0:  # Infinite values times zero decay would be NaN.
        _multiply_add(p, s.decay, g, out=g)

    _multiply(g, s.one_minus_beta2, g, out=change)
    largest = _multiply_add(exp_avg_sq, s.beta2, change, out=exp_avg_sq)
    for maximum in max_exp_avg_sq:
        largest = torch.maximum(maximum, exp_avg_sq, out=maximum)
    _sqrt(largest, out=denominator)
    _multiply_add(denominator, s.rsqrt_bias_correction2, eps, out=denominator)

    # Interpolate from the nearer end, as torch.lerp does: exact for beta1 = 0.
    base = exp_avg if s.lerp_weight > 0 else g
    torch.sub(g, exp_avg, out=change)
    _multiply_add(change, s.lerp_weight, base, out=exp_avg)

    if s.step_size != 0:  # A zero step leaves the value alone, including the sign of a zero.
        if adam_w_mode and s.decay != 1:
            p.mul_(s.decay)
        _subtract_ratio_(p, exp_avg, s.step_size, denominator, scratch=change)
        if p is not value:
            value.copy_(p)


def _multiply(x: Tensor, factor: float, y: Tensor, out: Tensor) -> Tensor:
    """``(x * factor) * y`` >= 0, with both products rounded."""
    if not x.is_cpu:
        return torch.mul(x, factor, out=out).mul_(y)
    # One pass. A sum with zero rounds the last product, fused or not.
    return torch.addcmul(_ZERO, x, y, value=factor, out=out)


def _multiply_add(x: Tensor, factor: float, y: Tensor, out: Tensor) -> Tensor:
    """``x * factor + y``, with the product rounded; ``out`` may be ``x`` or ``y``."""
    if not x.is_cpu:
        return torch.add(x * factor, y, out=out)
    # One pass. Compilers make addcmul's last product and its sum one rounding, on most CPUs:
    # (factor * x) * 1 + y has a last product that is exact.
    return torch.addcmul(y, x, _ONE, value=factor, out=out)


def _subtract_ratio_(p: Tensor, x: Tensor, factor: float, y: Tensor, scratch: Tensor) -> None:
    """``p -= (factor * x) / y``, with both products rounded."""
    if p.is_cpu:  # One pass; compilers cannot join a quotient with a sum.
        p.addcdiv_(x, y, value=-factor)
    else:  # A GPU's addcdiv is p + factor * (x / y), with one rounding for product and sum.
        p.sub_(torch.mul(x, factor, out=scratch).div_(y))


def _sqrt(x: Tensor, out: Tensor) -> Tensor:
    """Correctly rounded square root of float32; torch's own of float64."""
    if x.dtype == torch.float64:
        return torch.sqrt(x, out=out)
    # torch's float32 square root on the CPU is off by one ulp for 17 % of the values (2.11, 2.13).
    if x.is_cpu and numpy is not None:
        numpy.sqrt(x.numpy(), out=out.numpy())
        return out
    # torch's float64 one is slow on some CPUs. Root and two divisions in float64 are wrong by less
    # than 3 * 2**-53 of the result. No root of a float32 is closer than 4 * 2**-53 to a tie of
    # float32: the tie's square has odd multiples of 1/4 in units where the float32 is an integer.
    return out.copy_(x.double().rsqrt_().reciprocal_())
