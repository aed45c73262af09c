"""Has somebody else written or moved these tensors? Read them again, all at once.

Counters kept by a tensor class can be bypassed (``swap_tensors``, ``.data``, ``set_``), so the
tensors themselves are read, thousands of them without a Python frame each. Nothing here keeps the
memory of weights alive; otherwise ``model.cpu()`` would free none.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
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
# Whether the storage object at an address, to which there is a weak reference, has lost its memory.
# While it has not, no other memory has its addresses: a tensor at its old address is where it was,
# and not in new memory that was put in by ``.data = new``, which changes no version.
_is_freed = torch.UntypedStorage._expired


def are_laid_out_as(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that checks in one call whether its arguments have the layouts of ``tensors``.

    It takes as many tensors, and compares shapes, strides, dtypes and devices with torch.compile's
    guards.
    """
    guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return guards.check


class Mark:
    """The memory of one tensor, and how often it had been written.

    Args:
        memory: Identifies the memory: an object, or the address of a storage with the place and
            the layout in it.
        versioned: The tensors whose versions cover all writes.
        alive: Keeps that address from being reused, without keeping the memory itself.
    """

    def __init__(
        self, memory: object, versioned: Iterable[Tensor], alive: StorageWeakRef | None = None
    ) -> None:
        self.memory, self.alive = memory, alive
        self._versions = tuple(map(version, versioned))
        self._source: tuple[Versions, tuple[int, ...]] | None = None

    @classmethod
    def of(cls, tensor: Tensor, owner: Tensor | None = None) -> "Mark":
        """The mark of a plain or quantized tensor; ``owner`` may be its DTensor."""
        if isinstance(tensor, QuantizedTensor):
            storage = tensor.inner
            return cls(weakref.ref(storage), storage.versioned)
        # An operation on a DTensor raises its own version, but not the local tensor's.
        held = (tensor,) if owner is None or owner is tensor else (owner, tensor)
        alive = StorageWeakRef(tensor.untyped_storage())
        layout = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        return cls((alive.cdata, *layout), held, alive)

    @property
    def versions(self) -> tuple[int, ...] | None:
        """The recorded versions; None while a fingerprint that it follows has none."""
        if self._source is None:
            return self._versions
        recorded, indices = self._source
        return recorded.values and tuple(recorded.values[i] for i in indices)

    def follow(self, recorded: "Versions", indices: Sequence[int]) -> None:
        """Take the versions from a fingerprint from now on."""
        self._source = recorded, tuple(indices)

    def is_same(self, other: "Mark | None") -> bool:
        """Whether the memory is neither written nor replaced between two marks."""
        return (
            other is not None
            and self.memory == other.memory
            and self.versions is not None
            and self.versions == other.versions
        )


class Versions:
    """The versions that a fingerprint has recorded last; None while it is invalid."""

    values: list[int] | None = None


class Column(NamedTuple):
    """Tensors that are read in the same way.

    Attributes:
        objects: Where they are read from.
        read: The C function that reads one object; None for the objects themselves.
        chained: Whether ``read`` returns several tensors.
        then: A function of each tensor that is read, or None.
        same: Whether they have to stay the same objects.
        placed: Whether they have to keep memory and layout.
        versioned: Whether they must not be written.
    """

    objects: list[Any]
    read: Callable[[Any], Any] | None = None
    chained: bool = False
    then: Callable[[Any], Any] | None = None
    same: bool = False
    placed: bool = False
    versioned: bool = False


class Fingerprint:
    """What many tensors were like when it was recorded.

    Args:
        columns: How to read them.
    """

    def __init__(self, columns: Iterable[Column]) -> None:
        self._columns = list(columns)
        self.versions = Versions()
        self._read()
        self._known = self._same
        self._addresses = list(map(data_ptr, self._placed))
        self._have_known_layouts = are_laid_out_as(self._placed)
        self._alive = [StorageWeakRef(x.untyped_storage()) for x in self._kept]
        self._blocks = [storage.cdata for storage in self._alive]
        self.record()

    def _read(self) -> None:
        self._same, self._placed, self._versioned, self._kept = [], [], [], []
        for objects, read, chained, then, same, placed, versioned in self._columns:
            if not objects:
                continue
            values = objects if read is None else map(read, objects)
            values = chain.from_iterable(values) if chained else values
            values = list(values if then is None else map(then, values))
            if same:
                self._same += values
            if placed:
                self._placed += values
            if versioned:
                self._versioned += values
            if placed and versioned:
                self._kept += values

    def _let_go(self) -> None:
        self._same = self._placed = self._versioned = self._kept = []

    def unchanged(self) -> bool:
        """Read everything again; True if it is as :meth:`record` found it."""
        return self.is_in_place() and self._has_versions()

    def is_in_place(self) -> bool:
        """Read everything again; True if objects and memory are the same, written or not."""
        try:
            self._read()
            if (
                len(self._same) == len(self._known)
                and all(map(is_, self._same, self._known))
                and list(map(data_ptr, self._placed)) == self._addresses
                and not any(map(_is_freed, self._blocks))
                and self._have_known_layouts(*self._placed)
            ):
                return True
        except (KeyError, AttributeError, RuntimeError, TypeError):
            pass  # a tensor is gone, has changed its class, or has no address
        self._let_go()
        return False

    def _has_versions(self) -> bool:
        if list(map(version, self._versioned)) == self.versions.values:
            return True
        self._let_go()
        return False

    def changed(self) -> list[bool]:
        """Per version, whether it differs from the recorded one; right after they were read."""
        values = zip(map(version, self._versioned), self.versions.values, strict=True)
        return [now != then for now, then in values]

    def invalidate(self) -> None:
        """Drop what is recorded, before a write that may be interrupted."""
        self.versions.values = None

    def record(self) -> None:
        """Record the versions of the tensors that were read last."""
        self.versions.values = list(map(version, self._versioned))
        self._let_go()

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
