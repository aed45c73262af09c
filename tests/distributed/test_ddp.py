"""Replicas: ranks that start differently train the same weights, bit for bit."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

with warnings.catch_warnings():  # it compiles functions with torch.jit.script
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

from fp4adam import FP4Adam, QuantizedTensor, quantize_model
from fp4adam.distributed.dtensor import local
from helpers import assert_identical
from ranks import home, run

FORMATS = ("nvfp4", "mxfp8", "float8block")
CASES = (*((recipe, torch.float32) for recipe in FORMATS), (None, torch.bfloat16))
IDS = [recipe or "bfloat16" for recipe, _ in CASES]
ROWS, COLS = 64, 32

Model = Callable[[Tensor], Tensor]


class Net(nn.Sequential):
    """With other values on each rank, and a layer that some batches leave out."""

    def __init__(self, recipe: str | None, dtype: torch.dtype) -> None:
        super().__init__(nn.Linear(COLS, ROWS), nn.Linear(ROWS, COLS, bias=False))
        self.rare = nn.Linear(COLS, COLS, bias=False)
        self.to(dtype).to(home() if dist.is_initialized() else "cpu")
        if recipe:
            quantize_model(self, recipe)

    def forward(self, x: Tensor, everything: bool = True) -> Tensor:
        x = self[1](self[0](x).tanh())
        return self.rare(x) if everything else x


def loss_of(model: Model, step: int, rank: int, **options: bool) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(2, 8, COLS, generator=generator).unbind()
    param = next(model.parameters())
    x, y = x.to(param), y.to(param)
    return (model(x, **options) - y).square().mean()


def adam(model: nn.Module, mode: str = "plain") -> FP4Adam:
    states = "8bit" if mode == "8bit" else "32bit"
    return FP4Adam(model.parameters(), lr=1e-2, weight_decay=0.1, states=states)


def snapshot(model: nn.Module, optimizer: FP4Adam) -> list[dict[str, Tensor]]:
    """The bytes of parameters, and all of their states."""
    weights = []
    for param in map(local, model.parameters()):
        is_plain = not isinstance(param, QuantizedTensor)
        weights.append({"value": param.detach()} if is_plain else param.storage_tensors())
    states = [{k: local(v) for k, v in state.items()} for state in optimizer.state.values()]
    return [{k: torch.as_tensor(v).clone() for k, v in x.items()} for x in (*weights, *states)]


def assert_one_outcome(results: list[Any]) -> None:
    for other in results[1:]:
        assert_identical(other, results[0])


# DistributedDataParallel, in the ways that it is used.

MODES = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    "bucket_views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    "no_sync": {},
    "8bit": {},
    "compiled": {},
}


def train_replicas(rank: int, recipe: str | None, dtype: torch.dtype, mode: str) -> list[Any]:
    replica = Net(recipe, dtype)
    model = DistributedDataParallel(replica, **MODES[mode])
    optimizer = adam(replica, mode)
    called = torch.compile(model, backend="aot_eager") if mode == "compiled" else model
    for step in range(3):
        options = {"everything": step != 1} if mode == "find_unused" else {}
        optimizer.zero_grad()
        if mode == "no_sync":
            with model.no_sync():
                loss_of(called, step + 3, rank).backward()
        loss_of(called, step, rank, **options).backward()
        optimizer.step()
    return snapshot(replica, optimizer)


def train_alone(recipe: str | None, dtype: torch.dtype, mode: str) -> list[Any]:
    """What :func:`train_replicas` computes on two ranks, in one process."""
    torch.manual_seed(1000)  # of rank 0
    model = Net(recipe, dtype)
    optimizer = adam(model, mode)
    for step in range(3):
        options = {"everything": step != 1} if mode == "find_unused" else {}
        grads = []
        for rank in range(2):
            optimizer.zero_grad()
            if mode == "no_sync":
                loss_of(model, step + 3, rank).backward()
            loss_of(model, step, rank, **options).backward()
            grads.append([param.grad for param in model.parameters()])
        for param, *both in zip(model.parameters(), *grads, strict=True):
            if both[0] is not None:
                param.grad = both[0] / 2 + both[1] / 2
        optimizer.step()
    return snapshot(model, optimizer)


@pytest.mark.parametrize("recipe, dtype", CASES, ids=IDS)
def test_replicas_that_start_differently_are_the_training_of_rank_0(recipe, dtype):
    results = run(train_replicas, 2, recipe, dtype, "plain")
    assert_one_outcome(results)
    if not torch.cuda.is_available():  # GPUs multiply otherwise
        assert_identical(results[0], train_alone(recipe, dtype, "plain"))


@pytest.mark.parametrize("mode", [*MODES][1:])
def test_modes(mode):
    results = run(train_replicas, 2, "nvfp4", torch.float32, mode)
    assert_one_outcome(results)
    if mode != "compiled" and not torch.cuda.is_available():
        assert_identical(results[0], train_alone("nvfp4", torch.float32, mode))


def train_all_cases(rank: int) -> list[Any]:
    return [x for case in CASES for x in train_replicas(rank, *case, "plain")]


def test_three_replicas():
    assert_one_outcome(run(train_all_cases, 3))


def quantize_differently(rank: int) -> None:
    model = Net(None, torch.float32)
    quantize_model(model, "nvfp4", filter=lambda module, name: rank == 0 or name != "rare")
    with pytest.raises(RuntimeError, match="same shape, dtype and quantizer on all ranks"):
        DistributedDataParallel(model)


def test_replicas_of_another_format_are_refused_on_every_rank():
    run(quantize_differently, 2)


# Others that make replicas equal, or keep them so.


def keep_equal_starts(
    rank: int, recipe: str | None, dtype: torch.dtype, mode: str = "plain"
) -> list[Any]:
    """replicate() of FSDP2, which leaves it to the ranks to start alike."""
    torch.manual_seed(1000)
    model = Net(recipe, dtype)
    replicate(model, mesh=init_device_mesh(home().type, (2,), mesh_dim_names=("replicate",)))
    optimizer = adam(model, mode)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    return snapshot(model, optimizer)


@pytest.mark.parametrize(
    "recipe, dtype, mode",
    [*((*case, "plain") for case in CASES), ("nvfp4", torch.float32, "8bit")],
    ids=[*IDS, "8bit"],
)
def test_composable_replicate(recipe, dtype, mode):
    results = run(keep_equal_starts, 2, recipe, dtype, mode)
    assert_one_outcome(results)
    if torch.cuda.device_count() >= 2:
        return  # one process computes on the CPU, whose matmuls have other bits than a GPU's
    for a, b in zip(results[0], train_alone(recipe, dtype, mode), strict=True):
        assert a.keys() <= b.keys()
        for name in a:  # shards do without what can be derived
            assert torch.equal(a[name].cpu(), b[name])


def train_with_zero(rank: int, recipe: str, **options: Any) -> list[Any]:
    torch.manual_seed(1000 + rank)
    replica = Net(recipe, torch.float32)
    model = DistributedDataParallel(replica)
    settings = dict(lr=1e-2, weight_decay=0.1, **options)
    optimizer = ZeroRedundancyOptimizer(replica.parameters(), FP4Adam, **settings)
    for step in range(3):
        model.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    return snapshot(replica, FP4Adam(replica.parameters()))


def zero_all_formats(rank: int, states: str) -> list[list[Any]]:
    return [train_with_zero(rank, recipe, states=states) for recipe in FORMATS]


@pytest.mark.parametrize("states, world_size", [("32bit", 2), ("32bit", 3), ("8bit", 2)])
def test_zero_redundancy_optimizer(states, world_size):
    results = run(zero_all_formats, world_size, states)
    for i, recipe in enumerate(FORMATS):
        outcomes = [result[i] for result in results]
        assert_one_outcome(outcomes)
        if world_size == 2 and not torch.cuda.is_available():
            alone = train_alone(recipe, torch.float32, "8bit" if states == "8bit" else "plain")
            assert_identical(outcomes[0], alone[: len(outcomes[0])])


def misuse_wrappers(rank: int) -> None:
    for flags in ({}, {"use_orig_params": True}):
        with pytest.raises(NotImplementedError, match="got FullyShardedDataParallel, which would"):
            FullyShardedDataParallel(Net("nvfp4", torch.float32), device_id=home(), **flags)
    with pytest.raises(NotImplementedError, match="parameters_as_bucket_view must be False"):
        train_with_zero(rank, "mxfp8", parameters_as_bucket_view=True)
    with pytest.raises(ValueError, match="FP4Adam"):
        train_with_zero(rank, "mxfp8", overlap_with_ddp=True)


def test_wrappers_that_flatten_weights_are_refused():
    run(misuse_wrappers, 2)


def resume(rank: int) -> list[Any]:
    """A model and an optimizer that rank 0 has loaded, then sent to the others."""
    torch.manual_seed(0)
    first = Net("nvfp4", torch.float32)
    model, optimizer = Net("nvfp4", torch.float32), None
    trained = adam(first)
    loss_of(first, 0, 0).backward()
    trained.step()
    if rank == 0:
        model.load_state_dict(first.state_dict())
    ddp = DistributedDataParallel(model)
    optimizer = adam(model)
    saved = [trained.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    optimizer.load_state_dict(saved[0])
    loss_of(ddp, 1, rank).backward()
    optimizer.step()
    return snapshot(model, optimizer)


def test_resuming_needs_the_state_of_the_optimizer_on_all_ranks():
    assert_one_outcome(run(resume, 3))
