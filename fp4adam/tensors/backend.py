"""Chooses the implementation for a tensor: Triton kernels on a GPU, torch operators elsewhere."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def uses_kernels(device: torch.device) -> bool:
    """Whether tensors on ``device`` are handled by ``fp4adam.kernels`` (same bits either way)."""
    return device.type == "cuda" and _runs_kernels(device.index)


@functools.lru_cache
def _runs_kernels(index: int | None) -> bool:
    """Whether kernels run on a GPU; warns once of what is missing."""
    missing = why_no_kernels(index)
    if missing is not None:
        warnings.warn(
            f"torch operators take the place of fp4adam's kernels, in many times their time: "
            f"{missing}",
            stacklevel=3,
        )
    return missing is None


# All that torch.compiler.assume_constant_result does, which imports torch._dynamo first.
_runs_kernels._dynamo_marked_constant = True


def why_no_kernels(index: int | None) -> str | None:
    """Why kernels cannot run on this device of torch's type "cuda", and what to do, or None."""
    if torch.version.hip is not None:
        return "they have assembly of NVIDIA GPUs, and this is torch for ROCm; nothing can be done"
    if not torch.cuda.is_available():
        return None  # of fake tensors
    capability = torch.cuda.get_device_capability(index)
    if capability < (7, 5):
        return "they need compute capability 7.5, and this GPU has {}.{}".format(*capability)
    try:
        import triton

        # Compiles what talks to the driver, unless an earlier process has.
        triton.runtime.driver.active.get_current_device()
    except ImportError as error:
        return f"they need Triton, got: {error}; pip install triton, on Windows triton-windows"
    except Exception as error:  # whatever a compiler or driver raises
        return f"Triton cannot start ({error}); install a C compiler (gcc) or name one by CC"
    return None


def check_device(device: torch.device) -> None:
    """Raise NotImplementedError for a device whose operators cannot give the right bits."""
    if device.type == "mps":
        raise NotImplementedError(
            "quantized tensors must not be on mps, got one: its operators have no float64, in "
            "which some sums and scalars are exact; use the CPU"
        )


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph instead of running its work."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def runs_eagerly(tensor: Tensor) -> bool:
    """Whether no tracer is active, so that a plain function can replace a custom operator."""
    return type(tensor) is Tensor and not torch.compiler.is_compiling()


_OPERATORS = torch.library.Library("fp4adam", "FRAGMENT")


def operator(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` as an operator of compiled graphs, without gradients; ``fake`` returns empty results.

    A call of what ``torch.library.custom_op`` makes takes 20 to 45 us longer.
    """
    schema = torch.library.infer_schema(run, mutates_args=())
    tags = torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order
    _OPERATORS.define(name + schema, tags=tags)
    _OPERATORS.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp4adam::{name}", fake, lib=_OPERATORS)
    return getattr(torch.ops.fp4adam, name).default
