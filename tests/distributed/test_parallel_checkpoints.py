"""Checkpoints move between tensor parallelism, FSDP2, DDP and one process, bit for bit."""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fp4adam import FP4Adam, QuantizedTensor
from fp4adam.distributed.dtensor import local
from ranks import all_ranks, home, run_ranks
from test_tensor_parallel import RECIPES, assert_parts, build, distribute, part_of, set_grads
from twins import OPTIONS, fixed_grads

Pair = tuple[nn.Module, FP4Adam]
NAMES = ["nvfp4", "mxfp8", "float8block"]
FULL = StateDictOptions(full_state_dict=True)


def make(name: str, layout: str, seed: int = 0, **options: Any) -> Pair:
    model = build(*RECIPES[name], seed=seed)
    if layout == "parallel":
        distribute(model, 2)
    elif layout == "sharded":
        fully_shard(model, mesh=all_ranks())
    elif layout == "hybrid":
        names = ("replicate", "shard")
        fully_shard(model, mesh=init_device_mesh(home().type, (2, 2), mesh_dim_names=names))
    elif layout == "replicated":
        model = DistributedDataParallel(model)
    return model, FP4Adam(model.parameters(), **OPTIONS, **options)


def take_steps(pair: Pair, seeds: Iterable[int]) -> Pair:
    model, optimizer = pair
    for seed in seeds:
        set_grads(model, fixed_grads(model, seed))
        optimizer.step()
    optimizer.zero_grad()
    return pair


def state_of(pair: Pair) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(*pair), strict=True))


def load(pair: Pair, path: Path) -> Pair:
    state = state_of(pair)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(*pair, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return pair


def assert_same(pair: Pair, expected: Pair) -> None:
    """Parameters and states are those of one process, as far as this rank has them."""
    assert_parts(pair[0], getattr(expected[0], "module", expected[0]))
    states = (each[1].state_dict()["state"].values() for each in (pair, expected))
    for param, a, b in zip(pair[0].parameters(), *states, strict=True):
        assert a.keys() == b.keys() and a["step"] == b["step"]
        for key in b.keys() - {"step"}:
            assert torch.equal(local(a[key]), part_of(param, b[key])), key


def hop(
    rank: int, names: list[str], source: Path | None, target: Path, layout: str, options: dict
) -> None:
    for name in names:
        expected = take_steps(make(name, "alone", **options), range(3))
        pair = make(name, layout, seed=0 if source is None else 1, **options)
        take_steps(pair, range(3)) if source is None else load(pair, source / name)
        assert_same(pair, expected)
        dcp.save(state_of(pair), checkpoint_id=target / name)
        assert_same(take_steps(pair, range(3, 5)), take_steps(expected, range(3, 5)))


# On three ranks boundaries cut blocks.
HOPS = [(4, "parallel"), (3, "sharded"), (4, "hybrid"), (2, "parallel"), (1, "alone")]
INT8_HOPS = [(1, "alone"), (3, "sharded"), (4, "hybrid"), (1, "alone")]
MORE_HOPS = [(2, "parallel"), (1, "alone"), (4, "parallel"), (2, "replicated"), (2, "parallel")]
MORE_HOPS += [(3, "sharded"), (4, "parallel"), (2, "sharded"), (2, "replicated"), (4, "sharded")]


@pytest.mark.parametrize(
    "names, hops, options",
    [
        (["nvfp4"], HOPS, {}),
        # Pieces of 43 rows cut blocks of shards of 64 rows, which share no scales.
        (["mxfp8"], [(3, "sharded"), (2, "sharded")], {}),
        (["nvfp4", "float8block"], INT8_HOPS, {"master_weight_dtype": torch.int8}),
        pytest.param([*NAMES, "float8"], MORE_HOPS, {}, marks=pytest.mark.exhaustive),
    ],
    ids=["quick", "cut", "int8", "all"],
)
def test_any_layout_resumes_what_any_other_has_saved(names, hops, options, tmp_path):
    source = None
    for i, (world_size, layout) in enumerate(hops):
        try:
            run_ranks(hop, world_size, names, source, tmp_path / str(i), layout, options)
        except Exception as error:
            raise AssertionError(f"hop {i}, {layout} on {world_size} ranks") from error
        source = tmp_path / str(i)


class PatientWriter(dcp.FileSystemWriter):
    """Writes nothing before the steps after the call have been taken."""

    def __init__(self, path: Path, may_write: threading.Event) -> None:
        super().__init__(path)
        self._may_write = may_write

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        assert self._may_write.wait(60)
        return super().write_data(*args, **kwargs)


def save_in_the_background(rank: int, path: Path) -> None:
    group = dist.new_group(backend="gloo")
    for layout in ("parallel", "sharded"):
        pair = make("nvfp4", layout)
        for i in range(2):
            take_steps(pair, range(i, i + 1))
            may_write = threading.Event()
            writer = PatientWriter(path / layout / str(i), may_write)
            saving = dcp.async_save(state_of(pair), storage_writer=writer, process_group=group)
            take_steps(pair, range(100, 103))
            may_write.set()
            saving.result()
            load(pair, path / layout / str(i))
            assert_same(pair, take_steps(make("nvfp4", "alone"), range(i + 1)))


def test_what_is_saved_in_the_background_is_the_state_of_the_call(tmp_path):
    run_ranks(save_in_the_background, 2, tmp_path)


def move_states(rank: int) -> None:
    """Whole state dictionaries go into and out of distributed models."""
    for name in NAMES:
        alone = take_steps(make(name, "alone"), range(3))
        pair = make(name, "parallel", seed=1)
        model_state, optimizer_state = get_state_dict(*alone)
        set_state_dict(
            *pair, model_state_dict=model_state, optim_state_dict=optimizer_state, options=FULL
        )
        assert_same(pair, alone)
        whole: dict[str, Tensor] = get_model_state_dict(pair[0], options=FULL)
        for key, value in whole.items():
            expected = dict(alone[0].named_parameters())[key].detach()
            if isinstance(expected, QuantizedTensor):
                expected = expected.dequantize(expected.dtype)
            assert torch.equal(value, expected), key
        assert_same(take_steps(pair, range(3, 5)), take_steps(alone, range(3, 5)))
        # Rounded values beside masters, as plain checkpoints have them.
        other = make(name, "parallel", seed=2)
        set_model_state_dict(other[0], whole, options=FULL)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_whole_state_dictionaries(world_size):
    run_ranks(move_states, world_size)
