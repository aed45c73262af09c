"""FSDP2's all-gather hooks for quantized weights.

The hooks gather codes and scales, about half a byte per weight in NVFP4. If matmuls read the values
of a weight, the gathered weight is a plain tensor decoded from them, so that layers and compiled
graphs are those of a model without quantized weights. If matmuls read codes, it is a quantized
tensor.

FSDP2 runs several operators per gathered tensor, which would make the GPU wait for the host. So the
codes and scales of a shard are in one buffer, which is gathered as it is and decoded in one launch.

``fully_shard`` cuts a weight into equal numbers of rows, even within blocks. Then both shards have
a scale for the cut block, with the same value (``scale_exchange.py``).

FSDP2 calls both hooks for every weight, forward and backward, so their preparation is cached. The
amax of an NVFP4 tensor is not gathered, because every rank has it.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fp4adam.distributed.dtensor import local
from fp4adam.distributed.scale_exchange import ShardInfo
from fp4adam.distributed.shards import parallel_infos, settle_shard
from fp4adam.tensors.blocks import blocks_of_parts, flat_shape, round_up
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.rows import keep_left
from fp4adam.tensors.storage import GlobalSpec, SharedStorage, Storage
from fp4adam.tensors.swizzle import build_gemm_scales, new_gemm_scale


@dataclasses.dataclass(eq=False, slots=True)
class Gathering:
    """The tensors that a shard contributes to an all-gather.

    Attributes:
        storage: The shard's inner tensors that this was made for.
        inputs: Views of them, of the same sizes on every rank.
        known: The names of inner tensors of the whole weight that the shard has already.
        stacks: Where the entries of all shards are in the outputs, by name.
        decoded: The first gathered output, the decoded values, and a function that decodes once
            more, or None. FSDP2 frees and reallocates the memory of outputs and values.
    """

    storage: Storage
    inputs: tuple[Tensor, ...]
    known: tuple[str, ...]
    stacks: "dict[str, _Stack]"
    decoded: tuple[Tensor, Tensor, Callable[[], None]] | None = None


class _Stack(NamedTuple):
    """A view of a gathered output: its index, then dtype, shape, strides and offset in elements."""

    output: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    def of(self, outputs: tuple[Tensor, ...]) -> Tensor:
        flat = outputs[self.output].view(-1).view(self.dtype)
        return flat.as_strided(self.shape, self.strides, self.start)


# Alignment in bytes of inner tensors in a packed buffer: a cache line of a GPU.
_ALIGNMENT = 128

# The cached inputs of shards, and the functions that refill weights gathered earlier.
_gatherings: WeakKeyDictionary[SharedStorage, Gathering] = WeakKeyDictionary()
_refills: WeakKeyDictionary[SharedStorage, tuple[Callable[[], object], ...]] = WeakKeyDictionary()


def gather_codes(shard: QuantizedTensor, mesh: DeviceMesh, dtype: torch.dtype) -> QuantizedTensor:
    """The whole weight of a settled shard, quantized, whatever matmuls read; a collective call."""
    place, outputs = ShardInfo.in_mesh(mesh), {}
    n_shards = _number_of_shards(_global_spec(shard), mesh)
    inputs, names = _entries_to_gather(shard, mesh, codes=True)
    for name, inner in inputs.items():
        own = inner.to(place.device).contiguous()
        outputs[name] = own.new_empty(n_shards, *own.shape)
        if n_shards > 1:
            dist.all_gather([*outputs[name]], own, place.group)
        else:
            outputs[name].copy_(own)
    known = {"amax": shard.inner.amax.to(place.device)} if names else {}
    return _whole_codes(shard, outputs, known, dtype)[0]


class _PreAllGather:
    """Returns what to gather, equal in size on every rank, and metadata for the second hook."""

    # FSDP2 inspects the signature at each call, which is slow for a bound method. Given more than
    # the mesh, it would refuse uneven shards.
    __slots__ = ("_shard",)
    __signature__ = inspect.Signature(
        [inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_ONLY)]
    )

    def __init__(self, shard: QuantizedTensor) -> None:
        self._shard = shard

    def __call__(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Gathering]:
        shard, shared = self._shard, self._shard._shared
        if shared.unsettled:
            shares = _global_spec(shard).shares_scales
            infos = (ShardInfo.in_mesh(mesh), *parallel_infos(shard)) if shares else ()
            settle_shard(shard, infos)
        gathering = _gatherings.get(shared)
        if gathering is None or gathering.storage is not shared.tensors:
            gathering = _gatherings[shared] = _make_gathering(shard, mesh)
        return gathering.inputs, gathering


def _make_gathering(shard: QuantizedTensor, mesh: DeviceMesh) -> Gathering:
    spec = _global_spec(shard)
    codes = spec.quantizer.multiplies_codes
    inputs, known = _entries_to_gather(shard, mesh, codes)
    n_shards, stacks = _number_of_shards(spec, mesh), {}
    # A shard that begins within a block stores its first row behind others, and so at an address of
    # its own. A rank without rows sends its amax, too.
    if not (codes or spec.is_cut or "amax" in inputs):
        return _pack(shard, n_shards, inputs, known)
    for i, (name, entries) in enumerate(inputs.items()):
        # The first rank always has rows, so its amax counts.
        shape = (1,) if name == "amax" else (n_shards, *entries.shape)
        strides = torch.empty(shape, device="meta").stride()
        stacks[name] = _Stack(i, entries.dtype, shape, strides)
    return Gathering(shard.inner, tuple(inputs.values()), known, stacks)


def _number_of_shards(spec: GlobalSpec, mesh: DeviceMesh) -> int:
    # The composable replicate() passes a mesh on which every rank has the whole weight.
    # With a first dimension of 0 or 1, all shards but at most one are empty.
    return mesh.size() if spec.chunk < spec.shape[0] or spec.shape[0] <= 1 else 1


def _entries_to_gather(
    shard: QuantizedTensor, mesh: DeviceMesh, codes: bool
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The inner tensors to gather, equal in size on every rank; the names of those known on all.

    ``codes``: Gather the codes of both directions, unless one can be derived from the other; else
    only what is needed to decode the values.
    """
    tensors, spec, first = shard.inner, _global_spec(shard), shard._first_row
    inputs, known = {}, ()
    for name, rows in shard.quantizer.layout.rows_per_entry.items():
        if not codes and name.startswith("columnwise"):
            continue
        inputs[name] = inner = getattr(tensors, name)
        if rows == 1:
            inputs[name] = inner[first:][: spec.chunk_rows]
        elif not spec.is_cut:  # else there is room for any first row within a block
            inputs[name] = inner[: -(-spec.chunk_rows // rows)]
    if tensors.amax is not None:
        # Gathered if some rank has no rows: such a rank's amax is not written when the others load
        # theirs.
        n_others = _number_of_shards(spec, mesh) - 1
        if spec.rows <= n_others * spec.chunk_rows:
            inputs["amax"] = tensors.amax
        else:
            known = ("amax",)
    return inputs, known


def _known(
    shard: QuantizedTensor, metadata: Gathering, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Inner tensors of the gathered shard that are those of the whole weight as well.

    They are not copied: a step that writes them makes the gathered codes stale too.
    """
    tensors = {name: getattr(metadata.storage, name) for name in names}
    if metadata.storage is not shard.inner:
        # FSDP2 has copied an offloaded shard, in another stream, and drops the copy before the
        # kernels of this stream have read it.
        for tensor in tensors.values():
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensors


def _pack(
    shard: QuantizedTensor, n_shards: int, inputs: dict[str, Tensor], known: tuple[str, ...]
) -> Gathering:
    """Move codes and scales of a shard to one buffer, equal in size on every rank."""
    keep_left(shard)
    inner, starts, size = shard.inner.existing(), {}, 0
    for name, entries in inputs.items():
        starts[name] = size
        # The padding of the last one stays at home. Kernels read in pieces of 16 bytes.
        gathered = size + round_up(entries.nbytes, 16)
        size += round_up(inner[name].nbytes, _ALIGNMENT)
    stacks = {}
    with torch.inference_mode(False):  # an inference tensor could not be versioned
        buffer = torch.zeros(size, dtype=torch.uint8, device=shard.device)
        for name, start in starts.items():
            old, dtype = inner[name], inner[name].dtype
            part = buffer[start : start + old.nbytes].view(dtype).view(old.shape)
            inner[name] = part.copy_(old)
            shape = n_shards, *inputs[name].shape
            strides = gathered // dtype.itemsize, *part.stride()
            stacks[name] = _Stack(0, dtype, shape, strides, start // dtype.itemsize)
        shard.inner = storage = Storage.of(inner)
    return Gathering(storage, (buffer[:gathered],), known, stacks)


def _global_spec(shard: QuantizedTensor) -> GlobalSpec:
    spec = shard.global_spec
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
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """The whole weight, and the tensors besides the outputs that FSDP2 has to free.

    With ``out``, the earlier result, everything in it that is no view of the outputs is rewritten,
    and None is returned.
    """
    if out is not None and metadata.decoded is not None:
        flat, values, decode = metadata.decoded
        # Equal addresses at the same time mean the same memory.
        is_known = flat.data_ptr() == all_gather_outputs[0].data_ptr()
        if is_known and values.data_ptr() == local(out).data_ptr():
            decode()
            _free(all_gather_outputs)
            return None
    spec = _global_spec(shard)
    # On one rank, and for replicate(), FSDP2 copies and passes only the first input.
    n, codes = len(all_gather_outputs), spec.quantizer.multiplies_codes
    missing = [name for name, stack in metadata.stacks.items() if stack.output >= n]
    known = _known(shard, metadata, (*metadata.known, *missing))
    if codes and out is not None:
        return _fill_in_again(local(out), known)
    given = ((name, stack) for name, stack in metadata.stacks.items() if stack.output < n)
    stacks = {name: stack.of(all_gather_outputs) for name, stack in given}
    if codes:
        return _whole_codes(shard, stacks, known, param_dtype)
    shape = flat_shape(spec.shape)
    if out is None:
        with torch.inference_mode(False):  # the tensor is reused, maybe for training
            # On the outputs' device, because the shard itself may be offloaded to the CPU.
            values = torch.empty(shape, dtype=param_dtype, device=all_gather_outputs[0].device)
    else:
        values = local(out).data.view(shape)
    # .data has its own version: autograd must not see a rewrite of what the forward pass saved.
    rewritten = values.data
    decode = spec.quantizer.decoder(Storage(**stacks, **known), rewritten)
    decode()
    metadata.decoded = all_gather_outputs[0], rewritten, decode
    _free(all_gather_outputs)
    return (values.view(spec.shape), (values,)) if out is None else None


def _free(outputs: tuple[Tensor, ...]) -> None:
    for inner in outputs:
        inner.untyped_storage().resize_(0)  # FSDP2 reallocates it before the next all-gather


def _whole_codes(
    shard: QuantizedTensor,
    stacks: dict[str, Tensor],
    known: dict[str, Tensor],
    dtype: torch.dtype,
) -> tuple[QuantizedTensor, tuple[Tensor, ...]]:
    """The whole weight as a quantized tensor, with swizzled scales; other derived parts follow."""
    spec = _global_spec(shard)
    parts = {name: _assemble(name, stack, spec) for name, stack in stacks.items()}
    tensors = Storage(**{name: part for name, (part, _) in parts.items()}, **known)
    filled = [part for part, refill in parts.values() if refill is not None]
    tensor = type(shard)(spec.shape, dtype, spec.quantizer, tensors)
    if spec.quantizer.optimize_for_gemm:
        kept = spec.quantizer.layout.kept
        gemm_scales = {f"{usage}_gemm_scale_inv": new_gemm_scale(tensor, usage) for usage in kept}
        tensor.inner = tensors.exchange(**gemm_scales)
        filled += gemm_scales.values()
    tensor._shared.is_gathered = True
    if spec.is_parallel:
        tensor.global_spec = dataclasses.replace(spec, chunk=spec.shape[0])
    _refills[tensor._shared] = tuple(refill for _, refill in parts.values() if refill)
    return tensor, tuple(filled)


QuantizedTensor.fsdp_pre_all_gather = property(_PreAllGather)
QuantizedTensor.fsdp_post_all_gather = post_all_gather
# torch frees the outputs after the hook if this is true (pytorch#194114). Codes are views of them.
QuantizedTensor.fsdp_should_release_all_gather_outputs_after_post_all_gather = lambda shard: (
    not _global_spec(shard).quantizer.multiplies_codes
)


def _fill_in_again(out: QuantizedTensor, known: dict[str, Tensor]) -> None:
    shared = out._shared
    # Replaced even if the same tensors are known: its identity shows that derived values are stale.
    shared.tensors = shared.tensors.exchange(**known)
    refills, has_gemm_scales = _refills[shared], out.quantizer.optimize_for_gemm
    if refills or has_gemm_scales:
        # Compiled graphs have saved these tensors for the backward pass.
        inner = tuple(shared.tensors.existing().values())
        with torch.autograd._unsafe_preserve_version_counter(inner):
            for refill in refills:
                refill()
            build_gemm_scales([out])


def _assemble(name: str, stack: Tensor, spec: GlobalSpec) -> tuple[Tensor, Callable | None]:
    """An inner tensor of the whole weight, padded, and what refills it, unless it is a view."""
    if name == "amax":
        return stack.view(-1)[:1], None  # the first rank always has rows
    inner = stack.flatten(0, 1)
    rows = spec.quantizer.layout.rows_per_entry[name]
    entries = -(-spec.rows // rows)
    shape, _ = spec.quantizer.layout.shapes(*flat_shape(spec.shape))[name]
    is_cut = rows > 1 and spec.is_cut
    if shape[0] == entries and not is_cut:
        return inner[:entries], None
    padded = inner.new_zeros(shape[0], *inner.shape[1:])
    part = spec.chunk_rows, stack.shape[1]
    order = blocks_of_parts(spec.rows, rows, *part, inner.device) if is_cut else slice(entries)

    def refill() -> None:
        padded[:entries] = inner[order]
        padded[entries:] = 0  # FSDP2 reallocates this memory without clearing it

    refill()
    return padded, refill
