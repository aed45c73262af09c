"""Columnwise codes built by transposing rowwise ones, for square blocks, which share scales."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp4adam.tensors import backend

if TYPE_CHECKING:
    from fp4adam.tensors.quantized_tensor import QuantizedTensor
    from fp4adam.tensors.storage import Storage


def build_columnwise(tensors: Sequence[QuantizedTensor]) -> None:
    """Rebuild the columnwise codes of tensors with square blocks that have some, in place.

    At most two launches per code width and device.
    """
    groups: dict[tuple[torch.device, int], list[Storage]] = defaultdict(list)
    written: list[Tensor] = []
    for tensor in tensors:
        inner = tensor.inner
        if inner.columnwise_data is not None:
            kind = inner.rowwise_data.device, tensor.quantizer.layout.code_type.bits
            groups[kind].append(inner)
            written += tensor, inner.columnwise_data
    for (_, bits), alike in groups.items():
        columnwise = [one.columnwise_data for one in alike]
        transpose_codes([one.rowwise_data for one in alike], columnwise, bits)
    torch.autograd.graph.increment_version(written)


def transposed_codes(codes: Tensor, bits: int) -> Tensor:
    """A transposed copy of uint8 codes: [rows, cols * bits / 8] to [cols, rows * bits / 8]."""
    if not (backend.runs_eagerly(codes) and backend.uses_kernels(codes.device)):
        return _transposed(codes, bits)
    rows, width = codes.shape
    transposed = codes.new_empty(width * 8 // bits, rows * bits // 8)
    transpose_codes([codes], [transposed], bits)
    return transposed


def _transposed(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes.t().clone(memory_format=torch.contiguous_format)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1).t()
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def transpose_codes(sources: list[Tensor], targets: list[Tensor], bits: int) -> None:
    """Transpose codes [rows, cols * bits / 8] into targets [cols, rows * bits / 8], contiguous.

    All are on one device.
    """
    if not backend.uses_kernels(sources[0].device):
        for source, target in zip(sources, targets, strict=True):
            target.copy_(_transposed(source, bits))
        return
    from fp4adam.kernels.launch.launch import launch_all
    from fp4adam.kernels.transpose import transpose

    launch_all(sources[0], transpose(sources, targets, bits))
