"""Transformer Engine's names on tensors and quantizers."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from fp4adam import Float8Quantizer, MXFP8Quantizer
from helpers import assert_identical
from quantizer_table import every, randn

NAMES = ("nvfp4", "nvfp4-1d", "nvfp4-swizzled", "mxfp8", "mxfp8-2d-swizzled", "float8block")
every_quantizer = every(*NAMES, "float8")


def value() -> Tensor:
    return randn(dtype=torch.bfloat16)


def test_names_of_float8_are_its_memory():
    tensor = Float8Quantizer()(value())
    assert torch.equal(tensor._data, tensor.rowwise_data) and not tensor._transpose_invalid
    assert torch.equal(tensor._transpose, tensor.columnwise_data)
    assert torch.equal(tensor._scale_inv, tensor.rowwise_scale_inv)
    tensor._data = moved = tensor._data.clone()
    assert tensor.data_ptr() == moved.data_ptr()
    stack = Float8Quantizer()(value().view(4, 16, 96))
    assert torch.equal(stack._data, tensor._data.view(4, 16, 96))
    assert torch.equal(stack._transpose, tensor._data.t().reshape(96, 4, 16))
    stack._data = moved = stack._data.clone()
    assert stack.data_ptr() == moved.data_ptr()
    assert torch.equal(stack.dequantize(), tensor.dequantize().view(4, 16, 96))


@every_quantizer
@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
def test_a_direction_that_is_dropped_comes_back_where_it_can(quantizer, usage):
    param = nn.Parameter(quantizer(value()))
    assert param._quantizer is param._get_quantizer() is quantizer
    assert param.get_usages() == {"rowwise": True, "columnwise": True}
    whole = {name: inner.clone() for name, inner in param.storage_tensors().items()}
    if usage == "rowwise" and quantizer.layout.shares_codes:
        with pytest.raises(ValueError, match="rowwise must be True with two_dimensional=True"):
            param.update_usage(rowwise_usage=False)
        return
    expected = dataclasses.replace(quantizer, **{usage: False})(value()).storage_tensors()

    param.update_usage(**{f"{usage}_usage": False})

    assert param.get_usages() == {"rowwise": usage != "rowwise", "columnwise": usage == "rowwise"}
    assert_identical(param.storage_tensors(), expected)
    if usage == "columnwise" and quantizer.layout.is_square:
        param.update_usage(columnwise_usage=True)
        assert param.quantizer == quantizer
        assert_identical(param.storage_tensors(), whole)
    else:
        with pytest.raises(RuntimeError, match=f"{usage} codes of a .* must be stored already"):
            param.update_usage(rowwise_usage=True, columnwise_usage=True)
    with pytest.raises(ValueError, match="must not both be False"):
        param.update_usage(False, False)


def test_quantizers_are_shared_and_stay_as_they_are():
    quantizer = MXFP8Quantizer(columnwise=False)
    assert quantizer.rowwise_usage and not quantizer.columnwise_usage and not quantizer.internal
    assert quantizer.copy() is quantizer
    quantizer.set_usage(rowwise=True)
    with pytest.raises(TypeError, match=r"columnwise of a quantizer must not change, got True"):
        quantizer.set_usage(columnwise=True)
