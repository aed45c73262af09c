"""Stacked experts in checkpoints: one weight per expert, and back to the same bytes."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from fp4adam import (
    FP4Adam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    export_checkpoint,
    export_masters,
    export_tensors,
    import_checkpoint,
    quantize_model,
)
from helpers import assert_identical
from ranks import all_ranks, run_ranks

EXPERTS, DIM = 3, 128
CASES = [
    ("nvfp4", "compressed-tensors"),
    ("nvfp4", "modelopt"),
    ("mxfp8", "compressed-tensors"),
    ("mxfp8", "modelopt"),
    ("float8block", "fp8"),
]


class Experts(nn.Module):
    def __init__(self, rows: int = DIM) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * rows, DIM))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, DIM, rows) / 8)


class MoE(nn.Module):
    def __init__(self, rows: int = DIM) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(EXPERTS, DIM))
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, DIM, bias=False)
        self.experts = Experts(rows)


def make(recipe=None, seed=0, rows=DIM, selected=None):
    torch.manual_seed(seed)
    model = MoE(rows)
    return quantize_model(model, recipe, selected) if recipe else model


def tensors(model):
    """All bytes but columnwise codes of MXFP8, which checkpoints do not have."""
    tensors = {}
    for name, x in model.named_parameters():
        tensors[name] = x.detach()
        if isinstance(x, QuantizedTensor):
            tensors[name] = x.storage_tensors()
            if isinstance(x.quantizer, MXFP8Quantizer):
                tensors[name] = {k: v for k, v in tensors[name].items() if "columnwise" not in k}
    return tensors


@pytest.mark.parametrize(("recipe", "layout"), CASES)
def test_round_trip(recipe, layout, tmp_path):
    model = make(recipe)
    export_checkpoint(model, tmp_path, layout)
    other = make(seed=1)
    other.set_experts_implementation = pytest.fail  # only stacks that were transposed need another
    imported = import_checkpoint(other, tmp_path)
    assert_identical(tensors(imported), tensors(model))
    assert imported.experts.down_proj.parameter_name == "experts.down_proj"
    stored = load_file(tmp_path / "model.safetensors")
    assert_identical(dict(export_tensors(model, layout)), stored)
    export_checkpoint(imported, tmp_path / "again", layout)
    assert_identical(load_file(tmp_path / "again/model.safetensors"), stored)


@pytest.mark.parametrize(("recipe", "layout"), CASES)
def test_each_expert_is_stored_as_a_linear_layer_is(recipe, layout, tmp_path):
    """The bytes are those of a model of linear layers with the decoded weights."""
    model = make(recipe)
    export_checkpoint(model, tmp_path / "stacked", layout)
    stored = load_file(tmp_path / "stacked/model.safetensors")

    class Linear(MoE):
        def __init__(self) -> None:
            super().__init__()
            projections = ("gate_proj", "up_proj", "down_proj")
            self.experts = nn.ModuleList(
                nn.ModuleDict({p: nn.Linear(DIM, DIM, bias=False) for p in projections})
                for _ in range(EXPERTS)
            )

    split = import_checkpoint(Linear(), tmp_path / "stacked")
    gate_up, down = (
        stack.dequantize(torch.float32)
        for stack in (model.experts.gate_up_proj, model.experts.down_proj)
    )
    for expert in range(EXPERTS):
        for projection, expected in (
            ("gate_proj", gate_up[expert, :DIM]),
            ("up_proj", gate_up[expert, DIM:]),
            ("down_proj", down[expert]),
        ):
            layer = split.experts[expert][projection]
            assert_identical(layer.weight.dequantize(torch.float32), expected)
    assert not any("gate_up" in name for name in stored)
    config = json.loads((tmp_path / "stacked/config.json").read_text())["quantization_config"]
    ignored = config.get("ignore", config.get("modules_to_not_convert"))
    assert not any("experts" in name for name in ignored)
    export_checkpoint(split, tmp_path / "split", layout)
    assert_identical(load_file(tmp_path / "split/model.safetensors"), stored)


def test_quantizers_with_other_scales(tmp_path):
    for quantizer in (
        NVFP4Quantizer(two_dimensional=False, columnwise=False),
        NVFP4Quantizer(columnwise=False),
        MXFP8Quantizer(columnwise=False),
    ):
        folder = tmp_path / repr(quantizer)
        model = make(quantizer)
        export_checkpoint(model, folder)
        assert_identical(
            tensors(import_checkpoint(make(seed=1), folder, quantizer)), tensors(model)
        )


def test_experts_in_high_precision_are_stored_one_by_one_as_well(tmp_path):
    model = make("nvfp4", selected=lambda module, name: name == "up")
    export_checkpoint(model, tmp_path / "a")
    stored = load_file(tmp_path / "a/model.safetensors")
    assert_identical(
        stored["experts.1.up_proj.weight"], model.experts.gate_up_proj[1, DIM:].detach().clone()
    )
    assert_identical(tensors(import_checkpoint(make(seed=1), tmp_path / "a")), tensors(model))
    optimizer = FP4Adam(model.named_parameters())
    export_masters(model, optimizer, tmp_path / "b", torch.bfloat16)
    masters = load_file(tmp_path / "b/model.safetensors")
    down = masters["experts.2.down_proj.weight"]
    assert_identical(down, model.experts.down_proj[2].detach().bfloat16())


def test_masters_of_quantized_stacks(tmp_path):
    model = make("nvfp4")
    optimizer = FP4Adam(model.named_parameters())
    model.experts.down_proj.grad = torch.randn(EXPERTS, DIM, DIM)
    optimizer.step()
    export_masters(model, optimizer, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    master = optimizer.state[model.experts.down_proj]["master_param"]
    for expert in range(EXPERTS):
        assert_identical(stored[f"experts.{expert}.down_proj.weight"], master[expert].clone())


def test_experts_that_share_scales_are_refused(tmp_path):
    model = make("float8block", rows=64)
    with pytest.raises(ValueError, match="of 128 rows to be exported, got rows 0 to 64 of 'exp"):
        export_checkpoint(model, tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()


def test_stacks_that_checkpoints_keep_are_refused(tmp_path):
    model = make("nvfp4")
    model.experts.is_transposed = True
    with pytest.raises(
        ValueError, match="hold one by one, got .experts.gate_up_proj.; .*export_masters"
    ):
        export_checkpoint(model, tmp_path / "out")
    export_masters(model, FP4Adam(model.named_parameters()), tmp_path / "out")
    assert "experts.gate_up_proj" in load_file(tmp_path / "out/model.safetensors")


def other_scale(stored):
    stored["experts.1.down_proj.weight_global_scale"] *= 2


def without(start):
    def change(stored):
        for key in [key for key in stored if key.startswith(start)]:
            del stored[key]

    return change


def in_high_precision(stored):
    without("experts.2.down")(stored)
    stored["experts.2.down_proj.weight"] = torch.zeros(DIM, DIM)


def other_rows(stored):
    for number, rows in ((0, DIM + 16), (1, DIM - 16)):
        key = f"experts.{number}.down_proj.weight_packed"
        stored[key] = torch.zeros(rows, DIM // 2, dtype=torch.uint8)


def more_experts(stored):
    for key in [key for key in stored if key.startswith("experts.2.")]:
        stored[key.replace("2", "3", 1)] = stored[key].clone()


BAD = [
    (other_scale, "one tensor scale to be one stack, got .* for 'experts.0.down_proj.weight_gl"),
    (without("experts.1.up_proj.weight_scale"), "the stack 'experts.gate_up_proj' alike, .*1.up_p"),
    (without("experts.2.down"), "got 'experts.0.down_proj.weight_.*' and none for 'experts.2.down"),
    (in_high_precision, "none for 'experts.2.down_proj.weight'; .* in high precision"),
    (other_rows, "one shape and dtype to be stacked, got .* in 'experts.down_proj.weight_packed'"),
    (more_experts, "such as 'experts.3.down_proj"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD)
def test_checkpoints_that_do_not_fit(change, message, tmp_path):
    export_checkpoint(make("nvfp4"), tmp_path)
    file = tmp_path / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    stored = load_file(file)
    change(stored)
    save_file(stored, file, metadata)
    model = make(seed=1)
    before = tensors(model)
    with pytest.raises(ValueError, match=message):
        import_checkpoint(model, tmp_path)
    assert_identical(tensors(model), before)


def export_sharded(rank, folder):
    model = make("nvfp4")
    fully_shard(model.experts, mesh=all_ranks())
    fully_shard(model, mesh=all_ranks())
    export_checkpoint(model, folder)


def test_export_under_fsdp(tmp_path):
    run_ranks(export_sharded, 2, tmp_path / "sharded")
    export_checkpoint(make("nvfp4"), tmp_path / "whole")
    files = [tmp_path / name / "model.safetensors" for name in ("sharded", "whole")]
    assert_identical(*map(load_file, files))


def test_stacks_of_several_modules_are_turned(tmp_path):
    """Checkpoints have [experts, out, in], and models know whether they do."""
    model, other = (nn.Sequential(make(seed=seed), make(seed=seed + 1)) for seed in (0, 2))
    for part in (*model, *other):
        part.experts.is_transposed = True  # whole stacks are stored
    quantize_model(model, "mxfp4", lambda module, name: name.endswith("experts"))
    export_checkpoint(model, tmp_path, "mxfp4")
    for part in other:
        for name, stack in part.experts.named_parameters():
            setattr(part.experts, name, nn.Parameter(stack.detach().mT.contiguous()))
    chosen: list[str] = []
    other.set_experts_implementation = chosen.append
    import_checkpoint(other, tmp_path)
    assert_identical(tensors(other), tensors(model))
    assert chosen == ["grouped_mm"] and not any(part.experts.is_transposed for part in other)
