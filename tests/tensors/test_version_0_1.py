"""Files that version 0.1 wrote still load, and training goes on from them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fp4adam import FP4Adam, QuantizedTensor, quantize_model

FILES = Path(__file__).parents[1] / "data" / "version_0_1"
FORMATS = ("nvfp4", "mxfp8", "float8block", "bf16")
every_format = pytest.mark.parametrize("name", FORMATS)


def load(name: str, weights_only: bool = True):
    return torch.load(FILES / f"{name}.pt", weights_only=weights_only)


def parts(tensor: Tensor) -> dict[str, Tensor]:
    if isinstance(tensor, QuantizedTensor):
        return tensor.storage_tensors()
    return {"": tensor.detach()}


def assert_same(actual: Tensor, expected: Tensor) -> None:
    actual, expected = parts(actual), parts(expected)
    assert actual.keys() == expected.keys()
    for name, part in actual.items():
        assert torch.equal(part, expected[name]), name


def new_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32, bias=False))
    return model.bfloat16() if name == "bf16" else quantize_model(model, name)


@every_format
def test_weights_are_those_of_their_masters(name):
    checkpoint = load(f"{name}-checkpoint")
    states = checkpoint["optimizer"]["state"]
    for weight, state in zip(checkpoint["model"].values(), states.values(), strict=True):
        master = state.get("master_param")
        if isinstance(weight, QuantizedTensor):
            assert_same(weight, weight.quantizer.quantize(master))
            assert torch.equal(
                weight.dequantize(torch.float32),
                weight.quantizer.quantize(master).dequantize(torch.float32),
            )
            assert weight._high_precision_init_val is None
        elif master is not None:
            assert_same(weight, master.to(weight.dtype))


@every_format
def test_training_goes_on_with_the_same_bits(name):
    """From whole objects, and from state dicts that a new model and optimizer load."""
    checkpoint = load(f"{name}-checkpoint")
    saved, optimizer = load(f"{name}-objects", weights_only=False)
    assert optimizer.param_groups[0]["params"][0] is saved[0].weight
    resumed = new_model(name)
    resumed.load_state_dict(checkpoint["model"])
    options = {key: optimizer.defaults[key] for key in ("lr", "weight_decay")}
    options |= {
        key: getattr(optimizer, key)
        for key in ("exp_avg_dtype", "exp_avg_sq_dtype", "store_param_remainders")
    }
    other = FP4Adam(resumed.parameters(), **options)
    other.load_state_dict(checkpoint["optimizer"])
    before = [{n: part.clone() for n, part in parts(p).items()} for p in saved.parameters()]
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        for a, b in zip(saved.parameters(), resumed.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator).to(a.dtype)
            b.grad = a.grad.clone()
        optimizer.step()
        other.step()
    for a, b, old in zip(saved.parameters(), resumed.parameters(), before, strict=True):
        assert_same(a, b)
        assert any(not torch.equal(part, old[n]) for n, part in parts(a).items())


@every_format
def test_weights_that_have_not_been_trained(name):
    for tensor, param in zip(
        load(f"{name}-fresh").values(), new_model(name).parameters(), strict=True
    ):
        assert type(tensor) in type(param).__mro__
        assert_same(tensor, param)
        assert torch.equal(tensor.float(), param.detach().float())


def test_values_before_quantization_and_rows():
    loaded = load("nvfp4-initial")
    weight, value = loaded["weight"], loaded["weight"].get_high_precision_init_val()
    assert loaded["same"] is weight and isinstance(weight, nn.Parameter)
    assert_same(weight, weight.quantizer.quantize(value))
    rows = loaded["rows"]
    assert rows.shape == (16, 32) and torch.equal(
        rows.dequantize(torch.float32), weight.dequantize(torch.float32)[16:]
    )
    weight.quantize_(2 * value)
    assert_same(weight, weight.quantizer.quantize(2 * value))
