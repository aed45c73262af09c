"""The quantizers against bytes made by running Transformer Engine's references, bit for bit."""

import dataclasses

import numpy as np
import pytest
import torch

import format_reference as reference
from fp4adam import MXFP8Quantizer, QuantizedTensor
from golden_vectors import FORMATS, GoldenCase, golden_cases, read_index, read_input, sha16
from helpers import assert_identical

USAGES = ("rowwise", "columnwise")
FIELDS = [f for u in USAGES for f in (f"{u}_data", f"{u}_scale_inv", f"amax_{u}")]

CASES = [case for format in FORMATS for case in golden_cases(format)]


def shows_nan(case: GoldenCase) -> bool:
    """Whether scales show NaN, which Transformer Engine's bytes of NVFP4 do not show."""
    return case.format.startswith("nvfp4") and bool(case.input.isnan().any())


def fields_of(case: GoldenCase) -> dict[str, torch.Tensor]:
    """The fields as our reference computes them."""
    largest = reference.BFLOAT16_MAX if case.variant == "bf16" else reference.FLOAT32_MAX
    fields = reference.quantize(case.format, case.input.float().numpy(), case.amax_epsilon, largest)
    return {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in fields.items()}


def assert_golden(
    tensor: QuantizedTensor, case: GoldenCase, usages: tuple[str, ...] = USAGES
) -> None:
    expected = fields_of(case) if shows_nan(case) else case.expected
    if "amax_rowwise" in expected:
        expected["amax_columnwise"] = expected["amax_rowwise"]
    for name in FIELDS:
        actual = getattr(tensor, name, None)
        if not any(usage in name for usage in usages):
            assert actual is None, name
        elif name in expected:
            assert_identical(actual, expected[name], name)


def assert_golden_values(tensor: QuantizedTensor, case: GoldenCase, usage: str) -> None:
    if (sha := case.sha16.get(f"dequantized_{usage}")) and not shows_nan(case):
        values = tensor.dequantize(torch.float32).cpu()
        if tensor.is_cuda and values.isnan().any():
            # A GPU makes NaN of another sign than a CPU: compare where they are.
            on_cpu = tensor.cpu().dequantize(torch.float32)
            assert torch.equal(values.isnan(), on_cpu.isnan())
            values = torch.where(values.isnan(), on_cpu, values)
        assert sha16(values) == sha


@pytest.mark.parametrize("case", CASES, ids=str)
def test_quantize_gives_the_golden_bytes(case, path_device):
    x = case.input.to(path_device)
    has_gemm_scales = not case.format.startswith("fp8block")
    quantizer = dataclasses.replace(case.quantizer(), optimize_for_gemm=has_gemm_scales)
    tensor = quantizer.quantize(x)
    assert tensor.dtype == x.dtype and tensor.shape == x.shape
    assert_golden(tensor, case)
    assert_golden_values(tensor, case, "rowwise")
    for usage in USAGES:
        sha = None if shows_nan(case) else case.sha16.get(f"swizzled_{usage}_scale_inv")
        if sha:
            assert sha16(tensor.storage_tensors()[f"_{usage}_gemm_scale_inv"].cpu()) == sha, usage
    # In place: nothing of an old value is left.
    whole = {name: inner.clone() for name, inner in tensor.storage_tensors().items()}
    addresses = [inner.data_ptr() for inner in tensor.storage_tensors().values()]
    tensor.quantize_(torch.ones_like(x))
    assert tensor.quantize_(x) is tensor
    assert [inner.data_ptr() for inner in tensor.storage_tensors().values()] == addresses
    assert_identical(tensor.storage_tensors(), whole)


def test_square_blocks_of_mxfp8_have_the_golden_bytes():
    for entry, item in read_index()["mxfp8_2d"].items():
        case, variant = entry.split("/")
        x = read_input(case)
        m, k = x.shape
        x = x.bfloat16() if variant == "bf16" else x
        tensor = MXFP8Quantizer(two_dimensional=True).quantize(x)
        found = {
            "rowwise_data": tensor.rowwise_data,
            "rowwise_scale_inv": tensor.rowwise_scale_inv[:m, : k // 32],
            "columnwise_scale_inv": tensor.columnwise_scale_inv[: m // 32, :k],
        }
        assert {name: sha16(field) for name, field in found.items()} == item["sha16"], entry


@pytest.mark.parametrize("format", FORMATS)
def test_reference_gives_the_golden_bytes_and_values(format):
    for case in golden_cases(format):
        fields = fields_of(case)
        for name, expected in case.expected.items():
            actual = fields[name]
            if shows_nan(case):
                # Only blocks with NaN differ: their scales are 0x7F, their codes 7.
                nan = 0x7F if "scale" in name else 0x77
                actual = torch.where((actual == nan) & (actual != expected), expected, actual)
            assert_identical(actual, expected, f"{case} {name}")
        if shows_nan(case):
            continue
        arrays = {name: x.numpy() for name, x in fields.items()}
        values = {"dequantized_rowwise": reference.dequantize(format, arrays)}
        if format == "mxfp8":
            values["dequantized_columnwise"] = reference.dequantize_mxfp8(arrays, "columnwise")
        for name, value in values.items():
            assert case.sha16.get(name, sha16(value)) == sha16(value), f"{case} {name}"
