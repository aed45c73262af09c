"""How much of its weights NVFP4's look at the coming amax reads in a real training run.

    python benchmarks/preview.py [--every 10] [--json preview.json] [options of train_gpt.py]

Trains the GPT of examples/ with NVFP4 weights on an NVIDIA GPU. At every so many steps it counts
the tiles that kernels/amax_preview.py looks into, and times its kernels beside those of the step.
"""

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from provenance import about
from torch import Tensor

from fp4adam.kernels.amax_preview import PreviewedLaunch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from options import parse_args
from train_gpt import build_run, text_parts, train_step


@contextlib.contextmanager
def counting() -> Iterator[list[tuple[int, int]]]:
    """Tiles, and those that are looked into, of every preview made inside."""
    counts = []
    launch = PreviewedLaunch.__call__

    def counted(self: PreviewedLaunch, *signals: Tensor) -> None:
        candidates = self.candidates()
        counts.append((candidates.numel(), int(candidates.sum())))
        launch(self, *signals)

    with mock.patch.object(PreviewedLaunch, "__call__", counted):
        yield counts


def kernel_times(profile: torch.profiler.profile) -> dict[str, float]:
    """Microseconds on the GPU of the preview's kernels and of those of the step itself."""
    times = {"preview_us": 0.0, "step_us": 0.0}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            for key, part in (("preview_us", "_amax_preview"), ("step_us", "step_kernel")):
                times[key] += event.time_range.elapsed_us() * (part in event.name)
    return times


def observed_step(run: Any, args: argparse.Namespace, text: Tensor) -> dict[str, Any]:
    """One training step, and what its preview looked at."""
    lr = run.scheduler.get_last_lr()[0]
    how = dict(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)
    with counting() as counts, torch.profiler.profile(**how) as profile:
        loss = train_step(run, args, text).item()
    n_tiles, n_looked_into = (sum(column) for column in zip(*counts, strict=True))
    return {
        "step": run.step,
        "loss": loss,
        "lr": lr,
        "tiles": n_tiles,
        "share_of_tiles": n_looked_into / n_tiles,
        **kernel_times(profile),
    }


def main() -> None:
    """Train, observe, and print one line per observed step and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--every", type=int, default=10, help="steps from one look to the next")
    parser.add_argument("--json", type=Path, help="write settings and results to this file")
    own, rest = parser.parse_known_args()
    args = parse_args([*rest, "--format", "nvfp4"])
    if torch.device(args.device).type != "cuda":
        parser.error(f"--device must be an NVIDIA GPU, got {args.device}; a CPU needs no preview")
    if own.json:
        own.json.parent.mkdir(parents=True, exist_ok=True)
    run = build_run(args, "nvfp4", "fp4adam")
    text, _ = text_parts(args)
    rows = []
    content = {"about": about(args.device) | {"settings": vars(args)}, "results": rows}
    while run.step < args.steps:
        if run.step % own.every:
            train_step(run, args, text)
            continue
        row = observed_step(run, args, text)
        rows.append(row)
        print(
            f"step {row['step']:>5}  loss {row['loss']:.4f}  looked into "
            f"{row['share_of_tiles']:.4%} of {row['tiles']:,} tiles  "
            f"preview {row['preview_us']:.1f} us, step {row['step_us']:.1f} us",
            flush=True,
        )
        if own.json:
            own.json.write_text(json.dumps(content, indent=1) + "\n")
    shares = [row["share_of_tiles"] for row in rows]
    later = rows[1:] or rows
    preview, step = (statistics.median(r[key] for r in later) for key in ("preview_us", "step_us"))
    print(
        f"NVFP4's preview over {run.step} steps, {len(rows)} observed: looked into "
        f"{statistics.median(shares):.3%} of the tiles in the median, {max(shares):.3%} at most; "
        f"{preview:.1f} us beside {step:.1f} us of the step itself in the median"
    )


if __name__ == "__main__":
    main()
