"""Masters spread over ranks, with the calls and names of Megatron's distributed optimizer.

The weights of every rank are those of one process, bit for bit.
"""

import importlib.util
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp4adam.fp4_utils as fp4_utils  # the path that stands in for megatron.core.fp4_utils
from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    FusedAdam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
)
from fp4adam.formats.nvfp4 import NVFP4Tensor
from fp4adam.fp8_utils import post_all_gather_processing, quantize_master_weights
from fp4adam.interop.adapter import is_foreign
from fp4adam.tensors import backend
from helpers import RECIPES, assert_identical, random
from ranks import run_ranks
from te_stand_ins import te_bytes, te_tensor

SHAPES = {
    NVFP4Quantizer(optimize_for_gemm=True): (48, 80),
    MXFP8Quantizer(): (32, 96),
    Float8BlockQuantizer(): (130, 20),
    NVFP4Quantizer(columnwise=False): (16, 16),
}


def masters() -> list[Tensor]:
    return [random(shape, seed) for seed, shape in enumerate(SHAPES.values())]


def bounds(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Uneven parts at odd offsets; the third rank has nothing of small weights, a fourth of any."""
    if world_size == 2:
        cuts = [0, numel // 3 + 1, numel]
    else:
        cuts = [0, 999, 2001, numel] if numel > 3000 else [0, 7, numel, numel]
    cuts += [numel]
    return cuts[rank], cuts[rank + 1]


def gather_codes(weight: QuantizedTensor, start: int, stop: int) -> None:
    """What an all-gather does, for parts of any size: every code comes from its owner."""
    gathered = [weight._rowwise_data]
    if isinstance(weight.quantizer, MXFP8Quantizer):
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


def quantize_on_rank(rank: int, world_size: int, manual: bool) -> list:
    weights = [q.make_empty(shape, torch.bfloat16) for q, shape in SHAPES.items()]
    for weight in weights:
        weight._high_precision_init_val = torch.zeros(weight.shape)
    ends = [bounds(weight.numel(), rank, world_size) for weight in weights]
    parts, starts = [], []
    for value, (start, stop) in zip(masters(), ends, strict=True):
        # Slices have any shape, and an offset without a slice says nothing.
        part = value.flatten()[start:stop].clone().view((-1, 1) if manual else (-1,))
        parts.append(part if stop > start else None)
        starts.append(start if manual or stop > start else None)
    options = dict(manual_post_all_gather_processing=manual)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        quantize_master_weights(weights, parts, starts, None, **options)
    assert all_reduce.call_count == 1
    for weight, (start, stop) in zip(weights, ends, strict=True):
        assert weight._high_precision_init_val is None
        gather_codes(weight, start, stop)
    post_all_gather_processing(weights)
    return [(w.quantizer, w.storage_tensors()) for w in weights]


@pytest.mark.parametrize("world_size, manual", [(2, True), (4, False)])
def test_ranks_agree_on_the_full_cast_in_one_all_reduce(world_size, manual):
    expected = [q.quantize(x.bfloat16()) for q, x in zip(SHAPES, masters(), strict=True)]
    for tensors in run_ranks(quantize_on_rank, world_size, world_size, manual):
        for weight, (quantizer, storage) in zip(expected, tensors, strict=True):
            dropped = not (manual or isinstance(weight.quantizer, MXFP8Quantizer))
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
    (dict(master_weights=[]), "master_weights must have one entry per weight, 2, got 1"),
    (dict(start_offsets=[0, 0]), "start_offsets must have one entry per weight, 2"),
    ({OUTS: []}, f"{OUTS} must have one entry"),
    (dict(start_offsets=[None]), r"with a start_offsets\[1\], got a Tensor and None"),
    (dict(start_offsets=[-1]), r"must lie inside its weight of 1024 elements, got \[-1, 15\)"),
    (dict(start_offsets=[1009]), r"must lie inside .* got \[1009, 1025\)"),
    (dict(master_weights=[[1.0]]), "must be a tensor with .* got a list"),
    (dict(master_weights=[torch.ones(32)[::2]]), r"master_weights\[1\] must be a contiguous"),
    (dict(master_weights=[torch.ones(16).long()]), "must be a contiguous float32"),
    (dict(master_weights=empty(NVFP4Quantizer())), "must be a contiguous float32"),
    (dict(master_weights=[torch.ones(16, device="meta")]), "on cpu"),
    (dict(model_weights=[torch.ones(16, 16)]), r"model_weights\[1\] must be an NVFP4, MXFP8"),
    (
        dict(model_weights=[MXFP8Quantizer().make_empty((64, 32))[32:]]),
        r"got a slice of shape \(32",
    ),
    (dict(model_weights=empty(NVFP4Quantizer(two_dimensional=False))), "two_dimensional=True"),
    (dict(model_weights=empty(NVFP4Quantizer(rowwise=False))), "data to be cast .* rowwise=True"),
    (
        dict(model_weights=empty(NVFP4Quantizer(), device="meta"), master_weights=[None]),
        "must be on the device of the others, cpu, got meta",
    ),
    ({OUTS: [OUT[:7]]}, rf"{OUTS}\[1\] must be contiguous uint8 of 8 bytes"),
    ({OUTS: [OUT.float()]}, "uint8 of 8 bytes .* of torch.float32"),
    ({OUTS: [OUT.to("meta")]}, "on cpu"),
    ({OUTS: [torch.zeros(16, dtype=torch.uint8)[::2]]}, "contiguous"),
    ({OUTS: [(OUT, OUT)]}, "must be one tensor"),
    ({OUTS: [OUT], "model_weights": empty(MXFP8Quantizer())}, r"pair \(rowwise, columnwise\)"),
    ({OUTS: [(OUT.repeat(2), OUT)], "model_weights": empty(MXFP8Quantizer())}, "of 16 bytes"),
]


@pytest.mark.table
@pytest.mark.parametrize(("change", "match"), MISUSE)
def test_misuse_is_refused_before_any_collective(change, match, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda *_: pytest.fail("a rank waits for others"))
    sound = dict(model_weights=empty(NVFP4Quantizer()), master_weights=[torch.ones(16)])
    sound |= {"start_offsets": [0], OUTS: [None]}
    # An entry that is sound comes before the one that is not.
    arguments = {name: each + (sound | change)[name] for name, each in sound.items()}
    with pytest.raises(ValueError, match=match):
        quantize_master_weights(**arguments, group=None)


QUANTIZERS = RECIPES | {"float8-delayed": Float8Quantizer(scaling="delayed", amax_history_len=4)}
SIZE, STEPS = 32, 8
OPTIONS = dict(lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)


def make_weights(te: bool) -> list[Tensor]:
    """One per format, which every rank has in full; or stand-ins for Transformer Engine's."""
    weights = []
    for seed, quantizer in enumerate(QUANTIZERS.values()):
        value = random((SIZE, SIZE), seed, scale=0.2).bfloat16()
        if te:
            weight = te_tensor(quantizer, value, **initial_value(value))
        else:
            weight = nn.Parameter(quantizer.quantize(value))
            weight._high_precision_init_val = value
        weights.append(weight)
    return weights


def initial_value(value: Tensor) -> dict:
    """The methods of Transformer Engine's tensors for the value before quantization."""
    kept = [value]
    return dict(
        get_high_precision_init_val=lambda: kept[0] if kept else None,
        clear_high_precision_init_val=kept.clear,
    )


def update_scale(weight: Tensor) -> None:
    """Delayed scaling as Transformer Engine's forward pass does it, with a history of 1."""
    quantizer = getattr(weight, "_quantizer", None)
    if hasattr(quantizer, "amax") and quantizer.amax > 0:
        quantizer.scale.copy_(224 / quantizer.amax)  # with a margin of its own
        quantizer.amax.zero_()


def gathered_codes(param: Tensor) -> list[Tensor]:
    """The codes that ranks gather: rowwise ones, of MXFP8 those of both directions."""
    if hasattr(param, "_data"):
        return [param._data]
    is_mxfp8 = type(param).__name__ == "MXFP8Tensor"
    return [param._rowwise_data] + is_mxfp8 * [param._columnwise_data]


def buffers(param: Tensor, manual: bool = True) -> dict[str, Tensor]:
    """All inner tensors that are valid, by name; else without those that are dropped."""
    found = te_bytes(param) if is_foreign(param) else param.storage_tensors()
    if getattr(param, "_transpose_invalid", False):
        found.pop("_transpose")
    keeps = manual or type(param).__name__ == "MXFP8Tensor"
    names = [n for n in found if keeps or not n.startswith(("_transpose", "_columnwise"))]
    return {name: found[name] for name in names}


def grads_of(step: int) -> list[Tensor]:
    return [random((SIZE, SIZE), 100 * step + i).bfloat16() for i in range(len(QUANTIZERS))]


def train_sharded(rank: int, manual: bool, te: bool) -> list[dict[str, Tensor]]:
    """ZeRO-1: this rank's slices of the masters, quantized into the weights, codes gathered."""
    weights, group, n = make_weights(te), dist.group.WORLD, SIZE * SIZE // 2
    own, masters = slice(rank * n, (rank + 1) * n), []
    for weight in weights:
        value = weight.get_high_precision_init_val()
        masters.append(nn.Parameter(value.detach().view(-1)[own].clone().float()))
        weight.clear_high_precision_init_val()
    optimizer, starts = FusedAdam(masters, **OPTIONS), [own.start] * len(masters)
    for step in range(STEPS):
        for weight, master, grad in zip(weights, masters, grads_of(step), strict=True):
            update_scale(weight)
            master.grad = grad.view(-1)[own].float()
        optimizer.step()
        is_fp4 = [*map(fp4_utils.is_nvfp4tensor, weights)]
        for of_fp4 in (True, False):
            columns = [
                [one for one, is_chosen in zip(column, is_fp4, strict=True) if is_chosen == of_fp4]
                for column in (weights, masters, starts)
            ]
            if of_fp4 and manual:
                fp4_utils.quantize_nvfp4_param_shard(*columns, group)
            elif of_fp4:
                fp4_utils.cast_master_weights_to_nvfp4(*columns, group)
            else:
                quantize_master_weights(*columns, group, manual_post_all_gather_processing=manual)
        for codes in (codes.view(-1) for weight in weights for codes in gathered_codes(weight)):
            dist.all_gather_into_tensor(codes, codes.chunk(2)[rank].clone(), group)
        if manual:
            post_all_gather_processing(weights)
    return [*map(buffers, weights)]


@pytest.mark.parametrize("manual, te", [(True, False), (False, False), (False, True), (True, True)])
def test_two_ranks_train_as_one_process_bit_for_bit(manual, te):
    weights = make_weights(te)
    optimizer = FP4Adam(weights, quantize_from="param_dtype", **OPTIONS)
    for step in range(STEPS):
        for weight, grad in zip(weights, grads_of(step), strict=True):
            update_scale(weight)
            weight.grad = grad
        optimizer.step()
    for of_rank in run_ranks(train_sharded, 2, manual, te):
        assert_identical(of_rank, [buffers(weight, manual) for weight in weights])


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_slices_are_written_to_other_memory(name, alone):
    """As with Megatron's FSDP: codes go to a shard of the caller's, a tensor or bare memory."""
    quantizer, value = QUANTIZERS[name], (torch.randn(32, 64) * 0.1).bfloat16()
    weights = [te_tensor(quantizer, value) for _ in range(2)]
    before = te_bytes(weights[0])
    master, start = torch.randn(32 * 16), 64 * 4
    per_byte = 8 // quantizer.layout.code_type.bits
    outs = [torch.zeros(len(master) // per_byte, dtype=torch.uint8) for _ in range(2)]
    target = (outs[0], outs[1]) if name == "mxfp8" else outs[0]
    if name.startswith("float8") and name != "float8block":
        target = weights[0].on(outs[0])  # a Float8Tensor of the same codes
    quantize_master_weights([weights[0]], [master], [start], None, [target], True)
    quantize_master_weights([weights[1]], [master], [start], None, None, True)
    codes = [gathered_codes(weight) for weight in weights]
    own = slice(start // per_byte, start // per_byte + len(outs[0]))
    for out, elsewhere, within in zip(outs, *codes, strict=False):
        assert out.any() and torch.equal(out, within.view(-1)[own])
        assert any(torch.equal(elsewhere, x) for x in before.values())  # still the old codes
    scales = [{n: x for n, x in te_bytes(w).items() if "scale" in n} for w in weights]
    assert all(torch.equal(x, scales[1][n]) for n, x in scales[0].items())


def test_an_adapter_says_how_columnwise_codes_are_dropped(alone, monkeypatch):
    first, weight = (te_tensor(NVFP4Quantizer(), torch.ones(16, 32)) for _ in range(2))
    quantize_master_weights([first], [master := torch.randn(512)], [0], None)
    assert first._columnwise_data is None
    adapter = "fp4adam.interop.transformer_engine.TransformerEngineAdapter"
    monkeypatch.delattr(f"{adapter}.drop_columnwise")
    before = te_bytes(weight)
    with pytest.raises(NotImplementedError, match="drop_columnwise must be defined by Tran"):
        quantize_master_weights([first, weight], [None, master], [None, 0], None)
    assert all(torch.equal(x, before[name]) for name, x in te_bytes(weight).items())
    # None are dropped that are gathered, or that are not there.
    for quantizer in (MXFP8Quantizer(), NVFP4Quantizer(columnwise=False)):
        weight = te_tensor(quantizer, torch.ones(32, 32))
        quantize_master_weights([weight], [torch.randn(1024)], [0], None)


def test_post_all_gather_processing_derives_what_it_can():
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    for quantizer, is_built in ((NVFP4Quantizer(), True), (MXFP8Quantizer(), False)):
        weight = quantizer.quantize(x)
        expected = weight._columnwise_data.clone()
        weight._columnwise_data.zero_()
        post_all_gather_processing(weight if is_built else [weight])
        assert torch.equal(weight._columnwise_data, expected if is_built else 0 * expected)
    stand_ins = [te_tensor(MXFP8Quantizer(two_dimensional=True), x) for _ in range(2)]
    for stand_in in stand_ins:  # whose columnwise codes are a copy
        stand_in._rowwise_data.fill_(7)
    post_all_gather_processing(stand_ins)
    assert all((stand_in._columnwise_data == 7).all() for stand_in in stand_ins)
    plain = torch.ones(4, 4)
    for quantizer in (NVFP4Quantizer(two_dimensional=False), Float8BlockQuantizer(rowwise=False)):
        weights = [plain, *(each.make_empty((16, 16)) for each in (NVFP4Quantizer(), quantizer))]
        with pytest.raises(ValueError, match=r"weights\[1\] must have square blocks and rowwise"):
            post_all_gather_processing(weights)
    for nothing in (plain, [plain], []):
        post_all_gather_processing(nothing)
    quantize_master_weights([], [], [], None)
    fp4_utils.quantize_nvfp4_param_shard([], [], [], None)


def test_packed_shapes_and_moved_storage():
    assert fp4_utils.get_nvfp4_rowwise_packed_shape((3, 8)) == (3, 4)
    assert fp4_utils.get_nvfp4_rowwise_packed_shape(()) == ()
    with pytest.raises(ValueError, match=r"must be even to be packed, got shape \(3, 7\)"):
        fp4_utils.get_nvfp4_rowwise_packed_shape((3, 7))
    own = NVFP4Quantizer().quantize(random((16, 32), 0).bfloat16())
    values = own.dequantize(torch.bfloat16)
    for tensor in (te_tensor(NVFP4Quantizer(), values), own):
        buffer = torch.zeros(300, dtype=torch.uint8)
        fp4_utils.modify_nvfp4_rowwise_storage(tensor, buffer[10:266])
        assert tensor._rowwise_data.data_ptr() == buffer.data_ptr() + 10
        assert torch.equal(fp4_utils.dequantize_fp4_tensor(tensor), values)
        assert fp4_utils.is_nvfp4tensor(tensor) and not fp4_utils.is_grouped_nvfp4tensor(tensor)
    assert own.data_ptr() == buffer.data_ptr() + 10 and torch.equal(own.dequantize(), values)
    others = te_tensor(MXFP8Quantizer(), torch.ones(32, 32)), values, None
    assert not any(map(fp4_utils.is_nvfp4tensor, others))


def test_stacks_are_moved_with_their_slices():
    stack = NVFP4Quantizer().quantize(torch.randn(2, 16, 32))
    assert fp4_utils.is_grouped_nvfp4tensor(stack)
    assert not fp4_utils.is_grouped_nvfp4tensor(torch.ones(2, 16, 32))
    second, values = stack[1:], stack.dequantize(torch.float32)
    buffer = torch.zeros(512, dtype=torch.uint8)
    fp4_utils.modify_grouped_nvfp4_rowwise_storage(stack, buffer)
    assert stack.data_ptr() == buffer.data_ptr() and torch.equal(stack.dequantize(), values)
    buffer[256:] = 0
    assert not second.dequantize().any() and torch.equal(stack.dequantize()[0], values[0])
    with pytest.raises(ValueError, match="must be contiguous uint8 of 512 bytes"):
        fp4_utils.modify_grouped_nvfp4_rowwise_storage(stack, buffer[:-1])


CONFIG = dict(fp4="e2m1", fp4_param=True, fp4_recipe="nvfp4", num_layers=4)
CONFIG |= dict(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1)
CONFIG |= dict(num_layers_at_end_in_bf16=1)


def config(**changes):
    return SimpleNamespace(**CONFIG | changes)


def test_layers_are_built_in_the_context_of_their_place():
    kinds = []
    for layer_no in (-1, *range(4)):
        with fp4_utils.get_fp4_context(config(), layer_no, is_init=True):
            layer = nn.Sequential(nn.Linear(32, 32, bias=False))
        with fp4_utils.get_fp4_context(config(), layer_no):
            layer(torch.ones(1, 32)).sum().backward()
        kinds.append(isinstance(layer[0].weight, NVFP4Tensor))
    assert kinds == [True, False, True, True, False]
    for changes in (dict(fp4_param=False), dict(fp4=None, fp4_param=False)):
        with fp4_utils.get_fp4_context(config(**changes), 1, is_init=True):
            assert type(nn.Linear(32, 32).weight.data) is Tensor
    assert fp4_utils.get_fp4_recipe(config()) == NVFP4Quantizer()
    with pytest.raises(ValueError, match="fp4_recipe must be 'nvfp4', got 'custom'"):
        fp4_utils.get_fp4_context(config(fp4_recipe="custom"), 1, is_init=True)


def test_flags_say_what_is_there():
    assert (importlib.util.find_spec("transformer_engine") is not None) == fp4_utils.HAVE_TE
    assert fp4_utils.HAVE_TE_FP4_TENSOR_CLASS and fp4_utils.FP4_TENSOR_CLASS is NVFP4Tensor
    assert fp4_utils.get_fp4_align_size() == 128


@pytest.fixture
def by_kernels(monkeypatch):
    """Casts by kernels, on the only rank."""
    monkeypatch.setattr(backend, "uses_kernels", lambda d: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda *args: None)


@pytest.mark.slow
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
    values[1] = values[1].view(torch.bfloat16)[:1024]  # at the same address
    cast(builds=True)
    cast(builds=False)
    values[0].data = values[0].clone()
    cast(builds=True)
    weights[1].data = weights[1].clone()
    cast(builds=True)
    cast(builds=False)
    weights[1]._high_precision_init_val = torch.zeros(32, 32)
    cast(builds=False)
    assert weights[1]._high_precision_init_val is None
    weights.reverse()
    cast(builds=True)


def test_kept_tables_keep_no_weight_alive(device, by_kernels):
    weight = NVFP4Quantizer(columnwise=False).make_empty((16, 16), torch.bfloat16, device)
    for version in (2, 4):
        quantize_master_weights([weight], [torch.ones(256, device=device)], [0], None, None, True)
        post_all_gather_processing([weight])
        assert weight._version == version  # each call raises it
    storage = weakref.ref(weight._shared)
    del weight
    assert storage() is None
