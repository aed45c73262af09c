"""Checkpoints of sharded training: any number of ranks resumes them, bit for bit."""

import copy
import os
from collections.abc import Iterable, Iterator
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
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import AdamW, Optimizer

from fp4adam import (
    Float8BlockQuantizer,
    FP4Adam,
    QuantizedTensor,
)
from fp4adam.distributed.dtensor import like, local, part_for
from fp4adam.optim.state_tensor import SCALES
from helpers import assert_identical
from ranks import all_ranks, home, run, use_kernels
from twins import build, bytes_of, fixed_grads, full, gathered_bytes, whole_bytes

OPTIONS = dict(lr=1e-2, weight_decay=0.1)
FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

# On three ranks the boundaries of 64 rows cut blocks, and those of 96 do not; of 5 rows, a fourth
# rank has none.
CASES = [
    ("nvfp4", 64, 32),
    ("mxfp8", 96, 64),
    ("float8block", 64, 32),
    ("float8", 64, 32),
    (Float8BlockQuantizer(force_pow_2_scales=False), 5, 16),
]

Pair = tuple[nn.Module, Optimizer]


def make(
    case: tuple[Any, int, int],
    layout: str = "sharded",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    optimizer_class: type[Optimizer] = FP4Adam,
    **options: Any,
) -> Pair:
    """A model with other values for each seed, and its optimizer."""
    recipe, rows, cols = case
    with torch.device("meta" if layout == "meta" else home()):
        model = build(rows, cols, recipe, dtype)
    if layout != "meta":
        generator = torch.Generator().manual_seed(seed)
        for param in model.parameters():
            value = torch.randn(param.shape, generator=generator).mul_(0.1)
            with torch.no_grad():
                param.copy_(value.to(dtype))
    if layout != "alone":
        fully_shard(model, mesh=all_ranks())
    if layout == "meta":
        model.to_empty(device=home())
    return model, optimizer_class(model.parameters(), **OPTIONS, **options)


def take_steps(pair: Pair, seeds: Iterable[int]) -> Pair:
    """Steps by gradients that depend on nothing but the seeds."""
    model, optimizer = pair
    for seed in seeds:
        for param, grad in zip(model.parameters(), fixed_grads(model, seed), strict=True):
            param.grad = like(param, part_for(param, grad).contiguous())
        optimizer.step()
    optimizer.zero_grad()
    return pair


def snapshot(pair: Pair) -> list[dict[str, Tensor]]:
    """The bytes of whole parameters, and their whole states."""
    model = pair[0]
    params = gathered_bytes(model) if isinstance(model, FSDPModule) else whole_bytes(model)
    return copy.deepcopy([*params, *numbers(pair)])


def numbers(pair: Pair) -> list[dict[str, Tensor]]:
    """The states of whole parameters as the numbers that they stand for."""
    states = pair[1].state_dict()["state"]
    return [{name: full(x).clone() for name, x in states[i].items()} for i in range(len(states))]


def state_of(pair: Pair) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(*pair), strict=True))


def load(pair: Pair, path: Path, partly: bool = False) -> Pair:
    """What the documentation of torch.distributed.checkpoint says to do."""
    state = state_of(pair)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=partly)
    dcp.load(state, checkpoint_id=path, planner=planner)
    set_state_dict(*pair, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return pair


# The functions of torch.distributed.checkpoint.state_dict, and those of model and optimizer


def transfers(saved: Pair, alone: Pair, case: tuple[Any, int, int]) -> Iterator[tuple[str, Pair]]:
    """New models and optimizers, loaded with everything that ``saved`` or its twin holds."""
    options = {
        "local": StateDictOptions(),
        "offloaded": StateDictOptions(cpu_offload=True),
        "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
        "full": FULL,
    }
    for name, option in options.items():
        model_state, optimizer_state = get_state_dict(*saved, options=option)
        pair = make(case, seed=1)
        states = dict(model_state_dict=model_state, optim_state_dict=optimizer_state)
        set_state_dict(*pair, **states, options=option)
        yield name, pair

    on_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = get_state_dict(*saved, options=on_rank_0)
    quantized = copy.deepcopy(get_state_dict(*alone))
    if dist.get_rank() > 0:
        assert gathered == ({}, {})
        quantized = ({}, {})
    for name, states in {"from rank 0": gathered, "quantized, from rank 0": quantized}.items():
        pair = make(case, seed=1)
        set_model_state_dict(pair[0], states[0], options=FROM_RANK_0)
        set_optimizer_state_dict(*pair, states[1], options=FROM_RANK_0)
        yield name, pair

    model_state, optimizer_state = copy.deepcopy(get_state_dict(*alone))
    pair = make(case, seed=1)
    states = dict(model_state_dict=model_state, optim_state_dict=optimizer_state)
    set_state_dict(*pair, **states, options=FULL)
    yield "quantized, on every rank", pair

    # Masters beside weights that have been rounded to the nominal dtype in place of the format.
    rounded, states = dict(alone[0].state_dict()), copy.deepcopy(alone[1].state_dict())
    for name, state in zip(rounded, states["state"].values(), strict=True):
        rounded[name] = state["master_param"].bfloat16()
    pair = make(case, seed=1)
    set_model_state_dict(pair[0], rounded, options=FULL)
    pair[1].load_state_dict(states)
    yield "plain weights, then masters", pair

    for forward in (False, True):
        model, optimizer = make(case, seed=1)
        optimizer.load_state_dict(saved[1].state_dict())
        model.load_state_dict(saved[0].state_dict())
        if forward:
            forward_alone(model)
        yield f"model after optimizer, forward={forward}", (model, optimizer)


def load_rounded_weights(rank: int) -> None:
    """Masters first, then weights that are these in fewer bits: masters lose nothing."""
    for case in CASES:
        alone = take_steps(make(case, "alone"), range(3))
        for dtype in (torch.bfloat16, torch.float32):
            pair = make(case, seed=1)
            pair[1].load_state_dict(copy.deepcopy(alone[1].state_dict()))
            states = alone[1].state_dict()["state"].values()
            masters = [state["master_param"].to(dtype) for state in states]
            weights = dict(zip(alone[0].state_dict(), masters, strict=True))
            set_model_state_dict(pair[0], weights, options=FULL)
            expected = snapshot(take_steps(copy.deepcopy(alone), range(3, 5)))
            assert_identical(snapshot(take_steps(pair, range(3, 5))), expected)


def test_weights_in_high_precision_do_not_replace_masters():
    run(load_rounded_weights, 3)


@torch.no_grad()
def forward_alone(model: nn.Module) -> None:
    model(torch.ones(2, model[0].in_features, dtype=torch.bfloat16, device=home()))
    model.reshard()


def transfer(rank: int, chosen: slice) -> None:
    for case in CASES[chosen]:
        saved, alone = (take_steps(make(case, layout), range(3)) for layout in ("sharded", "alone"))
        before, expected = snapshot(alone), snapshot(take_steps(copy.deepcopy(alone), range(3, 5)))
        for name, pair in transfers(saved, alone, case):
            try:
                assert_identical(snapshot(pair), before)
                assert_identical(snapshot(take_steps(pair, range(3, 5))), expected)
            except AssertionError as error:
                raise AssertionError(f"{case}, {name}") from error
        assert_identical(snapshot(saved), before)


@pytest.mark.parametrize(
    "world_size, chosen",
    [
        (3, slice(0, None, 2)),
        pytest.param(3, slice(1, None, 2), marks=pytest.mark.exhaustive),
        pytest.param(1, slice(None), marks=pytest.mark.exhaustive),
    ],
    ids=["nvfp4 and Float8Block", "mxfp8 and float8", "one rank"],
)
def test_every_way_of_moving_states_keeps_the_bits(world_size, chosen):
    run(transfer, world_size, chosen)


def restart(rank: int) -> None:
    """A model that is loaded after the optimizer, and is another one, restarts the masters."""
    for case in CASES:
        results = []
        for layout in ("sharded", "alone"):
            _, optimizer = take_steps(make(case, layout), range(3))
            other, _ = take_steps(make(case, layout, seed=2), range(1))
            model, resumed = make(case, layout, seed=1)
            resumed.load_state_dict(optimizer.state_dict())
            model.load_state_dict(other.state_dict())
            results.append(snapshot(take_steps((model, resumed), range(3, 5))))
        assert_identical(*results)


def test_another_model_restarts_the_masters_of_shards():
    run(restart, 3)


# Plain weights, and states without masters


def save_plain(rank: int, path: Path) -> list[Any]:
    """Train as without this package; what there is then, whole."""
    saved = []
    for i, (_, rows, cols) in enumerate(CASES):
        for dtype in (torch.float32, torch.bfloat16):
            pair = make((None, rows, cols), dtype=dtype, optimizer_class=AdamW)
            take_steps(pair, range(3))
            dcp.save(state_of(pair), checkpoint_id=path / f"{i} {dtype}")
            saved.append((i, dtype, *get_state_dict(*pair, options=FULL)))
    return saved


def plain_loads(
    path: Path, weights: dict[str, Tensor], states: dict[str, Any], case: Any, layout: str
) -> Iterator[tuple[str, bool, Pair]]:
    """Quantized models loaded from plain weights, and whether moments were loaded as well."""

    def fresh() -> Pair:
        return make(case, layout, seed=1)

    pair = fresh()
    state = get_model_state_dict(pair[0])
    dcp.load({"model": state}, checkpoint_id=path)
    set_model_state_dict(pair[0], state)
    yield "weights", False, pair
    pair = fresh()
    mine = copy.deepcopy(weights) if dist.get_rank() == 0 else {}
    set_model_state_dict(pair[0], mine, options=FROM_RANK_0)
    yield "weights from rank 0", False, pair
    yield "all", True, load(fresh(), path, partly=True)
    pair = fresh()
    full_states = dict(model_state_dict=copy.deepcopy(weights), optim_state_dict=states)
    set_state_dict(*pair, **copy.deepcopy(full_states), options=FULL)
    yield "all, full", True, pair


def load_plain(rank: int, path: Path, saved: list[Any]) -> None:
    for i, dtype, weights, states in saved:
        alone, _ = make(CASES[i], "alone")
        expected = {
            name: bytes_of(param.detach().copy_(weights[name]))
            for name, param in alone.named_parameters()
        }
        for layout in ("sharded", "meta"):
            source = path / f"{i} {dtype}"
            for name, with_moments, pair in plain_loads(source, weights, states, CASES[i], layout):
                try:
                    assert_identical(gathered_bytes(pair[0]), list(expected.values()))
                    moments = states if with_moments else None
                    assert_continues(pair, weights, moments)
                except AssertionError as error:
                    raise AssertionError(f"{CASES[i]}, {dtype}, {layout}, {name}") from error


def assert_continues(pair: Pair, weights: dict[str, Tensor], states: dict | None) -> None:
    """Moments are what was loaded, and masters start from the weights, which are not rounded."""
    model, optimizer = pair
    named = dict(zip(weights, optimizer.param_groups[0]["params"], strict=True))
    for name, param in named.items() if states else ():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            loaded = full(optimizer.state[param][key]).cpu()
            assert torch.equal(loaded, states["state"][name][key].float()), (name, key)
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(pair, [0])
    for name, param in named.items():
        start, master = weights[name].float(), optimizer.state[param]["master_param"]
        if not isinstance(local(param), QuantizedTensor):
            start = start.to(param.dtype).float()
        assert torch.equal(full(master).cpu(), start), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("formats", ["two", "the others"])
def test_plain_weights_and_states_of_adamw_load_into_quantized_shards(formats, tmp_path):
    two = formats == "two"
    saved = [each for each in run(save_plain, 2, tmp_path)[0] if (each[0] in (0, 3)) == two]
    run(load_plain, 3, tmp_path, saved)


def other_weights(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Float32 values of the whole parameters."""
    generator = torch.Generator().manual_seed(seed)
    named = model.named_parameters()
    return {name: torch.randn(param.shape, generator=generator) for name, param in named}


def save_what_waits(rank: int, path: Path) -> None:
    """Weights that have not been quantized yet, for want of an all-gather, are saved unrounded."""
    group = dist.new_group(backend="gloo")
    for i, case in enumerate(CASES):
        pair, resumed = (make(case, seed=seed) for seed in (0, 1))
        weights = other_weights(pair[0], 1)
        set_model_state_dict(pair[0], copy.deepcopy(weights), options=FULL)
        state = {"model": get_model_state_dict(pair[0])}
        saving = dcp.async_save(state, checkpoint_id=path / str(i), process_group=group)
        set_model_state_dict(pair[0], other_weights(pair[0], 2), options=FULL)
        saving.result()
        state = {"model": get_model_state_dict(resumed[0])}
        dcp.load(state, checkpoint_id=path / str(i))
        set_model_state_dict(pair[0], weights, options=FULL)
        assert_identical(gathered_bytes(resumed[0]), gathered_bytes(pair[0]))


def test_weights_that_wait_for_their_scales_are_saved(tmp_path):
    run(save_what_waits, 3, tmp_path)


def load_and_step(rank: int, by_kernels: bool) -> list[list[dict[str, Tensor]]]:
    """Weights and states are loaded after steps, and there are more steps, without all-gathers."""
    if by_kernels:
        use_kernels()
    pair = take_steps(make(CASES[0]), range(2))
    saved = copy.deepcopy(pair[1].state_dict())
    set_model_state_dict(pair[0], other_weights(pair[0], 1), options=FULL)
    results = [snapshot(take_steps(pair, range(2, 4)))]
    pair[1].load_state_dict(saved)
    return [*results, snapshot(take_steps(pair, range(2, 3)))]


def test_kernels_step_what_has_been_loaded():
    for a, b in zip(
        *(run(load_and_step, 2, by_kernels)[0] for by_kernels in (False, True)), strict=True
    ):
        assert_identical(a, b)


# States in fewer bits

NARROW = [
    dict(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16),
    dict(exp_avg_dtype=torch.float8_e4m3fn, exp_avg_sq_dtype=torch.float16),
    dict(master_weight_dtype=torch.float16),
    dict(store_param_remainders=True),
    dict(states="8bit"),
]


def save_narrow(rank: int, path: Path) -> None:
    for i, options in enumerate(NARROW):
        case = CASES[i % 2]
        saved, alone = (
            take_steps(make(case, layout, **options), range(3)) for layout in ("sharded", "alone")
        )
        state = state_of(saved)
        for values in state["optimizer"]["state"].values():
            assert all(x.dtype == torch.float32 for x in values.values())
        dcp.save(state, checkpoint_id=path / str(i))
        resumed = [load(make(case, seed=1, **options), path / str(i))]

        small = options.get("states") == "8bit"
        scaled = any(name in x for x in saved[1].state.values() for name in SCALES.values())
        if scaled:
            words = "got .*int8 masters" if small else "must have no scales .* got .*_scale"
            with pytest.raises(NotImplementedError, match=words):
                saved[1].compact_state_dict()
        else:
            resumed.append(make(case, seed=1, **options))
            resumed[1][0].load_state_dict(saved[0].state_dict())
            resumed[1][1].load_state_dict(saved[1].compact_state_dict())
        for pair in resumed:
            assert_identical(numbers(pair), numbers(saved))

        # Of what one process has saved each rank takes its part.
        parts = make(case, seed=1, **options)
        set_model_state_dict(parts[0], copy.deepcopy(alone[0].state_dict()), options=FULL)
        if small:
            with pytest.raises(ValueError, match="got int8 remainders of a whole weight"):
                parts[1].load_state_dict(alone[1].compact_state_dict())
        whole = alone[1].state_dict() if small else alone[1].compact_state_dict()
        parts[1].load_state_dict(copy.deepcopy(whole))
        assert_identical(numbers(parts)[:1], numbers(alone)[:1])

        for pair in (saved, *resumed):
            take_steps(pair, range(3, 5))
            assert_identical(numbers(pair), numbers(saved))
            assert_identical(gathered_bytes(pair[0]), gathered_bytes(saved[0]))


def test_states_in_fewer_bits(tmp_path):
    run(save_narrow, 2, tmp_path)


# What goes wrong


def save_complete(path: Path, pair: Pair, writer: type = dcp.FileSystemWriter) -> None:
    """A folder that appears when it is complete."""
    unfinished = path.with_suffix(".unfinished")
    dcp.save(state_of(pair), storage_writer=writer(unfinished))
    if dist.get_rank() == 0:
        unfinished.rename(path)
    dist.barrier()


# What torch says of a folder without it: 2.11, and later ones.
NO_METADATA = r"metadata is None|bad\.unfinished/\.metadata"


class DyingWriter(dcp.FileSystemWriter):
    """Ends the process of rank 1 when it is to write."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            os._exit(1)
        return super().write_data(*args, **kwargs)


def die(rank: int, path: Path) -> str:
    pair = take_steps(make(CASES[0]), range(3))
    save_complete(path / "good", pair)
    take_steps(pair, range(3, 4))
    try:
        save_complete(path / "bad", pair, DyingWriter)
    except Exception as error:
        return str(error)
    return "no error"


def load_broken(rank: int, path: Path) -> list[dict[str, Tensor]]:
    """Try what was not written to its end and what is of another model; then the good one."""
    pair = take_steps(make(CASES[0], seed=1), range(1))
    before = snapshot(pair)
    with pytest.raises(dcp.api.CheckpointException, match=NO_METADATA):
        dcp.load(copy.deepcopy(state_of(pair)), checkpoint_id=path / "bad.unfinished")
    assert_identical(snapshot(pair), before)  # it was read into copies
    wider = make(("nvfp4", 128, 32), seed=1)
    with pytest.raises(dcp.api.CheckpointException, match=r"(?s)\[64, 32\].*\[128, 32\].*0.weight"):
        load(wider, path / "good")
    load(pair, path / "good")
    return snapshot(take_steps(pair, range(3, 5)))


def train_alone(rank: int) -> list[dict[str, Tensor]]:
    return snapshot(take_steps(make(CASES[0], "alone"), range(5)))


def test_the_last_good_checkpoint_survives(tmp_path):
    errors = run(die, 3, tmp_path, survives=True, timeout=40.0)
    assert errors[1] is None and all("Connection" in errors[rank] for rank in (0, 2))
    assert not (tmp_path / "bad").exists()
    found = run(load_broken, 2, tmp_path)[0]
    assert_identical(found, run(train_alone, 1)[0])
