"""Adapters, by which FP4Adam steps quantized tensors of other packages in their own memory.

No package is imported for them: adapters are found by the full name of a tensor's class.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fp4adam.distributed.dtensor import is_dtensor
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer

FIELDS = (
    "rowwise_data",
    "rowwise_scale_inv",
    "columnwise_data",
    "columnwise_scale_inv",
    "amax_rowwise",
    "amax_columnwise",
    "per_tensor_scale",
)


class TensorAdapter:
    """How another package's quantized tensor lies in memory, for ``FP4Adam`` to step it in place.

    Derive a class from it that says which format a tensor has and where its codes and scales are,
    and hand an instance to :func:`register_adapter`::

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
    values. After a step, its memory holds what ``quantizer(tensor).quantize(master)`` does, byte
    for byte. Master weights start from what that memory decodes to.

    Attributes:
        attributes: Names of the attributes of a tensor that hold its memory, each a plain tensor or
            None. Training continues from another tensor that is put there, and from another value
            that torch writes.
    """

    attributes: ClassVar[tuple[str, ...]]

    def quantizer(self, tensor: Tensor) -> Quantizer:
        """The format of ``tensor``, with the directions that it has codes of.

        Raises:
            ValueError: If it is in none of the formats; name the property and the cure.
        """
        raise NotImplementedError

    def fields(self, tensor: Tensor) -> dict[str, Tensor]:
        """The fields of a quantized tensor as views of the memory of ``tensor``.

        =======================  =================================================================
        field                    view of
        =======================  =================================================================
        ``rowwise_data``,        codes as in the class of the format (:class:`NVFP4Tensor`,
        ``columnwise_data``      :class:`MXFP8Tensor`, :class:`Float8BlockTensor`): contiguous, one
                                 byte per entry
        ``rowwise_scale_inv``,   scales as there, in two dimensions with any padding. Or in more
        ``columnwise_scale_inv`` dimensions, up to five, if they lie otherwise: then a view that
                                 counts the padded ones row by row (not with
                                 ``two_dimensional=True``)
        ``amax_rowwise``,        NVFP4: one float32, the largest magnitude
        ``amax_columnwise``
        ``per_tensor_scale``     NVFP4: one float32, the largest magnitude / 2688, if that is kept
        =======================  =================================================================

        Data and scales of each direction of the quantizer are required, and for NVFP4 one of the
        last three. All given fields are written; padding is left alone.
        """
        raise NotImplementedError

    def dequantize(self, tensor: Tensor) -> Tensor | None:
        """Float32 values for the master weight to start from; None: the decoded fields."""
        return None

    def get_high_precision_init_val(self, tensor: Tensor) -> Tensor | None:
        """The value before quantization, if the tensor has kept it for the optimizer.

        The master weight starts from it if the tensor still holds its quantized value.
        """
        return None

    def clear_high_precision_init_val(self, tensor: Tensor) -> None:
        """Free the value before quantization."""


_ADAPTERS: dict[str, TensorAdapter] = {}


def register_adapter(tensor_class: type[Tensor] | str, adapter: TensorAdapter) -> None:
    """Have ``FP4Adam`` take parameters of a class of another package.

    Args:
        tensor_class: The class, or "module.Class", which need not have been imported; also for the
            classes that are derived from it. Replaces an earlier adapter of that class.
        adapter: How its tensors lie in memory.

    Raises:
        TypeError: If ``adapter`` is not a :class:`TensorAdapter`, or ``tensor_class`` neither a
            class nor a name.
    """
    if not isinstance(adapter, TensorAdapter):
        raise TypeError(
            f"adapter must be an instance of a class derived from TensorAdapter, got {adapter!r}; "
            "see its documentation for what to implement"
        )
    if not isinstance(tensor_class, str | type):
        raise TypeError(
            f"tensor_class must be a class or its name, got {tensor_class!r}; pass 'module.Class'"
        )
    name = tensor_class if isinstance(tensor_class, str) else class_name(tensor_class)
    _ADAPTERS[name] = adapter


def class_name(tensor_class: type) -> str:
    """The name that a class is registered by."""
    return f"{tensor_class.__module__}.{tensor_class.__qualname__}"


def is_foreign(tensor: Tensor) -> bool:
    """Whether a tensor keeps its values in a way that only an adapter can know."""
    own = (QuantizedTensor, FakeTensor)
    return not (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        or isinstance(tensor, own)
        or is_dtensor(tensor)
    )


def adapter_of(tensor: Tensor) -> TensorAdapter:
    """The adapter of a tensor of another package.

    Raises:
        TypeError: If none has been registered for its class.
    """
    for base in type(tensor).__mro__:
        if (adapter := _ADAPTERS.get(class_name(base))) is not None:
            return adapter
    raise TypeError(
        "parameters must be plain tensors, tensors of fp4adam or of classes that have an adapter, "
        f"got {class_name(type(tensor))}; register a fp4adam.TensorAdapter, which says where its "
        "codes and scales are, with fp4adam.register_adapter, or optimize a parameter in high "
        "precision"
    )


def memory(tensor: Tensor, adapter: TensorAdapter) -> list[Tensor | None]:
    """The tensors that hold the codes and scales of a tensor of another package."""
    return [getattr(tensor, name) for name in adapter.attributes]


def count_writes(tensor: Tensor, parts: list[Tensor | None]) -> int:
    """A number that grows when torch writes to a tensor or to a part of its memory."""
    return tensor._version + sum(part._version for part in parts if part is not None)
