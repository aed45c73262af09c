"""Steps that CUDA graphs record: what they require, and where learning rates have to be."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp4adam.optim.checks import CAPTURE_AROUND
from fp4adam.optim.engine import Engine
from fp4adam.optim.hyper_parameters import is_on_device
from fp4adam.optim.options import Options


def check_option(options: Options, group: Mapping[str, Any]) -> None:
    """Raise if ``capturable`` does not go together with the other options."""
    own = options.capturable
    if group["capturable"] != own:
        raise ValueError(
            f"capturable must be the same for all groups, got {group['capturable']} in one of an "
            f"optimizer with {own}; pass it to the constructor"
        )
    if own and (options.offload_states or group["fused"] is False):
        raise ValueError(
            "offload_states and fused must not be set with capturable=True, got "
            f"{options.offload_states} and {group['fused']}: a replay cannot stream states or take "
            "scalars from the host; leave them out"
        )


def check_capture(engine: Engine, captured: list) -> None:
    """Raise if a CUDA graph cannot record a step; keeps what its replays read in ``captured``."""
    options = engine.targets.options
    if not options.capturable:
        raise RuntimeError(
            "capturable must be True to capture step() in a CUDA graph, got False: replays would "
            f"repeat the scalars of the capture; create {options.name}(capturable=True), or with "
            f"quantized parameters {CAPTURE_AROUND}"
        )
    if engine.clipping:
        raise RuntimeError(
            "clipping must not be pending while a step is captured, got a clip_grad_norm_ "
            "before it: every replay would multiply by that coefficient; capture "
            "torch.nn.utils.clip_grad_norm_, which scales the gradients"
        )
    for group, _ in engine.groups:
        if not is_on_device(group["lr"]):
            raise RuntimeError(
                "lr must be a tensor on the GPU while a step is captured, got "
                f"{group['lr']!r}: replays would repeat this number; run one step outside the "
                'graph first, which makes it one, then change it with group["lr"].fill_()'
            )
    plan = engine.plan
    if not (plan is not None and plan.has_run and engine.has_fitting_plan()):
        raise RuntimeError(
            "a captured step must be like the last one outside the graph, got a first step, "
            "or one with other parameters, states or gradients: these need new memory and "
            "kernels; run one step outside the graph right before the capture"
        )
    # Graphs outlive plans, and nothing tells when one is gone.
    if not any(memory is plan.memory_of_replays for memory in captured):
        captured.append(plan.memory_of_replays)


def put_rates_on_devices(engine: Engine) -> None:
    """Make learning rates tensors that replays can read, as Transformer Engine does."""
    for group, params in engine.groups:
        lr = group["lr"]
        if isinstance(lr, Tensor) and not is_on_device(lr):
            raise ValueError(
                "lr must be a number or a tensor on the GPU with capturable=True, got a tensor "
                f"on {lr.device}, which a replay cannot read; move it, or pass a number"
            )
        if not isinstance(lr, Tensor) and params:
            # Float64, because it holds the number itself.
            group["lr"] = torch.tensor(float(lr), dtype=torch.float64).to(params[0].device)
