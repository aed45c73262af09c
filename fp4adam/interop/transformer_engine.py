"""Adapters of Transformer Engine's NVFP4Tensor, MXFP8Tensor, Float8BlockwiseQTensor, Float8Tensor.

The fields of this package are named after theirs. Data derived from a weight is either among the
fields, and so is written, or was dropped and is derived again when needed.
"""

from typing import Any

from torch import Tensor, nn

from fp4adam.formats.float8 import Float8Quantizer
from fp4adam.formats.float8_block import Float8BlockQuantizer
from fp4adam.formats.mxfp8 import MXFP8Quantizer
from fp4adam.formats.nvfp4 import NVFP4Quantizer
from fp4adam.interop.adapter import TensorAdapter, class_name, register_adapter
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.quantizer import Quantizer

_FP8 = {"_fp8_dtype": "kFloat8E4M3"}
_BLOCKS = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")


class TransformerEngineAdapter(TensorAdapter):
    """Adapter of one class, by tables.

    Args:
        format: The class of this package's quantizer.
        options: By its options, where a tensor ("_name") or its quantizer ("name") has them.
        dtypes, required: By attribute, the only dtype or value that is known.
        drops_columnwise: False if Transformer Engine would not make columnwise codes again.
    """

    def __init__(
        self,
        format: type[Quantizer],
        options: dict[str, str],
        dtypes: dict[str, str] = _FP8,
        required: dict[str, Any] | None = None,
        attributes: tuple[str, ...] = _BLOCKS,
        drops_columnwise: bool = True,
    ) -> None:
        self.format, self.options, self.dtypes = format, options, dtypes
        self.required, self.attributes = required or {}, attributes
        if not drops_columnwise:
            self.drop_columnwise = None

    def quantizer(self, tensor: Tensor) -> Quantizer:
        self._check(tensor)
        named = {option: _read(tensor, name, False) for option, name in self.options.items()}
        return self.format(
            rowwise=tensor._rowwise_data is not None,
            columnwise=tensor._columnwise_data is not None,
            **named,
        )

    def _check(self, tensor: Tensor) -> None:
        """Raise ValueError if anything would be misread: a dtype, memory, an option."""
        kind = type(tensor).__name__
        if tensor._quantizer is None:
            raise ValueError(
                f"_quantizer of a {kind} must be the quantizer that it was made by, got None: it "
                "says which blocks share a scale; make the model inside quantized_model_init()"
            )
        dtypes = {n: x for n, x in vars(tensor).items() if n.endswith("_dtype") and n != "_dtype"}
        found = {name: getattr(x, "name", str(x)) for name, x in dtypes.items()}
        wanted: dict[str, Any] = {**dict.fromkeys(found), **self.dtypes, **self.required}
        for name, value in wanted.items():
            actual = found.get(name, _read(tensor, name, value))
            if actual != value:
                raise ValueError(
                    f"{name} of a {kind} must be {'absent' if value is None else value} to be "
                    f"stepped, got {actual}, which would be misread; leave it out of the recipe"
                )
        inner = {name for name, _ in getattr(tensor, "_INNER_TENSORS", ())}
        if unknown := inner.difference(self.attributes):
            raise ValueError(
                f"memory of a {kind} must be in {', '.join(self.attributes)} to be stepped, got "
                f"{', '.join(sorted(unknown))} as well; quantize weights with another recipe"
            )

    def fields(self, tensor: Tensor) -> dict[str, Tensor]:
        named = {name[1:]: getattr(tensor, name) for name in self.attributes}
        return {name: field for name, field in named.items() if field is not None}

    def drop_columnwise(self, tensor: Tensor) -> None:
        tensor.update_usage(rowwise_usage=True, columnwise_usage=False)


class Float8Adapter(TransformerEngineAdapter):
    """Adapter of Float8Tensor: one scale per tensor, from its current amax or from earlier ones.

    With delayed scaling, Transformer Engine keeps the history: a step multiplies by the quantizer's
    ``scale``, and raises its ``amax``. Its scales are quotients 448 / x; another number is taken as
    the nearest quotient, at most one unit in the last place away, and the decode scale is that of
    the quotient. The transposed codes are written if the tensor has valid ones; otherwise
    Transformer Engine makes them when it needs them.
    """

    def quantizer(self, tensor: Tensor) -> Quantizer:
        self._check(tensor)
        usages = dict(rowwise=tensor._data is not None, columnwise=_has_transpose(tensor))
        if _is_delayed(tensor._quantizer):
            # The history has the two entries that the scale of another package needs.
            return Float8Quantizer(
                **usages, scaling="delayed", amax_history_len=2, amax_compute_algo="most_recent"
            )
        named = {option: getattr(tensor._quantizer, option) for option in self.options}
        return Float8Quantizer(**usages, **named)

    def fields(self, tensor: Tensor) -> dict[str, Tensor]:
        fields = {"per_tensor_scale": tensor._scale_inv}
        if tensor._data is not None:
            fields["rowwise_data"] = tensor._data.view(flat_shape(tuple(tensor.shape)))
        if _has_transpose(tensor):
            fields["columnwise_data"] = tensor._transpose
        elif tensor._data is not None:
            # One that no step writes: strided, as that of a shard may be, or stale already.
            tensor._transpose_invalid = True
        fields |= zip(("scale", "amax"), self.given(tensor), strict=True)
        return fields

    def given(self, tensor: Tensor) -> tuple[Tensor | None, Tensor | None]:
        quantizer = tensor._quantizer
        return (quantizer.scale, quantizer.amax) if _is_delayed(quantizer) else (None, None)

    def drop_columnwise(self, tensor: Tensor) -> None:
        tensor._reset_caches()


def _read(tensor: Tensor, name: str, default: Any) -> Any:
    """An attribute of a tensor, or without "_" of its quantizer; versions have different ones."""
    return getattr(tensor if name[0] == "_" else tensor._quantizer, name, default)


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

    Modules make them in their first forward pass with ``is_first_microbatch``. Clear a module's
    ``_fp8_workspaces`` where weights have been moved or sharded since; ``cast`` refuses those.

    Returns the copies, and for each the parts of its weight along the first dimension. ValueError
    if the model has no modules that keep copies.
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
        for name, copy in (module._fp8_workspaces or {}).items():
            # A fused weight may be split into several parameters.
            names = getattr(module, "weight_names", [name]) if name == "weight" else [name]
            copies.append(copy)
            weights.append(tuple(getattr(module, each) for each in names))
    return copies, weights


_PATH = "transformer_engine.pytorch.tensor"
_SQUARE, _SWIZZLED = "with_2d_quantization", "_with_gemm_swizzled_scales"
_FLOAT8 = {name: name for name in ("force_pow_2_scales", "amax_epsilon")}
ADAPTERS = {
    f"{_PATH}.nvfp4_tensor.NVFP4Tensor": TransformerEngineAdapter(
        NVFP4Quantizer,
        {"two_dimensional": _SQUARE, "optimize_for_gemm": _SWIZZLED},
        {"_fp4_dtype": "kFloat4E2M1", "_scale_dtype": "kFloat8E4M3"},
        {
            "_row_scaled_nvfp4": False,
            "_nvfp4_use_4over6": False,
            "_nvfp4_e4m3_max": 448,
            "with_rht": False,
            "disable_second_level_scale": False,
            "stochastic_rounding": False,
        },
        (*_BLOCKS, "_amax_rowwise", "_amax_columnwise"),
    ),
    f"{_PATH}.mxfp8_tensor.MXFP8Tensor": TransformerEngineAdapter(
        MXFP8Quantizer,
        {"two_dimensional": _SQUARE, "optimize_for_gemm": _SWIZZLED},
        drops_columnwise=False,
    ),
    f"{_PATH}.float8_blockwise_tensor.Float8BlockwiseQTensor": TransformerEngineAdapter(
        Float8BlockQuantizer, {"two_dimensional": "_is_2D_scaled", **_FLOAT8}
    ),
    f"{_PATH}.float8_tensor.Float8Tensor": Float8Adapter(
        Float8Quantizer,
        _FLOAT8,
        attributes=("_data", "_transpose", "_transpose_invalid", "_scale_inv"),
    ),
}
for _name, _adapter in ADAPTERS.items():
    register_adapter(_name, _adapter)
