"""What FSDP2 asks of a shard: what to gather, and the tensor that comes of it.

Gathered are codes and scales, about half a byte per weight in NVFP4. ``fully_shard`` cuts a weight
into equal numbers of rows, wherever that is: a shard that ends within a block has the scale of this
block, as has the next one, and both are the same (``scale_exchange.py``).

FSDP2 calls both hooks for every weight, forward and backward, and the GPU waits for the host. So
what they do is worked out once: as a rule, nothing is left to do. And each tensor that is gathered
takes FSDP2 several operators, so what every rank has already is not: the amax of an NVFP4 tensor.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fp4adam.distributed.scale_exchange import Place, settle_shard
from fp4adam.tensors.quantizer import flat_shape
from fp4adam.tensors.row_window import Whole
from fp4adam.tensors.swizzle import build_gemm_scales, scales_of

if TYPE_CHECKING:
    from fp4adam.tensors.quantized_tensor import QuantizedTensor


class Gathering(NamedTuple):
    """What a shard contributes to an all-gather.

    Attributes:
        generation: Of the inner tensors; see ``QuantizedTensor.storage_generation``.
        inputs: Views of them, of the same sizes on every rank.
        names: Which they are.
        known: The inner tensors of the whole that the shard has, by name. They are its own: a step
            writes them while the weight is still gathered, whose codes are out of date then anyway.
    """

    generation: int
    inputs: tuple[Tensor, ...]
    names: tuple[str, ...]
    known: dict[str, Tensor]


def pre_all_gather(
    shard: "QuantizedTensor", mesh: DeviceMesh
) -> tuple[tuple[Tensor, ...], Gathering]:
    """The inner tensors to gather, of one size on every rank, and what comes of them."""
    origin = shard._origin
    if origin.unsettled and origin.whole is not None and origin.whole.shares_scales:
        settle_shard(shard, Place.in_mesh(mesh))
    gathering = origin.gathering
    if gathering is None or gathering.generation != shard.storage_generation:
        gathering = origin.gathering = _make_gathering(shard, mesh)
    return gathering.inputs, gathering


def _make_gathering(shard: "QuantizedTensor", mesh: DeviceMesh) -> Gathering:
    whole, first, n_shards = _whole_of(shard), shard._first_row, mesh.size()
    inputs, known = {}, {}
    for name, pitch in shard.quantizer.row_pitch.items():
        inner = getattr(shard, name)
        if pitch == 1:
            inputs[name] = inner[first : first + whole.chunk_rows]
        else:
            inputs[name] = inner[: _entries(whole, pitch)]
    if shard._amax is not None:
        # It is written with rows. A rank without any does not even know when others load theirs.
        has_idle_ranks = whole.rows <= (n_shards - 1) * whole.chunk_rows
        (inputs if has_idle_ranks else known)["_amax"] = shard._amax
    return Gathering(shard.storage_generation, tuple(inputs.values()), tuple(inputs), known)


def _whole_of(shard: "QuantizedTensor") -> Whole:
    whole = shard._origin.whole
    if whole is None:
        raise RuntimeError(
            f"a {type(shard).__name__} must have been sharded by fully_shard to be gathered, got "
            f"one of shape {tuple(shard.shape)}; quantize the model first, then call fully_shard"
        )
    return whole


def post_all_gather(
    shard: "QuantizedTensor",
    outputs: tuple[Tensor, ...],
    gathering: Gathering,
    dtype: torch.dtype,
    out: "QuantizedTensor | None" = None,
) -> "tuple[QuantizedTensor, tuple[Tensor, ...]] | None":
    """The whole tensor, and those of its inner tensors that FSDP2 frees beside ``outputs``.

    Codes that can be derived are left to who wants them; scales for GEMMs are written, in a launch.
    With ``out``, a tensor from here, what is no view is filled in again.
    """
    # On one rank, and for replicate(), FSDP2 copies the first input, and hands over no other.
    gathered, rest = gathering.names[: len(outputs)], gathering.names[len(outputs) :]
    known = gathering.known | {name: getattr(shard, name) for name in rest}
    if out is not None:
        _fill_in_again(out, known)
        return None
    whole = _whole_of(shard)
    parts = {
        name: _assemble(name, inner, whole) for name, inner in zip(gathered, outputs, strict=True)
    }
    storage = {name: part.tensor for name, part in parts.items()} | known
    filled = [part.tensor for part in parts.values() if part.refill is not None]
    tensor = type(shard)(whole.shape, dtype, whole.quantizer, storage)
    if whole.quantizer.optimize_for_gemm:
        gemm_scales = {name: pair.swizzled for name, pair in scales_of(tensor).items()}
        tensor = type(shard)(whole.shape, dtype, whole.quantizer, storage | gemm_scales)
        build_gemm_scales([tensor])
        filled += gemm_scales.values()
    tensor._origin.refills = tuple(part.refill for part in parts.values() if part.refill)
    return tensor, tuple(filled)


def _fill_in_again(out: "QuantizedTensor", known: dict[str, Tensor]) -> None:
    # Others if the shard has been moved or exchanged. Of a gathered tensor no plan has addresses.
    vars(out).update(known)
    refills, has_gemm_scales = out._origin.refills, out.quantizer.optimize_for_gemm
    if refills or has_gemm_scales:
        # Compiled graphs have saved these for the backward pass that they are filled in for.
        with torch.autograd._unsafe_preserve_version_counter((*out.storage_tensors().values(),)):
            for refill in refills:
                refill()
            build_gemm_scales([out])
    out._origin.writes += 1  # what has been made of it is out of date


class _Part(NamedTuple):
    """An inner tensor of the whole, and what fills it in unless it is a view."""

    tensor: Tensor
    refill: Callable[[], object] | None = None


def _assemble(name: str, inner: Tensor, whole: Whole) -> _Part:
    """An inner tensor of the whole from those of all shards, one after the other."""
    if name == "_amax":
        # The first rank has rows.
        return _Part(inner[:1])
    pitch = whole.quantizer.row_pitch[name]
    entries = -(-whole.rows // pitch)
    shape, _ = whole.quantizer.storage_layout(*flat_shape(whole.shape))[name]
    is_cut = pitch > 1 and whole.is_cut
    if shape[0] == entries and not is_cut:
        return _Part(inner[:entries])
    padded = inner.new_zeros(shape[0], *inner.shape[1:])
    index = _entry_of_shards(whole, pitch, inner.device) if is_cut else None

    def refill() -> None:
        if index is not None:
            torch.index_select(inner, 0, index, out=padded[:entries])
        else:
            padded[:entries] = inner[:entries]
        padded[entries:] = 0  # its memory has been someone else's

    refill()
    return _Part(padded, refill)


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
