"""Small models of transformers, by architecture: how they are made, run and trained."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer

import helpers
from fp4adam import FP4Adam, quantize_model

# Sides are multiples of 128.
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
QWEN3_MOE = dict(EXPERTS, moe_intermediate_size=128, num_experts=4)
LATENT = dict(
    EXPERTS,
    head_dim=16,
    kv_lora_rank=32,
    q_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=32,
    moe_intermediate_size=128,
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
)
WHISPER = dict(
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
GPT2 = dict(n_embd=128, n_layer=2, n_head=4, vocab_size=256, n_positions=64)
VIT = {key: SIZES[key] for key in [*SIZES][:4]}
T5 = dict(d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, vocab_size=256)
# By name: the start of the configuration's class, the end of the model's, and the configuration.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("Llama", "ForCausalLM", GROUPED),
    "Qwen2": ("Qwen2", "ForCausalLM", GROUPED),
    "Qwen3": ("Qwen3", "ForCausalLM", GROUPED),
    "Qwen3-MoE": ("Qwen3Moe", "ForCausalLM", QWEN3_MOE),
    "Mixtral": ("Mixtral", "ForCausalLM", dict(EXPERTS, num_local_experts=4)),
    "Gemma 3": ("Gemma3", "ForCausalLM", GROUPED),
    "Phi-3": ("Phi3", "ForCausalLM", GROUPED),
    "OLMoE": ("Olmoe", "ForCausalLM", dict(EXPERTS, num_experts=4)),
    "GPT-2": ("GPT2", "LMHeadModel", dict(GPT2, bos_token_id=None, eos_token_id=None)),
    "BERT": ("Bert", "ForMaskedLM", dict(SIZES, vocab_size=256)),
    "ViT": ("ViT", "ForImageClassification", dict(VIT, image_size=32, patch_size=16)),
    "Whisper": ("Whisper", "ForConditionalGeneration", WHISPER),
    "T5": ("T5", "ForConditionalGeneration", T5),
    "gpt-oss": ("GptOss", "ForCausalLM", dict(EXPERTS, num_local_experts=4)),
    "DeepSeek-V3": ("DeepseekV3", "ForCausalLM", LATENT),
}
TEXT_CONFIGS = {"Gemma3": "Gemma3Text"}
TOKENS = torch.arange(64).view(2, -1)


def make(
    name: str, recipe: Any = None, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any
) -> Any:
    """A model with random weights, quantized with a recipe; options change its configuration."""
    torch.manual_seed(seed)
    kind, task, defaults = ARCHITECTURES[name]
    config = getattr(transformers, TEXT_CONFIGS.get(kind, kind) + "Config")
    model_class = getattr(transformers, kind + task)
    model = model_class._from_config(config(**{**defaults, **options}), dtype=dtype).eval()
    for key, layer in [*model.named_modules()]:
        if type(layer).__name__ == "Conv1D":  # nn.Linear, as docs/frameworks.md puts in its place
            model.set_submodule(key, nn.Linear(*layer.weight.shape, dtype=dtype))
    return model if recipe is None else quantize_model(model, recipe)


def logits(model: nn.Module, **inputs: Tensor) -> Tensor:
    """For TOKENS, unless other inputs are given."""
    with torch.no_grad():
        return model.eval()(**(inputs or {"input_ids": TOKENS})).logits


def train(model: nn.Module, optimizer: Optimizer | None = None, steps: int = 4) -> list[float]:
    """Losses of steps with everything that requires gradients."""
    if optimizer is None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        optimizer = FP4Adam(trained, lr=1e-2)
    model.train()
    losses = helpers.train(optimizer, (model(TOKENS, labels=TOKENS).loss for _ in range(steps)))
    model.eval()
    return losses
