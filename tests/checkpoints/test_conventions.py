"""Checkpoints as other programs write them, and what exports say to other programs."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_export import FILE, build, bytes_of, rewrite
from torch import Tensor, nn

from fp4adam import FP4Adam, export_checkpoint, export_masters, import_checkpoint
from helpers import assert_identical


def assert_imports(folder: Path, model: nn.Module) -> None:
    """The values, but for scales with the last bit of an amax that only our header has."""
    read = import_checkpoint(build(None, seed=1), folder)
    for name, param in model.named_parameters():
        own = dict(read.named_parameters())[name]
        torch.testing.assert_close(own.to(torch.bfloat16), param.to(torch.bfloat16), rtol=0, atol=0)


def converted(key: str, change: Callable[[Tensor], Tensor]) -> Callable[..., object]:
    names = [f"{layer}.{key}" for layer in ("up", "down")]
    return lambda tensors: tensors.update({name: change(tensors[name]) for name in names})


def with_more(name: str) -> Callable[..., object]:
    return lambda tensors: tensors.update({name: torch.ones(()), "up.input_scale": torch.ones(())})


AS_OTHERS_WRITE = [
    # Qwen3-FP8 has BF16 scales, DeepSeek-V3.1 has powers of two.
    *(
        ("float8block", "fp8", converted("weight_scale_inv", lambda x, dtype=dtype: x.to(dtype)))
        for dtype in (torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
    ),
    ("float8block", "compressed-tensors", converted("weight_scale", Tensor.bfloat16)),
    *(
        ("mxfp8", layout, converted("weight_scale", lambda x: x.view(torch.float8_e8m0fnu)))
        for layout in ("compressed-tensors", "modelopt")
    ),
    # Scales of activations and of the KV cache are left out.
    *(
        ("nvfp4", "modelopt", with_more(name))
        for name in ("up.k_scale", "layers.0.attn.k_scale", "up.v_scale")
    ),
]


@pytest.mark.parametrize(("recipe", "layout", "change"), AS_OTHERS_WRITE)
def test_tensors_as_others_write_them(recipe, layout, change, tmp_path):
    model = build(recipe)
    export_checkpoint(model, tmp_path, layout)
    rewrite(tmp_path, change)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_imports(tmp_path, model)


@pytest.mark.parametrize("config", ["{}", '{"hidden_size": 64}', None])
def test_hf_quant_config_alone(config, tmp_path):
    model = build("nvfp4")
    export_checkpoint(model, tmp_path, "modelopt")
    details = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(details))
    (tmp_path / "config.json").unlink()
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert_imports(tmp_path, model)


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


class Adapted(nn.Module):
    """As PEFT's models, which hold another one deeper, and as its layers."""

    def __init__(self, inner: nn.Module, method: str) -> None:
        super().__init__()
        self.inner = inner
        setattr(self, method, lambda: inner)


def test_adapters_are_merged_first(tmp_path):
    model = build("nvfp4")
    optimizer = FP4Adam(model.parameters())
    wrapped = Adapted(model, "merge_and_unload")
    for export in (export_checkpoint, lambda m, folder: export_masters(m, optimizer, folder)):
        with pytest.raises(ValueError, match="got a Adapted at ''; merge .*.merge_and_unload()"):
            export(wrapped, tmp_path / "out")
    model.up = Adapted(model.up, "get_base_layer")
    with pytest.raises(ValueError, match="without adapters .* got a Adapted at 'up'; merge"):
        export_checkpoint(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_safetensors_is_asked_for_where_it_is_needed(tmp_path, monkeypatch):
    export_checkpoint(build("nvfp4"), tmp_path / "out")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        import_checkpoint(build(None), tmp_path / "out")
    with pytest.raises(ImportError, match="pip install safetensors"):
        export_checkpoint(build("nvfp4"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_tied_weights_with_two_values_are_refused(tmp_path):
    export_checkpoint(build("nvfp4"), tmp_path)
    rewrite(tmp_path, lambda x: x.update({"lm_head.weight": x.pop("embedding.weight")}))
    import_checkpoint(build(None, seed=1), tmp_path)
    rewrite(tmp_path, lambda x: x.update({"embedding.weight": x["lm_head.weight"].clone()}))
    import_checkpoint(build(None, seed=1), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors["lm_head.weight"][0, 0].add_(1))
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
