"""Masters behind saturated codes of MXFP4, whose bytes, steps and ranks are rows of the tables."""

import pytest
import torch

from fp4adam import MXFP4Quantizer
from fp4adam.optim.remainder import complete, split_off, units


@pytest.mark.parametrize("rounding", ["floor", "even", "up"])
def test_remainders_reach_the_masters_of_saturated_codes(rounding):
    """With "floor" weights up to 8 times the scale have the code of 6 times."""
    values = torch.linspace(-1.999, 1.999, 128).view(2, 64)[:, torch.randperm(64)]
    values = values.repeat(16, 1)
    weight = MXFP4Quantizer(scale_rounding=rounding).quantize(values)
    master = complete(weight, split_off(weight, values))
    # Half a gap of 2 is 119.5 units, and scales are at most 1/2.
    assert (master - values).abs().max() <= 0.5 * 0.5 * 2 / 119.5
    assert units(weight).max().item() == pytest.approx(2 / 478)
