"""Fine-tunes all weights of a model on one card: 4-bit weights, 8-bit states, released gradients.

    python examples/finetune_full.py                               # a small Llama, on a CPU
    python examples/finetune_full.py --config Qwen/Qwen3-8B        # its shape, random weights
    python examples/finetune_full.py Qwen/Qwen3-8B --text my_code  # of the hub, on a GPU
    python examples/finetune_full.py Qwen/Qwen3-8B --text my_code --resume

Weight, master and moments take 3.57 bytes per parameter of the linear layers in NVFP4, 3.09 with
--format mxfp8 --masters none, gradients exist for one layer at a time, and activations are
recomputed. At rates of 1e-5 and below, NVFP4 needs --masters fp16, one byte more, to learn as BF16
does. --out gets a checkpoint to resume from with the same bits, and at the end the masters in BF16,
which from_pretrained reads, or with --export quantized the trained codes themselves. Needs
transformers: pip install '.[integrations]'.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from options import count, device, folders, is_empty_folder, number, positive_number
from stdlib_text import cut_batch, load_text
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
)

import fp4adam

FORMATS = ("nvfp4", "mxfp8", "float8block")
MASTERS = {"fp16": {"master_weight_dtype": torch.float16}, "none": {"master_weights": False}}
CHECKPOINT = "checkpoint.pt"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("name", nargs="?", help="what from_pretrained takes: a folder or a name on the hub")
    add("--config", metavar="NAME", help="random weights in the shape of this model instead")
    add("--format", choices=FORMATS, default="nvfp4", help="default: nvfp4")
    add(
        "--states",
        choices=("factored", "8bit", "16bit", "32bit"),
        default="8bit",
        help="default: 8bit",
    )
    add("--masters", choices=MASTERS, help="default: as --states says")
    add("--text", type=folders, metavar="DIR,...", default=[], help="default: Python's own library")
    add("--out", type=Path, metavar="DIR", default=Path("runs/full"), help="default: runs/full")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--steps", type=count, default=100, metavar="N", help="in all; default: 100")
    add("--save-every", type=count, metavar="N", help="steps; default: at the end")
    add("--batch", type=count, default=4, metavar="N", help="default: 4")
    add("--context", type=count, default=256, metavar="N", help="tokens; default: 256")
    add("--lr", type=positive_number, default=1e-5, metavar="X", help="default: 1e-5")
    add("--weight-decay", type=number, default=0.0, metavar="X", help="default: 0")
    add("--export", choices=("masters", "quantized"), default="masters", help="default: masters")
    gpu = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", type=device, default=gpu, help="default: the GPU")
    args = parser.parse_args(argv)
    if args.name and args.config:
        parser.error(f"--config makes random weights, got {args.name!r} beside it; leave one out")
    if args.resume != (args.out / CHECKPOINT).exists():
        parser.error(
            f"--resume goes on from {args.out / CHECKPOINT}, which "
            + ("is not there" if args.resume else "is there already; give it, or another --out")
        )
    args.folder = args.out / f"{args.export}-{args.steps}"
    if args.folder.exists() and not is_empty_folder(args.folder):
        parser.error(f"{args.folder} must be new or empty; choose other --steps, or remove it")
    return args


def small_config() -> LlamaConfig:
    """A Llama of 0.5 M parameters that reads bytes."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )


def build(args: argparse.Namespace) -> PreTrainedModel:
    """The model in BF16 with quantized linear layers, which recomputes its activations."""
    if args.name:
        model = AutoModelForCausalLM.from_pretrained(args.name, dtype=torch.bfloat16)
    else:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(args.config) if args.config else small_config()
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = fp4adam.quantize_model(model.to(args.device), args.format)
    model.config.use_cache = False
    # The name that transformers gave it in 2026, and the one before.
    recompute = getattr(model, "activation_checkpointing_enable", None)
    (recompute or model.gradient_checkpointing_enable)({"use_reentrant": False})
    return model.train()


def load_tokens(args: argparse.Namespace, model: PreTrainedModel) -> tuple[Tensor, Any]:
    """The text as tokens of the model, and its tokenizer; bytes and None without one."""
    text = load_text(tuple(args.text))[0]
    name = args.name or args.config
    if name is None:
        return text, None
    tokenizer = AutoTokenizer.from_pretrained(name)
    words = text.numpy().tobytes().decode(errors="replace")
    return tokenizer(words, return_tensors="pt", verbose=False).input_ids[0], tokenizer


def save(model: PreTrainedModel, optimizer: fp4adam.FP4Adam, step: int, path: Path) -> None:
    """Write codes and states as they are stored; an interrupt leaves the checkpoint before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".part")
    state = {"model": model.state_dict(), "optimizer": optimizer.compact_state_dict()}
    torch.save({**state, "step": step}, written)
    os.replace(written, path)


def main(argv: Sequence[str] | None = None) -> PreTrainedModel:
    """Train, save, export; returns the trained model."""
    args = parse_args(argv)
    model = build(args)
    tokens, tokenizer = load_tokens(args, model)
    optimizer = fp4adam.FP4Adam(
        model.named_parameters(),
        lr=args.lr,
        weight_decay=args.weight_decay,
        states=args.states,
        **MASTERS.get(args.masters, {}),
    )
    first, path = 0, args.out / CHECKPOINT
    if args.resume:
        saved = torch.load(path, map_location="cpu", mmap=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        del saved
    # Each weight is stepped within backward(), which frees its gradient.
    optimizer.enable_gradient_release()
    for step in range(first + 1, args.steps + 1):
        batch, _ = cut_batch(tokens, args.batch, args.context, seed=step)
        batch = batch.to(args.device)
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        if step % max(1, args.steps // 10) == 0:
            print(f"step {step:>5}/{args.steps}  loss {loss.item():.4f}", flush=True)
        if step == args.steps or (args.save_every and step % args.save_every == 0):
            save(model, optimizer, step, path)
    report(model, optimizer)
    if args.export == "masters":
        fp4adam.export_masters(model, optimizer, args.folder, torch.bfloat16)
    else:
        layout = "fp8" if args.format == "float8block" else "compressed-tensors"
        fp4adam.export_checkpoint(model, args.folder, layout)
    if tokenizer is not None:
        tokenizer.save_pretrained(args.folder)
    print(f"wrote {path} and {args.folder}")
    return model


def report(model: PreTrainedModel, optimizer: fp4adam.FP4Adam) -> None:
    """Print what the quantized weights take, as they are stored."""
    weights = fp4adam.summary(model, optimizer).quantized
    numel = sum(p.numel for p in weights)
    weight, state = (
        sum(getattr(p, n) for p in weights) / numel for n in ("nbytes", "state_nbytes")
    )
    print(f"{numel / 1e6:.1f} M quantized weights: {weight:.2f} bytes each, states {state:.2f}")
    if torch.cuda.is_available():
        print(f"peak memory of the GPU: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
