"""The identity of the storage and versions of inner tensors tell of every exchange and write."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fp4adam import QuantizedTensor
from fp4adam.distributed.cast import PartialCast
from fp4adam.tensors.transpose import build_columnwise
from helpers import through_a_file
from quantizer_table import TABLE, every, randn

NVFP4 = TABLE["nvfp4-swizzled"]
every_quantizer = every("nvfp4-swizzled", "mxfp8-swizzled", "float8block", "float8")


def versions(tensor: QuantizedTensor) -> dict[str, int]:
    return {name: inner._version for name, inner in tensor.inner.existing().items()}


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def cast_in_parts(tensor: QuantizedTensor) -> None:
    x = randn(seed=1).flatten().to(tensor.device)
    cast = PartialCast([tensor], [0], [x.numel()], [x.dtype])
    cast.measure([x])
    cast.write([x])


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
}


def holder(tensor: QuantizedTensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(tensor)
    return module


@every_quantizer
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_every_write_raises_every_version(quantizer, write, path_device):
    tensor = quantizer.quantize(randn().to(path_device))
    storage, before, own = tensor.inner, versions(tensor), tensor._version
    write(tensor)
    assert tensor.inner is storage and tensor._version > own
    after = versions(tensor)
    assert all(after[name] > before[name] for name in before)
    if quantizer.layout.is_square:
        build_columnwise([tensor])
        assert all(version > after[name] for name, version in versions(tensor).items())


def test_reading_is_no_write():
    tensor = NVFP4.quantize(randn())
    before, storage = versions(tensor), tensor.inner
    reads = (tensor.dequantize(torch.float32), tensor.float(), tensor + 1, tensor.clone())
    reads += (copy.deepcopy(tensor), tensor.split(16), tensor.pending_value())
    tensor.copy_(tensor.detach())
    assert versions(tensor) == before and tensor.inner is storage


def test_plain_tensors_beside_quantized_ones_are_versioned():
    quantized, plain = NVFP4.quantize(randn()), torch.zeros(3)
    before = quantized._version, plain._version
    torch._foreach_copy_([quantized, plain], [randn(seed=1), torch.ones(3)])
    assert plain._version > before[1] and quantized._version > before[0]
    assert torch.equal(plain, torch.ones(3))


@every_quantizer
def test_aliases_see_what_is_exchanged(quantizer):
    param = nn.Parameter(quantizer.quantize(randn()))
    aliases = [param.detach(), param.data, param[:32], holder(param).state_dict()["weight"]]
    before = param.inner
    param._rowwise_data = param._rowwise_data.clone()
    assert param.inner is not before
    for alias in aliases:
        assert alias._shared is param._shared and alias._rowwise_data is param._rowwise_data


EXCHANGES = {
    "half": lambda m: m.half(),
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
    exchange(module)
    assert module.weight is param and param.inner is not before
    assert param.is_shared() == (exchange is EXCHANGES["shared memory"])
    assert param.inner != before and param.inner == param.inner


COPIES = {
    "new": lambda t: t,
    "clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
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


@every_quantizer
def test_an_inner_tensor_of_someone_else_counts_for_itself(quantizer):
    tensor = quantizer.quantize(randn())
    flat = torch.zeros(tensor._rowwise_data.numel(), dtype=tensor._rowwise_data.dtype)
    tensor._rowwise_data = flat.view(tensor._rowwise_data.shape)
    before = [inner._version for inner in tensor.inner.versioned]
    flat.zero_()
    assert [inner._version for inner in tensor.inner.versioned] != before
