"""Stacked experts in checkpoints: one weight per expert, and back to the same bytes."""

import json
import re
import sys
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from test_export import FILE, bytes_of, rewrite
from torch import nn
from torch.distributed.fsdp import fully_shard

from fp4adam import (
    FP4Adam,
    NVFP4Quantizer,
    export_checkpoint,
    export_masters,
    export_tensors,
    import_checkpoint,
    quantize_model,
)
from fp4adam.checkpoints.layouts import LAYOUTS
from fp4adam.checkpoints.model_state import module_names, unquantized_modules
from helpers import assert_identical
from ranks import all_ranks, run_ranks

EXPERTS, DIM = 11, 128  # the tenth is not the tenth by name
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
CASES = [
    ("nvfp4", "compressed-tensors"),
    ("nvfp4", "modelopt"),
    ("mxfp8", "compressed-tensors"),
    ("mxfp8", "modelopt"),
    ("float8block", "fp8"),
]
OTHERS = [(NVFP4Quantizer(two_dimensional=False, columnwise=False), "compressed-tensors")]


class Experts(nn.Module):
    def __init__(self, rows: int = DIM) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * rows, DIM))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, DIM, rows) / 7)  # no scale has its amax


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, DIM))


class MoE(nn.Module):
    """Experts and a router as transformers has them, and what engines take for no linear layer."""

    def __init__(self, rows: int = DIM) -> None:
        super().__init__()
        self.embedding, self.conv = nn.Embedding(8, DIM), nn.Conv1d(DIM, DIM, 3)
        self.pos_embed = nn.Parameter(torch.ones(1, 4, DIM))
        self.gate, self.norm = Router(), nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, DIM)
        self.experts = Experts(rows)


def make(recipe=None, seed=0, rows=DIM, selected=None):
    torch.manual_seed(seed)
    model = MoE(rows)
    return quantize_model(model, recipe, selected) if recipe else model


@pytest.mark.parametrize(("recipe", "layout"), CASES + OTHERS)
def test_round_trip(recipe, layout, tmp_path):
    """Each expert is stored as a linear layer with its values is."""
    model = make(recipe)
    export_checkpoint(model, tmp_path, layout)
    stored = load_file(tmp_path / FILE)
    assert_identical(dict(export_tensors(model, layout)), stored)
    assert not any("gate_up" in name for name in stored)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config.get("ignore", config.get("modules_to_not_convert")) == ["gate"]
    other = make(seed=1)
    other.set_experts_implementation = pytest.fail  # only stacks that were transposed need another
    quantizer = None if isinstance(recipe, str) else recipe
    imported = import_checkpoint(other, tmp_path, quantizer)
    assert_identical(bytes_of(imported), bytes_of(model))
    assert imported.experts.down_proj.parameter_name == "experts.down_proj"

    split = make(seed=1)
    split.experts = nn.ModuleList(
        nn.ModuleDict({p: nn.Linear(DIM, DIM, bias=False) for p in PROJECTIONS})
        for _ in range(EXPERTS)
    )
    import_checkpoint(split, tmp_path, quantizer)
    stacks = model.experts.gate_up_proj, model.experts.down_proj
    gate_up, down = (stack.dequantize(torch.float32) for stack in stacks)
    for expert, layers in enumerate(split.experts):
        values = (*gate_up[expert].chunk(2), down[expert])
        for projection, expected in zip(PROJECTIONS, values, strict=True):
            assert_identical(layers[projection].weight.dequantize(torch.float32), expected)
    for name, again in (("stacked", imported), ("split", split)):
        export_checkpoint(again, tmp_path / name, layout)
        assert_identical(load_file(tmp_path / name / FILE), stored)


@pytest.mark.parametrize(("recipe", "layout"), CASES)
def test_experts_in_high_precision_are_stored_one_by_one_as_well(recipe, layout, tmp_path):
    model = make(recipe, selected=lambda module, name: name == "up")
    export_checkpoint(model, tmp_path, layout)
    part = load_file(tmp_path / FILE)["experts.1.up_proj.weight"]
    assert_identical(part, model.experts.gate_up_proj[1, DIM:].detach().clone())
    assert_identical(bytes_of(import_checkpoint(make(seed=1), tmp_path)), bytes_of(model))
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    ignored = config.get("ignore", config.get("modules_to_not_convert"))
    assert ignored[:2] == ["gate", "experts"]
    if layout != "compressed-tensors":
        assert len(ignored) == 2
        return
    (pattern,) = ignored[2:]  # engines look for a layer of one expert
    match = re.compile(pattern.removeprefix("re:")).match
    assert match("experts.0.gate_proj") and not match("experts_more.0") and not match("up")


@pytest.mark.parametrize("recipe", [None, "nvfp4"])
def test_masters_of_stacks(recipe, tmp_path, monkeypatch):
    others = Mock(PreTrainedModel=Router)  # none of whose models this is
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", others)
    model = make(recipe)
    optimizer = FP4Adam(model.named_parameters())
    model.experts.down_proj.grad = torch.randn(EXPERTS, DIM, DIM)
    optimizer.step()
    export_masters(model, optimizer, tmp_path, torch.bfloat16)
    stored, down = load_file(tmp_path / FILE), model.experts.down_proj
    masters = optimizer.state[down].get("master_param", down.detach()).bfloat16()
    for expert, master in enumerate(masters):
        assert_identical(stored[f"experts.{expert}.down_proj.weight"], master.clone())


def test_modules_that_checkpoints_name_otherwise():
    spans = {"moe.up": [("a.0.up.weight", (0, 4))], "layer.weight": [("b.weight", None)]}
    assert module_names(spans) == {"moe": "a", "layer": "b"}
    model = nn.ModuleDict({name: make().experts for name in ("moe", "other")})
    for experts in model.values():
        experts.router = nn.Parameter(torch.ones(EXPERTS, DIM))
    modules, layout = unquantized_modules(model, {"moe": "a"}), LAYOUTS["compressed-tensors"]
    ignored = layout.describe(layout.encodings[0], *modules)["ignore"]
    assert ignored == ["moe", "a", "other", *(rf"re:{x}\..*" for x in ("moe", "a", "other"))]


def test_all_that_readers_misread_is_told(tmp_path):
    model = make()
    model.q_proj, model.k_proj, model.from_pretrained = nn.Linear(DIM, 16), nn.Linear(DIM, 16), 0
    with pytest.warns(UserWarning, match="one amax"), pytest.warns(UserWarning, match="P4 experts"):
        export_checkpoint(quantize_model(model, "nvfp4"), tmp_path)


def test_experts_that_share_scales_are_refused(tmp_path):
    model = make("float8block", rows=64)
    with pytest.raises(ValueError, match="of 128 rows to be exported, got rows 0 to 64 of 'exp"):
        export_checkpoint(model, tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()


def test_stacks_that_checkpoints_keep_are_refused(tmp_path):
    model = make("nvfp4")
    model.experts.is_transposed = True
    with pytest.raises(ValueError, match="one by one, got .experts.gate_up_proj.; .*_masters"):
        export_checkpoint(model, tmp_path / "out")
    export_masters(model, FP4Adam(model.named_parameters()), tmp_path / "out")
    assert "experts.gate_up_proj" in load_file(tmp_path / "out" / FILE)


def other_scale(stored):
    stored["experts.2.down_proj.weight_global_scale"] *= 2


def without(start):
    def change(stored):
        for key in [key for key in stored if key.startswith(start)]:
            del stored[key]

    return change


def in_high_precision(stored):
    without("experts.2.down")(stored)
    stored["experts.2.down_proj.weight"] = torch.zeros(DIM, DIM)


def other_rows(stored):
    for number, rows in enumerate((DIM + 16, DIM + 16, DIM - 32)):
        key = f"experts.{number}.down_proj.weight_packed"
        stored[key] = torch.zeros(rows, DIM // 2, dtype=torch.uint8)


def more_experts(stored):
    for key in [key for key in stored if key.startswith("experts.2.")]:
        stored[key.replace("2", "11", 1)] = stored[key].clone()


BAD = [
    (other_scale, "one tensor scale to be one stack, got .* for 'experts.0.down_proj.weight_gl"),
    (without("experts.1.up_proj.weight_scale"), "parts of .experts.gate_up_proj. alike, .*1.up_p"),
    (without("experts.2.down"), "got 'experts.0.down_proj.weight_.*' and no 'experts.2.down"),
    (in_high_precision, "no 'experts.2.down_proj.weight_packed'; .* in high precision"),
    (other_rows, "one shape and dtype to be stacked, got .* in 'experts.down_proj.weight_packed'"),
    (more_experts, "such as 'experts.11.down_proj"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD)
def test_checkpoints_that_do_not_fit(change, message, tmp_path):
    export_checkpoint(make("nvfp4"), tmp_path)
    rewrite(tmp_path, change, keeps_header=True)
    model = make(seed=1)
    before = bytes_of(model)
    with pytest.raises(ValueError, match=message):
        import_checkpoint(model, tmp_path)
    assert_identical(bytes_of(model), before)


def export_sharded(rank, folder):
    model = make("nvfp4")
    fully_shard(model.experts, mesh=all_ranks())
    fully_shard(model, mesh=all_ranks())
    export_checkpoint(model, folder)


def test_export_under_fsdp(tmp_path):
    run_ranks(export_sharded, 2, tmp_path / "sharded")
    export_checkpoint(make("nvfp4"), tmp_path / "whole")
    assert_identical(*(load_file(tmp_path / name / FILE) for name in ("sharded", "whole")))


def test_stacks_of_several_modules_are_turned(tmp_path):
    """Checkpoints have [experts, out, in], and models know whether they do."""
    model, other = (nn.Sequential(make(seed=seed), make(seed=seed + 1)) for seed in (0, 2))
    for part in (*model, *other):
        part.experts.is_transposed = True  # whole stacks are stored
    quantize_model(model, "mxfp4", lambda module, name: name.endswith("experts"))
    export_checkpoint(model, tmp_path, "mxfp4")
    stored = load_file(tmp_path / FILE)["1.experts.gate_up_proj_blocks"]
    assert stored.shape == (EXPERTS, 2 * DIM, DIM // 32, 16)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == ["0.gate", "0.up", "1.gate", "1.up"]
    for part in other:
        for name, stack in part.experts.named_parameters():
            setattr(part.experts, name, nn.Parameter(stack.detach().mT.contiguous()))
    chosen: list[str] = []
    other.set_experts_implementation = chosen.append
    import_checkpoint(other, tmp_path)
    assert_identical(bytes_of(other), bytes_of(model))
    assert chosen == ["grouped_mm"] and not any(part.experts.is_transposed for part in other)
