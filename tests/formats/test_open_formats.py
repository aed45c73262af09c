"""A format that this package does not list is served like those that it does."""

import dataclasses

import pytest
import torch

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    PartialCast,
    build_columnwise,
    post_all_gather_processing,
)
from fp4adam.interop.adapter import TensorAdapter
from fp4adam.interop.borrowed_tensor import BorrowedTensor
from fp4adam.tensors import backend


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
    assert layout.rows_per_entry == layout.cols_per_entry == {}


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
    def read(self, tensors, dtype, after=None):
        return 2 * super().read(tensors, dtype, after)


@pytest.mark.parametrize("path", ["operators", "kernels"])
def test_a_format_that_decodes_otherwise_is_gathered_so(path, device, monkeypatch):
    monkeypatch.setattr(backend, "uses_kernels", lambda d: path == "kernels")
    value = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(device)
    tensors, out = Doubled().quantize(value)._shared.tensors, torch.empty_like(value)
    Doubled().decoder(tensors, out)()
    assert torch.equal(out, 2 * NVFP4Quantizer().quantize(value).dequantize(torch.float32))
