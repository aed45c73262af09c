"""The output of training runs: a progress bar, a table, numbers as JSON, a picture as PNG."""

import contextlib
import json
import platform
import resource
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import fp4adam
from distributed import rank, total, world_size

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

Result = dict[str, Any]
# Evaluations that a line of gaps is the mean of.
SMOOTHED = 3


def peak_memory(device: torch.device) -> int:
    """Bytes: of CUDA tensors since the run began, or of the process since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if platform.system() == "Darwin" else 1024  # Linux reports KiB, macOS bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@torch.no_grad()
def stored_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of tensors on all processes; for a quantized tensor, of its codes and scales.

    Args:
        device: The device that processes communicate with; step counters are on the CPU.
    """
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    count = sum(
        t.nbytes_stored if isinstance(t, fp4adam.QuantizedTensor) else t.nbytes for t in parts
    )
    return int(total(torch.tensor(count, device=device)))


def say(line: str) -> None:
    """Prints a line at once, above the progress bar if there is one."""
    if tqdm is None:
        print(line, flush=True)
    else:
        tqdm.write(line)
        sys.stdout.flush()


@contextlib.contextmanager
def progress_bar(label: str, done: int, steps: int) -> Iterator[Callable[[], object]]:
    """A bar with the time that is left, on terminals and if tqdm is installed.

    Yields:
        What is to be called after each step.
    """
    if tqdm is None:
        yield lambda: None
        return
    disable = True if rank() else None  # None: unless it is a terminal
    options = dict(unit="step", leave=False, dynamic_ncols=True, disable=disable)
    with tqdm(desc=label, initial=done, total=steps, **options) as bar:
        yield bar.update


def print_table(results: list[Result]) -> None:
    """One row per run."""
    print(
        "\nformat       optimizer  seed  train loss  val loss   tokens/s  weight B/param  "
        "state B/param  peak GiB"
    )
    for r in results:
        print(
            f"{r['format']:<12} {r['optimizer']:<9} {r['seed']:>5}  "
            f"{r['final_train_loss']:>10.4f}  {r['final_validation_loss']:>8.4f}  "
            f"{r['tokens_per_second']:>9,.0f}  "
            f"{r['weight_bytes_per_parameter']:>14.3f}  "
            f"{r['optimizer_bytes_per_parameter']:>13.3f}  "
            f"{r['peak_memory_bytes'] / 2**30:>8.2f}"
        )


def write_json(path: Path, settings: dict[str, Any], results: list[Result]) -> None:
    """Writes settings, versions, device and results."""
    device = torch.device(settings["device"])
    cuda = device.type == "cuda"
    content = {
        "settings": settings,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "fp4adam": fp4adam.__version__,
        },
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "cpu_threads": torch.get_num_threads(),
        "processes": world_size(),
        "runs": results,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_plot(path: Path, results: list[Result], title: str) -> None:
    """Draws losses, gaps of held-out losses to the first run's, bytes and times, one below another.

    Runs of the first one's format and optimizer with other seeds are shown as the noise of gaps.
    """
    from matplotlib.figure import Figure  # only here, so that training does without

    first = results[0]
    repeats = [r for r in results[1:] if _label(r) == _label(first)]
    compared = [r for r in results if r not in repeats]
    # Upright and in large letters, to be read on a phone as well.
    figure = Figure(figsize=(6.6, 10.2), layout="constrained")
    figure.suptitle(title, fontsize=13)
    loss, gap, cost = figure.subplots(3, 1, gridspec_kw={"height_ratios": (5, 5, 3)})
    for number, r in enumerate(compared):
        style = {"color": f"C{number}", "label": _label(r)}
        loss.plot(*zip(*enumerate(smooth(r["train_loss"]), start=1), strict=True), **style)
        steps, losses = zip(*r["validation_loss"].items(), strict=True)
        loss.plot(steps, losses, "o", color=style["color"], markersize=4)
    loss.set(xlabel="step", ylabel="nats per byte")
    loss.set_title("Loss: training (lines), held out (dots)")
    loss.legend()
    _draw_gaps(gap, compared, repeats)
    _draw_costs(cost, compared)
    figure.savefig(path, dpi=150)


def _label(result: Result) -> str:
    names = {"adamw": "AdamW", "fp4adam": "FP4Adam"}
    weights = {"nvfp4": "NVFP4", "mxfp8": "MXFP8", "float8block": "Float8Block"}
    kind = result["format"]
    return f"{names[result['optimizer']]}, {weights.get(kind, kind.upper())} weights"


def _draw_gaps(axes: Any, compared: list[Result], repeats: list[Result]) -> None:
    """Held-out losses minus those of the first run, and how far its repeats are from it."""
    first, *others = compared
    steps = list(first["validation_loss"])

    def gaps(result: Result) -> list[float]:
        return [result["validation_loss"][step] - first["validation_loss"][step] for step in steps]

    # Two seeds differ by chance in either direction, so only how far they are apart counts.
    distances = zip(*([abs(value) for value in gaps(r)] for r in repeats), strict=True)
    axes.axhline(0, color="C0", label=_label(first))
    if noise := mean_of_last([max(values) for values in distances]):
        label = f"the same, {'another seed' if len(repeats) == 1 else 'other seeds'}"
        below = [-value for value in noise]
        axes.fill_between(steps, below, noise, color="C0", alpha=0.2, linewidth=0, label=label)
    for number, r in enumerate(others, start=1):
        axes.plot(steps, gaps(r), ".", color=f"C{number}", alpha=0.5)
        axes.plot(steps, mean_of_last(gaps(r)), color=f"C{number}", label=_label(r))
    axes.set(xlabel=f"step (dots: evaluations, lines: means over {SMOOTHED * steps[0]} steps)")
    axes.set(ylabel="nats per byte", title=f"Held-out loss minus that of {_label(first)}")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.12 * (high - low) * len(axes.get_legend_handles_labels()[1]))
    axes.legend(loc="upper right")  # above the curves


def _draw_costs(axes: Any, results: list[Result]) -> None:
    """Bars of weight, master and moments in bytes per parameter, with the time of a step."""
    labels = [_label(r).replace(", ", "\n") for r in results]
    left = [0.0] * len(results)
    for part, color in (("weight", "C2"), ("master weight", "0.7"), ("moments", "0.85")):
        sizes = [_bytes_per_parameter(r)[part] for r in results]
        axes.barh(labels, sizes, left=left, color=color, label=part)
        for row, size in enumerate(sizes):
            if size > 0.8:  # has room for it
                axes.text(left[row] + size / 2, row, f"{size:.2f}", ha="center", va="center")
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for row, r in enumerate(results):
        words = f"{left[row]:.1f} bytes\n{1e3 * r['seconds_per_step']:.0f} ms"
        axes.text(left[row] + 0.1, row, words, va="center")
    axes.set(xlim=(0, 1.25 * max(left)), title="Bytes per parameter, median time of a step")
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False)


def _bytes_per_parameter(result: Result) -> dict[str, float]:
    """Weight, master weight and moments."""
    master = result["master_bytes_per_parameter"]
    moments = result["optimizer_bytes_per_parameter"] - master
    weight = result["weight_bytes_per_parameter"]
    return {"weight": weight, "master weight": master, "moments": moments}


def smooth(values: list[float]) -> list[float]:
    """Each value's mean with those before it, over a thirtieth of the curve."""
    return mean_of_last(values, max(1, len(values) // 30))


def mean_of_last(values: list[float], width: int = SMOOTHED) -> list[float]:
    """Each value's mean with those before it, ``width`` in all."""
    return [statistics.fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]
