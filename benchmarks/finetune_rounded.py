"""Fine-tuning that starts from rounded weights, as checkpoints in FP8 and FP4 have them.

    python benchmarks/finetune_rounded.py [--json FILE] [--lr X ...] [--seeds N ...]
        [--starts NAME ...] [--steps N]

A small Llama learns the source code of the standard library in BF16, and is then fine-tuned on
English: its documentation. Runs start from its BF16 weights or from these rounded to a format,
which is all that a published checkpoint has; they train plain BF16 weights, or quantized ones with
masters in FP32 or int8, all with FP4Adam. A row has the held-out loss on English before and after,
and the share of values that have changed; a seed has its own model and its own batches. The file is
written after each row. In the end it prints the means of what was gained over the seeds, and the
largest distance from one.
"""

import argparse
import copy
import functools
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# Read when torch loads OpenMP: products of this size are no faster on more cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import fp4adam

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from finetune_and_export import llama
from provenance import about
from stdlib_text import cut_batch, load_text

BATCH, CONTEXT, HELD_OUT = 8, 64, 16
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)
# By name: the format, and whether the weights before rounding are known.
STARTS = {
    "BF16": (None, True),
    "BF16, rounded to FP8": ("float8block", False),
    "BF16, rounded to MXFP4": ("mxfp4", False),
    "FP8, unrounded known": ("float8block", True),
    "FP8": ("float8block", False),
    "MXFP4, unrounded known": ("mxfp4", True),
    "MXFP4": ("mxfp4", False),
}


class FP32Products(TorchDispatchMode):
    """Products of BF16 matrices in FP32, rounded once: CPUs without BF16 units are faster so."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        if func in PRODUCTS and args[0].dtype == torch.bfloat16:
            return func(*(x.float() for x in args)).bfloat16()
        return func(*args, **kwargs or {})


@functools.cache
def english() -> tuple[Tensor, Tensor]:
    """Docstrings of the standard library's modules, as bytes: to train on, and held out."""
    source = load_text()[0].numpy().tobytes().decode(errors="ignore")
    text = "\n".join(source.split('"""')[1::2])
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def loss_of(model: nn.Module, text: Tensor, seed: int) -> Tensor:
    """The loss per byte of a batch."""
    inputs, targets = cut_batch(text, BATCH, CONTEXT, seed)
    return nn.functional.cross_entropy(
        model(inputs).logits.float().flatten(0, 1), targets.flatten()
    )


def evaluate(model: nn.Module, text: Tensor) -> float:
    """The loss per byte of the same held-out batches."""
    with torch.no_grad():
        losses = [loss_of(model, text, 10**6 + i).item() for i in range(HELD_OUT)]
    return statistics.mean(losses)


def train(model: nn.Module, lr: float, text: Tensor, steps: int, seed: int, **options: Any) -> None:
    optimizer = fp4adam.FP4Adam(model.parameters(), lr=lr, **options)
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr * min(1.0, (step + 1) / 20, 2 * (steps - step) / steps)
        loss_of(model, text, seed * steps + step).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    """The values of quantized weights; zeros of either sign are one."""
    params = (p for p in model.parameters() if isinstance(p, fp4adam.QuantizedTensor))
    return [p.detach().dequantize() for p in params]


def run(
    base: nn.Module, start: str, lr: float, masters: torch.dtype, steps: int, seed: int
) -> dict[str, Any]:
    """One row of the results."""
    model, (format, knows) = copy.deepcopy(base), STARTS[start]
    if format is not None:
        fp4adam.quantize_model(model, format)
        if not knows:
            for param in model.parameters():
                if isinstance(param, fp4adam.QuantizedTensor):
                    param.clear_high_precision_init_val()
        if start.startswith("BF16"):
            fp4adam.dequantize_model(model)
    before, (text, held_out) = values(model), english()
    row = dict(start=start, masters=str(masters).removeprefix("torch."), lr=lr, seed=seed)
    row["before"] = evaluate(model, held_out)
    train(model, lr, text, steps, seed, master_weight_dtype=masters)
    row["after"] = evaluate(model, held_out)
    changed = [(a != b).sum().item() for a, b in zip(before, values(model), strict=True)]
    row["values changed"] = sum(changed) / sum(x.numel() for x in before) if before else None
    return row


def runs(starts: Iterable[str]) -> Iterator[tuple[str, torch.dtype]]:
    """What a run starts from, and the dtype of its masters."""
    for start in starts:
        format, knows = STARTS[start]
        yield start, torch.float32
        if format is not None and not knows and not start.startswith("BF16"):
            yield start, torch.int8


def pretrained(seed: int, steps: int) -> nn.Module:
    """A model in BF16 that knows the source code of the standard library."""
    config = llama(num_hidden_layers=3).config
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    train(model, 3e-3, load_text()[0], steps, seed)
    return model


def describe(rows: list[dict[str, Any]]) -> None:
    """Print what was gained from the loss of the weights in BF16."""
    before = {row["seed"]: row["before"] for row in rows if row["start"] == "BF16"}
    alike: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        alike[row["lr"], row["start"], row["masters"]].append(row)
    for (lr, start, masters), found in alike.items():
        gains = [before[row["seed"]] - row["after"] for row in found]
        mean = statistics.mean(gains)
        text = f"{mean:.4f} within {max(abs(gain - mean) for gain in gains):.4f}"
        if found[0]["values changed"] is not None:
            text += f", changed {statistics.mean(row['values changed'] for row in found):.1%}"
        print(f"lr {lr:g}, {start}, masters {masters}: {text}")


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pretrain", type=int, default=600, metavar="N")
    parser.add_argument("--steps", type=int, default=150, metavar="N")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=STARTS, metavar="NAME")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-5, 1e-4, 1e-3], metavar="X")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows = []
    result = {**about("cpu"), "pretrain": args.pretrain, "steps": args.steps, "rows": rows}
    with FP32Products():
        bases = {seed: pretrained(seed, args.pretrain) for seed in args.seeds}
        for lr in args.lr:
            for seed, base in bases.items():
                for start, masters in runs(args.starts):
                    rows.append(run(base, start, lr, masters, args.steps, seed))
                    print(rows[-1], flush=True)
                    if args.json:
                        args.json.write_text(json.dumps(result, indent=1) + "\n")
    describe(rows)


if __name__ == "__main__":
    main()
