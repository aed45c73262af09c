"""Conversions between float32 and the small formats, in plain torch operators.

The Triton counterparts, ``fp4adam.kernels._e2m1``, ``_e4m3`` and ``_e8m0``, give the same codes.
Source: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 5.4.
"""

import torch
from torch import Tensor

E2M1_MAX = 6.0
E4M3_MAX = 448.0
FP32_MAX = torch.finfo(torch.float32).max

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Adding 2**23 to a value below 2**22 leaves round-to-nearest-even of it in the low mantissa bits.
_ROUND_TO_INTEGER = 2.0**23
_ROUND_TO_INTEGER_BITS = 0x4B000000


def e2m1_code(x: Tensor) -> Tensor:
    """Round float32 to E2M1: nearest, ties to the even code, saturating; NaN becomes +6.

    Returns:
        uint8 codes 0..15 of the shape of ``x``, bit 3 the sign (kept for zero).
    """
    magnitude = x.abs().nan_to_num_(nan=E2M1_MAX).clamp_(max=E2M1_MAX)
    at_least_2, at_least_4 = magnitude >= 2.0, magnitude >= 4.0
    # Steps are 1/2 below 2, 1 below 4 and 2 above: scale each range to steps of one.
    steps = torch.where(
        at_least_4, magnitude * 0.5, torch.where(at_least_2, magnitude, magnitude * 2)
    )
    code = (steps + _ROUND_TO_INTEGER).view(torch.int32) - _ROUND_TO_INTEGER_BITS
    code += (at_least_2.to(torch.int32) + at_least_4) * 2
    return (code | (torch.signbit(x) & (x == x)).to(torch.int32) << 3).to(torch.uint8)


def e2m1_value(code: Tensor) -> Tensor:
    """float32 values of uint8 E2M1 codes 0..15."""
    table = torch.tensor(_E2M1_MAGNITUDES, device=code.device)
    return torch.cat([table, -table])[code.int()]


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack codes [..., 2n] into bytes [..., n]; even elements go into the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Unpack bytes [..., n] into codes [..., 2n]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def e4m3_code(x: Tensor) -> Tensor:
    """Round float32 to E4M3: nearest-even, saturating at 448, NaN becomes 0x7F; uint8 bytes."""
    # torch 2.11 turns values above 464 into NaN, torch 2.13 saturates; clamping serves both.
    code = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x == x, code, 0x7F)


def e4m3_value(code: Tensor) -> Tensor:
    """float32 values of uint8 E4M3 bytes."""
    return code.view(torch.float8_e4m3fn).to(torch.float32)


def e8m0_code_up(x: Tensor) -> Tensor:
    """Round non-negative float32 up to a power of two 2**(code - 127); uint8, at most 254."""
    bits = x.view(torch.int32)
    # Subnormals up to 2**-127 belong to code 0, whose value that is.
    above = (bits & 0x7FFFFF) > torch.where(bits < 0x800000, 0x400000, 0)
    return ((bits >> 23) + above).clamp_(max=254).to(torch.uint8)


def e8m0_reciprocal(code: Tensor) -> Tensor:
    """Exact float32 2**(127 - code) of uint8 codes 0..254."""
    exponent = 254 - code.to(torch.int32)
    return torch.where(exponent > 0, exponent << 23, 0x400000).view(torch.float32)


def e8m0_value(code: Tensor) -> Tensor:
    """Exact float32 2**(code - 127) of uint8 codes; 255 is NaN."""
    exponent = code.to(torch.int32)
    bits = torch.where(exponent > 0, exponent << 23, 0x400000)
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


def amax(x: Tensor, dim: tuple[int, ...] | None = None) -> Tensor:
    """Largest magnitude over ``dim`` (all by default), ignoring NaN as a GPU's maximum does."""
    dims = tuple(range(x.dim())) if dim is None else dim
    largest = x.abs().amax(dims)
    if largest.isnan().any():
        largest = x.abs().nan_to_num_(nan=0.0, posinf=torch.inf).amax(dims)
    return largest
