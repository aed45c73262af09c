"""Exchange of a weight's content for a quantized one or back; the parameter object stays.

``torch.utils.swap_tensors`` gives the object the class and the memory of another tensor. So
optimizers, tied modules, lists of averages and hooks that have the parameter see the new content.
First everything is checked, then new tensors are prepared, then all of them are swapped.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
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
        state = "none" if weight is None else "one without a shape"
        raise ValueError(
            f"weight of layer {name!r} must be an ordinary parameter, got {state}; quantize before "
            "adding a parametrization and after the first forward pass of a lazy layer, or leave "
            "this layer in high precision (filter=...)"
        )
    if type(weight) is not nn.Parameter and not isinstance(weight, FakeTensor | QuantizedTensor):
        raise ValueError(
            f"weight of layer {name!r} must be an ordinary parameter, got a "
            f"{type(weight).__name__}, whose behavior a quantized one would not have; leave this "
            "layer alone (filter=...)"
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


def check_no_replica(modules: Iterable[nn.Module], weights: Sequence[nn.Parameter] = ()) -> None:
    """Raise ValueError if a wrapper has taken one of the parameters already; FSDP1 takes all."""
    for module in modules:
        kinds = _WRAPPERS.keys() & {kind.__name__ for kind in type(module).__mro__}
        kind = kinds.pop() if kinds else None
        takes_all = kind == "FullyShardedDataParallel"
        if kind and (takes_all or not {*module.parameters()}.isdisjoint(weights)):
            raise ValueError(
                f"model must not be wrapped by {kind} yet, got one that is; {_WRAPPERS[kind]}"
            )


def _attributes(weight: nn.Parameter) -> dict[str, Any]:
    """Attributes that users have set on a parameter, such as ``tensor_model_parallel``."""
    own = vars(weight.detach()) if isinstance(weight, QuantizedTensor) else ()
    return {n: value for n, value in vars(weight).items() if n not in (*own, "_is_param")}


def put_in(weights: Iterable[tuple[nn.Module, str, nn.Parameter]]) -> None:
    """Give the parameter of each module and name the content of a new one, and keep the object.

    Attributes, hooks and gradients stay. The layers then show the format.

    Raises:
        RuntimeError: If torch cannot swap one of them because something else has its memory. None
            has changed then.
    """
    weights = [*weights]
    pairs = {module._parameters[name]: (name, new) for module, name, new in weights}
    done = []
    try:
        for old, (name, new) in pairs.items():
            if old is not new:
                _hand_over(old, new)
                _swap(name, old, new)
                done.append((old, new))
    except BaseException:
        for old, new in done:
            torch.utils.swap_tensors(old, new)
        raise
    for old, new in done:
        new.grad = None  # it has gone along
        if not old.is_inference():
            # An optimizer that has stepped it looks again at what has another version.
            torch.autograd.graph.increment_version(old)
    for module, _, _ in weights:
        # Of the instance: its class may be nn.Linear itself.
        module.extra_repr = functools.partial(_extra_repr, module)


def _hand_over(weight: nn.Parameter, successor: nn.Parameter) -> None:
    vars(successor).update(_attributes(weight))
    # The dictionaries themselves, so that the handles of registered hooks still remove them.
    successor._backward_hooks = weight._backward_hooks
    successor._post_accumulate_grad_hooks = weight._post_accumulate_grad_hooks
    successor.grad_dtype = weight.grad_dtype
    successor.grad = weight.grad


def _swap(name: str, old: nn.Parameter, new: nn.Parameter) -> None:
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
