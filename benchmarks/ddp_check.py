"""Checks that replicas stay equal on this machine's GPUs; a PASS or FAIL line for each case.

    python benchmarks/ddp_check.py                    # NCCL, one rank per GPU
    python benchmarks/ddp_check.py --device cpu --ranks 2

Each rank is a process with a hash seed and random seeds of its own, and starts from other weights.
After three steps on different data the digests of all weights, masters and moments must be the same
on all ranks. On two ranks they must also be those of one process that averages the gradients: the
sum of two is the same in any order.
"""

import argparse
import copy
import hashlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fp4adam import FP4Adam, QuantizedTensor, quantize_model
from fp4adam.distributed.dtensor import local

FORMATS = ("nvfp4", "mxfp8", "float8block", "bfloat16")
MODES = {
    "DDP": {},
    "static_graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    "bucket_view": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.1},
    "no_sync": {},
    "compile": {},
    "ZeRO": {},
    "replicate": {},
}
STEPS = 3


class Net(nn.Sequential):
    """Two layers, and a third one that some batches leave out."""

    def __init__(self, size: int, recipe: str, device: str) -> None:
        super().__init__(nn.Linear(size, 2 * size), nn.Linear(2 * size, size, bias=False))
        self.rare = nn.Linear(size, size, bias=False)
        self.to(device, torch.bfloat16)
        if recipe != "bfloat16":
            quantize_model(self, recipe)

    def forward(self, x: Tensor, everything: bool = True) -> Tensor:
        x = self[1](self[0](x).tanh())
        return self.rare(x) if everything else x


def loss_of(
    model: Callable, size: int, device: str, step: int, rank: int, everything: bool
) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(2, 64, size, generator=generator).to(device, torch.bfloat16)
    return (model(x, everything) - y).square().mean()


def backward(model: Callable, size: int, device: str, step: int, rank: int, mode: str) -> None:
    if mode == "no_sync":
        with model.no_sync() if hasattr(model, "no_sync") else warnings.catch_warnings():
            loss_of(model, size, device, step + STEPS, rank, True).backward()
    everything = mode != "find_unused" or step != 1
    loss_of(model, size, device, step, rank, everything).backward()


def adam(model: nn.Module) -> FP4Adam:
    return FP4Adam(model.parameters(), lr=1e-2, weight_decay=0.1, master_weights=True)


def digest(tensors: list[Tensor]) -> str:
    """Of all bytes, those of quantized tensors included."""
    result = hashlib.blake2b(digest_size=8)
    for tensor in map(local, tensors):
        is_quantized = isinstance(tensor, QuantizedTensor)
        for part in tensor.storage_tensors().values() if is_quantized else [tensor]:
            part = part.detach().cpu().contiguous().view(-1)
            result.update(part.view(torch.uint8).numpy().tobytes() if part.numel() else b"")
    return result.hexdigest()


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> str:
    states = [] if optimizer is None else optimizer.state.values()
    values = [x for state in states for x in state.values() if isinstance(x, Tensor)]
    return digest([*model.parameters(), *values])


def train(replica: nn.Module, size: int, device: str, rank: int, mode: str) -> str:
    if mode == "replicate":
        # torch leaves it to the ranks to start alike.
        from torch.distributed._composable.replicate_with_fsdp import replicate

        for param in replica.parameters():
            dist.broadcast(param.detach(), src=0)
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("replicate",))
        model = replicate(replica, mesh=mesh)
    else:
        model = DistributedDataParallel(replica, **MODES[mode])
    if mode == "ZeRO":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import ZeroRedundancyOptimizer
        settings = dict(lr=1e-2, weight_decay=0.1, master_weights=True)
        optimizer = ZeroRedundancyOptimizer(replica.parameters(), FP4Adam, **settings)
    else:
        optimizer = adam(replica)
    called = torch.compile(model, backend="aot_eager") if mode == "compile" else model
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(called, size, device, step, rank, mode)
        optimizer.step()
    return digest_of(replica, None if mode == "ZeRO" else optimizer)


def train_alone(model: nn.Module, size: int, device: str, mode: str) -> str:
    """What two ranks compute together, in one process."""
    optimizer = adam(model)
    for step in range(STEPS):
        grads = []
        for rank in range(2):
            optimizer.zero_grad()
            backward(model, size, device, step, rank, mode)
            grads.append([param.grad for param in model.parameters()])
        for param, first, second in zip(model.parameters(), *grads, strict=True):
            if first is not None:
                param.grad = first / 2 + second / 2
        optimizer.step()
    return digest_of(model, None if mode == "ZeRO" else optimizer)


def check(rank: int, world_size: int, device: str, size: int, store: str, failed: object) -> None:
    """All cases, on one rank."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    torch.manual_seed(rank)
    for recipe in FORMATS:
        for mode in MODES:
            replica = Net(size, recipe, device)
            alone = copy.deepcopy(replica)
            own = [digest_of(replica, None), train(replica, size, device, rank, mode)]
            compares = world_size == 2 and mode not in ("compile", "replicate")
            if compares and rank == 0:
                own.append(train_alone(alone, size, device, mode))
            every: list[list[str]] = [[] for _ in range(world_size)]
            dist.all_gather_object(every, own)
            if rank:
                continue
            ok = len({ranks[0] for ranks in every}) == world_size  # they did start differently
            ok &= len({ranks[1] for ranks in every} | {*own[1:]}) == 1
            also = " = one process" if compares else ""
            ends = " ".join(dict.fromkeys(ranks[1] for ranks in every))
            if compares and not ok:
                also = f" one process {own[2]}"
            print("PASS" if ok else "FAIL", f"{recipe:12}{mode:13}", ends + also, flush=True)
            failed.value += not ok
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="default: one per GPU; 2 on the CPU")
    parser.add_argument("--size", type=int, help="of layers; default: 1024 on GPUs, 128 on the CPU")
    args = parser.parse_args()
    is_gpu = args.device == "cuda"
    ranks = args.ranks or (torch.cuda.device_count() if is_gpu else 2)
    if ranks < 2 or (is_gpu and ranks > torch.cuda.device_count()):
        parser.error(f"--ranks must be 2 to {torch.cuda.device_count()} on these GPUs, got {ranks}")
    size = args.size or (1024 if is_gpu else 128)
    where = torch.cuda.get_device_name() if is_gpu else "CPU, gloo"
    print(f"{ranks} ranks, {where}, torch {torch.__version__}")
    context = mp.get_context("spawn")
    failed = context.Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            os.environ["PYTHONHASHSEED"] = str(rank + 1)
            work = (rank, ranks, args.device, size, f"{folder}/store", failed)
            processes.append(context.Process(target=check, args=work, daemon=True))
            processes[-1].start()
        for process in processes:
            process.join()
    died = [rank for rank, process in enumerate(processes) if process.exitcode]
    if died:
        print(f"FAIL ranks {died} ended with an error")
    sys.exit(bool(died or failed.value))


if __name__ == "__main__":
    main()
