"""Conversions between float32 and narrow float formats, in torch operators.

The Triton counterparts in ``fp4adam.kernels.tiles`` give the same codes.
Source: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 5.4.
"""

import ctypes
import math

import torch
from torch import Tensor

from fp4adam.tensors import backend
from fp4adam.tensors.blocks import blocks_of, strips

E2M1_MAX = 6.0
E4M3_MAX = 448.0
FP32_MAX = torch.finfo(torch.float32).max

# 2**22, 2**22 + 1 and 2**22 + 2, as tensors that operators take with those of any device.
_ROUNDING = torch.tensor(
    [2.0**22, 2.0**22 + 1, 2.0**22 + 2], dtype=torch.float32, device="cpu"
).unbind()

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def float32(x: float) -> float:
    """Round a number to float32."""
    return ctypes.c_float(x).value


def e2m1_code(x: Tensor) -> Tensor:
    """Round float32 to E2M1: nearest, ties to the even code, saturating; NaN becomes +6.

    Returns:
        uint8 codes 0..15 in the shape of ``x``; bit 3 is the sign, which zero keeps.
    """
    magnitude = x.abs()
    # A code would be above 7, or there is NaN.
    if x.numel() and not magnitude.amax() < E2M1_MAX + 1:
        x = x.nan_to_num(E2M1_MAX).clamp_(-E2M1_MAX, E2M1_MAX)
        magnitude = x.abs()
    # Half the code is min(a, a/2 + 1, a/4 + 2), lines that meet at 2 and 4. Adding 2**22, where
    # float32 has steps of 0.5, rounds each of them to even and leaves the code in the low byte.
    # The products are exact, so fused multiply-adds give the same sums.
    half = torch.add(_ROUNDING[2], magnitude, alpha=0.25)
    line = torch.add(_ROUNDING[1], magnitude, alpha=0.5)
    torch.minimum(half, line, out=half)
    torch.minimum(half, torch.add(_ROUNDING[0], magnitude, out=line), out=half)
    sign = torch.bitwise_right_shift(x.view(torch.int32), 31, out=line.view(torch.int32))  # -1 or 0
    return half.view(torch.int32).add_(sign, alpha=-8).to(torch.uint8)


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
    scale = torch.where((amax == 0) | ~amax.isfinite(), 1.0, scale)
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


def amax(x: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    """Largest magnitude of float32 over ``dims`` (all by default), ignoring NaN as a GPU does."""
    largest = _amax(x.abs(), dims)
    if largest.numel() and math.isnan(largest.amax()):
        largest = _amax(x.abs().nan_to_num_(0.0, posinf=math.inf), dims)
    return largest


def block_amaxes(x: Tensor, block: tuple[int, int]) -> Tensor:
    """The :func:`amax` of each block of a matrix of any dtype, strip by strip."""
    return torch.cat([amax(blocks_of(strip, block), (1, 3)) for _, strip in strips(x, block[0])])


def _amax(x: Tensor, dims: tuple[int, ...] | None) -> Tensor:
    if dims is None:
        return x.amax()
    # Reducing one dimension at a time is faster, above all if the first reduction shrinks most.
    for i, dim in enumerate(sorted(dims)):
        x = x.squeeze(dim - i) if x.shape[dim - i] == 1 else x.amax(dim - i)
    return x
