"""Repeatable copies between fixed views, in one launch per dtype and device."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp4adam.kernels.launch.device_tables import upload
from fp4adam.tensors import backend

if TYPE_CHECKING:
    from fp4adam.kernels.launch.launch import Launch

Pair = tuple[Tensor, Tensor]


class StridedCopies:
    """Copies between views of up to five dimensions with any strides.

    Args:
        pairs: (target, source) pairs; both of a pair have the same dtype, uint8 or float32, and
            device. Sources are broadcast to their targets. Targets must not overlap.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        alike: dict[tuple[torch.device, torch.dtype], list[Pair]] = defaultdict(list)
        for target, source in pairs:
            alike[target.device, target.dtype].append((target, source.expand_as(target)))
        # Holding the views keeps their memory alive.
        self._copies = [
            (views, _launch(*kind, views) if backend.uses_kernels(kind[0]) else None)
            for kind, views in alike.items()
        ]

    def __call__(self) -> None:
        """Make all copies."""
        for views, launch in self._copies:
            if launch is not None:
                with torch.cuda.device_of(views[0][0]):
                    launch()
                continue
            for target, source in views:
                target.copy_(source)


def _launch(device: torch.device, dtype: torch.dtype, pairs: list[Pair]) -> "Launch":
    from fp4adam.kernels import strided_copy

    rows, chunks = [], []
    for i, (target, source) in enumerate(pairs):
        missing = strided_copy.RANK.value - target.dim()
        shapes = ((1, target.shape), (0, source.stride()), (0, target.stride()))
        columns = [n for fill, values in shapes for n in (*[fill] * missing, *values)]
        rows.append([source.data_ptr(), target.data_ptr(), *columns])
        firsts = torch.arange(
            0, target.numel(), strided_copy.CHUNK, dtype=torch.int32, device="cpu"
        )
        chunks.append(torch.stack((torch.full_like(firsts, i), firsts), dim=1))
    tables = []
    for host in (torch.tensor(rows, dtype=torch.int64, device="cpu"), torch.cat(chunks)):
        tables.append(torch.empty_like(host, device=device))
        upload(host, tables[-1])
    return strided_copy.strided_copy(*tables, dtype)
