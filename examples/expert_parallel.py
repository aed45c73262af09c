"""Expert parallelism: each process has some of the experts, and some of the tokens.

    torchrun --nproc-per-node 2 examples/expert_parallel.py
    python examples/expert_parallel.py        # the same bits in one process

A byte-level language model of two mixtures of experts, trained by FP4Adam in MXFP8 or Float8Block.
Tokens travel to the processes of their experts and back by ``all_to_all``. An NVFP4 stack has one
amax: spread over processes it has one on each, and other bits than in one process.

The global batch has two parts. A process computes both, or one of two processes one of them, so
that sums are taken in the same order.
"""

import argparse
import hashlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from stdlib_text import cut_batch, load_text
from torch import Tensor, nn

from distributed import leave, process_group, rank, total, world_size
from fp4adam import FP4Adam, is_hidden_linear, quantize_model

PARTS = 2  # of the global batch
DIM, INNER, EXPERTS, TOP, LAYERS = 128, 128, 4, 2, 2
BATCH, CONTEXT = 4, 64


class Exchange(torch.autograd.Function):
    """Sends rows to every process, and receives rows from every one.

    ``sent`` and ``received`` count the rows to and from each. The gradient takes the way back.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.counts = received, sent
        return _exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchange(grad, *ctx.counts), None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    if not dist.is_initialized():
        return rows.clone()
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent)
    return out


class MoE(nn.Module):
    """A router, and this process's experts as stacks that quantize_model knows by num_experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.num_experts = EXPERTS // world_size()
        # Every process draws all experts from the same seed, and keeps its own.
        own = slice(rank() * self.num_experts, (rank() + 1) * self.num_experts)
        gate_up = torch.randn(EXPERTS, 2 * INNER, DIM) / DIM**0.5
        down = torch.randn(EXPERTS, DIM, INNER) / INNER**0.5
        self.gate_up_proj = nn.Parameter(gate_up[own].clone())
        self.down_proj = nn.Parameter(down[own].clone())

    def forward(self, parts: list[Tensor]) -> list[Tensor]:
        """The outputs [tokens, DIM] for each part of the batch that this process has."""
        routes = [self.router(x).softmax(-1).topk(TOP) for x in parts]
        weights = torch.cat([weight for weight, _ in routes]).flatten()
        experts = torch.cat([expert for _, expert in routes]).flatten()
        order = experts.argsort(stable=True)
        rows = torch.cat(parts).repeat_interleave(TOP, 0)[order]
        # Rows by process [world, experts of it]; the host has to know how many there are.
        sent = experts.bincount(minlength=EXPERTS).view(-1, self.num_experts)
        received = _exchange(sent, [1] * world_size(), [1] * world_size())
        counts = sent.sum(1).tolist(), received.sum(1).tolist()
        # They arrive by process, then by expert.
        numbers = torch.arange(self.num_experts).repeat(world_size())
        by_expert = numbers.repeat_interleave(received.flatten()).argsort(stable=True)
        offsets = received.sum(0).cumsum(0).int()
        y = self.experts(Exchange.apply(rows, *counts)[by_expert], offsets)
        y = Exchange.apply(y[by_expert.argsort()], *reversed(counts))[order.argsort()]
        y = (y * weights[:, None]).unflatten(0, (-1, TOP)).sum(1)
        return [x + out for x, out in zip(parts, y.split([len(x) for x in parts]), strict=True)]

    def experts(self, x: Tensor, offsets: Tensor) -> Tensor:
        """The experts of this process; an expert may have no tokens, and a process none."""
        gate, up = F.grouped_mm(x, self.gate_up_proj.transpose(1, 2), offs=offsets).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=offsets)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        self.layers = nn.ModuleList(MoE() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, 256, bias=False)

    def forward(self, parts: list[Tensor]) -> list[Tensor]:
        hidden = [self.embedding(tokens.flatten()) for tokens in parts]
        for layer in self.layers:
            hidden = layer(hidden)
        return [self.head(x) for x in hidden]


def digest(model: Model) -> str:
    """A hash of all weights of all processes, the same wherever the experts are."""
    own = {name: p.detach().float().contiguous() for name, p in model.named_parameters()}
    stacks = {name: [*value] for name, value in own.items() if value.dim() == 3}
    everyone = [stacks]
    if dist.is_initialized():
        everyone = [None] * world_size()
        dist.all_gather_object(everyone, stacks)
    seen = hashlib.sha256()
    for name, value in own.items():
        of_experts = [expert for stacks in everyone for expert in stacks.get(name, ())]
        for tensor in of_experts or [value]:
            seen.update(tensor.view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()


def train(recipe: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    # The router has too few rows for blocks, and decides better in high precision.
    quantize_model(model, recipe, lambda m, n: is_hidden_linear(m, n) and "router" not in n)
    shared = [param for param in model.parameters() if param.dim() < 3]
    optimizer = FP4Adam(model.named_parameters(), lr=1e-2, weight_decay=0.1)
    text, _ = load_text()
    losses = []
    for step in range(steps):
        batch = [cut_batch(text, BATCH, CONTEXT, seed=step * PARTS + i) for i in range(PARTS)]
        inputs, targets = zip(*batch[rank() :: world_size()], strict=True)
        logits = model([*inputs])
        parts = [
            F.cross_entropy(out, target.flatten(), reduction="sum") / (PARTS * target.numel())
            for out, target in zip(logits, targets, strict=True)
        ]
        torch.stack(parts).sum().backward()
        for param in shared:
            param.grad = total(param.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total(torch.stack(parts).sum().detach()).item())
        print(f"step {step + 1}: loss {losses[-1]:.4f}")
    result = {"losses": losses, "weights": digest(model)}
    print(f"weights {result['weights']}")
    return result


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--format", default="mxfp8", choices=["mxfp8", "float8block", "nvfp4"])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    if world_size() not in (1, PARTS):
        parser.error(f"processes must be 1 or {PARTS}, got {world_size()}")
    with process_group("cpu"):
        return train(options.format, options.steps)


if __name__ == "__main__":
    main()
    leave()
