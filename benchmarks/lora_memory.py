"""LoRA on frozen bases of several formats: memory, time and the error of the base.

    python benchmarks/lora_memory.py [--size 1b] [--json lora_memory.json]

The GPT of examples/, every linear layer of its blocks frozen and with an adapter in BF16, which the
same optimizer trains for all bases. NF4 is that of bitsandbytes (pip install bitsandbytes), whose
row says so where it is missing. Memory is measured on a GPU only.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpt_training import GPT, PRESETS, GPTConfig, gpt_config
from provenance import about
from report import Column, versions_of
from step import Clock, measure_all, measure_steps, stored_bytes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import allocate_workspaces

from fp4adam import (
    Float8BlockQuantizer,
    FP4Adam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    quantize_model,
)

Row = dict[str, Any]
BF16 = torch.bfloat16
COLUMNS = (
    Column("base_B", "base B", "base, bytes per parameter", ".3f"),
    Column("base_error", "error", "error of the base", ".4f"),
    Column("steady_GiB", "steady GiB", "between steps, GiB", ".3f"),
    Column("peak_GiB", "peak GiB", "peak, GiB", ".3f"),
    Column("ms", "ms", "ms", ".1f"),
    Column("loss", "loss", "loss after the steps", ".4f"),
)


class Base(NamedTuple):
    """A way to store frozen weights: what makes a linear layer of one in BF16."""

    name: str
    freeze: Callable[[nn.Linear], nn.Module]


class Adapted(nn.Module):
    """A frozen layer and its adapter, ``base(x) + up(down(x))``.

    Args:
        base: The layer.
        rows: Its outputs.
        cols: Its inputs.
        rank: Of the adapter.
    """

    def __init__(self, base: nn.Module, rows: int, cols: int, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, cols, dtype=BF16) / math.sqrt(cols))
        self.up = nn.Parameter(torch.zeros(rows, rank, dtype=BF16))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., cols] to [..., rows]."""
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def plain(layer: nn.Linear) -> nn.Module:
    """The layer as it is."""
    return layer


def quantized(quantizer: Any) -> Callable[[nn.Linear], nn.Module]:
    """This package's linear layer."""
    return lambda layer: quantize_model(nn.ModuleList([layer]), quantizer)[0]


def nf4(double: bool) -> Callable[[nn.Linear], nn.Module]:
    """bitsandbytes' linear layer; ``double`` quantizes its scales too, as QLoRA does."""

    def freeze(layer: nn.Linear) -> nn.Module:
        import bitsandbytes

        other = bitsandbytes.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=False,
            compute_dtype=BF16,
            compress_statistics=double,
            quant_type="nf4",
            device="meta",
        )
        # It quantizes as it moves to its device.
        other.weight = bitsandbytes.nn.Params4bit(
            layer.weight.detach(),
            requires_grad=False,
            compress_statistics=double,
            quant_type="nf4",
            module=other,
        )
        return other.to(layer.weight.device)

    return freeze


BASES = (
    Base("BF16", plain),
    Base("bitsandbytes NF4", nf4(False)),
    Base("bitsandbytes NF4, double (QLoRA)", nf4(True)),
    Base("NVFP4, rowwise", quantized(NVFP4Quantizer(columnwise=False))),
    Base("NVFP4", quantized(NVFP4Quantizer())),
    Base("MXFP8, rowwise", quantized(MXFP8Quantizer(columnwise=False))),
    Base("Float8Block, rowwise", quantized(Float8BlockQuantizer(columnwise=False))),
)


def value_of(layer: nn.Module) -> Tensor:
    """The weight that a frozen layer multiplies by."""
    weight = layer.weight.detach()
    if isinstance(weight, QuantizedTensor):
        return weight.dequantize(BF16)
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        return weight
    import bitsandbytes.functional

    return bitsandbytes.functional.dequantize_4bit(weight, state)


def nbytes_of(layer: nn.Module) -> int:
    """Bytes of all tensors that a frozen weight consists of."""
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        return stored_bytes(layer.weight.detach())
    tensors = state.as_dict(packed=True).values()
    return layer.weight.nbytes + sum(t.nbytes for t in tensors if isinstance(t, Tensor))


def linear_layers(model: GPT) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Parents, names and linear layers of all blocks."""
    for parent in list(model.blocks.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                yield parent, name, layer


def build(base: Base, config: GPTConfig, device: str, rank: int, row: Row) -> GPT:
    """A frozen model with adapters; notes bytes and error of the base."""
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(config).to(BF16).requires_grad_(False)
    count = nbytes = 0
    squares = torch.zeros(2, dtype=torch.float64)
    for parent, name, layer in linear_layers(model):
        value, (rows, cols) = layer.weight.detach().clone(), layer.weight.shape
        frozen = base.freeze(layer)
        difference = value_of(frozen).float() - value.float()
        squares += torch.stack([difference.square().sum(), value.float().square().sum()]).cpu()
        count, nbytes = count + value.numel(), nbytes + nbytes_of(frozen)
        with torch.device(device):
            setattr(parent, name, Adapted(frozen, rows, cols, rank))
    row["base_parameters"], row["base_B"] = count, nbytes / count
    row["base_error"] = (squares[0] / squares[1]).sqrt().item()
    return model


def recompute(model: GPT) -> None:
    """Recompute the activations of each block in the backward pass."""
    for block in model.blocks:
        block.forward = _checkpointed(block.forward)


def _checkpointed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def measure(base: Base, args: argparse.Namespace, row: Row) -> None:
    """Put into the row what there is to know of a base that runs."""
    clock = Clock(args.device)
    before = torch.cuda.memory_allocated() if clock.cuda else 0
    model = build(base, args.config, args.device, args.rank, row)
    if args.checkpoint:
        recompute(model)
    adapters = [param for param in model.parameters() if param.requires_grad]
    row["adapter_parameters"] = sum(map(Tensor.numel, adapters))
    optimizer = FP4Adam(adapters, lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    shape = (args.batch, args.config.context)
    # A sequence that repeats itself, so that there is something to learn.
    period = torch.randint(256, (args.batch, 64), generator=generator)
    tokens = period.repeat(1, -(-shape[1] // 64))[:, : shape[1]].to(args.device)

    def step() -> Tensor:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    row |= measure_steps(clock, step, args.repeats, before)
    row["loss"] = step().item()


def parse_args() -> argparse.Namespace:
    """The command line; what depends on the device is filled in."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--size", choices=tuple(PRESETS), help="1b on a GPU, tiny on a CPU")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters; 16")
    parser.add_argument("--batch", type=int, help="sequences; 4 on a GPU, 2 on a CPU")
    parser.add_argument("--repeats", type=int, help="counted steps; 10 on a GPU, 1 on a CPU")
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations of blocks")
    parser.add_argument("--json", type=Path, help="write settings and results to this file")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.size = args.size or ("1b" if cuda else "tiny")
    args.batch = args.batch or (4 if cuda else 2)
    args.repeats = args.repeats or (10 if cuda else 1)
    args.config = gpt_config(args.size)
    return args


def main() -> None:
    """Measure every base, and print a line for each."""
    args = parse_args()
    names = ("size", "rank", "batch", "repeats", "checkpoint")
    settings = {name: getattr(args, name) for name in names} | vars(args.config)
    run = about(args.device) | {"settings": settings}
    print(versions_of(run))
    print(f"{run['device']}, {run['date']}, {args.size}, rank {args.rank}, batch {args.batch}\n")
    if args.device == "cuda":
        allocate_workspaces()
    measure_all(((b.name, partial(measure, b, args)) for b in BASES), COLUMNS, run, args.json)


if __name__ == "__main__":
    main()
