"""How much of a tensor a CPU works on at a time, so that what is in between stays in its cache."""

import torch

# The few float32 tensors that an operator reads and writes stay near a core, and it works longer on
# them than it takes to start.
PER_THREAD = 2**17


def numel() -> int:
    """Elements of one piece."""
    return PER_THREAD * torch.get_num_threads()
