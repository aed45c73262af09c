"""Blocks of 32 elements with E8M0 scales: what MXFP8 and MXFP4 have in common."""

import triton
import triton.language as tl

from fp4adam.kernels.launch.tensor_table import tile_offsets, tile_start
from fp4adam.kernels.tiles.remainder import complete, split_off, unit_of_one


@triton.jit
def amax_of_blocks(blocks, AXIS: tl.constexpr):
    """The largest magnitudes of float32 blocks along AXIS; NaN counts only if there is no other."""
    amax = tl.max(tl.abs(blocks), AXIS)
    return tl.where(amax == amax, amax, 0.0)  # all elements NaN


@triton.jit
def scale_pointers(scales, row, col, cols, BR: tl.constexpr, BC: tl.constexpr):
    """Pointers [BR, BC / 32] to the rowwise scales of the tile [BR, BC] at (row, col)."""
    width = (cols // 32 + 3) // 4 * 4
    return scales + tile_start(row, col // 32, width) + tile_offsets(width, BR, BC // 32)


@triton.jit
def complete_blocks(
    value,
    factor,
    remainder,
    BITS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    CAPS: tl.constexpr = False,
):
    """The float32 masters of a tile [BR, BC] from values of codes, factors and int8 remainders.

    remainder: None for none.

    factor: float32 [BR, BC / 32], from codes to values. BITS, CAPS: as for :func:`complete`.
    """
    unit, _ = unit_of_one(factor, BITS)
    value = tl.reshape(value, (BR, BC // 32, 32))
    if remainder is not None:
        remainder = tl.reshape(remainder, (BR, BC // 32, 32))
    master = complete(value, factor[:, :, None], unit[:, :, None], remainder, BITS, CAPS)
    return tl.reshape(master, (BR, BC))


@triton.jit
def split_off_blocks(
    master,
    value,
    factor,
    inverse,
    dither,
    BITS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    CAPS: tl.constexpr = False,
):
    """The int8 remainders [BR, BC] of masters with these values of codes.

    factor, inverse: float32 [BR, BC / 32]; see :func:`split_off`.
    """
    remainder = split_off(
        tl.reshape(master, (BR, BC // 32, 32)),
        tl.reshape(value, (BR, BC // 32, 32)),
        factor[:, :, None],
        inverse[:, :, None],
        tl.reshape(dither, (BR, BC // 32, 32)),
        BITS,
        CAPS=CAPS,
    )
    return tl.reshape(remainder, (BR, BC))
