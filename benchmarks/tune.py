"""Times the fused steps with other tiles than the chosen ones, on an NVIDIA GPU.

    python benchmarks/tune.py [FORMAT ...] [--layers 16]

For every format, the tiles of its table below are put in place of the package's one after another
and the step is timed as in step.py; the best come first, as share of the copy rate.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peers import FORMATS, HYPER, LAYER, parameters
from step import Clock, copy_rate, step_bytes

from fp4adam import FP4Adam
from fp4adam.kernels import float8_block_step, mxfp8_step, nvfp4_step
from fp4adam.kernels.launch.tensor_table import Tile

NVFP4_TILES = [
    Tile(16, 64, 4, 4, 4),
    Tile(16, 64, 4, 4, 3),
    Tile(16, 64, 4, 4, 2),
    Tile(16, 64, 2, 4, 4),
    Tile(16, 64, 4, 8, 4),
    Tile(16, 128, 4, 8, 3),
    Tile(16, 128, 4, 4, 3),
    Tile(16, 128, 4, 4, 2),
    Tile(16, 32, 4, 2, 4),
    Tile(32, 32, 4, 4, 3),
    Tile(32, 64, 2, 4, 2),
]
# Each with the columns of a part.
MXFP8_TILES = [
    (Tile(32, 256, 1, 4, 3), 64),
    (Tile(32, 256, 1, 4, 4), 64),
    (Tile(32, 256, 1, 4, 2), 64),
    (Tile(32, 512, 1, 4, 3), 64),
    (Tile(32, 128, 1, 4, 3), 64),
    (Tile(32, 256, 1, 8, 3), 64),
    (Tile(32, 128, 1, 4, 4), 32),
    (Tile(32, 256, 1, 4, 4), 32),
    (Tile(32, 128, 1, 2, 4), 32),
]
FLOAT8_BLOCK_TILES = [
    Tile(8, 128, 16, 4, 4),
    Tile(8, 128, 16, 4, 3),
    Tile(8, 128, 16, 4, 5),
    Tile(8, 128, 16, 8, 3),
    Tile(8, 128, 16, 8, 4),
    Tile(16, 128, 8, 4, 3),
    Tile(16, 128, 8, 8, 3),
]


def put_nvfp4(two_dimensional: bool) -> Callable[[Tile], None]:
    """What puts a tile in the place of NVFP4's."""

    def put(tile: Tile) -> None:
        nvfp4_step.STEP_TILE[two_dimensional] = tile

    return put


def put_mxfp8(tile_and_part: tuple[Tile, int]) -> None:
    """Put a tile and its part in the place of MXFP8's."""
    mxfp8_step.STEP_TILE, mxfp8_step.STEP_PART[False] = tile_and_part


def put_float8_block(two_dimensional: bool) -> Callable[[Tile], None]:
    """What puts a tile in the place of Float8Block's for whole blocks."""

    def put(tile: Tile) -> None:
        edge = float8_block_step.STEP_PARTS[two_dimensional, False][1]
        float8_block_step.STEP_PARTS[two_dimensional, False] = (tile, edge)

    return put


CANDIDATES = {
    "NVFP4": (NVFP4_TILES, put_nvfp4(True)),
    "NVFP4 1D": (NVFP4_TILES, put_nvfp4(False)),
    "MXFP8": (MXFP8_TILES, put_mxfp8),
    "Float8Block": (FLOAT8_BLOCK_TILES, put_float8_block(True)),
    "Float8Block 1D": (FLOAT8_BLOCK_TILES, put_float8_block(False)),
}


def timings(name: str, layers: int, rate: float) -> Iterator[tuple[float, float, Any]]:
    """Share of the copy rate, milliseconds and tile, for every tile that compiles."""
    tiles, put = CANDIDATES[name]
    params = parameters(LAYER * layers, "cuda", torch.bfloat16, FORMATS[name])
    numel = sum(p.numel() for p in params)
    for tile in tiles:
        put(tile)
        optimizer = FP4Adam(params, **HYPER)
        try:
            optimizer.step()
        except Exception as error:  # a tile that needs more than the GPU has is no candidate
            print(f"{name}: {tile} does not run: {str(error)[:80]}")
            continue
        optimizer.step()
        ms = statistics.median(Clock("cuda").samples(optimizer.step, 12))
        yield step_bytes(optimizer, params) / ms * 1e3 / rate, ms, tile
    print(f"{name}: {numel / 1e6:.0f} M parameters")


def main() -> None:
    """Time all tiles of the chosen formats."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*", default=list(CANDIDATES), metavar="FORMAT")
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    rate = copy_rate(Clock("cuda"), "cuda")
    for name in args.formats:
        for share, ms, tile in sorted(timings(name, args.layers, rate), reverse=True):
            print(f"{name:16s} {share:.3f} of copy  {ms:7.3f} ms  {tile}", flush=True)


if __name__ == "__main__":
    main()
