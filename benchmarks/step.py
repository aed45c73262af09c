"""Time, memory and launches of one optimizer step, beside its peers, in the same run.

    python benchmarks/step.py [--model gpt] [--device cuda] [--json results.json]

Models and optimizers are those of peers.py. An optimizer that cannot run here says why in its row.
With --json, the file is written anew after every row, and at the end a .csv and two pictures beside
it, .png and _memory.png.
README.md explains the columns.
"""

import argparse
import gc
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peers import CONTESTANTS, LARGE_LIST, MODELS, SHORT_LIST, Contestant, Shape, model_shapes
from provenance import about
from report import (
    Column,
    Row,
    header_line,
    result_line,
    versions_of,
    write_csv,
    write_json,
    write_plots,
)
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp4adam.optim.te_layout import stored_state


class Clock:
    """Times work on a device: events on a GPU, the wall clock on a CPU."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def samples(self, fn: Callable[[], Any], repeats: int) -> list[float]:
        """Milliseconds of each of ``repeats`` calls, after three that are not counted."""
        for _ in range(3):
            fn()
        if not self.cuda:
            return [self._wall(fn) for _ in range(repeats)]
        pairs = []
        for _ in range(repeats):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            fn()
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in pairs]

    def host(
        self, fn: Callable[[], Any], before: Callable[[], Any] = lambda: None, repeats: int = 5
    ) -> float:
        """Median milliseconds until ``fn`` returns, after ``before`` and with the device idle."""
        times = []
        for _ in range(repeats):
            before()
            times.append(self._wall(fn))
        return statistics.median(times)

    def host_running(self, fn: Callable[[], Any], steps: int = 3, repeats: int = 9) -> float:
        """Median milliseconds per call of calls that follow each other, the device behind."""
        times = []
        for _ in range(repeats):
            times.append(self._wall(lambda: [fn() for _ in range(steps)]) / steps)
        return statistics.median(times)

    def _wall(self, fn: Callable[[], Any]) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        fn()
        return (time.perf_counter() - start) * 1e3


def copy_rate(clock: Clock, device: str, scale: int = 1) -> float:
    """Bytes per second, read and written, of a large copy."""
    x = torch.randn((2**30 if device == "cuda" else 2**27) // scale, device=device)
    y = torch.empty_like(x)
    ms = statistics.median(clock.samples(lambda: y.copy_(x), 20 if device == "cuda" else 5))
    return 2 * x.numel() * x.element_size() / ms * 1e3


def stored_tensors(value: Any) -> Iterator[Tensor]:
    """The plain tensors that a state is made of, scalars left out."""
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from stored_tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        if value.dim():
            yield value
    elif isinstance(value, dict) or hasattr(value, "__dict__"):
        for part in (value if isinstance(value, dict) else vars(value)).values():
            yield from stored_tensors(part)


def stored_bytes(value: Any) -> int:
    """Bytes of :func:`stored_tensors`."""
    return sum(t.nbytes for t in stored_tensors(value))


def step_bytes(optimizer: Any, params: list[Parameter]) -> int:
    """Bytes that a step has to read and write, however it does it."""
    total = 0
    for param in params:
        state = stored_state(optimizer.state[param])
        # Written only, where a master weight is what is updated.
        passes = 1 if "master_param" in state else 2
        grad_reads = getattr(optimizer, "grad_reads", 1)
        total += grad_reads * param.grad.nbytes + 2 * stored_bytes(state)
        total += passes * stored_bytes(param)
        if passes == 1 and state["master_param"].dtype == torch.int8:
            total += param._rowwise_data.nbytes  # which the remainders complete
    return total


def renew_gradients(params: list[Parameter]) -> None:
    """Put every gradient at another address, as training with ``zero_grad()`` does."""
    for param in params:
        param.grad = param.grad.clone()


def gpu_events(fn: Callable[[], Any]) -> list[FunctionEvent]:
    """What ``fn`` launches on the GPU: kernels, copies and fills, with names and times."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        fn()
        torch.cuda.synchronize()
    return [
        event
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]


def count_launches(fn: Callable[[], Any]) -> tuple[int, int]:
    """Kernels, and copies and fills, that ``fn`` launches on the GPU."""
    names = [event.name for event in gpu_events(fn)]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in names)
    return len(names) - copies, copies


def count_waits(fn: Callable[[], Any]) -> int:
    """How often the host waits for the GPU: what torch warns of, and calls of synchronize()."""
    synchronize = mock.patch.object(torch.cuda, "synchronize", wraps=torch.cuda.synchronize)
    with synchronize as explicit, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            fn()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    implicit = sum("called a synchronizing" in str(warning.message) for warning in caught)
    return explicit.call_count + implicit


def memory(optimizer: Any, before: int) -> dict[str, float]:
    """MiB that stay allocated between steps, and that a step takes beyond them."""
    torch.cuda.synchronize()
    steady = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return {"steady_MiB": (steady - before) / 2**20, "temporary_MiB": (peak - steady) / 2**20}


def measure(
    contestant: Contestant, shapes: list[Shape], device: str, rate: float, repeats: int, row: Row
) -> None:
    """Fill in what a row holds about an optimizer that runs."""
    clock = Clock(device)
    before = torch.cuda.memory_allocated() if clock.cuda else 0
    optimizer, params = contestant.make(shapes, device)
    optimizer.step()
    if clock.cuda:
        row |= memory(optimizer, before)
        row["kernels"], row["copies"] = count_launches(optimizer.step)
        row["waits"] = count_waits(optimizer.step)
    samples = clock.samples(optimizer.step, repeats)
    row["ms"] = statistics.median(samples)
    row["ms_min"], row["ms_max"] = min(samples), max(samples)
    if hasattr(optimizer, "masters"):

        def write() -> None:
            with optimizer.masters():
                pass

        row["write_back_ms"] = statistics.median(clock.samples(write, repeats))
    few = min(repeats, 5)
    row["host_ms"] = clock.host_running(optimizer.step)
    row["host_idle_ms"] = clock.host(optimizer.step, repeats=few)
    row["host_new_grads_ms"] = clock.host(optimizer.step, lambda: renew_gradients(params), few)
    numel = sum(p.numel() for p in params)
    moved = step_bytes(optimizer, params)
    row["bytes_per_param"] = moved / numel
    row["floor_ms"] = moved / rate * 1e3
    row["share_of_copy"] = row["floor_ms"] / row["ms"]
    row["state_bytes_per_param"] = sum(stored_bytes(optimizer.state[p]) for p in params) / numel
    row["weight_bytes_per_param"] = sum(stored_bytes(p) for p in params) / numel


def release() -> None:
    """Free what the optimizer before this one has left."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reason(error: Exception) -> str:
    """What an error says, in one line."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def measured(row: Row, measure: Callable[[Row], None]) -> Row:
    """The row, filled in by ``measure`` or with the reason why it could not be."""
    release()
    try:
        measure(row)
    except Exception as error:  # a missing package, no memory, or what a compiler may raise
        row["error"] = reason(error)
    return row


def measure_steps(clock: Clock, step: Callable[[], Any], repeats: int, before: int) -> Row:
    """GiB between training steps and at the peak of one, on a GPU alone, and milliseconds of one.

    ``before``: Bytes that were allocated before there was a model.
    """
    row: Row = {}
    step()
    gc.collect()
    if clock.cuda:
        torch.cuda.synchronize()
        row["steady_GiB"] = (torch.cuda.memory_allocated() - before) / 2**30
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        row["peak_GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    row["ms"] = statistics.median(clock.samples(step, repeats))
    return row


def measure_all(
    members: Iterable[tuple[str, Callable[[Row], None]]],
    columns: tuple[Column, ...],
    run: dict[str, Any],
    path: Path | None,
) -> None:
    """Measure one after the other, print a line for each, and write all so far to ``path``."""
    print(header_line("", columns), flush=True)
    rows: list[Row] = []
    for name, measure in members:
        rows.append(measured({"name": name}, measure))
        print(result_line(rows[-1], columns), flush=True)
        if path:
            write_json(path, run, rows)


def parse_args() -> argparse.Namespace:
    """The command line; what depends on the device is filled in."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=("cuda", "cpu"))
    parser.add_argument(
        "--model",
        default="gpt",
        choices=(*MODELS, "all"),
        help="which matrices; all optimizers are measured on gpt, few on the others",
    )
    parser.add_argument("--layers", type=int, help="as in peers.py on a GPU, 1 on a CPU")
    parser.add_argument("--scale", type=int, help="divides all sides; 1 on a GPU, 4 on a CPU")
    parser.add_argument("--repeats", type=int, help="counted steps; 30 on a GPU, 3 on a CPU")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(";"),
        metavar="TEXT[;TEXT]",
        help="measure only names that contain one of these",
    )
    parser.add_argument("--json", type=Path, help="write settings and results to this file")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.layers = args.layers or (None if cuda else 1)
    args.scale = args.scale or (1 if cuda else 4)
    args.repeats = args.repeats or (30 if cuda else 3)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    return args


def chosen(args: argparse.Namespace, model: str) -> list[Contestant]:
    """Who is measured on a model: everyone on gpt, few on the others, --only aside."""
    named = args.only and model == args.model
    few = LARGE_LIST if model == "llama-8b" else SHORT_LIST
    everyone = [c for c in CONTESTANTS if named or model == "gpt" or c.name in few]
    return [c for c in everyone if any(text in c.name for text in args.only or [""])]


def main() -> None:
    """Measure every optimizer on every chosen model, and print a line for each."""
    args = parse_args()
    cuda = args.device == "cuda"
    rate = copy_rate(Clock(args.device), args.device, 1 if cuda else args.scale)
    run = about(args.device) | {"copy_TB_per_s": rate / 1e12}
    print(versions_of(run))
    print(f"{run['device']}, copies {run['copy_TB_per_s']:.3f} TB/s, {run['date']}")
    gc.freeze()  # so that release() need not look through all that was imported
    rows = []
    for model in MODELS if args.model == "all" else [args.model]:
        print(f"\n{header_line(model)}", flush=True)
        for contestant in chosen(args, model):
            shapes = model_shapes(model, args.layers, args.scale, contestant.multiple)
            row = {
                "model": model,
                "name": contestant.name,
                "kind": contestant.kind,
                "tensors": len(shapes),
                "parameters": sum(math.prod(shape) for shape in shapes),
            }
            how = (contestant, shapes, args.device, rate, args.repeats)
            rows.append(measured(row, partial(measure, *how)))
            print(result_line(row), flush=True)
            if args.json:
                write_json(args.json, run, rows)
    if args.json:
        write_csv(args.json.with_suffix(".csv"), rows)
        write_plots(args.json.with_suffix(".png"), run, rows)


if __name__ == "__main__":
    main()
