"""Lightning: closures, schedules, checkpoints, and clipping in every precision."""

import logging
import re
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from with_lightning import LanguageModel, text_loader

import fp4adam
from helpers import assert_bytes_are_of_masters, assert_identical, snapshot

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*dataloader' does not have many workers", "ignore:.*isinstance.treespec, LeafSpec"
)
PRECISIONS = ["32-true", "bf16-true", "bf16-mixed", "16-mixed"]


class Recorded(LanguageModel):
    """Keeps its losses."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, rows, index):
        loss = super().training_step(rows, index)
        self.losses.append(loss.detach())
        return loss


def fit(precision="32-true", epochs=1, checkpoint=None, model=None, **options):
    """Epochs of six batches."""
    model = model or Recorded()
    if precision == "16-mixed":  # which a Trainer makes on GPUs only
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        options["plugins"] = MixedPrecision(precision, "cpu", scaler)
    else:
        options["precision"] = precision
    hidden = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options |= dict.fromkeys(hidden, False)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=epochs, **options)
    loader = text_loader(4, rows=24)
    trainer.fit(model, loader, ckpt_path=checkpoint, weights_only=True)
    return model, trainer


def test_steps_are_those_of_a_plain_loop():
    """Lightning runs forward and backward in the closure that it hands to step()."""
    model, trainer = fit(gradient_clip_val=1.0)
    plain = LanguageModel()
    plain.log = lambda *args, **options: None
    configured = plain.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    losses = []
    for index, rows in enumerate(text_loader(4, rows=24)):
        optimizer.zero_grad()
        loss = plain.training_step(rows, index)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    assert_identical(model.losses, losses)
    assert_identical(snapshot(trainer.optimizers[0]), snapshot(optimizer))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_resumed_run_has_the_bits_of_an_uninterrupted_one(precision, tmp_path):
    options = dict(precision=precision, gradient_clip_val=1.0, accumulate_grad_batches=2)
    whole, trainer = fit(epochs=2, **options)
    _, first = fit(epochs=1, **options)
    path = tmp_path / "first.ckpt"
    first.save_checkpoint(path)
    resumed, again = fit(epochs=2, checkpoint=path, **options)
    assert len(whole.losses) == 12
    assert_identical(resumed.losses, whole.losses[6:])
    optimizers = [run.optimizers[0] for run in (again, trainer)]
    assert_identical(*map(snapshot, optimizers))
    assert_bytes_are_of_masters(optimizers[0])
    assert {state["step"].item() for state in optimizers[0].state.values()} == {6}
    assert whole.losses[-1] < whole.losses[0]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_lightning_refuses_to_clip_itself_in_mixed_precision(precision):
    model = Recorded()
    model.configure_gradient_clipping = super(LanguageModel, model).configure_gradient_clipping
    with pytest.raises(RuntimeError, match="FP4Adam, does not allow for gradient clipping"):
        fit(precision, model=model, gradient_clip_val=1.0)


MONITORING = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"


@pytest.mark.skipif(not MONITORING.is_file(), reason="there is no docs/ beside this tests/")
def test_the_callback_of_the_docs():
    (block,) = re.findall(
        r"^```python\n(import lightning.*?)^```", MONITORING.read_text(), re.DOTALL | re.MULTILINE
    )
    namespace = {"fp4adam": fp4adam}
    exec(block, namespace)
    _, trainer = fit(callbacks=[namespace["LogQuantization"]()], log_every_n_steps=2)
    assert 0.05 < trainer.logged_metrics["relative_error/all"] < 0.15
