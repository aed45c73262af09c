"""dequantize_model: plain parameters of the same values, and all that belongs to the old ones."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fp4adam import (
    FP4Adam,
    QuantizedTensor,
    dequantize_model,
    is_hidden_linear,
    quantize_model,
    summary,
)
from helpers import assert_identical
from ranks import all_ranks, run_ranks

FORMATS = ("nvfp4", "mxfp8", "float8block")


def make(recipe="nvfp4", dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64, bias=False))
    return quantize_model(model.to(dtype), recipe)


def value(weight: Tensor) -> Tensor:
    return weight.detach().dequantize(weight.dtype)


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_dtypes_and_outputs_stay(recipe, dtype, device):
    model = make(recipe, dtype).to(device)
    x = torch.randn(4, 64, dtype=dtype, device=device)
    expected, values = model(x).detach(), [value(model[i].weight) for i in (0, 2)]
    for layer in (model[0], model[2]):
        layer.weight.tensor_model_parallel = True
    assert dequantize_model(model) is model
    for layer, was in zip((model[0], model[2]), values, strict=True):
        assert type(layer.weight) is nn.Parameter and layer.weight.requires_grad
        assert layer.weight.tensor_model_parallel
        assert_identical(layer.weight.detach(), was)
    assert_identical(model(x).detach(), expected)
    assert not summary(model).quantized and "NVFP4" not in str(model)
    assert dequantize_model(model) is model  # nothing to do
    quantize_model(model, recipe)
    assert len(summary(model).quantized) == 2


def test_masters_are_not_what_is_written():
    model = make()
    optimizer = FP4Adam(model.named_parameters(), lr=1e-4)
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    codes = value(model[0].weight)
    dequantize_model(model)
    assert_identical(model[0].weight.detach(), codes)
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()  # goes on with the plain weight
    assert not torch.equal(model[0].weight, codes)


def test_attributes_hooks_gradients_and_ties_go_along():
    model = make()
    model[2].weight = model[0].weight
    weight = model[0].weight
    weight.tensor_model_parallel, seen = True, []
    weight.register_hook(lambda grad: seen.append("grad"))
    handle = weight.register_post_accumulate_grad_hook(lambda param: seen.append("accumulated"))
    weight.grad = torch.ones(64, 64)
    dequantize_model(model)
    assert model[2].weight is model[0].weight
    plain = model[0].weight
    assert plain.tensor_model_parallel and torch.equal(plain.grad, torch.ones(64, 64))
    assert not {"quantizer", "_shared", "_start"} & vars(plain).keys()
    model(torch.randn(2, 64)).sum().backward()
    assert seen.count("accumulated") == 1 and "grad" in seen
    handle.remove()
    copy.deepcopy(model)(torch.randn(2, 64)).sum().backward()


def test_some_modules_and_frozen_ones():
    model = make().requires_grad_(False)
    dequantize_model(model, lambda module, name: name == "2")
    assert isinstance(model[0].weight, QuantizedTensor)
    assert type(model[2].weight) is nn.Parameter and not model[2].weight.requires_grad
    dequantize_model(model[0])
    assert not summary(model).quantized


def test_what_is_refused():
    model = make()
    model[2].weight = model[0].weight
    with pytest.raises(ValueError, match=r"'2.weight' must be selected by filter like the modules"):
        dequantize_model(model, lambda module, name: name == "0")
    assert isinstance(model[0].weight, QuantizedTensor)
    with pytest.raises(TypeError, match="model must be an nn.Module, got a?"):
        dequantize_model(model[0].weight)
    with pytest.raises(TypeError, match="filter must be a function"):
        dequantize_model(model, "0")


def refused_on_ranks(rank: int) -> None:
    with pytest.raises(ValueError, match="must not be wrapped by DistributedDataParallel"):
        dequantize_model(DistributedDataParallel(make()))
    model = make()
    fully_shard(model, mesh=all_ranks())
    with pytest.raises(ValueError, match="'0.weight' must be whole .* before fully_shard"):
        dequantize_model(model)


def test_wrapped_models_are_refused():
    run_ranks(refused_on_ranks, 2)


# Adapters


class Adapted(nn.Module):
    """A layer around another one, as PEFT has them."""

    adapter_layer_names = ("lora_A", "lora_B", "lora_dropout", "not_there")

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(64, 32, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(32, 64, bias=False)})
        self.lora_dropout = nn.ModuleDict()

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


@pytest.mark.parametrize("filter", [None, lambda module, name: True])
def test_adapters_are_never_quantized(filter):
    model = nn.Sequential(Adapted(nn.Linear(64, 64)), nn.Sequential(Adapted(nn.Linear(64, 64))))
    quantize_model(model, "nvfp4", filter)
    names = [p.name for p in summary(model).quantized]
    assert names == ["0.base_layer.weight", "1.0.base_layer.weight"]


def test_wrapped_heads_are_heads():
    for name in ("base_layer", "original_module", "modules_to_save.default"):
        assert not is_hidden_linear(nn.Linear(1, 1), f"model.lm_head.{name}")
        assert is_hidden_linear(nn.Linear(1, 1), f"model.q_proj.{name}")


@pytest.mark.parametrize("freeze", ["before", "requires_grad_", "attribute"])
def test_frozen_weights_keep_no_second_copy(freeze):
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    quantize_model(model.requires_grad_(freeze != "before"), "nvfp4")
    alias = nn.Parameter(model[0].weight.detach(), False)  # does not freeze the weight
    assert alias._high_precision_init_val is model[0].weight._high_precision_init_val
    if freeze == "requires_grad_":
        model.requires_grad_(False)
    elif freeze == "attribute":
        for param in model.parameters():
            param.requires_grad = False
    assert summary(model).total("init_nbytes") == 0
    for param in model.parameters():
        assert not param.requires_grad and param._high_precision_init_val is None
    model.requires_grad_()
    assert all(param.requires_grad for param in model.parameters())
    optimizer = FP4Adam(model.parameters(), lr=1e-3)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
