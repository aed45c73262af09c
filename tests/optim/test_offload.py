"""Offloaded states: what moves, and when; memory that ends; chunks.

That they have the bits of resident ones is a path of the step table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from fp4adam import FP4Adam, FusedAdam, quantize_model
from fp4adam.optim import offload
from fp4adam.optim.checks import check_state
from helpers import (
    RECIPES,
    all_params,
    assert_identical,
    assert_same_training,
    make_params,
    random,
    set_grads,
    take_steps,
)
from late_link import LateLink, offload_to

OPTIONS = dict(lr=1e-2, weight_decay=0.1)
# Three chunks of make_params().
CHUNK = 12 * 64 * 96
counts = pytest.mark.skipif(torch.cuda.is_available(), reason="a link that counts stands in")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a GPU")


@pytest.fixture
def link() -> Iterator[LateLink]:
    link = LateLink()
    with offload_to(link, CHUNK):
        yield link


def pair(device: str) -> list[FP4Adam]:
    """An optimizer with offloaded states, and one like it with resident ones."""
    params = [make_params(RECIPES["nvfp4"], device) for _ in range(2)]
    return [FP4Adam(params[i], **OPTIONS, offload_states=i == 0) for i in range(2)]


@counts
def test_a_step_moves_each_state_once_in_and_once_out(device: str, link: LateLink) -> None:
    optimizer, _ = pair(device)
    take_steps(optimizer, range(2))
    link.moved = [0, 0]
    take_steps(optimizer, [2])
    states = [value for state in optimizer.state.values() for value in state.values()]
    # Saving one of them does not save its chunk.
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in states if value.dim())
    size = sum(-(-value.nbytes // 256) * 256 for value in states) - 256 * len(optimizer.state)
    assert link.moved == [size] * 2 and link.pinned_bytes == size
    # Frozen and unused parameters stay where they are.
    optimizer.zero_grad()
    optimizer.step()
    assert link.moved == [size] * 2
    optimizer.load_state_dict(optimizer.state_dict())
    assert link.pinned_bytes == 0
    optimizer.enable_gradient_release()
    take_steps(optimizer, [3])
    assert link.pinned_bytes == size


def test_new_states_of_one_chunk_are_on_the_gpu_at_a_time(device, link, monkeypatch):
    made: list[StorageWeakRef] = []
    init = offload._Chunk.__init__

    def note(self: Any, link: Any, states: dict[Tensor, dict]) -> None:
        assert all(memory.expired() for memory in made)
        values = (value for state in states.values() for value in state.values() if value.dim())
        made.extend(StorageWeakRef(value.untyped_storage()) for value in values)
        init(self, link, states)

    monkeypatch.setattr(offload._Chunk, "__init__", note)
    options = dict(amsgrad=True, exp_avg_dtype=torch.uint8, offload_states=True)
    take_steps(FP4Adam(make_params(RECIPES["nvfp4"], device), **options), [0])
    assert made and all(memory.expired() for memory in made)


def test_larger_buffers_come_when_the_old_ones_are_gone(device, link, monkeypatch):
    optimizer, _ = pair(device)
    take_steps(optimizer, range(3))
    (used,) = optimizer._whole._links.values()
    old = [StorageWeakRef(memory.untyped_storage()) for memory in used.buffers]
    empty, gone = type(used).empty, []

    def note(self: Any, nbytes: int) -> Tensor:
        gone.append([each.expired() for each in old])
        return empty(self, nbytes)

    monkeypatch.setattr(type(used), "empty", note)
    optimizer.add_param_group({"params": [Parameter(random((128, 96), 5, device))]})
    take_steps(optimizer, range(3, 6))
    assert gone == [[True, True]] * 2


def test_states_outlive_their_optimizer(device: str, link: LateLink) -> None:
    optimizer, resident = pair(device)
    for one in (optimizer, resident):
        take_steps(one, range(3))
    kept = optimizer.state_dict()["state"]
    del optimizer, one
    assert_identical(kept, resident.state_dict()["state"])
    assert link.pinned_bytes == 0


def test_layouts_and_dtypes(device: str, link: LateLink) -> None:
    """Channels last, float64, empty."""
    optimizers = []
    for offloads in (True, False):
        conv = random((4, 3, 5, 5), 0, device).to(memory_format=torch.channels_last)
        params = [Parameter(conv), Parameter(random((9, 3), 3, device).double())]
        params.append(Parameter(random((0, 3), 4, device)))
        optimizers.append(FusedAdam(params, **OPTIONS, offload_states=offloads))
        for seeds in (range(3), range(3, 5)):  # in other chunks
            take_steps(optimizers[-1], seeds)
            optimizers[-1].param_groups[0]["params"].reverse()
    assert_same_training(*optimizers)
    state = optimizers[0].state[all_params(optimizers[0])[0]]
    assert state["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    for value in optimizers[0].state[all_params(optimizers[0])[2]].values():
        assert value.untyped_storage().nbytes() == value.nbytes


# What is refused


def test_parameters_on_the_host_are_refused() -> None:
    optimizer = FusedAdam([Parameter(torch.ones(4))], offload_states=True)
    set_grads(all_params(optimizer), 0)
    with pytest.raises(RuntimeError, match="must be on a GPU with offload_states, got one on cpu"):
        optimizer.step()
    assert not optimizer.state
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="Invalid learning rate"):
        optimizer.step()
    param, state = torch.ones(4, device="meta"), {"exp_avg": torch.zeros(4)}
    check_state(param, state, optimizer._targets.options, is_offloaded=True)
    with pytest.raises(RuntimeError, match="must have the shape and device of its parameter"):
        check_state(param, state, optimizer._targets.options)


@counts
def test_pinned_memory_that_runs_out_is_named(device: str) -> None:
    optimizer, resident = pair(device)
    params, link = all_params(optimizer), LateLink(limit=100_000)
    with offload_to(link, CHUNK):
        set_grads(params, 0)
        with pytest.raises(MemoryError, match=r"got none for 62,976 bytes beyond the \d\d,\d{3}"):
            optimizer.step()
        # What was stepped has a state, and continues once there is memory.
        link._limit = float("inf")
        take_steps(resident, [0])
        stepped = [param for param in params if param in optimizer.state]
        for param in stepped:
            param.grad = None
        optimizer.step()
        take_steps(optimizer, [1])
        take_steps(resident, [1])
        assert_same_training(optimizer, resident)


@counts
def test_states_leave_the_buffer_though_their_new_block_finds_no_memory(device: str) -> None:
    optimizer, resident = pair(device)
    with offload_to(link := LateLink(), 10 * CHUNK):
        for one in (optimizer, resident):
            take_steps(one, range(2))
            one.param_groups[0]["amsgrad"] = True
        link._limit = link.pinned_bytes
        with pytest.raises(MemoryError):
            take_steps(optimizer, [2])
        assert link.pinned_bytes == 0  # the old block went first
        for state in optimizer.state.values():
            for value in state.values():
                assert value.untyped_storage().nbytes() == value.nbytes or not value.dim()
        take_steps(resident, [2])
        assert_same_training(optimizer, resident)


def test_what_cuda_says_about_memory_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []

    class Cudart:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            calls.append((address, nbytes, flags))
            return 0 if nbytes < 2**16 else 2

        def cudaHostUnregister(self, address: int) -> None:
            calls.append((address,))

        def cudaGetErrorString(self, code: int) -> str:
            return {2: "out of memory"}[code]

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append((device,)))
    link, owner = object.__new__(offload.Link), LateLink()
    link._device, link.pinned_bytes = torch.device("cpu"), 0
    memory = offload._pinned(link, 4096, owner)
    address = offload._tensor(memory, 0, 4096, torch.uint8).data_ptr()
    kept = offload._tensor(memory, 256, 64, torch.float32).fill_(3.0)
    assert (calls, link.pinned_bytes) == ([(address, 4096, 1)], 4096)
    with pytest.raises(MemoryError, match=r"65,536 bytes beyond the 4,096 .* \(out of memory\)"):
        offload._pinned(link, 2**16, owner)
    del owner, memory
    assert (calls[-2:], link.pinned_bytes) == ([(link._device,), (address,)], 0)
    assert kept.tolist() == [3.0] * 16


# Chunks and buffers


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4)), st.integers(1, 20))
def test_chunks(sizes: list[list[int]], most: int) -> None:
    limit = 12 * most
    units = [[torch.empty(numel) for numel in unit] for unit in sizes]
    with offload_to(LateLink(), limit):
        found = offload.chunks(units)
    number = {id(param): i for i, chunk in enumerate(found) for param in chunk}
    assert len(number) == sum(map(len, units)) == sum(map(len, found))
    assert all(len({number[id(param)] for param in unit}) == 1 for unit in units)  # together
    for i, chunk in enumerate(found):
        is_one_unit = sum(number[id(unit[0])] == i for unit in units) == 1
        assert sum(12 * param.numel() for param in chunk) <= limit or is_one_unit
    for chunk, after in itertools.pairwise(found):  # filled up
        unit = next(unit for unit in units if unit[0] is after[0])
        assert sum(12 * param.numel() for param in (*chunk, *unit)) > limit


def test_buffers() -> None:
    """They take turns; large ones share the first."""
    with offload_to(link := LateLink(), 1000):
        numbers = [link.next_number(size) for size in (9, 9, 9, 2000, 9, 9, 3000, 2000, 9)]
    assert numbers == [1, 0, 1, 0, 1, 0, 0, 0, 1]


# With streams


@needs_gpu
def test_gpu_memory_is_two_buffers() -> None:
    params = [Parameter(random((1024, 1024), i, "cuda").bfloat16()) for i in range(16)]
    with offload_to(LateLink(), 12 * 2**20):
        optimizer = FusedAdam(params, offload_states=True)
        set_grads(params, 0)
        optimizer.step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            optimizer.step()
        torch.cuda.synchronize()
        buffers = 2 * 12 * 2**20
        assert torch.cuda.max_memory_allocated() - before <= buffers + 2**21


@needs_gpu
@pytest.mark.parametrize("releases", [False, True])
def test_steps_beside_work_of_other_streams(releases: bool) -> None:
    """Long kernels before and after each step: what is copied too early or late differs."""
    optimizers = []
    busy = torch.randn(4096, 4096, device="cuda")
    for offloads in (True, False):
        torch.manual_seed(0)
        layers = (nn.Linear(512, 512, bias=False) for _ in range(12))
        model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
        quantize_model(model, "nvfp4", filter=lambda *_: True)
        with offload_to(LateLink(), 12 * 2**19):
            optimizer = FP4Adam(model.parameters(), **OPTIONS, offload_states=offloads)
            if releases:
                optimizer.enable_gradient_release()
            for step in range(6):
                for _ in range(10):
                    busy = busy @ busy * 1e-3
                model(random((64, 512), step, "cuda").bfloat16()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                for param in model.parameters():  # reads what the step has written
                    busy[0, 0] += param.dequantize(torch.float32).sum()
        optimizers.append(optimizer)
    assert_same_training(*optimizers)
