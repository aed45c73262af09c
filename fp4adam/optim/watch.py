"""Detects foreign changes to the tensors of a step, by reading them again at every step."""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import is_dtensor, local
from fp4adam.interop.borrowed_tensor import BorrowedTensor
from fp4adam.optim.memory_note import (
    WriteNote,
    are_laid_out_as,
    data_ptr,
    is_freed,
    version,
)
from fp4adam.optim.param_state import ParamState
from fp4adam.tensors.quantized_tensor import QuantizedTensor

_local = attrgetter("_local_tensor")
_storage = attrgetter("_shared.tensors")
_local_storage = attrgetter("_local_tensor._shared.tensors")
_versioned = attrgetter("versioned")
_counter = attrgetter("_shared.tensors.counter")
_local_counter = attrgetter("_local_tensor._shared.tensors.counter")
# The C slot itself, so that map() calls it without a Python frame.
_deref = weakref.ref.__call__


class Watch:
    """Tells whether parameters or states have moved, or been written by other code.

    The tensors must be where the kernels look for them. Writes matter only to parameters that have
    to agree with a master or a remainder: one that Adam updates directly is its own value, so
    whatever other code has written is what it continues from.

    Args:
        members: The parameters of a plan.
        more_names: Names of state tensors that the kernels use besides ``state_names``.
    """

    def __init__(self, members: Sequence[ParamState], more_names: tuple[str, ...] = ()) -> None:
        self._members = members
        self._borrowed = [m.borrowed for m in members if m.borrowed is not None]
        self._lenders = [m.owner for m in members if m.borrowed is not None]
        # One list per way of reading a parameter's tensors.
        own = [m.owner for m in members if m.borrowed is None]
        self._quantized, self._quantized_shards, self._plain, self._sharded = (
            [p for p in own if isinstance(local(p), QuantizedTensor) == q and (local(p) is p) == w]
            for q, w in ((True, True), (True, False), (False, True), (False, False))
        )
        # Those whose writes matter, besides quantized parameters.
        views = {m.owner: m.view for m in members if m.view.has_master or m.view.has_remainder}
        self._noted_shards = [p for p in self._sharded if p in views]
        self._noted = [*(p for p in self._plain if p in views), *self._noted_shards]
        self._notes = [views[p].note() for p in self._noted]
        self._blocks = [note.alive.cdata for note in self._notes]
        states: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
        for m in members:
            states[is_dtensor(m.owner), (*m.state_names, *more_names)].append(m.state)
        self._states = [
            (is_sharded, itemgetter(*names), alike) for (is_sharded, names), alike in states.items()
        ]
        self._present: list[bool] = []
        self._let_go()
        storages = [local(p)._shared.tensors for p in (*self._quantized, *self._quantized_shards)]
        self._storages = [weakref.ref(storage) for storage in storages]
        self._counts = [len(storage.versioned) for storage in storages]
        # A counter belongs to one storage and holds no memory. So keeping the counters themselves
        # tells storages apart, in less time than weak references to these. Storages that have had
        # an inner tensor exchanged have none.
        counters = [storage.counter for storage in storages]
        self._has_loose = any(counter is None for counter in counters)
        self._known_counters = [] if self._has_loose else counters
        self._read()
        self._have_known_layouts = are_laid_out_as(self._tensors)
        self._addresses = self._read_addresses()
        self._versions = self._read_versions()
        self._let_go()

    def _read(self) -> None:
        """Read the tensors of all parameters and states."""
        self._tensors = [*self._plain, *map(_local, self._sharded)]
        for is_sharded, getter, states in self._states:
            values = chain.from_iterable(map(getter, states))
            self._tensors += map(local, values) if is_sharded else values
        if self._has_loose:
            self._now = list(map(_storage, self._quantized))
            self._now += map(_local_storage, self._quantized_shards)
            self._counters = list(chain.from_iterable(map(_versioned, self._now)))
            # Inner tensors with versions of their own may get new memory without a new version.
            self._loose = self._counters
        else:
            self._counters = list(map(_counter, self._quantized))
            self._counters += map(_local_counter, self._quantized_shards)

    def _let_go(self) -> None:
        """Drop the tensors that were read, so that the watch keeps no memory alive."""
        self._tensors: list[Tensor] = []
        self._now = self._counters = self._loose = []

    def _read_addresses(self) -> list[int]:
        return list(map(data_ptr, chain(self._tensors, self._loose)))

    def _read_versions(self) -> list[int]:
        # An operation on a DTensor raises its own version, but not the local tensor's.
        shards = map(_local, self._noted_shards)
        return list(map(version, chain(self._noted, shards, self._counters)))

    def is_unchanged(self) -> bool:
        """Read everything again; True if it is as the optimizer's last write left it."""
        try:
            self._read()
            if (
                self._has_known_storages()
                and self._read_versions() == self._versions
                and self._read_addresses() == self._addresses
                and not any(map(is_freed, self._blocks))
                # Inner tensors need no check: their format fixes their layouts, and exchanging one
                # replaces the storage.
                and self._have_known_layouts(*self._tensors)
                and all(map(BorrowedTensor.is_current, self._borrowed, map(local, self._lenders)))
            ):
                return True
        except (KeyError, AttributeError, RuntimeError, TypeError):
            pass  # a state is gone, a parameter changed its class, or a tensor has no address
        self._let_go()
        return False

    def _has_known_storages(self) -> bool:
        if self._has_loose:
            return all(map(is_, self._now, map(_deref, self._storages)))
        return all(map(is_, self._counters, self._known_counters))

    def note_own_write(self, present: list[bool]) -> None:
        """Raise the versions of what the kernels wrote, and record them as the optimizer's own.

        Call it after :meth:`is_unchanged`, whose tensors it uses.

        Args:
            present: Which members were stepped. Pass the same list object while this is unchanged.
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
            written = [
                owner in owners
                for owner, count in zip(quantized, self._counts, strict=True)
                for _ in range(count)
            ]
            self._written += compress(self._known_counters, written)
            self._written_loose = written if self._has_loose else []
        loose = compress(self._loose, self._written_loose)
        torch.autograd.graph.increment_version([*self._written, *loose])
        for borrowed in self._borrowed:
            borrowed.note()
        self._versions = self._read_versions()
        self._let_go()

    def notes(self) -> dict[Tensor, WriteNote]:
        """The memory and versions of parameters, as the optimizer's last write left them.

        Those that Adam updates directly have none.
        """
        n, versions = len(self._noted), self._versions
        n_plain, notes = n - len(self._noted_shards), {}
        for i, (owner, note) in enumerate(zip(self._noted, self._notes, strict=True)):
            held = (versions[i],) if i < n_plain else (versions[i], versions[n + i - n_plain])
            notes[owner] = note._replace(versions=held)
        first = n + len(self._noted_shards)
        quantized = (*self._quantized, *self._quantized_shards)
        for owner, storage, count in zip(quantized, self._storages, self._counts, strict=True):
            notes[owner] = WriteNote(storage, tuple(versions[first : first + count]))
            first += count
        notes |= {m.owner: m.view.note() for m in self._members if m.borrowed is not None}
        return notes
