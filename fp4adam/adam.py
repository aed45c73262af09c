"""The Adam update: its scalars, and its arithmetic in plain torch operators.

``fp4adam.kernels.adam.adam_tile`` does the same operations in the same order. Every one is a single
correctly rounded float32 operation (float64 for float64 parameters), so both give the same bits.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Elements that are updated at a time on a CPU, so that what is in between stays in its cache.
_CHUNK = 2**15


class Scalars(NamedTuple):
    """What one update takes from the hyper-parameters; computed in float64, used in float32.

    Attributes:
        grad_factor: 1, or -1 to maximize.
        decay: 1 - lr * weight_decay, or weight_decay where decay is added to the gradient (L2).
        lerp_weight: 1 - beta1 if that is below 1/2, else -beta1 (see :func:`adam_`).
        beta2: Decay rate of the second moment.
        one_minus_beta2: 1 - beta2.
        eps: Term added to the denominator.
        step_size: lr / (1 - beta1**step).
        rsqrt_bias_correction2: 1 / sqrt(1 - beta2**step).
    """

    grad_factor: float
    decay: float
    lerp_weight: float
    beta2: float
    one_minus_beta2: float
    eps: float
    step_size: float
    rsqrt_bias_correction2: float


def moves(group: Mapping[str, Any]) -> bool:
    """Whether updates of a parameter group change values, and not just moments."""
    return float(group["lr"]) > 2.0**-149  # float32 cannot tell less from zero


def adam_scalars(group: Mapping[str, Any], step: float) -> Scalars:
    """The scalars of a parameter group for its update number ``step`` (1 for the first)."""
    lr = float(group["lr"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    weight_decay = float(group["weight_decay"])
    bias_correction1 = bias_correction2 = 1.0
    if group["bias_correction"]:
        bias_correction1, bias_correction2 = 1 - beta1**step, 1 - beta2**step
    return Scalars(
        grad_factor=-1.0 if group["maximize"] else 1.0,
        decay=1 - lr * weight_decay if group["adam_w_mode"] else weight_decay,
        lerp_weight=1 - beta1 if 1 - beta1 < 0.5 else -beta1,
        beta2=beta2,
        one_minus_beta2=1 - beta2,
        eps=float(group["eps"]),
        step_size=lr / bias_correction1 if moves(group) else 0.0,
        rsqrt_bias_correction2=1 / math.sqrt(bias_correction2),
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
        grad_scale: float32 one-element tensor that the gradient is to be divided by, or None.
        clip: float32 one-element tensor that it is multiplied by after that, or None.

    Source: arXiv:1711.05101, algorithm 2; arXiv:1904.09237 for AMSGrad.
    """
    tensors = [value, grad, exp_avg, exp_avg_sq]
    if max_exp_avg_sq is not None:
        tensors.append(max_exp_avg_sq)
    if value.is_cpu and value.numel() > _CHUNK and all(t.is_contiguous() for t in tensors):
        parts = zip(*(t.view(-1).split(_CHUNK) for t in tensors), strict=True)
    else:
        parts = [tensors]
    for part in parts:
        _adam_part_(*part, scalars=scalars, adam_w_mode=adam_w_mode, grad_scale=grad_scale)


def _adam_part_(
    value: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
    *,
    scalars: Scalars,
    adam_w_mode: bool,
    grad_scale: Tensor | None,
) -> None:
    s = scalars
    dtype = exp_avg.dtype
    factor = s.grad_factor
    if grad_scale is not None:
        factor = grad_scale.reshape(()).reciprocal() * factor
    g = grad.to(dtype) * factor
    p = value.to(dtype)
    if adam_w_mode:
        p = p * s.decay
    else:
        g = g + p * s.decay
    # Interpolate from the nearer end: exact for beta1 = 0, as torch.lerp does.
    base = exp_avg if s.lerp_weight > 0 else g
    m = base + (g - exp_avg) * s.lerp_weight
    v = exp_avg_sq * s.beta2 + (g * s.one_minus_beta2) * g
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    if max_exp_avg_sq is not None:
        v = torch.maximum(max_exp_avg_sq, v)
        max_exp_avg_sq.copy_(v)
    denominator = _sqrt(v) * s.rsqrt_bias_correction2 + s.eps
    if s.step_size != 0:  # A step of length zero leaves the value alone, its sign of zero included.
        value.copy_(p - (m * s.step_size) / denominator)


def _sqrt(x: Tensor) -> Tensor:
    # torch's float32 square root on the CPU is off by one ulp for 0.6 % of the values (2.11, 2.13).
    return x.sqrt() if x.dtype == torch.float64 else x.double().sqrt().to(x.dtype)
