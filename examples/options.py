"""The command line of train_gpt.py: options, presets, and checks of combinations."""

import argparse
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, GPTConfig

import fp4adam
from distributed import EXTRA, load_extra, world_size

QUANTIZED = ("nvfp4", "mxfp8", "float8block")
PLAIN = ("bf16", "fp32")
# How the optimizer stores its states: moments in a dtype, FP8 with scales of blocks, and masters in
# FP32; or both by one word of FP4Adam's.
STATES: dict[str, dict[str, Any]] = {
    name: {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    for name, dtype in (
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp8", torch.float8_e4m3fn),
    )
}
STATES |= {
    "16bit": {"states": "16bit"},
    "8bit": {"states": "8bit"},
    "factored": {"states": "factored"},
    "fp16-masters": {"states": "8bit", "master_weight_dtype": torch.float16},
    "no-masters": {"states": "8bit", "master_weights": False},
    "factored-no-masters": {"states": "factored", "master_weights": False},
}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(layers=4, heads=4, dim=128, context=128, batch=16, steps=240, lr=2e-3),
    "small": dict(layers=6, heads=10, dim=640, context=512, batch=64, steps=1000, lr=1.2e-3),
    "100m": dict(layers=14, heads=12, dim=768, context=1024, batch=32, steps=1000, lr=8e-4),
    "1b": dict(layers=20, heads=16, dim=2048, context=1024, batch=16, steps=300, lr=3e-4),
}
# Operands of linear layers: weights dequantized for each matmul, or once for all batches of a step;
# or quantized weights, activations and gradients.
MATMULS = ("dequantized", "quantized")
# What may differ between the run that wrote a checkpoint and the one that resumes it.
FREE_ON_RESUME = {"resume", "device", "out", "steps", "eval_every", "checkpoint_every", "sample"}


def formats(text: str) -> list[str]:
    """A comma-separated list of formats (argparse type)."""
    names = text.split(",")
    for name in names:
        if name not in (*QUANTIZED, *PLAIN):
            known = ", ".join((*QUANTIZED, *PLAIN))
            raise argparse.ArgumentTypeError(f"must be of {known}, got {name!r}")
    return names


def states(text: str) -> list[str]:
    """A comma-separated list of what states are stored in (argparse type)."""
    names = text.split(",")
    for name in names:
        if name not in STATES:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(STATES)}, got {name!r}")
    return names


def folders(text: str) -> list[str]:
    """Comma-separated folders, as absolute paths (argparse type)."""
    names = text.split(",")
    for name in names:
        if not Path(name).is_dir():
            raise argparse.ArgumentTypeError(f"must be folders, got {name!r}")
    return [str(Path(name).resolve()) for name in names]


def count(text: str, least: int = 1) -> int:
    """A whole number from 1 (argparse type)."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least}, got {text!r}")
    return int(text)


def count_or_none(text: str) -> int:
    """A whole number from 0 (argparse type)."""
    return count(text, least=0)


def number(text: str) -> float:
    """A finite number from 0 (argparse type)."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"must be a number from 0, got {text!r}")
    return value


def positive_number(text: str) -> float:
    """A finite number above 0 (argparse type)."""
    if not (value := number(text)):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text!r}")
    return value


def device(text: str) -> str:
    """A device of this machine (argparse type)."""
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:INDEX, got {text!r}")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(
            f"must be a device of this machine, got {text!r} with {torch.cuda.device_count()} "
            "CUDA devices; `python -m fp4adam` says why, --device cpu works everywhere"
        )
    return text


def checkpoint(text: str) -> str:
    """The path of a checkpoint (argparse type)."""
    if not Path(text, EXTRA).is_file():
        raise argparse.ArgumentTypeError(f"must be the folder of a checkpoint, got {text!r}")
    return text


def build_parser() -> argparse.ArgumentParser:
    """All options; None stands for the value that --size or --steps implies."""
    parser = argparse.ArgumentParser(
        description="Trains a GPT with quantized weights, on the source code of Python itself or "
        "other --text."
    )
    gpu = torch.cuda.is_available()
    what = parser.add_argument_group("what to train").add_argument
    what(
        "--format",
        type=formats,
        default=["nvfp4"],
        metavar="NAME[,NAME]",
        help="how linear weights are stored: nvfp4, mxfp8, float8block; bf16 and fp32 quantize "
        "nothing; several only with --compare (default: nvfp4)",
    )
    what(
        "--matmul",
        choices=MATMULS,
        default="dequantized",
        help="of quantized weights: dequantized for each matmul, or multiplied as they are, by "
        "quantized activations and gradients (default: dequantized)",
    )
    what(
        "--optimizer",
        choices=("fp4adam", "adamw"),
        default="fp4adam",
        help="adamw is torch's and takes no quantized weights (default: fp4adam)",
    )
    what(
        "--compare",
        action="store_true",
        help="train each --baseline with torch's AdamW and round the first one to each --format "
        "afterwards, then train in each --format with each of --states, and plot them all",
    )
    what(
        "--seeds",
        type=count,
        default=1,
        metavar="N",
        help="seeds that --compare trains everyone with, --seed and those after it, so that gaps "
        "have a standard error (default: 1)",
    )
    what(
        "--baseline",
        type=formats,
        default=["fp32"],
        metavar="NAME[,NAME]",
        help="parameters of the AdamW runs of --compare: fp32, bf16 (default: fp32)",
    )
    what(
        "--size",
        choices=tuple(PRESETS),
        default="100m" if gpu else "tiny",
        help="preset for the next seven options: 1 M, 30 M, 100 M or 1 B parameters "
        "(default: 100m on a GPU, else tiny)",
    )
    what("--layers", type=count, metavar="N", help="number of blocks")
    what("--heads", type=count, metavar="N", help="attention heads per block")
    what(
        "--dim",
        type=count,
        metavar="N",
        help="width of the residual stream, best a multiple of 128",
    )
    what("--context", type=count, metavar="N", help="sequence length in bytes")
    what(
        "--text",
        type=folders,
        default=[],
        metavar="DIR[,DIR]",
        help="train on the *.py, *.md, *.rst and *.txt files of these folders (default: the "
        "standard library)",
    )
    how = parser.add_argument_group("how to train it").add_argument
    how("--batch", type=count, metavar="N", help="sequences per batch")
    how("--steps", type=count, metavar="N", help="optimizer steps")
    how("--lr", type=positive_number, metavar="X", help="highest learning rate")
    how(
        "--schedule",
        choices=("cosine", "wsd", "constant"),
        default="cosine",
        help="after a warm-up of 10 %%: cosine to a tenth, constant with a linear end over the "
        "last 20 %%, or constant (default: cosine)",
    )
    how("--weight-decay", type=number, default=0.1, metavar="X", help="of matrices (default: 0.1)")
    how(
        "--clip",
        type=number,
        default=1.0,
        metavar="X",
        help="largest norm of all gradients together; 0 for no limit (default: 1)",
    )
    how(
        "--states",
        type=states,
        default=["fp32"],
        metavar="NAME[,NAME]",
        help="how fp4adam stores its moments: fp32, bf16, fp16, fp8; or its masters too: 16bit, "
        "8bit, fp16-masters (beside FP8 moments), no-masters (8-bit weights alone); several only "
        "with --compare (default: fp32)",
    )
    how("--accumulate", type=count, default=1, metavar="N", help="batches per step (default: 1)")
    how(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="compile the blocks with torch.compile (default: no)",
    )
    how("--seed", type=int, default=0, metavar="N", help="of weights and data order (default: 0)")
    how(
        "--device",
        type=device,
        default="cuda" if gpu else "cpu",
        metavar="NAME",
        help="cpu or cuda[:index] (default: the GPU)",
    )
    out = parser.add_argument_group("what to write").add_argument
    out("--out", metavar="DIR", help="new folder for all files (default: runs/SIZE-NUMBER)")
    out(
        "--eval-every",
        type=count,
        metavar="N",
        help="steps between progress lines with a held-out loss (default: a tenth of --steps)",
    )
    out(
        "--checkpoint-every",
        type=count_or_none,
        default=0,
        metavar="N",
        help="steps between checkpoints, the last step included; 0 for none (default: 0)",
    )
    out(
        "--resume",
        type=checkpoint,
        metavar="DIR",
        help="continue from a checkpoint, to the same bits on as many processes as wrote it; its "
        "settings are the defaults. --steps may be larger: the schedule is then the longer one's",
    )
    out(
        "--sample",
        type=count_or_none,
        default=0,
        metavar="N",
        help="bytes to write at the end (default: 0)",
    )
    return parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, completed by --size or by the checkpoint to resume."""
    parser = build_parser()
    first = parser.parse_args(argv)
    settings = PRESETS[first.size]
    if first.resume:
        settings = load_extra(Path(first.resume))["settings"] | {"out": None}
    parser.set_defaults(**settings)
    args = parser.parse_args(argv)
    args.eval_every = args.eval_every or max(1, args.steps // 10)
    check_args(parser, args, settings)
    return args


def check_args(
    parser: argparse.ArgumentParser, args: argparse.Namespace, settings: dict[str, Any]
) -> None:
    """Ends the program if options do not go together, before any time is spent."""
    if args.compare and args.resume:
        parser.error("--resume continues one run, got --compare too; leave one of them out")
    if args.compare and importlib.util.find_spec("matplotlib") is None:
        parser.error("--compare plots with matplotlib; install it: pip install '.[demo]'")
    for name in ("baseline", "seeds"):
        is_given = not args.resume and getattr(args, name) != parser.get_default(name)
        if is_given and not args.compare:
            parser.error(f"--{name} is for --compare alone; add it, or leave --{name} out")
    for name in ("format", "states"):
        values = getattr(args, name)
        if not args.compare and len(values) > 1:
            parser.error(f"--{name} must be one name, got {','.join(values)}; add --compare")
    if args.optimizer == "adamw" and not set(args.format) <= set(PLAIN):
        parser.error(f"--optimizer adamw needs bf16 or fp32, got --format {','.join(args.format)}")
    if args.matmul != "dequantized" and not set(args.format) <= set(QUANTIZED):
        parser.error(
            f"--matmul {args.matmul} needs quantized weights, got --format "
            f"{','.join(args.format)}; leave --matmul out"
        )
    if args.out and Path(args.out).exists() and not is_empty_folder(Path(args.out)):
        parser.error(f"--out must be new or empty, got {args.out}; choose another, or leave it out")
    if args.resume:
        done = load_extra(Path(args.resume))["scheduler"]["last_epoch"]
        if args.steps < done:
            parser.error(f"--steps must be at least the {done} of the checkpoint, got {args.steps}")
    check_model(parser, args)
    if not set(args.baseline) <= set(PLAIN):
        parser.error(f"--baseline must be of bf16, fp32, got {','.join(args.baseline)}")
    if args.batch % world_size():
        parser.error(
            f"--batch must be a multiple of the {world_size()} processes, got {args.batch}; change "
            "it or torchrun's --nproc-per-node"
        )
    if world_size() > 1 and args.device not in ("cpu", "cuda"):
        parser.error(
            f"--device must be cpu or cuda under torchrun, got {args.device}; each process takes "
            "the GPU of its local rank"
        )
    for name in settings.keys() - FREE_ON_RESUME if args.resume else ():
        if getattr(args, name) != settings[name]:
            option = "--" + name.replace("_", "-")
            parser.error(f"{option} must be {settings[name]} to resume, got {getattr(args, name)}")


def is_empty_folder(path: Path) -> bool:
    """Whether nothing in it could be overwritten."""
    return path.is_dir() and not any(path.iterdir())


def recipe_of(args: argparse.Namespace, weight_format: str) -> fp4adam.Recipe:
    """What --format and --matmul say about one of the formats."""
    both = args.matmul == "quantized"
    return fp4adam.Recipe(weight_format, activations=both, gradients=both)


def check_model(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program if there is no such model, or a format cannot hold one of its weights."""
    try:
        for name in args.format:
            with torch.device("meta"):
                model = GPT(GPTConfig(1, args.heads, args.dim, args.context))
            if name in QUANTIZED:
                # With a filter, a layer that does not fit is an error.
                fp4adam.quantize_model(model, recipe_of(args, name), fp4adam.is_hidden_linear)
    except ValueError as error:
        parser.error(str(error))
