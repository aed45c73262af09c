"""Where tensors lie and how often they have been written, as a plan compares it at each step.

Counters that a tensor class keeps can be gone around (``swap_tensors``, ``.data``, ``set_``), so
nothing is concluded from them: everything is read from the tensors again. Notes keep no memory
alive, or ``model.cpu()`` would not free any.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# Builtins, which map() calls without a Python frame.
data_ptr = torch._C.TensorBase.data_ptr
_is_contiguous = torch._C.TensorBase.is_contiguous
_numel = torch._C.TensorBase.numel
_stride = torch._C.TensorBase.stride
_shape = attrgetter("shape")
_dtype = attrgetter("dtype")

# The address of what owns a tensor's memory. ``.data = new`` changes it, and no version.
storage_address = torch._C._storage_address
version = attrgetter("_version")


def layout_of(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Addresses, sizes, strides and dtypes of tensors; an address is on one device."""
    dense = list(map(_is_contiguous, tensors))
    # Contiguous ones are read flat, so their number of elements is all that matters of a shape.
    sizes = [list(map(_numel, tensors))]
    if not all(dense):
        sizes = [list(map(_shape, tensors)), list(map(_stride, tensors))]
    return [list(map(data_ptr, tensors)), dense, *sizes, list(map(_dtype, tensors))]


class WriteNote(NamedTuple):
    """Which memory a parameter has, and how often it has been written to.

    Attributes:
        memory: What is equal as long as the memory is the same: an address, or an object.
        versions: Of the tensors that hold the value.
        alive: Keeps the address from being given to another storage, but not its memory.
    """

    memory: object
    versions: tuple[int, ...]
    alive: StorageWeakRef | None = None

    def is_same(self, other: "WriteNote") -> bool:
        """Whether nobody has written or exchanged memory between two notes."""
        return (self.memory, self.versions) == (other.memory, other.versions)
