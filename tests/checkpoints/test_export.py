"""Checkpoints of serving engines: trained bytes go out, and come back to be trained on."""

import copy
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from fp4adam import (
    Float8BlockQuantizer,
    FP4Adam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    export_checkpoint,
    export_masters,
    export_tensors,
    import_checkpoint,
    quantize_model,
    use_plain_state_dict,
)
from fp4adam.checkpoints.export import Trained, gathered
from fp4adam.checkpoints.layouts import LAYOUTS, Float8BlockEncoding
from fp4adam.checkpoints.reader import CheckpointReader
from helpers import assert_identical, stored
from ranks import all_ranks, run_ranks
from twins import fixed_grads, set_grads

SQUARE_NVFP4 = NVFP4Quantizer(columnwise=False)
ROWWISE_NVFP4 = NVFP4Quantizer(two_dimensional=False, columnwise=False)
CASES = [
    ("compressed-tensors", NVFP4Quantizer()),
    ("compressed-tensors", ROWWISE_NVFP4),
    ("compressed-tensors", MXFP8Quantizer()),
    ("compressed-tensors", MXFP8Quantizer(two_dimensional=True)),
    ("compressed-tensors", NVFP4Quantizer(optimize_for_gemm=True)),
    ("compressed-tensors", MXFP8Quantizer(optimize_for_gemm=True)),
    ("modelopt", SQUARE_NVFP4),
    ("modelopt", MXFP8Quantizer(columnwise=False)),
    ("fp8", Float8BlockQuantizer()),
    ("fp8", Float8BlockQuantizer(columnwise=False)),
    ("fp8", Float8BlockQuantizer(columnwise=False, force_pow_2_scales=False)),
    ("fp8", Float8BlockQuantizer(force_pow_2_scales=False)),
]


class Model(nn.Module):
    """A quantized layer with a bias, one without, a buffer, and a head tied to an embedding."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 64)
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)
        self.lm_head = nn.Linear(64, 10, bias=False)
        self.lm_head.weight = self.embedding.weight
        for name in ("steps", "rounds"):
            self.register_buffer(name, torch.tensor(3))
        for name in ("k_scale", "input_scale"):  # as scales are called that imports leave out
            self.register_buffer(name, torch.rand(3))
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.down(self.up(self.embedding(tokens)).relu()))


def build(
    recipe: str | Quantizer | None, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Model:
    torch.manual_seed(seed)
    model = Model(dtype)
    return model if recipe is None else quantize_model(model, recipe)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.arange(10)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(recipe: str | Quantizer, **options: Any) -> tuple[Model, FP4Adam]:
    model = build(recipe)
    optimizer = FP4Adam(model.parameters(), lr=1e-2, **options)
    train(model, optimizer)
    return model, optimizer


def bytes_of(model: nn.Module) -> dict[str, Any]:
    """All that checkpoints have of a model; columnwise blocks of MXFP8 they do not have."""
    found = {}
    for name, value in model.state_dict().items():
        is_mxfp8 = isinstance(getattr(value, "quantizer", None), MXFP8Quantizer)
        parts = {key: part.clone() for key, part in stored(value).items()}
        found[name] = {k: v for k, v in parts.items() if not is_mxfp8 or "columnwise" not in k}
    return found


FILE = "model.safetensors"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def rewrite(
    folder: Path, change: Callable[[dict[str, Tensor]], object], keeps_header: bool = False
) -> None:
    """Change the tensors of a checkpoint; its header, with exact amaxes, goes unless it is kept."""
    with CheckpointReader(folder) as reader:
        metadata = reader.metadata if keeps_header else None
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata)


def decoded(stored: dict[str, Tensor], layer: str, layout: str) -> Tensor:
    """What a reader makes of a stored weight, from the layout's description, in BF16."""

    def get(name: str) -> Tensor:
        return stored[f"{layer}.{name}"]

    if layout == "fp8":
        scale = get("weight_scale_inv").repeat_interleave(128, 0).repeat_interleave(128, 1)
        rows, cols = get("weight").shape
        return (get("weight").float() * scale[:rows, :cols]).bfloat16()
    scale = get("weight_scale")
    if scale.dtype == torch.uint8:
        scale = (2.0 ** (scale.float() - 127)).repeat_interleave(32, 1)
        return (get("weight").float() * scale).bfloat16()
    if layout == "modelopt":
        packed, scale = get("weight"), scale.float() * get("weight_scale_2")
    else:
        packed, scale = get("weight_packed"), scale.float() / get("weight_global_scale")
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).int()
    return (E2M1[codes] * scale.repeat_interleave(16, 1)).bfloat16()


@pytest.mark.parametrize(("layout", "quantizer"), CASES, ids=str)
def test_trained_bytes_go_out_and_come_back(layout, quantizer, tmp_path):
    model, _ = trained(quantizer)
    export_checkpoint(model, tmp_path / "out", layout, config={"hidden_size": 64})
    stored = load_file(tmp_path / "out" / FILE)
    assert_identical(dict(export_tensors(model, layout)), stored)
    for layer in ("up", "down"):
        weight = model.get_submodule(layer).weight
        assert torch.equal(decoded(stored, layer, layout), weight.dequantize(torch.bfloat16))
        codes = "weight_packed" if f"{layer}.weight_packed" in stored else "weight"
        assert torch.equal(stored[f"{layer}.{codes}"].view(torch.uint8), weight.rowwise_data)
    assert torch.equal(stored["up.bias"], model.up.bias)
    assert "lm_head.weight" not in stored  # tied: once, by its first name
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == config | {"hidden_size": 64, "dtype": "bfloat16", "architectures": ["Model"]}
    assert config["quantization_config"]["quant_method"] == layout
    written = config["quantization_config"]
    assert written.get("ignore", written.get("modules_to_not_convert")) == ["lm_head"]

    other = build(None, seed=1)
    is_default = not quantizer.columnwise  # checkpoints have one direction
    assert import_checkpoint(other, tmp_path / "out", None if is_default else quantizer) is other
    assert other.up.weight.quantizer == quantizer
    expected = bytes_of(model)
    assert_identical(bytes_of(other), expected)
    values = other.up.weight.dequantize(torch.float32)
    if isinstance(quantizer, MXFP8Quantizer) and not quantizer.two_dimensional:
        both = other.up.weight, quantizer.quantize(values)
        assert_identical(*([x.columnwise_data, x.columnwise_scale_inv] for x in both))
    optimizer = FP4Adam(other.parameters(), lr=0.0)
    train(other, optimizer, steps=1)
    assert_identical(bytes_of(other), expected)
    assert torch.equal(optimizer.state[other.up.weight]["master_param"], values)


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_weights_of_zeros(value, tmp_path):
    model = build(None)
    nn.init.constant_(model.up.weight, value)
    quantize_model(model, "nvfp4")
    export_checkpoint(model, tmp_path)
    stored = load_file(tmp_path / FILE)
    assert stored["up.weight_global_scale"] == 1
    assert not decoded(stored, "up", "compressed-tensors").any()
    assert_identical(bytes_of(import_checkpoint(build(None, 1), tmp_path)), bytes_of(model))

    def fill(tensors: dict[str, Tensor]) -> None:
        for name in ("packed", "scale"):
            tensors[f"up.weight_{name}"].view(torch.uint8).fill_(17)

    rewrite(tmp_path, fill, keeps_header=True)
    assert import_checkpoint(build(None, 1), tmp_path).up.weight.dequantize(torch.float32).any()


def test_tensors_are_the_models_own_memory_and_read_when_their_turn_comes():
    model = build("nvfp4")
    tensors = export_tensors(model)
    with torch.no_grad():
        model.up.bias.zero_()
    tensors = dict(tensors)
    assert tensors["up.weight_packed"].data_ptr() == model.up.weight.rowwise_data.data_ptr()
    assert tensors["up.bias"].data_ptr() == model.up.bias.data_ptr()
    assert not tensors["up.bias"].any()
    assert all(x.is_contiguous() and not x.requires_grad for x in tensors.values())


@pytest.mark.parametrize(
    "options", [{}, {"master_weight_dtype": torch.float16}, {"states": "8bit"}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters(dtype, options, tmp_path):
    model, optimizer = trained("nvfp4", **options)
    config = {"dtype": "float16", "quantization_config": {}}
    export_masters(model, optimizer, tmp_path, dtype, config=config)
    stored = load_file(tmp_path / FILE)
    states = optimizer.state_dict()["state"]
    for i, (name, _) in enumerate(model.named_parameters()):
        assert torch.equal(stored[name], states[i]["master_param"].to(dtype)), name
    assert stored["steps"] == 3 and "lm_head.weight" not in stored
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == str(dtype)[6:] and "quantization_config" not in config


def test_masters_before_the_first_step_and_of_overwritten_parameters(tmp_path):
    """Values before quantization, where they are kept, and what has been written since."""
    model = build("nvfp4", dtype=torch.float32)
    model.down.weight.clear_high_precision_init_val()
    export_masters(model, FP4Adam(model.parameters()), tmp_path / "first")
    found = load_file(tmp_path / "first" / FILE)
    assert torch.equal(found["up.weight"], build(None, dtype=torch.float32).up.weight)
    assert torch.equal(found["down.weight"], model.down.weight.dequantize(torch.float32))

    model, optimizer = trained("nvfp4")
    model.load_state_dict(model.state_dict())  # nothing new
    written = model.down.weight.detach().dequantize().t().contiguous()
    model.up.weight.data.copy_(written)
    export_masters(model, optimizer, tmp_path / "second")
    found = load_file(tmp_path / "second" / FILE)
    assert torch.equal(found["up.weight"], written.float())
    assert torch.equal(found["down.weight"], optimizer.state[model.down.weight]["master_param"])


def test_names_are_those_without_wrappers(tmp_path):
    def wrapped(model: Model) -> nn.Module:
        model.up, compiled = checkpoint_wrapper(model.up), nn.Module()
        compiled._orig_mod = model  # as torch.compile does
        return compiled

    model = build("nvfp4")
    model.again = model.lm_head  # one layer, which either name says is in high precision
    export_checkpoint(model, tmp_path / "plain")
    export_checkpoint(wrapped(model), tmp_path / "wrapped")
    plain, other = (tmp_path / name for name in ("plain", "wrapped"))
    assert_identical(load_file(other / FILE), load_file(plain / FILE))
    assert (config := (other / "config.json").read_text()) == (plain / "config.json").read_text()
    assert json.loads(config)["quantization_config"]["ignore"] == ["lm_head", "again"]
    compiled = wrapped(read := build(None, seed=1))
    assert import_checkpoint(compiled, plain) is compiled
    assert torch.equal(*(x.up.weight.dequantize(torch.float32) for x in (read, model)))


def test_import_keeps_what_belongs_to_a_weight(tmp_path):
    export_checkpoint(build("nvfp4"), tmp_path)
    with CheckpointReader(tmp_path) as reader:
        reader.read("up.bias").zero_()
        assert reader.read("up.bias").any()  # that was a copy
    for recipe in (None, "nvfp4"):
        model, calls = build(recipe, seed=1), []
        model.up.weight.tensor_model_parallel = True
        model.up.weight.register_hook(lambda grad: calls.append("up"))  # noqa: B023
        old = model.down.weight.requires_grad_(False)
        import_checkpoint(model, tmp_path)
        assert model.up.weight.tensor_model_parallel and model.down.weight is old
        assert model.up.weight.requires_grad and not model.down.weight.requires_grad
        train(model, FP4Adam(model.parameters()), steps=1)
        assert calls == ["up"]
    (model := build(None)).down.weight.quantizer = "another"
    with pytest.raises(ValueError, match="layer 'down' must have no attribute 'quantizer'"):
        import_checkpoint(model, tmp_path)
    model.up.weight = type("Special", (nn.Parameter,), {})(model.up.weight.detach())
    with pytest.raises(ValueError, match="'up' must be an ordinary parameter, got a Special"):
        import_checkpoint(model, tmp_path)
    with pytest.raises(TypeError, match="layer 'up' must be float32, .* got torch.float64"):
        import_checkpoint(build(None, dtype=torch.float64), tmp_path)


def test_buffers_that_the_model_cannot_fill_are_refused(tmp_path):
    export_checkpoint(build("nvfp4"), tmp_path)
    model = build(None, seed=1)
    for module, *places in ((model, "meta", "cpu"), (model.up, "cpu", "meta"), (model.down, 0, 0)):
        for name, place in zip(("mask", "phase"), places, strict=True):
            module.register_buffer(name, torch.ones(3, device=place or "cpu"), persistent=False)
    before = bytes_of(model)
    with pytest.raises(ValueError, match="buffer '(mask|phase)' must be in memory"):
        import_checkpoint(model, tmp_path)
    assert_identical(bytes_of(model), before)
    # As models of transformers do, parameters as well.
    model._init_weights = lambda m: (m.mask.copy_(m.phase.fill_(2)), model.up.bias.data.zero_())
    assert import_checkpoint(model, tmp_path).mask.sum() == model.up.mask.sum() == 6
    assert model.up.bias.all() and model.down.mask.sum() == 3  # which had been filled


# State dict hooks


def dequantize_all(module, state, prefix, metadata):
    """What users write by themselves in place of use_plain_state_dict."""
    for name, value in state.items():
        if isinstance(value, QuantizedTensor):
            state[name] = value.detach().dequantize(torch.float32)


LAYOUT_OF = {"nvfp4": "compressed-tensors", "mxfp8": "compressed-tensors", "float8block": "fp8"}


@pytest.mark.parametrize("hook", [None, dequantize_all])
@pytest.mark.parametrize(("recipe", "layout"), LAYOUT_OF.items())
def test_hooks_do_not_come_between_a_model_and_its_checkpoints(recipe, layout, hook, tmp_path):
    model, optimizer = trained(recipe)
    for name in ("plain", "hooked"):
        if name == "hooked" and hook:
            model.register_state_dict_post_hook(hook)
        elif name == "hooked":
            use_plain_state_dict(model)
        export_checkpoint(model, tmp_path / name, layout)
        export_masters(model, optimizer, tmp_path / f"{name}-masters")
    for kind in ("", "-masters"):
        plain, hooked = (tmp_path / f"{name}{kind}" for name in ("plain", "hooked"))
        assert_identical(*(load_file(path / FILE) for path in (hooked, plain)))
        assert (hooked / "config.json").read_text() == (plain / "config.json").read_text()
    export_checkpoint(other := build(recipe, seed=1), tmp_path / "other", layout)
    import_checkpoint(model, tmp_path / "other")
    values = (x.up.weight.dequantize(torch.float32) for x in (model, other))
    assert torch.equal(*values) and torch.equal(model.up.bias, other.up.bias)


def test_hooks_may_change_names(tmp_path):
    def rename(module, state, prefix, metadata):
        state["encoder.weight"], state["decoder.weight"] = map(
            state.pop, ("up.weight", "down.weight")
        )
        if not is_import:
            del state["steps"]
            state["version"] = torch.tensor(2)

    is_import, (model, optimizer), other = True, trained("nvfp4"), build(None, seed=1)
    for each in (model, other):
        each.register_state_dict_post_hook(rename)
    export_checkpoint(model, tmp_path / "codes")
    assert_identical(bytes_of(import_checkpoint(other, tmp_path / "codes")), bytes_of(model))
    is_import = False
    use_plain_state_dict(model)
    export_masters(model, optimizer, tmp_path)
    stored = load_file(tmp_path / FILE)
    master = optimizer.state[model.down.weight]["master_param"]
    assert torch.equal(stored["decoder.weight"], master)
    assert stored["version"] == 2 and not {"down.weight", "steps"} & stored.keys()


def test_parameters_that_a_hook_computes_something_from(tmp_path):
    def fuse(module, state, prefix, metadata):
        state["both.weight"] = torch.cat((state.pop("up.weight"), state.pop("down.weight").t()))

    model, optimizer = trained("nvfp4")
    export_checkpoint(model, tmp_path / "before")
    model.register_state_dict_post_hook(fuse)
    before = bytes_of(model)
    match = "must have its parameter 'up.weight', got 'both.weight' in its stead"
    for call in (
        lambda: export_checkpoint(model, tmp_path / "out"),
        lambda: export_masters(model, optimizer, tmp_path / "out"),
        lambda: import_checkpoint(model, tmp_path / "before"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    assert not (tmp_path / "out").exists()
    assert_identical(bytes_of(model), before)


class Attention(nn.Module):
    def __init__(self, cols: int, rows: int, kv_rows: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(cols, rows), nn.Linear(cols, kv_rows)


def one_amax(model: Attention) -> None:
    model.k_proj.weight = nn.Parameter(model.q_proj.weight.detach().clone())


@pytest.mark.parametrize(
    ("shape", "recipe", "change", "message"),
    [
        ((32, 32, 32), "nvfp4", None, "should have one amax, got .*q_proj.*k_proj"),
        ((32, 32, 32), "nvfp4", one_amax, None),
        ((192, 32, 32), "float8block", None, "sides .* multiples of 128, got others in 2 layers"),
        ((128, 256, 128), "float8block", None, None),
        ((128, 256, 64), "float8block", None, r"'k_proj'.* vLLM \(0.32\) where it fuses"),
        ((32, 32, 32), "mxfp8", lambda m: setattr(m, "from_pretrained", 0), "'modelopt' should be"),
        ((32, 32, 32), "mxfp8", None, None),
    ],
)
def test_warnings_of_what_engines_misread(shape, recipe, change, message, tmp_path):
    model = quantize_model(Attention(*shape), recipe)
    layout = "modelopt" if recipe == "mxfp8" else LAYOUT_OF[recipe]
    if change:
        change(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export_checkpoint(model, tmp_path, layout)
    assert len(caught) == bool(message)
    assert not message or re.search(message, str(caught[0].message))


def tie(model: Model) -> None:
    model.down = copy.deepcopy(model.up)
    model.down.weight = model.up.weight


EXPORT_ERRORS = [
    ("nvfp4", None, {"layout": "awq"}, "one of compressed-tensors, modelopt, fp8, mxfp4, got"),
    ("nvfp4", None, {"layout": "fp8"}, "for layout 'fp8', Float8BlockTensor, got NVFP4Tensor; use"),
    ("mxfp8", None, {"layout": "fp8"}, "use layout='compressed-tensors' or 'modelopt'"),
    ("float8", None, {}, "got Float8Tensor; quantize all .* or call export_masters"),
    (None, None, {}, "got none; quantize all weights"),
    (Float8BlockQuantizer(two_dimensional=False), None, {"layout": "fp8"}, "two_dimensional=True"),
    ("nvfp4", tie, {}, "'up.weight' and 'down.weight' must be two weights"),
    ("nvfp4", lambda m: (m.register_state_dict_post_hook(dequantize_all), setattr(m, "down", m.up)),
     {}, "'up.weight' and 'down.weight' must be two weights"),
    (None, lambda m: (quantize_model(m.up, "nvfp4"), quantize_model(m.down, "mxfp8")), {},
     "of one format .* got MXFP8Tensor, NVFP4Tensor; quantize all weights alike"),
    ("nvfp4", lambda m: setattr(m, "other", copy.deepcopy(m.up.weight)), {},
     "must be those of nn.Linear layers, or stacks.*, got 'other'"),
    ("nvfp4", lambda m: m.up.weight.quantize_(torch.full((96, 64), torch.inf)), {},
     "'up.weight': amax must be finite and at least 1e-35"),
    ("nvfp4", lambda model: model.to("meta"), {}, "on the meta device"),
    ("nvfp4", None, {"max_shard_bytes": 0}, "max_shard_bytes must be a positive number"),
    ("nvfp4", None, {"max_shard_bytes": "5GB"}, "max_shard_bytes must be a positive number"),
    (NVFP4Quantizer(), lambda m: m.down.weight.update_usage(False), {}, "down.weight' .*rowwise=T"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "change", "options", "message"), EXPORT_ERRORS)
def test_what_cannot_be_exported(recipe, change, options, message, tmp_path):
    model = build(recipe)
    if change:
        change(model)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        export_checkpoint(model, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_every_part_of_a_fused_weight_is_checked():
    weights = {"qk": Float8BlockQuantizer().make_empty((200, 128))}
    spans = {"qk": [("q", (0, 128)), ("k", (128, 200))]}
    each, nvfp4 = ((LAYOUTS[name], LAYOUTS[name].encodings[0]) for name in ("fp8", "modelopt"))
    with pytest.raises(ValueError, match="got rows 128 to 200 of 'qk'"):
        Trained(None, weights, weights, *each, spans)._check("qk", True)
    Trained(None, weights, weights, *nvfp4, spans)._check("qk", True)  # scales of one row each


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("layout", "kinds", "option"),
    [
        ("compressed-tensors", (SQUARE_NVFP4, ROWWISE_NVFP4), "two_dimensional"),
        ("fp8", [case[1] for case in CASES[-3:-1]], "force_pow_2_scales"),
    ],
)
def test_the_format_is_one_that_holds_all_layers(layout, kinds, option, order, tmp_path):
    model = build(None)
    for layer, quantizer in zip((model.up, model.down)[::order], kinds, strict=True):
        quantize_model(nn.ModuleList([layer]), quantizer)
    export_checkpoint(model, tmp_path, layout)
    read = import_checkpoint(build(None, seed=1), tmp_path)
    assert not getattr(read.up.weight.quantizer, option)
    for own, param in zip(read.parameters(), model.parameters(), strict=True):
        assert torch.equal(own.to(torch.bfloat16), param.to(torch.bfloat16))


def test_blocks_of_one_row_are_not_taken_for_square_ones(tmp_path):
    export_checkpoint(trained(ROWWISE_NVFP4)[0], tmp_path)
    for quantizer, message in (
        (NVFP4Quantizer(), "layer 'up': weight_scale must be equal for the 16 rows"),
        (NVFP4Quantizer(two_dimensional=False), "columnwise=False"),
    ):
        with pytest.raises(ValueError, match=message):
            import_checkpoint(build(None), tmp_path, quantizer)


def test_scales_are_powers_of_two_if_all_are():
    for scales, is_pow_2 in (([2.0, 0.0], True), ([2.0, 3.0], False)):
        found = Float8BlockEncoding("fp8").quantizer_for([torch.tensor(scales), torch.ones(2)])
        assert found.force_pow_2_scales is is_pow_2


def export_shards(rank: int, folder: str) -> None:
    for is_sharded in (False, True):
        model = build("nvfp4", dtype=torch.float32)
        if is_sharded:
            fully_shard(model, mesh=all_ranks())
        optimizer = FP4Adam(model.parameters(), lr=1e-2)
        given = model if is_sharded else nn.parallel.DistributedDataParallel(model)
        name = "sharded" if is_sharded else f"whole{rank}"
        export_masters(given, optimizer, f"{folder}/{name}-before")
        set_grads(model, fixed_grads(model, seed=0))
        optimizer.step()
        export_checkpoint(given, f"{folder}/{name}")
        export_masters(given, optimizer, f"{folder}/{name}-masters")
    with pytest.raises(FileExistsError, match="must not hold a checkpoint"):
        export_checkpoint(model, f"{folder}/sharded")
    before = gathered_bytes(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    import_checkpoint(model, f"{folder}/sharded")  # in place
    assert_identical(gathered_bytes(model), before)
    with torch.device("meta"):
        model = build(None, dtype=torch.float32)
        for name in ("mask", "phase"):
            model.register_buffer(name, torch.empty(3), persistent=False)
        model.register_buffer("missing", None, persistent=False)
    model._init_weights = lambda module: module.mask.fill_(2).add_(module.phase.fill_(1))
    import_checkpoint(model, f"{folder}/sharded", device="meta")
    fully_shard(model, mesh=all_ranks())
    with pytest.raises(ValueError, match="a DTensor on the meta device; .* to_empty"):
        import_checkpoint(model, f"{folder}/sharded")
    import_checkpoint(model.to_empty(device="cpu"), f"{folder}/sharded")
    assert model.mask.sum() == 9
    assert_identical(gathered_bytes(model), before)
    with pytest.raises(ValueError, match="import with device='meta' before fully_shard"):
        model = fully_shard(build(None, dtype=torch.float32), mesh=all_ranks())
        import_checkpoint(model, f"{folder}/sharded")
    for recipe, layout in LAYOUT_OF.items():
        model = build(recipe)
        expected = {name: tensor.clone() for name, tensor in export_tensors(model, layout)}
        fully_shard(model, mesh=all_ranks())
        found = {name: tensor.clone() for name, tensor in export_tensors(model, layout)}
        assert_identical(found, expected)  # names in the same order
        assert [*found] == [*expected]


def gathered_bytes(model: nn.Module) -> list[dict[str, Tensor]]:
    """Codes, scales and values of all ranks."""
    names = ("", "_rowwise_data", "_block_scale_inv", "_amax")
    parts = [stored(gathered(param)) for param in model.parameters()]
    return [{key: part[key] for key in names if key in part} for part in parts]


def test_shards_are_gathered_as_they_are(tmp_path):
    run_ranks(export_shards, 3, str(tmp_path))  # 96 and 64 rows: whole blocks, and cut ones
    for kind in ("", "-before", "-masters"):
        whole, sharded = (tmp_path / f"{name}{kind}" for name in ("whole0", "sharded"))
        with CheckpointReader(whole) as expected:
            with CheckpointReader(sharded) as actual:
                assert_identical(*({n: r.read(n) for n in r.names()} for r in (actual, expected)))
                assert actual.metadata == expected.metadata
                assert actual.config == expected.config
