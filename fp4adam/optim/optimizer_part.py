"""A part of an optimizer: some of its parameters, stepped alone with its options and states.

Gradient release steps each parameter when its gradient is complete, and offload steps as many at a
time as fit into its staging memory. The whole optimizer's own code does it, so with the same bits.
"""

import operator
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import local
from fp4adam.optim.memory_note import WriteNote

if TYPE_CHECKING:
    from fp4adam.optim.fused_adam import FusedAdam


class OptimizerPart:
    """Parameters that are stepped together, and an optimizer of these alone.

    Args:
        whole: The optimizer that they belong to; it is not kept alive.
        params: The parameters; all members of a scale group, or none.

    Attributes:
        params: The parameters.
        optimizer: Their optimizer. It has its states where the parameters are.
        beside: Whether the step may run beside what the GPU does now; only offloaded ones do.
    """

    beside = False

    def __init__(self, whole: "FusedAdam", params: list[Tensor]) -> None:
        self.params = params
        self._owner = weakref.ref(whole)
        members = set(params)
        self._groups = [g for g in whole.param_groups if not members.isdisjoint(g["params"])]
        self.optimizer = object.__new__(type(whole))
        self.optimizer.__dict__.update(whole.__dict__)
        self.optimizer.param_groups = [
            {"params": [param for param in group["params"] if param in members]}
            for group in self._groups
        ]
        self.optimizer._release = self.optimizer._offload = None
        self.optimizer.state = {}
        self.optimizer._forget()
        self.optimizer._masters.update(whole._masters.notes_of(params))

    def is_current(self, params: list[Tensor]) -> bool:
        """Whether it has these parameters, and the optimizer still has their groups."""
        groups = self._owner().param_groups
        same = len(params) == len(self.params) and all(map(operator.is_, params, self.params))
        return same and all(any(known is group for group in groups) for known in self._groups)

    def notes(self) -> dict[Tensor, WriteNote]:
        """The notes of the parameters as the last step left them."""
        self.optimizer._take_notes()
        return self.optimizer._masters.notes_of(self.params)

    @property
    def device(self) -> torch.device:
        """The device of the parameters, or of the first one."""
        return local(self.params[0]).device

    def has_gradients(self) -> bool:
        """Whether any of the parameters has one."""
        read_grad = self.optimizer._read_grad
        return any(read_grad(param) is not None for param in self.params)

    def grads(self) -> list[Tensor]:
        """The local gradients, as far as there are any."""
        return [grad for grad in map(self.optimizer._read_grad, self.params) if grad is not None]

    def take_options(self) -> None:
        """Copy the current options of the whole optimizer."""
        whole, part = self._owner(), self.optimizer
        for name in part._option_names:
            setattr(part, name, getattr(whole, name))
        for own, group in zip(part.param_groups, self._groups, strict=True):
            own.update((k, v) for k, v in group.items() if k not in ("params", "param_names"))

    def step(self, clip: dict[torch.device, Tensor], **signals: Tensor | None) -> None:
        """Step the parameters with the current options and states of the whole optimizer.

        Args:
            clip: The clipping coefficient by device.
            signals: What a ``GradScaler`` sets: ``grad_scale`` and ``found_inf``.
        """
        whole, part = self._owner(), self.optimizer
        self.take_options()
        part._clip = dict(clip)
        vars(part).update(signals)
        states = whole.__dict__["state"]
        try:
            if whole._offload is not None:
                whole._offload.step(self, states)
            else:
                part.state = states_of(self.params, states)
                part._step()
                states.update(part.__dict__["state"])
        finally:
            for name in signals:
                vars(part).pop(name, None)


def states_of(params: Iterable[Tensor], states: dict[Tensor, Any]) -> dict[Tensor, Any]:
    """The states of these parameters, as far as there are any."""
    return {param: states[param] for param in params if param in states}
