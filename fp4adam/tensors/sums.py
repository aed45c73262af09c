"""Sums over the rows of a matrix in one order, which kernels and shards can follow.

Numbers are added by pairs of neighbours, 2**levels of them, then every 32nd of these sums in turn,
then by pairs again; ``fp4adam.kernels.factored`` does the same.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS_OF_ROWS, LEVELS_OF_COLUMNS, _LEVELS_OF_TURNS = 7, 3, 5


def pairs(x: Tensor, levels: int) -> Tensor:
    """Sums [n / 2**levels, m], rounded up, over neighbouring rows of ``x`` [n, m]."""
    x = F.pad(x, (0, 0, 0, -len(x) % 2**levels))
    for _ in range(levels):
        x = x[::2] + x[1::2]
    return x


def sums(x: Tensor, levels: int = LEVELS_OF_ROWS) -> Tensor:
    """Sums [m] over the rows of ``x`` [n, m]."""
    x, turns = pairs(x, levels), 2**_LEVELS_OF_TURNS
    x = F.pad(x, (0, 0, 0, -len(x) % turns)).unflatten(0, (-1, turns))
    return pairs(functools.reduce(torch.add, x.unbind()), _LEVELS_OF_TURNS)[0]
