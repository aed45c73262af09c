"""Quantization-aware training: a BF16 or FP32 model learns to be served in 4 or 8 bits.

    python examples/qat.py [--format nvfp4] [--steps 300] [--out DIR]

A small GPT is trained with torch's AdamW. Then it is (1) rounded, (2) trained for some more steps
on quantized weights, and (3) distilled: trained to predict what the first model predicts. Each is
exported, the file is read back, and held-out text is predicted with activations in high precision
and quantized (W4A16 and W4A4, or W8A16 and W8A8). benchmarks/qat.py measures it at equal tokens.
"""

import argparse
import copy
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

# Read when torch loads OpenMP, as in train_gpt.py.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from options import count, device
from stdlib_text import cut_batch, load_text
from torch import Tensor, nn

import fp4adam

CONFIG = GPTConfig(layers=2, heads=4, dim=128, context=64)
BATCH, LR = 16, 2e-3
LAYOUTS = {"nvfp4": "compressed-tensors", "mxfp8": "compressed-tensors", "float8block": "fp8"}
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def cross_entropy(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Nats per byte of the text."""
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def distillation(teacher: nn.Module) -> Loss:
    """KL(teacher || model) per byte; the text's next bytes are not looked at."""

    def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            expected = teacher(tokens).float().log_softmax(-1).flatten(0, 1)
        found = model(tokens).float().log_softmax(-1).flatten(0, 1)
        return F.kl_div(found, expected, reduction="batchmean", log_target=True)

    return loss


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, loss: Loss, steps: range
) -> None:
    """Takes a step on one batch of ``text`` for each number in ``steps``."""
    for step in steps:
        loss(model, *cut_batch(text, BATCH, CONFIG.context, seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def quantized_student(teacher: nn.Module, recipe: fp4adam.Recipe) -> nn.Module:
    """A copy of the teacher whose weights are quantized; FP4Adam's masters start from its own."""
    # Weights that an engine serves as one matrix share a scale if they are named as in Hugging
    # Face's models.
    return fp4adam.quantize_model(
        copy.deepcopy(teacher), recipe, scale_groups=fp4adam.hf_scale_groups
    )


@torch.no_grad()
def served_losses(model: nn.Module, weights: str, text: Tensor, folder: Path) -> list[float]:
    """Held-out losses of the exported files, with plain and with quantized activations."""
    fp4adam.export_checkpoint(model, folder, LAYOUTS[weights], config={"model_type": "gpt"})
    losses = []
    for activations in (False, "fake"):
        quantizer = fp4adam.Recipe(weights, activations=activations).quantizer
        served = fp4adam.import_checkpoint(GPT(CONFIG).to(text.device), folder, quantizer)
        batches = [cut_batch(text, BATCH, CONFIG.context, seed) for seed in range(8)]
        losses.append(sum(cross_entropy(served, *batch).item() for batch in batches) / 8)
    return losses


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--format", choices=LAYOUTS, default="nvfp4")
    parser.add_argument(
        "--steps", type=count, default=300, metavar="N", help="of AdamW; default: 300"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to keep the exports")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, default=default, help="default: the GPU")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Train the teacher, make the three models, print and return their losses."""
    args = parse_args(argv)
    text, held_out = (part.to(args.device) for part in load_text())
    torch.manual_seed(0)
    teacher = GPT(CONFIG).to(args.device)
    train(
        teacher, torch.optim.AdamW(teacher.parameters(), LR), text, cross_entropy, range(args.steps)
    )
    more = range(args.steps, args.steps + max(1, args.steps // 10))
    recipe = fp4adam.Recipe(args.format, activations="fake")
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, loss in (
            ("rounded", None),
            ("trained", cross_entropy),
            ("distilled", distillation(teacher)),
        ):
            model = quantized_student(teacher, recipe)
            if loss is not None:
                optimizer = fp4adam.FP4Adam(
                    model.named_parameters(), lr=LR / 10, scale_groups=fp4adam.hf_scale_groups
                )
                train(model, optimizer, text, loss, more)
            folder = (args.out or Path(scratch)) / name
            found[name] = served_losses(model, args.format, held_out, folder)
    bits = 4 if args.format == "nvfp4" else 8
    print(f"held-out loss, nats per byte       W{bits}A16     W{bits}A{bits}")
    for name, losses in found.items():
        print(f"{name:30s}" + "".join(f"{loss:10.4f}" for loss in losses))
    return found


if __name__ == "__main__":
    main()
