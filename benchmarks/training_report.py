"""Tables of what training.py has recorded.

    python benchmarks/training_report.py FILE [FILE ...]

prints Markdown, without a device and without torch.
"""

import argparse
from pathlib import Path
from typing import Any

from report import Column, Row, load_runs, source, table

SPEED = (
    Column("ms", "ms", "training step, ms", ".1f"),
    Column("host_ms", "host ms", "host of forward and backward, ms", ".1f"),
    Column("predicted_ms", "predicted", "at the ceilings, ms", ".1f"),
    Column("tokens_per_second", "tokens/s", "tokens/s", ",.0f"),
)
MEMORY = (
    Column("weight_B", "weight B", "weights, B/param", ".2f"),
    Column("state_B", "state B", "states, B/param", ".2f"),
    Column("steady_B", "steady B", "allocated between steps, B/param", ".2f"),
    Column("gradient_B", "grad B", "gradients, B/param", ".2f"),
    Column("fixed_B", "fixed B", "added by a step, B/param", ".2f"),
    Column("token_KB", "KB/token", "and KB per token", ".1f"),
    Column("peak_GiB", "peak GiB", "peak, GiB", ".2f"),
)
SHARES = (
    Column("gpu_ms", "GPU ms", "GPU, ms", ".1f"),
    Column("matmul_share", "matmul", "matmuls", ".1%"),
    Column("dequantize_share", "dequant.", "dequantize", ".1%"),
    Column("operand_share", "operands", "quantize operands", ".1%"),
    Column("attention_share", "attention", "attention", ".1%"),
    Column("optimizer_share", "optimizer", "optimizer", ".1%"),
    Column("other_share", "other", "other", ".1%"),
)
COLUMNS = (*SPEED, *MEMORY, *SHARES)


def title(settings: dict[str, Any]) -> str:
    """What was trained, and how."""
    return ", ".join(
        [
            f"{settings['layers']} layers of {settings['dim']}",
            f"{settings['accumulate']} x {settings['batch'] * settings['context']:,} tokens",
            "compiled" if settings["compile"] else "eager",
            *(["checkpointed"] if settings["checkpoint"] else []),
        ]
    )


def markdown(about: dict[str, Any], rows: list[Row]) -> str:
    """A table each of times, memory and shares of the GPU's time, as far as there is any."""
    measured = [row for row in rows if "error" not in row]
    lines, what = [], title(about["settings"])
    if measured:
        what = f"{measured[0]['parameters'] / 1e6:,.0f} M parameters, {what}"
    for name, columns in (("", SPEED), ("memory: ", MEMORY), ("GPU time: ", SHARES)):
        if any(column.key in row for row in measured for column in columns):
            lines += [*table(name + what, columns, measured), ""]
    lines += [f"- {row['name']}: not measured ({row['error']})" for row in rows if "error" in row]
    lines.append(f"- {source(about)}")
    return "\n".join(lines)


def main() -> None:
    """Print recorded results as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    for path in parser.parse_args().files:
        for run in load_runs(path):
            print(markdown(run["about"], run["results"]), end="\n\n")


if __name__ == "__main__":
    main()
