"""Exported checkpoints, read back by transformers and compressed-tensors: the bits of training."""

from pathlib import Path

import finetune_and_export
import finetune_full
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForQuestionAnswering,
    Gemma2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    RobertaConfig,
    RobertaForSequenceClassification,
)
from transformers.utils.quantization_config import CompressedTensorsConfig

from fp4adam import (
    FP4Adam,
    NVFP4Quantizer,
    QuantizedTensor,
    export_checkpoint,
    export_masters,
    import_checkpoint,
    quantize_model,
)
from helpers import train

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


def llama(tied: bool = False) -> PreTrainedModel:
    """Two layers of everything that a Llama has, in BF16, with random weights."""
    return finetune_and_export.llama(
        num_hidden_layers=2, max_position_embeddings=128, tie_word_embeddings=tied
    )


def text() -> Tensor:
    """Four lines of 64 bytes of real text."""
    content = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8)
    return content[: 4 * 64].view(4, 64).long()


def train_model(model: PreTrainedModel, steps: int = 3) -> FP4Adam:
    optimizer = FP4Adam(model.parameters(), lr=3e-3)
    train(optimizer, (model(text(), labels=text()).loss for _ in range(steps)))
    model.eval()
    return optimizer


def assert_is(read: PreTrainedModel, model: PreTrainedModel) -> None:
    """Logits, weights and greedy text are the same, bit for bit."""
    with torch.no_grad():
        # The first forward pass decompresses weights that were loaded as they are.
        assert torch.equal(read(text()).logits, model(text()).logits)
    params = dict(read.named_parameters())
    for name, param in model.named_parameters():
        is_quantized = isinstance(param, QuantizedTensor)
        value = param.dequantize(torch.bfloat16) if is_quantized else param
        assert torch.equal(params[name], value), name
    prompt = text()[:1, :8]
    options = dict(max_new_tokens=16, do_sample=False, attention_mask=torch.ones_like(prompt))
    written = [m.generate(prompt, pad_token_id=0, **options) for m in (read, model)]
    assert torch.equal(*written)


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize(("recipe", "layout"), CASES)
def test_transformers_reads_what_was_trained(recipe, layout, dequantize, tmp_path):
    model = quantize_model(llama(), recipe)
    train_model(model)
    export_checkpoint(model, tmp_path, layout)
    options = {}
    if dequantize and layout == "compressed-tensors":
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    assert read.dtype == torch.bfloat16
    assert_is(read, model)


def test_transformers_reads_several_files_and_ties(tmp_path):
    model = quantize_model(llama(tied=True), "nvfp4")
    train_model(model)
    export_checkpoint(model, tmp_path, max_shard_bytes=100_000)
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    read = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert read.lm_head.weight is read.model.embed_tokens.weight
    assert_is(read, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_reads_masters(dtype, tmp_path):
    model = quantize_model(llama(), "nvfp4")
    optimizer = train_model(model)
    export_masters(model, optimizer, tmp_path, dtype)
    read = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    for name, param in model.named_parameters():
        assert torch.equal(read[name], optimizer.state[param]["master_param"].to(dtype)), name


@pytest.mark.parametrize(("recipe", "layout"), CASES)
def test_training_goes_on_from_what_was_exported(recipe, layout, tmp_path):
    model = quantize_model(llama(), recipe)
    train_model(model)
    export_checkpoint(model, tmp_path, layout)
    other = import_checkpoint(llama(), tmp_path)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        if isinstance(a, QuantizedTensor):
            assert torch.equal(a.rowwise_data, b.rowwise_data)
            assert torch.equal(a.rowwise_scale_inv, b.rowwise_scale_inv)
        else:
            assert torch.equal(a, b)
    with torch.no_grad():
        assert torch.equal(other(text()).logits, model(text()).logits)
        before = other(text(), labels=text()).loss
    train_model(other)
    with torch.no_grad():
        assert other(text(), labels=text()).loss < before


def test_checkpoints_that_transformers_wrote_are_imported(tmp_path):
    model = quantize_model(llama(), "nvfp4")
    train_model(model)
    export_checkpoint(model, tmp_path / "ours")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    read.save_pretrained(tmp_path / "theirs")
    other = import_checkpoint(llama(), tmp_path / "theirs")
    with torch.no_grad():
        assert torch.equal(other(text()).logits, model(text()).logits)


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
    llama().save_pretrained(folder / "model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
    (folder / "text").mkdir()
    for i in range(12):
        (folder / f"text/{i}.md").write_text(f"{i} " + "some words to read. " * 20)
    return str(folder / "model")


@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp8", "float8block"])
def test_full_fine_tuning_resumes_with_the_same_bits(weight_format, tmp_path, capsys):
    start = [pretrained(tmp_path), "--text", str(tmp_path / "text"), "--format", weight_format]
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
    assert capsys.readouterr().out.count("states 3.06") == 1
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


SMALL = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)


def small(config: type[PreTrainedConfig], **options: object) -> PreTrainedConfig:
    options = {"num_key_value_heads": 2, "head_dim": 16, **options}
    return config(**SMALL, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("recipe", "layout"), CASES)
@pytest.mark.parametrize("config", [LlamaConfig, Qwen3Config, Gemma2Config])
def test_models_of_other_dtypes_run_where_they_are_read(config, recipe, layout, dtype, tmp_path):
    """compressed-tensors decodes to BF16: so the model has to be read in that dtype."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small(config), dtype=dtype)
    quantize_model(model, recipe)
    train_model(model, steps=1)
    export_checkpoint(model, tmp_path, layout)
    read = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert read.dtype == (torch.bfloat16 if layout == "compressed-tensors" else dtype)
    other = AutoModelForCausalLM.from_config(small(config), dtype=read.dtype).eval()
    import_checkpoint(other, tmp_path)
    with torch.no_grad():
        logits = read(text()).logits
        assert torch.equal(logits, other(text()).logits)
        assert (logits - model(text()).logits).abs().max() < 0.05


def test_the_generation_configuration_is_read(tmp_path):
    model = quantize_model(llama(), "nvfp4")
    model.generation_config.eos_token_id = [3, 7]
    export_checkpoint(model, tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id == [3, 7]


def test_heads_of_tasks_stay_in_high_precision():
    bert = BertConfig(**SMALL, tie_word_embeddings=False)
    heads = {
        BertForQuestionAnswering(bert): ["qa_outputs"],
        BertForNextSentencePrediction(bert): ["cls.seq_relationship"],
        BertForMaskedLM(bert): ["cls.predictions.decoder"],
        RobertaForSequenceClassification(RobertaConfig(**SMALL)): ["classifier.out_proj"],
    }
    for model, expected in heads.items():
        quantize_model(model, "nvfp4")
        plain = [
            name
            for name, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear) and not isinstance(layer.weight, QuantizedTensor)
        ]
        assert plain == expected


def test_warnings_of_what_transformers_misreads(tmp_path):
    with pytest.warns(UserWarning, match="MXFP8 .* 'modelopt' .* leaves their scales out"):
        export_checkpoint(quantize_model(llama(), "mxfp8"), tmp_path / "modelopt", "modelopt")
