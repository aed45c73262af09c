"""That faults of compiled code are found, on a machine with or without a GPU."""

import pytest

from aot import compile_ahead_of_time, count

triton = pytest.importorskip("triton", reason="nothing can be compiled without Triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def inexact(x):
    return tl.sqrt(x * x + 1.0) / x


def test_inexact_arithmetic_is_found():
    job = {
        "module": "elementwise",
        "kernel": "_elementwise_kernel",
        "signature": {"x_ptr": "*fp32", "y_ptr": "*fp32", "numel": "i32"},
        "constexprs": {"FUNCTION": {"import": f"{__name__}.inexact"}, "BLOCK": 1024},
        "divisible_by_16": ["x_ptr", "y_ptr", "numel"],
        "sm": 90,
    }
    fused, unfused = compile_ahead_of_time([job | {"enable_fp_fusion": x} for x in (True, False)])
    assert count(fused, r"^fma\.rn\.f32$") > 0 == count(unfused, r"^fma")
    assert count(unfused, r"^sqrt\.approx") > 0 < count(unfused, r"^div\.full")
    assert count(unfused, r"^ld\.global\.v4") > 0 < count(unfused, r"^st\.global\.v4")
