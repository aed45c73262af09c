"""Mixtures of experts of transformers: their stacks are quantized and train unchanged."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from small_models import TOKENS, logits, make, train
from transformers import AutoModelForCausalLM

from fp4adam import (
    FP4Adam,
    QuantizedTensor,
    dequantize_model,
    export_checkpoint,
    export_masters,
    hf_scale_groups,
    import_checkpoint,
    quantize_model,
    summary,
    use_plain_state_dict,
)
from helpers import assert_bytes_are_of_masters, assert_identical

NAMES = ["Mixtral", "Qwen3-MoE", "gpt-oss", "DeepSeek-V3"]
SMALL = dict(vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64)
every_model = pytest.mark.parametrize("name", NAMES)


def stacks(model):
    return {n: p for n, p in model.named_parameters() if p.dim() == 3}


def run(model):
    model.zero_grad()
    out = model(TOKENS, labels=TOKENS)
    out.loss.backward()
    return out.logits.detach(), {name: param.grad for name, param in stacks(model).items()}


@every_model
def test_experts_are_quantized_and_compute_with_their_values(name, tmp_path):
    model = make(name, "nvfp4", **SMALL)
    assert all(isinstance(stack, QuantizedTensor) for stack in stacks(model).values())
    found = summary(model)
    # The rest are embeddings and the output head, large in so small a model, biases and norms.
    left = {p.name.rpartition(".")[0].rpartition(".")[2] for p in found.parameters if p.numel > 256}
    left -= {p.name.rpartition(".")[0].rpartition(".")[2] for p in found.quantized}
    assert left <= {"embed_tokens", "lm_head"}
    plain = dequantize_model(copy.deepcopy(model))
    assert_identical(run(model), run(plain))
    model.train()
    model.gradient_checkpointing_enable()
    assert_identical(run(model), run(plain))
    expected = run(model)
    for other in ("eager", "batched_mm"):  # on decoded values
        model.set_experts_implementation(other)
        torch.testing.assert_close(run(model), expected, rtol=1e-4, atol=1e-5)
    use_plain_state_dict(model.eval()).save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_identical(logits(read), logits(plain))


@every_model
def test_experts_train_and_masters_are_read(name, tmp_path):
    model = make(name, "nvfp4", **SMALL)
    optimizer = FP4Adam(model.named_parameters(), lr=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        losses = train(model, optimizer, steps=8)
    assert losses[-1] < losses[0] - 0.2
    assert_bytes_are_of_masters(optimizer)
    export_masters(model, optimizer, tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    for key, param in model.named_parameters():
        master = optimizer.state[param].get("master_param", param.detach())
        assert_identical(read.get_parameter(key).detach(), master)


# Checkpoints; experts are whole blocks of 128x128.

PER_EXPERT = {
    "Mixtral": ("model.layers.1.block_sparse_moe.experts", {"w1", "w2", "w3"}),
    "Qwen3-MoE": ("model.layers.1.mlp.experts", {"gate_proj", "up_proj", "down_proj"}),
    "DeepSeek-V3": ("model.layers.1.mlp.experts", {"gate_proj", "up_proj", "down_proj"}),
}
LAYOUTS = [("nvfp4", "compressed-tensors"), ("nvfp4", "modelopt"), ("float8block", "fp8")]


@pytest.mark.filterwarnings("ignore:NVFP4 experts should be read:UserWarning")
@pytest.mark.parametrize("name", PER_EXPERT)
@pytest.mark.parametrize(("recipe", "layout"), LAYOUTS)
def test_checkpoints_have_the_names_of_the_hub(name, recipe, layout, tmp_path):
    model = make(name, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    hub = load_file(tmp_path / "plain/model.safetensors")
    quantize_model(model, recipe, scale_groups=hf_scale_groups)
    export_checkpoint(model, tmp_path / "out", layout)
    stored = load_file(tmp_path / "out/model.safetensors")
    suffixes = ("weight_packed", "weight_global_scale", "weight_scale_2", "weight_scale_inv")
    layers = {key.rpartition(".")[0] for key in stored if key.endswith(suffixes)}
    plain = {key for key in stored if key.rpartition(".")[0] not in layers}
    assert {f"{layer}.weight" for layer in layers} | plain == hub.keys()
    prefix, projections = PER_EXPERT[name]
    assert {f"{prefix}.{expert}.{part}" for expert in range(4) for part in projections} <= layers
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    ignored = config.get("ignore", config.get("modules_to_not_convert"))
    assert not any("experts" in module for module in ignored)
    assert prefix.replace("experts", "gate") in ignored  # the router
    imported = import_checkpoint(make(name, dtype=torch.bfloat16, seed=1), tmp_path / "out")
    assert_identical(logits(imported), logits(model))
    export_checkpoint(imported, tmp_path / "again", layout)
    assert_identical(load_file(tmp_path / "again/model.safetensors"), stored)
    if layout == "fp8":
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert_identical(logits(read), logits(model))


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "float8block"])
def test_stacks_that_the_hub_keeps_as_they_are_are_served_decoded(recipe, tmp_path):
    model = make("gpt-oss", recipe, torch.bfloat16)
    layout = "fp8" if recipe == "float8block" else "compressed-tensors"
    with pytest.raises(ValueError, match=r"experts.gate_up_proj'; .* dequantize_model\(model\)"):
        export_checkpoint(model, tmp_path / "out", layout)
    expected = logits(model)
    dequantize_model(model).save_pretrained(tmp_path / "decoded")
    assert_identical(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "decoded")), expected)
