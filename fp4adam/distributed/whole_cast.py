"""Quantization of whole weights from values at fixed addresses, which can be repeated."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp4adam.kernels.launch import schema, tile_lists
from fp4adam.tensors import backend
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer

if TYPE_CHECKING:
    from fp4adam.kernels.launch.launch import Launch

FORMATS = ("float8", "float8_block", "mxfp8", "mxfp8_2d")
ALIGNMENT = 16  # of every address in bytes, and of rows and columns


class WholeCast:
    """Quantizes weights in place, in as few passes as their formats allow.

    The bytes are those of ``quantizer.quantize(value)``. There are at most four launches for all
    weights with the same quantizer and dtype of values.

    Args:
        tensors: :class:`QuantizedTensor` s on one device that :func:`fits` accepts.
        values: Their values, contiguous. They are not kept alive: a call reads what is at their
            addresses then.
    """

    def __init__(self, tensors: Sequence[QuantizedTensor], values: Sequence[Tensor]) -> None:
        self._written = [*tensors]
        self._amaxes: list[Tensor] = []  # of current scaling: zero before the first launch
        self._launches: list[Launch] = []
        self._scales: list[Launch] = []  # take the amaxes of delayed scaling from histories
        alike: dict[tuple[Quantizer, torch.dtype], list[tuple[QuantizedTensor, Tensor]]]
        alike = defaultdict(list)
        for tensor, value in zip(tensors, values, strict=True):
            self._written += tensor._shared.tensors.versioned
            alike[tensor.quantizer, value.dtype].append((tensor, value))
        for (quantizer, dtype), members in alike.items():
            self._prepare(quantizer, dtype, members)
        device = tensors[0].device
        one, zero = torch.ones(1, device=device), torch.zeros(1, device=device)
        self._signals = one, one, zero

    def _prepare(
        self,
        quantizer: Quantizer,
        dtype: torch.dtype,
        members: list[tuple[QuantizedTensor, Tensor]],
    ) -> None:
        from fp4adam.kernels import float8_step, whole_cast
        from fp4adam.kernels.launch.tensor_table import Usage

        # Not 0: the tensors take part.
        rows = [schema.table_row(grad=1, **_fields(*each)) for each in members]
        table = tile_lists.table(rows, members[0][0].device)
        shapes = [flat_shape(tuple(tensor.shape)) for tensor, _ in members]
        given = table, shapes, dtype
        if quantizer.layout.scale_type == "e8m0":
            usage = Usage(
                quantizer.rowwise,
                quantizer.columnwise,
                quantizer.layout.is_square,
                quantizer.optimize_for_gemm,
            )
            self._launches += whole_cast.quantize_mxfp8(*given, usage)
            return
        if quantizer.layout.tensor_scale == "current":
            self._amaxes += [tensor._amax for tensor, _ in members]
            self._launches += whole_cast.measure(*given)
        elif quantizer.layout.tensor_scale == "delayed":
            self._scales.append(float8_step.delayed_amaxes(table, quantizer))
        self._launches += whole_cast.quantize_square(
            *given,
            scales_blocks=quantizer.layout.scale_type is not None,
            has_history=quantizer.layout.tensor_scale == "delayed",
            columnwise=quantizer.columnwise,
            force_pow_2_scales=quantizer.layout.scale_rule.force_pow_2_scales,
            amax_epsilon=quantizer.layout.scale_rule.amax_epsilon,
        )

    def __call__(self) -> None:
        """Write what is at the addresses of the values now."""
        from fp4adam.kernels.launch.launch import launch_all

        if self._amaxes:
            torch._foreach_zero_(self._amaxes)
        launch_all(self._signals[0], self._scales, *self._signals)
        launch_all(self._signals[0], self._launches)
        torch.autograd.graph.increment_version(self._written)


def fits(tensor: QuantizedTensor, value: Tensor) -> bool:
    """Whether :class:`WholeCast` can write a whole tensor, which has no writes that are pending."""
    return (
        backend.uses_kernels(tensor.device)
        and tensor.quantizer.name in FORMATS
        # Not a scale per 128 elements, nor columns alone.
        and tensor.quantizer.layout.casts_in_parts
        and not any(field % ALIGNMENT for field in _fields(tensor, value).values())
    )


def _fields(tensor: QuantizedTensor, value: Tensor) -> dict[str, int]:
    """Addresses and sizes, by the names of the table's columns."""
    rows, cols = flat_shape(tuple(tensor.shape))
    inner = tensor._shared.tensors.addresses()
    return {"value": value.data_ptr(), "rows": rows, "cols": cols, **inner}
