"""Averages of quantized models, which are kept in high precision.

A moving average changes by less than half a step between codes, so an average in codes would stand
still. ``torch.optim.swa_utils.AveragedModel`` copies the model; its copy is decoded.
"""

from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim.swa_utils import AveragedModel

from fp4adam.distributed.dtensor import is_dtensor
from fp4adam.nn.dequantize_model import make_plain
from fp4adam.tensors.quantized_tensor import QuantizedTensor


def _decode_copy(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if not (isinstance(module, AveragedModel) and name == "module" and child is not None):
        return
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for part in child.modules():
        for key, param in part.named_parameters(recurse=False):
            if isinstance(param, QuantizedTensor) and not is_dtensor(param):
                places.setdefault(param, []).append((part, key))
    make_plain(places)


nn_module.register_module_module_registration_hook(_decode_copy)
