"""What tile functions compile to, on a machine with or without a GPU; and that faults are found."""

import functools

import pytest

from aot import INEXACT, compile_ahead_of_time, count

triton = pytest.importorskip("triton", reason="nothing can be compiled without Triton")
tl = pytest.importorskip("triton.language")

from fp4adam.kernels.tiles.codes import e4m3_code, round_to  # noqa: E402

E4M3_VALUE = "fp4adam.kernels.tiles.codes.e4m3_value"


@triton.jit
def inexact(x):
    return tl.sqrt(x * x + 1.0) / x


@triton.jit
def to_bfloat16(x):
    return round_to(x, tl.bfloat16)


@triton.jit
def to_e4m3(x):
    return e4m3_code(x, True)


def elementwise_job(function: str, x: str, y: str, sm: int) -> dict:
    return {
        "module": "elementwise",
        "kernel": "_elementwise_kernel",
        "signature": {"x_ptr": x, "y_ptr": y, "numel": "i32"},
        "constexprs": {"FUNCTION": {"import": function}, "BLOCK": 1024},
        "divisible_by_16": ["x_ptr", "y_ptr", "numel"],
        "sm": sm,
    }


@functools.cache
def compiled() -> dict:
    """The inexact function with fused arithmetic and without, and conversions by capability."""
    job = elementwise_job(f"{__name__}.inexact", "*fp32", "*fp32", 90)
    jobs = {fusion: job | {"enable_fp_fusion": fusion} for fusion in (True, False)}
    for sm in (80, 89, 90):
        jobs["bf16", sm] = elementwise_job(f"{__name__}.to_bfloat16", "*fp32", "*bf16", sm)
        jobs["code", sm] = elementwise_job(f"{__name__}.to_e4m3", "*fp32", "*u8", sm)
        jobs["value", sm] = elementwise_job(E4M3_VALUE, "*u8", "*fp32", sm)
    return dict(zip(jobs, compile_ahead_of_time(list(jobs.values())), strict=True))


def test_inexact_arithmetic_is_found():
    fused, unfused = compiled()[True], compiled()[False]
    assert count(fused, r"^fma\.rn\.f32$") > 0 == count(unfused, r"^fma")
    assert count(unfused, r"^sqrt\.approx") > 0 < count(unfused, r"^div\.full")
    assert count(unfused, r"^ld\.global\.v4") > 0 < count(unfused, r"^st\.global\.v4")


@pytest.mark.parametrize("sm", [80, 89, 90])
def test_numbers_are_converted_by_the_hardware_where_that_rounds_once(sm):
    bf16, code, value = (compiled()[name, sm] for name in ("bf16", "code", "value"))
    assert count(bf16, r"^cvt\.rn\.bf16(x2)?\.f32$") > 0
    assert (count(code, r"^cvt\.rn\.satfinite\.e4m3x2\.f32$") > 0) == (sm >= 90)
    assert (count(value, r"^cvt\.rn\.f16x2\.e4m3x2$") > 0) == (sm >= 90)
    assert not any(count(each, INEXACT) or each["spilled_bytes"] for each in (bf16, code, value))
