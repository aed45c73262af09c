"""Which implementation serves a tensor: Triton kernels on a GPU, torch operators elsewhere."""

import torch
from torch import Tensor

# Elements per thread that a CPU works on at a time: the few float32 tensors that an operator reads
# and writes stay in a core's cache, and the work takes longer than starting it.
PER_THREAD = 2**17


def uses_kernels(device: torch.device) -> bool:
    """Whether tensors on ``device`` are handled by ``fp4adam.kernels`` (same bits either way)."""
    return device.type == "cuda"


def runs_eagerly(tensor: Tensor) -> bool:
    """Whether nothing traces operations: then a function can replace a custom operator."""
    return type(tensor) is Tensor and not torch.compiler.is_compiling()


def cpu_chunk_numel() -> int:
    """Number of elements that a CPU works on at a time, so that intermediates stay in its cache."""
    return PER_THREAD * torch.get_num_threads()
