"""Every write raises versions and writes scales in both orders; exchanges give another storage."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import format_reference as reference
from fp4adam import FP4Adam, MXFP8Quantizer, QuantizedTensor
from fp4adam.distributed.cast import PartialCast
from fp4adam.tensors.swizzle import ScalePair, write_scales
from fp4adam.tensors.transpose import build_columnwise
from helpers import through_a_file
from quantizer_table import TABLE, every, randn

NVFP4 = TABLE["nvfp4-swizzled"]
NAMES = ("nvfp4-swizzled", "mxfp8-swizzled", "float8block", "float8")
every_quantizer = every(*NAMES)
SWIZZLED = [
    f"{name}-swizzled" for name in ("nvfp4-1d", "nvfp4-columnwise", "mxfp8-2d", "mxfp8-rowwise")
]


def versions(tensor: QuantizedTensor) -> dict[str, int]:
    return {name: inner._version for name, inner in tensor.inner.existing().items()}


def cast_in_parts(tensor: QuantizedTensor) -> None:
    x = randn(seed=1).flatten().to(tensor.device)
    cast = PartialCast([tensor.clone(), tensor], [0, 0], [x.numel()] * 2, [x.dtype] * 2)
    cast.measure([x / 2, x])
    cast.write([x / 2, x])


def step(tensor: QuantizedTensor) -> None:
    weight = nn.Parameter(tensor)
    weight.grad = torch.ones_like(weight)
    FP4Adam([weight], lr=0.1).step()


def copy_without_gemm_scales(tensor: QuantizedTensor) -> None:
    """As from a checkpoint of a model without them."""
    compact = dataclasses.replace(tensor.quantizer, optimize_for_gemm=False)
    tensor.copy_(compact.quantize(randn(seed=1).to(tensor.device)))


WRITES = {
    "quantize_": lambda t: t.quantize_(randn(seed=1)),
    "copy_": lambda t: t.copy_(randn(seed=1)),
    "copy_ bytes": lambda t: t.copy_(t.quantizer.quantize(randn(seed=1).to(t.device))),
    "foreach": lambda t: torch._foreach_copy_([t], [randn(seed=1).to(t.device)]),
    "normal_": lambda t: t.normal_(),
    "init": lambda t: nn.init.zeros_(t),
    "data": lambda t: setattr(t, "data", randn(seed=1)),
    "load_state_dict": lambda t: holder(t).load_state_dict({"weight": randn(seed=1)}),
    "partial cast": cast_in_parts,
    "compact bytes": copy_without_gemm_scales,
    "step": step,
}


def holder(tensor: QuantizedTensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(tensor)
    return module


def pairs_of(scales: list[Tensor]) -> list[ScalePair]:
    """Scales with room for the swizzled ones, which write_scales swizzles."""
    sizes = [(s.shape[0] + -s.shape[0] % 128, s.shape[1] + -s.shape[1] % 4) for s in scales]
    return [ScalePair(s, s.new_empty(size)) for s, size in zip(scales, sizes, strict=True)]


def expected_swizzle(scale: Tensor) -> Tensor:
    scale = scale.cpu().numpy()
    padding = [(0, -scale.shape[0] % 128), (0, -scale.shape[1] % 4)]
    return torch.from_numpy(reference.swizzle(np.pad(scale, padding)))


def assert_gemm_scales_are_up_to_date(tensor: QuantizedTensor) -> None:
    for usage in ("rowwise", "columnwise"):
        scale = getattr(tensor, f"{usage}_scale_inv")
        stored = tensor.storage_tensors().get(f"_{usage}_gemm_scale_inv")
        assert (stored is None) == (scale is None)
        if scale is not None:
            if isinstance(tensor.quantizer, MXFP8Quantizer) and usage == "columnwise":
                scale = scale.t()
            assert torch.equal(stored.cpu(), expected_swizzle(scale))


@every(*NAMES, *SWIZZLED)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_every_write_raises_every_version(quantizer, write, path_device):
    if write is cast_in_parts and not quantizer.layout.rows_per_entry:
        return  # refused in words
    tensor = quantizer.quantize(randn().to(path_device))
    storage, before, own = tensor.inner, versions(tensor), tensor._version
    write(tensor)
    assert tensor.inner is storage and tensor._version > own
    after = versions(tensor)
    assert all(after[name] > before[name] for name in before)
    if quantizer.optimize_for_gemm:
        assert_gemm_scales_are_up_to_date(tensor)
    elif quantizer.layout.is_square and quantizer.rowwise:
        build_columnwise([tensor])
        assert all(version > after[name] for name, version in versions(tensor).items())


def test_tails_are_padded_with_zeros(path_device):
    shapes = [(5, 3), (130, 37), (128, 4), (1, 65), (300, 1), (0, 8)]
    plain = []
    for i, (rows, blocks) in enumerate(shapes):
        wide = torch.arange(rows * blocks * 2).add(i).to(torch.uint8)
        # Any strides, and any dtype of one byte.
        scale = wide.view(blocks, 2 * rows).t()[::2] if i % 2 else wide.view(rows, -1)[:, :blocks]
        plain.append(scale.to(path_device).view(torch.float8_e8m0fnu if i > 3 else torch.uint8))
    write_scales(pairs := pairs_of(plain))
    for scale, swizzled, _ in pairs:
        expected = expected_swizzle(scale.view(torch.uint8))
        assert torch.equal(swizzled.view(torch.uint8).cpu(), expected)
    back = [pair._replace(plain=torch.empty_like(pair.plain)) for pair in pairs]
    write_scales(back, undo=True)
    for scale, pair in zip(plain, back, strict=True):
        assert torch.equal(pair.plain.view(torch.uint8), scale.view(torch.uint8))


def test_reading_is_no_write():
    tensor = NVFP4.quantize(randn())
    before, storage = versions(tensor), tensor.inner
    reads = (tensor.dequantize(torch.float32), tensor.float(), tensor + 1, tensor.clone())
    reads += (copy.deepcopy(tensor), tensor.split(16), tensor.pending_value())
    pickled = tensor._shared.__getstate__()["tensors"]  # costs no memory
    assert pickled["amax"].data_ptr() == tensor._amax.data_ptr()
    tensor.copy_(tensor.detach())
    assert versions(tensor) == before and tensor.inner is storage


@every_quantizer
def test_aliases_see_what_is_exchanged(quantizer):
    param = nn.Parameter(quantizer.quantize(randn()))
    aliases = [param.detach(), param.data, param[:32], holder(param).state_dict()["weight"]]
    param._rowwise_data = param._rowwise_data.clone()
    for alias in aliases:
        assert alias._shared is param._shared and alias._rowwise_data is param._rowwise_data


EXCHANGES = {
    "to": lambda m: m.to("cpu", torch.bfloat16),
    "data": lambda m: setattr(m.weight, "data", NVFP4.quantize(randn(seed=1))),
    "swap": lambda m: torch.utils.swap_tensors(
        m.weight, nn.Parameter(NVFP4.quantize(randn(seed=1)))
    ),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "attribute": lambda m: setattr(m.weight, "_amax", m.weight._amax.clone()),
    "shared memory": lambda m: m.weight.share_memory_(),
}


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES.keys())
def test_every_exchange_gives_another_storage(exchange):
    module = holder(NVFP4.quantize(randn()))
    param, before = module.weight, module.weight.inner
    before.codes.share_memory_()
    exchange(module)
    assert module.weight is param and param.inner == param.inner != before
    assert param.is_shared() == (exchange is EXCHANGES["shared memory"])


COPIES = {
    "new": lambda t: t,
    "clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "file": through_a_file,
    "to": lambda t: t.to(t.device, copy=True),
    "empty_like": torch.empty_like,
    "rows": lambda t: t[:32].clone(),
}


@every_quantizer
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_a_write_to_one_inner_tensor_is_one_to_all(quantizer, copied, device):
    tensor = copied(quantizer.quantize(randn().to(device)))
    for inner in tensor.inner.present:
        before = versions(tensor)
        inner.zero_()
        assert {version + 1 for version in before.values()} == set(versions(tensor).values())
