"""Rounding to narrow floats as a search in the sorted list of representable values."""

import numpy as np

from format_reference import E2M1_VALUES as E2M1
from format_reference import E4M3_VALUES as E4M3
from format_reference import nearest_even

__all__ = ["BFLOAT16", "E2M1", "E4M3", "E8M0", "float32_inputs", "signed_code"]

E8M0 = 2.0 ** np.arange(-127, 128)
BFLOAT16 = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
# The rounding of the largest values to Inf is that of a format with one more exponent.
BFLOAT16 = np.append(BFLOAT16, 2.0**128)


@np.errstate(invalid="ignore")  # widening a signalling NaN
def signed_code(x: np.ndarray, values: np.ndarray, nan: int, sign: int) -> np.ndarray:
    """Code of the nearest of ``values``; ``nan`` for NaN of either sign."""
    code = nearest_even(x.astype(np.float64), values) + np.where(np.signbit(x), sign, 0)
    return np.where(np.isnan(x), nan, code)


def float32_inputs(values: np.ndarray) -> np.ndarray:
    """Bit patterns of BF16 and of FP32, and the neighbourhood of every value and midpoint."""
    rng = np.random.default_rng(0)
    values = values[values <= np.finfo(np.float32).max].astype(np.float64)
    points = np.concatenate([values, (values[:-1] + values[1:]) / 2]).astype(np.float32)
    points = points.view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)
    every_bfloat16 = np.arange(1 << 16, dtype=np.uint32) << 16
    anywhere = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    # Most random patterns are far outside a small format's range: exponents from 2^-12 to 2^9.
    near_one = rng.integers(115 << 23, 137 << 23, 1 << 20, dtype=np.uint32)
    nans = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=np.uint32)
    positive = np.concatenate([points.view(np.uint32).ravel(), near_one, nans])
    bits = np.concatenate([every_bfloat16, anywhere, positive, positive | np.uint32(1 << 31)])
    return bits.view(np.float32)
