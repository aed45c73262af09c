"""Updates of an engine's weights: bytes and milliseconds, all of them or what a step has changed.

    python benchmarks/refit.py [--size tiny] [--layers N] [--format nvfp4,mxfp8] [--json refit.json]
    torchrun --nproc-per-node 2 benchmarks/refit.py [--size 1b]    # shards of FSDP2

A GPT trains on Python's own source code. At each learning rate it takes --steps steps; after each
one the changed bytes are exported, packed, unpacked and applied in this process, and so is a full
update. Host and device are waited for. What a network takes comes on top, by the bytes. Under
torchrun every process exports its shards, and the first one packs and applies.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from provenance import about
from torch import Tensor

import fp4adam

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig
from options import PRESETS, count, device, formats
from stdlib_text import cut_batch, load_text

from distributed import process_group, rank, shard, world_size

LAYOUT_OF = {"nvfp4": "compressed-tensors", "mxfp8": "compressed-tensors", "float8block": "fp8"}
RATES = (1e-5, 1e-6)
WARM_UP, WARM_UP_LR = 20, 1e-3


def wait() -> None:
    """Until everything that was launched is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def refit(
    sender: fp4adam.WeightSender, receiver: fp4adam.WeightReceiver, full: bool
) -> tuple[int, float]:
    """One update from export to the receiver's tensors: bytes, milliseconds."""
    wait()
    start = time.perf_counter()
    update = sender.export_changes(full)
    if update is None:  # the first rank has it
        return 0, 0.0
    packed = update.pack()
    receiver.apply(fp4adam.WeightUpdate.unpack(packed))
    wait()
    return packed.nbytes, (time.perf_counter() - start) * 1e3


def measure(weights: str, args: argparse.Namespace, text: Tensor) -> list[dict[str, Any]]:
    """A row per learning rate."""
    preset = PRESETS[args.size]
    layers = args.layers or preset["layers"]
    torch.manual_seed(0)
    with torch.device(args.device):
        model = GPT(GPTConfig(layers, preset["heads"], preset["dim"], preset["context"]))
    fp4adam.quantize_model(model.bfloat16(), weights)
    parameters = sum(p.numel() for p in model.parameters())
    if world_size() > 1:
        shard(model)
    optimizer = fp4adam.FP4Adam(model.parameters(), lr=WARM_UP_LR)
    sender, receiver = fp4adam.WeightSender(model, LAYOUT_OF[weights]), fp4adam.WeightReceiver()

    def step(number: int) -> None:
        seed = number * world_size() + rank()
        tokens, targets = cut_batch(text, args.batch, preset["context"], seed)
        F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(WARM_UP):
        step(number)
    refit(sender, receiver, full=False)
    rows = []
    for lr in RATES:
        optimizer.param_groups[0]["lr"] = lr
        step(0)
        refit(sender, receiver, full=False)
        changed, full = [], []
        for number in range(args.steps):
            step(number)
            changed.append(refit(sender, receiver, full=False))
            full.append(refit(sender, receiver, full=True))
        row = {
            "format": weights,
            "lr": lr,
            "processes": world_size(),
            "parameters": parameters,
        }
        for name, pairs in (("changed", changed), ("full", full)):
            sizes, times = zip(*pairs, strict=True)
            row |= {f"{name}_bytes": statistics.mean(sizes), f"{name}_ms": statistics.median(times)}
        rows.append(row)
    refit(sender, receiver, full=False)
    for name, tensor in fp4adam.export_tensors(model, LAYOUT_OF[weights]):  # gathers shards
        if rank() == 0 and not torch.equal(receiver.tensors[name], tensor):
            raise AssertionError(f"{weights}: {name} is not what the model would be exported as")
    return rows


def main() -> None:
    """Measure all formats."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--format", type=formats, default=[*LAYOUT_OF], metavar="NAME[,NAME]")
    parser.add_argument("--size", choices=PRESETS, default="tiny")
    parser.add_argument("--layers", type=count, metavar="N", help="default: those of the size")
    parser.add_argument("--steps", type=count, default=5, metavar="N", help="default: 5")
    parser.add_argument("--batch", type=count, default=8, metavar="N", help="default: 8")
    parser.add_argument(
        "--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--json", type=Path, default=Path("refit.json"))
    args = parser.parse_args()
    with process_group(torch.device(args.device).type):
        text = load_text()[0].to(args.device)
        rows = [row for weights in args.format for row in measure(weights, args, text)]
        if rank() == 0:
            report(rows, args)


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Write the file and print a table."""
    args.json.write_text(json.dumps({**about(args.device), "rows": rows}, indent=1) + "\n")
    print("| | parameters | lr | full, bytes | ms | changed, bytes | ms |")
    print("| --- " * 7 + "|")
    for row in rows:
        print(
            f"| {row['format']} | {row['parameters'] / 1e6:.1f} M | {row['lr']:.0e} "
            f"| {row['full_bytes']:,.0f} | {row['full_ms']:.1f} "
            f"| {row['changed_bytes']:,.0f} | {row['changed_ms']:.1f} |"
        )


if __name__ == "__main__":
    main()
