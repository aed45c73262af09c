"""Which implementation serves a device: Triton kernels on a GPU, torch operators elsewhere."""

import torch
from torch import Tensor


def uses_kernels(device: torch.device) -> bool:
    """Whether tensors on ``device`` are handled by ``fp4adam.kernels`` (same bits either way)."""
    return device.type == "cuda"


def runs_eagerly(tensor: Tensor) -> bool:
    """Whether nobody traces what is done to a tensor: then a function is as good as an operator."""
    return type(tensor) is Tensor and not torch.compiler.is_compiling()
