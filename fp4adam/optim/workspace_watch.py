"""Detects writes to weights and to their quantized copies, by reading all of them at once."""

from collections.abc import Hashable
from itertools import accumulate, chain
from operator import attrgetter, is_, itemgetter

from torch import Tensor

from fp4adam.interop.adapter import is_foreign
from fp4adam.interop.borrowed_tensor import BorrowedTensor, borrow, source_columns
from fp4adam.interop.transformer_engine import Workspace
from fp4adam.tensors.fingerprint import Column, Fingerprint, Mark
from fp4adam.tensors.quantized_tensor import QuantizedTensor

_weights = itemgetter(0)
_copy = itemgetter(1)
_storage = attrgetter("_shared.tensors")
_versioned = attrgetter("_shared.tensors.versioned")
_pending = attrgetter("_shared.pending")


class WorkspaceWatch:
    """The fingerprint of workspaces: which of them have been written?

    It keeps the memory of copies alive, but not that of weights.

    Args:
        workspaces: The copies, which fit their weights.
        before: The watch whose versions hold for workspaces on the same memory, if any.

    Attributes:
        targets: What to write to, per workspace.
        gpus: The GPUs that these are on.
    """

    def __init__(self, workspaces: list[Workspace], before: "WorkspaceWatch | None") -> None:
        self._copies = list(map(_copy, workspaces))
        self.targets = [borrow(x) if is_foreign(x) else x.flush() for x in self._copies]
        self.gpus = {x.device for x in self._copies if x.is_cuda}
        self._counts = [len(each.weights) for each in workspaces]
        self._weights = _read(workspaces)
        own = [i for i, x in enumerate(self.targets) if isinstance(x, QuantizedTensor)]
        borrowed = [i for i, x in enumerate(self.targets) if isinstance(x, BorrowedTensor)]
        tensors = [self.targets[i] for i in own]
        workspace_of_weight = chain.from_iterable([i] * n for i, n in enumerate(self._counts))
        columns = [
            (Column(self._weights, placed=True, versioned=True), [*workspace_of_weight]),
            (Column(tensors, _versioned, chained=True, versioned=True), own),
            (Column(tensors, _storage, same=True), own),
            (Column(tensors, _pending, same=True), own),
        ]
        pairs = [(self.targets[i], self._copies[i]) for i in borrowed]
        columns += [(c, [borrowed[i] for i in which]) for c, which in source_columns(pairs)]
        self._fingerprint = Fingerprint([column for column, _ in columns])
        # Per workspace the indices of its versions.
        self._indices: list[list[int]] = [[] for _ in workspaces]
        for (_, which), spans in zip(columns, self._fingerprint.spans(), strict=True):
            for i, span in zip(which, spans, strict=False):  # others have no spans
                self._indices[i] += span
        ends = [*accumulate(self._counts)]
        memory = [Mark.of(weight).memory for weight in self._weights]
        self._keys: list[tuple[Hashable, list]] = [
            (x if isinstance(x, BorrowedTensor) else x._shared.tensors, memory[end - n : end])
            for x, n, end in zip(self.targets, self._counts, ends, strict=True)
        ]
        known = {} if before is None else before._recorded()
        values = self._fingerprint.versions.values
        for (key, where), indices in zip(self._keys, self._indices, strict=True):
            memory_before, versions = known.get(key, (None, []))
            if where != memory_before:
                versions = [-1] * len(indices)
            for index, value in zip(indices, versions, strict=True):
                values[index] = value
        self.is_on(workspaces)  # reads what :meth:`written` compares

    def _recorded(self) -> dict[Hashable, tuple[list, list[int]]]:
        """By what is on a copy's memory: the memory of its weights, and the recorded versions."""
        values = self._fingerprint.versions.values
        return {
            key: (where, [values[i] for i in indices])
            for (key, where), indices in zip(self._keys, self._indices, strict=True)
        }

    def is_on(self, workspaces: list[Workspace]) -> bool:
        """Whether these are the same copies of weights in the same memory, written or not."""
        self._weights[:] = _read(workspaces)
        try:
            return (
                [*map(len, map(_weights, workspaces))] == self._counts
                and all(map(is_, map(_copy, workspaces), self._copies))
                and self._fingerprint.is_in_place()
            )
        finally:
            self._weights.clear()

    def written(self) -> list[int]:
        """The workspaces that have been written since :meth:`record`, or whose weight has.

        Call it after :meth:`is_on`.
        """
        changed = self._fingerprint.changed()
        if not any(changed):
            return []
        return [i for i, own in enumerate(self._indices) if any(changed[k] for k in own)]

    def record(self) -> None:
        """Record that the copies are those of their weights now."""
        self._fingerprint.record()


def _read(workspaces: list[Workspace]) -> list[Tensor]:
    return [*chain.from_iterable(map(_weights, workspaces))]
