"""Adapters of Transformer Engine's NVFP4Tensor, MXFP8Tensor, Float8BlockwiseQTensor, Float8Tensor.

The fields of this package are named after theirs. Data derived from a weight is either among the
fields, and so is written, or was dropped and is derived again when needed.
"""

import sys
from typing import Any, ClassVar

from torch import Tensor, nn

from fp4adam.formats.float8 import Float8Quantizer
from fp4adam.formats.float8_block import Float8BlockQuantizer
from fp4adam.formats.mxfp8 import MXFP8Quantizer
from fp4adam.formats.nvfp4 import NVFP4Quantizer
from fp4adam.interop.adapter import TensorAdapter, class_name, register_adapter
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.quantizer import Quantizer

MAJOR_VERSION = 2  # of Transformer Engine, whose attributes these are


class TransformerEngineAdapter(TensorAdapter):
    """The common part of the adapters.

    A tensor with a dtype or with memory that they do not know is refused: its bytes would be read
    as something else.
    """

    attributes = (
        "_rowwise_data",
        "_rowwise_scale_inv",
        "_columnwise_data",
        "_columnwise_scale_inv",
    )
    # By attribute, the name of the only dtype of codes or scales that is known.
    dtypes: ClassVar[dict[str, str]] = {"_fp8_dtype": "kFloat8E4M3"}

    def check(self, tensor: Tensor) -> dict[str, bool]:
        """The directions that a tensor stores, as arguments of a quantizer.

        Raises:
            ValueError: If it has a version, dtypes or memory that are not known.
        """
        kind = type(tensor).__name__
        version = getattr(sys.modules.get("transformer_engine"), "__version__", None)
        if version is not None and int(version.split(".")[0]) != MAJOR_VERSION:
            raise ValueError(
                f"transformer_engine must be version {MAJOR_VERSION}, got {version}: what the "
                f"attributes of its {kind} mean is not known; upgrade fp4adam"
            )
        for name, dtype in vars(tensor).items():
            if not name.endswith("_dtype") or name == "_dtype":
                continue
            known, actual = self.dtypes.get(name), getattr(dtype, "name", str(dtype))
            if known is None or not actual.endswith(known):
                raise ValueError(
                    f"{name} of a {kind} must be {known or 'absent'} to be stepped, got {actual}, "
                    "which this version would misread; quantize weights with another recipe"
                )
        inner = {name for name, _ in getattr(tensor, "_INNER_TENSORS", ())}
        if unknown := inner.difference(self.attributes):
            raise ValueError(
                f"memory of a {kind} must be in {', '.join(self.attributes)} to be stepped, got "
                f"{', '.join(sorted(unknown))} as well, which this version does not know; upgrade "
                "fp4adam, or quantize weights with another recipe"
            )
        return {
            usage: getattr(tensor, f"_{usage}_data", None) is not None
            for usage in ("rowwise", "columnwise")
        }

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


class NVFP4Adapter(TransformerEngineAdapter):
    """Adapter of NVFP4Tensor: 16x16 or 1x16 blocks, and two equal amaxes."""

    attributes = (*TransformerEngineAdapter.attributes, "_amax_rowwise", "_amax_columnwise")
    dtypes: ClassVar[dict[str, str]] = {
        "_fp4_dtype": "kFloat4E2M1",
        "_scale_dtype": "kFloat8E4M3",
    }

    # Of tensors and of their quantizers; both leave out what their version does not know.
    required: ClassVar[dict[str, Any]] = {
        "_row_scaled_nvfp4": False,
        "_nvfp4_use_4over6": False,
        "_nvfp4_e4m3_max": 448,
        "with_rht": False,
        "disable_second_level_scale": False,
        "stochastic_rounding": False,
    }

    def quantizer(self, tensor: Tensor) -> Quantizer:
        usages, quantizer = self.check(tensor), _quantizer_of(tensor)
        for name, value in self.required.items():
            actual = getattr(tensor if name[0] == "_" else quantizer, name, value)
            if actual != value:
                raise ValueError(
                    f"{name} of a {type(tensor).__name__} must be {value} to be stepped, got "
                    f"{actual}; leave it out of the recipe for weights"
                )
        return NVFP4Quantizer(
            **usages,
            two_dimensional=getattr(quantizer, "with_2d_quantization", False),
            optimize_for_gemm=getattr(tensor, "_with_gemm_swizzled_scales", False),
        )


class MXFP8Adapter(TransformerEngineAdapter):
    """Adapter of MXFP8Tensor: 1x32 and 32x1 blocks, or 32x32 blocks with equal codes twice."""

    def quantizer(self, tensor: Tensor) -> Quantizer:
        usages, quantizer = self.check(tensor), getattr(tensor, "_quantizer", None)
        square = getattr(quantizer, "with_2d_quantization", False)
        if square and not usages["rowwise"]:
            raise ValueError(
                f"rowwise codes of a {type(tensor).__name__} must be stored to be stepped with "
                "with_2d_quantization, got columnwise ones alone; keep rowwise usage"
            )
        return MXFP8Quantizer(
            **usages,
            two_dimensional=square,
            optimize_for_gemm=getattr(tensor, "_with_gemm_swizzled_scales", False),
        )

    # Transformer Engine would not make them again.
    drop_columnwise = TensorAdapter.drop_columnwise


class Float8BlockwiseAdapter(TransformerEngineAdapter):
    """Adapter of Float8BlockwiseQTensor: 128x128 or 1x128 blocks."""

    def quantizer(self, tensor: Tensor) -> Quantizer:
        usages, quantizer = self.check(tensor), _quantizer_of(tensor)
        return Float8BlockQuantizer(
            **usages,
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
        self.check(tensor)
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

    def drop_columnwise(self, tensor: Tensor) -> None:
        tensor._reset_caches()


def _is_delayed(quantizer: Any) -> bool:
    """Whether a Float8Tensor's quantizer takes a scale, rather than making it from values."""
    # Before 2.16, quantizers of current scaling have buffers named scale and amax as well.
    return hasattr(quantizer, "scale") and not hasattr(quantizer, "amax_epsilon")


def _has_transpose(tensor: Tensor) -> bool:
    """Whether a Float8Tensor has transposed codes, in a layout that a step can write."""
    if tensor._transpose is None or tensor._transpose_invalid:
        return False
    return tensor._data is None or tensor._transpose.is_contiguous()


def is_te_tensor(tensor: Any, name: str = "") -> bool:
    """Whether a tensor is of Transformer Engine's class ``name``, or of any with an adapter."""
    names = {class_name(base) for base in type(tensor).__mro__}
    return any(path in names and path.endswith(name) for path in ADAPTERS)


def workspaces_of(model: nn.Module) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
    """The quantized copies that Transformer Engine's modules keep of weights, for :func:`cast`.

    Modules make them in their first forward pass with ``is_first_microbatch``. One that no longer
    fits its weight is dropped, and made again by its module.

    Returns:
        The copies, and for each the parts of its weight along the first dimension.

    Raises:
        ValueError: If the model has no modules that keep copies.
    """
    keeping = [module for module in model.modules() if hasattr(module, "_fp8_workspaces")]
    if not keeping or all(getattr(m, "primary_weights_in_fp8", False) for m in keeping):
        kind = "whose weights are not quantized" if keeping else "of Transformer Engine"
        raise ValueError(
            f"model must have modules {kind} to have workspaces, got none in a "
            f"{type(model).__name__}; FP4Adam steps quantized weights themselves"
        )
    copies, weights = [], []
    for module in keeping:
        for name, copy in [*(module._fp8_workspaces or {}).items()]:
            # A fused weight may be split into several parameters.
            names = getattr(module, "weight_names", [name]) if name == "weight" else [name]
            parts = tuple(getattr(module, each) for each in names)
            shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
            is_whole = not any(hasattr(part, "device_mesh") for part in parts)
            is_there = all(part.device == copy.device for part in parts)
            if is_whole and is_there and shape == tuple(copy.shape):
                copies.append(copy)
                weights.append(parts)
            else:
                del module._fp8_workspaces[name]
    return copies, weights


def _quantizer_of(tensor: Tensor) -> Any:
    quantizer = getattr(tensor, "_quantizer", None)
    if quantizer is None:
        raise ValueError(
            f"_quantizer of a {type(tensor).__name__} must be the quantizer that it was made by, "
            "got None: it says which blocks share a scale; make the model inside "
            "quantized_model_init()"
        )
    return quantizer


_MODULE = "transformer_engine.pytorch.tensor"
ADAPTERS = {
    f"{_MODULE}.nvfp4_tensor.NVFP4Tensor": NVFP4Adapter(),
    f"{_MODULE}.mxfp8_tensor.MXFP8Tensor": MXFP8Adapter(),
    f"{_MODULE}.float8_blockwise_tensor.Float8BlockwiseQTensor": Float8BlockwiseAdapter(),
    f"{_MODULE}.float8_tensor.Float8Tensor": Float8Adapter(),
}
for _path, _adapter in ADAPTERS.items():
    register_adapter(_path, _adapter)
