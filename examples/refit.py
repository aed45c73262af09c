"""A small reinforcement-learning loop: one process trains a GPT, another samples with its weights.

    python examples/refit.py --format nvfp4
    python examples/refit.py --requantize          # BF16 weights, which the engine quantizes
    python examples/refit.py --size 1b --device cuda --lr 1e-6

The reward is the share of lower-case letters in the text that the engine has sampled; nothing is
downloaded. After each step the engine gets the bytes that the step has changed (WeightSender and
WeightReceiver), and samples with them. With --requantize the trainer has weights in high precision,
as in most RL frameworks: it sends all of them in BF16, and the engine rounds them to the format.
Each step prints the divergence (KL) of the trainer's predictions from the engine's on what was
sampled, and what the refit took. On CPUs or one GPU bytes travel through host memory (gloo), on two
GPUs directly (NCCL).
"""

import argparse
import hashlib
import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

# Read when torch loads OpenMP, as in train_gpt.py.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from options import PRESETS, count, positive_number
from stdlib_text import cut_batch, load_text
from torch import Tensor

import fp4adam

LAYOUT_OF = {"nvfp4": "compressed-tensors", "mxfp8": "compressed-tensors", "float8block": "fp8"}
TRAINER, ENGINE = 0, 1
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--format", choices=LAYOUT_OF, default="nvfp4")
    parser.add_argument("--requantize", action="store_true", help="the engine quantizes")
    parser.add_argument("--size", choices=PRESETS, default="tiny")
    parser.add_argument("--pretrain", type=count, default=60, metavar="N", help="default: 60")
    parser.add_argument("--steps", type=count, default=10, metavar="N", help="of RL; default: 10")
    parser.add_argument("--samples", type=count, default=16, metavar="N", help="default: 16")
    parser.add_argument("--length", type=count, default=24, metavar="N", help="default: 24 bytes")
    parser.add_argument("--lr", type=positive_number, default=3e-4, metavar="X", help="of RL")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def build(args: argparse.Namespace, device: str) -> GPT:
    """The policy; its layers have BF16 weights on a GPU, FP32 ones on a CPU."""
    preset = PRESETS[args.size]
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(GPTConfig(preset["layers"], preset["heads"], preset["dim"], preset["context"]))
    return model.to(torch.bfloat16 if device != "cpu" else torch.float32)


# The engine


def decode(stored: dict[str, Tensor], layer: str, weight_format: str) -> Tensor | None:
    """The values of a layer's weight, float32, as an engine computes them from codes and scales."""
    if weight_format == "nvfp4" and f"{layer}.weight_packed" in stored:
        packed = stored[f"{layer}.weight_packed"]
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
        scale = stored[f"{layer}.weight_scale"].float() / stored[f"{layer}.weight_global_scale"]
        return E2M1.to(packed.device)[codes] * scale.repeat_interleave(16, -1)
    codes = stored[f"{layer}.weight"]
    if weight_format == "mxfp8" and f"{layer}.weight_scale" in stored:
        scale = 2.0 ** (stored[f"{layer}.weight_scale"].float() - 127)
        return codes.float() * scale.repeat_interleave(32, -1)
    if weight_format == "float8block" and f"{layer}.weight_scale_inv" in stored:
        scale = stored[f"{layer}.weight_scale_inv"]
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes.float() * scale[: codes.shape[0], : codes.shape[1]]
    return None


class Engine:
    """Samples with the weights that it was last sent: W4A16, or W8A16."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        self.args, self.model = args, build(args, device)
        self.receiver = fp4adam.WeightReceiver(device=device)

    @torch.no_grad()
    def refit(self, packed: Tensor) -> None:
        """Apply an update, and decode what has changed, or quantize what came in BF16."""
        changed = self.receiver.apply(fp4adam.WeightUpdate.unpack(packed))
        self.decode({name.rpartition(".")[0] for name in changed})

    @torch.no_grad()
    def quantize(self, weights: dict[str, Tensor]) -> None:
        """Take BF16 weights and quantize those of hidden layers, as the trainer would."""
        quantizer = fp4adam.Recipe(self.args.format).quantizer
        for name, param in self.model.named_parameters():
            value = weights[name]
            is_hidden = param.ndim == 2 and name.startswith("blocks.")
            param.copy_(quantizer.quantize(value).dequantize() if is_hidden else value)

    def decode(self, layers: set[str]) -> None:
        """Write the values of some layers into the model."""
        for layer in layers:
            value = decode(self.receiver.tensors, layer, self.args.format)
            if value is None:
                value = self.receiver.tensors[f"{layer}.weight"]
            self.model.get_parameter(f"{layer}.weight").copy_(value)

    @torch.no_grad()
    def rollout(self) -> tuple[Tensor, Tensor]:
        """Sampled bytes [samples, 1 + length], and the log probabilities they were drawn from."""
        device = self.model.lm_head.weight.device
        tokens = torch.full((self.args.samples, 1), ord("\n"), device=device)
        for _ in range(self.args.length):
            logits = self.model(tokens)[:, -1].float()
            tokens = torch.cat((tokens, torch.multinomial(logits.softmax(-1), 1)), dim=1)
        logs = self.model(tokens[:, :-1]).float().log_softmax(-1)
        return tokens, logs


# The trainer


class Trainer:
    """Trains the policy; its weights are quantized unless the engine is to do that."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        self.args, self.model = args, build(args, device)
        self.sender = None
        if not args.requantize:
            fp4adam.quantize_model(self.model, args.format)
        self.optimizer = fp4adam.FP4Adam(self.model.parameters(), lr=PRESETS[args.size]["lr"])
        if not args.requantize:
            self.sender = fp4adam.WeightSender(self.model, LAYOUT_OF[args.format])

    def forward(self, tokens: Tensor) -> Tensor:
        """Log probabilities of the next bytes, float32."""
        return self.model(tokens).float().log_softmax(-1)

    def step(self, loss: Tensor) -> None:
        """One optimizer step."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def pretrain(self) -> None:
        """Learn some text, so that there is a policy to begin with."""
        text = load_text()[0].to(self.model.lm_head.weight.device)
        for step in range(self.args.pretrain):
            tokens, targets = cut_batch(text, 16, self.model.config.context, seed=step)
            self.step(F.nll_loss(self.forward(tokens).flatten(0, 1), targets.flatten()))
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr

    def learn(self, tokens: Tensor, sampled_logs: Tensor) -> tuple[float, float]:
        """One step of REINFORCE; the mean reward, and KL(engine || trainer) per byte before it."""
        written = tokens[:, 1:]
        reward = ((written >= ord("a")) & (written <= ord("z"))).float().mean(1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        logs = self.forward(tokens[:, :-1])
        q, p = sampled_logs.double(), logs.detach().double()
        kl = (q.exp() * (q - p)).sum(-1).mean()
        chosen = logs.gather(-1, written[..., None])[..., 0]
        self.step(-(advantage[:, None] * chosen).mean())
        return reward.mean().item(), kl.item()


# Between them


def send(tensor: Tensor | None, rank: int, device: str) -> Tensor:
    """A tensor from the trainer to the engine, which passes None; gloo sends from host memory."""
    through_host = dist.get_backend() == "gloo"
    size = [None if tensor is None else (tensor.numel(), tensor.dtype)]
    dist.broadcast_object_list(size, TRAINER)
    numel, dtype = size[0]
    wire = "cpu" if through_host else device
    if rank == TRAINER:
        # As bytes: not every backend sends every dtype.
        dist.send(tensor.to(wire).view(-1).view(torch.uint8), ENGINE)
        return tensor
    received = torch.empty(numel, dtype=dtype, device=wire)
    dist.recv(received.view(torch.uint8), TRAINER)
    return received.to(device)


def share(tensors: list[Tensor] | None, device: str) -> list[Tensor]:
    """Tensors of the engine, on both ranks."""
    held = [None if tensors is None else [tensor.cpu() for tensor in tensors]]
    dist.broadcast_object_list(held, ENGINE)
    return [tensor.to(device) for tensor in held[0]]


def wait_for_device() -> None:
    """Until everything that was launched is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def refit(trainer: Trainer | None, engine: Engine | None, device: str) -> dict[str, Any]:
    """Bring the trainer's weights to the engine; bytes and milliseconds of both sides together."""
    rank = TRAINER if trainer else ENGINE
    requantizes = (trainer or engine).args.requantize
    dist.barrier()
    start = time.perf_counter()
    packed = None
    if trainer and requantizes:
        flat = [param.detach().bfloat16().view(-1) for param in trainer.model.parameters()]
        packed = torch.cat(flat)
    elif trainer:
        packed = trainer.sender.export_changes().pack()
    packed = send(packed, rank, device)
    if engine and requantizes:
        params = dict(engine.model.named_parameters())
        values = packed.split([param.numel() for param in params.values()])
        pairs = zip(params.items(), values, strict=True)
        engine.quantize({name: value.view(param.shape) for (name, param), value in pairs})
    elif engine:
        engine.refit(packed)
    wait_for_device()
    dist.barrier()
    return {"bytes": packed.nbytes, "ms": (time.perf_counter() - start) * 1e3}


def run(rank: int, args: argparse.Namespace, port: int) -> None:
    """One of the two processes."""
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    several = args.device == "cuda" and torch.cuda.device_count() > 1
    device = args.device if args.device == "cpu" else f"cuda:{rank if several else 0}"
    if device != "cpu":
        torch.cuda.set_device(device)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl" if several else "gloo", address, rank=rank, world_size=2)
    trainer = engine = None
    if rank == TRAINER:
        trainer = Trainer(args, device)
        trainer.pretrain()
    else:
        engine = Engine(args, device)
    for step in range(args.steps):
        took = refit(trainer, engine, device)
        tokens, logs = share(engine.rollout() if engine else None, device)
        if trainer:
            reward, kl = trainer.learn(tokens, logs)
            print(
                f"step {step + 1:>3}  reward {reward:.3f}  KL {kl:9.2e}  "
                f"refit {took['bytes']:>13,} bytes {took['ms']:>9.1f} ms",
                flush=True,
            )
    refit(trainer, engine, device)
    if not args.requantize:
        check(trainer, engine)
    dist.barrier()  # neither leaves while the other still receives
    dist.destroy_process_group()


def check(trainer: Trainer | None, engine: Engine | None) -> None:
    """The engine has the trainer's bytes, all of them."""
    expected = [None]
    if trainer:
        layout = LAYOUT_OF[trainer.args.format]
        expected = [{n: digest(t) for n, t in fp4adam.export_tensors(trainer.model, layout)}]
    dist.broadcast_object_list(expected, TRAINER)
    if engine:
        if {n: digest(t) for n, t in engine.receiver.tensors.items()} != expected[0]:
            raise SystemExit("the engine has other bytes than the trainer")
        print("the engine has the bytes that were trained")


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
