"""Collectives of quantized tensors move codes, scales, and the value before quantization."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from fp4adam import MXFP8Quantizer, NVFP4Quantizer, QuantizedTensor, Quantizer, quantize_model
from fp4adam.nn.recipe import RECIPES
from helpers import assert_identical
from ranks import home, run, run_ranks

QUANTIZERS = (
    *RECIPES.values(),
    NVFP4Quantizer(optimize_for_gemm=True),
    MXFP8Quantizer(columnwise=False),
)


def own(quantizer: Quantizer, init_dtype: torch.dtype | None = None) -> QuantizedTensor:
    """With other values on each rank, and the value before quantization in a dtype."""
    value = torch.randn(64, 32).to(home())
    tensor = quantizer.quantize(value)
    if init_dtype is not None:
        tensor._high_precision_init_val = value.to(init_dtype)
    return tensor


def parts(tensor: QuantizedTensor) -> list[Tensor | None]:
    kept = tensor._high_precision_init_val
    inner = [inner.clone() for inner in tensor.storage_tensors().values()]
    return [*inner, None if kept is None else kept.clone()]


def broadcast(rank: int) -> list[list[Tensor | None]]:
    results = []
    # Who has a value before quantization, in which dtype.
    for of_root, of_others in (
        (torch.float32, None),
        (torch.bfloat16, torch.float32),
        (None, torch.float32),
        (None, None),
    ):
        for quantizer in QUANTIZERS:
            tensor = own(quantizer, of_root if rank == 1 else of_others)
            before = parts(tensor)
            addresses = [inner.data_ptr() for inner in tensor.storage_tensors().values()]
            versions = [inner._version for inner in tensor.storage_tensors().values()]
            work = dist.broadcast(tensor.data, src=1, async_op=True)
            work.wait()
            inner = tensor.storage_tensors().values()
            assert [x.data_ptr() for x in inner] == addresses
            if rank == 1:
                assert_identical(parts(tensor), before)
                assert [x._version for x in inner] == versions
            else:
                assert all(x._version > v for x, v in zip(inner, versions, strict=True))
            results.append(parts(tensor))
    layers = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)).to(home())
    nn.parallel.DistributedDataParallel(quantize_model(layers, "mxfp8"))
    return results + [parts(layer.weight) for layer in layers]


def gather(rank: int) -> list[list[Tensor | None]]:
    results = []
    for quantizer in QUANTIZERS:
        tensor = own(quantizer, torch.float32 if rank == 1 else None)
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor)
        assert_identical(parts(gathered[rank]), parts(tensor))
        values = [torch.empty(64, 32, device=home()) for _ in gathered]
        dist.all_gather(values, tensor)
        for value, other in zip(values, gathered, strict=True):
            assert torch.equal(value, other.dequantize(torch.float32))
        results += map(parts, gathered)
        rotated = [*gathered[1:], gathered[0]]
        dist.scatter(tensor, rotated if rank == 0 else None)
        sent = rotated[rank]  # decoded on its way to others
        assert_identical(tensor, quantizer.quantize(sent.dequantize()) if rank else sent)
    return results


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("function", [broadcast, gather])
def test_bytes_and_the_value_before_quantization_are_sent(function, world_size):
    first, *others = run(function, world_size)
    for other in others:
        assert_identical(other, first)


def send_another_format(rank: int) -> None:
    whole, rows = own(NVFP4Quantizer()), NVFP4Quantizer().quantize(torch.ones(96, 32)).to(home())
    for pair in (
        (whole, own(MXFP8Quantizer())),
        (whole, own(NVFP4Quantizer(columnwise=False))),
        (whole, rows[:64]),
        (rows[4:68], rows[8:72]),  # at other places in their blocks
    ):
        tensor = pair[rank]
        before = parts(tensor)
        with pytest.raises(RuntimeError, match="same shape, dtype and quantizer on all ranks"):
            dist.broadcast(tensor, src=0)
        assert_identical(parts(tensor), before)
    tensor = own(NVFP4Quantizer())
    with pytest.raises(RuntimeError, match="same shape, dtype and quantizer on all ranks"):
        dist.all_gather([own(MXFP8Quantizer()) for _ in range(2)], tensor)
    with pytest.raises(RuntimeError, match="got plain values of shape|got NVFP4Quantizer"):
        dist.all_gather([tensor.detach().clone(), torch.empty(64, 32)], tensor)
    for in_place in (dist.all_reduce, lambda t: dist.reduce(t, 0)):
        with pytest.raises(NotImplementedError, match="must not write into a NVFP4Tensor"):
            in_place(tensor.detach())
    dist.broadcast(tensor, src=1)  # the ranks are still in step


def test_another_format_is_refused_on_every_rank():
    run_ranks(send_another_format, 2, timeout=30.0)


def load_from_rank_0(rank: int) -> None:
    torch.manual_seed(0)
    for quantizer in QUANTIZERS:
        saved, model = nn.Linear(32, 64).to(home()), nn.Linear(32, 64).to(home())
        for layer in (saved, model):
            layer.weight = nn.Parameter(quantizer.quantize(layer.weight.detach()))
        state = saved.state_dict() if rank == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        assert torch.equal(
            model.weight.dequantize(torch.float32), saved.weight.dequantize(torch.float32)
        ), quantizer


def test_a_full_state_dict_of_rank_0_arrives_in_plain_tensors():
    run_ranks(load_from_rank_0, 2, timeout=30.0)
