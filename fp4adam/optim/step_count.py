"""The entry ``step`` of a parameter's state."""

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class StepCount:
    """A step count that behaves as the 0-dimensional float32 tensor it holds, but is none.

    Transformer Engine counts steps per group, and code for its optimizer takes every tensor of a
    state for one of the shape of the parameter: Megatron copies and shards all of them.

    Attributes:
        tensor: The count, on the host.
    """

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "tensor":
            raise AttributeError(name)
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        plain = (as_tensor(x) for x in args)
        return func(*plain, **{name: as_tensor(x) for name, x in (kwargs or {}).items()})

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepCount":
        return StepCount(copy.deepcopy(self.tensor, memo))

    def __reduce__(self) -> tuple[type["StepCount"], tuple[Tensor]]:
        return StepCount, (self.tensor.clone(),)

    def __repr__(self) -> str:
        return repr(self.tensor)

    def __float__(self) -> float:
        return self.tensor.item()

    def __int__(self) -> int:
        return int(self.tensor)

    __index__ = __int__
    __hash__ = object.__hash__


def _operator(name: str) -> Callable:
    function = getattr(operator, name)
    return lambda count, other: function(count.tensor, as_tensor(other))


def _reflected(name: str) -> Callable:
    function = getattr(operator, name)
    return lambda count, other: function(as_tensor(other), count.tensor)


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "pow"):
    setattr(StepCount, f"__{_name}__", _operator(_name))
for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(StepCount, f"__r{_name}__", _reflected(_name))


def as_tensor(value: Any) -> Any:
    """The tensor of a step count; any other value itself."""
    return value.tensor if isinstance(value, StepCount) else value


torch.serialization.add_safe_globals([StepCount])
