"""The tensors of a model by the names that checkpoints have for them."""

import copy

import torch
from torch import Tensor, nn

# Last parts of the names of tensors that quantization of activations and of the KV cache needs.
ACTIVATION_SCALES = frozenset(("input_scale", "input_global_scale", "activation_scale"))
CACHE_SCALES = frozenset(("k_scale", "v_scale"))


def model_state(model: nn.Module) -> tuple[dict[str, Tensor], set[str]]:
    """Read a model: the names are those of its state dict, the tensors are the model's.

    Hooks of the state dict can rename, leave out and add entries. If one replaces the value of a
    tensor, for example by its dequantized value, the tensor itself is returned.

    Returns:
        Tensors by all of their names, in the order of the state dict: parameters and persistent
        buffers themselves, and any other entries; the names of these, which hooks and
        ``get_extra_state`` add.

    Raises:
        TypeError: If the state dict holds anything but tensors.
        ValueError: If a hook replaces a parameter by an entry of another name and value.
    """
    own = {
        plain_name(f"{prefix}.{name}" if prefix else name): value
        for prefix, module in model.named_modules(remove_duplicate=False)
        for members in (module._parameters, module._buffers)
        for name, value in members.items()
        if value is not None and name not in module._non_persistent_buffers_set
    }
    by_id = {id(value): value for value in own.values()}
    tensors: dict[str, Tensor] = {}
    extra: set[str] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        name = plain_name(name)
        if not isinstance(value, Tensor):
            raise TypeError(
                f"state_dict() of the model must hold tensors, got a {type(value).__name__} for "
                f"{name!r}; remove it, a checkpoint for serving has no place for it"
            )
        member = by_id.get(id(value), own.get(name))
        if member is None:
            extra.add(name)
        tensors[name] = value if member is None else member
    found = {id(value) for value in tensors.values()}
    lost = [
        name
        for name, value in own.items()
        if isinstance(value, nn.Parameter) and id(value) not in found
    ]
    if lost and extra:
        raise ValueError(
            f"state_dict() of the model must have its parameter {lost[0]!r}, got {min(extra)!r} "
            "in its stead: a hook has computed one from the other, and what the parameter holds "
            "would be lost; remove the hook, or let it change the name alone"
        )
    return tensors, extra


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without the wrappers of ``torch.compile`` and DistributedDataParallel."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = getattr(model.module, "_orig_mod", model.module)
    return model


def in_high_precision(model: nn.Module) -> nn.Module | None:
    """What ``from_pretrained`` would build from the configuration of a model of transformers.

    It is on the meta device, and not quantized. None for other models.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "_from_config"):
        return None
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return type(model)._from_config(config, dtype=getattr(config, "dtype", None))


def plain_name(name: str) -> str:
    """A name without the prefixes of ``torch.compile`` and activation checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
