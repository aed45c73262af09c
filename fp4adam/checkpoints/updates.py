"""Updates of an engine that serves a model in training: all bytes, or those that have changed."""

import json
import math
import secrets
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp4adam.checkpoints.layouts import find_layout
from fp4adam.checkpoints.trained import Trained
from fp4adam.distributed.dtensor import is_dtensor

_ALL = -1  # count of a tensor that is sent whole
_UNIT = 16  # bytes that are compared and sent together


class UpdateLost(RuntimeError):
    """An update that does not follow the last one that was applied; ask for a full one."""


class Part(NamedTuple):
    """What an update says about a tensor of the engine.

    Attributes:
        name: The engine's name for it.
        dtype: Its dtype, such as "uint8".
        shape: Its shape.
        count: The number of its units that have changed; -1 if it is sent whole.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="meta").nbytes

    @property
    def unit(self) -> int:
        """Bytes of a unit: 16, or fewer for a tensor that does not consist of 16 bytes each."""
        return math.gcd(self.nbytes, _UNIT)


class WeightUpdate(NamedTuple):
    """What :meth:`WeightSender.export_changes` returns.

    Attributes:
        id: A random number.
        follows: That of the sender's update before; None for a full update, which any receiver can
            apply.
        parts: The tensors that have changed; all of them in a full update.
        positions: int32, the changed units of these, one tensor after the other.
        payload: uint8, per tensor the bytes of these units, or all of them.
    """

    id: int
    follows: int | None
    parts: tuple[Part, ...]
    positions: Tensor
    payload: Tensor

    @property
    def is_full(self) -> bool:
        """True if it has all bytes of all tensors."""
        return self.follows is None

    @property
    def nbytes(self) -> int:
        """Bytes of positions and payload."""
        return self.positions.nbytes + self.payload.nbytes

    def pack(self) -> Tensor:
        """The update as one tensor to be sent: uint8, on the device of the weights.

        The host reads all of it for its CRC-32.
        """
        header = json.dumps([*self[:3], self.positions.numel()]).encode()
        head = torch.frombuffer(
            bytearray(len(header).to_bytes(4, "little") + header), dtype=torch.uint8
        )
        tensors = self.positions.view(torch.uint8), self.payload
        body = torch.cat([head.to(self.payload.device), *tensors])
        crc = torch.frombuffer(bytearray(_crc(body)), dtype=torch.uint8)
        return torch.cat([crc.to(body.device), body])

    @classmethod
    def unpack(cls, packed: Tensor) -> "WeightUpdate":
        """The update that :meth:`pack` has made a tensor of.

        Raises:
            ValueError: If it is none, or has other bytes than were packed.
        """
        crc, body = packed[:4], packed[4:]
        if packed.dtype != torch.uint8 or crc.cpu().numpy().tobytes() != _crc(body):
            raise ValueError(
                "packed must be what pack() has returned, uint8, got a tensor with another "
                "checksum; send it again, or export_changes(full=True)"
            )
        begin = 4 + int.from_bytes(body[:4].cpu().numpy().tobytes(), "little")
        *ids, parts, n = json.loads(body[4:begin].cpu().numpy().tobytes())
        parts = tuple(Part(name, dtype, tuple(shape), count) for name, dtype, shape, count in parts)
        end = begin + 4 * n
        return cls(*ids, parts, body[begin:end].clone().view(torch.int32), body[end:])  # aligned


def _crc(body: Tensor) -> bytes:
    return zlib.crc32(body.cpu().numpy()).to_bytes(4, "little")


class WeightSender:
    """Sends an engine the bytes of a model in training, after the first time those that change.

    At the learning rates of reinforcement learning one step changes few of the codes of 4 and 8
    bits. The sender keeps the bytes that it has sent last, and compares: 0.56 bytes per NVFP4
    weight, about 1 of an 8-bit one, 2 of one in BF16. Whatever has written the weights, a
    ``WeightReceiver`` then has the very bytes of :func:`export_tensors`.

    Under ``fully_shard`` every rank makes a sender and calls :meth:`export_changes`: weights are
    gathered one by one, and the first rank of their mesh compares and sends them. It alone keeps
    bytes.

    Args:
        model: As for :func:`export_tensors`.
        layout: As for :func:`export_tensors`.
        device: Where the bytes sent last are kept; by default with the weights. ``"cpu"`` leaves
            the memory of a GPU free, and takes the time of copies.

    Raises:
        ValueError: As by :func:`export_tensors`.
        NotImplementedError: As by :func:`export_tensors`.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: str = "compressed-tensors",
        *,
        device: torch.device | str | None = None,
    ) -> None:
        self._model, self._layout, self._device = model, find_layout(layout), device
        self._sent: dict[str, tuple[Part, Tensor]] = {}
        self._structure: tuple | None = None
        self._id: int | None = None  # of the last update; None: the next one has to be full
        Trained.of(model, self._layout)

    @torch.no_grad()
    def export_changes(self, full: bool = False) -> WeightUpdate | None:
        """What has changed since the last call; everything at the first one, and after an error.

        Args:
            full: Send everything, as after :class:`UpdateLost`.

        Returns:
            The update; None on all ranks but the first if weights are DTensors.
        """
        trained = Trained.of(self._model, self._layout)
        structure = trained.encoding, trained.pieces, {*trained.quantized}
        follows = self._id if structure == self._structure and not full else None
        if follows is None:
            self._sent.clear()
        self._id, self._structure = None, structure
        sends = _is_first_rank(trained)
        parts, positions, payload = [], [], []
        for name, tensor in (i for entry in trained.entries() for i in entry.tensors.items()):
            found = self._compare(name, tensor) if sends else None
            if found is not None:
                parts.append(found[0])
                positions.append(found[1])
                payload.append(found[2])
        if not sends:
            return None
        self._id = secrets.randbits(62)
        device = next(iter(trained.weights.values())).device
        return WeightUpdate(
            self._id,
            follows,
            tuple(parts),
            torch.cat([torch.empty(0, dtype=torch.int32, device=device), *_on(device, positions)]),
            torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *_on(device, payload)]),
        )

    def _compare(self, name: str, tensor: Tensor) -> tuple[Part, Tensor, Tensor] | None:
        """The changed units of a tensor and their bytes, which are kept; None if it is as sent."""
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(tensor.dtype).removeprefix("torch.")
        whole = Part(name, dtype, tuple(tensor.shape), _ALL)
        part, sent = self._sent.get(name, (None, raw))
        if part != whole:
            self._sent[name] = whole, raw.to(self._device or raw.device, copy=True)
            return whole, raw.new_empty(0, dtype=torch.int32), raw
        units = raw.view(raw.numel() // whole.unit, whole.unit)
        positions = (units != sent.to(raw.device).view_as(units)).any(1).nonzero().view(-1)
        if not positions.numel():
            return None
        sent.copy_(raw)
        changed = whole._replace(count=positions.numel())
        return changed, positions.int(), units[positions].view(-1)


def _is_first_rank(trained: Trained) -> bool:
    """True on the rank that sends: the first one of the meshes of all weights."""
    meshes = {weight.device_mesh for weight in trained.weights.values() if is_dtensor(weight)}
    return not any(any(mesh.get_coordinate() or ()) for mesh in meshes)


def _on(device: torch.device, tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


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
        """Write an update to the tensors; nothing is written if it raises.

        Returns:
            The names of the tensors that it has written.

        Raises:
            UpdateLost: If an update before this one is missing, or this one is not full and of
                another sender. Ask for ``sender.export_changes(full=True)`` then.
            ValueError: If the update is damaged, or tensors do not have its dtypes and shapes.
        """
        if not update.is_full and self._last != update.follows:
            raise UpdateLost(
                "update must follow the last one that was applied, got one that follows another: "
                "one was lost, or it is of another sender; apply sender.export_changes(full=True)"
            )
        spans = _spans(update)
        targets = {part.name: self._target(part, update.payload.device) for part in update.parts}
        for part, positions, raw in spans:
            target = targets[part.name].view(-1).view(torch.uint8)
            raw = raw.to(target.device)
            if part.count == _ALL:
                target.copy_(raw)
            else:
                index = positions.to(target.device).long()
                target.view(-1, part.unit)[index] = raw.view(-1, part.unit)
        self.tensors = targets if update.is_full else {**self.tensors, **targets}
        self._last = update.id
        return [*targets]

    def _target(self, part: Part, device: torch.device) -> Tensor:
        """The tensor that a part is written to: the engine's own, or a new one."""
        dtype, known = getattr(torch, part.dtype), self.tensors.get(part.name)
        fits = known is not None and (known.dtype, known.shape) == (dtype, part.shape)
        if fits and known.is_contiguous():
            return known
        if self._is_given or part.count != _ALL:
            found = "none" if known is None else f"{known.dtype} {tuple(known.shape)}"
            raise ValueError(
                f"tensors must have {part.name!r}, contiguous {dtype} {part.shape}, got {found}; "
                "pass the engine's tensors, or none to have them made"
            )
        return torch.empty(part.shape, dtype=dtype, device=self._device or device)


def _spans(update: WeightUpdate) -> list[tuple[Part, Tensor, Tensor]]:
    """Per tensor its changed units and their bytes."""
    counts = [max(part.count, 0) for part in update.parts]
    sizes = [p.nbytes if p.count == _ALL else p.count * p.unit for p in update.parts]
    if (sum(counts), sum(sizes)) != (update.positions.numel(), update.payload.numel()):
        raise ValueError(
            f"update must have {sum(sizes)} bytes for {sum(counts)} units, got "
            f"{update.payload.numel()} for {update.positions.numel()}; send it again"
        )
    parts = update.positions.split(counts), update.payload.split(sizes)
    return [*zip(update.parts, *parts, strict=True)]
