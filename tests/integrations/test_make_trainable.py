"""Checkpoints that transformers, compressed-tensors and torchao have quantized, trained."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import train_checkpoint
from compressed_tensors.compressors.model_compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from small_models import logits, make, train
from torch import Tensor, nn
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.trainer_utils import validate_quantization_for_training

from fp4adam import (
    Float8BlockQuantizer,
    MXFP4Quantizer,
    QuantizedTensor,
    export_checkpoint,
    make_trainable,
)
from helpers import assert_identical

pytestmark = [
    # transformers, for a checkpoint that is read with another configuration of its quantizer.
    pytest.mark.filterwarnings("ignore:You passed `quantization_config` or equivalent parameters"),
    # Small models have no scale groups.
    pytest.mark.filterwarnings("ignore:weights that are served as one matrix should have one amax"),
]

# Of transformers, and of compressed-tensors; NVFP4 has scales of activations as well.
LAYOUTS = ["fp8", "fp8 ue8m0", "fp8 experts"]
LAYOUTS += ["NVFP4", "NVFP4A16", "MXFP4A16", "MXFP8A16", "FP8_BLOCK"]


@pytest.fixture(autouse=True)
def fp8_without_a_gpu(monkeypatch):
    """transformers decodes FP8 checkpoints where it has no kernels; here it keeps the bytes."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)


def build(name: str = "Qwen3", recipe: Any = None, **options: Any) -> Any:
    return make(name, recipe, torch.bfloat16, **options)


def compress(model: nn.Module, scheme: str, folder: Path) -> None:
    compressor = compress_in_memory(model, scheme)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def compress_in_memory(model: nn.Module, scheme: str) -> ModelCompressor:
    """As llm-compressor does without data: scales from amaxes, then compressed-tensors' codes."""
    group = preset_name_to_scheme(scheme, ["Linear"])
    if scheme != "NVFP4":
        group = QuantizationScheme(targets=["Linear"], weights=group.weights)
    weights = group.weights
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if not hasattr(module, "quantization_scheme") or not isinstance(module, nn.Linear):
            continue
        weight = module.weight.detach().float()
        if weights.strategy == "block":
            side, _ = weights.block_structure
            blocks = weight.unflatten(1, (-1, side)).unflatten(0, (-1, side)).transpose(1, 2)
        elif weights.strategy == "tensor":
            blocks = weight[None, None]
        else:
            blocks = weight.unflatten(1, (-1, weights.group_size))[:, :, None]
        extremes = blocks.amin((2, 3)), blocks.amax((2, 3))
        tensor_scale = None
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.data.fill_(100.0)
        if hasattr(module, "weight_global_scale"):
            tensor_scale = generate_gparam(weight.min(), weight.max())
            module.weight_global_scale.data.copy_(tensor_scale)
        scale, _ = calculate_qparams(*extremes, weights, tensor_scale)
        module.weight_scale.data.copy_(scale.view_as(module.weight_scale))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    return compressor


@pytest.fixture(scope="module", params=LAYOUTS)
def folder(request, tmp_path_factory) -> Path:
    """A checkpoint that its owners have quantized."""
    folder = tmp_path_factory.mktemp("hub")
    method, _, kind = request.param.partition(" ")
    if method != "fp8":
        compress(build(), method, folder)
        return folder
    build("Qwen3-MoE" if kind == "experts" else "Qwen3").save_pretrained(folder / "plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
        config = FineGrainedFP8Config(scale_fmt="ue8m0" if kind == "ue8m0" else "float")
        load(folder / "plain", quantization_config=config).save_pretrained(folder)
    if kind == "experts":
        split_scales(folder / "model.safetensors")
    return folder


def split_scales(path: Path) -> None:
    """Give each expert its own scales, as on the hub; transformers writes those of a stack."""
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj_scale_inv")]:
        prefix = name.removesuffix("gate_up_proj_scale_inv")
        down = tensors.pop(f"{prefix}down_proj_scale_inv")
        for expert, both in enumerate(tensors.pop(name)):
            parts = dict(zip(("gate_proj", "up_proj"), both.chunk(2), strict=True))
            for layer, scale in {**parts, "down_proj": down[expert]}.items():
                tensors[f"{prefix}{expert}.{layer}.weight_scale_inv"] = scale.clone()
    save_file(tensors, path, {"format": "pt"})


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def quantized_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)}


def test_load_train_export_and_load_again(folder, tmp_path):
    loaded = load(folder)
    before = state(loaded)
    model = make_trainable(loaded)
    assert_identical(state(loaded), before)
    quantized = quantized_of(model)
    assert len(quantized) in (12, 14) and all(p.requires_grad for p in quantized.values())
    assert {type(m) for m in model.modules()} == {
        type(m) for m in type(model)(model.config).modules()
    }
    validate_quantization_for_training(model)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    kind = FineGrainedFP8Config if config["quant_method"] == "fp8" else CompressedTensorsConfig
    decoded = load(folder, quantization_config=kind(dequantize=True)).eval()
    for name, param in quantized.items():
        expected = decoded.get_parameter(name)
        assert torch.equal(param.dequantize(torch.bfloat16), expected), name
    assert_identical(logits(model), logits(decoded))
    frozen = "model.layers.0.self_attn.o_proj"
    model.get_submodule(frozen).weight.requires_grad_(False)
    losses = train(model)
    assert losses[-1] < losses[0] - 0.5
    layout = config["quant_method"]
    if layout == "compressed-tensors" and "num_experts" in config:
        return
    export_checkpoint(model, tmp_path / "out", layout)
    again = make_trainable(load(tmp_path / "out"), next(iter(quantized.values())).quantizer)
    assert_identical(state(again), state(model))
    files = load_file(folder / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    weights = [name for name in files[1] if name.startswith(frozen)]
    assert len(weights) in (2, 3)
    for name in weights:
        ours, theirs = files[1][name].float(), files[0][name].float()
        torch.testing.assert_close(ours, theirs.view_as(ours), rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:NVFP4 experts should be read")
@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4"])
def test_experts_that_transformers_has_decoded(weight_format, tmp_path):
    """In NVFP4 without the scales of tensors."""
    trained = build("Qwen3-MoE", weight_format)
    export_checkpoint(trained, tmp_path / "all")
    model = make_trainable(load(tmp_path / "all"))
    for name, param in quantized_of(trained).items():
        assert torch.equal(model.get_parameter(name).dequantize(), param.dequantize())


def test_the_cache_of_the_hub(tmp_path, monkeypatch):
    hub = tmp_path / "models--someone--small"
    export_checkpoint(build(recipe="mxfp4"), hub / "snapshots" / "abc")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model = load(hub / "snapshots" / "abc")
    model.config._name_or_path = "someone/small"
    monkeypatch.setattr(
        huggingface_hub,
        "try_to_load_from_cache",
        functools.partial(huggingface_hub.try_to_load_from_cache, cache_dir=tmp_path),
    )
    assert len(quantized_of(make_trainable(model))) == 14
    model.config._name_or_path = "someone/else"
    with pytest.raises(FileNotFoundError, match="'someone/else', .* pass folder="):
        make_trainable(model)
    assert len(quantized_of(make_trainable(model, folder=hub / "snapshots" / "abc"))) == 14


def test_shapes_and_ties_of_other_models(tmp_path):
    """Tied embeddings, biases, sides that are no multiples of blocks."""
    sizes = dict(hidden_size=192, intermediate_size=320, head_dim=40, attention_bias=True)
    trained = build(recipe="float8block", tie_word_embeddings=True, **sizes)
    export_checkpoint(trained, tmp_path / "hub", "fp8")
    model = make_trainable(load(tmp_path / "hub"), Float8BlockQuantizer(columnwise=False))
    assert_identical(state(model), state(trained))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    losses = train(model, steps=2)
    assert losses[1] < losses[0]


@pytest.mark.parametrize("rounding", ["floor", "even", "up"])
def test_bytes_of_mxfp4_are_those_of_other_quantizers(rounding):
    torch.manual_seed(0)
    x = torch.randn(128, 256, dtype=torch.bfloat16) * torch.randn(128, 1).exp().bfloat16()
    ours = MXFP4Quantizer(scale_rounding=rounding).quantize(x)
    mode = {"floor": "FLOOR", "even": "EVEN", "up": "RCEIL"}[rounding]
    theirs = MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode[mode])
    assert torch.equal(ours.rowwise_scale_inv[:, :8], theirs.scale.view(torch.uint8))
    assert torch.equal(ours.rowwise_data, theirs.qdata.view(torch.uint8))
    if rounding == "even":
        layer = nn.Sequential(nn.Linear(256, 128, bias=False))
        layer[0].weight.data = x
        compress_in_memory(layer, "MXFP4A16")
        assert torch.equal(ours.rowwise_scale_inv[:, :8], layer[0].weight_scale)
        assert torch.equal(ours.rowwise_data, layer[0].weight_packed)


def test_gpt_oss(tmp_path):
    """Stacks [experts, in, out] in memory, [experts, out, in] in the checkpoint."""
    plain = build("gpt-oss", hidden_size=64, intermediate_size=96, head_dim=16)
    plain.save_pretrained(tmp_path / "hub")
    path = tmp_path / "hub/model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if "experts" in name and name.endswith("_proj")]:
        weight = tensors.pop(name).transpose(1, 2).contiguous()
        blocks = MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)
        tensors[f"{name}_blocks"] = blocks.qdata.view(torch.uint8).unflatten(2, (-1, 16)).clone()
        tensors[f"{name}_scales"] = blocks.scale.view(torch.uint8).clone()
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((tmp_path / "hub/config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "hub/config.json").write_text(json.dumps(config))
    decoded = load(tmp_path / "hub")  # without a GPU
    decoded.set_experts_implementation("grouped_mm")
    model = make_trainable(load(tmp_path / "hub"))
    assert_identical(logits(model), logits(decoded))
    export_checkpoint(model, tmp_path / "same", "mxfp4")
    assert_identical(load_file(tmp_path / "same/model.safetensors"), tensors)
    losses = train(model)
    assert losses[-1] < losses[0] - 0.5
    export_checkpoint(model, tmp_path / "out", "mxfp4")
    again = load(tmp_path / "out")
    experts = model.model.layers[1].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        own = getattr(experts, name).dequantize(torch.bfloat16).transpose(1, 2)
        assert torch.equal(getattr(again.model.layers[1].mlp.experts, name), own)
    with pytest.raises(ValueError, match="must be whole stacks of experts for layout 'mxfp4'"):
        export_checkpoint(build(recipe="mxfp4"), tmp_path / "no", "mxfp4")


def test_the_page_lists_what_is_tested():
    page = (Path(__file__).parents[2] / "docs/train_checkpoints.md").read_text()
    tested = page.partition("Tested with ")[2].partition("\n\n")[0]
    assert re.findall("`(.+?)`", tested)[1:] == [*LAYOUTS, "mxfp4"]


def test_the_example(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train_checkpoint.py", "--steps", "2"])
    train_checkpoint.main()
    printed = capsys.readouterr().out
    assert "14 of 25 weights are quantized" in printed and "step 2: loss" in printed
    assert "loaded again, all weights are the same: True" in printed


def test_what_is_refused(tmp_path):
    build().save_pretrained(tmp_path / "plain")
    config = FineGrainedFP8Config(weight_block_size=(64, 64))
    load(tmp_path / "plain", quantization_config=config).save_pretrained(tmp_path / "small")
    compress(build(), "FP8", tmp_path / "by tensor")
    offloaded = load(tmp_path / "small")
    offloaded.lm_head.weight = nn.Parameter(torch.empty(256, 128, device="meta"))
    adapted = get_peft_model(load(tmp_path / "plain"), LoraConfig(target_modules=["lm_head"]))
    export_checkpoint(build(recipe="float8block"), tmp_path / "blocks", "fp8")
    with pytest.raises(ValueError, match="quantizer must be a Float8BlockQuantizer"):
        make_trainable(load(tmp_path / "blocks"), "mxfp8")
    for model, error, message in (
        (adapted, ValueError, "must be without adapters .* add them afterwards"),
        ("Qwen3", TypeError, "must be an nn.Module"),
        (nn.Linear(4, 4), ValueError, "must be one of transformers .* got a Linear"),
        (build(), FileNotFoundError, "pass folder="),
        (load(tmp_path / "plain"), ValueError, "quant_method must be one of .* got None"),
        (load(tmp_path / "small"), ValueError, r"in blocks of 128x128, got \(2, [24]\)"),
        (load(tmp_path / "by tensor"), ValueError, r"in blocks of 128x128, got \(1,\)"),
        (offloaded, ValueError, r"must be on one device .* got \['cpu', 'meta'\]"),
    ):
        with pytest.raises(error, match=message):
            make_trainable(model)
