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
    """Elements ``start`` to ``stop``, exclusive, of a row-major matrix of ``shape``."""

    shape: tuple[int, int]
    start: int
    stop: int


@functools.lru_cache(maxsize=4096)
def blocks_of_parts(
    rows: int, block: int, part_rows: int, part_blocks: int, device: torch.device
) -> Tensor:
    """For each block of rows, the index of its entry among those of consecutive parts, int64.

    Each has room for ``part_blocks`` entries, one for every block that its rows overlap.
    """
    number = torch.arange(-(-rows // block), device="cpu")
    part = number * block // part_rows
    index = part * part_blocks + number - part * part_rows // block
    return index.to(device, non_blocking=True)
