"""The tile functions against searches in the sorted list of representable values, bit for bit.

Codes in words are packed and transposed as plain torch does it.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from elementwise import elementwise
from fp4adam.formats import minifloat
from fp4adam.formats.float8_block import encode_scale
from fp4adam.kernels.format import float32_scale, inverse_scale
from fp4adam.kernels.tiles.codes import (
    e2m1_code,
    e2m1_value,
    e4m3_code,
    e4m3_value,
    e4m3_words,
    e8m0_code_up,
    e8m0_value,
    pack_words,
    round_to,
    transpose_words,
)
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
    return elementwise(function, torch.from_numpy(x).to(device), dtype).cpu().numpy()


@triton.jit
def e2m1_rounded(x):
    code, value = e2m1_code(x)
    # What the code stands for, with the sign of x, which NaN keeps as well.
    same = (e2m1_value(code << 28) == value) | (x != x)
    return tl.where(same, code, -1)


@triton.jit
def e2m1_value_of(code):
    return e2m1_value(code << 28)


@triton.jit
def e8m0_reciprocal(code):
    return e8m0_value(code, True)


@triton.jit
def to_bfloat16(x):
    return round_to(x, tl.bfloat16).to(tl.int16, bitcast=True)


def e8m0_up(x: np.ndarray) -> np.ndarray:
    """Of numbers that are not negative."""
    expected = np.minimum(np.searchsorted(E8M0.astype(np.float32), x), 254)
    return np.where(np.isnan(x), 255, expected)


@pytest.mark.parametrize(
    ("function", "values", "dtype", "expected"),
    [
        (e2m1_rounded, E2M1, torch.int32, lambda x: signed_code(x, E2M1, nan=0x7, sign=0x8)),
        (e4m3_code, E4M3, torch.uint8, lambda x: signed_code(x, E4M3, nan=0x7F, sign=0x80)),
        (
            to_bfloat16,
            BFLOAT16,
            torch.int16,
            lambda x: signed_code(x, BFLOAT16, nan=0x7FFF, sign=0x8000).astype(np.int16),
        ),
        (e8m0_code_up, E8M0, torch.int32, e8m0_up),
    ],
    ids=["e2m1", "e4m3", "bf16", "e8m0"],
)
def test_codes_are_the_nearest_values_with_ties_to_even(function, values, dtype, expected, device):
    x = float32_inputs(values)
    x = np.abs(x) if values is E8M0 else x
    code, expected = apply(function, x, dtype, device), expected(x)
    wrong = np.flatnonzero(code != expected)[:8]
    shown = [(hex(x[i].view("u4")), code[i], expected[i]) for i in wrong]
    assert not shown, f"(input bits, result, expected): {shown}"


@pytest.mark.parametrize(
    ("function", "n", "dtypes", "expected"),
    [
        (e2m1_value_of, 16, [np.int32], np.concatenate([E2M1, -E2M1])),
        (e4m3_value, 256, [np.uint8], np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]])),
        (e8m0_value, 256, [np.uint8, np.int32], np.append(E8M0, np.nan)),
        (e8m0_reciprocal, 256, [np.uint8, np.int32], np.append(1 / E8M0, np.nan)),
    ],
    ids=["e2m1", "e4m3", "e8m0", "1 / e8m0"],
)
def test_values_are_exact_for_every_code(function, n, dtypes, expected, device):
    for dtype in dtypes:
        value = apply(function, np.arange(n, dtype=dtype), torch.float32, device)
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(value), nan)
        bits = expected.astype(np.float32).view(np.int32)
        np.testing.assert_array_equal(value.view(np.int32)[~nan], bits[~nan])


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


@triton.jit
def _words_kernel(
    code_ptr, out_ptr, transposed_ptr, BITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    code = tl.load(code_ptr + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :])
    words = pack_words(code, BITS, R, C)
    width: tl.constexpr = C * BITS // 32
    tl.store(out_ptr + tl.arange(0, R)[:, None] * width + tl.arange(0, width)[None, :], words)
    height: tl.constexpr = R * BITS // 32
    ptr = transposed_ptr + tl.arange(0, C)[:, None] * height + tl.arange(0, height)[None, :]
    tl.store(ptr, transpose_words(words, BITS, R, C))


@triton.jit
def _e4m3_words_kernel(x_ptr, out_ptr, R: tl.constexpr, C: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :])
    out = out_ptr + tl.arange(0, R)[:, None] * (C // 4) + tl.arange(0, C // 4)[None, :]
    tl.store(out, e4m3_words(x, R, C))


def packed(code, bits):
    """Bytes of codes, the first in the low bits."""
    return code if bits == 8 else code[:, ::2] | code[:, 1::2] << 4


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "cols"), [(16, 16), (64, 64), (128, 32)])
def test_words_hold_codes_of_neighbouring_columns_and_rows(bits, rows, cols, device):
    generator = torch.Generator().manual_seed(0)
    code = torch.randint(0, 1 << bits, (rows, cols), dtype=torch.uint8, generator=generator)
    words = torch.empty(rows, cols * bits // 32, dtype=torch.int32, device=device)
    transposed = torch.empty(cols, rows * bits // 32, dtype=torch.int32, device=device)
    _words_kernel[(1,)](
        code.to(device), words.view(torch.uint32), transposed.view(torch.uint32), bits, rows, cols
    )
    assert torch.equal(words.view(torch.uint8).cpu(), packed(code, bits))
    assert torch.equal(transposed.view(torch.uint8).cpu(), packed(code.T.contiguous(), bits))


def test_e4m3_words_hold_the_codes(device):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (64, 256), dtype=torch.int32, generator=generator)
    # Any bit pattern in one half, values within the format's range in the other.
    x = torch.cat((bits.view(torch.float32), torch.randn(64, 256, generator=generator) * 64))
    expected, x = minifloat.e4m3_code(x), x.to(device)
    words = torch.empty(128, 64, dtype=torch.int32, device=device)
    _e4m3_words_kernel[(1,)](x, words.view(torch.uint32), 128, 256)
    assert torch.equal(words.view(torch.uint8).cpu(), expected)
