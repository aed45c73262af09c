"""Lightning with NVFP4 weights.

    pip install '.[integrations]'
    python examples/with_lightning.py

In mixed precision Lightning refuses to clip gradients for optimizers that unscale them, torch's
fused AdamW among them. ``configure_gradient_clipping`` lets FP4Adam clip within its step instead.
"""

import argparse
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from stdlib_text import load_text
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from fp4adam import FP4Adam, quantize_model

CONTEXT = 64


class LanguageModel(lightning.LightningModule):
    """A GPT of bytes with quantized linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = quantize_model(GPT(GPTConfig(2, 2, 128, CONTEXT)), "nvfp4")

    def training_step(self, rows: Tensor, index: int) -> Tensor:
        """Loss of a batch, uint8 [batch, length + 1]."""
        tokens = rows.long()
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """The next step clips, as it reads the gradients."""
        if gradient_clip_val is None:
            return
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None:  # in "16-mixed"
            scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(gradient_clip_val)

    def configure_optimizers(self) -> dict[str, Any]:
        """FP4Adam with a warm-up of ten steps."""
        optimizer = FP4Adam(self.parameters(), lr=3e-3, weight_decay=0.1)
        schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def text_loader(batch: int, rows: int | None = None) -> DataLoader:
    """Batches of the first ``rows`` pieces of the training text, uint8 [batch, CONTEXT + 1]."""
    text, _ = load_text()
    width = CONTEXT + 1
    return DataLoader(text[: len(text) // width * width].view(-1, width)[:rows], batch_size=batch)


def main() -> None:
    """Trains for 200 optimizer steps."""
    trainer = lightning.Trainer(
        max_steps=200,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        default_root_dir="runs/lightning",
    )
    trainer.fit(LanguageModel(), text_loader(8))


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
