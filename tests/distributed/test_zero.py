"""Masters spread over ranks: the weights of every rank are those of one process, bit for bit."""

import math
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fp4adam import (
    Float8BlockQuantizer,
    FP4Adam,
    FusedAdam,
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
    """Uneven parts at odd offsets; of small weights the last of three ranks has nothing."""
    if world_size == 2:
        cuts = [0, numel // 3 + 1, numel]
    else:
        cuts = [0, 999, 2001, numel] if numel > 3000 else [0, 7, numel, numel]
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


@pytest.mark.parametrize("world_size, manual", [(2, True), (3, False)])
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


def test_no_weights_are_no_work():
    quantize_master_weights([], [], [], None)
    post_all_gather_processing([])
    fp4_utils.quantize_nvfp4_param_shard([], [], [], None)


def test_post_all_gather_processing_refuses_what_it_cannot_build():
    weight, plain = NVFP4Quantizer(two_dimensional=False).make_empty((16, 16)), torch.ones(4, 4)
    with pytest.raises(ValueError, match=r"model_weights\[0\] must"):
        post_all_gather_processing([plain, weight])
    post_all_gather_processing([plain])  # as it is
    post_all_gather_processing(plain)


def test_post_all_gather_processing_takes_one_tensor_and_leaves_mxfp8_alone():
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    weight = NVFP4Quantizer().quantize(x)
    expected = weight._columnwise_data.clone()
    weight._columnwise_data.zero_()
    post_all_gather_processing(weight)
    assert torch.equal(weight._columnwise_data, expected)
    other = MXFP8Quantizer().quantize(x)
    expected = other._columnwise_data.clone()
    post_all_gather_processing([other])
    assert torch.equal(other._columnwise_data, expected)


# A distributed optimizer as Megatron has it: one buffer of packed weights, one of gradients.
LAYERS = [(48, 80), (16, 16), (32, 48), (16, 112)]
N_STEPS = 3
OPTIONS = dict(lr=0.05, weight_decay=0.1)


def layer_values() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in LAYERS]


def layer_grads(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in LAYERS]


class ShardedOptimizer:
    """Rank r owns elements [r * size, (r + 1) * size) of all weights, one after the other."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.params = [NVFP4Quantizer().quantize(x.bfloat16()) for x in layer_values()]
        first, self.spans = 0, []
        for param in self.params:
            self.spans.append((first, first + param.numel()))
            first += -(-param.numel() // 64) * 64
        # Bytes follow from elements: every boundary lies between two bytes.
        self.size = 2 * math.ceil(first / (2 * world_size))
        self.buffer = torch.zeros(self.size * world_size // 2, dtype=torch.uint8)
        for param, (start, stop) in zip(self.params, self.spans, strict=True):
            shape = fp4_utils.get_nvfp4_rowwise_packed_shape(param.shape)
            packed = self.buffer[start // 2 : stop // 2].view(shape)
            fp4_utils.modify_nvfp4_rowwise_storage(param, packed)
        self.own = slice(rank * self.size, (rank + 1) * self.size)
        self.mains: list[Tensor | None] = []
        self.offsets: list[int | None] = []
        for value, (start, stop) in zip(layer_values(), self.spans, strict=True):
            begin, end = max(start, self.own.start), min(stop, self.own.stop)
            part = value.flatten()[begin - start : end - start].clone()
            self.mains.append(torch.nn.Parameter(part) if begin < end else None)
            self.offsets.append(begin - start if begin < end else None)
        mine = [main for main in self.mains if main is not None]
        # A rank may own nothing but padding.
        self.optimizer = FusedAdam(mine, **OPTIONS) if mine else None

    def step(self, grads: list[Tensor]) -> None:
        for main, offset, grad in zip(self.mains, self.offsets, grads, strict=True):
            if main is not None:
                main.grad = grad.flatten()[offset : offset + main.numel()].float()
        if self.optimizer is not None:
            self.optimizer.step()
        fp4_utils.quantize_nvfp4_param_shard(
            self.params, self.mains, self.offsets, dist.group.WORLD
        )
        own = self.buffer[self.own.start // 2 : self.own.stop // 2].clone()
        dist.all_gather_into_tensor(self.buffer, own)
        post_all_gather_processing(self.params)


def train_on_rank(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    optimizer = ShardedOptimizer(rank, world_size)
    for step in range(N_STEPS):
        optimizer.step(layer_grads(step))
    return [param.storage_tensors() for param in optimizer.params]


@pytest.mark.parametrize("world_size", [2, 3, 5, 6, 12])
def test_a_distributed_optimizer_gives_the_weights_of_one_process(world_size):
    params = []
    for value in layer_values():
        param = torch.nn.Parameter(NVFP4Quantizer().quantize(value.bfloat16()))
        param._high_precision_init_val = value
        params.append(param)
    optimizer = FP4Adam(params, quantize_from="param_dtype", **OPTIONS)
    for step in range(N_STEPS):
        for param, grad in zip(params, layer_grads(step), strict=True):
            param.grad = grad
        optimizer.step()
    for weights in run_ranks(train_on_rank, world_size, world_size):
        for param, storage in zip(params, weights, strict=True):
            for name, inner in param.storage_tensors().items():
                assert torch.equal(storage[name], inner), name


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
    ("quantizer", "new", "error", "match"),
    [
        (NVFP4Quantizer(), torch.zeros(511, dtype=torch.uint8), ValueError, "uint8 of 512 bytes"),
        (NVFP4Quantizer(), torch.zeros(512), ValueError, "uint8 of 512 bytes"),
        (NVFP4Quantizer(), torch.zeros(1024, dtype=torch.uint8)[::2], ValueError, "contiguous"),
        (
            NVFP4Quantizer(rowwise=False),
            torch.zeros(512, dtype=torch.uint8),
            RuntimeError,
            "must have rowwise codes",
        ),
    ],
)
def test_storage_that_does_not_fit_is_refused(quantizer, new, error, match):
    with pytest.raises(error, match=match):
        fp4_utils.modify_nvfp4_rowwise_storage(quantizer.make_empty((32, 32)), new)


def test_alignment_depends_on_the_kernels():
    assert fp4_utils.get_fp4_align_size() == 128


def test_tables_are_kept_while_addresses_hold(device, monkeypatch):
    monkeypatch.setattr(backend, "uses_kernels", lambda d: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda *args: None)
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

    cast(builds=True)
    cast(builds=False)
    cast(builds=False)
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


def test_kept_tables_keep_no_weight_alive(device, monkeypatch):
    monkeypatch.setattr(backend, "uses_kernels", lambda d: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda *args: None)
    weight = NVFP4Quantizer().make_empty((16, 16), torch.bfloat16, device)
    for _ in range(2):
        quantize_master_weights([weight], [torch.ones(256, device=device)], [0], None, None, True)
        post_all_gather_processing([weight])
    storage = weakref.ref(weight._shared)
    del weight
    assert storage() is None
