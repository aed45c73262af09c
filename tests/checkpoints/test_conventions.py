"""Checkpoints as other programs write them, and what exports say to other programs."""

import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export import build, bytes_of
from torch import Tensor, nn

from fp4adam import (
    FP4Adam,
    export_checkpoint,
    export_masters,
    import_checkpoint,
    is_hidden_linear,
    quantize_model,
)
from fp4adam.checkpoints.reader import CheckpointReader
from helpers import assert_identical

FILE = "model.safetensors"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def configure(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def assert_imports(folder: Path, model: nn.Module) -> None:
    """The values, but for scales with the last bit of an amax that only our header has."""
    read = import_checkpoint(build(None, seed=1), folder)
    for name, param in model.named_parameters():
        own = dict(read.named_parameters())[name]
        torch.testing.assert_close(own.to(torch.bfloat16), param.to(torch.bfloat16), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_of_blocks_in_other_dtypes(dtype, tmp_path):
    """Qwen3-FP8 has BF16 ones, DeepSeek-V3.1 has powers of two."""
    model = build("float8block")
    export_checkpoint(model, tmp_path, "fp8")
    for layer in ("up", "down"):
        name = f"{layer}.weight_scale_inv"
        rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))  # noqa: B023
    configure(tmp_path, lambda config: config.update(scale_fmt="ue8m0"))
    assert_imports(tmp_path, model)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_scales_of_mxfp8_that_are_typed(layout, tmp_path):
    model = build("mxfp8")
    export_checkpoint(model, tmp_path, layout)
    for layer in ("up", "down"):
        name = f"{layer}.weight_scale"
        rewrite(
            tmp_path,
            lambda tensors: tensors.update({name: tensors[name].view(torch.float8_e8m0fnu)}),  # noqa: B023
        )
    assert_imports(tmp_path, model)


@pytest.mark.parametrize("name", ["up.k_scale", "layers.0.attn.k_scale", "up.v_scale"])
def test_scales_of_activations_and_the_kv_cache_are_left_out(name, tmp_path):
    model = build("nvfp4")
    export_checkpoint(model, tmp_path, "modelopt")
    more = {name: torch.ones(()), "up.input_scale": torch.ones(())}
    rewrite(tmp_path, lambda tensors: tensors.update(more))
    assert_imports(tmp_path, model)


def test_scales_that_the_model_has_are_read(tmp_path):
    models = [build("nvfp4"), build(None, seed=1)]
    for i, model in enumerate(models):
        model.k_scale = nn.Parameter(torch.full((3,), i + 1.0))
        model.register_buffer("input_scale", torch.full((3,), i + 1.0))
    export_checkpoint(models[0], tmp_path)
    import_checkpoint(models[1], tmp_path)
    assert models[1].k_scale.sum() == 3 and models[1].input_scale.sum() == 3


@pytest.mark.parametrize("config", [{}, {"hidden_size": 64}, None])
def test_hf_quant_config_alone(config, tmp_path):
    details = {"quant_algo": "NVFP4", "group_size": 16}
    model = build("nvfp4")
    export_checkpoint(model, tmp_path, "modelopt")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": details}))
    (tmp_path / "config.json").unlink()
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert_imports(tmp_path, model)


# Experts


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(4, 64, 32))
        self.down_proj = nn.Parameter(torch.ones(4, 32, 32))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 32))


class MoE(nn.Module):
    """Stacked experts and a router, as transformers has them, beside a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 32)
        self.conv = nn.Conv1d(32, 32, 3)
        self.norm = nn.LayerNorm(32)
        self.mlp = nn.Module()
        self.mlp.pos_embed = nn.Parameter(torch.ones(1, 4, 32))  # beside a quantized layer
        self.mlp.shared = nn.Linear(32, 32)
        self.mlp.gate, self.mlp.experts = Router(), Experts()
        self.lm_head = nn.Linear(32, 8)


@pytest.mark.filterwarnings("ignore:only .* of the elements of matrices are quantized")
def test_stacked_experts_are_listed_as_not_quantized(tmp_path):
    listed = {
        "compressed-tensors": ("nvfp4", lambda config: config["ignore"]),
        "modelopt": ("nvfp4", lambda config: config["ignore"]),
        "fp8": ("float8block", lambda config: config["modules_to_not_convert"]),
    }
    for layout, (recipe, names) in listed.items():
        model = quantize_model(MoE(), recipe)
        export_checkpoint(model, tmp_path / layout, layout)
        config = json.loads((tmp_path / layout / "config.json").read_text())
        ignored = names(config["quantization_config"])
        assert ignored[:3] == ["mlp.gate", "mlp.experts", "lm_head"]
        if layout == "compressed-tensors":  # engines look for a layer of one expert
            (pattern,) = ignored[3:]
            match = re.compile(pattern.removeprefix("re:")).match
            assert match("mlp.experts.0.gate_proj") and not match("mlp.experts_more.0")
            assert not match("mlp.shared")
        else:
            assert len(ignored) == 3


class SplitExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))


class OneExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()


def test_experts_of_their_own(tmp_path):
    model = quantize_model(SplitExperts(), "nvfp4")
    export_checkpoint(model, tmp_path)
    assert_identical(bytes_of(import_checkpoint(SplitExperts(), tmp_path)), bytes_of(model))
    with pytest.raises(ValueError, match="such as 'experts.0.weight'; build"):
        import_checkpoint(OneExpert(), tmp_path)


# What exports write


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_dtype_that_readers_decode_to(dtype, tmp_path):
    for recipe, layout, expected in (
        ("nvfp4", "compressed-tensors", "bfloat16"),
        ("mxfp8", "compressed-tensors", "bfloat16"),
        ("nvfp4", "modelopt", str(dtype)[6:]),
        ("float8block", "fp8", str(dtype)[6:]),
    ):
        model = build(recipe, dtype=dtype)
        folder = tmp_path / f"{recipe}-{layout}"
        export_checkpoint(model, folder, layout, config={"dtype": "float64"})
        assert json.loads((folder / "config.json").read_text())["dtype"] == expected
        assert load_file(folder / FILE)["up.bias"].dtype == dtype  # nothing is rounded
        other = import_checkpoint(build(None, seed=1, dtype=dtype), folder)
        assert torch.equal(other.up.bias, model.up.bias)


def test_the_generation_configuration_goes_along(tmp_path):
    model = build("nvfp4")
    content = {"eos_token_id": [2, 3], "max_length": 5}
    model.generation_config = SimpleNamespace(to_json_string=lambda: json.dumps(content))
    export_checkpoint(model, tmp_path / "out")
    export_masters(model, FP4Adam(model.parameters()), tmp_path / "masters")
    for folder in ("out", "masters"):
        assert json.loads((tmp_path / folder / "generation_config.json").read_text()) == content
    model.generation_config = None
    export_checkpoint(model, tmp_path / "without")
    assert not (tmp_path / "without/generation_config.json").exists()


class PeftModel(nn.Module):
    """As PEFT's: the model itself lies deeper, and its layers hold another one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def merge_and_unload(self) -> nn.Module:
        return self.base_model


class LoraLinear(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer

    def get_base_layer(self) -> nn.Linear:
        return self.base_layer


def test_adapters_are_merged_first(tmp_path):
    model = build("nvfp4")
    optimizer = FP4Adam(model.parameters())
    wrapped = PeftModel(model)
    for export in (export_checkpoint, lambda m, folder: export_masters(m, optimizer, folder)):
        with pytest.raises(ValueError, match="got a PeftModel at ''; merge .*.merge_and_unload()"):
            export(wrapped, tmp_path / "out")
    model.up = LoraLinear(model.up)
    with pytest.raises(ValueError, match="without adapters .* got a LoraLinear at 'up'; merge"):
        export_checkpoint(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


HEADS = (
    "lm_head score qa_outputs classifier classifier.out_proj lm_head.decoder cls.seq_relationship "
    "bert.classification_head.out_proj cls.predictions.decoder"
)
HIDDEN = (
    "q_proj layers.0.self_attn.out_proj classifier.dense decoder lm_head.dense "
    "predictions.out_proj model.decoder.layers.0.fc1 cls.predictions.transform.dense"
)


def test_task_heads_stay_in_high_precision():
    layer = nn.Linear(64, 64)
    assert not any(is_hidden_linear(layer, name) for name in HEADS.split())
    assert all(is_hidden_linear(layer, name) for name in ("", *HIDDEN.split()))


def test_safetensors_is_asked_for_where_it_is_needed(tmp_path, monkeypatch):
    export_checkpoint(build("nvfp4"), tmp_path / "out")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        import_checkpoint(build(None), tmp_path / "out")
    with pytest.raises(ImportError, match="pip install safetensors"):
        export_checkpoint(build("nvfp4"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


class Attention(nn.Module):
    def __init__(self, kv_rows: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(128, 256), nn.Linear(128, kv_rows)
        self.v_proj = nn.Linear(128, kv_rows)


def test_warning_of_rows_that_vllm_fuses_within_a_block(tmp_path):
    for rows, is_wrong in ((128, False), (64, True)):
        model = quantize_model(Attention(rows), "float8block")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            export_checkpoint(model, tmp_path / str(rows), "fp8")
        assert [("k_proj" in str(w.message)) for w in caught] == [True] * is_wrong
        assert all("vLLM (0.32) where it fuses" in str(w.message) for w in caught)


def test_tied_weights_with_two_values_are_refused(tmp_path):
    model = build("nvfp4")
    export_checkpoint(model, tmp_path)
    path = tmp_path / "model.safetensors"
    with CheckpointReader(tmp_path) as reader:
        metadata = reader.metadata
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["embedding.weight"].clone()
    save_file(tensors, path, metadata)
    import_checkpoint(build(None, seed=1), tmp_path)
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, path, metadata)
    other = build(None, seed=1)
    before = bytes_of(other)
    with pytest.raises(ValueError, match="'embedding.weight' and 'lm_head.weight' must be equal"):
        import_checkpoint(other, tmp_path)
    assert_identical(bytes_of(other), before)


def test_a_model_on_the_meta_device_is_filled(tmp_path):
    export_checkpoint(build("nvfp4"), tmp_path)
    with torch.device("meta"):
        model = build(None)
    import_checkpoint(model, tmp_path)
    assert_identical(bytes_of(model), bytes_of(import_checkpoint(build(None, seed=1), tmp_path)))
    assert all(isinstance(param, nn.Parameter) for param in model.parameters())
    assert not any(isinstance(buffer, nn.Parameter) for buffer in model.buffers())
