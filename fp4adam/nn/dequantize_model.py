"""Turning quantized weights of a model back into plain parameters.

Averages are kept in high precision: a moving average changes by less than half a step between
codes, so one in codes would stand still. ``AveragedModel`` copies the model; its copy is decoded.
"""

from collections.abc import Callable
from typing import TypeVar

from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim.swa_utils import AveragedModel

from fp4adam.distributed.dtensor import is_dtensor, local
from fp4adam.nn.candidates import check_module
from fp4adam.nn.replacement import check_no_replica, put_in
from fp4adam.tensors.quantized_tensor import QuantizedTensor

Model = TypeVar("Model", bound=nn.Module)


def dequantize_model(model: Model, filter: Callable[[nn.Module, str], bool] | None = None) -> Model:
    """Replace quantized weights of ``model`` by plain ones of their decoded values, in place.

    The inverse of :func:`quantize_model`, for code that writes to weights in place or computes with
    them in high precision: merging adapters, starts such as PiSSA and OLoRA, pruning. Each
    quantized parameter becomes a plain one in its nominal dtype; the object stays, with its
    attributes, hooks and gradient. The values are those
    that the model computes with, not masters (:func:`export_masters` writes these); to quantize
    them again may round them again.

    Args:
        model: Any module, a single layer for example; parameters of other packages' formats stay.
        filter: ``filter(module, name) -> bool`` says which modules lose their quantized weights;
            all by default. A tied weight has to be selected with all of its modules. Names are
            those of ``model.named_modules()``.

    Returns:
        ``model``.

    Raises:
        ValueError: If the model is wrapped by ``DistributedDataParallel`` or sharded by
            ``fully_shard``, or only some modules of a tied weight are selected.
        TypeError: If an argument has another type than above.

    Nothing has been changed when it raises. Parameters stay the same objects.
    """
    check_module(model)
    if not (filter is None or callable(filter)):
        raise TypeError(
            f"filter must be a function of a module and its name, got {filter!r}; pass "
            "lambda module, name: name.startswith('layers.0.')"
        )
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    kept: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        for key, param in module.named_parameters(recurse=False):
            if not isinstance(local(param), QuantizedTensor):
                continue
            place = f"{name}.{key}".removeprefix(".")
            if filter is not None and not filter(module, name):
                kept.setdefault(param, place)
            elif is_dtensor(param):
                raise ValueError(
                    f"{place!r} must be whole to be dequantized, got a DTensor; call "
                    "dequantize_model before fully_shard, or export_masters"
                )
            else:
                places.setdefault(param, []).append((module, key))
    for param in places:
        if param in kept:
            raise ValueError(
                f"{kept[param]!r} must be selected by filter like the modules it is tied to, got "
                "one of them left out; select all or none"
            )
    check_no_replica(model.modules(), [*places])
    _make_plain(places)
    return model


def _make_plain(places: dict[nn.Parameter, list[tuple[nn.Module, str]]]) -> None:
    """Put decoded parameters in the places, module and name, of quantized ones."""
    plain = [
        nn.Parameter(param.detach().dequantize(param.dtype), param.requires_grad)
        for param in places
    ]
    put_in(
        (module, key, successor)
        for successor, users in zip(plain, places.values(), strict=True)
        for module, key in users
    )


def _decode_copy(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if not (isinstance(module, AveragedModel) and name == "module" and child is not None):
        return
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for part in child.modules():
        for key, param in part.named_parameters(recurse=False):
            if isinstance(param, QuantizedTensor) and not is_dtensor(param):
                places.setdefault(param, []).append((part, key))
    _make_plain(places)


nn_module.register_module_module_registration_hook(_decode_copy)
