"""int8 remainders: what a quantized weight lacks of its master, in units of its own codes.

The arithmetic of ``fp4adam.optim.remainder``, which describes it, bit for bit.
"""

import triton
import triton.language as tl

from fp4adam.kernels.tiles.layout import state_offsets

FP32_MAX = tl.constexpr(3.4028234663852886e38)
# The bits of the smallest power of two of a code, and the units per power of two.
_LEAST_E2M1, _PER_E2M1 = tl.constexpr(0x3F800000), tl.constexpr(476)
_LEAST_E4M3, _PER_E4M3 = tl.constexpr(0x3C800000), tl.constexpr(1904)


@triton.jit
def code_power(value, BITS: tl.constexpr):
    """The bits, int32, of the powers of two of codes with these float32 values.

    BITS: 4 for E2M1, 8 for E4M3.
    """
    LEAST: tl.constexpr = _LEAST_E2M1 if BITS == 4 else _LEAST_E4M3
    return tl.maximum(value.to(tl.int32, bitcast=True) & 0x7F800000, LEAST)


@triton.jit
def unit_of_one(factor, BITS: tl.constexpr):
    """The unit of codes with the power of two 1, and its inverse.

    factor: float32, from codes to values.
    """
    PER_POWER: tl.constexpr = _PER_E2M1 if BITS == 4 else _PER_E4M3
    unit = factor * (1.0 / PER_POWER)
    return unit, tl.minimum(tl.div_rn(1.0, unit), FP32_MAX)


@triton.jit
def complete(value, factor, unit, remainder, BITS: tl.constexpr):
    """Masters, float32, of codes with int8 remainders.

    value: of the codes, float32. factor: from codes to values. unit: by :func:`unit_of_one`.
    """
    power = code_power(value, BITS).to(tl.float32, bitcast=True)
    # As an integer added to the bits of 1.5 * 2^23, where the spacing of FP32 is 1.
    steps = (remainder.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    steps = tl.where(remainder == -128, float("nan"), steps)
    return value * factor + steps * (power * unit)


@triton.jit
def split_off(master, value, factor, inverse, dither, BITS: tl.constexpr):
    """The int8 remainders of float32 masters, rounded with uint32 dither.

    value: of their codes, float32. factor: from codes to values. inverse: by :func:`unit_of_one`.
    """
    # The reciprocal of a power of two.
    power = (0x7F000000 - code_power(value, BITS)).to(tl.float32, bitcast=True)
    steps = (master - value * factor) * (inverse * power)
    # In this range a number has 15 bits below the point, which the dither rounds up or down.
    center = tl.minimum(tl.maximum(steps + 384.0, 257.0), 511.0)
    bits = center.to(tl.int32, bitcast=True) + (dither >> 17).to(tl.int32)
    # The lowest byte of the integer part is the remainder plus 128.
    byte = tl.where(steps == steps, (bits >> 15) ^ 0x80, 0x80)
    return byte.to(tl.int8)


@triton.jit
def load_remainder(ptr, start, stride, mask, BR: tl.constexpr, BC: tl.constexpr):
    """Load the int8 remainders of a tile; arguments as for ``load_state``."""
    return tl.load(ptr + start + state_offsets(stride, BR, BC), mask)


@triton.jit
def store_remainder(ptr, start, stride, mask, remainder, BR: tl.constexpr, BC: tl.constexpr):
    """Store what :func:`load_remainder` loads."""
    tl.store(ptr + start + state_offsets(stride, BR, BC), remainder, mask)
