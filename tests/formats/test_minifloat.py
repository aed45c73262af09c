"""Conversions in torch operators, against searches in the lists of representable values."""

import numpy as np
import torch

from fp4adam.formats import minifloat
from rounding_reference import E2M1, E4M3, E8M0, float32_inputs, signed_code


def test_e2m1_codes_are_the_nearest_with_or_without_numbers_out_of_range():
    x = float32_inputs(E2M1)
    for numbers in (x, x[np.abs(x) < 7], x[np.abs(x) <= 6]):
        code = minifloat.e2m1_code(torch.from_numpy(numbers.copy())).numpy()
        np.testing.assert_array_equal(code, signed_code(numbers, E2M1, nan=0x7, sign=0x8))
    assert minifloat.e2m1_code(torch.empty(0, 4)).shape == (0, 4)


def test_e4m3_codes_are_the_nearest_with_or_without_nan():
    x = float32_inputs(E4M3)
    for numbers in (x, x[~np.isnan(x)], x[~(np.isnan(x) & np.signbit(x))]):
        code = minifloat.e4m3_code(torch.from_numpy(numbers.copy())).numpy()
        np.testing.assert_array_equal(code, signed_code(numbers, E4M3, nan=0x7F, sign=0x80))


def test_e4m3_values_are_those_of_their_codes_however_many():
    codes = torch.arange(256, dtype=torch.uint8)
    few, many = minifloat.e4m3_value(codes), minifloat.e4m3_value(codes.repeat(3, 2))
    expected = torch.from_numpy(np.concatenate([E4M3, [np.nan]])).float()
    assert torch.equal(few.nan_to_num(-1.0), torch.cat([expected, -expected]).nan_to_num(-1.0))
    assert torch.equal(many.nan_to_num(-1.0), few.repeat(3, 2).nan_to_num(-1.0))


def test_e8m0_rounds_up_and_its_reciprocals_are_exact():
    x = np.abs(float32_inputs(E8M0))
    x = x[~np.isnan(x)]
    code = minifloat.e8m0_code_up(torch.from_numpy(x.copy())).numpy()
    expected = np.minimum(np.searchsorted(E8M0.astype(np.float32), x), 254)
    np.testing.assert_array_equal(code, expected)
    codes = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(minifloat.e8m0_value(codes), torch.from_numpy(E8M0[:255]).float())
    assert torch.equal(minifloat.e8m0_reciprocal(codes), torch.from_numpy(1 / E8M0[:255]).float())
    assert minifloat.e8m0_value(torch.tensor([255], dtype=torch.uint8)).isnan().all()
