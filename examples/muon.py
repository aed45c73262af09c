"""torch.optim.Muon on NVFP4 weights of a small GPT, AdamW on the rest; FSDP2 under torchrun.

python examples/muon.py                                  on one device
torchrun --nproc-per-node 2 examples/muon.py             sharded over two, GPUs if there are any
"""

import argparse

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from stdlib_text import cut_batch, load_text
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

import distributed
from fp4adam import MasterWeightOptimizer, quantize_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(layers: int = 2, dim: int = 128, context: int = 64) -> tuple[GPT, list[Optimizer]]:
    """A GPT with NVFP4 weights, sharded if processes are connected, and its two optimizers."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers, 2, dim, context)).to(DEVICE, torch.bfloat16)
    quantize_model(model, "nvfp4")
    distributed.shard(model)
    hidden = [param for param in model.blocks.parameters() if param.ndim == 2]
    chosen = {id(param) for param in hidden}
    others = [param for param in model.parameters() if id(param) not in chosen]
    return model, [
        MasterWeightOptimizer(hidden, Muon, lr=3e-3, adjust_lr_fn="match_rms_adamw"),
        MasterWeightOptimizer(others, AdamW, lr=3e-3),
    ]


def train(model: nn.Module, optimizers: list[Optimizer], steps: range) -> list[float]:
    """Trains on the batches of these numbers; the losses, means over all processes."""
    losses = []
    for index in steps:
        batch = cut_batch(load_text()[0], 8, 64, seed=index)
        inputs, targets = (distributed.local_part(part).to(DEVICE) for part in batch)
        loss: Tensor = F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(distributed.mean(loss.detach()).item())
        if index % 20 == 19 or index == steps[-1]:
            print(f"step {index + 1}: loss {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    """Trains for 100 steps, or as many as are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    with distributed.process_group(DEVICE):
        train(*build(), range(steps))
    distributed.leave()


if __name__ == "__main__":
    main()
