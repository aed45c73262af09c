"""Values, quantized parameters, training loops and comparisons that tests share."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

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
from fp4adam.optim.te_layout import stored_state

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
    return (randn(*shape, seed=seed) * scale).to(device)


def randn(
    *shape: int, seed: int = 0, device: Any = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normal values that do not depend on the device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


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
    kinds = [((7,), torch.float32), ((5, 3), torch.bfloat16), ((), torch.float16)]
    plain = [Parameter(random(kinds[i][0], i, device).to(kinds[i][1])) for i in range(3)]
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


class WithGradient(torch.autograd.Function):
    """A loss whose gradient with respect to ``param`` is given; with None backward() raises."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, grad: Tensor | None) -> Tensor:
        ctx.grad = None if grad is None else grad.to(param.dtype)
        return torch.zeros((), device=param.device)

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor, None]:
        if ctx.grad is None:
            raise RuntimeError("out of memory")
        return ctx.grad, None


def take_steps(optimizer: Optimizer, seeds: Iterable[int]) -> None:
    for seed in seeds:
        set_grads(all_params(optimizer), seed)
        optimizer.step()


def launched_by(optimizer: Optimizer) -> list[str]:
    """The names of the kernels that a step launches."""
    from fp4adam.kernels.launch.launch import Launch  # after TRITON_INTERPRET

    launched, original = [], Launch.__call__

    def spy(self: Any, *signals: Tensor) -> None:
        launched.extend([self._kernel.__name__] if self._grid[0] else [])
        original(self, *signals)

    with mock.patch.object(Launch, "__call__", spy):
        optimizer.step()
    return launched


def train(optimizer: Optimizer, losses: Iterable[Tensor]) -> list[float]:
    """One step for each loss, computed when it is asked for; the values of the losses."""
    values = []
    for loss in losses:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


def through_a_file(value: Any, weights_only: bool = True, **options: Any) -> Any:
    """What ``torch.load`` reads of what ``torch.save`` wrote."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only, **options)


def quantized(params: Iterable[Tensor]) -> list[QuantizedTensor]:
    return [param for param in params if isinstance(param, QuantizedTensor)]


def value_of(param: Tensor) -> Tensor:
    """A copy of a parameter's value in FP32."""
    if isinstance(param, QuantizedTensor):
        return param.detach().dequantize(torch.float32)
    return param.detach().to(torch.float32, copy=True)


def stored(param: Tensor) -> dict[str, Tensor]:
    """The tensors that hold the value of a parameter."""
    if isinstance(param, QuantizedTensor):
        return param.detach().storage_tensors()
    return {"": param.detach()}


def addresses(optimizer: Optimizer) -> list[int]:
    """Where everything that a step writes lies in memory."""
    found = []
    for param in all_params(optimizer):
        state = stored_state(optimizer.state[param])
        state = {name: value for name, value in state.items() if name != "step"}
        found += [tensor.data_ptr() for tensor in (*stored(param).values(), *state.values())]
    return found


def written(optimizer: Optimizer) -> list[dict[str, Tensor]]:
    """A copy of everything that a step writes, for each parameter, on the CPU."""
    states = optimizer.state
    tensors = [stored(p) | stored_state(states[p]) for p in all_params(optimizer)]
    return [{k: v.detach().cpu().clone() for k, v in entry.items()} for entry in tensors]


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
            "state": [dict(stored_state(optimizer.state.get(param, {}))) for param in params],
            "sizes": [len(group["params"]) for group in optimizer.param_groups],
            "options": options,
            "defaults": optimizer.defaults,
        }
    )


def bits(tensor: Tensor) -> Tensor:
    """All bytes of a tensor, on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits(a), bits(b))


def assert_identical(actual: Any, expected: Any, where: str = "", any_nan: bool = False) -> None:
    """Equal bit for bit, dtype and shape included, through lists, tuples and dictionaries.

    With ``any_nan`` all NaNs are equal.
    """
    assert type(actual) is type(expected), where
    if isinstance(actual, QuantizedTensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
        assert actual.quantizer == expected.quantizer, where
        actual, expected = actual.storage_tensors(), expected.storage_tensors()
    if isinstance(actual, Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
        if any_nan and actual.is_floating_point():
            actual, expected = (x.masked_fill(x.isnan(), torch.nan) for x in (actual, expected))
        differ = bits(actual) != bits(expected)
        assert not differ.any(), f"{where}: {int(differ.sum())} of {differ.numel()} bytes differ"
    elif isinstance(actual, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in actual.items():
            assert_identical(value, expected[key], f"{where}[{key!r}]", any_nan)
    elif isinstance(actual, (list, tuple)):
        assert len(actual) == len(expected), where
        for i, (item, other) in enumerate(zip(actual, expected, strict=True)):
            assert_identical(item, other, f"{where}[{i}]", any_nan)
    else:
        assert actual == expected, where


def assert_same_training(actual: Optimizer, expected: Optimizer) -> None:
    """Parameters and states are the same, bit for bit."""
    assert_identical(written(actual), written(expected))


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
