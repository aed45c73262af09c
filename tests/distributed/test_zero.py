"""Masters spread over ranks: the weights of every rank are those of one process, bit for bit."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fp4adam import (
    Float8BlockQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    fp4_utils,
)
from fp4adam.fp8_utils import post_all_gather_processing, quantize_master_weights
from fp4adam.tensors import backend
from helpers import random
from ranks import run_ranks

SHAPES = {
    NVFP4Quantizer(optimize_for_gemm=True): (48, 80),
    MXFP8Quantizer(): (32, 96),
    Float8BlockQuantizer(): (130, 20),
    NVFP4Quantizer(columnwise=False): (16, 16),
}


def masters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def empty_weights() -> list[QuantizedTensor]:
    return [q.make_empty(shape, torch.bfloat16) for q, shape in SHAPES.items()]


def bounds(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Uneven parts at odd offsets; the third rank has nothing of small weights, a fourth of any."""
    if world_size == 2:
        cuts = [0, numel // 3 + 1, numel]
    else:
        cuts = [0, 999, 2001, numel] if numel > 3000 else [0, 7, numel, numel]
    cuts += [numel]
    return cuts[rank], cuts[rank + 1]


def has_square_blocks(weight: QuantizedTensor) -> bool:
    return not isinstance(weight.quantizer, MXFP8Quantizer)


def gather_codes(weight: QuantizedTensor, start: int, stop: int) -> None:
    """What an all-gather does, for parts of any size: every code comes from its owner."""
    gathered = [weight._rowwise_data]
    if not has_square_blocks(weight):
        gathered.append(weight._columnwise_data)
    for data in gathered:
        codes = data.view(-1).clone()
        if fp4_utils.is_nvfp4tensor(weight):
            codes = torch.stack([codes & 0xF, codes >> 4], -1).view(-1)
        codes[:start], codes[stop:] = 0, 0
        dist.all_reduce(codes)  # the others have zeros here
        if fp4_utils.is_nvfp4tensor(weight):
            codes = codes[0::2] | codes[1::2] << 4
        data.copy_(codes.view_as(data))


def quantize_on_rank(rank: int, world_size: int, manual: bool) -> tuple[list, int]:
    weights = empty_weights()
    for weight in weights:
        weight._high_precision_init_val = torch.zeros(weight.shape)
    parts, starts, ends = [], [], []
    for value in masters():
        start, stop = bounds(value.numel(), rank, world_size)
        parts.append(value.flatten()[start:stop].clone() if stop > start else None)
        starts.append(start if stop > start else None)
        ends.append((start, stop))
    calls = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: calls.append(args) or all_reduce(*args, **kwargs)
    quantize_master_weights(weights, parts, starts, None, manual_post_all_gather_processing=manual)
    dist.all_reduce = all_reduce
    for weight, (start, stop) in zip(weights, ends, strict=True):
        assert weight._high_precision_init_val is None
        gather_codes(weight, start, stop)
    post_all_gather_processing(weights)
    return [(w.quantizer, w.storage_tensors()) for w in weights], len(calls)


@pytest.mark.parametrize("world_size, manual", [(2, True), (4, False)])
def test_ranks_agree_on_the_full_cast_in_one_all_reduce(world_size, manual):
    expected = [q.quantize(x.bfloat16()) for q, x in zip(SHAPES, masters(), strict=True)]
    for tensors, n_calls in run_ranks(quantize_on_rank, world_size, world_size, manual):
        assert n_calls == 1
        for weight, (quantizer, storage) in zip(expected, tensors, strict=True):
            dropped = not manual and has_square_blocks(weight)
            assert quantizer.columnwise == (weight.quantizer.columnwise and not dropped)
            for name, inner in weight.storage_tensors().items():
                if dropped and name.startswith("_columnwise"):
                    assert name not in storage
                else:
                    assert torch.equal(storage[name], inner), name


def empty(quantizer: Quantizer, **options: Any) -> list[QuantizedTensor]:
    return [quantizer.make_empty((32, 32), **options)]


OUT = torch.zeros(8, dtype=torch.uint8)
OUTS = "fsdp_shard_model_weights"
MISUSE = [
    (dict(master_weights=[]), "master_weights must have one entry per weight, 1, got 0"),
    (dict(start_offsets=[0, 0]), "start_offsets must have one entry per weight, 1"),
    ({OUTS: []}, f"{OUTS} must have one entry"),
    (dict(start_offsets=[None]), r"with a start_offsets\[0\], got a Tensor and None"),
    (dict(start_offsets=[-1]), r"must lie inside its weight of 1024 elements, got \[-1, 15\)"),
    (dict(start_offsets=[1009]), r"must lie inside .* got \[1009, 1025\)"),
    (dict(master_weights=[[1.0]]), "must be a tensor with .* got a list"),
    (dict(master_weights=[torch.ones(32)[::2]]), r"master_weights\[0\] must be a contiguous"),
    (dict(master_weights=[torch.ones(16).long()]), "must be a contiguous float32"),
    (dict(master_weights=[torch.ones(16).double()]), "must be a contiguous float32"),
    (dict(master_weights=empty(NVFP4Quantizer())), "must be a contiguous float32"),
    (dict(master_weights=[torch.ones(16, device="meta")]), "on cpu"),
    (dict(model_weights=[torch.ones(16, 16)]), r"model_weights\[0\] must be an NVFP4, MXFP8"),
    *(
        (dict(model_weights=empty(kind(two_dimensional=False))), "blocks .*two_dimensional=True")
        for kind in (NVFP4Quantizer, Float8BlockQuantizer)
    ),
    (dict(model_weights=empty(NVFP4Quantizer(rowwise=False))), "data to be cast .* rowwise=True"),
    (
        dict(
            model_weights=[*empty(NVFP4Quantizer()), *empty(NVFP4Quantizer(), device="meta")],
            master_weights=[None, None],
            start_offsets=[None, None],
        ),
        "must be on the device of the others, cpu, got meta",
    ),
    ({OUTS: [OUT[:7]]}, rf"{OUTS}\[0\] must be contiguous uint8 of 8 bytes"),
    ({OUTS: [OUT.float()]}, "uint8 of 8 bytes .* of torch.float32"),
    ({OUTS: [OUT.to("meta")]}, "on cpu"),
    ({OUTS: [torch.zeros(16, dtype=torch.uint8)[::2]]}, "contiguous"),
    ({OUTS: [(OUT, OUT)]}, "must be one tensor"),
    ({OUTS: [OUT], "model_weights": empty(MXFP8Quantizer())}, r"pair \(rowwise, columnwise\)"),
    ({OUTS: [(OUT, None)], "model_weights": empty(MXFP8Quantizer())}, "uint8 of 16 bytes"),
]


@pytest.mark.parametrize(("change", "match"), MISUSE)
def test_misuse_is_refused_before_any_collective(change, match, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda *_: pytest.fail("a rank waits for others"))
    arguments = dict(
        model_weights=empty(NVFP4Quantizer()),
        master_weights=[torch.ones(16)],
        start_offsets=[0],
        group=None,
    )
    with pytest.raises(ValueError, match=match):
        quantize_master_weights(**(arguments | change))


def cast_on_rank(rank: int) -> None:
    """A slice of any shape; an offset without a slice says nothing."""
    value = random((32, 32), 0)
    half = value[16 * rank :][:16].clone()
    expected = NVFP4Quantizer(columnwise=False).quantize(value)
    for master, start in ((half, 512 * rank), (half.flatten(), 512 * rank)):
        weights = [NVFP4Quantizer(columnwise=False).make_empty((32, 32)) for _ in range(2)]
        # Rank 0 has no slice of the second weight, and rank 1 has all of it.
        second = (None, 77) if rank == 0 else (value.clone(), 0)
        masters, starts = zip((master, start), second, strict=True)
        quantize_master_weights(weights, masters, starts, None)
        own = slice(16 * rank, 16 * rank + 16)
        assert torch.equal(weights[0].rowwise_data[own], expected.rowwise_data[own])
        if rank:
            assert torch.equal(weights[1].rowwise_data, expected.rowwise_data)
        for weight in weights:
            assert torch.equal(weight.rowwise_scale_inv, expected.rowwise_scale_inv)


def test_masters_of_any_shape_and_offsets_without_one():
    run_ranks(cast_on_rank, 2)


def test_post_all_gather_processing_derives_what_it_can():
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    for quantizer, is_built in ((NVFP4Quantizer(), True), (MXFP8Quantizer(), False)):
        weight = quantizer.quantize(x)
        expected = weight._columnwise_data.clone()
        weight._columnwise_data.zero_()
        post_all_gather_processing(weight if is_built else [weight])
        assert torch.equal(weight._columnwise_data, expected if is_built else 0 * expected)
    plain, vectors = torch.ones(4, 4), NVFP4Quantizer(two_dimensional=False).make_empty((16, 16))
    with pytest.raises(ValueError, match=r"model_weights\[0\] must"):
        post_all_gather_processing([plain, vectors])
    for nothing in (plain, [plain], []):
        post_all_gather_processing(nothing)
    quantize_master_weights([], [], [], None)
    fp4_utils.quantize_nvfp4_param_shard([], [], [], None)


def test_packed_shapes_and_moved_storage():
    assert fp4_utils.get_nvfp4_rowwise_packed_shape((3, 8)) == (3, 4)
    assert fp4_utils.get_nvfp4_rowwise_packed_shape(()) == ()
    with pytest.raises(ValueError, match=r"must be even to be packed, got shape \(3, 7\)"):
        fp4_utils.get_nvfp4_rowwise_packed_shape((3, 7))
    tensor = NVFP4Quantizer().quantize(torch.randn(16, 32))
    values = tensor.dequantize(torch.float32)
    buffer = torch.zeros(300, dtype=torch.uint8)
    fp4_utils.modify_nvfp4_rowwise_storage(tensor, buffer[10:266])
    assert tensor.data_ptr() == buffer.data_ptr() + 10
    assert torch.equal(tensor.dequantize(torch.float32), values)
    assert torch.equal(fp4_utils.dequantize_fp4_tensor(tensor), values)
    assert fp4_utils.is_nvfp4tensor(tensor) and not fp4_utils.is_nvfp4tensor(values)


@pytest.mark.parametrize(
    "options, new, error, match",
    [
        ({}, torch.zeros(511, dtype=torch.uint8), ValueError, "uint8 of 512 bytes"),
        ({}, torch.zeros(512), ValueError, "uint8 of 512 bytes"),
        ({}, torch.zeros(1024, dtype=torch.uint8)[::2], ValueError, "contiguous"),
        ({"rowwise": False}, torch.zeros(512), RuntimeError, "must have rowwise codes"),
    ],
)
def test_storage_that_does_not_fit_is_refused(options, new, error, match):
    tensor = NVFP4Quantizer(**options).make_empty((32, 32))
    with pytest.raises(error, match=match):
        fp4_utils.modify_nvfp4_rowwise_storage(tensor, new)


@pytest.fixture
def by_kernels(monkeypatch):
    """Casts by kernels, on the only rank."""
    monkeypatch.setattr(backend, "uses_kernels", lambda d: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda *args: None)


def test_tables_are_kept_while_addresses_hold(device, monkeypatch, by_kernels):
    from fp4adam.distributed import cast_launch

    tables, launches = [], cast_launch.CastLaunches
    monkeypatch.setattr(
        cast_launch, "CastLaunches", lambda *args: tables.append(1) or launches(*args)
    )
    weights = [NVFP4Quantizer().make_empty((32, 32), torch.bfloat16, device) for _ in range(2)]
    weights.append(MXFP8Quantizer().make_empty((32, 32), torch.bfloat16, device))
    values = [torch.randn(1024, device=device) for _ in weights]

    def cast(builds: bool) -> None:
        """Quantize new values, and compare; all tables are built anew, or none."""
        tables.clear()
        for value in values:
            value.normal_()
        codes = [weight._rowwise_data for weight in weights]
        versions = [x._version for x in (*weights, *codes)]
        quantize_master_weights(
            weights, values, (0, 0, 0), None, manual_post_all_gather_processing=True
        )
        post_all_gather_processing(weights)
        assert bool(tables) == builds
        assert all(map(int.__lt__, versions, (x._version for x in (*weights, *codes))))
        for weight, value in zip(weights, values, strict=True):
            expected = weight.quantizer.quantize(value.view(32, 32).bfloat16())
            assert weight.has_bytes_of(expected)

    for builds in (True, False, False):
        cast(builds)
    values[1] = values[1].clone()
    cast(builds=True)
    cast(builds=False)
    values[0].data = values[0].clone()
    cast(builds=True)
    weights[0].data = weights[0].clone()
    cast(builds=True)
    cast(builds=False)
    weights[1]._high_precision_init_val = torch.zeros(32, 32)
    cast(builds=False)
    assert weights[1]._high_precision_init_val is None
    weights.reverse()
    cast(builds=True)


def test_kept_tables_keep_no_weight_alive(device, by_kernels):
    weight = NVFP4Quantizer().make_empty((16, 16), torch.bfloat16, device)
    for _ in range(2):
        quantize_master_weights([weight], [torch.ones(256, device=device)], [0], None, None, True)
        post_all_gather_processing([weight])
    storage = weakref.ref(weight._shared)
    del weight
    assert storage() is None
