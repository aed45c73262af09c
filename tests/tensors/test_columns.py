"""Columns of a quantized tensor: windows on whole blocks, as rows are windows."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp4adam import Float8BlockQuantizer, MXFP8Quantizer, QuantizedTensor
from fp4adam.tensors.rows import check_parallel, parallel_part
from helpers import randn
from quantizer_table import every

every_quantizer = every("nvfp4", "mxfp8", "mxfp8-2d", "mxfp8-columnwise", "float8block")


@every_quantizer
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_windows_have_the_values_of_slices(quantizer, data):
    block = quantizer.layout.block
    rows, cols = (data.draw(st.integers(1, 3)) * block for _ in range(2))
    whole = quantizer.quantize(randn(rows, cols))
    values = whole.dequantize(torch.float32)
    first_row, first_col = data.draw(st.integers(0, rows)), data.draw(st.integers(0, 3)) * block
    first_col = min(first_col, cols)
    n_rows = data.draw(st.integers(0, rows - first_row))
    n_cols = data.draw(st.integers(0, (cols - first_col) // block)) * block
    window = whole[first_row : first_row + n_rows, first_col : first_col + n_cols]
    expected = values[first_row : first_row + n_rows, first_col : first_col + n_cols]
    copies = [window, window.clone(), copy.deepcopy(window), pickle.loads(pickle.dumps(window))]
    for one in copies:
        assert isinstance(one, QuantizedTensor) and one.shape == expected.shape
        assert torch.equal(one.dequantize(torch.float32), expected)


@every_quantizer
def test_columns_within_blocks_are_decoded_copies(quantizer):
    tensor = quantizer.quantize(randn(128, 256))
    for cut in (tensor[:, 1:], tensor[:, : quantizer.layout.block + 1], tensor[:, ::2]):
        assert type(cut) is Tensor
    parts = tensor.split(quantizer.layout.block // 2, dim=1)
    assert all(type(part) is Tensor for part in parts)
    assert torch.equal(torch.cat(parts, 1), tensor.dequantize(torch.float32))


def test_edges_of_float8_are_whole_blocks():
    tensor = Float8BlockQuantizer().quantize(randn(128, 200))
    assert isinstance(tensor[:, 128:], QuantizedTensor)
    assert torch.equal(
        tensor[:, 128:].dequantize(torch.float32), tensor.dequantize(torch.float32)[:, 128:]
    )


@pytest.mark.parametrize("dim", [0, 1])
@every_quantizer
def test_parts_together_are_the_whole(quantizer, dim):
    value = randn(256, 256)
    whole = quantizer.quantize(value)
    if not quantizer.rowwise:
        whole = MXFP8Quantizer(columnwise=False).quantize(value)
    whole._high_precision_init_val = value
    parts = [parallel_part(whole, dim, number, 2, None) for number in range(2)]
    assert torch.equal(
        torch.cat([p.dequantize(torch.float32) for p in parts], dim),
        whole.dequantize(torch.float32),
    )
    kept = [part.get_high_precision_init_val() for part in parts]
    assert torch.equal(torch.cat(kept, dim), value)
    for part in parts:
        assert part.quantizer == whole.quantizer
        layout = part.quantizer.layout.shapes(*part.shape)
        found = part.inner.existing()
        assert {n: (tuple(x.shape), x.dtype) for n, x in found.items()} == layout
    # They own their memory.
    parts[0].inner.present[0].zero_()
    assert torch.equal(
        whole.dequantize(torch.float32), whole.quantizer.quantize(value).dequantize(torch.float32)
    )
    with pytest.raises(ValueError, match="multiple of 3 parts"):
        check_parallel(whole, dim, 3)
