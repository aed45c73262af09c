"""int8 remainders against the formulas of docs/numerics.md, computed from tables in float64."""

import pytest
import torch

from fp4adam import Float8BlockQuantizer, Float8Quantizer, MXFP8Quantizer, NVFP4Quantizer
from fp4adam.optim.remainder import NAN, complete, is_in_reach, split_off, units
from fp4adam.optim.state_codec import dither_bits

QUANTIZERS = {
    "nvfp4": NVFP4Quantizer(),
    "nvfp4 1d": NVFP4Quantizer(two_dimensional=False),
    "nvfp4 columnwise": NVFP4Quantizer(rowwise=False),
    "mxfp8": MXFP8Quantizer(),
    "mxfp8 columnwise": MXFP8Quantizer(rowwise=False),
    "float8 block": Float8BlockQuantizer(),
    "float8 block 1d": Float8BlockQuantizer(two_dimensional=False),
    "float8": Float8Quantizer(),
    "float8 delayed": Float8Quantizer(scaling="delayed"),
}
by_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0]
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist() + [480.0]


def make(quantizer, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 128, generator=generator) * 0.02
    # Blocks of many sizes, down to those whose scale is 0, and zeros.
    values *= 10.0 ** -torch.arange(8.0).repeat_interleave(8)[:, None]
    values[32:48, :32] = 0
    return values.to(device), quantizer.quantize(values.to(device))


def gaps(param, is_e2m1):
    """Half the gap from each value to the next larger one, in float64, from neighbouring values."""
    table = torch.tensor(E2M1 if is_e2m1 else E4M3, dtype=torch.float64)
    value = param.dequantize(torch.float32).double().abs().cpu()
    # The factor of each block, from any of its codes.
    inner = param.inner
    data = inner.rowwise_data if inner.rowwise_data is not None else inner.columnwise_data
    transposed = inner.rowwise_data is None and param.quantizer.layout.columnwise.codes.transposed
    if is_e2m1:
        code = torch.stack((data & 7, data >> 4 & 7), -1).flatten(-2)
    else:
        code = data & 0x7F
    code = (code.t() if transposed else code).cpu().long()
    factor = value / table[code]
    return factor, (table[code + 1] - table[code]) / 2


@by_quantizer
def test_units_are_parts_of_half_a_gap(quantizer):
    values, param = make(quantizer)
    is_e2m1 = quantizer.layout.code_type.name == "e2m1"
    factor, half = gaps(param, is_e2m1)
    known = (factor > 0) & factor.isfinite()
    if is_e2m1:  # Units of blocks with small scales are larger.
        known &= factor > factor[known].max() * 2.0**-7 / 448 * 1.01
    unit = units(param).double()
    torch.testing.assert_close(unit[known], (half * factor / 119.5)[known], rtol=1e-6, atol=0)
    assert known.float().mean() > 0.3


@by_quantizer
def test_remainders_complete_what_codes_lack(quantizer, device):
    values, param = make(quantizer, device)
    remainder, unit = split_off(param, values), units(param)
    assert remainder.dtype == torch.int8 and remainder.abs().max() <= 120
    master = complete(param, remainder)
    assert ((master - values).abs() <= 0.5001 * unit).all()
    assert torch.equal(split_off(param, master), remainder)
    assert is_in_reach(param, values) and is_in_reach(param, master)
    assert not is_in_reach(param, values * 1.3)
    # Nothing is lost of the values themselves.
    assert not split_off(param, param.dequantize(torch.float32)).any()


def test_rounding_is_right_on_average(device):
    values, param = make(NVFP4Quantizer(), device)
    unit, mean = units(param), torch.zeros_like(values)
    for step in range(256):
        dither = dither_bits(0, values.numel(), step, device).master.view(values.shape)
        master = complete(param, split_off(param, values, dither))
        assert ((master - values).abs() < 1.0001 * unit).all()
        mean += master / 256
    error = (mean - values) / unit
    assert error.abs().mean() < 0.04 and error.mean().abs() < 2e-3


def test_nan_stays(device):
    values, param = make(NVFP4Quantizer(), device)
    values[3, 5], values[4, 6] = torch.nan, torch.inf
    remainder = split_off(param, values)
    assert (remainder == NAN).nonzero().tolist() == [[3, 5], [4, 6]]
    assert complete(param, remainder)[remainder == NAN].isnan().all()


@pytest.mark.parametrize("quantizer", [NVFP4Quantizer(), MXFP8Quantizer()], ids=["nvfp4", "mxfp8"])
def test_no_master_lies_between_two_codes(quantizer):
    """The sign of the smallest update would decide there, and weights ran ahead of masters."""
    _, param = make(quantizer)
    is_e2m1 = quantizer.layout.code_type.name == "e2m1"
    factor, half = gaps(param, is_e2m1)
    table = torch.tensor(E2M1 if is_e2m1 else E4M3, dtype=torch.float64)
    middles = (table[1:] + table[:-1]) / 2
    known = (factor > 0) & factor.isfinite() & (factor > factor[factor.isfinite()].max() * 2.0**-12)
    unit = units(param).double() / factor
    for remainder in (-120, -119, -60, -59, 59, 60, 119, 120):
        filled = torch.full(param.shape, remainder, dtype=torch.int8)
        code = (complete(param, filled).double().abs() / factor)[known][::7]
        distance = (code[:, None] - middles).abs().amin(1)
        assert (distance > 0.2 * unit[known][::7]).all(), remainder
