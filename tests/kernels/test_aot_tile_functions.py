"""That faults of compiled code are found, on a machine with or without a GPU."""

import pytest

from aot import Job, compile_ahead_of_time, count

triton = pytest.importorskip("triton", reason="nothing can be compiled without Triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def inexact(x):
    return tl.sqrt(x * x + 1.0) / x


def jobs():
    from elementwise import _elementwise_kernel

    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "numel": "i32"}
    constants = dict(FUNCTION=inexact, BLOCK=1024)
    job = Job(_elementwise_kernel, signature, constants, [*signature], 90, {})
    fused, unfused = (dict(enable_fp_fusion=is_fused) for is_fused in (True, False))
    return {"fused": job._replace(options=fused), "unfused": job._replace(options=unfused)}


def test_inexact_arithmetic_is_found():
    fused, unfused = compile_ahead_of_time(jobs).values()
    assert count(fused, r"^fma\.rn\.f32$") > 0 == count(unfused, r"^fma")
    assert count(unfused, r"^sqrt\.approx") > 0 < count(unfused, r"^div\.full")
    assert count(unfused, r"^ld\.global\.v4") > 0 < count(unfused, r"^st\.global\.v4")
