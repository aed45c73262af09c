"""GGUF files, read back by the package gguf: metadata, vocabularies and the bits of training."""

import math
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fp4adam import (
    Float8BlockQuantizer,
    FP4Adam,
    NVFP4Quantizer,
    QuantizedTensor,
    export_checkpoint,
    quantize_model,
)
from ranks import all_ranks, run_ranks

gguf = pytest.importorskip("gguf")

WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD, EXPERTS = 128, 192, 4, 2, 32, 3
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "rms_norm_eps": 1e-5,
    "vocab_size": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
QWEN3 = {**CONFIG, "architectures": ["Qwen3ForCausalLM"]}
MOE = {
    **CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": HIDDEN,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
FORMATS = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "mxfp8": "BF16", "float8block": "BF16"}


def linear(rows: int, cols: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(cols, rows, bias=bias)


def mlp() -> nn.Module:
    module = nn.Module()
    module.gate_proj, module.up_proj = linear(HIDDEN, WIDTH), linear(HIDDEN, WIDTH)
    module.down_proj = linear(WIDTH, HIDDEN)
    return module


def norm(size: int = WIDTH) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.rand(size))
    return module


def model_of(config: dict[str, Any], experts: str = "") -> nn.Module:
    """The parameters of a model of transformers under their names; it computes nothing.

    Args:
        config: Its configuration.
        experts: "stacked", "plain stacks" (which quantize_model does not know), "apart" or none.
    """
    torch.manual_seed(0)
    layer, attention = nn.Module(), nn.Module()
    attention.q_proj = linear(HEADS * HEAD, WIDTH, config.get("attention_bias", False))
    attention.k_proj = linear(KV_HEADS * HEAD, WIDTH, config.get("attention_bias", False))
    attention.v_proj = linear(KV_HEADS * HEAD, WIDTH, config.get("attention_bias", False))
    attention.o_proj = linear(WIDTH, HEADS * HEAD)
    if config["architectures"] != ["LlamaForCausalLM"]:
        attention.q_norm, attention.k_norm = norm(HEAD), norm(HEAD)
    layer.self_attn = attention
    layer.input_layernorm, layer.post_attention_layernorm = norm(), norm()
    layer.mlp = mlp() if not experts else nn.Module()
    if experts:
        layer.mlp.gate = linear(EXPERTS, WIDTH)
    if experts == "apart":
        layer.mlp.experts = nn.ModuleList(mlp() for _ in range(EXPERTS))
    if "stack" in experts:
        layer.mlp.experts = stacks = nn.Module()
        if experts == "stacked":
            stacks.num_experts = EXPERTS
        stacks.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH))
        stacks.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
    model, inner = nn.Module(), nn.Module()
    inner.embed_tokens = nn.Embedding(config["vocab_size"], WIDTH)
    inner.layers, inner.norm = nn.ModuleList([layer]), norm()
    model.model, model.lm_head = inner, linear(config["vocab_size"], WIDTH)
    return model.to(torch.bfloat16)


def is_hidden(layer: nn.Linear, name: str) -> bool:
    return name != "lm_head" and not name.endswith("mlp.gate")


def quantized(config: dict[str, Any], recipe: Any = "nvfp4", **options: Any) -> nn.Module:
    """A model whose weights one step has changed, so that amaxes are FP32 numbers."""
    model = quantize_model(model_of(config, **options), recipe, filter=is_hidden)
    optimizer = FP4Adam(model.parameters(), lr=1e-2)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, dtype=param.dtype)
    optimizer.step()
    return model


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Values of all tensors, multiplied by their scales, their types, and the metadata."""
    reader = gguf.GGUFReader(folder / "model.gguf")
    values, types = {}, {}
    for tensor in reader.tensors:
        types[tensor.name] = tensor.tensor_type.name
        decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values[tensor.name] = torch.from_numpy(np.array(decoded, dtype=np.float32))
    for name in [name for name in values if name.endswith(".scale")]:
        scale = values.pop(name)
        weight = f"{name.removesuffix('scale')}weight"
        values[weight] *= scale.view(-1, *[1] * 2) if values[weight].ndim > 2 else scale
    return values, types, {name: field.contents() for name, field in reader.fields.items()}


def paired(value: Tensor, heads: int) -> Tensor:
    """Row 2 i + j of each head is its row i + j n / 2: llama.cpp turns neighbors."""
    n = len(value) // heads
    order = [h * n + i + j * n // 2 for h in range(heads) for i in range(n // 2) for j in (0, 1)]
    return value[order]


ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def expected_of(model: nn.Module, config: dict[str, Any], layer: dict[str, str]) -> dict:
    """The values of a dense model, or of what is dense in it, under llama.cpp's names."""
    names = {f"blk.0.{ours}": f"model.layers.0.{theirs}" for ours, theirs in layer.items()}
    names |= {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
    }
    values = {}
    for ours, theirs in names.items():
        for kind, param in model.get_submodule(theirs).named_parameters():
            is_quantized = isinstance(param, QuantizedTensor)
            value = param.dequantize(torch.bfloat16) if is_quantized else param
            value = value.detach().float()
            if config["architectures"] == ["LlamaForCausalLM"] and ours.endswith(("_q", "_k")):
                value = paired(value, HEADS if ours.endswith("_q") else KV_HEADS)
            values[f"{ours}.{kind}"] = value
    return values


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        # Tensors in high precision are in BF16 as well.
        assert torch.equal(actual[name].bfloat16().float(), value), name


@pytest.mark.parametrize("config", [CONFIG, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize(
    "recipe", [*FORMATS, NVFP4Quantizer(two_dimensional=False, columnwise=False)], ids=str
)
def test_values_are_those_of_training(recipe, config, tmp_path):
    model = quantized(config, recipe)
    export_checkpoint(model, tmp_path, "gguf", config=config)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    values, types, _ = read(tmp_path)
    norms = NORMS if config is QWEN3 else {}
    assert_same(values, expected_of(model, config, {**ATTENTION, **MLP, **norms}))
    assert types["blk.0.attn_q.weight"] == FORMATS.get(recipe, "NVFP4")
    assert types["token_embd.weight"] == types["output.weight"] == "BF16"
    assert {types[name] for name in types if "norm" in name or "scale" in name} == {"F32"}


def test_nvfp4_takes_36_bytes_for_64_weights(tmp_path):
    model = quantized(CONFIG)
    export_checkpoint(model, tmp_path, "gguf", config=CONFIG)
    for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors:
        if tensor.tensor_type.name == "NVFP4":
            assert tensor.data.nbytes * 64 == math.prod(tensor.shape) * 36


def test_biases_are_paired_as_weights_are(tmp_path):
    config = {**CONFIG, "attention_bias": True}
    model = quantized(config)
    export_checkpoint(model, tmp_path, "gguf", config=config)
    values, _, _ = read(tmp_path)
    assert "blk.0.attn_q.bias" in values
    assert_same(values, expected_of(model, config, {**ATTENTION, **MLP}))


@pytest.mark.parametrize("experts", ["plain stacks", "stacked", "apart"])
def test_experts_are_stacked(experts, tmp_path):
    model = quantized(MOE, experts=experts)
    export_checkpoint(model, tmp_path, "gguf", config=MOE)
    values, types, fields = read(tmp_path)
    expected = expected_of(model, MOE, {**ATTENTION, **NORMS, "ffn_gate_inp": "mlp.gate"})
    module = model.model.layers[0].mlp.experts
    if experts != "apart":
        whole, down = (
            (param.dequantize(torch.bfloat16) if isinstance(param, QuantizedTensor) else param)
            .detach()
            .float()
            for param in (module.gate_up_proj, module.down_proj)
        )
        gate, up = whole.chunk(2, 1)
        stacks = {"gate": gate, "up": up, "down": down}
    else:
        stacks = {
            name: torch.stack(
                [getattr(e, f"{name}_proj").weight.dequantize(torch.bfloat16) for e in module]
            )
            for name in ("gate", "up", "down")
        }
    assert_same(values, expected | {f"blk.0.ffn_{n}_exps.weight": v for n, v in stacks.items()})
    assert types["blk.0.ffn_gate_inp.weight"] == "F32"
    assert types["blk.0.ffn_up_exps.weight"] == ("BF16" if "plain" in experts else "NVFP4")
    assert fields["qwen3moe.expert_count"] == EXPERTS
    assert fields["qwen3moe.expert_used_count"] == 2
    assert fields["qwen3moe.expert_feed_forward_length"] == HIDDEN


def test_tied_embeddings_are_there_once(tmp_path):
    model = quantized(CONFIG)
    model.lm_head.weight = model.model.embed_tokens.weight
    export_checkpoint(model, tmp_path, "gguf", config=CONFIG)
    values, _, _ = read(tmp_path)
    assert "token_embd.weight" in values and "output.weight" not in values


def test_metadata(tmp_path):
    export_checkpoint(quantized(CONFIG), tmp_path, "gguf", config=CONFIG)
    _, _, fields = read(tmp_path)
    expected = {
        "general.architecture": "llama",
        "general.file_type": gguf.LlamaFileType.MOSTLY_NVFP4,
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": HIDDEN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.key_length": HEAD,
        "llama.attention.value_length": HEAD,
        "llama.rope.dimension_count": HEAD,
        "llama.rope.freq_base": 50000.0,
        "llama.vocab_size": 256,
        "tokenizer.ggml.model": "none",
    }
    assert {name: fields[name] for name in expected} == expected
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    # Activations were not quantized in training.
    names, allowed = (fields[f"general.tensor_extra.{key}"] for key in ("name", "prec_a4"))
    assert len(names) == 7 and allowed == [False] * 7


def test_llama_3_turns_positions_more_slowly(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = {**CONFIG, "rope_parameters": rope}
    export_checkpoint(quantized(config), tmp_path, "gguf", config=config)
    factors = read(tmp_path)[0]["rope_freqs.weight"]
    # Wave lengths up to 2,048 positions stay, those from 8,192 on become 8 times as long.
    waves = 2 * math.pi * 500000.0 ** (torch.arange(0, HEAD, 2) / HEAD)
    assert torch.equal(factors[waves < 2048], torch.ones(int((waves < 2048).sum())))
    assert torch.equal(factors[waves > 8192], torch.full([int((waves > 8192).sum())], 8.0))
    between = factors[(waves > 2048) & (waves < 8192)]
    smooth = (8192 / waves[(waves > 2048) & (waves < 8192)] - 1) / 3
    torch.testing.assert_close(between, 1 / ((1 - smooth) / 8 + smooth))
    assert len(between)


# Vocabularies


def test_bytes_as_a_vocabulary(tmp_path):
    config = {**CONFIG, "vocab_size": 258, "eos_token_id": [256, 257]}
    export_checkpoint(quantized(config), tmp_path, "gguf", config=config, tokenizer="bytes")
    _, _, fields = read(tmp_path)
    tokens = fields["tokenizer.ggml.tokens"]
    assert len({*tokens}) == 258 and tokens[65] == "A" and tokens[32] == "\u0120"
    assert tokens[256:] == ["[PAD256]", "[PAD257]"]
    assert fields["tokenizer.ggml.token_type"] == [1] * 256 + [5] * 2
    assert fields["tokenizer.ggml.eos_token_id"] == 256
    assert fields["tokenizer.ggml.add_bos_token"] is False


def vocabulary(path: Path, size: int) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(size)])
    writer.add_token_scores([0.5] * size)
    writer.add_token_types([1] * size)
    writer.add_bos_token_id(3)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_the_vocabulary_of_another_file(tmp_path):
    other = vocabulary(tmp_path / "vocab.gguf", 250)
    for path in (other, str(other)):
        out = tmp_path / type(path).__name__
        export_checkpoint(quantized(CONFIG), out, "gguf", config=CONFIG, tokenizer=path)
        _, _, fields = read(out)
        tokens = fields["tokenizer.ggml.tokens"]
        assert tokens[:250] == [f"<{i}>" for i in range(250)] and len(tokens) == 256
        assert fields["tokenizer.ggml.scores"] == [0.5] * 250 + [-10000.0] * 6
        assert fields["tokenizer.ggml.bos_token_id"] == 3
        assert fields["tokenizer.chat_template"] == "{{ messages }}"
        assert fields["general.architecture"] == "llama"


# What is refused

PLAIN_SCALES = Float8BlockQuantizer(force_pow_2_scales=False)
REFUSED = [
    ({}, {"num_hidden_layers": 0}, "layers.0.* for which llama.cpp has no name"),
    ({}, {"architectures": ["GPT2LMHeadModel"]}, "architectures must be one of LlamaForCausalLM"),
    ({}, {"rms_norm_eps": None}, "config must have 'rms_norm_eps'"),
    ({}, {"use_sliding_window": True}, "use_sliding_window must be False .* got True"),
    ({}, {"hidden_act": "gelu"}, "hidden_act must be 'silu' .* got 'gelu'"),
    ({}, {"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be one of .* got 'yarn'"),
    ({}, {**MOE, "norm_topk_prob": False}, "norm_topk_prob must be True"),
    ({}, {**MOE, "decoder_sparse_step": 2}, "decoder_sparse_step must be 1"),
    ({}, {"vocab_size": 300}, "got one with 300 rows of 'model.embed_tokens.weight'"),
    ({}, {"head_dim": 64}, "got one with 256 rows of 'model.layers.0.self_attn.q_proj.weight'"),
    ({}, {"num_key_value_heads": 4}, "k_proj.weight', which has 64; correct"),
    ({"recipe": PLAIN_SCALES}, {}, "scales that are powers of two"),
]


def assert_refused(model: nn.Module, folder: Path, match: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=match):
        export_checkpoint(model, folder / "refused", "gguf", **{"config": CONFIG, **options})
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize(("options", "changes", "match"), REFUSED)
def test_configurations_that_are_refused(options, changes, match, tmp_path):
    assert_refused(quantized(CONFIG, **options), tmp_path, match, config={**CONFIG, **changes})


ADVICE = {
    "nvfp4": "computes with NVFP4 in llama, qwen3, .* its converter on layout 'compressed-tensors'",
    "mxfp4": "its converter on layout 'mxfp4' for gpt-oss, else on .* export_masters writes",
    "mxfp8": "its converter on the folder that export_masters writes, or for Float8Block on",
    "float8block": "that export_masters writes, or for Float8Block on layout 'fp8'",
}


@pytest.mark.parametrize("recipe", ADVICE)
@pytest.mark.parametrize(
    "changes", [{"architectures": ["GemmaForCausalLM"]}, {"rope_parameters": {"type": "yarn"}}]
)
def test_advice_is_by_format(recipe, changes, tmp_path):
    """llama.cpp answers NaN for NVFP4 in other graphs, and has no type for MXFP8."""
    match = f"{ADVICE[recipe]}"
    model = quantized(CONFIG, recipe)
    assert_refused(model, tmp_path, match, config={**CONFIG, **changes})
    if recipe != "nvfp4":
        with pytest.raises(ValueError) as refused:
            export_checkpoint(model, tmp_path, "gguf", config={**CONFIG, **changes})
        assert "compressed-tensors" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:(sides of Float8Block weights|rows of q, k, gate):UserWarning")
@pytest.mark.parametrize("recipe", ["mxfp8", "float8block"])
def test_the_advice_for_float8block_is_taken_and_that_of_others_refused(recipe, tmp_path):
    model = quantized(CONFIG, recipe)
    if recipe == "float8block":
        export_checkpoint(model, tmp_path, "fp8", config=CONFIG)
        assert [*tmp_path.glob("*.safetensors")]
    else:
        with pytest.raises(ValueError, match="layout"):
            export_checkpoint(model, tmp_path, "fp8", config=CONFIG)


def test_models_that_are_refused(tmp_path):
    model = quantized(CONFIG)
    model.model.register_buffer("extra", torch.zeros(3))
    assert_refused(model, tmp_path, "got 'model.extra', for which llama.cpp has no name")
    model = quantized(CONFIG)
    model.model.norm.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
    assert_refused(model, tmp_path, "'model.norm.weight' must be in one of torch.float32")
    model = quantized(MOE, experts="apart")
    del model.model.layers[0].mlp.experts[1]
    model.model.layers[0].mlp.experts.add_module("7", mlp().bfloat16())
    assert_refused(model, tmp_path, "experts must be numbered from 0 on", config=MOE)
    model = model_of(MOE, experts="apart")
    quantize_model(model, "nvfp4", filter=lambda layer, name: name.endswith("experts.0.up_proj"))
    assert_refused(model, tmp_path, "experts must be alike to be stacked", config=MOE)
    model = model_of(CONFIG)
    model.model.layers[0].mlp.up_proj = linear(HIDDEN, WIDTH, bias=True)
    quantize_model(model, "nvfp4", filter=is_hidden)
    assert_refused(model, tmp_path, "layers of an MLP must have no bias")
    model = model_of(CONFIG)
    model.model.layers[0].mlp.down_proj = linear(WIDTH, 48)
    quantize_model(model, "nvfp4", filter=is_hidden)
    assert_refused(model, tmp_path, "must have multiples of 64 columns .* got 48 for")


def test_vocabularies_that_are_refused(tmp_path):
    model = quantized(CONFIG)
    other = vocabulary(tmp_path / "vocab.gguf", 300)
    (tmp_path / "out").mkdir()
    match = "tokenizer must have at most 256 tokens"
    assert_refused(model, tmp_path / "out", match, tokenizer=other)
    export_checkpoint(model, tmp_path / "without", "gguf", config=CONFIG)
    (without,) = (tmp_path / "without").iterdir()
    match = "and at least one, got 0 in"
    assert_refused(model, tmp_path / "out", match, tokenizer=without)
    with pytest.raises(ValueError, match="tokenizer must be None for layout 'modelopt'"):
        export_checkpoint(model, tmp_path / "out", "modelopt", tokenizer="bytes")


def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path):
    model = quantized(CONFIG)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 5_000, 60_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(OSError, match="must be written whole"):
                export_checkpoint(model, tmp_path / "out", "gguf", config=CONFIG)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [*tmp_path.iterdir()] == []
    export_checkpoint(model, tmp_path / "out", "gguf", config=CONFIG)
    content = (tmp_path / "out/model.gguf").read_bytes()
    with pytest.raises(FileExistsError, match="must not hold a model.gguf yet"):
        export_checkpoint(model, tmp_path / "out", "gguf", config=CONFIG)
    assert (tmp_path / "out/model.gguf").read_bytes() == content


def export_shards(rank: int, folder: str) -> None:
    for is_sharded in (False, True):
        model = quantize_model(model_of(CONFIG), "nvfp4", filter=is_hidden)
        if is_sharded:
            fully_shard(model, mesh=all_ranks())
        name = "sharded" if is_sharded else f"whole{rank}"
        export_checkpoint(model, f"{folder}/{name}", "gguf", config=CONFIG)
    with pytest.raises(FileExistsError, match=r"must not hold a model\.gguf"):
        export_checkpoint(model, f"{folder}/sharded", "gguf", config=CONFIG)


@pytest.mark.exhaustive
def test_shards_give_the_same_file(tmp_path):
    run_ranks(export_shards, 3, str(tmp_path))
    files = [(tmp_path / name / "model.gguf").read_bytes() for name in ("whole0", "sharded")]
    assert files[0] == files[1]
