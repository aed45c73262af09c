"""Second moments that are two vectors, beside Adam's: losses of GPTs over seeds, paired by seed.

    python benchmarks/factored.py --stages small,tuned --tokens 50e6 --out small.json
    python benchmarks/factored.py --stages 100m --tokens 50e6 --with small.json --out factored.json
    python benchmarks/factored.py --stages fp4adam,experts,heads --tokens 491520 --out fp4adam.json
    python benchmarks/factored.py --stages tiny --seeds 2 --batch 2 --tokens 1e3    # also on a CPU

All seeds of a rule train at once, in one stack of weights, on the same batches for every rule. An
update is m / (sqrt(v) + eps), bias-corrected, with v of

    adam      beta2 v + (1 - beta2) g^2
    before    beta2 R C / mean(R) + (1 - beta2) g^2, by the means of g^2 from before the step, of
              rows and columns: one pass, and an element's own square bounds it at once
    now       R C / mean(R), with this g^2 in the means (Adafactor): two passes
    rows      as "before", with R alone
    8bit      as Adam; BF16 weights and 8-bit moments, all rounded stochastically

The other rules are FP4Adam's: weights in a format, and its ``states``; "v alone" with first
moments in FP32. "experts" has two of eight small MLPs per token, without a loss for balance, whose
matrices are apart; in "heads" the output head is quantized, and factored, too.

Embeddings, heads and norms keep Adam's. Printed: the gap of the last loss to Adam's of the same
beta2 (and format), mean and standard error over seeds; the mean update beside Adam's; the mean and
largest one by 1,000 times the last gradient; and |log2| of Adam's v over the outer product of its
means. The mean update is that of the second half of steps, by FP4Adam of one more by the last
gradient.
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
from torch import Tensor, nn

from fp4adam import FP4Adam, quantize_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPTConfig, rotate
from options import PRESETS
from stdlib_text import load_text

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MATRICES = ("qkv", "out", "gate", "up", "down")
N_EXPERTS, TOP = 8, 2
EPS, BETA1, DECAY = 1e-8, 0.9, 0.1
# (kind, beta2, factor of the rate)
THREE = ("adam", "before", "8bit")
SHORT = [("adam", 0.95, 1.0), ("before", 0.95, 1.0), ("adam", 0.95, 1.3)]
ALL = [*SHORT, *((kind, 0.95, 1.0) for kind in ("now", "rows", "8bit"))]
ALL += [(kind, 0.999, 1.0) for kind in THREE]
TUNED = [(kind, 0.999, rate) for rate in (1.0, 0.1) for kind in THREE] + [("adam", 0.999, 0.0)]
# Rules of FP4Adam: a format and options.
_FP32 = {"exp_avg_dtype": torch.float32}
FP4ADAM = {
    "nvfp4": ("nvfp4", {}),
    "nvfp4, factored": ("nvfp4", {"states": "factored"}),
    "nvfp4, 8bit": ("nvfp4", {"states": "8bit"}),
    "nvfp4, factored v alone": ("nvfp4", {"states": "factored", **_FP32}),
    "mxfp8": ("mxfp8", {}),
    "mxfp8, factored, no masters": ("mxfp8", {"states": "factored", "master_weights": False}),
    "mxfp8, 8bit, no masters": ("mxfp8", {"states": "8bit", "master_weights": False}),
}
OURS = [SHORT[0], *((kind, 0.95, 1.0) for kind in FP4ADAM), ("nvfp4", 0.95, 1.3)]
FEW = [(kind, 0.95, 1.0) for kind in FP4ADAM if kind.startswith("nvfp4")]
OURS += [(kind, 0.999, 1.0) for kind, *_ in FEW[:2]]
# Seeds and rules. "tuned" goes on from what "small" trains by its first rule, at rates of 1e-5,
# 1e-6 and 0, on other text.
STAGES = {"tiny": (16, ALL), "small": (4, ALL), "tuned": (4, TUNED), "100m": (2, SHORT)}
STAGES |= {"fp4adam": (16, OURS), "experts": (8, FEW), "heads": (16, FEW)}  # of the size "tiny"


def new_weights(config: GPTConfig, seeds: int, experts: int = 0) -> dict[str, Tensor]:
    """Weights of a model per seed, [seeds, layers, out, in], distributed as in ``gpt.py``.

    Those of ``experts``, if any, are [seeds, layers, experts, out, in].
    """
    d, h, n = config.dim, config.hidden, config.layers
    many = (n, experts) if experts else (n,)
    h = d if experts else h
    shapes = [(n, 3 * d, d), (n, d, d), (*many, h, d), (*many, h, d), (*many, d, h)]
    shapes += [(256, d), (256, d)] + [(n, experts, d)] * bool(experts)
    names = *MATRICES, "embedding", "head", *["router"] * bool(experts)
    weights = {}
    for name, shape in zip(names, shapes, strict=True):
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
    qkv, out, gate, up, down, norm1, norm2, *router = w
    q, k, v = linear(norm(x, norm1), qkv).unflatten(-1, (3, heads, -1)).permute(3, 0, 1, 4, 2, 5)
    q, k, v = (t.flatten(0, 1) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    x = x + linear(mixed.unflatten(0, x.shape[:2]).flatten(-2), out)
    y = norm(x, norm2)
    if not router:
        return x + linear(F.silu(linear(y, gate)) * linear(y, up), down)
    # All experts of all tokens, most of them times zero, so that shapes do not depend on values.
    share, chosen = linear(y, router[0]).float().softmax(-1).topk(TOP)
    shares = share.new_zeros(*share.shape[:-1], gate.shape[1]).scatter(-1, chosen, share)
    inner = F.silu(linear(y, gate.flatten(1, 2))) * linear(y, up.flatten(1, 2))
    inner = inner.unflatten(-1, (gate.shape[1], -1)) * shares[..., None].to(inner.dtype)
    return x + linear(inner.flatten(-2), down.transpose(1, 2).flatten(2))


compiled_block = torch.compile(block, dynamic=False) if DEVICE == "cuda" else block


def losses(weights: dict[str, Tensor], tokens: Tensor, config: GPTConfig) -> Tensor:
    """The loss of each model, [n], on tokens [n, batch, length + 1]."""
    x, y = tokens[..., :-1], tokens[..., 1:]
    pairs = config.dim // config.heads // 2
    frequencies = 10_000.0 ** (-torch.arange(pairs, device=DEVICE) / pairs)
    angles = torch.outer(torch.arange(x.shape[-1], device=DEVICE), frequencies)
    number = torch.arange(len(x), device=DEVICE)[:, None, None]
    names = [name for name in (*MATRICES, "norm1", "norm2", "router") if name in weights]
    layers = zip(*(weights[name].unbind(1) for name in names), strict=True)
    # Of the smallest model, compilation would take most of the time.
    run_block = block if config.dim == PRESETS["tiny"]["dim"] else compiled_block
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

    def __init__(
        self, weights: dict[str, Tensor], kind: str, beta2: float, matrices: tuple[str, ...]
    ) -> None:
        self.weights, self.kind, self.beta2, self.steps = weights, kind, beta2, 0
        self.matrices, self.sizes = matrices, []
        self.factored = matrices if kind in ("before", "now", "rows") or "factored" in kind else ()
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
    def clip(self) -> None:
        squares = (w.grad.square().flatten(1).sum(1) for w in self.weights.values())
        factor = (1 / (sum(squares).sqrt() + 1e-6)).clamp(max=1)
        for w in self.weights.values():
            w.grad *= factor.view(-1, *[1] * (w.dim() - 1))

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Clip each model's gradients and step."""
        self.steps += 1
        self.clip()
        sizes = []
        for name, w in self.weights.items():
            update, self.m[name], self.v[name] = self.update(name, w.grad)
            if not name.startswith("norm"):
                w.mul_(1 - rate * DECAY)
            w.sub_(update, alpha=rate)
            if name in self.matrices:
                sizes.append(update.abs().mean())
                if self.kind == "8bit":
                    self.m[name] = in_8_bits(self.m[name], 20, 14)
                    self.v[name] = in_8_bits(self.v[name], 19, 15)
                    w.copy_(at_random(w, 16))
        self.sizes.append(torch.stack(sizes).mean())

    def size(self) -> float:
        """The mean update of matrices, in the second half of all steps."""
        return float(torch.stack(self.sizes[len(self.sizes) // 2 :]).mean())

    @torch.no_grad()
    def spike(self, factor: float = 1000) -> tuple[float, float]:
        """The mean and largest update of matrices by so many times the last gradient."""
        grads = {name: factor * self.weights[name].grad for name in self.matrices}
        us = [self.update(name, grad)[0].abs() for name, grad in grads.items()]
        return statistics.mean(float(u.mean()) for u in us), max(float(u.max()) for u in us)

    def violations(self) -> dict[str, list[float]]:
        """|log2| of v over the outer product of its means: median and 99 %."""
        found, parts = {}, torch.tensor([0.5, 0.99], device=DEVICE)
        for name in () if self.factored else self.matrices:
            v = self.v[name][0] + 1e-30
            rows, columns = v.mean(-1, keepdim=True), v.mean(-2, keepdim=True)
            far = (v * rows.mean(-2, keepdim=True) / (rows * columns)).log2().abs().flatten()
            far = far[torch.randint(len(far), (2**20,), device=DEVICE)]
            found[name] = torch.quantile(far, parts).tolist()
        return found


class Packaged(Optimizer):
    """FP4Adam of each model; ``weights`` have what its quantized matrices decode to.

    ``m`` and ``v`` are there after the last step: from :meth:`size` on.
    """

    def __init__(
        self, weights: dict[str, Tensor], kind: str, beta2: float, matrices: tuple[str, ...]
    ) -> None:
        super().__init__(weights, kind, beta2, matrices)
        self.optimizers, self.quantized = [], []
        weight_format, options = FP4ADAM[kind]
        for w in weights.values():
            w.grad = torch.zeros_like(w)  # where gradients stay
        for seed in range(len(weights["head"])):
            decayed, others = [], []
            for name, w in weights.items():
                pairs = zip(*(self.parts(name, x, seed) for x in (w, w.grad)), strict=True)
                for part, grad in pairs:
                    param = nn.Parameter(part)
                    if name in matrices:
                        layer = nn.Linear(1, 1, bias=False)
                        layer.weight = nn.Parameter(part.clone())
                        quantize_model(nn.Sequential(layer), weight_format)
                        param = layer.weight
                        self.quantized.append((part, param))
                    param.grad = grad
                    (others if name.startswith("norm") else decayed).append(param)
            groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others}]
            given = {"betas": (BETA1, beta2), "eps": EPS, "weight_decay": 0.0, **options}
            self.optimizers.append(FP4Adam(groups, **given))
        self.decode()

    def parts(self, name: str, x: Tensor, seed: int, dims: int = 2) -> list[Tensor]:
        """What each parameter of a model has of x, of so many dimensions for a matrix."""
        x = x.detach()[seed]
        return [*x.view(-1, *x.shape[-dims:])] if name in self.matrices else [x]

    @torch.no_grad()
    def decode(self) -> None:
        for part, param in self.quantized:
            part.copy_(param.dequantize())

    def step(self, rate: float) -> None:
        self.steps += 1
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        self.decode()

    def size(self) -> float:
        self.clip()
        for seed, optimizer in enumerate(self.optimizers):
            states = iter(optimizer.state_dict()["state"].values())
            for name in self.weights:  # norms are last
                ms = self.parts(name, self.m[name], seed)
                if name in self.factored:
                    vs = [self.parts(name, v, seed, 1) for v in self.v[name]]
                else:
                    vs = [self.parts(name, self.v[name], seed)]
                for m, *v in zip(ms, *vs, strict=True):
                    state = next(states)
                    m.copy_(state["exp_avg"])
                    v[0].copy_(state["exp_avg_sq" if len(v) == 1 else "exp_avg_sq_rows"])
                    if len(v) > 1:
                        v[1].copy_(state["exp_avg_sq_columns"][:-1])
        return self.spike(1)[0]


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
    preset = PRESETS["small" if start else stage if stage in PRESETS else "tiny"]
    config = GPTConfig(*(preset[key] for key in ("layers", "heads", "dim", "context")))
    folders = (str(Path(torch.__file__).parent / "nn"),) if start else ()
    text, held = (part.to(DEVICE) for part in load_text(folders))
    shape = seeds, batch or preset["batch"], config.context + 1
    steps = math.ceil(tokens / (shape[1] * config.context))
    torch.manual_seed(0)  # for what is rounded at random
    weights = start or new_weights(config, seeds, N_EXPERTS if stage == "experts" else 0)
    weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
    matrices = (*MATRICES, "head") if stage == "heads" else MATRICES
    optimizer = (Packaged if kind in FP4ADAM else Optimizer)(weights, kind, beta2, matrices)
    begin = time.perf_counter()
    for t in range(steps):
        schedule = min(1, (t + 1) / max(1, steps // 10))
        schedule *= 0.1 + 0.45 * (1 + math.cos(math.pi * t / steps))
        rate = factor * (1e-5 if start else preset["lr"] * schedule)
        for w in weights.values():
            if w.grad is not None:
                w.grad.zero_()
        losses(weights, cut(text, shape, t), config).sum().backward()
        optimizer.step(rate)
    with torch.no_grad():
        batches = [cut(held, shape, 10**6 + k) for k in range(16)]
        last = torch.stack([losses(weights, batch, config) for batch in batches]).mean(0)
    return {
        "stage": stage, "rule": {"kind": kind, "beta2": beta2, "rate": factor}, "steps": steps,
        "tokens": steps * shape[1] * config.context, "losses": last.tolist(),
        "update": optimizer.size(), "spike": optimizer.spike(),
        "violations": optimizer.violations(),
        "weights": {name: w.detach() for name, w in weights.items()},
        "seconds": time.perf_counter() - begin,
    }  # fmt: skip


def report(runs: list[dict]) -> None:
    """Print gaps to Adam of the same beta2 and format, where that has run, and note them."""
    adams = {tuple(run["rule"].values()): run for run in runs if run["violations"]}
    if not adams:
        return
    first = next(iter(adams.values()))
    print(f"\n{first['stage']}: {first['steps']} steps, {first['tokens'] / 1e6:.1f} M tokens each")
    print(f"{'rule':42}loss       gap        +-  update  spike: mean, largest")
    for run in runs:
        kind, beta2, rate = run["rule"].values()
        same_rate = rate if first["stage"] == "tuned" else 1.0
        base = kind.partition(",")[0] if kind in FP4ADAM else "adam"
        adam = adams.get((base, beta2, same_rate))
        if adam is None:
            continue
        gaps = [a - b for a, b in zip(run["losses"], adam["losses"], strict=True)]
        run["gap"], run["error"] = statistics.mean(gaps), math.nan
        if len(gaps) > 1:
            run["error"] = statistics.stdev(gaps) / len(gaps) ** 0.5
        loss, ratio, (mean, most) = statistics.mean(run["losses"]), run["update"], run["spike"]
        print(
            f"{kind:27}{beta2:6} x{rate:<4} {loss:8.5f} {run['gap']:+9.5f} {run['error']:9.5f} "
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
    parser.add_argument("--rules", help="by number, stages apart: 0;0,1,3")
    parser.add_argument("--with", dest="others", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    done = [run for other in args.others for run in json.loads(other.read_text())["runs"]]
    start, stages = None, args.stages.split(",") if args.stages else []
    chosen = args.rules.split(";") if args.rules else [""] * len(stages)
    for stage, numbers in zip(stages, chosen, strict=True):
        seeds, rules = STAGES[stage]
        if stage == "tuned" and start is None:
            raise SystemExit('"tuned" goes on from what "small" trains: put that before it')
        given = start if stage == "tuned" else None
        for rule in [rules[int(n)] for n in numbers.split(",")] if numbers else rules:
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
