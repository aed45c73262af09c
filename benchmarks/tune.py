"""Times the fused steps with other tiles than the chosen ones, on an NVIDIA GPU.

    python benchmarks/tune.py [CASE ...] [--layers 8]

A case is an optimizer of peers.py on one of its models. The tiles of its table below are put in
place of the package's one after another, and the step is timed as in step.py; the best come first,
as share of the copy rate.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from peers import CONTESTANTS, NARROW, model_shapes
from step import Clock, copy_rate, step_bytes

from fp4adam.kernels import adam, float8_block_step, mxfp8_step, nvfp4_step
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


# Of blocks that need masks.
MASKED_TILES = [
    Tile(8, 128, 16, 4, 2),
    Tile(8, 128, 16, 4, 3),
    Tile(8, 128, 16, 4, 4),
    Tile(4, 128, 32, 4, 4),
]
EDGE_WARPS = [1, 2, 4]
# Of masters in int8, which the step completes: tiles, and the most registers of a thread.
COMPLETED_NVFP4 = [
    (Tile(16, 64, 4, 2, 4), 255),
    (Tile(16, 64, 4, 2, 3), 255),
    (Tile(16, 64, 4, 2, 2), 255),
    (Tile(16, 64, 4, 2, 4), 168),
    (Tile(16, 64, 4, 4, 4), 168),
    (Tile(16, 64, 4, 4, 3), 168),
    (Tile(16, 64, 4, 4, 3), 128),
    (Tile(16, 64, 8, 2, 4), 255),
    (Tile(16, 128, 4, 4, 3), 255),
    (Tile(16, 128, 4, 4, 2), 168),
]
# Each with the columns of a part between.
COMPLETED_MXFP8 = [
    (Tile(32, 256, 1, 4, 3), 64, None),
    (Tile(32, 256, 1, 4, 3), 64, 255),
    (Tile(32, 256, 1, 4, 2), 64, 168),
    (Tile(32, 256, 1, 4, 3), 32, 128),
    (Tile(32, 256, 1, 8, 3), 64, 128),
    (Tile(32, 256, 1, 8, 2), 128, 128),
    (Tile(32, 512, 1, 8, 2), 128, 128),
    (Tile(32, 256, 1, 4, 1), 64, 168),
]
COMPLETED_FLOAT8_BLOCK = [
    (Tile(16, 128, 8, 8, 2), 255),
    (Tile(16, 128, 8, 8, 1), 255),
    (Tile(16, 128, 8, 8, 3), 255),
    (Tile(8, 128, 16, 8, 2), 255),
    (Tile(32, 128, 4, 8, 1), 255),
    (Tile(32, 128, 4, 8, 2), 255),
    (Tile(32, 128, 4, 16, 1), 128),
    (Tile(32, 128, 4, 16, 2), 128),
]
BLOCKS = [512, 1024]


def put_nvfp4(two_dimensional: bool) -> Callable[[Tile], None]:
    """What puts a tile in the place of NVFP4's."""

    def put(tile: Tile) -> None:
        nvfp4_step.STEP_TILE[two_dimensional] = tile

    return put


def put_mxfp8(tile_and_part: tuple[Tile, int]) -> None:
    """Put a tile and its part in the place of MXFP8's."""
    mxfp8_step.STEP_TILE, mxfp8_step.STEP_PART[False] = tile_and_part


def put_float8_block(two_dimensional: bool, masked: bool = False) -> Callable[[Tile], None]:
    """What puts a tile in the place of Float8Block's for whole blocks, or for those with masks."""

    def put(tile: Tile) -> None:
        parts = float8_block_step.MASKED_PARTS if masked else float8_block_step.STEP_PARTS
        parts[two_dimensional, False] = tile

    return put


def put_completed_nvfp4(tile_and_registers: tuple[Tile, int]) -> None:
    """Give NVFP4's masters in int8 this tile, and a thread so many registers."""
    tile, registers = tile_and_registers
    edge = nvfp4_step.EDGE_TILE[True]
    nvfp4_step.step_forms = lambda *_: (tile, edge)
    nvfp4_step.step_registers = lambda *_: (registers, 255)


def put_completed_mxfp8(candidate: tuple[Tile, int, int | None]) -> None:
    """Give MXFP8's masters in int8 this tile, its part, and a thread so many registers."""
    mxfp8_step.STEP_TILE, part, registers = candidate
    mxfp8_step.step_part = lambda *_: part
    mxfp8_step.step_registers = lambda *_: registers


def put_completed_float8_block(tile_and_registers: tuple[Tile, int]) -> None:
    """Give Float8Block's masters in int8 these parts, and a thread so many registers."""
    tile, registers = tile_and_registers
    float8_block_step.decoded_part = lambda *_: tile
    float8_block_step.max_registers = lambda *_: registers


def put_edge_warps(warps: int) -> None:
    """Give NVFP4's tiles at edges so many warps."""
    nvfp4_step.EDGE_TILE[False] = nvfp4_step.EDGE_TILE[False]._replace(num_warps=warps)


def put_block(block: int) -> None:
    """Give programs of plain parameters so many elements."""
    adam.BLOCKS.update({False: block, True: block})


class Case(NamedTuple):
    """An optimizer and a model of peers.py, what to choose from, and how to put it in place."""

    optimizer: str
    model: str
    candidates: list[Any]
    put: Callable[[Any], None]


CASES = {
    "NVFP4": Case("FP4Adam, NVFP4", "gpt", NVFP4_TILES, put_nvfp4(True)),
    "NVFP4 1D": Case("FP4Adam, NVFP4 1D", "gpt", NVFP4_TILES, put_nvfp4(False)),
    "MXFP8": Case("FP4Adam, MXFP8", "gpt", MXFP8_TILES, put_mxfp8),
    "Float8Block": Case("FP4Adam, Float8Block", "gpt", FLOAT8_BLOCK_TILES, put_float8_block(True)),
    "Float8Block 1D": Case(
        "FP4Adam, Float8Block 1D", "gpt", FLOAT8_BLOCK_TILES, put_float8_block(False)
    ),
    "BF16 moments": Case("FP4Adam, NVFP4, BF16 moments", "gpt", NVFP4_TILES, put_nvfp4(True)),
    "FP8 moments": Case("FP4Adam, NVFP4, FP8 moments", "gpt", NVFP4_TILES, put_nvfp4(True)),
    "FP8 moments, FP16 masters": Case(NARROW, "gpt", NVFP4_TILES, put_nvfp4(True)),
    "NVFP4, 8-bit": Case(
        "FP4Adam, NVFP4, 8-bit states", "gpt", COMPLETED_NVFP4, put_completed_nvfp4
    ),
    "MXFP8, 8-bit": Case(
        "FP4Adam, MXFP8, 8-bit states", "gpt", COMPLETED_MXFP8, put_completed_mxfp8
    ),
    "Float8Block, 8-bit": Case(
        "FP4Adam, Float8Block, 8-bit states",
        "gpt",
        COMPLETED_FLOAT8_BLOCK,
        put_completed_float8_block,
    ),
    "plain": Case("FusedAdam, BF16 + FP32 masters", "gpt", BLOCKS, put_block),
    "plain, BF16 moments": Case(
        "FusedAdam, BF16 + FP32 masters, BF16 moments", "gpt", BLOCKS, put_block
    ),
    "plain, FP8 moments": Case(
        "FusedAdam, BF16 + FP32 masters, FP8 moments", "gpt", BLOCKS, put_block
    ),
    "ragged NVFP4": Case("FP4Adam, NVFP4", "ragged", EDGE_WARPS, put_edge_warps),
    "ragged Float8Block": Case(
        "FP4Adam, Float8Block", "ragged", MASKED_TILES, put_float8_block(True, masked=True)
    ),
}


def timings(
    name: str, layers: int, rate: float, only: int | None
) -> Iterator[tuple[float, float, Any]]:
    """Share of the copy rate, milliseconds and candidate, for every candidate that compiles."""
    case = CASES[name]
    (contestant,) = (c for c in CONTESTANTS if c.name == case.optimizer)
    shapes = model_shapes(case.model, layers, multiple=contestant.multiple)
    print(f"{name}: {sum(math.prod(shape) for shape in shapes) / 1e6:.0f} M parameters")
    candidates = case.candidates if only is None else case.candidates[only : only + 1]
    for candidate in candidates:
        case.put(candidate)
        optimizer, params = contestant.make(shapes, "cuda")
        try:
            optimizer.step()
        except Exception as error:  # a tile that needs more than the GPU has is no candidate
            print(f"{name}: {candidate} does not run: {str(error)[:80]}")
            continue
        optimizer.step()
        ms = statistics.median(Clock("cuda").samples(optimizer.step, 12))
        yield step_bytes(optimizer, params) / ms * 1e3 / rate, ms, candidate


def main() -> None:
    """Time all candidates of the chosen cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--only", type=int, help="which candidate, by number; all if not given")
    args = parser.parse_args()
    rate = copy_rate(Clock("cuda"), "cuda")
    for name in args.cases:
        for share, ms, candidate in sorted(
            timings(name, args.layers, rate, args.only), key=lambda timing: timing[1]
        ):
            print(f"{name:26s} {share:.3f} of copy  {ms:7.3f} ms  {candidate}", flush=True)


if __name__ == "__main__":
    main()
