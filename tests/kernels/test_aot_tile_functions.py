"""What the tile functions compile to, on a machine with or without a GPU."""

import functools

import pytest

from aot import INEXACT, compile_ahead_of_time, count

triton = pytest.importorskip("triton", reason="nothing can be compiled without Triton")
tl = pytest.importorskip("triton.language")

# Name, then the types of its argument and of its result.
TILE_FUNCTIONS = {
    "bfloat16.round_to_bfloat16": ("*fp32", "*bf16"),
    "e2m1.e2m1_code": ("*fp32", "*i32"),
    "e2m1.e2m1_value": ("*i32", "*fp32"),
    "e4m3.e4m3_code": ("*fp32", "*u8"),
    "e4m3.e4m3_value": ("*u8", "*fp32"),
    "e8m0.e8m0_code_up": ("*fp32", "*i32"),
    "e8m0.e8m0_reciprocal": ("*i32", "*fp32"),
    "e8m0.e8m0_value": ("*i32", "*fp32"),
}
# The hardware casts to E4M3 from 90 on.
QUICK = (89, 90)
CAPABILITIES = [
    *QUICK,
    *(pytest.param(sm, marks=pytest.mark.exhaustive) for sm in (80, 100, 120)),
]


def elementwise_job(function: str, x: str, y: str, sm: int) -> dict:
    return {
        "module": "elementwise",
        "kernel": "_elementwise_kernel",
        "signature": {"x_ptr": x, "y_ptr": y, "numel": "i32"},
        "constexprs": {"FUNCTION": {"import": function}, "BLOCK": 1024},
        "divisible_by_16": ["x_ptr", "y_ptr", "numel"],
        "sm": sm,
    }


@triton.jit
def inexact(x):
    return tl.sqrt(x * x + 1.0) / x


INEXACT_JOB = elementwise_job(f"{__name__}.inexact", "*fp32", "*fp32", 90)


@functools.cache
def compile_for(capabilities):
    """The tile functions, and the inexact one with fused arithmetic and without."""
    jobs = {
        (function, sm): elementwise_job(f"fp4adam.kernels.tiles.{function}", *types, sm)
        for function, types in TILE_FUNCTIONS.items()
        for sm in capabilities
    }
    for fusion in (True, False):
        jobs["inexact", fusion] = INEXACT_JOB | {"enable_fp_fusion": fusion}
    return dict(zip(jobs, compile_ahead_of_time(list(jobs.values())), strict=True))


@pytest.fixture
def compiled(request):
    """All that one process compiles: for the capabilities of the quick run, or for another one."""
    sm = request.node.callspec.params["sm"] if hasattr(request.node, "callspec") else QUICK[0]
    return compile_for(QUICK if sm in QUICK else (sm,))


def test_inexact_arithmetic_is_found(compiled):
    fused, unfused = compiled["inexact", True], compiled["inexact", False]
    assert count(fused, r"^fma\.rn\.f32$") > 0 == count(unfused, r"^fma")
    assert count(unfused, r"^sqrt\.approx") > 0 < count(unfused, r"^div\.full")
    assert count(unfused, r"^ld\.global\.v4") > 0 < count(unfused, r"^st\.global\.v4")


@pytest.mark.exhaustive
def test_a_job_that_does_not_compile_says_why():
    job = elementwise_job("fp4adam.kernels.tiles.e4m3.e4m3_value", "*u8", "*bf16", 90)
    with pytest.raises(RuntimeError, match="FUNCTION must return the dtype of y"):
        compile_ahead_of_time([job])


@pytest.mark.parametrize("sm", CAPABILITIES)
@pytest.mark.parametrize("function", TILE_FUNCTIONS)
def test_tile_function_is_compiled_without_inexact_arithmetic_or_spills(function, sm, compiled):
    facts = compiled[function, sm]
    assert facts["spilled_bytes"] == 0
    assert count(facts, INEXACT) == 0


@pytest.mark.parametrize("sm", CAPABILITIES)
def test_e4m3_is_cast_by_the_hardware_where_that_rounds_once(sm, compiled):
    code, value = compiled["e4m3.e4m3_code", sm], compiled["e4m3.e4m3_value", sm]
    trusted = sm >= 90
    assert (count(code, r"^cvt\.rn\.satfinite\.e4m3x2\.f32$") > 0) == trusted
    assert (count(code, "e4m3") > 0) == trusted
    assert (count(value, r"^cvt\.rn\.f16x2\.e4m3x2$") > 0) == trusted
    assert (count(value, "e4m3") > 0) == trusted


@pytest.mark.parametrize("sm", CAPABILITIES)
def test_bfloat16_is_cast_by_the_hardware(sm, compiled):
    facts = compiled["bfloat16.round_to_bfloat16", sm]
    assert count(facts, r"^cvt\.rn\.bf16(x2)?\.f32$") > 0
