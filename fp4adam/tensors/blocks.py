"""Block arithmetic: sizes rounded up to blocks, and views and strips of whole blocks."""

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fp4adam.tensors import backend


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def flat_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The matrix shape that a weight is quantized as: [product of leading dimensions, last]."""
    return math.prod(shape[:-1]), shape[-1]


def strips(x: Tensor, block: tuple[int, int], scratch: int = 0) -> Iterator[tuple]:
    """Cut a matrix into strips of whole blocks, few enough rows for a CPU's cache.

    Args:
        x: The matrix, of any floating dtype.
        block: Rows and columns of a block.
        scratch: Number of tensors to work in. All strips share their memory, because what was
            used last is still in the cache.

    Yields:
        For each strip its rows as a slice; their values, float32, padded with zeros to whole
        blocks, which are valid until the next strip; and ``scratch`` float32 tensors of that shape.
    """
    rows, cols = x.shape
    height = max(1, backend.cpu_chunk_numel() // (block[0] * cols)) * block[0]
    height = min(height, max(1, round_up(rows, block[0])))
    width = round_up(cols, block[1])
    copies = x.dtype != torch.float32 or width != cols or rows % block[0] != 0
    padded = x.new_zeros(height if copies else 0, width, dtype=torch.float32)
    memory = [x.new_empty(height, width, dtype=torch.float32) for _ in range(scratch)]
    for start in range(0, rows, height):
        span = slice(start, min(start + height, rows))
        strip = x[span]
        if copies:
            padded[: len(strip), :cols] = strip
            padded[len(strip) :] = 0
            strip = padded[: round_up(len(strip), block[0])]
        yield span, strip, *(each[: len(strip)] for each in memory)


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
