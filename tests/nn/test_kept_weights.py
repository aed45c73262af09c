"""What is made of a weight is made once for all microbatches, and again when it has changed."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from fp4adam import FP4Adam, QuantizedTensor, Recipe, kept_weights, quantize_model
from fp4adam.nn import operand

FORMATS = ("nvfp4", "mxfp8", "float8block")
every_format = pytest.mark.parametrize("weights", FORMATS)


@pytest.fixture
def read(monkeypatch) -> list[weakref.ref]:
    """A reference to every dequantized weight from now on."""
    made, original = [], QuantizedTensor._read

    def watched(*args, **kwargs) -> Tensor:
        value = original(*args, **kwargs)
        made.append(weakref.ref(value))
        return value

    monkeypatch.setattr(QuantizedTensor, "_read", watched)
    return made


def layer_in(recipe) -> nn.Linear:
    torch.manual_seed(0)
    return quantize_model(nn.Linear(128, 128), recipe)


def microbatches(layer: nn.Linear, n: int = 3) -> Tensor:
    """Outputs of ``n`` forward and backward passes."""
    torch.manual_seed(1)
    outputs = []
    for _ in range(n):
        y = layer(torch.randn(4, 128, requires_grad=True))
        y.pow(2).sum().backward()
        outputs.append(y.detach())
    return torch.cat(outputs)


@every_format
def test_each_weight_is_dequantized_once_per_step(weights, read):
    kept, plain = layer_in(weights), layer_in(weights)
    optimizers = [FP4Adam(layer.parameters(), lr=1e-2) for layer in (kept, plain)]
    counts = []
    for _ in range(2):
        with kept_weights():
            y = microbatches(kept)
            counts.append(len(read))
        assert torch.equal(y, microbatches(plain))
        assert torch.equal(kept.weight.grad, plain.weight.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        read.clear()
    assert counts == [1, 1]


def test_any_write_makes_it_anew(read):
    layer = layer_in("nvfp4")
    optimizer = FP4Adam(layer.parameters(), lr=1e-2)
    other = layer_in("nvfp4").weight.detach()
    writes = [
        lambda: optimizer.step(),
        lambda: layer.weight.quantize_(torch.randn(128, 128)),
        lambda: layer.weight.detach().copy_(torch.randn(128, 128)),
        lambda: layer.weight.detach()[:16].copy_(torch.randn(16, 128)),
        lambda: setattr(layer.weight, "data", other),
        lambda: layer.bfloat16().float(),
        lambda: layer.load_state_dict(layer_in("nvfp4").state_dict()),
    ]
    with kept_weights():
        microbatches(layer)
        for write in writes:
            write()
            y, expected = (microbatches(layer, 1) for _ in range(2))
            torch.manual_seed(1)
            x = torch.randn(4, 128)
            dense = layer.weight.dequantize(torch.float32)
            assert torch.equal(y, torch.nn.functional.linear(x, dense, layer.bias))
            assert torch.equal(y, expected)


def test_rows_of_a_weight_are_kept_apart():
    weight = layer_in("nvfp4").weight
    x, parts = torch.randn(4, 128), [slice(None), slice(64), slice(64, None)]
    optimizer = FP4Adam([weight], lr=1e-2)
    with kept_weights():
        for _ in range(2):
            for part in parts + parts:
                y = torch.nn.functional.linear(x, weight.detach()[part])
                assert torch.equal(
                    y, torch.nn.functional.linear(x, weight.dequantize(torch.float32)[part])
                )
            weight.grad = torch.ones(128, 128)
            optimizer.step()


def test_it_is_freed_at_the_end(read):
    layer = layer_in("nvfp4")
    with kept_weights():
        microbatches(layer)
        with kept_weights():
            microbatches(layer)
        gc.collect()
        assert [reference() is None for reference in read] == [False]
    gc.collect()
    assert read[0]() is None
    microbatches(layer, 1)
    assert len(read) == 3 and read[-1]() is None


def test_blocks_of_threads_end_in_any_order(read):
    layer, first, second = layer_in("nvfp4"), kept_weights(), kept_weights()
    first.__enter__()
    second.__enter__()
    microbatches(layer, 1)
    first.__exit__(None, None, None)
    microbatches(layer, 1)
    assert len(read) == 1
    second.__exit__(None, None, None)
    gc.collect()
    assert read[0]() is None


@every_format
def test_operands_of_weights_are_kept_as_well(weights, monkeypatch):
    layer, made = layer_in(Recipe(weights, activations=True, gradients=True)), []
    kind = type(operand.FORMATS[type(layer.weight.quantizer)])
    original = kind.of_weight
    monkeypatch.setattr(kind, "of_weight", lambda *args: made.append(args[2]) or original(*args))
    expected = microbatches(layer)
    made.clear()
    with kept_weights():
        assert torch.equal(microbatches(layer), expected)
    assert made == ["rowwise", "columnwise"]
