"""Turning quantized weights of a model back into plain parameters.

Averages are kept in high precision: a moving average changes by less than half a step between
codes, so one in codes would stand still. ``AveragedModel`` copies the model; its copy is decoded.
"""

from typing import TypeVar

from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim.swa_utils import AveragedModel

from fp4adam.distributed.dtensor import is_dtensor, local
from fp4adam.nn.candidates import Filter, check_filter, check_module
from fp4adam.nn.replacement import check_no_replica, put_in
from fp4adam.tensors.quantized_tensor import QuantizedTensor

Model = TypeVar("Model", bound=nn.Module)


def dequantize_model(model: Model, filter: Filter | None = None) -> Model:
    """Replace quantized weights of ``model`` by plain ones of their decoded values, in place.

    The inverse of :func:`quantize_model`, for code that writes to weights in place or computes with
    them in high precision: merging adapters, starts such as PiSSA and OLoRA, pruning. Parameters
    stay the same objects, in their nominal dtypes. The values are those that the model computes
    with, not masters (:func:`export_masters` writes these); to quantize them again may round them.

    Args:
        model: Any module, a single layer for example; parameters of other packages' formats stay.
        filter: ``filter(module, name) -> bool`` says which modules lose their quantized weights;
            all by default. A tied weight has to be selected with all of its modules.

    Returns: ``model``.

    Raises:
        ValueError: If the model is wrapped by ``DistributedDataParallel`` or sharded by
            ``fully_shard``, or only some modules of a tied weight are selected.

    Nothing has been changed when it raises.
    """
    check_module(model)
    check_filter(filter)
    users: list[tuple[nn.Module, str, nn.Parameter]] = []
    kept: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        for key, param in module.named_parameters(recurse=False):
            if not isinstance(local(param), QuantizedTensor):
                continue
            place = f"{name}.{key}".removeprefix(".")
            if filter is not None and not filter(module, name):
                kept[param] = place
            elif is_dtensor(param):
                raise ValueError(
                    f"{place!r} must be whole to be dequantized, got a DTensor; call "
                    "dequantize_model before fully_shard, or export_masters"
                )
            else:
                users.append((module, key, param))
    for *_, param in users:
        if param in kept:
            raise ValueError(
                f"{kept[param]!r} must be selected by filter like the modules it is tied to, got "
                "one of them left out; select all or none"
            )
    if users:
        check_no_replica(model.modules())
        _make_plain(users)
    return model


def _make_plain(users: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    plain = {
        param: nn.Parameter(param.dequantize(param.dtype), param.requires_grad)
        for *_, param in users
    }
    put_in((module, key, plain[param]) for module, key, param in users)


def _decode_copy(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if isinstance(module, AveragedModel) and name == "module" and child is not None:
        members = ((m, *named) for m in child.modules() for named in m._parameters.items())
        _make_plain([each for each in members if isinstance(each[2], QuantizedTensor)])


nn_module.register_module_module_registration_hook(_decode_copy)
