"""Tests with engines that serve what was exported, on the CPU: ``make test-engines``.

At the end they print what docs/serving.md says of them, a line per engine, model and format.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

OTHERS = [
    "ignore:NVFP4 experts should be read by an engine:UserWarning",
    "ignore:layout .modelopt. with .* should be read by an engine:UserWarning",
    "ignore:sides of Float8Block weights should be multiples of 128:UserWarning",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::PendingDeprecationWarning",
]
ROWS: list[tuple[Any, ...]] = []
TITLES = ("engine", "model", "format", "layout", "weights", "logits", "texts")


def pytest_configure(config: pytest.Config) -> None:
    for line in OTHERS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture
def record():
    """A function that takes a line of the table."""
    return lambda *row: ROWS.append(row)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for row in [TITLES, *ROWS] if ROWS else []:
        terminalreporter.write_line("| " + " | ".join(map(str, row)) + " |")
