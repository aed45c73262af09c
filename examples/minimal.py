"""The template: text, a model, 4-bit weights."""

import argparse
import logging
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4adam import FP4Adam, quantize_model, summary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIM, CONTEXT, BATCH, STEPS, LR = 128, 64, 32, 200, 3e-3


class NextByte(nn.Module):
    """Predicts the next byte from the last eight: int64 [batch, length] to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        self.mix, self.mlp = nn.Linear(8 * DIM, 4 * DIM), nn.Linear(4 * DIM, 4 * DIM)
        self.lm_head = nn.Linear(4 * DIM, 256)  # an output head stays in high precision

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.pad(self.embedding(tokens), (0, 0, 7, 0)).unfold(1, 8, 1).flatten(2)
        return self.lm_head(F.silu(self.mlp(F.silu(self.mix(x)))))


def compute_loss(model: nn.Module, text: Tensor) -> Tensor:
    """Cross entropy on random crops of ``text``, in nats per byte."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), device=DEVICE)
    crops = text[starts + torch.arange(CONTEXT + 1, device=DEVICE)].long()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        logits = model(crops[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), crops[:, 1:].flatten())


def main(recipe: str = "nvfp4", steps: int = STEPS) -> list[float]:
    """Trains on Python's own source code, and returns the loss of each step."""
    torch.manual_seed(0)
    code = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(code), dtype=torch.uint8).to(DEVICE)
    text, held_out = data[:-500_000], data[-500_000:]
    model = quantize_model(NextByte().to(DEVICE), recipe)  # before the optimizer, DDP and compile
    optimizer = FP4Adam(model.parameters(), lr=LR, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for step in range(steps):
        loss = compute_loss(model, text)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)  # clips within the step; torch's function works as well
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}/{steps}: loss {losses[-1]:.4f}")
    print(summary(model, optimizer))
    print(f"held out: loss {compute_loss(model, held_out).item():.4f} nats per byte, on {DEVICE}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="nvfp4", help="nvfp4, mxfp8 or float8block")
    logging.basicConfig(level="INFO")  # quantize_model says what it does and what it leaves
    main(parser.parse_args().recipe)
