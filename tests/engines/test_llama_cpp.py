"""llama.cpp on the CPU: exports after its own converter."""

import copy
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import models
import numpy as np
import pytest
import torch
import xllamacpp
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from fp4adam import dequantize_model, export_checkpoint

VERSION = f"xllamacpp {importlib.metadata.version('xllamacpp')}"
# The source of llama.cpp, with its converter: see the Makefile.
SOURCE = os.environ.get("LLAMA_CPP", "")
pytestmark = pytest.mark.skipif(
    not SOURCE, reason="needs llama.cpp's source; run make test-engines, or set LLAMA_CPP"
)


def serve(path: Path) -> tuple[Tensor, list[list[int]]]:
    """Log probabilities of the first byte after each prompt, and the greedy text."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    logs, texts = [], []
    for prompt in models.text()[:, : models.PROMPT].tolist():
        answer = server.handle_completions(
            dict(
                prompt=prompt,
                max_tokens=models.WRITTEN,
                temperature=0,
                logprobs=models.VOCABULARY,
                ignore_eos=True,
            )
        )
        answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
        tokens = answer["choices"][0]["logprobs"]["content"]
        row = torch.full((models.VOCABULARY,), float("nan"))
        for entry in tokens[0]["top_logprobs"]:
            row[entry["id"]] = entry["logprob"]
        logs.append(row)
        texts.append([token["id"] for token in tokens])
    return torch.stack(logs), texts


def assert_serves(path: Path, model: object, name: str, *kind: object, record: object) -> None:
    logs, texts = serve(path)
    error, bf16 = models.errors(logs, model)
    # The engine quantizes the inputs of NVFP4 weights to 8 bits and rounds those of BF16 weights;
    # training rounds every result to BF16, which is an error of the same size.
    assert error < 0.1, (error, bf16)
    assert texts == models.greedy(model)
    count = len(models.quantized_weights(model))
    record(VERSION, name, *kind, count, f"{error:.3f} (BF16 {bf16:.3f})", f"{len(texts)} equal")


def matrices(model: object) -> Iterator[tuple[str, Tensor]]:
    """Quantized weights by the names that the package gguf knows, gate and up apart."""
    for name, value in models.quantized_weights(model).items():
        if name.endswith("experts.gate_up_proj"):
            for half, part in zip(("gate", "up"), value.chunk(2, 1), strict=True):
                yield name.replace("gate_up", half) + ".weight", part
        else:
            yield name.removesuffix(".weight") + ".weight", value


def assert_weights(path: Path, model: object) -> None:
    """Values times scales are those of training, whatever the order of their rows."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, value in matrices(model):
        tensor = tensors[names.get_name(name, try_suffixes=(".weight",))]
        decoded = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        scale = tensors.get(tensor.name.removesuffix("weight") + "scale")
        if scale is not None:
            # One, or one for each expert.
            decoded *= torch.from_numpy(np.array(scale.data)).view(-1, *(1,) * (value.dim() - 1))
        decoded = decoded.bfloat16()
        assert decoded.shape == value.shape
        shape = (-1, *value.shape[-2:])  # the matrices of a stack, or the one that there is
        for ours, theirs in zip(value.view(shape), decoded.view(shape), strict=True):
            assert torch.equal(in_order(theirs), in_order(ours)), name


def in_order(value: Tensor) -> Tensor:
    """The rows of a matrix, sorted."""
    rows = value.float().contiguous().numpy()
    return torch.from_numpy(rows[np.lexsort(rows.T)])


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes, numbered as bytes, with one merge, which llama.cpp wants."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    tokens = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    space = tokens[ord(" ")]
    vocabulary = {token: i for i, token in enumerate([*tokens, 2 * space])}
    tokenizer = Tokenizer(BPE(vocabulary, [(space, space)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def convert(folder: Path, out: Path) -> None:
    save_tokenizer(folder)
    script = Path(__file__).with_name("convert_with_llama_cpp.py")
    command = [sys.executable, script, SOURCE, folder, "--outfile", out, "--outtype", "bf16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


CONVERTED = [("nvfp4", "compressed-tensors"), ("nvfp4", "modelopt"), ("float8block", "fp8")]


@pytest.mark.parametrize(("weight_format", "layout"), CONVERTED)
@pytest.mark.parametrize("name", models.CONFIGS)
def test_its_converter_reads_exports(name, weight_format, layout, tmp_path, record):
    model = models.trained(name, weight_format)
    export_checkpoint(model, tmp_path / "out", layout)
    convert(tmp_path / "out", path := tmp_path / "model.gguf")
    assert_weights(path, model)
    kind = (weight_format, f"{layout}, converted")
    assert_serves(path, model, name, *kind, record=record)


def test_its_converter_reads_the_mxfp4_of_gpt_oss(tmp_path, record):
    model = models.trained(models.GPT_OSS, "mxfp4")
    export_checkpoint(model, tmp_path / "out", "mxfp4")
    convert(tmp_path / "out", path := tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        both = experts.gate_up_proj.detach().dequantize()
        parts = {"gate": both[:, ::2], "up": both[:, 1::2]}
        parts["down"] = experts.down_proj.detach().dequantize()
        for part, value in parts.items():
            tensor = tensors[f"blk.{i}.ffn_{part}_exps.weight"]
            assert tensor.tensor_type.name == "MXFP4"
            decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert torch.equal(torch.from_numpy(decoded), value.float())
    kind = ("mxfp4", "mxfp4, converted")
    assert_serves(path, model, models.GPT_OSS, *kind, record=record)


def test_its_converter_refuses_mxfp4_of_other_models(tmp_path):
    """When this fails, docs/serving.md has to say more."""
    model = models.trained("Llama", "mxfp4")
    export_checkpoint(model, tmp_path / "out")
    with pytest.raises(AssertionError, match="'mxfp4-pack-quantized' .* is not yet supported"):
        convert(tmp_path / "out", tmp_path / "model.gguf")


def test_gpt_oss_is_served_with_the_values_of_training(tmp_path, record):
    model = models.trained(models.GPT_OSS, "nvfp4")
    dequantize_model(copy.deepcopy(model)).save_pretrained(tmp_path / "decoded")
    convert(tmp_path / "decoded", path := tmp_path / "model.gguf")
    kind = ("nvfp4", "BF16, converted")
    assert_serves(path, model, models.GPT_OSS, *kind, record=record)
