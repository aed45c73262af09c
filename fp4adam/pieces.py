"""How much of a tensor a CPU works on at a time, so that what is in between stays in its cache."""

import torch

# Per thread: two or three such float32 tensors fill a core's cache, and an operator works longer on
# one than it takes to start.
PER_THREAD = 2**16


def numel() -> int:
    """Elements of one piece."""
    return PER_THREAD * torch.get_num_threads()
