"""The host's time of an optimizer step, of ZeRO's casts and of copies, without a GPU.

    python benchmarks/host.py [--weights 2000] [--calls 50]

Kernels, torch's own and the all-reduce are replaced by functions that do nothing, so what is left
is Python's work: checking what may have changed, finding the kept tables, and launching. Of torch
this leaves out what its operators do per tensor, which is in C++. Prints milliseconds of the
process, which a busy machine changes less than those of a clock: the median and the minimum, and of
casts those of the first call, which builds the tables. A step checks states only if
``optimizer.state`` or ``state_dict()`` has been read: the last columns.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import Parameter

from fp4adam import Float8BlockQuantizer, FP4Adam, MXFP8Quantizer, NVFP4Quantizer, cast
from fp4adam.fp8_utils import post_all_gather_processing, quantize_master_weights
from fp4adam.kernels.launch.launch import Launch
from fp4adam.tensors import backend

SIDE = 256
OPTIMIZERS = {
    "torch's fused AdamW": (None, {}),
    "MXFP8": (MXFP8Quantizer, {}),
    "Float8Block": (Float8BlockQuantizer, {}),
    "NVFP4": (NVFP4Quantizer, {}),
    "NVFP4, 8-bit states": (NVFP4Quantizer, {"states": "8bit"}),
}


def milliseconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return 1e3 * (time.process_time() - start)


def summary(times: list[float]) -> str:
    return f"{statistics.median(times):6.2f}, at best {min(times):6.2f}"


class Steps:
    """An optimizer of ``n`` weights, and two sets of gradients that take turns."""

    def __init__(self, name: str, n: int) -> None:
        quantizer, options = OPTIMIZERS[name]
        shape = SIDE, SIDE
        empty = torch.empty if quantizer is None else quantizer().make_empty
        self.params = [Parameter(empty(shape, dtype=torch.bfloat16)) for _ in range(n)]
        self._grads = [[torch.empty(shape, dtype=torch.bfloat16) for _ in range(n)] for _ in "12"]
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(self.params, fused=True)
            if quantizer is None
            else FP4Adam(self.params, **options)
        )
        for _ in range(3):
            self.time()

    def time(self) -> float:
        self._grads.reverse()
        for param, grad in zip(self.params, self._grads[0], strict=True):
            param.grad = grad
        return milliseconds(self.optimizer.step)


def measure_steps(n: int, calls: int) -> None:
    """The optimizers take turns, so that all have the same machine and cold caches."""
    runs = {name: Steps(name, n) for name in OPTIMIZERS}
    columns = []
    for _ in range(2):
        times = [[run.time() for run in runs.values()] for _ in range(calls)]
        columns.append([summary(each) for each in zip(*times, strict=True)])
        for run in runs.values():
            run.optimizer.state  # noqa: B018
    for name, unread, read in zip(runs, *columns, strict=True):
        print(f"{n:5} weights  step: {name:20} {unread}   states read {read}")


def measure_casts(n: int, calls: int) -> None:
    quantizer = NVFP4Quantizer()
    weights = [quantizer.make_empty((32, 32), torch.bfloat16) for _ in range(n)]
    masters = [torch.zeros(512) for _ in range(n)]
    values = [torch.zeros(32, 32, dtype=torch.bfloat16) for _ in range(n)]
    starts = [512] * n

    def quantize() -> None:
        quantize_master_weights(
            weights, masters, starts, None, manual_post_all_gather_processing=True
        )

    for name, function in (
        ("quantize_master_weights", quantize),
        ("post_all_gather_processing", lambda: post_all_gather_processing(weights)),
        ("cast", lambda: cast(weights, values)),
    ):
        first = milliseconds(function)
        times = [milliseconds(function) for _ in range(calls)]
        print(f"{n:5} weights  {name:26} {summary(times)}   first {first:6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", type=int, nargs="+", default=[2000])
    parser.add_argument("--calls", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    backend.uses_kernels = lambda device: True
    Launch.__call__ = lambda self, *leading: None
    torch._fused_adamw_ = torch._foreach_add_ = lambda *args, **kwargs: None
    dist.is_initialized = lambda: True
    dist.all_reduce = lambda *args: None
    for n in options.weights:
        measure_steps(n, options.calls)
        measure_casts(n, options.calls)


if __name__ == "__main__":
    main()
