"""quantize_model, dequantize_model and quantized_init: which weights they take, what they keep."""

import copy
import dataclasses
import gc
import warnings
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.modules import module as nn_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from fp4adam import (
    Float8BlockQuantizer,
    FP4Adam,
    FusedAdam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Recipe,
    dequantize_model,
    is_hidden_linear,
    quantize_model,
    quantized_init,
    summary,
)
from helpers import RECIPES, assert_identical, train, value_of
from ranks import all_ranks, run_ranks

every_format = pytest.mark.parametrize("recipe", RECIPES)


def make_block() -> nn.Sequential:
    layers = {"norm": nn.LayerNorm(64), "up": nn.Linear(64, 128, bias=False)}
    return nn.Sequential(OrderedDict(layers | {"relu": nn.ReLU(), "down": nn.Linear(128, 64)}))


def make_model() -> nn.Sequential:
    """Embedding, blocks, head; the head has a shape that no block format holds."""
    layers = {
        "embedding": nn.Embedding(50, 64),
        "blocks": nn.Sequential(make_block(), make_block()),
    }
    layers |= {"norm": nn.LayerNorm(64), "lm_head": nn.Linear(64, 50, bias=False)}
    return nn.Sequential(OrderedDict(layers))


HIDDEN = [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down")]


def quantized_names(model: nn.Module) -> list[str]:
    """Names of the quantized parameters, as often as they are used."""
    params = model.named_parameters(remove_duplicate=False)
    return [name for name, param in params if isinstance(param, QuantizedTensor)]


def only_up(module: nn.Module, name: str) -> bool:
    return name.endswith("up")


def but(end: str):
    """Hidden layers whose names do not end so."""
    return lambda module, name: is_hidden_linear(module, name) and not name.endswith(end)


def step(model: nn.Module, **options) -> FP4Adam:
    optimizer = FP4Adam(model.parameters(), **options)
    x = torch.arange(10) if isinstance(model[0], nn.Embedding) else torch.ones(2, 64)
    model(x).sum().backward()
    optimizer.step()
    return optimizer


@every_format
def test_hidden_linear_layers_are_quantized_and_back(recipe, device):
    model = make_model().to(device)
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert quantize_model(model, recipe) is model
    assert quantized_names(model) == HIDDEN
    for name, param in model.named_parameters():
        if name not in HIDDEN:
            assert torch.equal(param, values[name])
            continue
        quantizer = dataclasses.replace(RECIPES[recipe], columnwise=False)
        assert param.quantizer == quantizer and param.device.type == device
        assert torch.equal(value_of(param), value_of(quantizer.quantize(values[name])))
        assert torch.equal(param.get_high_precision_init_val(), values[name])
    tokens = torch.arange(10, device=device)
    y = model(tokens)
    y.sum().backward()
    assert all(type(param.grad) is Tensor for param in model.parameters())
    for layer in model.modules():  # some have their bias first
        layer._parameters = dict(reversed(layer._parameters.items()))
    expected, y = [value_of(p) for p in model.parameters()], y.detach()
    assert dequantize_model(model) is model and not summary(model).quantized
    assert all(type(param) is nn.Parameter and param.requires_grad for param in model.parameters())
    assert_identical([value_of(p) for p in model.parameters()], expected)
    assert torch.equal(model(tokens), y) and "weight=" not in str(model)
    dequantize_model(model)  # nothing to do
    assert quantized_names(quantize_model(model, recipe)) == HIDDEN


HEADS = """
    lm_head head decoder.output_layer score predictions.decoder lm_head.base_layer lm_head.decoder
    lm_head.original_module lm_head.modules_to_save.default qa_outputs cls.seq_relationship
    classifier classifier.out_proj bert.classification_head.out_proj cls.predictions.decoder
"""
HIDDEN_LAYERS = """
    q_proj q_proj.base_layer layers.0.self_attn.out_proj classifier.dense decoder lm_head.dense
    predictions.out_proj model.decoder.layers.0.fc1 cls.predictions.transform.dense
"""


def test_output_heads_are_known_by_name():
    layer = nn.Linear(64, 64)
    for name in HEADS.split():
        assert not is_hidden_linear(layer, name) and is_hidden_linear(layer, name + ".proj")
    assert all(is_hidden_linear(layer, name) for name in ("", *HIDDEN_LAYERS.split()))


def test_weights_keep_the_codes_that_matmuls_read():
    rowwise = ["mxfp8", *(Recipe("mxfp8", activations=each) for each in (True, "fake"))]
    both = (Recipe("mxfp8", True, True), MXFP8Quantizer(), Recipe(MXFP8Quantizer()))
    for recipe in (*rowwise, *both):
        layer, columnwise = quantize_model(nn.Linear(64, 64), recipe), recipe not in rowwise
        assert layer.weight.quantizer.columnwise is columnwise, recipe
        assert layer.weight.quantizer.multiplies_codes == bool(getattr(recipe, "activations", 0))
        assert (layer.weight.columnwise_data is not None) is columnwise
        layer(torch.ones(2, 64)).sum().backward()


def test_weights_that_others_use_stay_in_high_precision():
    # The shape of the tied head does not matter then.
    model = make_model()
    model.lm_head.weight = model.embedding.weight
    for block in model.blocks:
        block.adapter_layer_names = ("lora_A", "up")  # as layers of PEFT
    quantize_model(model, "nvfp4", lambda *_: True)
    assert model.lm_head.weight is model.embedding.weight
    assert quantized_names(model) == HIDDEN[1::2]

    refused = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    refused[1].weight = refused[0].weight
    with pytest.warns(UserWarning, match="no weight was quantized in Sequential, NVFP4: 0 of 1 "):
        quantize_model(refused, "nvfp4", lambda module, name: name == "0")
    shared = nn.Sequential(nn.Linear(64, 64))
    shared.projection_matrix = shared[0].weight
    with pytest.warns(UserWarning, match="no weight was quantized in Sequential"):
        quantize_model(shared, "nvfp4")
    for model in (refused, shared):
        assert len({*model.parameters(), model[0].weight}) == len([*model.parameters()])
        assert not quantized_names(model)


def test_tied_layers_stay_tied():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    quantize_model(model, "nvfp4")
    assert quantized_names(model) == ["0.weight", "1.weight", "2.weight"]
    assert model[0].weight is model[2].weight
    assert len(step(model).state) == 5  # one master and one update for both
    with pytest.raises(ValueError, match=r"'0.weight' must be selected by filter like the modules"):
        dequantize_model(model, lambda module, name: name in ("1", "2"))
    assert quantized_names(model) == ["0.weight", "1.weight", "2.weight"]
    dequantize_model(model)
    assert model[0].weight is model[2].weight and not quantized_names(model)


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


@pytest.mark.parametrize("by", ["quantize_model", "quantized_init", "dequantize_model"])
@every_format
def test_what_belongs_to_a_weight_stays_with_it(recipe, by):
    build = quantized_init(recipe)(hooked_layer) if by == "quantized_init" else hooked_layer
    layer, calls = build()
    weight = layer.weight
    if by != "quantized_init":
        quantize_model(layer, recipe)
    if by == "dequantize_model":
        dequantize_model(layer)
        assert not {"quantizer", "_shared", "_start"} & vars(weight).keys()
    assert layer.weight is weight
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
    source = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    value, layers = source[0].weight.detach().clone(), copy.deepcopy(source)
    if is_meta:
        layers.to("meta")
    layers[0].weight.requires_grad_(False)
    quantize_model(layers, "nvfp4")
    if is_meta:
        layers.to_empty(device="cpu").load_state_dict(source.state_dict())
    frozen, trained = (layer.weight for layer in layers)
    assert not frozen.requires_grad and trained.requires_grad
    assert frozen._high_precision_init_val is None
    assert trained._high_precision_init_val is not None
    expected = value_of(NVFP4Quantizer().quantize(value))
    assert torch.equal(value_of(frozen), expected)
    # Thawed: training starts from what is there.
    frozen.requires_grad_(True)
    assert torch.equal(step(layers, lr=0.0).state[frozen]["master_param"], expected)


def test_weights_that_are_frozen_later_free_it():
    for freeze in (nn.Module.requires_grad_, lambda m, on: setattr(m.weight, "requires_grad", on)):
        model = quantize_model(nn.Linear(64, 64, bias=False), "nvfp4")
        weight = model.weight
        alias = nn.Parameter(weight.detach(), False)  # does not freeze the weight
        freeze(model, True)
        assert alias._high_precision_init_val is weight._high_precision_init_val is not None
        freeze(model, False)
        assert weight._high_precision_init_val is None and not weight.requires_grad
        assert not dequantize_model(model).weight.requires_grad


def test_masters_start_from_the_value_before_quantization_wherever_it_goes(device):
    model = make_model()
    value = model.blocks[0].up.weight.detach().clone()
    quantize_model(model, "nvfp4").to(device).bfloat16()
    for each in (copy.deepcopy(model), model):
        weight = each.blocks[0].up.weight
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight.get_high_precision_init_val().cpu(), value)
    model.cpu()
    optimizer = step(model, lr=0.0)
    assert torch.equal(optimizer.state[weight]["master_param"], value)
    assert weight._high_precision_init_val is None
    codes = value_of(weight)
    dequantize_model(model)  # not to the master
    assert_identical(weight.detach(), codes.bfloat16())
    model(torch.arange(10)).sum().backward()
    optimizer.step()  # goes on with the plain weight


@pytest.mark.parametrize("source", ["plain", "quantized"])
@every_format
def test_meta_models_are_quantized_without_values(recipe, source, device):
    with torch.device("meta"):
        model = quantize_model(make_model(), recipe)
    with torch.device("meta"), quantized_init(recipe):
        built = make_model()
    for each in (model, built):
        assert quantized_names(each) == HIDDEN and all(p.is_meta for p in each.parameters())
    other = make_model()
    value = other.blocks[0].up.weight.detach().clone().to(device)
    if source == "quantized":
        quantize_model(other, recipe)
    model.to_empty(device=device).load_state_dict(other.state_dict())
    weight = model.blocks[0].up.weight
    assert torch.equal(value_of(weight), value_of(RECIPES[recipe].quantize(value)))
    # As for a model that had its values from the start; there is no copy of codes.
    kept = weight._high_precision_init_val
    assert kept is None if source == "quantized" else torch.equal(kept, value)
    model(torch.arange(10, device=device))


MyParameter = type("MyParameter", (nn.Parameter,), {})
# As FSDP1 leaves a layer, for which it needs a GPU: without its parameter.
FullyShardedDataParallel = type("FullyShardedDataParallel", (nn.Module,), {})

# What is done to the layer, and what is said of it then.
REFUSED = {
    " must be an ordinary .* got a MyParameter": (
        lambda layer: setattr(layer, "weight", MyParameter(torch.ones(64, 128)))
    ),
    " must have no attribute 'rowwise_data'": (
        lambda layer: setattr(layer.weight, "rowwise_data", "mine")
    ),
    " must have no attribute 'quantizer'": lambda m: vars(m.weight).update(a=0, quantizer=0),
    " must be an ordinary .* got none": parametrizations.weight_norm,
}


@pytest.mark.parametrize(("said", "change"), REFUSED.items())
def test_nothing_changes_when_one_layer_cannot_be_quantized(said, change):
    model = make_model()
    change(model.blocks[1].down)
    model.blocks[0].up.weight.register_hook(lambda grad: 2 * grad)
    params = list(model.parameters())
    before = [(dict(vars(param)), param.grad, param._backward_hooks) for param in params]
    with pytest.raises(ValueError, match=f"layer 'blocks.1.down'{said}"):
        quantize_model(model, "nvfp4", is_hidden_linear)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert before == [(dict(vars(param)), param.grad, param._backward_hooks) for param in params]
    # The message's cure.
    assert quantized_names(quantize_model(model, "nvfp4", but("blocks.1.down"))) == HIDDEN[:3]


def test_arguments_that_are_refused():
    for call, args, error, match in (
        (quantized_init, ("int4",), ValueError, "one of nvfp4, mxfp8, mxfp4, .* got 'int4'"),
        (quantized_init, ("nvfp4", "0"), TypeError, "filter must be a function"),
        (dequantize_model, (nn.Linear(2, 2), "0"), TypeError, "filter must be a function"),
        (dequantize_model, (torch.ones(2),), TypeError, "model must be an nn.Module, got Tensor"),
    ):
        with pytest.raises(error, match=match), call(*args):
            pass
    for model, cure in (
        (FullyShardedDataParallel(), "fully_shard after quantize_model"),
        (AveragedModel(nn.Sequential(nn.Linear(64, 64))), "the model that it averages"),
    ):
        with pytest.raises(ValueError, match=f"wrapped by {type(model).__name__} yet.*{cure}"):
            quantize_model(model, "nvfp4")


def refuse_wrapped(rank: int) -> None:
    match = "wrapped by DistributedDataParallel .* model first"
    replica = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64)))
    with pytest.raises(ValueError, match=match):
        quantize_model(replica, "nvfp4")
    with pytest.raises(ValueError, match=match), quantized_init("nvfp4"):
        other = DistributedDataParallel(nn.Linear(64, 64))
    assert not quantized_names(replica) and not quantized_names(other)
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(ValueError, match=match):
        dequantize_model(DistributedDataParallel(quantize_model(model, "nvfp4")))
    model = quantize_model(nn.Sequential(nn.Linear(64, 64)), "nvfp4")
    fully_shard(model, mesh=all_ranks())
    with pytest.raises(ValueError, match="'0.weight' must be whole .* before fully_shard"):
        dequantize_model(model)


def test_models_are_quantized_before_they_are_wrapped():
    run_ranks(refuse_wrapped, 1)


@pytest.mark.parametrize(
    ("recipe", "described"),
    [
        ("mxfp8", r"MXFP8 \(columnwise=False\)"),
        (NVFP4Quantizer(), "NVFP4"),
        (Recipe("nvfp4", emulate=True), r"NVFP4 \(columnwise=False, emulate=True\)"),
    ],
)
def test_weights_that_another_recipe_has_quantized_are_refused(recipe, described):
    model = quantize_model(make_model(), "nvfp4", only_up)
    first = model.blocks[0].up.weight
    match = rf"'blocks.0.up' .* got NVFP4 \(columnwise=False\) for {described}: quantizing"
    with pytest.raises(ValueError, match=match):
        quantize_model(model, recipe)
    assert quantized_names(model) == [name for name in HIDDEN if "up" in name]
    # The message's cure.
    quantize_model(model, recipe, but("up"))
    kinds = [quantize_model(nn.Linear(64, 64), r).weight.quantizer for r in ("nvfp4", recipe)]
    assert [model.get_parameter(name).quantizer for name in HIDDEN] == kinds * 2
    # Those that the same recipe has quantized are skipped.
    quantize_model(model, NVFP4Quantizer(columnwise=False), only_up)
    assert model.blocks[0].up.weight is first
    dequantize_model(model, only_up)
    assert quantized_names(model) == [name for name in HIDDEN if "down" in name]


@pytest.mark.parametrize("change", [lambda m: quantize_model(m, "mxfp8"), dequantize_model])
def test_weights_in_use_are_refused_and_nothing_changes(change):
    model = make_model()
    if change is dequantize_model:
        quantize_model(model, "nvfp4")
    in_use = [model(torch.arange(4)), weakref.ref(model.blocks[1].down.weight)]
    kinds = [*map(type, model.parameters())]
    while in_use:
        with pytest.raises(RuntimeError, match=r"'blocks\.\d\..*' must be free .*no_grad"):
            change(model)
        assert kinds == [*map(type, model.parameters())]
        del in_use[0]
    change(model)
    assert kinds != [*map(type, model.parameters())]


def test_everything_built_inside_is_quantized_at_the_end():
    build = quantized_init("nvfp4")(make_model)
    torch.manual_seed(0)
    expected = quantize_model(make_model(), "nvfp4")
    torch.manual_seed(0)
    with quantized_init("nvfp4"):
        model = make_model()
        assert not quantized_names(model)
    torch.manual_seed(0)
    for each in (model, build()):
        assert_identical([*each.parameters()], [*expected.parameters()])
        for name in HIDDEN:
            values = [m.get_parameter(name)._high_precision_init_val for m in (each, expected)]
            assert torch.equal(*values)
    assert quantized_names(build()) == HIDDEN
    step(model)
    with quantized_init("nvfp4"):  # initialization runs in high precision
        layer = nn.Linear(64, 64)
        nn.init.orthogonal_(layer.weight)
        with torch.no_grad():  # in place, which a quantized weight would refuse
            layer.weight.mul_(3).clamp_(-1, 1)
            layer.weight[0] = 0.5
    value = layer.weight.get_high_precision_init_val()
    assert value[0].eq(0.5).all() and value.abs().max() <= 1


def test_errors_leave_no_hook_and_no_quantized_weight():
    hooks = [getattr(nn_module, f"_global_{x}_registration_hooks") for x in ("parameter", "module")]
    before = [*map(dict, hooks)]
    with quantized_init("nvfp4"):
        assert all(len(now) > len(then) for now, then in zip(hooks, before, strict=True))
    with pytest.raises(KeyError), quantized_init("nvfp4"):
        interrupted = make_model()
        raise KeyError
    match = "layer 'lm_head': .* got shape"
    with pytest.raises(ValueError, match=match), quantized_init("nvfp4", lambda *_: True):
        fine, bad = nn.Linear(64, 64), make_model()
    assert [*map(dict, hooks)] == before
    assert not any(map(quantized_names, (interrupted, fine, bad, make_model())))


def test_blocks_may_be_nested_and_keep_what_is_quantized_already():
    before = quantize_model(make_block(), "float8block")
    with quantized_init("nvfp4"):
        first = make_block()
        with quantized_init("mxfp8"):
            second = make_block()
        assert isinstance(second.up.weight.quantizer, MXFP8Quantizer)
        assert not quantized_names(first)
        model = nn.ModuleList([before, first, second, quantize_model(make_block(), "mxfp8")])
    kinds = [type(block.up.weight.quantizer) for block in model]
    assert kinds == [Float8BlockQuantizer, NVFP4Quantizer, MXFP8Quantizer, MXFP8Quantizer]


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
            built = make_model(), nn.Linear(16, 16)
    assert [warning.filename for warning in caught] == [__file__] * 2
    assert seen == [name.removesuffix(".weight") for name in HIDDEN] + ["lm_head", ""]
    assert not any(map(quantized_names, built))


def test_copies_and_inserted_modules_are_built_inside_models_from_before_are_not():
    model, other = make_model(), nn.Linear(64, 64)
    other.weight = None  # its bias is there
    with quantized_init("nvfp4"):
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2, enable_nested_tensor=False
        )
        sequence = nn.Sequential(nn.Linear(16, 16))
        sequence.insert(0, copy.deepcopy(sequence[0]))
        model.extra = copy.deepcopy(sequence[0])
        model.head = nn.Linear(64, 64)
        model.blocks.append(make_block())
        other.weight = nn.Parameter(torch.zeros(64, 64))
        embedding, head = nn.Embedding(32, 64), nn.Linear(64, 32, bias=False)
        head.weight = embedding.weight
        first, second = nn.Linear(64, 64), nn.Linear(64, 64)
        second.weight = first.weight
    assert len(quantized_names(encoder)) == 6
    assert quantized_names(sequence) == ["0.weight", "1.weight"]
    expected = ["blocks.2.up.weight", "blocks.2.down.weight", "extra.weight"]
    assert quantized_names(model) == expected and not quantized_names(other)
    assert head.weight is embedding.weight and not quantized_names(head)
    assert first.weight is second.weight and quantized_names(first)


def make_odd() -> nn.ModuleDict:
    """A network for ten classes, whose head and first layer no format can hold."""
    sizes = {"first": (84, 250), "hidden": (256, 256), "ten": (256, 10)}
    return nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})


def test_layers_that_do_not_fit_stay_with_one_warning_or_are_refused():
    with pytest.warns(UserWarning, match="2 layers .* them: first, ten. .*250") as w:
        model = quantize_model(make_odd(), "nvfp4")
    with pytest.warns(UserWarning, match="2 layers stay"), quantized_init("nvfp4"):
        built = make_odd()
    assert len(w) == 1 and quantized_names(model) == quantized_names(built) == ["hidden.weight"]
    for names, match in ((["first", "hidden", "ten"], "'first': .*250"), (["ten"], "'ten': .*10")):
        model = make_odd()
        with pytest.raises(ValueError, match=f"layer {match}"):
            quantize_model(model, "nvfp4", lambda module, name, names=names: name in names)
        assert not quantized_names(model)


@pytest.mark.parametrize(
    "module", [nn.LSTM(64, 64), nn.MultiheadAttention(64, 8), nn.Conv2d(64, 64, 3)], ids=repr
)
def test_less_than_half_of_the_matrices_is_said(module):
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 32), module)
    with pytest.warns(UserWarning, match="only .*% of the elements of matrices are quantized") as w:
        quantize_model(model, "mxfp8")
        quantized_init("mxfp8")(nn.Sequential)(nn.Linear(64, 32), module)
    assert len(w) == 2
    model = nn.Sequential(nn.Linear(64, 32), module)
    quantize_model(model, "mxfp8", lambda module, name: isinstance(module, nn.Linear))
    # Embeddings and heads do not count.
    model = nn.ModuleDict({"wte": nn.Embedding(5000, 64), "tied": nn.Linear(64, 5000, bias=False)})
    model["tied"].weight = model["wte"].weight
    model.update({"lm_head": nn.Linear(64, 5000), "up": nn.Linear(64, 64)})
    assert quantized_names(quantize_model(model, "mxfp8")) == ["up.weight"]


def test_a_model_that_nobody_has_quantized_is_said(monkeypatch):
    monkeypatch.setattr(QuantizedTensor, "exists", False)
    model = nn.Linear(64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        FP4Adam([model.bias])
        FusedAdam(model.parameters())
        with pytest.raises(UserWarning, match="no quantized weight"):
            FP4Adam(model.parameters())
        FP4Adam(quantize_model(model, "nvfp4").parameters())
        FP4Adam(nn.Linear(64, 4).parameters())  # adapters beside a quantized base


def test_an_optimizer_from_before_trains_what_one_from_after_does():
    losses = []
    for is_before, steps in ((True, 0), (False, 0), (True, 2)):
        torch.manual_seed(0)
        model, x = make_model(), torch.arange(4)
        optimizer = FP4Adam([torch.zeros(2, requires_grad=True), *model.parameters()], lr=1e-3)
        train(optimizer, (model(x).square().sum() for _ in range(steps)))
        old = [*model.parameters()]
        quantize_model(model, "nvfp4")
        assert all(a is b for a, b in zip(old, model.parameters(), strict=True))
        if not is_before:
            optimizer = FP4Adam(model.parameters(), lr=1e-3)
        losses.append(train(optimizer, (model(x).square().sum() for _ in range(3))))
    assert losses[0] == losses[1] and losses[2][2] < losses[2][0] < losses[0][0]


def test_compiled_models_notice():
    model = nn.Sequential(nn.Linear(64, 64))
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(3, 64)
    compiled(x).sum().backward()
    quantize_model(model, "nvfp4")
    assert torch.equal(compiled(x), model(x))
