"""What PyTorch's own optimizer tests feed to AdamW, and small problems to run an optimizer on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from torch.testing._internal.common_optimizers import ErrorOptimizerInput, OptimizerInfo, optim_db

import helpers
from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    FusedAdam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIMIZERS = (FusedAdam, FP4Adam)
QUANTIZERS = (NVFP4Quantizer(), MXFP8Quantizer(), Float8BlockQuantizer(), Float8Quantizer())
REFUSED_FLAGS = ("capturable", "differentiable")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

ADAMW: OptimizerInfo = next(info for info in optim_db if info.optim_cls is AdamW)


def _without_refused(kwargs: dict[str, Any]) -> bool:
    return not any(kwargs.get(flag) for flag in REFUSED_FLAGS)


def adamw_inputs() -> list[Any]:
    """Every configuration PyTorch constructs AdamW with, less those with a refused flag."""
    return [
        pytest.param(entry.kwargs, id=entry.desc)
        for entry in ADAMW.optim_inputs_func(device=DEVICE)
        if _without_refused(entry.kwargs)
    ]


def adamw_error_inputs() -> list[Any]:
    """Every misuse PyTorch provokes with AdamW, less those with a refused flag."""
    devices = ("cpu", "cuda") if DEVICE == "cuda" else ("cpu",)
    entries: list[ErrorOptimizerInput] = []
    for device in devices:
        entries += ADAMW.optim_error_inputs_func(device=device, dtype=torch.float32)
    return [
        pytest.param(entry, id=entry.optimizer_error_input.desc)
        for entry in entries
        if _without_refused(entry.optimizer_error_input.kwargs)
    ]


class LeastSquares:
    """``|weight @ x + bias|^2``, whose parameters are views with stride 2 if not contiguous."""

    def __init__(
        self, device: str, dtype: torch.dtype = torch.float32, contiguous: bool = True
    ) -> None:
        torch.manual_seed(0)
        weight, bias = (torch.randn((*shape, 2), dtype=dtype) for shape in ((10, 5), (10,)))
        self.x = torch.randn(5, dtype=dtype).to(device)
        views = [tensor.to(device)[..., 0] for tensor in (weight, bias)]
        self.params = [Parameter(view.contiguous() if contiguous else view) for view in views]

    def loss(self) -> Tensor:
        weight, bias = self.params
        return (weight.mv(self.x) + bias).pow(2).sum()

    def closure(self, optimizer: Optimizer) -> Callable[[], Tensor]:
        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        return evaluate


def small_network(device: str, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers = (torch.nn.Linear(2, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 1), torch.nn.Sigmoid())
    return torch.nn.Sequential(*layers).to(device=device, dtype=dtype)


def convolution(device: str) -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers = (torch.nn.Conv2d(4, 2, 1, stride=2), torch.nn.BatchNorm2d(2))
    return torch.nn.Sequential(*layers).to(device)


def make_params(
    device: str,
    dtype: torch.dtype = torch.float32,
    shapes: Iterable[tuple[int, ...]] = ((2, 3), (5,), ()),
    seed: int = 0,
) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes
    ]


def make_quantized_params(device: str, quantizer: Quantizer) -> list[Parameter]:
    """Two quantized matrices of BF16 and FP32 nominal dtype, and a plain FP32 vector."""
    matrix, vector, other = make_params("cpu", shapes=[(32, 64), (5,), (64, 32)])
    return [
        Parameter(quantizer.quantize(matrix.detach().to(device, torch.bfloat16))),
        Parameter(vector.detach().to(device)),
        Parameter(quantizer.quantize(other.detach().to(device))),
    ]


def copies(params: Iterable[Tensor], device: str | None = None) -> list[Parameter]:
    """Parameters with the same values, dtypes and strides, and no gradient."""
    return [Parameter(param.detach().clone().to(device or param.device)) for param in params]


def set_grads(params: Iterable[Tensor], seed: int, scale: float = 1.0) -> None:
    """The same gradients for the same seed, whatever the device and dtype of the parameters."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        grad = scale * torch.randn(param.shape, generator=generator)
        param.grad = grad.to(param.device, param.dtype)


def take_steps(optimizer: Optimizer, n_steps: int, first_seed: int = 100) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for seed in range(first_seed, first_seed + n_steps):
        set_grads(params, seed)
        optimizer.step()


# Processors differ in the payload of NaN.
assert_identical = functools.partial(helpers.assert_identical, any_nan=True)


def assert_same_optimization(actual: Optimizer, expected: Optimizer) -> None:
    """Parameters and state are equal bit for bit; hyper-parameters may differ."""
    for group, other in zip(actual.param_groups, expected.param_groups, strict=True):
        assert_identical(group["params"], other["params"])
        for param, twin in zip(group["params"], other["params"], strict=True):
            assert_identical(dict(actual.state[param]), dict(expected.state[twin]))
