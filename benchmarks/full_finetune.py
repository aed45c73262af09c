"""Full fine-tuning of a Llama shape on one GPU: peak memory and tokens per second.

    python benchmarks/full_finetune.py [--shape 8b] [--only TEXT[;TEXT]] [--json full_finetune.json]
    python benchmarks/full_finetune.py --layers 100   # how large a model trains: add layers

The model is transformers' ``LlamaForCausalLM`` with random weights, in BF16 where they are not
quantized; its steps read random tokens. Each optimizer is measured with and without recomputed
activations (``gradient_checkpointing_enable``). One that does not fit says so in its row.
"""

import argparse
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from provenance import about
from report import Column
from step import Clock, measure_all, measure_steps, stored_bytes
from torch import nn
from torch.nn import Parameter

from fp4adam import FP4Adam, Recipe, quantized_init

Row = dict[str, Any]
HYPER = dict(lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1)
# Layers, width, width of the MLP, heads, heads of keys and values, vocabulary.
SHAPES = {
    "tiny": (2, 64, 128, 4, 2, 256),
    "1b": (16, 2048, 8192, 32, 8, 128256),
    "3b": (28, 3072, 8192, 24, 8, 128256),
    "8b": (32, 4096, 14336, 32, 8, 128256),
    "70b": (80, 8192, 28672, 64, 8, 128256),
}
COLUMNS = (
    Column("weight_B", "weight B", "weights, bytes per parameter", ".2f"),
    Column("state_B", "state B", "states, bytes per parameter", ".2f"),
    Column("steady_GiB", "steady GiB", "between steps, GiB", ".1f"),
    Column("peak_GiB", "peak GiB", "peak of a step, GiB", ".1f"),
    Column("ms", "ms", "a step, ms", ".0f"),
    Column("tokens_per_second", "tokens/s", "tokens per second", ".0f"),
)


class Contestant(NamedTuple):
    """An optimizer of a model whose linear weights are in ``format``, BF16 if None."""

    name: str
    make: Callable[[list[Parameter]], Any]
    format: str | Recipe | None = None
    releases: bool = False


def ours(**options: Any) -> Callable[[list[Parameter]], Any]:
    """FP4Adam with these options."""
    return partial(FP4Adam, **HYPER, **options)


def peer(module: str, name: str, **options: Any) -> Callable[[list[Parameter]], Any]:
    """Another package's optimizer; ImportError where it is missing."""

    def make(params: list[Parameter]) -> Any:
        return getattr(importlib.import_module(module), name)(params, **HYPER, **options)

    return make


CONTESTANTS = (
    Contestant(
        "torch AdamW fused, BF16 (no masters)", partial(torch.optim.AdamW, **HYPER, fused=True)
    ),
    Contestant(
        "torchao AdamW8bit, BF16, stochastic rounding",
        peer("torchao.optim", "AdamW8bit", bf16_stochastic_round=True),
    ),
    Contestant("flashoptim FlashAdamW", peer("flashoptim", "FlashAdamW")),
    Contestant("FP4Adam, NVFP4, FP32 states, released", ours(), "nvfp4", True),
    *(
        Contestant(f"FP4Adam, {name}, 8-bit states, released", ours(states="8bit"), format, True)
        for name, format in (
            ("NVFP4", "nvfp4"),
            ("MXFP8", "mxfp8"),
            ("Float8Block", "float8block"),
        )
    ),
    Contestant(
        "FP4Adam, Float8Block, 8-bit states, released, FP8 matmuls",
        ours(states="8bit"),
        Recipe("float8block", activations=True, gradients=True),
        True,
    ),
)


def build(contestant: Contestant, args: argparse.Namespace, recompute: bool) -> nn.Module:
    """The model, quantized layer by layer as it is made."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, mlp, heads, kv_heads, vocabulary = args.sizes
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=args.context,
        use_cache=False,
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(args.device):
            if contestant.format is None:
                model = LlamaForCausalLM(config)
            else:
                with quantized_init(contestant.format):
                    model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    for param in model.parameters():
        if hasattr(param, "clear_high_precision_init_val"):
            param.clear_high_precision_init_val()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def measure(contestant: Contestant, args: argparse.Namespace, recompute: bool, row: Row) -> None:
    """Put into the row what there is to know of an optimizer that runs."""
    clock = Clock(args.device)
    before = torch.cuda.memory_allocated() if clock.cuda else 0
    model = build(contestant, args, recompute)
    params = list(model.parameters())
    row["parameters"] = count = sum(p.numel() for p in params)
    row["quantized"] = sum(p.numel() for p in params if hasattr(p, "quantizer"))
    row["weight_B"] = sum(map(stored_bytes, params)) / count
    optimizer = contestant.make(params)
    if contestant.releases:
        optimizer.enable_gradient_release()
    tokens = torch.randint(
        args.sizes[-1], (args.batch, args.context), generator=torch.Generator().manual_seed(0)
    ).to(args.device)

    def step() -> None:
        # HF shifts the labels; logits in FP32 would take more than the model's layers.
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    row |= measure_steps(clock, step, args.repeats, before)
    row["state_B"] = sum(stored_bytes(optimizer.state[p]) for p in params) / count
    row["tokens_per_second"] = tokens.numel() / row["ms"] * 1e3


def parse_args() -> argparse.Namespace:
    """The command line; what depends on the device is filled in."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b" if cuda else "tiny")
    parser.add_argument("--layers", type=int, help="as --shape says")
    parser.add_argument("--context", type=int, default=4096 if cuda else 64)
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--repeats", type=int, default=3 if cuda else 1, help="counted steps")
    parser.add_argument(
        "--recompute", choices=("yes", "no", "both"), default="both", help="activations"
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(";"),
        metavar="TEXT[;TEXT]",
        help="only names that contain one of these",
    )
    parser.add_argument("--json", type=Path, help="write settings and results to this file")
    args = parser.parse_args()
    args.sizes = (args.layers or SHAPES[args.shape][0], *SHAPES[args.shape][1:])
    return args


def main() -> None:
    """Measure every optimizer, and print a line for each."""
    args = parse_args()
    names = ("shape", "sizes", "context", "batch", "repeats")
    settings = {name: getattr(args, name) for name in names}
    run = about(args.device) | {"settings": settings}
    print(f"{run['device']}, {run['date']}, {settings}\n")
    members = (
        (
            f"{contestant.name}{', recomputed' if recompute else ''}",
            partial(measure, contestant, args, recompute),
        )
        for contestant in CONTESTANTS
        if any(text in contestant.name for text in args.only or [""])
        for recompute in (True, False)
        if args.recompute in ("both", "yes" if recompute else "no")
    )
    measure_all(members, COLUMNS, run, args.json)


if __name__ == "__main__":
    main()
