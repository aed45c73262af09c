"""Tests with other people's packages, as pinned in constraints.txt: ``make test-integrations``."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

# What the packages themselves do that torch or Python has deprecated, at import and later.
OTHERS = [
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::PendingDeprecationWarning",
    "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning",
    # Models of the tests are smaller than the blocks of Float8Block.
    "ignore:sides of Float8Block weights should be multiples of 128:UserWarning",
]


def pytest_configure(config: pytest.Config) -> None:
    for line in OTHERS:
        config.addinivalue_line("filterwarnings", line)
