"""Operands of matmuls: matrices quantized with a scale per 128 elements, padded with rows of zeros.

A kernel of its own, because operands are quantized in every pass: it reads each value once and
exchanges words alone between threads.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.format import float32_scale, inverse_scale
from fp4adam.kernels.launch.launch import Launch, alignment, on_its_device
from fp4adam.kernels.launch.tensor_table import tile_offsets, tile_start
from fp4adam.kernels.tiles.codes import (
    capability,
    e4m3_word,
    e4m3_words,
    store_words,
    to_float32,
)

BLOCK = 128
# Fewer warps exchange less between threads.
WARPS = {False: 8, True: 4}  # by columnwise


@triton.jit
def load_rows(x_ptr, row, col, cols, mask):
    """Every fourth row of a block, from ``row`` on: a tile [32, 128]. Zeros outside of the mask."""
    ptr = x_ptr + tile_start(row, col, cols) + tile_offsets(4 * cols, 32, 128)
    x = tl.load(ptr) if mask is None else tl.load(ptr, mask, 0.0)
    if x.dtype == tl.bfloat16 and capability() > 0:
        # Neighbours come in pairs. Compilers move the second down before they move it up again.
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        y = to_float32(x)
    return y


@triton.jit
def store_rows(x, rowwise_data, row, col, cols, mask):
    """Store the codes of a scaled tile by :func:`load_rows`; mask: of their words, [32, 32]."""
    words = e4m3_words(x, 32, 128)
    ptr = rowwise_data.to(tl.pointer_type(tl.uint32)) + tile_start(row, col // 4, cols // 4)
    # With the hint each thread stores the words that it has, and exchanges none for wider stores.
    offs = tl.arange(0, 32)[:, None] * cols + tl.arange(0, 32)[None, :]
    tl.store(ptr + tl.max_contiguous(offs, (1, 2)), words, mask)


@triton.jit
def _load_padded_rows(x_ptr, row, col, x_rows, cols, PADDED: tl.constexpr):
    """A tile by :func:`load_rows`, with zeros past ``x_rows``."""
    # The mask is constant along a row, so rows are still read 16 bytes at a time.
    inside = (row + 4 * tl.arange(0, 32) < x_rows)[:, None]
    return load_rows(x_ptr, row, col, cols, inside if PADDED else None)


@triton.jit
def _quantize_rows(
    x, rowwise_data, row, col, cols, epsilon, LARGEST: tl.constexpr, POW_2: tl.constexpr,
):  # fmt: skip
    """Store the rowwise codes of a tile by :func:`load_rows`; returns its encode scales [32]."""
    scale = float32_scale(tl.max(tl.abs(x), 1), epsilon, LARGEST, POW_2)
    store_rows(x * scale[:, None], rowwise_data, row, col, cols, None)
    return scale


@triton.jit
def _quantize_vectors_kernel(
    x_ptr, rowwise_data, rowwise_scale, columnwise_data, columnwise_scale, x_rows, rows, cols,
    epsilon, LARGEST: tl.constexpr, POW_2: tl.constexpr, ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Quantize x [x_rows, cols], padded with zeros to ``rows`` rows, with a scale per 128 elements.

    Grid: (rows / 128 * cols / 128,). Tile: [128, 128], which divides rows and cols. Reads x (2 or 4
    bytes per element) once, writes one byte per element and direction, and the scales, in words.
    PADDED: whether ``rows`` is more than ``x_rows``.

    A block is held as four tiles of every fourth row. So four rows of a column, whose codes make a
    word, are in the same thread, and only whole words are exchanged between threads.
    """
    block, blocks_per_row = tl.program_id(0), cols // 128
    row, col = block // blocks_per_row * 128, block % blocks_per_row * 128
    x0 = _load_padded_rows(x_ptr, row, col, x_rows, cols, PADDED)
    x1 = _load_padded_rows(x_ptr, row + 1, col, x_rows, cols, PADDED)
    x2 = _load_padded_rows(x_ptr, row + 2, col, x_rows, cols, PADDED)
    x3 = _load_padded_rows(x_ptr, row + 3, col, x_rows, cols, PADDED)
    if ROWWISE:
        scale0 = _quantize_rows(x0, rowwise_data, row, col, cols, epsilon, LARGEST, POW_2)
        scale1 = _quantize_rows(x1, rowwise_data, row + 1, col, cols, epsilon, LARGEST, POW_2)
        scale2 = _quantize_rows(x2, rowwise_data, row + 2, col, cols, epsilon, LARGEST, POW_2)
        scale3 = _quantize_rows(x3, rowwise_data, row + 3, col, cols, epsilon, LARGEST, POW_2)
        scale = tl.join(tl.join(scale0, scale2), tl.join(scale1, scale3))
        ptr = rowwise_scale + tile_start(col // 128, row, rows) + tl.arange(0, 128)
        tl.store(ptr, inverse_scale(tl.reshape(scale, (128,)), POW_2))
    if COLUMNWISE:
        magnitude = tl.join(tl.join(tl.abs(x0), tl.abs(x1)), tl.join(tl.abs(x2), tl.abs(x3)))
        largest = tl.max(tl.max(tl.max(magnitude, 3), 2), 0)
        scale = float32_scale(largest, epsilon, LARGEST, POW_2)
        ptr = columnwise_scale + tile_start(row // 128, col, cols) + tl.arange(0, 128)
        tl.store(ptr, inverse_scale(scale, POW_2))
        scale = scale[None, :]
        words = e4m3_word(x0 * scale, x1 * scale, x2 * scale, x3 * scale)
        words_ptr = columnwise_data.to(tl.pointer_type(tl.uint32))
        store_words(words_ptr, col, row // 4, rows // 4, tl.trans(words), 128, 32)


@on_its_device
def quantize_vectors(
    x: Tensor,
    *,
    rowwise_data: Tensor | None,
    columnwise_data: Tensor | None,
    rowwise_scale: Tensor | None,
    columnwise_scale: Tensor | None,
    rows: int,
    force_pow_2_scales: bool,
    amax_epsilon: float,
) -> None:
    """Quantize the contiguous matrix ``x`` with a scale per 128 elements into new storage.

    The storage has ``rows`` rows, at least as many as ``x``; missing rows of ``x`` count as zeros.
    ``rows`` and the columns of ``x`` are multiples of 128.
    """
    launch = _vectors_launch(
        tuple(x.shape),
        rows,
        x.dtype,
        x.device.index,
        rowwise_data is not None,
        columnwise_data is not None,
        alignment(x),
        force_pow_2_scales,
        amax_epsilon,
    )
    storage = (rowwise_data, rowwise_scale, columnwise_data, columnwise_scale)
    launch(x, *(x if t is None else t for t in storage))


@functools.lru_cache(maxsize=4096)
def _vectors_launch(
    shape: tuple[int, int],
    rows: int,
    dtype: torch.dtype,
    device: int | None,
    rowwise: bool,
    columnwise: bool,
    aligned: tuple[bool, ...],
    force_pow_2_scales: bool,
    amax_epsilon: float,
) -> Launch:
    """The cached launch for a shape; ``device`` and ``aligned`` only distinguish kernels."""
    return Launch(
        _quantize_vectors_kernel,
        rows // BLOCK * (shape[1] // BLOCK),
        (shape[0], rows, shape[1], amax_epsilon),
        dict(
            LARGEST=torch.finfo(dtype).max,
            POW_2=force_pow_2_scales,
            ROWWISE=rowwise,
            COLUMNWISE=columnwise,
            PADDED=shape[0] < rows,
        ),
        num_warps=WARPS[columnwise],
    )
