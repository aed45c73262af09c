"""AdamW on FP32 masters in plain torch, and the one rule about who wrote a parameter last."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4adam import QuantizedTensor
from helpers import bits_equal, stored
from step_reference import adamw_


def value_of(param: Tensor) -> Tensor:
    """A copy of a parameter's value in FP32."""
    if isinstance(param, QuantizedTensor):
        return param.detach().dequantize(torch.float32)
    return param.detach().to(torch.float32, copy=True)


def rounded(param: Tensor, master: Tensor, quantize_from: str = "master") -> dict[str, Tensor]:
    """What ``stored(param)`` is when ``master`` has been rounded to it."""
    if not isinstance(param, QuantizedTensor):
        return {"": master.to(param.dtype)}
    return rounded_tensor(param, master, quantize_from).storage_tensors()


def rounded_tensor(param: QuantizedTensor, master: Tensor, quantize_from: str) -> QuantizedTensor:
    """A new tensor in the format of ``param``, to which ``master`` has been rounded."""
    value = master.to(param.dtype) if quantize_from == "param_dtype" else master
    return param.quantizer.quantize(value.contiguous())


def is_rounded(param: Tensor, master: Tensor, quantize_from: str = "master") -> bool:
    """Whether a parameter is what ``master`` rounds to.

    So is a weight that came back through a plain state dict: the values of the rounded master in
    the nominal dtype, quantized again.
    """
    if master.device != param.device or master.shape != param.shape:
        return False
    if same_bits(stored(param), rounded(param, master, quantize_from)):
        return True
    if not isinstance(param, QuantizedTensor):
        return False
    plain = rounded_tensor(param, master, quantize_from).dequantize(param.dtype)
    return same_bits(stored(param), param.quantizer.quantize(plain).storage_tensors())


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether tensors of the same names have the same bits."""
    return a.keys() == b.keys() and all(bits_equal(a[name], b[name]) for name in a)


class Twin:
    """One parameter trained in FP32: its master and its moments, in memory of their own.

    Attributes:
        value: The master weight, or the value of a parameter that needs none.
        moments: exp_avg, exp_avg_sq, and max_exp_avg_sq with AMSGrad.
        step: How many updates there were.
        rounded: What ``stored`` of the parameter has to be after the update.
    """

    rounded: dict[str, Tensor]

    def __init__(self, value: Tensor, moments: dict[str, Tensor], step: float) -> None:
        self.value, self.moments, self.step = value, moments, step

    @classmethod
    def of(cls, optimizer: Any, param: Tensor) -> Twin:
        """A copy of what an optimizer with FP32 states has of a parameter."""
        state = optimizer.state.get(param, {})
        master = state.get("master_param")
        value = value_of(param) if master is None else master.detach().clone()
        names = [name for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if name in state]
        moments = {name: state[name].detach().clone() for name in names}
        return cls(value, moments, float(state.get("step", 0)))

    def update(
        self,
        grad: Tensor,
        group: dict[str, Any],
        grad_scale: Tensor | None = None,
        clip: Tensor | None = None,
    ) -> None:
        """Take one step of a parameter group's AdamW."""
        self.step += 1
        adamw_(self.value, self.moments, self.step, grad, group, grad_scale, clip)
