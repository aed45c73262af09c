"""On a CPU, tensors are worked on in pieces: the same bytes, in memory that does not grow."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    FusedAdam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
)
from fp4adam.formats.encoding import strips
from fp4adam.tensors import backend
from fp4adam.tensors.transpose import transpose_bytes

FORMATS = {
    "nvfp4_2d": NVFP4Quantizer(),
    "nvfp4_1d": NVFP4Quantizer(two_dimensional=False),
    "mxfp8": MXFP8Quantizer(),
    "mxfp8-2d": MXFP8Quantizer(two_dimensional=True),
    "fp8block_2d": Float8BlockQuantizer(),
    "float8_fp32": Float8Quantizer(),
    "fp8block_1d": Float8BlockQuantizer(two_dimensional=False),
}
every_format = pytest.mark.parametrize("format", FORMATS)
PIECE = 2**13


class Allocations(TorchDispatchMode):
    """Records the bytes of the largest memory that operators allocate."""

    largest = 0

    def __torch_dispatch__(
        self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {t.untyped_storage().data_ptr() for t in plain_tensors((args, kwargs))}
        for t in plain_tensors(result):
            if t.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return result


def plain_tensors(tree: object) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, QuantizedTensor)]


def matrix(rows: int, cols: int) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", [None, *FORMATS])
def test_a_step_allocates_no_more_than_a_piece_needs(format, dtype, monkeypatch):
    monkeypatch.setattr(backend, "cpu_chunk_numel", lambda: PIECE)
    value = matrix(PIECE // 4, 64).to(dtype)  # sixteen pieces
    if format is not None:
        value = FORMATS[format].quantize(value)
    param = torch.nn.Parameter(value)
    param.grad = torch.ones(value.shape, dtype=dtype)
    optimizer = (FusedAdam if format is None else FP4Adam)([param])
    optimizer.step()  # makes the state
    with Allocations() as allocations:
        optimizer.step()
    # Four float32 buffers of a piece are one tensor; the whole one would take 64 bytes per element.
    assert 4 * PIECE <= allocations.largest <= 16 * PIECE


@every_format
def test_quantize_allocates_no_more_than_a_piece_needs(format, monkeypatch):
    monkeypatch.setattr(backend, "cpu_chunk_numel", lambda: PIECE)
    x = matrix(PIECE // 4, 64)
    tensor = FORMATS[format].quantize(x)
    with Allocations() as allocations:
        tensor.quantize_(x)
    assert 4 * PIECE <= allocations.largest <= 8 * PIECE


@every_format
@pytest.mark.parametrize("special", [0.0, torch.nan, torch.inf])
def test_strips_give_the_bytes_of_the_whole(format, special, monkeypatch):
    shape = (300, 147) if format.startswith("fp8block") else (288, 160)
    x = matrix(*shape)
    x[::5, 3] = special
    x[40:60] *= 1e6
    tensors = []
    for size in (1, 20_000, 2**40):
        monkeypatch.setattr(backend, "cpu_chunk_numel", lambda size=size: size)
        tensor = FORMATS[format].quantize(x)
        tensors.append([*tensor.storage_tensors().values(), tensor.dequantize(torch.float32)])
    for other in tensors[:2]:
        for pieces, whole in zip(other, tensors[2], strict=True):
            assert torch.equal(pieces.view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("shape", [(8, 5), (7, 12), (3, 4), (4, 1), (1, 1)])
def test_bytes_are_transposed_at_any_address(shape, offset):
    rows, cols = shape
    source = torch.arange(rows * cols, dtype=torch.uint8).view(shape)
    memory = torch.zeros(cols * 16 + offset, dtype=torch.uint8)
    transpose_bytes(source, memory[offset:].view(cols, 16)[:, :rows])
    expected = torch.zeros(cols, 16, dtype=torch.uint8)
    expected[:, :rows] = source.t()
    assert torch.equal(memory[offset:].view(cols, 16), expected)
    assert not memory[:offset].any()


def test_strips_pad_the_last_blocks_with_zeros(monkeypatch):
    monkeypatch.setattr(backend, "cpu_chunk_numel", lambda: 8 * 5)
    x = matrix(10, 5)
    parts = [(span, strip.clone(), work.shape) for span, strip, work in strips(x, (4, 3), 1)]
    assert [span for span, _, _ in parts] == [slice(0, 8), slice(8, 10)]
    padded = torch.cat([strip for _, strip, _ in parts])
    assert torch.equal(padded, torch.nn.functional.pad(x, (0, 1, 0, 2)))
    assert all(strip.shape == shape for _, strip, shape in parts)
    assert list(strips(x[:0], (4, 3), 1)) == []
