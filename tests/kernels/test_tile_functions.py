"""The tile functions against searches in the sorted list of representable values, bit for bit."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from elementwise import elementwise
from fp4adam.formats.float8_block import encode_scale
from fp4adam.kernels.format import float32_scale, inverse_scale
from fp4adam.kernels.tiles.bfloat16 import round_to_bfloat16
from fp4adam.kernels.tiles.e2m1 import e2m1_code, e2m1_value
from fp4adam.kernels.tiles.e4m3 import e4m3_code, e4m3_value
from fp4adam.kernels.tiles.e8m0 import e8m0_code_up, e8m0_reciprocal, e8m0_value
from rounding_reference import BFLOAT16, E2M1, E4M3, E8M0, float32_inputs, signed_code


@triton.jit
def _scales_kernel(
    amax_ptr, scale_ptr, decode_ptr, epsilon, N: tl.constexpr, LARGEST: tl.constexpr,
    POW_2: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0) * N + tl.arange(0, N)
    scale = float32_scale(tl.load(amax_ptr + offs), epsilon, LARGEST, POW_2)
    tl.store(scale_ptr + offs, scale)
    tl.store(decode_ptr + offs, inverse_scale(scale, POW_2))


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


@pytest.mark.filterwarnings("ignore:(overflow|divide by zero):RuntimeWarning")
@pytest.mark.parametrize("epsilon", [0.0, 1e-39, 1e-6])
@pytest.mark.parametrize("largest", [torch.float32, torch.float16])
@pytest.mark.parametrize("pow_2", [True, False])
def test_float8_scales_are_those_of_a_division(pow_2, largest, epsilon, device):
    # Every exponent with mantissas around 1.75, where the exponent of the quotient changes; NaN.
    mantissas = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF], dtype=torch.int32)
    bits = (torch.arange(256, dtype=torch.int32)[:, None] << 23) | mantissas
    amax = bits.flatten().view(torch.float32)
    largest = torch.finfo(largest).max
    numbers = torch.where(amax == amax, amax, 0)
    expected = encode_scale(numbers, largest, epsilon, pow_2)
    scale, decode = (torch.empty(amax.shape, device=device) for _ in range(2))
    _scales_kernel[(3,)](
        amax.to(device), scale, decode, epsilon, 512, largest, pow_2, enable_fp_fusion=False
    )
    assert torch.equal(scale.cpu(), expected)
    assert torch.equal(decode.cpu(), 1.0 / expected)
