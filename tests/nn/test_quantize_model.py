"""quantize_model and quantized_init: which weights they quantize, and what they keep."""

import copy
import dataclasses
import gc
import math
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Recipe,
    dequantize_model,
    is_hidden_linear,
    quantize_model,
    quantized_init,
)
from ranks import run_ranks

RECIPES = {
    "nvfp4": NVFP4Quantizer(),
    "mxfp8": MXFP8Quantizer(),
    "float8block": Float8BlockQuantizer(),
    "float8": Float8Quantizer(),
}


class Block(nn.Module):
    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    """Embedding, blocks, head; the head has a shape that no block format holds."""

    def __init__(self, dim: int = 64, vocabulary: int = 50, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


HIDDEN = [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down")]


def quantized_names(model: nn.Module) -> list[str]:
    """Names of the quantized parameters, as often as they are used."""
    params = model.named_parameters(remove_duplicate=False)
    return [name for name, param in params if isinstance(param, QuantizedTensor)]


def train(model: nn.Module) -> FP4Adam:
    optimizer = FP4Adam(model.parameters())
    model(torch.arange(10)).sum().backward()
    optimizer.step()
    return optimizer


# quantize_model


@pytest.mark.parametrize("recipe", RECIPES)
def test_hidden_linear_layers_are_quantized(recipe, device):
    model = Model().to(device)
    values = {name: param.detach().clone() for name, param in model.named_parameters()}

    assert quantize_model(model, recipe) is model

    assert quantized_names(model) == HIDDEN
    for name, param in model.named_parameters():
        assert isinstance(param, nn.Parameter)
        if name not in HIDDEN:
            assert torch.equal(param, values[name])
            continue
        quantizer = dataclasses.replace(RECIPES[recipe], columnwise=False)
        assert param.quantizer == quantizer and param.device.type == device
        expected = quantizer.quantize(values[name])
        assert torch.equal(param.dequantize(torch.float32), expected.dequantize(torch.float32))
        assert torch.equal(param.get_high_precision_init_val(), values[name])
    model(torch.arange(10, device=device)).sum().backward()
    assert all(type(param.grad) is Tensor for param in model.parameters())


def test_recipe_may_be_a_quantizer():
    quantizer = NVFP4Quantizer(columnwise=False)
    model = quantize_model(Model(), quantizer)
    assert model.blocks[0].up.weight.quantizer is quantizer


def test_unknown_recipes_are_refused():
    for call in (lambda r: quantize_model(Model(), r), lambda r: quantized_init(r).__enter__()):
        with pytest.raises(
            ValueError, match="one of nvfp4, mxfp8, mxfp4, float8block, float8 or .* got 'int4'"
        ):
            call("int4")
        with pytest.raises(TypeError, match="recipe must be a format name .* got type; pass one"):
            call(NVFP4Quantizer)


@pytest.mark.parametrize("name", ["lm_head", "head", "decoder.output_layer", "score"])
def test_output_heads_are_known_by_name(name):
    layer = nn.Linear(64, 64)
    assert not is_hidden_linear(layer, name)
    assert is_hidden_linear(layer, name + ".proj") and is_hidden_linear(layer, "")


def test_filter_chooses_among_linear_layers():
    seen = []

    def only_up(module: nn.Module, name: str) -> bool:
        seen.append((type(module), name))
        return name.endswith("up")

    model = quantize_model(Model(), "nvfp4", only_up)
    assert quantized_names(model) == [name for name in HIDDEN if "up" in name]
    assert {kind for kind, _ in seen} == {nn.Linear}
    assert [name for _, name in seen] == [n.removesuffix(".weight") for n in HIDDEN] + ["lm_head"]


def test_subclasses_and_single_layers_are_quantized():
    class MyLinear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    layer = quantize_model(MyLinear(64, 64, bias=False), "nvfp4")
    x = torch.ones(1, 64)
    assert torch.equal(layer(x), 2 * (x @ layer.weight.dequantize(torch.float32).t()))


def hooked_layer() -> tuple[nn.Linear, list[str]]:
    """A layer with all that can belong to its weight, and what its hooks have been called for."""
    layer, calls = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16), []
    weight = layer.weight
    weight.tensor_model_parallel, weight.allreduce = True, False
    weight.grad_dtype = torch.float32
    weight.grad = torch.ones(64, 64)
    layer.handle = weight.register_hook(lambda grad: calls.append("grad") or 2 * grad)
    weight.register_post_accumulate_grad_hook(lambda param: calls.append(param))
    return layer, calls


@pytest.mark.parametrize("by", ["quantize_model", "quantized_init"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_belongs_to_a_weight_stays_with_it(recipe, by):
    if by == "quantized_init":
        with quantized_init(recipe):
            layer, calls = hooked_layer()
    else:
        layer, calls = hooked_layer()
        quantize_model(layer, recipe)
    weight = layer.weight
    assert weight.tensor_model_parallel is True and weight.allreduce is False
    assert weight.dtype == torch.bfloat16 and weight.requires_grad
    assert weight.grad_dtype == torch.float32 and torch.equal(weight.grad, torch.ones(64, 64))
    layer(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
    assert calls[0] == "grad" and calls[1] is weight
    assert torch.equal(weight.grad, torch.full((64, 64), 3.0))
    layer.handle.remove()
    layer(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(weight.grad, torch.full((64, 64), 4.0)) and calls[2:] == [weight]


@pytest.mark.parametrize("is_meta", [False, True])
def test_frozen_weights_keep_no_value_before_quantization(is_meta):
    with torch.device("meta" if is_meta else "cpu"):
        layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    frozen, trained = (layer.weight for layer in layers)
    value = None if is_meta else frozen.detach().clone()
    frozen.requires_grad_(False)
    quantize_model(layers, "nvfp4")
    if is_meta:
        source = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        layers.to_empty(device="cpu").load_state_dict(source.state_dict())
        value = source[0].weight.detach()
    frozen, trained = (layer.weight for layer in layers)
    assert not frozen.requires_grad and trained.requires_grad
    assert frozen._high_precision_init_val is None
    assert trained._high_precision_init_val is not None
    expected = NVFP4Quantizer().quantize(value).dequantize(torch.float32)
    assert torch.equal(frozen.dequantize(torch.float32), expected)
    # Thawed: training starts from what is there.
    frozen.requires_grad_(True)
    optimizer = FP4Adam(layers.parameters(), lr=0.0)
    layers(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    assert torch.equal(optimizer.state[frozen]["master_param"], expected)


class MyParameter(nn.Parameter):
    pass


def another_kind(model: Model) -> None:
    model.blocks[1].down.weight = MyParameter(model.blocks[1].down.weight.detach())


def same_attribute(model: Model) -> None:
    model.blocks[1].down.weight.quantizer = "mine"


def same_property(model: Model) -> None:
    model.blocks[1].down.weight.rowwise_data = "mine"


@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (another_kind, ValueError, "'blocks.1.down' must be an ordinary .* got a MyParameter"),
        (same_attribute, ValueError, "'blocks.1.down' must have no attribute 'quantizer'"),
        (same_property, ValueError, "'blocks.1.down' must have no attribute 'rowwise_data'"),
    ],
)
def test_nothing_changes_when_something_cannot_go_along(spoil, error, match):
    model = Model()
    model.blocks[0].up.weight.register_hook(lambda grad: 2 * grad)
    spoil(model)
    params = list(model.parameters())
    before = [(dict(vars(param)), param.grad, param._backward_hooks) for param in params]
    with pytest.raises(error, match=match):
        quantize_model(model, "nvfp4")
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert before == [(dict(vars(param)), param.grad, param._backward_hooks) for param in params]


def quantize_replica(rank: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    replica = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(ValueError, match="wrapped by DistributedDataParallel .* model first"):
        quantize_model(replica, "nvfp4")
    with pytest.raises(ValueError, match="wrapped by DistributedDataParallel .* model first"):
        with quantized_init("nvfp4"):
            other = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    assert not quantized_names(replica) and not quantized_names(other)


def test_replicas_are_quantized_before_they_are_wrapped():
    run_ranks(quantize_replica, 1)


class FullyShardedDataParallel(nn.Module):
    """As FSDP1 leaves a layer, for which it needs a GPU: without its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self._fsdp_wrapped_module = nn.Linear(64, 64)
        self._fsdp_wrapped_module._parameters.pop("weight")


def test_wrappers_that_take_parameters_apart_are_named():
    averaged = AveragedModel(nn.Sequential(nn.Linear(64, 64)))
    for model, cure in (
        (FullyShardedDataParallel(), "fully_shard after quantize_model"),
        (averaged, "the model that it averages"),
    ):
        with pytest.raises(ValueError, match=f"wrapped by {type(model).__name__} yet.*{cure}"):
            quantize_model(model, "nvfp4")


def only_up(module: nn.Module, name: str) -> bool:
    return name.endswith("up")


def test_weights_that_the_same_recipe_has_quantized_are_skipped():
    model = quantize_model(Model(), "nvfp4", only_up)
    first = model.blocks[0].up.weight
    quantize_model(model, NVFP4Quantizer(columnwise=False))
    assert model.blocks[0].up.weight is first
    assert quantized_names(model) == HIDDEN


@pytest.mark.parametrize(
    "recipe", ["mxfp8", NVFP4Quantizer(), Recipe("nvfp4", emulate=True)], ids=str
)
def test_weights_that_another_recipe_has_quantized_are_refused(recipe):
    model = quantize_model(Model(), "nvfp4", only_up)
    params = list(model.parameters())
    match = "layer 'blocks.0.up' must not be quantized by another recipe, got NVFP4 "
    with pytest.raises(ValueError, match=match):
        quantize_model(model, recipe)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    # The message's cure.
    quantize_model(model, recipe, lambda m, n: is_hidden_linear(m, n) and not only_up(m, n))
    kinds = [quantize_model(nn.Linear(64, 64), r).weight.quantizer for r in ("nvfp4", recipe)]
    layers = [layer for block in model.blocks for layer in (block.up, block.down)]
    assert [layer.weight.quantizer for layer in layers] == kinds * 2


def test_blocks_keep_the_recipes_of_what_is_quantized_already():
    before = quantize_model(Block(), "float8block")
    with quantized_init("nvfp4"):
        model = nn.ModuleList([before, quantize_model(Block(), "mxfp8"), Block()])
    kinds = [type(block.up.weight.quantizer) for block in model]
    assert kinds == [Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer]


def bad_shape(model: Model) -> None:
    model.blocks[1].down = nn.Linear(130, 64)


def bad_dtype(model: Model) -> None:
    model.blocks[1].down.double()


def lazy(model: Model) -> None:
    model.blocks[1].down = nn.LazyLinear(64)


def parametrized(model: Model) -> None:
    parametrizations.weight_norm(model.blocks[1].down)


@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (
            bad_shape,
            ValueError,
            r"layer 'blocks.1.down': .* multiples of 16, got shape \(64, 130\)",
        ),
        (bad_dtype, TypeError, "layer 'blocks.1.down': weight must be .* got torch.float64"),
        (lazy, ValueError, "layer 'blocks.1.down' must be an ordinary parameter, got .* shape"),
        (parametrized, ValueError, "layer 'blocks.1.down' must be an ordinary .* got none"),
    ],
)
def test_nothing_changes_when_one_layer_cannot_be_quantized(spoil, error, match):
    model = Model()
    spoil(model)
    params = list(model.parameters())
    with pytest.raises(error, match=match):
        quantize_model(model, "nvfp4", lambda m, n: is_hidden_linear(m, n))
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    # The message's cure.
    quantize_model(model, "nvfp4", lambda m, n: is_hidden_linear(m, n) and n != "blocks.1.down")
    assert quantized_names(model) == HIDDEN[:3]


def test_tied_layers_stay_tied():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    quantize_model(model, "nvfp4")
    assert quantized_names(model) == ["0.weight", "1.weight", "2.weight"]
    assert model[0].weight is model[2].weight
    # One master weight and one update for both.
    optimizer = FP4Adam(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 5


def everything(module: nn.Module, name: str) -> bool:
    return True


def test_weights_that_others_use_stay_in_high_precision():
    # The shape of the tied head does not matter then.
    model = quantize_model(Model(tied=True), "nvfp4", everything)
    assert model.lm_head.weight is model.embedding.weight
    assert quantized_names(model) == HIDDEN

    refused = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    refused[1].weight = refused[0].weight
    with pytest.warns(UserWarning, match="no weight was quantized in Sequential, NVFP4: 0 of 1 "):
        quantize_model(refused, "nvfp4", lambda module, name: name == "0")
    assert refused[1].weight is refused[0].weight and not quantized_names(refused)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(64, 64)
            self.projection_matrix = self.proj.weight

    with pytest.warns(UserWarning, match="no weight was quantized in Shared"):
        shared = quantize_model(Shared(), "nvfp4")
    assert shared.proj.weight is shared.projection_matrix and not quantized_names(shared)


def test_meta_models_are_quantized_without_values(device):
    with torch.device("meta"):
        model = Model()
    quantize_model(model, "nvfp4")
    assert quantized_names(model) == HIDDEN
    assert all(param.is_meta for param in model.parameters())

    source = Model()
    model.to_empty(device=device).load_state_dict(source.state_dict())

    weight = model.blocks[0].up.weight
    value = source.blocks[0].up.weight.detach().to(device)
    assert torch.equal(
        weight.dequantize(torch.float32), NVFP4Quantizer().quantize(value).dequantize(torch.float32)
    )
    # As for a model that had its values from the start.
    assert torch.equal(weight.get_high_precision_init_val(), value)


def test_meta_models_take_quantized_checkpoints_without_a_copy():
    source = quantize_model(Model(), "nvfp4")
    with torch.device("meta"):
        model = quantize_model(Model(), "nvfp4")
    model.to_empty(device="cpu").load_state_dict(source.state_dict())
    assert model.blocks[0].up.weight._high_precision_init_val is None
    model(torch.arange(10))


# The value before quantization


def test_masters_start_from_the_value_before_quantization():
    model = Model()
    value = model.blocks[0].up.weight.detach().clone()
    quantize_model(model, "nvfp4")
    weight = model.blocks[0].up.weight
    optimizer = FP4Adam(model.parameters(), lr=0.0)
    model(torch.arange(10)).sum().backward()
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["master_param"], value)
    assert weight._high_precision_init_val is None


def test_value_before_quantization_is_carried_by_conversions(device):
    model = Model()
    value = model.blocks[0].up.weight.detach().clone()
    quantize_model(model, "nvfp4").to(device).bfloat16()
    weight = model.blocks[0].up.weight
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight.get_high_precision_init_val().cpu(), value)
    copied = copy.deepcopy(model).blocks[0].up.weight
    assert torch.equal(copied.get_high_precision_init_val().cpu(), value)


@pytest.mark.parametrize("source", [None, "nvfp4", "mxfp8"])
def test_value_before_quantization_is_replaced_by_loading(source):
    model, other = quantize_model(Model(), "nvfp4"), Model()
    value = other.blocks[0].up.weight.detach().clone()
    if source:
        quantize_model(other, source)
    model.load_state_dict(other.state_dict())
    kept = model.blocks[0].up.weight._high_precision_init_val
    assert kept is None if source else torch.equal(kept, value)


def test_initialization_after_quantization_is_what_training_starts_from():
    model = quantize_model(Model(), "nvfp4")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)
    weight = model.blocks[0].up.weight
    value = weight.get_high_precision_init_val().clone()
    assert value.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(
        weight.dequantize(torch.float32), weight.quantizer.quantize(value).dequantize(torch.float32)
    )


# quantized_init


def test_everything_built_inside_is_quantized_at_the_end():
    torch.manual_seed(0)
    expected = quantize_model(Model(), "nvfp4")
    torch.manual_seed(0)
    with quantized_init("nvfp4"):
        model = Model()
        assert not quantized_names(model)
    assert quantized_names(model) == HIDDEN
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert type(a) is type(b) and torch.equal(a, b)
        if isinstance(a, QuantizedTensor):
            init_val = b._high_precision_init_val
            assert torch.equal(a._high_precision_init_val, init_val)
    train(model)


def test_initialization_runs_in_high_precision():
    with quantized_init("nvfp4"):
        model = Model()
        for name, param in model.named_parameters():
            if "up" in name:
                nn.init.orthogonal_(param)
                # In place, which a quantized weight would refuse.
                with torch.no_grad():
                    param.mul_(3).clamp_(-1, 1)
                    param[0] = 0.5
    value = model.blocks[0].up.weight.get_high_precision_init_val()
    assert value[0].eq(0.5).all() and value.abs().max() <= 1
    assert quantized_names(model) == HIDDEN


def test_no_hook_remains():
    hooks = (
        nn_module._global_parameter_registration_hooks,
        nn_module._global_module_registration_hooks,
    )
    before = [*map(dict, hooks)]
    with quantized_init("nvfp4"):
        assert all(len(now) > len(then) for now, then in zip(hooks, before, strict=True))
    with pytest.raises(KeyError), quantized_init("nvfp4"):
        raise KeyError
    with pytest.raises(ValueError), quantized_init("nvfp4", everything):
        model = Model()
    assert [*map(dict, hooks)] == before
    assert not quantized_names(model) and not quantized_names(Model())


def test_exception_inside_leaves_the_models_alone():
    with pytest.raises(KeyError), quantized_init("nvfp4"):
        model = Model()
        raise KeyError
    assert not quantized_names(model)


def test_nothing_changes_when_one_of_several_models_cannot_be_quantized():
    match = "layer 'lm_head': .* got shape"
    with pytest.raises(ValueError, match=match), quantized_init("nvfp4", everything):
        fine, bad = nn.Linear(64, 64), Model()
    assert not quantized_names(fine) and not quantized_names(bad)


def test_blocks_may_be_nested():
    with quantized_init("nvfp4"):
        first = Block()
        with quantized_init("mxfp8"):
            second = Block()
        assert second.up.weight.quantizer == MXFP8Quantizer(columnwise=False)
        assert not quantized_names(first)
        model = nn.ModuleList([first, second])
    assert model[0].up.weight.quantizer == NVFP4Quantizer(columnwise=False)
    assert model[1].up.weight.quantizer == MXFP8Quantizer(columnwise=False)


def test_weights_keep_the_codes_that_matmuls_read():
    both = Recipe("mxfp8", activations=True, gradients=True)
    for recipe, columnwise in (
        ("mxfp8", False),
        (Recipe("mxfp8", activations=True), False),
        (Recipe("mxfp8", activations="fake"), False),
        (both, True),
        (MXFP8Quantizer(), True),
        (Recipe(MXFP8Quantizer()), True),
    ):
        layer = quantize_model(nn.Linear(64, 64), recipe)
        assert layer.weight.quantizer.columnwise is columnwise, recipe
        assert (layer.weight.columnwise_data is not None) is columnwise
        layer(torch.ones(2, 64)).sum().backward()


def test_models_may_be_built_by_functions():
    @quantized_init("nvfp4")
    def build() -> nn.Module:
        return Model()

    assert quantized_names(build()) == quantized_names(build()) == HIDDEN


def test_discarded_modules_do_not_hide_others():
    with quantized_init("nvfp4"):
        kept = []
        for _ in range(50):
            # Python gives the address of what is thrown away to what comes next.
            nn.Sequential(nn.Linear(16, 16))
            kept.append(nn.Linear(16, 16))
        gc.collect()
        # A shape that does not matter, as the layer is gone.
        nn.Linear(3, 3)
    assert all(isinstance(layer.weight, QuantizedTensor) for layer in kept)


def test_filter_sees_names_from_the_outermost_module():
    seen = []
    with pytest.warns(UserWarning, match="no weight was quantized in") as caught:
        with quantized_init("nvfp4", lambda module, name: bool(seen.append(name))):
            model = Model()
            layer = nn.Linear(16, 16)
    assert [warning.filename for warning in caught] == [__file__] * 2
    assert seen == [name.removesuffix(".weight") for name in HIDDEN] + ["lm_head", ""]
    assert not quantized_names(model) and not quantized_names(layer)


def test_copies_and_inserted_modules_are_built_inside_too():
    with quantized_init("nvfp4"):
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2, enable_nested_tensor=False
        )
        layers = nn.ModuleList([nn.Linear(16, 16)])
        layers.insert(0, nn.Linear(32, 32))
        sequence = nn.Sequential(nn.Linear(16, 16))
        sequence.insert(0, copy.deepcopy(sequence[0]))
    assert len(quantized_names(encoder)) == 6
    assert quantized_names(layers) == quantized_names(sequence) == ["0.weight", "1.weight"]


def test_models_from_before_keep_their_layers():
    model, other = Model(), nn.Linear(64, 64)
    with quantized_init("nvfp4"):
        model.extra = nn.Linear(64, 64)
        model.head = nn.Linear(64, 64)
        model.blocks.append(Block())
        other.weight = nn.Parameter(torch.zeros(64, 64))
    expected = ["blocks.2.up.weight", "blocks.2.down.weight", "extra.weight"]
    assert quantized_names(model) == expected
    assert not quantized_names(other)


def test_ties_between_models_are_kept():
    with quantized_init("nvfp4"):
        embedding, head = nn.Embedding(32, 64), nn.Linear(64, 32, bias=False)
        head.weight = embedding.weight
        first, second = nn.Linear(64, 64), nn.Linear(64, 64)
        second.weight = first.weight
    assert head.weight is embedding.weight and not quantized_names(head)
    assert first.weight is second.weight and quantized_names(first)


def test_models_on_the_meta_device():
    with torch.device("meta"), quantized_init("nvfp4"):
        model = Model()
    assert quantized_names(model) == HIDDEN and model.blocks[0].up.weight.is_meta


def test_memory_of_a_quantized_model_is_that_of_its_formats():
    model = quantize_model(nn.Linear(512, 512, bias=False), "nvfp4")
    assert model.weight.nbytes_stored < 0.26 * 4 * math.prod(model.weight.shape)


# Starts that cannot train


class Odd(nn.Module):
    """A network for ten classes, whose head and first layer no format can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden = nn.Linear(84, 250), nn.Linear(256, 256)
        self.ten = nn.Linear(256, 10)


def test_layers_that_do_not_fit_stay_with_one_warning():
    model = Odd()
    with pytest.warns(UserWarning, match="2 layers .* them: first, ten. .*250") as w:
        quantize_model(model, "nvfp4")
    assert len(w) == 1
    assert quantized_names(model) == ["hidden.weight"]
    with (
        pytest.warns(UserWarning, match="2 layers stay in high precision"),
        quantized_init("nvfp4"),
    ):
        model = Odd()
    assert quantized_names(model) == ["hidden.weight"]


@pytest.mark.parametrize(
    ("names", "match"),
    [(["first", "hidden", "ten"], "'first': .*250"), (["hidden", "ten"], "'ten': .*10, 256")],
    ids=["first", "last"],
)
def test_layers_that_a_filter_selects_have_to_fit(names, match):
    model = Odd()
    with pytest.raises(ValueError, match=f"layer {match}"):
        quantize_model(model, "nvfp4", lambda module, name: name in names)
    assert not quantized_names(model)


@pytest.mark.parametrize(
    "module", [nn.LSTM(64, 64), nn.MultiheadAttention(64, 8), nn.Conv2d(64, 64, 3)], ids=repr
)
def test_less_than_half_of_the_matrices_is_said(module):
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 32), module)
    with pytest.warns(UserWarning, match="only .*% of the elements of matrices are quantized") as w:
        quantize_model(model, "mxfp8")
    assert len(w) == 1
    model = nn.Sequential(nn.Linear(64, 32), module)
    quantize_model(model, "mxfp8", lambda module, name: isinstance(module, nn.Linear))


def test_embeddings_and_heads_do_not_count():
    model = nn.ModuleDict({"wte": nn.Embedding(5000, 64), "lm_head": nn.Linear(64, 5000)})
    model["tied"] = nn.Linear(64, 5000, bias=False)
    model["tied"].weight = model["wte"].weight
    model["up"] = nn.Linear(64, 64)
    quantize_model(model, "mxfp8")
    assert quantized_names(model) == ["up.weight"]


def test_an_optimizer_from_before_trains_what_one_from_after_does():
    losses = []
    for is_before, steps in ((True, 0), (False, 0), (True, 2)):
        torch.manual_seed(0)
        model, x = Model(), torch.arange(4)
        optimizer = FP4Adam([torch.zeros(2, requires_grad=True), *model.parameters()], lr=1e-3)
        for _ in range(steps):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        old = [*model.parameters()]
        quantize_model(model, "nvfp4")
        assert all(a is b for a, b in zip(old, model.parameters(), strict=True))
        if not is_before:
            optimizer = FP4Adam(model.parameters(), lr=1e-3)
        run = []
        for _ in range(3):
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.append(loss.item())
        losses.append(run)
    assert losses[0] == losses[1] and losses[2][2] < losses[2][0] < losses[0][0]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("steps", [0, 1])
def test_other_optimizers_from_before_meet_the_refusal_of_the_tensor(kind, steps):
    model = Model()
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.arange(4)).sum().backward()
        optimizer.step()
    quantize_model(model, "nvfp4")
    codes = [*model.parameters()][1].detach().dequantize()
    model(torch.arange(4)).sum().backward()
    with pytest.raises(NotImplementedError, match="must not write into a NVFP4Tensor: .*FP4Adam"):
        optimizer.step()
    assert torch.equal([*model.parameters()][1].detach().dequantize(), codes)


@pytest.mark.parametrize("change", [lambda m: quantize_model(m, "mxfp8"), dequantize_model])
def test_weights_in_use_are_refused_and_nothing_changes(change):
    model = Model()
    if change is dequantize_model:
        quantize_model(model, "nvfp4")
    weight = model.blocks[1].down.weight
    graph, reference = model(torch.arange(4)), weakref.ref(weight)
    kinds = [type(param) for param in model.parameters()]
    for in_use in ("graph", "reference"):
        with pytest.raises(RuntimeError, match=r"'blocks\.\d\..*' must be free .*no_grad"):
            change(model)
        assert kinds == [type(param) for param in model.parameters()]
        if in_use == "graph":
            del graph
    del reference
    change(model)
    assert kinds != [type(param) for param in model.parameters()]


def test_compiled_models_notice():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(3, 64)
    compiled(x).sum().backward()
    quantize_model(model, "nvfp4")
    assert torch.equal(compiled(x), model(x))


FORGOTTEN = """
import warnings, torch, fp4adam
warnings.simplefilter("error", UserWarning)
model = torch.nn.Linear(64, 64)
fp4adam.FP4Adam([model.bias])
fp4adam.FusedAdam(model.parameters())
try:
    fp4adam.FP4Adam(model.parameters())
    raise SystemExit("nothing was said")
except UserWarning as warning:
    assert "no quantized weight" in str(warning)
fp4adam.quantize_model(model, "nvfp4")
fp4adam.FP4Adam(model.parameters())
fp4adam.FP4Adam(torch.nn.Linear(64, 4).parameters())  # adapters beside a quantized base
"""


def test_a_model_that_nobody_has_quantized_is_said():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", FORGOTTEN], check=True, env=environment)
