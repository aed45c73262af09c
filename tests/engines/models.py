"""Small models of transformers that have learned three lines by heart, and what they answer."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from fp4adam import FP4Adam, QuantizedTensor, hf_scale_groups, quantize_model

VOCABULARY = 264  # bytes, and a token that merges two of them
PROMPT, WRITTEN, N_PROMPTS, STEPS = 32, 31, 3, 120
SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
    tie_word_embeddings=False,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True)
CONFIGS: dict[str, Any] = {
    "Llama": lambda **options: LlamaConfig(**SHAPE, **options),
    "Qwen3": lambda **options: Qwen3Config(**SHAPE, **options),
    "Qwen3-MoE": lambda **options: Qwen3MoeConfig(**SHAPE, **EXPERTS, **options),
}
# Its experts are served in BF16 alone.
GPT_OSS = "gpt-oss"
FEW_WIDE = dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=128)


def build(name: str, weight_format: str) -> PreTrainedModel:
    torch.manual_seed(0)
    # vLLM joins q, k and v, so that the rows of each have to fill blocks of 128.
    head_dim = 64 if weight_format == "float8block" else 32
    if name == GPT_OSS:
        config = GptOssConfig(**{**SHAPE, **FEW_WIDE}, head_dim=head_dim)
    else:
        config = CONFIGS[name](head_dim=head_dim)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if (name, weight_format) == (GPT_OSS, "mxfp4"):
        turn_experts(model)
    return model


def turn_experts(model: PreTrainedModel) -> None:
    """Stacks [experts, out, in], as gpt-oss' files have them, and imports leave them."""
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for key in ("gate_up_proj", "down_proj"):
            turned = getattr(experts, key).detach().transpose(1, 2).contiguous()
            setattr(experts, key, torch.nn.Parameter(turned))
        experts.is_transposed = False
    model.set_experts_implementation("grouped_mm")


def text() -> Tensor:
    """Three lines of 64 bytes."""
    content = Path(__file__).read_bytes()[: N_PROMPTS * 64]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(N_PROMPTS, 64).long()


def train(model: Any, optimizer: Any, lines: Tensor, steps: int, schedule: Any = None) -> Tensor:
    """Steps on the same lines; the last loss."""
    for _ in range(steps):
        loss = model(lines, labels=lines).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return loss.detach()


@functools.cache
def trained(name: str, weight_format: str) -> PreTrainedModel:
    """A quantized model that is sure of how each line goes on."""
    model = build(name, weight_format)
    alone = {}
    if (name, weight_format) == (GPT_OSS, "mxfp4"):  # whose files have quantized experts alone
        alone["filter"] = lambda _, layer: "experts" in layer
    quantize_model(model, weight_format, scale_groups=hf_scale_groups, **alone)
    optimizer = FP4Adam(model.named_parameters(), lr=3e-3, scale_groups=hf_scale_groups)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, STEPS)
    assert train(model, optimizer, text(), STEPS, schedule) < 0.2
    return model.eval()


def quantized_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The values of quantized weights in BF16, as training multiplies by them."""
    return {
        name: param.detach().dequantize(torch.bfloat16)
        for name, param in model.named_parameters()
        if isinstance(param, QuantizedTensor)
    }


def in_float32(model: PreTrainedModel) -> PreTrainedModel:
    """The same values, computed with in FP32."""
    values = quantized_weights(model)
    state = {name: values.get(name, param) for name, param in model.named_parameters()}
    exact = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    for name, module in exact.named_modules():
        turned = getattr(model.get_submodule(name), "is_transposed", None)
        if getattr(module, "is_transposed", None) != turned:  # as turn_experts leaves them
            for key in ("gate_up_proj", "down_proj"):
                state[f"{name}.{key}"] = state[f"{name}.{key}"].transpose(1, 2)
    exact.load_state_dict({name: value.float() for name, value in state.items()})
    return exact


@torch.no_grad()
def log_probabilities(model: PreTrainedModel) -> Tensor:
    """Those of the first byte after each prompt, [prompts, vocabulary]."""
    return model(text()[:, :PROMPT]).logits[:, -1].float().log_softmax(-1)


def errors(logs: Tensor, model: PreTrainedModel) -> tuple[float, float]:
    """The largest difference from the same model in FP32, and that of the model itself.

    Prompts for which a router hardly prefers the last expert that it takes are left out: whoever
    rounds otherwise may take another one. The clearest of them is always compared.
    """
    exact, gaps = in_float32(model), []

    def note(router: torch.nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        count = model.config.num_experts_per_tok
        bias = getattr(router, "bias", None)
        best = torch.nn.functional.linear(inputs[0], router.weight, bias).topk(count + 1).values
        gaps.append((best[..., -2] - best[..., -1]).view(N_PROMPTS, PROMPT).amin(1))

    for layer in exact.model.layers:
        router = getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None))
        if router is not None:
            router.register_forward_hook(note)
    expected = log_probabilities(exact)
    clarity = torch.stack([*gaps, torch.ones(N_PROMPTS)]).amin(0)
    is_clear = clarity >= clarity.max().clamp(max=0.005)
    error, own = (
        (x - expected)[is_clear].abs().max().item() for x in (logs, log_probabilities(model))
    )
    return error, own


@torch.no_grad()
def greedy(model: PreTrainedModel) -> list[list[int]]:
    """How the model goes on after each prompt."""
    prompts = text()[:, :PROMPT]
    options = dict(max_new_tokens=WRITTEN, do_sample=False, pad_token_id=0)
    mask = torch.ones_like(prompts)
    return model.generate(prompts, attention_mask=mask, **options)[:, PROMPT:].tolist()
