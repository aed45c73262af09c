"""Detects writes to weights and to their quantized copies, by reading all of them at once."""

from collections.abc import Sequence
from itertools import accumulate, chain
from operator import attrgetter, is_, itemgetter

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fp4adam.interop.adapter import is_foreign
from fp4adam.interop.borrowed_tensor import BorrowedTensor, SourceWatch, borrow
from fp4adam.interop.transformer_engine import Workspace
from fp4adam.optim.memory_note import are_laid_out_as, data_ptr, is_freed, version
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.storage import Storage

_weights = itemgetter(0)
_copy = itemgetter(1)
_storage = attrgetter("_shared.tensors")
_pending = attrgetter("_shared.pending")


class WorkspaceWatch:
    """Tells whether workspaces are the same as before, and which of them have been written.

    It keeps the memory of copies alive, but not that of weights.

    Args:
        workspaces: The copies, which fit their weights.
        before: The watch whose notes hold for workspaces on the same memory, if any.

    Attributes:
        targets: What to write to, per workspace.
        gpus: The GPUs that these are on.
    """

    def __init__(self, workspaces: list[Workspace], before: "WorkspaceWatch | None") -> None:
        self._copies = list(map(_copy, workspaces))
        self.targets = [borrow(x) if is_foreign(x) else x.flush() for x in self._copies]
        self._own = [x for x in self.targets if isinstance(x, QuantizedTensor)]
        self.gpus = {x.device for x in self._copies if x.is_cuda}
        self._storages = list(map(_storage, self._own))
        self._sources = SourceWatch([x for x in self.targets if isinstance(x, BorrowedTensor)])
        parts = [
            (*x.memory, copy) if isinstance(x, BorrowedTensor) else x._shared.tensors.versioned
            for x, copy in zip(self.targets, self._copies, strict=True)
        ]
        self._counts = [len(each.weights) for each in workspaces]
        self._of_weights = _spans(self._counts)
        self._of_parts = _spans([len(each) for each in parts])
        self._parts = [*chain.from_iterable(parts)]
        weights = _read(workspaces)
        self._has_known_layouts = are_laid_out_as(weights)
        self._layouts = [(x.shape, x.stride(), x.dtype) for x in weights]
        self._addresses = list(map(data_ptr, weights))
        # Keeps the addresses of freed storages from being reused.
        self._alive = [StorageWeakRef(weight.untyped_storage()) for weight in weights]
        self._blocks = [storage.cdata for storage in self._alive]
        self._noted_weights, self._noted_parts = [-1] * len(weights), [-1] * len(self._parts)
        known = {} if before is None else before._notes()
        for i, (key, (memory, *_)) in enumerate(self._notes().items()):
            if key in known and known[key][0] == memory:
                _, of_weights, of_parts = known[key]
                self._noted_weights[self._of_weights[i]] = of_weights
                self._noted_parts[self._of_parts[i]] = of_parts

    def _notes(self) -> dict[BorrowedTensor | Storage, tuple[tuple, list[int], list[int]]]:
        """By what is on a copy's memory: the memory of its weights, and the versions of both."""
        keys = [x if isinstance(x, BorrowedTensor) else x._shared.tensors for x in self.targets]
        return {
            key: (
                (self._blocks[of], self._addresses[of], self._layouts[of]),
                self._noted_weights[of],
                self._noted_parts[own],
            )
            for key, of, own in zip(keys, self._of_weights, self._of_parts, strict=True)
        }

    def is_on(self, workspaces: list[Workspace]) -> bool:
        """Whether these are the same copies of weights in the same memory, written or not."""
        try:
            weights = _read(workspaces)
            return (
                [*map(len, map(_weights, workspaces))] == self._counts
                and all(map(is_, map(_copy, workspaces), self._copies))
                and all(map(is_, map(_storage, self._own), self._storages))
                and not any(map(_is_something, map(_pending, self._own)))
                and list(map(data_ptr, weights)) == self._addresses
                and not any(map(is_freed, self._blocks))
                and self._has_known_layouts(*weights)
                and self._sources.is_on()
            )
        except (AttributeError, RuntimeError, TypeError):
            return False  # a tensor has changed its class, or has no address

    def written(self, workspaces: list[Workspace]) -> list[int]:
        """The workspaces that have been written since :meth:`note`, or whose weight has."""
        weights, parts = self._versions(workspaces)
        if weights == self._noted_weights and parts == self._noted_parts:
            return []
        return [
            i
            for i, (own, of) in enumerate(zip(self._of_parts, self._of_weights, strict=True))
            if weights[of] != self._noted_weights[of] or parts[own] != self._noted_parts[own]
        ]

    def note(self, workspaces: list[Workspace]) -> None:
        """Record that the copies are those of their weights now."""
        self._noted_weights, self._noted_parts = self._versions(workspaces)

    def _versions(self, workspaces: list[Workspace]) -> tuple[list[int], list[int]]:
        return list(map(version, _read(workspaces))), list(map(version, self._parts))


def _read(workspaces: list[Workspace]) -> list[Tensor]:
    return [*chain.from_iterable(map(_weights, workspaces))]


def _spans(counts: Sequence[int]) -> list[slice]:
    ends = [*accumulate(counts)]
    return [*map(slice, [0, *ends], ends)]


def _is_something(value: Tensor | None) -> bool:
    return value is not None
