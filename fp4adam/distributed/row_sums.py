"""Sums over rows that ranks share, with the bits of one process on any number of them.

Shards are whole pairs of rows, up to the power of two that divides their rows. So a rank adds its
rows up to there, in the order of ``tensors.sums``, and ranks exchange these sums, the **nodes**.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fp4adam.distributed.scale_exchange import ShardInfo
from fp4adam.tensors import backend
from fp4adam.tensors.sums import LEVELS_OF_ROWS, sums


class RowSums:
    """Sums over the rows of a matrix, of which each rank adds up to nodes what it has.

    Attributes:
        levels: Nodes are of 2**levels rows.
        shape: Of the nodes of this rank.
    """

    def __init__(
        self, rows: int, cols: int, shards: ShardInfo | None, device: torch.device
    ) -> None:
        self._shards, self._n = shards, 1 if shards is None else shards.n_shards
        chunk, self.levels = -(-rows // self._n), LEVELS_OF_ROWS - 1  # those of a program
        if self._n > 1:
            self.levels = min(self.levels, (chunk & -chunk).bit_length() - 1)
        self.shape = -(-chunk // 2**self.levels), cols
        self._width = -(-cols // self._n)
        self._rest = LEVELS_OF_ROWS - self.levels
        self.launch = None
        if backend.uses_kernels(device):
            from fp4adam.kernels.factored import sums_launch

            self.launch = sums_launch(self.shape[0] * self._n, self._width, self.levels)

    def __call__(self, nodes: Tensor) -> Tensor:
        """Sums [cols] of the nodes of all ranks, each of which has to call it."""
        if self._shards is None:
            return self._sums(nodes)
        # Each rank adds some columns.
        padded = F.pad(nodes, (0, self._width * self._n - nodes.shape[1]))
        sent = padded.unflatten(1, (self._n, -1)).transpose(0, 1).contiguous()
        received, found = torch.empty_like(sent), padded.new_empty(padded.shape[1])
        dist.all_to_all_single(received, sent, group=self._shards.group)
        own = self._sums(received.flatten(0, 1))
        dist.all_gather_into_tensor(found, own, group=self._shards.group)
        return found[: nodes.shape[1]]

    def _sums(self, nodes: Tensor) -> Tensor:
        if self.launch is None:
            return sums(nodes, self._rest)
        found = nodes.new_empty(nodes.shape[1])
        self.launch(nodes, found)
        return found
