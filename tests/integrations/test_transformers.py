"""Trainer: schedules, accumulation, checkpoints; a Llama from its configuration on real text."""

import re
from pathlib import Path

import pytest
import torch
import with_transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
from with_transformers import build_trainer

import fp4adam
from fp4adam import FP4Adam, QuantizedTensor, quantize_model, summary
from helpers import assert_bytes_are_of_masters, assert_identical, quantized, snapshot

DOCS = Path(__file__).resolve().parents[2] / "docs"
MODELS, MONITORING = DOCS / "models.md", DOCS / "monitoring.md"
ARGUMENTS = dict(
    max_steps=6,
    save_steps=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    weight_decay=0.1,
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)


def train(out, seed=0, resume=None, **options):
    torch.manual_seed(seed)
    trainer = build_trainer(out, **ARGUMENTS | dict(learning_rate=1e-2) | options)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


@pytest.fixture(scope="module", params=[False, True], ids=["fp32", "bf16"])
def trained(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("trainer")
    return train(out, bf16=request.param), out, request.param


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_training(trained):
    trainer, _, _ = trained
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer) is FP4Adam
    assert len(quantized(trainer.model.parameters())) == 2 * 7
    losses = logged(trainer, "loss")
    assert losses[-1] < losses[0] - 1
    shares = [1e-2 * share for share in (0, 0.5, 1, 0.853553, 0.5, 0.146447)]
    assert logged(trainer, "learning_rate") == pytest.approx(shares, rel=1e-5)
    decays = {group["weight_decay"]: group["params"] for group in optimizer.param_groups}
    assert decays.keys() == {0.1, 0.0}
    assert all(param.dim() == 1 for param in decays[0.0])
    # One step for two batches.
    assert {state["step"].item() for state in optimizer.state.values()} == {6}
    assert_bytes_are_of_masters(optimizer)


def test_resumed_run_has_the_bits_of_an_uninterrupted_one(trained, tmp_path):
    trainer, out, bf16 = trained
    resumed = train(tmp_path, seed=1, resume=out / "checkpoint-3", bf16=bf16)
    assert logged(resumed, "loss") == logged(trainer, "loss")
    pair = (snapshot(run.optimizer.optimizer) for run in (resumed, trainer))
    assert_identical(*({part: s[part] for part in ("params", "state", "options")} for s in pair))


def test_checkpoints_hold_plain_tensors(trained):
    trainer, out, bf16 = trained
    saved = torch.load(out / "checkpoint-6" / "optimizer.pt", weights_only=True)
    names = {name for state in saved["state"].values() for name in state}
    assert names == {"step", "exp_avg", "exp_avg_sq", "master_param"}
    plain = LlamaForCausalLM.from_pretrained(out / "checkpoint-6")
    assert not any(isinstance(param, QuantizedTensor) for param in plain.parameters())
    tokens = torch.arange(64).view(1, -1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = [model.eval()(tokens).logits.float() for model in (plain, trainer.model)]
    assert_identical(*logits)


def test_first_save_without_plain_state_dict_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(with_transformers, "use_plain_state_dict", lambda model: model)
    with pytest.raises(RuntimeError, match=r"call fp4adam.use_plain_state_dict\(model\) once"):
        train(tmp_path, bf16=False)


def test_released_gradients_give_the_same_bits_or_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must not clip or accumulate .* got max_grad_norm=1\.0"):
        train(tmp_path, release=True)
    options = dict(max_steps=2, gradient_accumulation_steps=1, max_grad_norm=0.0)
    runs = [train(tmp_path, release=release, **options) for release in (False, True)]
    pair = [snapshot(run.optimizer.optimizer) for run in runs]
    assert_identical(*({part: s[part] for part in ("params", "state")} for s in pair))


@pytest.mark.skipif(not MODELS.is_file(), reason="there is no docs/ beside this copy of tests/")
def test_gpt2_is_quantized_as_the_docs_say():
    (block,) = re.findall(
        r"^```python\n((?:(?!^```).)*Conv1D.*?)^```", MODELS.read_text(), re.MULTILINE | re.DOTALL
    )
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=64)).eval()
    tokens = torch.randint(64, (2, 16))
    expected = gpt2(tokens).logits
    functions = block.rpartition("quantize_model(")[0]
    exec(functions, namespace := {"torch": torch})
    torch.testing.assert_close(namespace["with_linear_layers"](gpt2)(tokens).logits, expected)
    names = [p.name for p in summary(gpt2).parameters]
    exec(block, {"quantize_model": quantize_model, "model": gpt2})
    result = summary(gpt2)
    assert [p.name for p in result.parameters] == names
    assert len(result.quantized) == 2 * 4 and "Conv1D" not in result.describe()


@pytest.mark.skipif(not MONITORING.is_file(), reason="there is no docs/ beside this tests/")
def test_the_monitored_trainer_of_the_docs(tmp_path, monkeypatch):
    (block,) = re.findall(
        r"^```python\n(from transformers.*?)^```", MONITORING.read_text(), re.DOTALL | re.MULTILINE
    )
    namespace = {"fp4adam": fp4adam}
    exec(block, namespace)
    monkeypatch.setattr(with_transformers, "Trainer", namespace["MonitoredTrainer"])
    trainer = train(tmp_path)
    errors = logged(trainer, "relative_error/all")
    assert len(errors) >= ARGUMENTS["max_steps"] and all(0.05 < x < 0.15 for x in errors)
    assert 0 < logged(trainer, "changed_share/all")[0] < 1
