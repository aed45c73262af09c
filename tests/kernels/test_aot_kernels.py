"""What the package's kernels compile to: no spills, exact arithmetic, wide accesses.

A job is what a launch would compile: steps, casts and decodings run up to their launches.
"""

import importlib.metadata
import re
from collections import Counter
from unittest import mock

import pytest
import torch
from torch.nn import Parameter

from aot import INEXACT, Job, compile_ahead_of_time, count
from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    FusedAdam,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Recipe,
)
from fp4adam.distributed import row_sums
from fp4adam.distributed.cast import PartialCast
from fp4adam.nn.fake_quantize import fake_quantize
from fp4adam.tensors import backend
from fp4adam.tensors.storage import Storage
from fp4adam.tensors.swizzle import read_gemm_scales
from fp4adam.tensors.transpose import build_columnwise
from test_rows import in_parts

# What CI compiles, by scenario, and what the quick run does of that; the nights compile it all.
LAUNCHED_MOST = {
    r"plain (fp32|bf16)|captured|fake .*": r"_(plain|step_scalars|quantize)_kernel",
    r"step (nvfp4|mxfp8|float8|float8 block)( 8bit| factored)?|step mxfp4": (
        r"(step|_amax_preview|_strips|_sums|_columns)_kernel 1"
    ),
    r"step float8 delayed": r"_delayed_amax_kernel",
    r"cast (mxfp8|float8 block)": r"_span_kernel 3",
    r"decode nvfp4": r"_dequantize_kernel",
}
ONE_OF_EACH = {
    r"plain (fp32|bf16)|captured": r"_(plain|step_scalars)_kernel",
    r"step (nvfp4|mxfp8|float8|float8 block)": r"step_kernel 1",
    r"cast (mxfp8|float8 block)": r"_span_kernel 3",
    r"decode nvfp4": r"_dequantize_kernel 1",
}
NIGHTLY = [pytest.mark.exhaustive, pytest.mark.nightly]
EVERY = (pytest.mark.exhaustive, pytest.mark.every_kernel)
SIGNALS = ("grad_scale_ptr", "clip_ptr", "found_inf_ptr")
FORMATS = {
    "nvfp4": NVFP4Quantizer(optimize_for_gemm=True),
    "nvfp4 plain": NVFP4Quantizer(),
    "nvfp4 1d": NVFP4Quantizer(two_dimensional=False, optimize_for_gemm=True),
    "mxfp8": MXFP8Quantizer(optimize_for_gemm=True),
    "mxfp8 2d": MXFP8Quantizer(two_dimensional=True, optimize_for_gemm=True),
    "mxfp4": MXFP4Quantizer(),
    "float8": Float8Quantizer(),
    "float8 delayed": Float8Quantizer(scaling="delayed"),
    "float8 block": Float8BlockQuantizer(),
    "float8 block 1d": Float8BlockQuantizer(two_dimensional=False),
}
FP16, BF16, FP8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn


def moments(dtype, **options):
    return dict(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype, **options)


STATES = {
    "": {},
    " 8bit": dict(states="8bit"),
    " factored": dict(states="factored"),
    " BF16": moments(BF16),
    " FP16 and masters": moments(FP16, master_weight_dtype=FP16),
    " FP8, FP16 masters": moments(FP8, master_weight_dtype=FP16),
    " BF16, int8 masters": moments(BF16, master_weight_dtype=torch.int8),
    " FP8, no masters": moments(FP8, master_weights=False),
    " factored, no masters": dict(states="factored", master_weights=False),
}
# The formats whose step is compiled with every storage of states.
OF_ALL_STATES = ("nvfp4", "mxfp8", "float8 block")
# Whole tiles, and less than one.
SHAPES = [(256, 256), (64, 96)]


def train(kind, params, **options):
    optimizer = kind(params, **options)
    for param in params:
        param.grad = torch.zeros(param.shape, dtype=param.dtype)
    optimizer.step()


def step(quantizer, **options):
    weights = [torch.zeros(shape, dtype=BF16) for shape in SHAPES]
    train(FP4Adam, [Parameter(quantizer.quantize(weight)) for weight in weights], **options)


def step_shards(levels):
    """Factored second moments of shards whose rows are added to nodes of 2**levels."""
    with mock.patch.object(row_sums, "LEVELS_OF_ROWS", levels + 1):
        step(FORMATS["mxfp8"], states="factored")


def cast(quantizer):
    weight = quantizer.quantize(torch.zeros(256, 256, dtype=BF16))
    if quantizer.layout.is_square:
        build_columnwise([weight])
    if quantizer.layout.has_gemm_scales:
        read_gemm_scales(weight)
    shard = PartialCast([weight], [0], [256 * 256], [torch.float32])
    shard.measure([torch.zeros(256 * 256)])
    shard.write([torch.zeros(256 * 256)])


def decode(quantizer):
    out = torch.empty(256, 256, dtype=BF16)
    tensor = quantizer.quantize(out)
    tensor.dequantize()
    inner, layout = tensor.inner, quantizer.layout
    names = ["rowwise_data", "block_scale_inv" if layout.is_square else "rowwise_scale_inv"]
    parts = {
        name: in_parts(getattr(inner, name), layout.rows_per_entry[name], 128, 2, 0)
        for name in names[: 1 + (layout.scale_type is not None)]
    }
    quantizer.decoder(Storage(**parts, amax=inner.amax), out)()


def scenarios():
    """What launches kernels, by name."""
    for name, quantizer in FORMATS.items():
        for states, options in STATES.items():
            few = states in ("", " 8bit") or name in OF_ALL_STATES
            if few and not ("no masters" in states and name == "nvfp4"):
                yield f"step {name}{states}", lambda q=quantizer, o=options: step(q, **o)
        if quantizer.layout.rows_per_entry:
            yield f"cast {name}", lambda q=quantizer: cast(q)
            if name != "float8 delayed":
                yield f"decode {name}", lambda q=quantizer: decode(q)
    for k in range(row_sums.LEVELS_OF_ROWS - 1):
        yield f"step shards of {2**k} rows", lambda k=k: step_shards(k)
    few, many = torch.zeros(16, 128, dtype=BF16), torch.zeros(256, 256)
    for kind in (NVFP4Quantizer, MXFP8Quantizer, Float8Quantizer, Float8BlockQuantizer):
        recipe = Recipe(kind(), activations="fake").quantizer
        columnwise, name = kind(rowwise=False), kind.__name__
        yield f"fake {name}", lambda q=recipe: fake_quantize(few, q)
        yield f"columnwise {name}", lambda q=columnwise: q.quantize(many).dequantize()
    for name, kind, dtype, options in (
        ("fp32", FusedAdam, torch.float32, {}),
        ("bf16", FP4Adam, BF16, {}),
        ("bf16 with remainder", FP4Adam, BF16, dict(store_param_remainders=True)),
        ("fp16 without master", FusedAdam, FP16, {}),
        *((f"bf16{states}", FP4Adam, BF16, STATES[states]) for states in STATES if states),
    ):
        params = [Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
        yield f"plain {name}", lambda k=kind, p=params, o=options: train(k, p, **o)
    param = Parameter(torch.zeros(32))
    yield "captured", lambda: train(FusedAdam, [param], capturable=True)


TYPES = {torch.float32: "fp32", torch.float64: "fp64", BF16: "bf16", FP16: "fp16"}
TYPES |= {torch.uint8: "u8", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64"}


def job(kernel, arguments, sm, options):
    """What Triton would compile for a launch, if memory is aligned."""
    signature, constants, divisible = {}, {}, []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            divisible += [name] if name not in SIGNALS else []
        elif name.isupper() or value is None or type(value) is int and value == 1:
            constants[name] = getattr(value, "value", value)
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
            divisible += [name] if isinstance(value, int) and value % 16 == 0 else []
    return Job(kernel, signature, constants, divisible, sm, options)


def kernel_jobs(sm, forms):
    """The launches of scenarios, without repetitions: all, or those that ``forms`` names."""
    from fp4adam.kernels import plain_step, step
    from fp4adam.kernels.launch.launch import Launch

    found, numbers = {}, Counter()

    def record(kernel, *given, **named):
        options = {n: named.pop(n) for n in ("num_warps", "maxnreg") if n in named}
        assert named.pop("enable_fp_fusion", False) is False
        arguments = dict(zip(kernel.arg_names, given, strict=False)) | named
        numbers[kernel.__name__] += 1
        name = f"{kernel.__name__} {numbers[kernel.__name__]}"
        made = job(kernel, arguments, sm, options)
        if re.match(wanted, name) and made not in found.values():
            found[f"{scenario}: {name}"] = made

    def launched(self, *leading):
        record(self._kernel, *leading, *self._fixed, **self._constexprs, **self._options)

    with mock.patch.object(Launch, "__call__", launched), pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "uses_kernels", lambda device: True)
        for module in (plain_step, step):
            patch.setattr(module, "compute_capability", lambda device: sm)
        for scenario, run in scenarios():
            wanted = next((forms[form] for form in forms if re.fullmatch(form, scenario)), None)
            if wanted is not None:
                numbers.clear()
                run()
    return found


def quick_jobs(sm):
    """One of each kernel, and one with faults that must be found."""
    from elementwise import _elementwise_kernel, inexact

    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "numel": "i32"}
    constants = dict(FUNCTION=inexact, BLOCK=1024)
    fault = Job(_elementwise_kernel, signature, constants, [*signature], sm, {})
    faults = {"unfused": fault, "fused": fault._replace(options=dict(enable_fp_fusion=True))}
    return kernel_jobs(sm, ONE_OF_EACH) | faults


def most_spilled() -> int:
    """Bytes per thread that ptxas may spill, written and read: none up to Triton 3.8.

    With Triton 3.9 it spills 8 to 88 bytes in some ten kernels that have all registers they may.
    """
    major, minor = map(int, importlib.metadata.version("triton").split(".")[:2])
    return 96 if (major, minor) >= (3, 9) else 0


# Architectures on which kernels are compiled alone, and the shared memory that a program may have.
SHARED_BYTES = {75: 64 * 1024, 86: 99 * 1024}
# What ptxas spills on 8.6 at most, in bytes per thread, written and read.
A_LITTLE = {"step nvfp4 8bit: step_kernel 1": 24, "step mxfp8 8bit: step_kernel 1": 16}


# One test per target, because everything is compiled for it first, and tests run in parallel.
@pytest.mark.parametrize(
    "sm, forms",
    [
        (90, None),
        pytest.param(90, LAUNCHED_MOST, marks=pytest.mark.exhaustive),
        pytest.param(75, ONE_OF_EACH, marks=pytest.mark.exhaustive),
        pytest.param(86, LAUNCHED_MOST, marks=NIGHTLY),
        pytest.param(90, {".*": ""}, marks=NIGHTLY),
        *(pytest.param(sm, {".*": ""}, marks=EVERY) for sm in (100, 120)),
    ],
    ids=["90-quick", "90-launched most", "75", "86", "90", "100", "120"],
)
def test_kernels_compile_to_exact_and_wide_code_without_spills(sm, forms):
    pytest.importorskip("triton", reason="nothing can be compiled without Triton")
    if forms is None:
        compiled = compile_ahead_of_time(quick_jobs, sm)
        fused, unfused = compiled.pop("fused"), compiled.pop("unfused")
        assert count(fused, r"^fma\.rn\.f32$") > 0 == count(unfused, r"^fma")
        assert count(unfused, r"^sqrt\.approx") > 0 < count(unfused, r"^div\.full")
        assert count(unfused, r"^ld\.global\.v4") > 0 < count(unfused, r"^st\.global\.v4")
    else:
        compiled = compile_ahead_of_time(kernel_jobs, sm, forms)
    spilled = {name: each["spilled_bytes"] for name, each in compiled.items()}
    known = A_LITTLE if sm == 86 else {}
    assert not {n: x for n, x in spilled.items() if x > max(known.get(n, 0), most_spilled())}
    inexact = {name: count(each, INEXACT) for name, each in compiled.items()}
    assert not any(inexact.values()), {name: n for name, n in inexact.items() if n}
    if sm in SHARED_BYTES:
        shared = {name: each["shared_bytes"] for name, each in compiled.items()}
        assert max(shared.values()) <= SHARED_BYTES[sm], shared
        return

    scalars = compiled["captured: _step_scalars_kernel 1"]
    assert count(scalars, r"^div\.rn\.f64") and count(scalars, r"^sqrt\.rn\.f64")
    store, load = r"^st\.global\.v4|^st\.global\.v2\.b64", r"^ld\.global\.v4|^ld\.global\.v2\.b64"
    wide = [f"plain {name}: _plain_kernel 1" for name in ("fp32", "bf16")]
    wide += [f"step {x}: step_kernel 1" for x in ("nvfp4", "mxfp8", "float8", "float8 block")]
    wide += [f"cast {name}: _span_kernel 3" for name in ("mxfp8", "float8 block")]
    # Numbers are converted by the hardware where that rounds once.
    assert count(compiled["step mxfp8: step_kernel 1"], r"^cvt\.rn\.satfinite\.e4m3x2\.f32$")
    assert count(compiled["plain bf16: _plain_kernel 1"], r"^cvt\.rn\.bf16(x2)?\.f32$")
    for name in wide:
        assert count(compiled[name], store) and count(compiled[name], rf"{load}|^cp\.async\.cg"), (
            name
        )
    for name, each in compiled.items():
        if each["is_plain"]:
            # A thread writes 16 bytes at a time, and reads what they are from in one go as well.
            assert count(each, store) == 2, name
            assert not count(each, r"^st\.global\.b|^bar"), name
