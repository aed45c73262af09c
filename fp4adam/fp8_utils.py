"""Quantized weights as primary weights, under the names of Megatron's ``core.fp8_utils``.

Those that Megatron's distributed optimizer, its parameter buffers and its checkpoints call.
``HAVE_TE`` tells whether Transformer Engine is installed; the other flags are always true.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fp4adam.distributed.cast import Out
from fp4adam.distributed.zero import cast_master_weights_to_fp8 as cast_master_weights_to_fp8
from fp4adam.distributed.zero import post_all_gather_processing as post_all_gather_processing
from fp4adam.distributed.zero import quantize_master_weights as quantize_master_weights
from fp4adam.distributed.zero import replace_raw_data as replace_raw_data
from fp4adam.formats.float8 import Float8Quantizer
from fp4adam.formats.float8_block import Float8BlockQuantizer
from fp4adam.formats.mxfp8 import MXFP8Quantizer, MXFP8Tensor
from fp4adam.interop.borrowed_tensor import BorrowedTensor
from fp4adam.interop.transformer_engine import is_te_tensor
from fp4adam.nn.quantize_model import quantized_init
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer

HAVE_TE = importlib.util.find_spec("transformer_engine") is not None
HAVE_TE_FP8_TENSOR_CLASS = HAVE_TE_MXFP8TENSOR = True
FP8_TENSOR_CLASS = QuantizedTensor
_RECIPES = dict(tensorwise=Float8Quantizer, blockwise=Float8BlockQuantizer, mxfp8=MXFP8Quantizer)


def is_float8tensor(tensor: Any) -> bool:
    """Whether ``tensor`` is quantized, in any format, by this package or Transformer Engine."""
    return isinstance(tensor, QuantizedTensor) or is_te_tensor(tensor)


def is_mxfp8tensor(tensor: Any) -> bool:
    """Whether ``tensor`` is an :class:`MXFP8Tensor`, of this package or of Transformer Engine."""
    return isinstance(tensor, MXFP8Tensor) or is_te_tensor(tensor, "MXFP8Tensor")


def is_grouped_tensor(tensor: Any) -> bool:
    """False: a stack of weights, [weights, rows, cols], is one tensor here like any other."""
    return False


is_grouped_tensor_with_quantized_storage = is_grouped_mxfp8tensor = is_grouped_tensor


def copy_tensor_to_quantized_param(param: Tensor, src: Tensor) -> None:
    """Quantize ``src``, float32, bfloat16 or float16 of as many elements, into ``param``."""
    param.detach().copy_(src.view(param.shape))


def copy_tensors_to_quantized_params(params: Sequence[Tensor], srcs: Sequence[Tensor]) -> None:
    """:func:`copy_tensor_to_quantized_param` for as many parameters; else ValueError."""
    for param, src in zip(params, srcs, strict=True):
        copy_tensor_to_quantized_param(param, src)


def dequantize_fp8_tensor(fp8_tensor: Tensor) -> Tensor:
    """The values in the tensor's nominal dtype; ValueError if it is not a quantized tensor."""
    own = BorrowedTensor(fp8_tensor).tensor if is_te_tensor(fp8_tensor) else fp8_tensor
    if isinstance(own, QuantizedTensor):
        return own.dequantize()
    raise ValueError(
        f"fp8_tensor must be a quantized tensor, got a {type(fp8_tensor).__name__}; other tensors "
        "have their values already"
    )


def get_fp8_align_size(fp8_recipe: Any) -> int:
    """The multiple that the token dimension is padded to: 32 for "mxfp8", else 16, in tokens."""
    return 32 if getattr(fp8_recipe, "value", fp8_recipe) == "mxfp8" else 16


modify_underlying_storage = replace_raw_data


def quantize_param_shard(
    model_params: Sequence[Tensor],
    main_params: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    data_parallel_group: dist.ProcessGroup | None,
    fsdp_shard_model_params: Sequence[Out] | None = None,
) -> None:
    """:func:`quantize_master_weights` before an all-gather of the caller's own."""
    arguments = model_params, main_params, start_offsets, data_parallel_group
    quantize_master_weights(*arguments, fsdp_shard_model_params, True)


def correct_amax_history_if_needed(model: Iterable[nn.Module]) -> None:
    """Nothing: copies between tensors write no amax into a history."""


def is_first_last_bf16_layer(config: Any, layer_no: int) -> bool:
    """Whether a layer, counted from 0, is among the first and last that stay in BF16.

    ``config`` has ``first_last_layers_bf16``, ``num_layers``, ``num_layers_at_start_in_bf16`` and
    ``num_layers_at_end_in_bf16``; -1 is no layer in particular.
    """
    if layer_no < 0 or not config.first_last_layers_bf16:
        return False
    end = config.num_layers - config.num_layers_at_end_in_bf16
    return not config.num_layers_at_start_in_bf16 <= layer_no < end


def get_fp8_recipe(config: Any) -> Quantizer:
    """The quantizer of weights for a Megatron configuration, for :func:`fp4adam.quantized_init`.

    ``config.fp8_recipe`` is "tensorwise", "blockwise", "mxfp8" or "delayed", which also takes
    ``fp8_amax_history_len``, ``fp8_amax_compute_algo`` and ``fp8_margin``; or an enum of these.
    """
    recipe = getattr(config.fp8_recipe, "value", config.fp8_recipe)
    if recipe == "delayed":
        return Float8Quantizer(
            scaling="delayed",
            amax_history_len=config.fp8_amax_history_len,
            amax_compute_algo=config.fp8_amax_compute_algo,
            margin=config.fp8_margin,
        )
    if recipe in _RECIPES:
        return _RECIPES[recipe]()
    raise ValueError(
        f"fp8_recipe must be one of delayed, {', '.join(_RECIPES)}, got {recipe!r}; for other "
        "options pass a quantizer to fp4adam.quantized_init"
    )


def get_fp8_context(
    config: Any, layer_no: int = -1, is_init: bool = False
) -> contextlib.AbstractContextManager:
    """The context that Megatron builds (``is_init``) or runs a layer in.

    ``quantized_init`` of the recipe where a layer with quantized weights is built, else one that
    does nothing. ``config`` has ``fp8``, ``fp8_param``, and the entries that
    :func:`is_first_last_bf16_layer` and :func:`get_fp8_recipe` read.
    """
    return layer_context(is_init and config.fp8_param, config, layer_no, get_fp8_recipe)


def layer_context(
    is_quantized: Any, config: Any, layer_no: int, recipe: Callable[[Any], Quantizer]
) -> contextlib.AbstractContextManager:
    """The context of a layer: that of ``recipe(config)`` if it is built with quantized weights."""
    if not is_quantized or is_first_last_bf16_layer(config, layer_no):
        return contextlib.nullcontext()
    return quantized_init(recipe(config))


def get_fp8_disabled_context(
    config: Any, is_init: bool = False
) -> contextlib.AbstractContextManager:
    """The context for a part of a layer that stays in high precision; ``config`` is ignored."""
    return quantized_init(enabled=False) if is_init else contextlib.nullcontext()
