"""The table of exports: architectures of transformers, formats and layouts, and what reads them.

    python tests/integrations/export_table.py

measures all cells with the installed transformers and writes ``export_table.json`` beside this
file, of which ``docs/serving.md`` shows the table. Models have random weights and sides that are
multiples of 128; a cell is

- "right": ``from_pretrained`` gives the outputs of the trained weights, bit for bit;
- "refused": the export raises an error that says why;
- "reader refuses": ``from_pretrained`` or the first forward pass raises;
- "misread": it gives other outputs.

The export has to warn of the last one.
"""

import json
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from small_models import ARCHITECTURES, logits, make
from torch import Tensor, nn
from transformers.utils import logging as their_logging

from fp4adam import export_checkpoint, quantize_model

RECORD = Path(__file__).with_suffix(".json")
LAYOUTS = [
    ("nvfp4", "compressed-tensors"),
    ("nvfp4", "modelopt"),
    ("mxfp8", "compressed-tensors"),
    ("mxfp8", "modelopt"),
    ("float8block", "fp8"),
    ("float8block", "compressed-tensors"),
    ("mxfp4", "compressed-tensors"),
]
NAMES = [name for name in ARCHITECTURES if name not in ("gpt-oss", "DeepSeek-V3")]


def build(name: str, recipe: str) -> nn.Module:
    """A quantized model in BF16 with random weights."""
    model = make(name, dtype=torch.bfloat16)
    for param in model.parameters():  # weights that are zero at first would hide a mistake
        nn.init.normal_(param, std=0.05)
    return quantize_model(model, recipe)


def outputs(model: Any) -> Tensor:
    """The logits for fixed inputs."""
    kind = model.main_input_name
    inputs = {"input_ids": torch.arange(32).view(2, 16)}
    if kind != "input_ids":
        shape = (2, 3, 32, 32) if kind == "pixel_values" else (2, 80, 128)
        inputs = {kind: torch.linspace(-1, 1, math.prod(shape)).view(shape).bfloat16()}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.arange(8).view(2, 4)
    return logits(model, **inputs)


def measure(name: str, recipe: str, layout: str) -> tuple[str, list[str]]:
    """The cell of an architecture, a format and a layout, and the warnings of the export."""
    model = build(name, recipe)
    expected = outputs(model)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            export_checkpoint(model, Path(folder, "out"), layout)
        except (ValueError, NotImplementedError):
            return "refused", []
        texts = [str(each.message) for each in said]
        try:
            read = type(model).from_pretrained(Path(folder, "out")).eval()
            found = outputs(read)
        except Exception:  # whatever a reader raises
            return "reader refuses", texts
    return "right" if torch.equal(found, expected) else "misread", texts


def table(cells: dict[str, dict[str, str]]) -> str:
    """The table of ``docs/serving.md``."""
    heads = [f"{recipe} `{layout}`" for recipe, layout in LAYOUTS]
    lines = ["| | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    for name, row in cells.items():
        found = [row[f"{recipe}, {layout}"] for recipe, layout in LAYOUTS]
        lines.append(f"| {name} | " + " | ".join(found) + " |")
    return "\n".join(lines)


def main() -> None:
    their_logging.set_verbosity_error()
    their_logging.disable_progress_bar()
    cells: dict[str, dict[str, str]] = {}
    for name in NAMES:
        cells[name] = {}
        for recipe, layout in LAYOUTS:
            cell, said = measure(name, recipe, layout)
            cells[name][f"{recipe}, {layout}"] = cell
            print(name, recipe, layout, cell, [text[:150] for text in said], flush=True)
    record = {"transformers": transformers.__version__, "cells": cells}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(table(cells))


if __name__ == "__main__":
    main()
