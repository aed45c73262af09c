"""What storing Adam's moments in one byte each does: to the size of updates, and to losses.

    python benchmarks/moments.py [--json FILE] [--seeds N ...] [--only TEXT]

After every step of FusedAdam with FP32 states, both moments are rounded to a storage and back:

- "FP8": E4M3 and 8-bit floats without sign, with dither, as exp_avg_dtype=torch.float8_e4m3fn;
- "FP8 to nearest": the same codes without dither;
- "companded": int8 of 2 x / (1 + |x|) and uint8 of sqrt(x), relative to the largest of 32, to
  nearest, as in arXiv:2602.23349; "companded, dithered": the same codes, rounded stochastically.

Updates: noisy gradients of one weight, whose elements differ in size; the mean size of an update,
and what it has of that of FP32 moments. Losses: the examples' GPT, in FP32, on the standard library
for 200 steps (far from converged), and on 32 KiB of it for 600 (learnt by heart, nearly). A larger
step looks like a better method in the first, so FP32 moments at 1.3 times the learning rate stand
beside the others.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp4adam
from fp4adam.optim.state_codec import StateCodec, dither_bits, state_codec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig
from provenance import about
from stdlib_text import cut_batch, load_text

NAMES = ("exp_avg", "exp_avg_sq")
Store = Callable[[str, Tensor, Tensor], Tensor]  # name, values, dither: what is kept of the values


def fp8(name: str, x: Tensor, dither: Tensor | None) -> Tensor:
    codec: StateCodec = state_codec(name, torch.float8_e4m3fn)
    return codec.decode(*codec.encode(x, dither))


def companded(name: str, x: Tensor, dither: Tensor | None) -> Tensor:
    blocks = F.pad(x, (0, -len(x) % 32)).view(-1, 32)
    largest = blocks.abs().amax(1, keepdim=True).clamp_min(2.0**-126)
    x = blocks / largest
    y = 2 * x / (1 + x.abs()) * 127 if name == "exp_avg" else x.sqrt() * 255
    if dither is None:
        y = y.round()
    else:
        share = (dither.to(torch.int64) & 0xFFFFFFFF).double() * 2.0**-32
        y = (y + F.pad(share, (0, -len(share) % 32)).view(-1, 32)).floor().float()
    if name == "exp_avg":
        y = y / 127
        x = y / (2 - y.abs())
    else:
        x = (y / 255).square()
    return (x * largest).view(-1)


STORAGES: dict[str, Store | None] = {
    "FP32": None,
    "FP32, 1.3 times the learning rate": None,
    "FP8": fp8,
    "FP8 to nearest": lambda name, x, dither: fp8(name, x, None),
    "companded": lambda name, x, dither: companded(name, x, None),
    "companded, dithered": companded,
}


@torch.no_grad()
def store(optimizer: fp4adam.FusedAdam, how: Store | None, step: int) -> None:
    """Round all moments to a storage and back."""
    if how is None:
        return
    for state in optimizer.state.values():
        numel = state["exp_avg"].numel()
        dither = dither_bits(0, numel, step)
        for name in NAMES:
            kept = how(name, state[name].view(-1), getattr(dither, name))
            state[name].copy_(kept[:numel].view_as(state[name]))


def updates(how: Store | None, beta2: float, steps: int) -> Tensor:
    """The updates of the second half of the steps, [steps / 2, n]."""
    generator = torch.Generator().manual_seed(3)
    size = torch.randn(128, 128, generator=generator).exp()
    param = nn.Parameter(torch.zeros(128, 128))
    optimizer = fp4adam.FusedAdam([param], lr=1e-3, betas=(0.9, beta2), weight_decay=0.0)
    kept = []
    for step in range(1, steps + 1):
        before = param.detach().clone()
        param.grad = size * (torch.randn(128, 128, generator=generator) + 0.2)
        optimizer.step()
        store(optimizer, how, step)
        if step > steps // 2:
            kept.append((param.detach() - before).flatten())
    return torch.stack(kept)


def train(how: Store | None, seed: int, factor: float, by_heart: bool) -> float:
    """The last loss: held out, or of the text that has been learnt."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(3, 4, 128, 128))
    text, held_out = load_text()
    steps, lr = (600, 1e-3) if by_heart else (200, 2e-3)
    if by_heart:
        text = held_out = text[2**20 : 2**20 + 2**15]
    optimizer = fp4adam.FusedAdam(
        model.parameters(), lr=lr * factor, betas=(0.9, 0.95), weight_decay=0.1
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(1, steps + 1):
        share = min(step / 20, 1.0) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share
        loss_of(model, text, seed * 10**5 + step).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        store(optimizer, how, step)
    with torch.no_grad():
        return statistics.fmean(loss_of(model, held_out, 10**6 + i).item() for i in range(16))


def loss_of(model: nn.Module, text: Tensor, seed: int) -> Tensor:
    inputs, targets = cut_batch(text, 8, 128, seed)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def main() -> None:
    """Print and write a row after each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="", metavar="TEXT", help="updates, short or by heart")
    parser.add_argument("--json", type=Path, default=Path("moments.json"))
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def add(**row: Any) -> None:
        rows.append(row)
        args.json.write_text(json.dumps(about("cpu") | {"rows": rows}, indent=1) + "\n")
        print(*row.values(), sep="  ", flush=True)

    for beta2, steps in ((0.95, 400), (0.999, 1500)) if args.only in "updates" else ():
        exact = updates(None, beta2, steps)
        for name, how in [*STORAGES.items()][2:]:
            own = updates(how, beta2, steps)
            size = (own.square().mean() / exact.square().mean()).sqrt().item()
            shared = ((own * exact).sum() / exact.square().sum()).item()
            add(what="updates", storage=name, beta2=beta2, size=size, projection=shared)
    for what in ("short", "by heart"):
        for seed in args.seeds if args.only in what else ():
            for name, how in STORAGES.items():
                loss = train(how, seed, 1.3 if "1.3" in name else 1.0, what == "by heart")
                add(what=what, storage=name, seed=seed, loss=loss)


if __name__ == "__main__":
    main()
