"""Replacement of a weight by a quantized one or back, with attributes, hooks and gradient.

First everything is checked, then new parameters are prepared, then all of them are put in.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

from fp4adam.distributed.dtensor import is_dtensor, local
from fp4adam.nn.summary import format_name
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.retired import retire


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
    for attribute in _attributes(weight, successor):
        is_plain = hasattr(nn.Parameter, attribute)
        if attribute in vars(successor) or (hasattr(type(successor), attribute) and not is_plain):
            raise ValueError(
                f"weight of layer {name!r} must have no attribute {attribute!r} to be quantized, "
                f"which {type(successor).__name__} has itself, got one; rename it"
            )


def check_no_replica(modules: Iterable[nn.Module], weights: Sequence[nn.Parameter]) -> None:
    """Raise ValueError if DistributedDataParallel has taken one of the parameters already."""
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            taken = set(module.parameters())
            if any(weight in taken for weight in weights):
                raise ValueError(
                    "model must not be wrapped by DistributedDataParallel yet, got one that is: it "
                    "would not reduce the gradients of new parameters; quantize the model first"
                )


def _attributes(weight: nn.Parameter, successor: nn.Parameter) -> dict[str, Any]:
    """Attributes that users have set on a parameter, such as ``tensor_model_parallel``."""
    own = {"_is_param", "_replaced_in"}
    if isinstance(weight, QuantizedTensor):
        own |= vars(weight.detach()).keys()
    return {name: value for name, value in vars(weight).items() if name not in own}


def hand_over(weight: nn.Parameter, successor: nn.Parameter) -> None:
    """Give ``successor`` the attributes, hooks and gradient of ``weight``, which keeps them too."""
    vars(successor).update(_attributes(weight, successor))
    # The dictionaries themselves, so that the handles of registered hooks still remove them.
    successor._backward_hooks = weight._backward_hooks
    successor._post_accumulate_grad_hooks = weight._post_accumulate_grad_hooks
    successor.grad_dtype = weight.grad_dtype
    successor.grad = weight.grad


def completed(change: Callable[[], None]) -> None:
    """Call ``change``; if Ctrl-C interrupts it, once more, so that all of it or nothing is done.

    Args:
        change: May be called again, whatever part of it has been done, and comes to the same.
    """
    try:
        change()
    except KeyboardInterrupt:
        change()
        raise


def put_in(weights: Iterable[tuple[nn.Module, str, nn.Parameter]]) -> None:
    """Make each parameter that of its module and name; if one module refuses, none changes.

    The layers then show the format, and an optimizer that still has their old parameters can tell.
    """
    found = [(module, name, module._parameters[name], weight) for module, name, weight in weights]
    completed(functools.partial(_exchange, found))


def _exchange(found: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]) -> None:
    """Exchange old parameters of modules for new ones."""
    try:
        for module, name, _, weight in found:
            setattr(module, name, weight)
    except Exception:
        for module, name, old, _ in found:
            module._parameters[name] = old
        raise
    for module, _, old, weight in found:
        if old is not weight:
            retire(old, module)
        # Of the instance: its class may be nn.Linear itself.
        module.extra_repr = functools.partial(_extra_repr, module)


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
