"""Why a small model ends behind in a format: the demo's runs with one change at a time.

    python benchmarks/demo_gap.py --json demo_gap.json [--seeds 3] [--only NAME[;NAME]]

Every run of a case and a seed adds its losses to the file when it ends; runs that are in it are not
repeated. Without options that say otherwise, the model, data and schedule are those of `make demo`
on a CPU. The table at the end has each case's gap to AdamW with the same seed.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from numerics import describe, release

import fp4adam

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from options import parse_args
from train_gpt import build_run, learning_rate_share, new_model, text_parts, train_step, validate

BATCHES = 64
REFERENCE = "AdamW, FP32"


class Case(NamedTuple):
    """What a run trains.

    Args:
        name: Its name.
        recipe: The weights' recipe; None keeps them in FP32.
        states: As in --states of train_gpt.py; None is torch's AdamW.
        lr_factor: Times the demo's learning rate.
        warmup: Times the demo's warm-up of a tenth.
        takes: Which of the layers that would be quantized are.
        moved: Starting weights are multiplied by 1 + this times normally distributed numbers.
    """

    name: str
    recipe: str | fp4adam.NVFP4Quantizer | None = None
    states: str | None = "fp32"
    lr_factor: float = 1.0
    warmup: float = 1.0
    takes: Callable[[str], bool] = lambda name: True
    moved: float = 0.0


NVFP4_1D = fp4adam.NVFP4Quantizer(two_dimensional=False)
CASES = (
    Case(REFERENCE, states=None),
    Case("AdamW, FP32, starting weights moved by 1e-6", states=None, moved=1e-6),
    Case("Float8Block", "float8block"),
    Case("NVFP4", "nvfp4"),
    Case("FP32 weights, FP8 moments", states="fp8"),
    Case("NVFP4, 8-bit states", "nvfp4", states="8bit"),
    Case("AdamW, FP32, starting weights moved by 1e-3", states=None, moved=1e-3),
    Case("MXFP8", "mxfp8"),
    Case("NVFP4, blocks of 16 elements", NVFP4_1D),
    Case("AdamW, FP32, half the learning rate", states=None, lr_factor=0.5),
    Case("NVFP4, half the learning rate", "nvfp4", lr_factor=0.5),
    Case("AdamW, FP32, three times the warm-up", states=None, warmup=3.0),
    Case("NVFP4, three times the warm-up", "nvfp4", warmup=3.0),
    Case("NVFP4, FP8 moments", "nvfp4", states="fp8"),
    Case(
        "NVFP4, first and last block in FP32",
        "nvfp4",
        takes=lambda name: not name.startswith(("blocks.0.", "blocks.3.")),
    ),
)


def measure(case: Case, args: argparse.Namespace, seed: int) -> dict[str, object]:
    """Train the demo's model so; its losses on the held-out batches, and rounded to NVFP4."""
    args = argparse.Namespace(**vars(args) | {"seed": seed, "lr": args.lr * case.lr_factor})
    model = new_model(args)
    if case.moved:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in model.parameters():
                noise = torch.randn(param.shape, generator=generator).to(param.device)
                param.mul_(1 + case.moved * noise)
    if case.recipe:
        fp4adam.quantize_model(
            model,
            case.recipe,
            lambda layer, name: fp4adam.is_hidden_linear(layer, name) and case.takes(name),
        )
    optimizer = "fp4adam" if case.states else "adamw"
    run = build_run(args, "fp32", optimizer, model=model, states=case.states)

    def share(step: int) -> float:
        # The demo's warm-up takes a tenth; a longer one ends on the same cosine.
        length = case.warmup * args.steps / 10
        usual = learning_rate_share(step, args.steps, args.schedule)
        return min(usual, (step + 1) / length)

    run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, share)
    text, held_out = text_parts(args)
    train_losses = [train_step(run, args, text).item() for _ in range(args.steps)]
    row = {"name": case.name, "seed": seed, "losses": validate(run, args, held_out, BATCHES)}
    row["train_loss"] = statistics.fmean(train_losses[-args.steps // 10 :])
    if not case.recipe and case.states is None:
        fp4adam.quantize_model(model, "nvfp4")
        row["rounded_to_nvfp4"] = validate(run, args, held_out, BATCHES)
    return row


def table(rows: list[dict[str, object]]) -> str:
    """Markdown: of each case the loss of every seed, and the mean gap to AdamW's of the same."""
    losses = {(row["name"], row["seed"]): statistics.fmean(row["losses"]) for row in rows}
    seeds = sorted({seed for _, seed in losses})
    lines = [f"| | {' | '.join(f'seed {seed}' for seed in seeds)} | gap to AdamW |"]
    lines.append("| --- " * (len(seeds) + 2) + "|")
    for name in dict.fromkeys(row["name"] for row in rows):
        found = [losses.get((name, seed)) for seed in seeds]
        gaps = [
            losses[name, seed] - losses[REFERENCE, seed]
            for seed in seeds
            if (name, seed) in losses and (REFERENCE, seed) in losses
        ]
        texts = ["-" if loss is None else f"{loss:.4f}" for loss in found]
        gap = f"{statistics.fmean(gaps):+.4f}" if gaps else "-"
        lines.append(f"| {name} | {' | '.join(texts)} | {gap} |")
    return "\n".join(lines)


def main() -> None:
    """Train the cases that the file lacks, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--json", type=Path, required=True, help="where results are, and go")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", metavar="NAME[;NAME]", help="these cases alone")
    own, rest = parser.parse_known_args()
    args = parse_args(rest)
    content = {"about": describe(args), "runs": []}
    if own.json.exists():
        content = json.loads(own.json.read_text())
    for seed in range(own.seeds):
        for case in CASES:
            is_there = any((r["name"], r["seed"]) == (case.name, seed) for r in content["runs"])
            if is_there or (own.only and case.name not in own.only.split(";")):
                continue
            release()
            row = measure(case, args, seed)
            content["runs"].append(row)
            own.json.write_text(json.dumps(content, indent=1) + "\n")
            print(f"{case.name}, seed {seed}: {statistics.fmean(row['losses']):.4f}", flush=True)
    print(table(content["runs"]))


if __name__ == "__main__":
    main()
