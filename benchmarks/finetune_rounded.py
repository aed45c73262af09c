"""Fine-tuning that starts from rounded weights, as checkpoints in FP8 and FP4 have them.

    python benchmarks/finetune_rounded.py [--json FILE] [--steps N] [--pretrain N]

A small Llama learns the source code of the standard library in BF16 with AdamW, and is then
fine-tuned on English: its documentation. Runs start from its BF16 weights or from these rounded to
a format, which is all that a published checkpoint has; they train plain BF16 weights with FP32
masters (AdamW), or quantized ones with FP4Adam and masters in FP32 or int8. For each the held-out
loss on English before, in the middle and at the end, and the share of codes that have changed.
"""

import argparse
import copy
import functools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp4adam

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from finetune_and_export import llama
from provenance import about
from stdlib_text import cut_batch, load_text

BATCH, CONTEXT, HELD_OUT = 8, 64, 16
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


def train(model: nn.Module, optimizer: Any, text: Tensor, steps: int) -> None:
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr * min(1.0, (step + 1) / 20, 2 * (steps - step) / steps)
        loss_of(model, text, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def codes(model: nn.Module) -> list[Tensor]:
    params = (p for p in model.parameters() if isinstance(p, fp4adam.QuantizedTensor))
    return [p.rowwise_data.clone() for p in params]


def run(base: nn.Module, start: str, lr: float, masters: torch.dtype, args: Any) -> dict[str, Any]:
    """One row of the table."""
    model, (format, knows) = copy.deepcopy(base), STARTS[start]
    if format is not None:
        fp4adam.quantize_model(model, format)
        if not knows:
            for param in model.parameters():
                if isinstance(param, fp4adam.QuantizedTensor):
                    param.clear_high_precision_init_val()
        if start.startswith("BF16"):
            fp4adam.dequantize_model(model)
    before, (text, held_out) = codes(model), english()
    optimizer = fp4adam.FP4Adam(model.parameters(), lr=lr, master_weight_dtype=masters)
    row = dict(start=start, masters=str(masters).removeprefix("torch."), lr=lr)
    row["before"] = evaluate(model, held_out)
    train(model, optimizer, text, args.steps)
    row["after"] = evaluate(model, held_out)
    changed = [(a != b).sum().item() for a, b in zip(before, codes(model), strict=True)]
    row["codes changed"] = sum(changed) / max(sum(x.numel() for x in before), 1) or None
    return row


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pretrain", type=int, default=600, metavar="N")
    parser.add_argument("--steps", type=int, default=200, metavar="N")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-5, 1e-4, 1e-3], metavar="X")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.manual_seed(0)
    base = llama(num_hidden_layers=3)
    train(base, fp4adam.FP4Adam(base.parameters(), lr=3e-3), load_text()[0], args.pretrain)
    rows = []
    for lr in args.lr:
        for start, (format, knows) in STARTS.items():
            kinds = [torch.float32]
            if format is not None and not knows and not start.startswith("BF16"):
                kinds.append(torch.int8)
            for masters in kinds:
                rows.append(run(base, start, lr, masters, args))
                print(rows[-1], flush=True)
                if args.json:
                    result = {**about("cpu"), "pretrain": args.pretrain, "steps": args.steps}
                    args.json.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
