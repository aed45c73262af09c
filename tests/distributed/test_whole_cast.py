"""Casts of whole weights by kernels give the bytes of ``quantize``."""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp4adam import Float8BlockQuantizer, Float8Quantizer, MXFP8Quantizer, NVFP4Quantizer, Quantizer
from fp4adam.distributed import whole_cast
from fp4adam.distributed.whole_cast import WholeCast
from fp4adam.tensors import backend
from fp4adam.tensors.quantized_tensor import QuantizedTensor

INF, NAN = float("inf"), float("nan")
QUANTIZERS = {
    "float8block": Float8BlockQuantizer(),
    "float8block-fp32-scales": Float8BlockQuantizer(force_pow_2_scales=False, amax_epsilon=1e-3),
    "float8block-rowwise": Float8BlockQuantizer(columnwise=False),
    "float8": Float8Quantizer(),
    "float8-rowwise": Float8Quantizer(columnwise=False, force_pow_2_scales=True),
    "float8-delayed": Float8Quantizer(scaling="delayed", amax_history_len=3, margin=1),
    "float8-delayed-recent": Float8Quantizer(
        scaling="delayed", amax_history_len=1, amax_compute_algo="most_recent"
    ),
    "mxfp8": MXFP8Quantizer(),
    "mxfp8-rowwise": MXFP8Quantizer(columnwise=False, optimize_for_gemm=True),
    "mxfp8-swizzled": MXFP8Quantizer(optimize_for_gemm=True),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def kernels(monkeypatch, device) -> Iterator[None]:
    """Kernels run, in the interpreter if there is no GPU."""
    monkeypatch.setattr(backend, "uses_kernels", lambda _: True)
    # The interpreter works on NaN and Inf in NumPy, which warns of it.
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
        yield


def by_torch(quantizer: Quantizer, value: Tensor) -> QuantizedTensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "uses_kernels", lambda _: False)
        return quantizer.quantize(value.cpu())


def write_by_torch(tensor: QuantizedTensor, value: Tensor) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "uses_kernels", lambda _: False)
        tensor.quantize_(value.cpu())


def assert_bits(tensor: QuantizedTensor, wanted: QuantizedTensor) -> None:
    for name, inner in wanted.storage_tensors().items():
        actual = tensor.storage_tensors()[name].cpu()
        assert torch.equal(actual.view(torch.uint8), inner.view(torch.uint8)), name


def values(shape: tuple[int, int], seed: int, dtype: torch.dtype, device: str) -> Tensor:
    """Values of many magnitudes, with a block of zeros and single extremes, of each sign."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= 2.0 ** torch.randint(-30, 8, (shape[0], 1), generator=generator)
    x[:32, :32] = 0.0
    flat = x.view(-1)
    extremes = torch.tensor([NAN, INF, -INF, -0.0, 1e-40, torch.finfo(dtype).max])
    picked = extremes[torch.randint(0, 6, (seed % 4,), generator=generator)]
    flat[torch.randint(0, flat.numel(), (seed % 4,), generator=generator)] = picked
    return x.to(dtype).to(device)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_bytes_are_those_of_quantize(name, device):
    quantizer = QUANTIZERS[name]

    @settings(max_examples=5, deadline=None)
    @given(
        sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=3),
        step=st.sampled_from((32, 64)),
        seed=st.integers(0, 2**20),
        dtype=st.sampled_from(DTYPES),
    )
    def check(sizes, step, seed, dtype):
        step //= 2 if quantizer.name != "mxfp8" else 1
        shapes = [(step * m, step * n) for m, n in sizes]
        given = [values(shape, seed + i, dtype, device) for i, shape in enumerate(shapes)]
        wanted = [by_torch(quantizer, value) for value in given]
        tensors = [by_torch(quantizer, torch.ones_like(value)).to(device) for value in given]
        if quantizer.layout.tensor_scale == "delayed":
            for tensor, value in zip(wanted, given, strict=True):
                tensor.copy_(by_torch(quantizer, torch.ones_like(value)))
        assert all(map(whole_cast.fits, tensors, given))
        cast = WholeCast(tensors, given)
        for factor in (1.0, -0.5):
            for value, other in zip(given, wanted, strict=True):
                value.mul_(factor)
                write_by_torch(other, value)
            before = [tensor._version for tensor in tensors]
            cast()
            for tensor, other, version in zip(tensors, wanted, before, strict=True):
                assert_bits(tensor, other)
                assert tensor._version > version

    check()


def test_tensors_that_need_masks_or_have_other_formats_do_not_fit(device):
    x = torch.ones(48, 33, dtype=torch.bfloat16, device=device)
    odd = Float8BlockQuantizer()
    assert not whole_cast.fits(odd.make_empty((48, 33), device=device), x)
    for other in (
        Float8BlockQuantizer(two_dimensional=False),
        Float8Quantizer(rowwise=False),
        NVFP4Quantizer(),
    ):
        assert not whole_cast.fits(other.make_empty((48, 32), device=device), x)
    base = torch.ones(48 * 32 + 1, device=device)
    tensor = odd.make_empty((48, 32), device=device)
    assert whole_cast.fits(tensor, base[:-1].view(48, 32))
    assert not whole_cast.fits(tensor, base[1:].view(48, 32))
