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
WEIGHTS = {"nvfp4": "NVFP4", "mxfp8": "MXFP8", "float8block": "Float8Block"}
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


def print_table(results: list[Result]) -> None:
    """One row per run, and one per format that the first run was rounded to afterwards."""
    print("\n" + " " * 46 + "held out   bytes per parameter: weight  gradient   state  together")
    for name, loss, parts in rows(results):
        sizes = "".join(f"{part:>9.2f}" for part in (*parts, sum(parts)))
        print(f"{name:<46}{loss:>8.4f}   {'':>20}{sizes}")


def rows(results: list[Result]) -> Iterator[tuple[str, float, tuple[float, float, float]]]:
    """Of each contestant its name, its loss at the end, and bytes of weight, gradient and state."""
    for r in results:
        seed = f", seed {r['seed']}" if r["seed"] != results[0]["seed"] else ""
        parts = tuple(
            r[f"{part}_bytes_per_parameter"] for part in ("weight", "gradient", "optimizer")
        )
        yield _label(r) + seed, r["end_loss"], parts
        for name, loss in r.get("rounded_afterwards", {}).items():
            yield f"the same, rounded to {WEIGHTS[name]} afterwards", loss, parts


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
    """Draws losses, losses at the end beside what another seed makes of them, and bytes."""
    from matplotlib.figure import Figure  # only here, so that training does without

    repeats = [r for r in results[1:] if _label(r) == _label(results[0])]
    compared = [r for r in results if r not in repeats]
    # Upright and in large letters, to be read on a phone as well.
    figure = Figure(figsize=(6.6, 9.6), layout="constrained")
    figure.suptitle(title, fontsize=13)
    loss, end, cost = figure.subplots(3, 1, gridspec_kw={"height_ratios": (5, 3, 3)})
    for number, r in enumerate(compared):
        style = {"color": COLORS[number % len(COLORS)], "label": _label(r)}
        loss.plot(*zip(*enumerate(smooth(r["train_loss"]), start=1), strict=True), **style)
        steps, losses = zip(*r["validation_loss"].items(), strict=True)
        loss.plot(steps, losses, "o", color=style["color"], markersize=4)
    loss.set(xlabel="step", ylabel="nats per byte")
    loss.set_title("Loss: training (lines), held out (dots)")
    loss.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
    _draw_ends(end, results)
    _draw_costs(cost, compared)
    figure.savefig(path, dpi=150)


def _label(result: Result) -> str:
    names = {"adamw": "AdamW", "fp4adam": "FP4Adam"}
    kind, states = result["format"], result.get("states", "fp32")
    kept = f", {states.upper()} moments"
    if states in ("fp32", "16bit", "8bit"):
        kept = {"fp32": "", "16bit": ", 16-bit states", "8bit": ", 8-bit states"}[states]
    return f"{names[result['optimizer']]}, {WEIGHTS.get(kind, kind.upper())} weights{kept}"


def _draw_ends(axes: Any, results: list[Result]) -> None:
    """Held-out losses at the end, a row per contestant, and how far other seeds are from the first.

    Two seeds differ by chance in either direction, so only how far they are apart counts.
    """
    first = results[0]["end_loss"]
    found = [row for row in rows(results) if ", seed " not in row[0]]
    noise = max(abs(r["end_loss"] - first) for r in results if _label(r) == _label(results[0]))
    if noise:
        axes.axvspan(first - noise, first + noise, color="0.9", label="another seed")
    for place, (_, loss, _) in enumerate(found):
        axes.plot(loss, place, "o", color="black")
        axes.annotate(f"  {loss:.4f}", (loss, place), va="center")
    names = [name.replace(", ", ",\n", 1) for name, *_ in found]
    axes.set_yticks(range(len(found)), names)
    axes.margins(x=0.2, y=0.2)
    axes.invert_yaxis()
    axes.set_title("Held-out loss at the end" + (" (grey: another seed)" if noise else ""))


def _draw_costs(axes: Any, results: list[Result]) -> None:
    """Bars of weight, gradient, master and moments in bytes per parameter.

    Times are those of a GPU; a CPU emulates the kernels.
    """
    labels = [_label(r).replace(", ", ",\n") for r in results]
    left = [0.0] * len(results)
    colors = {
        "weight": "tab:cyan",
        "gradient": "tab:olive",
        "master weight": "0.7",
        "moments": "0.85",
    }
    for part, color in colors.items():
        sizes = [_bytes_per_parameter(r)[part] for r in results]
        axes.barh(labels, sizes, left=left, color=color, label=part)
        for row, size in enumerate(sizes):
            if size > 1.6:  # has room for it
                axes.text(left[row] + size / 2, row, f"{size:.2f}", ha="center", va="center")
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for row, r in enumerate(results):
        time = f"\n{1e3 * r['seconds_per_step']:.0f} ms" if r.get("is_on_gpu") else ""
        axes.text(left[row] + 0.1, row, f"{left[row]:.1f} bytes{time}", va="center")
    times = ", median time of a step" if any(r.get("is_on_gpu") for r in results) else ""
    axes.set(xlim=(0, 1.35 * max(left)), title=f"Bytes per parameter{times}")
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=4, frameon=False)


def _bytes_per_parameter(result: Result) -> dict[str, float]:
    """Weight, gradient, master weight and moments."""
    master = result["master_bytes_per_parameter"]
    return {
        "weight": result["weight_bytes_per_parameter"],
        "gradient": result["gradient_bytes_per_parameter"],
        "master weight": master,
        "moments": result["optimizer_bytes_per_parameter"] - master,
    }


def smooth(values: list[float]) -> list[float]:
    """Each value's mean with those before it, over a thirtieth of the curve."""
    width = max(1, len(values) // 30)
    return [statistics.fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]
