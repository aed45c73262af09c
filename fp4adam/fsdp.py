"""What FSDP2 asks of a shard: what to gather, and the tensor that comes of it.

Gathered are codes and scales, about 0.56 bytes per weight in NVFP4. ``fully_shard`` cuts a weight
into equal numbers of rows, wherever that is: a shard that ends within a block has the scale of this
block, as has the next one, and both are the same (``shared_scales.py``).
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fp4adam.columnwise import BITS, transpose_codes
from fp4adam.quantizer import flat_shape
from fp4adam.row_window import Whole

if TYPE_CHECKING:
    from fp4adam.quantized_tensor import QuantizedTensor


class Gathered(NamedTuple):
    """What the gathered tensors are: their names, and of how many shards."""

    names: tuple[str, ...]
    n_shards: int


def pre_all_gather(shard: "QuantizedTensor", mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:
    """The inner tensors to gather, of one size on every rank, and what they are."""
    from fp4adam.shared_scales import Place, settle_shard

    origin = shard._origin
    whole = origin.whole
    if whole is None:
        raise RuntimeError(
            f"a {type(shard).__name__} must have been sharded by fully_shard to be gathered, got "
            f"one of shape {tuple(shard.shape)}; quantize the model first, then call fully_shard"
        )
    if whole.shares_scales:
        settle_shard(shard, Place.in_mesh(mesh))
    first = origin.first_row or 0
    inputs = {}
    for name, pitch in shard.quantizer.row_pitch.items():
        inner = getattr(shard, name)
        if pitch == 1:
            inputs[name] = inner[first : first + whole.chunk_rows]
        else:
            inputs[name] = inner[: _entries(whole, pitch)]
    if shard._amax is not None:
        inputs["_amax"] = shard._amax
    return tuple(inputs.values()), Gathered(tuple(inputs), mesh.size())


def post_all_gather(
    shard: "QuantizedTensor",
    outputs: tuple[Tensor, ...],
    gathered: Gathered,
    dtype: torch.dtype,
    out: "QuantizedTensor | None" = None,
) -> "tuple[QuantizedTensor, tuple[Tensor, ...]] | None":
    """The whole tensor, and those of its inner tensors that are not views of ``outputs``.

    With ``out``, these are filled again; the others have been already.
    """
    whole = shard._origin.whole
    derived = _Derived(None if out is None else out.storage_tensors())
    storage = {}
    # Of a single shard, FSDP2 hands over the first tensor only.
    inputs = [*outputs, *(getattr(shard, name) for name in gathered.names[len(outputs) :])]
    for name, inner in zip(gathered.names, inputs, strict=True):
        storage[name] = _assembled(name, inner, whole, gathered.n_shards, derived)
    quantizer = whole.quantizer
    layout = quantizer.storage_layout(*flat_shape(whole.shape))
    for name in layout.keys() - storage.keys():
        shape, kind = layout[name]
        storage[name] = derived.make(name, shape, kind, outputs[0].device)
    tensor = out
    if out is None:
        tensor = type(shard)(whole.shape, dtype, quantizer, storage)
    if quantizer != quantizer.without_derived():
        # Not through the tensor, whose version would tell autograd that its value has changed.
        codes = (tensor._rowwise_data, tensor._columnwise_data)
        transpose_codes([codes], BITS[type(quantizer)], outputs[0].device)
    return None if out is not None else (tensor, tuple(derived.tensors))


class _Derived:
    """Inner tensors that do not share memory with what was gathered, allocated once."""

    def __init__(self, existing: dict[str, Tensor] | None) -> None:
        self._existing = existing
        self.tensors: list[Tensor] = []

    def make(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The tensor ``name``, with any content."""
        if self._existing is not None:
            return self._existing[name]
        self.tensors.append(torch.empty(shape, dtype=dtype, device=device))
        return self.tensors[-1]


def _assembled(name: str, inner: Tensor, whole: Whole, n_shards: int, derived: _Derived) -> Tensor:
    """An inner tensor of the whole from those of all shards, one after the other."""
    if name == "_amax":
        # That of a rank without rows may never have been written.
        amax = derived.make(name, (1,), inner.dtype, inner.device)
        return torch.amax(inner, 0, keepdim=True, out=amax)
    pitch = whole.quantizer.row_pitch[name]
    entries = -(-whole.rows // pitch)
    shape, _ = whole.quantizer.storage_layout(*flat_shape(whole.shape))[name]
    if pitch > 1 and whole.is_cut:
        index = _entry_of_shards(whole, pitch, inner.device)
        if shape[0] == entries:
            target = derived.make(name, (entries, *inner.shape[1:]), inner.dtype, inner.device)
            return torch.index_select(inner, 0, index, out=target)
        inner = inner[index]
    if shape[0] == entries:
        return inner[:entries]
    padded = derived.make(name, (shape[0], *inner.shape[1:]), inner.dtype, inner.device)
    padded[:entries] = inner[:entries]
    padded[entries:] = 0
    return padded


def _entries(whole: Whole, pitch: int) -> int:
    """The most entries of ``pitch`` rows that a shard has a part of."""
    if not whole.is_cut:
        return -(-whole.chunk_rows // pitch)
    return (pitch - 1 + whole.chunk_rows - 1) // pitch + 1


def _entry_of_shards(whole: Whole, pitch: int, device: torch.device) -> Tensor:
    """For each entry of the whole, where it is among those of all shards."""
    entry = torch.arange(math.ceil(whole.rows / pitch))
    shard = entry * pitch // whole.chunk_rows
    first_entry = shard * whole.chunk_rows // pitch
    return (shard * _entries(whole, pitch) + entry - first_entry).to(device, non_blocking=True)
