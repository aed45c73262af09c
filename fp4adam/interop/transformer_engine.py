"""Adapters of Transformer Engine's NVFP4Tensor, MXFP8Tensor, Float8BlockwiseQTensor, Float8Tensor.

The fields of this package are named after theirs. Data derived from a weight is either among the
fields, and so is written, or was dropped and is derived again when needed.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from fp4adam.formats.float8 import Float8Quantizer
from fp4adam.formats.float8_block import Float8BlockQuantizer
from fp4adam.formats.mxfp8 import MXFP8Quantizer
from fp4adam.formats.nvfp4 import NVFP4Quantizer
from fp4adam.interop.adapter import TensorAdapter, find_adapter, is_foreign, register_adapter
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.quantizer import Quantizer


class TransformerEngineAdapter(TensorAdapter):
    """The common part of the adapters."""

    attributes = (
        "_rowwise_data",
        "_rowwise_scale_inv",
        "_columnwise_data",
        "_columnwise_scale_inv",
    )

    def fields(self, tensor: Tensor) -> dict[str, Tensor]:
        named = {name[1:]: getattr(tensor, name) for name in self.attributes}
        return {name: field for name, field in named.items() if field is not None}

    def drop_columnwise(self, tensor: Tensor) -> None:
        tensor.update_usage(rowwise_usage=True, columnwise_usage=False)

    def get_high_precision_init_val(self, tensor: Tensor) -> Tensor | None:
        getter = getattr(tensor, "get_high_precision_init_val", None)
        return None if getter is None else getter()

    def clear_high_precision_init_val(self, tensor: Tensor) -> None:
        if hasattr(tensor, "clear_high_precision_init_val"):
            tensor.clear_high_precision_init_val()

    def _usages(self, tensor: Tensor) -> dict[str, bool]:
        """The directions that the tensor stores, as arguments of a quantizer."""
        return {
            usage: getattr(tensor, f"_{usage}_data") is not None
            for usage in ("rowwise", "columnwise")
        }


class NVFP4Adapter(TransformerEngineAdapter):
    """Adapter of NVFP4Tensor: 16x16 or 1x16 blocks, and two equal amaxes."""

    attributes = (*TransformerEngineAdapter.attributes, "_amax_rowwise", "_amax_columnwise")

    def quantizer(self, tensor: Tensor) -> Quantizer:
        quantizer = _quantizer_of(tensor)
        _require(tensor, "_row_scaled_nvfp4", False, "leave it False for weights")
        _require(quantizer, "with_rht", False, "leave it False for weights", tensor)
        _require(quantizer, "stochastic_rounding", False, "leave it False for weights", tensor)
        adaptive = None
        if getattr(tensor, "_nvfp4_use_4over6", False):
            adaptive = quantizer.nvfp4_4over6_err_mode.lower()
        else:
            _require(tensor, "_nvfp4_e4m3_max", 448, "only 4over6 has another bound")
        return NVFP4Quantizer(
            **self._usages(tensor),
            two_dimensional=getattr(quantizer, "with_2d_quantization", False),
            adaptive=adaptive,
            bound=getattr(tensor, "_nvfp4_e4m3_max", 448),
            optimize_for_gemm=_is_swizzled(tensor),
        )


class MXFP8Adapter(TransformerEngineAdapter):
    """Adapter of MXFP8Tensor: 1x32 and 32x1 blocks."""

    def quantizer(self, tensor: Tensor) -> Quantizer:
        _require_e4m3(tensor)
        quantizer = getattr(tensor, "_quantizer", None)
        _require(quantizer, "with_2d_quantization", False, "leave it False", tensor)
        return MXFP8Quantizer(**self._usages(tensor), optimize_for_gemm=_is_swizzled(tensor))


class Float8BlockwiseAdapter(TransformerEngineAdapter):
    """Adapter of Float8BlockwiseQTensor: 128x128 or 1x128 blocks."""

    def quantizer(self, tensor: Tensor) -> Quantizer:
        _require_e4m3(tensor)
        quantizer = _quantizer_of(tensor)
        return Float8BlockQuantizer(
            **self._usages(tensor),
            two_dimensional=tensor._is_2D_scaled,
            force_pow_2_scales=quantizer.force_pow_2_scales,
            amax_epsilon=quantizer.amax_epsilon,
        )


class Float8Adapter(TransformerEngineAdapter):
    """Adapter of Float8Tensor: one scale per tensor, from its current amax or from earlier ones.

    With delayed scaling, Transformer Engine keeps the history: a step multiplies by the quantizer's
    ``scale``, and raises its ``amax``. Its scales are quotients 448 / x; another number is taken as
    the nearest quotient, at most one unit in the last place away, and the decode scale is that of
    the quotient. The transposed codes are written if the tensor has valid
    ones; otherwise Transformer Engine makes them when it needs them.
    """

    attributes = ("_data", "_transpose", "_transpose_invalid", "_scale_inv")

    def quantizer(self, tensor: Tensor) -> Quantizer:
        _require_e4m3(tensor)
        quantizer = _quantizer_of(tensor)
        usages = dict(rowwise=tensor._data is not None, columnwise=_has_transpose(tensor))
        if _is_delayed(quantizer):
            # The history has the two entries that the scale of another package needs.
            return Float8Quantizer(
                **usages, scaling="delayed", amax_history_len=2, amax_compute_algo="most_recent"
            )
        if not hasattr(quantizer, "amax_epsilon"):
            raise ValueError(
                "_quantizer of a Float8Tensor must be a Float8CurrentScalingQuantizer or a "
                f"Float8Quantizer to be stepped, got a {type(quantizer).__name__}; build the model "
                "with the recipe Float8CurrentScaling or DelayedScaling"
            )
        return Float8Quantizer(
            **usages,
            force_pow_2_scales=quantizer.force_pow_2_scales,
            amax_epsilon=quantizer.amax_epsilon,
        )

    def fields(self, tensor: Tensor) -> dict[str, Tensor]:
        fields = {"per_tensor_scale": tensor._scale_inv}
        if tensor._data is not None:
            fields["rowwise_data"] = tensor._data.view(flat_shape(tuple(tensor.shape)))
        if _has_transpose(tensor):
            fields["columnwise_data"] = tensor._transpose
        elif tensor._data is not None:
            # One that no step writes: strided, as that of a shard may be, or stale already.
            tensor._transpose_invalid = True
        if _is_delayed(tensor._quantizer):
            fields |= {"scale": tensor._quantizer.scale, "amax": tensor._quantizer.amax}
        return fields

    def given(self, tensor: Tensor) -> tuple[Tensor | None, Tensor | None]:
        quantizer = tensor._quantizer
        return (quantizer.scale, quantizer.amax) if _is_delayed(quantizer) else (None, None)

    def drop_columnwise(self, tensor: Tensor) -> None:
        tensor._reset_caches()


def _is_swizzled(tensor: Tensor) -> bool:
    """Whether the scales of a tensor are in the order of GEMMs, which its quantizer asked for."""
    return getattr(tensor, "_with_gemm_swizzled_scales", False)


def _is_delayed(quantizer: Any) -> bool:
    """Whether a Float8Tensor's quantizer takes a scale, rather than making it from values."""
    return hasattr(quantizer, "scale") and hasattr(quantizer, "amax")


def _has_transpose(tensor: Tensor) -> bool:
    """Whether a Float8Tensor has transposed codes, in a layout that a step can write."""
    if tensor._transpose is None or tensor._transpose_invalid:
        return False
    rows, _ = flat_shape(tuple(tensor.shape))
    return tensor._data is None or (tensor._transpose.is_contiguous() and not rows % 16)


def is_nvfp4_tensor(tensor: Any) -> bool:
    """Whether a tensor is Transformer Engine's NVFP4Tensor."""
    is_other = isinstance(tensor, Tensor) and is_foreign(tensor)
    return is_other and isinstance(find_adapter(tensor), NVFP4Adapter)


class Workspace(NamedTuple):
    """A quantized copy of a weight.

    Attributes:
        weights: The weight, or its parts along the first dimension.
        tensor: The copy.
        drop: Makes its module forget it and make another one; None if no module made it.
    """

    weights: tuple[Tensor, ...]
    tensor: Tensor
    drop: Callable[[], Any] | None = None


def workspaces_of(model: nn.Module) -> Iterator[Workspace]:
    """The workspaces that Transformer Engine's modules keep now."""
    for module in model.modules():
        workspaces = vars(module).get("_fp8_workspaces")
        if not workspaces:
            continue
        for name, tensor in list(workspaces.items()):
            # A fused weight may be split into several parameters.
            names = getattr(module, "weight_names", [name]) if name == "weight" else [name]
            # Modules' own lookup of attributes takes longer than all else here.
            own = module._parameters
            weights = tuple([own[n] if n in own else getattr(module, n) for n in names])
            yield Workspace(weights, tensor, partial(workspaces.pop, name, None))


def check_has_workspaces(model: nn.Module) -> None:
    """Raise ValueError unless a module keeps workspaces, now or after a forward pass."""
    keeping = [module for module in model.modules() if hasattr(module, "_fp8_workspaces")]
    if not keeping or all(getattr(m, "primary_weights_in_fp8", False) for m in keeping):
        kind = "whose weights are not quantized" if keeping else "of Transformer Engine"
        raise ValueError(
            f"model must have modules {kind} to have workspaces, got none in a "
            f"{type(model).__name__}; pass {{weight: quantized_copy}} for other modules, while "
            "FP4Adam steps quantized weights themselves"
        )


def _quantizer_of(tensor: Tensor) -> Any:
    quantizer = getattr(tensor, "_quantizer", None)
    if quantizer is None:
        raise ValueError(
            f"_quantizer of a {type(tensor).__name__} must be the quantizer that it was made by, "
            "got None: it says which blocks share a scale; make the model inside "
            "quantized_model_init()"
        )
    return quantizer


def _require(owner: Any, name: str, value: Any, cure: str, tensor: Tensor | None = None) -> None:
    """Raise ValueError if an attribute exists and its value is not the supported one."""
    if (actual := getattr(owner, name, value)) != value:
        kind = type(owner if tensor is None else tensor).__name__
        raise ValueError(f"{name} of a {kind} must be {value} to be stepped, got {actual}; {cure}")


def _require_e4m3(tensor: Tensor) -> None:
    dtype = tensor._fp8_dtype
    if "E4M3" not in getattr(dtype, "name", str(dtype)):
        raise ValueError(
            f"_fp8_dtype of a {type(tensor).__name__} must be E4M3 to be stepped, got {dtype}; "
            "weights of a hybrid recipe are E4M3 as well"
        )


_MODULE = "transformer_engine.pytorch.tensor"
register_adapter(f"{_MODULE}.nvfp4_tensor.NVFP4Tensor", NVFP4Adapter())
register_adapter(f"{_MODULE}.mxfp8_tensor.MXFP8Tensor", MXFP8Adapter())
register_adapter(
    f"{_MODULE}.float8_blockwise_tensor.Float8BlockwiseQTensor", Float8BlockwiseAdapter()
)
register_adapter(f"{_MODULE}.float8_tensor.Float8Tensor", Float8Adapter())
