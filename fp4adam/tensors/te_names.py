"""Transformer Engine's names on tensors and quantizers, for code that was written for its classes.

Each says in a line what it is here. ``tests/interop/te_names.md`` lists those that are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fp4adam.tensors import rows
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.storage import Storage
from fp4adam.tensors.swizzle import build_gemm_scales
from fp4adam.tensors.transpose import build_columnwise

if TYPE_CHECKING:
    from fp4adam.tensors.quantized_tensor import QuantizedTensor
    from fp4adam.tensors.quantizer import Quantizer


def _code_bytes(name: str, transposed: bool, doc: str) -> property:
    """The codes of one direction in the shape of the tensor; assignment moves them elsewhere."""

    def get(tensor: Any) -> Tensor | None:
        codes, shape = getattr(tensor, name), tuple(tensor.shape)
        if codes is None or codes.numel() != tensor.numel():
            return codes
        return codes.view(shape[-1:] + shape[:-1] if transposed else shape)

    def exchange(tensor: Any, value: Tensor | None) -> None:
        matrix = rows.matrix_shape(tensor)[:: -1 if transposed else 1]
        fits = value is not None and value.numel() == tensor.numel()
        setattr(tensor, name, value.view(matrix) if fits else value)

    return property(get, exchange, doc=doc)


class TensorNames:
    """Names of ``QuantizedTensor`` in Transformer Engine, as a part of this package's class."""

    quantizer: Quantizer
    # Scales in ``rowwise_scale_inv`` are never swizzled; the swizzled ones have names of their own.
    _with_gemm_swizzled_scales = False

    _quantizer = property(lambda tensor: tensor.quantizer, doc="``quantizer``.")

    def _get_quantizer(self) -> Quantizer:
        return self.quantizer

    def get_usages(self) -> dict[str, bool]:
        """The directions that are stored."""
        return self.quantizer.get_usages()

    def get_data_tensors(
        self, rowwise_data: bool = True, columnwise_data: bool = True
    ) -> Tensor | None | tuple[Tensor | None, Tensor | None]:
        """The codes of a direction, or a pair (rowwise, columnwise); ValueError for neither."""
        wanted = {"rowwise_data": rowwise_data, "columnwise_data": columnwise_data}
        found = tuple(getattr(self, name) for name, is_wanted in wanted.items() if is_wanted)
        if not found:
            raise ValueError(
                "rowwise_data and columnwise_data must not both be False, got False, False; ask "
                "for one direction, or for both"
            )
        return found if len(found) == 2 else found[0]

    def get_metadata(self) -> dict[str, Any]:
        """Codes, scales, quantizer and nominal dtype, by Transformer Engine's names."""
        names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
        inner = {name: getattr(self, name) for name in names}
        return {**inner, "quantizer": self.quantizer, "fake_dtype": self.dtype}

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Store or drop a direction, for all tensors on the same memory; None leaves it as it is.

        Columnwise codes of square blocks and of Float8 are transposed from the rowwise ones.

        Raises:
            ValueError: If neither direction would be left.
            RuntimeError: If codes are asked for that are not stored and cannot be derived from the
                others, as for MXFP8, or the tensor is a slice or a shard.
        """
        given = {"rowwise": rowwise_usage, "columnwise": columnwise_usage}
        new = dataclasses.replace(
            self.quantizer, **{usage: x for usage, x in given.items() if x is not None}
        )
        if new == self.quantizer:
            return
        is_derived = new.layout.is_square and self.quantizer.rowwise
        added = [u for u, wanted in new.get_usages().items() if wanted > self.get_usages()[u]]
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


class Float8Names:
    """Names of ``Float8Tensor`` in Transformer Engine."""

    _data = _code_bytes("_rowwise_data", False, "``rowwise_data`` in the shape of the tensor.")
    _transpose = _code_bytes("_columnwise_data", True, "``columnwise_data``, last dimension first.")
    _scale_inv = property(
        lambda tensor: tensor.quantizer.per_tensor_scale(tensor._amax),
        doc="Decode scale, float32 [1].",
    )
    # Transposed codes are written with the others.
    _transpose_invalid = False


class QuantizerNames:
    """Names of ``Quantizer`` in Transformer Engine, as a part of this package's class."""

    rowwise: bool
    columnwise: bool
    # Tensors are tensors of torch, never its bare storages.
    internal = False

    rowwise_usage = property(lambda quantizer: quantizer.rowwise, doc="``rowwise``.")
    columnwise_usage = property(lambda quantizer: quantizer.columnwise, doc="``columnwise``.")

    def get_usages(self) -> dict[str, bool]:
        """The directions that its tensors store."""
        return {"rowwise": self.rowwise, "columnwise": self.columnwise}

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """TypeError if it would change anything: quantizers are immutable and shared."""
        wanted = {"rowwise": rowwise, "columnwise": columnwise}
        for name, value in wanted.items():
            if value is not None and value != getattr(self, name):
                raise TypeError(
                    f"{name} of a quantizer must not change, got {value} for {self}: its tensors "
                    f"share it; use dataclasses.replace(quantizer, {name}={value}), or "
                    "tensor.update_usage()"
                )

    def copy(self) -> Quantizer:
        """The quantizer itself, because it is immutable."""
        return self

    def __call__(self, x: Tensor) -> QuantizedTensor:
        return self.quantize(x)

    def multi_quantize(self, tensors: Sequence[Tensor]) -> list[QuantizedTensor]:
        """Quantize several tensors."""
        return [self.quantize(x) for x in tensors]

    def update_quantized(
        self, src: Tensor, dst: QuantizedTensor, *, noop_flag: Tensor | None = None
    ) -> QuantizedTensor:
        """``dst.quantize_(src)``; a ``noop_flag``, which skips writes on the device, is refused."""
        if noop_flag is not None:
            raise NotImplementedError(
                "noop_flag must be None, got a tensor: writes are not conditional here; skip the "
                "call on the host"
            )
        return dst.quantize_(src)

    def is_quantizable(self, x: Tensor) -> bool:
        """Whether the format can hold a tensor of the shape of ``x``."""
        try:
            self.check_shape(tuple(x.shape))
        except ValueError:
            return False
        return True

    def get_scale_shape(self, shape: Sequence[int], columnwise: bool) -> tuple[int, ...]:
        """The shape of ``rowwise_scale_inv`` or ``columnwise_scale_inv`` of such a tensor."""
        scales = (self.layout.columnwise if columnwise else self.layout.rowwise).scales
        return (1,) if scales is None else scales.shape(*flat_shape(tuple(shape)))
