"""TRL's SFTTrainer, and the plug-in with which Axolotl makes one of the same trainers."""

import pytest
import sft
import torch
from transformers import Trainer, TrainingArguments
from with_transformers import build_model, collate

from fp4adam import FP4Adam
from helpers import quantized

ARGUMENTS = dict(max_steps=4, logging_steps=1, disable_tqdm=True)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_sft_trains_and_saves(tmp_path):
    trainer = sft.build_trainer(
        learning_rate=1e-2,
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        lr_scheduler_type="cosine",
        save_steps=4,
        **ARGUMENTS,
    )
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer) is FP4Adam
    assert len(quantized(trainer.model.parameters())) == 2 * 7
    assert losses(trainer)[-1] < losses(trainer)[0] - 0.3
    assert {state["step"].item() for state in optimizer.state.values()} == {4}
    saved = sft.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    for name, param in saved.named_parameters():
        expected = trainer.model.get_parameter(name)
        assert torch.equal(param, expected.detach().float().bfloat16()), name


def test_axolotl_plugin(tmp_path):
    base = pytest.importorskip("axolotl.integrations.base")
    plugin = base.load_plugin("with_axolotl.FP4AdamPlugin")
    import with_axolotl

    assert plugin.get_input_args() == "with_axolotl.FP4AdamArgs"
    cfg = base.DictDefault(with_axolotl.FP4AdamArgs(fp4adam_states="16bit").model_dump())
    model = build_model(format=None)
    plugin.post_model_load(cfg, model)
    data = torch.randint(256, (64, 16))
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], learning_rate=1e-2, adam_beta2=0.95, **ARGUMENTS
    )
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=collate)
    plugin.post_trainer_create(cfg, trainer)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer) is FP4Adam
    assert len(quantized(model.parameters())) == 2 * 7
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}
    assert {group["initial_lr"] for group in optimizer.param_groups} == {1e-2}
    assert optimizer.state[quantized(model.parameters())[0]]["exp_avg"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="adapters are not quantized, got adapter='lora'"):
        plugin.post_model_load(base.DictDefault(adapter="lora"), model)
