"""Block scales in the swizzled layout that block-scaled GEMMs read.

NVFP4 and MXFP8 GEMMs read scales in tiles of 128 rows by 4 blocks (512 bytes), with the tiles in
row-major order. Byte (i, j) of a tile is at i % 32 * 16 + i // 32 * 4 + j.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fp4adam.kernels.launch import tile_lists
from fp4adam.kernels.launch.schema import table_row
from fp4adam.kernels.launch.tile_lists import Region
from fp4adam.tensors import backend
from fp4adam.tensors.blocks import round_up

if TYPE_CHECKING:
    from fp4adam.kernels.launch.launch import Launch
    from fp4adam.tensors.quantized_tensor import QuantizedTensor


class ScalePair(NamedTuple):
    """The same scales in two layouts.

    Attributes:
        plain: One-byte dtype, [rows / repeats, blocks per row], any strides.
        swizzled: One-byte dtype, contiguous [rows padded to 128, blocks padded to 4].
        repeats: Number of rows that share one row of ``plain``.
    """

    plain: Tensor
    swizzled: Tensor
    repeats: int = 1


def swizzle_scales(scales: Sequence[Tensor]) -> list[Tensor]:
    """Swizzle block scales for the block-scaled GEMM, in one launch for all of them.

    Args:
        scales: Matrices [rows, blocks per row] of a one-byte dtype, on one device, of any size and
            strides. Columnwise scales of MXFP8 have to be transposed (a view is enough).

    Returns:
        For each a new matrix [rows padded to 128, blocks padded to 4] of its dtype; padding is 0.

    Raises:
        ValueError: If a tensor is not as above.
    """
    for i, scale in enumerate(scales):
        _check(f"scales[{i}]", scale, scales[0].device)
    pairs = [ScalePair(scale, _empty_swizzled(scale)) for scale in scales]
    write_scales(pairs)
    return [pair.swizzled for pair in pairs]


def unswizzle_scales(
    swizzled: Sequence[Tensor], shapes: Sequence[tuple[int, int]] | None = None
) -> list[Tensor]:
    """Undo :func:`swizzle_scales`, in one launch for all matrices.

    Args:
        swizzled: Its results.
        shapes: [rows, blocks per row] of each result; None keeps the padding.

    Raises:
        ValueError: If a tensor is no such result, or a shape does not fit it.
    """
    shapes = [tuple(s.shape) for s in swizzled] if shapes is None else shapes
    if len(shapes) != len(swizzled):
        raise ValueError(
            f"shapes must have one entry per tensor, {len(swizzled)}, got {len(shapes)}; pass None "
            "to keep all padding"
        )
    pairs = []
    for i, (tensor, (rows, blocks)) in enumerate(zip(swizzled, shapes, strict=True)):
        _check(f"swizzled[{i}]", tensor, swizzled[0].device)
        needed = (round_up(rows, 128), round_up(blocks, 4))
        if tuple(tensor.shape) != needed or not tensor.is_contiguous():
            raise ValueError(
                f"swizzled[{i}] must be a contiguous matrix {list(needed)} for scales [{rows}, "
                f"{blocks}], got {tuple(tensor.shape)} with strides {tensor.stride()}; rows are "
                "padded to 128 and blocks to 4"
            )
        pairs.append(ScalePair(tensor.new_empty(rows, blocks), tensor))
    write_scales(pairs, undo=True)
    return [pair.plain for pair in pairs]


def _check(what: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.dim() != 2 or tensor.element_size() != 1 or tensor.device != device:
        raise ValueError(
            f"{what} must be a matrix of one byte per element on {device}, got "
            f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}; pass the bytes of E4M3 "
            "or E8M0 scales"
        )


def build_gemm_scales(tensors: Sequence[QuantizedTensor]) -> None:
    """Rewrite the swizzled scales of tensors that store them, in one launch per device.

    Addresses stay.
    """
    by_device: dict[torch.device, list[ScalePair]] = defaultdict(list)
    for tensor in tensors:
        by_device[tensor.device] += _stored_pairs(tensor)
    for pairs in by_device.values():
        write_scales(pairs)


def gemm_scale_launches(tensors: Sequence[QuantizedTensor]) -> list[Launch]:
    """The launches of :func:`build_gemm_scales`, for tensors on one GPU; each can be repeated."""
    pairs = [pair for tensor in tensors for pair in _stored_pairs(tensor)]
    return [_launch(pairs, undo=False)] if pairs else []


def read_gemm_scales(tensor: QuantizedTensor) -> None:
    """Undo :func:`build_gemm_scales` for one tensor: write its plain scales from swizzled ones."""
    write_scales(_stored_pairs(tensor), undo=True)


def _stored_pairs(tensor: QuantizedTensor) -> list[ScalePair]:
    return [*scales_of(tensor).values()] if tensor.quantizer.optimize_for_gemm else []


def new_gemm_scale(tensor: QuantizedTensor, usage: str) -> Tensor:
    """New swizzled scales of one direction ("rowwise" or "columnwise"), which the tensor has."""
    pair = _scales_in(tensor, usage)
    write_scales([pair])
    return pair.swizzled


def scales_of(tensor: QuantizedTensor) -> dict[str, ScalePair]:
    """The scales in both layouts, by the name of the inner tensor with the swizzled ones.

    If the tensor does not store that inner tensor, ``swizzled`` is new and uninitialized.
    """
    kept = tensor.quantizer.layout.kept
    return {f"{usage}_gemm_scale_inv": _scales_in(tensor, usage) for usage in kept}


def _scales_in(tensor: QuantizedTensor, usage: str) -> ScalePair:
    tensors, layout = tensor._shared.tensors, tensor.quantizer.layout
    name, repeats = layout.scales_of(usage), layout.block if layout.is_square else 1
    is_transposed = (usage == "columnwise") ^ layout.inner[name].transposed
    plain = getattr(tensors, name)
    plain = plain.t() if is_transposed else plain
    stored = getattr(tensors, f"{usage}_gemm_scale_inv")
    return ScalePair(plain, _empty_swizzled(plain, repeats) if stored is None else stored, repeats)


def _empty_swizzled(plain: Tensor, repeats: int = 1) -> Tensor:
    return plain.new_empty(round_up(plain.shape[0] * repeats, 128), round_up(plain.shape[1], 4))


def write_scales(pairs: list[ScalePair], undo: bool = False) -> None:
    """Write ``swizzled`` from ``plain`` for pairs on one device; with ``undo`` the reverse.

    The padding of ``swizzled`` becomes zero.
    """
    if pairs and backend.uses_kernels(pairs[0].plain.device):
        from fp4adam.kernels.launch.launch import launch_all

        launch_all(pairs[0].plain, [_launch(pairs, undo)])
        return
    for pair in pairs:
        _write(pair, undo)


def _launch(pairs: list[ScalePair], undo: bool) -> Launch:
    from fp4adam.kernels import swizzle

    device = pairs[0].plain.device
    rows: list[list[int]] = []
    regions: list[Region] = []
    for i, (plain, swizzled, repeats) in enumerate(pairs):
        n, blocks = plain.shape[0] * repeats, plain.shape[1]
        row_stride, col_stride = plain.stride()
        rows.append(
            table_row(
                plain=plain.data_ptr(),
                swizzled=swizzled.data_ptr(),
                scale_rows=n,
                scale_cols=blocks,
                row_stride=row_stride,
                col_stride=col_stride,
                repeats=repeats,
            )
        )
        regions.append((i, 0, swizzled.shape[0], 0, swizzled.shape[1]))
    tiles = tile_lists.tile_list(regions, swizzle.TILE, device)
    return swizzle.swizzle(tile_lists.table(rows, device), tiles, undo=undo)


def row_by_row(swizzled: Tensor, rows: int, blocks: int) -> Tensor:
    """A view of contiguous swizzled scales whose elements are in row-major order, with padding.

    It is [row tiles, 4, 32, column tiles, 4], of tiles of 128 rows by 4 blocks. ``rows`` and
    ``blocks``, per row, may include the padding.
    """
    tiles = round_up(rows, 128) // 128, round_up(blocks, 4) // 4
    # Flat first: from [rows, blocks], torch.compile would add guards on symbolic sizes.
    return swizzled.view(-1).view(*tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)


def swizzle_padded(scales: Tensor) -> Tensor:
    """Swizzle contiguous scales [rows padded to 128, blocks padded to 4], in one copy."""
    rows, blocks = scales.shape
    tiles = scales.view(rows // 128, 4, 32, blocks // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.clone(memory_format=torch.contiguous_format).view(-1).view(rows, blocks)


def _write(pair: ScalePair, undo: bool) -> None:
    plain, swizzled = pair.plain.view(torch.uint8), pair.swizzled.view(torch.uint8)
    rows, blocks = swizzled.shape
    tiles = row_by_row(swizzled, rows, blocks)
    if undo:
        stored = slice(0, plain.shape[0] * pair.repeats, pair.repeats)
        plain.copy_(tiles.reshape(rows, blocks)[stored, : plain.shape[1]])
        return
    padded = swizzled.new_zeros(rows, blocks)
    rows_of_blocks = plain.repeat_interleave(pair.repeats, 0)
    padded[: rows_of_blocks.shape[0], : plain.shape[1]] = rows_of_blocks
    tiles.copy_(padded.view(rows // 128, 4, 32, blocks // 4, 4))
