"""Which implementation serves a device: Triton kernels on a GPU, torch operators elsewhere."""

import torch


def uses_kernels(device: torch.device) -> bool:
    """Whether tensors on ``device`` are handled by ``fp4adam.kernels`` (same bits either way)."""
    return device.type == "cuda"
