"""Tensors for a running engine: the bytes of a checkpoint, fused where engines fuse them."""

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fp4adam import (
    FP4Adam,
    NVFP4Quantizer,
    export_checkpoint,
    export_tensors,
    hf_scale_groups,
    quantize_model,
)
from helpers import assert_identical
from ranks import all_ranks, run_ranks

CASES = [
    ("compressed-tensors", "nvfp4"),
    ("compressed-tensors", "mxfp8"),
    ("modelopt", "nvfp4"),
    ("modelopt", "mxfp8"),
    ("fp8", "float8block"),
]


class Block(nn.Module):
    """What engines fuse, what they do not, and a weight in high precision with a bias."""

    def __init__(self, rows: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(128, bias=False)
        self.q_proj = nn.Linear(128, rows, bias=True)
        self.k_proj = nn.Linear(128, 128, bias=True)
        self.v_proj = nn.Linear(128, 128, bias=True)
        self.gate_proj = nn.Linear(128, 128, bias=False)
        self.up_proj = nn.Linear(128, 96, bias=False)
        self.down_proj = nn.Linear(96, 128, bias=False)


def build(recipe: Any, scale_groups: Any = hf_scale_groups, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.block, model.lm_head = Block(**options), nn.Linear(128, 10)
    model.bfloat16()
    is_nvfp4 = recipe == "nvfp4" or isinstance(recipe, NVFP4Quantizer)
    options = {"scale_groups": scale_groups} if is_nvfp4 and scale_groups else {}
    quantize_model(model, recipe, **options)
    optimizer = FP4Adam(model.named_parameters(), lr=1e-2, **options)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, dtype=param.dtype)
    optimizer.step()
    return model


def written(model: nn.Module, layout: str, folder: Any) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of partial blocks
        export_checkpoint(model, folder, layout)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("layout", "recipe"), CASES)
def test_tensors_are_those_of_a_checkpoint(layout, recipe, tmp_path):
    model = build(recipe)
    given = dict(export_tensors(model, layout))
    assert_identical(given, written(model, layout, tmp_path))
    assert all(tensor.is_contiguous() for tensor in given.values())


@pytest.mark.parametrize(("layout", "recipe"), CASES)
def test_fused_tensors_are_rows_of_the_parts(layout, recipe, tmp_path):
    model = build(recipe)
    stored = written(model, layout, tmp_path)
    expected = {}
    for name, value in stored.items():
        layer, _, key = name.rpartition(".")
        parts = {"q_proj": "qkv_proj", "k_proj": "", "v_proj": "", "gate_proj": "gate_up_proj"}
        parent, _, part = layer.rpartition(".")
        whole = {**parts, "up_proj": ""}.get(part, part)
        if whole == "":
            continue
        members = {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up")}.get(whole)
        if members:
            rows = [stored[f"{parent}.{member}_proj.{key}"] for member in members]
            rows = [row.reshape(-1, *row.shape[1:]) for row in rows]
            # Not every build of torch joins FP8 numbers.
            value = torch.cat([row.view(torch.uint8) for row in rows]).view(rows[0].dtype)
        expected[f"{parent}.{whole}.{key}" if parent else name] = value
    actual = dict(export_tensors(model, layout, fused=True))
    assert_identical(actual, expected)
    if recipe == "nvfp4":
        scale = actual[
            f"block.qkv_proj.weight_{'global_scale' if layout != 'modelopt' else 'scale_2'}"
        ]
        assert scale.shape == (3,) and len({*scale.tolist()}) == 1
    assert actual["block.qkv_proj.bias"].shape == (512,)


def test_nvfp4_takes_9_16_of_a_byte_per_weight():
    model = build("nvfp4")
    for fused in (False, True):
        tensors = dict(export_tensors(model, fused=fused))
        weights = {n: t for n, t in tensors.items() if "_proj.weight" in n and "global" not in n}
        count = sum(p.numel() for n, p in model.named_parameters() if "_proj.weight" in n)
        assert sum(t.nbytes for t in weights.values()) == count * 9 / 16


def test_codes_are_the_models_own_memory():
    model = build("nvfp4")
    tensors = dict(export_tensors(model))
    weight = model.block.q_proj.weight
    assert tensors["block.q_proj.weight_packed"].data_ptr() == weight.rowwise_data.data_ptr()
    assert tensors["lm_head.weight"].data_ptr() == model.lm_head.weight.data_ptr()
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_weights_are_read_when_their_turn_comes():
    model = build("nvfp4")
    iterator = export_tensors(model)
    before = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert before.any() and not dict(iterator)["lm_head.weight"].any()


def test_names_of_the_engine():
    model = build("mxfp8")
    names = {n for n, _ in export_tensors(model, fused=True, names=lambda name: f"engine.{name}")}
    assert names == {f"engine.{name}" for name, _ in export_tensors(model, fused=True)}
    assert "engine.block.gate_up_proj.weight_scale" in names
    with pytest.raises(ValueError, match="names must be unique, got 'x.weight' for 'block.norm"):
        export_tensors(model, names=lambda name: "x.weight")
    with pytest.raises(ValueError, match="names that end in 'weight', got 'block.q_proj.codes'"):
        export_tensors(model, names=lambda name: name.replace("proj.weight", "proj.codes"))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(["q_proj", "k_proj", "v_proj", "gate_proj"]), unique=True))
def test_parts_that_are_missing_leave_the_others_as_they_are(removed):
    model = build("mxfp8")
    for name in removed:
        delattr(model.block, name)
    names = {name.rpartition(".")[0] for name, _ in export_tensors(model, fused=True)}
    whole = {"block.qkv_proj": {"q_proj", "k_proj", "v_proj"}}
    whole["block.gate_up_proj"] = {"gate_proj", "up_proj"}
    for fused, parts in whole.items():
        assert (fused in names) == parts.isdisjoint(removed)
        for part in parts - {*removed}:
            assert (f"block.{part}" in names) != (fused in names)


def test_what_cannot_be_fused():
    with pytest.raises(ValueError, match="one amax to be fused, got .*scale_groups"):
        export_tensors(build("nvfp4", scale_groups=None), fused=True)
    with pytest.raises(ValueError, match="multiple of 128 to be fused .* got 160 of 'block.q_proj"):
        export_tensors(build("float8block", rows=160), "fp8", fused=True)
    model = build("mxfp8")
    model.block.k_proj = nn.Linear(128, 128)
    with pytest.raises(ValueError, match="alike to be fused, got 'block.q_proj.weight' quantized"):
        export_tensors(model, fused=True)
    assert dict(export_tensors(model))
    with pytest.raises(ValueError, match="for export_tensors, got 'awq'"):
        export_tensors(model, "awq")
    with pytest.raises(ValueError, match="in Float8BlockTensor for layout 'fp8'"):
        export_tensors(model, "fp8")


def compare_ranks(rank: int) -> None:
    for layout, recipe, fused in (
        ("compressed-tensors", "nvfp4", True),
        ("modelopt", "mxfp8", True),
        ("fp8", "float8block", False),
    ):
        expected = dict(export_tensors(build(recipe), layout, fused=fused))
        model = build(recipe)
        fully_shard(model, mesh=all_ranks())
        actual = {n: t.clone() for n, t in export_tensors(model, layout, fused=fused)}
        assert_identical(actual, expected)
    amaxes = build("nvfp4", scale_groups=None)
    fully_shard(amaxes, mesh=all_ranks())
    with pytest.raises(ValueError, match="one amax to be fused"):  # on every rank
        list(export_tensors(amaxes, fused=True))


def test_shards_are_gathered_in_the_same_order_on_all_ranks():
    run_ranks(compare_ranks, 2)


def test_a_matrix_of_zeros():
    model = build("nvfp4")
    with torch.no_grad():
        model.block.down_proj.weight.zero_()
    tensors = dict(export_tensors(model))
    assert not tensors["block.down_proj.weight_packed"].any()
    assert math.isfinite(tensors["block.down_proj.weight_global_scale"].item())
