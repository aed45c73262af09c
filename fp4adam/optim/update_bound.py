"""How far an Adam step can move a weight, whatever the gradients are.

With m and v the moments, F a small constant, and C >= m**2 / (v + F) before a step, Cauchy-Schwarz
gives m**2 / (v + F) <= beta1**2 / beta2 * C + (1 - beta1)**2 / (1 - beta2) after it, for any
gradient and any betas. Moments that start at zero have C = 0.

Moments that are rounded to 8 bits, or a state that something else has written, can break the bound.
Nothing is wrong then but where to look first: see ``kernels.amax_preview``.
"""

import math

import torch
from torch import Tensor

from fp4adam.optim.adam import Scalars

# Rounding of m and v, and of the update itself.
_ROUNDING = 1 + 1e-4
# F is the square of this times eps: small enough for sqrt(v) and eps to outweigh it, as long as
# 1 / sqrt(1 - beta2**step) is below 100, and large enough for what underflows in v not to matter.
_SHARE_OF_EPS = 1e-2
_PIECE = 2**24


def next_ratio(ratio: float, scalars: Scalars) -> float:
    """The bound C after a step, from that before; Inf if there is none."""
    growth, added = _growth(scalars)
    return growth * ratio + added


def ratio_after(step: float, scalars: Scalars) -> float:
    """The bound C of moments that started at zero, after as many steps with the same betas."""
    growth, added = _growth(scalars)
    if step == 0 or growth == 1:
        return added * step if step else 0.0
    return added * (1 - growth**step) / (1 - growth) if growth < 1 else math.inf


def _growth(scalars: Scalars) -> tuple[float, float]:
    s = scalars
    weight = s.lerp_weight if s.lerp_weight > 0 else 1 + s.lerp_weight
    if s.one_minus_beta2 == 0 or s.beta2 == 0:
        return 0.0, math.inf
    return (1 - weight) ** 2 / s.beta2, weight**2 / s.one_minus_beta2


def largest_update(scalars: Scalars, ratio: float) -> float:
    """Bound of |update|, weight decay aside, of a step that ends with C = ``ratio``."""
    if scalars.eps == 0 or scalars.rsqrt_bias_correction2 * _SHARE_OF_EPS >= 1:
        return math.inf
    bound = abs(scalars.step_size) * math.sqrt(ratio) / scalars.rsqrt_bias_correction2
    return bound * _ROUNDING


def measured_ratio(exp_avg: Tensor, exp_avg_sq: Tensor, eps: float) -> float:
    """The least C of moments that are there, float32 and contiguous; waits for the device."""
    floor = (eps * _SHARE_OF_EPS) ** 2
    largest = exp_avg.new_zeros(1)
    parts = zip(exp_avg.view(-1).split(_PIECE), exp_avg_sq.view(-1).split(_PIECE), strict=True)
    for m, v in parts:
        # What is not a number is in no amax either.
        root = (m.abs() / (v + floor).sqrt()).nan_to_num_(0.0, math.inf)
        largest = torch.maximum(largest, root.max())
    return largest.item() ** 2 * _ROUNDING
