"""Conversions between float32 and narrow float formats, in torch operators.

The Triton counterparts in ``fp4adam.kernels.tiles`` give the same codes.
Source: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 5.4.
"""

import ctypes

import torch
from torch import Tensor

from fp4adam.tensors import backend

E2M1_MAX = 6.0
E4M3_MAX = 448.0
FP32_MAX = torch.finfo(torch.float32).max
_INFINITY = 0x7F800000

# Whether torch rounds numbers out of E4M3's range to 448: 2.13 does, 2.11 makes them NaN.
_SATURATES = (
    not torch.tensor(torch.inf, device="cpu").to(torch.float8_e4m3fn).float().isnan().item()
)

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def float32(x: float) -> float:
    """Round a number to float32."""
    return ctypes.c_float(x).value


def e2m1_code(x: Tensor) -> Tensor:
    """Round float32 to E2M1: nearest, ties to the even code, saturating; NaN becomes +6.

    Returns:
        uint8 codes 0..15 in the shape of ``x``; bit 3 is the sign, which zero keeps.
    """
    scratch = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    return e2m1_words(scratch.copy_(x), torch.empty_like(scratch)).to(torch.uint8)


def e2m1_words(x: Tensor, scratch: Tensor) -> Tensor:
    """The codes of :func:`e2m1_code` as int16, without memory of its own.

    ``scratch``: Like ``x``, contiguous. Both are overwritten, and the codes lie in ``scratch``.
    """
    if x.numel():
        low, high = torch.aminmax(x)
        if not (low > -E2M1_MAX - 1 and high < E2M1_MAX + 1):  # codes above 7, or NaN
            x.nan_to_num_(E2M1_MAX).clamp_(-E2M1_MAX, E2M1_MAX)
    # Half the code is min(a, a/2 + 1, a/4 + 2), lines that meet at 2 and 4, each rounded to a
    # multiple of 1/2, ties to even. FP16 has numbers below 2**-14 as multiples of 2**-24, with the
    # multiple as bits: conversion does the rounding. Bit 15 is the sign for sums and minima too.
    x.mul_(2.0**-23)
    code, line = scratch.view(torch.float16).view(2, *x.shape).unbind()
    code.copy_(x)
    code, bits = code.view(torch.int16), line.view(torch.int16)
    for offset in (2, 4):
        line.copy_(x.mul_(0.5))
        torch.minimum(code, bits.add_(offset), out=code)
    code.bitwise_or_(torch.bitwise_right_shift(code, 12, out=bits))
    return code.bitwise_and_(15)


def pack_e2m1(codes: Tensor, out: Tensor | None = None) -> Tensor:
    """Pack contiguous codes [..., 2n] into bytes [..., n]; even elements go into the low nibble.

    ``codes``: uint8 or int16. ``out``: Memory for the bytes.
    """
    # Read as words of two elements, the odd one is the upper half; the low byte is kept at the end.
    size = codes.element_size()
    pairs = codes.view({1: torch.int16, 2: torch.int32}[size])
    pairs = (pairs >> 8 * size - 4).bitwise_or_(pairs)
    return pairs.to(torch.uint8) if out is None else out.copy_(pairs)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """float32 values [..., 2n] of packed E2M1 codes [..., n]."""
    magnitudes = torch.tensor(_E2M1_MAGNITUDES, dtype=torch.float32, device=packed.device)
    values = torch.cat([magnitudes, -magnitudes])
    # A table of the value pairs of all 256 bytes, each pair read as one int64.
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)
    return _look_up(pairs.view(torch.int64).view(-1), packed).view(torch.float32)


def e4m3_code(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Round float32 to E4M3: nearest-even, saturating at 448, NaN becomes 0x7F; uint8 bytes.

    ``out``: uint8 memory for the codes, in the shape of ``x``.
    """
    code = torch.empty(x.shape, dtype=torch.uint8, device=x.device) if out is None else out
    code.view(torch.float8_e4m3fn).copy_(x if _SATURATES else x.clamp(-E4M3_MAX, E4M3_MAX))
    if code.numel() and code.amax() == 0xFF:  # There is a negative NaN, which is rare.
        code.masked_fill_(code == 0xFF, 0x7F)
    return code


def e4m3_encode_scale(
    amax: Tensor, largest: float, epsilon: float, force_pow_2_scales: bool
) -> Tensor:
    """Factors that map magnitudes up to ``amax`` to those of E4M3, float32.

    Args:
        amax: Amaxes, float32.
        largest: The factor where 448 / amax overflows.
        epsilon: Lower bound of amaxes.
        force_pow_2_scales: Whether to round factors down to powers of two.
    """
    amax = amax.clamp(min=epsilon)
    # torch computes number / tensor as number * (1 / tensor), which rounds twice.
    scale = torch.full_like(amax, E4M3_MAX) / amax
    scale = torch.where(scale.isinf(), largest, scale)
    scale = torch.where((amax == 0) | (amax <= FP32_MAX).logical_not(), 1.0, scale)
    if force_pow_2_scales:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def e4m3_value(code: Tensor) -> Tensor:
    """float32 values of uint8 E4M3 bytes."""
    if code.numel() <= 256:
        return code.view(torch.float8_e4m3fn).float()
    # A table lookup, because torch's own conversion is several times slower.
    every_code = torch.arange(256, dtype=torch.uint8, device=code.device)
    return _look_up(every_code.view(torch.float8_e4m3fn).float(), code)


def _look_up(table: Tensor, code: Tensor) -> Tensor:
    values = torch.empty(code.shape, dtype=table.dtype, device=code.device)
    rows = max(1, backend.cpu_chunk_numel() // max(1, code.shape[-1]))
    # In pieces, because the int64 index takes far more memory than everything else.
    for value, index in zip(values.split(rows), code.split(rows), strict=True):
        torch.gather(table.expand(len(index), -1), -1, index.long(), out=value)
    return values


def e8m0_code_up(x: Tensor) -> Tensor:
    """Round non-negative float32 up to a power of two 2**(code - 127); uint8, at most 254."""
    # Code 0 means 2**-127, so subnormals up to that value round up to code 0.
    bits = torch.threshold(x.view(torch.int32), 0x400000, 0)
    return bits.add_(0x7FFFFF).bitwise_right_shift_(23).clamp_(max=254).to(torch.uint8)


def e8m0_reciprocal(code: Tensor) -> Tensor:
    """2**(127 - code) as exact float32, for uint8 codes 0..254."""
    exponent = 254 - code.to(torch.int32)
    return exponent.bitwise_left_shift_(23).clamp_(min=0x400000).view(torch.float32)


def e8m0_value(code: Tensor) -> Tensor:
    """2**(code - 127) as exact float32, for uint8 codes; 255 gives NaN."""
    exponent = code.to(torch.int32)
    bits = (exponent << 23).clamp_(min=0x400000)
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


def amax(x: Tensor, dims: tuple[int, ...] | None = None, scratch: Tensor | None = None) -> Tensor:
    """Largest magnitude of float32 over ``dims`` (all by default), ignoring NaN as a GPU does.

    ``dims``: In ascending order. ``scratch``: float32 memory of as many elements as ``x``,
    contiguous.
    """
    magnitude = torch.abs(x, out=None if scratch is None else scratch.view(x.shape))
    # The bits of magnitudes are in their order, and torch finds the largest integer faster.
    bits = magnitude.view(torch.int32)
    largest = _amax(bits, dims)
    if largest.numel() and largest.amax() > _INFINITY:
        largest = _amax(bits.masked_fill_(bits > _INFINITY, 0), dims)
    return largest.view(torch.float32)


def _amax(x: Tensor, dims: tuple[int, ...] | None) -> Tensor:
    if dims is None:
        return x.amax()
    # Reducing one dimension at a time is faster, above all if the first reduction shrinks most.
    for i, dim in enumerate(dims):
        x = x.squeeze(dim - i) if x.shape[dim - i] == 1 else x.amax(dim - i)
    return x
