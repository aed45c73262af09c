"""The table of names in ``interop/te_names.md`` against the code."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp4adam
from fp4adam import FusedAdam, fp4_utils, fp8_utils, quantize_model
from helpers import RECIPES

PAGE = Path(__file__).parent / "interop/te_names.md"


def table_of_names() -> dict[str, tuple[set[str], set[str]]]:
    """By owner, the names that are there and those that are not."""
    section = PAGE.read_text().split("\n## Names\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("| ")]
    cells = [[*row, ""][:3] for row in rows[2:]]  # after the head and its rule
    names = [[set(re.findall(r"`(\w+)`", cell)) for cell in row[1:]] for row in cells]
    return {row[0].strip(" `"): (*found,) for row, found in zip(cells, names, strict=True)}


def tensors() -> list[Any]:
    layers = (quantize_model(nn.Linear(32, 32), quantizer) for quantizer in RECIPES.values())
    return [layer.weight for layer in layers]


def options() -> list[Any]:
    found = [inspect.signature(type(quantizer)).parameters for quantizer in RECIPES.values()]
    return [type("Options", (), dict.fromkeys(set().union(*found)))]


OWNERS: dict[str, Callable[[], list[Any]]] = {
    "FusedAdam": lambda: [FusedAdam([nn.Parameter(torch.ones(2))])],
    "tensors": tensors,
    "Float8Tensor": lambda: [RECIPES["float8"].quantize(torch.ones(32, 32))],
    "quantizers": lambda: [*RECIPES.values()],
    "options of quantizers": options,
    "fp4adam": lambda: [fp4adam],
    "fp4adam.fp8_utils": lambda: [fp8_utils],
    "fp4adam.fp4_utils": lambda: [fp4_utils],
}


@pytest.mark.parametrize("owner", OWNERS)
def test_names_are_there_or_not_as_the_page_says(owner):
    there, absent = table_of_names()[owner]
    assert there
    for one in OWNERS[owner]():
        assert {name for name in there if not hasattr(one, name)} == set()
        assert {name for name in absent if hasattr(one, name)} == set()


def test_all_rows_are_checked():
    assert table_of_names().keys() == OWNERS.keys()
