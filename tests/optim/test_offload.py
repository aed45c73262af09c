"""Offloaded states: the bits of resident ones, in whatever order copies happen."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from fp4adam import FP4Adam, FusedAdam, hf_scale_groups, quantize_model
from fp4adam.optim import offload
from fp4adam.optim.engine import Engine
from fp4adam.optim.state_dict import current_masters
from fp4adam.tensors import backend
from helpers import (
    QUANTIZERS,
    RECIPES,
    all_params,
    assert_identical,
    make_mlp,
    make_params,
    make_weight,
    mlp_loss,
    random,
    set_grads,
    snapshot,
    take_steps,
)
from late_link import LateLink, offload_to

OPTIONS = dict(lr=1e-2, weight_decay=0.1)
# Three chunks of make_params().
CHUNK = 12 * 64 * 96
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a GPU")


@pytest.fixture
def link() -> Iterator[LateLink]:
    link = LateLink()
    with offload_to(link, CHUNK):
        yield link


def pair(quantizer: Any, device: str, **options: Any) -> list[FP4Adam]:
    """An optimizer with offloaded states, and one like it with resident ones."""
    return [
        FP4Adam(make_params(quantizer, device), **OPTIONS, **options, offload_states=offloads)
        for offloads in (True, False)
    ]


def assert_same_training(offloaded: Any, resident: Any) -> None:
    assert_identical(snapshot(offloaded)["params"], snapshot(resident)["params"])
    assert_identical(offloaded.state_dict()["state"], resident.state_dict()["state"])


def is_on_host(optimizer: FusedAdam) -> bool:
    tensors = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step" and value.numel()
    ]
    pinned = [tensor.is_pinned() for tensor in tensors] if torch.cuda.is_available() else [True]
    return bool(tensors) and all(tensor.device.type == "cpu" for tensor in tensors) and all(pinned)


STORING = {
    "float32": {},
    "bfloat16": dict(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16),
    "narrow": dict(
        exp_avg_dtype=torch.float8_e4m3fn,
        exp_avg_sq_dtype=torch.float8_e4m3fn,
        master_weight_dtype=torch.float16,
    ),
    "remainders": dict(store_param_remainders=True),
    "8bit": dict(states="8bit"),
    "amsgrad": dict(amsgrad=True),
    "torch operators": dict(fused=False),
}


@pytest.mark.parametrize("storing", STORING)
def test_the_bits_of_resident_states(storing: str, device: str, link: LateLink) -> None:
    optimizers = pair(RECIPES["nvfp4"], device, **STORING[storing])
    for step in range(5):
        for optimizer in optimizers:
            params = all_params(optimizer)
            set_grads(params, step)
            if step == 3:
                params[1].grad = params[2].grad = None
            if step < 2:  # a part of a chunk begins later
                params[3].grad = None
            if step % 2:
                optimizer.clip_grad_norm_(0.5)
            optimizer.step()
        assert is_on_host(optimizers[0])
    assert_same_training(*optimizers)


@pytest.mark.parametrize(
    "recipe, storing",
    [
        ("nvfp4", "float32"),
        ("nvfp4", "8bit"),
        *(
            pytest.param(*both, marks=pytest.mark.exhaustive)
            for both in [("mxfp8", "narrow"), ("float8block", "bfloat16"), ("nvfp4", "remainders")]
        ),
    ],
)
def test_kernels(
    recipe: str, storing: str, device: str, link: LateLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "uses_kernels", lambda d: d.type == device)
    optimizers = []
    for offloads in (True, False):
        params = [make_weight(RECIPES[recipe], device, (32, 32), seed=i) for i in range(2)]
        params.append(Parameter(random((40,), 2, device).bfloat16()))
        options = {**OPTIONS, **STORING[storing], "offload_states": offloads}
        optimizer = FP4Adam(params, **options)
        monkeypatch.setattr(offload, "CHUNK_BYTES", 12 * 32 * 32)
        take_steps(optimizer, range(3))
        optimizers.append(optimizer)
    assert_same_training(*optimizers)


@pytest.mark.parametrize(
    "quantizer",
    [
        pytest.param(q, id=name, marks=[] if name in RECIPES else pytest.mark.exhaustive)
        for name, q in QUANTIZERS.items()
    ],
)
def test_formats(quantizer: Any, device: str, link: LateLink) -> None:
    optimizers = pair(quantizer, device, quantize_from="param_dtype")
    for optimizer in optimizers:
        take_steps(optimizer, range(3))
    assert_same_training(*optimizers)
    assert torch.cuda.is_available() or len(link.sizes) == 2


def test_a_step_moves_each_state_once_in_and_once_out(device: str, link: LateLink) -> None:
    if torch.cuda.is_available():
        pytest.skip("bytes are counted where copies are Python's")
    optimizer, _ = pair(RECIPES["nvfp4"], device)
    take_steps(optimizer, range(2))
    link.moved = [0, 0]
    take_steps(optimizer, [2])
    sizes = [
        -(-value.nbytes // 256) * 256
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    assert link.moved == [sum(sizes)] * 2
    assert link.pinned_bytes == sum(sizes)
    # Frozen and unused parameters stay where they are.
    optimizer.zero_grad()
    link.moved = [0, 0]
    optimizer.step()
    assert link.moved == [0, 0]


def test_new_states_of_one_chunk_are_on_the_gpu_at_a_time(
    device: str, link: LateLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[StorageWeakRef] = []
    init = offload._Chunk.__init__

    def note(self: Any, link: Any, states: dict[Tensor, dict]) -> None:
        assert all(memory.expired() for memory in made)
        values = (value for state in states.values() for value in state.values() if value.dim())
        made.extend(StorageWeakRef(value.untyped_storage()) for value in values)
        init(self, link, states)

    monkeypatch.setattr(offload._Chunk, "__init__", note)
    take_steps(pair(RECIPES["nvfp4"], device)[0], [0])
    assert made and all(memory.expired() for memory in made)


def test_larger_buffers_come_when_the_old_ones_are_gone(
    device: str, link: LateLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizers = pair(RECIPES["nvfp4"], device)
    for optimizer in optimizers:
        take_steps(optimizer, range(3))
    (used,) = optimizers[0]._whole._links.values()
    old = [StorageWeakRef(memory.untyped_storage()) for memory in used.buffers]
    empty, gone = type(used).empty, []

    def note(self: Any, nbytes: int) -> Tensor:
        gone.append([each.expired() for each in old])
        return empty(self, nbytes)

    monkeypatch.setattr(type(used), "empty", note)
    for optimizer in optimizers:
        large = Parameter(random((128, 96), 5, device))
        optimizer.add_param_group({"params": [large], **OPTIONS})
        take_steps(optimizer, range(3, 6))
    assert gone == [[True, True]] * 2
    assert_same_training(*optimizers)


def test_grad_scaler_skips_and_counts(device: str, link: LateLink) -> None:
    optimizers = pair(RECIPES["mxfp8"], device)
    for optimizer in optimizers:
        for step, overflows in enumerate((False, False, True, False)):
            set_grads(all_params(optimizer), step)
            optimizer.grad_scale = torch.full((), 4.0, device=device)
            optimizer.found_inf = torch.full((), float(overflows), device=device)
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
            counts = {float(state["step"]) for state in optimizer.state.values()}
            assert counts == {[1.0, 2.0, 2.0, 3.0][step]}
    assert_same_training(*optimizers)


def test_scale_groups_share_a_chunk(device: str, link: LateLink) -> None:
    optimizers = []
    for offloads in (True, False):
        torch.manual_seed(0)
        names = ("q_proj", "other", "k_proj")
        model = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in names})
        quantize_model(model.to(device), "nvfp4", filter=lambda *_: True)
        optimizer = FP4Adam(
            model.named_parameters(),
            **OPTIONS,
            scale_groups=hf_scale_groups,
            offload_states=offloads,
        )
        for step in range(3):
            set_grads(all_params(optimizer), step)
            if step == 2:  # its state is written nevertheless, with the group's amax
                all_params(optimizer)[0].grad = None
            optimizer.step()
        q, _, k = all_params(optimizer)
        assert_identical(q.amax_rowwise, k.amax_rowwise)
        optimizers.append(optimizer)
    assert_same_training(*optimizers)


def test_gradient_release(device: str, link: LateLink) -> None:
    optimizers = []
    for offloads in (True, False):
        model = make_mlp(RECIPES["nvfp4"], device, torch.bfloat16)
        optimizer = FP4Adam(model.parameters(), **OPTIONS, offload_states=offloads)
        release = optimizer.enable_gradient_release()
        for step in range(4):
            mlp_loss(model, step).backward()
            assert all(param.grad is None for param in model.parameters())
            optimizer.step()
        release.remove()
        mlp_loss(model, 5).backward()
        optimizer.step()
        optimizers.append(optimizer)
    assert_same_training(*optimizers)
    assert is_on_host(optimizers[0])


def test_checkpoints_go_both_ways(device: str, link: LateLink) -> None:
    for offloads in (True, False):
        source, target = pair(RECIPES["nvfp4"], device)[:: 1 if offloads else -1]
        _, expected = pair(RECIPES["nvfp4"], device)
        take_steps(source, range(2))
        take_steps(expected, range(2))
        with torch.no_grad():
            for param, saved in zip(all_params(target), all_params(source), strict=True):
                param.copy_(saved)
        target.load_state_dict(copy.deepcopy(source.state_dict()))
        # None of the loaded states waits on the GPU for the next step.
        assert target is not source and (offloads or not_on_gpu(target))
        for optimizer in (source, target, expected):
            take_steps(optimizer, range(2, 4))
        assert_same_training(source, expected)
        assert_same_training(target, expected)


def not_on_gpu(optimizer: FusedAdam) -> bool:
    states = optimizer.state.values()
    return all(value.device.type == "cpu" for state in states for value in state.values())


def test_adamw_of_torch(device: str, link: LateLink) -> None:
    param, twin = (Parameter(random((33, 5), 0, device)) for _ in range(2))
    ours, theirs = FP4Adam([param], offload_states=True), torch.optim.AdamW([twin])
    take_steps(ours, range(3))
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state[twin]["exp_avg"].device == twin.device
    again = FP4Adam([twin], offload_states=True)
    again.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        twin.copy_(param)
    take_steps(ours, [3])
    take_steps(again, [3])
    assert_identical([param.detach()], [twin.detach()])
    assert_identical(ours.state_dict()["state"], again.state_dict()["state"])


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "a file"])
def test_copies_offload_as_well(way: str, device: str, link: LateLink, tmp_path: Any) -> None:
    optimizer, resident = pair(RECIPES["nvfp4"], device)
    for one in (optimizer, resident):
        take_steps(one, range(3))
    if way == "deepcopy":
        twin = copy.deepcopy(optimizer)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(optimizer))
    else:
        torch.save(optimizer, tmp_path / "optimizer.pt")
        twin = torch.load(tmp_path / "optimizer.pt", weights_only=False)
    for one in (twin, optimizer, resident):
        take_steps(one, [3])
    assert_same_training(twin, resident)
    assert_same_training(optimizer, resident)
    assert is_on_host(twin)


def test_saving_one_state_does_not_save_its_chunk(device: str, link: LateLink) -> None:
    optimizer, _ = pair(RECIPES["nvfp4"], device)
    take_steps(optimizer, range(2))
    for state in optimizer.state.values():
        for value in state.values():
            assert value.untyped_storage().nbytes() == value.nbytes or not value.dim()


def test_states_outlive_their_optimizer(device: str, link: LateLink) -> None:
    optimizer, resident = pair(RECIPES["nvfp4"], device)
    for one in (optimizer, resident):
        take_steps(one, range(3))
    kept = optimizer.state_dict()["state"]
    del optimizer, one
    assert_identical(kept, resident.state_dict()["state"])
    assert link.pinned_bytes == 0


WRITES: dict[str, Callable[[FP4Adam], object]] = {
    "weight": lambda o: [p.copy_(random(tuple(p.shape), 7, str(p.device))) for p in all_params(o)],
    "moments in place": lambda o: [s["exp_avg"].mul_(0.5) for s in o.state.values()],
    "moments exchanged": lambda o: [
        s.update(exp_avg_sq=s["exp_avg_sq"] * 0.5) for s in o.state.values()
    ],
    "moments by data": lambda o: [
        setattr(s["exp_avg"], "data", s["exp_avg"] * 0.5) for s in o.state.values()
    ],
    "reset_master_weights": lambda o: o.reset_master_weights(),
    "set_scaled_state": lambda o: [
        o.set_scaled_state(p, "master_param", random(tuple(p.shape), 8)) for p in all_params(o)[1:2]
    ],
    "weight, then its master": lambda o: [
        (p.copy_(p.detach().float() + 1), o.set_scaled_state(p, "master_param", random(p.shape, 8)))
        for p in all_params(o)[1:2]
    ],
    "initialize_state": lambda o: [o.initialize_state(p) for p in all_params(o)[:2]],
    "new group": lambda o: o.add_param_group(
        {"params": [Parameter(random((40, 7), 3, str(all_params(o)[0].device)))], "lr": 0.1}
    ),
    "own state": lambda o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "compact state": lambda o: o.load_state_dict(copy.deepcopy(o.compact_state_dict())),
    "lr": lambda o: o.param_groups[0].update(lr=0.0),
    "frozen": lambda o: [p.requires_grad_(False) for p in all_params(o)[1:3]],
    "chunks": lambda o: setattr(offload, "CHUNK_BYTES", 12 * 700),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    "storing", ["float32", pytest.param("narrow", marks=pytest.mark.exhaustive)]
)
def test_writes_by_others(write: str, storing: str, device: str, link: LateLink) -> None:
    if write.startswith("moments") and storing == "narrow":
        pytest.skip("codes are no numbers")
    optimizers = pair(RECIPES["nvfp4"], device, **STORING[storing])
    for optimizer in optimizers:
        take_steps(optimizer, range(3))
        with torch.no_grad():
            WRITES[write](optimizer)
        take_steps(optimizer, range(3, 6))
    assert_same_training(*optimizers)
    assert is_on_host(optimizers[0])


def test_states_on_their_way_are_waited_for(device: str, link: LateLink) -> None:
    """A reset writes to them, and exports read them."""
    optimizer, resident = pair(RECIPES["nvfp4"], device, store_param_remainders=True)
    for one in (optimizer, resident):
        take_steps(one, range(2))
    for ours, theirs in zip(all_params(optimizer), all_params(resident), strict=True):
        masters = [
            current_masters(one._engine)(p) for one, p in ((optimizer, ours), (resident, theirs))
        ]
        assert_identical(*masters)
    for one in (optimizer, resident):
        take_steps(one, range(2, 3))
        one.reset_master_weights()
    assert_same_training(optimizer, resident)


@pytest.mark.usefixtures("through_the_kernels")
def test_moments_that_others_write_carry_small_weights_over_the_largest(
    device: str, link: LateLink
) -> None:
    """Nothing may rely on the bounds of former moments, as int8 masters do otherwise."""
    optimizers = []
    for options in (dict(offload_states=True), dict(fused=False)):
        value = torch.zeros(64, 128, device=device)
        value[:, :64] = 0.18
        param = Parameter(RECIPES["nvfp4"].quantize(value))
        optimizer = FP4Adam([param], **OPTIONS, master_weight_dtype=torch.int8, **options)
        for step in range(3):
            set_grads([param], step, scale=0.01)
            optimizer.step()
        state = optimizer.state[param]
        # By the CPU in both, wherever the state is.
        state["exp_avg"][:, 64:] = 600 * state["exp_avg_sq"][:, 64:].cpu().sqrt().to(device)
        param.grad.zero_()
        optimizer.step()
        assert param.amax_rowwise > 0.9
        optimizers.append(optimizer)
    assert_same_training(*optimizers)


def test_moved_and_cast_models(device: str, link: LateLink) -> None:
    optimizers = []
    for offloads in (True, False):
        model = make_mlp(RECIPES["nvfp4"], device, torch.bfloat16)
        optimizer = FP4Adam(model.parameters(), **OPTIONS, offload_states=offloads)
        for step in range(8):
            mlp_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                model._apply(torch.clone)  # new memory
            if step == 4:
                model.cpu().to(device)
        optimizers.append(optimizer)
    assert_same_training(*optimizers)


def test_odd_tensors(device: str, link: LateLink) -> None:
    """Channels last, scalars, empty tensors, float64."""
    optimizers = []
    for offloads in (True, False):
        conv = random((4, 3, 5, 5), 0, device).to(memory_format=torch.channels_last)
        values = [conv, random((), 1, device), random((0, 4), 2, device)]
        values += [random((9, 3), 3, device).double(), random((700,), 4, device).half()]
        optimizer = FusedAdam([Parameter(v) for v in values], **OPTIONS, offload_states=offloads)
        take_steps(optimizer, range(4))
        optimizers.append(optimizer)
    assert_same_training(*optimizers)
    state = optimizers[0].state[all_params(optimizers[0])[0]]
    assert state["exp_avg"].is_contiguous(memory_format=torch.channels_last)


def test_interrupts_leave_what_is_there(
    device: str, link: LateLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the second chunk: the first one has been stepped, and the states say so."""
    optimizers = pair(RECIPES["nvfp4"], device)
    for optimizer in optimizers:
        take_steps(optimizer, range(3))
    before = {name: value.clone() for name, value in state_of(optimizers[0], 4).items()}
    after = copy.deepcopy(optimizers[1])
    take_steps(after, [3])
    set_grads(all_params(optimizers[0]), 3)
    step, calls = Engine.step, 0

    def interrupted(self: Engine, *args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        step(self, *args)

    monkeypatch.setattr(Engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizers[0].step()
    assert_identical(dict(state_of(optimizers[0], 4)), before)
    assert_identical(dict(state_of(optimizers[0], 0)), dict(state_of(after, 0)))


def state_of(optimizer: FusedAdam, index: int) -> dict[str, Tensor]:
    return optimizer.state[all_params(optimizer)[index]]


# What is refused


def test_parameters_on_the_host_are_refused() -> None:
    optimizer = FusedAdam([Parameter(torch.ones(4))], offload_states=True)
    set_grads(all_params(optimizer), 0)
    with pytest.raises(RuntimeError, match="must be on a GPU with offload_states, got one on cpu"):
        optimizer.step()
    assert not optimizer.state


def test_nothing_changes_if_a_later_chunk_is_refused(device: str, link: LateLink) -> None:
    optimizer, resident = pair(RECIPES["nvfp4"], device)
    for one in (optimizer, resident):
        take_steps(one, range(3))
    before = snapshot(optimizer)
    set_grads(all_params(optimizer), 3)
    all_params(optimizer)[-1].grad = all_params(optimizer)[-1].grad.to_sparse()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert_identical(snapshot(optimizer)["params"], before["params"])
    assert_identical(snapshot(optimizer)["state"], before["state"])
    for one in (optimizer, resident):
        one.param_groups[0]["lr"] = 1e-2
        take_steps(one, [3])
    assert_same_training(optimizer, resident)


def test_pinned_memory_that_runs_out_is_named(device: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("the limit is the link's that stands in")
    params = make_params(RECIPES["nvfp4"], device)
    optimizer = FP4Adam(params, **OPTIONS, offload_states=True)
    resident = FP4Adam(make_params(RECIPES["nvfp4"], device), **OPTIONS)
    link = LateLink(limit=100_000)
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


def test_states_leave_the_buffer_though_their_new_block_finds_no_memory(device: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("the limit is the link's that stands in")
    optimizer, resident = pair(RECIPES["nvfp4"], device)
    link = LateLink()
    with offload_to(link, 10 * CHUNK):
        for one in (optimizer, resident):
            take_steps(one, range(2))
            one.param_groups[0]["amsgrad"] = True
        link._limit = link.pinned_bytes
        with pytest.raises(MemoryError):
            take_steps(optimizer, [2])
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
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    link, owner = object.__new__(offload.Link), LateLink()
    link._device, link.pinned_bytes = torch.device("cpu"), 0
    memory = offload._pinned(link, 4096, owner)
    address = offload._tensor(memory, 0, 4096, torch.uint8).data_ptr()
    kept = offload._tensor(memory, 256, 64, torch.float32).fill_(3.0)
    assert (calls, link.pinned_bytes) == ([(address, 4096, 1)], 4096)
    with pytest.raises(MemoryError, match=r"65,536 bytes beyond the 4,096 .* \(out of memory\)"):
        offload._pinned(link, 2**16, owner)
    del owner, memory
    assert (calls[-1], link.pinned_bytes) == ((address,), 0)
    assert kept.tolist() == [3.0] * 16


# Chunks and buffers


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=20), st.integers(1, 900))
def test_chunks(sizes: list[tuple[int, int]], limit: int) -> None:
    params = [torch.empty(numel) for numel, _ in sizes]
    scales = [group for _, group in sizes]
    with offload_to(LateLink(), limit):
        units = [[params[i] for i, s in enumerate(scales) if s == g] for g in set(scales)]
        found = offload.chunks(units)
    number = {id(param): i for i, chunk in enumerate(found) for param in chunk}
    assert len(number) == len(params) == sum(map(len, found))
    for group in set(scales):  # together
        assert len({number[id(p)] for p, s in zip(params, scales, strict=True) if s == group}) == 1
    for chunk in found:
        one_group = len({scales[[id(p) for p in params].index(id(param))] for param in chunk}) == 1
        assert sum(12 * param.numel() for param in chunk) <= limit or one_group


@pytest.mark.parametrize(
    ("sizes", "numbers", "buffers"),
    [
        ([3, 3, 3, 3], [1, 0, 1, 0], [3, 3]),
        # Few large ones share a buffer.
        ([9, 3, 3, 3, 3, 3, 3, 8], [0, 1, 0, 1, 0, 1, 0, 0], [9, 3]),
        ([5], [1], [0, 5]),
    ],
)
def test_buffers(sizes: list[int], numbers: list[int], buffers: list[int]) -> None:
    link = LateLink()
    states = [{Parameter(torch.ones(1)): {"exp_avg": torch.ones(64 * n)}} for n in sizes]
    chunks = [offload._Chunk(link, state) for state in states]
    link.make_buffers(chunks)
    assert [chunk.number for chunk in chunks] == numbers
    assert link.sizes == [256 * n for n in buffers]


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
def test_steps_beside_work_of_other_streams() -> None:
    """Long kernels before and after each step: what is copied too early or late differs."""
    optimizers = []
    busy = torch.randn(4096, 4096, device="cuda")
    for offloads in (True, False):
        params = [Parameter(random((512, 512), i, "cuda").bfloat16()) for i in range(12)]
        with offload_to(LateLink(), 12 * 2**19):
            optimizer = FusedAdam(params, **OPTIONS, offload_states=offloads)
            for step in range(6):
                for _ in range(10):
                    busy = busy @ busy * 1e-3
                set_grads(params, step)
                optimizer.step()
                for param in params:  # reads what the step has written
                    busy[0, 0] += param.sum()
        optimizers.append(optimizer)
    assert_same_training(*optimizers)


@needs_gpu
def test_release_beside_the_backward_pass() -> None:
    optimizers = []
    for offloads in (True, False):
        torch.manual_seed(0)
        layers = (nn.Linear(512, 512, bias=False) for _ in range(12))
        model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
        quantize_model(model, "nvfp4", filter=lambda *_: True)
        optimizer = FP4Adam(model.parameters(), **OPTIONS, offload_states=offloads)
        optimizer.enable_gradient_release()
        for step in range(6):
            model(random((64, 512), step, "cuda").bfloat16()).square().mean().backward()
            optimizer.step()
        optimizers.append(optimizer)
    assert_same_training(*optimizers)
