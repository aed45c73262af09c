"""FP4Adam with torchao's NVFP4Tensor and MXTensor parameters, on a CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization import quantize_

from fp4adam import FP4Adam, MXFP8Quantizer, NVFP4Quantizer

QUANTIZERS = {
    "nvfp4": NVFP4Quantizer(columnwise=False, two_dimensional=False),
    "mxfp8": MXFP8Quantizer(columnwise=False),
}
every_layout = pytest.mark.parametrize("swizzled", [False, True])
every_format = pytest.mark.parametrize("format", QUANTIZERS)


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    """Normal values of any size, so that blocks of NVFP4 have scales below torchao's smallest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x * torch.logspace(0, -6, shape[0])[(..., *[None] * (len(shape) - 1))]).bfloat16()


def quantized(format: str, x: Tensor, swizzled: bool = False) -> Parameter:
    """What torchao makes of a value."""
    if format == "mxfp8":
        return Parameter(MXTensor.to_mx(x, torch.float8_e4m3fn, is_swizzled_scales=swizzled))
    scale = per_tensor_amax_to_scale(x.abs().amax())
    return Parameter(NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale, is_swizzled_scales=swizzled))


def step(optimizer: FP4Adam, seed: int) -> None:
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = values(tuple(param.shape), seed).flip(0).to(param.device)
    optimizer.step()


def bytes_of(param: Tensor) -> list[Tensor]:
    inner = (getattr(param, name) for name in param.__tensor_flatten__()[0])
    return [x.detach().cpu().clone().view(-1).view(torch.uint8) for x in inner]


@every_format
@every_layout
@pytest.mark.parametrize("shape", [(32, 96), (160, 256), (2, 128, 64)], ids=str)
def test_torchao_decodes_what_a_step_writes(format, swizzled, shape, path_device):
    param = quantized(format, values(shape, 0), swizzled).detach()
    param = Parameter(param.to(path_device))
    start, before = param.dequantize(torch.float32), bytes_of(param)
    inner = [id(getattr(param, name)) for name in param.__tensor_flatten__()[0]]
    optimizer = FP4Adam([param], lr=0.0)
    step(optimizer, 0)
    master = optimizer.state[param]["master_param"]
    torch.testing.assert_close(master, start, rtol=2**-22, atol=0)  # its order of scales
    optimizer.param_groups[0]["lr"], optimizer.found_inf = 1e-3, torch.ones((), device=path_device)
    step(optimizer, 1)
    assert all(map(torch.equal, bytes_of(param), before))  # nothing has changed

    optimizer.found_inf = None
    for seed in range(1, 3):
        step(optimizer, seed)
    assert [id(getattr(param, name)) for name in param.__tensor_flatten__()[0]] == inner
    expected = QUANTIZERS[format].quantize(master)
    decoded = param.dequantize(torch.float32)
    assert not torch.equal(decoded, start)
    assert torch.equal(param.dequantize(torch.bfloat16), expected.dequantize(torch.bfloat16))
    # torchao multiplies NVFP4's scales in another order.
    rtol = 0 if format == "mxfp8" else 2**-22
    torch.testing.assert_close(decoded, expected.dequantize(), rtol=rtol, atol=0)
    assert torch.equal(param.qdata.view(torch.uint8).flatten(), expected.rowwise_data.flatten())


def test_small_scales_are_kept():
    param = quantized("nvfp4", values((32, 96), 0))
    optimizer = FP4Adam([param], lr=1e-8, weight_decay=0.0)
    value = values((32, 96), 1).float()
    step(optimizer, 0)
    optimizer.state[param]["master_param"].copy_(value)
    step(optimizer, 1)
    assert param.scale.float()[param.scale.float() > 0].min() < 2**-6

    def error(x: Tensor) -> float:
        return (x.dequantize(torch.float32) - value).norm(dim=1)[16:].sum().item()

    assert error(param) < error(quantized("nvfp4", value.bfloat16()))


def make_model(seed: int) -> tuple[nn.Module, FP4Adam]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).bfloat16()
    quantize_(model, NVFP4WeightOnlyConfig())
    model.requires_grad_(True)  # quantize_() makes models for inference
    assert isinstance(model[0].weight, NVFP4Tensor)
    return model, FP4Adam(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: FP4Adam, steps: int) -> float:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - x.flip(1)).float().square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("model_first", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_of_quantize_is_trained_and_resumed(model_first, seed, tmp_path):
    model, optimizer = make_model(0)
    before = bytes_of(model[2].weight)
    first = train(model, optimizer, 1)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint.pt")
    clone = copy.deepcopy(model)
    kept = bytes_of(clone[0].weight)
    assert train(model, optimizer, 60) < 0.1 * first
    assert not torch.equal(bytes_of(model[2].weight)[0], before[0])
    assert all(map(torch.equal, bytes_of(clone[0].weight), kept))
    resumed, other = make_model(seed)
    train(resumed, other, 2)
    states = torch.load(tmp_path / "checkpoint.pt", weights_only=False)
    pairs = [*zip((resumed, other), states, strict=True)]
    for target, state in pairs if model_first else reversed(pairs):
        target.load_state_dict(state)
    train(resumed, other, 60)
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        if isinstance(a, NVFP4Tensor):
            assert all(map(torch.equal, bytes_of(a), bytes_of(b)))
        else:
            assert torch.equal(a, b)


REFUSED = {
    "one scale": (
        lambda x: NVFP4Tensor.to_nvfp4(x),
        "per_tensor_scale .* got None; quantize with use_dynamic_per_tensor_scale=True",
    ),
    "e5m2": (lambda x: MXTensor.to_mx(x, torch.float8_e5m2), "got torch.float8_e5m2 and 32"),
    "transposed": (
        lambda x: quantized("mxfp8", x).t(),
        "must be contiguous to be stepped, got strides .* not its transpose",
    ),
    "odd rows": (lambda x: quantized("mxfp8", x[:24]), r"multiples of 32, got shape \(24, 96\)"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_what_no_kernel_writes_is_refused(make, words):
    param = Parameter(make(values((32, 96), 0)).detach())
    with pytest.raises(ValueError, match=words):
        FP4Adam([param])


def test_wrappers_of_plain_weights_are_stepped_as_plain_ones() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    layers = []
    for kind in (torch.optim.AdamW, FP4Adam):
        torch.manual_seed(0)
        layer = convert_to_float8_training(nn.Linear(32, 32), config=config)
        assert type(layer.weight).__name__ == "WeightWithDynamicFloat8CastTensor"
        optimizer = kind(layer.parameters(), lr=1e-2)
        for _ in range(3):
            layer.weight.grad = torch.ones(32, 32)
            layer.bias.grad = torch.ones(32)
            optimizer.step()
        layers.append(layer)
    expected, actual = (layer.weight._tensor for layer in layers)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
