"""Time, memory and launches of one optimizer step, beside torch's fused AdamW, in the same run.

    python benchmarks/step.py [--device cuda] [--layers 16] [--json results.json]

The tensors are the matrices of a GPT with hidden size 2048: 80 of them and 973 M parameters with
16 layers (on a CPU one of hidden size 512). Gradients are BF16 unless the parameters are FP32.
Rates count the bytes that a step has to move (gradient, states, parameter; codes and scales of both
directions) and are given as a share of what a copy of 8 GB (1 GB on a CPU) reaches in the same run.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton

import fp4adam
from fp4adam import FP4Adam, FusedAdam, QuantizedTensor

LAYER = [(3072, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)]
HYPER = dict(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
FORMATS = {
    "NVFP4": fp4adam.NVFP4Quantizer(),
    "NVFP4 1D": fp4adam.NVFP4Quantizer(two_dimensional=False),
    "NVFP4 rowwise": fp4adam.NVFP4Quantizer(columnwise=False),
    "MXFP8": fp4adam.MXFP8Quantizer(),
    "Float8Block": fp4adam.Float8BlockQuantizer(),
    "Float8Block 1D": fp4adam.Float8BlockQuantizer(two_dimensional=False),
}


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

    def host(self, fn: Callable[[], Any], repeats: int = 5) -> float:
        """Median milliseconds until ``fn`` returns, the device idle before."""
        return statistics.median(self._wall(fn) for _ in range(repeats))

    def _wall(self, fn: Callable[[], Any]) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        fn()
        return (time.perf_counter() - start) * 1e3


def copy_rate(clock: Clock, device: str) -> float:
    """Bytes per second, read and written, of a large copy."""
    x = torch.randn(2**30 if device == "cuda" else 2**27, device=device)
    y = torch.empty_like(x)
    ms = statistics.median(clock.samples(lambda: y.copy_(x), 20 if device == "cuda" else 5))
    return 2 * x.numel() * x.element_size() / ms * 1e3


def parameters(
    shapes: list[tuple[int, int]], device: str, dtype: torch.dtype, quantizer: Any = None
) -> list[torch.nn.Parameter]:
    """Parameters with gradients, from fixed seeds."""
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes:
        value = (torch.randn(shape, device=device, generator=generator) * 0.02).to(dtype)
        param = torch.nn.Parameter(value if quantizer is None else quantizer.quantize(value))
        grad = torch.randn(shape, device=device, generator=generator) * 1e-3
        param.grad = grad.to(dtype)
        params.append(param)
    return params


def step_bytes(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> int:
    """Bytes that one step has to read and write."""
    total = 0
    for param in params:
        total += param.grad.nbytes
        states = [s for s in optimizer.state[param].values() if s.dim()]
        total += 2 * sum(s.nbytes for s in states)
        if isinstance(param, QuantizedTensor):
            total += param.nbytes_stored
        else:
            total += param.nbytes * (1 if "master_param" in optimizer.state[param] else 2)
    return total


def measure(
    name: str, make: Callable[[], tuple[Any, list]], clock: Clock, rate: float, repeats: int
) -> dict[str, Any]:
    """One row of the table."""
    optimizer, params = make()
    optimizer.step()
    row: dict[str, Any] = {"name": name}
    if clock.cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        torch.cuda.synchronize()
        row["allocated_MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        row["launches"] = count_launches(optimizer.step)
    samples = clock.samples(optimizer.step, repeats)
    row["ms"] = statistics.median(samples)
    row["ms_min"], row["ms_max"] = min(samples), max(samples)
    row["host_ms"] = clock.host(optimizer.step)
    numel = sum(p.numel() for p in params)
    row["bytes_per_param"] = step_bytes(optimizer, params) / numel
    row["share_of_copy"] = row["bytes_per_param"] * numel / row["ms"] * 1e3 / rate
    return row


def count_launches(fn: Callable[[], Any]) -> int:
    """Kernels and memory operations that ``fn`` launches."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        fn()
        torch.cuda.synchronize()
    return sum(1 for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)


def contestants(shapes: list[tuple[int, int]], device: str) -> dict[str, Callable]:
    """What is measured, by name; each makes an optimizer and its parameters."""

    def plain(optimizer: type, dtype: torch.dtype, **kwargs: Any) -> Callable:
        def make() -> tuple[Any, list]:
            params = parameters(shapes, device, dtype)
            return optimizer(params, **HYPER, **kwargs), params

        return make

    def quantized(quantizer: Any) -> Callable:
        def make() -> tuple[Any, list]:
            params = parameters(shapes, device, torch.bfloat16, quantizer)
            return FP4Adam(params, **HYPER), params

        return make

    adamw = torch.optim.AdamW
    return {
        "torch AdamW fused, FP32": plain(adamw, torch.float32, fused=True),
        "torch AdamW fused, BF16 (no masters)": plain(adamw, torch.bfloat16, fused=True),
        "FusedAdam, FP32": plain(FusedAdam, torch.float32),
        "FusedAdam, BF16 + FP32 masters": plain(FusedAdam, torch.bfloat16),
        **{f"FP4Adam, {name}": quantized(q) for name, q in FORMATS.items()},
    }


def main() -> None:
    """Measure every contestant and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=("cuda", "cpu"))
    parser.add_argument(
        "--layers", type=int, help="16 of 61 M parameters on a GPU, 1 of 4 M on a CPU"
    )
    parser.add_argument("--repeats", type=int, help="counted steps; 30 on a GPU, 3 on a CPU")
    parser.add_argument("--only", default="", help="measure only names that contain this")
    parser.add_argument("--json", help="write settings and results to this file")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    # A sixteenth of a layer on a CPU.
    layer = LAYER if cuda else [(rows // 4, cols // 4) for rows, cols in LAYER]
    shapes = layer * (args.layers or (16 if cuda else 1))
    clock = Clock(args.device)
    rate = copy_rate(clock, args.device)
    about = {
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "fp4adam": fp4adam.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "parameters": sum(r * c for r, c in shapes),
        "tensors": len(shapes),
        "copy_TB_per_s": rate / 1e12,
    }
    print(json.dumps(about))
    rows = []
    titles = ("ms", "min", "max", "B/param", "of copy", "host ms", "launches", "MiB")
    print(" " * 39, *(f"{title:>8s}" for title in titles))
    for name, make in contestants(shapes, args.device).items():
        if args.only not in name:
            continue
        row = measure(name, make, clock, rate, args.repeats or (30 if cuda else 3))
        rows.append(row)
        print(
            f"{name:40s} {row['ms']:8.3f} {row['ms_min']:8.3f} {row['ms_max']:8.3f} "
            f"{row['bytes_per_param']:8.3f} {row['share_of_copy']:8.3f} {row['host_ms']:8.3f} "
            f"{row.get('launches', '-'):>8} {row.get('allocated_MiB', 0):8.3f}",
            flush=True,
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"about": about, "results": rows}, file, indent=1)


if __name__ == "__main__":
    main()
