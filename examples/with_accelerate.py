"""Hugging Face Accelerate with NVFP4 weights, on one device or spread over several by FSDP2.

    pip install '.[integrations]'
    python examples/with_accelerate.py
    accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 \\
        --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap Block \\
        --fsdp_cpu_ram_efficient_loading false examples/with_accelerate.py

``fsdp_cpu_ram_efficient_loading`` would put plain weights in the place of quantized ones, and is
refused. For mixed precision under FSDP2, build the model in FP32.
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from gpt import GPT, GPTConfig
from stdlib_text import load_text
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from fp4adam import FP4Adam, quantize_model, use_plain_state_dict

CONTEXT = 64


class Training:
    """Model, optimizer and schedule, as Accelerate prepared them.

    Args:
        accelerator: Of any kind, FSDP2 included.
        warmup: Optimizer steps until the learning rate is reached.
    """

    def __init__(self, accelerator: Accelerator, warmup: int = 10) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerator
        model = quantize_model(GPT(GPTConfig(2, 2, 128, CONTEXT)), "nvfp4")
        use_plain_state_dict(model)  # save_state() writes safetensors
        optimizer = FP4Adam(model.parameters(), lr=3e-3, weight_decay=0.1)
        count = accelerator.num_processes  # as often, Accelerate steps the schedule at a time
        schedule = LambdaLR(optimizer, lambda step: min(1.0, (step // count + 1) / warmup))
        self.model, self.optimizer, self.schedule = accelerator.prepare(model, optimizer, schedule)

    def step(self, rows: Tensor) -> float:
        """One batch, uint8 [batch, length + 1]; its loss."""
        with self.accelerator.accumulate(self.model):
            tokens = rows.to(self.accelerator.device).long()
            logits = self.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return loss.item()


def text_rows() -> Tensor:
    """The training text in rows of CONTEXT + 1 bytes, uint8."""
    text, _ = load_text()
    width = CONTEXT + 1
    return text[: len(text) // width * width].view(-1, width)


def main() -> None:
    """Trains for 400 batches, two per optimizer step."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    training = Training(accelerator)
    loader = accelerator.prepare(DataLoader(text_rows(), batch_size=8, shuffle=True))
    for index, rows in zip(range(400), loader, strict=False):
        loss = training.step(rows)
        if index % 40 == 39:
            accelerator.print(f"batch {index + 1}: loss {loss:.4f}")
    accelerator.save_state("runs/accelerate")  # load_state() takes it back


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
