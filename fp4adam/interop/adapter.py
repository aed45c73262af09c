"""Adapters that let FP4Adam step other packages' quantized tensors in their own memory.

Adapters are found by the full name of a tensor's class, so no package is imported for them.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer


class TensorAdapter:
    """Describes the memory of another package's quantized tensor, so FP4Adam can step it in place.

    Derive a class that returns the format of a tensor and the location of its codes and scales, and
    pass an instance to :func:`register_adapter`::

        class PackedAdapter(fp4adam.TensorAdapter):
            attributes = ("packed", "scales", "amax")

            def quantizer(self, tensor):
                return fp4adam.NVFP4Quantizer(columnwise=False, two_dimensional=False)

            def fields(self, tensor):
                return {
                    "rowwise_data": tensor.packed,
                    "rowwise_scale_inv": tensor.scales,
                    "amax_rowwise": tensor.amax,
                }


        fp4adam.register_adapter("my_package.PackedTensor", PackedAdapter())

    The tensor's ``shape``, ``dtype`` (float32, bfloat16 or float16) and ``device`` are those of its
    values. After a step, its memory holds the bytes of ``quantizer(tensor).quantize(master)``.
    Master weights start from the decoded values of that memory, or from what a method
    ``get_high_precision_init_val`` of the tensor returns, if that has these bytes;
    ``clear_high_precision_init_val`` frees it then.

    Attributes:
        attributes: Names of the tensor's attributes that hold its memory, each a plain tensor or
            None, and of flags (True, False, None) that say which of it is valid. If one is
            replaced, or written by a torch operator, training continues from the new value.
    """

    attributes: ClassVar[tuple[str, ...]]

    def quantizer(self, tensor: Tensor) -> Quantizer:
        """The format of ``tensor``, with the directions that it stores.

        Raise ValueError if it is not supported, and name the property and the remedy.
        """
        raise NotImplementedError

    def fields(self, tensor: Tensor) -> dict[str, Tensor]:
        """The fields of a quantized tensor, as views of the memory of ``tensor``.

        =======================  =================================================================
        field                    view of
        =======================  =================================================================
        ``rowwise_data``,        codes as in the class of the format (:class:`NVFP4Tensor`,
        ``columnwise_data``      :class:`MXFP8Tensor`, :class:`Float8Tensor`,
                                 :class:`Float8BlockTensor`): contiguous, one byte per entry
        ``rowwise_scale_inv``,   scales as in that class, in two dimensions with any padding. For
        ``columnwise_scale_inv`` any other layout, a view of more dimensions whose row-major
                                 order is that of the padded matrix (not with
                                 ``two_dimensional=True``). With ``optimize_for_gemm=True`` in the
                                 order of GEMMs, contiguous
        ``amax_rowwise``,        NVFP4, Float8: one float32, the largest magnitude
        ``amax_columnwise``
        ``per_tensor_scale``     one float32, the decode scale of the tensor, if stored: NVFP4, the
                                 largest magnitude / 2688; Float8, the reciprocal of its scale
        ``scale``, ``amax``      Float8 with delayed scaling: one float32 each, the factor that the
                                 next values are multiplied by, which is only read, and the largest
                                 magnitude written, which is raised
        =======================  =================================================================

        Data and scales of each direction of the quantizer are required, for NVFP4 and Float8 also
        an amax of a direction or ``per_tensor_scale``, and with delayed scaling the last two. All
        returned fields but ``scale`` are written; padding is left alone.
        """
        raise NotImplementedError

    def given(self, tensor: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The fields ``scale`` and ``amax``, or None; each step reads which these are."""
        fields = self.fields(tensor)
        return fields.get("scale"), fields.get("amax")

    drop_columnwise: Callable[[Tensor], None] | None = None
    """Drops columnwise codes that were transposed from rowwise ones, which are new now; optional,
    for :func:`fp4adam.fp8_utils.quantize_master_weights`."""


_ADAPTERS: dict[str, TensorAdapter] = {}


def register_adapter(tensor_class: type[Tensor] | str, adapter: TensorAdapter) -> None:
    """Make ``FP4Adam`` accept parameters of another package's class.

    Args:
        tensor_class: The class, or its name "module.Class", which need not be imported. Applies to
            derived classes too, and replaces an earlier adapter of the same class.
        adapter: The adapter for its tensors.

    Raises:
        TypeError: If an argument is something else.
    """
    if not (isinstance(adapter, TensorAdapter) and isinstance(tensor_class, str | type)):
        raise TypeError(
            "tensor_class must be a class or its name 'module.Class', and adapter an instance of a "
            f"class derived from TensorAdapter, got {tensor_class!r} and {adapter!r}"
        )
    name = tensor_class if isinstance(tensor_class, str) else class_name(tensor_class)
    _ADAPTERS[name] = adapter


def class_name(tensor_class: type) -> str:
    """The name that a class is registered under."""
    return f"{tensor_class.__module__}.{tensor_class.__qualname__}"


# Subclasses that hold a plain weight and quantize it in the forward pass alone, and its attribute.
_WRAPPERS = {
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": "_tensor",
    "torchao.prototype.moe_training.tensor.TrainingWeightWrapperBaseTensor": "_data",
}


@functools.cache
def _inner_of(tensor_class: type) -> str | None:
    names = map(class_name, tensor_class.__mro__)
    return next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None)


def unwrapped(tensor: Any) -> Any:
    """The plain tensor that a wrapper of another package holds; anything else itself."""
    name = _inner_of(type(tensor))
    return tensor if name is None else getattr(tensor, name)


def is_foreign(tensor: Tensor) -> bool:
    """Whether a (local) tensor is of another package's subclass, which needs an adapter."""
    is_plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return not (is_plain or isinstance(tensor, QuantizedTensor | FakeTensor))


def adapter_of(tensor: Tensor) -> TensorAdapter:
    """The adapter of a tensor of another package; TypeError if none has been registered."""
    for name in map(class_name, type(tensor).__mro__):
        if name in _ADAPTERS:
            return _ADAPTERS[name]
    raise TypeError(
        "parameters must be plain tensors, tensors of fp4adam or of classes that have an adapter, "
        f"got {class_name(type(tensor))}; register a fp4adam.TensorAdapter, which says where its "
        "codes and scales are, with fp4adam.register_adapter, or optimize a parameter in high "
        "precision"
    )
