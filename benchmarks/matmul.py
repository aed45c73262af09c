"""Time of linear layers with quantized weights beside BF16 ones, and of what they are made of.

    python benchmarks/matmul.py [--device cuda] [--tokens 4096,16384] [--json matmul.json]

"layer" rows: one forward and backward pass of [tokens, in] by [out, in], BF16, weight-only in every
format (dequantized for each matmul), and with quantized activations and gradients where
the GPU has such matmuls; `error` then compares these with the emulation, as the largest difference
over the largest value of y, dx and dW. "kernel" rows: dequantizing and quantizing, their bytes, and
these over the time as a share of what a copy reaches, one of as many bytes and one of 8 GB;
"matmul" rows: one product alone. Times are of CUDA graphs, without the host (`ms`), and as Python
calls them (`eager_ms`).
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from provenance import about
from report import versions_of, write_json
from step import Clock, copy_rate, reason
from torch import Tensor
from torch.nn import Parameter

from fp4adam import Recipe
from fp4adam.nn import operand
from fp4adam.tensors.blocks import round_up
from fp4adam.tensors.quantized_tensor import QuantizedTensor

FORMATS = ("nvfp4", "mxfp8", "float8block")
# Shapes [out, in]: of attention, and of the two matrices of an MLP.
SHAPES = ((1, 1), (4, 1), (1, 4))
# More than the L2 cache holds: kernels go through so many bytes of different tensors.
COLD_BYTES = 256 << 20


@dataclasses.dataclass
class Bench:
    """How things are timed."""

    device: str
    repeats: int
    rate: float

    def ms(self, fns: list[Callable[[], Any]]) -> float:
        """Median milliseconds of one of several functions that follow each other, host aside."""
        clock = Clock(self.device)
        if self.device == "cpu":
            return statistics.median(clock.samples(lambda: [f() for f in fns], 1)) / len(fns)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                for fn in fns:
                    fn()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for fn in fns:
                fn()
        return statistics.median(clock.samples(graph.replay, self.repeats)) / len(fns)

    def eager_ms(self, fn: Callable[[], Any]) -> float:
        """Median milliseconds of calls that follow each other."""
        clock = Clock(self.device)
        steps = 3 if self.device == "cuda" else 1
        samples = clock.samples(lambda: [fn() for _ in range(steps)], self.repeats)
        return statistics.median(samples) / steps

    def kernel(self, fns: list[Callable[[], Any]], n_bytes: int) -> dict[str, float]:
        """Times of a kernel that moves so many bytes, and its shares of copies' rates."""
        ms = self.ms(fns)
        # Whole pages: copies of other sizes have been seen to reach half the rate.
        half = round_up(n_bytes // 2, 4096)
        room = [
            torch.empty(2, half, dtype=torch.uint8, device=self.device)
            for _ in range(cold_copies(self, n_bytes))
        ]
        copies = [functools.partial(target.copy_, source) for target, source in room]
        return {
            "ms": ms,
            "eager_ms": self.eager_ms(fns[0]),
            "bytes": n_bytes,
            "share_of_equal_copy": self.ms(copies) / ms,
            "share_of_copy": n_bytes / self.rate / ms * 1e3,
        }


def attempt(measure: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """What a measurement gives, or why there is none."""
    try:
        return measure(*args)
    except RuntimeError as error:  # no such matmul on this GPU, or no memory
        return {"error": reason(error)}


def step_of(weight: Tensor, x: Tensor, grad: Tensor) -> Callable[[], None]:
    """A forward and backward pass that leaves no gradients behind."""

    def run() -> None:
        torch.autograd.grad(F.linear(x, weight), (x, weight), grad)

    return run


def layer(bench: Bench, weight: Tensor, tokens: int) -> dict[str, Any]:
    """Times of one layer, forward alone and with the backward pass."""
    n, k = weight.shape
    x = torch.randn(tokens, k, dtype=torch.bfloat16, device=bench.device, requires_grad=True)
    grad = torch.randn(tokens, n, dtype=torch.bfloat16, device=bench.device)
    run = step_of(weight, x, grad)
    row = {"ms": bench.ms([run]), "eager_ms": bench.eager_ms(run)}
    with torch.no_grad():
        row["forward_ms"] = bench.ms([lambda: F.linear(x, weight)])
    row["TFLOP_per_s"] = 6 * tokens * n * k / row["ms"] / 1e9
    return row


def native_layer(bench: Bench, weight: QuantizedTensor, tokens: int) -> dict[str, Any]:
    """The same with quantized activations and gradients, and how far it is from the emulation."""
    row = layer(bench, weight, tokens)
    n, k = weight.shape
    x = torch.randn(tokens, k, dtype=torch.bfloat16, device=bench.device, requires_grad=True)
    grad = torch.randn(tokens, n, dtype=torch.bfloat16, device=bench.device)
    results = []
    quantizer = weight.quantizer
    for emulate in (False, True):
        weight.quantizer = dataclasses.replace(
            quantizer, operands=quantizer.operands._replace(emulate=emulate)
        )
        y = F.linear(x, weight)
        results.append((y.detach(), *torch.autograd.grad(y, (x, weight), grad)))
    weight.quantizer = quantizer
    for name, native, emulated in zip(("y", "dx", "dw"), *results, strict=True):
        error = (native.float() - emulated.float()).abs().max() / emulated.float().abs().max()
        row[f"error_{name}"] = error.item()
    return row


def layer_rows(bench: Bench, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """BF16, weight-only and native layers of every shape."""
    for hidden in args.hidden:
        for out, into in SHAPES:
            shape = (out * hidden, into * hidden)
            value = torch.randn(shape, dtype=torch.bfloat16, device=bench.device) / shape[1] ** 0.5
            weights: list[tuple[str, Callable, Tensor]] = [("BF16", layer, Parameter(value))]
            for name in FORMATS:
                weight = Parameter(Recipe(name).quantizer.quantize(value))
                weights.append((f"{name}, dequantized", layer, weight))
                recipe = Recipe(name, activations=True, gradients=True)
                weight = Parameter(recipe.quantizer.quantize(value))
                weights.append((f"{name}, native", native_layer, weight))
            for tokens in args.tokens:
                for name, measure, weight in weights:
                    row = {"kind": "layer", "name": name, "tokens": tokens}
                    row |= {"out": shape[0], "in": shape[1]}
                    yield row | attempt(measure, bench, weight, tokens)


def dequantize_rows(bench: Bench, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Dequantize kernels, to BF16 and FP32."""
    for hidden in args.hidden:
        value = torch.randn(hidden, hidden, device=bench.device)
        for name in FORMATS:
            weight = Recipe(name).quantizer.quantize(value)
            stored = weight.storage_tensors().items()
            read = sum(t.nbytes for part, t in stored if not part.startswith("_columnwise"))
            for dtype in (torch.bfloat16, torch.float32):
                n_bytes = read + value.numel() * dtype.itemsize
                weights = [weight.clone() for _ in range(cold_copies(bench, n_bytes))]
                fns = [lambda w=w, d=dtype: w.dequantize(d) for w in weights]
                row = {"kind": "kernel", "name": f"{name} to {str(dtype)[6:]}"}
                row |= {"rows": hidden, "cols": hidden}
                yield row | attempt(bench.kernel, fns, n_bytes)


def cold_copies(bench: Bench, n_bytes: int) -> int:
    """Of how many tensors a kernel that moves so many bytes finds none in the cache."""
    return max(1, COLD_BYTES // n_bytes) if bench.device == "cuda" else 1


# Bytes per element of operands, codes and scales.
OPERAND_BYTES = {"nvfp4": 1 / 2 + 1 / 16, "mxfp8": 1 + 1 / 32, "float8block": 1 + 4 / 128}


def operand_rows(bench: Bench, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Quantization of activations, and products of what it gives."""
    for hidden, tokens in itertools.product(args.hidden, args.tokens):
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=bench.device)
        for name in FORMATS:
            quantizer = Recipe(name, activations=True, gradients=True).quantizer
            for columnwise in (False, True) if name == "float8block" else (False,):
                ways = 1 + columnwise
                n_bytes = int(x.numel() * (2 + ways * OPERAND_BYTES[name]))
                fns = [
                    functools.partial(operand.quantize, x.clone(), quantizer, True, columnwise)
                    for _ in range(cold_copies(bench, n_bytes))
                ]
                row = {"kind": "kernel", "name": f"{name} operands, {ways} ways"}
                row |= {"rows": tokens, "cols": hidden}
                yield row | attempt(bench.kernel, fns, n_bytes)
            row = {"kind": "matmul", "name": name, "tokens": tokens, "out": hidden, "in": hidden}
            yield row | attempt(product, bench, x, quantizer)


def product(bench: Bench, x: Tensor, quantizer: Any) -> dict[str, Any]:
    """x W^T of operands that are there already."""
    weight = quantizer.quantize(torch.randn(x.shape[1], x.shape[1], device=bench.device))
    operand.runs_natively(quantizer, x.device)  # or says why not
    a, _ = operand.quantize(x, quantizer, True)
    b = operand.weight_operand(weight, "rowwise")
    ms = bench.ms([lambda: operand.matmul(a, b, quantizer, torch.bfloat16)])
    return {"ms": ms, "TFLOP_per_s": 2 * len(x) * weight.numel() / ms / 1e9}


def parse_args() -> argparse.Namespace:
    """The command line; what depends on the device is filled in."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    cuda = default == "cuda"

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--device", default=default, choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=numbers, default=[4096, 16384, 32768] if cuda else [128])
    parser.add_argument("--hidden", type=numbers, default=[2048, 4096, 8192] if cuda else [128])
    parser.add_argument("--repeats", type=int, default=10 if cuda else 1)
    parser.add_argument("--only", choices=("kernel", "layer", "matmul"), help="kind of rows")
    parser.add_argument("--json", type=Path, help="write settings and results to this file")
    args = parser.parse_args()
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    """Measure everything, and print a line for each."""
    args = parse_args()
    cuda = args.device == "cuda"
    rate = copy_rate(Clock(args.device), args.device, 1 if cuda else 64)
    run = about(args.device) | {"copy_TB_per_s": rate / 1e12}
    print(versions_of(run))
    print(f"{run['device']}, copies {run['copy_TB_per_s']:.3f} TB/s, {run['date']}")
    bench, rows = Bench(args.device, args.repeats, rate), []
    for measured in (dequantize_rows, operand_rows, layer_rows):
        if args.only == "layer" and measured is not layer_rows:
            continue
        if args.only in ("kernel", "matmul") and measured is layer_rows:
            continue
        for row in measured(bench, args):
            if args.only and row["kind"] != args.only:
                continue
            rows.append(row)
            values = (f"{k} {v:.4g}" if isinstance(v, float) else f"{v}" for k, v in row.items())
            print("  ".join(values), flush=True)
            if args.json:
                write_json(args.json, run, rows)


if __name__ == "__main__":
    main()
