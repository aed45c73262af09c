"""How far an Adam step can move a weight, whatever the gradients are and were.

With m and v the moments and F > 0, the ratio m**2 / (v + F) never exceeds a number C that follows
from the betas alone (Cauchy-Schwarz): C grows by one update to
beta1**2 / beta2 * C + (1 - beta1)**2 / (1 - beta2). F keeps this true where v underflows.
"""

import math

import torch
from torch import Tensor

from fp4adam.adam import Scalars

# Far below any v that matters and far above what float32 loses when v underflows.
FLOOR = 2.0**-100
_UNIT_ROUNDOFF = 2.0**-24
_CHUNK = 2**24


def measured_ratio(moments: list[tuple[Tensor, Tensor]]) -> float:
    """sqrt(C) of (exp_avg, exp_avg_sq) pairs of unknown history; Inf if they are not finite."""
    largest = []
    for pair in moments:
        for m, v in zip(*(moment.reshape(-1).split(_CHUNK) for moment in pair), strict=True):
            if m.numel():
                largest.append((m.abs() / (v + FLOOR).sqrt()).amax())
    if not largest:
        return 0.0
    ratio = torch.stack([each.to(largest[0].device) for each in largest]).amax().item()
    return ratio * (1 + 1e-5) if math.isfinite(ratio) else math.inf


def next_ratio(ratio: float, scalars: Scalars) -> float:
    """sqrt(C) after one more update, from sqrt(C) before it."""
    weight = scalars.lerp_weight if scalars.lerp_weight > 0 else 1 + scalars.lerp_weight
    beta1, beta2, complement = 1 - weight, scalars.beta2, scalars.one_minus_beta2
    if beta2 == 0 or complement < 1e-7:
        return math.inf
    exact = math.hypot(beta1 / math.sqrt(beta2) * ratio, weight / math.sqrt(complement))
    # Four roundings in m, each of at most the size of m or of the gradient.
    rounding = 4 * _UNIT_ROUNDOFF * (ratio / math.sqrt(beta2) + 1 / math.sqrt(complement))
    return exact * (1 + 1e-5) + rounding


def largest_update(ratio: float, scalars: Scalars) -> float:
    """Upper bound of |update| (weight decay aside), from sqrt(C) of the updated moments."""
    if scalars.eps == 0:
        return math.inf
    reach = max(1 / scalars.rsqrt_bias_correction2, math.sqrt(FLOOR) / scalars.eps)
    return scalars.step_size * ratio * reach * (1 + 1e-5)
