"""How close training with quantized weights comes to BF16: losses of the same GPT on the same data.

    python benchmarks/numerics.py [--tokens 50e6] [--only TEXT[;TEXT]] [options of train_gpt.py]
    python benchmarks/numerics.py --start model.pt --lr 1e-5 --schedule constant --text FOLDER

Every run adds its losses to --out when it ends, in place of an earlier run of that name; processes
on several GPUs take a part of the runs each, and a file of their own. numerics_report.py makes a
table and a picture of the files. With --start, all runs continue from the model in that file; if
there is none, the first run's model is saved there. README.md explains what is measured and how.
"""

import argparse
import dataclasses
import gc
import json
import math
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpt_training import use_torchao
from provenance import about
from report import versions_of

import fp4adam
from fp4adam.nn.operand import Float8Operands

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from options import parse_args
from train_gpt import OPTIMIZERS, build_run, new_model, text_parts, train_step, validate

from distributed import world_size

# Batches of held-out text, the same for every run: those of the curve, and with more behind them
# those of the last loss.
BATCHES, LAST_BATCHES = 16, 64
EVALUATIONS = 20
# Options of train_gpt.py that each run has its own of.
DECIDED = ("format", "optimizer", "compare", "matmul", "seed", "steps", "resume")


class Contestant(NamedTuple):
    """What a run trains; an ablation is there to fail.

    ``gradients`` are the codes of gradients in Float8 matmuls, ``torchao`` its recipe for float8
    training of weights in high precision.
    """

    name: str
    format: str
    optimizer: str = "fp4adam"
    recipe: fp4adam.Recipe | None = None
    seed: int = 0
    is_ablation: bool = False
    states: str = "fp32"
    lr_factor: float = 1.0
    gradients: torch.dtype = torch.float8_e5m2
    torchao: str | None = None


FP8_MATMULS = fp4adam.Recipe("float8block", activations=True, gradients=True)
FLOAT8 = fp4adam.Recipe("float8", activations=True, gradients=True)
FLOAT8_BUT_DW = dataclasses.replace(FLOAT8, weight_gradients=False)
NVFP4_1D = fp4adam.Recipe(fp4adam.NVFP4Quantizer(two_dimensional=False))
# Weights and activations in NVFP4; their products are emulated.
NVFP4_MATMULS = fp4adam.Recipe("nvfp4", activations=True, emulate=True)
CONTESTANTS = (
    Contestant("BF16 + AdamW, seed 0", "fp32", "adamw"),
    Contestant("BF16 + AdamW, seed 1", "fp32", "adamw", seed=1),
    Contestant("BF16 + AdamW, seed 2", "fp32", "adamw", seed=2),
    Contestant("MXFP8", "mxfp8"),
    Contestant("Float8Block", "float8block"),
    Contestant("NVFP4 2D", "nvfp4"),
    Contestant("NVFP4 1D", "nvfp4", recipe=NVFP4_1D),
    Contestant("NVFP4, NVFP4 matmuls", "nvfp4", recipe=NVFP4_MATMULS),
    Contestant("Float8Block, FP8 matmuls", "float8block", recipe=FP8_MATMULS),
    *(
        Contestant(
            f"Float8, FP8 matmuls{what}, seed {seed}", "float8", "fp4adam", recipe, seed, **of
        )
        for what, recipe, of in (
            ("", FLOAT8, {}),
            (" with E4M3 gradients", FLOAT8, {"gradients": torch.float8_e4m3fn}),
            (" but dW", FLOAT8_BUT_DW, {}),
        )
        for seed in range(3)
    ),
    *(
        Contestant(
            f"torchao float8 tensorwise, seed {seed}",
            "fp32",
            "adamw",
            seed=seed,
            torchao="tensorwise",
        )
        for seed in range(2)
    ),
    Contestant("NVFP4 without masters", "nvfp4", is_ablation=True),
    *(
        Contestant(f"{name}, {what}, seed {seed}", name.lower(), seed=seed, states=states)
        for name in ("NVFP4", "MXFP8", "Float8Block")
        for what, states in (
            ("8bit states", "8bit"),
            ("factored", "factored"),
            ("16bit states", "16bit"),
            ("fp8 states", "fp8"),
            ("FP16 masters and FP8 moments", "fp16-masters"),
        )
        for seed in range(3)
    ),
    *(
        Contestant(f"{name}, FP32 states, seed {seed}", name.lower(), seed=seed)
        for name in ("NVFP4", "MXFP8", "Float8Block")
        for seed in range(1, 3)
    ),
    *(
        Contestant(f"{name}, {what}no masters, seed {seed}", name.lower(), seed=seed, states=states)
        for name in ("MXFP8", "Float8Block")
        for what, states in (("", "no-masters"), ("factored, ", "factored-no-masters"))
        for seed in range(3)
    ),
    # At the part of AdamW's learning rate that its authors advise.
    *(
        Contestant(f"Gefen-X, seed {seed}", "bf16", "gefen", seed=seed, lr_factor=0.6)
        for seed in range(2)
    ),
    *(
        Contestant(
            f"BF16 weights, rounded stochastically, seed {seed}", "bf16", "torchao", seed=seed
        )
        for seed in range(3)
    ),
    # A loss below the reference is a warning: these tests are too short to converge.
    Contestant("NVFP4, FP32 states, 1.3 times the learning rate", "nvfp4", lr_factor=1.3),
)


def rounded_stochastically(
    groups: list[dict[str, Any]], fused: bool, **options: Any
) -> torch.optim.Optimizer:
    """torchao's AdamW of BF16 weights without masters; moments are in BF16 as well."""
    from torchao.optim import _AdamW

    return _AdamW(groups, **options, bf16_stochastic_round=True)


def gefen_x(groups: list[dict[str, Any]], fused: bool, **options: Any) -> torch.optim.Optimizer:
    from gefen import Gefen

    return Gefen(groups, **options)


OPTIMIZERS |= {"torchao": rounded_stochastically, "gefen": gefen_x}


@torch.no_grad()
def forget_masters(optimizer: fp4adam.FP4Adam) -> None:
    """Leave of each master what its weight's codes say, and lose what is smaller than a step."""
    for param, state in optimizer.state.items():
        if isinstance(param, fp4adam.QuantizedTensor):
            state["master_param"].copy_(param.dequantize(torch.float32))


def measure(
    contestant: Contestant, args: argparse.Namespace, start: Path | None = None
) -> dict[str, Any]:
    """Train it, with a line for each evaluation, and return all losses.

    ``start``: The file of a model to continue from; if there is none, this one is saved there.

    Raises:
        RuntimeError: If a loss is not finite, or the device cannot do it.
    """
    own = {"seed": contestant.seed, "lr": args.lr * contestant.lr_factor}
    args = argparse.Namespace(**vars(args) | own)
    Float8Operands.gradient_codes = contestant.gradients
    is_loaded = start is not None and start.exists()
    model = new_model(args)
    if is_loaded:
        model.load_state_dict(torch.load(start, map_location=args.device))
    if contestant.torchao is not None:
        use_torchao(model.blocks, contestant.torchao, args.device)
    run = build_run(
        args, contestant.format, contestant.optimizer, contestant.recipe, model, contestant.states
    )
    text, held_out = text_parts(args)
    train_loss: list[float] = []
    validation_loss: dict[int, float] = {}
    speeds = []
    while run.step < args.steps:
        began, losses = time.perf_counter(), []
        for _ in range(min(args.eval_every, args.steps - run.step)):
            losses.append(train_step(run, args, text))
            if contestant.is_ablation:
                forget_masters(run.optimizer)
        train_loss += torch.stack(losses).tolist()  # waits for the device, for the first time
        tokens = len(losses) * args.batch * args.context * args.accumulate
        speeds.append(tokens / (time.perf_counter() - began))
        if not all(map(math.isfinite, train_loss)):
            raise RuntimeError(f"a loss is not finite before step {run.step}; lower --lr")
        validation_loss[run.step] = statistics.fmean(validate(run, args, held_out, BATCHES))
        print(
            f"{contestant.name:24s}  step {run.step:>5}/{args.steps}  loss {train_loss[-1]:.4f}  "
            f"val {validation_loss[run.step]:.4f}  {speeds[-1]:>9,.0f} tokens/s",
            flush=True,
        )
    if start is not None and not is_loaded:
        weights = {
            name: value.dequantize() if isinstance(value, fp4adam.QuantizedTensor) else value
            for name, value in run.model.state_dict().items()
        }
        torch.save(weights, start)
    return {
        "name": contestant.name,
        "is_ablation": contestant.is_ablation,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "text_bytes": [len(text), len(held_out)],
        "tokens_per_second": statistics.median(speeds),  # which compilation does not move
        "train_loss": [round(loss, 6) for loss in train_loss],
        "validation_loss": validation_loss,
        "last_validation_losses": validate(run, args, held_out, LAST_BATCHES),
    }


def release() -> None:
    """Free the run before this one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def add_run(path: Path, row: dict[str, Any]) -> None:
    """Write a run to a file of runs, in place of one of the same name."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    runs = [run for run in runs if run["name"] != row["name"]] + [row]
    path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """On what was trained, with which settings."""
    names = ("size", "layers", "heads", "dim", "context", "batch", "accumulate", "steps", "lr")
    names += ("schedule", "weight_decay", "clip", "text", "compile", "device")
    return about(args.device) | {"settings": {name: getattr(args, name) for name in names}}


def parse() -> tuple[argparse.Namespace, argparse.Namespace]:
    """The options of this program, and those of train_gpt.py."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--tokens",
        type=float,
        default=50e6 if cuda else 5e5,
        help="to train each run on; 50e6 on a GPU, 5e5 on a CPU",
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(";"),
        default=[""],
        metavar="TEXT[;TEXT]",
        help="only runs whose names contain one of these, or equal it after a '='",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("numerics.json"), help="default: numerics.json"
    )
    parser.add_argument(
        "--start",
        type=Path,
        metavar="FILE",
        help="continue from the model in this file, or save that of the first run there",
    )
    own, rest = parser.parse_known_args()
    args = parse_args([*(["--compile"] if cuda else []), *rest])
    usual = parse_args(["--size", args.size])
    for name in DECIDED:
        if getattr(args, name) != getattr(usual, name):
            parser.error(f"--{name} must be left to the runs and --tokens, got one; see --only")
    if world_size() > 1:
        parser.error(f"runs must be of one process, got {world_size()}; take GPUs with --only")
    args.steps = max(1, int(own.tokens) // (args.batch * args.context * args.accumulate))
    args.eval_every = math.ceil(args.steps / EVALUATIONS)
    return own, args


def main() -> None:
    """Train the runs one after the other; one that fails says so, and the others go on."""
    own, args = parse()
    own.out.parent.mkdir(parents=True, exist_ok=True)
    here = describe(args)
    print(versions_of(here))
    print(f"{here['device']}, {here['date']}, {args.steps} steps", flush=True)
    failed = []
    for contestant in CONTESTANTS:
        name = contestant.name
        if not any(name == text[1:] if text[:1] == "=" else text in name for text in own.only):
            continue
        release()
        try:
            row = measure(contestant, args, own.start)
        except Exception:  # also of compilers: no such matmul on this device, no memory
            traceback.print_exc()
            failed.append(contestant.name)
            continue
        add_run(own.out, row | {"about": here})
        loss = statistics.fmean(row["last_validation_losses"])
        speed = row["tokens_per_second"]
        print(f"{contestant.name:24s}  held out {loss:.5f}  {speed:,.0f} tokens/s", flush=True)
    if failed:
        raise SystemExit(f"not measured: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
