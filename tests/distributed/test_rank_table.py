"""Format x cut, whole and empty shards x states x calls: the bits of one process on any ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from late_link import LateLink, offload_to
from ranks import NIGHTLY, by_world_size, run, run_cases, use_kernels
from twins import FORMATS, TRANSFERS, Twin, run_calls

STEPS = ["step", "freeze", "clip", "step"]
WRITES = ["overwrite", "gather", "fill", "overwrite_parts", "step", "load_values", "step"]
ALL = ["gather", *STEPS, *WRITES, "overwrite_elsewhere", "step", "move", "reload", "gather"]
ALL += ["overwrite", "reload", "move", "step"]
ALL += ["load_whole", "step", "back", "step", "poison", "step"]
# What optimizers of other kinds do not offer; bytes that do not follow from values alone.
LEFT_OUT = {"any optimizer": ("clip", "overwrite_elsewhere", "compact")}
OF_VALUES = ("load_whole", "full", "from rank 0", "whole, from rank 0")
LEFT_OUT |= {"delayed": OF_VALUES, "8bit": (*OF_VALUES, "write_states")}
LEFT_OUT |= {"zero": ("write_states",), "int8": ("load_whole",)}
LEFT_OUT |= {"factored": (*LEFT_OUT["8bit"], "flattened")}
if torch.cuda.device_count() > 1:  # torch takes whole states only for states on one device
    LEFT_OUT |= {"offloaded": ("load_whole", "whole, from rank 0")}
TRAIN = ["train", "gather", "train", "write_states", "train", "train"]
RESUME = ["step", *(call for each in TRANSFERS for call in (each, "step")), "compact", "step"]
RESUME += ["load_values", "as it is", "step", *["model_last", "step"] * 2, "other_model", "step"]
BRIEF = ["step", "gather", "load_values", "step"]


def run_case(
    rank: int,
    layout: str,
    recipe: str,
    rows: int,
    cols: int,
    states: str = "",
    calls: list[str] = ALL,
    **options: Any,
) -> None:
    where = f"{layout}, {recipe} [{rows}, {cols}], {states}"
    keys = recipe, *states.split(", "), *layout.split(", ")
    left_out = {call for key in keys for call in LEFT_OUT.get(key, ())}
    calls = [call for call in calls if call not in left_out]
    with offload_to(LateLink(), 12 * 16 * 32):
        run_calls(Twin(layout, recipe, rows, cols, states, **options), calls, where)


def run_by_kernels(rank: int, *case: Any) -> None:
    """The kernels of a GPU, in Triton's interpreter on a CPU."""
    use_kernels()
    run_case(rank, *case, calls=BRIEF)


def run_transfers(rank: int, *case: Any) -> None:
    plain = ["rounded_weights"] if len(case) == 4 else []
    run_case(rank, *case, calls=RESUME + plain)


def run_training(rank: int, *case: Any) -> None:
    run_case(rank, *case, calls=TRAIN, dtype=torch.float32)


# The number of ranks, layout, format, shape of the first weight, states. On three ranks boundaries
# cut blocks of 64 rows, on two those of 288 in Float8Block. Every other row is quick.
ROWS = [
    (1, "root", "nvfp4", 64, 32),
    *((2, "root", recipe, 256, 64) for recipe in FORMATS[:3]),  # whole blocks
    *((3, "root", recipe, 64, 32) for recipe in FORMATS),
    (2, "sharded", "float8block", 288, 64),
    (3, "root", "float8", 37, 20),  # 13, 13 and 11 rows
    (6, "root", "float8block", 7, 16),  # two rows each on three ranks, one on the fourth
    (5, "root", "nvfp4", 16, 16),  # four rows each on four of five ranks
    (2, "root", "delayed", 256, 32),  # the history has the amaxes of the whole weight
    (3, "root", "delayed", 64, 32),
    *((2, "root", "nvfp4", 64, 32, states) for states in ("from dtype", "fp8", "bf16", "8bit")),
    *((2, "root", "float8block", 64, 32, states) for states in ("fp16 masters", "amsgrad")),
    (3, "root", "nvfp4", 64, 32, "factored"),  # from sums over two rows, and over one
    (6, "root", "float8block", 7, 32, "factored"),
    (3, "root", "float8block", 64, 32, "no masters"),
    *((3, "root", recipe, 64, 32, "any optimizer") for recipe in ("nvfp4", "float8block")),
    (5, "root", "float8block", 5, 16, "any optimizer"),
    (3, "root", "nvfp4", 64, 32, "offloaded"),
    (2, "root", "nvfp4-gemm", 64, 32),
    (4, "hybrid", "nvfp4", 64, 32),
    *((2, "parallel", recipe, 256, 64) for recipe in (*FORMATS[:3], "mxfp4")),
    (4, "parallel", "nvfp4", 64, 32),
    (4, "parallel", "nvfp4", 64, 16),  # its parts are cut by FSDP2
]
MORE_ROWS = [
    *((3, "root", "mxfp8", rows, cols) for rows, cols in ((96, 64), (288, 64))),
    *((2, "root", recipe, 288, 64) for recipe in FORMATS),
    *((2, "root", recipe, 64, 32, s) for recipe in FORMATS[1:] for s in ("from dtype", "int8")),
    *((2, "root", recipe, 64, 32, s) for recipe in FORMATS[1::2] for s in ("amsgrad", "fp8")),
    *((3, "root", recipe, 64, 32, "any optimizer") for recipe in ("mxfp8", "float8")),
    *((n, "parallel", recipe, 256, 64) for n in (2, 4) for recipe in ("float8", "mxfp8-rowwise")),
    *((4, "parallel", r, 256, 64) for r in ("nvfp4-rowwise", "nvfp4-gemm", "mxfp8-gemm")),
    *((4, "parallel", r, 256, 64) for r in ("float8block", "float8block-fp32")),
]


KERNELS = [
    (3, "root", "nvfp4", 64, 32),
    (2, "root", "mxfp8", 64, 32),
    (2, "root", "float8block", 256, 32),
    (3, "root", "float8block", 64, 32),  # quantized after the exchange
    (2, "root", "float8", 31, 16),  # kernels step 16 rows, operators 15
    (2, "root", "delayed", 31, 16),
    *((n, "root", "nvfp4", 64, 32, "factored") for n in (2, 3)),
    (2, "root", "mxfp8", 64, 32, "no masters"),
    (2, "parallel", "nvfp4", 64, 32, "l2"),
]
MORE_KERNELS = [
    *((3, "root", recipe, 64, 32) for recipe in ("mxfp8", "float8", "delayed")),
    *((3, "root", recipe, 64, 32, "any optimizer") for recipe in FORMATS),
    (2, "root", "delayed", 256, 32),
    *((2, "root", "float8block", 256, 32, states) for states in ("int8", "no masters")),
    *((4, "parallel", recipe, 64, 64) for recipe in ("nvfp4-gemm", "mxfp8")),
]


VARIANTS = ["", ", kept", ", meta", ", offloaded", ", bfloat16"]
MORE_VARIANTS = [", prefetched", ", recomputed"]
TRAINED = [
    *((2, f"sharded{variant}", "mxfp8", 256, 32) for variant in VARIANTS),
    *((2, f"sharded{variant}", "float8block", 48, 32) for variant in VARIANTS),  # cut blocks
    *((4, "hybrid", r, 64, 32, s) for r in ("nvfp4", "float8block") for s in ("", "factored")),
    *((2, "replicated", recipe, 64, 32) for recipe in ("nvfp4-gemm", "mxfp8-gemm", "float8")),
    *((2, "sharded", recipe, 64, 32) for recipe in ("nvfp4-gemm", "mxfp8-gemm")),
    *((2, "ddp", recipe, 64, 32) for recipe in FORMATS),
    (2, "ddp", None, 64, 32),
    *((2, f"ddp, {variant}", "nvfp4", 64, 32) for variant in ("static", "views", "zero")),
    *((2, layout, "nvfp4", 64, 32, "8bit") for layout in ("ddp", "replicated")),
    *((4, layout, "mxfp8", 64, 32) for layout in ("ddp, zero", "replicated")),
    *((2, "sharded", f"{recipe}, codes", 256, 128) for recipe in FORMATS),
    (2, "sharded", "nvfp4, fake", 256, 128),
    (2, "root, grouped", "nvfp4", 64, 32, "released, 8bit"),
    (2, "sharded, kept", "nvfp4", 64, 32, "released"),
    *((2, "root", recipe, 48, 32, "released") for recipe in ("nvfp4", "float8block")),
    (2, "root, grouped", "nvfp4", 64, 32, "offloaded"),
    (2, "sharded", "nvfp4", 64, 32, "offloaded, released, factored"),
    *((2, layout, "mxfp4", 64, 32) for layout in ("ddp", "sharded")),
]
MORE_TRAINED = [
    *((2, f"sharded{v}", r, 256, 32) for r in ("float8block", "mxfp8") for v in MORE_VARIANTS),
    *((2, f"sharded{v}", r, 256, 32) for r in FORMATS[::3] for v in VARIANTS + MORE_VARIANTS),
    *((4, f"hybrid{v}", "nvfp4", 256, 32) for v in MORE_VARIANTS),
]


# The functions of torch.distributed.checkpoint.state_dict, and those of models and optimizers.
RESUMED = [
    (3, "root", "nvfp4", 64, 32),
    (3, "root", "float8block-fp32", 5, 16),
    *((2, "root", "nvfp4", 64, 32, s) for s in ("factored", "fp8", "offloaded", "16-bit rest")),
    *((2, "root", "mxfp8", 64, 32, s) for s in ("no masters", "bf16", "fp16 masters")),
    (2, "root", "mxfp4", 64, 32),
    (2, "parallel", "nvfp4", 256, 64),
]
MORE_RESUMED = [
    (4, "hybrid", "nvfp4", 64, 32),
    (4, "parallel", "nvfp4", 64, 32),
    *((3, "root", recipe, 64, 32) for recipe in FORMATS[1:]),
    *((2, "parallel", recipe, 256, 64) for recipe in FORMATS[1:]),
    *((2, "root", "float8block", 64, 32, s) for s in ("8bit", "fp8", "fp16 masters")),
    (2, "root", "float8block", 64, 32, "any optimizer"),
]


@pytest.mark.table
@pytest.mark.parametrize(
    "function, world_size, cases",
    [
        *by_world_size(run_case, ROWS, MORE_ROWS),
        *by_world_size(run_by_kernels, KERNELS, MORE_KERNELS, is_slow=True),
        *by_world_size(run_training, TRAINED, MORE_TRAINED),
        *by_world_size(run_transfers, RESUMED, MORE_RESUMED),
    ],
)
def test_ranks_have_the_bits_of_one_process(
    function: Callable[..., None], world_size: int, cases: list[tuple]
) -> None:
    run_cases(function, world_size, cases)


# Random programs

seeds = st.integers(0, 100)
calls = st.sampled_from(
    ["step", "step", "freeze", "overwrite", "overwrite_parts", "fill", "load_values", "move"]
    + ["reload", "gather"]
)
programs = st.tuples(
    st.sampled_from([*FORMATS, "delayed"]),
    st.booleans(),
    st.sampled_from([64, 48, 96]),
    st.lists(st.tuples(calls, seeds), min_size=2, max_size=6),
)


def run_programs(rank: int, drawn: list[tuple]) -> None:
    for recipe, grouped, rows, program in drawn:
        layout = "root, grouped" if grouped and recipe in ("nvfp4", "float8") else "root"
        twin = Twin(layout, recipe, rows, 32)
        run_calls(twin, [*program, ("step", 1), ("step", 2)], f"{layout}, {recipe}, {rows} rows")


# A step without a gradient leaves weights as others have written them: those of a scale group with
# amaxes of their own, and the history of delayed scaling.
NO_GRADIENTS = [
    (recipe, True, 64, [("step", 0), (how, seed), ("freeze", seed + 1), ("freeze", seed)])
    for recipe in ("nvfp4", "float8", "delayed")
    for how, seed in (("overwrite", 2), ("load_values", 0), ("overwrite", 3))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size, examples", [(2, 1), (3, 2), *(pytest.param(n, 8, marks=NIGHTLY) for n in (2, 3))]
)
def test_random_programs(world_size: int, examples: int) -> None:
    """Each example starts ranks once and runs some programs there."""

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @given(drawn=st.lists(programs, min_size=6, max_size=6))
    def check(drawn: list[tuple]) -> None:
        run(run_programs, world_size, [*NO_GRADIENTS, *drawn], timeout=300.0)

    check()
