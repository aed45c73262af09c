"""The table of exports in docs/serving.md is what transformers makes of them, and exports warn."""

import json
import re
from pathlib import Path

import export_table
import pytest
import transformers
from export_table import LAYOUTS, NAMES, RECORD

RECORDED = json.loads(RECORD.read_text())
IN_QUICK_RUN = ("Llama", "GPT-2")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recipe", "layout"), LAYOUTS)
@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_QUICK_RUN else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in NAMES
    ],
)
def test_cells_are_what_transformers_makes_of_the_files(name, recipe, layout):
    if transformers.__version__ != RECORDED["transformers"]:
        recorded, here = RECORDED["transformers"], transformers.__version__
        pytest.skip(f"cells were recorded with transformers {recorded}, and this is {here}")
    cell, said = export_table.measure(name, recipe, layout)
    assert cell == RECORDED["cells"][name][f"{recipe}, {layout}"], said
    # By the reader and its version. Whoever refuses says so itself.
    version = re.escape(transformers.__version__.rpartition(".")[0])
    is_warned = any(re.search(rf"(transformers|from_pretrained) \({version}\)", x) for x in said)
    if name != "GPT-2":  # whose layers the user has exchanged for nn.Linear
        assert cell == "reader refuses" or is_warned == (cell == "misread"), said


def test_the_page_has_the_table():
    page = Path(__file__).parents[2].joinpath("docs", "serving.md").read_text()
    assert export_table.table(RECORDED["cells"]) in page
    assert f"transformers {RECORDED['transformers']}" in page
