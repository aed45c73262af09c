"""Chooses the implementation for a tensor: Triton kernels on a GPU, torch operators elsewhere."""

import torch
from torch import Tensor

# Elements per thread in a CPU chunk: few enough that the float32 tensors of an operator stay in a
# core's cache, many enough to outweigh the cost of starting the operator.
PER_THREAD = 2**18


def uses_kernels(device: torch.device) -> bool:
    """Whether tensors on ``device`` are handled by ``fp4adam.kernels`` (same bits either way)."""
    return device.type == "cuda"


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph instead of running its work."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def runs_eagerly(tensor: Tensor) -> bool:
    """Whether no tracer is active, so that a plain function can replace a custom operator."""
    return type(tensor) is Tensor and not torch.compiler.is_compiling()


def cpu_chunk_numel() -> int:
    """Number of elements in a CPU chunk, small enough that intermediates stay in cache."""
    return PER_THREAD * torch.get_num_threads()
