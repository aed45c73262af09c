"""Transformer Engine's names on tensors and quantizers, for code that was written for its classes.

Each says in a line what it is here. ``tests/interop/te_names.md`` lists those that are left out.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fp4adam.tensors import rows
from fp4adam.tensors.storage import Storage
from fp4adam.tensors.swizzle import build_gemm_scales
from fp4adam.tensors.transpose import build_columnwise

if TYPE_CHECKING:
    from fp4adam.tensors.quantized_tensor import QuantizedTensor
    from fp4adam.tensors.quantizer import Quantizer


def codes_as_shaped(name: str, transposed: bool) -> property:
    """The codes of one direction in the shape of the tensor; assignment moves them elsewhere."""

    def get(tensor: Any) -> Tensor | None:
        codes, shape = getattr(tensor, name), tuple(tensor.shape)
        shape = shape[-1:] + shape[:-1] if transposed else shape
        return None if codes is None else codes.view(shape)

    def exchange(tensor: Any, value: Tensor) -> None:
        setattr(tensor, name, value.view(rows.matrix_shape(tensor)[:: -1 if transposed else 1]))

    return property(get, exchange)


class TensorNames:
    """Those of ``QuantizedTensor``."""

    quantizer: Quantizer
    # Scales in ``rowwise_scale_inv`` are never swizzled; the swizzled ones have names of their own.
    _with_gemm_swizzled_scales = False

    _quantizer = property(lambda tensor: tensor.quantizer)

    def _get_quantizer(self) -> Quantizer:
        return self.quantizer

    def get_usages(self) -> dict[str, bool]:
        """The directions that are stored."""
        return self.quantizer.get_usages()

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Store or drop a direction, for all tensors on the same memory; None leaves it as it is.

        Columnwise codes of square blocks and of Float8 are transposed from the rowwise ones of a
        whole tensor; RuntimeError for others. ValueError if neither direction would be left.
        """
        given = {"rowwise": rowwise_usage, "columnwise": columnwise_usage}
        given = {usage: wanted for usage, wanted in given.items() if wanted is not None}
        new = dataclasses.replace(self.quantizer, **given)
        if new == self.quantizer:
            return
        is_derived = new.layout.is_square and self.quantizer.rowwise
        added = [usage for usage in given if given[usage] > getattr(self.quantizer, usage)]
        if added and not (is_derived and rows.is_all(self) and self.global_spec is None):
            raise RuntimeError(
                f"{added[0]} codes of a {type(self).__name__} of shape {tuple(self.shape)} must be "
                "stored already, or follow from rowwise codes of the whole tensor, got neither; "
                f"make the tensor with {added[0]}=True"
            )
        stored = self.inner.existing()
        if added:
            stored = new.zeros(*rows.matrix_shape(self), self.device).existing() | stored
        kept = {name: stored[name] for name in new.layout.shapes(*rows.stored_shape(self))}
        self.inner, self.quantizer = Storage(**kept), new
        if added:
            build_columnwise([self])
            build_gemm_scales([self])


class QuantizerNames:
    """Those of ``Quantizer``."""

    rowwise: bool
    columnwise: bool
    internal = False  # tensors are tensors of torch, never its bare storages

    rowwise_usage = property(lambda quantizer: quantizer.rowwise)
    columnwise_usage = property(lambda quantizer: quantizer.columnwise)

    def get_usages(self) -> dict[str, bool]:
        """The directions that its tensors store."""
        return {"rowwise": self.rowwise, "columnwise": self.columnwise}

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """TypeError if it would change anything: quantizers are immutable and shared."""
        for name, value in {"rowwise": rowwise, "columnwise": columnwise}.items():
            if value not in (None, getattr(self, name)):
                raise TypeError(
                    f"{name} of a quantizer must not change, got {value}: its tensors share it; "
                    "use dataclasses.replace, or tensor.update_usage()"
                )

    def copy(self) -> Quantizer:
        """The quantizer itself, because it is immutable."""
        return self

    def __call__(self, x: Tensor) -> QuantizedTensor:
        return self.quantize(x)
