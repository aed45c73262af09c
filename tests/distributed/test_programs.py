"""Random programs of steps and overwrites on several ranks: the bits of one process throughout."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fp4adam import Float8Quantizer, FP4Adam, quantize_model
from fp4adam.distributed.dtensor import like, local, part_for
from helpers import assert_identical, random
from ranks import all_ranks, home, run
from test_fsdp import full, gathered_bytes, set_grads, whole_bytes

# Rows of three weights, the first two of which may share their amax: ranks have 48, 16 or 32 of
# them, or 24 and less, which cut blocks.
ROWS, COLS = (48, 64, 32), 32
OPTIONS = dict(lr=1e-2, weight_decay=0.1)
RECIPES = {"delayed": Float8Quantizer(scaling="delayed", amax_history_len=3)}


def _part(param: Tensor, value: Tensor) -> Tensor:
    return like(param, part_for(param, value))


# Full overwrites of one parameter, whole or sharded.
WRITES = {
    "copy_": lambda model, name, value: model.get_parameter(name).copy_(
        _part(model.get_parameter(name), value)
    ),
    "copy_ of BF16": lambda model, name, value: model.get_parameter(name).copy_(
        _part(model.get_parameter(name), value.bfloat16())
    ),
    "copy_ of the local part": lambda model, name, value: local(model.get_parameter(name)).copy_(
        part_for(model.get_parameter(name), value)
    ),
    "fill_": lambda model, name, value: model.get_parameter(name).fill_(value[0, 0].item()),
    "load_state_dict": lambda model, name, value: model.load_state_dict(
        {name: _part(model.get_parameter(name), value)}, strict=False
    ),
}

names = st.integers(0, len(ROWS) - 1).map("{}.weight".format)
seeds = st.integers(0, 100)
steps = st.tuples(st.just("step"), st.sets(names, max_size=2), seeds)
writes = st.tuples(st.sampled_from([*WRITES]), names, seeds)
others = st.tuples(st.sampled_from(["new memory", "state_dict"]), st.none(), seeds)
programs = st.tuples(
    st.sampled_from(["nvfp4", "mxfp8", "float8block", "float8", "delayed"]),
    st.booleans(),
    st.lists(steps | writes | writes | others, min_size=2, max_size=6),
)


def build(recipe: str, grouped: bool) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(COLS, rows, bias=False) for rows in ROWS)).to(home())
    with torch.no_grad():
        for seed, param in enumerate(model.parameters()):
            param.copy_(random(tuple(param.shape), seed, scale=0.1 * 3**seed))
    groups = [["0.weight", "1.weight"]] if grouped and recipe in ("nvfp4", "float8") else ()
    return quantize_model(model, RECIPES.get(recipe, recipe), scale_groups=groups)


def call(model: nn.Module, optimizer: Any, what: str, name: Any, seed: int) -> None:
    """Take one step of a program."""
    if what == "step":
        scale = 10.0 ** (seed % 3 - 1)
        grads = [
            random(tuple(param.shape), 10 * seed + i, home().type, scale)
            for i, param in enumerate(model.parameters())
        ]
        set_grads(model, grads)
        for own in sorted(name):
            model.get_parameter(own).grad = None
        optimizer.step()
    elif what == "new memory":
        model._apply(torch.clone)
    elif what == "state_dict":
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        shape = tuple(model.get_parameter(name).shape)
        with torch.no_grad():
            WRITES[what](model, name, random(shape, seed, home().type, 10.0 ** (seed % 3 - 1)))


def run_programs(rank: int, drawn: list[tuple]) -> None:
    for program in drawn:
        recipe, grouped, calls = program
        whole, sharded = (build(recipe, grouped) for _ in range(2))
        fully_shard(sharded, mesh=all_ranks())
        pairs = [(model, FP4Adam(model.parameters(), **OPTIONS)) for model in (whole, sharded)]
        for i, each in enumerate([*calls, ("step", set(), 1), ("step", set(), 2)]):
            where = f"call {i} of {program}"
            for pair in pairs:
                call(*pair, *each)
            assert_identical(gathered_bytes(sharded), whole_bytes(whole), where)
            (_, expected), (_, optimizer) = pairs
            if each[0] == "step":
                for a, b in zip(sharded.parameters(), whole.parameters(), strict=True):
                    mine, theirs = optimizer.state[a], expected.state[b]
                    assert mine.keys() == theirs.keys(), where
                    for key in sorted(theirs.keys() - {"step"}):
                        assert_identical(full(mine[key]), theirs[key], f"{key}, {where}")


# A step without a gradient leaves weights as others have written them: those of a scale group with
# amaxes of their own, and the history of delayed scaling.
NO_GRADIENTS = [
    (
        recipe,
        True,
        [("step", set(), 0), (how, "1.weight", 2), ("step", {"0.weight", "1.weight"}, 3)],
    )
    for recipe in ("nvfp4", "float8", "delayed")
    for how in ("copy_", "load_state_dict")
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_steps_without_gradients_have_the_bits_of_one_process(world_size: int) -> None:
    run(run_programs, world_size, NO_GRADIENTS)


@pytest.mark.parametrize(
    "examples", [2, pytest.param(8, marks=pytest.mark.exhaustive)], ids=["some", "many"]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_programs_have_the_bits_of_one_process(world_size: int, examples: int) -> None:
    """Each example starts ranks once and runs some programs there; the first one is short."""

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @given(drawn=st.lists(programs, min_size=6, max_size=6))
    def check(drawn: list[tuple]) -> None:
        run(run_programs, world_size, drawn, timeout=300.0)

    check()
