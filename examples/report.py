"""The output of training runs: a table, numbers as JSON, loss curves as PNG."""

import json
import platform
import resource
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import fp4adam
from distributed import total, world_size

Result = dict[str, Any]


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


def print_table(results: list[Result]) -> None:
    """One row per run."""
    print(
        "\nformat       optimizer  train loss  val loss   tokens/s  weight B/param  "
        "state B/param  peak GiB"
    )
    for r in results:
        print(
            f"{r['format']:<12} {r['optimizer']:<9}  {r['final_train_loss']:>10.4f}  "
            f"{r['final_validation_loss']:>8.4f}  {r['tokens_per_second']:>9,.0f}  "
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
    """Draws losses, gaps of the held-out losses to the first run's, bytes and times of steps."""
    from matplotlib.figure import Figure  # only here, so that training does without

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    figure.suptitle(title)
    loss, gap, cost = figure.subplots(1, 3)
    baseline, first = results[0]["validation_loss"], _label(results[0])
    for number, r in enumerate(results):
        style = {"color": f"C{number}", "label": _label(r)}
        loss.plot(*zip(*enumerate(smooth(r["train_loss"]), start=1), strict=True), **style)
        steps, losses = zip(*r["validation_loss"].items(), strict=True)
        loss.plot(steps, losses, "o", color=style["color"], markersize=4)
        gaps = [value - baseline[step] for step, value in r["validation_loss"].items()]
        gap.plot(steps, gaps, "o-", markersize=4, **style)
    loss.set(xlabel="step", ylabel="nats per byte", title="Loss: training (line), held out (dots)")
    gap.set(xlabel="step", ylabel="nats per byte", title=f"Held-out loss minus that of {first}")
    loss.legend()
    gap.legend()
    _draw_costs(cost, results)
    figure.savefig(path, dpi=150)


def _label(result: Result) -> str:
    return f"{result['format']}, {result['optimizer']}"


def _draw_costs(axes: Any, results: list[Result]) -> None:
    """Bars of weight and state in bytes per parameter, with the time of a training step."""
    labels = [_label(r) for r in results]
    weights = [r["weight_bytes_per_parameter"] for r in results]
    states = [r["optimizer_bytes_per_parameter"] for r in results]
    axes.barh(labels, weights, color="tab:cyan", label="weight")
    axes.barh(labels, states, left=weights, color="tab:orange", label="optimizer state")
    for row, r in enumerate(results):
        axes.text(
            0.1,
            row,
            f"{weights[row]:.2f} + {states[row]:.2f} bytes, {1e3 * r['seconds_per_step']:.0f} ms",
            verticalalignment="center",
        )
    axes.invert_yaxis()
    axes.set(title="Bytes per parameter, ms per step")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)


def smooth(values: list[float]) -> list[float]:
    """Each value's mean with those before it, over a thirtieth of the curve."""
    width = max(1, len(values) // 30)
    return [statistics.fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]
