"""A format that this package does not list is served like those that it does."""

import dataclasses

import pytest
import torch

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Recipe,
)
from fp4adam.distributed.cast import PartialCast
from fp4adam.formats import minifloat
from fp4adam.formats.mx import MXQuantizer, layout
from fp4adam.fp8_utils import post_all_gather_processing
from fp4adam.interop.adapter import TensorAdapter
from fp4adam.interop.borrowed_tensor import BorrowedTensor
from fp4adam.tensors import backend
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.transpose import build_columnwise


@dataclasses.dataclass(frozen=True)
class OwnNVFP4(NVFP4Quantizer):
    pass


@dataclasses.dataclass(frozen=True)
class OwnMXFP8(MXFP8Quantizer):
    pass


@dataclasses.dataclass(frozen=True)
class OwnFloat8(Float8Quantizer):
    pass


@dataclasses.dataclass(frozen=True)
class OwnFloat8Block(Float8BlockQuantizer):
    pass


PAIRS = {
    "nvfp4": (OwnNVFP4(), NVFP4Quantizer()),
    "mxfp8": (OwnMXFP8(), MXFP8Quantizer()),
    "float8": (OwnFloat8(), Float8Quantizer()),
    "float8block": (OwnFloat8Block(), Float8BlockQuantizer()),
}
every_pair = pytest.mark.parametrize("own, listed", PAIRS.values(), ids=PAIRS.keys())


def matrix() -> torch.Tensor:
    return torch.randn(64, 96, generator=torch.Generator().manual_seed(0))


def test_a_format_without_cuts_is_cut_nowhere():
    layout = NVFP4Quantizer(two_dimensional=False).layout
    assert layout.rows_per_entry == {}


@every_pair
def test_parts_are_cast_and_transposed(own, listed):
    x = matrix()
    expected = listed.quantize(x)
    tensor = own.make_empty((64, 96))
    casts = [PartialCast([tensor], [start], [3072], [x.dtype]) for start in (0, 3072)]
    halves = x.flatten().split(3072)
    for cast, half in zip(casts, halves, strict=True):
        cast.measure([half])
    largest = torch.maximum(*(cast.amaxes for cast in casts))
    for cast, half in zip(casts, halves, strict=True):
        cast.amaxes.copy_(largest)
        cast.write([half])
    post_all_gather_processing([tensor])
    if own.layout.is_square:
        build_columnwise([tensor])
    for usage in ("rowwise", "columnwise"):
        for name in (f"{usage}_data", f"{usage}_scale_inv", f"{usage}_gemm_scale_inv"):
            assert torch.equal(getattr(tensor, name), getattr(expected, name)), name


@every_pair
def test_memory_of_others_is_borrowed(own, listed, monkeypatch):
    expected = listed.quantize(matrix())

    class Adapter(TensorAdapter):
        attributes = ()

        def quantizer(self, tensor):
            return own

        def fields(self, tensor):
            names = [f"{u}_{part}" for u in ("rowwise", "columnwise") for part in FIELDS]
            fields = {name: getattr(expected, name) for name in names}
            return fields | (
                {"amax_rowwise": expected._amax} if own.layout.tensor_scale == "current" else {}
            )

    FIELDS = ("data", "scale_inv")
    monkeypatch.setattr("fp4adam.interop.borrowed_tensor.adapter_of", lambda _: Adapter())
    borrowed = BorrowedTensor(torch.empty(64, 96))
    assert torch.equal(
        borrowed.tensor.dequantize(torch.float32), expected.dequantize(torch.float32)
    )
    assert borrowed.is_of(matrix())


@dataclasses.dataclass(frozen=True)
class Doubled(NVFP4Quantizer):
    """NVFP4 whose values are twice as large."""

    def decode(self, scales, tensor_amax):
        return 2 * super().decode(scales, tensor_amax)


@dataclasses.dataclass(frozen=True)
class Coarse(MXFP8Quantizer):
    """MXFP8 with scales twice as large."""

    def encode(self, amaxes, tensor_amax, dtype):
        return super().encode(2 * amaxes, tensor_amax, dtype)


class PlainTensor(QuantizedTensor):
    pass


@dataclasses.dataclass(frozen=True)
class Plain(MXQuantizer):
    """A format without kernels."""

    columnwise: bool = False
    tensor_class = PlainTensor

    def full_layout(self):
        return layout(minifloat.E4M3, is_square=False)

    def encode(self, amaxes, tensor_amax, dtype):
        scales = minifloat.e8m0_code_up(amaxes * (1 / 448))
        return scales, minifloat.e8m0_reciprocal(scales)


@pytest.mark.parametrize("quantizer", [Doubled(), Coarse(), Plain()], ids=repr)
def test_a_format_with_arithmetic_of_its_own_never_runs_the_kernels_of_another(
    quantizer, monkeypatch
):
    def trained(device: str) -> list[torch.Tensor]:
        param = torch.nn.Parameter(quantizer.quantize(matrix().to(device)))
        optimizer = FP4Adam([param], lr=1e-2)
        gathered = torch.empty(64, 96, device=device)
        for _ in range(2):
            param.grad = torch.ones_like(gathered)
            optimizer.step()
        quantizer.decoder(param.inner, gathered)()
        assert torch.equal(gathered, param.dequantize(torch.float32))
        return [gathered, *param.storage_tensors().values()]

    expected = trained("cpu")
    monkeypatch.setattr(backend, "uses_kernels", lambda _: True)
    for tensor, other in zip(trained("cpu"), expected, strict=True):
        assert torch.equal(tensor, other)
    with pytest.raises(ValueError, match="must be False unless weights are of"):
        Recipe(quantizer, activations="fake")
    if quantizer.layout.rows_per_entry:
        weight = quantizer.make_empty((64, 96))
        cast = PartialCast([weight], [0], [64 * 96], [torch.float32])
        cast.measure([matrix().view(-1)])
        cast.write([matrix().view(-1)])
        assert torch.equal(weight.rowwise_data, quantizer.quantize(matrix()).rowwise_data)
