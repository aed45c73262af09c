"""FP4Adam in torchtitan's own trainer, beside AdamW in BF16 and torchao's float8.

    python benchmarks/torchtitan_trainer.py [--gpus 2] [--compile] [--json trainer.json]

Needs torchtitan 0.2.2, the last that runs with torch 2.11. Each row is torchtitan's Llama 3 under
its trainer and FSDP2, in processes of its own (torchrun); its output goes to a file in
--log-folder. Rows of --resume save a checkpoint, take a few steps more, and resume in a new
trainer, from other random weights, whose losses are to be the same; with several GPUs, one process
then resumes their checkpoints as well. README.md explains what is measured and how.
"""

import argparse
import dataclasses
import functools
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from provenance import about
from report import Column, Row, header_line, result_line, versions_of, write_json
from torch import Tensor, nn

from fp4adam import FP4Adam, Recipe, quantize_model

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from stdlib_text import cut_batch, load_text

if TYPE_CHECKING:
    from torchtitan.config import JobConfig
    from torchtitan.train import Trainer

NAME = "llama3_of_bytes"
# "1b" has five layers of Llama 3's 8B.
FLAVORS = {
    "tiny": dict(dim=128, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=128),
    "1b": dict(
        dim=4096,
        n_layers=5,
        n_heads=32,
        n_kv_heads=8,
        multiple_of=1024,
        ffn_dim_multiplier=1.3,
        rope_theta=500000,
    ),
}


class Contestant(NamedTuple):
    """A row: torchtitan's name of the optimizer, its options, and the model's converter.

    Without a recipe, ``converter`` is one of torchtitan's.
    """

    optimizer: str = "AdamW"
    options: dict[str, Any] = {}
    converter: str | None = None
    recipe: str | Recipe | None = None


CONTESTANTS = {
    "torch AdamW fused, BF16 matmuls": Contestant(),
    "torch AdamW fused, torchao float8": Contestant(converter="quantize.linear.float8"),
    "FP4Adam, Float8, quantized matmuls": Contestant(
        "FP4Adam", {}, "fp4adam.float8", Recipe("float8", activations=True, gradients=True)
    ),
    "FP4Adam, NVFP4, 8-bit states": Contestant(
        "FP4Adam", {"states": "8bit"}, "fp4adam.nvfp4", "nvfp4"
    ),
}
COLUMNS = (
    Column("tokens_per_second", "tokens/s", "tokens per second", ",.0f"),
    Column("peak_GiB", "peak GiB", "peak, GiB", ".1f"),
    Column("last_loss", "loss", "loss", ".4f"),
    Column("checkpoint_GB", "saved GB", "checkpoint, GB", ".2f"),
    Column("resumed_difference", "resumed", "resumed", ".1e"),
    Column("alone_difference", "alone", "resumed by one", ".1e"),
)
# Steps after the checkpoint, and those of the start that are not counted.
MORE, WARMUP = 3, 10


class Quantize:
    """torchtitan's interface of a model converter; quantizes before ``fully_shard``.

    Args:
        recipe: As of :func:`fp4adam.quantize_model`.
    """

    def __init__(self, recipe: str | Recipe, job_config: "JobConfig", parallel_dims: Any) -> None:
        self.recipe = recipe

    def convert(self, model: nn.Module) -> None:
        """Quantize the weights of hidden layers, on the meta device."""
        quantize_model(model, self.recipe)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: a step has written the weights."""


class Bytes:
    """Batches of text, the same ones on any number of ranks.

    Args:
        dp_world_size: Ranks that divide a batch.
        dp_rank: Which of them this one is.
        job_config: Its ``training`` says how large a rank's part is.
        tokenizer: There is none.
    """

    def __init__(
        self, *, dp_world_size: int, dp_rank: int, job_config: "JobConfig", tokenizer: None
    ) -> None:
        self.sequences = slice(dp_rank, None, dp_world_size)
        self.batch = job_config.training.local_batch_size * dp_world_size
        self.context = job_config.training.seq_len
        self.position = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        text, _ = load_text()
        while True:
            inputs, targets = cut_batch(text, self.batch, self.context, seed=self.position)
            self.position += 1
            yield {"input": inputs[self.sequences]}, targets[self.sequences]

    def state_dict(self) -> dict[str, int]:
        """The number of the next batch."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on with that batch."""
        self.position = state["position"]


class Records:
    """Keeps what torchtitan's metrics processor logs, by step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """As of torchtitan's loggers."""
        self.steps[step] = dict(metrics)

    def close(self) -> None:
        """Nothing to close."""

    def losses(self, first: int) -> list[float]:
        """Those of the steps from ``first`` on."""
        return [
            m["loss_metrics/global_avg_loss"] for step, m in self.steps.items() if step >= first
        ]


def register(contestant: Contestant) -> None:
    """Make torchtitan know the model, the text, the converter and the optimizer."""
    from torchtitan.components.metrics import build_metrics_processor
    from torchtitan.components.optimizer import OptimizersContainer, build_optimizers
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
    from torchtitan.protocols.model_converter import register_model_converter
    from torchtitan.protocols.train_spec import register_train_spec

    def optimizers(parts: list[nn.Module], config: Any, parallel_dims: Any) -> OptimizersContainer:
        if config.name != "FP4Adam":
            return build_optimizers(parts, config, parallel_dims)
        hyper = dict(
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        return OptimizersContainer(parts, FP4Adam, hyper | contestant.options)

    def metrics(*args: Any) -> Any:
        processor = build_metrics_processor(*args)
        processor.logger = Records()
        return processor

    if contestant.recipe:
        converter = functools.partial(Quantize, contestant.recipe)
        register_model_converter(converter, contestant.converter)
    spec = dataclasses.replace(
        get_train_spec(),
        model_args={
            name: TransformerModelArgs(vocab_size=256, **sizes) for name, sizes in FLAVORS.items()
        },
        build_optimizers_fn=optimizers,
        build_dataloader_fn=Bytes,
        build_tokenizer_fn=None,  # bytes are tokens
        build_metrics_processor_fn=metrics,
        build_validator_fn=None,
        state_dict_adapter=None,
    )
    register_train_spec(NAME, spec)


def job_config(contestant: Contestant, args: argparse.Namespace, **checkpoint: Any) -> "JobConfig":
    """torchtitan's settings; what is not here is its default."""
    from torchtitan.config import job_config as jobs

    float8 = jobs.Float8Linear(filter_fqns=["output"], emulate=args.emulate)
    if int(os.environ["WORLD_SIZE"]) > 1:  # what torchtitan recommends there
        float8.enable_fsdp_float8_all_gather = True
        float8.precompute_float8_dynamic_scale_for_fsdp = True
    return jobs.JobConfig(
        job=jobs.Job(dump_folder=str(args.folder)),
        metrics=jobs.Metrics(log_freq=args.log_every, disable_color_printing=True),
        model=jobs.Model(
            name=NAME,
            flavor=args.flavor,
            converters=[contestant.converter] if contestant.converter else [],
        ),
        optimizer=jobs.Optimizer(name=contestant.optimizer, lr=args.lr),
        lr_scheduler=jobs.LRScheduler(warmup_steps=WARMUP, total_steps=args.steps + MORE),
        training=jobs.Training(
            local_batch_size=args.batch,
            seq_len=args.context,
            steps=args.steps,
            dtype=args.dtype,
        ),
        checkpoint=jobs.Checkpoint(last_save_model_only=False, **checkpoint),
        activation_checkpoint=jobs.ActivationCheckpoint(mode="none"),
        compile=jobs.Compile(enable=args.compile),
        quantize=jobs.Quantize(linear=jobs.QuantizedLinear(float8=float8)),
        debug=jobs.Debug(seed=int("load_step" in checkpoint)),
    )


def take_steps(trainer: "Trainer") -> list[float]:
    """The losses of a few steps after those of ``training.steps``, each logged."""
    first = trainer.step + 1
    trainer.job_config.metrics.log_freq = 1
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in range(first, first + MORE):
        trainer.train_step(batches)
    return trainer.metrics_processor.logger.losses(first)


def resume(contestant: Contestant, args: argparse.Namespace) -> list[float]:
    """The losses of the first steps of a new trainer that loads the checkpoint."""
    from torchtitan.train import Trainer

    trainer = Trainer(job_config(contestant, args, enable=True, load_step=args.steps))
    trainer.train()  # loads; there is no step to be taken
    losses = take_steps(trainer)
    trainer.close()
    return losses


def train(contestant: Contestant, args: argparse.Namespace) -> Row:
    """Train; then save, go on, and resume, if this row does."""
    from torchtitan.train import Trainer

    trainer = Trainer(job_config(contestant, args, enable=resumes(args.row, args)))
    trainer.train()
    records = trainer.metrics_processor.logger
    steady = [metrics for step, metrics in records.steps.items() if step > WARMUP]
    row: Row = {
        # Of all GPUs together; torchtitan's is per GPU.
        "tokens_per_second": int(os.environ["WORLD_SIZE"])
        * statistics.median(metrics["throughput(tps)"] for metrics in steady),
        "peak_GiB": max(metrics["memory/max_active(GiB)"] for metrics in steady),
        "reserved_GiB": max(metrics["memory/max_reserved(GiB)"] for metrics in steady),
        "losses": {
            step: metrics["loss_metrics/global_avg_loss"] for step, metrics in records.steps.items()
        },
        "last_loss": records.losses(args.steps)[0],
        "parameters": sum(p.numel() for part in trainer.model_parts for p in part.parameters()),
    }
    if resumes(args.row, args):
        stored = sum(path.stat().st_size for path in args.folder.rglob("*.distcp"))
        row |= {"checkpoint_GB": stored / 1e9, "next_losses": take_steps(trainer)}
        trainer.close()
        del trainer, records
        gc.collect()
        torch.cuda.empty_cache()
        row["resumed_losses"] = resume(contestant, args)
        row["resumed_difference"] = largest_difference(row["next_losses"], row["resumed_losses"])
    return row


def resumes(name: str, args: argparse.Namespace) -> bool:
    """Whether a row saves a checkpoint and resumes."""
    return any(text in name for text in args.resume)


def largest_difference(losses: list[float], others: list[float]) -> float:
    """Of losses of the same steps."""
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


def run_row(args: argparse.Namespace) -> None:
    """What a process of a row does; rank 0 writes what it has found."""
    from torchtitan.tools.logging import init_logger

    init_logger()
    contestant = CONTESTANTS[args.row]
    register(contestant)
    if args.alone:
        found = {"alone_losses": resume(contestant, args)}
    else:
        found = train(contestant, args)
    if os.environ["RANK"] == "0":
        (args.folder / "row.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def launch(name: str, args: argparse.Namespace, folder: Path, *options: str, gpu: int = 0) -> Row:
    """Run a row in processes of its own, and read what it has found, or else why it has not."""
    processes = 1 if options else args.gpus
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(args.gpus)))).split(",")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", *args.program, *sys.argv[1:]]
    command += ["--row", name, "--folder", str(folder), *options]
    log = args.log_folder / f"{name.replace(' ', '_').replace(',', '')}{''.join(options[:1])}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus[gpu : gpu + processes])},
        )
        try:
            process.wait(args.limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its processes
            process.wait()
            return {"error": f"no result within {args.limit} s, see {log}"}
    found = folder / "row.json"
    if process.returncode or not found.exists():
        return {"error": f"exit status {process.returncode}, see {log}"}
    row = json.loads(found.read_text())
    found.unlink()
    return row


def resume_alone(args: argparse.Namespace, rows: list[Row], folders: dict[str, Path]) -> None:
    """Let one process resume what several have saved; as many rows at once as there are GPUs."""

    def resume_row(row: Row, gpu: int) -> None:
        options = "--alone", "--batch", str(args.gpus * args.batch)
        row |= launch(row["name"], args, folders[row["name"]], *options, gpu=gpu)
        if "alone_losses" in row:
            row["alone_difference"] = largest_difference(row["next_losses"], row["alone_losses"])

    members = [row for row in rows if "next_losses" in row]
    with ThreadPoolExecutor(args.gpus) as pool:
        for number, row in enumerate(members):
            pool.submit(resume_row, row, number % args.gpus)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--flavor", choices=tuple(FLAVORS), default="1b")
    parser.add_argument("--batch", type=int, default=8, help="sequences per GPU")
    parser.add_argument("--context", type=int, default=2048, help="bytes of a sequence")
    parser.add_argument("--steps", type=int, default=30, help="steps before the checkpoint")
    parser.add_argument("--log-every", type=int, default=5, help="steps between two losses")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of parameters; matmuls are in BF16 or less with either, by autocast or FSDP2",
    )
    parser.add_argument("--compile", action="store_true", help="each block with torch.compile")
    parser.add_argument("--emulate", action="store_true", help="torchao's float8 on a CPU")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(";"),
        metavar="TEXT[;TEXT]",
        help="only names that contain one of these",
    )
    parser.add_argument(
        "--resume",
        type=lambda text: text.split(";"),
        metavar="TEXT[;TEXT]",
        default="FP4Adam",
        help="names of rows that resume contain one of these; '' for all",
    )
    parser.add_argument("--limit", type=float, default=120, help="seconds for a row")
    parser.add_argument("--log-folder", type=Path, default=Path("torchtitan_logs"))
    parser.add_argument("--json", type=Path, help="write settings and results to this file")
    for name in ("row", "folder", "alone"):  # of the processes that run a row
        how = {"action": "store_true"} if name == "alone" else {}
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, **how)
    args = parser.parse_args()
    if args.steps <= WARMUP:
        parser.error(f"--steps must be more than {WARMUP}, which are not counted, got {args.steps}")
    args.folder = args.folder and Path(args.folder)
    args.program = [__file__]
    return args


def main() -> None:
    """Run every row, print a line for each, and write all so far to ``--json``."""
    args = parse_args()
    if args.row:
        run_row(args)
        return
    args.log_folder.mkdir(parents=True, exist_ok=True)
    names = ("gpus", "flavor", "batch", "context", "steps", "lr", "dtype", "compile")
    run = about("cuda") | {"settings": {name: getattr(args, name) for name in names}}
    print(versions_of(run))
    print(f"{run['device']}, {run['date']}\n{header_line('', COLUMNS)}", flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as root:
        folders = {name: Path(root) / str(i) for i, name in enumerate(CONTESTANTS)}
        for name, folder in folders.items():
            if not any(text in name for text in args.only or [""]):
                continue
            folder.mkdir()
            rows.append({"name": name} | launch(name, args, folder))
            print(result_line(rows[-1], COLUMNS), flush=True)
            if args.json:
                write_json(args.json, run, rows)
            if args.gpus == 1:
                shutil.rmtree(folder)
        if args.gpus > 1:
            resume_alone(args, rows, folders)
    if args.gpus > 1:
        for row in rows:
            print(result_line(row, COLUMNS), flush=True)
    if args.json:
        write_json(args.json, run, rows)


if __name__ == "__main__":
    main()
