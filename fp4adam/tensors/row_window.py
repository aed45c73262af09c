"""Tensors that are some rows of what their inner tensors hold: slices, pieces, and shards.

The inner tensors hold a matrix of whole blocks. A window on it has the same inner tensors, and
knows its first row and how many there are. So a slice costs nothing, what is written to it is
written to the tensor, and a shard that begins in the middle of a block is like any other one.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp4adam.tensors.quantizer import Quantizer, flat_shape, round_up

if TYPE_CHECKING:
    from fp4adam.tensors.quantized_tensor import QuantizedTensor


@dataclasses.dataclass(frozen=True)
class Whole:
    """The tensor that a shard is a part of.

    Attributes:
        shape: Its shape.
        quantizer: How it is quantized; a shard may do without what can be derived.
        chunk: How much of the first dimension each shard holds; the last ones may hold less.
    """

    shape: tuple[int, ...]
    quantizer: Quantizer
    chunk: int

    @functools.cached_property
    def rows(self) -> int:
        """Rows of the matrix that it is quantized as."""
        return flat_shape(self.shape)[0]

    @functools.cached_property
    def chunk_rows(self) -> int:
        """Rows of one shard."""
        return self.chunk * (self.rows // self.shape[0]) if self.shape[0] else 0

    @functools.cached_property
    def is_cut(self) -> bool:
        """Whether shards end within blocks, whose scales they have to agree on."""
        return self.chunk_rows < self.rows and self.chunk_rows % self.quantizer.block_rows != 0

    @functools.cached_property
    def shares_scales(self) -> bool:
        """Whether a shard cannot be quantized without knowing the others."""
        return self.chunk_rows < self.rows and (self.is_cut or self.quantizer.scales_tensor)


@dataclasses.dataclass
class Origin:
    """What all tensors on one storage share beside its bytes.

    Attributes:
        init_val: The value before quantization, if it was kept for the optimizer; on the meta
            device it only says that the first value that is written has to be kept.
        pending: Rows that have been written and could not be quantized yet, because that takes all
            rows of the tensor; plain, [rows, cols].
        rows: How many rows of the stored matrix are values; None for all of them.
        first_row: Where these begin; None for a shard that has not been written yet.
        whole: What this is a shard of, or None.
        unsettled: Whether a shard may have been written since the ranks last agreed on its scales.
        name: Of the parameter in its model, for errors.
        writes: How often something other than an optimizer has written to it.
        scale_group: The weights that it shares its amax with, a ``ScaleGroup``, or None.
        gathering: What FSDP2 gathers of a shard, worked out once; of this storage alone.
        refills: What has to be done when FSDP2 has gathered the tensor again; None for others.
    """

    init_val: Tensor | None = None
    pending: Tensor | None = None
    rows: int | None = None
    first_row: int | None = 0
    whole: Whole | None = None
    unsettled: bool = False
    name: str | None = None
    writes: int = 0
    scale_group: Any = None
    gathering: Any = dataclasses.field(default=None, init=False)
    refills: tuple[Callable[[], object], ...] | None = dataclasses.field(default=None, init=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "gathering": None, "refills": None}

    # Asynchronous checkpoints, too, copy by this; what is on the meta device they could not.
    def __deepcopy__(self, memo: dict[int, Any]) -> "Origin":
        names = ("init_val", "pending", "scale_group")
        copies = {name: copy.deepcopy(getattr(self, name), memo) for name in names}
        return dataclasses.replace(self, **copies)


def matrix_shape(tensor: "QuantizedTensor") -> tuple[int, int]:
    """Rows and columns of the matrix that a tensor is quantized as."""
    whole = tensor._origin.whole
    if whole is None:
        return flat_shape(tuple(tensor.shape))
    # A shard may have been flattened, or be empty.
    cols = whole.shape[-1]
    return tensor.numel() // max(cols, 1), cols


def stored_rows(tensor: "QuantizedTensor") -> int:
    """Rows of the matrix that the inner tensors hold."""
    for name, pitch in tensor.quantizer.row_pitch.items():
        if pitch == 1 and name.endswith("_data"):
            return getattr(tensor, name).shape[0]
    return matrix_shape(tensor)[0]


def is_all(tensor: "QuantizedTensor") -> bool:
    """Whether a tensor has all rows of its origin."""
    rows = tensor._origin.rows
    rows = stored_rows(tensor) if rows is None else rows
    return tensor._start == 0 and matrix_shape(tensor)[0] == rows


def is_whole_blocks(tensor: "QuantizedTensor") -> bool:
    """Whether a tensor begins where its storage does, and no other one has a part of its blocks."""
    whole = tensor._origin.whole
    return tensor._first_row == 0 and is_all(tensor) and not (whole is not None and whole.is_cut)


def own_blocks(tensor: "QuantizedTensor") -> "QuantizedTensor":
    """The tensor on a storage without blocks of which it has no row; itself if it has all rows.

    What can be derived is left out.
    """
    if is_all(tensor):
        return tensor
    (rows, _), block = matrix_shape(tensor), tensor.quantizer.block_rows
    total, first = stored_rows(tensor), tensor._first_row
    low = first // block * block
    high = max(min(round_up(first + rows, block), total), low)
    quantizer = tensor.quantizer.without_derived()
    part = type(tensor)(
        tuple(tensor.shape), tensor.dtype, quantizer, _stored_between(tensor, low, high)
    )
    pending = tensor._origin.pending
    part._origin = dataclasses.replace(
        tensor._origin,
        init_val=None,
        pending=None if pending is None else rows_of(tensor, pending),
        rows=rows,
        first_row=first - low,
    )
    return part


def _stored_between(tensor: "QuantizedTensor", low: int, high: int) -> dict[str, Tensor]:
    """Views of the inner tensors on the blocks of stored rows; without what can be derived."""
    storage = {} if tensor._amax is None else {"_amax": tensor._amax}
    for name, pitch in tensor.quantizer.row_pitch.items():
        inner = getattr(tensor, name)
        # The last one keeps its padding.
        stop = inner.shape[0] if high == stored_rows(tensor) else -(-high // pitch)
        storage[name] = inner[low // pitch : stop]
    return storage


def read(tensor: "QuantizedTensor", dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    """Decode a tensor to a plain matrix of ``dtype``; ``after`` as in :meth:`Quantizer.read`."""
    pending = tensor.settled()._origin.pending
    if pending is not None:
        return rows_of(tensor, pending).to(dtype, copy=True)
    part, rows = own_blocks(tensor), matrix_shape(tensor)[0]
    values = part.quantizer.read(part, dtype, after)
    # In memory of its own, where that begins: it may become a state of a DTensor.
    return values if len(values) == rows else values[part._first_row :][:rows].clone()


def write(tensor: "QuantizedTensor", value: Tensor, amax: Tensor | None = None) -> None:
    """Overwrite a tensor by plain values on its device; ``amax`` as for ``Quantizer.write``."""
    origin = tensor._origin
    waits = _waits(origin)
    origin.unsettled |= waits
    if tensor.is_meta or not value.numel():
        return
    matrix = value.reshape(matrix_shape(tensor))
    if not is_all(tensor):
        if origin.pending is None:
            every = _every_row(tensor)
            origin.pending = read(every, matrix.dtype)
        elif origin.pending.dtype != matrix.dtype:
            origin.pending = origin.pending.float()
        rows_of(tensor, origin.pending).copy_(matrix)
    elif waits:
        origin.pending = matrix.clone()
    else:
        origin.pending = None
        _quantize(tensor, matrix, amax)


def settle(tensor: "QuantizedTensor") -> None:
    """Quantize pending rows, unless that takes what other ranks have."""
    origin = tensor._origin
    if _waits(origin):
        return
    pending, origin.pending = origin.pending, None
    _quantize(_every_row(tensor), pending)
    if origin.init_val is not None:
        origin.init_val = pending


def copy_bytes(tensor: "QuantizedTensor", source: "QuantizedTensor", non_blocking: bool) -> bool:
    """Copy codes and scales of ``source``; False if they would not mean the same here."""
    origin, other = tensor._origin, source.settled()._origin
    if type(tensor) is not type(source):
        return False
    if origin.whole is None and other.whole is None:
        mine, others = tensor.quantizer, source.quantizer
        same = mine.with_compact_scales() == others.with_compact_scales()
        same &= is_all(tensor) and is_all(source)
        if other.pending is not None or not same:
            return False
        values = source.storage_tensors()
        for name, inner in tensor.storage_tensors().items():
            # What is not stored can be derived.
            value = values[name] if name in values else getattr(source, name.removeprefix("_"))
            inner.copy_(value, non_blocking)
        origin.pending = None
        return True
    pitch = tensor.quantizer.row_pitch
    if tensor.quantizer.without_derived() != source.quantizer.without_derived() or not pitch:
        return False
    rows = matrix_shape(tensor)[0]
    if origin.first_row is None:
        origin.first_row = source._first_row % tensor.quantizer.block_rows
        origin.rows = rows
        # FSDP2 moves shards to larger memory, which does not make the values new.
        origin.writes = other.writes
        _take_init_val(tensor, source)
    if other.pending is not None or (origin.pending is not None and not is_all(tensor)):
        return False
    origin.pending = None
    to, start = tensor._first_row, source._first_row
    if (to - start) % tensor.quantizer.block_rows:
        return False
    for name, step in pitch.items():
        targets = getattr(tensor, name)[to // step : -(-(to + rows) // step)]
        values = getattr(source, name)[start // step : -(-(start + rows) // step)]
        width = min(targets.shape[-1], values.shape[-1])
        targets[..., :width].copy_(values[..., :width], non_blocking)
    if tensor._amax is not None and rows:
        tensor._amax.copy_(source._amax, non_blocking)
    _build_derived(_every_row(tensor))
    return True


def _build_derived(tensor: "QuantizedTensor") -> None:
    """Write again what follows from the other inner tensors."""
    from fp4adam.tensors.transpose import build_columnwise

    if tensor.quantizer.with_compact_scales() != tensor.quantizer.without_derived():
        build_columnwise([tensor])
    _build_gemm_scales(tensor)


def _build_gemm_scales(tensor: "QuantizedTensor") -> None:
    if tensor.quantizer.optimize_for_gemm:
        from fp4adam.tensors.swizzle import build_gemm_scales

        build_gemm_scales([tensor])


def is_of(tensor: "QuantizedTensor", value: Tensor) -> bool:
    """Whether a tensor is what plain values are quantized to, if the scales that it has are right.

    Of shards that share scales, a rank can tell no more without the others.
    """
    pending = tensor.settled()._origin.pending
    part, (rows, cols) = own_blocks(tensor), matrix_shape(tensor)
    own = slice(part._first_row, part._first_row + rows)

    def codes(matrix: Tensor) -> Tensor:
        shape = (stored_rows(part), cols)
        every_row = torch.zeros(shape, dtype=torch.float32, device=tensor.device)
        every_row[own] = matrix.view(rows, cols)
        return part.quantizer.recode(every_row, part)[own].short()

    if pending is None:
        name = "_rowwise_data" if part.quantizer.rowwise else "_columnwise_data"
        actual = getattr(part, name)[own].short()
    else:
        actual = codes(rows_of(tensor, pending))
    slack = 0 if part.quantizer.recodes_exactly else 1
    return bool(((codes(value) - actual).abs() <= slack).all())


def make_shard(tensor: "QuantizedTensor", shape: tuple[int, ...]) -> "QuantizedTensor":
    """A shard of ``tensor``, or of what that is a shard of, that has not been written yet.

    Raises:
        ValueError: If the tensor can only be sharded otherwise, or not at all.
    """
    whole = tensor._origin.whole
    if whole is None:
        whole = Whole(tuple(tensor.shape), tensor.quantizer, shape[0])
    quantizer = whole.quantizer.without_derived()
    name = tensor._origin.name
    what = type(tensor).__name__ if name is None else f"parameter {name!r}"
    if not quantizer.row_pitch:
        raise ValueError(
            f"{what} must have rowwise=True and two_dimensional=True to be sharded, got "
            f"{whole.quantizer}; quantize it so, or leave it in high precision (filter=...)"
        )
    if tuple(shape[1:]) != tuple(whole.shape[1:]):
        raise ValueError(
            f"{what} must be sharded along its first dimension, got shards {tuple(shape)} of "
            f"{tuple(whole.shape)}; use Shard(0)"
        )
    block, rows = quantizer.block_rows, math.prod(shape[:-1])
    if whole.is_cut:
        # Wherever in a block it is going to begin.
        rows = round_up(rows + block - 1, block)
    storage = quantizer.zeros(rows, shape[-1], tensor.device)
    shard = type(tensor)(tuple(shape), tensor.dtype, quantizer, storage)
    shard._origin = Origin(
        rows=None,
        first_row=None,
        whole=whole,
        unsettled=True,
        name=name,
        scale_group=tensor._origin.scale_group,
    )
    return shard


def _take_init_val(tensor: "QuantizedTensor", source: "QuantizedTensor") -> None:
    value = source._origin.init_val
    if value is not None:
        rows = rows_of(source, value).reshape(tensor.shape)
        tensor._origin.init_val = rows.clone()


def _waits(origin: Origin) -> bool:
    """Whether all rows of an origin are not enough to quantize them."""
    if origin.whole is not None:
        return origin.whole.shares_scales
    return origin.rows is not None  # a copy of rows that were cut off


def rows_of(tensor: "QuantizedTensor", value: Tensor) -> Tensor:
    """The rows of a window, [rows, cols], of a value of all rows of its origin."""
    rows, cols = matrix_shape(tensor)
    return value.reshape(-1, cols)[tensor._start : tensor._start + rows]


def _every_row(tensor: "QuantizedTensor") -> "QuantizedTensor":
    """The window on all rows of the origin, as a matrix."""
    rows = tensor._origin.rows
    shape = (stored_rows(tensor) if rows is None else rows, matrix_shape(tensor)[1])
    return tensor._alias(shape, -tensor._start)


def _quantize(tensor: "QuantizedTensor", matrix: Tensor, amax: Tensor | None = None) -> None:
    """Quantize all rows of an origin that shares no scales with another one."""
    rows = len(matrix)
    if rows < stored_rows(tensor):
        storage = _stored_between(tensor, 0, rows)
        tensor = type(tensor)(tuple(matrix.shape), tensor.dtype, tensor.quantizer, storage)
    options = {} if amax is None else {"amax": amax}
    tensor.quantizer.write(matrix.contiguous(), tensor, **options)
    _build_gemm_scales(tensor)


torch.serialization.add_safe_globals([Origin, Whole])
