"""Full fine-tuning of a Llama shape on one GPU: peak memory and tokens per second.

    python benchmarks/full_finetune.py [--shape 8b] [--only TEXT[;TEXT]] [--json full_finetune.json]
    python benchmarks/full_finetune.py --layers 100   # how large a model trains: add layers
    python benchmarks/full_finetune.py --trainer      # in the loop of TRL's SFTTrainer

The model is transformers' ``LlamaForCausalLM`` with random weights, in BF16 where they are not
quantized; its steps read random tokens and recompute activations. Everyone is measured on the same
terms: with gradients that stay for the step, and released, each weight stepped within the backward
pass and its gradient freed. Who has no release of its own gets one optimizer per parameter in
``register_post_accumulate_grad_hook``, as torch's tutorial does. One that does not fit, or a
package that is missing, says so in its row. A trainer accumulates gradients of two sequences and
clips them, so nothing is released there.
"""

import argparse
import importlib
import itertools
import statistics
import tempfile
import time
import warnings
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


class StepInBackward:
    """One optimizer per parameter, stepped as soon as its gradient is there."""

    def __init__(self, model: nn.Module, make: Callable[[list[Parameter]], Any]) -> None:
        self._optimizers = {p: make([p]) for p in model.parameters()}
        self._hooks = [p.register_post_accumulate_grad_hook(self._step) for p in self._optimizers]

    def _step(self, param: Parameter) -> None:
        self._optimizers[param].step()
        param.grad = None

    def remove(self) -> None:
        """Take the hooks away, which would keep the model in memory."""
        for hook in self._hooks:
            hook.remove()

    def step(self) -> None:
        """Nothing is left to do."""

    zero_grad = step

    @property
    def state(self) -> dict[Parameter, Any]:
        """The state of all optimizers."""
        return {p: optimizer.state[p] for p, optimizer in self._optimizers.items()}


Made = tuple[Any, Any]  # an optimizer, and what has ``remove()`` for its hooks
Release = Callable[[nn.Module, Callable[[list[Parameter]], Any]], Made]


def step_in_backward(model: nn.Module, make: Callable[[list[Parameter]], Any]) -> Made:
    """One optimizer per parameter."""
    optimizer = StepInBackward(model, make)
    return optimizer, optimizer


class Contestant(NamedTuple):
    """An optimizer of a model whose linear weights are in ``format``, BF16 if None.

    ``release``: makes an optimizer of a model that frees gradients in the backward pass; None: it
    is not measured so.
    """

    name: str
    make: Callable[[list[Parameter]], Any]
    format: str | Recipe | None = None
    release: Release | None = step_in_backward


def released_by_fp4adam(model: nn.Module, make: Callable[[list[Parameter]], Any]) -> Made:
    """FP4Adam with its own gradient release."""
    optimizer = make(list(model.parameters()))
    return optimizer, optimizer.enable_gradient_release()


def released_by_flashoptim(model: nn.Module, make: Callable[[list[Parameter]], Any]) -> Made:
    """flashoptim's optimizer with its own gradient release, whose step() only warns."""
    optimizer = make(list(model.parameters()))
    release = importlib.import_module("flashoptim").enable_gradient_release(model, optimizer)
    warnings.filterwarnings("ignore", ".*no-op while enable_gradient_release")
    return optimizer, release


def ours(**options: Any) -> Callable[[list[Parameter]], Any]:
    """FP4Adam with these options."""
    return partial(FP4Adam, **HYPER, **options)


def peer(module: str, name: str, **options: Any) -> Callable[[list[Parameter]], Any]:
    """Another package's optimizer; ImportError where it is missing."""
    options = HYPER | options

    def make(params: list[Parameter]) -> Any:
        return getattr(importlib.import_module(module), name)(params, **options)

    return make


def fp4adam_on(
    name: str, format: str | Recipe, label: str = "8-bit states", **options: Any
) -> Contestant:
    """FP4Adam on a model in this format."""
    options = {"states": "8bit"} | options
    return Contestant(f"FP4Adam, {name}, {label}", ours(**options), format, released_by_fp4adam)


CONTESTANTS = (
    Contestant(
        "torch AdamW fused, BF16 (no masters)", partial(torch.optim.AdamW, **HYPER, fused=True)
    ),
    Contestant(
        "torchao AdamW8bit, BF16, stochastic rounding",
        peer("torchao.optim", "AdamW8bit", bf16_stochastic_round=True),
    ),
    Contestant(
        "flashoptim FlashAdamW, BF16",
        peer("flashoptim", "FlashAdamW"),
        release=released_by_flashoptim,
    ),
    # Its pages ask for 0.6 times the learning rate of AdamW. It has no release of its own, and one
    # optimizer per parameter had not made its first steps within three minutes.
    Contestant("Gefen-X, BF16", peer("gefen", "Gefen", lr=0.6 * HYPER["lr"]), release=None),
    fp4adam_on("NVFP4", "nvfp4"),
    fp4adam_on("NVFP4", "nvfp4", "FP16 masters, FP8 moments", master_weight_dtype=torch.float16),
    fp4adam_on("MXFP8", "mxfp8"),
    fp4adam_on("MXFP8", "mxfp8", "8-bit moments, no masters", master_weights=False),
    fp4adam_on("Float8Block", "float8block", "8-bit moments, no masters", master_weights=False),
    fp4adam_on("NVFP4", "nvfp4", "factored second moments", states="factored"),
    *(
        fp4adam_on(
            name,
            format,
            "factored second moments, no masters",
            states="factored",
            master_weights=False,
        )
        for name, format in (("MXFP8", "mxfp8"), ("Float8Block", "float8block"))
    ),
    fp4adam_on("NVFP4", "nvfp4", "8-bit states on the host", offload_states=True),
    *(
        fp4adam_on(f"{name}, FP8 matmuls", Recipe(weights, activations=True, gradients=True))
        for name, weights in (("Float8", "float8"), ("Float8Block", "float8block"))
    ),
)


def build(contestant: Contestant, args: argparse.Namespace) -> nn.Module:
    """The model, quantized layer by layer as it is made, without values before that."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    layers, width, mlp, heads, kv_heads, vocabulary = args.sizes
    config = LlamaConfig(
        num_hidden_layers=0,
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
            model, config.num_hidden_layers = LlamaForCausalLM(config), layers
            for i in range(layers):
                with quantized_init(contestant.format, enabled=contestant.format is not None):
                    layer = LlamaDecoderLayer(config, i)
                for param in layer.parameters():
                    if hasattr(param, "clear_high_precision_init_val"):
                        param.clear_high_precision_init_val()
                model.model.layers.append(layer)
    finally:
        torch.set_default_dtype(default)
    if args.recompute == "yes":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if args.compile:
        for layer in model.model.layers:
            layer.compile()
    return model.train()


def measure_in_trainer(
    model: nn.Module, optimizer: Any, tokens: torch.Tensor, args: argparse.Namespace, before: int
) -> Row:
    """GiB at the peak of later steps, and milliseconds of one, of TRL's SFTTrainer."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    cuda, ends, peaks = args.device == "cuda", [], []

    class Meter(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
                peaks.append((torch.cuda.max_memory_allocated() - before) / 2**30)
                torch.cuda.reset_peak_memory_stats()
            ends.append(time.perf_counter())

    end = "<|end|>"
    words = Tokenizer(models.WordLevel({end: 0}, unk_token=end))
    accumulate, warm_up = 2, 3
    steps = warm_up + args.repeats
    rows = [{"input_ids": row.tolist()} for row in tokens for _ in range(accumulate * steps)]
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            folder,
            max_steps=steps,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=accumulate,
            gradient_checkpointing=args.recompute == "yes",
            max_length=args.context,
            save_strategy="no",
            report_to=[],
            use_cpu=not cuda,
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model,
            config,
            train_dataset=Dataset.from_list(rows),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=words, eos_token=end, pad_token=end
            ),
            optimizers=(optimizer, None),
            callbacks=[Meter()],
        )
        trainer.train()
    seconds = statistics.median(b - a for a, b in itertools.pairwise(ends[warm_up - 1 :]))
    row: Row = {"ms": seconds * 1e3, "clipped_at": config.max_grad_norm}
    row["tokens_per_second"] = accumulate * tokens.numel() / seconds
    if cuda:
        row["peak_GiB"] = max(peaks[warm_up:])
    return row


def measure(contestant: Contestant, args: argparse.Namespace, releases: bool, row: Row) -> None:
    """Put into the row what there is to know of an optimizer that runs."""
    clock = Clock(args.device)
    before = torch.cuda.memory_allocated() if clock.cuda else 0
    row["released"] = releases
    model = build(contestant, args)
    params = list(model.parameters())
    row["parameters"] = count = sum(p.numel() for p in params)
    row["quantized"] = sum(p.numel() for p in params if hasattr(p, "quantizer"))
    row["weight_B"] = sum(map(stored_bytes, params)) / count
    if releases:
        optimizer, release = contestant.release(model, contestant.make)
    else:
        optimizer, release = contestant.make(params), None
    tokens = torch.randint(
        args.sizes[-1], (args.batch, args.context), generator=torch.Generator().manual_seed(0)
    ).to(args.device)

    def step() -> None:
        # HF shifts the labels; logits in FP32 would take more than the model's layers.
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        if args.trainer:
            row |= measure_in_trainer(model, optimizer, tokens, args, before)
        else:
            row |= measure_steps(clock, step, args.repeats, before)
            row["tokens_per_second"] = tokens.numel() / row["ms"] * 1e3
        state = optimizer.state
        row["state_B"] = sum(stored_bytes(state[p]) for p in params) / count
    finally:
        if release is not None:
            release.remove()


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
    parser.add_argument("--recompute", choices=("yes", "no"), default="yes", help="activations")
    parser.add_argument("--compile", action="store_true", help="each layer")
    parser.add_argument("--trainer", action="store_true", help="TRL's, gradients not released")
    parser.add_argument(
        "--release", choices=("yes", "no", "both"), default="both", help="gradients"
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(";"),
        metavar="TEXT[;TEXT]",
        help="only names that contain one of these",
    )
    parser.add_argument("--json", type=Path, help="write settings and results to this file")
    args = parser.parse_args()
    if args.trainer:
        args.release = "no"
    args.sizes = (args.layers or SHAPES[args.shape][0], *SHAPES[args.shape][1:])
    return args


def main() -> None:
    """Measure every optimizer, and print a line for each."""
    args = parse_args()
    names = ("shape", "sizes", "context", "batch", "repeats", "recompute", "compile", "trainer")
    settings = {name: getattr(args, name) for name in names}
    run = about(args.device) | {"settings": settings}
    print(f"{run['device']}, {run['date']}, {settings}\n")
    members = (
        (
            f"{contestant.name}{', released' if releases else ''}",
            partial(measure, contestant, args, releases),
        )
        for contestant in CONTESTANTS
        for releases in (False, True)
        if args.release in ("both", "yes" if releases else "no")
        and (contestant.release or not releases)
        and any(text in contestant.name for text in args.only or [""])
    )
    measure_all(members, COLUMNS, run, args.json)


if __name__ == "__main__":
    main()
