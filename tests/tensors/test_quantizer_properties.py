"""The quantizers against the NumPy reference on drawn shapes and values, and their contract."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import format_reference as reference
from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
)
from helpers import assert_identical

FORMATS = {
    "nvfp4_2d": (NVFP4Quantizer(two_dimensional=True), 16),
    "nvfp4_1d": (NVFP4Quantizer(two_dimensional=False), 16),
    "mxfp8": (MXFP8Quantizer(), 32),
    "mxfp8_2d": (MXFP8Quantizer(two_dimensional=True), 32),
    "mxfp4_floor": (MXFP4Quantizer(scale_rounding="floor"), 32),
    "mxfp4_even": (MXFP4Quantizer(), 32),
    "mxfp4_up": (MXFP4Quantizer(scale_rounding="up"), 32),
    "float8_fp32": (Float8Quantizer(), 1),
    "float8_pow2": (Float8Quantizer(force_pow_2_scales=True), 1),
    "fp8block_2d_pow2": (Float8BlockQuantizer(), 1),
    "fp8block_2d_fp32": (Float8BlockQuantizer(force_pow_2_scales=False), 1),
    "fp8block_1d_pow2": (Float8BlockQuantizer(two_dimensional=False), 1),
    "fp8block_1d_fp32": (Float8BlockQuantizer(two_dimensional=False, force_pow_2_scales=False), 1),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, -(2.0**-126), 3.4e38, -3.4e38)

# In the quick run, golden vectors stand for the other ways to scale.
QUICK = ("nvfp4_2d", "nvfp4_1d", "mxfp8", "mxfp8_2d", "mxfp4_even", "mxfp4_up", "float8_fp32")
QUICK += ("fp8block_2d_pow2",)
every_format = pytest.mark.parametrize(
    "format",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in FORMATS],
)
# The path is the same for every example, so a fixture set once for all of them does no harm.
examples = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def matrices(draw: st.DrawFn, multiple: int) -> Tensor:
    """[M, K] with magnitudes over all of the dtype's range and some special values."""
    edge = st.integers(1, 200) if multiple == 1 else st.integers(1, 96 // multiple)
    rows, cols = (multiple * draw(edge) for _ in range(2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    center = draw(st.integers(-140, 127))
    spread = draw(st.sampled_from([0, 2, 20, 140]))
    exponent = rng.integers(center - spread, center + spread + 1, (rows, cols))
    x = np.ldexp(rng.standard_normal((rows, cols)), exponent.clip(-149, 127))
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=3)):
        x[rng.random((rows, cols)) < draw(st.sampled_from([0.001, 0.1, 0.9]))] = value
    if draw(st.booleans()):
        x[rng.integers(rows), rng.integers(cols)] *= 2.0**20
    # Whole rows and columns reach every kind of block.
    fill = draw(st.sampled_from([0.0, 0.0, np.nan, np.inf]))
    x[rng.random(rows) < draw(st.sampled_from([0, 0.5, 1])), :] = fill
    x[:, rng.random(cols) < draw(st.sampled_from([0, 0.5]))] = fill
    return torch.from_numpy(x).float().to(draw(st.sampled_from(DTYPES)))


def largest_finite(dtype: torch.dtype) -> np.float32:
    return np.float32(torch.finfo(dtype).max)


def assert_same_fields(tensor: QuantizedTensor, fields: reference.Fields) -> None:
    for name, expected in fields.items():
        expected = torch.from_numpy(np.ascontiguousarray(expected))
        assert_identical(getattr(tensor, name), expected, name)


@every_format
@examples
@given(data=st.data())
def test_quantize_and_dequantize_agree_with_the_reference(data, format, path_device):
    quantizer, multiple = FORMATS[format]
    x = data.draw(matrices(multiple))
    epsilon = 0.0
    if format.startswith("fp8block"):
        epsilon = data.draw(st.sampled_from([0.0, 1e-12, 2.0]))
        quantizer = dataclasses.replace(quantizer, amax_epsilon=epsilon)
    fields = reference.quantize(format, x.float().numpy(), epsilon, largest_finite(x.dtype))

    tensor = quantizer.quantize(x.to(path_device))

    assert_same_fields(tensor, fields)
    value = tensor.dequantize(torch.float32)
    expected = torch.from_numpy(reference.dequantize(format, fields))
    assert_identical(value, expected, any_nan=True)
    for dtype in DTYPES:
        assert_identical(tensor.dequantize(dtype), value.to(dtype), any_nan=True)


@pytest.mark.table
@pytest.mark.parametrize("format", [name for name in FORMATS if name.startswith("mxfp4")])
def test_amaxes_at_the_edges_of_roundings(format, path_device):
    edges = [0, 1e-40, 2**-126, 1, 1.5, 1.5 + 2**-23, 1.75 - 2**-23, 1.75, 2 - 2**-23, 3e38, np.inf]
    x = torch.rand(len(edges), 32) * 2 - 1
    for row, amax in zip(x, edges, strict=True):
        row *= min(amax, 1e30)
        row[7] = -amax
    x = torch.cat([x, torch.arange(32)[None] * 0.25, torch.full((20, 32), torch.nan)])
    tensor = FORMATS[format][0].quantize(x.to(path_device))
    fields = reference.quantize(format, x.numpy())
    assert_same_fields(tensor, fields)
    decoded = torch.from_numpy(reference.dequantize(format, fields))
    assert_identical(tensor.dequantize(torch.float32), decoded, any_nan=True)


# Zero is a multiple of every block size: an expert or shard without rows is a tensor like others.
@every_format
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0), (2, 0, 64)])
def test_empty_tensor_becomes_an_empty_tensor(format, shape, path_device):
    quantizer, _ = FORMATS[format]
    tensor = quantizer.quantize(torch.zeros(shape, device=path_device))
    matrix = np.zeros((int(np.prod(shape[:-1])), shape[-1]), np.float32)
    assert_same_fields(tensor, reference.quantize(format, matrix))
    assert tensor.quantize_(torch.zeros(shape, device=path_device)) is tensor
    assert tensor.dequantize(torch.float32).shape == shape


@pytest.mark.parametrize(
    ("format", "shape", "rule"),
    [
        ("nvfp4_2d", (24, 32), "NVFP4 must be multiples of 16"),
        ("nvfp4_1d", (32, 24), "NVFP4 must be multiples of 16"),
        ("mxfp8", (48, 64), "MXFP8 must be multiples of 32"),
        ("mxfp4_even", (32, 48), "MXFP4 must be multiples of 32"),
        *[(format, (64,), "at least 2 dimensions") for format in QUICK],
        ("nvfp4_2d", (), "at least 2 dimensions"),
    ],
)
def test_shape_error_names_the_rule_the_shape_and_the_cure(format, shape, rule):
    quantizer, _ = FORMATS[format]
    for make in (quantizer.make_empty, lambda shape: quantizer.quantize(torch.zeros(shape))):
        with pytest.raises(ValueError, match=rule) as error:
            make(shape)
        assert all(words in str(error.value) for words in (f" {shape}", "high precision"))


DELAYED = dict(scaling="delayed")


@pytest.mark.table
@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        *(
            (kind, dict(amax_epsilon=epsilon), f"finite and >= 0, got {epsilon}.*turns it off")
            for kind in (Float8BlockQuantizer, Float8Quantizer)
            for epsilon in (-1.0, float("inf"), float("nan"))
        ),
        (Float8Quantizer, dict(scaling="block"), "scaling must be one of .*, got 'block'"),
        (Float8Quantizer, DELAYED | dict(amax_compute_algo="mean"), "one of max, .* got 'mean'"),
        (Float8Quantizer, DELAYED | dict(amax_history_len=0), "must be >= 1, got 0"),
        (Float8Quantizer, DELAYED | dict(margin=0.5), "margin must be an integer .* got 0.5"),
        (Float8Quantizer, dict(margin=1), "margin must be 0 with scaling='current', got 1; it is"),
        (Float8Quantizer, DELAYED | dict(force_pow_2_scales=True), "must be False with"),
        (Float8Quantizer, dict(optimize_for_gemm=True), "must be False for Float8"),
        (Float8BlockQuantizer, dict(optimize_for_gemm=True), "must be False for Float8Block"),
        (MXFP4Quantizer, dict(rowwise=False), "must not both be False, got False, False; keep one"),
        (MXFP4Quantizer, dict(columnwise=True), "must be False for MXFP4"),
        (MXFP4Quantizer, dict(optimize_for_gemm=True), "must be False for MXFP4"),
        (MXFP4Quantizer, dict(scale_rounding="nearest"), "one of floor, even, up, got 'nearest'"),
    ],
)
def test_options_that_do_not_fit_are_refused(kind, options, match):
    with pytest.raises(ValueError, match=match):
        kind(**options)
