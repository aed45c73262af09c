"""The table and the picture of what numerics.py has recorded, in one file or several.

    python benchmarks/numerics_report.py FILE [FILE ...] [--png numerics.png [--drawn "A;B"]]

prints Markdown, without a device and without torch. A run that is in two files is taken from the
last one.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from report import cells, source

Run = dict[str, Any]
# The runs that all others are compared with; the noise is what the seed makes of the same run.
BASELINES = ("BF16 + AdamW, seed 0", "BF16 + AdamW, seed 1")
# No colour twice, but for seeds; baselines are black, ablations grey.
COLORS = (
    *("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink"),
    *("tab:olive", "tab:cyan", "navy", "gold", "lime", "teal", "magenta", "salmon", "indigo"),
    *("darkgreen", "khaki", "skyblue", "crimson"),
)
TITLES = ("", "training loss", "held-out loss", "gap to BF16, nats")


def load_runs(paths: list[Path]) -> dict[str, Run]:
    """All runs by name, the baselines first and ablations last.

    Raises:
        SystemExit: If they were not made with the same settings and text.
    """
    found = [run for path in paths for run in json.loads(path.read_text())["runs"]]
    found.sort(key=lambda run: (run["name"] not in BASELINES, run["is_ablation"]))
    runs = {run["name"]: run for run in found}
    first, *others = runs.values()
    for run in others:
        ours, theirs = (r["about"]["settings"] | {"bytes": r["text_bytes"]} for r in (first, run))
        # Paths differ between machines, where the text's bytes do not; states are the run's own.
        for name in ours.keys() - {"text", "states"}:
            if ours[name] != theirs[name]:
                raise SystemExit(
                    f"all runs must have the {name} of {first['name']}, {ours[name]}, got "
                    f"{theirs[name]} of {run['name']}; train it again"
                )
    return runs


def held_out(run: Run) -> float:
    """The last held-out loss."""
    return statistics.fmean(run["last_validation_losses"])


def final_train_loss(run: Run) -> float:
    """The mean of the last tenth."""
    return statistics.fmean(run["train_loss"][-max(1, len(run["train_loss"]) // 10) :])


def gap(run: Run, baselines: list[Run]) -> tuple[float, float]:
    """Held-out loss minus the mean of the baselines', and the standard error of the text's choice.

    All runs have the same batches, so that only what differs between runs counts.
    """
    columns = zip(*(other["last_validation_losses"] for other in baselines), strict=True)
    means = map(statistics.fmean, columns)
    return mean_and_error(
        [a - b for a, b in zip(run["last_validation_losses"], means, strict=True)]
    )


def mean_and_error(numbers: list[float]) -> tuple[float, float]:
    """Two or more numbers' mean, and its standard error."""
    return statistics.fmean(numbers), statistics.stdev(numbers) / len(numbers) ** 0.5


def noise(runs: dict[str, Run]) -> float:
    """How far the two seeds of the baseline end apart."""
    first, second = (held_out(runs[name]) for name in BASELINES)
    return abs(first - second)


def markdown(runs: dict[str, Run]) -> str:
    """A row per run, the noise, and where and how it was measured."""
    baselines = [runs[name] for name in BASELINES if name in runs]
    lines = [cells([*TITLES]), cells(["---"] * len(TITLES))]
    for run in runs.values():
        compared = "{:+.4f} ± {:.4f}".format(*gap(run, baselines)) if baselines else "-"
        losses = f"{final_train_loss(run):.4f}", f"{held_out(run):.4f}"
        lines.append(cells([run["name"], *losses, compared]))
    lines.append("")
    if len(baselines) == 2:
        lines.append(f"Noise, the difference of the two seeds: {noise(runs):.4f} nats.")
    first = next(iter(runs.values()))
    lines.append(
        f"{first['parameters'] / 1e6:.1f} M parameters, {len(first['train_loss'])} steps, text of "
        f"{first['text_bytes'][0] / 1e6:.1f} MB and {first['text_bytes'][1] / 1e6:.1f} MB held out."
    )
    for about in {json.dumps(run["about"]): run["about"] for run in runs.values()}.values():
        lines.append(f"- {source(about)}")
    return "\n".join(lines)


def curve(run: Run) -> tuple[list[int], list[float]]:
    """Steps and held-out losses."""
    return [int(step) for step in run["validation_loss"]], [*run["validation_loss"].values()]


def write_plot(path: Path, runs: dict[str, Run]) -> None:
    """Draw held-out losses, and their gaps to the first baseline's with the noise around them."""
    try:
        from matplotlib.figure import Figure  # only here, so that the table does without
    except ImportError:
        raise SystemExit(f"no {path}: install matplotlib (pip install '.[demo]')") from None
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    largest, first = 0.0, 0
    kinds = [name.partition(", seed ")[0] for name in runs if name not in BASELINES]
    colors = dict(zip(dict.fromkeys(kinds), COLORS, strict=False))
    for run in runs.values():
        style = {"label": run["name"], "linewidth": 1.2}
        if run["name"] in BASELINES:
            style |= {"color": "black", "linestyle": "-" if run["name"] == BASELINES[0] else ":"}
        else:
            kind, _, seed = run["name"].partition(", seed ")
            style |= {"color": "0.6" if run["is_ablation"] else colors[kind]}
            style |= {"linestyle": "-" if seed in ("", "0") else ":"}
        left.plot(*curve(run), marker=".", **style)
        if BASELINES[0] not in runs:
            continue
        steps, gaps = gaps_to(runs[BASELINES[0]], run)
        if run["name"] == BASELINES[1]:
            low, high = ([sign * abs(gap) for gap in gaps] for sign in (-1, 1))
            right.fill_between(steps, low, high, color="0.9")
        elif run["name"] != BASELINES[0]:
            right.plot(steps, gaps, marker=".", **style)
        if not run["is_ablation"]:
            # Early ones are large, and those of an ablation throughout.
            first = steps[len(gaps) // 4]
            largest = max(largest, *map(abs, gaps[len(gaps) // 4 :]))
    if largest:
        right.set_ylim(-1.1 * largest, 1.1 * largest)
        right.set_xlim(left=first)
    right.axhline(0, color="black", linewidth=0.8)
    left.set(xlabel="step", ylabel="nats per byte", title="Held-out loss")
    right.set(
        xlabel="step",
        ylabel="nats per byte",
        title="Minus that of BF16, seed 0; grey: as far as seed 1",
    )
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize="small"
    )
    figure.savefig(path, dpi=150)


def gaps_to(baseline: Run, run: Run) -> tuple[list[int], list[float]]:
    """Steps, and how much larger the held-out loss is there than the baseline's."""
    steps, losses = curve(run)
    return steps, [a - b for a, b in zip(losses, curve(baseline)[1], strict=True)]


def main() -> None:
    """Print recorded runs as Markdown, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--png", type=Path, help="draw the picture to this file too")
    parser.add_argument(
        "--drawn", default="", metavar="NAME;NAME", help="the runs beside BF16 in it; all if empty"
    )
    args = parser.parse_args()
    runs = load_runs(args.files)
    print(markdown(runs))
    if args.png:
        drawn = {*BASELINES, *args.drawn.split(";")} if args.drawn else runs.keys()
        write_plot(args.png, {name: run for name, run in runs.items() if name in drawn})


if __name__ == "__main__":
    main()
