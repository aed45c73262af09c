"""Quantization in torch operators, for any layout: what kernels have to equal, bit for bit."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp4adam.tensors.blocks import Span
from fp4adam.tensors.layout import Layout
from fp4adam.tensors.storage import Storage

if TYPE_CHECKING:
    from fp4adam.tensors.quantizer import Quantizer

FlatCodes = tuple[Tensor, int]  # memory, and the index of the byte of a matrix that it starts at


def write(quantizer: "Quantizer", x: Tensor, out: Storage) -> None:
    """Quantize a matrix into ``out``, whose amax is known; swizzled scales are not written."""
    layout, values = quantizer.layout, x.float()
    for usage, block in layout.blocks.items():
        blocks = blocks_of(values, block)
        amaxes = out.amax if layout.scale_type is None else block_amaxes(layout, blocks, (1, 3))
        scales, factors = quantizer.encode(amaxes, out.amax, x.dtype)
        if layout.scale_type is not None:
            stored_scales(layout, out, usage, tuple(x.shape)).copy_(scales)
        codes = _codes(layout, blocks, factors)[: x.shape[0], : x.shape[1]]
        pack = layout.code_type.pack
        if usage == "rowwise" and out.rowwise_data is not None:
            out.rowwise_data.copy_(pack(codes))
        if out.columnwise_data is not None and (usage == "columnwise" or layout.is_square):
            codes = codes.t() if layout.columnwise.codes.transposed else codes
            out.columnwise_data.copy_(pack(codes))


def read(quantizer: "Quantizer", tensors: Storage, dtype: torch.dtype) -> Tensor:
    """Decode to a matrix of ``dtype``."""
    layout, shape = quantizer.layout, quantizer.decoded_shape(tensors)
    usage = tensors.usage
    values = layout.code_type.decode(tensors.codes)
    values = values.t() if getattr(layout, usage).codes.transposed else values
    if layout.scale_type is None:
        values = values * quantizer.decode(None, tensors.amax)
    else:
        usage = "rowwise" if layout.is_square else usage
        factors = quantizer.decode(stored_scales(layout, tensors, usage, shape), tensors.amax)
        blocks = blocks_of(values, layout.blocks[usage]) * factors[:, None, :, None]
        values = blocks.flatten(2).flatten(0, 1)[: shape[0], : shape[1]]
    return values.to(dtype).contiguous()


def amax_over(x: Tensor, dims: tuple[int, ...], keeps_nan: bool = False) -> Tensor:
    """Largest magnitude of float32 over ``dims``, ignoring NaN as a GPU does, or keeping it."""
    magnitude = x.abs()
    return (magnitude if keeps_nan else magnitude.nan_to_num_(0.0, math.inf)).amax(dims)


def block_amaxes(layout: Layout, blocks: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The amaxes of float32 blocks over ``dims``; NaN if a block has one that no code can show."""
    return amax_over(blocks, dims, keeps_nan=not layout.code_type.has_nan)


def recode(quantizer: "Quantizer", x: Tensor, tensors: Storage) -> Tensor:
    """The stored codes of the float32 matrix ``x`` in the direction that :func:`read` reads."""
    layout, (rows, cols) = quantizer.layout, x.shape
    usage, block = next(iter(layout.blocks.items()))
    scales = None
    if layout.scale_type is not None:
        scales = stored_scales(layout, tensors, usage, (rows, cols))
    codes = _codes(layout, blocks_of(x, block), quantizer.factors(scales, tensors.amax))
    codes = codes[:rows, :cols]
    if not quantizer.rowwise and layout.columnwise.codes.transposed:
        codes = codes.t()
    return layout.code_type.pack(codes)


def measure_blocks(
    layout: Layout,
    x: Tensor,
    span: Span,
    dtype: torch.dtype,
    grids: dict[str, Tensor],
    amax: Tensor | None,
) -> None:
    """Write the amaxes of all blocks, by direction, and raise that of the tensor, if any.

    ``x`` has the values of the span, which are rounded to ``dtype`` first; all others are 0.
    """
    values = _around(x, span, dtype)
    for usage, grid in grids.items():
        grid.copy_(block_amaxes(layout, blocks_of(values, layout.blocks[usage]), (1, 3)))
    if amax is not None and x.numel():
        torch.maximum(amax, amax_over(values, (0, 1)), out=amax)


def write_codes(
    quantizer: "Quantizer",
    x: Tensor,
    span: Span,
    dtype: torch.dtype,
    factors: dict[str, Tensor],
    targets: dict[str, FlatCodes],
) -> None:
    """Write the codes of a span, in the directions of ``targets``; other nibbles are preserved.

    ``x`` has the values of the span, which are rounded to ``dtype`` first; ``factors`` map values
    to codes, of all blocks by direction.
    """
    layout, (rows, cols) = quantizer.layout, span.shape
    values, per_byte = _around(x, span, dtype), 8 // layout.code_type.bits
    for usage, (target, first_byte) in targets.items() if x.numel() else ():
        codes = _codes(layout, blocks_of(values, layout.blocks[usage]), factors[usage])
        codes = codes[:rows, :cols].reshape(-1)[span.start : span.stop]
        at = span.start - first_byte * per_byte
        packed = target[at // per_byte : -(-(at + len(codes)) // per_byte)]
        if per_byte == 2:  # nibbles beside the span stay
            nibbles = torch.stack((packed & 0x0F, packed >> 4), -1).flatten()
            nibbles[at % 2 :][: len(codes)] = codes
            codes = nibbles
        packed.copy_(layout.code_type.pack(codes))


def _around(x: Tensor, span: Span, dtype: torch.dtype) -> Tensor:
    values = x.new_zeros(span.shape, dtype=torch.float32)
    values.view(-1)[span.start : span.stop] = x.detach().to(dtype).float().view(-1)
    return values


def _codes(layout: Layout, blocks: Tensor, factors: Tensor) -> Tensor:
    if layout.scale_type is not None:
        factors = factors[:, None, :, None]
    scaled = (blocks * factors).flatten(2).flatten(0, 1)
    return layout.code_type.encode(scaled)


def grid_shape(block: tuple[int, int], shape: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def stored_scales(layout: Layout, tensors: Storage, usage: str, shape: tuple[int, int]) -> Tensor:
    """A view of the stored scales of a direction, [block rows, block columns]."""
    name = layout.scales_of(usage)
    stored = getattr(tensors, name)
    stored = stored.t() if layout.inner[name].transposed else stored
    rows, cols = grid_shape(layout.blocks[usage], shape)
    return stored[:rows, :cols]


def blocks_of(x: Tensor, block: tuple[int, int]) -> Tensor:
    """View [rows, cols] as [block row, row, block column, column]; edges are padded with zeros."""
    below, beside = -x.shape[0] % block[0], -x.shape[1] % block[1]
    if below or beside:
        x = torch.nn.functional.pad(x, (0, beside, 0, below))
    return x.reshape(x.shape[0] // block[0], block[0], x.shape[1] // block[1], block[1])
