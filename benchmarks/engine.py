"""Transformer Engine's weights, layers and optimizer, for those who have it on a GPU."""

import contextlib
import importlib
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

# By format: the recipe, and what says whether it runs.
RECIPES = {
    "Float8": ("Float8CurrentScaling", "is_fp8_available"),
    "Float8 delayed": ("DelayedScaling", "is_fp8_available"),
    "Float8Block": ("Float8BlockScaling", "is_fp8_block_scaling_available"),
    "MXFP8": ("MXFP8BlockScaling", "is_mxfp8_available"),
    "NVFP4": ("NVFP4BlockScaling", "is_nvfp4_available"),
}


def load() -> None:
    """Load Transformer Engine's libraries, before torch loads a cuDNN that may be another one."""
    with contextlib.suppress(ImportError):
        importlib.import_module("transformer_engine.pytorch")


def recipe_of(format: str) -> tuple[Any, Any]:
    """Transformer Engine, and its recipe for a format.

    Raises:
        ImportError: Without Transformer Engine.
        RuntimeError: If the format does not run on this GPU.
    """
    te = importlib.import_module("transformer_engine.pytorch")
    recipe, check = RECIPES[format]
    runs, why = getattr(te, check)(return_reason=True)
    if not runs:
        raise RuntimeError(why)
    recipes = importlib.import_module("transformer_engine.common.recipe")
    return te, getattr(recipes, recipe)()


def linear(te: Any, recipe: Any, rows: int, cols: int) -> nn.Module:
    """A linear layer whose BF16 weight [rows, cols] is quantized."""
    with te.quantized_model_init(recipe=recipe):
        return te.Linear(cols, rows, bias=False, params_dtype=torch.bfloat16, device="cuda")


def adam(params: list[Parameter], *, fused: bool = True, **options: Any) -> Any:
    """Transformer Engine's FusedAdam with FP32 masters."""
    optimizers = importlib.import_module("transformer_engine.pytorch.optimizers")
    return optimizers.FusedAdam(params, **options, master_weights=True)


def use_in(model: nn.Module, format: str) -> Any:
    """Give blocks its linear layers, with the same values; returns the recipe."""
    te, recipe = recipe_of(format)
    for block in model.blocks:
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, nn.Linear):
                    new = linear(te, recipe, *layer.weight.shape)
                    with torch.no_grad():
                        new.weight.copy_(layer.weight)
                    setattr(parent, name, new)
    return recipe
