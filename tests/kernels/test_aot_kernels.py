"""What the package's kernels compile to: no spills, exact arithmetic, wide accesses."""

import importlib.metadata
import itertools
import re

import pytest

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
    r"|partial (mxfp8|float8block) codes fp32 whole=True|dequantize words nvfp4"
    r"|quantize vectors bf16 columnwise=True padded=True|fake quantize"
)
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
BOTH = {"ROWWISE": True, "COLUMNWISE": True}
VARIANT = "fp4adam.kernels.adam.Variant"
USAGE = "fp4adam.kernels.launch.tensor_table.Usage"
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
FP32_MAX = 3.4028234663852886e38
PLAIN_SCALES = {"ADAPTIVE": None, "BOUND": 448}


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


def usage(square=False):
    """Both directions."""
    return {"USAGE": {"tuple": USAGE, "fields": [True, True, square]}}


def of_format(quantizer, tensor_amax=None):
    """The format of a step."""
    import torch

    from fp4adam.kernels.format import format_of

    layout = quantizer.layout
    if tensor_amax is None:
        tensor_amax = {"current": "preview", "delayed": "history", None: ""}[layout.tensor_scale]
    options = dict(swizzled=layout.has_gemm_scales, tensor_amax=tensor_amax)
    return format_of(layout, torch.float32, **options)


def constexpr_of(F):
    return {"F": {"tuple": FORMAT, "fields": list(F)}}


def tile_options(tile):
    return {"BR": tile.rows, "BC": tile.cols, "STAGES": tile.num_stages}


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
        jobs[f"adam {name}{STATE_CODECS[codecs]}"] = job(
            "plain_step._block_kernel",
            TABLES,
            {**options, "BLOCK": plain_step.BLOCK},
            maxnreg=max_registers(*used),
        )
        if are_narrow(*used):
            sizes = dict(zip(("BR", "LOOP", "STAGES"), plain_step.LOOP_TILE, strict=True))
            jobs[f"adam {name} loop{STATE_CODECS[codecs]}"] = job(
                "plain_step._loop_kernel",
                TABLES,
                {**options, **sizes},
                maxnreg=plain_step.loop_registers(used, sm),
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
    """The kernels of a partial cast, of transposes and of copies, with masks and without."""
    from fp4adam.kernels import strided_copy, transpose
    from fp4adam.kernels.partial_cast import SCALES, TILES

    jobs = {}
    listed = {"table": "*i64", "tiles": "*i32"}
    epsilon = {"epsilon": "fp32"}
    block = {"LARGEST": FP32_MAX, "POW_2": True}
    for value, whole in (("fp32", True), ("fp32", False), ("bf16", True)):
        types = {"VALUE_DTYPE": dtype(value), "WRITE_DTYPE": dtype("bf16"), "WHOLE": whole}
        tiles = {format: tiles[0 if whole else 1] for format, tiles in TILES.items()}
        e4m3, nvfp4, mxfp8 = tiles["float8_block"], tiles["nvfp4"], tiles["mxfp8"]
        sixteen = {"BLOCK": 16, "OF_BLOCKS": True, "OF_TENSOR": True, **tile_options(nvfp4)}
        square = {"BLOCK": 128, **tile_options(e4m3)}
        parts = {"BR": e4m3.rows, "STAGES": e4m3.num_stages, **block}
        for name, kernel, signature, options in (
            ("nvfp4 amax", "square_amax", {}, sixteen),
            ("nvfp4 codes", "nvfp4_codes", {}, {"BC": nvfp4.cols, **PLAIN_SCALES}),
            ("mxfp8 amax", "mxfp8_amax", {}, {"BC": mxfp8.cols, **BOTH}),
            ("mxfp8 codes", "mxfp8_codes", {}, {"BC": mxfp8.cols, "SQUARE": False, **BOTH}),
            (
                "mxfp8_2d codes",
                "mxfp8_codes",
                {},
                {"BC": mxfp8.cols, "SQUARE": True, "ROWWISE": True, "COLUMNWISE": False},
            ),
            ("mxfp4 codes", "mxfp4_codes", {}, {"BC": mxfp8.cols, "ROUNDING": 0x200000}),
            ("float8 amax", "square_amax", {}, {"OF_BLOCKS": False, "OF_TENSOR": True, **square}),
            ("float8 codes", "float8_codes", epsilon, {"SCALES_BLOCKS": False, **parts}),
            (
                "float8block amax",
                "square_amax",
                {},
                {"OF_BLOCKS": True, "OF_TENSOR": False, **square},
            ),
            ("float8block codes", "float8_codes", epsilon, {"SCALES_BLOCKS": True, **parts}),
        ):
            jobs[f"partial {name} {value} whole={whole}"] = job(
                f"partial_cast._{kernel}_kernel", {**listed, **signature}, {**types, **options}
            )
    for format in TILES:
        jobs[f"partial {format} scales"] = job(
            "partial_cast._scales_kernel",
            {"table": "*i64", "chunks": "*i32", **epsilon},
            {**block, **PLAIN_SCALES, "FORMAT": format, "ROUNDING": 0, "CHUNK": SCALES},
        )
    for bits, side in transpose.TILE.items():
        for name, size in (("transpose", side), ("transpose_edge", transpose.EDGE)):
            jobs[f"{name} {bits}"] = job(
                f"transpose._{name}_kernel", listed, {"BITS": bits, "SIDE": size}
            )
    for name in ("uint8", "float32"):
        jobs[f"strided copy {name}"] = job(
            "strided_copy._strided_copy_kernel",
            {"table": "*i64", "chunks": "*i32"},
            {"DTYPE": dtype(name), "CHUNK": strided_copy.CHUNK},
        )
    return jobs


def kernel_jobs(sm):
    """Every kernel in the forms that a training run launches most, and in its widest one."""
    from fp4adam.kernels import fake_quantize, float8_block, nvfp4, step_scalars, swizzle
    from fp4adam.kernels.tiles.words import WORDS

    jobs = {}
    for codecs in STATE_CODECS:
        jobs |= step_jobs(codecs, sm) | plain_jobs(codecs, sm)
    jobs |= preview_jobs() | shard_jobs()
    jobs["step scalars"] = job(
        "step_scalars._step_scalars_kernel",
        {
            "found_inf_ptr": "*fp32",
            "table": "*i64",
            "hyper": "*fp64",
            "groups": "*i32",
            "first_elements": "*i64",
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
    sizes = {"rows": "i32", "cols": "i32"}
    tile64 = {"BR": 64, "BC": 64}
    jobs["nvfp4 amax of"] = job(
        "nvfp4._amax_kernel",
        {"x_ptr": "*bf16", "amax_ptr": "*fp32", "numel": "i32"},
        {"N": nvfp4.AMAX_TILE},
    )
    for name in ("nvfp4", "mxfp8", "float8_block", "float8"):
        jobs[f"fake quantize {name}"] = job(
            "fake_quantize._fake_quantize_kernel",
            {"x_ptr": "*bf16", "amax_ptr": "*fp32", "out_ptr": "*bf16", **sizes, "epsilon": "fp32"},
            {
                "FORMAT": name,
                "LARGEST": FP32_MAX,
                "POW_2": True,
                "BR": fake_quantize.TILE_ROWS,
                "BC": fake_quantize.TILE_COLS,
            },
        )
    for square in (True, False):
        jobs[f"nvfp4 quantize square={square}"] = job(
            "nvfp4._quantize_kernel",
            {"x_ptr": "*bf16", **STORAGE, "amax_ptr": "*fp32", **sizes, "tiles_per_row": "i32"},
            {**usage(square), **tile64},
        )
    strides = dict.fromkeys(
        ("stride_scale_row", "stride_scale_col", "stride_out_row", "stride_out_col"), "i32"
    )
    jobs["nvfp4 dequantize"] = job(
        "nvfp4._dequantize_kernel",
        {
            "data_ptr": "*u8",
            "scale_ptr": "*u8",
            "amax_ptr": "*fp32",
            "out_ptr": "*bf16",
            "cols": "i32",
            "tiles_per_row": "i32",
            **strides,
        },
        {"SQUARE": True, "BOUND": 448, **tile64},
    )
    jobs["float8 quantize"] = job(
        "float8._quantize_kernel",
        {
            "x_ptr": "*bf16",
            "rowwise_data": "*u8",
            "columnwise_data": "*u8",
            "amax_ptr": "*fp32",
            **sizes,
            "tiles_per_row": "i32",
            "epsilon": "fp32",
        },
        {**usage(), "POW_2": False, **tile64},
    )
    jobs["mxfp8 quantize"] = job(
        "mxfp8._quantize_kernel",
        {"x_ptr": "*bf16", **STORAGE, "cols": "i32"},
        {**usage(), "BC": 32},
    )
    tile = {"BR": 32, "BC": 64}
    jobs["mxfp4 quantize"] = job(
        "mxfp4._quantize_kernel",
        {"x_ptr": "*bf16", "data": "*u8", "scales": "*u8", "cols": "i32", "tiles_per_row": "i32"},
        {"ROUNDING": 0x200000, **tile},
    )
    jobs["mxfp4 dequantize"] = job(
        "mxfp4._dequantize_kernel",
        {
            "data_ptr": "*u8",
            "scale_ptr": "*u8",
            "out_ptr": "*bf16",
            "cols": "i32",
            "tiles_per_row": "i32",
            "stride_scale_row": "i32",
        },
        tile,
    )
    jobs["mxfp8 dequantize"] = job(
        "mxfp8._dequantize_kernel",
        {
            "data_ptr": "*u8",
            "scale_ptr": "*u8",
            "out_ptr": "*bf16",
            "cols": "i32",
            "stride_scale_row": "i32",
        },
        {"BLOCK_ROWS": 1, "BLOCK_COLS": 32, "BR": 32, "BC": 32},
    )
    fp32_scales = {**STORAGE, "rowwise_scale": "*fp32", "columnwise_scale": "*fp32"}
    for square in (True, False):
        jobs[f"float8block quantize square={square}"] = job(
            "float8_block._quantize_kernel",
            {"x_ptr": "*bf16", **fp32_scales, **sizes, "epsilon": "fp32"},
            {"LARGEST": FP32_MAX, "POW_2": True, **BOTH, "SQUARE": square},
            num_warps=4 if square else 8,
            maxnreg=float8_block.QUANTIZE_REGISTERS[square],
        )
    jobs["float8block dequantize"] = job(
        "float8_block._dequantize_kernel",
        {"data_ptr": "*u8", "scale_ptr": "*fp32", "out_ptr": "*bf16", **sizes, **strides},
        {"SQUARE": True, "BR": 32},
    )
    words = {"n_words": "i32", "words_per_row": "i32", "stride_scale_row": "i32"}
    parts = {"rows_per_part": "i32", "data_gap": "i32", "scale_part": "i32"}
    types = {"data_ptr": "*u8", "scale_ptr": "*u8", "out_ptr": "*bf16"}
    amax = {"data_ptr": "*u8", "scale_ptr": "*u8", "amax_ptr": "*fp32", "out_ptr": "*bf16"}
    fp32 = {**types, "scale_ptr": "*fp32"}
    float8_words = {name: kind for name, kind in {**amax, **words}.items() if "scale" not in name}
    for name, signature, options in (
        ("nvfp4", {**amax, **words}, {"SQUARE": True, "BOUND": 448}),
        ("mxfp8", {**types, **words}, {"BLOCK_ROWS": 1, "BLOCK_COLS": 32}),
        ("mxfp4", {**types, **words}, {}),
        ("float8_block", {**fp32, **words, "stride_scale_col": "i32"}, {"SQUARE": True}),
        ("float8", float8_words, {"EPSILON": 0.0, "POW_2": True}),
    ):
        for parted in (False, True):
            jobs[f"dequantize words {name} parted={parted}"] = job(
                f"{name}._dequantize_words_kernel",
                {**signature, **parts},
                {**options, "PARTED": parted, "N": WORDS},
            )
    for x, columnwise, padded in itertools.product(("bf16", "fp32"), (True, False), (True, False)):
        jobs[f"quantize vectors {x} columnwise={columnwise} padded={padded}"] = job(
            "float8_block._quantize_vectors_kernel",
            {"x_ptr": f"*{x}", **fp32_scales, "x_rows": "i32", **sizes, "epsilon": "fp32"},
            {
                "LARGEST": FP32_MAX,
                "POW_2": True,
                "ROWWISE": True,
                "COLUMNWISE": columnwise,
                "PADDED": padded,
            },
            num_warps=float8_block.VECTORS_WARPS[columnwise],
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
        *(pytest.param(sm, "", marks=pytest.mark.exhaustive) for sm in CAPABILITIES),
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
    wide += [f"partial {name} codes fp32 whole=True" for name in ("mxfp8", "float8block")]
    wide += [name for name in jobs if name.startswith("fake quantize")]
    # In one direction a thread has four codes of a row, and neighbours have the next.
    wide += [name for name in jobs if re.match("quantize vectors .*columnwise=True", name)]
    wide += [name for name in jobs if re.match(r"whole \w+ bf16 (columnwise=True|128$)", name)]
    assert set(wide) <= set(compiled)
    for name, each in compiled.items():
        if name.startswith("dequantize words"):
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
        pytest.param(86, LAUNCHED_MOST, marks=pytest.mark.exhaustive),
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
