"""What the package's kernels compile to: no spills, exact arithmetic, wide accesses."""

import importlib.metadata
import re

import pytest
import torch

from aot import INEXACT, compile_ahead_of_time, count
from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

CAPABILITIES = (90, 100, 120)
# What the quick run compiles; the exhaustive one compiles everything for these capabilities.
LAUNCHED_MOST = (
    r"adam (fp32|bf16 with master)$|amax preview again=False$|step scalars|delayed amax"
    r"|step (nvfp4|mxfp8|float8|float8 block)( FP8 states, int8 masters)?$|step mxfp4$"
    r"|span codes (mxfp8|float8 block) whole=True|dequantize nvfp4"
    r"|quantize vectors bf16 columnwise=True padded=True|fake quantize"
)
NIGHTLY = [pytest.mark.exhaustive, pytest.mark.nightly]
EVERY = (pytest.mark.exhaustive, pytest.mark.every_kernel)
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SIGNALS = ("grad_scale_ptr", "clip_ptr", "found_inf_ptr")
TABLES = {
    **dict.fromkeys(SIGNALS, "*fp32"),
    "table": "*i64",
    "scalars": "*fp32",
    "tiles": "*i32",
}
STORAGE = {
    "rowwise_data": "*u8",
    "rowwise_scale": "*u8",
    "columnwise_data": "*u8",
    "columnwise_scale": "*u8",
}
VARIANT = "fp4adam.kernels.adam.Variant"
FORMAT = "fp4adam.kernels.format.Format"
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
# Of masters and moments, with what tells the names of the kernels apart.
STATE_CODECS = {
    ("plain", "float32", "float32"): "",
    ("int8", "e4m3", "ue4m4"): " FP8 states, int8 masters",
    ("plain", "bfloat16", "bfloat16"): " BF16 states",
    ("float16", "float16", "ue5m11"): " FP16 states and masters",
    ("float16", "e4m3", "ue4m4"): " FP8 states, FP16 masters",
    ("int8", "bfloat16", "bfloat16"): " BF16 states, int8 masters",
    ("codes", "e4m3", "ue4m4"): " FP8 states, no masters",
}
PLAIN, EIGHT_BIT, *OTHERS = STATE_CODECS
# The formats whose step is compiled with every storage of states.
OF_ALL_STATES = ("nvfp4", "mxfp8", "float8 block")


def dtype(name):
    return {"import": f"triton.language.{DTYPES.get(name, name)}"}


def job(path, signature, constexprs, **options):
    module, kernel = path.split(".")
    pointers = [
        name for name, kind in signature.items() if kind.startswith("*") and name not in SIGNALS
    ]
    return {
        "module": f"fp4adam.kernels.{module}",
        "kernel": kernel,
        "signature": signature,
        "constexprs": constexprs,
        "divisible_by_16": [*pointers, *(n for n in ("rows", "cols", "numel") if n in signature)],
        **options,
    }


def variant(codecs, grad="bf16", value=None, write="fp32", is_updated=False):
    dtypes = (None if name is None else dtype(name) for name in (grad, value, write))
    fields = [*dtypes, *codecs, True, False, is_updated]
    return {"VARIANT": {"tuple": VARIANT, "fields": fields}}


def of_format(quantizer, tensor_amax=None):
    """The format of a step."""
    from fp4adam.kernels.format import format_of

    layout = quantizer.layout
    if tensor_amax is None:
        tensor_amax = {"current": "preview", "delayed": "history", None: ""}[layout.tensor_scale]
    options = dict(swizzled=layout.has_gemm_scales, tensor_amax=tensor_amax)
    return format_of(layout, torch.float32, **options)


def constexpr_of(F):
    return {"F": {"tuple": FORMAT, "fields": list(F)}}


MEASURED = ("tile_ratios", "stored_amaxes")


def step_jobs(codecs, sm):
    """The step of quantized weights with the states in some codecs."""
    import triton.language as tl

    from fp4adam.kernels import step
    from fp4adam.kernels.adam import Variant
    from fp4adam.kernels.tiles.state import has_scales, starts_from_codes

    # States with scales are updated before, which leaves a pass the scales of masters alone; but
    # masters with remainders exist only in the pass.
    is_updated = has_scales(*codecs) and not starts_from_codes(codecs[0])
    codecs_now = (codecs[0], "float32", "float32") if is_updated else codecs
    known = Variant(tl.bfloat16, None, None, *codecs_now, True, False, is_updated)
    amaxes = ("amaxes", "next_amaxes", "tile_amaxes", "exceeding", *MEASURED)
    jobs = {}
    for name, quantizer in FORMATS.items():
        if codecs in OTHERS and name not in OF_ALL_STATES:
            continue
        if codecs[0] == "codes" and name == "nvfp4":
            continue
        F = of_format(quantizer)
        signature = {**TABLES, "epsilon": "fp32"}
        if F.tensor_amax == "preview":
            signature |= {"slots": "*i32", **dict.fromkeys(amaxes, "*fp32")}
        elif F.tensor_amax == "history":
            signature |= {"stored_amaxes": "*fp32"}
        for size, form in zip(("step", "edge"), step.forms(F, known, sm), strict=True):
            if size == "edge" and codecs in OTHERS:
                continue
            jobs[f"{size} {name}{STATE_CODECS[codecs]}"] = job(
                "step.step_kernel",
                signature,
                {
                    **variant(codecs_now, is_updated=is_updated),
                    **constexpr_of(F),
                    "MASKED": size == "edge" and F.scale == "float32",
                    "TR": form.rows,
                    "TC": form.cols,
                    "BR": form.part_rows,
                    "BC": form.part_cols,
                    "STAGES": form.num_stages,
                },
                num_warps=form.num_warps,
                maxnreg=form.registers,
            )
    return jobs


def plain_jobs(codecs, sm):
    """The step of plain tensors, or of states before a pass."""
    from fp4adam.kernels import plain_step
    from fp4adam.kernels.tiles.state import are_narrow, has_scales, max_registers

    jobs = {}
    kinds = {
        "bf16 with master": (
            "bf16", "fp16" if has_scales(codecs[0]) else "fp32", "bf16", codecs[0]
        ),
        "of a master": ("bf16", None, None, codecs[0]),
    }  # fmt: skip
    if codecs == PLAIN:
        kinds |= {
            "fp32": ("fp32", "fp32", None, "plain"),
            "bf16 with remainder": ("bf16", "bf16", None, "remainder"),
            "fp16 without master": ("fp16", "fp16", None, "plain"),
        }
    for name, (grad, value, param, codec) in kinds.items():
        if codec in ("int8", "codes"):
            continue  # only of quantized weights
        used = codec, *codecs[1:]
        options = variant(used, grad, value, param)
        loops = (1, plain_step.LOOP) if are_narrow(*used) else (1,)
        for loop in loops:
            limit = plain_step.loop_registers(used, sm) if loop > 1 else max_registers(*used)
            jobs[f"adam {name}{' loop' * (loop > 1)}{STATE_CODECS[codecs]}"] = job(
                "plain_step._plain_kernel",
                TABLES,
                {**options, "LOOP": loop, "STAGES": plain_step.STAGES},
                maxnreg=limit,
            )
    return jobs


def preview_jobs():
    """The preview of amaxes, and what corrects it."""
    from fp4adam.kernels import amax_preview
    from fp4adam.kernels.tiles.state import has_scales, max_registers

    jobs = {}
    slots = {**TABLES, "slots": "*i32"}
    known = ("tile_amaxes", "old_amaxes", "amaxes", "exceeding", *MEASURED)
    known = {**slots, **dict.fromkeys(known, "*fp32"), "n_tiles": "i32", "epsilon": "fp32"}
    for codecs, name in (
        (PLAIN, None),
        (("plain", "bfloat16", "bfloat16"), None),
        (("float16", "float16", "ue5m11"), None),
        (EIGHT_BIT, "nvfp4"),
        (EIGHT_BIT, "float8"),
    ):
        completed = amax_preview.COMPLETED_PART[has_scales(*codecs)]
        br, bc = amax_preview.PART if name is None else completed
        of = {"F": None} if name is None else constexpr_of(of_format(FORMATS[name]))
        for again in (False,) if name is None else (False, True):
            ending = "" if codecs == PLAIN else f" {name or codecs}"
            jobs[f"amax preview again={again}{ending}"] = job(
                "amax_preview._amax_preview_kernel",
                known,
                {
                    **variant(codecs), "AGAIN": again, **of, "SCAN": amax_preview.SCAN, "BR": br,
                    "BC": bc,
                },
                maxnreg=max_registers(*codecs),
            )  # fmt: skip
    rewritten = {
        "table": "*i64", "tiles": "*i32", "slots": "*i32", "amaxes": "*fp32",
        "exceeding": "*fp32", "n_tiles": "i32", "n_slots": "i32", "epsilon": "fp32",
    }  # fmt: skip
    for name in ("nvfp4", "nvfp4 1d", "float8"):
        for codec, width in (("plain", 16), ("float16", 32)):
            jobs[f"requantize {name} {codec}"] = job(
                "amax_preview._requantize_kernel",
                rewritten,
                {
                    "WRITE_DTYPE": dtype("fp32"),
                    "VALUE_CODEC": codec,
                    **constexpr_of(of_format(FORMATS[name])),
                    "BC": width,
                },
                num_warps=1,
            )
    jobs["delayed amax"] = job(
        "step._delayed_amax_kernel",
        {
            **dict.fromkeys(SIGNALS, "*fp32"), "table": "*i64", "stored_amaxes": "*fp32",
            "factor": "fp32",
        },
        {"IS_MAX": True, "LENGTH": 1000, "BLOCK": 1024},
    )  # fmt: skip
    return jobs


def shard_jobs():
    """The kernels of a partial cast and of transposes, with masks and without."""
    from fp4adam.kernels import cast, transpose

    jobs = {}
    listed = {"table": "*i64", "tiles": "*i32"}
    types = {"VALUE_DTYPE": dtype("fp32"), "WRITE_DTYPE": dtype("bf16")}
    for name in ("nvfp4", "mxfp8", "mxfp8 2d", "mxfp4", "float8", "float8 block"):
        layout = FORMATS[name].layout
        F = constexpr_of(cast.span_format(layout, torch.bfloat16))
        for whole, form in zip((True, False), cast.span_forms(layout), strict=True):
            options = {
                **types, **F, "WHOLE": whole, "TR": form.rows, "BR": form.part_rows,
                "BC": form.cols, "STAGES": form.num_stages,
            }  # fmt: skip
            for kind in ("amax", "codes"):
                if kind == "amax" and not whole and name != "mxfp8":
                    continue  # its masks are those of the codes
                jobs[f"span {kind} {name} whole={whole}"] = job(
                    "cast._span_kernel",
                    {**listed, "epsilon": "fp32"},
                    {"MEASURES": kind == "amax", **options},
                    maxnreg=form.registers,
                )
        jobs[f"span scales {name}"] = job(
            "cast._scales_kernel",
            {"table": "*i64", "chunks": "*i32", "epsilon": "fp32"},
            {**F, "CHUNK": cast.SCALES},
        )
    for bits, side in transpose.TILE.items():
        for name, size in (("transpose", side), ("transpose_edge", transpose.EDGE)):
            options = {"BITS": bits, "WHOLE": name == "transpose", "SIDE": size}
            jobs[f"{name} {bits}"] = job("transpose._transpose_kernel", listed, options)
    return jobs


def matrix_jobs():
    """The kernels that quantize and decode a matrix."""
    from fp4adam.kernels import cast, dequantize

    jobs = {}
    sizes = {"rows": "i32", "cols": "i32"}
    jobs["amax of"] = job(
        "cast._amax_kernel",
        {"x_ptr": "*bf16", "amax_ptr": "*fp32", "numel": "i32"},
        {"N": cast.AMAX_TILE},
    )
    given = {**sizes, "tiles_per_row": "i32", "epsilon": "fp32"}
    for name in ("nvfp4 plain", "nvfp4 1d", "mxfp8", "mxfp4", "float8", "float8 block",
                 "float8 block 1d"):  # fmt: skip
        F = cast._format(FORMATS[name].layout, torch.bfloat16)._replace(swizzled=False)
        masked = F.block == 128
        br, bc = (128, 128) if masked else (32 if F.block == 32 else 64, 64)
        pointers = dict(STORAGE)
        if F.scale == "float32":
            pointers |= {"rowwise_scale": "*fp32", "columnwise_scale": "*fp32"}
        jobs[f"quantize {name}"] = job(
            "cast._quantize_kernel",
            {"x_ptr": "*bf16", **pointers, "amax_ptr": "*fp32", **given},
            {**constexpr_of(F), "MASKED": masked, "BR": br, "BC": bc},
            num_warps=8 if masked else br * bc // 1024,
        )
    kinds = NVFP4Quantizer, MXFP8Quantizer, Float8BlockQuantizer, Float8Quantizer
    names = "nvfp4", "mxfp8", "float8_block", "float8"
    for name, quantizer in zip(names, (kind() for kind in kinds), strict=True):
        jobs[f"fake quantize {name}"] = job(
            "cast._quantize_kernel",
            {"x_ptr": "*bf16", "amax_ptr": "*fp32", "out_ptr": "*bf16", **given},
            {
                **constexpr_of(cast._format(quantizer.layout, torch.bfloat16)), "MASKED": True,
                "BR": 16, "BC": 128,
            },
            num_warps=2,
        )  # fmt: skip
    numbers = ("n_groups", "groups_per_row", "cols", "stride_scale_row", "stride_scale_col")
    numbers += ("stride_out_row", "stride_out_col", "rows_per_part", "data_gap", "scale_part")
    for name, block, ways in (
        ("nvfp4", (16, 16), ("plain", "parted", "strided")),
        ("mxfp8", (1, 32), ("plain", "parted")),
        ("mxfp8", (32, 1), ("plain",)),
        ("mxfp4", (1, 32), ("plain", "parted")),
        ("float8", (1, 1), ("plain", "parted", "strided")),
        ("float8 block", (128, 128), ("plain", "parted", "strided")),
    ):
        F = cast._format(FORMATS[name].layout, torch.float32)
        scale = "*fp32" if F.scale == "float32" else "*u8"
        for way in ways:
            jobs[f"dequantize {name} {block} {way}"] = job(
                "dequantize._dequantize_kernel",
                {
                    "data_ptr": "*u8", "scale_ptr": scale, "amax_ptr": "*fp32", "out_ptr": "*bf16",
                    **dict.fromkeys(numbers, "i32"), "epsilon": "fp32",
                },
                {
                    **constexpr_of(F), "BLOCK_ROWS": block[0], "BLOCK_COLS": block[1],
                    "PARTED": way == "parted", "PLAIN": way != "strided", "N": dequantize.GROUPS,
                },
            )  # fmt: skip
    return jobs


def kernel_jobs(sm):
    """Every kernel in the forms that a training run launches most, and in its widest one."""
    from fp4adam.kernels import step_scalars, swizzle

    jobs = {}
    for codecs in STATE_CODECS:
        jobs |= step_jobs(codecs, sm) | plain_jobs(codecs, sm)
    jobs |= preview_jobs() | shard_jobs() | matrix_jobs()
    jobs["step scalars"] = job(
        "step_scalars._step_scalars_kernel",
        {
            "found_inf_ptr": "*fp32",
            "table": "*i64",
            "hyper": "*fp64",
            "groups": "*i32",
            "steps": "*i64",
            "scalars": "*fp32",
            "n": "i32",
        },
        {"BLOCK": step_scalars.BLOCK},
    )
    for undo in (False, True):
        jobs[f"swizzle undo={undo}"] = job(
            "swizzle._swizzle_kernel",
            {"table": "*i64", "tiles": "*i32"},
            {"UNDO": undo, **dict(zip(("BR", "BC"), swizzle.TILE, strict=True))},
        )
    return jobs


def most_spilled() -> int:
    """Bytes per thread that ptxas may spill, written and read: none up to Triton 3.8.

    With Triton 3.9 it spills 8 to 88 bytes in some ten kernels that have all registers they may.
    """
    major, minor = map(int, importlib.metadata.version("triton").split(".")[:2])
    return 96 if (major, minor) >= (3, 9) else 0


# One test per target, because everything is compiled for it first, and tests run in parallel.
@pytest.mark.parametrize(
    "sm, forms",
    [
        (90, LAUNCHED_MOST),
        pytest.param(90, "", marks=NIGHTLY),
        *(pytest.param(sm, "", marks=EVERY) for sm in CAPABILITIES[1:]),
    ],
    ids=["90-launched most", *map(str, CAPABILITIES)],
)
def test_kernels_compile_to_exact_and_wide_code_without_spills(sm, forms):
    pytest.importorskip("triton", reason="nothing can be compiled without Triton")
    jobs = {name: each for name, each in kernel_jobs(sm).items() if re.match(forms, name)}
    facts = compile_ahead_of_time([{**each, "sm": sm} for each in jobs.values()])
    compiled = dict(zip(jobs, facts, strict=True))

    spilled = {name: each["spilled_bytes"] for name, each in compiled.items()}
    assert not {name: n for name, n in spilled.items() if n > most_spilled()}
    inexact = {name: count(each, INEXACT) for name, each in compiled.items()}
    assert not any(inexact.values()), {name: n for name, n in inexact.items() if n}

    scalars = compiled["step scalars"]
    assert count(scalars, r"^div\.rn\.f64") and count(scalars, r"^sqrt\.rn\.f64")

    loads = r"^ld\.global\.v4|^ld\.global\.v2\.b64|^cp\.async\.cg"
    wide = ["adam fp32", "adam bf16 with master"]
    wide += [f"step {name}" for name in ("nvfp4", "mxfp8", "float8", "float8 block")]
    wide += [f"span codes {name} whole=True" for name in ("mxfp8", "float8 block")]
    # In one direction a thread has four codes of a row, and neighbours have the next.
    wide += [name for name in jobs if re.match("quantize vectors .*columnwise=True", name)]
    assert set(wide) <= set(compiled)
    for name, each in compiled.items():
        if name.startswith("dequantize") and not name.endswith("strided"):
            # A thread writes 16 bytes at a time, and reads what they are from in one go as well.
            assert count(each, r"^st\.global\.v4|^st\.global\.v2\.b64") == 2, name
            assert not count(each, r"^st\.global\.b|^bar"), name
    for name in wide:
        assert count(compiled[name], r"^st\.global\.v4|^st\.global\.v2\.b64") > 0, name
        assert count(compiled[name], loads) > 0, name


# Architectures on which kernels are compiled alone, and the shared memory that a program may have.
SHARED_BYTES = {75: 64 * 1024, 80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024}
# What ptxas spills there at most, in bytes per thread, written and read. Nothing on 7.5.
A_LITTLE = {
    "step nvfp4 FP8 states, int8 masters": 24,
    "step mxfp8 FP8 states, int8 masters": 16,
    "quantize vectors bf16 columnwise=True padded=True": 16,
}
SPILLED = dict.fromkeys((80, 86, 89), A_LITTLE)
# One kernel of each kind, in the quick run.
ONE_OF_EACH = r"adam bf16 with master$|step (nvfp4|mxfp8|float8)$"


@pytest.mark.parametrize(
    "sm, forms",
    [
        (75, ONE_OF_EACH),
        pytest.param(86, LAUNCHED_MOST, marks=NIGHTLY),
    ],
    ids=["75-one of each", "86"],
)
def test_kernels_compile_for_older_gpus(sm, forms):
    pytest.importorskip("triton", reason="nothing can be compiled without Triton")
    jobs = {name: each for name, each in kernel_jobs(sm).items() if re.match(forms, name)}
    facts = compile_ahead_of_time([{**each, "sm": sm} for each in jobs.values()])
    compiled = dict(zip(jobs, facts, strict=True))
    spilled = {name: each["spilled_bytes"] for name, each in compiled.items()}
    known = SPILLED.get(sm, {})
    assert not {n for n in spilled if spilled[n] > max(known.get(n, 0), most_spilled())}
    inexact = {name: count(each, INEXACT) for name, each in compiled.items()}
    assert not any(inexact.values()), {name: n for name, n in inexact.items() if n}
    shared = {name: each["shared_bytes"] for name, each in compiled.items()}
    assert max(shared.values()) <= SHARED_BYTES[sm], shared
