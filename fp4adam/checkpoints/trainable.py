"""Training of models that transformers has loaded from quantized checkpoints."""

import copy
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from fp4adam.checkpoints.export import check_no_adapters
from fp4adam.checkpoints.folder import CONFIG
from fp4adam.checkpoints.import_checkpoint import import_checkpoint
from fp4adam.nn.candidates import check_module
from fp4adam.nn.recipe import FormatName, Recipe, resolve_recipe
from fp4adam.tensors.quantizer import Quantizer

Model = TypeVar("Model", bound=nn.Module)


def make_trainable(
    model: Model,
    recipe: FormatName | Quantizer | Recipe | None = None,
    *,
    folder: str | Path | None = None,
) -> Model:
    """A model to train, with the bytes of the FP8 or FP4 checkpoint that ``model`` was loaded from.

    It is what transformers would build in high precision, ``nn.Linear`` where it has put modules of
    its own, filled by :func:`fp4adam.import_checkpoint` from the files of ``model``::

        model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B-FP8", device_map="cuda")
        model = fp4adam.make_trainable(model)
        optimizer = fp4adam.FP4Adam(model.parameters(), lr=1e-5)

    The files are read again: it does not matter what transformers has made of them. What has been
    changed in ``model`` since, hooks included, does not go along.

    Args:
        model: A model of transformers, on one device. It stays as it is.
        recipe: As for :func:`fp4adam.quantize_model`, of the format of the checkpoint: for example
            a :class:`fp4adam.Recipe` with FP8 matmuls. By default the format with rowwise codes
            alone, which needs no further memory.
        folder: The checkpoint; by default where ``model.config`` says that it was loaded from, a
            folder or a name in the cache of the Hugging Face hub.

    Returns:
        The new model, on the device of ``model``.

    Raises:
        ValueError: If ``model`` is not one of transformers, has the adapters of PEFT, or lies on
            several devices. Other errors are those of ``import_checkpoint``.
    """
    check_module(model)
    check_no_adapters(model, "made trainable", "add them afterwards")
    devices = {tensor.device for tensor in model.parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"model must be on one device to be made trainable, got {sorted(map(str, devices))}; "
            "load it without offloading, and spread it afterwards, say by fully_shard"
        )
    quantizer = None if recipe is None else resolve_recipe(recipe)
    if not hasattr(model, "_from_config"):
        raise ValueError(
            f"model must be one of transformers to be built anew, got a {type(model).__name__}; "
            "import_checkpoint reads folders into any model"
        )
    folder = _folder_of(model) if folder is None else folder
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        trainable = type(model)._from_config(config, dtype=getattr(config, "dtype", None))
    import_checkpoint(trainable, folder, quantizer, device=devices.pop())
    if hasattr(model, "generation_config"):
        trainable.generation_config = model.generation_config
    return trainable.train(model.training)


def _folder_of(model: nn.Module) -> Path:
    """Where a model of transformers was loaded from; names are looked up in the hub's cache."""
    name = getattr(model.config, "_name_or_path", "")
    if name and Path(name).is_dir():
        return Path(name)
    found = None
    if name:
        from huggingface_hub import try_to_load_from_cache

        revision = getattr(model.config, "_commit_hash", None)
        found = try_to_load_from_cache(name, CONFIG, revision=revision)
    if not isinstance(found, str):
        raise FileNotFoundError(
            f"folder must be that of the checkpoint, got none, and {name!r}, the name in the "
            "model's configuration, is neither a folder nor in the cache of the hub; pass folder="
        )
    return Path(found).parent
