"""FSDP2, replicas and stages: gathered weights, collectives, and what is refused."""

import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Muon

from fp4adam import (
    FP4Adam,
    MasterWeightOptimizer,
    NVFP4Quantizer,
    QuantizedTensor,
    check_shards,
    quantize_model,
)
from fp4adam.distributed import fsdp
from fp4adam.distributed.dtensor import local
from helpers import assert_identical
from ranks import all_ranks, home, run, run_cases
from twins import (
    FORMATS,
    OPTIONS,
    Twin,
    build,
    distribute,
    fixed_grads,
    full,
    gathered_bytes,
    initialize,
    run_calls,
    set_grads,
    take_step,
    whole_bytes,
    zero_redundancy_optimizer,
)


def gather_to_other_memory(rank: int) -> None:
    """A decoder is used again for the memory that it was made for, and for no other."""
    shard, freed = local(distribute(build(64, 32, "nvfp4"), "root")[0].weight), []
    free, fsdp._free = fsdp._free, freed.append
    shard._high_precision_init_val = None
    shard._shared.stepped_by = weakref.WeakSet([stepped_by := mock.Mock()])
    (packed,), gathering = shard.fsdp_pre_all_gather(all_ranks())
    assert stepped_by.has_left.called and shard.has_bytes_of(shard._shared.left)
    with mock.patch("torch.cuda.current_stream"):  # moved from the host, in another stream
        for part in fsdp._known(shard, mock.Mock(), ("amax", "rowwise_data")).values():
            part.record_stream.assert_called_once()
    outputs = (packed.clone(),), (packed.clone(),)
    whole, _ = shard.fsdp_post_all_gather(outputs[0], gathering, torch.float32)
    other = torch.empty_like(whole)
    calls = (0, whole, True), (1, whole, False), (1, other, False), (1, other, True)
    for i, out, is_known in calls:
        known = gathering.decoded
        out.data.zero_()
        shard.fsdp_post_all_gather(outputs[i], gathering, torch.float32, out=out)
        assert torch.equal(out, shard.dequantize(torch.float32))
        assert (gathering.decoded is known) == is_known and freed[-1] is outputs[i]
    assert len(freed) == 5
    free(parts := (*outputs[0], *outputs[1]))
    assert not any(part.untyped_storage().size() for part in parts)
    rows = NVFP4Quantizer().make_empty((16, 16)).new_zeros(4, 16)
    for n_ranks, known in ((4, ("amax",)), (5, ())):  # of which the fifth has no rows
        mesh = mock.Mock(**{"size.return_value": n_ranks})
        assert fsdp._entries_to_gather(rows, mesh, codes=False)[1] == known


def exchange_shards(rank: int) -> None:
    # Codes and scales in one buffer; of both directions, and apart, where matmuls read them.
    n_gathered = dict.fromkeys(FORMATS, 1) | {"nvfp4-gemm": 2, "mxfp8-gemm": 4}
    for recipe, n in n_gathered.items():
        whole, sharded, other = (build(256, 64, recipe) for _ in range(3))
        for model in (sharded, other):
            distribute(model, "root")
        gathered_bytes(sharded)
        for model in (whole, other):
            initialize(model)
        sharded.load_state_dict(other.state_dict(), assign=True)
        shard = local(sharded[0].weight)
        assert len(shard.fsdp_pre_all_gather(all_ranks())[0]) == n
        is_decoded = shard.fsdp_should_release_all_gather_outputs_after_post_all_gather()
        assert is_decoded == (recipe in FORMATS)  # codes are views of what was gathered
        assert_identical(gathered_bytes(sharded), whole_bytes(whole))
        sharded.unshard()
        assert isinstance(sharded[0].weight, QuantizedTensor) != is_decoded
        if not is_decoded:
            assert sharded[0].weight.global_spec is None  # it is no shard of another
            with pytest.raises(RuntimeError, match="must be sharded to be written to.*reshard"):
                nn.init.zeros_(sharded[0].weight)
            scales = sharded[0].weight.inner.rowwise_gemm_scale_inv
            sharded.reshard()
            assert not scales.untyped_storage().size()  # as the codes


def disagree(rank: int) -> None:
    for name in ("_amax", "_block_scale_inv"):
        model = distribute(build(64, 32, "nvfp4"), "root")  # boundaries cut blocks of both weights
        initialize(model)
        check_shards(model)  # which quantizes what waits for other ranks
        assert local(model[2].weight).pending_value() is None
        if rank == 1:
            getattr(local(model[2].weight), name).add_(8)
        with pytest.raises(RuntimeError, match=r"parameter '2\.weight' must have the same scales"):
            check_shards(model)


def shard_otherwise(rank: int) -> None:
    with pytest.raises(ValueError, match="layer '0' must be whole.*fully_shard after"):
        quantize_model(distribute(build(64, 32, None), "root"), "nvfp4")
    model = build(64, 32, "nvfp4")
    fully_shard(model[0], mesh=all_ranks())
    optimizer = FP4Adam(model.parameters(), scale_groups=[[model[0].weight, model[2].weight]])
    set_grads(model, fixed_grads(model, 0))
    with pytest.raises(NotImplementedError, match="must be sharded over the same ranks, got"):
        optimizer.step()
    dist.barrier()  # nobody waits for anybody


def count_collectives(rank: int, layout: str, recipe: str, count: int) -> None:
    model = distribute(build(64, 64, recipe), layout)
    check_shards(model)  # scales that wait for other ranks take a collective of their own
    optimizer = FP4Adam(model.parameters())
    for step in range(3):
        set_grads(model, fixed_grads(model, step))
        with CommDebugMode() as mode:
            optimizer.step()
        counts = {torch.ops.c10d.allreduce_: count} if count else {}
        assert dict(mode.get_comm_counts()) == counts


@pytest.mark.parametrize(
    "world_size, cases",
    [
        (2, [("parallel", "nvfp4", 1), ("parallel", "mxfp8", 0), ("root", "nvfp4", 1)]),
        (3, [("root", "nvfp4", 1), ("root", "mxfp8", 1)]),
        # Among the shards of a part, and among the parts.
        (4, [("parallel", "nvfp4", 2), ("hybrid", "nvfp4", 1)]),
    ],
)
def test_collectives_of_a_step(world_size, cases):
    run_cases(count_collectives, world_size, cases)


def train_compiled(rank: int, recipe: str) -> None:
    run_calls(Twin("sharded, compiled", recipe, 192, 128, dtype=torch.float32), ["train", "train"])


# Scales that are filled in anew: of blocks that 192 rows cut, and in the order of GEMMs.
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["float8block", "nvfp4, codes"])
def test_compiled_layers(recipe):
    run(train_compiled, 2, recipe, timeout=400.0)


def train_with_muon(rank: int) -> None:
    """An optimizer that communicates: sums over ranks have another order than in one process."""
    models = [distribute(build(64, 32, "nvfp4"), layout) for layout in ("alone", "root")]
    matrices = [[param for param in model.parameters() if param.ndim == 2] for model in models]
    alone, own = (MasterWeightOptimizer(each, Muon, lr=0.02) for each in matrices)
    for step in range(3):
        for model, optimizer in zip(models, (alone, own), strict=True):
            take_step(model, optimizer, fixed_grads(models[0], step))
    check_shards(models[1])
    for whole, param, found in zip(*matrices, gathered_bytes(models[1])[::2], strict=True):
        master = full(own.state[param]["master_param"])
        torch.testing.assert_close(master, alone.state[whole]["master_param"], rtol=0, atol=2e-3)
        expected = local(param).global_spec.quantizer.quantize(master).dequantize(param.dtype)
        assert torch.equal(found["value"], expected)


# Replicas and stages


def backward(model: nn.Module) -> None:
    model(torch.ones(8, 32, device=home())).square().mean().backward()


def release_in_replicas(rank: int) -> None:
    model = build(64, 32, "nvfp4")
    optimizer = FP4Adam(model.parameters(), **OPTIONS)
    optimizer.enable_gradient_release()
    replica = DistributedDataParallel(model)
    backward(replica)
    with pytest.raises(RuntimeError, match="that have one again: DistributedDataParallel aver"):
        optimizer.step()


def quantize_differently(rank: int) -> None:
    model = build(64, 32, None)
    quantize_model(model, "nvfp4", filter=lambda module, name: rank == 0 or name != "2")
    with pytest.raises(RuntimeError, match="same shape, dtype and quantizer on all ranks"):
        DistributedDataParallel(model)


def misuse_wrappers(rank: int) -> None:
    for flags in ({}, {"use_orig_params": True}):
        with pytest.raises(NotImplementedError, match="got FullyShardedDataParallel, which would"):
            FullyShardedDataParallel(build(64, 32, "nvfp4"), device_id=home(), **flags)
    for flags, error, match in (
        ({"parameters_as_bucket_view": True}, NotImplementedError, "bucket_view must be False"),
        ({"overlap_with_ddp": True}, ValueError, "FP4Adam"),
    ):
        model = DistributedDataParallel(build(64, 32, "mxfp8"))
        with pytest.raises(error, match=match):
            optimizer = zero_redundancy_optimizer()(model.parameters(), FP4Adam, **OPTIONS, **flags)
            backward(model)
            optimizer.step()


@pytest.mark.table
@pytest.mark.parametrize(
    "function, world_size",
    [
        (gather_to_other_memory, 1),
        (exchange_shards, 1),
        (exchange_shards, 2),
        (disagree, 3),
        pytest.param(shard_otherwise, 4, marks=pytest.mark.slow),
        pytest.param(train_with_muon, 2, marks=pytest.mark.slow),
        pytest.param(release_in_replicas, 2, marks=pytest.mark.slow),
        pytest.param(quantize_differently, 2, marks=pytest.mark.slow),
        (misuse_wrappers, 2),
    ],
)
def test_on_ranks(function, world_size):
    run(function, world_size)


MICROBATCHES = 4


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train_stages(rank: int, recipe: str, schedule_class: type) -> None:
    stages = [[model[:2], model[2]] for model in (build(128, 64, recipe) for _ in range(2))]
    own, whole = stages[0][rank], [param for stage in stages[1] for param in stage.parameters()]
    optimizer, expected = FP4Adam(own.parameters(), **OPTIONS), FP4Adam(whole, **OPTIONS)
    schedule = schedule_class(PipelineStage(own, rank, 2, home()), MICROBATCHES, loss_fn=loss_of)
    for step in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(home())
        target, losses, wanted = x.roll(1, 1), [], []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=losses)
        for part, of_part in zip(*(each.chunk(MICROBATCHES) for each in (x, target)), strict=True):
            wanted.append(loss_of(stages[1][1](stages[1][0](part)), of_part))
            wanted[-1].backward()
        for param in whole:
            param.grad.div_(MICROBATCHES)
        if rank == 1:
            assert torch.equal(torch.stack(losses), torch.stack(wanted))
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
    assert_identical(whole_bytes(own), whole_bytes(stages[1][rank]))
    for param, same in zip(own.parameters(), stages[1][rank].parameters(), strict=True):
        assert_identical(dict(optimizer.state[param]), dict(expected.state[same]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["nvfp4", *(pytest.param(r, marks=pytest.mark.exhaustive) for r in FORMATS[1:])]
)
def test_two_stages(recipe):
    run_cases(train_stages, 2, [(recipe, kind) for kind in (ScheduleGPipe, Schedule1F1B)])
