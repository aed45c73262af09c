"""Second moments that are two vectors, beside Adam's: losses of GPTs over seeds, paired by seed.

    python benchmarks/factored.py --stages small,tuned --tokens 50e6 --out small.json
    python benchmarks/factored.py --stages 100m --tokens 50e6 --with small.json --out factored.json
    python benchmarks/factored.py --stages tiny --seeds 2 --batch 2 --tokens 1e3    # also on a CPU

All seeds of a rule train at once, in one stack of weights, on the same batches for every rule. An
update is m / (sqrt(v) + eps), bias-corrected, with v of

    adam      beta2 v + (1 - beta2) g^2
    before    beta2 R C / mean(R) + (1 - beta2) g^2, by the means of g^2 from before the step, of
              rows and columns: one pass, and an element's own square bounds it at once
    now       R C / mean(R), with this g^2 in the means (Adafactor): two passes
    rows      as "before", with R alone
    8bit      as Adam; BF16 weights and 8-bit moments, all rounded stochastically

Embeddings, heads and norms keep Adam's. Printed: the gap of the last loss to Adam's of the same
beta2, mean and standard error over seeds; the mean update beside Adam's; the mean and largest one
by 1,000 times the last gradient; and |log2| of Adam's v over the outer product of its means.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from provenance import about
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPTConfig, rotate
from options import PRESETS
from stdlib_text import load_text

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MATRICES = ("qkv", "out", "gate", "up", "down")
EPS, BETA1, DECAY = 1e-8, 0.9, 0.1
# (kind, beta2, factor of the rate)
THREE = ("adam", "before", "8bit")
SHORT = [("adam", 0.95, 1.0), ("before", 0.95, 1.0), ("adam", 0.95, 1.3)]
ALL = [*SHORT, *((kind, 0.95, 1.0) for kind in ("now", "rows", "8bit"))]
ALL += [(kind, 0.999, 1.0) for kind in THREE]
TUNED = [(kind, 0.999, rate) for rate in (1.0, 0.1) for kind in THREE] + [("adam", 0.999, 0.0)]
# Seeds and rules. "tuned" goes on from what "small" trains by its first rule, at rates of 1e-5,
# 1e-6 and 0, on other text.
STAGES = {"tiny": (16, ALL), "small": (4, ALL), "tuned": (4, TUNED), "100m": (2, SHORT)}


def new_weights(config: GPTConfig, seeds: int) -> dict[str, Tensor]:
    """Weights of a model per seed, [seeds, layers, out, in], distributed as in ``gpt.py``."""
    d, h, n = config.dim, config.hidden, config.layers
    shapes = [(n, 3 * d, d), (n, d, d), (n, h, d), (n, h, d), (n, d, h), (256, d), (256, d)]
    weights = {}
    for name, shape in zip((*MATRICES, "embedding", "head"), shapes, strict=True):
        std = 0.02 / math.sqrt(2 * n if name in ("out", "down") else 1)
        w = weights[name] = torch.empty(seeds, *shape, device=DEVICE)
        for seed in range(seeds):
            generator = torch.Generator(DEVICE).manual_seed(100 * seed + len(weights))
            w[seed].normal_(std=std, generator=generator)
    for name, shape in (("norm1", (n, d)), ("norm2", (n, d)), ("norm", (d,))):
        weights[name] = torch.ones(seeds, *shape, device=DEVICE)
    return weights


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """[n, batch, length, in] by [n, out, in]."""
    return (x.flatten(1, 2) @ weight.mT).unflatten(1, x.shape[1:3])


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:]) * weight[:, None, None]


def block(x: Tensor, cos: Tensor, sin: Tensor, heads: int, w: tuple[Tensor, ...]) -> Tensor:
    """A block of ``gpt.py`` of all models: x [n, batch, length, dim]."""
    qkv, out, gate, up, down, norm1, norm2 = w
    q, k, v = linear(norm(x, norm1), qkv).unflatten(-1, (3, heads, -1)).permute(3, 0, 1, 4, 2, 5)
    q, k, v = (t.flatten(0, 1) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    x = x + linear(mixed.unflatten(0, x.shape[:2]).flatten(-2), out)
    y = norm(x, norm2)
    return x + linear(F.silu(linear(y, gate)) * linear(y, up), down)


run_block = torch.compile(block, dynamic=False) if DEVICE == "cuda" else block


def losses(weights: dict[str, Tensor], tokens: Tensor, config: GPTConfig) -> Tensor:
    """The loss of each model, [n], on tokens [n, batch, length + 1]."""
    x, y = tokens[..., :-1], tokens[..., 1:]
    pairs = config.dim // config.heads // 2
    frequencies = 10_000.0 ** (-torch.arange(pairs, device=DEVICE) / pairs)
    angles = torch.outer(torch.arange(x.shape[-1], device=DEVICE), frequencies)
    number = torch.arange(len(x), device=DEVICE)[:, None, None]
    layers = zip(*(weights[name].unbind(1) for name in (*MATRICES, "norm1", "norm2")), strict=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        h = weights["embedding"][number, x]
        for layer in layers:
            h = run_block(h, angles.cos(), angles.sin(), config.heads, layer)
        logits = linear(norm(h, weights["norm"]), weights["head"])
    flat = F.cross_entropy(logits.float().flatten(0, 2), y.flatten(), reduction="none")
    return flat.unflatten(0, y.shape).mean((1, 2))


def at_random(x: Tensor, bits: int) -> Tensor:
    """Float32 numbers without their lowest bits, rounded up or down at random."""
    dither = torch.randint(1 << bits, x.shape, dtype=torch.int32, device=DEVICE)
    return ((x.view(torch.int32) + dither) & -(1 << bits)).view(torch.float32)


def in_8_bits(x: Tensor, bits: int, powers: int) -> Tensor:
    """Rounded to numbers of blocks of 32 that reach so many powers of two below the largest."""
    blocks = x.unflatten(-1, (-1, 32))
    least = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))) - powers)
    return at_random(torch.where(blocks.abs() >= least, blocks, 0), bits).flatten(-2)


class Optimizer:
    """The rules, of all models at once."""

    def __init__(self, weights: dict[str, Tensor], kind: str, beta2: float) -> None:
        self.weights, self.kind, self.beta2, self.steps = weights, kind, beta2, 0
        self.factored = MATRICES if kind in ("before", "now", "rows") else ()
        self.m = {name: torch.zeros_like(w) for name, w in weights.items()}
        # Per element, or means by row and by column.
        self.v = {
            name: (w.new_zeros(w.shape[:-1]), w.new_zeros(w.shape[:-2] + w.shape[-1:]))
            if name in self.factored
            else torch.zeros_like(w)
            for name, w in weights.items()
        }

    def update(self, name: str, g: Tensor) -> tuple[Tensor, Tensor, Tensor | tuple]:
        """The update by a gradient, and the moments after it."""
        beta2, square = self.beta2, g * g
        m = self.m[name].lerp(g, 1 - BETA1)
        if name in self.factored:
            means = zip(self.v[name], (square.mean(-1), square.mean(-2)), strict=True)
            new = tuple(old.lerp(mean, 1 - beta2) for old, mean in means)
            rows, columns = new if self.kind == "now" else self.v[name]
            v = rows[..., None]
            if self.kind != "rows":
                v = v * (columns / (rows.mean(-1, keepdim=True) + 1e-30))[..., None, :]
            if self.kind != "now":
                v = beta2 * v + (1 - beta2) * square
        else:
            v = new = self.v[name].lerp(square, 1 - beta2)
        root = (v / (1 - beta2**self.steps)).sqrt() + EPS
        return m / (1 - BETA1**self.steps) / root, m, new

    @torch.no_grad()
    def step(self, rate: float) -> Tensor:
        """Clip each model's gradients and step; returns the mean update of matrices."""
        self.steps += 1
        squares = (w.grad.square().flatten(1).sum(1) for w in self.weights.values())
        factor, sizes = (1 / (sum(squares).sqrt() + 1e-6)).clamp(max=1), []
        for name, w in self.weights.items():
            w.grad *= factor.view(-1, *[1] * (w.dim() - 1))
            update, self.m[name], self.v[name] = self.update(name, w.grad)
            if not name.startswith("norm"):
                w.mul_(1 - rate * DECAY)
            w.sub_(update, alpha=rate)
            if name in MATRICES:
                sizes.append(update.abs().mean())
                if self.kind == "8bit":
                    self.m[name] = in_8_bits(self.m[name], 20, 14)
                    self.v[name] = in_8_bits(self.v[name], 19, 15)
                    w.copy_(at_random(w, 16))
        return torch.stack(sizes).mean()

    @torch.no_grad()
    def spike(self) -> tuple[float, float]:
        """The mean and largest update of matrices by 1,000 times the last gradient."""
        us = [self.update(name, 1000 * self.weights[name].grad)[0].abs() for name in MATRICES]
        return statistics.mean(float(u.mean()) for u in us), max(float(u.max()) for u in us)

    def violations(self) -> dict[str, list[float]]:
        """|log2| of v over the outer product of its means: median and 99 %."""
        found, parts = {}, torch.tensor([0.5, 0.99], device=DEVICE)
        for name in () if self.factored else MATRICES:
            v = self.v[name][0] + 1e-30
            rows, columns = v.mean(-1, keepdim=True), v.mean(-2, keepdim=True)
            far = (v * rows.mean(-2, keepdim=True) / (rows * columns)).log2().abs().flatten()
            far = far[torch.randint(len(far), (2**20,), device=DEVICE)]
            found[name] = torch.quantile(far, parts).tolist()
        return found


def cut(text: Tensor, shape: tuple[int, ...], number: int) -> Tensor:
    """Crops of the text, int64 [seeds, batch, length], by their number alone."""
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(text) - shape[2], (*shape[:2], 1), generator=generator)
    return text[starts.to(DEVICE) + torch.arange(shape[2], device=DEVICE)].long()


def train(
    stage: str, seeds: int, rule: tuple, tokens: float, batch: int | None, start: dict | None
) -> dict:
    """Train all seeds by a rule, on so many tokens each, and measure."""
    kind, beta2, factor = rule
    preset = PRESETS["small" if start else stage]
    config = GPTConfig(*(preset[key] for key in ("layers", "heads", "dim", "context")))
    folders = (str(Path(torch.__file__).parent / "nn"),) if start else ()
    text, held = (part.to(DEVICE) for part in load_text(folders))
    shape = seeds, batch or preset["batch"], config.context + 1
    steps = math.ceil(tokens / (shape[1] * config.context))
    torch.manual_seed(0)  # for what is rounded at random
    weights = start or new_weights(config, seeds)
    weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
    optimizer, sizes, begin = Optimizer(weights, kind, beta2), [], time.perf_counter()
    for t in range(steps):
        schedule = min(1, (t + 1) / max(1, steps // 10))
        schedule *= 0.1 + 0.45 * (1 + math.cos(math.pi * t / steps))
        rate = factor * (1e-5 if start else preset["lr"] * schedule)
        for w in weights.values():
            w.grad = None
        losses(weights, cut(text, shape, t), config).sum().backward()
        sizes.append(optimizer.step(rate))
    with torch.no_grad():
        batches = [cut(held, shape, 10**6 + k) for k in range(16)]
        last = torch.stack([losses(weights, batch, config) for batch in batches]).mean(0)
    return {
        "stage": stage, "rule": {"kind": kind, "beta2": beta2, "rate": factor}, "steps": steps,
        "tokens": steps * shape[1] * config.context, "losses": last.tolist(),
        "update": float(torch.stack(sizes)[steps // 2 :].mean()), "spike": optimizer.spike(),
        "violations": optimizer.violations(),
        "weights": {name: w.detach() for name, w in weights.items()},
        "seconds": time.perf_counter() - begin,
    }  # fmt: skip


def report(runs: list[dict]) -> None:
    """Print gaps to Adam of the same beta2, where that has run, and note them."""
    adams = {tuple(run["rule"].values()): run for run in runs if run["rule"]["kind"] == "adam"}
    if not adams:
        return
    first = next(iter(adams.values()))
    print(f"\n{first['stage']}: {first['steps']} steps, {first['tokens'] / 1e6:.1f} M tokens each")
    print("rule                  loss       gap        +-  update  spike: mean, largest")
    for run in runs:
        kind, beta2, rate = run["rule"].values()
        same_rate = rate if first["stage"] == "tuned" else 1.0
        adam = adams.get(("adam", beta2, same_rate))
        if adam is None:
            continue
        gaps = [a - b for a, b in zip(run["losses"], adam["losses"], strict=True)]
        run["gap"], run["error"] = statistics.mean(gaps), math.nan
        if len(gaps) > 1:
            run["error"] = statistics.stdev(gaps) / len(gaps) ** 0.5
        loss, ratio, (mean, most) = statistics.mean(run["losses"]), run["update"], run["spike"]
        print(
            f"{kind:7}{beta2:6} x{rate:<4} {loss:8.5f} {run['gap']:+9.5f} {run['error']:9.5f} "
            f"{ratio / adam['update']:7.3f} {mean:8.2f} {most:10.2f}"
        )
    for name, (median, most) in first["violations"].items():
        print(f"  v beside its outer product, {name}: median {median:.2f}, 99 % {most:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", default="tiny,small,tuned,100m", help="of these, in order")
    parser.add_argument("--tokens", type=float, default=50e6, help="per seed and rule")
    parser.add_argument("--batch", type=int, help="sequences, in place of the stages' own")
    parser.add_argument("--seeds", type=int, help="in place of the stages' own")
    parser.add_argument("--rules", help="these of each stage, as numbers: 0,1,6")
    parser.add_argument("--with", dest="others", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    done = [run for other in args.others for run in json.loads(other.read_text())["runs"]]
    start = None
    for stage in args.stages.split(",") if args.stages else ():
        seeds, rules = STAGES[stage]
        if stage == "tuned" and start is None:
            raise SystemExit('"tuned" goes on from what "small" trains: put that before it')
        given = start if stage == "tuned" else None
        if args.rules:
            rules = [rules[int(number)] for number in args.rules.split(",")]
        for rule in rules:
            run = train(stage, args.seeds or seeds, rule, args.tokens, args.batch, given)
            weights = run.pop("weights")
            if stage == "small" and start is None:
                start = weights
            done.append(run)
            print(f"{stage} {run['rule']}: {run['losses']}, {run['seconds']:.0f} s", flush=True)
            if args.out:
                text = json.dumps({**about(DEVICE), "runs": done}, indent=1)
                args.out.write_text(text + "\n")
    for stage in STAGES:
        report([run for run in done if run["stage"] == stage])
    if args.out:
        args.out.write_text(json.dumps({**about(DEVICE), "runs": done}, indent=1) + "\n")


if __name__ == "__main__":
    main()
