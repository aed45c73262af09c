"""The tensors behind the parameters of a step, read from parameters and states at every step."""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fp4adam.distributed.dtensor import is_dtensor, local
from fp4adam.optim.memory_note import (
    WriteNote,
    are_laid_out_as,
    data_ptr,
    storage_address,
    version,
)
from fp4adam.optim.param_state import ParamState
from fp4adam.tensors.quantized_tensor import QuantizedTensor

_local = attrgetter("_local_tensor")
_storage = attrgetter("_shared.tensors")
_local_storage = attrgetter("_local_tensor._shared.tensors")
_versioned = attrgetter("versioned")
_is_current = methodcaller("is_current")
# The slot itself, which map() calls without a Python frame.
_deref = weakref.ref.__call__


class Watch:
    """Whether parameters and states are where they were, and whether others have written to them.

    Args:
        members: The parameters of a plan.
    """

    def __init__(self, members: Sequence[ParamState]) -> None:
        self._members = members
        self._borrowed = [m.borrowed for m in members if m.borrowed is not None]
        # Which list a parameter is in decides how its tensors are read.
        own = [m.owner for m in members if m.borrowed is None]
        self._quantized, self._quantized_shards, self._plain, self._sharded = (
            [p for p in own if isinstance(local(p), QuantizedTensor) == q and (local(p) is p) == w]
            for q, w in ((True, True), (True, False), (False, True), (False, False))
        )
        states: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
        for m in members:
            states[is_dtensor(m.owner), m.state_names].append(m.state)
        self._states = [
            (is_sharded, itemgetter(*names), alike) for (is_sharded, names), alike in states.items()
        ]
        self._present: list[bool] = []
        storages = [local(p)._shared.tensors for p in (*self._quantized, *self._quantized_shards)]
        self._has_loose = any(storage.counter is None for storage in storages)
        self._read()
        self._have_known_layouts = are_laid_out_as([*self._params, *self._values])
        self._addresses = self._read_addresses()
        self._blocks = list(map(storage_address, self._params))
        # So that no other storage gets the address of one that is gone.
        self._alive = [StorageWeakRef(param.untyped_storage()) for param in self._params]
        self._storages = [weakref.ref(storage) for storage in self._now]
        self._counts = [len(storage.versioned) for storage in self._now]
        self._versions = self._read_versions()
        self._let_go()

    def _read(self) -> None:
        """Read the tensors of all parameters and states."""
        self._params = [*self._plain, *map(_local, self._sharded)]
        self._now = list(map(_storage, self._quantized))
        self._now += map(_local_storage, self._quantized_shards)
        self._counters = list(chain.from_iterable(map(_versioned, self._now)))
        # Inner tensors that count for themselves can be given other memory behind our back.
        self._loose = self._counters if self._has_loose else []
        self._values: list[Tensor] = []
        for is_sharded, getter, states in self._states:
            values = chain.from_iterable(map(getter, states))
            self._values += map(local, values) if is_sharded else values

    def _let_go(self) -> None:
        """Drop what has been read: nobody else may hold it any more when it is next asked for."""
        self._params, self._now, self._values = [], [], []
        self._counters = self._loose = []

    def _read_addresses(self) -> list[int]:
        return list(map(data_ptr, chain(self._params, self._values, self._loose)))

    def _read_versions(self) -> list[int]:
        return list(map(version, chain(self._params, self._sharded, self._counters)))

    def is_unchanged(self) -> bool:
        """Read everything again; True if it is as the last own write has left it."""
        try:
            self._read()
            if (
                all(map(is_, self._now, map(_deref, self._storages)))
                and self._read_versions() == self._versions
                and self._read_addresses() == self._addresses
                and list(map(storage_address, self._params)) == self._blocks
                # Inner tensors have the layouts of their format, unless someone exchanges them,
                # which makes another storage of them.
                and self._have_known_layouts(*self._params, *self._values)
                and all(map(_is_current, self._borrowed))
            ):
                return True
        except (KeyError, AttributeError, RuntimeError, TypeError):
            pass  # a state is gone, a parameter is of another kind, or something has no address
        self._let_go()
        return False

    def note_own_write(self, present: list[bool]) -> None:
        """Raise the versions of what kernels have written, and take them for the optimizer's own.

        Follows :meth:`is_unchanged`, whose reading it goes on from.

        Args:
            present: Which members have been stepped; a new list if they are others.
        """
        if present is not self._present:
            self._present = present
            stepped = [*compress(self._members, present)]
            self._written = [m.owner for m in stepped]
            self._written += [m.param for m in stepped if m.param is not m.owner]
            self._written += chain.from_iterable(
                m.param._shared.tensors.versioned for m in stepped if m.borrowed is not None
            )
            owners = {m.owner for m in stepped}
            quantized = (*self._quantized, *self._quantized_shards)
            self._written_counters = [
                owner in owners
                for owner, count in zip(quantized, self._counts, strict=True)
                for _ in range(count)
            ]
        counters = compress(self._counters, self._written_counters)
        torch.autograd.graph.increment_version([*self._written, *counters])
        for borrowed in self._borrowed:
            borrowed.note()
        self._versions = self._read_versions()
        self._let_go()

    def notes(self) -> dict[Tensor, WriteNote]:
        """For each parameter how the last own write has left it."""
        n, versions = len(self._blocks), self._versions
        notes = {}
        for i, owner in enumerate((*self._plain, *self._sharded)):
            number = i - len(self._plain)
            held = (versions[i],) if number < 0 else (versions[n + number], versions[i])
            notes[owner] = WriteNote(self._blocks[i], held, self._alive[i])
        first = n + len(self._sharded)
        quantized = (*self._quantized, *self._quantized_shards)
        for owner, storage, count in zip(quantized, self._storages, self._counts, strict=True):
            notes[owner] = WriteNote(storage, tuple(versions[first : first + count]))
            first += count
        notes |= {m.owner: m.view.note() for m in self._members if m.borrowed is not None}
        return notes
