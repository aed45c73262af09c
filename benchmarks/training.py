"""Whole training steps of a GPT on one device: time, memory, and where the GPU's time goes.

    python benchmarks/training.py [--size 1b] [--compile] [--json training.json]
    python benchmarks/training.py --layers 5 --dim 4096 --heads 32

An optimizer that cannot run here says why in its row. With --json, the file is written anew after
every row; training_report.py makes tables of it. README.md explains what is measured and how.
"""

import argparse
import collections
import gc
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import engine
import torch
import torch.nn.functional as F
from gpt_training import PRESETS, Batch, Contestant, Training, build_model, gpt_config
from kernel_kinds import KINDS, kind_of
from provenance import about
from report import versions_of
from roofline import predicted_ms
from step import Clock, gpu_events, measure_all, stored_bytes
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from training_report import COLUMNS, title

from fp4adam import FP4Adam, FusedAdam, Recipe
from fp4adam.nn import operand

Row = dict[str, Any]

FORMATS = {"NVFP4": "nvfp4", "MXFP8": "mxfp8", "Float8Block": "float8block"}
# Torchao's recipes for float8 training; the last multiplies gradients of weights in BF16.
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
CONTESTANTS = (
    Contestant("torch AdamW fused, FP32, BF16 autocast", torch.optim.AdamW, dtype=torch.float32),
    Contestant("torch AdamW fused, BF16 (no masters)", torch.optim.AdamW),
    Contestant("FusedAdam, BF16 + FP32 masters", FusedAdam),
    *(Contestant(f"FP4Adam, {name}", FP4Adam, recipe) for name, recipe in FORMATS.items()),
    Contestant("FusedAdam, BF16 + FP32 masters, released", FusedAdam, releases=True),
    Contestant("FP4Adam, NVFP4, released", FP4Adam, "nvfp4", releases=True),
    *(
        Contestant(
            f"FP4Adam, {name}, quantized matmuls",
            FP4Adam,
            Recipe(recipe, activations=True, gradients=True),
        )
        for name, recipe in (FORMATS | {"Float8": "float8"}).items()
    ),
    *(Contestant(f"FusedAdam, torchao float8 {name}", FusedAdam, torchao=name) for name in TORCHAO),
    *(
        Contestant(f"{optimizer}, TE's layers, {name}", make, engine=name)
        for name in engine.RECIPES
        for optimizer, make in (("TE FusedAdam", engine.adam), ("FP4Adam", FP4Adam))
    ),
)


def kernel_times(fn: Callable[[], Any]) -> collections.Counter[str]:
    """Milliseconds of the GPU that ``fn`` takes, by kernel."""
    times: collections.Counter[str] = collections.Counter()
    for event in gpu_events(fn):
        times[event.name] += event.time_range.elapsed_us() / 1e3
    return times


def gpu_times(training: Training, batches: list[Batch]) -> Row:
    """Milliseconds of the GPU in one step, and shares of them.

    All that the optimizer launches counts as optimizer, whatever its name.
    """
    passes = kernel_times(lambda: training.accumulate(*batches))
    optimizer = kernel_times(training.update).total()
    total = passes.total() + optimizer
    shares = dict.fromkeys(KINDS, 0.0)
    for name, ms in passes.items():
        shares[kind_of(name)] += ms / total
    return {
        "gpu_ms": total,
        "optimizer_share": optimizer / total,
        **{f"{kind}_share": share for kind, share in shares.items()},
        # So that a reader can see whether names were understood.
        "longest_kernels": {name: [kind_of(name), ms] for name, ms in passes.most_common(20)},
    }


def step_memory(training: Training, batches: list[Batch]) -> tuple[int, int, int]:
    """Bytes allocated between steps, and beyond these by gradients, and by a step at its peak."""
    training.step(*batches)  # compiles, and makes what stays
    torch.cuda.synchronize()
    steady = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    training.accumulate(*batches)
    torch.cuda.synchronize()
    gradients = torch.cuda.memory_allocated() - steady
    training.update()
    torch.cuda.synchronize()
    return steady, gradients, torch.cuda.max_memory_allocated() - steady


def memory(training: Training, args: argparse.Namespace, before: int, n_params: int) -> Row:
    """What is allocated; a step's part as a line through its peaks at two numbers of sequences."""
    sizes = args.batch, args.batch // 2
    all_batches = [microbatches(training, size, args.accumulate) for size in sizes]
    (steady, gradients, peak), (_, _, less) = (step_memory(training, b) for b in all_batches)
    tokens, fewer = (batches[0][0].numel() for batches in all_batches)
    per_token = (peak - less) / (tokens - fewer)
    return {
        "steady_B": (steady - before) / n_params,
        "gradient_B": gradients / n_params,
        "fixed_B": (peak - per_token * tokens) / n_params,
        "token_KB": per_token / 1e3,
        "peak_GiB": (steady + peak - before) / 2**30,
    }


def microbatches(training: Training, batch: int, count: int) -> list[Batch]:
    """So many batches."""
    return [training.crops(batch, seed) for seed in range(count)]


def check_runs(contestant: Contestant, args: argparse.Namespace) -> None:
    """Raise RuntimeError where a row would not be what its name says."""
    if isinstance(contestant.recipe, Recipe):
        operand.runs_natively(contestant.recipe.quantizer, torch.device(args.device))


def prepare(model: torch.nn.Module, args: argparse.Namespace) -> None:
    """Compile and checkpoint blocks, as far as it is asked for."""
    for i, block in enumerate(model.blocks):
        if args.compile:
            block.compile(fullgraph=True, dynamic=False)
        if args.checkpoint:
            model.blocks[i] = checkpoint_wrapper(block)


def measure(contestant: Contestant, args: argparse.Namespace, row: Row) -> None:
    """Put into the row what there is to know of an optimizer that runs."""
    check_runs(contestant, args)
    clock = Clock(args.device)
    before = torch.cuda.memory_allocated() if clock.cuda else 0
    model = build_model(contestant, args.config, args.device)
    prepare(model, args)
    training = Training(contestant, model, args.size)
    batches = microbatches(training, args.batch, args.accumulate)
    training.step(*batches)
    params, state = list(model.parameters()), training.optimizer.state
    n_params = sum(p.numel() for p in params)
    row["parameters"] = n_params
    row["weight_B"] = sum(map(stored_bytes, params)) / n_params
    row["state_B"] = sum(stored_bytes(state[p]) for p in params) / n_params
    samples = clock.samples(lambda: training.step(*batches), args.repeats)
    row["ms"] = statistics.median(samples)
    row["ms_min"], row["ms_max"] = min(samples), max(samples)
    # Codes or values are written, states read and written, gradients in BF16 read.
    moved = row["weight_B"] + 2 * row["state_B"] + 2
    tokens = sum(inputs.numel() for inputs, _ in batches)
    name = torch.cuda.get_device_name() if clock.cuda else "CPU"
    predicted = predicted_ms(name, args.config, tokens, contestant.is_fp8, moved)
    if predicted is not None and not args.checkpoint:
        row["predicted_ms"] = predicted
    if clock.cuda and not contestant.releases:
        row["host_ms"] = clock.host(lambda: training.accumulate(*batches))
        training.optimizer.zero_grad()
    row["tokens_per_second"] = sum(x.numel() for x, _ in batches) / row["ms"] * 1e3
    if clock.cuda and not args.times:
        row |= memory(training, args, before, n_params)
        if not contestant.releases:  # its backward pass has the optimizer's launches in it
            row |= gpu_times(training, batches)


def allocate_workspaces() -> None:
    """Have cuBLAS allocate what it keeps, for the forward and for the backward pass's thread."""
    x = torch.ones(128, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    F.linear(x, x).sum().backward()


def parse_args() -> argparse.Namespace:
    """The command line; what depends on the device is filled in."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--size", choices=tuple(PRESETS), help="1b on a GPU, tiny on a CPU")
    for name in ("layers", "dim", "heads", "context"):
        parser.add_argument(f"--{name}", type=int, help="as --size says")
    parser.add_argument(
        "--batch", type=int, help="sequences, at least 2: memory is measured with half of them too"
    )
    parser.add_argument("--accumulate", type=int, default=1, help="batches per step")
    parser.add_argument("--compile", action="store_true", help="each block with torch.compile")
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations of blocks")
    parser.add_argument("--times", action="store_true", help="times alone, without memory")
    parser.add_argument("--repeats", type=int, help="counted steps; 10 on a GPU, 1 on a CPU")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(";"),
        metavar="TEXT[;TEXT]",
        help="only names that contain one of these, or are one of these behind a =",
    )
    parser.add_argument("--json", type=Path, help="write settings and results to this file")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.size = args.size or ("1b" if cuda else "tiny")
    args.batch = args.batch or (8 if cuda else 2)
    args.repeats = args.repeats or (10 if cuda else 1)
    if args.batch < 2:
        parser.error(f"--batch must be at least 2, got {args.batch}; raise it")
    sizes = {name: getattr(args, name) for name in ("layers", "dim", "heads", "context")}
    args.config = gpt_config(args.size, **sizes)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    """Measure every optimizer, and print a line for each."""
    args = parse_args()
    names = ("size", "batch", "accumulate", "compile", "checkpoint", "repeats")
    settings = {name: getattr(args, name) for name in names} | vars(args.config)
    run = about(args.device) | {"settings": settings}
    print(versions_of(run))
    print(f"{run['device']}, {run['date']}, {title(settings)}\n")
    engine.load()
    gc.freeze()  # so that release() need not look through all that was imported
    if args.device == "cuda":
        allocate_workspaces()
    members = (
        (contestant.name, partial(measure, contestant, args))
        for contestant in CONTESTANTS
        if any(
            text[1:] == contestant.name if text.startswith("=") else text in contestant.name
            for text in args.only or [""]
        )
    )
    measure_all(members, COLUMNS, run, args.json)


if __name__ == "__main__":
    main()
