"""Block arithmetic: sizes rounded up to blocks, and views and strips of whole blocks."""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fp4adam.tensors import backend


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def flat_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The matrix shape that a weight is quantized as: [product of leading dimensions, last]."""
    return math.prod(shape[:-1]), shape[-1]


class Span(NamedTuple):
    """A run of elements of a row-major matrix.

    Attributes:
        shape: Rows and columns of the matrix.
        start: Index of the first element.
        stop: Index of the element after the last one.
    """

    shape: tuple[int, int]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole matrix."""
        return (self.start, self.stop) == (0, math.prod(self.shape))


def strips(
    x: Tensor,
    block: tuple[int, int],
    scratch: int = 0,
    span: Span | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple]:
    """Cut a matrix, or a span of one, into strips of whole blocks that fit into a CPU's cache.

    Args:
        x: The contiguous matrix, of any floating dtype; the values of the span if there is one.
        block: Rows and columns of a block.
        scratch: Number of tensors to work in. All strips share their memory, because what was
            used last is still in the cache.
        span: The elements of a matrix that ``x`` holds; None for all.
        dtype: The dtype that values are rounded to.

    Yields:
        For each strip its rows as a slice; their values, float32, padded with zeros to whole
        blocks and outside of the span, which are valid until the next strip; and ``scratch``
        float32 tensors of that shape.
    """
    (rows, cols), start, stop = (x.shape, 0, x.numel()) if span is None else span
    if start == stop:
        return
    first = start // cols // block[0] * block[0]
    last = min(round_up(-(-stop // cols), block[0]), rows)
    height = max(1, backend.cpu_chunk_numel() // (block[0] * cols)) * block[0]
    height = min(height, round_up(last - first, block[0]))
    width, flat = round_up(cols, block[1]), x.detach().reshape(-1)
    memory = [x.new_empty(height, width, dtype=torch.float32) for _ in range(scratch)]
    padded = None
    for top in range(first, last, height):
        here = slice(top, min(top + height, last))
        begin, end = max(start, top * cols), min(stop, here.stop * cols)
        values, n = flat[begin - start : end - start], here.stop - top
        if dtype not in (torch.float32, x.dtype):
            values = values.to(dtype)
        shape = round_up(n, block[0]), width
        if values.dtype == torch.float32 and len(values) == math.prod(shape):
            strip = values.view(shape)
        else:
            if padded is None:
                padded = x.new_zeros(height, width, dtype=torch.float32)
            strip = padded[: shape[0]]
            if len(values) < n * cols:
                around = values.new_zeros(n * cols)
                around[begin - top * cols : end - top * cols] = values
                values = around
            strip[:n, :cols] = values.view(n, cols)
            strip[n:] = 0
        yield here, strip, *(each[: shape[0]] for each in memory)


def blocks_of(x: Tensor, block: tuple[int, int]) -> Tensor:
    """View [rows, cols] as [block row, row, block column, column]; edges are padded with zeros."""
    rows, cols = (round_up(n, size) for n, size in zip(x.shape, block, strict=True))
    if x.shape != (rows, cols):
        x = torch.nn.functional.pad(x, (0, cols - x.shape[1], 0, rows - x.shape[0]))
    return x.view(rows // block[0], block[0], cols // block[1], block[1])


def times_factors(blocks: Tensor, factors: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply [block row, row, block column, column] by one factor per block.

    ``out``: Contiguous memory for the products, of any shape.
    """
    out = torch.empty_like(blocks) if out is None else out.view(blocks.shape)
    height, width = blocks.shape[1], blocks.shape[3]
    if height == 1 or width == 1:
        return torch.mul(blocks, factors[:, None, :, None], out=out)
    # Torch multiplies whole rows by rows several times faster than pieces of them by a number.
    rows = factors.repeat_interleave(width, dim=1)[:, None]
    torch.mul(blocks.flatten(2), rows, out=out.flatten(2))
    return out


def in_blocks(span: slice, block: int) -> slice:
    """The slice of blocks that covers the rows ``span``, which starts at a block boundary."""
    return slice(span.start // block, -(-span.stop // block))


@functools.lru_cache(maxsize=4096)
def blocks_of_parts(
    rows: int, block: int, part_rows: int, part_blocks: int, device: torch.device
) -> Tensor:
    """For each block of rows, the index of its entry among those of consecutive parts, int64.

    Each part has an entry for every block that it overlaps, the parts' ends may cut blocks.

    Args:
        rows: Number of rows.
        block: Rows of a block.
        part_rows: Rows of a part.
        part_blocks: Number of entries that each part has room for.
        device: Where to put the indices.
    """
    number = torch.arange(-(-rows // block), device="cpu")
    part = number * block // part_rows
    index = part * part_blocks + number - part * part_rows // block
    return index.to(device, non_blocking=True)
