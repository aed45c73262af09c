"""Exchange of a weight's content for a quantized one or back; the parameter object stays.

``torch.utils.swap_tensors`` gives the object the class and the memory of another tensor. So
optimizers, tied modules, lists of averages and hooks that have the parameter see the new content.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fp4adam.distributed.dtensor import is_dtensor, local
from fp4adam.nn.recipe import format_name
from fp4adam.tensors.quantized_tensor import QuantizedTensor


def check_weight(name: str, weight: nn.Parameter | None) -> None:
    """Raise ValueError if the weight of layer ``name`` is none that can be exchanged."""
    if is_dtensor(weight):
        raise ValueError(
            f"weight of layer {name!r} must be whole to be quantized, got a DTensor; call "
            "fully_shard after quantize_model"
        )
    if weight is None or isinstance(weight, nn.UninitializedParameter):
        kind = "none" if weight is None else "one without a shape"
    elif type(weight) is nn.Parameter or isinstance(weight, FakeTensor | QuantizedTensor):
        return
    else:
        kind = f"a {type(weight).__name__}, whose behavior a quantized one would not have"
    raise ValueError(
        f"weight of layer {name!r} must be an ordinary parameter, got {kind}; quantize before "
        "adding a parametrization and after the first forward pass of a lazy layer, or leave "
        "this layer in high precision (filter=...)"
    )


def check_attributes(name: str, weight: nn.Parameter, successor: nn.Parameter) -> None:
    """Raise ValueError if an attribute of ``weight`` has a name that ``successor`` uses itself."""
    for attribute in _attributes(weight):
        is_plain = hasattr(nn.Parameter, attribute)
        if attribute in vars(successor) or (hasattr(type(successor), attribute) and not is_plain):
            raise ValueError(
                f"weight of layer {name!r} must have no attribute {attribute!r} to be quantized, "
                f"which {type(successor).__name__} has itself, got one; rename it"
            )


# Wrappers that have taken parameters apart, or count their gradients, once they are made.
_WRAPPERS = {
    "DistributedDataParallel": "quantize the model first",
    "FullyShardedDataParallel": "use fully_shard after quantize_model instead: FSDP1 flattens "
    "parameters to plain memory",
    "DeepSpeedEngine": "it keeps flat copies of the parameters; train with fully_shard",
    "AveragedModel": "averages of codes would stand still; quantize the model that it averages",
}


def check_no_replica(modules: Iterable[nn.Module]) -> None:
    """Raise ValueError if a wrapper that takes parameters apart is among the modules."""
    for module in modules:
        for kind in _WRAPPERS.keys() & {kind.__name__ for kind in type(module).__mro__}:
            raise ValueError(
                f"model must not be wrapped by {kind} yet, got one that is; {_WRAPPERS[kind]}"
            )


def _attributes(weight: Tensor) -> dict[str, Any]:
    """Attributes that users have set on a parameter, such as ``tensor_model_parallel``."""
    own = vars(weight.detach()) if isinstance(weight, QuantizedTensor) else ()
    return {n: value for n, value in vars(weight).items() if n not in (*own, "_is_param")}


def put_in(weights: Iterable[tuple[nn.Module, str, Tensor]]) -> None:
    """Give the tensor of each module and name the content of a new one, and keep the object.

    Attributes, hooks and gradients stay. The layers then show the format.

    Raises:
        RuntimeError: If something else refers to one of them. None has changed then.
    """
    weights = [*weights]
    pairs = {getattr(module, name): (name, new) for module, name, new in weights}
    done = []
    try:
        for old, (name, new) in pairs.items():
            if old is not new:
                _swap(name, old, new)
                done.append((old, new))
    except BaseException:
        for old, new in done:
            torch.utils.swap_tensors(old, new)
        raise
    for module, _, _ in weights:
        # Of the instance: its class may be nn.Linear itself.
        module.extra_repr = functools.partial(_extra_repr, module)


def _swap(name: str, old: Tensor, new: Tensor) -> None:
    vars(new).update(_attributes(old))
    # The dictionaries themselves, so that the handles of registered hooks still remove them.
    for part in ("_backward_hooks", "_post_accumulate_grad_hooks", "grad_dtype", "grad"):
        setattr(new, part, getattr(old, part))
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError as error:
        tensors = (each for each in (old, new) if isinstance(each, QuantizedTensor))
        name = next(tensors).parameter_name or name
        raise RuntimeError(
            f"{name!r} must be free to get other content, got a parameter that something else "
            "refers to: an output with a graph (delete it, or compute it under torch.no_grad()), a "
            "wrapper such as DistributedDataParallel (wrap the model afterwards), or a weak "
            f"reference ({error})"
        ) from error


def _extra_repr(layer: nn.Module) -> str:
    """What ``print(model)`` says of a layer: its own words and the formats of its weights."""
    words = [type(layer).extra_repr(layer)]
    for name, param in layer._parameters.items():
        weight = local(param)
        if isinstance(weight, QuantizedTensor):
            words.append(f"{name}={format_name(weight.quantizer)}")
            operands = weight.quantizer.operands
            if quantized := [n for n in ("activations", "gradients") if getattr(operands, n)]:
                words.append(f"quantizes={'+'.join(quantized)}")
            if operands.fake_activations:
                words.append("fake-quantizes=activations")
    return ", ".join(dict.fromkeys(filter(None, words)))
