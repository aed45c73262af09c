"""Trains a small Llama in 4 or 8 bits, exports it, and has transformers write the same text.

    python examples/finetune_and_export.py --format nvfp4
    python examples/finetune_and_export.py --start runs/llama-nvfp4 --out runs/llama-more

The second line goes on from the first one's export. The text is the source code of Python itself,
as bytes, so that nothing has to be downloaded. Needs transformers, and for NVFP4 and MXFP8
compressed-tensors: pip install '.[integrations]'.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Read when torch loads OpenMP, as in train_gpt.py.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from options import count, device, is_empty_folder, positive_number
from stdlib_text import cut_batch, load_text
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import fp4adam

FORMATS = ("nvfp4", "mxfp8", "float8block")
PROMPT = b"    def __init__(self"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--format", choices=FORMATS, default="nvfp4")
    parser.add_argument("--start", type=Path, metavar="DIR", help="an export to go on from")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/llama-FORMAT")
    parser.add_argument("--steps", type=count, default=200, metavar="N", help="default: 200")
    parser.add_argument("--batch", type=count, default=8, metavar="N", help="default: 8")
    parser.add_argument("--context", type=count, default=128, metavar="N", help="default: 128")
    parser.add_argument(
        "--lr", type=positive_number, default=3e-3, metavar="X", help="default: 3e-3"
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, default=default, help="default: the GPU")
    args = parser.parse_args(argv)
    args.out = args.out or Path("runs", f"llama-{args.format}")
    if args.out.exists() and not is_empty_folder(args.out):
        parser.error(f"--out must be new or empty, got {args.out}; choose another, or remove it")
    return args


def llama(**changes: Any) -> PreTrainedModel:
    """A new Llama of 1 M parameters in BF16 that reads bytes; ``changes`` its configuration."""
    torch.manual_seed(0)
    options = dict(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
    )
    config = LlamaConfig(**{**options, **changes})
    # As from_pretrained does it: model.to(torch.bfloat16) would round the rotary frequencies, too.
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def build(args: argparse.Namespace) -> PreTrainedModel:
    """The model to train: new, or with the bytes of --start."""
    model = llama().to(args.device)
    if args.start:
        return fp4adam.import_checkpoint(model, args.start)
    # What is served as one matrix then has one scale.
    return fp4adam.quantize_model(model, args.format, scale_groups=fp4adam.hf_scale_groups)


def train(model: PreTrainedModel, args: argparse.Namespace) -> None:
    """Takes --steps steps, and prints the loss in nats per byte."""
    text, _ = load_text()
    optimizer = fp4adam.FP4Adam(
        model.named_parameters(),
        lr=args.lr,
        weight_decay=0.1,
        scale_groups=fp4adam.hf_scale_groups,
    )
    model.train()
    for step in range(1, args.steps + 1):
        tokens, _ = cut_batch(text, args.batch, args.context, seed=step)
        tokens = tokens.to(args.device)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, args.steps // 10) == 0:
            print(f"step {step:>5}/{args.steps}  loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def write(model: PreTrainedModel, count: int = 200) -> Tensor:
    """The prompt with ``count`` bytes appended, always the likeliest one."""
    tokens = torch.tensor([list(PROMPT)], device=model.device)
    mask = torch.ones_like(tokens)
    options = dict(max_new_tokens=count, do_sample=False, pad_token_id=0)
    return model.eval().generate(tokens, attention_mask=mask, **options)[0].cpu()


def main(argv: Sequence[str] | None = None) -> None:
    """Train, export, read, compare."""
    args = parse_args(argv)
    model = build(args)
    train(model, args)
    kinds = {type(getattr(p, "quantizer", None)) for p in model.parameters()}
    # Float8Block has a layout of its own.
    layout = "fp8" if fp4adam.Float8BlockQuantizer in kinds else "compressed-tensors"
    fp4adam.export_checkpoint(model, args.out, layout)
    config = json.loads((args.out / "config.json").read_text())["quantization_config"]
    size = sum(path.stat().st_size for path in args.out.glob("*.safetensors"))
    name = config.get("format", config["quant_method"])
    print(f"wrote {args.out}: {name}, {size / 2**20:.2f} MiB")

    served = AutoModelForCausalLM.from_pretrained(args.out).to(args.device)
    trained_text, served_text = write(model), write(served)
    print(bytes(served_text.tolist()).decode(errors="replace"))
    if not torch.equal(trained_text, served_text):
        raise SystemExit("transformers wrote another text than the trained model")
    print("transformers wrote the same text as the trained model")


if __name__ == "__main__":
    main()
