"""NVFP4 weights as primary weights, under the names of Megatron's ``core.fp4_utils``.

Flags are those of :mod:`fp4adam.fp8_utils`; ``FP4_TENSOR_CLASS`` is this package's own.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from fp4adam.distributed.zero import cast_master_weights_to_nvfp4 as cast_master_weights_to_nvfp4
from fp4adam.formats.nvfp4 import NVFP4Quantizer, NVFP4Tensor
from fp4adam.fp8_utils import HAVE_TE as HAVE_TE
from fp4adam.fp8_utils import (
    dequantize_fp8_tensor,
    layer_context,
    quantize_param_shard,
    replace_raw_data,
)
from fp4adam.interop.transformer_engine import is_te_tensor

HAVE_TE_FP4_TENSOR_CLASS = True
FP4_TENSOR_CLASS = NVFP4Tensor
modify_nvfp4_rowwise_storage = modify_grouped_nvfp4_rowwise_storage = replace_raw_data
dequantize_fp4_tensor, quantize_nvfp4_param_shard = dequantize_fp8_tensor, quantize_param_shard


def is_nvfp4tensor(tensor: Any) -> bool:
    """Whether ``tensor`` is an :class:`NVFP4Tensor`, of this package or of Transformer Engine."""
    return isinstance(tensor, NVFP4Tensor) or is_te_tensor(tensor, "NVFP4Tensor")


def is_grouped_nvfp4tensor(tensor: Any) -> bool:
    """Whether ``tensor`` is an :class:`NVFP4Tensor` of this package, [weights, rows, cols]."""
    return isinstance(tensor, NVFP4Tensor) and tensor.dim() == 3


def get_nvfp4_rowwise_packed_shape(shape: Sequence[int]) -> torch.Size:
    """The shape of packed rowwise codes: the last dimension halved; ValueError if it is odd."""
    last = shape[-1:]  # empty for ()
    if any(size % 2 for size in last):
        raise ValueError(
            f"the last dimension must be even to be packed, got shape {tuple(shape)}; pad it, "
            "because a byte holds two codes"
        )
    return torch.Size((*shape[:-1], *(size // 2 for size in last)))


def get_fp4_align_size(fp4_recipe: Any = None) -> int:
    """The multiple that the token dimension is padded to: 128 tokens, which suits all kernels."""
    return 128


def get_fp4_recipe(config: Any) -> NVFP4Quantizer:
    """The quantizer of weights for a Megatron configuration, for :func:`fp4adam.quantized_init`.

    ValueError if ``config.fp4_recipe`` is not "nvfp4", or an enum of that value.
    """
    recipe = getattr(config.fp4_recipe, "value", config.fp4_recipe)
    if recipe != "nvfp4":
        raise ValueError(
            f"fp4_recipe must be 'nvfp4', got {recipe!r}; for other options pass a quantizer to "
            "fp4adam.quantized_init"
        )
    return NVFP4Quantizer()


def get_fp4_context(
    config: Any, layer_no: int = -1, is_init: bool = False
) -> contextlib.AbstractContextManager:
    """:func:`fp4adam.fp8_utils.get_fp8_context` for ``fp4``, ``fp4_param`` and ``fp4_recipe``."""
    return layer_context(is_init and config.fp4_param, config, layer_no, get_fp4_recipe)
