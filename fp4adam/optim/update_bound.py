"""An upper bound on how far an Adam step can move a weight, for any gradient.

With m and v the moments, F a small constant, and C >= m**2 / (v + F) before a step, Cauchy-Schwarz
gives m**2 / (v + F) <= beta1**2 / beta2 * C + (1 - beta1)**2 / (1 - beta2) after it, for any
gradient and any betas. Moments that start at zero have C = 0.

Moments rounded to 8 bits, or a state written by other code, can break the bound. The results stay
right: the bound only decides which tiles ``kernels.amax_preview`` looks at first.
"""

import math

from torch import Tensor

from fp4adam.optim.adam import Scalars

# Rounding of m and v, and of the update itself.
_ROUNDING = 1 + 1e-4
# F = (_SHARE_OF_EPS * eps)**2. It is small enough that sqrt(v) and eps outweigh it as long as
# 1 / sqrt(1 - beta2**step) is below 100, and large enough that underflow in v does not matter.
_SHARE_OF_EPS = 1e-2


def next_ratio(ratio: float, scalars: Scalars) -> float:
    """The bound C after a step, given the bound before it; Inf if there is none."""
    growth, added = _growth(scalars)
    return growth * ratio + added


def ratio_after(step: float, scalars: Scalars) -> float:
    """The bound C of moments that started at zero, after ``step`` steps with the same betas."""
    growth, added = _growth(scalars)
    if step == 0 or growth == 1:
        return added * step if step else 0.0
    return added * (1 - growth**step) / (1 - growth) if growth < 1 else math.inf


def _growth(scalars: Scalars) -> tuple[float, float]:
    weight = scalars.lerp_weight if scalars.lerp_weight > 0 else 1 + scalars.lerp_weight
    if scalars.one_minus_beta2 == 0 or scalars.beta2 == 0:
        return 0.0, math.inf
    return (1 - weight) ** 2 / scalars.beta2, weight**2 / scalars.one_minus_beta2


def largest_update(scalars: Scalars, ratio: float) -> float:
    """Upper bound of |update|, weight decay excluded, for a step that ends with C = ``ratio``."""
    if scalars.eps == 0 or scalars.rsqrt_bias_correction2 * _SHARE_OF_EPS >= 1:
        return math.inf
    bound = abs(scalars.step_size) * math.sqrt(ratio) / scalars.rsqrt_bias_correction2
    return bound * _ROUNDING


def measured_ratio(exp_avg: Tensor, exp_avg_sq: Tensor, eps: float) -> float:
    """The smallest C that holds for the given moments (float32); syncs the device."""
    floor = (eps * _SHARE_OF_EPS) ** 2
    # Amaxes ignore NaN, so the bound may too.
    root = (exp_avg.abs() / (exp_avg_sq + floor).sqrt()).nan_to_num_(0.0, math.inf)
    largest = root.max().item() if root.numel() else 0.0
    return largest**2 * _ROUNDING
