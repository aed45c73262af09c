"""The tile functions against searches in the sorted list of representable values, bit for bit."""

import numpy as np
import pytest
import torch

from elementwise import elementwise
from fp4adam.kernels.tiles.bfloat16 import round_to_bfloat16
from fp4adam.kernels.tiles.e2m1 import e2m1_code, e2m1_value
from fp4adam.kernels.tiles.e4m3 import e4m3_code, e4m3_value
from fp4adam.kernels.tiles.e8m0 import e8m0_code_up, e8m0_reciprocal, e8m0_value

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


@np.errstate(invalid="ignore")  # the interpreter computes with signalling NaNs in numpy
def apply(function, x: np.ndarray, dtype: torch.dtype, device: str) -> np.ndarray:
    y = elementwise(function, torch.from_numpy(x).to(device), dtype).cpu()
    return (y.view(torch.int16) if dtype == torch.bfloat16 else y).numpy()


def assert_same(actual: np.ndarray, expected: np.ndarray, x: np.ndarray) -> None:
    wrong = np.flatnonzero(actual != expected)[:8]
    shown = [(hex(x[i].view(f"u{x.itemsize}")), actual[i], expected[i]) for i in wrong]
    assert not shown, f"(input bits, result, expected): {shown}"


def assert_same_values(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits, except that one NaN is as good as another."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    bits = expected.astype(np.float32).view(np.int32)
    np.testing.assert_array_equal(actual.view(np.int32)[~nan], bits[~nan])


def test_e2m1_code_is_the_nearest_value_with_ties_to_even(device):
    x = float32_inputs(E2M1)
    code = apply(e2m1_code, x, torch.int32, device)
    assert_same(code, signed_code(x, E2M1, nan=0x7, sign=0x8), x)


def test_e2m1_value_is_exact_for_every_code(device):
    value = apply(e2m1_value, np.arange(16, dtype=np.int32), torch.float32, device)
    assert_same_values(value, np.concatenate([E2M1, -E2M1]))


def test_e4m3_code_is_the_nearest_value_with_ties_to_even(device):
    x = float32_inputs(E4M3)
    code = apply(e4m3_code, x, torch.uint8, device)
    assert_same(code, signed_code(x, E4M3, nan=0x7F, sign=0x80), x)


def test_e4m3_value_is_exact_for_every_byte(device):
    value = apply(e4m3_value, np.arange(256, dtype=np.uint8), torch.float32, device)
    assert_same_values(value, np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]]))


def test_e8m0_code_up_is_the_smallest_value_not_below(device):
    x = np.abs(float32_inputs(E8M0))
    code = apply(e8m0_code_up, x, torch.int32, device)
    expected = np.minimum(np.searchsorted(E8M0.astype(np.float32), x), 254)
    assert_same(code, np.where(np.isnan(x), 255, expected), x)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_e8m0_value_is_exact_for_every_byte(dtype, device):
    value = apply(e8m0_value, np.arange(256, dtype=dtype), torch.float32, device)
    assert_same_values(value, np.append(E8M0, np.nan))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_e8m0_reciprocal_is_exact_for_every_byte(dtype, device):
    value = apply(e8m0_reciprocal, np.arange(256, dtype=dtype), torch.float32, device)
    assert_same_values(value, np.append(1 / E8M0, np.nan))


def test_round_to_bfloat16_is_the_nearest_value_with_ties_to_even(device):
    x = float32_inputs(BFLOAT16)
    bits = apply(round_to_bfloat16, x, torch.bfloat16, device)
    expected = signed_code(x, BFLOAT16, nan=0x7FFF, sign=0x8000)
    assert_same(bits, expected.astype(np.uint16).view(np.int16), x)
