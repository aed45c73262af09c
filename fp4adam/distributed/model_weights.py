"""Weights that callers pass again and again, and whether they are as they were.

Tables of addresses are kept as long as they are. Comparing takes half a microsecond per weight, so
everything is read by functions in C that run over whole lists.
"""

import weakref
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_

import torch
from torch import Tensor

from fp4adam.interop.adapter import is_foreign
from fp4adam.interop.borrowed_tensor import borrow
from fp4adam.tensors.quantized_tensor import QuantizedTensor

_shared, _quantizer, _dtype = map(attrgetter, ("_shared", "quantizer", "dtype"))
_storage, _pending = attrgetter("tensors"), attrgetter("pending")
_init_val, _keeps_init_val = attrgetter("init_val"), attrgetter("keeps_init_val")
_data_ptr, _numel = torch._C.TensorBase.data_ptr, torch._C.TensorBase.numel


def are_none(values: Iterable[object]) -> bool:
    """Whether all values are None."""
    return all(map(is_, values, repeat(None)))


class ModelWeights:
    """Quantized weights, of this package or others.

    It keeps the memory of the weights alive, but not the weights, so that a dictionary with one of
    them as its weak key can hold it.

    Args:
        weights: The weights.

    Attributes:
        borrowed: By index, the borrowed tensors for weights of other packages.
        tensors: The weights as this package's tensors.
        own: Those that are.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        foreign = (i for i, w in enumerate(weights) if isinstance(w, Tensor) and is_foreign(w))
        self.borrowed = {i: borrow(weights[i]) for i in foreign}
        self._own = [i for i, w in enumerate(weights) if isinstance(w, QuantizedTensor)]
        self.tensors = list(weights)
        for i in self._own:
            self.tensors[i] = weights[i]._alias()
        self.own = [self.tensors[i] for i in self._own]
        for i, one in self.borrowed.items():
            self.tensors[i] = one.tensor
        self._refs = [weakref.ref(w) for w in weights if isinstance(w, Tensor)]
        # Others are refused by those who take the weights.
        is_all = len(self._own) + len(self.borrowed) == len(weights)
        with torch._C.DisableTorchFunctionSubclass():
            self._looks = self._look(weights) if is_all else None

    def _look(self, weights: Sequence[Tensor]) -> tuple[list, ...]:
        own = weights if not self.borrowed else [weights[i] for i in self._own]
        storages = list(map(_storage, map(_shared, own)))
        return storages, list(map(_quantizer, own)), list(map(_dtype, weights))

    def are(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are the same weights on the same memory, without pending writes."""
        # Reading a dtype of a subclass would take a call of __torch_function__.
        with torch._C.DisableTorchFunctionSubclass():
            return (
                len(weights) == len(self._refs)
                and all(map(is_, weights, [ref() for ref in self._refs]))
                and self._look(weights) == self._looks
                and are_none(map(_pending, map(_shared, self.own)))
                and all(borrow(weights[i]) is one for i, one in self.borrowed.items())
            )

    def with_init_val(self) -> list[QuantizedTensor]:
        """Those of this package that have a high-precision initial value, or are to keep one."""
        shared = list(map(_shared, self.own))
        if are_none(map(_init_val, shared)) and not any(map(_keeps_init_val, shared)):
            return []
        return [x for x in self.own if x._shared.init_val is not None or x._shared.keeps_init_val]


class Values:
    """Plain tensors that may be None, and whether they are as they were; held weakly."""

    def __init__(self, values: Sequence[Tensor | None]) -> None:
        self._refs = [None if x is None else weakref.ref(x) for x in values]
        self._looks = self._look(values)

    def _look(self, values: Sequence[Tensor | None]) -> tuple[list, ...]:
        there = [x for x in values if x is not None]
        reads = _data_ptr, _numel, _dtype
        return tuple([*map(read, there)] for read in reads)

    def are(self, values: Sequence[Tensor | None]) -> bool:
        """Whether these are the same tensors on the same memory."""
        known = [None if ref is None else ref() for ref in self._refs]
        return (
            len(values) == len(known)
            and all(map(is_, values, known))
            and self._look(values) == self._looks
        )
