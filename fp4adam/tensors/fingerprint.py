"""Has somebody else written or moved these tensors? Read them again, all at once.

Counters can be bypassed (``swap_tensors``, ``.data``, ``set_``), so the tensors are read, thousands
of them without a Python frame each. Nothing here keeps the memory of weights alive.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.multiprocessing.reductions import StorageWeakRef

from fp4adam.tensors.quantized_tensor import QuantizedTensor

# Builtins, which map() calls without a Python frame.
data_ptr = torch._C.TensorBase.data_ptr
version = attrgetter("_version")
# Whether the storage at an address has lost its memory. While it has not, a tensor at its old
# address is where it was, and not in memory put in by ``.data = new``, which changes no version.
_is_freed = torch.UntypedStorage._expired


def are_laid_out_as(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A check of as many tensors: their shapes, strides, dtypes and devices are those of these."""
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


# The versions that were recorded last; each None while they are invalid.
Versions = list[int | None]


class Mark:
    """The memory of one tensor, and how often it had been written.

    ``memory`` identifies it: an object, or the address of a storage, which ``alive`` keeps from
    being reused, with the layout in it. The versions of ``versioned`` cover all writes.
    """

    def __init__(
        self, memory: object, versioned: Iterable[Tensor], alive: StorageWeakRef | None = None
    ) -> None:
        self.memory, self.alive = memory, alive
        values = list(map(version, versioned))
        self.follow(values, range(len(values)))

    @classmethod
    def of(cls, tensor: Tensor, owner: Tensor | None = None) -> "Mark":
        """The mark of a plain or quantized tensor; ``owner`` may be its DTensor."""
        if isinstance(tensor, QuantizedTensor):
            return cls(weakref.ref(tensor.inner), tensor.inner.versioned)
        # An operation on a DTensor raises its own version, but not the local tensor's.
        held = (tensor,) if owner is None or owner is tensor else (owner, tensor)
        alive = StorageWeakRef(tensor.untyped_storage())
        layout = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        return cls((alive.cdata, *layout), held, alive)

    def follow(self, recorded: Versions, indices: Sequence[int]) -> None:
        """Take the versions from a fingerprint from now on."""
        self._recorded, self._indices = recorded, indices

    def _versions(self) -> Versions:
        return [self._recorded[i] for i in self._indices]

    def is_same(self, other: "Mark | None") -> bool:
        """Whether the memory is neither written nor replaced between two marks, one of them new."""
        is_there = other is not None and self.memory == other.memory
        return is_there and self._versions() == other._versions()


class Column(NamedTuple):
    """Tensors that are read in the same way."""

    objects: list[Any]  # where they are read from
    read: Callable[[Any], Any] | None = None  # a C function of an object; None for objects alone
    chained: bool = False  # whether it returns several tensors
    then: Callable[[Any], Any] | None = None  # a function of each tensor that is read
    same: bool = False  # whether they have to stay the same objects, which are kept alive,
    placed: bool = False  # to keep their memory, and if they may be others, the layout,
    versioned: bool = False  # or not to be written


class Fingerprint:
    """What the tensors of these columns were like when it was recorded."""

    def __init__(self, columns: Iterable[Column]) -> None:
        self._columns = list(columns)
        self._known, placed, versioned, kept, laid_out = self._read()
        self._addresses = list(map(data_ptr, placed))
        self._have_known_layouts = are_laid_out_as(laid_out)
        self._alive = [StorageWeakRef(x.untyped_storage()) for x in kept]
        self._blocks = [storage.cdata for storage in self._alive]
        self.versions: Versions = [*map(version, versioned)]

    def _read(self) -> tuple[list[Any], ...]:
        """What has to stay the same, in place, unwritten, both of the latter, or laid out alike."""
        found: tuple[list[Any], ...] = [], [], [], [], []
        for objects, read, chained, then, same, placed, versioned in self._columns:
            values = objects if read is None else map(read, objects)
            values = chain.from_iterable(values) if chained else values
            values = list(values if then is None else map(then, values))
            wanted = same, placed, versioned, placed and versioned, placed and not same
            for values_of_kind in compress(found, wanted):
                values_of_kind += values
        return found

    def unchanged(self) -> bool:
        """Read everything again; True if it is as :meth:`record` found it."""
        try:
            same, placed, versioned, _, laid_out = self._read()
            unchanged = (
                len(same) == len(self._known)
                and all(map(is_, same, self._known))
                and list(map(data_ptr, placed)) == self._addresses
                and not any(map(_is_freed, self._blocks))
                and self._have_known_layouts(*laid_out)
                and list(map(version, versioned)) == self.versions
            )
        except (KeyError, AttributeError, RuntimeError, TypeError):
            return False  # a tensor is gone, has changed its class, or has no address
        self._unrecorded = map(version, versioned if unchanged else ())
        return unchanged

    def invalidate(self) -> None:
        """Drop what is recorded, before a write that may be interrupted."""
        self.versions[:] = [None] * max(1, len(self.versions))  # equal to no versions at all

    def record(self) -> None:
        """Record the versions of the tensors that were read last, and let go of them."""
        self.versions[:] = self._unrecorded  # an iterator, which drops its list at the end

    def spans(self) -> list[list[range]]:
        """Per column and object, the indices of its versions; empty for other columns."""
        found, first = [], 0
        for objects, read, chained, _, _, _, versioned in self._columns:
            spans = []
            for each in objects if versioned else ():
                count = len(read(each)) if chained else 1
                spans.append(range(first, first + count))
                first += count
            found.append(spans)
        return found
