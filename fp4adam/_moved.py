"""Where modules of version 0.1 have moved, so that what was pickled then still loads.

``pickle`` looks classes up by the module that they were in. Nothing new belongs here.
"""

import importlib
import sys
import types
from typing import Any

import torch

from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.storage import STORAGE_NAMES, GlobalSpec, SharedStorage, Storage


class _Origin:
    """What tensors on one storage shared; pickled attributes become its own."""

    shared: SharedStorage | None = None

    def shared_storage(self, tensors: Storage) -> SharedStorage:
        """The same for all tensors that had this origin."""
        if self.shared is None:
            state = vars(self)
            names = ("pending", "rows", "first_row", "unsettled", "name", "scale_group")
            kept = {name: state[name] for name in names}
            self.shared = SharedStorage(tensors, global_spec=state["whole"], **kept)
        return self.shared


def _rebuild_quantized_tensor(
    cls: type[QuantizedTensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> QuantizedTensor:
    attributes = dict(attributes)
    inner = {name: attributes.pop(f"_{name}", None) for name in STORAGE_NAMES}
    quantizer, origin = attributes.pop("quantizer"), attributes.pop("_origin")
    shared = origin.shared_storage(Storage(**inner))
    tensor = cls(shape, dtype, quantizer, shared, requires_grad)
    tensor._start = attributes.pop("_start")
    del attributes["_piece"]
    tensor.__dict__.update(attributes)
    if origin.init_val is not None:
        tensor._high_precision_init_val = origin.init_val
    return tensor


# What pickles and checkpoints of version 0.1 name: by module, where it is now, and names in it.
_MOVED = {
    "quantized_tensor": ("tensors.quantized_tensor", ()),
    "row_window": ("tensors.storage", ()),
    "quantizer": ("tensors.quantizer", ("Operands",)),
    "nvfp4": ("formats.nvfp4", ("NVFP4Tensor", "NVFP4Quantizer")),
    "mxfp8": ("formats.mxfp8", ("MXFP8Tensor", "MXFP8Quantizer")),
    "float8_block": ("formats.float8_block", ("Float8BlockTensor", "Float8BlockQuantizer")),
    "scale_groups": ("formats.scale_groups", ("ScaleGroup", "hf_scale_groups")),
    "fused_adam": ("optim.fused_adam", ("FusedAdam",)),
    "fp4_adam": ("optim.fp4_adam", ("FP4Adam",)),
}
# Names of which there is no equal now.
_REPLACED = {
    "quantized_tensor": {"_rebuild_quantized_tensor": _rebuild_quantized_tensor},
    "row_window": {"Origin": _Origin, "Whole": GlobalSpec},
}


def install() -> None:
    """Make the old paths importable, and known to ``torch.load(weights_only=True)``."""
    for old, (new, names) in _MOVED.items():
        path, module = f"fp4adam.{old}", importlib.import_module(f"fp4adam.{new}")
        found = {name: getattr(module, name) for name in names}
        if old in _REPLACED:
            found |= _REPLACED[old]
            module = types.ModuleType(path, module.__doc__)
            vars(module).update(found)
        sys.modules[path] = module
        torch.serialization.add_safe_globals(
            [(value, f"{path}.{name}") for name, value in found.items()]
        )
