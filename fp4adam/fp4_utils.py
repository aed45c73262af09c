"""NVFP4 weights as primary weights, under the names of Megatron's ``core.fp4_utils``.

``HAVE_TE`` tells whether Transformer Engine is installed; nothing here imports it.
``HAVE_TE_FP4_TENSOR_CLASS`` tells whether there is a class of FP4 tensors for
:func:`is_nvfp4tensor`: always, as it is ``FP4_TENSOR_CLASS``, this package's own.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp4adam.distributed.cast_span import Out
from fp4adam.distributed.zero import cast_master_weights_to_nvfp4 as cast_master_weights_to_nvfp4
from fp4adam.distributed.zero import replace_raw_data
from fp4adam.formats.nvfp4 import NVFP4Quantizer, NVFP4Tensor
from fp4adam.fp8_utils import HAVE_TE as HAVE_TE
from fp4adam.fp8_utils import dequantize_fp8_tensor, layer_context
from fp4adam.interop.transformer_engine import is_te_tensor

HAVE_TE_FP4_TENSOR_CLASS = True
FP4_TENSOR_CLASS = NVFP4Tensor


def is_nvfp4tensor(tensor: Any) -> bool:
    """Whether ``tensor`` is an :class:`NVFP4Tensor`, of this package or of Transformer Engine."""
    return isinstance(tensor, NVFP4Tensor) or is_te_tensor(tensor, "NVFP4Tensor")


def is_grouped_nvfp4tensor(tensor: Any) -> bool:
    """Whether ``tensor`` is an :class:`NVFP4Tensor` of several weights, [weights, rows, cols].

    Transformer Engine keeps such a stack in a class of its own, which is not taken; here
    :func:`is_nvfp4tensor` is true of it as well.
    """
    return isinstance(tensor, NVFP4Tensor) and tensor.dim() == 3


def get_nvfp4_rowwise_packed_shape(shape: Sequence[int]) -> torch.Size:
    """The shape of a tensor's packed rowwise codes: last dimension halved; () stays ().

    Raises:
        ValueError: If the last dimension is odd.
    """
    if not shape:
        return torch.Size(shape)
    if shape[-1] % 2:
        raise ValueError(
            f"the last dimension must be even to be packed, got shape {tuple(shape)}; pad it, "
            "because a byte holds two codes"
        )
    return torch.Size((*shape[:-1], shape[-1] // 2))


def modify_nvfp4_rowwise_storage(fp4_tensor: NVFP4Tensor, new_rowwise_data: Tensor) -> None:
    """Move the rowwise codes of a tensor to other memory, such as a slice of a parameter buffer.

    As :func:`fp4adam.fp8_utils.replace_raw_data`; ValueError for another format.
    """
    _check_nvfp4(fp4_tensor)
    replace_raw_data(fp4_tensor, new_rowwise_data)


def modify_grouped_nvfp4_rowwise_storage(
    grouped_tensor: NVFP4Tensor, new_rowwise_data: Tensor
) -> None:
    """:func:`modify_nvfp4_rowwise_storage` for a stack of weights; ValueError for anything else."""
    if not is_grouped_nvfp4tensor(grouped_tensor):
        kind = type(grouped_tensor).__name__
        shape = tuple(getattr(grouped_tensor, "shape", ()))
        raise ValueError(
            f"grouped_tensor must be an NVFP4Tensor of three dimensions, got a {kind} of shape "
            f"{shape}; call modify_nvfp4_rowwise_storage for a single weight"
        )
    modify_nvfp4_rowwise_storage(grouped_tensor, new_rowwise_data)


def quantize_nvfp4_param_shard(
    model_params: Sequence[NVFP4Tensor],
    main_params: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    data_parallel_group: dist.ProcessGroup | None,
    fsdp_shard_model_params: Sequence[Out] | None = None,
) -> None:
    """:func:`fp4adam.fp4_utils.cast_master_weights_to_nvfp4` before a caller's own all-gather.

    :func:`fp4adam.fp8_utils.post_all_gather_processing` comes after it.
    """
    cast_master_weights_to_nvfp4(
        model_params,
        main_params,
        start_offsets,
        data_parallel_group,
        fsdp_shard_model_params,
        manual_post_all_gather_processing=True,
    )


def get_fp4_align_size(fp4_recipe: Any = None) -> int:
    """The multiple that the token dimension is padded to: 128 tokens, which suits all kernels."""
    return 128


def dequantize_fp4_tensor(fp4_tensor: NVFP4Tensor) -> Tensor:
    """The values in the tensor's nominal dtype; ValueError if it is not an NVFP4 tensor."""
    _check_nvfp4(fp4_tensor)
    return dequantize_fp8_tensor(fp4_tensor)


def _check_nvfp4(tensor: Any) -> None:
    if not is_nvfp4tensor(tensor):
        raise ValueError(
            f"fp4_tensor must be an NVFP4Tensor, got a {type(tensor).__name__}; fp4adam.fp8_utils "
            "has the functions of other formats"
        )


def get_fp4_recipe(config: Any) -> NVFP4Quantizer:
    """The quantizer of weights for a Megatron configuration, for :func:`fp4adam.quantized_init`.

    Raises:
        ValueError: If ``config.fp4_recipe`` is not "nvfp4", or an enum of that value.
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
    is_wanted = config.fp4_param if is_init else config.fp4
    return layer_context(is_wanted, config, layer_no, is_init, get_fp4_recipe)
