"""What FSDP2 asks of a shard: what to gather, and the tensor that comes of it.

Gathered are codes and scales, about half a byte per weight in NVFP4. ``fully_shard`` cuts a weight
into equal numbers of rows, wherever that is: a shard that ends within a block has the scale of this
block, as has the next one, and both are the same (``scale_exchange.py``).

FSDP2 calls both hooks for every weight, forward and backward, and the GPU waits for the host. So
what they do is worked out once: as a rule, nothing is left to do. And each tensor that is gathered
takes FSDP2 several operators, so what every rank has already is not: the amax of an NVFP4 tensor.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fp4adam.distributed.scale_exchange import ShardInfo, settle_shard
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.storage import GlobalSpec, SharedStorage, Storage
from fp4adam.tensors.swizzle import build_gemm_scales, scales_of


class Gathering(NamedTuple):
    """What a shard contributes to an all-gather.

    Attributes:
        storage: The inner tensors that this has been worked out for.
        inputs: Views of them, of the same sizes on every rank.
        names: Which they are.
        known: The inner tensors of the whole that the shard has, by name. They are its own: a step
            writes them while the weight is still gathered, whose codes are out of date then anyway.
    """

    storage: Storage
    inputs: tuple[Tensor, ...]
    names: tuple[str, ...]
    known: dict[str, Tensor]


# What shards contribute, and what fills in the tensors that have been gathered from them again.
_gatherings: WeakKeyDictionary[SharedStorage, Gathering] = WeakKeyDictionary()
_refills: WeakKeyDictionary[SharedStorage, tuple[Callable[[], object], ...]] = WeakKeyDictionary()


# FSDP2 passes more than the mesh to a hook that takes it, and then refuses uneven shards.
def pre_all_gather(
    shard: QuantizedTensor, mesh: DeviceMesh
) -> tuple[tuple[Tensor, ...], Gathering]:
    """The inner tensors to gather, of one size on every rank, and what comes of them."""
    shared = shard.flush()._shared
    spec = shared.global_spec
    if shared.unsettled and spec is not None and spec.shares_scales:
        settle_shard(shard, ShardInfo.in_mesh(mesh))
    gathering = _gatherings.get(shared)
    if gathering is None or gathering.storage is not shared.tensors:
        gathering = _gatherings[shared] = _make_gathering(shard, mesh)
    return gathering.inputs, gathering


# FSDP2 asks for it each time, and it takes longer to find out than the hook takes to run.
pre_all_gather.__signature__ = inspect.signature(pre_all_gather)


def _make_gathering(shard: QuantizedTensor, mesh: DeviceMesh) -> Gathering:
    tensors = shard._shared.tensors
    spec, first = _global_spec(shard), shard._first_row
    # Composable replicate() passes a mesh of ranks each of which has everything.
    n_shards = mesh.size() if spec.is_divided else 1
    inputs, known = {}, {}
    for name, rows in shard.quantizer.rows_per_entry.items():
        inner = getattr(tensors, name)
        if rows == 1:
            inputs[name] = inner[first : first + spec.chunk_rows]
        else:
            inputs[name] = inner[: _entries(spec, rows)]
    if tensors.amax is not None:
        # It is written with rows. A rank without any does not even know when others load theirs.
        has_idle_ranks = spec.rows <= (n_shards - 1) * spec.chunk_rows
        (inputs if has_idle_ranks else known)["amax"] = tensors.amax
    return Gathering(tensors, tuple(inputs.values()), tuple(inputs), known)


def _global_spec(shard: QuantizedTensor) -> GlobalSpec:
    spec = shard._shared.global_spec
    if spec is None:
        raise RuntimeError(
            f"a {type(shard).__name__} must have been sharded by fully_shard to be gathered, got "
            f"one of shape {tuple(shard.shape)}; quantize the model first, then call fully_shard"
        )
    return spec


def post_all_gather(
    shard: QuantizedTensor,
    all_gather_outputs: tuple[Tensor, ...],
    metadata: Gathering,
    param_dtype: torch.dtype,
    *,
    out: QuantizedTensor | None = None,
) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
    """The whole tensor, and those of its inner tensors that FSDP2 frees beside the outputs.

    Codes that can be derived are left to who wants them; scales for GEMMs are written, in a launch.
    With ``out``, a tensor from here, what is no view is filled in again.
    """
    spec = _global_spec(shard)
    # On one rank, and for replicate(), FSDP2 copies the first input, and hands over no other.
    n, own = len(all_gather_outputs), shard._shared.tensors
    gathered, rest = metadata.names[:n], metadata.names[n:]
    known = metadata.known | {name: getattr(own, name) for name in rest}
    if out is not None:
        _fill_in_again(out, known)
        return None
    parts = {
        name: _assemble(name, inner, spec)
        for name, inner in zip(gathered, all_gather_outputs, strict=True)
    }
    tensors = Storage(**{name: part.tensor for name, part in parts.items()}, **known)
    filled = [part.tensor for part in parts.values() if part.refill is not None]
    tensor = type(shard)(spec.shape, param_dtype, spec.quantizer, tensors)
    if spec.quantizer.optimize_for_gemm:
        gemm_scales = {name: pair.swizzled for name, pair in scales_of(tensor).items()}
        tensor._shared.tensors = dataclasses.replace(tensors, **gemm_scales)
        build_gemm_scales([tensor])
        filled += gemm_scales.values()
    tensor._shared.is_gathered = True
    _refills[tensor._shared] = tuple(part.refill for part in parts.values() if part.refill)
    return tensor, tuple(filled)


QuantizedTensor.fsdp_pre_all_gather = pre_all_gather
QuantizedTensor.fsdp_post_all_gather = post_all_gather


def _fill_in_again(out: QuantizedTensor, known: dict[str, Tensor]) -> None:
    shared = out._shared
    # Others if the shard has been moved or exchanged. And in any case another storage, whose
    # identity tells that what has been made of the old one is out of date.
    shared.tensors = dataclasses.replace(shared.tensors, **known)
    refills, has_gemm_scales = _refills[shared], out.quantizer.optimize_for_gemm
    if refills or has_gemm_scales:
        # Compiled graphs have saved these for the backward pass that they are filled in for.
        inner = tuple(shared.tensors.existing().values())
        with torch.autograd._unsafe_preserve_version_counter(inner):
            for refill in refills:
                refill()
            build_gemm_scales([out])


class _Part(NamedTuple):
    """An inner tensor of the whole, and what fills it in unless it is a view."""

    tensor: Tensor
    refill: Callable[[], object] | None = None


def _assemble(name: str, inner: Tensor, spec: GlobalSpec) -> _Part:
    """An inner tensor of the whole from those of all shards, one after the other."""
    if name == "amax":
        # The first rank has rows.
        return _Part(inner[:1])
    rows = spec.quantizer.rows_per_entry[name]
    entries = -(-spec.rows // rows)
    shape, _ = spec.quantizer.storage_layout(*flat_shape(spec.shape))[name]
    is_cut = rows > 1 and spec.is_cut
    if shape[0] == entries and not is_cut:
        return _Part(inner[:entries])
    padded = inner.new_zeros(shape[0], *inner.shape[1:])
    index = _entry_of_shards(spec, rows, inner.device) if is_cut else None

    def refill() -> None:
        if index is not None:
            torch.index_select(inner, 0, index, out=padded[:entries])
        else:
            padded[:entries] = inner[:entries]
        padded[entries:] = 0  # its memory has been someone else's

    refill()
    return _Part(padded, refill)


def _entries(spec: GlobalSpec, rows: int) -> int:
    """The most entries of ``rows`` rows that a shard has a part of."""
    if not spec.is_cut:
        return -(-spec.chunk_rows // rows)
    return (rows - 1 + spec.chunk_rows - 1) // rows + 1


def _entry_of_shards(spec: GlobalSpec, rows: int, device: torch.device) -> Tensor:
    """For each entry of the whole, where it is among those of all shards."""
    entry = torch.arange(math.ceil(spec.rows / rows), device="cpu")
    shard = entry * rows // spec.chunk_rows
    first_entry = shard * spec.chunk_rows // rows
    return (shard * _entries(spec, rows) + entry - first_entry).to(device, non_blocking=True)
