"""Rows and columns of a quantized tensor can be read, and queries change nothing."""

import copy
import dataclasses
import itertools
import pickle
import weakref
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    quantize_model,
)
from fp4adam.distributed.cast import PartialCast
from fp4adam.distributed.shards import settle_shard
from fp4adam.tensors import backend
from fp4adam.tensors.rows import check_parallel, matrix_shape, parallel_part
from fp4adam.tensors.storage import Storage
from fp4adam.tensors.transpose import build_columnwise
from quantizer_table import TABLE, every, randn

SHAPE = (32, 64)
every_quantizer = every("nvfp4", "mxfp8", "mxfp8-2d", "float8block", "float8")
every_window = every("nvfp4", "mxfp8", "mxfp8-2d", "mxfp8-columnwise", "float8block")


PROPERTIES = [f"rowwise_{what}" for what in ("data", "scale_inv", "gemm_scale_inv")]
PROPERTIES += [name.replace("rowwise", "columnwise") for name in PROPERTIES]


@pytest.mark.parametrize("shape", [(16, 64), SHAPE])
@every_quantizer
def test_what_zeros_are_depends_on_nothing_but_the_size(quantizer, shape):
    tensor = quantizer.quantize(randn(SHAPE))
    state = dict(vars(tensor))
    tensor.split(16)
    tensor.chunk(2, dim=1)
    assert vars(tensor) == state
    zeros = tensor.new_zeros(shape)
    assert type(zeros) is type(tensor) and zeros.shape == shape
    assert not zeros.dequantize(torch.float32).any()
    half = tensor.new_zeros(shape, dtype=torch.float16)
    assert type(half) is Tensor and half.dtype == torch.float16
    for other in ((3,), (2, *SHAPE), (64, 64), (16, 32), ()):
        plain = tensor.new_zeros(other)
        assert type(plain) is Tensor and plain.shape == other and not plain.any()


def test_pieces_of_what_cannot_be_cut_are_refused():
    tensor = NVFP4Quantizer(two_dimensional=False).quantize(randn(SHAPE))
    with pytest.raises(ValueError, match=r"(?s)two_dimensional=True to be sharded.*dtype="):
        tensor.new_zeros(16, 64)
    square = TABLE["nvfp4"].quantize(randn(SHAPE))
    with pytest.raises(ValueError, match="sharded along its first dimension.*dtype="):
        square.new_zeros(32, 32)


WRITES = {
    "copy_": lambda rows, x: rows.copy_(x),
    "quantize_": lambda rows, x: rows.quantize_(x),
    "normal_": lambda rows, x: rows.normal_(),
    "codes": lambda rows, x: rows.copy_(rows.quantizer.quantize(x.repeat(2, 1))[:16]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@every("nvfp4", "float8block")
def test_slices_are_read_only(quantizer, write):
    tensor = quantizer.quantize(randn(SHAPE))
    before = [inner.clone() for inner in tensor.storage_tensors().values()]
    with pytest.raises(RuntimeError, match="for a slice of shape .16, 64.*write the whole"):
        write(tensor[:16], randn((16, 64), seed=1))
    after = tensor.storage_tensors().values()
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert torch.equal(tensor[16:].dequantize(), tensor.dequantize()[16:])
    for rows_ in (tensor[:16], tensor[:16].clone()):
        param = nn.Parameter(rows_)
        param.grad = torch.ones(16, 64)
        with pytest.raises(NotImplementedError, match="must be whole quantized tensors, got a sl"):
            FP4Adam([param]).step()


def test_rows_have_their_part_of_the_value_before_quantization():
    weight = quantize_model(nn.Linear(64, 32, bias=False), "nvfp4").weight
    value = weight.get_high_precision_init_val().clone()
    rows = weight.detach()[16:]
    assert torch.equal(rows.get_high_precision_init_val(), value[16:])
    rows.clear_high_precision_init_val()
    assert torch.equal(weight.get_high_precision_init_val(), value)
    weight.detach().copy_(other := value + 1)
    other.zero_()
    assert torch.equal(weight.get_high_precision_init_val(), value + 1)
    weight.clear_high_precision_init_val()
    assert rows._high_precision_init_val is None


@pytest.mark.parametrize("default", ["meta", "cuda"])
@every_quantizer
def test_the_default_device_does_not_matter(quantizer, default):
    if default == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    x = randn(SHAPE)

    def made() -> list[Tensor]:
        tensor = quantizer.quantize(x)
        cast = PartialCast([copy := tensor.clone()], [0], [x.numel()], [x.dtype])
        cast.measure([x.flatten()])
        cast.write([x.flatten()])
        if quantizer.layout.is_square:
            build_columnwise([copy])
        parts = [getattr(t, name) for t in (tensor, copy) for name in PROPERTIES]
        return [*parts, *(t.dequantize(torch.float32) for t in (tensor, tensor[16:].clone()))]

    expected = made()
    with torch.device(default):
        actual = made()
    for a, b in zip(actual, expected, strict=True):
        assert a.device == b.device and torch.equal(a, b)


def in_parts(inner: Tensor, per_entry: int, part: int, n_parts: int, gap: int) -> Tensor:
    """A stack of the entries that each part of so many rows overlaps, with bytes in between."""
    spans = [(i * part // per_entry, -(-(i + 1) * part // per_entry)) for i in range(n_parts)]
    values = [inner[start:stop] for start, stop in spans]
    most = max(map(len, values))
    width = most * inner[0].numel() + gap // inner.itemsize
    buffer = torch.full((n_parts * width * inner.itemsize,), 255, dtype=torch.uint8)
    buffer = buffer.to(inner.device).view(inner.dtype)
    strides = width, *inner[:1].stride()
    parts = buffer.as_strided((n_parts, most, *inner.shape[1:]), strides)
    for stack, value in zip(parts, values, strict=True):
        stack[: len(value)] = value
    return parts


@pytest.mark.parametrize("gap", [0, 16, 4])
@pytest.mark.parametrize("path", ["operators", "kernels"])
@pytest.mark.parametrize("blocks", [2, 1.25])
@every_quantizer
def test_rows_in_parts_are_decoded_as_in_one(quantizer, blocks, path, gap, device, monkeypatch):
    """The last part has rows that the matrix does not, or parts cut blocks."""
    monkeypatch.setattr(backend, "uses_kernels", lambda d: path == "kernels")
    block = quantizer.layout.block
    tensor = quantizer.quantize(randn((5 * block, 64)).to(device))
    tensors, names = tensor.inner, ["rowwise_data", "rowwise_scale_inv"]
    if quantizer.layout.is_square:
        names[1] = "block_scale_inv"
    if quantizer.layout.scale_type is None:
        names.pop()
    parts, part = {"amax": tensors.amax}, int(blocks * block)
    for name in names:
        per_entry = quantizer.layout.rows_per_entry[name]
        inner = getattr(tensors, name)[: 5 * block // per_entry].contiguous()
        parts[name] = in_parts(inner, per_entry, part, -(-5 * block // part), gap)
    out = torch.empty(5 * block, 64, dtype=torch.bfloat16, device=device)
    quantizer.decoder(Storage(**parts), out)()
    assert torch.equal(out, tensor.dequantize(torch.bfloat16))


@pytest.mark.parametrize(("quantizer", "cols"), [(MXFP8Quantizer(), 96), (TABLE["float8"], 1)])
def test_flat_shards_of_stacks_are_matrices_of_their_last_dimension(quantizer, cols):
    """FSDP2 keeps shards flat; the stack has other sizes in its other dimensions."""
    stack = quantizer.quantize(torch.ones(4, 32, cols))
    shard = stack.new_zeros((2, 32, cols)).copy_(stack[:2])
    settle_shard(shard, ())
    assert matrix_shape(shard.view(-1)) == (64, cols)
    assert shard._shared.unsettled  # whatever other ranks have loaded


def test_rows_that_are_written_alone_are_quantized_with_the_others():
    # Alone in their blocks, or together with rows beyond; in more rows than columns, or fewer.
    slices = slice(128, 160), slice(32), slice(32, 80), slice(81, 96)
    for cols, rows in itertools.product((32, 128), slices):
        quantizer = TABLE["float8block" if rows.stop == 160 else "mxfp8-2d"]
        whole = quantizer.quantize(randn((160, cols)))
        part = whole[: max(rows.stop, 96)]
        shard = whole.new_zeros(part.shape).copy_(part)
        settle_shard(shard, ())
        value = shard.dequantize()
        shard[1:2].zero_()
        shard.copy_(value)
        value[rows] *= 8
        shard[rows].copy_(new := value[rows].clone())
        assert (shard.pending_value() is None) == (rows in slices[:2])
        new.zero_()
        settle_shard(shard, ())
        assert torch.equal(shard.dequantize(), quantizer.quantize(value).dequantize())
        assert shard.pending_value() is None
    waits = whole.new_zeros((80, 128)).copy_(whole[:80])  # for the amaxes of other ranks
    expected = 8 * value[:80]
    waits.copy_(new := expected.bfloat16())
    for other in (new, waits.dequantize(torch.bfloat16)):
        other.zero_()
    expected[:2] = 1 + 2**-20
    waits[:2].copy_(expected[:2])
    assert torch.equal(waits.dequantize(), expected)
    assert waits.copy_(whole[:80]).pending_value() is None
    shard = TABLE["nvfp4"].make_empty((64, 64), device="meta").new_zeros(32, 64)
    assert shard.normal_().pending_value() is None  # to_empty() would make zeros of it


@pytest.mark.parametrize("name, n_rows", [("float8block", 3), ("nvfp4", 0)])
def test_bytes_of_a_shard_are_those_of_its_rows(name, n_rows):
    whole = TABLE[name].quantize(torch.ones(16, 64))
    shard = whole.new_zeros((n_rows, 64)).copy_(whole[:n_rows])
    other = shard.twin()
    for inner in other.storage_tensors().values():
        inner[-1:] += 1  # of a block without rows; an amax that nothing reads
    assert other.has_bytes_of(shard)
    other.inner.codes[:n_rows] += 1
    assert other.has_bytes_of(shard) == (n_rows == 0)
    # The same codes, with scales of one block or of two.
    whole = TABLE["float8block"].quantize(torch.ones(256, 64))
    first, second = (whole.new_zeros((60, 64)).copy_(whole[i : i + 60]) for i in (0, 100))
    assert not first.has_bytes_of(second)


@pytest.mark.parametrize("answers", [(True, True), (False, True), (True, False)])
def test_a_shard_that_moves_takes_along_what_a_step_has_left(answers):
    whole = Float8Quantizer(scaling="delayed").quantize(randn(SHAPE))
    shard, moved = (whole.new_zeros((16, 64)) for _ in range(2))
    shard.copy_(whole[:16])
    targets = [Mock(**{"has_left.return_value": answer}) for answer in answers]
    shard._shared.stepped_by = weakref.WeakSet(targets)
    moved.copy_(shard)
    for name, inner in shard.storage_tensors().items():
        assert torch.equal(getattr(moved, name), inner) and inner.any()
    left = moved._shared.left
    assert left.has_bytes_of(shard) if all(answers) else left is None
    assert moved.to(moved.device, copy=True)._shared.stepped_by == shard._shared.stepped_by
    value, version = moved.dequantize(torch.float32), moved._amax._version
    for same in (moved.detach(), value):  # the bytes that other ranks may have written anew
        moved._shared.left, moved._shared.unsettled = None, False
        assert moved.copy_(same)._shared.unsettled
    assert (moved._shared.left is not None) == all(answers) and moved._amax._version > version
    assert torch.equal(moved._high_precision_init_val, value)
    whole._shared.init_val = torch.empty(0, device="meta")  # the next one is to be kept
    new = whole.new_zeros((16, 64)).copy_(whole[:16])
    assert new._shared.init_val.is_meta
    new.copy_(2 * value)  # waits for other ranks, and is quantized with the amaxes of before
    assert torch.equal(whole.new_zeros((16, 64)).copy_(new).amax_history, shard.amax_history)
    assert not dataclasses.replace(shard.global_spec, chunk=32).shares_scales


@every_window
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_windows_have_the_values_of_slices(quantizer, data):
    block = quantizer.layout.block
    rows, cols = (data.draw(st.integers(1, 3)) * block for _ in range(2))
    whole = quantizer.quantize(randn((rows, cols)))
    values = whole.dequantize(torch.float32)
    first_row, first_col = data.draw(st.integers(0, rows)), data.draw(st.integers(0, 3)) * block
    first_col = min(first_col, cols)
    n_rows = data.draw(st.integers(0, rows - first_row))
    n_cols = data.draw(st.integers(0, (cols - first_col) // block)) * block
    window = whole[first_row : first_row + n_rows, first_col : first_col + n_cols]
    expected = values[first_row : first_row + n_rows, first_col : first_col + n_cols]
    copies = [window, window.clone(), copy.deepcopy(window), pickle.loads(pickle.dumps(window))]
    for name, per_entry in quantizer.layout.rows_per_entry.items():  # they have their own alone
        assert len(getattr(copies[1].inner, name)) <= (-(-n_rows // block) + 1) * block // per_entry
    for one in copies:
        assert isinstance(one, QuantizedTensor) and one.shape == expected.shape
        decoded = one.dequantize(torch.float32)
        assert torch.equal(decoded, expected) and decoded.storage_offset() == 0


@every_window
def test_columns_within_blocks_are_decoded_copies(quantizer):
    tensor = quantizer.quantize(randn((128, 256)))
    for cut in (tensor[:, 1:], tensor[:, : quantizer.layout.block + 1], tensor[:, ::2]):
        assert type(cut) is Tensor
    assert [len(tensor[:n].split(1)) for n in range(3)] == [1, 1, 2]
    parts = tensor.split(quantizer.layout.block // 2, dim=1)
    assert all(type(part) is Tensor for part in parts)
    assert torch.equal(torch.cat(parts, 1), tensor.dequantize(torch.float32))
    if isinstance(quantizer, Float8BlockQuantizer):  # the last block of a row may be shorter
        tensor = quantizer.quantize(randn((128, 200)))
        assert isinstance(tensor[:, 128:], QuantizedTensor)
        assert torch.equal(tensor[:, 128:].dequantize(), tensor.dequantize()[:, 128:])


@pytest.mark.parametrize("dim", [0, 1])
@every_window
def test_parts_together_are_the_whole(quantizer, dim):
    value = randn((512, 256))
    whole = quantizer.quantize(value)
    if not quantizer.rowwise:
        whole = MXFP8Quantizer(columnwise=False).quantize(value)
    whole._high_precision_init_val = value
    parts = [parallel_part(whole, dim, number, 2, None) for number in range(2)]
    expected = whole.dequantize()
    assert torch.equal(torch.cat([part.dequantize() for part in parts], dim), expected)
    kept = [part.get_high_precision_init_val() for part in parts]
    assert torch.equal(torch.cat(kept, dim), value)
    for part in parts:
        assert part.quantizer == whole.quantizer
        assert part.t().shape == part.shape[::-1]  # needs no ranks, as it has not been written
        layout = part.quantizer.layout.shapes(*part.shape)
        found = part.inner.existing()
        assert {n: (tuple(x.shape), x.dtype) for n, x in found.items()} == layout
    # They own their memory.
    parts[0].inner.present[0].zero_()
    assert torch.equal(whole.dequantize(), expected)
    parts[1][:128].copy_(torch.ones(128, parts[1].shape[1]))
    assert torch.equal(torch.cat(kept, dim), value)
    if parts[1].pending_value() is None:
        assert parts[1].get_high_precision_init_val()[:128].eq(1).all()
    if whole.quantizer.layout.is_square:
        build_columnwise([again := parts[1].clone()])
        assert torch.equal(again.columnwise_data, parts[1].columnwise_data)
    kept[0].zero_()
    assert torch.equal(value, randn((512, 256)))
    with pytest.raises(ValueError, match="multiple of 3 parts"):
        check_parallel(whole, dim, 3)
