"""Steps with states in host memory: time beside what the link moves, and bytes on the GPU.

    python benchmarks/offload.py [--layers 32] [--format nvfp4] [--states fp32] [--json FILE]
    python benchmarks/offload.py --train 8192 --layers 8
    python benchmarks/offload.py --exact 5 --layers 2 --scale 4

The parameters are those of Llama-3.1-8B. Matrices of layers have the format, embedding and output
matrix are BF16. --train runs forward and backward passes of the feed-forward layers with so many
tokens, with gradient release and without. --exact compares all bytes after so many steps with
those of resident states. README.md explains the columns.
"""

import argparse
import gc
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peers import FORMATS, HYPER
from provenance import about
from torch import Tensor, nn
from torch.nn import Parameter

from fp4adam import FP4Adam, QuantizedTensor, quantize_model

HIDDEN, INNER, KEYS, VOCABULARY, LAYERS = 4096, 14336, 1024, 128256, 32
NAMES = {"nvfp4": "NVFP4", "mxfp8": "MXFP8", "float8block": "Float8Block"}
STATES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": dict(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16),
    "fp8": dict(exp_avg_dtype=torch.float8_e4m3fn, exp_avg_sq_dtype=torch.float8_e4m3fn),
    "fp8, fp16 masters": dict(
        exp_avg_dtype=torch.float8_e4m3fn,
        exp_avg_sq_dtype=torch.float8_e4m3fn,
        master_weight_dtype=torch.float16,
    ),
}


def shapes(layers: int, scale: int = 1) -> Iterator[tuple[tuple[int, ...], bool]]:
    """The parameters of the model, and which are quantized; ``scale`` divides all sides."""
    hidden, inner, keys = (n // scale for n in (HIDDEN, INNER, KEYS))
    vocabulary = VOCABULARY // scale // 32 * 32
    yield (vocabulary, hidden), False
    for _ in range(layers):
        yield from ((shape, True) for shape in ((hidden, hidden), (keys, hidden), (keys, hidden)))
        yield (hidden, hidden), True
        yield from (((inner, hidden), True), ((inner, hidden), True), ((hidden, inner), True))
        yield from (((hidden,), False), ((hidden,), False))
    yield (hidden,), False
    yield (vocabulary, hidden), False


def make_params(args: argparse.Namespace, layers: int) -> list[Parameter]:
    """Parameters with BF16 gradients, both from a seed."""
    generator = torch.Generator(args.device).manual_seed(0)
    params = []
    for shape, is_quantized in shapes(layers, args.scale):
        value, grad = (
            torch.empty(shape, dtype=torch.bfloat16, device=args.device) for _ in range(2)
        )
        value.normal_(0.0, 0.02, generator=generator)
        grad.normal_(0.0, 1e-3, generator=generator)
        if is_quantized and args.format != "bf16":
            value = FORMATS[NAMES[args.format]].quantize(value)
        param = Parameter(value)
        param.grad = grad
        params.append(param)
    return params


def tensors(param: Tensor) -> list[Tensor]:
    """The plain tensors of a parameter."""
    if not isinstance(param, QuantizedTensor):
        return [param.detach()]
    return [tensor for tensor in param.storage_tensors().values() if tensor is not None]


def wait() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allocated(peak: bool = False) -> int:
    """Bytes on the GPU now, or the most since the last ``reset()``."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def reset() -> None:
    """Free what is no longer used, and begin a new peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def seconds(fn: Callable[[], Any], repeats: int) -> list[float]:
    """Wall-clock seconds of each call, with the GPU idle before and after."""
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        fn()
        wait()
        times.append(time.perf_counter() - start)
    return times


def link_rates(device: str, nbytes: int, repeats: int = 5) -> dict[str, float]:
    """Bytes per second that pinned copies move: in, out, and both ways at the same time, summed."""
    cuda = device == "cuda"
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)] if cuda else [None, None]

    def copy(inwards: bool, outwards: bool) -> None:
        pairs = ((there[0], hosts[0]), (hosts[1], there[1]))
        for wanted, stream, (target, source) in zip(
            (inwards, outwards), streams, pairs, strict=True
        ):
            if wanted:
                with torch.cuda.stream(stream):
                    for _ in range(4):
                        target.copy_(source, non_blocking=True)

    rates = {}
    for name, ways in (("in", (True, False)), ("out", (False, True)), ("both", (True, True))):
        copy(*ways)
        taken = statistics.median(seconds(lambda ways=ways: copy(*ways), repeats))
        rates[name] = 4 * sum(ways) * nbytes / taken
    return rates


def state_bytes(optimizer: FP4Adam) -> int:
    """Bytes of all states."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if value.dim())


def measure(args: argparse.Namespace, offloads: bool, rate: float) -> dict[str, Any]:
    """Time and memory of steps; or that they do not fit."""
    reset()
    before = allocated()
    params = make_params(args, args.layers)
    numel = sum(param.numel() for param in params)
    fixed = allocated() - before
    row: dict[str, Any] = {"states": args.states, "offloaded": offloads, "parameters": numel}
    try:
        options = {**HYPER, **STATES[args.states]}
        optimizer = FP4Adam(params, **options, offload_states=offloads)
        row["first_s"] = seconds(optimizer.step, 1)[0]
        row["second_s"] = seconds(optimizer.step, 1)[0]
        reset()
        row["steady_B"] = (allocated() - before - fixed) / numel
        samples = seconds(optimizer.step, args.repeats)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return row | {"error": str(error).split(". ")[0]}
    row["peak_B"] = (allocated(peak=True) - before - fixed) / numel
    row["weights_gradients_GiB"] = fixed / 2**30
    row["peak_GiB"] = (allocated(peak=True) - before) / 2**30
    row["ms"] = 1e3 * statistics.median(samples)
    row["ms_min"], row["ms_max"] = 1e3 * min(samples), 1e3 * max(samples)
    held = state_bytes(optimizer)
    row["state_B"], row["host_GiB"] = held / numel, held / 2**30 if offloads else 0.0
    if offloads:
        row["share_of_link"] = 2 * held / rate / statistics.median(samples)
    return row


def digests(args: argparse.Namespace, offloads: bool) -> list[str]:
    """SHA-256 of every parameter and every state after some clipped steps."""
    params = make_params(args, args.layers)
    options = {**HYPER, **STATES[args.states]}
    optimizer = FP4Adam(params, **options, offload_states=offloads)
    for step in range(args.exact):
        for param in params:
            param.grad.mul_(1.0 + 0.25 * (step % 3 - 1))
        optimizer.clip_grad_norm_(1.0 if step % 2 else 1e-3)
        optimizer.step()
    found = []
    for param in params:
        state = optimizer.state[param]
        for tensor in (*tensors(param), *(state[name] for name in sorted(state))):
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            found.append(hashlib.sha256(data.numpy().tobytes()).hexdigest())
    return found


def exact(args: argparse.Namespace) -> bool:
    """Whether all bytes are those of resident states; prints what they were."""
    found = []
    for offloads in (True, False):
        reset()
        found.append(digests(args, offloads))
    same = sum(a == b for a, b in zip(*found, strict=True))
    verdict = "PASS" if found[0] == found[1] else "FAIL"
    print(f"{verdict}: {args.format}, {args.states}, {same} of {len(found[0])} tensors equal")
    return found[0] == found[1]


def make_layers(args: argparse.Namespace) -> nn.Sequential:
    """Feed-forward layers of the model."""
    hidden, inner = HIDDEN // args.scale, INNER // args.scale
    torch.manual_seed(0)
    with torch.device(args.device):
        model = nn.Sequential()
        for _ in range(args.layers):
            up, down = (nn.Linear(*s, bias=False) for s in ((hidden, inner), (inner, hidden)))
            model.extend([up, nn.SiLU(), down])
    model.to(torch.bfloat16)
    if args.format != "bf16":
        quantize_model(model, args.format, filter=lambda *_: True)
        for param in model.parameters():
            param.clear_high_precision_init_val()
    return model


def train(args: argparse.Namespace, offloads: bool, releases: bool) -> dict[str, Any]:
    """Time and memory of training steps with an input of ``args.train`` tokens."""
    reset()
    before = allocated()
    row: dict[str, Any] = {"offloaded": offloads, "gradient_release": releases}
    try:
        model = make_layers(args)
        params = [*model.parameters()]
        numel = sum(param.numel() for param in params)
        options = {**HYPER, **STATES[args.states]}
        optimizer = FP4Adam(params, **options, offload_states=offloads)
        if releases:
            optimizer.enable_gradient_release()
        shape = (args.train, HIDDEN // args.scale)
        x = torch.randn(shape, dtype=torch.bfloat16, device=args.device)

        def run() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        def pass_only() -> None:
            model(x).square().mean().backward()
            for param in params:
                param.grad = None

        for _ in range(3):
            run()
        reset()
        row["parameters"] = numel
        row["ms"] = 1e3 * statistics.median(seconds(run, args.repeats))
        row["peak_GiB"] = (allocated(peak=True) - before) / 2**30
        if not releases:
            passes = statistics.median(seconds(pass_only, args.repeats))
            row["forward_backward_ms"] = 1e3 * passes
    except (torch.OutOfMemoryError, MemoryError) as error:
        row["error"] = str(error).split(". ")[0]
    return row


def line(row: dict[str, Any]) -> str:
    """A row in one line."""
    return ", ".join(
        f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
    )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of 32")
    parser.add_argument("--scale", type=int, default=1, help="divides all sides")
    parser.add_argument("--format", choices=(*NAMES, "bf16"), default="nvfp4")
    parser.add_argument("--states", choices=[*STATES], default="fp32")
    parser.add_argument("--resident", action="store_true", help="measure resident states as well")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--train", type=int, metavar="TOKENS", help="train feed-forward layers")
    parser.add_argument("--exact", type=int, metavar="STEPS", help="compare bytes, measure nothing")
    parser.add_argument("--json", type=Path, help="write settings and results to this file")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("states are offloaded from an NVIDIA GPU, got none; run it where there is one")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure, or compare."""
    args = parse_args(argv)
    if args.exact:
        return 0 if exact(args) else 1
    rates = link_rates(args.device, 2**30 // args.scale**2)
    result = about(args.device) | {f"link_{name}_GB_per_s": r / 1e9 for name, r in rates.items()}
    print(line({"device": result["device"], **{k: v for k, v in result.items() if "link" in k}}))
    rows: list[dict[str, Any]] = []
    if args.train:
        ways = [(False, False), (True, False), (True, True)]
        todo = [lambda way=way: train(args, *way) for way in ways]
    else:
        ways = [True, False] if args.resident else [True]
        todo = [lambda way=way: measure(args, way, rates["both"]) for way in ways]
    for run in todo:
        rows.append(run())
        print(line(rows[-1]), flush=True)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps({"about": result, "results": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
