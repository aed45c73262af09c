"""A GPT that FSDP2 spreads over GPUs: times, bytes on the wire, memory, and whether bits agree.

    torchrun --nproc-per-node 4 benchmarks/scaling.py [--size 1b] [--compile] [--out scaling.json]
    torchrun --nproc-per-node 4 benchmarks/scaling.py --ddp    # replicas in place of shards
    torchrun --nproc-per-node 4 benchmarks/scaling.py --profile    # where the host's time goes
    torchrun --nproc-per-node 4 benchmarks/scaling.py --exact 20 [--out exact.json]

Each run adds what it finds to --out, and scaling_report.py makes tables of one or several of these
files. One process trains without FSDP. README.md explains what is measured and how.
"""

import argparse
import hashlib
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt_training import PRESETS, Contestant, Training, build_model, gpt_config
from provenance import about
from report import header_line, result_line, versions_of
from scaling_report import COLUMNS, add_run, exact_line
from step import Clock, release
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from traffic import Traffic

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    FusedAdam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Recipe,
)
from fp4adam.optim.te_layout import stored_state

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from distributed import leave, process_group, rank, shard, world_size

Row = dict[str, Any]

CONTESTANTS = (
    Contestant("torch AdamW fused, BF16 (no masters)", torch.optim.AdamW),
    Contestant("FusedAdam, BF16 + FP32 masters", FusedAdam),
    Contestant("FP4Adam, NVFP4", FP4Adam, "nvfp4"),
    Contestant("FP4Adam, MXFP8", FP4Adam, "mxfp8"),
    Contestant("FP4Adam, Float8Block", FP4Adam, "float8block"),
    *(
        Contestant(
            f"FP4Adam, {name}, quantized matmuls",
            FP4Adam,
            Recipe(name.lower(), activations=True, gradients=True),
        )
        for name in ("Float8", "Float8Block")
    ),
    Contestant("FusedAdam, torchao float8 tensorwise", FusedAdam, torchao="tensorwise"),
    # Without masters, as its weights under FSDP2 are of a class of its own.
    Contestant(
        "torch AdamW fused, torchao float8 tensorwise, FP8 all-gather",
        torch.optim.AdamW,
        torchao="tensorwise, FP8 all-gather",
    ),
)
SIZES = ("layers", "dim", "heads")
# What a forward pass gathers of quantized weights, in bytes per element: codes and scales.
GATHERED = {
    NVFP4Quantizer: 1 / 2 + 1 / 16**2,
    MXFP8Quantizer: 1 + 1 / 32,
    Float8BlockQuantizer: 1 + 4 / 128**2,
    Float8Quantizer: 1,
}


def build(contestant: Contestant, args: argparse.Namespace) -> tuple[Training, float]:
    """Training from the same weights on any number of processes, and the bytes to be gathered."""
    sizes = {name: getattr(args, name) for name in SIZES}
    model = build_model(contestant, gpt_config(args.size, **sizes), args.device)
    if args.compile:
        torch.compiler.reset()
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=False)
    to_gather = sum(
        p.numel()
        * (GATHERED[type(p.quantizer)] if isinstance(p, QuantizedTensor) else p.element_size())
        for p in model.parameters()
    )
    if world_size() > 1 and args.ddp:
        replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
        training = Training(contestant, model, args.size)
        training.forward = replica
        return training, 0
    if world_size() > 1:
        # The mean of equal BF16 gradients is then exact where their number is a power of two.
        shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    return Training(contestant, model, args.size), to_gather


def name_of(contestant: Contestant, args: argparse.Namespace) -> str:
    """The name of a row."""
    return f"{contestant.name} (DDP)" if args.ddp else contestant.name


def measure(contestant: Contestant, args: argparse.Namespace) -> Row:
    """Times, bytes and memory; times and memory are those of the process with the largest."""
    clock = Clock(args.device)
    training, to_gather = build(contestant, args)
    crops = training.crops(args.batch, seed=rank())
    row: Row = {"name": name_of(contestant, args), "processes": world_size()}
    row["parameters"] = sum(p.numel() for p in training.model.parameters())

    def median(fn: Callable[[], Any]) -> float:
        return largest(statistics.median(clock.samples(fn, args.repeats)), args.device)

    training.step(crops)
    if clock.cuda:
        row["steady_GiB"] = largest(torch.cuda.memory_allocated() / 2**30, args.device)
        torch.cuda.reset_peak_memory_stats()
    row["train_ms"] = median(lambda: training.step(crops))
    row["host_ms"] = largest(clock.host(lambda: training.step(crops), repeats=9), args.device)
    if clock.cuda:
        row["peak_GiB"] = largest(torch.cuda.max_memory_allocated() / 2**30, args.device)
    row["tokens_per_second"] = world_size() * crops[0].numel() / row["train_ms"] * 1e3
    with Traffic() as forward:
        loss = training.loss(*crops)
    with Traffic() as backward:
        loss.backward()
    with Traffic() as step:
        training.optimizer.step()
    for part, traffic in (("forward", forward), ("backward", backward), ("step", step)):
        row |= {f"{part}_{kind}_MB": n / 1e6 for kind, n in traffic.bytes.items()}
    row["formula_MB"] = to_gather * (1 - 1 / world_size()) / 1e6
    row["step_ms"] = median(training.optimizer.step)
    if step.reduced:
        row["reduce_ms"] = median(all_reduces(step.reduced, args.device))
        row["reduce_share"] = row["reduce_ms"] / row["step_ms"]
    if args.profile:
        row["host_times"] = host_times(training, crops)
    return row


def host_times(training: Training, crops: tuple[Tensor, Tensor], steps: int = 5) -> list[Row]:
    """What takes the host longest in a training step: self times in µs, and calls.

    Ranges that FSDP2 names contain its Python and that of hooks; runtime calls are those of CUDA.
    """
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if torch.cuda.is_available() else [kinds.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            training.step(crops)
    events = sorted(profile.key_averages(), key=lambda e: e.self_cpu_time_total, reverse=True)
    return [
        {"what": e.key, "us": e.self_cpu_time_total / steps, "calls": e.count / steps}
        for e in events[:30]
    ]


def all_reduces(reduced: list[tuple[torch.Size, torch.dtype]], device: str) -> Callable[[], None]:
    """A function that reduces tensors like these and does nothing else."""
    tensors = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype in reduced]

    def call() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)

    return call


def largest(value: float, device: str) -> float:
    """The largest of all processes' values."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def train_exactly(contestant: Contestant, args: argparse.Namespace) -> Row:
    """The bits of every loss, and digests of all weights and of the optimizer's state at the end.

    Every process takes the same batches, so that the result does not depend on their number.
    """
    training, _ = build(contestant, args)
    seeds = range(args.exact)
    losses = [training.step(training.crops(args.batch, seed)).item().hex() for seed in seeds]
    check_agreement(contestant.name, losses)
    states = [*map(stored_state, training.optimizer.state.values())]
    digests = {
        name: digest(state[name] for state in states if name in state)
        for name in dict.fromkeys(name for state in states for name in state)
    }
    for module in training.model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    digests["weights"] = digest(training.model.parameters())
    return {
        "name": name_of(contestant, args),
        "processes": world_size(),
        "losses": losses,
        "digests": digests,
    }


def check_agreement(name: str, losses: list[str]) -> None:
    """Ends the program unless all processes have the same losses."""
    if not dist.is_initialized():
        return
    everyone = [losses] * world_size()
    dist.all_gather_object(everyone, losses)
    for number, others in enumerate(everyone):
        if others != everyone[0]:
            raise SystemExit(
                f"{name}: all processes must have the losses of the first, {everyone[0]}, got "
                f"{others} on process {number}"
            )


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the values of tensors, gathered and decoded."""
    result = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        if isinstance(whole, QuantizedTensor):
            whole = whole.dequantize(whole.dtype)  # which is what FSDP2 gathers
        result.update(f"{whole.dtype} {tuple(whole.shape)}".encode())
        result.update(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return result.hexdigest()


def parse_args() -> argparse.Namespace:
    """The command line; what depends on the device is filled in."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--size", choices=tuple(PRESETS), help="1b on a GPU, tiny on a CPU")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help="as --size says")
    parser.add_argument("--batch", type=int, help="sequences per process; 8 on a GPU, 1 on a CPU")
    parser.add_argument("--repeats", type=int, help="counted steps; 30 on a GPU, 3 on a CPU")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument(
        "--ddp", action="store_true", help="DistributedDataParallel in place of FSDP2"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print and record what takes the host longest"
    )
    parser.add_argument(
        "--exact", type=int, metavar="STEPS", help="train so many steps and record bits, not times"
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(";"),
        metavar="TEXT[;TEXT]",
        help="only names that contain one of these, or are one of these behind a =",
    )
    parser.add_argument("--out", type=Path, help="add settings and results to this JSON file")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.size = args.size or ("1b" if cuda else "tiny")
    args.batch = args.batch or (8 if cuda else 1)
    args.repeats = args.repeats or (30 if cuda else 3)
    return args


def be_deterministic() -> None:
    """The same bits twice, also from attention's backward pass and cuBLAS."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """What was run, on what, with which settings."""
    launcher = f"torchrun --nproc-per-node {world_size()}" if dist.is_initialized() else "python"
    return about(args.device) | {
        "command": f"{launcher} {shlex.join(sys.argv)}",
        "processes": world_size(),
        "settings": {
            name: getattr(args, name)
            for name in ("size", *SIZES, "batch", "repeats", "exact", "compile", "ddp")
        },
    }


def main() -> None:
    """Measure every optimizer, or record its bits, and print a line for each."""
    args = parse_args()
    if args.exact:
        be_deterministic()
    with process_group(args.device):
        run, rows = describe(args), []
        print(versions_of(run))
        print(f"{world_size()} x {run['device']}, {run['date']}")
        if not args.exact:
            print(f"\n{header_line(args.size, COLUMNS)}", flush=True)
        for contestant in CONTESTANTS:
            name = contestant.name
            if not any(name == t[1:] if t[:1] == "=" else t in name for t in args.only or [""]):
                continue
            release()
            row = (train_exactly if args.exact else measure)(contestant, args)
            rows.append(row)
            print(exact_line(row) if args.exact else result_line(row, COLUMNS), flush=True)
            for entry in row.get("host_times", ()):
                print("{us:12,.0f} us {calls:8.1f} calls  {what}".format(**entry), flush=True)
        if args.out and rank() == 0:
            add_run(args.out, run, rows)


if __name__ == "__main__":
    main()
    leave()
