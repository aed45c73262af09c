"""torchtitan's optimizer and schedule containers around FP4Adam.

    pip install torchtitan .
    python examples/with_torchtitan.py

torchtitan has no list of optimizers to add to: a subclass of its container knows the name, and a
configuration with ``optimizer=Optimizers.Config(...)`` selects it. Its own trainer and attention
need a GPU; the model here is that of the other examples. quantize_model comes before fully_shard.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from stdlib_text import cut_batch, load_text
from torch import nn
from torch.optim import Optimizer
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from fp4adam import FP4Adam, quantize_model


class Optimizers(OptimizersContainer):
    """torchtitan's container, which knows "FP4Adam" as well."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """As torchtitan's."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name == "FP4Adam":
            return FP4Adam
        return OptimizersContainer._resolve_optimizer_factory(name)


def optimizer_config(lr: float = 3e-3) -> Optimizers.Config:
    """No weight decay for norms; names are regular expressions, the first that fits counts."""

    def group(pattern: str, weight_decay: float) -> ParamGroupConfig:
        options = {"lr": lr, "betas": (0.9, 0.95), "weight_decay": weight_decay}
        return ParamGroupConfig(pattern=pattern, optimizer_name="FP4Adam", optimizer_kwargs=options)

    return Optimizers.Config(param_groups=[group("norm", 0.0), group(".*", 0.1)])


class Training:
    """A quantized GPT of bytes with what torchtitan's trainer steps and saves.

    Args:
        steps: Length of the schedule, a tenth of which is warm-up.
    """

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = quantize_model(GPT(GPTConfig(2, 2, 128, 64)), "nvfp4")
        self.optimizers = optimizer_config().build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=max(1, steps // 10))
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=steps)

    def step(self, index: int) -> float:
        """One optimizer step on the batch of this number; its loss."""
        inputs, targets = cut_batch(load_text()[0], 8, 64, seed=index)
        self.optimizers.zero_grad()
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizers.step()
        self.schedulers.step()
        return loss.item()


def main() -> None:
    """Trains for 200 steps."""
    training = Training(200)
    for index in range(200):
        loss = training.step(index)
        if index % 20 == 19:
            print(f"step {index + 1}: loss {loss:.4f}")


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
