"""Trains a GPT whose linear weights live in 4 or 8 bits, on the source code of Python itself.

    python examples/train_gpt.py --format nvfp4 --sample 400
    python examples/train_gpt.py --compare --format nvfp4,mxfp8,float8block
    torchrun --nproc-per-node 8 examples/train_gpt.py --size 1b --checkpoint-every 100

The second line trains FP32 weights with torch's AdamW, rounds a copy of them to each format, then
trains in each format with FP4Adam, from the same starting weights and in the same data order; with
--seeds 3, all of it three times, so that gaps have a standard error. It writes results.json and
comparison.png.
The third spreads the model and each batch over eight GPUs; data order and starting weights stay the
same.
"""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

# Read when torch loads OpenMP. Threads that spin while they wait cost most of the speed of a CPU
# that has anything else to do.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from comparison import (
    Result,
    peak_memory,
    print_table,
    progress_bar,
    say,
    stored_bytes,
    write_json,
    write_plot,
)
from gpt import GPT, GPTConfig
from options import QUANTIZED, STATES, parse_args, recipe_of
from stdlib_text import cut_batch, load_text
from torch import Tensor, nn

import distributed
import fp4adam

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "fp4adam": fp4adam.FP4Adam,
}
# Batches of the held-out loss: while training, and at the end.
VALIDATION_BATCHES, END_BATCHES = 8, 64


class Contestant(NamedTuple):
    """What tells the runs of one comparison apart."""

    format: str
    optimizer: str
    seed: int
    states: str = "fp32"


@dataclass
class Run:
    """One model in training, and its measurements so far."""

    format: str
    optimizer_name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    suffix: str = ""
    train_loss: list[float] = field(default_factory=list)
    validation_loss: dict[int, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return self.scheduler.last_epoch

    @property
    def label(self) -> str:
        """The name of the run in progress lines and files."""
        return f"{self.format}-{self.optimizer_name}{self.suffix}"


def learning_rate_share(step: int, steps: int, schedule: str) -> float:
    """The share of --lr at ``step``: 10 % linear warm-up, then what --schedule says."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if schedule == "cosine":
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
    return 1.0 if schedule == "constant" else min(1.0, (1 - progress) / 0.2)


def new_model(args: argparse.Namespace) -> GPT:
    """A GPT in FP32 with the starting weights of --seed."""
    torch.manual_seed(args.seed)
    with torch.device(args.device):
        return GPT(GPTConfig(args.layers, args.heads, args.dim, args.context))


def build_run(
    args: argparse.Namespace,
    weight_format: str,
    optimizer_name: str,
    recipe: fp4adam.Recipe | None = None,
    model: nn.Module | None = None,
    states: str | None = None,
) -> Run:
    """Model, optimizer and schedule; one --seed gives every format the same starting weights.

    Args:
        args: All options but the format and the optimizer.
        weight_format: As in --format.
        optimizer_name: As in --optimizer.
        recipe: The recipe, if not the one of the format and --matmul.
        model: A model in high precision to train on, if not a new one.
        states: One of --states, if there are several.
    """
    model = model or new_model(args)
    model.to(DTYPES.get(weight_format, torch.float32))
    if recipe is not None or weight_format in QUANTIZED:
        fp4adam.quantize_model(model, recipe or recipe_of(args, weight_format))
    if args.compile:
        torch.compiler.reset()  # blocks of all runs share their code, and torch counts its versions
        for block in model.blocks:
            block.compile()  # before FSDP2 adds its hooks, which are not to be compiled
    distributed.shard(model)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    options = dict(lr=args.lr, betas=(0.9, 0.95), fused=True)
    if optimizer_name == "fp4adam":
        options |= STATES[states or args.states[0]]
    optimizer = OPTIMIZERS[optimizer_name](groups, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_share(step, args.steps, args.schedule)
    )
    return Run(weight_format, optimizer_name, model, optimizer, scheduler)


def autocast(args: argparse.Namespace) -> torch.autocast:
    """Activations in BF16 on a GPU, as the parameters are on a CPU."""
    device_type = torch.device(args.device).type
    return torch.autocast(device_type, torch.bfloat16, enabled=device_type == "cuda")


def check_text(args: argparse.Namespace) -> None:
    """Ends the program if there is not enough text."""
    for part in load_text(tuple(args.text)):
        if len(part) <= args.context:
            raise SystemExit(
                f"--text must have more than --context = {args.context} bytes to train on and to "
                f"hold out, got {len(part)}; add folders"
            )


def text_parts(args: argparse.Namespace) -> list[Tensor]:
    """Training and held-out text, uint8, where batches are to be cut."""
    check_text(args)
    return [part.to(args.device) for part in load_text(tuple(args.text))]


def compute_loss(run: Run, args: argparse.Namespace, text: Tensor, seed: int) -> Tensor:
    """Cross entropy of this process's crops of those that ``seed`` picks, in nats per byte."""
    crops = cut_batch(text, args.batch, args.context, seed)
    inputs, targets = map(distributed.local_part, crops)
    with autocast(args):
        logits = run.model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def train_step(
    run: Run, args: argparse.Namespace, text: Tensor, compute: Callable[..., Tensor] = compute_loss
) -> Tensor:
    """One optimizer step over --accumulate batches; their mean loss. The host does not wait.

    Args:
        run: The run to take on.
        args: All options.
        text: Training text.
        compute: Computes the loss of a batch, as ``compute_loss`` does.
    """
    total = torch.zeros((), device=args.device)
    for index in range(run.step * args.accumulate, (run.step + 1) * args.accumulate):
        loss = compute(run, args, text, args.seed * 1_000_003 + index) / args.accumulate
        loss.backward()
        total += loss.detach()
    if args.clip and run.optimizer_name == "fp4adam":
        run.optimizer.clip_grad_norm_(args.clip)  # as the next, without writing the gradients
    elif args.clip:
        nn.utils.clip_grad_norm_(run.model.parameters(), args.clip)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.scheduler.step()
    return distributed.mean(total)


@torch.no_grad()
def validate(
    run: Run, args: argparse.Namespace, text: Tensor, batches: int = VALIDATION_BATCHES
) -> list[float]:
    """The losses of batches of crops that are the same at every call."""
    losses = (compute_loss(run, args, text, seed) for seed in range(batches))
    return [distributed.mean(loss).item() for loss in losses]


def train(run: Run, args: argparse.Namespace) -> None:
    """Takes ``run`` from where it is to --steps."""
    text, held_out = text_parts(args)
    with progress_bar(run.label, run.step, args.steps) as advance:
        while run.step < args.steps:
            start = time.perf_counter()
            loss = train_step(run, args, text).item()  # waits for the GPU: the clock is right
            run.seconds.append(time.perf_counter() - start)
            run.train_loss.append(loss)
            if not math.isfinite(loss):
                raise SystemExit(
                    f"the loss of {run.label} is {loss} at step {run.step}; lower --lr"
                )
            if is_due(run, args, args.eval_every):
                run.validation_loss[run.step] = statistics.fmean(validate(run, args, held_out))
                print_progress(run, args)
            if args.checkpoint_every and is_due(run, args, args.checkpoint_every):
                save_checkpoint(run, args)
            advance()


def is_due(run: Run, args: argparse.Namespace, every: int) -> bool:
    """Whether something happens now that happens every so many steps, and after the last."""
    return run.step % every == 0 or run.step == args.steps


def tokens_per_second(args: argparse.Namespace, seconds: list[float]) -> float:
    """Speed of the median step, which compilation and single slow steps do not affect."""
    return args.batch * args.context * args.accumulate / statistics.median(seconds)


def print_progress(run: Run, args: argparse.Namespace) -> None:
    """One line: step, losses, learning rate, speed since the last line, peak memory."""
    speed = tokens_per_second(args, run.seconds[-args.eval_every :])
    say(
        f"{run.label:<19}  step {run.step:>5}/{args.steps}  loss {run.train_loss[-1]:.4f}  "
        f"val {run.validation_loss[run.step]:.4f}  lr {run.scheduler.get_last_lr()[0]:.2e}  "
        f"{speed:>9,.0f} tokens/s  {peak_memory(torch.device(args.device)) / 2**30:.2f} GiB"
    )


def save_checkpoint(run: Run, args: argparse.Namespace) -> None:
    """Writes everything that resuming needs."""
    settings = vars(args) | {"format": [run.format], "optimizer": run.optimizer_name}
    on_gpu = torch.device(args.device).type == "cuda"
    extra = {
        "settings": settings | {"compare": False},
        "scheduler": run.scheduler.state_dict(),
        "history": (run.train_loss, run.validation_loss, run.seconds),
        "cpu_rng": torch.get_rng_state(),
        "gpu_rng": torch.cuda.get_rng_state(args.device) if on_gpu else None,
    }
    path = Path(args.out) / f"{run.label}-step{run.step:06d}"
    distributed.save(path, run.model, run.optimizer, extra)
    say(f"{run.label:<19}  step {run.step:>5}/{args.steps}  checkpoint: {path}")


def load_checkpoint(run: Run, args: argparse.Namespace) -> None:
    """Puts the state in --resume into a freshly built run."""
    distributed.load(Path(args.resume), run.model, run.optimizer)
    extra = distributed.load_extra(Path(args.resume))
    run.scheduler.load_state_dict(extra["scheduler"])
    run.train_loss, run.validation_loss, run.seconds = extra["history"]
    torch.set_rng_state(extra["cpu_rng"])
    if extra["gpu_rng"] is not None and torch.device(args.device).type == "cuda":
        torch.cuda.set_rng_state(extra["gpu_rng"], args.device)


def summarize(run: Run, args: argparse.Namespace) -> Result:
    """The numbers of a finished run; the final training loss is the mean of the last tenth."""
    device = torch.device(args.device)
    params = list(run.optimizer.state)  # the model's own can be gathered after a forward pass
    count = sum(p.numel() for p in params)
    states = [pair for state in run.optimizer.state.values() for pair in state.items()]
    masters = [value for name, value in states if name.startswith("master_param")]
    _, held_out = text_parts(args)
    gradients = sum(p.numel() * p.dtype.itemsize for p in params)  # in the parameters' dtype
    return {
        "format": run.format,
        "optimizer": run.optimizer_name,
        "seed": args.seed,
        "parameters": count,
        "final_train_loss": statistics.fmean(run.train_loss[-max(1, args.steps // 10) :]),
        "final_validation_loss": run.validation_loss[run.step],
        "end_loss": statistics.fmean(validate(run, args, held_out, END_BATCHES)),
        "tokens_per_second": tokens_per_second(args, run.seconds),
        "is_on_gpu": device.type == "cuda",
        "seconds_per_step": statistics.median(run.seconds),
        "peak_memory_bytes": peak_memory(device),
        "weight_bytes_per_parameter": stored_bytes(params, device) / count,
        "gradient_bytes_per_parameter": gradients / count,
        "optimizer_bytes_per_parameter": stored_bytes([v for _, v in states], device) / count,
        "master_bytes_per_parameter": stored_bytes(masters, device) / count,
        "train_loss": run.train_loss,
        "validation_loss": run.validation_loss,
    }


def print_sample(run: Run, args: argparse.Namespace) -> None:
    """Prints --sample bytes that the model writes after "def ", as ASCII."""
    torch.manual_seed(args.seed)
    prompt = torch.tensor([list(b"\ndef ")], device=args.device)
    with autocast(args), torch.compiler.set_stance("force_eager"):  # lengths change at every byte
        codes = run.model.generate(prompt, args.sample)[0].tolist()
    text = "".join(chr(c) if c == 10 or 32 <= c < 127 else "?" for c in codes)
    print(f"\n{run.label} writes:{text}")


def planned(args: argparse.Namespace) -> list[Contestant]:
    """The runs, in their order."""
    states = args.states if args.optimizer == "fp4adam" else ["fp32"]
    plan = [Contestant(f, args.optimizer, args.seed, kept) for f in args.format for kept in states]
    if not args.compare:
        return plan
    plan = [Contestant(name, "adamw", args.seed) for name in args.baseline] + plan
    return [c._replace(seed=args.seed + i) for i in range(args.seeds) for c in plan]


def suffix(args: argparse.Namespace, contestant: Contestant) -> str:
    """What the label of a run has behind format and optimizer."""
    states = "" if contestant.states == "fp32" else f"-{contestant.states}"
    return states + ("" if contestant.seed == args.seed else f"-seed{contestant.seed}")


def round_afterwards(run: Run, args: argparse.Namespace) -> dict[str, float]:
    """The held-out loss of a finished run whose weights are rounded to each --format at the end."""
    _, held_out = text_parts(args)
    losses = {}
    for name in args.format:
        if name in QUANTIZED:
            model = new_model(args)
            model.load_state_dict(run.model.state_dict())
            rounded = fp4adam.quantize_model(model, name)
            losses[name] = statistics.fmean(
                validate(dataclasses.replace(run, model=rounded), args, held_out, END_BATCHES)
            )
    return losses


def execute(args: argparse.Namespace, contestant: Contestant) -> Result:
    """Trains one model from beginning (or --resume) to end."""
    weight_format, optimizer_name, seed, states = contestant
    if torch.device(args.device).type == "cuda":
        gc.collect()  # the model before this one, or its memory would count as this one's
        torch.cuda.reset_peak_memory_stats(args.device)
    own = argparse.Namespace(**{**vars(args), "seed": seed})
    run = build_run(own, weight_format, optimizer_name, states=states)
    run.suffix = suffix(args, contestant)
    if weight_format in QUANTIZED:
        say(f"\n{run.label}: {fp4adam.summary(run.model).describe()}")
    if args.resume:
        load_checkpoint(run, own)
    train(run, own)
    if args.sample:
        print_sample(run, own)
    result = summarize(run, own) | {"states": states}
    first = planned(args)[0]._replace(seed=seed)
    if args.compare and contestant == first and distributed.world_size() == 1:
        result["rounded_afterwards"] = round_afterwards(run, own)
    return result


def new_folder(args: argparse.Namespace) -> str:
    """Makes --out, or the first runs/SIZE-NUMBER that does not exist yet."""
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        return args.out
    for number in itertools.count(1):
        path = Path("runs", f"{args.size}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return str(path)


def describe_device(args: argparse.Namespace) -> str:
    """The GPU's name, or the CPU's architecture and number of threads."""
    if torch.device(args.device).type == "cuda":
        return torch.cuda.get_device_name(args.device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def describe_training(args: argparse.Namespace) -> str:
    """What is trained, on what, and how long."""
    with torch.device("meta"):
        model = GPT(GPTConfig(args.layers, args.heads, args.dim, args.context))
    count = sum(param.numel() for param in model.parameters())
    devices = f"{distributed.world_size()} x " if distributed.world_size() > 1 else ""
    return (
        f"a GPT of {count / 1e6:,.1f} M parameters (layers {args.layers}, width {args.dim})"
        f" on {devices}{describe_device(args)}, steps {args.steps} of "
        f"{args.batch * args.accumulate} x {args.context} bytes"
    )


def check_matmul(args: argparse.Namespace) -> None:
    """Ends the program if the GPU has no matmuls for --matmul quantized."""
    if args.matmul != "quantized":
        return
    try:
        for name in args.format:
            layer = nn.Linear(128, 128, bias=False, device=args.device)
            fp4adam.quantize_model(layer, recipe_of(args, name))
            with autocast(args):
                layer(torch.zeros(128, 128, device=args.device))
    except RuntimeError as error:
        raise SystemExit(f"--matmul quantized: {error}") from None


def main(argv: Sequence[str] | None = None) -> list[Result]:
    """Runs the command line and returns what results.json holds about each run."""
    args = parse_args(argv)
    check_text(args)
    if torch.device(args.device).type == "cuda":
        # Attention's backward pass and cuBLAS give the same bits twice only when asked to.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a check that costs bandwidth
    plan = planned(args)
    with distributed.process_group(torch.device(args.device).type):
        check_matmul(args)
        args.out = distributed.of_first(new_folder(args) if distributed.rank() == 0 else None)
        labels = ", ".join(f"{c.format}-{c.optimizer}{suffix(args, c)}" for c in plan)
        training = describe_training(args)
        say(f"{labels}: {training}; results go to {args.out}")
        results = [execute(args, contestant) for contestant in plan]
        print_table(results)
        report, picture = (Path(args.out) / name for name in ("results.json", "comparison.png"))
        if distributed.rank() == 0:
            write_json(report, vars(args), results)
            if args.compare:
                write_plot(
                    picture, results, title="Training " + training.replace(" on ", "\non ", 1)
                )
        print(f"\nnumbers: {report}")
        if args.compare:
            print(f"picture: {picture}")
    return results


if __name__ == "__main__":
    main()
    distributed.leave()
