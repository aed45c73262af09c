"""Lists of tiles on a device, kept for the next launch that covers the same regions."""

import functools

import torch
from torch import Tensor

from fp4adam.device_tables import upload

# Tensor, first row, row behind the last, first column, column behind the last.
Region = tuple[int, int, int, int, int]


def tile_list(regions: list[Region], tile: tuple[int, int], device: torch.device) -> Tensor:
    """Tiles (tensor, first row, first column, 0) of [rows, columns] that cover regions, int32."""
    # What a stream uploads is there for its own launches, not for those of another one.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _tile_list(tuple(regions), tile, device, stream)


@functools.lru_cache(maxsize=64)
def _tile_list(
    regions: tuple[Region, ...], tile: tuple[int, int], device: torch.device, stream: int
) -> Tensor:
    from fp4adam.kernels.tensor_table import tile_grid

    grids = [
        tile_grid(tensor, (top, bottom, tile[0]), (left, right, tile[1]))
        for tensor, top, bottom, left, right in regions
        if top < bottom and left < right
    ]
    tiles = torch.cat([torch.empty(0, 4, dtype=torch.int32), *grids])
    on_device = torch.empty_like(tiles, device=device)
    upload(tiles, on_device)
    return on_device
