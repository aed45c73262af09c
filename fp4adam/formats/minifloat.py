"""Conversions between float32 and narrow float formats, in torch operators.

The Triton counterparts in ``fp4adam.kernels.tiles`` give the same codes.
Source: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 5.4.
"""

import torch
from torch import Tensor

from fp4adam.tensors.layout import CodeType

E2M1_MAX = 6.0
E4M3_MAX = 448.0
FP32_MAX = torch.finfo(torch.float32).max

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_code(x: Tensor) -> Tensor:
    """Round float32 to E2M1: nearest, ties to the even code, saturating; NaN becomes +6.

    Returns:
        uint8 codes 0..15 in the shape of ``x``; bit 3 is the sign, which zero keeps.
    """
    x = x.nan_to_num(E2M1_MAX)
    a = x.abs().clamp_(max=E2M1_MAX)
    # Codes are linear in magnitudes up to 2, from there to 4, and beyond. torch.round takes ties to
    # even numbers; 2 and 4 are added afterwards, as sums would be rounded once more.
    code = (2 * a).round_()
    code = torch.minimum(code, a.round() + 2)
    code = torch.minimum(code, (a / 2).round_() + 4)
    return code.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack uint8 codes [..., 2n] into bytes [..., n]; even elements go into the low nibble."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def unpack_e2m1(packed: Tensor) -> Tensor:
    """float32 values [..., 2n] of packed E2M1 codes [..., n]."""
    magnitudes = torch.tensor(_E2M1_MAGNITUDES, dtype=torch.float32, device=packed.device)
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
    return torch.cat([magnitudes, -magnitudes])[codes.int()]


def e4m3_code(x: Tensor) -> Tensor:
    """Round float32 to E4M3: nearest-even, saturating at 448, NaN becomes 0x7F; uint8 bytes."""
    code = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return code.masked_fill_(code == 0xFF, 0x7F)


def e4m3_value(code: Tensor) -> Tensor:
    """float32 values of uint8 E4M3 bytes."""
    return code.view(torch.float8_e4m3fn).float()


def e8m0_code_up(x: Tensor) -> Tensor:
    """Round non-negative float32 up to a power of two 2**(code - 127); uint8, at most 254."""
    # Code 0 means 2**-127, so subnormals up to that value round up to code 0.
    bits = torch.threshold(x.view(torch.int32), 0x400000, 0)
    return bits.add_(0x7FFFFF).bitwise_right_shift_(23).clamp_(max=254).to(torch.uint8)


def e8m0_reciprocal(code: Tensor) -> Tensor:
    """2**(127 - code) as exact float32, for uint8 codes; 255 gives NaN."""
    return e8m0_value(254 - code)  # 254 - 255 is 255 again


def e8m0_value(code: Tensor) -> Tensor:
    """2**(code - 127) as exact float32, for uint8 codes; 255 gives NaN."""
    exponent = code.to(torch.int32)
    bits = (exponent << 23).clamp_(min=0x400000)
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


E2M1 = CodeType("e2m1", 4, 0x7, 2, False, e2m1_code, pack_e2m1, unpack_e2m1)
E4M3 = CodeType("e4m3", 8, 0x7E, 8, True, e4m3_code, lambda codes: codes, e4m3_value)
