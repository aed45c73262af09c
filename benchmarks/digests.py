"""Digests of random training programs: they compare two versions of the code, or a GPU with a CPU.

    python benchmarks/digests.py --json OUT [--programs 240] [--device cuda] [--kernels]
    python benchmarks/digests.py --compare BEFORE AFTER

A program is drawn from its seed alone: a format, state dtypes and options, then steps mixed with
missing gradients, overwritten weights, reloads, learning rates of zero, clipping and gradient
release. Every fourth one runs on two or three ranks, under FSDP2. Its digest is a SHA-256 of all
bytes of weights and optimizer states at its end. Only public names and torch's protocols are used.
"""

import argparse
import copy
import hashlib
import json
import os
import random
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
SHAPES = ((32, 64), (64, 96), (128, 32), (48, 96), (16, 160))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=240)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kernels", action="store_true", help="Triton's interpreter on a CPU")
    parser.add_argument("--alone", action="store_true", help="no programs on several ranks")
    parser.add_argument("--json", type=Path, help="where digests are written")
    parser.add_argument("--compare", type=Path, nargs=2, help="two results; fails if they differ")
    return parser.parse_args()


def quantizers() -> dict[str, Any]:
    import fp4adam

    return {
        "nvfp4": fp4adam.NVFP4Quantizer(),
        "nvfp4-1d": fp4adam.NVFP4Quantizer(two_dimensional=False),
        "nvfp4-rowwise": fp4adam.NVFP4Quantizer(columnwise=False),
        "mxfp8": fp4adam.MXFP8Quantizer(),
        "mxfp8-rowwise": fp4adam.MXFP8Quantizer(columnwise=False),
        "float8block": fp4adam.Float8BlockQuantizer(),
        "float8block-1d": fp4adam.Float8BlockQuantizer(two_dimensional=False),
        "float8block-fp32": fp4adam.Float8BlockQuantizer(
            force_pow_2_scales=False, amax_epsilon=1e-3
        ),
        "float8": fp4adam.Float8Quantizer(),
        "float8-delayed": fp4adam.Float8Quantizer(scaling="delayed", amax_history_len=3),
    }


# Formats that went: their names are still drawn, so that each seed stands for what it did before.
GONE = ("nvfp4-4over6", "nvfp4-4over6-1d")


class Program:
    """What one seed stands for."""

    def __init__(self, seed: int, is_sharded: bool) -> None:
        draw = self.draw = random.Random(seed)
        self.seed = seed
        names = sorted([*quantizers(), *GONE])
        if is_sharded:
            names = [name for name in names if name != "float8-delayed" and "1d" not in name]
        self.formats = draw.sample(names, 2)
        # MXFP8 takes multiples of 32.
        self.shapes = [
            draw.choice(SHAPES[:3] if self.formats[i % 2].startswith("mxfp8") else SHAPES)
            for i in range(4)
        ]
        amsgrad = draw.random() < 0.15
        self.options: dict[str, Any] = {
            "lr": draw.choice((1e-2, 1e-3)),
            "weight_decay": draw.choice((0.0, 0.1)),
            "amsgrad": amsgrad,
            "adam_w_mode": draw.random() < 0.8,
            "bias_correction": draw.random() < 0.9,
            "exp_avg_dtype": draw.choice(STATE_DTYPES),
            "exp_avg_sq_dtype": torch.float32 if amsgrad else draw.choice(STATE_DTYPES),
            "master_weight_dtype": draw.choice((torch.float32, torch.float32, torch.float16)),
            "quantize_from": draw.choice(("master", "master", "param_dtype")),
        }
        if self.options["master_weight_dtype"] == torch.float32:
            self.options["store_param_remainders"] = draw.random() < 0.3
        self.dtype = draw.choice((torch.float32, torch.bfloat16))
        self.has_release = not is_sharded and draw.random() < 0.2
        self.keeps_value = draw.random() < 0.5
        self.actions = [
            draw.choices(
                ("step", "partial", "still", "overwrite", "reload", "clip", "copy"),
                (8, 2, 1, 2, 2, 1 if not self.has_release else 0, 1),
            )[0]
            for _ in range(draw.randint(5, 9))
        ]

    def value(self, shape: tuple[int, ...], i: int, scale: float) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + i)
        x = torch.randn(shape, generator=generator) * scale
        # Blocks of unlike sizes, so that scales differ.
        return x * torch.exp2(torch.randint(-3, 3, shape[:1], generator=generator)).view(
            -1, *[1] * (len(shape) - 1)
        )


class Model(nn.Module):
    """Four weights of two formats, a BF16 and an FP32 vector."""

    def __init__(self, program: Program, device: str) -> None:
        import fp4adam

        super().__init__()
        known = quantizers()
        for i, shape in enumerate(program.shapes):
            layer = nn.Linear(shape[1], shape[0], bias=False, dtype=program.dtype, device=device)
            with torch.no_grad():
                layer.weight.copy_(program.value(shape, i, 0.1))
            block = nn.Sequential(layer)
            fp4adam.quantize_model(block, known[program.formats[i % 2]], filter=lambda *_: True)
            if not program.keeps_value:
                layer.weight.clear_high_precision_init_val()
            setattr(self, f"block{i}", block)
        self.narrow = nn.Parameter(program.value((48,), 10, 1.0).to(device, torch.bfloat16))
        self.wide = nn.Parameter(program.value((24,), 11, 1.0).to(device))


def local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def bytes_of(value: Any) -> Any:
    """Names and bytes of tensors, in order, down to what torch's flattening protocol gives."""
    if isinstance(value, dict):
        for name in sorted(value, key=str):
            yield str(name).encode()
            yield from bytes_of(value[name])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from bytes_of(item)
    elif isinstance(value, Tensor):
        value = local(value.detach())
        if hasattr(value, "__tensor_flatten__"):
            for name in sorted(value.__tensor_flatten__()[0]):
                yield name.encode()
                yield from bytes_of(getattr(value, name))
        else:
            yield f"{value.dtype} {tuple(value.shape)}".encode()
            yield value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        yield repr(value).encode()


def digest(*values: Any) -> str:
    sha = hashlib.sha256()
    for value in values:
        for part in bytes_of(value):
            sha.update(part)
    return sha.hexdigest()[:24]


def set_gradients(program: Program, params: list[Tensor], at: int, skip: set[int]) -> None:
    """Gradients of whole parameters, cut as the parameters are."""
    for i, param in enumerate(params):
        if i in skip:
            param.grad = None
            continue
        grad = program.value(tuple(param.shape), 100 * (at + 1) + i, 0.01)
        grad = grad.to(param.device, param.dtype)
        if hasattr(param, "_local_tensor"):
            from torch.distributed.tensor import distribute_tensor

            grad = distribute_tensor(grad, param.device_mesh, param.placements)
        param.grad = grad


def run(program: Program, device: str, kernels: bool, mesh: Any = None) -> str:
    import fp4adam

    model = Model(program, device)
    if mesh is not None:
        from torch.distributed.fsdp import fully_shard

        for child in model.children():
            fully_shard(child, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def make(model: nn.Module) -> tuple[list[Tensor], Any, Any]:
        params = list(model.parameters())
        options = program.options | ({} if kernels else {"fused": False})
        # Of the group, as a keyword of its own chooses another layout of the states.
        group = {"params": params, "adam_w_mode": options.pop("adam_w_mode")}
        optimizer = fp4adam.FP4Adam([group], **options)
        release = optimizer.enable_gradient_release() if program.has_release else None
        return params, optimizer, release

    params, optimizer, release = make(model)
    draw = random.Random(program.seed + 1)
    for at, action in enumerate(program.actions):
        skip = (
            {i for i in range(len(params)) if draw.random() < 0.4} if action == "partial" else set()
        )
        lr = program.options["lr"] * draw.choice((1.0, 0.5, 2.0))
        for group in optimizer.param_groups:
            group["lr"] = 0.0 if action == "still" else lr
        chosen = draw.randrange(len(params))
        if action == "overwrite":
            value = program.value(tuple(params[chosen].shape), 50 + at, 0.1)
            value = value.to(params[chosen].device, params[chosen].dtype)
            if mesh is not None:
                continue  # a rule of its own: shards restart from what each rank knows
            with torch.no_grad():
                params[chosen].copy_(value)
            continue
        if action == "reload":
            saved = copy.deepcopy(
                optimizer.state_dict()
                if mesh is not None or draw.random() < 0.5
                else optimizer.compact_state_dict()
            )
            optimizer.load_state_dict(saved)
            continue
        if action == "copy":
            if mesh is None and release is None:
                weights = copy.deepcopy(model.state_dict())
                saved = copy.deepcopy(optimizer.state_dict())
                model = copy.deepcopy(model)
                params, optimizer, release = make(model)
                model.load_state_dict(weights)
                optimizer.load_state_dict(saved)
            continue
        if release is not None:
            # Gradients arrive by a backward pass, and are gone after it.
            loss = torch.zeros((), device=device)
            for i, param in enumerate(params):
                if i in skip:
                    continue
                grad = program.value(tuple(param.shape), 100 * (at + 1) + i, 0.01)
                grad = grad.to(param.device, param.dtype)
                value = (
                    param.dequantize()
                    if hasattr(param, "dequantize") and hasattr(param, "quantizer")
                    else param
                )
                loss = loss + (value.to(param.dtype) * grad).float().sum()
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
        else:
            set_gradients(program, params, at, skip)
            if action == "clip":
                optimizer.clip_grad_norm_(0.05)
            optimizer.step()
            optimizer.zero_grad()
    # Steps are counted in the saved states; where an optimizer keeps them is its own business.
    states = [
        {name: value for name, value in optimizer.state[param].items() if name != "step"}
        for param in params
        if param in optimizer.state
    ]
    saved = optimizer.state_dict()["state"]
    for state in saved.values():
        state["step"] = float(state["step"])
    return digest(params, states, saved)


def describe(program: Program) -> str:
    short = {k: str(v).removeprefix("torch.") for k, v in program.options.items()}
    drawn = program.formats, program.shapes, short, program.actions
    return f"{drawn} release {program.has_release}"


def rank_main(rank: int, world: int, port: int, seeds: list[int], args: Any, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    prepare(args)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    for seed in seeds:
        try:
            mine = run(Program(seed, True), "cpu", args.kernels, mesh)
        except Exception as error:
            mine = f"{type(error).__name__}: {error}"[:300]
        every: list[Any] = [None] * world
        dist.all_gather_object(every, mine)
        if rank == 0:
            results[seed] = hashlib.sha256("".join(every).encode()).hexdigest()[:24]
            if any(":" in one for one in every):
                results[seed] = " | ".join(every)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive their group


def prepare(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if args.kernels and args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        sys.path.insert(0, str(ROOT / "tests"))
        import interpreter

        interpreter.install()
        from fp4adam.tensors import backend

        backend.uses_kernels = lambda device: True


def main() -> None:
    args = parse_args()
    if args.compare:
        records = [json.loads(path.read_text()) for path in args.compare]
        before, after = (record["digests"] for record in records)
        common = before.keys() & after.keys()
        if len({record["about"]["device"] for record in records}) > 1:
            # The last bits of torch's norm depend on the device.
            common = {s for s in common if "clip" not in Program(int(s), int(s) % 4 == 3).actions}
        unlike = sorted(int(seed) for seed in common if before[seed] != after[seed])
        print(f"{len(common)} programs in both, {len(unlike)} differ")
        for seed in unlike[:20]:
            print(seed, describe(Program(seed, seed % 4 == 3)), before[str(seed)], after[str(seed)])
        sys.exit(bool(unlike) or not common)
    prepare(args)
    from provenance import about

    seeds = [
        seed
        for seed in range(args.programs)
        if not set(Program(seed, seed % 4 == 3).formats) & set(GONE)
    ]
    digests: dict[int, str] = {}
    for seed in (s for s in seeds if s % 4 != 3):
        try:
            digests[seed] = run(Program(seed, False), args.device, args.kernels)
        except Exception as error:
            digests[seed] = f"{type(error).__name__}: {error}"[:300]
    if not args.alone and args.device == "cpu":
        with mp.get_context("spawn").Manager() as manager:
            results = manager.dict()
            for world in (2, 3):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", 0))
                    port = s.getsockname()[1]
                mine = [s for s in seeds if s % 4 == 3 and (s // 4) % 2 == world - 2]
                mp.spawn(rank_main, (world, port, mine, args, results), nprocs=world)
            digests.update(results)
    failed = {seed: text for seed, text in digests.items() if ":" in text}
    print(f"{len(digests)} programs, {len(failed)} raised")
    for seed, text in sorted(failed.items())[:10]:
        print(seed, text, describe(Program(seed, seed % 4 == 3)))
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    "about": about(args.device),
                    "digests": {str(s): d for s, d in sorted(digests.items())},
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
