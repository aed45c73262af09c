"""MXFP4 against the OCP specification, read in plain torch, and the step that writes it."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fp4adam import FP4Adam, MXFP4Quantizer, grouped_linear, quantize_model
from fp4adam.tensors import backend
from helpers import assert_bytes_are_of_masters, assert_identical, randn
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
        amax = part[~part.isnan()].abs().max() if not part.isnan().all() else torch.tensor(0.0)
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


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_bytes_are_those_of_the_specification(rounding, path_device):
    x = edge_cases()
    codes, scales = reference(x, rounding)
    quantizer = MXFP4Quantizer(scale_rounding=rounding)
    tensor = quantizer.quantize(x.to(path_device))
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    assert torch.equal(tensor.rowwise_scale_inv.cpu()[:32, :2], scales)
    assert torch.equal(tensor.rowwise_data.cpu(), packed)
    factor = 2.0 ** (scales.double() - 127).repeat_interleave(32, 1)
    values = torch.tensor([*E2M1, *(-v for v in E2M1)]).double()[codes.long()] * factor
    assert torch.equal(tensor.dequantize().cpu().double(), values.float().double())
    assert torch.equal(tensor.dequantize(torch.bfloat16).cpu(), values.float().bfloat16())
    # Decoded values have these codes again, or others of the same values.
    again = quantizer.quantize(tensor.dequantize()).dequantize()
    unsaturated = tensor.dequantize().abs() < 1e38
    assert torch.equal(again[unsaturated], tensor.dequantize()[unsaturated])


@pytest.mark.parametrize("states", [torch.float32, "8bit"], ids=str)
@pytest.mark.parametrize("master", [torch.float32, torch.float16], ids=str)
def test_a_step_by_kernels_has_the_bits_of_operators(states, master, through_the_kernels, device):
    def run(place: str) -> tuple[FP4Adam, nn.Parameter]:
        weight = nn.Parameter(randn(64, 96).bfloat16().to(place))
        model = nn.Module()
        model.layer = nn.Linear(96, 64, bias=False)
        model.layer.weight = weight
        quantize_model(model, MXFP4Quantizer())
        dtype = states if isinstance(states, torch.dtype) else torch.float8_e4m3fn
        options = {} if dtype is torch.float32 else dict(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
        optimizer = FP4Adam(model.parameters(), lr=1e-2, master_weight_dtype=master, **options)
        for seed in range(3):
            model.layer.weight.grad = randn(64, 96, seed=seed + 1).bfloat16().to(place)
            optimizer.step()
        return optimizer, model.layer.weight

    of_kernels, by_kernels = run(device)
    backend_uses = backend.uses_kernels
    try:
        backend.uses_kernels = lambda device: False
        of_operators, by_operators = run("cpu")
    finally:
        backend.uses_kernels = backend_uses
    assert_identical(
        [x.cpu() for x in by_kernels.storage_tensors().values()],
        [x.cpu() for x in by_operators.storage_tensors().values()],
    )
    states = of_kernels.state[by_kernels], of_operators.state[by_operators]
    for name in states[1]:
        assert torch.equal(*(torch.as_tensor(s[name]).cpu().float() for s in states)), name
    if master is torch.float32:
        assert_bytes_are_of_masters(of_operators)


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
    actual = grouped_linear(x, stack, offsets)
    values = stack.dequantize()
    expected = torch.cat([x[:4] @ values[0].t(), x[4:] @ values[2].t()])
    torch.testing.assert_close(actual, expected)


def train_shards(rank: int) -> None:
    def run(is_sharded: bool) -> tuple[FP4Adam, nn.Module]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64, bias=False)).bfloat16()
        quantize_model(model, "mxfp4", filter=lambda *_: True)
        if is_sharded:
            fully_shard(model, mesh=all_ranks())
        optimizer = FP4Adam(model.parameters(), lr=1e-2)
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn(8, 64, dtype=torch.bfloat16)
            (model(x).float() ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, model

    (_, whole), (_, sharded) = run(False), run(True)
    from fp4adam.checkpoints.trained import gathered

    for name, param in whole.named_parameters():
        own = gathered(dict(sharded.named_parameters())[name])
        if hasattr(own, "rowwise_data"):
            assert own.has_bytes_of(param.detach()), name
    saved = copy.deepcopy(whole.state_dict())
    whole.load_state_dict(saved)


def test_two_ranks_have_the_bits_of_one():
    run_ranks(train_shards, 2)
