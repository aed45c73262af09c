"""Block scales in the swizzled layout that block-scaled GEMMs read.

NVFP4 and MXFP8 GEMMs read scales in tiles of 128 rows by 4 blocks (512 bytes), with the tiles in
row-major order. Byte (i, j) of a tile is at i % 32 * 16 + i // 32 * 4 + j. Padding is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fp4adam.kernels.launch import tile_lists
from fp4adam.kernels.launch.schema import SWIZZLE
from fp4adam.tensors import backend
from fp4adam.tensors.blocks import round_up

if TYPE_CHECKING:
    from fp4adam.kernels.launch.launch import Launch
    from fp4adam.tensors.quantized_tensor import QuantizedTensor


class ScalePair(NamedTuple):
    """One-byte scales of one direction in two layouts."""

    plain: Tensor  # [rows / repeats, blocks per row], any strides
    swizzled: Tensor  # contiguous [rows padded to 128, blocks padded to 4]
    repeats: int = 1


def build_gemm_scales(tensors: Sequence[QuantizedTensor]) -> None:
    """Rewrite the swizzled scales of tensors on one device that store them, in one launch."""
    write_scales([each for tensor in tensors for each in _stored(tensor)])


def gemm_scale_launches(tensors: Sequence[QuantizedTensor]) -> list[Launch]:
    """The launches of :func:`build_gemm_scales` for tensors on one GPU, to be repeated."""
    scales = [each for tensor in tensors for each in _stored(tensor)]
    return [_launch(scales, undo=False)] if scales else []


def read_gemm_scales(tensor: QuantizedTensor) -> None:
    """Write the plain scales of a tensor from its swizzled ones."""
    write_scales(_stored(tensor), undo=True)


def new_gemm_scale(tensor: QuantizedTensor, usage: str) -> Tensor:
    """New swizzled scales of a direction that the tensor has, "rowwise" or "columnwise"."""
    scales = _scales(tensor, usage)
    write_scales([scales])
    return scales.swizzled


def _stored(tensor: QuantizedTensor) -> list[ScalePair]:
    if not tensor.quantizer.optimize_for_gemm:
        return []
    return [_scales(tensor, usage) for usage in tensor.quantizer.layout.kept]


def _scales(tensor: QuantizedTensor, usage: str) -> ScalePair:
    """``swizzled`` is new and uninitialized if the tensor does not store it."""
    layout = tensor.quantizer.layout
    name, repeats = layout.scales_of(usage), layout.block if layout.is_square else 1
    is_transposed = (usage == "columnwise") ^ layout.inner[name].transposed
    plain = getattr(tensor.inner, name)
    plain = plain.t() if is_transposed else plain
    swizzled = getattr(tensor.inner, f"{usage}_gemm_scale_inv")
    if swizzled is None:
        rows, blocks = plain.shape
        swizzled = plain.new_empty(round_up(rows * repeats, 128), round_up(blocks, 4))
    return ScalePair(plain, swizzled, repeats)


def write_scales(scales: list[ScalePair], undo: bool = False) -> None:
    """Write ``swizzled`` from ``plain``, all on one device; with ``undo`` the reverse."""
    if scales and backend.uses_kernels(scales[0].plain.device):
        from fp4adam.kernels.launch.launch import launch_all

        launch_all(scales[0].plain, [_launch(scales, undo)])
        return
    for plain, swizzled, repeats in scales:
        rows, blocks = swizzled.shape
        if undo:
            every_row = row_by_row(swizzled, rows, blocks).reshape(rows, blocks)
            plain.copy_(every_row[: len(plain) * repeats : repeats, : plain.shape[1]])
        else:
            every_row = plain.view(torch.uint8).repeat_interleave(repeats, 0)
            missing = (0, blocks - plain.shape[1], 0, rows - len(every_row))
            padded = swizzle_padded(torch.nn.functional.pad(every_row, missing))
            swizzled.view(torch.uint8).copy_(padded)


def _launch(scales: list[ScalePair], undo: bool) -> Launch:
    from fp4adam.kernels import swizzle

    device = scales[0].plain.device
    rows, regions = [], []
    for i, (plain, swizzled, repeats) in enumerate(scales):
        addresses, (height, width) = (plain.data_ptr(), swizzled.data_ptr()), plain.shape
        rows.append((*addresses, height * repeats, width, *plain.stride(), repeats))
        regions.append((i, 0, swizzled.shape[0], 0, swizzled.shape[1]))
    table = tile_lists.table(dict(zip(SWIZZLE, zip(*rows, strict=True), strict=True)), device)
    return swizzle.swizzle(table, tile_lists.tile_list(regions, swizzle.TILE, device), undo=undo)


def row_by_row(swizzled: Tensor, rows: int, blocks: int) -> Tensor:
    """A view of swizzled scales in row-major order: [rows / 128, 4, 32, blocks / 4, 4]."""
    tiles = round_up(rows, 128) // 128, round_up(blocks, 4) // 4
    # Flat first: from [rows, blocks], torch.compile would add guards on symbolic sizes.
    return swizzled.view(-1).view(*tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)


def swizzle_padded(scales: Tensor) -> Tensor:
    """Swizzle contiguous scales [rows padded to 128, blocks padded to 4], in one copy."""
    rows, blocks = scales.shape
    tiles = scales.view(rows // 128, 4, 32, blocks // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.clone(memory_format=torch.contiguous_format).view(-1).view(rows, blocks)
