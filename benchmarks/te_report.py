"""Tables of a file of te_check.py, as Markdown: that of the README and that of docs/from_te.md.

    python benchmarks/te_report.py te_check.json

It needs neither a GPU nor torch.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from report import Row, versions_of

RECIPES = {
    "Float8Block": "Float8BlockScaling",
    "Float8": "Float8CurrentScaling",
    "Float8 delayed": "DelayedScaling",
}
THEIRS, OURS = "TE FusedAdam on TE's tensors", "FP4Adam on TE's tensors"


def select(rows: list[Row], **fields: Any) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row.get(k) == v for k, v in fields.items())]


def readme(rows: list[Row]) -> list[str]:
    """The first table of the README."""
    lines = [
        "| recipe | its `FusedAdam`: ms, temporary MiB | `FP4Adam` | bytes as by its quantizer |",
        "|---|---|---|---|",
    ]
    for format, recipe in RECIPES.items():
        theirs, ours = (_times(rows, format, what) for what in (THEIRS, OURS))
        same = select(rows, part="bytes", format=format)
        answer = "yes" if len(same) == 2 and all(row["ok"] for row in same) else "not in all rows"
        if theirs and ours:
            texts = [f"{x['ms']:.2f}, {x['temporary MiB']:,.0f}" for x in (theirs, ours)]
            lines.append(f"| `{recipe}` | {texts[0]} | **{texts[1]}** | {answer} |")
    return lines


def from_te(rows: list[Row]) -> list[str]:
    """The table of docs/from_te.md."""
    lines = [
        "| recipe | | ms | of the host, ms | temporaries, MiB | transposed codes after the step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for format, recipe in RECIPES.items():
        stale = [
            row.get("stale transposes (TE, ours)", [0, 0])
            for row in select(rows, part="modules", format=format)
        ]
        for i, (what, name) in enumerate(((THEIRS, "FusedAdam"), (OURS, "FP4Adam"))):
            row = _times(rows, format, what)
            if row is None:
                continue
            codes = "**of before the step**" if any(pair[i] for pair in stale) else "of the step"
            cells = (
                f"{row['ms']:.2f} | {row['host ms']:.1f} | {_mib(row['temporary MiB'])} | {codes}"
            )
            lines.append(f"| {'' if i else f'`{recipe}` '}| {name} | {cells} |")
    return lines


def summary(rows: list[Row]) -> list[str]:
    """What else the file says, a line each."""
    lines = []
    for part in dict.fromkeys(row["part"] for row in rows):
        own = select(rows, part=part)
        good = sum(row["ok"] for row in own)
        lines.append(f"- {part}: {good} of {len(own)} rows are as they should be")
    for name in ("largest relative difference", "losses apart", "masters apart"):
        found = [row[name] for row in rows if name in row]
        if found:
            lines.append(f"- {name}: {min(found):.1e} to {max(found):.1e}")
    for row in select(rows, part="workspace_times"):
        lines.append(
            f"- {row['what']}, {row['format']}: {row['ms']:.2f} ms, host {row['host ms']:.1f} ms"
        )
    return lines


def _times(rows: list[Row], format: str, what: str) -> Row | None:
    return next(iter(select(rows, part="times", format=format, what=what)), None)


def _mib(value: float) -> str:
    return f"{value:,.0f}" if value >= 0.5 or not value else f"{value:.3f}"


def main() -> None:
    """Print the tables of the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    file = json.loads(parser.parse_args().file.read_text())
    about, rows = file["about"], file["results"]
    engine = about.get("transformer_engine")
    print(
        f"{about['device']}, {versions_of(about)}, Transformer Engine {engine}, {about['date']}\n"
    )
    for table in (readme, from_te, summary):
        print("\n".join(table(rows)), end="\n\n")


if __name__ == "__main__":
    main()
