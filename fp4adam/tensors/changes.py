"""Which parts of weights have changed: flags that the writers of a step set, for exports.

A weight is divided into units: 32 consecutive elements of a quantized weight with the scales of
their blocks, 16 bytes of a plain one. Whoever overwrites a weight in a step compares the old bytes
of each unit with the new ones at that moment, and sets its flag. So no copy of a weight is kept.

A writer that sets no flags is noticed by the versions of the tensors: all of the weight counts as
changed then.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fp4adam.tensors.layout import Layout
from fp4adam.tensors.storage import SharedStorage, Storage

QUANTIZED_UNIT = 32  # elements
PLAIN_UNIT = 16  # bytes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ChangeRecord:
    """The flags of one weight, in place of an earlier record of it.

    Args:
        weight: A whole parameter, quantized or plain.
        flags: uint8 [number of units], on the device of the weight; nonzero where a unit has
            changed since the flags were last cleared.
    """

    def __init__(self, weight: Tensor, flags: Tensor) -> None:
        self.flags = flags
        # Not of a quantized tensor: model.to() exchanges only those without weak references.
        self._weight = weakref.ref(_key(weight))
        self._known: tuple | None = None  # the weight as the last step left it; None if unknown
        self.is_recorded = False
        flags.fill_(1)
        _records[_key(weight)] = self
        _new_generation()

    def detach(self) -> None:
        """Let writers forget this record."""
        weight = self._weight()
        if weight is not None and _records.get(weight) is self:
            del _records[weight]
            _new_generation()

    def is_right_for(self, weight: Tensor) -> bool:
        """Whether the flags say all that has changed in ``weight``: steps alone have written it."""
        is_its = record_of(weight) is self
        return is_its and self._known is not None and self._known == self._look()

    def begin(self) -> None:
        """Before a step: everything counts as changed if something else has written the weight."""
        if self._known != self._look():
            self.flags.fill_(1)
        self._known, self.is_recorded = self._look(), False

    def end(self) -> None:
        """After a step, also one that has been skipped."""
        if self._known != (now := self._look()):
            if not self.is_recorded:
                self.flags.fill_(1)
            self._known = now

    def clear(self) -> None:
        """The weight has been exported as it is now."""
        self.flags.zero_()
        self._known = self._look()

    def _look(self) -> tuple | None:
        weight = self._weight()
        if weight is None:
            return None
        if isinstance(weight, SharedStorage):
            versions = (inner._version for inner in weight.tensors.versioned)
            return weakref.ref(weight.tensors), *versions
        return weight.data_ptr(), weight._version


_records = WeakIdKeyDictionary()
_unseen = WeakIdKeyDictionary()  # its keys: what replays of CUDA graphs may write
generation = 0  # changes whenever a weight gets or loses a record


def ignore(weight: Tensor) -> None:
    """Record nothing of a weight that CUDA graphs step: a replay shows in no version."""
    _unseen[_key(weight)] = True


def _new_generation() -> None:
    global generation
    generation += 1


def is_recorded_by_kernels(weight: Tensor) -> bool:
    """Whether the kernels of a step set the flags of a weight that has a master."""
    if record_of(weight) is None:
        return False
    if _shared(weight) is None:
        return weight.element_size() == 2 and weight.is_contiguous()
    # A format of one's own may have kernels that do not.
    return weight.quantizer.rowwise and getattr(
        weight.quantizer.step_kernels(), "RECORDS_CHANGES", False
    )


def record_of(weight: Tensor) -> ChangeRecord | None:
    """The record of a weight, or None."""
    if not _records or _key(weight) in _unseen:
        return None
    return _records.get(_key(weight))


def _shared(weight: Tensor) -> SharedStorage | None:
    """The state that aliases of a quantized weight share; None of a plain one."""
    return getattr(weight, "_shared", None)


def _key(weight: Tensor) -> object:
    shared = _shared(weight)
    return weight if shared is None else shared


def unit_numel(weight: Tensor) -> int:
    """Elements of a unit of a weight."""
    return PLAIN_UNIT // weight.element_size() if _shared(weight) is None else QUANTIZED_UNIT


def number_of_units(weight: Tensor) -> int:
    """Units of a weight; 0 if it does not consist of whole ones."""
    units, rest = divmod(weight.numel(), unit_numel(weight))
    return 0 if rest else units


def records_of(weights: Iterable[Tensor]) -> list[ChangeRecord]:
    """The records of those weights that have one."""
    if not _records:
        return []
    found = map(record_of, weights)
    return [record for record in found if record is not None]


@contextlib.contextmanager
def recorded(*weights: Tensor) -> Iterator[None]:
    """Flag what torch operators inside the block change of weights that have a record.

    Their old bytes are copied for the time of the block.
    """
    before = [
        (weight, record, [old.clone() for old in _stored(weight)])
        for weight in weights
        if (record := record_of(weight)) is not None
    ]
    yield
    for weight, record, old_bytes in before:
        for old, new in zip(old_bytes, _stored(weight), strict=True):
            record.flags |= _changed_units(old, new, weight).view(torch.uint8)
        record.is_recorded = True


def _stored(weight: Tensor) -> list[Tensor]:
    """The bytes that units consist of: values, or codes and the scales of blocks within units."""
    shared = _shared(weight)
    if shared is None:
        return [weight.detach()]
    tensors = shared.tensors
    scales = _scales(tensors) if has_block_scales(weight.quantizer.layout) else None
    return [part for part in (tensors.rowwise_data, scales) if part is not None]


def _scales(tensors: Storage) -> Tensor | None:
    grid = tensors.block_scale_inv
    return tensors.rowwise_scale_inv if grid is None else grid


def has_block_scales(layout: Layout) -> bool:
    """Whether blocks of rowwise scales lie within units; larger ones belong to no unit."""
    return layout.scale_type is not None and layout.block <= QUANTIZED_UNIT


def _changed_units(old: Tensor, new: Tensor, weight: Tensor) -> Tensor:
    """bool [number of units]; the units in which two versions of some stored bytes differ."""
    n, shared = number_of_units(weight), _shared(weight)
    # Bit for bit: NaN equals itself, and zeros have signs.
    integers = _INTEGERS[new.element_size()]
    differs = old.view(integers) != new.view(integers)
    if shared is not None and new is not shared.tensors.rowwise_data:
        layout = weight.quantizer.layout
        if layout.is_square:
            differs = differs.repeat_interleave(layout.block, 0)
        rows, cols = weight.numel() // weight.shape[-1], weight.shape[-1]
        differs = differs[:rows, : cols // layout.block]
    return differs.reshape(n, -1).any(1)
