"""Mixtures of experts of transformers: their stacks are quantized and train unchanged."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

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

SMALL = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
)
FEW = dict(moe_intermediate_size=64, num_experts_per_tok=2)
LATENT = dict(
    kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32
)
CONFIGS = {
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SMALL, **FEW, num_experts=4),
    "gpt_oss": lambda: GptOssConfig(**SMALL, num_local_experts=4),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**SMALL, "head_dim": 16},
        **FEW,
        **LATENT,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}
TOKENS = torch.arange(64).view(2, -1)


def make(name, dtype=torch.float32, seed=0, **sizes):
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    for key, value in sizes.items():
        setattr(config, key, value)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def stacks(model):
    return {n: p for n, p in model.named_parameters() if p.dim() == 3}


def run(model):
    model.zero_grad()
    out = model(TOKENS, labels=TOKENS)
    out.loss.backward()
    return out.logits.detach(), {name: param.grad for name, param in stacks(model).items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_are_quantized_and_compute_with_their_values(name):
    model = quantize_model(make(name), "nvfp4")
    assert all(isinstance(stack, QuantizedTensor) for stack in stacks(model).values())
    found = summary(model)
    # The rest are embeddings and the output head, large in so small a model, biases and norms.
    left = {p.name.rpartition(".")[0].rpartition(".")[2] for p in found.parameters if p.numel > 256}
    left -= {p.name.rpartition(".")[0].rpartition(".")[2] for p in found.quantized}
    assert left <= {"embed_tokens", "lm_head"}
    plain = make(name)
    for (_, param), (_, value) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        value = value.detach()
        param.data = (
            value.dequantize(torch.float32) if isinstance(value, QuantizedTensor) else value.clone()
        )
    assert_identical(run(model), run(plain))
    model.train()
    model.gradient_checkpointing_enable()
    assert_identical(run(model), run(plain))
    logits, grads = run(model)
    for other in ("eager", "batched_mm"):  # on decoded values
        model.set_experts_implementation(other)
        torch.testing.assert_close(run(model), (logits, grads), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_train(name):
    model = quantize_model(make(name), "nvfp4")
    optimizer = FP4Adam(model.named_parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
    assert_bytes_are_of_masters(optimizer)


# Checkpoints

# Experts of whole blocks of 128x128.
WIDE = dict(hidden_size=128, intermediate_size=128, moe_intermediate_size=128)
PER_EXPERT = {
    "mixtral": ("model.layers.1.block_sparse_moe.experts", {"w1", "w2", "w3"}),
    "qwen3_moe": ("model.layers.1.mlp.experts", {"gate_proj", "up_proj", "down_proj"}),
    "deepseek_v3": ("model.layers.1.mlp.experts", {"gate_proj", "up_proj", "down_proj"}),
}
LAYOUTS = [("nvfp4", "compressed-tensors"), ("nvfp4", "modelopt"), ("float8block", "fp8")]


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.filterwarnings("ignore:NVFP4 experts should be read:UserWarning")
@pytest.mark.parametrize("name", PER_EXPERT)
@pytest.mark.parametrize(("recipe", "layout"), LAYOUTS)
def test_checkpoints_have_the_names_of_the_hub(name, recipe, layout, tmp_path):
    model = make(name, torch.bfloat16, **WIDE)
    make(name, torch.bfloat16, **WIDE).save_pretrained(tmp_path / "plain")
    hub = load_file(tmp_path / "plain/model.safetensors")
    quantize_model(model, recipe, scale_groups=hf_scale_groups)
    export_checkpoint(model, tmp_path / "out", layout)
    stored = load_file(tmp_path / "out/model.safetensors")
    suffixes = ("weight_packed", "weight_global_scale", "weight_scale_2", "weight_scale_inv")
    layers = {key.rpartition(".")[0] for key in stored if key.endswith(suffixes)}
    plain = {key for key in stored if key.rpartition(".")[0] not in layers}
    assert {f"{layer}.weight" for layer in layers} | plain == hub.keys()
    prefix, projections = PER_EXPERT[name]
    assert {
        f"{prefix}.{expert}.{projection}" for expert in range(4) for projection in projections
    } <= layers
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    ignored = config.get("ignore", config.get("modules_to_not_convert"))
    assert not any("experts" in module for module in ignored)
    assert prefix.replace("experts", "gate") in ignored  # the router
    imported = import_checkpoint(make(name, torch.bfloat16, 1, **WIDE), tmp_path / "out")
    assert_identical(logits(imported), logits(model))
    export_checkpoint(imported, tmp_path / "again", layout)
    assert_identical(load_file(tmp_path / "again/model.safetensors"), stored)
    if layout == "fp8":
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        assert_identical(logits(read), logits(model))


def test_experts_that_transformers_misreads_are_warned_of(tmp_path):
    model = quantize_model(make("qwen3_moe", torch.bfloat16), "nvfp4", scale_groups=hf_scale_groups)
    with pytest.warns(UserWarning, match="from_pretrained .* leaves their scales out"):
        export_checkpoint(model, tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_masters_are_read(name, tmp_path):
    model = quantize_model(make(name), "nvfp4")
    optimizer = FP4Adam(model.named_parameters(), lr=1e-2)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    export_masters(model, optimizer, tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    for key, param in model.named_parameters():
        master = optimizer.state[param].get("master_param", param.detach())
        assert_identical(read.get_parameter(key).detach(), master)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "float8block"])
def test_stacks_that_the_hub_keeps_as_they_are_are_served_decoded(recipe, tmp_path):
    sizes = dict(hidden_size=128, intermediate_size=128)
    model = quantize_model(make("gpt_oss", torch.bfloat16, **sizes), recipe)
    layout = "fp8" if recipe == "float8block" else "compressed-tensors"
    with pytest.raises(ValueError, match=r"experts.gate_up_proj'; .* dequantize_model\(model\)"):
        export_checkpoint(model, tmp_path / "out", layout)
    expected = logits(model)
    dequantize_model(model).save_pretrained(tmp_path / "decoded")
    assert_identical(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "decoded")), expected)


def test_saved_models_are_read_with_their_values(tmp_path):
    model = use_plain_state_dict(quantize_model(make("mixtral"), "nvfp4"))
    model.save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_identical(logits(read), logits(model))
