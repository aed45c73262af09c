"""The tensors of a model, and the names that checkpoints have for them.

transformers stacks the weights of experts as it loads them, and takes the stacks apart to save
them, one weight per expert. What its conversion does to a model is found by converting numbers in
place of weights: they show under which names, and which of its rows, each parameter is stored.
"""

import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fp4adam.distributed.dtensor import local
from fp4adam.nn.candidates import is_stack
from fp4adam.tensors.quantized_tensor import QuantizedTensor

# Last parts of the names of scales of activations and of the KV cache, which no training has.
UNUSED_SCALES = {"input_scale", "input_global_scale", "activation_scale", "k_scale", "v_scale"}
# Each weight of a stack is numbered in so many parts: two could be rows that alternate.
PARTS = 4
_BASE = 2**32
# Of each parameter and buffer of a model the names that a checkpoint stores it under, in the order
# of its rows [product of leading dimensions, last]; with each the first row and the one behind the
# last, or None for all of them, in its own shape.
Rows = tuple[int, int] | None
Spans = dict[str, list[tuple[str, Rows]]]


def model_state(model: nn.Module) -> tuple[dict[str, Tensor], set[str]]:
    """Read a model: the names are those of its state dict, the tensors are the model's.

    Hooks of the state dict can rename, leave out and add entries. If one replaces the value of a
    tensor, for example by its dequantized value, the tensor itself is returned.

    Returns:
        Tensors by all of their names, in the order of the state dict: parameters and persistent
        buffers themselves, and any other entries; the names of these, which hooks and
        ``get_extra_state`` add.

    Raises TypeError or ValueError if one is no tensor, or would take the place of a parameter.
    """
    own = {
        plain_name(f"{prefix}.{name}" if prefix else name): value
        for prefix, module in model.named_modules(remove_duplicate=False)
        for members in (module._parameters, module._buffers)
        for name, value in members.items()
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
    lost = [n for n, x in own.items() if isinstance(x, nn.Parameter) and id(x) not in found]
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


def plain_name(name: str) -> str:
    """A name without the prefixes of ``torch.compile`` and activation checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def spans_of(model: nn.Module, tensors: dict[str, Tensor]) -> Spans:
    """What a checkpoint of a model holds, by the names on the hub.

    Of models without stacked experts, and of stacks that transformers stores as they are, these are
    the names of the model. Stacks of modules that are not of transformers are stored as
    ``<module>.<number>.<projection>.weight``, ``gate_up_proj`` as ``gate_proj`` and ``up_proj``;
    those [experts, in, out] (``is_transposed``) as they are. ValueError if transformers stores a
    tensor in another way than by rows.
    """
    stack_of = {
        id(param): module
        for module in model.modules()
        for key, param in module._parameters.items()
        if is_stack(module, key)
    }
    stacks = {n: stack_of[id(value)] for n, value in tensors.items() if id(value) in stack_of}
    convert = _conversion_of(model) if stacks else None
    if convert is not None:
        return _trace(convert, tensors, stacks)
    cut = {n for n, module in stacks.items() if not getattr(module, "is_transposed", False)}
    return {n: _by_expert(n, x) if n in cut else [(n, None)] for n, x in tensors.items()}


def _conversion_of(model: nn.Module) -> Callable[[dict[str, Tensor]], dict[str, Tensor]] | None:
    """How transformers names the tensors of one of its models on the hub."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return None
    from transformers.core_model_loading import revert_weight_conversion

    return lambda state: revert_weight_conversion(model, state)


def _by_expert(name: str, stack: Tensor) -> list[tuple[str, Rows]]:
    experts, rows, _ = stack.shape
    prefix, _, key = name.rpartition(".")
    halves = ("gate_proj", "up_proj") if key == "gate_up_proj" and rows % 2 == 0 else (key,)
    size = rows // len(halves)
    return [
        (f"{prefix}.{expert}.{half}.weight".removeprefix("."), (start, start + size))
        for expert in range(experts)
        for half, start in zip(halves, range(expert * rows, (expert + 1) * rows, size), strict=True)
    ]


def _trace(
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    tensors: dict[str, Tensor],
    stacks: dict[str, nn.Module],
) -> Spans:
    names, numbers = [*tensors], {}
    for i, (name, value) in enumerate(tensors.items()):
        shape = (1,) * value.dim()
        if name in stacks:
            experts, rows, _ = value.shape
            shape = (experts, PARTS if rows % PARTS == 0 else rows, 1)
        numbers[name] = (torch.arange(math.prod(shape)) + i * _BASE).view(shape)
    spans, covered = defaultdict(list), defaultdict(int)
    for stored, found in convert(dict(numbers)).items():
        start, count = int(found.flatten()[0]), found.numel()
        index, first = divmod(start, _BASE)
        name = names[index]
        is_run = torch.equal(found.flatten(), torch.arange(start, start + count))
        is_all = found.shape == numbers[name].shape
        if not is_run or not (is_all or (name in stacks and found.shape[1:] == (1,))):
            raise ValueError(
                f"{name!r} must be stored by whole rows, got {stored!r}, which transformers "
                "computes in another way; train and export a model without it"
            )
        covered[name] += count
        part = 0 if is_all else tensors[name].shape[1] // numbers[name].shape[1]
        spans[name].append((stored, None if is_all else (first * part, (first + count) * part)))
    lost = [name for name in names if covered[name] != numbers[name].numel()]
    if lost:
        raise ValueError(
            f"{lost[0]!r} must be stored once, got none or several in what transformers saves; "
            "train and export a model without it"
        )
    return {name: sorted(parts, key=lambda part: part[1] or ()) for name, parts in spans.items()}


def module_names(spans: Spans) -> dict[str, str]:
    """The names in a checkpoint of the modules that have the tensors of a model."""
    modules = {}
    for name, [(stored, rows), *_] in spans.items():
        suffix = r"\.[^.]+$" if rows is None else r"\.\d+\.[^.]+\.[^.]+$"
        modules.setdefault(name.rpartition(".")[0], re.sub(suffix, "", stored))
    return modules


def unquantized_modules(
    model: nn.Module, stored_names: dict[str, str]
) -> tuple[list[str], list[str]]:
    """Modules whose weights stay in high precision, and those of them with stacks of weights.

    Each has its name in the model and, if it is another, the one in the checkpoint. They are the
    modules that engines could take for quantized linear layers: linear layers, routers, stacked
    experts; not embeddings, convolutions and modules that contain quantized ones.
    """
    excluded, stacked = [], []
    for name, module in model.named_modules(remove_duplicate=False):
        name = plain_name(f"{name}.").removesuffix(".")
        own = [param for param in module._parameters.values() if param is not None]
        is_other = isinstance(module, nn.Embedding | nn.modules.conv._ConvNd)
        if not name or is_other or not any(param.ndim > 1 for param in own):
            continue
        if not any(isinstance(local(param), QuantizedTensor) for param in module.parameters()):
            names = dict.fromkeys((name, stored_names.get(name, name)))
            excluded += names
            if any(param.ndim > 2 for param in own):
                stacked += names
    return excluded, stacked
