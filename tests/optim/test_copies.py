"""Quantized copies of BF16 weights, written again after a step."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    cast,
    workspaces_of,
)
from fp4adam.formats import minifloat
from fp4adam.tensors import backend
from helpers import make_weight, random
from te_stand_ins import QUANTIZERS, SHAPE, Wrapper, assert_bytes, stand_in

DELAYED = Float8Quantizer(scaling="delayed", amax_history_len=2, amax_compute_algo="most_recent")
every_format = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)


class TELinear(nn.Module):
    """A layer with the attributes of Transformer Engine's that hold workspaces."""

    def __init__(self, weight: Tensor, quantizer: Quantizer, parts: int = 1) -> None:
        super().__init__()
        self.primary_weights_in_fp8 = False
        self.weight_names = ["weight"] if parts == 1 else [f"part{i}_weight" for i in range(parts)]
        for name, part in zip(self.weight_names, weight.clone().chunk(parts), strict=True):
            self.register_parameter(name, Parameter(part))
        self.fc2_weight = Parameter(weight.clone())
        pairs = ("weight", self.fused), ("fc2_weight", weight)
        self._fp8_workspaces = {name: stand_in(quantizer.quantize(x)) for name, x in pairs}

    @property
    def fused(self) -> Tensor:
        return torch.cat([getattr(self, name).detach() for name in self.weight_names])


def value(seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return random(SHAPE, seed, device, scale=0.1).to(dtype)


def assert_current(tensor: Tensor, weight: Tensor, quantizer: Quantizer) -> None:
    """The copy has the bytes of its weight, quantized."""
    wanted = quantizer.quantize(weight.detach())
    if isinstance(tensor, Wrapper):
        assert_bytes(tensor, stand_in(wanted))
    else:
        assert tensor.has_bytes_of(wanted)


@pytest.mark.parametrize("kind", ["own", "te"])
@every_format
def test_copies_are_the_quantized_weights(quantizer, kind, path_device):
    dtypes = torch.bfloat16, torch.float32, torch.float16
    weights = [Parameter(value(i, path_device, dtype)) for i, dtype in enumerate(dtypes)]
    copies = [make_weight(quantizer, path_device, SHAPE, keeps_value=True) for _ in weights]
    memory = [x.data_ptr() for each in copies for x in each.storage_tensors().values()]
    given = copies if kind == "own" else [*map(stand_in, copies)]
    for _ in range(2):
        with torch.no_grad():
            torch._foreach_mul_(weights, -1.5)
        versions = [each._version for each in given]
        cast(given, weights)
        for weight, tensor, version in zip(weights, given, versions, strict=True):
            assert_current(tensor, weight, quantizer)
            assert tensor._version > version
    assert kind == "te" or not any(hasattr(x, "get_high_precision_init_val") for x in copies)
    assert memory == [x.data_ptr() for each in copies for x in each.storage_tensors().values()]


def test_delayed_scales_of_other_packages(path_device):
    weights = [Parameter(value(i, path_device)) for i in range(2)]
    copies = [stand_in(DELAYED.quantize(weight.detach())) for weight in weights]
    for i in range(3):
        for j, (weight, tensor) in enumerate(zip(weights, copies, strict=True)):
            with torch.no_grad():
                weight.mul_(-0.75 if i == 1 else 1.5)
            # As the package does it: in place, or by a new tensor. 448 / 2^n has an exact amax.
            scale = torch.full((1,), 2.0 ** (8 + i + j), device=path_device)
            if i < 2:
                tensor._quantizer.scale.copy_(scale)
                tensor._quantizer.amax.zero_()
            else:
                tensor._quantizer.scale, tensor._quantizer.amax = scale, torch.zeros_like(scale)
        cast(copies, weights)
        for weight, tensor in zip(weights, copies, strict=True):
            scale = tensor._quantizer.scale
            codes = minifloat.e4m3_code(weight.detach().float() * scale)
            assert torch.equal(tensor._data, codes)
            assert torch.equal(tensor._transpose, codes.t())
            assert torch.equal(tensor._scale_inv, 1 / scale)
            assert tensor._quantizer.amax.item() == weight.abs().max().item()


def test_weights_that_take_different_passes_are_written_together(path_device):
    quantizers = [*[Float8BlockQuantizer()] * 3, NVFP4Quantizer(two_dimensional=False)]
    quantizers += [Float8Quantizer(), DELAYED]
    quantizers += [dataclasses.replace(DELAYED, amax_compute_algo="max")]
    shapes = [SHAPE, (33, 130), (160, 144)] + [SHAPE] * 4
    dtypes = [torch.bfloat16, torch.float16, torch.float32] + [torch.bfloat16] * 4
    weights = [
        random(shape, i, path_device, scale=0.1).to(dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    weights[2] = weights[2].t().contiguous().t()
    weights[0] = weights[0].cpu()  # on another device than the others, if they are on a GPU
    buffer = torch.zeros(SHAPE[0] * SHAPE[1] + 1, dtype=torch.bfloat16, device=path_device)
    weights[4] = buffer[1:].view(SHAPE)  # at an address that is not aligned
    pairs = [*zip(quantizers, weights, strict=True)]
    copies, alone = ([q.quantize(w.bfloat16()) for q, w in pairs] for _ in range(2))
    for factor in (-1.5, 0.1, 0.0, torch.inf):
        for weight, tensor in zip(weights, alone, strict=True):
            weight.mul_(factor).add_(0.01)
            tensor.quantize_(weight)
        cast(copies, weights)
        for tensor, wanted in zip(copies, alone, strict=True):
            assert tensor.has_bytes_of(wanted)


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_workspaces_of_a_model(parts, joins):
    quantizer = MXFP8Quantizer(optimize_for_gemm=True)
    model = nn.Sequential(*(TELinear(value(i), quantizer, parts) for i in range(2)))
    later = model[1]._fp8_workspaces.pop("weight")
    if joins:  # parts that do not follow each other
        name = model[0].weight_names[0]
        setattr(model[0], name, Parameter(getattr(model[0], name).detach().clone()))
    for layers in (model[:1], model):
        with torch.no_grad():
            torch._foreach_mul_([*model.parameters()], -1.5)
        cast(*workspaces_of(model))
        for layer in layers:
            for name, weight in (("weight", layer.fused), ("fc2_weight", layer.fc2_weight)):
                assert_current(layer._fp8_workspaces[name], weight, quantizer)
        model[1]._fp8_workspaces["weight"] = later


def test_models_without_workspaces_and_captures_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="modules of Transformer Engine .* Linear"):
        workspaces_of(nn.Linear(2, 2))
    layer = TELinear(value(), NVFP4Quantizer())
    layer.primary_weights_in_fp8 = True
    with pytest.raises(ValueError, match="whose weights are not quantized"):
        workspaces_of(layer)
    monkeypatch.setattr(backend, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="got a call in one; call cast"):
        cast([quantized()], [value()])


def quantized(shape: tuple[int, ...] = SHAPE) -> Tensor:
    return NVFP4Quantizer().quantize(torch.zeros(shape))


BAD = {
    "number": (lambda w: (quantized(), w, w), "one per copy, got 3 for 2"),
    "double": (lambda w: (quantized(), w.double()), "got a Tensor of torch.float64"),
    "double part": (lambda w: (quantized(), [w[:16], w[16:].double()]), "float64"),
    "quantized weight": (lambda w: (quantized(), quantized()), "got a NVFP4Tensor"),
    "plain copy": (lambda w: (w.clone(), w), "must be whole quantized .* got a Tensor"),
    "shape": (lambda w: (quantized((16, 96)), w), r"\(32, 96\) on cpu, got \(16, 96\)"),
    "slice": (lambda w: (quantized((64, 96))[32:], w), "that is a shard or a slice"),
    "parts": (lambda w: (quantized(), [w[:16], w[16:, :48]]), r"on cpu, \(16, 48\) on cpu, got"),
    "no parts": (lambda w: (quantized(), []), "weight, without parts, got"),
    "device": (lambda w: (quantized(), [w[:16].to("meta"), w[16:]]), "on meta, .*, got .* on cpu"),
    "format": (
        lambda w: (stand_in(MXFP8Quantizer().quantize(w), _fp8_dtype="E5M2"), w),
        "_fp8_dtype of a MXFP8Tensor must be kFloat8E4M3",
    ),
}


@pytest.mark.parametrize(("given", "words"), BAD.values(), ids=BAD)
def test_nothing_is_written_if_one_copy_is_bad(given, words):
    weight, good = value(), quantized()
    bad, *weights = given(weight)
    with pytest.raises(ValueError, match=words):
        cast([good, bad], [weight, *weights])
    with pytest.raises(ValueError, match="must be different tensors, got one twice"):
        cast([good, good._alias()], [weight, weight])
    assert not good._rowwise_data.any()


def test_sharded_weights_are_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = distribute_tensor(value(), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(ValueError, match="must be whole .* got a DTensor of"):
            cast([quantized()], [weight])
        layer = nn.Linear(96, 32, bias=False)
        layer.weight = Parameter(quantized())
        fully_shard(layer)
        for shard in (layer.weight, layer.weight.to_local()):
            with pytest.raises(ValueError, match="must be whole .* that is a shard"):
                cast([shard], [value()])
    finally:
        dist.destroy_process_group()
