"""Codecs that store optimizer states in 8 or 16 bits: codes, block scales, and dither.

Rounding is stochastic, or a moving average that changes by less than half the spacing of two codes
would never move. The dither must be independent from step to step, because rounding errors stay in
the average and meet the next one. It is a hash of element index and step (:func:`dither_bits`), so
shards, kernels and resumed runs draw the same bits. The step is mixed thoroughly, on the host.

Scales are powers of two, one byte per 32 consecutive elements. Decoding is exact (above 2**-126),
and a decoded value encodes to itself with any dither.

``fp4adam.kernels.tiles.state`` implements the same codecs as tile functions, with the same bits.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4adam.formats.minifloat import e8m0_reciprocal, e8m0_value
from fp4adam.tensors.sums import LEVELS_OF_COLUMNS, sums

STATE_BLOCK = 32

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_NAN_SCALE = 255
# The hash "lowbias32" of https://github.com/skeeto/hash-prospector: rounds of xor-shift and
# multiply, in which each input bit flips each output bit about half of the time.
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))
_LAST_SHIFT = 16
# Elements count in steps of a large odd number; the dither of a state is the square of that plus a
# number of its own, chosen so that pairs of dithers, of near elements or of two states, are even.
_OF_ELEMENTS = 0xC2B2AE35
_OF_MASTERS, _OF_EXP_AVG, _OF_EXP_AVG_SQ = 0x1B56C4E9, 0, 0x85EBCA6B


def dither_origin(first: int, step: int) -> int:
    """The 32-bit hash input for element ``first`` in update number ``step``; the next count up.

    Origins are distinct for the first 2**32 steps.
    """
    return (first + _mixed(_mixed(step >> 32) ^ step % 2**32)) % 2**32


def _mixed(x: int) -> int:
    for shift, factor in _ROUNDS:
        x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> _LAST_SHIFT


class Dither(NamedTuple):
    """Dither for each state, int32 [n]: the bits of numbers in [0, 2**32)."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def dither_bits(first: int, count: int, step: int, device: torch.device | str = "cpu") -> Dither:
    """Dither for ``count`` elements of a flattened tensor in update number ``step``."""
    x = torch.arange(count, dtype=torch.int32, device=device)
    x += _as_int32(dither_origin(first, step))
    x *= _as_int32(_OF_ELEMENTS)
    own = _OF_MASTERS, _OF_EXP_AVG, _OF_EXP_AVG_SQ
    return Dither(*((x + _as_int32(number)).square_() for number in own))


def _as_int32(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


def _upper_bits(dither: Tensor | None, count: int) -> Tensor | int:
    """The upper ``count`` bits of the dither; half their range if None, to round to nearest."""
    return 1 << (count - 1) if dither is None else dither >> (32 - count) & (1 << count) - 1


class StateCodec:
    """A storage format for float32 numbers; encodes and decodes flat tensors in memory order.

    Of this class are those whose codes are the numbers themselves (``exact``), and those that other
    code decodes with a weight. ``name``: That in the kernels. ``dtype``: That of the codes.
    """

    scaled = False  # True if codes share scales
    scale_dtype = torch.uint8

    def __init__(self, name: str, dtype: torch.dtype, exact: bool = False) -> None:
        self.name, self.dtype, self.exact = name, dtype, exact

    def encode(self, x: Tensor, dither: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Codes [n], and uint8 scales [ceil(n / 32)] or None, of contiguous float32 ``x`` [n].

        ``dither``: int32 [n], a field of :class:`Dither`; None rounds to nearest, ties away from
        zero.
        """
        return x, None

    def decode(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        return codes

    def shapes(self, param: torch.Size) -> tuple[torch.Size, torch.Size]:
        """Of codes and scales, (0,) without any, of a parameter of this shape."""
        return param, torch.Size([-(-param.numel() // STATE_BLOCK) * self.scaled])

    def nbytes(self, param: torch.Size) -> int:
        """Bytes of codes and scales of a parameter of this shape."""
        codes, scales = self.shapes(param)
        return codes.numel() * self.dtype.itemsize + scales.numel() * self.scale_dtype.itemsize

    def zeros_like(self, param: Tensor) -> tuple[Tensor, Tensor | None]:
        """Codes in the layout of ``param``, and scales, that encode zero: all bits are zero."""
        codes = torch.zeros_like(param, dtype=self.dtype, memory_format=torch.preserve_format)
        if not self.scaled:
            return codes, None
        scales = self.shapes(param.shape)[1]
        return codes, torch.zeros(scales, dtype=self.scale_dtype, device=param.device)


class Remainder(StateCodec):
    """BF16 parameters with the int16 remainders that complete their FP32 masters, as scales."""

    def encode(self, x: Tensor, dither: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return split_master(x)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return join_master(codes, scales)


class BFloat16(StateCodec):
    """BF16, which needs no scale; any NaN is 0x7FFF."""

    def encode(self, x: Tensor, dither: Tensor | None = None) -> tuple[Tensor, None]:
        bits = (x.view(torch.int32) + _upper_bits(dither, 16)) >> 16
        bits.masked_fill_(x.isnan(), 0x7FFF)
        return bits.to(torch.int16).view(torch.bfloat16), None

    def decode(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        return codes.float()


class BlockCodec(StateCodec):
    """Codes relative to a scale that follows from the block's amax; with NaN or Inf all are NaN."""

    scaled = True
    top: int  # exponent of the largest code
    # Added to the bits of the amax, it carries into the exponent if the mantissa is above that of
    # the largest code. The scale doubles then, so that no dither can round a number out of range.
    carry: int
    dropped: int  # mantissa bits that codes do not have
    nan_code = 0  # in blocks with a NaN or an Inf

    def encode(self, x: Tensor, dither: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if x.numel() % STATE_BLOCK:
            padding = (0, -x.numel() % STATE_BLOCK)
            dither = None if dither is None else F.pad(dither, padding)
            codes, scales = self.encode(F.pad(x, padding), dither)
            return codes[: x.numel()], scales
        blocks = x.view(-1, STATE_BLOCK)
        amax = blocks.abs().amax(1, keepdim=True).view(torch.int32) & _MAGNITUDE
        finite = amax < _INFINITY
        scales = (((amax + self.carry) >> 23) - self.top).clamp_(min=0)
        scales = torch.where(finite, scales, _NAN_SCALE)
        added = _upper_bits(None if dither is None else dither.view_as(blocks), self.dropped)
        codes = self._encode_blocks(blocks, scales, added)
        if not finite.all():
            codes.masked_fill_(~finite, self.nan_code)
        return codes.view(-1), scales.to(torch.uint8).view(-1)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        if codes.numel() % STATE_BLOCK:
            padding = (0, -codes.numel() % STATE_BLOCK)
            return self.decode(F.pad(codes, padding), scales)[: codes.numel()]
        return self._decode_blocks(codes.view(-1, STATE_BLOCK), scales.view(-1, 1)).view(-1)

    # Codes of float32 [blocks, 32] with int32 scales [blocks, 1], arbitrary at 255; ``added`` is
    # what is added to the bits before the lowest ``dropped`` of them are cut. And back, from uint8
    # scales; 255 is NaN.
    _encode_blocks: Callable[[Tensor, Tensor, Tensor | int], Tensor]
    _decode_blocks: Callable[[Tensor, Tensor], Tensor]


class SignedFloat(BlockCodec):
    """Numbers of a small float dtype times 2**(scale - 127), as in MXFP8, without subnormals.

    These have one spacing: rounded up by one, a tiny number could become many times as large, and
    the update with it if the second moment is just as small.
    """

    def __init__(self, name: str, number: torch.dtype, stored: torch.dtype) -> None:
        super().__init__(name, stored)
        self._number, info = number, torch.finfo(number)
        self._least = info.smallest_normal
        self.dropped = 23 + round(math.log2(info.eps))
        mantissa, exponent = math.frexp(info.max)
        self.top, self.carry = exponent - 1, round((1 - mantissa) * 2**24) - 1

    def _encode_blocks(self, x: Tensor, scales: Tensor, added: Tensor | int) -> Tensor:
        x = x * e8m0_reciprocal(scales)
        bits = x.view(torch.int32) + added
        # Of numbers that are too small the sign remains.
        is_small = bits.view(torch.float32).abs() < self._least
        bits &= torch.where(is_small, -(2**31), -(1 << self.dropped))
        return bits.view(torch.float32).to(self._number).view(self.dtype)

    def _decode_blocks(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.view(self._number).float() * e8m0_value(scales)


class UnsignedFloat(BlockCodec):
    """Unsigned floats relative to the exponent of the scale, for squares, which have no sign.

    Code c is the FP32 number with the bits ``(scale << 23) + (c << (23 - mantissa bits))``. The
    block's largest number is in the top binade. Numbers below the lowest one, zero included, are
    raised to it: too large a number in a denominator does no harm, but zero does. A block of zeros
    has scale 0, where code 0 is zero.
    """

    def __init__(self, exponent_bits: int, mantissa_bits: int) -> None:
        dtype = {8: torch.uint8, 16: torch.int16}[exponent_bits + mantissa_bits]
        super().__init__(f"ue{exponent_bits}m{mantissa_bits}", dtype)
        self.top = 2**exponent_bits - 1
        self.dropped = 23 - mantissa_bits
        self.carry = (1 << self.dropped) - 1
        self.nan_code = 1 << (mantissa_bits - 1)

    def _encode_blocks(self, x: Tensor, scales: Tensor, added: Tensor | int) -> Tensor:
        code = ((x.view(torch.int32) & _MAGNITUDE) - (scales << 23)).clamp_(min=0)
        return (code + added >> self.dropped).to(self.dtype)

    def _decode_blocks(self, codes: Tensor, scales: Tensor) -> Tensor:
        codes = codes.to(torch.int32) & 0xFFFF
        bits = (scales.to(torch.int32) << 23) + (codes << self.dropped)
        return bits.view(torch.float32)


class Factored(StateCodec):
    """A matrix of squares [n, m]: means by row, [n], and as scales those by column, and one number.

    The number is one over the mean of all. The matrix that is decoded is the product of the three.
    """

    scaled, scale_dtype = True, torch.float32

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return (codes * scales[-1])[:, None] * scales[:-1]

    def shapes(self, param: torch.Size) -> tuple[torch.Size, torch.Size]:
        return param[:1], torch.Size([param[1] + 1])

    def zeros_like(self, param: Tensor) -> tuple[Tensor, Tensor]:
        zeros = functools.partial(torch.zeros, dtype=self.dtype, device=param.device)
        return tuple(map(zeros, self.shapes(param.shape)))

    def add_rows(self, codes: Tensor, x: Tensor, *weights: Any) -> None:
        """Renew the means by row with squares ``x`` [n, m]; ``weights``: see :func:`_renew`."""
        _renew(codes, sums(x.T, LEVELS_OF_COLUMNS), x.shape[1], *weights)

    def add_columns(self, scales: Tensor, of_rows: Tensor, n: int, *weights: Any) -> None:
        """Renew the means by column, and the number, with sums [m] over n rows of squares."""
        by_column, mean = scales[:-1], scales[-1:]
        _renew(by_column, of_rows, n, *weights)
        _renew(mean.zero_(), sums(by_column[:, None]), len(by_column))
        # No mean that is not finite stands for anything, and below normal ones there is nothing.
        inverse = (mean + (mean - mean)).reciprocal()
        mean.copy_(inverse.masked_fill(mean < torch.finfo(mean.dtype).tiny, 0.0))


def _renew(
    means: Tensor, sums: Tensor, n: int, old: float = 0.0, new: float = 1.0, factor: Any = 1.0
) -> None:
    """Average means and those of n squares each of what ``factor`` multiplies, by weights."""
    found = sums / torch.full_like(sums, n)  # by a number, CUDA multiplies
    means.mul_(old).add_(found * factor * factor * new)


FLOAT32 = StateCodec("float32", torch.float32, exact=True)
# The value that Adam updates, kept in its own dtype and rounded to nearest.
PLAIN = StateCodec("plain", torch.float32, exact=True)
FLOAT64 = StateCodec("float64", torch.float64, exact=True)  # for FP64 parameters
REMAINDER = Remainder("remainder", torch.bfloat16)
# Remainders of quantized weights, see ``remainder``.
INT8 = StateCodec("int8", torch.int8)
# No master: the value of a quantized weight is what its codes say, see :func:`round_to_codes_`.
CODES = StateCodec("codes", torch.uint8)
BFLOAT16 = BFloat16("bfloat16", torch.bfloat16)
FLOAT16 = SignedFloat("float16", torch.float16, torch.float16)
E4M3 = SignedFloat("e4m3", torch.float8_e4m3fn, torch.uint8)
UE4M4 = UnsignedFloat(4, 4)
UE5M11 = UnsignedFloat(5, 11)
FACTORED = Factored("factored", torch.float32)

_FLOATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
_CODECS: dict[str, dict[Any, StateCodec]] = {
    "exp_avg": _FLOATS | {torch.float16: FLOAT16, torch.float8_e4m3fn: E4M3, torch.uint8: E4M3},
    "exp_avg_sq": _FLOATS | {torch.float16: UE5M11, torch.float8_e4m3fn: UE4M4, torch.uint8: UE4M4},
    "master_param": {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.int8: INT8},
}
_CODECS["exp_avg_sq"]["factored"] = FACTORED


@functools.cache
def state_codec(name: str, dtype: torch.dtype | str) -> StateCodec:
    """The codec that stores a state in a dtype."""
    codecs = _CODECS[name]
    if dtype not in codecs:
        known = ", ".join(str(known).removeprefix("torch.") for known in codecs)
        option = f"{name.replace('param', 'weight')}_dtype"
        raise ValueError(
            f"{option} must be one of {known}, got {dtype}; torch.float32 loses nothing"
        )
    return codecs[dtype]


def codec_of_codes(name: str, dtype: torch.dtype) -> StateCodec | None:
    """The codec with scales that stores a state in codes of ``dtype``, or None."""
    scaled = (codec for codec in _CODECS.get(name, {}).values() if codec.scaled)
    return next((codec for codec in scaled if codec.dtype == dtype), None)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Round float32 to BF16, ties away from zero, and an int16 remainder that completes its bits.

    NaN gives (0x7FC0, 0).
    """
    bits = master.view(torch.int32).masked_fill(master.isnan(), 0x7FC00000)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """Undo :func:`split_master`, bit for bit."""
    upper = param.view(torch.int16).to(torch.int32)
    return ((upper << 16) + remainder).view(torch.float32)


def round_to_codes_(x: Tensor, dither: Tensor) -> Tensor:
    """Round float32 numbers in place to the four significant bits of E4M3.

    A cast with a scale that is a power of two keeps them, but for numbers so small in their block
    that E4M3 has fewer bits. ``dither``: int32 in the same shape.
    """
    bits = x.view(torch.int32)
    finite = x.abs() < torch.inf
    bits.add_(_upper_bits(dither, 20) * finite).bitwise_and_(torch.where(finite, -(1 << 20), -1))
    return x
