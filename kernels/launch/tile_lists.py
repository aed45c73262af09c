"""Cached tables and tile lists on a device."""

import functools
from itertools import chain

import torch
from torch import Tensor

from fp4adam.kernels.launch.device_tables import upload
from fp4adam.kernels.launch.schema import TABLE_WIDTH

# (tensor, first row, end row, first column, end column); ends are exclusive.
Region = tuple[int, int, int, int, int]


def table(rows: list[list[int]], device: torch.device) -> Tensor:
    """A table, int64 [n_tensors, 19], from rows by ``schema.table_row``."""
    return _table(tuple(chain.from_iterable(rows)), device, _stream(device))


def tile_list(regions: list[Region], tile: tuple[int, int], device: torch.device) -> Tensor:
    """Tiles of shape ``tile`` that cover regions: int32 [n, 4], (tensor, row, column, 0)."""
    return _tile_list(tuple(regions), tile, device, _stream(device))


def _stream(device: torch.device) -> int:
    # Part of the cache key: an upload is ordered before later launches on its own stream only.
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@functools.lru_cache(maxsize=256)
def _table(words: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    return _on_device(
        torch.tensor(words, dtype=torch.int64, device="cpu").view(-1, TABLE_WIDTH), device
    )


@functools.lru_cache(maxsize=64)
def _tile_list(
    regions: tuple[Region, ...], tile: tuple[int, int], device: torch.device, stream: int
) -> Tensor:
    from fp4adam.kernels.launch.tensor_table import tile_grid

    grids = [
        tile_grid(tensor, (top, bottom, tile[0]), (left, right, tile[1]))
        for tensor, top, bottom, left, right in regions
        if top < bottom and left < right
    ]
    return _on_device(
        torch.cat([torch.empty(0, 4, dtype=torch.int32, device="cpu"), *grids]), device
    )


def _on_device(source: Tensor, device: torch.device) -> Tensor:
    target = torch.empty_like(source, device=device)
    upload(source, target)
    return target
