"""Conversions between float32 and narrow float formats, in torch operators.

The Triton counterparts in ``fp4adam.kernels.tiles`` give the same codes.
Source: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 5.4.
"""

import torch
from torch import Tensor

from fp4adam.tensors import backend

E2M1_MAX = 6.0
E4M3_MAX = 448.0
FP32_MAX = torch.finfo(torch.float32).max

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MAGNITUDE_BITS = 0x7FFFFFFF
_INFINITY_BITS = 0x7F800000


def e2m1_code(x: Tensor) -> Tensor:
    """Round float32 to E2M1: nearest, ties to the even code, saturating; NaN becomes +6.

    Returns:
        uint8 codes 0..15 in the shape of ``x``; bit 3 is the sign, which zero keeps.
    """
    bits = x.view(torch.int32)
    # Clamping the bits at those of 6.0 saturates and also maps NaN to 6.
    magnitude = (bits & _MAGNITUDE_BITS).clamp_(max=0x40C00000).view(torch.float32)
    # Half the code is min(a, a/2 + 1, a/4 + 2), lines that meet at 2 and 4. Adding 2**22, where
    # float32 has steps of 0.5, rounds each of them to even and leaves the code in the low byte.
    half = (magnitude * 0.25).add_(2.0**22 + 2)
    torch.minimum(half, (magnitude * 0.5).add_(2.0**22 + 1), out=half)
    torch.minimum(half, magnitude.add_(2.0**22), out=half)
    # As signed integers, -Inf and all negative numbers are below the negative NaNs, so this
    # comparison drops the sign of NaN.
    negative = torch.le(bits, -0x800000, out=magnitude.view(torch.int32))
    return half.view(torch.int32).add_(negative, alpha=8).to(torch.uint8)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack contiguous codes [..., 2n] into bytes [..., n]; even elements go into the low nibble."""
    # Read as 16-bit words, the odd element is the high byte; only the low byte is kept at the end.
    pairs = codes.view(torch.int16)
    return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """float32 values [..., 2n] of packed E2M1 codes [..., n]."""
    magnitudes = torch.tensor(_E2M1_MAGNITUDES, dtype=torch.float32, device=packed.device)
    values = torch.cat([magnitudes, -magnitudes])
    # A table of the value pairs of all 256 bytes, each pair read as one int64.
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)
    return _look_up(pairs.view(torch.int64).view(-1), packed).view(torch.float32)


def e4m3_code(x: Tensor) -> Tensor:
    """Round float32 to E4M3: nearest-even, saturating at 448, NaN becomes 0x7F; uint8 bytes."""
    # torch 2.11 turns values above 464 into NaN, torch 2.13 saturates; clamping works for both.
    code = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    negative_nan = torch.eq(code, 0xFF, out=torch.empty_like(code))
    return code.sub_(negative_nan, alpha=0x80)


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
    scale = torch.where((amax == 0) | ~amax.isfinite(), 1.0, scale)
    if force_pow_2_scales:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def e4m3_value(code: Tensor) -> Tensor:
    """float32 values of uint8 E4M3 bytes."""
    # A table lookup, because torch's own conversion is several times slower.
    every_code = torch.arange(256, dtype=torch.uint8, device=code.device)
    return _look_up(every_code.view(torch.float8_e4m3fn).to(torch.float32), code)


def _look_up(table: Tensor, code: Tensor) -> Tensor:
    values = torch.empty(code.shape, dtype=table.dtype, device=code.device)
    rows = max(1, backend.cpu_chunk_numel() // max(1, code.shape[-1]))
    # In pieces, because the int64 index takes far more memory than everything else.
    for value, index in zip(values.split(rows), code.split(rows), strict=True):
        torch.gather(table.expand(len(index), -1), -1, index.long(), out=value)
    return values


def e8m0_code_up(x: Tensor) -> Tensor:
    """Round non-negative float32 up to a power of two 2**(code - 127); uint8, at most 254."""
    bits = x.view(torch.int32)
    # Code 0 means 2**-127, so subnormals up to that value round up to code 0.
    above = (bits & 0x7FFFFF) > torch.where(bits < 0x800000, 0x400000, 0)
    return ((bits >> 23) + above).clamp_(max=254).to(torch.uint8)


def e8m0_reciprocal(code: Tensor) -> Tensor:
    """2**(127 - code) as exact float32, for uint8 codes 0..254."""
    exponent = 254 - code.to(torch.int32)
    return torch.where(exponent > 0, exponent << 23, 0x400000).view(torch.float32)


def e8m0_value(code: Tensor) -> Tensor:
    """2**(code - 127) as exact float32, for uint8 codes; 255 gives NaN."""
    exponent = code.to(torch.int32)
    bits = torch.where(exponent > 0, exponent << 23, 0x400000)
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


def amax(x: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    """Largest magnitude of float32 over ``dims`` (all by default), ignoring NaN as a GPU does."""
    # The bits of magnitudes order as integers do, with NaN on top, and integers compare faster.
    bits = x.view(torch.int32) & _MAGNITUDE_BITS
    largest = _amax(bits, dims)
    if (largest > _INFINITY_BITS).any():
        largest = _amax(bits.masked_fill_(bits > _INFINITY_BITS, 0), dims)
    return largest.view(torch.float32)


def _amax(x: Tensor, dims: tuple[int, ...] | None) -> Tensor:
    if dims is None:
        return x.amax()
    # Reducing one dimension at a time is faster, above all if the first reduction shrinks most.
    for i, dim in enumerate(sorted(dims)):
        x = x.squeeze(dim - i) if x.shape[dim - i] == 1 else x.amax(dim - i)
    return x
