"""Quantization in torch operators, for any layout: what kernels have to equal, bit for bit."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp4adam.tensors.layout import Layout
from fp4adam.tensors.storage import Storage

if TYPE_CHECKING:
    from fp4adam.tensors.quantizer import Quantizer


def write(quantizer: "Quantizer", x: Tensor, out: Storage) -> None:
    """Quantize a matrix into ``out``, whose amax is known; swizzled scales are not written."""
    layout, values = quantizer.layout, x.float()
    for usage, block in layout.blocks.items():
        amaxes = out.amax
        if layout.scale_type is not None:
            amaxes = block_amaxes(layout, blocks_of(values, block), (1, 3))
        codes = write_scales(quantizer, usage, values, amaxes, out, x.dtype)
        pack = layout.code_type.pack
        if usage == "rowwise" and out.rowwise_data is not None:
            out.rowwise_data.copy_(pack(codes))
        if out.columnwise_data is not None and (usage == "columnwise" or layout.is_square):
            codes = codes.t() if layout.columnwise.codes.transposed else codes
            out.columnwise_data.copy_(pack(codes))


def write_scales(
    quantizer: "Quantizer", usage: str, x: Tensor, amaxes: Tensor, out: Storage, dtype: torch.dtype
) -> Tensor:
    """Write the scales of blocks with these amaxes; returns the codes of ``x``, one per byte.

    ``x``: a float32 matrix; ``dtype``: what it was rounded to.
    """
    layout = quantizer.layout
    scales, factors = quantizer.encode(amaxes, out.amax, dtype)
    if layout.scale_type is not None:
        stored_scales(layout, out, usage, tuple(x.shape)).copy_(scales)
    return layout.code_type.encode(_scaled(layout, usage, x, factors))


def read(quantizer: "Quantizer", tensors: Storage, dtype: torch.dtype) -> Tensor:
    """Decode to a matrix of ``dtype``."""
    layout, shape = quantizer.layout, quantizer.decoded_shape(tensors)
    values = layout.code_type.decode(tensors.codes)
    values = values.t() if getattr(layout, tensors.usage).codes.transposed else values
    usage = "rowwise" if layout.is_square else tensors.usage
    factors = quantizer.decode(stored_scales(layout, tensors, usage, shape), tensors.amax)
    return _scaled(layout, usage, values, factors).to(dtype).contiguous()


def recode(quantizer: "Quantizer", x: Tensor, tensors: Storage) -> Tensor:
    """The stored codes of the float32 matrix ``x`` in the direction that :func:`read` reads."""
    layout = quantizer.layout
    usage = next(iter(layout.blocks))
    scales = stored_scales(layout, tensors, usage, tuple(x.shape))
    factors = quantizer.factors(scales, tensors.amax)
    codes = layout.code_type.encode(_scaled(layout, usage, x, factors))
    if not quantizer.rowwise and layout.columnwise.codes.transposed:
        codes = codes.t()
    return layout.code_type.pack(codes)


def amax_over(x: Tensor, dims: tuple[int, ...], keeps_nan: bool = False) -> Tensor:
    """Largest magnitude of float32 over ``dims``, ignoring NaN as a GPU does, or keeping it."""
    magnitude = x.abs()
    return (magnitude if keeps_nan else magnitude.nan_to_num_(0.0, math.inf)).amax(dims)


def block_amaxes(layout: Layout, blocks: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The amaxes of float32 blocks over ``dims``; NaN if a block has one that no code can show."""
    return amax_over(blocks, dims, keeps_nan=not layout.code_type.has_nan)


def _scaled(layout: Layout, usage: str, x: Tensor, factors: Tensor) -> Tensor:
    """The matrix ``x``, each block times its factor."""
    if layout.scale_type is None:
        return x * factors
    blocks = blocks_of(x, layout.blocks[usage]) * factors[:, None, :, None]
    return blocks.flatten(2).flatten(0, 1)[: x.shape[0], : x.shape[1]]


def grid_shape(block: tuple[int, int], shape: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def stored_scales(
    layout: Layout, tensors: Storage, usage: str, shape: tuple[int, int]
) -> Tensor | None:
    """A view of the stored scales of a direction, [block rows, block columns], or None."""
    if layout.scale_type is None:
        return None
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
