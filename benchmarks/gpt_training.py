"""Training of the example's GPT, as scaling.py and training.py measure it."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import engine
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from fp4adam import Recipe, quantize_model

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig
from options import PRESETS
from stdlib_text import cut_batch, load_text

HYPER = dict(betas=(0.9, 0.95), weight_decay=0.1, fused=True)
# Inputs and targets, int64 [batch, context].
Batch = tuple[Tensor, Tensor]


class Contestant(NamedTuple):
    """An optimizer of a GPT in ``dtype``, its linear weights quantized where there is a recipe.

    FP32 weights are multiplied in BF16, by autocast. ``releases`` is for gradient release.
    ``engine`` is the format of Transformer Engine's linear layers, if the blocks have these,
    ``torchao`` torchao's recipe for float8 training, or "tensorwise, FP8 all-gather".
    """

    name: str
    optimizer: Callable[..., Optimizer]
    recipe: str | Recipe | None = None
    dtype: torch.dtype = torch.bfloat16
    engine: str | None = None
    releases: bool = False
    torchao: str | None = None

    @property
    def is_fp8(self) -> bool:
        """Whether linear layers of blocks multiply in FP8."""
        return bool(self.engine or self.torchao or isinstance(self.recipe, Recipe))


def gpt_config(size: str, **sizes: int | None) -> GPTConfig:
    """The shape of a preset, but for the sizes that are given."""
    preset = PRESETS[size] | {name: value for name, value in sizes.items() if value}
    return GPTConfig(*(preset[name] for name in ("layers", "heads", "dim", "context")))


def build_model(contestant: Contestant, config: GPTConfig, device: str) -> GPT:
    """A model from the same weights for everyone."""
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(config).to(contestant.dtype)
    if contestant.recipe:
        quantize_model(model, contestant.recipe)
    if contestant.engine:
        engine.use_in(model, contestant.engine)
    if contestant.torchao:
        use_torchao(model.blocks, contestant.torchao, device)
    return model


def use_torchao(module: torch.nn.Module, recipe: str, device: str) -> None:
    """Give linear layers torchao's float8 training, emulated on a CPU."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    name, _, gathers = recipe.partition(", ")
    config = Float8LinearConfig.from_recipe_name(name)
    config = dataclasses.replace(
        config, emulate=device == "cpu", enable_fsdp_float8_all_gather=bool(gathers)
    )
    convert_to_float8_training(module, config=config)


class Training:
    """A model and its optimizer.

    Attributes:
        forward: What computes the logits: the model, or what wraps it.
    """

    def __init__(self, contestant: Contestant, model: GPT, size: str) -> None:
        self.contestant, self.model = contestant, model
        self.forward: Callable[[Tensor], Tensor] = model
        lr = PRESETS[size]["lr"]
        self.optimizer = contestant.optimizer(model.parameters(), lr=lr, **HYPER)
        self.release = self.optimizer.enable_gradient_release() if contestant.releases else None

    def crops(self, batch: int, seed: int) -> Batch:
        """Inputs and targets of so many sequences, by ``seed`` alone."""
        text, _ = load_text()
        inputs, targets = cut_batch(text, batch, self.model.config.context, seed)
        device = self.model.cos.device
        return inputs.to(device), targets.to(device)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy, in nats per byte."""
        with self._autocast(inputs.device.type):
            logits = self.forward(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def _autocast(self, device: str) -> contextlib.AbstractContextManager:
        if self.contestant.engine:
            te, recipe = engine.recipe_of(self.contestant.engine)
            return te.autocast(enabled=True, recipe=recipe)
        is_mixed = self.contestant.dtype == torch.float32
        return torch.autocast(device, torch.bfloat16, enabled=is_mixed)

    def accumulate(self, *batches: Batch) -> Tensor:
        """Gradients of the mean loss over batches, and that loss."""
        losses = []
        for inputs, targets in batches:
            loss = self.loss(inputs, targets) / len(batches)
            with self._keeping(len(losses) + 1 < len(batches)):
                loss.backward()
            losses.append(loss.detach())
        return sum(losses)

    def _keeping(self, more: bool) -> contextlib.AbstractContextManager:
        """Keeps gradients that would be released if ``more`` batches are to come."""
        keeps = self.release is not None and more
        return self.release.accumulate() if keeps else contextlib.nullcontext()

    def update(self) -> None:
        """The optimizer's part of a training step."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.contestant.torchao and "all-gather" in self.contestant.torchao:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(self.model)

    def step(self, *batches: Batch) -> Tensor:
        """A whole training step; the loss before it."""
        loss = self.accumulate(*batches)
        self.update()
        return loss
