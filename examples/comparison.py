"""The output of training runs: a progress bar, a table, numbers as JSON, a picture as PNG."""

import contextlib
import json
import math
import platform
import resource
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
WEIGHTS = {"nvfp4": "NVFP4", "mxfp8": "MXFP8", "float8block": "Float8Block"}
# What is beside the weights in a label; other names are dtypes of moments.
STATES = {
    "fp32": "",
    "16bit": ", 16-bit states",
    "8bit": ", 8-bit states",
    "factored": ", factored second moments",
    "fp16-masters": ", FP16 masters and FP8 moments",
    "no-masters": ", 8-bit moments, no masters",
    "factored-no-masters": ", factored second moments, no masters",
}
# Of curves; bars have others.
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink")


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


class Row(NamedTuple):
    """A contestant: its held-out losses at the end, one per seed, and bytes per parameter."""

    name: str
    losses: list[float]
    weight: float
    gradient: float
    master: float
    moments: float
    served: float

    @property
    def together(self) -> float:
        """Bytes of weight, gradient and state."""
        return self.weight + self.gradient + self.master + self.moments


def print_table(results: list[Result]) -> None:
    """One row per contestant, and one per format that the first one was rounded to afterwards."""
    table = rows(results)
    print(f"\n{'':50}held out   gap to the first    bytes per parameter, served")
    for row in table:
        loss, distance = statistics.fmean(row.losses), describe_gap(row, table[0])
        print(f"{row.name:<50}{loss:>8.4f}   {distance:<18}{row.together:>21.2f}{row.served:>8.2f}")


def rows(results: list[Result]) -> list[Row]:
    """The contestants in the order of their first runs."""
    found: dict[str, Row] = {}
    for r in results:
        weight, gradient, states = (
            r[f"{part}_bytes_per_parameter"] for part in ("weight", "gradient", "optimizer")
        )
        master = r["master_bytes_per_parameter"]
        sizes = (weight, gradient, master, states - master)
        row = found.setdefault(_label(r), Row(_label(r), [], *sizes, served=weight))
        row.losses.append(r["end_loss"])
        for name, loss in r.get("rounded_afterwards", {}).items():
            label = f"{_label(r)}, rounded to {WEIGHTS[name]} at the end"
            served = next((o for o in results if o["format"] == name), r)
            size = served["weight_bytes_per_parameter"]
            found.setdefault(label, Row(label, [], *sizes, served=size)).losses.append(loss)
    return list(found.values())


def gap(row: Row, first: Row) -> tuple[float, float]:
    """The mean difference of losses of the same seed, and its standard error (one seed: NaN)."""
    differences = [a - b for a, b in zip(row.losses, first.losses, strict=True)]
    mean = statistics.fmean(differences)
    if len(differences) == 1:
        return mean, math.nan
    return mean, statistics.stdev(differences) / len(differences) ** 0.5


def describe_gap(row: Row, first: Row) -> str:
    """The gap with its standard error, as far as there are several seeds."""
    if row is first:
        return ""
    mean, error = gap(row, first)
    return f"{mean:+.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


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
    """Draws losses, gaps at the end with their standard errors, and bytes."""
    from matplotlib.figure import Figure  # only here, so that training does without

    by_name: dict[str, list[Result]] = {}
    for r in results:
        by_name.setdefault(_label(r), []).append(r)
    # Upright and in large letters, to be read on a phone as well.
    figure = Figure(figsize=(7.6, 10.4), layout="constrained")
    figure.suptitle(title, fontsize=13)
    loss, end, cost = figure.subplots(3, 1, gridspec_kw={"height_ratios": (5, 3, 4)})
    for color, (name, runs) in zip(COLORS, by_name.items(), strict=False):
        curves = list(zip(*(smooth(r["train_loss"]) for r in runs), strict=True))
        steps = range(1, len(curves) + 1)
        loss.plot(steps, [statistics.fmean(values) for values in curves], color=color, label=name)
        if len(runs) > 1:
            low, high = map(min, curves), map(max, curves)
            loss.fill_between(steps, list(low), list(high), color=color, alpha=0.15, linewidth=0)
    seeds = len(results) // len(by_name)
    loss.set(xlabel="step", ylabel="nats per byte")
    loss.set_title("Training loss" + (f": mean and range of {seeds} seeds" if seeds > 1 else ""))
    loss.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
    table = rows(results)
    _draw_gaps(end, table)
    _draw_costs(cost, table)
    figure.savefig(path, dpi=150)


def _label(result: Result) -> str:
    names = {"adamw": "AdamW", "fp4adam": "FP4Adam"}
    kind, states = result["format"], result.get("states", "fp32")
    kept = STATES.get(states, f", {states.upper()} moments")
    return f"{names[result['optimizer']]}, {WEIGHTS.get(kind, kind.upper())} weights{kept}"


def _draw_gaps(axes: Any, table: list[Row]) -> None:
    """How far each contestant's held-out loss ends from the first one's with the same seed."""
    first, *others = table
    seeds = len(first.losses)
    axes.axvline(0, color="0.6", linewidth=1)
    for place, row in enumerate(others):
        mean, error = gap(row, first)
        for a, b in zip(row.losses, first.losses, strict=True):
            axes.plot(a - b, place, "o", color="0.75", markersize=4)
        axes.errorbar(mean, place, xerr=None if seeds == 1 else error, fmt="o", color="black")
        axes.annotate(
            describe_gap(row, first),
            (mean, place),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
        )
    axes.set_yticks(range(len(others)), [row.name.replace(", ", ",\n", 1) for row in others])
    axes.margins(x=0.25, y=0.35)
    axes.invert_yaxis()
    title = f"Held-out loss at the end, less the first one's {statistics.fmean(first.losses):.4f}"
    axes.set_title(title + ("" if seeds == 1 else f"\n± standard error of {seeds} seeds"))


# Bytes per parameter of what is not trained here: weight, gradient, master and moments. AdamW8bit
# keeps moments in 8 bits with a scale per 256.
COMPUTED = (
    Row("AdamW, BF16 weights (computed)", [], 2.0, 2.0, 0.0, 4.0, 2.0),
    Row("AdamW8bit, BF16 weights (computed)", [], 2.0, 2.0, 0.0, 2.03, 2.0),
)


def _draw_costs(axes: Any, table: list[Row]) -> None:
    """Bars of weight, gradient, master and moments in bytes per parameter, and served bytes."""
    table = [row for row in table if not row.name.endswith("at the end")] + list(COMPUTED)
    labels = [row.name.replace(", ", ",\n", 1) for row in table]
    left = [0.0] * len(table)
    parts = {"weight": "tab:cyan", "gradient": "tab:olive", "master": "0.7", "moments": "0.85"}
    for part, color in parts.items():
        sizes = [getattr(row, part) for row in table]
        axes.barh(labels, sizes, left=left, color=color, label=part)
        for place, size in enumerate(sizes):
            if size > 0.1 * max(row.together for row in table):  # has room for it
                axes.text(left[place] + size / 2, place, f"{size:.2f}", ha="center", va="center")
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for place, row in enumerate(table):
        text = f"{row.together:.1f}, serves {row.served:.2f}"
        axes.text(left[place] + 0.1, place, text, va="center")
    axes.set(xlim=(0, 1.5 * max(left)), title="Bytes per parameter, in training and served")
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.3, -0.1), ncols=4, frameon=False)


def smooth(values: list[float]) -> list[float]:
    """Each value's mean with those before it, over a thirtieth of the curve."""
    width = max(1, len(values) // 30)
    return [statistics.fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]
