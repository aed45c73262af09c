"""Updates of an engine that serves a model in training: all bytes, or those that have changed."""

import json
import math
import secrets
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp4adam.checkpoints.export import Trained
from fp4adam.checkpoints.layouts import find_layout
from fp4adam.distributed.dtensor import is_dtensor

_UNIT = 16  # bytes that are compared and sent together


class UpdateLost(RuntimeError):
    """An update that does not follow the last one that was applied; ask for a full one."""


class Change(NamedTuple):
    """What an update says about a tensor of the engine, named as in checkpoints.

    ``positions``: int32, the units of 16 bytes that have changed, smaller ones where a tensor does
    not consist of 16 bytes each; None if it is sent whole. ``data``: uint8, their bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    positions: Tensor | None
    data: Tensor


class WeightUpdate(NamedTuple):
    """What :meth:`WeightSender.export_changes` returns.

    Attributes:
        id: A random number.
        follows: That of the update before; None for a full one, which any receiver can apply.
        changes: The tensors that have changed; all of them in a full update.
    """

    id: int
    follows: int | None
    changes: tuple[Change, ...]

    @property
    def is_full(self) -> bool:
        """True if it has all bytes of all tensors."""
        return self.follows is None

    @property
    def nbytes(self) -> int:
        """Bytes of positions and data."""
        return sum(x.nbytes for c in self.changes for x in (c.positions, c.data) if x is not None)

    def pack(self) -> Tensor:
        """The update as one uint8 tensor on the device of the weights, with a CRC-32 of it."""
        each = [(c, [x for x in (c.positions, c.data) if x is not None]) for c in self.changes]
        listed = [(*c[:3], len(parts) > 1, *(x.nbytes for x in parts)) for c, parts in each]
        header = json.dumps([self.id, self.follows, listed]).encode()
        head = bytearray(len(header).to_bytes(4, "little") + header)
        tensors = [torch.frombuffer(head, dtype=torch.uint8)]
        tensors += [x.view(torch.uint8) for _, parts in each for x in parts]
        device = tensors[-1].device
        body = torch.cat([x.to(device) for x in tensors])
        crc = torch.frombuffer(bytearray(_crc(body)), dtype=torch.uint8)
        return torch.cat([crc.to(device), body])

    @classmethod
    def unpack(cls, packed: Tensor) -> "WeightUpdate":
        """The update that :meth:`pack` has made a tensor of; ValueError for other bytes."""
        crc, body = packed[:4], packed[4:]
        if packed.dtype != torch.uint8 or _bytes_of(crc) != _crc(body):
            raise ValueError(
                "packed must be what pack() has returned, uint8, got a tensor with another "
                "checksum; send it again, or export_changes(full=True)"
            )
        begin = 4 + int.from_bytes(_bytes_of(body[:4]), "little")
        number, follows, listed = json.loads(_bytes_of(body[4:begin]))
        parts = iter(body[begin:].split([n for _, _, _, _, *sizes in listed for n in sizes]))
        changes = []
        for name, dtype, shape, has_positions, *_ in listed:
            # Copied, and so aligned.
            positions = next(parts).clone().view(torch.int32) if has_positions else None
            changes.append(Change(name, dtype, tuple(shape), positions, next(parts)))
        return cls(number, follows, tuple(changes))


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _crc(body: Tensor) -> bytes:
    return zlib.crc32(body.cpu().numpy()).to_bytes(4, "little")


class WeightSender:
    """Sends an engine the bytes of a model in training, after the first time those that change.

    At the learning rates of reinforcement learning one step changes few of the codes of 4 and 8
    bits. The sender keeps the bytes that it has sent last, and compares: 0.56 bytes per NVFP4
    weight, about 1 of an 8-bit one, 2 of one in BF16. Whatever has written the weights, a
    ``WeightReceiver`` then has the very bytes of :func:`export_tensors`.

    Under ``fully_shard`` every rank makes a sender and calls :meth:`export_changes`: weights are
    gathered one by one, and the first rank of their mesh alone keeps, compares and sends them.

    Args:
        model: As for :func:`export_tensors`.
        layout: As for :func:`export_tensors`.
        device: Where the bytes sent last are kept; by default with the weights. ``"cpu"`` leaves
            the memory of a GPU free, and takes the time of copies.

    Errors are those of :func:`export_tensors`.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: str = "compressed-tensors",
        *,
        device: torch.device | str | None = None,
    ) -> None:
        self._model, self._layout, self._device = model, find_layout(layout), device
        self._sent: dict[str, tuple[tuple, Tensor]] = {}  # name, dtype and shape; bytes
        self._structure: tuple | None = None
        self._id: int | None = None  # of the last update; None: the next one has to be full
        Trained.of(model, self._layout)

    @torch.no_grad()
    def export_changes(self, full: bool = False) -> WeightUpdate | None:
        """What has changed since the last call; everything at the first one, and after an error.

        ``full=True`` sends everything, as after :class:`UpdateLost`. None is returned on all ranks
        but the first if weights are DTensors.
        """
        trained = Trained.of(self._model, self._layout)
        structure = trained.encoding, trained.spans, {*trained.quantized}
        follows = self._id if structure == self._structure and not full else None
        if follows is None:
            self._sent.clear()
        self._id, self._structure, changes = None, structure, []
        meshes = {weight.device_mesh for weight in trained.weights.values() if is_dtensor(weight)}
        sends = not any(any(mesh.get_coordinate() or ()) for mesh in meshes)  # on their first rank
        for name, tensor in (i for entry in trained.entries() for i in entry.items()):
            if sends and (change := self._change(name, tensor)) is not None:
                changes.append(change)
        if not sends:
            return None
        self._id = secrets.randbits(62)
        return WeightUpdate(self._id, follows, tuple(changes))

    def _change(self, name: str, tensor: Tensor) -> Change | None:
        """The changed units of a tensor, whose bytes are kept; None if it is as it was sent."""
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        key = name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        known, sent = self._sent.get(name, (None, raw))
        if known != key:
            self._sent[name] = key, raw.to(self._device or raw.device, copy=True)
            return Change(*key, None, raw.clone())
        unit = math.gcd(raw.numel(), _UNIT)
        units = raw.view(raw.numel() // unit, unit)
        positions = (units != sent.to(raw.device).view_as(units)).any(1).nonzero().view(-1)
        if not positions.numel():
            return None
        sent.copy_(raw)
        return Change(*key, positions.int(), units[positions].view(-1))


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
        self._last: int | None = None

    @torch.no_grad()
    def apply(self, update: WeightUpdate) -> list[str]:
        """Write an update to the tensors, and return their names; nothing is written if it raises.

        Raises:
            UpdateLost: If an update before this one is missing, or this one is not full and of
                another sender. Ask for ``sender.export_changes(full=True)`` then.
            ValueError: If tensors do not have its dtypes and shapes.
        """
        if not update.is_full and self._last != update.follows:
            raise UpdateLost(
                "update must follow the last one that was applied, got one that follows another: "
                "one was lost, or it is of another sender; apply sender.export_changes(full=True)"
            )
        targets = {change.name: self._target(change) for change in update.changes}
        for name, _, _, positions, data in update.changes:
            target = targets[name].view(-1).view(torch.uint8)
            data = data.to(target.device)
            if positions is None:
                target.copy_(data)
            else:
                units = target.view(-1, math.gcd(target.numel(), _UNIT))
                units[positions.to(target.device).long()] = data.view(len(positions), -1)
        self.tensors = targets if update.is_full else {**self.tensors, **targets}
        self._last = update.id
        return [*targets]

    def _target(self, change: Change) -> Tensor:
        """The tensor that a change is written to: the engine's own, or a new one."""
        dtype, known = getattr(torch, change.dtype), self.tensors.get(change.name)
        fits = known is not None and (known.dtype, known.shape) == (dtype, change.shape)
        if fits and known.is_contiguous():
            return known
        if self._is_given or change.positions is not None:
            found = "none" if known is None else f"{known.dtype} {tuple(known.shape)}"
            raise ValueError(
                f"tensors must have {change.name!r}, contiguous {dtype} {change.shape}, got "
                f"{found}; pass the engine's tensors, or none to have them made"
            )
        return torch.empty(change.shape, dtype=dtype, device=self._device or change.data.device)
