"""FP4Adam beside Transformer Engine's FusedAdam under FSDP2, on Transformer Engine's modules.

    torchrun --nproc-per-node 2 benchmarks/te_fsdp.py [--steps 20] [--json te_fsdp.json]

Both optimizers start from the same masters. Each row is of one recipe and one way to build the
model: on the GPU, or on the meta device and then by reset_parameters() on shards, with the values
before quantization as masters. Rank 0 prints the rows; the exit status is 1 if one is not as it
should be.
"""

import argparse
import importlib.metadata
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from provenance import about
from report import write_json
from te_check import OPTIONS, Row, formats, packages, random
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp4adam import FP4Adam

SIZE = 1024


def build(te: Any, recipe: Any, meta: bool, reshard: bool) -> nn.Module:
    """Layers of Transformer Engine, each in a group of its own."""
    torch.manual_seed(0)
    device = "meta" if meta else "cuda"
    common = dict(params_dtype=torch.bfloat16, device=device)
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=meta):
        model = nn.Sequential(
            te.Linear(SIZE, SIZE, **common),
            te.LayerNormLinear(SIZE, SIZE, **common),
            te.LayerNormMLP(SIZE, 2 * SIZE, **common),
        )
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    if meta:
        for layer in model.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    return model


def seed_masters(optimizer: Any, model: nn.Module) -> int:
    """Start Transformer Engine's masters from initial values, which FP4Adam does by itself."""
    seeded = 0
    for param in model.parameters():
        optimizer.initialize_state(param, False)
        value = getattr(param._local_tensor, "get_high_precision_init_val", lambda: None)()
        if value is not None:
            optimizer.set_scaled_state(param, "master_param", value.cuda().float())
            param._local_tensor.clear_high_precision_init_val()
            seeded += 1
    return seeded


def all_reduces(function: Any) -> int:
    """How often ``function`` calls torch.distributed.all_reduce."""
    calls, original = [], dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    dist.all_reduce = counted
    try:
        function()
    finally:
        dist.all_reduce = original
    return len(calls)


def differing_codes(model: nn.Module, optimizer: Any) -> float:
    """The share of codes of Float8 shards that Transformer Engine's quantizer makes otherwise."""
    worst = 0.0
    for param in model.parameters():
        local = param._local_tensor
        if not hasattr(local, "_transpose"):
            continue
        quantizer = local._quantizer.copy()
        if hasattr(quantizer, "amax_epsilon"):
            quantizer.with_amax_reduction = True
            quantizer.amax_reduction_group = param.device_mesh.get_group()
        else:
            quantizer.amax = torch.zeros_like(quantizer.amax)
        expected = quantizer(optimizer.state[param]["master_param"]._local_tensor.clone())
        pairs = (expected._data, local._data), (expected._scale_inv, local._scale_inv)
        worst = max(worst, *((a != b).float().mean().item() for a, b in pairs))
    return worst


def train(te: Any, recipe: Any, model: nn.Module, optimizer: Any, steps: int) -> Row:
    """Losses, the number of all-reduces of a step, and its milliseconds."""
    losses, calls, times = [], 0, []
    for step in range(steps):
        x = random(256, SIZE, seed=100 * step + dist.get_rank()).bfloat16()
        with te.autocast(enabled=True, recipe=recipe):
            y = model(x)
        loss = (y.float() - x.roll(1, dims=-1).float()).square().mean()
        loss.backward()
        torch.cuda.synchronize()
        start = time.perf_counter()
        calls = all_reduces(optimizer.step)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return {"losses": losses, "all_reduces": calls, "ms": sorted(times)[len(times) // 2]}


def masters(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """The local masters of quantized parameters, before any step."""
    return [
        optimizer.state[param]["master_param"]._local_tensor.float().clone()
        for param in model.parameters()
        if param.dim() == 2
    ]


def row_of(te: Any, optimizers: Any, recipe: Any, meta: bool, reshard: bool, steps: int) -> Row:
    """One recipe with both optimizers."""
    found, starts, classes = [], [], []
    for ours in (False, True):
        model = build(te, recipe, meta, reshard)
        params = list(model.parameters())
        if ours:
            optimizer = FP4Adam(params, **OPTIONS)
            for param in params:
                optimizer.initialize_state(param)
        else:
            optimizer = optimizers.FusedAdam(params, **OPTIONS, master_weights=True)
            seed_masters(optimizer, model)
        starts.append(masters(model, optimizer))
        found.append(train(te, recipe, model, optimizer, steps))
        classes.append(sorted({type(param._local_tensor).__name__ for param in params}))
        if ours:
            wrong = differing_codes(model, optimizer)
            kept = sum(
                getattr(p._local_tensor, "get_high_precision_init_val", lambda: None)() is not None
                for p in params
            )
    same = all(torch.equal(a, b) for a, b in zip(*starts, strict=True))
    losses = [each["losses"] for each in found]
    apart = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
    falls = all(each[-1] < each[0] for each in losses)
    return {
        "local classes": classes[1],
        "first": [each[0] for each in losses],
        "last (TE, ours)": [each[-1] for each in losses],
        "largest relative difference": apart,
        "same masters at the start": same,
        "codes unlike TE's": wrong,
        "all-reduces per step": found[1]["all_reduces"],
        "ms per step (TE, ours)": [round(each["ms"], 3) for each in found],
        "initial values kept": kept,
        "ok": bool(same and falls and apart < 0.02 and not wrong and not kept),
    }


def rows(steps: int) -> Iterator[Row]:
    """All rows; on every rank."""
    te, recipes, optimizers = packages()
    for name, recipe, _ in formats(te, recipes):
        for meta, reshard in ((False, True), (True, True), (True, False)):
            row = {"format": name, "meta": meta, "reshard_after_forward": reshard}
            try:
                row |= row_of(te, optimizers, recipe, meta, reshard, steps)
            except Exception as error:
                row |= {"why": f"{type(error).__name__}: {str(error)[:400]}", "ok": False}
            yield row


def main() -> int:
    """Run all rows; 1 if any is not as it should be, on any rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    found = []
    for row in rows(args.steps):
        found.append(row)
        if dist.get_rank() == 0:
            print(row, flush=True)
            if args.json:
                version = importlib.metadata.version("transformer_engine")
                ranks = {"ranks": dist.get_world_size(), "transformer_engine": version}
                write_json(args.json, {**about("cuda"), **ranks}, found)
    dist.destroy_process_group()
    return int(not all(row["ok"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
