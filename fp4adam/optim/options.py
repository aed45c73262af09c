"""The options of a whole optimizer, which hold for all of its parameter groups."""

import dataclasses
from typing import Any

import torch

from fp4adam.optim.state_codec import FLOAT64, StateCodec, state_codec


@dataclasses.dataclass(frozen=True)
class Options:
    """What an optimizer was made with; its parameters and engines share one object.

    Attributes:
        name: The optimizer's class, for error messages.
        takes_quantized: Whether parameters may be quantized.
        capturable: Whether step counts and scalars stay on the device, for CUDA graphs.

    The others are arguments of :class:`FP4Adam`.
    """

    name: str = "FusedAdam"
    takes_quantized: bool = False
    capturable: bool = False
    master_weights: bool = True
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    master_weight_dtype: torch.dtype = torch.float32
    store_param_remainders: bool = False
    use_decoupled_grad: bool = False
    offload_states: bool = False
    set_grad_none: bool | None = None
    quantize_from: str = "master"

    def codecs(self, param_dtype: torch.dtype) -> dict[str, StateCodec]:
        """The codecs of master and moments, by the name of the state."""
        if param_dtype == torch.float64:
            return dict.fromkeys(("exp_avg", "exp_avg_sq", "master_param"), FLOAT64)
        return {
            "master_param": state_codec("master_weight", self.master_weight_dtype),
            "exp_avg": state_codec("exp_avg", self.exp_avg_dtype),
            "exp_avg_sq": state_codec("exp_avg_sq", self.exp_avg_sq_dtype),
        }


class OptionAttribute:
    """An attribute of an optimizer that reads one of its :class:`Options`, or replaces it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type) -> Any:
        return self if optimizer is None else getattr(optimizer.options, self._name)

    def __set__(self, optimizer: Any, value: Any) -> None:
        optimizer.options = dataclasses.replace(optimizer.options, **{self._name: value})
