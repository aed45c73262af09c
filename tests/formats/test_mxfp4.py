"""MXFP4 against the OCP specification, read in plain torch, and the step that writes it."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fp4adam import (
    FP4Adam,
    MXFP4Quantizer,
    QuantizedTensor,
    quantize_model,
)
from fp4adam.checkpoints.export import gathered
from fp4adam.optim.remainder import complete, split_off
from helpers import randn
from ranks import all_ranks, run_ranks

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ROUNDINGS = ("floor", "even", "up")
# Amaxes at the edges of the roundings, and blocks of zeros, subnormals, infinity and NaN.
EDGES = [0, 1e-40, 2**-126, 1, 1.5, 1.5 + 2**-23, 1.75 - 2**-23, 1.75, 2 - 2**-23, 3e38, torch.inf]


def reference(x: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes of float32 x, element by element in float64."""
    codes = torch.zeros(x.shape, dtype=torch.uint8)
    scales = torch.zeros(x.shape[0], x.shape[1] // 32, dtype=torch.uint8)
    for row, block in itertools.product(range(x.shape[0]), range(x.shape[1] // 32)):
        part = x[row, 32 * block : 32 * block + 32].double()
        if part.isnan().any():  # a scale that is NaN
            scales[row, block], codes[row, 32 * block : 32 * block + 32] = 255, 7
            continue
        amax = part.abs().max()
        amax = torch.minimum(amax, torch.tensor(2.0**128, dtype=torch.float64))
        exponent = -200 if amax == 0 else int(torch.frexp(amax)[1]) - 1
        mantissa = 0.0 if amax == 0 else float(amax) / 2.0**exponent
        exponent += {"floor": False, "even": mantissa >= 1.75, "up": mantissa > 1.5}[rounding]
        byte = max(exponent - 2 + 127, 0)
        scales[row, block] = byte
        for i, value in enumerate(part.tolist()):
            magnitude = 6.0 if value != value else abs(value) / 2.0 ** (byte - 127)
            # The nearest, of two equally near ones the even code.
            code = min(range(8), key=lambda c: (abs(E2M1[c] - min(magnitude, 6.0)), c % 2))
            is_negative = value == value and torch.tensor(value).signbit()
            codes[row, 32 * block + i] = code + 8 * bool(is_negative)
    return codes, scales


def edge_cases() -> Tensor:
    x = torch.rand(32, 64) * 2 - 1
    for i, amax in enumerate(EDGES):
        x[i, :32] *= min(amax, 1e30)
        x[i, 7] = -amax
    x[20, :32], x[21, 3] = torch.nan, torch.nan
    x[22, :32] = torch.arange(32) * 0.25  # ties
    return x


def assert_equal_values(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_bytes_are_those_of_the_specification(rounding, path_device):
    x = edge_cases()
    codes, scales = reference(x, rounding)
    quantizer = MXFP4Quantizer(scale_rounding=rounding)
    tensor = quantizer.quantize(x.to(path_device))
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    assert torch.equal(tensor.rowwise_scale_inv.cpu()[:32, :2], scales)
    assert torch.equal(tensor.rowwise_data.cpu(), packed)
    factor = 2.0 ** (scales.double() - 127)
    factor = torch.where(scales == 255, torch.nan, factor).repeat_interleave(32, 1)
    values = torch.tensor([*E2M1, *(-v for v in E2M1)]).double()[codes.long()] * factor
    assert_equal_values(tensor.dequantize().cpu().double(), values.float().double())
    assert_equal_values(tensor.dequantize(torch.bfloat16).cpu(), values.float().bfloat16())
    # Decoded values have these codes again, or others of the same values.
    again = quantizer.quantize(tensor.dequantize()).dequantize()
    unsaturated = tensor.dequantize().abs() < 1e38
    assert torch.equal(again[unsaturated], tensor.dequantize()[unsaturated])


def test_what_is_refused():
    for options, match in (
        ({"columnwise": True}, "columnwise and optimize_for_gemm must be False for MXFP4"),
        ({"optimize_for_gemm": True}, "must be False for MXFP4"),
        ({"scale_rounding": "nearest"}, "must be one of floor, even, up, got 'nearest'"),
    ):
        with pytest.raises(ValueError, match=match):
            MXFP4Quantizer(**options)
    with pytest.raises(ValueError, match="multiples of 32"):
        MXFP4Quantizer().quantize(torch.ones(32, 48))


def test_stacks_of_experts_multiply():
    torch.manual_seed(0)
    stack = MXFP4Quantizer().quantize(torch.randn(3, 64, 32))
    x, offsets = torch.randn(12, 32), torch.tensor([4, 4, 12], dtype=torch.int32)
    actual = F.grouped_mm(x, stack.transpose(1, 2), offs=offsets)
    values = stack.dequantize()
    expected = torch.cat([x[:4] @ values[0].t(), x[4:] @ values[2].t()])
    torch.testing.assert_close(actual, expected)


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64, bias=False)).bfloat16()
    return quantize_model(model, "mxfp4", filter=lambda *_: True)


def train(model: nn.Module, optimizer: FP4Adam, seeds: range) -> None:
    for seed in seeds:
        x = randn(8, 64, seed=seed, dtype=torch.bfloat16)
        (model(x).float() ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same_weights(actual: nn.Module, expected: nn.Module) -> None:
    for name, param in expected.named_parameters():
        own = gathered(actual.get_parameter(name))
        if isinstance(own, QuantizedTensor):
            assert own.has_bytes_of(param.detach()), name
        else:
            assert torch.equal(own, param), name


def train_shards(rank: int, folder: str) -> None:
    mesh, plan = all_ranks(), {"0": ColwiseParallel(), "1": RowwiseParallel()}
    whole = build()
    train(whole, FP4Adam(whole.parameters(), lr=1e-2), range(3))
    for kind in ("fsdp", "tensor parallel", "ddp"):
        model = build()
        if kind == "fsdp":
            fully_shard(model, mesh=mesh)
        elif kind == "tensor parallel":
            model = parallelize_module(model, mesh, plan)
        replica = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
        optimizer = FP4Adam(model.parameters(), lr=1e-2)
        train(replica, optimizer, range(2))
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(saved, checkpoint_id=f"{folder}/{kind}")
        train(replica, optimizer, range(5, 7))
        dcp.load(saved, checkpoint_id=f"{folder}/{kind}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(replica, optimizer, range(2, 3))
        if kind == "tensor parallel":
            # Sums of products have another order, and so have gradients.
            for name, param in whole.named_parameters():
                own = gathered(model.get_parameter(name)).dequantize()
                torch.testing.assert_close(own, param.dequantize(), rtol=0.6, atol=0.02)
        else:
            assert_same_weights(model, whole)


def test_two_ranks_have_the_bits_of_one(tmp_path):
    run_ranks(train_shards, 2, str(tmp_path))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_remainders_reach_the_masters_of_saturated_codes(rounding):
    """With "floor" weights up to 8 times the scale have the code of 6 times."""
    values = torch.linspace(-1.999, 1.999, 128).view(2, 64)[:, torch.randperm(64)]
    values = values.repeat(16, 1)
    weight = MXFP4Quantizer(scale_rounding=rounding).quantize(values)
    master = complete(weight, split_off(weight, values))
    # Half a gap of 2 is 119.5 units, and scales are at most 1/2.
    assert (master - values).abs().max() <= 0.5 * 0.5 * 2 / 119.5
