"""What step.py leaves behind: lines, JSON, CSV, pictures, and the tables of docs/measurements.md.

    python benchmarks/report.py results.json [--model gpt] [--only TEXT[;TEXT]] [--png step.png]

prints the results as Markdown, and draws step.png (times) and step_memory.png, without a device and
without torch.
"""

import argparse
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]


class Column(NamedTuple):
    """A column: its titles in the lines of step.py and in Markdown, and how a value is written."""

    key: str
    title: str
    markdown: str | None
    digits: str


COLUMNS = (
    Column("ms", "ms", "ms", ".2f"),
    Column("ms_min", "min", None, ".2f"),
    Column("ms_max", "max", None, ".2f"),
    Column("write_back_ms", "writing", None, ".2f"),
    Column("bytes_per_param", "B/param", "bytes per parameter", ".2f"),
    Column("share_of_copy", "of copy", "of the copy", ".2f"),
    Column("host_ms", "host ms", "host, ms", ".2f"),
    Column("host_idle_ms", "after idle", None, ".2f"),
    Column("host_new_grads_ms", "new grads", None, ".2f"),
    Column("kernels", "kernels", "kernels", "d"),
    Column("copies", "copies", "copies", "d"),
    Column("waits", "waits", "waits", "d"),
    Column("state_bytes_per_param", "state B", "state, bytes per parameter", ".2f"),
    Column("weight_bytes_per_param", "weight B", None, ".2f"),
    Column("steady_MiB", "steady MiB", None, ".1f"),
    Column("temporary_MiB", "temp MiB", "temporary, MiB", ".2f"),
)
COLORS = {
    "torch": "C0",
    "fp4adam": "C2",
    "unfused": "C3",
    "Transformer Engine": "C1",
    "other packages": "C7",
}
# What memory goes to, the last only while a step runs.
PARTS: dict[str, dict[str, Any]] = {
    "weight": {"color": "C9"},
    "gradient": {"color": "C8"},
    "state (moments, masters)": {"color": "C1"},
    "temporary, in a step": {"color": "white", "edgecolor": "C3", "hatch": "/////", "linewidth": 0},
}


def versions_of(about: dict[str, Any]) -> str:
    """What was measured and what ran it, as text."""
    return ", ".join(f"{name} {version}" for name, version in about["versions"].items())


def source(about: dict[str, Any]) -> str:
    """The last line below a table: on what, with which versions, when, by which command."""
    return f"{about['device']}, {versions_of(about)}, {about['date']}: `{about['command']}`"


def load_runs(path: Path) -> list[dict[str, Any]]:
    """The runs of a file, each with ``about`` and ``results``; most programs write one."""
    content = json.loads(path.read_text())
    return content["runs"] if "runs" in content else [content]


def written(row: Row, column: Column) -> str:
    """A value as text; a dash for what does not exist on the device."""
    return format(row[column.key], column.digits) if column.key in row else "-"


def header_line(model: str, columns: tuple[Column, ...] = COLUMNS) -> str:
    """The line above those of :func:`result_line`."""
    return " ".join([f"{model:40s}", *(f"{column.title:>10s}" for column in columns)])


def result_line(row: Row, columns: tuple[Column, ...] = COLUMNS) -> str:
    """One line of text per measured optimizer."""
    if "error" in row:
        return f"{row['name']:40s}   not measured: {row['error']}"
    values = (f"{written(row, column):>10s}" for column in columns)
    return " ".join([f"{row['name']:40s}", *values])


def write_json(path: Path, about: dict[str, Any], rows: list[Row]) -> None:
    """Write settings and results."""
    path.write_text(json.dumps({"about": about, "results": rows}, indent=1) + "\n")


def write_csv(path: Path, rows: list[Row]) -> None:
    """Write one line per row, with empty cells for what a row lacks."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def by_model(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows of each model, those without results included."""
    return {
        m: [r for r in rows if r["model"] == m] for m in dict.fromkeys(r["model"] for r in rows)
    }


def write_plots(path: Path, about: dict[str, Any], rows: list[Row]) -> None:
    """Draw times to ``path`` and memory beside it, to the same name with ``_memory``."""
    try:
        from matplotlib.figure import Figure  # only here, so that measuring does without
    except ImportError:
        print(f"no {path}: install matplotlib to have it drawn (pip install '.[demo]')")
        return
    models = by_model([row for row in rows if "error" not in row])
    if not models:
        return
    heights = [len(members) + 2 for members in models.values()]
    for target, draw, label in (
        (path, _draw_times, "milliseconds per optimizer step"),
        (path.with_stem(f"{path.stem}_memory"), _draw_memory, "bytes per parameter"),
    ):
        figure = Figure(figsize=(9, 0.27 * sum(heights) + 0.6), layout="constrained")
        panels = figure.subplots(len(models), 1, squeeze=False, height_ratios=heights)[:, 0]
        for panel, (model, members) in zip(panels, models.items(), strict=True):
            members = [row for kind in COLORS for row in members if row["kind"] == kind]
            draw(panel, members)
            panel.set_yticks(range(len(members)), [row["name"] for row in members], fontsize=8)
            panel.invert_yaxis()
            panel.margins(x=0.1, y=0.01)
            panel.spines[["top", "right"]].set_visible(False)
            count = members[0]["parameters"] / 1e6
            panel.set_title(f"{model}: {count:,.0f} M parameters", fontsize=9, loc="left")
        panels[-1].set_xlabel(label)
        panels[0].legend(fontsize=8)
        title = f"{about['device']}, torch {about['versions']['torch']}, {about['date']}"
        figure.suptitle(title, fontsize=10)
        figure.savefig(target, dpi=150)


def _draw_times(panel: Any, members: list[Row]) -> None:
    """Bars in the colour of their kind, and the time of a copy of the same bytes in each."""
    places = range(len(members))
    for kind, color in COLORS.items():
        at = [i for i in places if members[i]["kind"] == kind]
        if at:
            bars = panel.barh(at, [members[i]["ms"] for i in at], color=color, label=kind)
            panel.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    floors = [row["floor_ms"] for row in members]
    panel.scatter(floors, places, marker="|", s=110, color="black", label="copy of these bytes")


def _draw_memory(panel: Any, members: list[Row]) -> None:
    """Stacked bars of what lives between steps, and of what a step allocates beyond it."""
    parts = [memory(row) for row in members]
    left = [0.0] * len(members)
    for part, style in PARTS.items():
        widths = [of[part] for of in parts]
        bars = panel.barh(range(len(members)), widths, left=left, label=part, **style)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    texts = []
    for of in parts:
        *living, temporary = of.values()
        extra = f" + {temporary:.2f}" if temporary >= 0.005 else ""
        texts.append(f"{sum(living):.2f}{extra}")
    panel.bar_label(bars, texts, padding=3, fontsize=8)


def memory(row: Row) -> dict[str, float]:
    """Bytes per parameter of each of ``PARTS``."""
    weight = row["weight_bytes_per_param"]
    gradient = 4 if weight == 4 else 2  # FP32 where the parameters are, else BF16: peers.py
    temporary = row.get("temporary_MiB", 0) * 2**20 / row["parameters"]  # measured on a GPU only
    sizes = (weight, gradient, row["state_bytes_per_param"], temporary)
    return dict(zip(PARTS, sizes, strict=True))


def markdown(about: dict[str, Any], rows: list[Row]) -> str:
    """One table per model, and below them where and how it was measured."""
    columns = [column for column in COLUMNS if column.markdown]
    lines = []
    for model, members in by_model(rows).items():
        measured = [row for row in members if "error" not in row]
        if measured:
            first = measured[0]
            count = f"{first['parameters'] / 1e6:,.0f} M parameters in {first['tensors']:,} tensors"
            lines += table(f"{model}: {count}", columns, measured)
        lines += [f"\n{r['name']}: not measured ({r['error']})" for r in members if "error" in r]
        lines.append("")
    lines.append(
        f"{about['device']}, copies {about['copy_TB_per_s']:.2f} TB/s, {versions_of(about)}, "
        f"{about['date']}: `{about['command']}`"
    )
    return "\n".join(lines)


def table(title: str, columns: Sequence[Column], rows: list[Row]) -> list[str]:
    """The lines of a Markdown table with a name and values per row."""
    titles = [title, *(column.markdown for column in columns)]
    lines = [cells(titles), cells(["---"] * len(titles))]
    return lines + [cells([row["name"], *(written(row, c) for c in columns)]) for row in rows]


def cells(values: list[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(values)} |"


def main() -> None:
    """Print recorded results as Markdown, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("--model", help="only this one")
    parser.add_argument("--only", default="", metavar="TEXT[;TEXT]", help="names that contain one")
    parser.add_argument("--png", type=Path, help="draw times to this file, memory beside it")
    args = parser.parse_args()
    content = json.loads(args.json.read_text())
    rows = [
        row
        for row in content["results"]
        if args.model in (None, row["model"])
        and any(text in row["name"] for text in args.only.split(";"))
    ]
    print(markdown(content["about"], rows))
    if args.png:
        write_plots(args.png, content["about"], rows)


if __name__ == "__main__":
    main()
