"""Columnwise codes built by transposing rowwise ones, for square blocks, which share scales."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp4adam.kernels.launch import tile_lists
from fp4adam.kernels.launch.schema import table_row
from fp4adam.tensors import backend

if TYPE_CHECKING:
    from fp4adam.kernels.launch.launch import Launch
    from fp4adam.tensors.quantized_tensor import QuantizedTensor

ALIGNMENT = 16  # in bytes, and of sizes in elements, for the kernel that transposes whole words


def build_columnwise(tensors: Sequence[QuantizedTensor]) -> None:
    """Rebuild the columnwise codes of tensors that have some from rowwise ones, in place.

    At most two launches per code width and device; ValueError if a tensor has no square blocks.
    """
    groups: dict[tuple[torch.device, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    written: list[Tensor] = []
    for i, tensor in enumerate(tensors):
        check_square(i, tensor)
        codes, columnwise = tensor.inner.rowwise_data, tensor.inner.columnwise_data
        if columnwise is not None:
            kind = tensor.device, tensor.quantizer.layout.code_type.bits
            groups[kind].append((codes, columnwise))
            written += tensor, columnwise
    for (device, bits), pairs in groups.items():
        transpose_codes(pairs, bits, device)
    torch.autograd.graph.increment_version(written)


def transposed_codes(codes: Tensor, bits: int) -> Tensor:
    """A transposed copy of uint8 codes: [rows, cols * bits / 8] to [cols, rows * bits / 8]."""
    if not (backend.runs_eagerly(codes) and backend.uses_kernels(codes.device)):
        return _transposed(codes, bits)
    rows, width = codes.shape
    transposed = codes.new_empty(width * 8 // bits, rows * bits // 8)
    transpose_codes([(codes, transposed)], bits, codes.device)
    return transposed


def _transposed(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes.t().clone(memory_format=torch.contiguous_format)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1).t()
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def check_square(i: int, tensor: QuantizedTensor, name: str = "tensors") -> None:
    """Raise ValueError unless columnwise codes, if any, can be built from rowwise ones."""
    quantizer = tensor.quantizer
    if quantizer.columnwise and not (quantizer.layout.is_square and quantizer.rowwise):
        raise ValueError(
            f"{name}[{i}] must have square blocks and rowwise data to build columnwise data from, "
            f"got a {type(tensor).__name__} with {quantizer}; set two_dimensional=True and "
            "rowwise=True if its format has square blocks, else quantize both directions"
        )


def transpose_codes(pairs: list[tuple[Tensor, Tensor]], bits: int, device: torch.device) -> None:
    """Transpose codes [rows, cols * bits / 8] into targets [cols, rows * bits / 8], contiguous."""
    if not backend.uses_kernels(device):
        for source, target in pairs:
            target.copy_(_transposed(source, bits))
    elif pairs:
        from fp4adam.kernels.launch.launch import launch_all

        launch_all(pairs[0][0], _launches(pairs, bits, device))


def _launches(pairs: list[tuple[Tensor, Tensor]], bits: int, device: torch.device) -> list[Launch]:
    from fp4adam.kernels import transpose

    rows, whole, edge, side = [], [], [], transpose.TILE[bits]
    for i, (source, target) in enumerate(pairs):
        m, n = source.shape[0], target.shape[0]
        codes = source.data_ptr(), target.data_ptr()
        fields = dict(rowwise_data=codes[0], columnwise_data=codes[1], rows=m, cols=n)
        rows.append(table_row(**fields))
        aligned = not any(field % ALIGNMENT for field in (*codes, m, n))
        bottom, right = (m // side * side, n // side * side) if aligned else (0, 0)
        whole.append((i, 0, bottom, 0, right))
        edge += [(i, 0, bottom, right, n), (i, bottom, m, 0, n)]
    sides = (whole, side), (edge, transpose.EDGE)
    tiles = [tile_lists.tile_list(listed, (side, side), device) for listed, side in sides]
    return transpose.transpose(tile_lists.table(rows, device), tiles, bits=bits)
