"""Casts in shards: the union of all is the full cast, and a shard leaves what is not its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
)
from fp4adam.distributed.cast import PartialCast
from fp4adam.optim import copies
from fp4adam.tensors import backend
from fp4adam.tensors.transpose import build_columnwise, transpose_codes
from golden_vectors import golden_cases, read_arrays, read_index, sha16
from test_quantizer_properties import examples, matrices

FORMATS = {
    "nvfp4": (NVFP4Quantizer(), 16),
    "nvfp4-rowwise": (NVFP4Quantizer(columnwise=False, optimize_for_gemm=True), 16),
    "mxfp4": (MXFP4Quantizer(), 32),
    "mxfp4-floor": (MXFP4Quantizer(scale_rounding="floor"), 32),
    "mxfp8": (MXFP8Quantizer(), 32),
    "mxfp8-rowwise": (MXFP8Quantizer(columnwise=False), 32),
    "mxfp8-columnwise": (MXFP8Quantizer(rowwise=False), 32),
    "mxfp8-2d": (MXFP8Quantizer(two_dimensional=True), 32),
    "float8": (Float8Quantizer(), 1),
    "float8-rowwise": (Float8Quantizer(columnwise=False, force_pow_2_scales=True), 1),
    "float8block": (Float8BlockQuantizer(), 1),
    "float8block-fp32": (Float8BlockQuantizer(True, True, True, False, 1e-3), 1),
}
GOLDEN_FORMATS = {"nvfp4": "nvfp4_2d", "mxfp8": "mxfp8", "fp8block": "fp8block_2d_pow2"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPLITS = [(case, i) for case, splits in read_index()["shards"].items() for i in range(len(splits))]


def quantized_by_torch(quantizer: Quantizer, x: Tensor) -> QuantizedTensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "uses_kernels", lambda _: False)
        return quantizer.quantize(x.cpu())


def assert_same_storage(tensor: QuantizedTensor, expected: QuantizedTensor) -> None:
    for name, inner in expected.storage_tensors().items():
        actual = getattr(tensor, name).cpu()
        assert torch.equal(actual.view(torch.uint8), inner.cpu().view(torch.uint8)), name


def cast_in_shards(
    weights: list[QuantizedTensor],
    values: list[Tensor],
    cuts: list[list[int]],
    dtypes: list[torch.dtype],
) -> None:
    """What ranks do between them: rank r has the elements between its cut and the next one."""
    ranks = []
    for rank in range(len(cuts[0]) - 1):
        bounds = [(own[rank], own[rank + 1]) for own in cuts]
        own = [
            value[start:stop].clone() for value, (start, stop) in zip(values, bounds, strict=True)
        ]
        sizes = [stop - start for start, stop in bounds]
        cast = PartialCast(weights, [start for start, _ in bounds], sizes, dtypes)
        cast.measure(own)
        ranks.append((cast, own))
    amaxes = torch.stack([cast.amaxes for cast, _ in ranks]).amax(0)
    for cast, own in ranks:
        cast.amaxes.copy_(amaxes)
        cast.write(own)


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_shards_give_the_golden_amaxes_and_bytes(name, split, path_device):
    format = name.split("_")[1]
    (case,) = (c for c in golden_cases(GOLDEN_FORMATS[format]) if c.case == name)
    golden = read_index()["shards"][name][split]
    full = quantized_by_torch(case.quantizer(), case.input)
    weight = case.quantizer().make_empty(case.shape, torch.bfloat16, path_device)
    values = case.input.float().to(path_device).view(-1)
    casts = []
    for start, stop, sha in zip(golden["cuts"], golden["cuts"][1:], golden["shards"], strict=False):
        cast = PartialCast([weight], [start], [stop - start], [torch.bfloat16])
        cast.measure([values[start:stop]])
        for usage, amaxes in cast.spans[0].grids.items():
            key = f"{usage}_amax_sha16" if format == "mxfp8" else "block_amax_sha16"
            # Those of NVFP4 are a grid, the others lie as scales do.
            laid_out = amaxes if format == "nvfp4" else in_scale_shape(weight, usage, amaxes)
            assert sha16(laid_out.cpu()) == sha[key], usage
        casts.append((cast, values[start:stop], sha))
    amaxes = torch.stack([cast.amaxes for cast, *_ in casts]).amax(0)
    for cast, own, sha in casts:
        if format == "nvfp4":
            before = torch.from_numpy(read_arrays("shards")[f"{name}_before{split}"].copy())
            weight._rowwise_data.copy_(before.view_as(weight._rowwise_data))
        cast.amaxes.copy_(amaxes)
        cast.write([own])
        if format == "nvfp4":
            assert sha16(weight._rowwise_data.cpu()) == sha["buffer_after_sha16"]
    if format == "nvfp4":
        for cast, own, _ in casts:
            cast.write([own])
    if format != "mxfp8":
        build_columnwise([weight])
    assert_same_storage(weight, full)


def in_scale_shape(weight: QuantizedTensor, usage: str, amaxes: Tensor) -> Tensor:
    padded = amaxes.new_zeros(getattr(weight, f"{usage}_scale_inv").shape)
    padded[: amaxes.shape[0], : amaxes.shape[1]] = amaxes
    return padded


@pytest.mark.parametrize("format", FORMATS)
@settings(examples, max_examples=5)
@given(data=st.data())
def test_union_of_shards_is_the_full_cast(format, path_device, data):
    quantizer, multiple = FORMATS[format]
    x = data.draw(matrices(multiple))
    dtype = data.draw(st.sampled_from(DTYPES))
    inner = data.draw(st.lists(st.integers(0, x.numel()), max_size=4))
    cuts = sorted([0, *inner, x.numel()])
    weight = quantizer.make_empty(x.shape, dtype, path_device)
    for codes in (weight._rowwise_data, weight._columnwise_data):
        if codes is not None:
            codes.fill_(0xA5)
    cast_in_shards([weight], [x.to(path_device).view(-1)], [cuts], [dtype])
    if not format.startswith("mxfp8"):
        codes = weight._columnwise_data
        build_columnwise([weight])
        assert codes is None or weight._columnwise_data.data_ptr() == codes.data_ptr()
    assert_same_storage(weight, quantized_by_torch(quantizer, x.to(dtype)))


@pytest.mark.slow
def test_whole_tiles_and_cut_ones_of_many_weights_give_the_full_cast(path_device):
    weights, values, cuts = [], [], []
    kinds = [
        (NVFP4Quantizer(optimize_for_gemm=True), (80, 144)),
        (MXFP8Quantizer(optimize_for_gemm=True), (96, 160)),
        (Float8BlockQuantizer(), (280, 144)),
        (NVFP4Quantizer(), (16, 16)),
        *((NVFP4Quantizer(), (32, 160)) for _ in DTYPES),
    ]
    for i, (quantizer, shape) in enumerate(kinds):
        n, is_aligned = shape[0] * shape[1], i < 4
        x = torch.randn(n + 1, generator=torch.Generator().manual_seed(i))
        x = x.to(path_device, torch.float32 if is_aligned else DTYPES[i - 4])
        values.append(x[:-1] if is_aligned else x[1:])  # at no multiple of 16 bytes
        weights.append(quantizer.quantize(torch.ones(shape)).to(path_device))
        # All of the second weight belongs to the last rank, in whole tiles.
        cuts.append([0, 0, 0, n] if i == 1 else [0, 48, n // 3 + 5, n])
    cast_in_shards(weights, values, cuts, [torch.bfloat16] * len(weights))
    build_columnwise([w for w in weights if not isinstance(w.quantizer, MXFP8Quantizer)])
    for weight, value in zip(weights, values, strict=True):
        expected = value.view(weight.shape).bfloat16()
        assert_same_storage(weight, quantized_by_torch(weight.quantizer, expected))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "float8block"])
@pytest.mark.parametrize(("start", "stop"), [(5, 11), (6, 7), (777, 1500), (0, 2048)])
def test_outs_get_the_codes_in_place_of_the_weight(format, start, stop, path_device):
    quantizer, _ = FORMATS[format]
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    full = quantized_by_torch(quantizer, x)
    weight = quantizer.make_empty(x.shape, device=path_device)
    cast = PartialCast([weight], [0], [x.numel()], [torch.float32])
    cast.measure([x.view(-1).to(path_device)])
    shard = PartialCast([weight], [start], [stop - start], [torch.float32])
    shard.amaxes.copy_(cast.amaxes)
    per_byte = 2 if format == "nvfp4" else 1
    first, last = start // per_byte, -(-stop // per_byte)
    outs = [torch.full((last - first,), 0xC3, dtype=torch.uint8, device=path_device)]
    outs += [outs[0].clone()] if format == "mxfp8" else []
    usages = ("rowwise", "columnwise")[: len(outs)]
    parts = [getattr(weight, f"_{usage}_data").view(-1)[first:last] for usage in usages]
    own = x.view(-1)[start:stop].to(path_device)
    # The memory of values stays: other memory for some codes, for all, then another dtype.
    given = outs, [*outs[:-1], outs[-1].clone()], None, None
    for memory, dtype in zip(given, [torch.float32] * 3 + [torch.bfloat16], strict=True):
        values = own.view(dtype)[: stop - start].copy_(own.clone())
        for part in parts:
            part.fill_(0xC3 if memory is None else 0)
        shard.write([values], memory and [tuple(memory) if memory[1:] else memory[0]])
        for usage, part, out in zip(usages, parts, memory or outs, strict=True):
            expected = getattr(full, f"_{usage}_data").view(-1)[first:last].clone()
            if start % per_byte:
                expected[0] = (expected[0] & 0xF0) | 0x03
            if stop % per_byte:
                expected[-1] = (expected[-1] & 0x0F) | 0xC0
            assert torch.equal((part if memory is None else out).cpu(), expected)
            assert memory is None or not getattr(weight, f"_{usage}_data").any()


def test_each_amax_joins_the_history_of_its_weight(path_device):
    kinds = [Float8Quantizer(scaling="delayed", amax_history_len=n) for n in (4, 4, 2)]
    kinds.append(MXFP8Quantizer())  # beside those with histories
    weights = [kind.quantize(torch.ones(32, 32)).to(path_device) for kind in kinds]
    values = [torch.full((1024,), x, device=path_device) for x in (2.0, 3.0, 4.0, 5.0)]
    cast_in_shards(weights, values, [[0, 100, 1024]] * 4, [torch.float32] * 4)
    assert [weight._amax_history.max().item() for weight in weights[:3]] == [2, 3, 4]
    assert_same_storage(weights[3], quantized_by_torch(kinds[3], values[3].view(32, 32)))


@pytest.mark.parametrize("n", [1, 3])
def test_launches_do_not_grow_with_the_number_of_weights(n, monkeypatch):
    pytest.importorskip("triton")
    from fp4adam.distributed import cast_launch
    from fp4adam.kernels import cast as casts

    launched, prepared, prepare = [], [], cast_launch.CastLaunches
    monkeypatch.setattr(cast_launch, "CastLaunches", lambda *a: prepared.append(1) or prepare(*a))
    kind, get = type(casts._span_kernel), type(casts._span_kernel).__getitem__
    monkeypatch.setattr(
        kind, "__getitem__", lambda k, *grid: launched.append(k.__name__) or get(k, *grid)
    )
    monkeypatch.setattr(backend, "uses_kernels", lambda _: True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = [NVFP4Quantizer().make_empty((32, 144), device=device) for _ in range(n)]

    def measure(start: int) -> tuple[PartialCast, list[Tensor]]:
        values = [torch.ones(32 * 144 - start, device=device)] * n
        sizes = [len(value) for value in values]
        cast = PartialCast(weights, [start] * n, sizes, [torch.float32] * n)
        cast.measure(values)
        return cast, values

    measure(1)
    assert launched == ["_span_kernel"]
    cast, values = measure(0)
    cast.write(values)
    assert all(weight._rowwise_data._version for weight in weights)
    build_columnwise(weights)
    span = ["_span_kernel"] * 2
    assert launched[1:] == [*span, "_scales_kernel", *span, "_transpose_kernel"]
    assert len(prepared) == 2  # one per cast
    for _ in range(2):
        copies.cast(weights, [value.view(32, 144) for value in values])
    assert launched[7:13] == launched[1:7] and len(prepared) == 3  # one for both calls


@pytest.mark.parametrize("size", read_index()["transposed_sha16"])
def test_transposed_codes_are_the_golden_ones(size, path_device):
    packed = torch.from_numpy(read_arrays("transpose")[f"packed_{size}"].copy()).to(path_device)
    out = packed.new_zeros(2 * packed.shape[1], packed.shape[0] // 2)
    transpose_codes([packed], [out], 4)
    assert sha16(out.cpu()) == read_index()["transposed_sha16"][size]
