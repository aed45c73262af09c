"""Addresses and versions of tensors, which a plan compares at every step.

Counters kept by a tensor class can be bypassed (``swap_tensors``, ``.data``, ``set_``), so every
step reads the tensors themselves again. Notes keep no memory alive; otherwise ``model.cpu()``
would free none.
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
# Whether the storage object at an address, to which there is a weak reference, has lost its memory.
# While it has not, no other memory has its addresses: a tensor at its old address is where it was,
# and not in new memory that was put in by ``.data = new``, which changes no version.
is_freed = torch.UntypedStorage._expired
version = attrgetter("_version")


def are_laid_out_as(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that checks in one call whether its arguments have the layouts of ``tensors``.

    It takes as many tensors, and compares shapes, strides, dtypes and devices with torch.compile's
    guards.
    """
    guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return guards.check


class WriteNote(NamedTuple):
    """The memory of a parameter, and how often it has been written.

    Attributes:
        memory: Identifies the memory: an object, or the address of a storage with the place and
            the layout in it.
        versions: Versions of the tensors that hold the value.
        alive: Keeps that address from being reused, without keeping the memory itself.
    """

    memory: object
    versions: tuple[int, ...]
    alive: StorageWeakRef | None = None

    def is_same(self, other: "WriteNote") -> bool:
        """Whether the memory is neither written nor replaced between two notes."""
        return (self.memory, self.versions) == (other.memory, other.versions)
