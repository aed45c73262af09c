"""Checkpoints of torch.distributed.checkpoint: any layout resumes any other one, bit for bit."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import AdamW

from helpers import assert_identical
from late_link import LateLink, offload_to
from ranks import NIGHTLY, run
from twins import (
    FORMATS,
    FROM_RANK_0,
    FULL,
    OPTIONS,
    Twin,
    build,
    distribute,
    fixed_grads,
    gathered_bytes,
    load_values,
    overwrite,
    set_states,
    take_step,
    whole_bytes,
)


def state_of(twin: Twin) -> dict[str, Any]:
    state = get_state_dict(twin.model, twin.optimizers[1])
    return dict(zip(("model", "optimizer"), state, strict=True))


def load(twin: Twin, path: Path, partly: bool = False) -> None:
    """What the documentation of torch.distributed.checkpoint says to do."""
    state = state_of(twin)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=partly)
    dcp.load(state, checkpoint_id=path, planner=planner)
    set_states(twin, (state["model"], state["optimizer"]), StateDictOptions())


def hop(rank: int, cases: list[tuple], source: Path | None, target: Path, *how: str) -> None:
    """Three steps, or what has been saved after as many; then two more."""
    layout, states = how
    for i, case in enumerate(cases):
        with offload_to(LateLink(), 12 * 16 * 32):
            twin = Twin(layout, *case, states)
            for seed in range(3):
                grads = fixed_grads(twin.whole, seed)
                take_step(twin.whole, twin.optimizers[0], grads)
                if source is None:
                    take_step(twin.model, twin.optimizers[1], grads)
            if source is not None:
                twin.renew()
                load(twin, source / str(i))
            dcp.save(state_of(twin), checkpoint_id=target / str(i))
            for seed in range(3, 5):
                twin.step(fixed_grads(twin.whole, seed))
            overwrite(twin, 0)
            twin.step([None, *fixed_grads(twin.whole, 5)[1:]])


SMALL = [("nvfp4", 64, 32)]
ALL = [(recipe, 256, 64) for recipe in FORMATS]
HOPS = [(4, "parallel"), (3, "sharded"), (2, "ddp"), (4, "hybrid"), (2, "parallel"), (1, "alone")]
INT8_HOPS = [(1, "alone"), (3, "sharded"), (4, "hybrid"), (1, "alone")]
FACTORED_HOPS = [(2, "sharded"), (3, "root"), (1, "alone"), (4, "root")]
MORE_HOPS = [(2, "parallel"), (1, "alone"), (4, "parallel"), (2, "ddp"), (2, "parallel")]
MORE_HOPS += [(3, "sharded"), (4, "parallel"), (2, "sharded"), (2, "ddp"), (4, "sharded")]


@pytest.mark.parametrize(
    "cases, hops",
    [
        (SMALL, [(*each, "") for each in HOPS]),
        # Pieces of 43 rows cut blocks of shards of 64 rows, which share no scales.
        ([("mxfp8", 128, 64)], [(3, "sharded", ""), (2, "sharded", "")]),
        pytest.param(
            [*SMALL, ("float8block", 64, 32)],
            [(*each, "int8") for each in INT8_HOPS],
            marks=pytest.mark.slow,
        ),
        (SMALL, [(2, "sharded", states) for states in ("offloaded", "", "offloaded")]),
        ([*SMALL, ("mxfp4", 64, 32)], [(2, "sharded", "8bit")] * 2),
        # On four ranks the last one has none of five rows.
        pytest.param(
            [*SMALL, ("float8block", 5, 32)],
            [(*each, "factored") for each in FACTORED_HOPS],
            marks=pytest.mark.slow,
        ),
        pytest.param(ALL, [(*each, "") for each in MORE_HOPS], marks=NIGHTLY),
    ],
    ids=["quick", "cut", "int8", "offloaded", "8bit", "factored", "all"],
)
@pytest.mark.table
def test_any_layout_resumes_what_any_other_has_saved(cases, hops, tmp_path):
    source = None
    for i, (world_size, *how) in enumerate(hops):
        try:
            run(hop, world_size, cases, source, tmp_path / str(i), *how)
        except Exception as error:
            raise AssertionError(f"hop {i}, {how} on {world_size} ranks") from error
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
    for layout, states in (("parallel", ""), ("sharded", "fp16 masters")):
        twin = Twin(layout, "nvfp4", 64, 32, states)
        for i in range(4):
            for seed in range(100 * i, 100 * i + 2):
                twin.step(fixed_grads(twin.whole, seed))
            if i % 2:
                load_values(twin, i)  # quantized only by the next all-gather or step
            expected = [
                copy.deepcopy(each.state_dict()) for each in (twin.whole, twin.optimizers[0])
            ]
            may_write = threading.Event()
            writer = PatientWriter(path / layout / str(i), may_write)
            saving = dcp.async_save(state_of(twin), storage_writer=writer, process_group=group)
            load_values(twin, 10)
            twin.step(fixed_grads(twin.whole, 10))
            may_write.set()
            saving.result()
            for each, state in zip((twin.whole, twin.optimizers[0]), expected, strict=True):
                each.load_state_dict(state)
            load(twin, path / layout / str(i))


@pytest.mark.slow
def test_what_is_saved_in_the_background_is_the_state_of_the_call(tmp_path):
    run(save_in_the_background, 2, tmp_path)


def load_plain(rank: int, path: Path) -> None:
    """What was trained without this package: weights, and AdamW's states, which have no masters."""
    for case in [("nvfp4", 64, 32), ("float8block", 64, 32), ("float8block-fp32", 5, 16)]:
        for dtype in (torch.float32, torch.bfloat16):
            plain = [build(*case[1:], None, dtype) for _ in range(2)]
            distribute(plain[1], "root")
            optimizers = [AdamW(model.parameters(), **OPTIONS) for model in plain]
            for seed in range(3):
                for model, optimizer in zip(plain, optimizers, strict=True):
                    take_step(model, optimizer, fixed_grads(plain[0], seed))
            source = path / f"{case} {dtype}"
            states = get_state_dict(plain[1], optimizers[1])
            dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=source)
            weights, states = get_state_dict(plain[0], optimizers[0])
            for layout in ("root", "root, meta"):
                twin = Twin(layout, case[0], *case[1:])
                twin.whole.load_state_dict(weights)
                twin.renew()
                mine = copy.deepcopy(weights) if rank == 0 else {}
                set_model_state_dict(twin.model, mine, options=FROM_RANK_0)
                assert_identical(gathered_bytes(twin.model), whole_bytes(twin.whole))
                set_state_dict(
                    twin.whole,
                    twin.optimizers[0],
                    model_state_dict=copy.deepcopy(weights),
                    optim_state_dict=copy.deepcopy(states),
                    options=FULL,
                )
                twin.renew()
                load(twin, source, partly=True)
                for group in (g for optimizer in twin.optimizers for g in optimizer.param_groups):
                    group["lr"] = 0.0
                twin.step(fixed_grads(twin.whole, 4))
                for name, param in twin.whole.named_parameters():  # masters are not rounded
                    master = twin.optimizers[0].state[param]["master_param"]
                    start = weights[name] if param.ndim == 2 else weights[name].to(param.dtype)
                    assert torch.equal(master, start.float()), name


@pytest.mark.slow
def test_plain_weights_and_states_of_adamw_load_into_quantized_shards(tmp_path):
    run(load_plain, 3, tmp_path)
