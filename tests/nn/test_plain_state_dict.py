"""use_plain_state_dict: checkpoints of plain tensors, with nothing lost or replaced."""

import copy

import pytest
import torch

from fp4adam import FP4Adam, QuantizedTensor, quantize_model, use_plain_state_dict
from helpers import RECIPES, assert_identical, make_mlp, snapshot, take_steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resumed_training_has_the_same_bits(dtype, device):
    model = use_plain_state_dict(make_mlp(None, device, dtype))
    optimizer = FP4Adam(quantize_model(model, RECIPES["nvfp4"]).parameters())
    take_steps(optimizer, range(2))
    saved, state = model.state_dict(), copy.deepcopy(optimizer.state_dict())
    assert {(type(value), value.dtype) for value in saved.values()} == {(torch.Tensor, dtype)}
    assert_identical(saved["0.weight"], model[0].weight.dequantize(dtype).detach())
    other = make_mlp(RECIPES["nvfp4"], device, dtype)
    other.load_state_dict(saved)
    resumed = FP4Adam(other.parameters())
    resumed.load_state_dict(state)
    take_steps(optimizer, [2])
    take_steps(resumed, [2])
    for part in ("params", "state"):
        assert_identical(snapshot(resumed)[part], snapshot(optimizer)[part])


def test_plain_values_do_not_take_the_place_of_quantized_ones(device):
    model = use_plain_state_dict(make_mlp(RECIPES["nvfp4"], device))
    weight = model[0].weight
    with pytest.raises(ValueError, match="assign must be False .* '0.weight', got True"):
        model.load_state_dict(model.state_dict(), assign=True)
    assert model[0].weight is weight
    model.load_state_dict(make_mlp(RECIPES["nvfp4"], device).state_dict(), assign=True)
    assert isinstance(model[0].weight, QuantizedTensor)
