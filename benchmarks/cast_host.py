"""Host time of ZeRO's casts per call: ``quantize_master_weights`` and its post-processing.

    python benchmarks/cast_host.py [--weights 80 2000] [--calls 50]

Runs on a CPU. Kernels and the all-reduce are replaced by functions that do nothing, so what is left
is the host's work: checking the arguments, finding the kept tables, and launching. Prints the time
of the first call, which builds the tables, then the median and the minimum of the others, which
differ on a busy machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from fp4adam import NVFP4Quantizer
from fp4adam.fp8_utils import post_all_gather_processing, quantize_master_weights
from fp4adam.kernels.launch.launch import Launch
from fp4adam.tensors import backend


def milliseconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


def measure(n: int, calls: int) -> None:
    """Time both functions for ``n`` weights of 32x32."""
    quantizer = NVFP4Quantizer()
    weights = [quantizer.make_empty((32, 32), torch.bfloat16) for _ in range(n)]
    masters = [torch.zeros(512) for _ in range(n)]
    starts = [512] * n

    def quantize() -> None:
        quantize_master_weights(
            weights, masters, starts, None, manual_post_all_gather_processing=True
        )

    for name, function in (
        ("quantize_master_weights", quantize),
        ("post_all_gather_processing", lambda: post_all_gather_processing(weights)),
    ):
        first = milliseconds(function)
        times = [milliseconds(function) for _ in range(calls)]
        median, best = statistics.median(times), min(times)
        line = f"first {first:8.2f} ms, then {median:6.3f}, at best {best:6.3f}"
        print(f"{n:5} weights  {name:27} {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", type=int, nargs="+", default=[80, 2000])
    parser.add_argument("--calls", type=int, default=50)
    options = parser.parse_args()
    backend.uses_kernels = lambda device: True
    Launch.__call__ = lambda self, *leading: None
    dist.is_initialized = lambda: True
    dist.all_reduce = lambda *args: None
    for n in options.weights:
        measure(n, options.calls)


if __name__ == "__main__":
    main()
