"""What a new format takes: E2M3 in blocks of 32, as far as kernels and operators go, in one file.

In the package its two kernel functions would be branches of ``code_words`` and ``code_values``.
"""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam import FP4Adam, QuantizedTensor
from fp4adam.formats import minifloat
from fp4adam.formats.mx import MXQuantizer, layout
from fp4adam.kernels import dequantize, format, step, store
from fp4adam.kernels.tiles.codes import pack_words
from fp4adam.tensors import backend
from fp4adam.tensors.layout import CodeType, Layout, ScaleRule
from helpers import random, take_steps

known_words, known_values = format.code_words, format.code_values


@triton.jit
def code_words(x, CODE: tl.constexpr, WHOLE, WORDS):
    if CODE == "e2m3":
        # Adding 2^20 times the power of two leaves a multiple of an eighth of it, ties to even.
        power = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
        rounder = (power + (20 << 23)).to(tl.float32, bitcast=True)
        magnitude = (tl.abs(x) + rounder) - rounder
        magnitude = tl.where(magnitude < 7.5, magnitude, 7.5)  # NaN too
        code = (magnitude * 2.0**-126).to(tl.int32, bitcast=True) >> 20
        sign = tl.where(x.to(tl.int32, bitcast=True) <= -0x800000, 0x80, 0)
        words = pack_words(code | sign, 8, x.shape[0], x.shape[1])
        value = x
    else:
        words, value = known_words(x, CODE, WHOLE, WORDS)
    return words, value


@triton.jit
def code_values(code, CODE: tl.constexpr):
    if CODE == "e2m3":
        bits = code.to(tl.int32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x1F) << 20)
        value = bits.to(tl.float32, bitcast=True) * 2.0**126
    else:
        value = known_values(code, CODE)
    return value


def encode_e2m3(x: Tensor) -> Tensor:
    codes = torch.bucketize(x.abs().double(), MIDDLES)  # the lower one of two equally near
    codes += (x.abs().double() == MIDDLES[codes.clamp(max=30)]) & (codes % 2 == 1)
    codes = torch.where(x.isnan(), 31, codes)
    return (codes | (x.signbit() & ~x.isnan()) << 7).to(torch.uint8)


def decode_e2m3(codes: Tensor) -> Tensor:
    values = VALUES[codes.long() & 31]
    return torch.where(codes >= 128, -values, values)


VALUES = torch.cat([torch.arange(16) / 8, torch.arange(8, 16) / 4, torch.arange(8, 16) / 2])
MIDDLES = ((VALUES[1:] + VALUES[:-1]) / 2).double()
E2M3 = CodeType("e2m3", 8, 31, 8, True, encode_e2m3, lambda codes: codes, decode_e2m3)


class E2M3Tensor(QuantizedTensor):
    """A tensor in E2M3, a code per byte."""


@dataclasses.dataclass(frozen=True)
class E2M3Quantizer(MXQuantizer[E2M3Tensor]):
    """One power of two per 32 elements of a row, which holds the largest one."""

    columnwise: bool = False
    tensor_class = E2M3Tensor
    kernels = True

    def full_layout(self) -> Layout:
        return layout(E2M3, is_square=False, scale_rule=ScaleRule(rounding=0xFFFFF))

    def encode(self, amaxes: Tensor, tensor_amax: Tensor | None, dtype: torch.dtype) -> tuple:
        rounded = amaxes.contiguous().view(torch.int32) + self.layout.scale_rule.rounding
        scales = torch.where(amaxes.isnan(), 255, ((rounded >> 23) - 2).clamp_(min=0))
        return scales.to(torch.uint8), minifloat.e8m0_reciprocal(scales)


@pytest.fixture(autouse=True)
def e2m3(monkeypatch):
    monkeypatch.setitem(format.CODE_BITS, "e2m3", 8)
    monkeypatch.setattr(format, "code_words", code_words)
    for module in (store, dequantize):
        monkeypatch.setattr(module, "code_values", code_values)


def train(kernels: bool, device: str, monkeypatch) -> list[Tensor]:
    monkeypatch.setattr(backend, "uses_kernels", lambda device: kernels)
    values = random((64, 96), seed=0, device=device)
    weight = torch.nn.Parameter(E2M3Quantizer().quantize(values))
    optimizer = FP4Adam([weight], lr=0.1, exp_avg_dtype=torch.bfloat16)
    found = []
    for seed in range(1, 4):
        weight.grad = random((64, 96), seed, device)
        optimizer.step()
        found += [weight._rowwise_data.clone(), weight._rowwise_scale_inv.clone()]
    return [each.cpu() for each in (*found, weight.dequantize(torch.float32))]


def test_kernels_and_operators_train_e2m3_alike(device, monkeypatch):
    kernels = step.step_kernel, dequantize._dequantize_kernel
    if any(getattr(kernel, "used_global_vals", None) for kernel in kernels):
        pytest.skip("kernels are compiled already: Triton refuses globals that change after that")
    values = torch.tensor([0.0, 0.0625, 0.1875, 1.0625, 3.125, -7.5, 9.0, torch.nan])
    assert decode_e2m3(encode_e2m3(values)).tolist() == [0, 0, 0.25, 1, 3, -7.5, 7.5, 7.5]
    by_kernels = train(True, device, monkeypatch)
    for a, b in zip(by_kernels, train(False, "cpu", monkeypatch), strict=True):
        assert torch.equal(a, b)


class Nibbles(E2M3Quantizer):
    def full_layout(self) -> Layout:
        return layout(E2M3._replace(name="int4", bits=4), is_square=False)


@pytest.mark.filterwarnings("error")
def test_int8_masters_need_known_gaps_and_go_on_after_a_load():
    params = [torch.nn.Parameter(E2M3Quantizer().quantize(random((64, 96), 0))) for _ in range(2)]
    runs = [FP4Adam([param], lr=0.1, states="8bit", fused=False) for param in params]
    take_steps(runs[0], range(3))
    params[1].data.copy_(params[0])
    runs[1].load_state_dict(runs[0].state_dict())
    for optimizer in runs:
        take_steps(optimizer, range(3, 5))
    assert torch.equal(*(param.dequantize() for param in params))
    with pytest.raises(ValueError, match="must not be int8 for codes of int4, whose gaps"):
        FP4Adam([torch.nn.Parameter(Nibbles().make_empty((64, 96)))], states="8bit")
