"""Tables of what scaling.py has recorded with one or several numbers of GPUs.

    python benchmarks/scaling_report.py FILE [FILE ...]

prints Markdown, without a device and without torch.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from report import Column, Row, cells, load_runs, source, table

COLUMNS = (
    Column("processes", "GPUs", "GPUs", "d"),
    Column("step_ms", "step ms", "step, ms", ".2f"),
    Column("reduce_ms", "reduce ms", "all-reduce in it, ms", ".3f"),
    Column("reduce_share", "of step", "of the step", ".1%"),
    Column("train_ms", "train ms", "training step, ms", ".1f"),
    Column("host_ms", "host ms", "host, ms", ".1f"),
    Column("tokens_per_second", "tokens/s", "tokens/s", ",.0f"),
    Column("forward_all_gather_MB", "gather MB", "gathered per forward and GPU, MB", ".1f"),
    Column("formula_MB", "formula", "by the formula, MB", ".1f"),
    Column("steady_GiB", "steady GiB", "steady, GiB", ".2f"),
    Column("peak_GiB", "peak GiB", "peak, GiB", ".2f"),
)


def add_run(path: Path, about: dict[str, Any], rows: list[Row]) -> None:
    """Write a run behind those that the file has already."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    runs.append({"about": about, "results": rows})
    path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


def exact_line(row: Row) -> str:
    """One line of text per optimizer whose bits were recorded."""
    loss = float.fromhex(row["losses"][-1])
    digests = "  ".join(f"{name} {value[:12]}" for name, value in row["digests"].items())
    return f"{row['name']:40s} last loss {loss:.6f}  {digests}"


def by_name(rows: list[Row]) -> list[list[Row]]:
    """The rows of each optimizer, one per number of GPUs, the last one recorded."""
    latest = {(row["name"], row["processes"]): row for row in rows}
    names = dict.fromkeys(row["name"] for row in rows)
    return [[latest[key] for key in sorted(latest) if key[0] == name] for name in names]


def speed_table(rows: list[Row]) -> list[str]:
    """Times, bytes and memory: a line per optimizer and number of GPUs."""
    return table("", COLUMNS, [row for same_name in by_name(rows) for row in same_name])


def exact_table(rows: list[Row]) -> list[str]:
    """Whose bits are those of the run with the fewest GPUs."""
    lines = [cells(["", "GPUs", "same bits as", "losses", "digests"]), cells(["---"] * 5)]
    for first, *others in by_name(rows):
        for row in others:
            steps = zip(row["losses"], first["losses"], strict=True)
            different = [step for step, (a, b) in enumerate(steps, start=1) if a != b]
            losses = (
                f"differ from step {different[0]}" if different else f"all {len(row['losses'])}"
            )
            wrong = [name for name, d in first["digests"].items() if row["digests"].get(name) != d]
            digests = f"differ: {', '.join(wrong)}" if wrong else ", ".join(first["digests"])
            lines.append(
                cells(
                    [row["name"], str(row["processes"]), str(first["processes"]), losses, digests]
                )
            )
    return lines


def markdown(runs: list[dict[str, Any]]) -> str:
    """Both tables, as far as there is something in them, and where and how it was measured."""
    rows = [row for run in runs for row in run["results"]]
    lines = []
    for make_table, kind in (
        (speed_table, [row for row in rows if "step_ms" in row]),
        (exact_table, [row for row in rows if "losses" in row]),
    ):
        if kind:
            lines += [*make_table(kind), ""]
    for run in runs:
        about = run["about"]
        lines.append(f"- {about['processes']} x {source(about)}")
    return "\n".join(lines)


def main() -> None:
    """Print recorded results as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    files = parser.parse_args().files
    print(markdown([run for path in files for run in load_runs(path)]))


if __name__ == "__main__":
    main()
