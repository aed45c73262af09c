"""Gradients in NVFP4: the random Hadamard transform and rounding at random."""

import math

import pytest
import torch
from torch import Tensor, nn

import format_reference as reference
from fp4adam import NVFP4Quantizer, Recipe, quantize_model
from fp4adam.formats import nvfp4_gradients
from fp4adam.formats.nvfp4_gradients import SIGNS, e2m1_stochastic_code, hadamard
from fp4adam.nn.operand import NVFP4Operands, quantize
from helpers import randn

QUANTIZER = NVFP4Quantizer()
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def matrix() -> Tensor:
    """Sylvester's matrix of 16 rows with Transformer Engine's signs, in float64."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < 16:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return torch.tensor([1.0 - 2 * (SIGNS >> i & 1) for i in range(16)]).double()[:, None] * h / 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_transform_is_the_product_with_the_matrix(dtype):
    x = randn(48, 64, dtype=dtype)
    expected = (x.double().view(-1, 16) @ matrix()).view(48, 64).to(dtype)
    assert torch.equal(hadamard(x), expected)
    twice = matrix() @ matrix().t()
    torch.testing.assert_close(twice, torch.eye(16, dtype=torch.float64))


def test_operands_of_activations_are_transformed_along_the_tokens_and_rounded_to_nearest():
    x = randn(40, 64, dtype=torch.bfloat16)
    rows, columns = quantize(x, QUANTIZER, True, True)
    padded = torch.cat([x, torch.zeros(88, 64, dtype=x.dtype)])
    transformed = (padded.t().double().reshape(-1, 16) @ matrix()).view(64, 128).bfloat16()
    for operand, value in ((rows, padded), (columns, transformed)):
        fields = reference.quantize("nvfp4_1d", value.float().numpy())
        assert torch.equal(operand.codes, torch.from_numpy(fields["rowwise_data"]))
        assert operand.amax.item() == fields["amax_rowwise"].item()
        decoded = reference.dequantize("nvfp4_1d", fields)
        assert torch.equal(NVFP4Operands().decode(operand)[: len(value)], torch.from_numpy(decoded))


def test_codes_are_those_next_to_a_value_and_right_on_average(monkeypatch):
    torch.manual_seed(0)
    value = torch.cat([torch.linspace(-6, 6, 97), MAGNITUDES, -MAGNITUDES])
    code = e2m1_stochastic_code(value.expand(4000, -1)).int()
    rounded = MAGNITUDES[code & 7] * (1 - 2 * (code >> 3))
    low = MAGNITUDES[torch.searchsorted(MAGNITUDES, value.abs(), right=True) - 1]
    high = MAGNITUDES[torch.searchsorted(MAGNITUDES, value.abs())]
    assert ((rounded.abs() == low) | (rounded.abs() == high)).all()
    assert torch.equal(rounded[:, -16:], value[-16:].expand(4000, -1))  # values of the format stay
    assert torch.equal(code >> 3, torch.signbit(value).int().expand(4000, -1))
    share = ((value.abs() - low) / (high - low)).nan_to_num(0.0)
    error = (rounded.mean(0) - value).abs()
    deviation = (high - low) * (share * (1 - share) / 4000).sqrt()
    assert (error <= 4.5 * deviation + 1e-6).all()
    special = e2m1_stochastic_code(torch.tensor([math.nan, math.inf, -math.inf, 9.0, -0.0]))
    assert special.tolist() == [7, 7, 15, 7, 8]
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)  # the smallest number that it draws
    assert e2m1_stochastic_code(MAGNITUDES).tolist() == [*range(8)]


@pytest.mark.parametrize("value", [randn(32, 64) * x for x in (1, 1e-30, 0, torch.nan)])
def test_scales_do_not_depend_on_the_rounding(value):
    nearest = NVFP4Quantizer(two_dimensional=False, columnwise=False).quantize(value)
    for at_random in (False, True):
        codes, scales, amax = nvfp4_gradients.quantize(value, at_random=at_random)
        assert torch.equal(scales, nearest._rowwise_scale_inv) and torch.equal(amax, nearest._amax)
        assert codes.shape == nearest._rowwise_data.shape
        assert at_random or torch.equal(codes, nearest._rowwise_data)


def test_the_gradient_of_a_weight_is_right_on_average():
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    quantize_model(model, Recipe("nvfp4", activations=True, gradients=True, emulate=True))
    x, grad = randn(64, 32), randn(64, 32) * 1e-3
    torch.manual_seed(0)
    found = []
    for _ in range(300):
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        model(leaf).backward(grad)
        found.append((model[0].weight.grad.clone(), leaf.grad))
    assert not torch.equal(found[0][0], found[1][0])
    # The activations are rounded to nearest, once and for all.
    _, columns = quantize(x, QUANTIZER, False, True)
    expected = hadamard(grad.t().contiguous()) @ NVFP4Operands().decode(columns)[:, :64].t()
    for actual, wanted in (
        (torch.stack([dw for dw, _ in found]), expected),
        (torch.stack([dx for _, dx in found]), grad @ model[0].weight.dequantize()),
    ):
        single, mean = ((one - wanted).norm() for one in (actual[0], actual.mean(0)))
        # What remains is the largest value of a block, if its scale was rounded down.
        assert mean < 0.2 * single and mean < 0.02 * wanted.norm()
    torch.manual_seed(0)
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    model(leaf).backward(grad)
    assert torch.equal(model[0].weight.grad, found[0][0]) and torch.equal(leaf.grad, found[0][1])
