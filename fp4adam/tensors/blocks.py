"""Block arithmetic: sizes rounded up to blocks, runs of elements, and blocks of several parts."""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor


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
