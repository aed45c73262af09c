"""Updates of the weights of an engine: all bytes, or those that training has changed."""

import functools
import itertools
import json
import secrets
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp4adam.checkpoints.layouts import LAYOUTS
from fp4adam.checkpoints.tensors import Matrix, Stored, group_matrices, stored_tensors
from fp4adam.checkpoints.trained import Trained
from fp4adam.distributed.dtensor import is_dtensor
from fp4adam.tensors import changes
from fp4adam.tensors.changes import PLAIN_UNIT, QUANTIZED_UNIT, ChangeRecord

_ALL = -1  # number of changed units where all bytes are sent
# How an UpdateLost begins; of another process an error has nothing but its words.
LOST = "update must follow the last one that was applied"


class UpdateLost(RuntimeError):
    """An update that does not follow the last one that was applied; ask for a full one."""


class Part(NamedTuple):
    """A tensor of the engine, as updates describe it.

    Attributes:
        name: The engine's name for it.
        dtype: Its dtype, such as "uint8".
        shape: Its shape.
        matrix: Number of the parameter that it belongs to; its tensors change together.
        unit: Its bytes per unit of the parameter; 0 if it is always sent as a whole.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    matrix: int
    unit: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="meta").nbytes


class WeightUpdate(NamedTuple):
    """What :meth:`WeightSender.export_changes` returns.

    Attributes:
        session: Identifies the sender.
        sequence: Number of the update, from 0.
        is_full: Whether it has all bytes. It can be applied by any receiver then; others follow
            the one before.
        counts: Per parameter of the engine, the number of its units that have changed; -1: all.
        checksum: Of positions and payload.
        parts: The tensors of the engine, in a full update; () otherwise.
        positions: int32, the changed units of all parameters, one after the other.
        payload: uint8, per tensor the bytes of these units, or all of them.
    """

    session: int
    sequence: int
    is_full: bool
    counts: tuple[int, ...]
    checksum: int
    parts: tuple[Part, ...]
    positions: Tensor
    payload: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of positions and payload."""
        return self.positions.nbytes + self.payload.nbytes

    def pack(self) -> Tensor:
        """The update as one tensor, uint8, on the device of the weights; to be sent."""
        header = json.dumps([*self[:6], self.positions.numel()]).encode()
        sizes = len(header).to_bytes(4, "little") + zlib.crc32(header).to_bytes(4, "little")
        head = torch.frombuffer(bytearray(sizes + header), dtype=torch.uint8)
        tensors = self.positions.view(torch.uint8), self.payload
        return torch.cat([head.to(self.payload.device), *tensors])

    @classmethod
    def unpack(cls, packed: Tensor) -> "WeightUpdate":
        """The update that :meth:`pack` has made a tensor of.

        Raises:
            ValueError: If it is none.
        """
        try:
            length, crc = (_number_of(packed[at : at + 4]) for at in (0, 4))
            header = _bytes_of(packed[8 : 8 + length])
            if zlib.crc32(header) != crc:
                raise ValueError("its header has another checksum")
            *fields, parts, n = json.loads(header)
            session, sequence, is_full, counts, checksum = fields
            parts = tuple(Part(a, b, tuple(shape), *rest) for a, b, shape, *rest in parts)
            body = packed[8 + length :]
            positions = body[: 4 * n].clone().view(torch.int32)  # aligned
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(
                f"packed must be the tensor of an update, uint8, got another one ({error}); pass "
                "what pack() has returned"
            ) from None
        fields = session, sequence, is_full, tuple(counts), checksum, parts
        return cls(*fields, positions, body[4 * n :])


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _number_of(tensor: Tensor) -> int:
    return int.from_bytes(_bytes_of(tensor), "little")


class WeightSender:
    """Sends an engine the bytes of a model in training, after the first time those that change.

    At the learning rates of reinforcement learning one step changes few of the codes of 4 and 8
    bits. The steps of ``FP4Adam`` and ``FusedAdam`` record which: when they overwrite a weight,
    they compare old and new bytes, and set a flag per 32 weights (16 bytes of parameters in high
    precision). The flags take 1/32 byte per weight; no copy of the weights is kept. Weights that
    something else overwrites are sent in full; so are those that a ``capturable`` optimizer
    steps, and on a GPU parameters in high precision without masters.

    After each update, ``WeightReceiver`` has the very bytes of :func:`export_tensors`. Writes that
    torch does not count, those through ``.data`` of a parameter in high precision, need
    ``export_changes(full=True)``. A copy of a sender, also one from a pickle, is a new sender of
    the model that was copied with it.

    Args:
        model: As for :func:`export_tensors`, on one process, without DTensors. A newer sender of
            the model takes over from an older one, which sends everything from then on.
        layout: As for :func:`export_tensors`, as are ``fused`` and ``names``.

    Raises:
        ValueError: As by :func:`export_tensors`.
        NotImplementedError: If weights are DTensors.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: str = "compressed-tensors",
        *,
        fused: bool = False,
        names: Callable[[str], str] | None = None,
    ) -> None:
        if layout not in LAYOUTS:
            raise ValueError(
                f"layout must be one of {', '.join(LAYOUTS)} for WeightSender, got {layout!r}"
            )
        self._model, self._layout = model, LAYOUTS[layout]
        self._fused, self._names = fused, names or str
        trained, _ = self._look()
        self._device = next(iter(trained.weights.values())).device
        self._records = _attach_records(trained)
        self._session, self._sequence = secrets.randbits(62), 0
        self._parts: tuple[Part, ...] = ()
        weakref.finalize(self, _detach, [*self._records.values()]).atexit = False

    def __reduce__(self) -> tuple:
        new = functools.partial(WeightSender, fused=self._fused, names=self._names)
        return new, (self._model, self._layout.name)

    def close(self) -> None:
        """Record no further changes, and free the flags."""
        _detach([*self._records.values()])
        self._records = {}

    def export_changes(self, full: bool = False) -> WeightUpdate:
        """What has changed since the last call; everything at the first one.

        The host waits for the device twice. Nothing is recorded as sent if it raises.

        Args:
            full: Send everything, as after :class:`UpdateLost`.
        """
        trained, groups = self._look()
        matrices = [matrix for group in groups for matrix in group]
        first_units = [*itertools.accumulate((_units(trained, m) for m in matrices), initial=0)]
        flags = torch.cat([self._flags(trained, matrix) for matrix in matrices])
        positions, counts = _find(flags, first_units)
        stored = [each for group in groups for each in stored_tensors(trained, group)]
        order = {id(matrix): i for i, matrix in enumerate(matrices)}
        parts = tuple(_part(each, order, trained) for each in stored)
        full = full or parts != self._parts
        if full:
            counts, positions = [_ALL] * len(matrices), positions[:0]
        begins = [*itertools.accumulate((max(n, 0) for n in counts), initial=0)]
        chunks = [torch.empty(0, dtype=torch.uint8, device=flags.device)]
        for part, each in zip(parts, stored, strict=True):
            count, begin = counts[part.matrix], begins[part.matrix]
            raw = each.tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            if part.unit and count != _ALL:
                index = positions[begin : begin + count].to(raw.device)
                raw = raw.view(-1, part.unit)[index].view(-1)
            chunks.append(raw.to(flags.device))
        payload = torch.cat(chunks)
        update = WeightUpdate(
            self._session,
            self._sequence,
            full,
            tuple(counts),
            _checksum(positions) ^ _checksum(payload),
            parts if full else (),
            positions,
            payload,
        )
        for record in self._records.values():
            record.clear()
        self._parts, self._sequence = parts, self._sequence + 1
        return update

    def _look(self) -> tuple[Trained, list[list[Matrix]]]:
        trained = Trained.of(self._model, self._layout)
        for name, weight in trained.weights.items():
            if is_dtensor(weight):
                raise NotImplementedError(
                    f"weights must be on one process for WeightSender, got {name!r}, a DTensor; "
                    "send export_tensors(model), which gathers"
                )
        return trained, group_matrices(trained, self._fused, self._names)

    def _flags(self, trained: Trained, matrix: Matrix) -> Tensor:
        """The flags of a parameter of the engine; none if its bytes are always sent."""
        found = []
        for member in matrix.members if _units(trained, matrix) else ():
            name, rows = trained.pieces[member]
            weight, record = trained.weights[name], self._records.get(name)
            if record is None or not record.is_right_for(weight):
                flags = torch.ones(
                    changes.number_of_units(weight), dtype=torch.uint8, device=weight.device
                )
            else:
                flags = record.flags
            flags = flags if rows is None else flags[_units_of_rows(weight, rows)]
            found.append(flags.to(self._device))
        return torch.cat([torch.empty(0, dtype=torch.uint8, device=self._device), *found])


def _detach(records: list[ChangeRecord]) -> None:
    for record in records:
        record.detach()


def _attach_records(trained: Trained) -> dict[str, ChangeRecord]:
    """Records with flags in one block of memory, by the names of the weights."""
    sizes = {name: changes.number_of_units(weight) for name, weight in trained.weights.items()}
    device = next(iter(trained.weights.values())).device
    # Kernels find flags by their address: each weight's begin at a multiple of 16.
    places = [-(-size // 16) * 16 for size in sizes.values()]
    blocks = torch.empty(sum(places), dtype=torch.uint8, device=device).split(places)
    records = {}
    for (name, size), block in zip(sizes.items(), blocks, strict=True):
        if size:
            weight = trained.weights[name]
            flags = block[:size] if weight.device == device else block[:size].to(weight.device)
            records[name] = ChangeRecord(weight, flags)
    return records


def _units_of_rows(weight: Tensor, rows: tuple[int, int]) -> slice:
    """The units of some rows of a weight, all whole."""
    first, last = (row * weight.shape[-1] // changes.unit_numel(weight) for row in rows)
    return slice(first, last)


def _units(trained: Trained, matrix: Matrix) -> int:
    """Units of a parameter of the engine; 0 if its bytes are always sent as a whole."""
    total = 0
    for member in matrix.members:
        name, rows = trained.pieces[member]
        weight = trained.weights[name]
        units = changes.number_of_units(weight)
        if units and rows is not None:
            if any(row * weight.shape[-1] % changes.unit_numel(weight) for row in rows):
                return 0
            span = _units_of_rows(weight, rows)
            units = span.stop - span.start
        if not units:
            return 0
        total += units
    return total


def _part(stored: Stored, order: dict[int, int], trained: Trained) -> Part:
    unit, encoding = PLAIN_UNIT, trained.encoding
    if stored.key == encoding.codes:
        unit = QUANTIZED_UNIT * encoding.bits // 8
    elif stored.key == encoding.scale and QUANTIZED_UNIT % encoding.block[1] == 0:
        unit = QUANTIZED_UNIT // encoding.block[1] * stored.tensor.element_size()
    elif stored.key is not None:
        unit = 0
    if not _units(trained, stored.matrix):
        unit = 0
    dtype = str(stored.tensor.dtype).removeprefix("torch.")
    return Part(stored.name, dtype, tuple(stored.tensor.shape), order[id(stored.matrix)], unit)


def _find(flags: Tensor, first_units: list[int]) -> tuple[Tensor, list[int]]:
    """The changed units of each parameter, int32 and counted from its first, and their numbers."""
    found = flags.nonzero().view(-1)
    bounds = torch.tensor(first_units, device=flags.device)
    ends = torch.searchsorted(found, bounds).tolist()
    counts = [b - a for a, b in itertools.pairwise(ends)]
    firsts = bounds[:-1].repeat_interleave(
        torch.tensor(counts, device=flags.device), output_size=found.numel()
    )
    return (found - firsts).to(torch.int32), counts


def _checksum(tensor: Tensor) -> int:
    """A sum of 8-byte words, each times an odd number that tells its place, modulo 2^64."""
    raw = tensor.reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(raw, (0, -raw.numel() % 8)).view(torch.int64)
    places = torch.arange(words.numel(), device=words.device) * 2 + 1
    return int((words * places).sum()) ^ raw.numel()


class WeightReceiver:
    """The engine's side: applies updates to tensors in place.

    Args:
        tensors: The engine's own tensors by the names of the updates, of the same dtypes and
            shapes, contiguous. None: they are made by the first full update.
        device: Where to make them; by default where the update is.

    Attributes:
        tensors: The tensors by name; after each update those that the sender's model is stored as.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.tensors = dict(tensors or {})
        self._is_given = tensors is not None
        self._device = device
        self._parts: tuple[Part, ...] = ()
        self._last: tuple[int, int] | None = None

    @torch.no_grad()
    def apply(self, update: WeightUpdate) -> list[str]:
        """Write an update to the tensors; nothing is written if it raises.

        Returns:
            The names of the tensors that it has written.

        Raises:
            UpdateLost: If an update before this one is missing, or this one is not full and of
                another sender. Ask for ``sender.export_changes(full=True)`` then.
            ValueError: If the update is damaged, or tensors do not have its dtypes and shapes.
        """
        if _checksum(update.positions) ^ _checksum(update.payload) != update.checksum:
            raise ValueError(
                "update must have the bytes that were sent, got another checksum than "
                f"{update.checksum}; send it again, or export_changes(full=True)"
            )
        if not update.is_full and self._last != (update.session, update.sequence - 1):
            last = "none" if self._last is None else self._last[1]
            raise UpdateLost(
                f"{LOST}, {last}, got {update.sequence}"
                f"{' of another sender' if self._is_of_another(update) else ''}; apply "
                "sender.export_changes(full=True)"
            )
        parts = update.parts if update.is_full else self._parts
        spans = self._spans(update, parts)
        tensors = self._made(parts, update.payload.device) if update.is_full else self.tensors
        written = []
        for part, positions, raw in spans:
            target = tensors[part.name].view(-1).view(torch.uint8)
            raw = raw.to(target.device)
            if positions is None:
                target.copy_(raw)
            elif positions.numel():
                index = positions.to(target.device).long()
                target.view(-1, part.unit)[index] = raw.view(-1, part.unit)
            else:
                continue
            written.append(part.name)
        self.tensors, self._parts = tensors, parts
        self._last = update.session, update.sequence
        return written

    def _is_of_another(self, update: WeightUpdate) -> bool:
        return self._last is not None and self._last[0] != update.session

    def _spans(
        self, update: WeightUpdate, parts: tuple[Part, ...]
    ) -> list[tuple[Part, Tensor | None, Tensor]]:
        """Per tensor its changed units, None for all, and their bytes; checked."""
        begins = [*itertools.accumulate((max(n, 0) for n in update.counts), initial=0)]
        spans, at = [], 0
        for part in parts:
            count, begin = update.counts[part.matrix], begins[part.matrix]
            positions = None
            nbytes = part.nbytes
            if part.unit and count != _ALL:
                positions = update.positions[begin : begin + count]
                nbytes = count * part.unit
            spans.append((part, positions, update.payload[at : at + nbytes]))
            at += nbytes
        if at != update.payload.numel() or begins[-1] != update.positions.numel():
            raise ValueError(
                f"update must have {at} bytes for {begins[-1]} units, got "
                f"{update.payload.numel()} for {update.positions.numel()}; send it again"
            )
        return spans

    def _made(self, parts: tuple[Part, ...], device: torch.device) -> dict[str, Tensor]:
        """The tensors of a full update: the engine's own, or new ones where others do not fit."""
        tensors = {}
        for part in parts:
            dtype, known = getattr(torch, part.dtype), self.tensors.get(part.name)
            fits = known is not None and (known.dtype, known.shape) == (dtype, part.shape)
            if self._is_given and not (fits and known.is_contiguous()):
                found = "none" if known is None else f"{known.dtype} {tuple(known.shape)}"
                raise ValueError(
                    f"tensors must have {part.name!r}, contiguous {dtype} {part.shape}, got "
                    f"{found}; pass the engine's tensors, or none to have them made"
                )
            tensors[part.name] = (
                known
                if fits
                else torch.empty(part.shape, dtype=dtype, device=self._device or device)
            )
        return tensors
