"""Mixtures of experts of transformers: their stacks are quantized and train unchanged."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from fp4adam import FP4Adam, QuantizedTensor, quantize_model, summary
from quantized_training import assert_bytes_are_of_masters, assert_identical

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


def make(name, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[name]()).to(dtype)


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
        param.data = value.dequantize() if isinstance(value, QuantizedTensor) else value.clone()
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
