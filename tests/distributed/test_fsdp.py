"""FSDP2: sharded training gives the same bits as training in one process."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    Recipe,
    check_shards,
    quantize_model,
)
from fp4adam.distributed import fsdp
from fp4adam.distributed.dtensor import like, local, part_for
from fp4adam.distributed.fsdp import gather_codes
from helpers import assert_identical
from ranks import all_ranks, by_world_size, home, run, run_cases, use_kernels

FORMATS = ("nvfp4", "mxfp8", "float8block", "float8")
# In the quick run, one of the two formats whose shards exchange an amax goes through every case.
CASES_OF = (*FORMATS[:3], pytest.param("float8", marks=pytest.mark.exhaustive))
WITH_GEMM_SCALES = {
    "nvfp4": NVFP4Quantizer(optimize_for_gemm=True),
    "mxfp8": MXFP8Quantizer(optimize_for_gemm=True),
}
OPTIONS = dict(lr=1e-2, weight_decay=0.1)


def build(
    rows: int, cols: int, recipe: str | Quantizer | None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(cols, rows), nn.Tanh(), nn.Linear(rows, cols, bias=False))
    model.to(dtype)
    if not model[0].weight.is_meta:
        model.to(home())
    # By name weights have one direction, which leaves less to gather.
    both = {"mxfp8": MXFP8Quantizer(), "float8block": Float8BlockQuantizer()}
    return quantize_model(model, both.get(recipe, recipe)) if recipe else model


def fixed_grads(model: nn.Module, seed: int, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Gradients of whole parameters, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(param.shape, generator=generator)
        .mul_(10.0 ** (i - 1))
        .to(param.device, dtype or param.dtype)
        for i, param in enumerate(model.parameters())
    ]


def set_grads(model: nn.Module, grads: list[Tensor]) -> None:
    """Give each parameter its part of its gradient."""
    for param, grad in zip(model.parameters(), grads, strict=True):
        if local(param) is not param:
            chunks = grad.chunk(dist.get_world_size())
            rank = dist.get_rank()
            part = chunks[rank] if rank < len(chunks) else grad[:0]
            grad = like(param, part.clone())
        param.grad = grad


PARTS = (
    "rowwise_data",
    "rowwise_scale_inv",
    "columnwise_data",
    "columnwise_scale_inv",
    "_rowwise_gemm_scale_inv",
    "_columnwise_gemm_scale_inv",
    "_amax",
)


def bytes_of(param: Tensor) -> dict[str, Tensor]:
    """What a whole parameter consists of, and its value."""
    value = {"value": param.detach().clone()}
    if not isinstance(param, QuantizedTensor):
        return value
    parts = {name: getattr(param, name) for name in PARTS}
    existing = {name: part.clone() for name, part in parts.items() if part is not None}
    return {"value": param.detach().dequantize(param.dtype), **existing}


def whole_of(param: Tensor) -> Tensor:
    """A parameter, put together from the shards of all ranks."""
    shard = local(param).detach()
    if shard is param or not isinstance(shard, QuantizedTensor):
        return full(param.detach()).to(home())  # an offloaded one is on the CPU
    mesh = param.device_mesh
    mesh = mesh["shard"] if mesh.ndim > 1 else mesh
    return gather_codes(shard, mesh, shard.dtype)


def gathered_bytes(
    model: nn.Module, modules: Iterable[Any] | None = None
) -> list[dict[str, Tensor]]:
    """The bytes of whole parameters; FSDP2 gathers their values, or these bytes."""
    modules = [model] if modules is None else [*modules]
    whole = [bytes_of(whole_of(param)) for param in model.parameters()]
    for module in modules:
        module.unshard()
    for param, expected in zip(model.parameters(), whole, strict=True):
        gathered = bytes_of(local(param))
        assert gathered.keys() in (expected.keys(), {"value"})
        assert_identical([gathered], [{name: expected[name] for name in gathered}])
    for module in modules:
        module.reshard()
    return whole


def whole_bytes(model: nn.Module) -> list[dict[str, Tensor]]:
    return list(map(bytes_of, model.parameters()))


def full(value: Tensor) -> Tensor:
    if local(value) is value:
        return value
    # gloo gathers no int16, which remainders are in.
    is_int16 = value.dtype == torch.int16
    return value.int().full_tensor().short() if is_int16 else value.full_tensor()


def step_in_parallel(
    rank: int, rows: int, cols: int, recipe: Any, options: dict, by_kernels: bool = False
) -> None:
    """By kernels: those of a GPU, in Triton's interpreter on a CPU."""
    if by_kernels:
        use_kernels()
    last = 1 if by_kernels else 9
    quantizer = WITH_GEMM_SCALES.get(recipe, recipe) if isinstance(recipe, str) else recipe
    whole, sharded = (build(rows, cols, quantizer, torch.bfloat16) for _ in range(2))
    fully_shard(sharded, mesh=all_ranks())
    expected = FP4Adam(whole.parameters(), **OPTIONS, **options)
    optimizer = FP4Adam(sharded.parameters(), **OPTIONS, **options)
    for step in range(last + 1):
        grads = fixed_grads(whole, step)
        if step == 1:
            # The largest weight becomes NaN, which is on one rank.
            largest = whole[0].weight.dequantize(torch.float32).abs().argmax()
            grads[0].view(-1)[largest] = float("nan")
        set_grads(whole, grads)
        set_grads(sharded, grads)
        expected.step()
        optimizer.step()
        if step in (0, 1, last):
            assert_identical(gathered_bytes(sharded), whole_bytes(whole))
    check_shards(sharded)
    for a, b in zip(optimizer.state.values(), expected.state.values(), strict=True):
        assert a["step"] == b["step"] == last + 1
        # Scales are of each rank's memory; the others are gathered, in one order on all ranks.
        for name in sorted(b.keys() - {"step", "exp_avg_sq_scale"}):
            assert_identical([{name: full(a[name])}], [{name: b[name]}])


DELAYED = Float8Quantizer(scaling="delayed", amax_history_len=3)
NARROW = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float8_e4m3fn}
REMAINDERS = {"master_weight_dtype": torch.int8, "exp_avg_dtype": torch.bfloat16}
WITHOUT_MASTERS = {"master_weights": False, "exp_avg_dtype": torch.bfloat16}
FROM_DTYPE, AMSGRAD = {"quantize_from": "param_dtype"}, {"amsgrad": True}

# The number of ranks, the shape of the first weight, format, options, and whether by kernels. On
# three ranks boundaries cut blocks of 64 rows, on two those of 288 in Float8Block.
STEPS = [
    (1, 64, 32, "nvfp4", {}),
    *((2, 256, 128, recipe, {}) for recipe in FORMATS[:3]),  # whole blocks
    *((3, 64, 32, recipe, {}) for recipe in FORMATS[:3]),
    (3, 96, 64, "mxfp8", {}),
    (2, 288, 64, "float8block", {}),
    (3, 37, 20, "float8", {}),  # 13, 13 and 11 rows
    (6, 7, 16, "float8block", {}),  # two rows each on three ranks, one on the fourth
    (5, 16, 16, "nvfp4", {}),  # four rows each on four of five ranks
    (2, 256, 32, DELAYED, {}),  # the history has the amaxes of the whole weight on every rank
    (3, 64, 32, DELAYED, {}),
    (2, 64, 32, "nvfp4", FROM_DTYPE),
    (2, 64, 32, "float8block", AMSGRAD),
    (2, 64, 32, "nvfp4", NARROW),
    (2, 64, 32, "float8block", NARROW),
    (3, 64, 32, "nvfp4", REMAINDERS),
    (6, 7, 32, "float8block", REMAINDERS),
    (3, 64, 32, "float8block", WITHOUT_MASTERS),
    (3, 64, 32, "nvfp4", {}, True),
    (2, 64, 32, "mxfp8", {}, True),
    (2, 256, 32, "float8block", {}, True),
    (3, 64, 32, "float8block", {}, True),  # quantized after the exchange
    (2, 31, 16, "float8", {}, True),  # kernels step 16 rows, operators 15
    (2, 31, 16, DELAYED, {}, True),
    (2, 64, 32, "nvfp4", REMAINDERS, True),
    (2, 64, 32, "mxfp8", WITHOUT_MASTERS, True),
]
MORE_STEPS = [
    *((n, rows, cols, "float8", {}) for n, rows, cols in ((2, 256, 128), (3, 64, 32))),
    *((2, 288, 64, recipe, {}) for recipe in ("nvfp4", "mxfp8", "float8")),
    *((2, 64, 32, recipe, FROM_DTYPE) for recipe in FORMATS[1:]),
    *((2, 64, 32, recipe, AMSGRAD) for recipe in ("nvfp4", "mxfp8", "float8")),
    *((2, 64, 32, recipe, NARROW) for recipe in ("mxfp8", "float8")),
    *((2, 64, 32, recipe, REMAINDERS) for recipe in FORMATS),
    (6, 7, 32, "float8block", WITHOUT_MASTERS),
    *((3, 64, 32, recipe, {}, True) for recipe in ("mxfp8", "float8", DELAYED)),
    (2, 256, 32, DELAYED, {}, True),
    (3, 64, 32, "float8", REMAINDERS, True),
    *((2, 256, 32, "float8block", options, True) for options in (REMAINDERS, WITHOUT_MASTERS)),
]


@pytest.mark.parametrize("world_size, cases", by_world_size(STEPS, MORE_STEPS))
def test_steps_have_the_bits_of_one_process(world_size, cases):
    run_cases(step_in_parallel, world_size, cases)


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


def load_rows(rank: int) -> None:
    whole, sharded = build(16, 16, "nvfp4"), build(16, 16, "nvfp4")
    fully_shard(sharded, mesh=all_ranks())
    assert_identical(gathered_bytes(sharded), whole_bytes(whole))
    initialize(whole)
    with torch.no_grad():
        for param, value in zip(sharded.parameters(), whole.parameters(), strict=True):
            parts = value.detach().chunk(dist.get_world_size())
            if rank < len(parts):
                local(param).copy_(parts[rank])
    check_shards(sharded)
    assert_identical(gathered_bytes(sharded), whole_bytes(whole))


def test_a_rank_without_rows_takes_part_in_what_others_load():
    run(load_rows, 5)


def clip_in_parallel(rank: int) -> None:
    whole, sharded = build(64, 32, "nvfp4"), build(64, 32, "nvfp4")
    whole[0].bias.requires_grad_(False)
    mesh = all_ranks()
    fully_shard(sharded, mesh=mesh, ignored_params={sharded[0].bias})
    sharded[0].bias.requires_grad_(False)
    expected, optimizer = FP4Adam(whole.parameters()), FP4Adam(sharded.parameters())
    reference = build(64, 32, None)
    for step, norm_type in enumerate((2.0, 1.0, float("inf"), 2.0)):
        grads = fixed_grads(whole, step)
        if step == 3:
            grads[0][40, 3] = float("nan")
        for model in (whole, sharded, reference):
            set_grads(model, [grad.clone() for grad in grads])
        norm = optimizer.clip_grad_norm_(1.0, norm_type)
        torch.testing.assert_close(
            norm, nn.utils.clip_grad_norm_(reference.parameters(), 1.0, norm_type), equal_nan=True
        )
        expected.clip_grad_norm_(1.0, norm_type)
        # The last bits of a norm depend on the number of ranks.
        expected._whole.clipping.coefficients = optimizer._whole.clipping.coefficients
        expected.step()
        optimizer.step()
    # NaN is in no amax, on no rank.
    assert_identical(gathered_bytes(sharded), whole_bytes(whole))


@pytest.mark.parametrize("world_size", [2, 3])
def test_clipping_by_the_norm_of_all_ranks(world_size):
    run(clip_in_parallel, world_size)


def train(model: nn.Module, optimizer: FP4Adam, steps: int, microbatches: int = 1) -> list[Tensor]:
    """Losses of a few steps; the same batch on every rank, so that the mean gradient is exact."""
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for i in range(microbatches):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(i == microbatches - 1)
            x = torch.randn(8, model[0].in_features, generator=generator).to(home())
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def initialize(model: nn.Module) -> None:
    """Fill in parameters; shards take their part of what a whole one would get."""
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        value = torch.randn(param.shape, generator=generator).mul_(0.1)
        with torch.no_grad():
            own = local(param)
            chunks = value.chunk(dist.get_world_size()) if own is not param else [value]
            own.copy_(chunks[dist.get_rank() % len(chunks)])


def train_variant(rank: int, recipe: str, rows: int, variant: str) -> None:
    whole = build(rows, 32, recipe)
    options, microbatches, mesh = {}, 1, all_ranks()
    if variant == "meta":
        with torch.device("meta"):
            sharded = build(rows, 32, recipe)
        initialize(whole)
    else:
        sharded = build(rows, 32, recipe)
    if variant == "kept":
        options["reshard_after_forward"] = False
    elif "hybrid" in variant:
        mesh = init_device_mesh(home().type, (2, 2), mesh_dim_names=("replicate", "shard"))
        microbatches = 2 if variant == "hybrid, accumulated" else 1
    elif variant == "accumulated":
        microbatches = 2
    elif variant == "bfloat16":
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        options["mp_policy"] = policy
    elif variant == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=home().type == "cuda")
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(sharded, mesh=mesh, **options)
    if "prefetched" in variant:
        sharded[0].set_modules_to_forward_prefetch([sharded[2]])
        sharded[2].set_modules_to_backward_prefetch([sharded[0]])
        sharded.set_unshard_in_backward(True)
    if "recomputed" in variant:
        for model in (whole, sharded):
            checkpoint(model[0])
            checkpoint(model[2])
    if variant == "meta":
        sharded.to_empty(device=home())
        initialize(sharded)
    small = REMAINDERS if "int8" in variant else {}
    expected, optimizer = (
        FP4Adam(model.parameters(), lr=1e-2, **small) for model in (whole, sharded)
    )
    if variant == "evaluated":
        with torch.inference_mode():
            sharded(torch.ones(8, 32, device=home()))
    actual = train(sharded, optimizer, 4, microbatches)
    for a, b in zip(actual, train(whole, expected, 4, microbatches), strict=True):
        # The same values in BF16 where activations are rounded to it.
        tolerance = 0.02 if variant == "bfloat16" else 0
        torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=0)
    if variant != "bfloat16":
        assert_identical(gathered_layers(sharded), whole_bytes(whole))


def train_replicated(rank: int) -> None:
    for recipe in FORMATS:
        whole, replicated = (build(64, 32, WITH_GEMM_SCALES.get(recipe, recipe)) for _ in range(2))
        mesh = init_device_mesh(home().type, (2,), mesh_dim_names=("replicate",))
        for module in (replicated[0], replicated[2], replicated):
            replicate(module, mesh=mesh)
        expected, optimizer = (FP4Adam(m.parameters(), lr=1e-2) for m in (whole, replicated))
        for a, b in zip(train(replicated, optimizer, 3), train(whole, expected, 3), strict=True):
            assert torch.equal(a, b)
        assert_identical(gathered_layers(replicated), whole_bytes(whole))


def test_composable_replicas_have_the_bits_of_one_process():
    run(train_replicated, 2)


def gathered_layers(model: nn.Module) -> list[dict[str, Tensor]]:
    return gathered_bytes(model, [layer for layer in model if isinstance(layer, nn.Linear)])


VARIANTS = {2: ["", "kept", "evaluated", "offloaded", "meta", "accumulated", "bfloat16", "int8"]}
VARIANTS[4] = ["hybrid", "hybrid, int8"]
MORE_VARIANTS = {
    2: ["prefetched", "recomputed"],
    4: ["hybrid, accumulated", "hybrid, prefetched", "hybrid, recomputed"],
}
WHOLE = [("nvfp4", 256), ("float8block", 256)]
OTHERS = [("mxfp8", 256), ("float8", 256), ("nvfp4", 48), ("float8block", 48)]  # 48 rows cut blocks


def cases_of(layouts: list, variants: dict[int, list[str]]) -> list[tuple]:
    return [(n, *each, name) for n, names in variants.items() for name in names for each in layouts]


@pytest.mark.parametrize(
    "world_size, cases",
    by_world_size(
        cases_of(WHOLE, VARIANTS),
        [*cases_of(WHOLE, MORE_VARIANTS), *cases_of(OTHERS, VARIANTS)],
    ),
)
def test_fully_shard_variants(world_size, cases):
    run_cases(train_variant, world_size, cases)


def exchange_shards(rank: int) -> None:
    # Codes and scales in one buffer; of both directions, and apart, where matmuls read them.
    n_gathered = dict.fromkeys(FORMATS, 1)
    n_gathered |= {WITH_GEMM_SCALES["nvfp4"]: 2, WITH_GEMM_SCALES["mxfp8"]: 4}
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


def overwrite_in_parallel(rank: int, recipe: str, rows: int, reset: bool) -> None:
    """The same overwrites of a whole model and of a sharded one, between steps."""
    models = [build(rows, 32, recipe, torch.bfloat16) for _ in range(2)]
    fully_shard(models[1], mesh=all_ranks())
    optimizers = [FP4Adam(model.parameters(), **OPTIONS) for model in models]
    for step in range(6):
        params = [[*model.parameters()][step % 3] for model in models]
        value = fixed_grads(models[0], 100 + step)[step % 3]
        if reset and step > 2:
            # One rank writes the values that it has, after which its masters would go on.
            first = -(-len(value) // dist.get_world_size())
            whole = params[0].detach()
            whole = whole.dequantize() if isinstance(whole, QuantizedTensor) else whole
            value[:first] = whole[:first]
        for model, optimizer, param in zip(models, optimizers, params, strict=True):
            with torch.no_grad():
                param.copy_(like(param, part_for(param, value)) if model is models[1] else value)
            if reset:
                optimizer.reset_master_weights()
            set_grads(model, fixed_grads(models[0], step))
            optimizer.step()
        assert_identical(gathered_bytes(models[1]), whole_bytes(models[0]))
        for a, b in zip(optimizers[1].state.values(), optimizers[0].state.values(), strict=True):
            assert_identical({n: full(x) for n, x in a.items()}, dict(b))
    check_shards(models[1])


OVERWRITES = [(3, "nvfp4", 64, False), (3, "nvfp4", 64, True), (3, "float8block", 64, False)]
MORE_OVERWRITES = [(3, "float8block", 64, True), (3, "mxfp8", 64, True), (3, "float8", 64, False)]


@pytest.mark.parametrize("world_size, cases", by_world_size(OVERWRITES, MORE_OVERWRITES))
def test_overwritten_weights_have_the_bits_of_one_process(world_size, cases):
    run_cases(overwrite_in_parallel, world_size, cases)
