"""FSDP2: sharded training gives the same bits as training in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode

from fp4adam import (
    Float8BlockQuantizer,
    FP4Adam,
    NVFP4Quantizer,
    QuantizedTensor,
    Recipe,
    check_shards,
    quantize_model,
)
from fp4adam.distributed import fsdp
from fp4adam.distributed.dtensor import local
from helpers import assert_identical
from ranks import all_ranks, home, run, use_kernels
from twins import (
    FORMATS,
    OPTIONS,
    build,
    fixed_grads,
    gathered_bytes,
    initialize,
    set_grads,
    whole_bytes,
)


def gather_cut_blocks(rank: int) -> None:
    use_kernels()
    # 144 rows per rank: the second one begins within a block; 32 rows are less than one.
    whole, sharded = (build(288, 64, "float8block", torch.bfloat16) for _ in range(2))
    fully_shard(sharded, mesh=all_ranks())
    x = torch.ones(2, 64, dtype=torch.bfloat16, device=home())
    torch.testing.assert_close(sharded(x), whole(x), rtol=0, atol=0)
    sharded.reshard()
    assert_identical(gathered_bytes(sharded), whole_bytes(whole))
    shards = [local(module.weight) for module in (sharded[0], sharded[2])]
    made = [fsdp._gatherings[shard._shared].names for shard in shards]
    assert made == [("rowwise_data", "block_scale_inv")] * 2


def test_shards_that_begin_within_a_block_are_gathered():
    run(gather_cut_blocks, 2)


def gather_to_other_memory(rank: int) -> None:
    """A decoder is used again for the memory that it was made for, and for no other."""
    model = build(64, 32, "nvfp4")
    fully_shard(model, mesh=all_ranks())
    shard, freed = local(model[0].weight), []
    fsdp._free = freed.append
    (packed,), gathering = shard.fsdp_pre_all_gather(all_ranks())
    outputs = (packed.clone(),), (packed.clone(),)
    whole, (values,) = shard.fsdp_post_all_gather(outputs[0], gathering, torch.float32)
    other = torch.empty_like(whole)
    for output, out, is_known in (
        (outputs[0], whole, True),
        (outputs[1], whole, False),
        (outputs[1], other, False),
        (outputs[1], other, True),
    ):
        known = gathering.decoded
        out.data.zero_()
        assert shard.fsdp_post_all_gather(output, gathering, torch.float32, out=out) is None
        assert torch.equal(out, shard.dequantize(torch.float32))
        assert (gathering.decoded is known) == is_known
        assert freed[-1] is output
    assert len(freed) == 5


def test_gathered_weights_are_decoded_again():
    run(gather_to_other_memory, 1)


def exchange_shards(rank: int) -> None:
    # Codes and scales in one buffer; of both directions, and apart, where matmuls read them.
    n_gathered = dict.fromkeys(FORMATS, 1)
    n_gathered |= {"nvfp4-gemm": 2, "mxfp8-gemm": 4}
    for recipe, n in n_gathered.items():
        whole, sharded, other = (build(256, 64, recipe) for _ in range(3))
        for model in (sharded, other):
            fully_shard(model, mesh=all_ranks())
        gathered_bytes(sharded)
        initialize(whole)
        initialize(other)
        sharded.load_state_dict(other.state_dict(), assign=True)
        inputs, _ = local(sharded[0].weight).fsdp_pre_all_gather(all_ranks())
        assert len(inputs) == n
        assert_identical(gathered_bytes(sharded), whole_bytes(whole))
        sharded.unshard()
        if isinstance(sharded[0].weight, QuantizedTensor):
            with pytest.raises(RuntimeError, match="must be sharded to be written to.*reshard"):
                nn.init.zeros_(sharded[0].weight)
        assert isinstance(sharded[0].weight, QuantizedTensor) == (recipe not in FORMATS)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gathered_weights_follow_shards_that_are_exchanged(world_size):
    run(exchange_shards, world_size)


def disagree(rank: int) -> None:
    model = build(64, 32, "nvfp4")
    fully_shard(model, mesh=all_ranks())
    initialize(model)
    check_shards(model)  # which quantizes what waits for other ranks
    assert local(model[2].weight).pending_value() is None
    if rank == 1:
        local(model[2].weight)._amax.mul_(2)
    with pytest.raises(RuntimeError, match=r"parameter '2\.weight' must have the same scales"):
        check_shards(model)


def test_shards_that_disagree_are_found_on_every_rank():
    run(disagree, 2)


def shard_otherwise(rank: int) -> None:
    mesh = all_ranks()
    for quantizer in (NVFP4Quantizer(two_dimensional=False), Float8BlockQuantizer(rowwise=False)):
        with pytest.raises(ValueError, match="parameter '0.weight' must have rowwise=True, and"):
            fully_shard(build(64, 32, quantizer), mesh=mesh)
    with pytest.raises(ValueError, match="must be sharded along its first dimension"):
        fully_shard(build(64, 32, "nvfp4"), mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    plain = build(64, 32, None)
    fully_shard(plain, mesh=mesh)
    with pytest.raises(ValueError, match="layer '0' must be whole.*fully_shard after"):
        quantize_model(plain, "nvfp4")
    # Nobody waits for anybody.
    dist.barrier()


def test_what_cannot_be_sharded_is_refused_on_every_rank():
    run(shard_otherwise, 4)


def count_collectives(rank: int) -> None:
    model = build(64, 32, "nvfp4")
    fully_shard(model, mesh=all_ranks())
    optimizer = FP4Adam(model.parameters())
    model.unshard()  # as every forward pass does, which settles what was written before
    model.reshard()
    for step in range(3):
        set_grads(model, fixed_grads(model, step))
        with CommDebugMode() as mode:
            optimizer.step()
        assert dict(mode.get_comm_counts()) == {torch.ops.c10d.allreduce_: 1}


def raise_versions(rank: int) -> None:
    use_kernels()
    model = build(64, 32, "nvfp4")
    fully_shard(model, mesh=all_ranks())
    optimizer = FP4Adam(model.parameters())
    for step in range(3):
        set_grads(model, fixed_grads(model, step))
        before = [local(param)._version for param in model.parameters()]
        optimizer.step()
        now = [local(param)._version for param in model.parameters()]
        assert all(a < b for a, b in zip(before, now, strict=True))


def test_autograd_sees_that_shards_were_written():
    run(raise_versions, 2)


def restart_from_large_moments(rank: int) -> None:
    """Small weights overtake the largest one in the second step: by the moments of one matrix."""
    use_kernels()
    results = []
    for sharded in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128)).to(home())
        model[0].weight.data[:, :64], model[0].weight.data[:, 64:] = 0.18, 0.0
        quantize_model(model, "nvfp4")
        if sharded:
            fully_shard(model, mesh=all_ranks())
        optimizer = FP4Adam(model.parameters(), lr=1e-2)
        set_grads(model, fixed_grads(model, 0))
        optimizer.step()
        saved = optimizer.state_dict()
        exp_avg, exp_avg_sq = (local(saved["state"][0][n]) for n in ("exp_avg", "exp_avg_sq"))
        exp_avg[:, :64] = 0.0
        exp_avg[:, 64:] = 60 * exp_avg_sq[:, 64:].sqrt()
        optimizer.load_state_dict(saved)
        for _ in range(2):
            set_grads(model, [torch.zeros_like(grad) for grad in fixed_grads(model, 0)])
            optimizer.step()
        results.append(gathered_bytes(model) if sharded else whole_bytes(model))
    assert_identical(*results)
    assert results[0][0]["_amax"] > 0.2


def test_the_bound_of_an_update_covers_all_loaded_moments():
    run(restart_from_large_moments, 2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_collective_per_step(world_size):
    run(count_collectives, world_size)


def three_losses(model: nn.Module) -> Tensor:
    """Of as many steps."""
    torch.manual_seed(0)  # NVFP4 rounds gradients at random
    optimizer = FP4Adam(model.parameters(), **OPTIONS)
    x = torch.randn(20, 128, generator=torch.Generator().manual_seed(1)).to(home())
    losses = []
    for _ in range(3):
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def train_quantized_matmuls(rank: int) -> None:
    codes = dict(activations=True, gradients=True, emulate=True)
    fake = dict(activations="fake")
    for weights, options in (
        ("nvfp4", codes),
        ("mxfp8", codes),
        ("float8block", codes),
        ("float8", codes),
        ("nvfp4", fake),
    ):
        recipe = Recipe(weights, **options)
        losses = []
        for sharded in (True, False):
            model = build(256, 128, recipe)
            if sharded:
                for layer in (model[0], model[2]):
                    fully_shard(layer, mesh=all_ranks())
                fully_shard(model, mesh=all_ranks())
                # The gathered weight is made of what was gathered, which torch must keep then.
                assert [releases_gathered(layer) for layer in (model[0], model[2])] == [False] * 2
            losses.append(three_losses(model))
        assert torch.equal(*losses) and losses[0][-1] < losses[0][0]


def test_gathered_weights_are_multiplied_as_whole_ones():
    run(train_quantized_matmuls, 2)


def releases_gathered(layer: nn.Module) -> bool:
    shard = layer.weight.to_local()
    return shard.fsdp_should_release_all_gather_outputs_after_post_all_gather()


def losses_in_blocks(recipe: str | Recipe, compiled: bool) -> Tensor:
    """Those of a model whose layers are gathered again for the backward pass."""
    model = build(192, 128, recipe)
    for layer in (model[0], model[2]):
        if compiled:
            layer.compile(backend="aot_eager")
        fully_shard(layer, mesh=all_ranks())
    fully_shard(model, mesh=all_ranks())
    assert all(releases_gathered(layer) == (recipe == "float8block") for layer in model[::2])
    return three_losses(model)


def compare_compiled_and_eager(rank: int) -> None:
    # Scales that are filled in anew: of blocks that 192 rows cut, and in the order of GEMMs.
    for recipe in ("float8block", Recipe("nvfp4", activations=True, gradients=True, emulate=True)):
        compiled, eager = (losses_in_blocks(recipe, compiled) for compiled in (True, False))
        assert torch.equal(compiled, eager)


def test_compiled_layers():
    run(compare_compiled_and_eager, 2)
