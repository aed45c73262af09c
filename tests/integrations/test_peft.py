"""PEFT's LoRA on quantized bases: training, merging, starts, saving, and two ranks."""

import copy
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from small_models import TOKENS, logits, make, train
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from fp4adam import dequantize_model, export_checkpoint, import_checkpoint, quantize_model, summary
from helpers import assert_identical, quantized, stored
from ranks import all_ranks, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:weights that are served as one matrix:UserWarning")
LAYOUT_OF = {"nvfp4": "compressed-tensors", "mxfp8": "modelopt", "float8block": "fp8"}


def adapted(model, seed=2, **options):
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", **options))


def codes(model):
    return [{k: v.clone() for k, v in stored(p).items()} for p in quantized(model.parameters())]


@pytest.mark.filterwarnings("ignore:MXFP8 weights in layout 'modelopt' should be read by an engine")
@pytest.mark.parametrize("adapted_first", [False, True])
@pytest.mark.parametrize("recipe", LAYOUT_OF)
def test_adapters_train_and_merge(recipe, adapted_first, tmp_path):
    if adapted_first:
        model = quantize_model(adapted(make("Llama")), recipe)
    else:
        model = adapted(make("Llama", recipe))
    found = summary(model)
    assert len(found.quantized) == 2 * 7 and found.total("init_nbytes") == 0
    assert all(p.name.endswith(".base_layer.weight") for p in found.quantized)
    before = codes(model)
    losses = train(model)
    assert losses[-1] < losses[0] - 0.1
    assert_identical(codes(model), before)
    expected = logits(model)
    with pytest.raises(NotImplementedError, match=r"dequantize_model\(model\)"):
        copy.deepcopy(model).merge_and_unload()
    with pytest.raises(ValueError, match=r"without adapters .* model.merge_and_unload\(\)"):
        export_checkpoint(model, tmp_path / "no", LAYOUT_OF[recipe])
    # The adapter alone, on another copy of the base.
    model.save_pretrained(tmp_path / "adapter")
    again = copy.deepcopy(model).unload()
    loaded = PeftModel.from_pretrained(again, tmp_path / "adapter")
    assert_identical(logits(loaded), expected)
    # Merged in high precision.
    dequantize_model(model)
    assert_identical(logits(model), expected)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    quantize_model(merged, recipe)
    export_checkpoint(merged, tmp_path / "served", LAYOUT_OF[recipe])
    served = import_checkpoint(make("Llama", seed=1), tmp_path / "served")
    assert_identical(logits(served), logits(merged))


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora"])
def test_starts_that_change_the_base(start):
    model = make("Llama", "mxfp8")
    expected = logits(model)
    model = adapted(dequantize_model(model), init_lora_weights=start)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    quantize_model(model, "mxfp8")  # what is left of the base, rounded once
    assert len(summary(model).quantized) == 2 * 7 and summary(model).total("init_nbytes") == 0
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=0.1)
    losses = train(model)
    assert losses[-1] < losses[0]


def test_gradient_checkpointing_and_autocast():
    runs = []
    for checkpoints in (False, True):
        model = adapted(make("Llama", "nvfp4"))
        if checkpoints:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert grads and all("lora_" in name for name in grads)
        runs.append((loss.detach(), grads))
    assert_identical(*runs)


@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ],
)
def test_lora_of_mixtures_of_experts(targets):
    model = make("Qwen3-MoE", "nvfp4", num_hidden_layers=1)
    model = get_peft_model(model, LoraConfig(r=4, **targets))
    assert len(summary(model).quantized) == 6 and summary(model).total("init_nbytes") == 0
    before = codes(model)
    losses = train(model)
    assert losses[-1] < losses[0]
    assert_identical(codes(model), before)
    expected = logits(model)
    merged = dequantize_model(model).merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)


def train_on_ranks(rank, sharded):
    model = adapted(make("Llama", "nvfp4"))
    if sharded:
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=all_ranks())
        fully_shard(model, mesh=all_ranks())
    losses = train(model, steps=3)
    values = {}
    for name, param in model.named_parameters():
        if "lora_" in name:
            value = param.detach()
            values[name] = value.full_tensor() if sharded else value
    if not sharded:
        return losses, values
    # As a rank saves the adapter alone.
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    adapter = get_peft_model_state_dict(model, state_dict=state)
    assert_identical(adapter, {name.replace(".default", ""): v for name, v in values.items()})
    return losses, values


def test_fsdp():
    losses, values = train_on_ranks(0, False)
    for others, found in run_ranks(train_on_ranks, 2, True):
        assert others == pytest.approx(losses, rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BLOCKS = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_blocks_of_the_page_run(tmp_path, monkeypatch):
    (block,) = BLOCKS
    names = {"model": make("Llama"), "tokens": TOKENS}
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(PAGE), "exec"), names)
    assert not any("lora_" in p.name for p in summary(names["model"]).quantized)
