"""Rounding afterwards, quantization-aware training and distillation: what each loses when served.

    python benchmarks/qat.py [--json qat.json] [--seeds N] [--first-seed N] [those of train_gpt.py]

The same GPT sees the same tokens in every run: AdamW in high precision, rounded at its end (PTQ);
the same until --share of the steps are left, which FP4Adam takes on quantized weights (QAT), or on
the teacher's predictions instead of the text (QAD); and FP4Adam from the first step on. Students
train with activations in high precision (W4A16) or fake-quantized (W4A4; W8A16 and W8A8 for the
formats of 8 bits). Each result is exported, the files are read back, and held-out text is predicted
with both kinds of activations. The teacher of QAD is the AdamW run at its end.
"""

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from provenance import about
from torch import Tensor, nn

import fp4adam

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from options import count, parse_args
from stdlib_text import cut_batch
from train_gpt import Run, autocast, build_run, compute_loss, new_model, text_parts, train_step

# Held-out batches, the same for every run.
BATCHES = 16
LAYOUT_OF = {"nvfp4": "compressed-tensors", "mxfp8": "compressed-tensors", "float8block": "fp8"}
# Options of train_gpt.py that each run has its own of.
DECIDED = ("optimizer", "compare", "matmul", "seed", "resume", "accumulate")


class Contestant(NamedTuple):
    """A way to quantized weights.

    Attributes:
        name: Its row in the table.
        activations: Of the recipe that it trains with, or None if it does not train with one.
        throughout: Whether weights are quantized from the first step on.
        distils: Whether it learns the teacher's predictions.
    """

    name: str
    activations: bool | str | None
    throughout: bool = False
    distils: bool = False


CONTESTANTS = (
    Contestant("AdamW, then rounded (PTQ)", None),
    Contestant("QAT, {a16}", False),
    Contestant("QAT, {a4}", "fake"),
    Contestant("QAD, {a16}", False, distils=True),
    Contestant("QAD, {a4}", "fake", distils=True),
    Contestant("FP4Adam throughout, {a16}", False, throughout=True),
    Contestant("FP4Adam throughout, {a4}", "fake", throughout=True),
)


def logits_of(model: nn.Module, args: argparse.Namespace, tokens: Tensor) -> Tensor:
    """Predictions, float32."""
    with autocast(args):
        return model(tokens).float()


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher || student) of logits, mean over the tokens."""
    logs = (logits.flatten(0, 1).log_softmax(-1) for logits in (student, teacher))
    return F.kl_div(*logs, reduction="batchmean", log_target=True)


def distillation_loss(
    teacher: nn.Module, run: Run, args: argparse.Namespace, text: Tensor, seed: int
) -> Tensor:
    """The divergence from the teacher's predictions on the crops that ``compute_loss`` takes."""
    tokens, _ = cut_batch(text, args.batch, args.context, seed)
    with torch.no_grad():
        expected = logits_of(teacher, args, tokens)
    return divergence(expected, logits_of(run.model, args, tokens))


def go_on(start: Run, args: argparse.Namespace, recipe: fp4adam.Recipe) -> Run:
    """A run with quantized weights that goes on from one with AdamW, moments included."""
    run = build_run(args, args.format[0], "fp4adam", recipe, copy.deepcopy(start.model))
    run.optimizer.load_state_dict(start.optimizer.state_dict())
    run.scheduler.load_state_dict(start.scheduler.state_dict())
    return run


def train_to(
    step: int,
    run: Run,
    args: argparse.Namespace,
    text: Tensor,
    compute: Callable[..., Tensor] = compute_loss,
) -> None:
    """Take steps until ``step`` are done."""
    while run.step < step:
        train_step(run, args, text, compute)


@torch.no_grad()
def served(
    run: Run, expected: list[Tensor], args: argparse.Namespace, held_out: Tensor
) -> dict[str, dict[str, float]]:
    """Export the run's model, read the files back, and evaluate both kinds of activations.

    Raises:
        RuntimeError: If the bytes that were read are not those that were trained.
    """
    found = {}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "export")
        layout = LAYOUT_OF[args.format[0]]
        fp4adam.export_checkpoint(run.model, folder, layout, config={"model_type": "gpt"})
        for name, activations in (("a16", False), ("a4", "fake")):
            recipe = fp4adam.Recipe(args.format[0], activations=activations)
            model = fp4adam.import_checkpoint(new_model(args), folder, recipe.quantizer)
            check_bytes(run.model, model)
            found[name] = evaluate(model, expected, args, held_out)
    return found


def check_bytes(trained: nn.Module, read: nn.Module) -> None:
    """Raise RuntimeError unless two models have the same codes."""
    for name, param in trained.named_parameters():
        if isinstance(param, fp4adam.QuantizedTensor):
            if not torch.equal(param.rowwise_data, read.get_parameter(name).rowwise_data):
                raise RuntimeError(f"{name} of the exported file has other codes than were trained")


@torch.no_grad()
def predict(model: nn.Module, args: argparse.Namespace, held_out: Tensor) -> list[Tensor]:
    """Logits of the held-out batches."""
    batches = (cut_batch(held_out, args.batch, args.context, seed) for seed in range(BATCHES))
    return [logits_of(model, args, tokens) for tokens, _ in batches]


def evaluate(
    model: nn.Module, expected: list[Tensor], args: argparse.Namespace, held_out: Tensor
) -> dict[str, float]:
    """Held-out loss in nats per byte, and the divergence from the teacher's predictions."""
    losses, divergences = [], []
    for seed, logits in enumerate(predict(model, args, held_out)):
        _, targets = cut_batch(held_out, args.batch, args.context, seed)
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item())
        divergences.append(divergence(expected[seed], logits).item())
    return {"loss": statistics.fmean(losses), "kl": statistics.fmean(divergences)}


def measure(args: argparse.Namespace, share: float) -> dict[str, Any]:
    """All runs of one seed, by name."""
    text, held_out = text_parts(args)
    begin = args.steps - max(1, round(args.steps * share))
    whole = build_run(args, "fp32", "adamw")
    train_to(begin, whole, args, text)
    start = copy.deepcopy(whole)
    train_to(args.steps, whole, args, text)
    teacher = whole.model
    expected = predict(teacher, args, held_out)
    found = {"AdamW, high precision": {"a16": evaluate(teacher, expected, args, held_out)}}
    for contestant in CONTESTANTS:
        clock = time.perf_counter()
        recipe = fp4adam.Recipe(args.format[0], activations=contestant.activations or False)
        compute = partial(distillation_loss, teacher) if contestant.distils else compute_loss
        if contestant.throughout:
            run = build_run(args, args.format[0], "fp4adam", recipe)
        else:
            run = go_on(whole if contestant.activations is None else start, args, recipe)
        train_to(args.steps, run, args, text, compute)
        name = contestant.name.format(**names_of(args))
        found[name] = served(run, expected, args, held_out)
        losses = "  ".join(f"{key} {each['loss']:.4f}" for key, each in found[name].items())
        seconds = time.perf_counter() - clock
        print(f"seed {args.seed}  {name:28s}  {losses}  {seconds:5.0f} s", flush=True)
    return found


def names_of(args: argparse.Namespace) -> dict[str, str]:
    """The usual names of both kinds of activations."""
    bits = 4 if args.format[0] == "nvfp4" else 8
    return {"a16": f"W{bits}A16", "a4": f"W{bits}A{bits}"}


def table(seeds: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """The means over the seeds as Markdown; gaps are to AdamW in high precision, seed by seed."""
    kinds = names_of(args)
    titles = [""]
    for name in kinds.values():
        titles += [f"held-out loss, {name}", "gap", "KL"]
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    baseline, *others = seeds[0]
    for name in (baseline, *others):
        cells = [name]
        for kind in kinds:
            if kind not in seeds[0][name]:
                cells += ["", "", ""]
                continue
            rows = [seed[name][kind] for seed in seeds]
            gaps = [seed[name][kind]["loss"] - seed[baseline]["a16"]["loss"] for seed in seeds]
            spread = f" ± {statistics.stdev(gaps):.4f}" if len(gaps) > 1 and any(gaps) else ""
            cells.append(f"{statistics.fmean(row['loss'] for row in rows):.4f}")
            cells.append(f"{statistics.fmean(gaps):+.4f}{spread}" if any(gaps) else "")
            divergence = statistics.fmean(row["kl"] for row in rows)
            cells.append(f"{divergence:.4f}" if any(gaps) else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse() -> tuple[argparse.Namespace, argparse.Namespace]:
    """The options of this program, and those of train_gpt.py."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=count, default=1, metavar="N", help="default: 1")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument(
        "--share", type=float, default=0.1, help="of the steps, for QAT and QAD; default: 0.1"
    )
    parser.add_argument("--json", type=Path, default=Path("qat.json"), help="default: qat.json")
    own, rest = parser.parse_known_args()
    args = parse_args(rest)
    usual = parse_args(["--size", args.size])
    for name in DECIDED:
        if getattr(args, name) != getattr(usual, name):
            parser.error(f"--{name} is not an option of this program; leave it out")
    if args.format[0] not in LAYOUT_OF or not 0 < own.share < 1:
        parser.error(f"--format must be of {', '.join(LAYOUT_OF)}, and --share between 0 and 1")
    return own, args


def main() -> None:
    """Measure, print the table, write the file."""
    own, args = parse()
    found = []
    for seed in range(own.first_seed, own.first_seed + own.seeds):
        found.append(measure(argparse.Namespace(**vars(args) | {"seed": seed}), own.share))
        settings = {"share": own.share, "first_seed": own.first_seed, "seeds": len(found)}
        settings |= {name: getattr(args, name) for name in ("format", "size", "steps", "batch")}
        settings |= {name: getattr(args, name) for name in ("layers", "heads", "dim", "context")}
        content = {**about(args.device), "settings": settings, "runs": found}
        own.json.write_text(json.dumps(content, indent=1) + "\n")
    print(table(found, args))


if __name__ == "__main__":
    main()
