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
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
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
SIZES = dict(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
DECODER = dict(SIZES, vocab_size=256, pad_token_id=0, bos_token_id=None, eos_token_id=None)
GROUPED = dict(DECODER, num_key_value_heads=4, head_dim=32)
EXPERTS = dict(GROUPED, num_experts_per_tok=2)


def _text() -> dict[str, Tensor]:
    return {"input_ids": torch.arange(32).view(2, 16)}


def _pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)}


def _sequences() -> dict[str, Tensor]:
    return {**_text(), "decoder_input_ids": torch.arange(8).view(2, 4)}


def _sound() -> dict[str, Tensor]:
    features = torch.linspace(-1, 1, 2 * 80 * 128).view(2, 80, 128)
    return {"input_features": features, "decoder_input_ids": torch.arange(8).view(2, 4)}


def _model(name: str, **options: Any) -> nn.Module:
    config, model = (getattr(transformers, part) for part in name.split(":"))
    return model._from_config(config(**options), dtype=torch.bfloat16)


def _gpt2() -> nn.Module:
    """GPT-2 with nn.Linear in the place of Conv1D, as ``docs/frameworks.md`` does it."""
    options = dict(n_embd=128, n_layer=2, n_head=4, vocab_size=256, n_positions=64)
    model = _model("GPT2Config:GPT2LMHeadModel", bos_token_id=None, eos_token_id=None, **options)
    for name, layer in [*model.named_modules()]:
        if type(layer).__name__ == "Conv1D":
            linear = nn.Linear(*layer.weight.shape, dtype=torch.bfloat16)
            model.set_submodule(name, linear)
    return model


_WHISPER = dict(
    d_model=128,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=256,
    decoder_ffn_dim=256,
    vocab_size=256,
    max_source_positions=64,
    max_target_positions=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
_T5 = dict(d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, vocab_size=256)
# By name: what makes the model, and what makes its inputs.
ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "Llama": (partial(_model, "LlamaConfig:LlamaForCausalLM", **GROUPED), _text),
    "Qwen2": (partial(_model, "Qwen2Config:Qwen2ForCausalLM", **GROUPED), _text),
    "Qwen3": (partial(_model, "Qwen3Config:Qwen3ForCausalLM", **GROUPED), _text),
    "Qwen3-MoE": (
        partial(
            _model,
            "Qwen3MoeConfig:Qwen3MoeForCausalLM",
            **EXPERTS,
            moe_intermediate_size=128,
            num_experts=4,
        ),
        _text,
    ),
    "Mixtral": (
        partial(_model, "MixtralConfig:MixtralForCausalLM", **EXPERTS, num_local_experts=4),
        _text,
    ),
    "Gemma 3": (partial(_model, "Gemma3TextConfig:Gemma3ForCausalLM", **GROUPED), _text),
    "Phi-3": (partial(_model, "Phi3Config:Phi3ForCausalLM", **GROUPED), _text),
    "OLMoE": (
        partial(_model, "OlmoeConfig:OlmoeForCausalLM", **EXPERTS, num_experts=4),
        _text,
    ),
    "GPT-2": (_gpt2, _text),
    "BERT": (partial(_model, "BertConfig:BertForMaskedLM", **SIZES, vocab_size=256), _text),
    "ViT": (
        partial(
            _model,
            "ViTConfig:ViTForImageClassification",
            **{key: SIZES[key] for key in [*SIZES][:4]},
            image_size=32,
            patch_size=16,
        ),
        _pixels,
    ),
    "Whisper": (
        partial(_model, "WhisperConfig:WhisperForConditionalGeneration", **_WHISPER),
        _sound,
    ),
    "T5": (partial(_model, "T5Config:T5ForConditionalGeneration", **_T5), _sequences),
}


def build(name: str, recipe: str) -> nn.Module:
    """A quantized model in BF16 with random weights."""
    torch.manual_seed(0)
    model = ARCHITECTURES[name][0]().eval()
    for param in model.parameters():  # weights that are zero at first would hide a mistake
        nn.init.normal_(param, std=0.05)
    return quantize_model(model, recipe)


def outputs(name: str, model: nn.Module) -> Tensor:
    """The logits for fixed inputs."""
    inputs = {
        key: value.to(torch.bfloat16) if value.is_floating_point() else value
        for key, value in ARCHITECTURES[name][1]().items()
    }
    with torch.no_grad():
        return model(**inputs).logits


def measure(name: str, recipe: str, layout: str) -> tuple[str, list[str]]:
    """The cell of an architecture, a format and a layout, and the warnings of the export."""
    model = build(name, recipe)
    expected = outputs(name, model)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            export_checkpoint(model, Path(folder, "out"), layout)
        except (ValueError, NotImplementedError):
            return "refused", []
        texts = [str(each.message) for each in said]
        try:
            read = type(model).from_pretrained(Path(folder, "out")).eval()
            found = outputs(name, read)
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
    for name in ARCHITECTURES:
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
