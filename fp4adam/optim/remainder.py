"""int8 remainders: what a quantized weight lacks of its master, in units of its own codes.

A master is the decoded weight plus ``remainder * unit``. The unit of an element is 1/239 of the
gap from its code to the next larger one, so that +-127 reach a little past the middle between two
codes. There the weight takes the other code, and the remainder continues from its other side. The
middle itself is no master: an update of any size would decide which code a weight has that lies
there, and weights would be ahead of their masters.

With c the code, P its power of two (0.5 <= |c| / P < 2; at least 1 in E2M1 and 2**-6 in E4M3) and f
the factor from codes to values, the unit is P * f / 478 in E2M1 and P * f / 1912 in E4M3. Block
scales of NVFP4 below 2**-7 count as 2**-7 in the unit, since the codes of such a block may saturate
or all decode to 0.

MXFP4 with scales that are rounded down (``scale_rounding="floor"``) codes magnitudes up to 8 f as
6 f. There the power of two of 6 counts as 8, so that remainders reach all of them.

Remainders are rounded stochastically; to the nearest, small updates would never move a master. -128
is NaN. ``fp4adam.kernels.tiles.remainder`` computes the same bits.
"""

import torch
from torch import Tensor

from fp4adam.formats import minifloat
from fp4adam.tensors import rows
from fp4adam.tensors.layout import Layout
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.storage import Storage

# What half a gap leaves up to 127 covers the rounding to BF16 that ``quantize_from="param_dtype"``
# puts before the codes, 1/16 of half a gap of E4M3.
UNITS_PER_GAP = 239.0
NAN = -128
# The byte of the smallest block scale of NVFP4 in a unit, 2**-7.
_LEAST_SCALE = 4
# From 256 to 512 a number has 15 bits below the point.
_CENTER, _BELOW_POINT = 384.0, 15
# The fractional part of the golden ratio, for :func:`digest`.
_ODD = 0x1E3779B97F4A7C15


def units(param: QuantizedTensor) -> Tensor:
    """The units of the remainders of a weight, float32 in its shape."""
    part, layout = rows.own_blocks(param), param.quantizer.layout
    powers = _decoded(param, _powers(part.inner, layout))
    kind = layout.code_type.bits, layout.scale_type, layout.scale_rule.rounding
    if kind == (4, "e8m0", 0):  # in MXFP4, 6 stands for magnitudes up to 8
        powers += _decoded(param, _largest(part.inner, layout))
    return powers.mul_(1 / (UNITS_PER_GAP * layout.code_type.per_power))


def largest_values(param: QuantizedTensor) -> Tensor:
    """What the largest code stands for in each place, float32; infinity where scales are 0."""
    part = rows.own_blocks(param)
    name = f"{part.quantizer.layout.kept[0]}_data"
    tensors, code = part.inner, part.quantizer.layout.code_type
    largest = code.largest if code.bits == 8 else code.largest * 0x11  # two per byte
    codes = torch.full_like(getattr(tensors, name), largest)
    largest = _decoded(param, tensors.exchange(**{name: codes}))
    return largest.masked_fill_(largest == 0, torch.inf)


def _decoded(param: QuantizedTensor, tensors: Storage) -> Tensor:
    part, n_rows = rows.own_blocks(param), rows.matrix_shape(param)[0]
    values = part.quantizer.read(tensors, torch.float32)
    return values[part._first_row :][:n_rows].reshape(param.shape)


def _powers(tensors: Storage, layout: Layout) -> Storage:
    usage = layout.kept[0]
    codes = getattr(tensors, f"{usage}_data")
    if layout.code_type.bits == 8:
        least = layout.code_type.per_power
        return tensors.exchange(**{f"{usage}_data": (codes & 0x80 - least).clamp_(min=least)})
    # Exponents of two codes per byte; an exponent of 0 becomes 1, whose power of two is 1.
    exponents = codes & 0x66
    is_below_2 = (~codes >> 1) & 0x22
    name = "block_scale_inv" if layout.is_square else f"{usage}_scale_inv"
    scales = {name: getattr(tensors, name).clamp(min=_LEAST_SCALE)}
    return tensors.exchange(**{f"{usage}_data": exponents | is_below_2}, **scales)


def _largest(tensors: Storage, layout: Layout) -> Storage:
    data = f"{layout.kept[0]}_data"
    codes = getattr(tensors, data)
    is_largest = (codes & codes >> 1 & codes >> 2).bitwise_and_(0x11)
    return tensors.exchange(**{data: is_largest * 6})


def complete(param: QuantizedTensor, remainder: Tensor) -> Tensor:
    """The master of a weight with this remainder, float32."""
    master = param.dequantize(torch.float32)
    master += remainder * units(param)
    return master.masked_fill_(remainder == NAN, torch.nan)


def split_off(param: QuantizedTensor, master: Tensor, dither: Tensor | None = None) -> Tensor:
    """The int8 remainder of a float32 master; int32 ``dither`` rounds it, or to the nearest."""
    difference = master - param.dequantize(torch.float32)
    inverse = units(param).reciprocal_().clamp_(max=minifloat.FP32_MAX)
    steps = difference.mul_(inverse)
    is_nan = ~steps.isfinite()
    bits = steps.add_(_CENTER).clamp_(_CENTER - 127, _CENTER + 127).view(torch.int32)
    # One more bit, as the dither has 16.
    bits <<= 1
    bits += 1 << _BELOW_POINT if dither is None else (dither >> 16).bitwise_and_(0xFFFF)
    # The lowest byte of the integer part is the remainder plus 128.
    remainder = (bits >> _BELOW_POINT + 1).bitwise_and_(0xFF).sub_(128).to(torch.int8)
    return remainder.masked_fill_(is_nan, NAN)


def is_in_reach(param: QuantizedTensor, master: Tensor) -> bool:
    """True if remainders can complete the codes of ``param`` to a float32 master."""
    difference = (master.view(param.shape) - param.dequantize(torch.float32)).abs_()
    reached = difference <= units(param).mul_(127.5)
    return bool((reached | master.view(param.shape).isnan()).all())


def digest(param: QuantizedTensor) -> Tensor:
    """A hash, int64 [1] on the CPU, of the codes and scales that remainders complete."""
    entries, usage = rows.own_entries(param), param.quantizer.layout.kept[0]
    names = f"{usage}_data", f"{usage}_scale_inv", "block_scale_inv", "amax"
    found = [entries[name] for name in names if name in entries]
    flat = torch.cat([inner.flatten().view(torch.uint8) for inner in found])
    words = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(torch.int64)
    # Sums wrap modulo 2**64. Each word is multiplied by an odd number of its position.
    words = words * torch.arange(len(words), device=words.device).mul_(_ODD * 2).add_(_ODD)
    return (words ^ (words >> 29)).mul_(_ODD).sum().view(1).cpu()
