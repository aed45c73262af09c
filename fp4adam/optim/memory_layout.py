"""Memory order and density of strided tensors."""

from torch import Tensor


def memory_order(tensor: Tensor) -> list[int]:
    """The dimensions, sorted from the largest stride to the smallest."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a block of memory without gaps or overlaps, in any order."""
    if not tensor.numel():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
