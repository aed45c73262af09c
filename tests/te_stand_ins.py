"""Stand-ins for Transformer Engine's tensors, which exist on a GPU only.

They have its names, attributes and buffers, and the operators that tests need; their bytes are
those of this package, which tests/golden compares with Transformer Engine's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
)
from fp4adam.formats import minifloat
from helpers import assert_identical, bits

aten = torch.ops.aten
E4M3 = SimpleNamespace(name="kFloat8E4M3")

# Scales of a row are padded, and those of a column as well.
SHAPE = (32, 96)
QUANTIZERS = {
    "nvfp4": NVFP4Quantizer(),
    "nvfp4-1d": NVFP4Quantizer(two_dimensional=False),
    "nvfp4-columnwise": NVFP4Quantizer(rowwise=False),
    "nvfp4-swizzled": NVFP4Quantizer(optimize_for_gemm=True),
    "mxfp8": MXFP8Quantizer(),
    "mxfp8-swizzled": MXFP8Quantizer(optimize_for_gemm=True),
    "mxfp8-2d": MXFP8Quantizer(two_dimensional=True),
    "mxfp8-2d-swizzled": MXFP8Quantizer(two_dimensional=True, optimize_for_gemm=True),
    "float8block": Float8BlockQuantizer(),
    "float8block-1d": Float8BlockQuantizer(two_dimensional=False, force_pow_2_scales=False),
    "float8": Float8Quantizer(),
    "float8-rowwise": Float8Quantizer(columnwise=False, force_pow_2_scales=True, amax_epsilon=4),
}


class Wrapper(torch.Tensor):
    """A tensor whose memory is in attributes that only its package knows."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, **attributes: Any) -> Wrapper:
        device = next(x.device for x in attributes.values() if isinstance(x, Tensor))
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, **attributes: Any) -> None:
        self.attributes = list(attributes)
        for name, value in attributes.items():
            setattr(self, name, value)

    def with_memory(self, function: Any) -> Wrapper:
        values = {name: getattr(self, name) for name in self.attributes}
        new = {n: function(x) if isinstance(x, Tensor) else x for n, x in values.items()}
        return type(self)(tuple(self.shape), self.dtype, **new)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return args[0].with_memory(lambda inner: inner)
        if func is aten.clone.default:
            return args[0].with_memory(torch.clone)
        if func is aten.copy_.default:
            for name in args[0].attributes:
                if isinstance(getattr(args[0], name), Tensor):
                    getattr(args[0], name).copy_(getattr(args[1], name))
            return args[0]
        raise NotImplementedError(f"{func} of {cls.__name__}")

    def update_usage(self, rowwise_usage: bool, columnwise_usage: bool) -> None:
        assert rowwise_usage and not columnwise_usage
        self._columnwise_data = self._columnwise_scale_inv = None


class Float8Wrapper(Wrapper):
    """The operators and hooks of Transformer Engine's Float8Tensor that FSDP2 needs."""

    def _reset_caches(self) -> None:
        self._transpose_invalid = True

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return minifloat.e4m3_value(self._data).mul_(self._scale_inv).to(dtype)

    def on(self, data: Tensor, scale_inv: Tensor | None = None) -> Float8Wrapper:
        """A tensor with other codes and without transposed ones."""
        memory = dict(_data=data, _transpose=None)
        memory["_scale_inv"] = self._scale_inv if scale_inv is None else scale_inv
        options = dict(_fp8_dtype=E4M3, _transpose_invalid=True, _quantizer=self._quantizer)
        return type(self)(tuple(data.shape), self.dtype, **memory, **options)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        tensor, *rest = args
        if func in (aten.view.default, aten.slice.Tensor, aten.as_strided.default):
            return tensor.on(func(tensor._data, *rest, **(kwargs or {})))
        if func is aten.split.Tensor:
            return [*map(tensor.on, func(tensor._data, *rest))]
        if func is aten.new_zeros.default:
            return tensor.on(tensor._data.new_zeros(rest[0]), tensor._scale_inv.clone())
        return super().__torch_dispatch__(func, types, args, kwargs)

    # Five arguments, as Transformer Engine's has.
    def fsdp_pre_all_gather(self, mesh, orig_size, contiguous_orig_stride, module, mp_policy):
        return (self._data,), self._scale_inv

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        if out is not None:
            out._data = all_gather_outputs[0]
            return None
        return self.on(all_gather_outputs[0], metadata), all_gather_outputs


def te_class(name: str, module: str, base: type[Wrapper] = Wrapper) -> type[Wrapper]:
    """A stand-in with the name of a class of Transformer Engine."""
    module = f"transformer_engine.pytorch.tensor.{module}"
    return type(name, (base,), {"__module__": module, "__qualname__": name})


TE_CLASSES = {
    NVFP4Quantizer: te_class("NVFP4Tensor", "nvfp4_tensor"),
    MXFP8Quantizer: te_class("MXFP8Tensor", "mxfp8_tensor"),
    Float8BlockQuantizer: te_class("Float8BlockwiseQTensor", "float8_blockwise_tensor"),
    Float8Quantizer: te_class("Float8Tensor", "float8_tensor", Float8Wrapper),
}
FIELDS = [
    f"{usage}_{kind}" for usage in ("rowwise", "columnwise") for kind in ("data", "scale_inv")
]
AMAXES = ["amax_rowwise", "amax_columnwise"]


def te_tensor(quantizer: Quantizer, value: Tensor, **attributes: Any) -> Parameter:
    """A parameter as Transformer Engine makes it of a value, given that the bytes are the same."""
    return Parameter(stand_in(quantizer.quantize(value), **attributes))


def stand_in(tensor: QuantizedTensor, **attributes: Any) -> Wrapper:
    """A stand-in with copies of the bytes of ``tensor``."""
    quantizer = tensor.quantizer
    kind = next(base for base in type(quantizer).__mro__ if base in TE_CLASSES)
    names = FIELDS + AMAXES if isinstance(quantizer, NVFP4Quantizer) else FIELDS
    fields = {f"_{name}": getattr(tensor, name) for name in names}
    if isinstance(quantizer, Float8Quantizer):
        transposed = tensor.columnwise_data
        fields = dict(_data=tensor.rowwise_data.view(tensor.shape), _transpose=transposed)
        fields["_scale_inv"] = tensor.rowwise_scale_inv
    elif quantizer.optimize_for_gemm:
        for usage in ("rowwise", "columnwise"):
            if fields[f"_{usage}_data"] is not None:
                swizzled = getattr(tensor, f"{usage}_gemm_scale_inv")
                fields[f"_{usage}_scale_inv"] = swizzled.view(fields[f"_{usage}_scale_inv"].shape)
    fields = {name: x if x is None else x.clone() for name, x in fields.items()}
    # Versions without such scales have no such attribute.
    swizzled = dict(_with_gemm_swizzled_scales=True) if quantizer.optimize_for_gemm else {}
    of_class = {
        NVFP4Quantizer: swizzled,
        MXFP8Quantizer: dict(**swizzled, _fp8_dtype=E4M3),
        Float8BlockQuantizer: dict(_fp8_dtype=E4M3),
        Float8Quantizer: dict(_fp8_dtype=E4M3, _transpose_invalid=not quantizer.columnwise),
    }[kind]
    options = vars(quantizer).copy()
    if isinstance(quantizer, Float8BlockQuantizer):
        of_class["_is_2D_scaled"] = quantizer.two_dimensional
    elif isinstance(quantizer, MXFP8Quantizer | NVFP4Quantizer):
        options["with_2d_quantization"] = quantizer.two_dimensional
    elif quantizer.layout.tensor_scale == "delayed":
        options = dict(scale=tensor.scale.clone(), amax=torch.zeros(1, device=tensor.device))
    attributes = {"_quantizer": SimpleNamespace(**options), **of_class, **attributes}
    return TE_CLASSES[kind](tuple(tensor.shape), tensor.dtype, **fields, **attributes)


def te_bytes(tensor: Tensor) -> dict[str, Tensor]:
    """Copies of all buffers."""
    buffers = {name: getattr(tensor, name) for name in tensor.attributes}
    return {name: x.clone() for name, x in buffers.items() if isinstance(x, Tensor)}


def assert_same(actual: Tensor, expected: Tensor, name: str) -> None:
    assert actual.shape == expected.shape and torch.equal(bits(actual), bits(expected)), name


def assert_bytes(actual: Tensor, expected: Tensor) -> None:
    """Assert that two stand-ins have the same bytes."""
    assert_identical(te_bytes(actual), te_bytes(expected))
