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


class Scalars(NamedTuple):
    """The scalars of one update; computed from the hyper-parameters in float64, used in float32."""

    grad_factor: float  # 1, or -1 to maximize
    decay: float  # 1 - lr * weight_decay, or weight_decay where that is added to the gradient (L2)
    lerp_weight: float  # 1 - beta1 if that is below 1/2, else -beta1; see adam_
    beta2: float
    one_minus_beta2: float
    eps: float
    step_size: float  # lr / (1 - beta1**step)
    rsqrt_bias_correction2: float  # 1 / sqrt(1 - beta2**step)
    dither_step: int  # number of the update; seeds the dither of narrow states


def updates_params(group: Mapping[str, Any]) -> bool:
    """Whether steps of a parameter group change the parameters, and not just the moments."""
    # The smallest float32 above zero; other optimizers may have no learning rate.
    return abs(float(group.get("lr", math.inf))) > 2.0**-149


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
    if group["decoupled_weight_decay"]:
        # Infinite lr times zero decay would be NaN.
        decay = 1 - lr * weight_decay if weight_decay else 1.0
    bias_correction1 = bias_correction2 = 1.0
    if group["bias_correction"]:
        bias_correction1 = 1 - power(beta1, int(step))
        bias_correction2 = 1 - power(beta2, int(step))
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


def grad_factor(scalars: Scalars, grad_scale: Tensor | None, clip: Tensor | None) -> float | Tensor:
    """What gradients are multiplied by: float32 [1] tensors divide and multiply them, or None."""
    factor = scalars.grad_factor
    if grad_scale is not None:
        factor = grad_scale.reshape(()).reciprocal() * factor
    return factor if clip is None else clip.reshape(()) * factor


def adam_(
    value: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    scalars: Scalars,
    adam_w_mode: bool,
    factor: float | Tensor,
) -> None:
    """Update ``value`` and the moments, float32 (float64 for float64 parameters), in place.

    16-bit values are widened and rounded back. ``adam_w_mode``: Whether decay shrinks the value
    (AdamW) or is added to the gradient (L2). ``factor``: A :func:`grad_factor`.

    Source: arXiv:1711.05101, algorithm 2; arXiv:1904.09237 for AMSGrad.
    """
    s, dtype = scalars, exp_avg.dtype
    p, g = value.to(dtype), grad.to(dtype)
    g = g * factor
    if not adam_w_mode and s.decay != 0:  # Infinite values times zero decay would be NaN.
        g = g + p * s.decay

    exp_avg_sq.mul_(s.beta2).add_(g * s.one_minus_beta2 * g)
    largest = exp_avg_sq
    if max_exp_avg_sq is not None:
        largest = torch.maximum(max_exp_avg_sq, exp_avg_sq, out=max_exp_avg_sq)
    # By way of float64: torch's float32 square root on the CPU is off by one ulp for 17 % of the
    # values (2.11, 2.13), and no root of a float32 is close to a tie between two.
    denominator = largest.double().sqrt().to(dtype) * s.rsqrt_bias_correction2 + s.eps

    # Interpolate from the nearer end, as torch.lerp does: exact for beta1 = 0.
    base = exp_avg if s.lerp_weight > 0 else g
    exp_avg.copy_((g - exp_avg) * s.lerp_weight + base)

    if s.step_size != 0:  # A zero step leaves the value alone, including the sign of a zero.
        if adam_w_mode:
            p = p * s.decay
        value.copy_(p - exp_avg * s.step_size / denominator)
