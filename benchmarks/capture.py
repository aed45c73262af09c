"""Steps replayed from CUDA graphs beside the same steps launched by the host, and torch's.

    python benchmarks/capture.py [--model small-tensors] [--json capture.json]
    python benchmarks/capture.py --exact 6

Each optimizer is captured alone, with ``capturable=True``, on the matrices of step.py. --exact
compares all bytes after so many replays, with other learning rates and gradients each, with those
of an optimizer whose steps the host counts. README.md explains the columns.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers import HYPER, MODELS, Contestant, Shape, model_shapes, parameters, plain
from provenance import about
from report import Column, Row, header_line, result_line, table, write_json
from step import Clock, copy_rate, count_launches, measured, step_bytes

from fp4adam import FusedAdam
from fp4adam.optim.te_layout import stored_state

NARROW = dict(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16)
# Options of FusedAdam, and the dtype of its parameters.
OURS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "FusedAdam, FP32": ({}, torch.float32),
    "FusedAdam, BF16 + FP32 masters": ({}, torch.bfloat16),
    "FusedAdam, BF16 + FP32 masters, BF16 moments": (NARROW, torch.bfloat16),
    "FusedAdam, BF16 + 16-bit remainders": (dict(store_param_remainders=True), torch.bfloat16),
}
TORCH = partial(torch.optim.AdamW, fused=True)
CONTESTANTS = (
    *(
        Contestant(name, "fp4adam", plain(FusedAdam, dtype, capturable=True, **options))
        for name, (options, dtype) in OURS.items()
    ),
    *(
        Contestant(f"torch AdamW fused, {name}", "torch", plain(TORCH, dtype, capturable=True))
        for name, dtype in (("FP32", torch.float32), ("BF16 (no masters)", torch.bfloat16))
    ),
)
COLUMNS = (
    Column("eager_ms", "eager ms", "step, ms", ".2f"),
    Column("ms", "replay ms", "replay, ms", ".2f"),
    Column("share_of_copy", "of copy", "of the copy", ".2f"),
    Column("eager_host_ms", "eager host", "host of a step, ms", ".2f"),
    Column("host_ms", "host ms", "of a replay, ms", ".3f"),
    Column("kernels", "kernels", "kernels of a replay", "d"),
    Column("copies", "copies", "copies", "d"),
    Column("allocations", "allocs", "allocations", "d"),
    Column("eager_allocations", "eager", "of a step", "d"),
)


def capture(step: Callable[[], Any]) -> Callable[[], None]:
    """The replay of a graph of one step; steps outside have made its states."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def allocations(fn: Callable[[], Any]) -> int:
    """How often ``fn`` takes memory of the GPU from torch's allocator."""
    name = "allocation.all.allocated"
    before = torch.cuda.memory_stats().get(name, 0)
    fn()
    return torch.cuda.memory_stats().get(name, 0) - before


def measure(
    contestant: Contestant, shapes: list[Shape], args: argparse.Namespace, rate: float, row: Row
) -> None:
    """Put into the row what there is to know of an optimizer that can be captured."""
    clock = Clock(args.device)
    optimizer, params = contestant.make(shapes, args.device)
    row["tensors"], row["parameters"] = len(params), sum(param.numel() for param in params)
    row["eager_ms"] = statistics.median(clock.samples(optimizer.step, args.repeats))
    row["eager_host_ms"] = clock.host_running(optimizer.step)
    replay = capture(optimizer.step)
    samples = clock.samples(replay, args.repeats)
    row["ms"], row["ms_min"], row["ms_max"] = statistics.median(samples), min(samples), max(samples)
    row["host_ms"] = clock.host_running(replay)
    moved = step_bytes(optimizer, params)
    row["bytes_per_param"] = moved / row["parameters"]
    row["share_of_copy"] = moved / rate * 1e3 / row["ms"]
    row["eager_share_of_copy"] = moved / rate * 1e3 / row["eager_ms"]
    if clock.cuda:
        row["kernels"], row["copies"] = count_launches(replay)
        row["eager_kernels"], row["eager_copies"] = count_launches(optimizer.step)
        row["allocations"], row["eager_allocations"] = map(allocations, (replay, optimizer.step))


def bits(optimizer: FusedAdam, params: list[torch.Tensor]) -> list[torch.Tensor]:
    """All bytes of parameters and states."""
    states = [stored_state(optimizer.state[param]) for param in params]
    values = [state[name].reshape(-1) for state in states for name in sorted(state)]
    return [t.detach().cpu().view(torch.uint8) for t in [*(p.flatten() for p in params), *values]]


def differing(
    name: str, shapes: list[Shape], args: argparse.Namespace, rates: list[float]
) -> tuple[int, int]:
    """Of how many tensors the bytes differ between replays and counted steps, and of how many."""
    options, dtype = OURS[name]
    results = []
    for capturable in (True, False):
        params = parameters(shapes, args.device, dtype)
        optimizer = FusedAdam(params, **HYPER, **options, capturable=capturable)
        optimizer.step()
        step = capture(optimizer.step) if capturable else optimizer.step
        for i, lr in enumerate(rates):
            for group in optimizer.param_groups:
                group["lr"].fill_(lr) if capturable else group.update(lr=lr)
            torch._foreach_mul_([param.grad for param in params], -0.5 if i % 2 else 1.75)
            step()
        results.append(bits(optimizer, params))
    pairs = zip(*results, strict=True)
    return sum(not torch.equal(a, b) for a, b in pairs), len(results[0])


def exact(args: argparse.Namespace) -> bool:
    """Whether replays have the bits of steps, with a line per variant."""
    shapes = model_shapes(args.model, args.layers, args.scale)
    rates = [1e-3 / (1 + i) for i in range(args.exact)]
    passed = True
    for name in OURS:
        wrong, count = differing(name, shapes, args, rates)
        passed = passed and not wrong
        same = f"{count - wrong} of {count} tensors equal"
        print(f"{'FAIL' if wrong else 'PASS'}: {name}, {args.exact} replays, {same}", flush=True)
    return passed


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help=argparse.SUPPRESS)
    parser.add_argument("--model", default="small-tensors", choices=tuple(MODELS))
    parser.add_argument("--layers", type=int, help="as in peers.py")
    parser.add_argument("--scale", type=int, default=1, help="divides all sides")
    parser.add_argument("--repeats", type=int, default=30, help="counted steps")
    parser.add_argument("--exact", type=int, metavar="STEPS", help="compare bytes, measure nothing")
    parser.add_argument("--json", type=Path, help="write settings and results to this file")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("CUDA graphs need an NVIDIA GPU, got none; run it where there is one")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure, or compare."""
    args = parse_args(argv)
    if args.exact:
        return 0 if exact(args) else 1
    rate = copy_rate(Clock(args.device), args.device, args.scale)
    run = about(args.device) | {"copy_TB_per_s": rate / 1e12, "settings": {"model": args.model}}
    print(f"{run['device']}, copies {run['copy_TB_per_s']:.3f} TB/s, {run['date']}")
    print(header_line(args.model, COLUMNS), flush=True)
    shapes = model_shapes(args.model, args.layers, args.scale)
    rows: list[Row] = []
    for contestant in CONTESTANTS:
        rows.append(
            measured({"name": contestant.name}, partial(measure, contestant, shapes, args, rate))
        )
        print(result_line(rows[-1], COLUMNS), flush=True)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            write_json(args.json, run, rows)
    numel = sum(map(math.prod, shapes))
    title = f"{len(shapes):,} tensors, {numel / 1e6:,.0f} M parameters"
    print("", *table(title, COLUMNS, [row for row in rows if "error" not in row]), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
