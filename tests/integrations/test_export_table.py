"""The table of exports in docs/serving.md is what transformers makes of them, and exports warn."""

import json
import re
from pathlib import Path

import export_table
import pytest
import transformers
from export_table import ARCHITECTURES, LAYOUTS, RECORD

RECORDED = json.loads(RECORD.read_text())
IN_QUICK_RUN = ("Llama", "GPT-2")
# Experts in 8 bits: the warning is for most models.
WARNED_BUT_RIGHT = {("Qwen3-MoE", "float8block, compressed-tensors")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recipe", "layout"), LAYOUTS)
@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_QUICK_RUN else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in ARCHITECTURES
    ],
)
def test_cells_are_what_transformers_makes_of_the_files(name, recipe, layout):
    if transformers.__version__ != RECORDED["transformers"]:
        recorded, here = RECORDED["transformers"], transformers.__version__
        pytest.skip(f"cells were recorded with transformers {recorded}, and this is {here}")
    cell, said = export_table.measure(name, recipe, layout)
    assert cell == RECORDED["cells"][name][f"{recipe}, {layout}"], said
    # By the reader and its version.
    version = re.escape(transformers.__version__.rpartition(".")[0])
    is_warned = any(re.search(rf"(transformers|from_pretrained) \({version}\)", x) for x in said)
    where = name, f"{recipe}, {layout}"
    assert is_warned == (cell in ("misread", "reader refuses") or where in WARNED_BUT_RIGHT), said


def test_the_page_has_the_table():
    page = Path(__file__).parents[2].joinpath("docs", "serving.md").read_text()
    assert export_table.table(RECORDED["cells"]) in page
    assert f"transformers {RECORDED['transformers']}" in page
