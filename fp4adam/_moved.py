"""Where modules of version 0.1 have moved, so that what was pickled then still loads.

``pickle`` looks classes up by the module that they were in. Nothing new belongs here.
"""

import importlib
import sys

import torch

# What pickles and checkpoints of version 0.1 name.
_MOVED = {
    "quantized_tensor": ("tensors.quantized_tensor", ("_rebuild_quantized_tensor",)),
    "row_window": ("tensors.row_window", ("Origin", "Whole")),
    "quantizer": ("tensors.quantizer", ("Operands",)),
    "nvfp4": ("formats.nvfp4", ("NVFP4Tensor", "NVFP4Quantizer")),
    "mxfp8": ("formats.mxfp8", ("MXFP8Tensor", "MXFP8Quantizer")),
    "float8_block": ("formats.float8_block", ("Float8BlockTensor", "Float8BlockQuantizer")),
    "scale_groups": ("formats.scale_groups", ("ScaleGroup", "hf_scale_groups")),
    "fused_adam": ("optim.fused_adam", ("FusedAdam",)),
    "fp4_adam": ("optim.fp4_adam", ("FP4Adam",)),
    # Megatron imports it by this path.
    "fp4_utils": ("distributed.fp4_utils", ()),
}


def install() -> None:
    """Make the old paths importable, and known to ``torch.load(weights_only=True)``."""
    for old, (new, names) in _MOVED.items():
        module = importlib.import_module(f"fp4adam.{new}")
        sys.modules[f"fp4adam.{old}"] = module
        torch.serialization.add_safe_globals(
            [(getattr(module, name), f"fp4adam.{old}.{name}") for name in names]
        )
