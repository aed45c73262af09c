"""Tensors for a running engine: the bytes of a checkpoint."""

import warnings
from typing import Any

import pytest
import torch
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


def test_what_is_refused():
    with pytest.raises(ValueError, match="layout must be one of .* got 'awq'"):
        export_tensors(build("mxfp8"), "awq")
    with pytest.raises(ValueError, match="for layout 'fp8', Float8BlockTensor, got MXFP8"):
        export_tensors(build("mxfp8"), "fp8")


def compare_ranks(rank: int) -> None:
    for layout, recipe in CASES:
        expected = dict(export_tensors(build(recipe), layout))
        model = build(recipe)
        fully_shard(model, mesh=all_ranks())
        assert_identical({n: t.clone() for n, t in export_tensors(model, layout)}, expected)


def test_shards_are_gathered_in_the_same_order_on_all_ranks():
    run_ranks(compare_ranks, 2)
