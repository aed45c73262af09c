"""How far an Adam step can move a weight, whatever the gradients are and were.

With m and v the moments, started at zero and updated t times with the same betas, Cauchy-Schwarz
bounds m**2 / v by a number C that depends on betas and t alone: C_0 = 0 and
C_t = beta1**2 / beta2 * C_(t-1) + (1 - beta1)**2 / (1 - beta2).

Betas that change, moments that are rounded to 8 bits, or a state that something else has written
can break the bound. Nothing is wrong then but where to look first: see ``kernels.amax_preview``.
"""

import math

from fp4adam.adam import Scalars

# Rounding of m and v, and of the update itself.
_ROUNDING = 1 + 1e-4


def largest_update(scalars: Scalars, step: float) -> float:
    """Bound of |update|, weight decay aside, of update number ``step``; Inf if there is none."""
    s = scalars
    weight = s.lerp_weight if s.lerp_weight > 0 else 1 + s.lerp_weight
    beta1_squared = (1 - weight) ** 2
    if s.eps == 0 or s.one_minus_beta2 == 0 or beta1_squared >= s.beta2:
        return math.inf
    growth = beta1_squared / s.beta2
    ratio = math.sqrt(weight**2 / s.one_minus_beta2 * (1 - growth**step) / (1 - growth))
    return s.step_size * ratio / s.rsqrt_bias_correction2 * _ROUNDING
