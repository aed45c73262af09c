"""Tile lists, and tables and tile lists that stay on a device."""

import functools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fp4adam.kernels.launch.device_tables import upload
from fp4adam.kernels.launch.schema import TABLE_WIDTH, column

# (tensor, first row, end row, first column, end column); ends are exclusive.
Region = tuple[int, int, int, int, int]
# Columns of a band. Tiles follow each other down a band before the next one begins, so that short
# pieces of transposed rows meet their neighbours in L2, however wide the matrix is. Tiles of 128
# rows store whole lines, and tiles without transposed rows have no such pieces: they are slower in
# bands.
BAND = 8192


def tile_grid(region: Region, tile: tuple[int, int], band: int | None = None) -> Tensor:
    """Tiles of shape ``tile`` that cover a region: int32 [n, 4], (tensor, row, column, 0).

    ``band``: The columns after which tiles go on with the next rows; None: all of them.
    """
    tensor, top, bottom, left, right = region
    bounds = (top, max(top, bottom), tile[0]), (left, max(left, right), tile[1])
    starts = torch.cartesian_prod(
        *(torch.arange(*each, dtype=torch.int32, device="cpu") for each in bounds)
    ).view(-1, 2)
    if band is not None:
        starts = starts[torch.argsort(starts[:, 1] // band, stable=True)]
    tiles = torch.zeros(len(starts), 4, dtype=torch.int32, device="cpu")
    tiles[:, 0], tiles[:, 1:3] = tensor, starts
    return tiles


def table(columns: Mapping[str, Iterable[int]], device: torch.device) -> Tensor:
    """A table, int64 [n_tensors, 20], of columns by name: 0 in all that are not given."""
    columns = tuple((name, tuple(numbers)) for name, numbers in columns.items())
    return _table(columns, device, _stream(device))


def tile_list(regions: list[Region], tile: tuple[int, int], device: torch.device) -> Tensor:
    """Tiles of shape ``tile`` that cover regions, as by :func:`tile_grid`."""
    return _tile_list(tuple(regions), tile, device, _stream(device))


def _stream(device: torch.device) -> int:
    # Part of the cache key: an upload is ordered before later launches on its own stream only.
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@functools.lru_cache(maxsize=256)
def _table(
    columns: tuple[tuple[str, tuple[int, ...]], ...], device: torch.device, stream: int
) -> Tensor:
    words = torch.zeros(len(columns[0][1]), TABLE_WIDTH, dtype=torch.int64, device="cpu")
    for name, numbers in columns:
        words[:, column(name)] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return _on_device(words, device)


@functools.lru_cache(maxsize=64)
def _tile_list(
    regions: tuple[Region, ...], tile: tuple[int, int], device: torch.device, stream: int
) -> Tensor:
    empty = torch.empty(0, 4, dtype=torch.int32, device="cpu")
    return _on_device(torch.cat([empty, *(tile_grid(each, tile) for each in regions)]), device)


def _on_device(source: Tensor, device: torch.device) -> Tensor:
    target = torch.empty_like(source, device=device)
    upload(source, target)
    return target
