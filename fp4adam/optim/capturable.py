"""Steps that CUDA graphs record: what they require, and where learning rates have to be."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp4adam.optim.adam import updates_params
from fp4adam.optim.hyper_parameters import is_on_device


class Capturable:
    """Captured steps, as a part of ``FusedAdam``; the attributes that it uses are its own."""

    def _check_capturable_option(self, options: Mapping[str, Any]) -> None:
        own = getattr(self, "defaults", options)["capturable"]
        if options["capturable"] != own:
            raise ValueError(
                f"capturable must be the same for all groups, got {options['capturable']} in one "
                f"of an optimizer with {own}; pass it to the constructor"
            )
        if own and self.offload_states:
            raise ValueError(
                "offload_states must be False with capturable=True, got True: a replay cannot "
                "stream states from the host; leave one of them out"
            )
        if own and options["fused"] is False:
            raise ValueError(
                "fused must not be False with capturable=True, got False: torch operators take the "
                "scalars of a step from the host; leave fused out"
            )

    @property
    def _is_capturable(self) -> bool:
        # Not that of a group, which torch.compile and checkpoints of torch.optim set.
        return self.defaults.get("capturable", False)

    def _updates(self, group: dict[str, Any]) -> bool:
        """Whether steps may change the parameters of a group, and not just the moments."""
        # Otherwise only the device knows the learning rate.
        return self._is_capturable or updates_params(group)

    def _check_capture(self) -> None:
        """Raise if a CUDA graph cannot record this step."""
        if not self._is_capturable:
            raise RuntimeError(self._capture_error())
        if self._clip:
            raise RuntimeError(
                "clipping must not be pending while a step is captured, got a clip_grad_norm_ "
                "before it: every replay would multiply by that coefficient; capture "
                "torch.nn.utils.clip_grad_norm_, which scales the gradients"
            )
        for group in self.param_groups:
            if not is_on_device(group["lr"]):
                raise RuntimeError(
                    "lr must be a tensor on the GPU while a step is captured, got "
                    f"{group['lr']!r}: replays would repeat this number; run one step outside the "
                    'graph first, which makes it one, then change it with group["lr"].fill_()'
                )
        structure = self._structure()
        can_be_captured = self._plan is not None and self._plan.can_be_captured
        if not (can_be_captured and self._has_fitting_plan(structure)):
            raise RuntimeError(
                "a captured step must be like the last one outside the graph, got a first step, "
                "or one with other parameters, states or gradients: these need new memory and "
                "kernels; run one step outside the graph right before the capture"
            )
        # Graphs outlive plans, and nothing tells when one is gone.
        if not any(memory is self._plan.memory_of_replays for memory in self._captured):
            self._captured.append(self._plan.memory_of_replays)

    def _capture_error(self) -> str:
        return (
            "capturable must be True to capture step() in a CUDA graph, got False: replays would "
            f"repeat the scalars of the capture; create {type(self).__name__}(capturable=True), or "
            "call step() outside the graph"
        )

    def _put_rates_on_devices(self) -> None:
        """Make learning rates tensors that replays can read, as Transformer Engine does."""
        for group in self.param_groups:
            lr = group["lr"]
            if isinstance(lr, Tensor) and not is_on_device(lr):
                raise ValueError(
                    "lr must be a number or a tensor on the GPU with capturable=True, got a tensor "
                    f"on {lr.device}, which a replay cannot read; move it, or pass a number"
                )
            if not isinstance(lr, Tensor) and group["params"]:
                device = group["params"][0].device
                # Float64, because it holds the number itself.
                group["lr"] = torch.tensor(float(lr), dtype=torch.float64).to(device)
