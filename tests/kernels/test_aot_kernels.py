"""What the package's kernels compile to: no spills, exact arithmetic, wide accesses."""

import importlib.metadata
import itertools
import re

import pytest

from aot import INEXACT, compile_ahead_of_time, count

CAPABILITIES = (90, 100, 120)
# What one capability compiles in the quick run, and what the others compile in the exhaustive one;
# `make test-kernels` compiles all for each of them.
LAUNCHED_MOST = (
    r"adam (fp32|bf16 with master)$|amax preview again=False$|(nvfp4|mxfp8) step .*swizzled=\w+$"
    r"|mxfp4 step|float8 (step|delayed step|delayed amax)$"
    r"|float8block \w+ masked=False$"
    r"|(nvfp4|mxfp8) step .* FP8 states, (FP16|int8|no) masters$"
    r"|partial \w+ codes fp32 whole=True|step scalars|dequantize words nvfp4"
    r"|whole \w+ bf16 (columnwise=True masked=False|128)$"
    r"|quantize vectors bf16 columnwise=True padded=True|fake quantize"
)
# All but the states that are chosen one by one, not by `states=`.
BY_WORD = r"(?!.*(BF16 states, int8|(?<!states,) int8| FP16 states and) masters$)"
EVERY = (pytest.mark.exhaustive, pytest.mark.every_kernel)
# Those that need most registers.
LARGEST = r"|.*(recorded|masked=True).* int8 masters$"
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
# Of masters and moments, with what tells the names of the kernels apart.
STATE_CODECS = {
    ("plain", "float32", "float32"): "",
    ("plain", "bfloat16", "bfloat16"): " BF16 states",
    ("float16", "float16", "ue5m11"): " FP16 states and masters",
    ("plain", "e4m3", "ue4m4"): " FP8 states",
    ("float16", "e4m3", "ue4m4"): " FP8 states, FP16 masters",
    ("int8", "e4m3", "ue4m4"): " FP8 states, int8 masters",
    ("int8", "float32", "float32"): " int8 masters",
    ("int8", "bfloat16", "bfloat16"): " BF16 states, int8 masters",
    ("codes", "e4m3", "ue4m4"): " FP8 states, no masters",
    ("codes", "float32", "float32"): " no masters",
}
PLAIN, *_, WIDEST = [codecs for codecs in STATE_CODECS if codecs[0] not in ("int8", "codes")]
# The formats that can be trained without masters.
WITHOUT_MASTERS = ("mxfp8", "float8block")
FP32_MAX = 3.4028234663852886e38
PLAIN_SCALES = {"ADAPTIVE": None, "BOUND": 448}
ADAPTIVE = {"ADAPTIVE": "mse", "BOUND": 256}


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


def variant(codecs, grad="bf16", value=None, write="fp32", is_updated=False, records=False):
    dtypes = (None if name is None else dtype(name) for name in (grad, value, write))
    fields = [*dtypes, *codecs, True, False, is_updated, records]
    return {"VARIANT": {"tuple": VARIANT, "fields": fields}}


def usage(square=False, swizzled=False, adaptive=None, records=False):
    """Both directions."""
    scales = [adaptive, 256 if adaptive else 448]
    return {"USAGE": {"tuple": USAGE, "fields": [True, True, square, swizzled, *scales, records]}}


def tile_options(tile):
    return {"BR": tile.rows, "BC": tile.cols, "STAGES": tile.num_stages}


def step_jobs(codecs, sm):
    """The kernels of a step, with the states in some codecs."""
    import triton.language as tl

    from fp4adam.kernels import (
        amax_preview,
        float8_block_step,
        float8_step,
        mxfp4_step,
        mxfp8_step,
        nvfp4_step,
        plain_step,
    )
    from fp4adam.kernels.adam import Variant
    from fp4adam.kernels.launch.tensor_table import Usage
    from fp4adam.kernels.tiles.state import (
        are_narrow,
        has_scales,
        max_registers,
        starts_from_codes,
    )

    jobs = {}
    scaled = has_scales(*codecs)
    completes = starts_from_codes(codecs[0])
    registers = max_registers(*codecs)
    # Of scales in one order or in two; where states need registers as well, of two.
    is_wide = codecs != PLAIN
    orders = {"step": {is_wide, True}, "edge": {is_wide}}
    with_master = ("bf16", "fp16" if has_scales(codecs[0]) else "fp32", "bf16", codecs[0])
    for name, grad, value, param, codec in (
        ("fp32", "fp32", "fp32", None, "plain"),
        ("bf16 with master", *with_master),
        ("bf16 recorded", *with_master),
        ("bf16 with remainder", "bf16", "bf16", None, "remainder"),
        ("fp16 without master", "fp16", "fp16", None, "plain"),
        ("of a master", "bf16", None, None, codecs[0]),
    ):
        if completes:
            continue  # only of quantized weights
        records = "recorded" in name
        options = variant((codec, *codecs[1:]), grad, value, param, records=records)
        jobs[f"adam {name}"] = job(
            "plain_step._block_kernel",
            TABLES,
            {**options, "BLOCK": plain_step.BLOCK},
            maxnreg=max_registers(codec, *codecs[1:]),
        )
        if are_narrow(codec, *codecs[1:]):
            sizes = dict(zip(("BR", "LOOP", "STAGES"), plain_step.LOOP_TILE, strict=True))
            jobs[f"adam {name} loop"] = job(
                "plain_step._loop_kernel",
                TABLES,
                {**options, **sizes},
                maxnreg=plain_step.loop_registers((codec, *codecs[1:]), sm),
            )

    measured = ("tile_ratios", "stored_amaxes")
    names = ("amaxes", "next_amaxes", "tile_amaxes", "exceeding", *measured)
    slots = {**TABLES, "slots": "*i32"}
    amaxes = {**slots, **dict.fromkeys(names, "*fp32")}
    known = ("tile_amaxes", "old_amaxes", "amaxes", "exceeding", *measured)
    known = dict.fromkeys(known, "*fp32")
    br, bc = amax_preview.COMPLETED_PART[scaled] if completes else amax_preview.PART
    for again, of_nvfp4 in itertools.product(
        (False, True), (True, False) if completes else (None,)
    ):
        form = {"USAGE": None, "SCALES_BLOCKS": None, "POW_2": None}
        if completes:
            form = {**usage(True), "SCALES_BLOCKS": of_nvfp4, "POW_2": False}
        name = "" if of_nvfp4 is None else f" nvfp4={of_nvfp4}"
        jobs[f"amax preview again={again}{name}"] = job(
            "amax_preview._amax_preview_kernel",
            {**slots, **known, "n_tiles": "i32", "epsilon": "fp32"},
            {
                **variant(codecs),
                "AGAIN": again,
                **form,
                "SCAN": amax_preview.SCAN,
                "BR": br,
                "BC": bc,
            },
            maxnreg=registers,
        )
    # States with scales are updated before, which leaves a pass the scales of masters alone; but
    # masters with remainders exist only in the pass.
    is_updated = scaled and not completes
    codecs_now = (codecs[0], "float32", "float32") if is_updated else codecs
    registers = max_registers(*codecs_now)
    options_now = variant(codecs_now, is_updated=is_updated)
    grad = DTYPES["bf16"]
    variant_now = Variant(getattr(tl, grad), None, None, *codecs_now, True, False, is_updated)
    for square in (True, False):
        adaptive = Usage(True, True, square, adaptive="mse")
        plain = Usage(True, True, square)
        own_tiles = nvfp4_step.step_forms(variant_now, adaptive)
        for at, (size, tile) in enumerate(
            zip(("step", "edge"), nvfp4_step.step_forms(variant_now, plain), strict=True)
        ):
            shape = {"LOOP": tile.loop, **tile_options(tile)}
            for swizzled in orders[size]:
                jobs[f"nvfp4 {size} square={square} swizzled={swizzled}"] = job(
                    "nvfp4_step._adam_step_kernel",
                    amaxes,
                    {**options_now, **usage(square, swizzled), **shape},
                    num_warps=tile.num_warps,
                    maxnreg=nvfp4_step.step_registers(codecs_now, plain, sm)[at],
                )
                recording = plain._replace(records=True)
                jobs[f"nvfp4 {size} square={square} swizzled={swizzled}, recorded"] = job(
                    "nvfp4_step._adam_step_kernel",
                    amaxes,
                    {**options_now, **usage(square, swizzled, records=True), **shape},
                    num_warps=tile.num_warps,
                    maxnreg=nvfp4_step.step_registers(codecs_now, recording, sm)[at],
                )
                # These take longest to compile: all states for one capability, for others the ends.
                if sm != CAPABILITIES[0] and codecs not in (PLAIN, WIDEST):
                    continue
                own = own_tiles[at]
                jobs[f"nvfp4 adaptive {size} square={square} swizzled={swizzled}"] = job(
                    "nvfp4_step._adam_step_kernel",
                    amaxes,
                    {
                        **options_now,
                        **usage(square, swizzled, "mse"),
                        "LOOP": own.loop,
                        **tile_options(own),
                    },
                    num_warps=own.num_warps,
                    maxnreg=nvfp4_step.step_registers(codecs_now, adaptive, sm)[at],
                )
    for size, tile, part, most in (
        (
            "step",
            mxfp8_step.STEP_TILE,
            mxfp8_step.step_part(variant_now),
            mxfp8_step.step_registers(codecs_now),
        ),
        ("edge", mxfp8_step.EDGE_TILE, mxfp8_step.EDGE_PART, mxfp8_step.EDGE_REGISTERS),
    ):
        shape = {"PART": part, "BC": tile.cols, "STAGES": tile.num_stages}
        for swizzled in orders[size]:
            jobs[f"mxfp8 {size} swizzled={swizzled}"] = job(
                "mxfp8_step._adam_step_kernel",
                TABLES,
                {**options_now, **usage(swizzled=swizzled), **shape},
                num_warps=tile.num_warps,
                maxnreg=most,
            )
        jobs[f"mxfp8 {size} recorded"] = job(
            "mxfp8_step._adam_step_kernel",
            TABLES,
            {**options_now, **usage(swizzled=True, records=True), **shape},
            num_warps=tile.num_warps,
            maxnreg=255 if size == "step" else most,
        )
        jobs[f"mxfp8 {size} of squares"] = job(
            "mxfp8_step._adam_step_kernel",
            TABLES,
            {**options_now, **usage(True, swizzled=True), **shape},
            num_warps=tile.num_warps,
            maxnreg=most,
        )
    for size, tile in (("step", mxfp4_step.STEP_TILE), ("edge", mxfp4_step.EDGE_TILE)):
        for records in (False, True):
            jobs[f"mxfp4 {size}{', recorded' * records}"] = job(
                "mxfp4_step._adam_step_kernel",
                TABLES,
                {**options_now, "ROUNDING": 0x200000, "RECORDS": records, "BC": tile.cols},
                num_warps=tile.num_warps,
                maxnreg=mxfp4_step.step_registers(records),
            )
    for size, tile in (
        ("step", float8_step.STEP_TILE),
        ("edge", float8_step.EDGE_TILE[scaled]),
    ):
        shape = {**usage(), "LOOP": tile.loop, **tile_options(tile)}
        options = dict(num_warps=tile.num_warps, maxnreg=registers)
        jobs[f"float8 {size}"] = job(
            "float8_step._current_step_kernel",
            {**amaxes, "epsilon": "fp32"},
            {**options_now, "POW_2": False, **shape},
            **options,
        )
        jobs[f"float8 delayed {size}"] = job(
            "float8_step._delayed_step_kernel",
            {**TABLES, "stored_amaxes": "*fp32"},
            {**options_now, **shape},
            **options,
        )
    if not is_wide:
        jobs["float8 delayed amax"] = job(
            "float8_step._delayed_amax_kernel",
            {
                **dict.fromkeys(SIGNALS, "*fp32"),
                "table": "*i64",
                "stored_amaxes": "*fp32",
                "factor": "fp32",
            },
            {"IS_MAX": True, "LENGTH": 1000, "BLOCK": 1024},
        )
    epsilon = {**TABLES, "epsilon": "fp32"}
    for shape, square, records in (
        ("square", True, False),
        ("square", True, True),
        ("vector", False, False),
        ("vector", False, True),
    ):
        forms = float8_block_step.step_forms(square, codecs_now, records, sm)
        for masked, (kernel, constexprs, tile, limit) in zip((False, True), forms, strict=True):
            extra = {"LARGEST": FP32_MAX, "POW_2": True, **constexprs, **tile_options(tile)}
            jobs[f"float8block {shape} masked={masked}{', recorded' * records}"] = job(
                f"float8_block_step.{kernel.__name__}",
                epsilon,
                {**options_now, **usage(square, records=records), **extra},
                num_warps=tile.num_warps,
                maxnreg=limit,
            )
    if codecs[0] == "codes":
        jobs = {name: found for name, found in jobs.items() if name.startswith(WITHOUT_MASTERS)}
    return {f"{name}{STATE_CODECS[codecs]}": found for name, found in jobs.items()}


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
            ("nvfp4 adaptive codes", "nvfp4_codes", {}, {"BC": nvfp4.cols, **ADAPTIVE}),
            ("nvfp4 adaptive choices", "nvfp4_choices", {}, {"BC": nvfp4.cols, **ADAPTIVE}),
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
    jobs["partial nvfp4 adaptive scales"] = job(
        "partial_cast._scales_kernel",
        {"table": "*i64", "chunks": "*i32", **epsilon},
        {**block, **ADAPTIVE, "FORMAT": "nvfp4", "ROUNDING": 0, "CHUNK": SCALES},
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
        jobs |= step_jobs(codecs, sm)
    jobs |= shard_jobs()
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
    for name, square, scales_blocks, adaptive in (
        ("nvfp4 square=True", True, True, None),
        ("nvfp4 square=False", False, True, None),
        ("nvfp4 adaptive square=True", True, True, "mse"),
        ("nvfp4 adaptive square=False", False, True, "mse"),
        ("float8", False, False, None),
    ):
        for codec, width in (("plain", 16), ("float16", 32)):
            jobs[f"requantize {name} {codec}"] = job(
                "amax_preview._requantize_kernel",
                {
                    "table": "*i64",
                    "tiles": "*i32",
                    "slots": "*i32",
                    "amaxes": "*fp32",
                    "exceeding": "*fp32",
                    "n_tiles": "i32",
                    "n_slots": "i32",
                    "epsilon": "fp32",
                },
                {
                    "WRITE_DTYPE": dtype("fp32"),
                    "VALUE_CODEC": codec,
                    **usage(square, scales_blocks, adaptive),
                    "SCALES_BLOCKS": scales_blocks,
                    "POW_2": False,
                    "BC": width,
                },
                num_warps=1 if adaptive is None else 4,
            )
    for undo in (False, True):
        jobs[f"swizzle undo={undo}"] = job(
            "swizzle._swizzle_kernel",
            {"table": "*i64", "tiles": "*i32"},
            {"UNDO": undo, **dict(zip(("BR", "BC"), swizzle.TILE, strict=True))},
        )
    sizes = {"rows": "i32", "cols": "i32"}
    tile64 = {"BR": 64, "BC": 64}
    adaptive_tile = dict(zip(("BR", "BC"), nvfp4.QUANTIZE_TILE[True], strict=True))
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
        jobs[f"nvfp4 adaptive quantize square={square}"] = job(
            "nvfp4._quantize_kernel",
            {"x_ptr": "*bf16", **STORAGE, "amax_ptr": "*fp32", **sizes, "tiles_per_row": "i32"},
            {**usage(square, adaptive="mse"), **adaptive_tile},
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
        pytest.param(90, BY_WORD, marks=pytest.mark.exhaustive),
        pytest.param(100, LAUNCHED_MOST + LARGEST, marks=pytest.mark.exhaustive),
        pytest.param(120, LAUNCHED_MOST + LARGEST, marks=pytest.mark.exhaustive),
        *(pytest.param(sm, "", marks=EVERY) for sm in CAPABILITIES),
    ],
    ids=["90-launched most", "90-by word", "100-launched most", "120-launched most"]
    + [*map(str, CAPABILITIES)],
)
def test_kernels_compile_to_exact_and_wide_code_without_spills(sm, forms):
    pytest.importorskip("triton", reason="nothing can be compiled without Triton")
    jobs = {name: each for name, each in kernel_jobs(sm).items() if re.match(forms, name)}
    facts = compile_ahead_of_time([{**each, "sm": sm} for each in jobs.values()])
    compiled = dict(zip(jobs, facts, strict=True))

    spilled = {name: each["spilled_bytes"] for name, each in compiled.items()}
    assert not {name: n for name, n in spilled.items() if n > most_spilled()}
    # Adaptive scales take three operations for a division, which give the same bits.
    inexact = {
        name: count(each, INEXACT.removeprefix("^fma|") if " adaptive " in name else INEXACT)
        for name, each in compiled.items()
    }
    assert not any(inexact.values()), {name: n for name, n in inexact.items() if n}

    scalars = compiled["step scalars"]
    assert count(scalars, r"^div\.rn\.f64") and count(scalars, r"^sqrt\.rn\.f64")

    loads = r"^ld\.global\.v4|^ld\.global\.v2\.b64|^cp\.async\.cg"
    wide = ["adam fp32", "adam bf16 with master", "float8 step", "float8 delayed step"]
    for swizzled in (False, True):
        wide += [f"{name} swizzled={swizzled}" for name in ("nvfp4 step square=True", "mxfp8 step")]
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
    for name, each in compiled.items():
        if name.startswith("grad norm"):
            assert count(each, loads) > 0, name
            # Half the warps that a multiprocessor can hold keep enough bytes in flight.
            assert each["registers"] <= 64, name


# Architectures on which kernels are compiled alone, and the shared memory that a program may have.
SHARED_BYTES = {75: 64 * 1024, 80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024}
# What ptxas spills there at most, in bytes per thread, written and read. Nothing on 7.5.
A_LITTLE = {
    "nvfp4 step square=True swizzled=True, recorded FP8 states, int8 masters": 24,
    "mxfp8 step recorded FP8 states, int8 masters": 16,
    "mxfp8 step swizzled=True FP8 states, int8 masters": 16,
    "quantize vectors bf16 columnwise=True padded=True": 16,
}
SPILLED = dict.fromkeys((80, 86, 89), A_LITTLE)
# One kernel of each kind, in the quick run.
ONE_OF_EACH = r"adam bf16 with master$|(nvfp4|mxfp8) step .*swizzled=False$|float8 step$"


@pytest.mark.parametrize(
    "sm, forms",
    [
        (75, ONE_OF_EACH),
        pytest.param(86, LAUNCHED_MOST, marks=pytest.mark.exhaustive),
        *(pytest.param(sm, LAUNCHED_MOST, marks=EVERY) for sm in (75, 80, 89)),
    ],
    ids=["75-one of each", "86", "75", "80", "89"],
)
def test_kernels_compile_for_older_gpus(sm, forms):
    pytest.importorskip("triton", reason="nothing can be compiled without Triton")
    jobs = {name: each for name, each in kernel_jobs(sm).items() if re.match(forms, name)}
    facts = compile_ahead_of_time([{**each, "sm": sm} for each in jobs.values()])
    compiled = dict(zip(jobs, facts, strict=True))
    spilled = {name: each["spilled_bytes"] for name, each in compiled.items()}
    known = SPILLED.get(sm, {})
    assert not {n for n in spilled if spilled[n] > max(known.get(n, 0), most_spilled())}
    inexact = {
        name: count(each, INEXACT.removeprefix("^fma|") if " adaptive " in name else INEXACT)
        for name, each in compiled.items()
    }
    assert not any(inexact.values()), {name: n for name, n in inexact.items() if n}
    shared = {name: each["shared_bytes"] for name, each in compiled.items()}
    assert max(shared.values()) <= SHARED_BYTES[sm], shared
