"""Trains an FP8 or FP4 checkpoint as it is, saves it in the same layout, and loads it again.

    python examples/train_checkpoint.py                              # a small model, on a CPU
    python examples/train_checkpoint.py Qwen/Qwen3-0.6B-FP8 --out out  # of the hub, on a GPU

Needs transformers and compressed-tensors: pip install '.[integrations]'.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from stdlib_text import cut_batch, load_text
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen3Config,
)

import fp4adam


def small_checkpoint(folder: Path) -> None:
    """A checkpoint in MXFP4, such as others publish, of a model that reads bytes."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, head_dim=32)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    config = Qwen3Config(vocab_size=256, **sizes, **heads, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fp4adam.export_checkpoint(fp4adam.quantize_model(model, "mxfp4"), folder)


def load(name: str) -> PreTrainedModel:
    """A model to train, with the bytes of what transformers loads."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map=device)
    return fp4adam.make_trainable(model)


def layout_of(name: str) -> str:
    """The layout that a checkpoint is in, by transformers' name for it."""
    config = AutoConfig.from_pretrained(name).quantization_config
    return str(config["quant_method"])


def batch(name: str, model: PreTrainedModel, step: int) -> torch.Tensor:
    """Tokens of the standard library; of the small model, bytes."""
    text, _ = cut_batch(load_text()[0], 4, 256, step)
    if model.config.vocab_size > 256:
        tokenizer = AutoTokenizer.from_pretrained(name)
        words = text.byte().numpy().tobytes().decode(errors="replace")
        tokens = tokenizer(words, return_tensors="pt").input_ids[0]
        text = tokens[: len(tokens) // 4 * 4].view(4, -1)
    return text.to(model.device)


def main() -> None:
    """Load, train, save, load again."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="?", help="a folder or a name on the hub")
    parser.add_argument("--out", type=Path, help="where to save; default: a temporary folder")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        name, out = args.name or f"{scratch}/hub", args.out or Path(scratch, "out")
        if args.name is None:
            small_checkpoint(Path(name))
        model = load(name)
        print(fp4adam.summary(model).describe())
        optimizer = fp4adam.FP4Adam(model.parameters(), lr=args.lr)
        for step in range(args.steps):
            tokens = batch(name, model, step)
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1}: loss {loss.item():.3f}")
        layout = layout_of(name)
        fp4adam.export_checkpoint(model, out, layout)
        again = load(str(out))
        pairs = zip(model.parameters(), again.parameters(), strict=True)
        same = all(torch.equal(*pair) for pair in pairs)
        print(f"saved in the layout {layout!r}; loaded again, all weights are the same: {same}")


if __name__ == "__main__":
    main()
