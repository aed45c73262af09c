"""Weights that callers pass again and again, and whether they are as they were."""

import weakref
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_

import torch
from torch import Tensor

from fp4adam.interop.adapter import is_foreign
from fp4adam.interop.borrowed_tensor import borrow
from fp4adam.tensors.fingerprint import Column, Fingerprint
from fp4adam.tensors.quantized_tensor import QuantizedTensor

# What has to stay the same for tables of addresses to hold.
_NAMES = "_shared.tensors", "_shared.pending", "quantizer", "dtype"
_READS = tuple(map(attrgetter, _NAMES))
_init_val = attrgetter("_shared.init_val")


class ModelWeights:
    """Quantized weights, of this package or others, and plain values for them.

    It keeps the memory of the weights alive, but not the weights, so that a dictionary with one of
    them as its weak key can hold it.

    Args:
        weights: The weights.
        values: Per weight its values, or None.

    Attributes:
        borrowed: By index, the borrowed tensors for weights of other packages.
        tensors: The weights as this package's tensors.
    """

    def __init__(self, weights: Sequence[Tensor], values: Sequence[Tensor | None] = ()) -> None:
        foreign = (i for i, w in enumerate(weights) if isinstance(w, Tensor) and is_foreign(w))
        self.borrowed = {i: borrow(weights[i]) for i in foreign}
        self._own = [i for i, w in enumerate(weights) if isinstance(w, QuantizedTensor)]
        own = {i: weights[i].flush()._alias() for i in self._own}
        others = {i: one.tensor for i, one in self.borrowed.items()}
        self.tensors = [own.get(i, others.get(i, w)) for i, w in enumerate(weights)]
        self._aliases = [*own.values()]
        self._refs = [weakref.ref(w) if isinstance(w, Tensor) else None for w in weights]
        self._has_value = [x is not None for x in values]
        self._read: list[Tensor] = []  # while they are compared
        self._values: list[Tensor] = []
        columns = [Column(self._read, read, same=True) for read in _READS]
        self._take(weights, values)
        with torch._C.DisableTorchFunctionSubclass():  # it would be called for every dtype
            self._fingerprint = Fingerprint([*columns, Column(self._values, placed=True)])
        self._let_go()

    def _take(self, weights: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
        self._read[:] = [weights[i] for i in self._own]
        self._values[:] = [x for x in values if isinstance(x, Tensor)]

    def _let_go(self) -> None:
        self._fingerprint.record()
        self._read.clear()
        self._values.clear()

    def are(self, weights: Sequence[Tensor], values: Sequence[Tensor | None] = ()) -> bool:
        """Whether these are the same weights and values in the same memory, written or not."""
        known = [ref and ref() for ref in self._refs]
        if (
            len(weights) != len(known)
            or not all(map(is_, weights, known))
            or [x is not None for x in values] != self._has_value
        ):
            return False
        self._take(weights, values)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return self._fingerprint.is_in_place() and all(
                    borrow(weights[i]) is one for i, one in self.borrowed.items()
                )
        finally:
            self._let_go()

    def with_init_val(self) -> list[QuantizedTensor]:
        """Those of this package that have a high-precision initial value, or are to keep one."""
        if all(map(is_, map(_init_val, self._aliases), repeat(None))):
            return []
        return [x for x in self._aliases if x._shared.init_val is not None]
