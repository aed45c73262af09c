"""The names of Megatron's ``core.fp8_utils``; its call sites are in ``tests/distributed``."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fp4adam.fp8_utils as fp8_utils  # the path that stands in for megatron.core.fp8_utils
from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    quantized_init,
)
from fp4adam.fp8_utils import replace_raw_data
from helpers import RECIPES, randn
from te_stand_ins import te_tensor

CONFIG = SimpleNamespace(
    fp8="hybrid",
    fp8_param=True,
    fp8_recipe="delayed",
    fp8_amax_history_len=8,
    fp8_amax_compute_algo="most_recent",
    fp8_margin=1,
    num_layers=4,
    first_last_layers_bf16=True,
    num_layers_at_start_in_bf16=1,
    num_layers_at_end_in_bf16=1,
)


def value() -> torch.Tensor:
    return randn(64, 96, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", RECIPES)
def test_tensors_of_both_packages_are_told_apart(name):
    quantizer = RECIPES[name]
    tensors = quantizer(value()), nn.Parameter(quantizer(value())), te_tensor(quantizer, value())
    of_subclass = te_tensor(quantizer, value())
    of_subclass.__class__ = type("Own", (type(of_subclass),), {})
    for tensor in (*tensors, of_subclass):
        assert fp8_utils.is_float8tensor(tensor)
        assert fp8_utils.is_mxfp8tensor(tensor) == (name == "mxfp8")
        assert not fp8_utils.is_grouped_tensor_with_quantized_storage(tensor)
        expected = quantizer(value()).dequantize()
        assert torch.equal(fp8_utils.dequantize_fp8_tensor(tensor), expected)
    assert not fp8_utils.is_float8tensor(value()) and not fp8_utils.is_mxfp8tensor(None)
    with pytest.raises(ValueError, match="must be a quantized tensor, got a Tensor"):
        fp8_utils.dequantize_fp8_tensor(value())


@pytest.mark.parametrize("name", RECIPES)
def test_codes_move_to_a_buffer_and_are_written_there(name):
    quantizer = RECIPES[name]
    makers = [lambda: nn.Parameter(quantizer(value())), lambda: te_tensor(quantizer, value())]
    for make in makers:
        param, size = make(), 64 * 96 * quantizer.layout.code_type.bits // 8
        buffer = torch.zeros(size + 16, dtype=torch.uint8)
        if name == "mxfp8":
            with pytest.raises(NotImplementedError, match="alone or of square blocks"):
                replace_raw_data(param, buffer[16:])
            continue
        for wrong in (buffer, torch.zeros(size), buffer.repeat(2)[: 2 * size : 2]):
            with pytest.raises(ValueError, match=f"contiguous uint8 of {size} bytes"):
                replace_raw_data(param, wrong)
        fp8_utils.modify_underlying_storage(param, buffer[16:])
        assert torch.equal(buffer[16:], quantizer(value()).rowwise_data.flatten())
    own = nn.Parameter(quantizer(value() * 0))
    if name != "mxfp8":
        replace_raw_data(own, buffer[16:])
    # From a flat slice of another buffer, as Megatron passes it.
    fp8_utils.copy_tensors_to_quantized_params([own], [value().flatten()])
    assert torch.equal(own.dequantize(), quantizer(value()).dequantize())
    if name != "mxfp8":
        assert torch.equal(buffer[16:], quantizer(value()).rowwise_data.flatten())
    with pytest.raises(RuntimeError, match="must have rowwise codes, alone"):
        replace_raw_data(NVFP4Quantizer(rowwise=False)(value()), buffer)
    with pytest.raises(ValueError, match="must be a quantized tensor, got a Tensor"):
        replace_raw_data(value(), buffer)


def test_recipes_and_contexts_of_a_configuration():
    expected = Float8Quantizer(
        scaling="delayed", amax_history_len=8, amax_compute_algo="most_recent", margin=1
    )
    assert fp8_utils.get_fp8_recipe(CONFIG) == expected
    recipes = dict(tensorwise=Float8Quantizer, blockwise=Float8BlockQuantizer, mxfp8=MXFP8Quantizer)
    for name, quantizer in recipes.items():
        enum = SimpleNamespace(fp8_recipe=SimpleNamespace(value=name))
        assert fp8_utils.get_fp8_recipe(enum) == quantizer()
    with pytest.raises(ValueError, match="fp8_recipe must be one of delayed, .* got 'custom'"):
        fp8_utils.get_fp8_recipe(SimpleNamespace(fp8_recipe="custom"))
    built = []
    for layer in range(4):
        with fp8_utils.get_fp8_context(CONFIG, layer, is_init=True):
            built.append(nn.Sequential(nn.Linear(32, 32)))
    assert [fp8_utils.is_float8tensor(m[0].weight) for m in built] == [False, True, True, False]
    with fp8_utils.get_fp8_context(CONFIG, 1):
        assert not fp8_utils.is_float8tensor(nn.Sequential(nn.Linear(32, 32))[0].weight)
    assert [fp8_utils.get_fp8_align_size(name) for name in ("mxfp8", "delayed")] == [32, 16]


def test_parts_of_a_layer_stay_in_high_precision():
    with quantized_init("mxfp8"):
        first = nn.Linear(32, 32)
        with fp8_utils.get_fp8_disabled_context(CONFIG, is_init=True):
            router = nn.Sequential(nn.Linear(32, 32))
        layer = nn.ModuleList([first, router, nn.Linear(32, 32)])
    weights = (first.weight, router[0].weight, layer[2].weight)
    assert [fp8_utils.is_float8tensor(weight) for weight in weights] == [True, False, True]
    with quantized_init(enabled=False):
        plain = nn.Sequential(nn.Linear(32, 32))
    from_before = nn.Sequential(nn.Linear(32, 32))
    with quantized_init("mxfp8"):  # what is wrapped later counts as built here
        wrapped = nn.ModuleList([from_before, plain])
    assert [fp8_utils.is_float8tensor(each[0].weight) for each in wrapped] == [True, False]
    assert hasattr(from_before[0].weight, "get_high_precision_init_val")
