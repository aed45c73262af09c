"""Models that transformers, compressed-tensors and torchao have quantized, trained in place."""

import copy
import json
import re
from pathlib import Path
from typing import Any

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
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.inference_workflow import (
    MXDynamicActivationMXWeightConfig,
    NVFP4WeightOnlyConfig,
)
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.quantization import Float8WeightOnlyConfig
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TorchAoConfig,
    Trainer,
    TrainingArguments,
)
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.trainer_utils import validate_quantization_for_training

from fp4adam import (
    Float8BlockQuantizer,
    FP4Adam,
    MXFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    Recipe,
    dequantize_model,
    export_checkpoint,
    import_checkpoint,
    make_trainable,
    quantize_model,
)
from helpers import assert_identical
from ranks import RankError, all_ranks, run_ranks

pytestmark = [
    # transformers, for a checkpoint that is read with another configuration of its quantizer.
    pytest.mark.filterwarnings("ignore:You passed `quantization_config` or equivalent parameters"),
    # Small models have no scale groups.
    pytest.mark.filterwarnings("ignore:weights that are served as one matrix should have one amax"),
]

SIZES = dict(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
TOKENS = torch.arange(64).view(2, 32) * 7 % 256
# Of transformers, and of compressed-tensors; NVFP4 has scales of activations as well.
LAYOUTS = ["fp8", "fp8 ue8m0", "fp8 experts"]
LAYOUTS += ["NVFP4", "NVFP4A16", "MXFP4A16", "MXFP8A16", "FP8_BLOCK"]


@pytest.fixture(autouse=True)
def fp8_without_a_gpu(monkeypatch):
    """transformers decodes FP8 checkpoints where it has no kernels; here it keeps the bytes."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)


def build(experts: bool = False) -> nn.Module:
    torch.manual_seed(0)
    if experts:
        config = Qwen3MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128
        )
        return Qwen3MoeForCausalLM(config).bfloat16()
    return Qwen3ForCausalLM(Qwen3Config(**SIZES)).bfloat16()


def compress(model: nn.Module, scheme: str, folder: Path, **options: Any) -> None:
    compressor = compress_in_memory(model, scheme, **options)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def compress_in_memory(model: nn.Module, scheme: str, **options: Any) -> ModelCompressor:
    """As llm-compressor does without data: scales from amaxes, then compressed-tensors' codes."""
    group = preset_name_to_scheme(scheme, ["Linear"])
    if scheme != "NVFP4":
        group = QuantizationScheme(targets=["Linear"], weights=group.weights)
    weights = group.weights
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"], **options)
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
    build(kind == "experts").save_pretrained(folder / "plain")
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


def trainable(folder: Path) -> Any:
    """A loaded model; compressed-tensors keeps scales in BF16, which holds powers of two."""
    is_rounded = "naive-quantized" in (folder / "config.json").read_text()
    return make_trainable(
        load(folder), Float8BlockQuantizer(columnwise=False) if is_rounded else None
    )


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(model: nn.Module, steps: int, optimizer: FP4Adam | None = None) -> list[float]:
    optimizer = optimizer or FP4Adam(model.parameters(), lr=1e-3)
    model.train()
    losses = []
    for _ in range(steps):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_shards(rank: int, folder: Path) -> None:
    """Two steps of a loaded model that ``fully_shard`` shards, and of one that is whole."""
    FineGrainedFP8HfQuantizer.validate_environment = lambda *_, **__: None
    whole, sharded = trainable(folder), trainable(folder)
    modules = [*sharded.model.layers, sharded]
    for module in modules:
        fully_shard(module, mesh=all_ranks())
    assert train(sharded, 2) == train(whole, 2)
    before = state(whole)
    for module in modules:
        module.unshard()
    for (name, param), own in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        gathered, expected = (
            x.detach().dequantize() if isinstance(x, QuantizedTensor) else x.detach()
            for x in (param, own)
        )
        assert_identical(gathered, expected, name)
    assert_identical(state(whole), before)


def test_shards_have_the_bits_of_one_process(folder):
    if "nvfp4" in (folder / "config.json").read_text():  # its blocks are parts of rows
        with pytest.raises(RankError, match="two_dimensional=True to be sharded"):
            run_ranks(train_shards, 2, folder)
    else:
        run_ranks(train_shards, 2, folder)


def test_load_train_save_and_load_again(folder, tmp_path):
    model = load(folder)
    before, places = state(model), {n: p.data_ptr() for n, p in model.named_parameters()}
    recipe = quantizer_of(trainable(folder))
    assert make_trainable(model, recipe) is model
    assert_identical(dict(sorted(state(model).items())), dict(sorted(before.items())))
    quantized = {n: p for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
    assert len(quantized) in (12, 14) and all(p.requires_grad for p in quantized.values())
    for name, param in quantized.items():
        stored = [name, name.replace("weight", "weight_packed")]
        assert param.data_ptr() in [places.get(n) for n in stored], name
        assert type(model.get_submodule(name.rpartition(".")[0])) is not nn.Module
    validate_quantization_for_training(model)
    assert not model.is_quantized
    frozen = "model.layers.0.self_attn.o_proj"
    model.get_submodule(frozen).weight.requires_grad_(False)
    losses = train(model, 5)
    assert losses[-1] < losses[0] - 0.5
    model.save_pretrained(tmp_path / "out")
    again = load(tmp_path / "out")
    trained = state(model)
    assert_identical(dict(sorted(state(again).items())), dict(sorted(trained.items())))
    changed = {n for n in before if not torch.equal(*(bits(s[n]) for s in (before, trained)))}
    assert not any(name.startswith(frozen) for name in changed)
    assert {n.rpartition(".")[0] for n in changed} >= {
        n.rpartition(".")[0] for n in quantized if not n.startswith(frozen)
    }
    files = load_file(folder / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert {n: (x.shape, x.dtype) for n, x in files[0].items()} == {
        n: (x.shape, x.dtype) for n, x in files[1].items()
    }
    configs = [json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "out")]
    described = [config.pop("quantization_config") for config in configs]
    assert configs[0] == configs[1]
    for key in ("quant_method", "weight_block_size", "scale_fmt", "format"):
        assert described[0].get(key) == described[1].get(key)
    assert train(make_trainable(again, recipe), 1)[0] == pytest.approx(train(model, 1)[0], abs=1e-3)
    model.load_state_dict(before)
    assert_identical(dict(sorted(state(model).items())), dict(sorted(before.items())))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def test_values_are_those_of_transformers(folder):
    """It decodes FP8 checkpoints and compressed ones in its own way."""
    model = make_trainable(load(folder)).eval()
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    kind = FineGrainedFP8Config if config["quant_method"] == "fp8" else CompressedTensorsConfig
    decoded = load(folder, quantization_config=kind(dequantize=True)).eval()
    names = [n for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)]
    for name in names:
        expected = decoded.get_parameter(name)
        assert torch.equal(model.get_parameter(name).dequantize(torch.bfloat16), expected), name
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, decoded(TOKENS).logits)


def test_a_checkpoint_read_on_the_meta_device(folder, tmp_path):
    """The bytes, and the bits of training, are those of the loaded model."""
    loaded = trainable(folder)
    config = copy.deepcopy(loaded.config)
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    import_checkpoint(model, folder, quantizer_of(loaded))
    assert train(model, 2) == train(loaded, 2)
    assert_identical(
        {n: p.detach() for n, p in model.named_parameters()},
        {n: p.detach() for n, p in loaded.named_parameters()},
    )
    layout = loaded.config.quantization_config.to_dict()["quant_method"]
    if not any("experts" in name for name, _ in model.named_parameters()):
        export_checkpoint(loaded, tmp_path / "out", str(getattr(layout, "value", layout)))
        make_trainable(again := load(tmp_path / "out"))
        assert_identical(
            {n: p.detach().dequantize() for n, p in quantized_of(again).items()},
            {n: p.detach().dequantize() for n, p in quantized_of(loaded).items()},
        )


def quantizer_of(model: nn.Module) -> Quantizer:
    return next(iter(quantized_of(model).values())).quantizer


def quantized_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)}


def test_the_trainer_resumes_with_the_same_bits(folder, tmp_path):
    names = (folder / "config.json").read_text()
    if "num_experts" in names or "nvfp4" in names:
        pytest.skip(
            "transformers' Trainer does not load stacks of experts; NVFP4's layout does not store "
            "the last bit of the amax"
        )

    def fit(steps: int, resume: bool = False) -> Any:
        model = trainable(folder)
        trainer = Trainer(
            model,
            TrainingArguments(
                tmp_path / "run",
                max_steps=steps,
                save_steps=2,
                per_device_train_batch_size=2,
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                lr_scheduler_type="constant",
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in TOKENS] * 4,
            optimizers=(FP4Adam(model.parameters(), lr=1e-3), None),
        )
        trainer.train(resume_from_checkpoint=resume)
        return model

    whole = fit(4)
    (tmp_path / "run" / "checkpoint-4").rename(tmp_path / "aside")
    resumed = fit(4, resume=True)
    assert_identical(state(resumed), state(whole))


def test_a_recipe_for_matmuls(folder):
    model = load(folder)
    kind = type(quantizer_of(trainable(folder)))
    if kind is not Float8BlockQuantizer:
        with pytest.raises(ValueError, match="quantizer must be a"):
            make_trainable(model, Float8BlockQuantizer())
        assert model.is_quantized and not quantized_of(model)
        return
    if any("experts" in name for name, _ in model.named_parameters()):
        pytest.skip("torch has no grouped product of blocks of 128x128")
    recipe = Recipe(Float8BlockQuantizer(), activations=True, gradients=True, emulate=True)
    losses = train(make_trainable(model, recipe), 3)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8", "mxfp4"])
def test_tensors_of_torchao(kind):
    """nn.Linear of any module; torchao has no backward pass for MXTensor."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 96, dtype=torch.bfloat16)
    value = layer.weight.detach()
    if kind == "nvfp4":
        amax = value.abs().max().float()
        theirs = NVFP4Tensor.to_nvfp4(value, per_tensor_scale=amax / (448 * 6))
    else:
        dtype = torch.float8_e4m3fn if kind == "mxfp8" else torch.float4_e2m1fn_x2
        theirs = MXTensor.to_mx(value, dtype, 32)
    layer.weight = nn.Parameter(theirs, requires_grad=False)
    model = nn.Sequential(layer)
    place, expected = theirs.qdata.data_ptr(), theirs.dequantize(torch.float32)
    make_trainable(model)
    assert model[0].weight.data_ptr() == place
    torch.testing.assert_close(
        model[0].weight.dequantize(torch.float32), expected, rtol=1e-6, atol=0
    )
    optimizer = FP4Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    stored = model.state_dict()["0.weight"]
    assert type(stored) is type(theirs) and stored.qdata.data_ptr() == place
    actual = model[0].weight.dequantize(torch.float32)
    torch.testing.assert_close(stored.dequantize(torch.float32), actual, rtol=1e-6, atol=0)
    assert (actual < expected).float().mean() > 0.5
    saved = copy.deepcopy(model.state_dict())
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    model.load_state_dict(saved)
    assert_identical(model[0].weight.detach(), before)


E2M1 = torch.float4_e2m1fn_x2
# How transformers quantizes with torchao, and how the scales of weights are rounded then.
TORCHAO = {
    "nvfp4": NVFP4WeightOnlyConfig(),
    "mxfp8": MXDynamicActivationMXWeightConfig(),
    "mxfp4": MXDynamicActivationMXWeightConfig(activation_dtype=E2M1, weight_dtype=E2M1),
}


@pytest.mark.parametrize("kind", TORCHAO)
def test_models_that_transformers_loads_with_torchao(kind, tmp_path):
    build().save_pretrained(tmp_path / "plain")
    config = TorchAoConfig(TORCHAO[kind])
    load(tmp_path / "plain", quantization_config=config).save_pretrained(tmp_path / "hub")
    model = load(tmp_path / "hub")
    layer = model.model.layers[1].self_attn.o_proj
    place = layer.weight.qdata.data_ptr()
    make_trainable(model)
    validate_quantization_for_training(model)
    assert not model.is_quantized and len(quantized_of(model)) == 14
    assert layer.weight.data_ptr() == place
    if kind == "mxfp4":
        assert layer.weight.quantizer.scale_rounding == "up"
    layer.weight.requires_grad_(False)
    before = layer.weight.detach().clone()
    losses = train(model, 3)
    assert losses[-1] < losses[0] - 0.3
    assert_identical(layer.weight.detach(), before)


@pytest.mark.parametrize("kind", TORCHAO)
def test_transformers_saves_what_was_trained_in_tensors_of_torchao(kind, tmp_path):
    build().save_pretrained(tmp_path / "plain")
    config = TorchAoConfig(TORCHAO[kind])
    load(tmp_path / "plain", quantization_config=config).save_pretrained(tmp_path / "hub")
    train(model := make_trainable(load(tmp_path / "hub")), 1)
    # The conversion that it would revert has no inverse.
    model.save_pretrained(tmp_path / "out", save_original_format=False)
    again = make_trainable(load(tmp_path / "out"))
    for (name, param), expected in zip(again.named_parameters(), model.parameters(), strict=True):
        if isinstance(param, QuantizedTensor):
            stored, wanted = (p.detach().storage_tensors() for p in (param, expected))
            if "_amax" in wanted:  # torchao has it as a scale, which is rounded
                torch.testing.assert_close(stored.pop("_amax"), wanted.pop("_amax"))
            assert_identical(stored, wanted, name)
        else:
            assert_identical(param.detach(), expected.detach(), name)


def test_torchao_tensors_that_are_refused(tmp_path):
    build().save_pretrained(tmp_path)
    config = TorchAoConfig(Float8WeightOnlyConfig())
    with pytest.raises(ValueError, match="'model.layers.0.* got a Float8Tensor; dequantize it"):
        make_trainable(load(tmp_path, quantization_config=config))
    weight = build().model.layers[0].mlp.up_proj.weight.detach()
    layer = nn.Linear(256, 384)
    layer.weight = nn.Parameter(NVFP4Tensor.to_nvfp4(weight), requires_grad=False)
    with pytest.raises(ValueError, match="'weight': per_tensor_scale .* got None"):
        make_trainable(layer)


def test_scales_of_activations_stay(tmp_path):
    """In what save_pretrained writes; exports describe weights alone as quantized."""
    build().save_pretrained(tmp_path / "plain")
    config = FineGrainedFP8Config(activation_scheme="static")
    model = load(tmp_path / "plain", quantization_config=config)
    name = "model.layers.0.mlp.up_proj.activation_scale"
    model.get_parameter(name).data.fill_(0.5)
    before = state(model)
    make_trainable(model)
    assert_identical(dict(sorted(state(model).items())), dict(sorted(before.items())))
    train(model, 1)
    model.save_pretrained(tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors")[name] == 0.5
    export_checkpoint(model, tmp_path / "export", "fp8")
    stored = load_file(tmp_path / "export/model.safetensors")
    assert stored.keys() == {name for name in before if not name.endswith("activation_scale")}


def test_scales_of_the_cache_stay(tmp_path):
    """Whoever reads what is saved quantizes its cache with them; training does not."""
    scheme = dict(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
    quantized = build()
    compress_in_memory(quantized, "MXFP4A16", kv_cache_scheme=scheme)
    for name, param in quantized.named_parameters():
        if name.endswith(("k_scale", "v_scale")):
            param.data.fill_(0.5)
    quantized.save_pretrained(tmp_path / "hub")
    ModelCompressor.from_pretrained_model(quantized).update_config(tmp_path / "hub")
    model = load(tmp_path / "hub")
    before = state(model)
    assert before["model.layers.1.self_attn.k_scale"] == 0.5
    assert model.model.layers[1].self_attn._forward_pre_hooks
    make_trainable(model)
    assert not model.model.layers[1].self_attn._forward_pre_hooks
    assert_identical(dict(sorted(state(model).items())), dict(sorted(before.items())))
    train(model, 1)
    model.save_pretrained(tmp_path / "out")
    assert_identical(
        dict(sorted(state(load(tmp_path / "out")).items())), dict(sorted(state(model).items()))
    )
    export_checkpoint(model, tmp_path / "export")
    stored = load_file(tmp_path / "export/model.safetensors")
    assert stored.keys() == {name for name in before if not name.endswith(("k_scale", "v_scale"))}


@pytest.mark.parametrize("scheme", ["FP8", "MXFP4A16"])
def test_what_users_have_at_modules(scheme, tmp_path):
    """Hooks, modes and recomputation go on; optimizers with the old parameters are refused."""
    if scheme == "FP8":
        build().save_pretrained(tmp_path)
        model = load(tmp_path, quantization_config=FineGrainedFP8Config())
        with pytest.raises(
            TypeError, match="float8_e4m3fn; call quantize_model, or make_trainable"
        ):
            FP4Adam(model.parameters())
    else:
        compress(build(), scheme, tmp_path)
        model = load(tmp_path)
    seen = []
    layer = model.model.layers[0].mlp.up_proj
    handles = [
        layer.register_forward_pre_hook(lambda *_: seen.append("before")),
        layer.register_forward_hook(lambda *_, **__: seen.append("after"), with_kwargs=True),
        layer.register_full_backward_hook(lambda *_: seen.append("back")),
    ]
    model.gradient_checkpointing_enable()
    make_trainable(model.train())
    assert model.model.layers[0].mlp.up_proj.training
    assert "weight=" in repr(model.model.layers[0].mlp.up_proj)
    model(TOKENS, labels=TOKENS).loss.backward()
    # The forward pass runs again in the backward pass.
    assert seen == ["before", "after", "before", "after", "back"]
    for handle in handles:
        handle.remove()
    model.zero_grad()
    twin = copy.deepcopy(model)
    before = state(model)
    losses = train(twin, 2)
    assert len(seen) == 5
    assert_identical(state(model), before)
    model.gradient_checkpointing_disable()
    assert train(model, 2) == losses
    assert_identical(state(model), state(twin))


def test_adapters_beside_trainable_weights(tmp_path):
    """PEFT takes the model as one in high precision, and freezes it."""
    compress(build(), "MXFP4A16", tmp_path)
    model = make_trainable(load(tmp_path))
    before = state(model)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    losses = train(adapted, 4)
    assert losses[-1] < losses[0]
    assert_identical(state(adapted.unload()), before)
    with pytest.raises(ValueError, match="must be without adapters .* add them afterwards"):
        loaded = load(tmp_path)
        make_trainable(get_peft_model(loaded, LoraConfig(r=4, target_modules=["lm_head"])))


@pytest.mark.parametrize("change", ["cast", "forward", "nan"])
def test_a_model_that_is_refused_is_as_it_was(change, tmp_path):
    """Whatever has been done to it since it was loaded."""
    if change == "forward":
        compress(build(), "MXFP4A16", tmp_path)
        model = load(tmp_path)
        model(TOKENS)
        message = "got no weight_packed; load it again, and call make_trainable at once"
    else:
        build().save_pretrained(tmp_path)
        model = load(tmp_path, quantization_config=FineGrainedFP8Config())
        if change == "cast":
            model.to(torch.bfloat16)
            message = "got torch.bfloat16; load it again, and call make_trainable at once"
        else:
            model.model.layers[1].mlp.up_proj.weight_scale_inv.data[1, 0] = float("nan")
            message = "layer 'model.layers.1.mlp.up_proj': weight_scale_inv .* got nan"

    def everything() -> list[Any]:
        hooks = [len(vars(m)[k]) for m in model.modules() for k in vars(m) if k.endswith("_hooks")]
        objects = [*model.modules(), *model.parameters(), model.hf_quantizer]
        return [*map(id, objects), model.is_quantized, hooks]

    before, values = everything(), {name: bits(x) for name, x in state(model).items()}
    with pytest.raises(TypeError if change == "cast" else ValueError, match=message):
        make_trainable(model)
    assert everything() == before
    assert_identical({name: bits(x) for name, x in state(model).items()}, values)


def fp8_model(folder: Path) -> Any:
    """A model that transformers quantizes while it loads it."""
    if not folder.exists():
        build().save_pretrained(folder)
    return make_trainable(load(folder, quantization_config=FineGrainedFP8Config()))


CODES = "model.layers.1.mlp.up_proj.weight"
DAMAGED_STATES = {
    "no scales": (lambda codes, scale: (codes, None), "the scales of its codes, got .*up_proj"),
    "few scales": (
        lambda codes, scale: (codes, scale[:1]),
        r"must have shape \(3, 2\) for a weight",
    ),
    "few rows": (lambda codes, scale: (codes[:128], scale), r"must have shape \(384, 256\) for"),
    "BF16": (lambda codes, scale: (codes.bfloat16(), scale), "must be torch.float8_e4m3fn, got"),
    "NaN": (lambda codes, scale: (codes, scale * torch.nan), "up_proj.weight': .* got nan"),
}


def test_state_dicts_that_do_not_fit(tmp_path):
    """Codes without their scales would be loaded as values, small tensors padded with zeros."""
    model = fp8_model(tmp_path / "plain")
    before = state(model)
    for damage, match in DAMAGED_STATES.values():
        damaged = {name: torch.zeros_like(value) for name, value in before.items()}
        parts = damage(before[CODES], before[f"{CODES}_scale_inv"])
        damaged |= dict(zip((CODES, f"{CODES}_scale_inv"), parts, strict=True))
        damaged = {name: value for name, value in damaged.items() if value is not None}
        with pytest.raises((ValueError, TypeError), match=match):
            model.load_state_dict(damaged, strict=False)
        assert_identical(state(model), before)
    # Parts of a state dict are torch's own matter, and so are values in high precision.
    own = {name: value for name, value in before.items() if "up_proj" not in name}
    assert model.load_state_dict(own, strict=False).missing_keys
    model.load_state_dict(build().state_dict())
    weight = model.get_parameter(CODES)
    assert weight.has_bytes_of(weight.quantizer.quantize(build().get_parameter(CODES).detach()))


def test_dequantized_models_are_saved_as_such(tmp_path):
    """config.json describes FP8 weights as long as there are some."""
    model = fp8_model(tmp_path / "plain")
    train(model, 1)
    dequantize_model(model, lambda _, name: name.endswith("q_proj"))
    with pytest.warns(UserWarning, match="q_proj.weight' are plain now, and config.json will not"):
        model.save_pretrained(tmp_path / "mixed")
    export_checkpoint(model, tmp_path / "export", "fp8")
    dequantize_model(model).save_pretrained(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    plain = load(tmp_path / "out")
    assert not [m for m in plain.modules() if type(m).__name__ == "FP8Linear"]
    assert_identical(state(plain), state(model))
    some = load(tmp_path / "export").model.layers[1].self_attn
    assert [type(some.q_proj).__name__, type(some.k_proj).__name__] == ["Linear", "FP8Linear"]


@pytest.mark.filterwarnings("ignore:experts in the layout 'compressed-tensors'")
@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4"])
def test_experts_that_transformers_has_decoded(weight_format, tmp_path):
    export_checkpoint(quantize_model(build(experts=True), weight_format), tmp_path / "all")
    model = load(tmp_path / "all")
    with pytest.raises(ValueError, match="got 'model.layers.0.mlp.experts.down_proj', which"):
        make_trainable(model)
    assert model.is_quantized and not quantized_of(model)


@pytest.mark.filterwarnings("ignore:sides of Float8Block weights should be multiples of 128")
def test_shapes_and_ties_of_other_models(tmp_path):
    """Tied embeddings, biases, sides that are no multiples of blocks."""
    sizes = dict(hidden_size=192, intermediate_size=320, head_dim=40, attention_bias=True)
    config = Qwen3Config(**{**SIZES, **sizes, "tie_word_embeddings": True})
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).bfloat16()
    export_checkpoint(quantize_model(model, "float8block"), tmp_path / "hub", "fp8")
    model = load(tmp_path / "hub")
    before = state(model)
    make_trainable(model)
    assert_identical(dict(sorted(state(model).items())), dict(sorted(before.items())))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    losses = train(model, 2)
    assert losses[1] < losses[0]
    assert not torch.equal(model.model.layers[0].self_attn.q_proj.bias, torch.zeros(160))
    model.save_pretrained(tmp_path / "out")
    assert_identical(
        dict(sorted(state(load(tmp_path / "out")).items())), dict(sorted(state(model).items()))
    )


def test_scales_that_a_dtype_would_round_are_saved_in_float32(folder, tmp_path):
    if "naive-quantized" not in (folder / "config.json").read_text():
        pytest.skip("only BF16 scales could be rounded, and this layout has none")
    model = make_trainable(load(folder))
    before = state(model)
    assert before["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.bfloat16
    train(model, 1)
    with pytest.warns(UserWarning, match="stored in float32, .* Float8BlockQuantizer"):
        model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.up_proj.weight_scale"]
    assert_identical(stored, model.model.layers[0].mlp.up_proj.weight._block_scale_inv)


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


def gpt_oss() -> nn.Module:
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    config = GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0)
    return GptOssForCausalLM(config).bfloat16()


def test_gpt_oss(tmp_path):
    """Stacks [experts, in, out] in memory, [experts, out, in] in the checkpoint."""
    plain = gpt_oss()
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
    with pytest.raises(ValueError, match="got none: transformers decodes FP8 and MXFP4"):
        make_trainable(load(tmp_path / "hub"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plain.config, dtype=torch.bfloat16)
    import_checkpoint(model, tmp_path / "hub")
    with torch.no_grad():
        assert torch.equal(model.eval()(TOKENS).logits, decoded.eval()(TOKENS).logits)
    export_checkpoint(model, tmp_path / "same", "mxfp4")
    assert_identical(load_file(tmp_path / "same/model.safetensors"), tensors)
    losses = train(model, 5)
    assert losses[-1] < losses[0] - 0.5
    export_checkpoint(model, tmp_path / "out", "mxfp4")
    again = load(tmp_path / "out")
    experts = model.model.layers[1].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        own = getattr(experts, name).dequantize(torch.bfloat16).transpose(1, 2)
        assert torch.equal(getattr(again.model.layers[1].mlp.experts, name), own)
    with pytest.raises(ValueError, match="must be whole stacks of experts for layout 'mxfp4'"):
        quantize_model(other := build(), "mxfp4")
        export_checkpoint(other, tmp_path / "no", "mxfp4")


def test_the_page_lists_what_is_tested():
    """What is asserted above, by the loader of each model."""
    page = (Path(__file__).parents[2] / "docs/train_checkpoints.md").read_text()
    table = page.partition("| model | layout | loaded in its memory | saved |")[2]
    rows = [row.split(" | ") for row in table.partition("\n\n")[0].splitlines()[2:]]
    listed = [
        (layout, loaded, saved.removesuffix(" |"))
        for _, layouts, loaded, saved in rows
        for layout in re.findall("`(.+?)`", layouts)
    ]
    assert listed == [
        *((kind, "yes", "yes") for kind in LAYOUTS),
        *((kind, "yes", "`save_original_format=False`") for kind in TORCHAO),
        ("mxfp4", "`import_checkpoint`", "`export_checkpoint`"),
    ]


def test_the_example(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train_checkpoint.py", "--steps", "2"])
    train_checkpoint.main()
    printed = capsys.readouterr().out
    assert "14 of 25 weights are quantized" in printed and "step 2: loss" in printed
    assert "loaded again, all weights are the same: True" in printed


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="got none: transformers decodes FP8 and MXFP4"):
        make_trainable(build())
    with pytest.raises(TypeError, match="must be an nn.Module"):
        make_trainable("Qwen3")
    build().save_pretrained(tmp_path)
    model = load(tmp_path, quantization_config=FineGrainedFP8Config())
    make_trainable(torch.compile(model))
    with pytest.raises(ValueError, match="must not be trainable yet, got .*q_proj.weight'"):
        make_trainable(model)
    config = FineGrainedFP8Config(weight_block_size=(64, 64))
    with pytest.raises(ValueError, match=r"must be one of 128x128 .* got 'blocks of \[64, 64\]'"):
        make_trainable(load(tmp_path, quantization_config=config))
    offloaded = load(tmp_path, quantization_config=FineGrainedFP8Config())
    offloaded.lm_head.weight = nn.Parameter(torch.empty(256, 256, device="meta"))
    with pytest.raises(ValueError, match="'lm_head.weight' must be .* in memory .* on the meta"):
        make_trainable(offloaded)
    assert offloaded.is_quantized
    compress(build(), "FP8", tmp_path / "by tensor")
    with pytest.raises(ValueError, match="got 'naive-quantized by tensor'"):
        make_trainable(load(tmp_path / "by tensor"))
