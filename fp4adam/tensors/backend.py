"""Which implementation serves a tensor: Triton kernels on a GPU, torch operators elsewhere."""

import torch
from torch import Tensor

# A CPU works on so many elements per thread at a time: the few float32 tensors that an operator
# reads and writes stay near a core, and it works longer on them than it takes to start.
PER_THREAD = 2**17


def uses_kernels(device: torch.device) -> bool:
    """Whether tensors on ``device`` are handled by ``fp4adam.kernels`` (same bits either way)."""
    return device.type == "cuda"


def runs_eagerly(tensor: Tensor) -> bool:
    """Whether nobody traces what is done to a tensor: then a function is as good as an operator."""
    return type(tensor) is Tensor and not torch.compiler.is_compiling()


def cpu_chunk_numel() -> int:
    """How many elements a CPU works on at a time, so that what is in between stays in its cache."""
    return PER_THREAD * torch.get_num_threads()
