"""int8 remainders: what a quantized weight lacks of its master, in units of its own codes.

The arithmetic of ``fp4adam.optim.remainder``, which describes it, bit for bit.
"""

import triton
import triton.language as tl

from fp4adam.kernels.tiles.layout import state_offsets
from fp4adam.kernels.tiles.target import is_compiled_for_cuda

FP32_MAX = tl.constexpr(3.4028234663852886e38)
# The bits of the smallest power of two of a code, and the units per power of two.
_LEAST_E2M1, _PER_E2M1 = tl.constexpr(0x3F800000), tl.constexpr(478)
_LEAST_E4M3, _PER_E4M3 = tl.constexpr(0x3C800000), tl.constexpr(1912)

# 2^23 + 128 more than four int8 numbers: each plus 128 in the lowest byte of 2^23.
_FOUR_FLOATS = tl.constexpr(
    "{ .reg .b32 x; xor.b32 x, $4, 0x80808080;"
    " prmt.b32 $0, x, 0x4B000000, 0x7440;"
    " prmt.b32 $1, x, 0x4B000000, 0x7441;"
    " prmt.b32 $2, x, 0x4B000000, 0x7442;"
    " prmt.b32 $3, x, 0x4B000000, 0x7443; }"
)
# Byte 2 of four numbers, less 128.
_FOUR_BYTES = tl.constexpr(
    "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0062; prmt.b32 high, $3, $4, 0x0062;"
    " prmt.b32 low, low, high, 0x5410; xor.b32 $0, low, 0x80808080; }"
)


@triton.jit
def code_power(value, BITS: tl.constexpr, CAPS: tl.constexpr = False):
    """The bits, int32, of the powers of two of codes with these float32 values.

    BITS: 4 for E2M1, 8 for E4M3. CAPS: 6, the largest code, stands for magnitudes up to 8.
    """
    LEAST: tl.constexpr = _LEAST_E2M1 if BITS == 4 else _LEAST_E4M3
    power = tl.maximum(value.to(tl.int32, bitcast=True) & 0x7F800000, LEAST)
    if CAPS:
        power = tl.where(tl.abs(value) == 6.0, 0x41000000, power)
    return power


@triton.jit
def unit_of_one(factor, BITS: tl.constexpr):
    """The unit of codes with the power of two 1, and its inverse.

    factor: float32, from codes to values.
    """
    PER_POWER: tl.constexpr = _PER_E2M1 if BITS == 4 else _PER_E4M3
    unit = factor * (1.0 / PER_POWER)
    return unit, tl.minimum(tl.div_rn(1.0, unit), FP32_MAX)


@triton.jit
def _int8_value(x):
    """The float32 values of int8 numbers."""
    if is_compiled_for_cuda():
        value = tl.inline_asm_elementwise(
            _FOUR_FLOATS, "=f,=f,=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=4
        )
        value -= 8388736.0
    else:
        value = x.to(tl.float32)
    return value


@triton.jit
def _int8_of_byte_2(x):
    """Byte 2 of int32 numbers less 128, int8."""
    if is_compiled_for_cuda():
        y = tl.inline_asm_elementwise(
            _FOUR_BYTES, "=r,r,r,r,r", [x], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        y = ((x >> 16) ^ 0x80).to(tl.int8)
    return y


@triton.jit
def complete(value, factor, unit, remainder, BITS: tl.constexpr, CAPS: tl.constexpr = False):
    """Masters, float32, of codes with int8 remainders; None for none.

    value: of the codes, float32. factor: from codes to values. unit: by :func:`unit_of_one`.
    BITS, CAPS: as for :func:`code_power`.
    """
    master = value * factor
    if remainder is not None:
        power = code_power(value, BITS, CAPS).to(tl.float32, bitcast=True)
        steps = _int8_value(remainder)
        steps = tl.where(steps == -128.0, float("nan"), steps)
        master += steps * (power * unit)
    return master


@triton.jit
def split_off(
    master, value, factor, inverse, dither, BITS: tl.constexpr, SATURATES: tl.constexpr = False,
    CAPS: tl.constexpr = False,
):  # fmt: skip
    """The int8 remainders of float32 masters, rounded with uint32 dither.

    value: of their codes, float32. factor: from codes to values. inverse: by :func:`unit_of_one`.
    SATURATES: codes may be out of reach, because their scale is that of other values. BITS, CAPS:
    as for :func:`code_power`.
    """
    # The reciprocal of a power of two.
    power = (0x7F000000 - code_power(value, BITS, CAPS)).to(tl.float32, bitcast=True)
    steps = (master - value * factor) * (inverse * power)
    # From 256 to 512 a number has 15 bits below the point, which the dither rounds up or down. The
    # lowest byte of its integer part is the remainder plus 128. That of Inf is 0, also for NaN.
    steps += 384.0
    if SATURATES:
        steps = tl.where(tl.abs(steps) < float("inf"), steps, float("nan"))
        inside = tl.minimum(tl.maximum(steps, 257.0), 511.0)
        steps = tl.where(steps == steps, inside, float("inf"))
    bits = tl.minimum(steps.to(tl.uint32, bitcast=True), 0x7F800000)
    return _int8_of_byte_2(((bits << 1) + (dither >> 16)).to(tl.int32))


@triton.jit
def load_remainder(
    ptr, start, stride, mask, BR: tl.constexpr, BC: tl.constexpr, LANES: tl.constexpr
):
    """Load the int8 remainders of a tile; arguments as for ``load_state``."""
    return tl.load(ptr + start + state_offsets(stride, BR, BC, LANES), mask)


@triton.jit
def store_remainder(
    ptr, start, stride, mask, remainder, BR: tl.constexpr, BC: tl.constexpr, LANES: tl.constexpr
):
    """Store what :func:`load_remainder` loads."""
    tl.store(ptr + start + state_offsets(stride, BR, BC, LANES), remainder, mask)
