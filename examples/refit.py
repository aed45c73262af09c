"""Refills an engine with the weights of a model that is being trained, in another process.

    python examples/refit.py --format nvfp4
    python examples/refit.py --size 1b --device cuda

After each step the trainer sends its weights two ways, and both are timed: the bytes that were
trained, by the engine's names (fp4adam.export_tensors), which the engine only has to receive; and
decoded to BF16, which it has to quantize again. The engine is a stand-in that has its buffers. On
CPUs or one GPU bytes travel through host memory (gloo), on two GPUs from one to the other (NCCL).
"""

import argparse
import hashlib
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

# Read when torch loads OpenMP, as in train_gpt.py.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp4adam

# Width, MLP and layers.
SIZES = {"tiny": (128, 384, 2), "100m": (1024, 2816, 8), "1b": (2048, 5632, 20)}
LAYOUT_OF = {"nvfp4": "compressed-tensors", "mxfp8": "compressed-tensors", "float8block": "fp8"}
TRAINER, ENGINE = 0, 1


class Block(nn.Module):
    """A transformer block of Hugging Face's names, with attention left out: its weights count."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [batch, width]."""
        y = self.norm(x)
        x = x + self.o_proj(self.q_proj(y).tanh() * self.k_proj(y) + self.v_proj(y))
        y = self.norm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--format", choices=LAYOUT_OF, default="nvfp4")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def build(args: argparse.Namespace, device: str) -> nn.Module:
    """The model that is trained."""
    width, hidden, layers = SIZES[args.size]
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(*(Block(width, hidden) for _ in range(layers))).bfloat16()
    # What the engine has as one matrix has one scale.
    groups = {"scale_groups": fp4adam.hf_scale_groups} if args.format == "nvfp4" else {}
    return fp4adam.quantize_model(model, args.format, **groups)


def trained_bytes(model: nn.Module, args: argparse.Namespace) -> Iterator[tuple[str, Tensor]]:
    """Codes and scales by the engine's names."""
    return fp4adam.export_tensors(model, LAYOUT_OF[args.format], fused=True)


def decoded(model: nn.Module, args: argparse.Namespace) -> Iterator[tuple[str, Tensor]]:
    """The usual way: BF16, by the model's names."""
    for name, param in model.named_parameters():
        is_quantized = isinstance(param, fp4adam.QuantizedTensor)
        value = param.detach()
        yield name, value.dequantize(torch.bfloat16) if is_quantized else value


def requantize(received: dict[str, Tensor], quantized: set[str], weight_format: str) -> None:
    """What the engine does with BF16: quantize it."""
    for name in quantized:
        quantizer_of(weight_format).quantize(received[name])


def quantizer_of(weight_format: str) -> Any:
    """The format as an engine holds it: no transposed copy."""
    quantizers = {
        "nvfp4": fp4adam.NVFP4Quantizer,
        "mxfp8": fp4adam.MXFP8Quantizer,
        "float8block": fp4adam.Float8BlockQuantizer,
    }
    return quantizers[weight_format](columnwise=False)


def transfer(tensor: Tensor, rank: int) -> None:
    """Send a tensor from the trainer, or receive it; gloo sends from host memory."""
    raw = tensor.reshape(-1).view(torch.uint8)
    through_host = dist.get_backend() == "gloo" and raw.is_cuda
    wire = (
        (raw.cpu() if rank == TRAINER else torch.empty_like(raw, device="cpu"))
        if through_host
        else raw
    )
    if rank == TRAINER:
        dist.send(wire, ENGINE)
        return
    dist.recv(wire, TRAINER)
    if through_host:
        raw.copy_(wire)


def refit(
    pairs: Iterator[tuple[str, Tensor]] | None, buffers: dict[str, Tensor], rank: int
) -> tuple[int, float]:
    """Fill the engine's buffers; returns the bytes sent and the milliseconds this rank took."""
    wait_for_device()
    dist.barrier()
    start, count = time.perf_counter(), 0
    for _, tensor in pairs if rank == TRAINER else buffers.items():
        transfer(tensor.contiguous(), rank)
        count += tensor.nbytes
    wait_for_device()
    return count, (time.perf_counter() - start) * 1e3


def wait_for_device() -> None:
    """Until everything that was launched is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run(rank: int, args: argparse.Namespace, port: int) -> None:
    """One of the two processes."""
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    several = args.device == "cuda" and torch.cuda.device_count() > 1
    device = args.device if args.device == "cpu" else f"cuda:{rank if several else 0}"
    if device != "cpu":
        torch.cuda.set_device(device)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl" if several else "gloo", address, rank=rank, world_size=2)
    ways = {"trained bytes": trained_bytes, "BF16, quantized again": decoded}
    model, optimizer = None, None
    if rank == TRAINER:
        model = build(args, device)
        optimizer = fp4adam.FP4Adam(
            model.named_parameters(),
            lr=1e-3,
            scale_groups=fp4adam.hf_scale_groups if args.format == "nvfp4" else None,
        )
    buffers = {way: announce(make, model, args, device, rank) for way, make in ways.items()}
    quantized = [None]
    if rank == TRAINER:
        names = {n for n, p in model.named_parameters() if isinstance(p, fp4adam.QuantizedTensor)}
        quantized = [names]
    dist.broadcast_object_list(quantized, TRAINER)
    for step in range(1, args.steps + 1):
        if rank == TRAINER:
            x = torch.randn(16, SIZES[args.size][0], device=device, dtype=torch.bfloat16)
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for way, make in ways.items():
            pairs = make(model, args) if rank == TRAINER else None
            count, took = refit(pairs, buffers[way], rank)
            start = time.perf_counter()
            if rank == ENGINE and make is decoded:
                requantize(buffers[way], quantized[0], args.format)
                wait_for_device()
            took += (time.perf_counter() - start) * 1e3
            if rank == ENGINE:
                print(f"step {step}  {way:<24} {count:>13,} bytes {took:>9.1f} ms", flush=True)
    check(model, *buffers.values(), quantized[0], args, rank)
    dist.barrier()  # neither leaves while the other still receives
    dist.destroy_process_group()


def announce(
    make: Any, model: nn.Module | None, args: argparse.Namespace, device: str, rank: int
) -> dict[str, Tensor]:
    """The engine's buffers: names, shapes and dtypes are agreed upon once."""
    described = [None]
    if rank == TRAINER:
        described = [[(name, tuple(t.shape), t.dtype) for name, t in make(model, args)]]
    dist.broadcast_object_list(described, TRAINER)
    return {
        name: torch.empty(shape, dtype=dtype, device=device) for name, shape, dtype in described[0]
    }


def check(
    model: nn.Module | None,
    received: dict[str, Tensor],
    plain: dict[str, Tensor],
    quantized: set[str],
    args: argparse.Namespace,
    rank: int,
) -> None:
    """The engine has the trainer's bytes; how many values differ if it has quantized again."""
    expected = [None]
    if rank == TRAINER:
        expected = [{name: digest(tensor) for name, tensor in trained_bytes(model, args)}]
    dist.broadcast_object_list(expected, TRAINER)
    if rank == TRAINER:
        return
    if {name: digest(tensor) for name, tensor in received.items()} != expected[0]:
        raise SystemExit("the engine has other bytes than the trainer")
    print("the engine has the bytes that were trained")
    quantizer = quantizer_of(args.format)
    others = sum(
        int((quantizer.quantize(plain[name]).dequantize(torch.bfloat16) != plain[name]).sum())
        for name in quantized
    )
    total = sum(plain[name].numel() for name in quantized)
    print(f"quantized again, {others:,} of {total:,} weights have another value")


def digest(tensor: Tensor) -> str:
    """A hash of the bytes of a tensor."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def main(argv: Sequence[str] | None = None) -> None:
    """Start both processes and wait for them."""
    args = parse_args(argv)
    context, port = multiprocessing.get_context("spawn"), free_port()
    processes = [context.Process(target=run, args=(rank, args, port)) for rank in (TRAINER, ENGINE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"a process failed: {[process.exitcode for process in processes]}")


if __name__ == "__main__":
    main()
