"""Exported checkpoints, read back by transformers and compressed-tensors: the bits of training."""

from pathlib import Path

import finetune_and_export
import finetune_full
import pytest
import torch
from small_models import TOKENS, logits, make, train
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.quantization_config import CompressedTensorsConfig

from fp4adam import (
    FP4Adam,
    NVFP4Quantizer,
    QuantizedTensor,
    export_checkpoint,
    export_masters,
    import_checkpoint,
)
from helpers import assert_identical, stored

pytestmark = [
    # transformers, of a configuration that is passed beside that of the checkpoint.
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning"),
    # q, k and v of these models have amaxes of their own, which transformers does not mind.
    pytest.mark.filterwarnings("ignore:weights that are served as one matrix:UserWarning"),
]
CASES = [
    ("nvfp4", "compressed-tensors"),
    (NVFP4Quantizer(two_dimensional=False, columnwise=False), "compressed-tensors"),
    ("mxfp8", "compressed-tensors"),
    ("float8block", "fp8"),
]


def assert_is(read: PreTrainedModel, model: PreTrainedModel) -> None:
    """Logits, weights and greedy text are the same, bit for bit."""
    # The first forward pass decompresses weights that were loaded as they are.
    assert_identical(logits(read), logits(model))
    params = dict(read.named_parameters())
    for name, param in model.named_parameters():
        is_quantized = isinstance(param, QuantizedTensor)
        value = param.dequantize(torch.bfloat16) if is_quantized else param
        assert torch.equal(params[name], value), name
    prompt = TOKENS[:1, :8]
    options = dict(max_new_tokens=16, do_sample=False, attention_mask=torch.ones_like(prompt))
    written = [m.generate(prompt, pad_token_id=0, **options) for m in (read, model)]
    assert torch.equal(*written)


@pytest.mark.parametrize(("recipe", "layout"), CASES)
def test_what_was_trained_is_read_and_trained_on(recipe, layout, tmp_path):
    model = make("Llama", recipe, torch.bfloat16)
    optimizer = FP4Adam(model.parameters(), lr=1e-2)
    train(model, optimizer)
    for dtype in (torch.float32, torch.bfloat16):
        export_masters(model, optimizer, tmp_path / str(dtype), dtype)
        masters = AutoModelForCausalLM.from_pretrained(tmp_path / str(dtype))
        for name, param in model.named_parameters():
            master = optimizer.state[param]["master_param"]
            assert torch.equal(masters.get_parameter(name), master.to(dtype)), name
    export_checkpoint(model, tmp_path / "ours", layout)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    read.save_pretrained(tmp_path / "theirs")
    assert read.dtype == torch.bfloat16
    assert_is(read, model)
    if layout == "compressed-tensors":
        options = dict(quantization_config=CompressedTensorsConfig(dequantize=True))
        assert_is(AutoModelForCausalLM.from_pretrained(tmp_path / "ours", **options), model)
    other = import_checkpoint(make("Llama", dtype=torch.bfloat16, seed=1), tmp_path / "ours")
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert_identical({k: stored(a)[k] for k in stored(b)}, dict(stored(b)))
    losses = train(other)
    assert losses[-1] < losses[0]
    if recipe == "nvfp4":
        other = import_checkpoint(make("Llama", dtype=torch.bfloat16, seed=1), tmp_path / "theirs")
        assert_identical(logits(other), logits(model))


def test_several_files_ties_and_the_generation_configuration(tmp_path):
    model = make("Llama", "nvfp4", torch.bfloat16, tie_word_embeddings=True)
    train(model)
    model.generation_config.eos_token_id = [3, 7]
    export_checkpoint(model, tmp_path, max_shard_bytes=100_000)
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    read = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert read.lm_head.weight is read.model.embed_tokens.weight
    assert read.generation_config.eos_token_id == [3, 7]
    assert_is(read, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("recipe", "layout"), CASES)
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_models_of_other_dtypes_run_where_they_are_read(name, recipe, layout, dtype, tmp_path):
    """compressed-tensors decodes to BF16: so the model has to be read in that dtype."""
    model = make(name, recipe, dtype)
    train(model, steps=1)
    export_checkpoint(model, tmp_path, layout)
    read = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert read.dtype == (torch.bfloat16 if layout == "compressed-tensors" else dtype)
    other = import_checkpoint(make(name, dtype=read.dtype, seed=1), tmp_path)
    assert_identical(logits(read), logits(other))
    assert (logits(read) - logits(model)).abs().max() < 0.05


@pytest.mark.parametrize("weight_format", ["nvfp4", "float8block"])
def test_the_example_writes_the_same_text_twice(weight_format, tmp_path, capsys):
    options = f"--format {weight_format} --steps 2 --batch 2 --context 16 --device cpu".split()
    finetune_and_export.main([*options, "--out", str(tmp_path / "first")])
    start = ["--start", str(tmp_path / "first"), "--out", str(tmp_path / "second")]
    finetune_and_export.main([*options, *start])
    assert capsys.readouterr().out.count("the same text as the trained model") == 2
    with pytest.raises(SystemExit):
        finetune_and_export.parse_args(start)  # before it trains
    assert "--out must be new or empty, got" in capsys.readouterr().err


def pretrained(folder: Path) -> str:
    """A model and a tokenizer of bytes, as the hub has them, and some text beside."""
    finetune_and_export.llama(num_hidden_layers=2).save_pretrained(folder / "model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
    (folder / "text").mkdir()
    for i in range(12):
        (folder / f"text/{i}.md").write_text(f"{i} " + "some words to read. " * 20)
    return str(folder / "model")


@pytest.mark.parametrize(
    ("chosen", "nbytes"), [("nvfp4 --masters fp16", 4.09), ("mxfp8", 3.06), ("float8block", 3.06)]
)
def test_full_fine_tuning_resumes_with_the_same_bits(chosen, nbytes, tmp_path, capsys):
    start = [pretrained(tmp_path), "--text", str(tmp_path / "text"), "--format", *chosen.split()]
    options = [*start, *"--batch 2 --context 16 --device cpu --lr 1e-3".split()]
    whole, parts = (str(tmp_path / name) for name in ("whole", "parts"))
    expected = finetune_full.main([*options, "--steps", "4", "--out", whole])
    quantized = ["--export", "quantized"]
    finetune_full.main([*options, "--steps", "2", "--out", parts, *quantized])
    with pytest.raises(SystemExit):
        finetune_full.parse_args([*options, "--out", parts])
    assert "is there already; give it, or another --out" in capsys.readouterr().err
    model = finetune_full.main([*options, "--steps", "4", "--out", parts, "--resume"])
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a.detach().float(), b.detach().float())
    assert capsys.readouterr().out.count(f"states {nbytes}") == 1
    read, same = (
        AutoModelForCausalLM.from_pretrained(Path(out, "masters-4")) for out in (whole, parts)
    )
    for a, b in zip(read.parameters(), same.parameters(), strict=True):
        assert a.dtype == torch.bfloat16 and torch.equal(a, b)
    # Masters, and not what the weights were rounded to.
    weight = expected.model.layers[0].mlp.up_proj.weight
    rounded = weight.dequantize(torch.bfloat16)
    difference = (read.model.layers[0].mlp.up_proj.weight - rounded).abs().max()
    assert 0 < difference < 0.2 * rounded.abs().max()
    assert (tmp_path / "parts/quantized-2/tokenizer.json").exists()
