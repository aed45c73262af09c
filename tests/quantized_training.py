"""Quantized parameters, gradients and comparisons that the tests of the optimizer share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    quantize_model,
)

RECIPES = {
    "nvfp4": NVFP4Quantizer(),
    "mxfp8": MXFP8Quantizer(),
    "float8block": Float8BlockQuantizer(),
    "float8": Float8Quantizer(),
}
QUANTIZERS = {
    **RECIPES,
    "nvfp4-1d": NVFP4Quantizer(two_dimensional=False),
    "nvfp4-columnwise": NVFP4Quantizer(rowwise=False),
    "mxfp8-rowwise": MXFP8Quantizer(columnwise=False),
    "float8block-1d": Float8BlockQuantizer(two_dimensional=False),
    "float8block-fp32": Float8BlockQuantizer(force_pow_2_scales=False, amax_epsilon=1e-3),
    "float8-delayed": Float8Quantizer(scaling="delayed", amax_history_len=3),
    "float8-columnwise": Float8Quantizer(rowwise=False, force_pow_2_scales=True),
}
SHAPES = ((64, 96), (32, 160))


def random(shape: tuple[int, ...], seed: int, device: str = "cpu", scale: float = 1.0) -> Tensor:
    """Normal values that do not depend on the device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(device)


def make_weight(
    quantizer: Quantizer,
    device: str,
    shape: tuple[int, ...] = SHAPES[0],
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    keeps_value: bool = False,
) -> Parameter:
    """A quantized parameter, with its value before quantization if ``keeps_value``."""
    value = random(shape, seed, device, scale=0.1).to(dtype)
    param = Parameter(quantizer.quantize(value))
    if keeps_value:
        param._high_precision_init_val = value
    return param


def make_params(quantizer: Quantizer, device: str, dtype: torch.dtype = torch.bfloat16) -> list:
    """Two quantized weights between plain parameters of three dtypes."""
    plain = [
        Parameter(random(shape, seed, device).to(plain_dtype))
        for seed, (shape, plain_dtype) in enumerate(
            [((7,), torch.float32), ((5, 3), torch.bfloat16), ((), torch.float16)]
        )
    ]
    weights = [
        make_weight(quantizer, device, shape, dtype, seed=10 + i, keeps_value=i == 0)
        for i, shape in enumerate(SHAPES)
    ]
    return [plain[0], weights[0], *plain[1:], weights[1]]


def make_mlp(quantizer: Quantizer | None, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """32 -> 64 -> 32, both layers quantized unless ``quantizer`` is None."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(device, dtype)
    return model if quantizer is None else quantize_model(model, quantizer)


def mlp_loss(model: Callable[[Tensor], Tensor], seed: int = 0, batch: int = 32) -> Tensor:
    """How far the model is from a rotation of its input."""
    first = getattr(model, "_orig_mod", model)[0]
    x = random((batch, 32), seed, first.bias.device)
    return (model(x.to(first.bias.dtype)).float() - x.roll(1, dims=1)).square().mean()


def all_params(optimizer: Optimizer) -> list[Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def set_grads(
    params: Iterable[Tensor], seed: int, scale: float = 1.0, dtype: torch.dtype | None = None
) -> None:
    """Gradients that depend on nothing but seed and shapes; as ``decoupled_grad`` with a dtype."""
    for i, param in enumerate(params):
        grad = random(tuple(param.shape), 1000 * seed + i, str(param.device), scale)
        if dtype is None:
            param.grad = grad.to(param.dtype)
        else:
            param.decoupled_grad = grad.to(dtype)


def take_steps(optimizer: Optimizer, seeds: Iterable[int]) -> None:
    for seed in seeds:
        set_grads(all_params(optimizer), seed)
        optimizer.step()


def quantized(params: Iterable[Tensor]) -> list[QuantizedTensor]:
    return [param for param in params if isinstance(param, QuantizedTensor)]


def addresses(optimizer: Optimizer) -> list[int]:
    """Where everything that a step writes lies in memory."""
    found = []
    for param in all_params(optimizer):
        inner = param.storage_tensors() if isinstance(param, QuantizedTensor) else {"": param}
        state = {name: value for name, value in optimizer.state[param].items() if name != "step"}
        found += [tensor.data_ptr() for tensor in (*inner.values(), *state.values())]
    return found


def snapshot(optimizer: Optimizer) -> dict[str, Any]:
    """A copy of all that an optimizer owns or writes."""
    params = all_params(optimizer)
    options = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return copy.deepcopy(
        {
            "params": [param.detach().clone() for param in params],
            "values": [getattr(param, "_high_precision_init_val", None) for param in params],
            "state": [dict(optimizer.state.get(param, {})) for param in params],
            "sizes": [len(group["params"]) for group in optimizer.param_groups],
            "options": options,
            "defaults": optimizer.defaults,
        }
    )


def assert_identical(actual: Any, expected: Any) -> None:
    """Equal bit for bit, dtype and shape included, through lists, tuples and dictionaries."""
    assert type(actual) is type(expected)
    if isinstance(actual, QuantizedTensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.quantizer == expected.quantizer
        assert_identical(actual.storage_tensors(), expected.storage_tensors())
    elif isinstance(actual, Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        bits = [
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            for tensor in (actual, expected)
        ]
        assert torch.equal(*bits)
    elif isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        for key, value in actual.items():
            assert_identical(value, expected[key])
    elif isinstance(actual, (list, tuple)):
        assert len(actual) == len(expected)
        for item, other in zip(actual, expected, strict=True):
            assert_identical(item, other)
    else:
        assert actual == expected


def assert_bytes_are_of_masters(optimizer: Optimizer) -> None:
    """Every quantized parameter is exactly what its quantizer makes of its master weight."""
    for param in quantized(all_params(optimizer)):
        master = optimizer.state[param]["master_param"]
        if optimizer.quantize_from == "param_dtype":
            master = master.to(param.dtype)
        if param.quantizer.layout.tensor_scale == "delayed":
            # Earlier values set the scale: the master is in the codes, and the latest amax.
            scaled = (master.float() * param.scale).clamp(-448, 448)
            codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
            assert_identical([param.rowwise_data, param.columnwise_data], [codes, codes.t()])
            if master.numel():
                assert param.amax_history[0] == master.abs().max()
            continue
        expected = param.quantizer.quantize(master).storage_tensors()
        assert_identical(param.storage_tensors(), expected)
