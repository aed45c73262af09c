"""Rounding to narrow floats as a search in the sorted list of representable values."""

import numpy as np

# Non-negative values in the order of their codes. In float64 their midpoints are exact.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.concatenate(
    [np.arange(8) * 2.0**-9, *((1 + np.arange(8) / 8) * 2.0**e for e in range(-6, 9))]
)[:-1]
E8M0 = 2.0 ** np.arange(-127, 128)
BFLOAT16 = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
# The rounding of the largest values to Inf is that of a format with one more exponent.
BFLOAT16 = np.append(BFLOAT16, 2.0**128)


def nearest_even(magnitude: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Index of the nearest of ``values``, the even index in a tie, the last beyond the range."""
    midpoints = (values[:-1] + values[1:]) / 2
    index = np.searchsorted(midpoints, magnitude)
    tie = midpoints[np.minimum(index, len(midpoints) - 1)] == magnitude
    return index + (tie & (index % 2 == 1))


@np.errstate(invalid="ignore")  # widening a signalling NaN
def signed_code(x: np.ndarray, values: np.ndarray, nan: int, sign: int) -> np.ndarray:
    """Code of the nearest of ``values``; ``nan`` for NaN of either sign."""
    code = nearest_even(np.abs(x).astype(np.float64), values) + np.where(np.signbit(x), sign, 0)
    return np.where(np.isnan(x), nan, code)


def float32_inputs(values: np.ndarray) -> np.ndarray:
    """Bit patterns of BF16 and of FP32, and the neighbourhood of every value and midpoint."""
    rng = np.random.default_rng(0)
    values = values[values <= np.finfo(np.float32).max]
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
