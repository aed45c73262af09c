"""What a step moves and what a rank keeps, for large models on many ranks; nothing is allocated.

    python benchmarks/cluster_plan.py [--ranks 8 64 1024] [--model 8b 70b 671b]
    torchrun --nproc-per-node 4 benchmarks/cluster_plan.py --check

Sizes come from the package's own code, run on the meta device: shards as ``fully_shard`` makes
them, the tensors that its hooks gather, the buffer that the step exchanges amaxes in. ``--check``
trains a small model and compares them with what collectives move and what ranks keep.
"""

import argparse
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp4adam import (
    Float8BlockQuantizer,
    FP4Adam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    quantize_model,
)
from fp4adam.distributed import fsdp
from fp4adam.distributed.dtensor import local
from fp4adam.distributed.scale_exchange import AmaxExchange, Exchanged, ShardInfo
from fp4adam.tensors.blocks import flat_shape

FORMATS: dict[str, Quantizer | None] = {
    "BF16": None,
    "NVFP4": NVFP4Quantizer(),
    "MXFP8": MXFP8Quantizer(),
    "Float8Block": Float8BlockQuantizer(),
}
# Of a master weight and two moments in FP32.
STATE_BYTES = 12


class Weights(NamedTuple):
    """Equal parameters: how many there are, their shape, and whether they are quantized."""

    count: int
    shape: tuple[int, ...]
    is_quantized: bool = True


# The parameters that are gathered together: how many such units there are, and the weights of one.
Unit = tuple[int, list[Weights]]


def llama(layers: int, dim: int, hidden: int, kv: int, vocabulary: int) -> list[Unit]:
    """A dense decoder with gated MLPs; ``kv`` is the width of all keys."""
    block = [
        Weights(2, (dim, dim)),
        Weights(2, (kv, dim)),
        Weights(2, (hidden, dim)),
        Weights(1, (dim, hidden)),
        Weights(2, (dim,), False),
    ]
    ends = [Weights(2, (vocabulary, dim), False), Weights(1, (dim,), False)]
    return [(layers, block), (1, ends)]


def mixture(layers: int, dense: int, dim: int, experts: int, vocabulary: int) -> list[Unit]:
    """The shapes of DeepSeek-V3 (arXiv:2412.19437, section 4.2)."""
    attention = [
        Weights(1, (1536, dim)),
        Weights(1, (24576, 1536)),
        Weights(1, (576, dim)),
        Weights(1, (32768, 512)),
        Weights(1, (dim, 16384)),
        Weights(2, (dim,), False),
    ]
    mlp = [Weights(2, (18432, dim)), Weights(1, (dim, 18432))]
    routed = [
        Weights(2 * (experts + 1), (2048, dim)),
        Weights(experts + 1, (dim, 2048)),
        Weights(1, (experts, dim), False),
    ]
    ends = [Weights(2, (vocabulary, dim), False), Weights(1, (dim,), False)]
    return [(dense, attention + mlp), (layers - dense, attention + routed), (1, ends)]


MODELS = {
    "8b": llama(32, 4096, 14336, 1024, 128256),
    "70b": llama(80, 8192, 28672, 1024, 128256),
    "671b": mixture(61, 3, 7168, 256, 129280),
}


class Plan(NamedTuple):
    """Bytes per rank.

    Attributes:
        weights: Of its shards.
        states: Of masters and moments of its shards.
        gathered: What it receives to gather all weights once.
        reduced: What it receives to reduce BF16 gradients once.
        exchanged: The buffer of amaxes that a step reduces.
        unit: A gathered unit, the largest: codes and scales, and the decoded BF16 values.
        messages: Collectives per training step: two gathers and one reduction for each unit, and
            the exchange if there is one.
    """

    weights: int
    states: int
    gathered: int
    reduced: int
    exchanged: int
    unit: int
    messages: int


class _Mesh(NamedTuple):
    """All that sizes depend on of a mesh."""

    n: int

    def size(self) -> int:
        return self.n


class _Shard(NamedTuple):
    """Bytes of one weight's shard: stored, contributed to a gather, exchanged; its elements."""

    stored: int
    gathered: int
    exchanged: int
    numel: int


@functools.cache
def shard_of(shape: tuple[int, ...], quantizer: Quantizer | None, n: int) -> _Shard:
    """The first of ``n`` shards of a weight in BF16 or a format; it is the largest."""
    chunk = -(-shape[0] // n)
    numel = chunk * (torch.Size(shape).numel() // shape[0])
    if quantizer is None:
        return _Shard(2 * numel, 2 * numel, 0, numel)
    weight = quantizer.make_empty(shape, torch.bfloat16, "meta")
    if n == 1:
        return _Shard(weight.nbytes_stored, 0, 0, numel)
    shard = weight.new_zeros((chunk, *shape[1:]))
    shared, spec = shard._shared, shard.global_spec
    shared.first_row = 0
    gathering = fsdp._make_gathering(shard, _Mesh(n))
    exchanged = 0
    if spec.shares_scales:
        rows, cols = flat_shape(tuple(shard.shape))
        block = quantizer.layout.block
        grids = [
            torch.empty(
                -(-rows // block) + 1, -(-cols // (block if quantizer.layout.is_square else 1))
            )
        ]
        amax = torch.zeros(1) if quantizer.layout.tensor_scale == "current" else None
        own = ShardInfo(None, 0, n, "cpu"), Exchanged(spec, amax, grids, shape)
        exchanged = AmaxExchange(None, torch.device("cpu"), [own])._buffer.nbytes
    gathered = sum(x.nbytes for x in gathering.inputs)
    return _Shard(shard.nbytes_stored, gathered, exchanged, numel)


def plan(units: Iterable[Unit], quantizer: Quantizer | None, n: int) -> Plan:
    """The bytes of one rank, where ``n`` ranks hold a shard of each parameter."""
    weights = states = gathered = reduced = exchanged = largest = n_units = 0
    for count, unit in units:
        n_units += count
        in_unit = 0
        for amount, shape, is_quantized in unit:
            own = quantizer if is_quantized else None
            shard = shard_of(shape, own, n)
            weights += count * amount * shard.stored
            states += count * amount * shard.numel * STATE_BYTES
            gathered += count * amount * shard.gathered * (n - 1)
            reduced += count * amount * shard.numel * 2 * (n - 1)
            exchanged += count * amount * shard.exchanged
            in_unit += amount * n * (shard.gathered + (2 * shard.numel if own else 0))
        largest = max(largest, in_unit)
    messages = 3 * n_units + (exchanged > 0) if n > 1 else 0
    return Plan(weights, states, gathered, reduced, exchanged, largest if n > 1 else 0, messages)


# The check


class Small(nn.Sequential):
    """Blocks of linear layers, one of them cut by shard boundaries."""

    def __init__(self) -> None:
        block = [nn.Linear(256, 512, bias=False), nn.Tanh(), nn.Linear(512, 256, bias=False)]
        cut = [nn.Linear(256, 160, bias=False), nn.Linear(160, 256, bias=False)]
        super().__init__(nn.Sequential(*block), nn.Sequential(*cut))


def check(name: str, device: str) -> dict[str, tuple[int, int]]:
    """By what is counted, the planned number and the counted one, on this rank."""
    # Counting needs torch's distributed tensors, which plans do not.
    from traffic import Traffic

    n = dist.get_world_size()
    quantizer = FORMATS[name]
    model = Small().to(device, torch.bfloat16)
    units: list[Unit] = [
        (1, [Weights(1, tuple(param.shape)) for param in unit.parameters()]) for unit in model
    ]
    if quantizer is not None:
        quantize_model(model, quantizer)
    mesh = init_device_mesh(device, (n,))
    if n > 1:
        for unit in model:
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = FP4Adam(model.parameters())
    x = torch.randn(64, 256, dtype=torch.bfloat16, device=device)
    for _ in range(2):  # the first step settles scales and makes states
        with Traffic() as forward:
            loss = model(x).float().square().mean()
        with Traffic() as backward:
            loss.backward()
        with Traffic() as step:
            optimizer.step()
        optimizer.zero_grad()
    planned = plan(units, quantizer, n)
    own = [local(param).detach() for param in model.parameters()]
    states = [local(x) for s in optimizer.state.values() for x in s.values() if x.dim()]
    return {
        "weights": (planned.weights, sum(map(_stored, own))),
        "states": (planned.states, sum(x.nbytes for x in states)),
        "gathered forward": (planned.gathered, forward.bytes["all_gather"]),
        "gathered backward": (planned.gathered, backward.bytes["all_gather"]),
        "reduced": (planned.reduced, backward.bytes["reduce_scatter"]),
        "exchanged": (planned.exchanged, step.bytes["all_reduce"]),
        "messages": (planned.messages, forward.calls + backward.calls + step.calls),
    }


def _stored(own: Tensor) -> int:
    if not isinstance(own, QuantizedTensor):
        return own.nbytes
    return sum(inner.nbytes for inner in own.storage_tensors().values())


def run_check(device: str) -> list[str]:
    """Lines about each format; raises where a plan and what is counted differ.

    A plan is that of the first rank; where sizes are no multiples, later ones keep less.
    """
    lines = []
    for name in FORMATS:
        for what, (planned, counted) in check(name, device).items():
            is_equal = planned == counted if dist.get_rank() == 0 else planned >= counted
            if not is_equal:
                raise AssertionError(f"{name}, {what}: planned {planned}, counted {counted}")
            lines.append(f"{name}, {dist.get_world_size()} ranks, {what}: {counted}")
    return lines


def table(model: str, ranks: Iterable[int]) -> list[str]:
    """A table in Markdown."""
    head = ["ranks", "format", "weights", "masters and moments", "gathered", "reduced"]
    head += ["exchanged", "gathered unit", "messages"]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for n in ranks:
        for name, quantizer in FORMATS.items():
            found = plan(MODELS[model], quantizer, n)
            sizes = [found.weights, found.states, found.gathered, found.reduced, found.exchanged]
            cells = [str(n), name, *map(_readable, (*sizes, found.unit)), str(found.messages)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _readable(size: int) -> str:
    if size == 0:
        return "0"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return (
                f"{size / scale:.3g} {unit}"
                if size < 999.5 * scale
                else f"{size / scale:.0f} {unit}"
            )
    return f"{size} B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024, 4096])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=[*MODELS])
    parser.add_argument("--check", action="store_true", help="compare with a small real run")
    args: Any = parser.parse_args()
    if args.check:
        dist.init_process_group("gloo")
        lines = run_check("cpu")
        if dist.get_rank() == 0:
            print("\n".join(lines))
        dist.destroy_process_group()
        return
    for model in args.model:
        numel = sum(
            count * amount * torch.Size(shape).numel()
            for count, unit in MODELS[model]
            for amount, shape, _ in unit
        )
        print(f"\n{model}: {numel / 1e9:.1f} billion parameters, per rank\n")
        print("\n".join(table(model, args.ranks)))


if __name__ == "__main__":
    main()
