"""Where tensors lie and how often they have been written, as a plan compares it at each step.

Counters that a tensor class keeps can be gone around (``swap_tensors``, ``.data``, ``set_``), so
nothing is concluded from them: everything is read from the tensors again. Notes keep no memory
alive, or ``model.cpu()`` would not free any.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.multiprocessing.reductions import StorageWeakRef

# Builtins, which map() calls without a Python frame.
data_ptr = torch._C.TensorBase.data_ptr
# The address of what owns a tensor's memory. ``.data = new`` changes it, and no version.
storage_address = torch._C._storage_address
version = attrgetter("_version")


def are_laid_out_as(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Tells of as many tensors, in one call, whether they have the same layouts as ``tensors``.

    These are their shapes, strides, dtypes and devices, as the guards of torch.compile check them.
    """
    guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return guards.check


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
