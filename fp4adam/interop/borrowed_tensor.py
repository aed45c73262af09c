"""Quantized tensors on the memory of other packages' tensors.

The step works on a tensor of this package that shares the codes of the other tensor, and its scales
if both use the same layout. If the layouts differ (scales repeated for the rows of a block,
transposed, unpadded or swizzled), the kernels write scales to a buffer, which is then copied back.
That costs at most an eighth of a byte per element, of the 27 that a step moves, and the kernels
need to know only one layout.
"""

import dataclasses
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fp4adam.interop.adapter import FIELDS, adapter_of, class_name, memory
from fp4adam.interop.strided_copy import StridedCopies
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.fingerprint import Column
from fp4adam.tensors.quantizer import Quantizer, check_dtype
from fp4adam.tensors.rows import is_of as has_codes_of
from fp4adam.tensors.storage import GlobalSpec, SharedStorage, Storage
from fp4adam.tensors.swizzle import read_gemm_scales

ALIGNMENT = 16  # in bytes, of everything that kernels read and write


class Whole(NamedTuple):
    """The shape of the tensor that a source is one rank's rows of, and the size of each shard."""

    shape: tuple[int, ...]
    chunk: int


class BorrowedTensor:
    """A quantized tensor that uses the memory of another package's tensor.

    Blocks of a shard begin at its first row, so ranks share no scale but that of a whole tensor.

    Attributes:
        tensor: This package's tensor on the same memory.
        copies: Pairs of views of the same scales: (in the source, in the tensor).
        mirrors: Pairs of codes, likewise, of which the source has a second copy.
        per_tensor_scale: The scale that the source has instead of an amax, or None.
        given: With delayed scaling the source's next encode scale and its largest magnitude so
            far, else None.
        adapter: The adapter of the source.
    """

    def __init__(self, source: Tensor, whole: Whole | None = None) -> None:
        """Borrow the memory of ``source``, which is a shard if there is a ``whole``.

        Raises:
            TypeError: If its class has no adapter, or its dtype is not supported.
            ValueError: If it has no supported format, if shards cut its blocks, or if its adapter
                returns wrong or too few fields.
        """
        # Weak, so that `borrow` keeps no tensor alive.
        self._source = weakref.ref(source)
        self.adapter = adapter_of(source)
        quantizer = self.adapter.quantizer(source)
        shape = tuple(source.shape)
        if whole is None:
            quantizer.check_shape(shape)
        else:
            self._check_shards(quantizer, whole)
        check_dtype(f"the dtype of a {class_name(type(source))}", source.dtype)
        self._rows, self._cols = flat_shape(shape)
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.mirrors: list[tuple[Tensor, Tensor]] = []
        self.per_tensor_scale: Tensor | None = None
        self.given: tuple[Tensor, Tensor] | None = None
        fields = dict(self.adapter.fields(source))
        self._memory = memory(source, self.adapter)
        shared = SharedStorage(self._storage(quantizer, fields))
        if whole is not None and quantizer.layout.tensor_scale == "current":
            shared.global_spec = GlobalSpec(whole.shape, quantizer, whole.chunk)
        self._given_fields = fields.get("scale"), fields.get("amax")
        if quantizer.layout.tensor_scale == "delayed":
            scale, amax = (self._field(fields, n, torch.float32, (1,)) for n in ("scale", "amax"))
            self.given = scale, amax
        self.tensor = quantizer.tensor_class(shape, source.dtype, quantizer, shared)
        with torch.no_grad():
            for target, own in self.copies:
                own.copy_(target[tuple(map(slice, own.shape))])
            read_gemm_scales(self.tensor)

    @property
    def source(self) -> Tensor:
        """The other package's tensor; it must be alive."""
        return self._source()

    @property
    def memory(self) -> list[Tensor]:
        """The attributes of the source that hold its memory."""
        return [part for part in self._memory if isinstance(part, Tensor)]

    def _check_shards(self, quantizer: Quantizer, whole: Whole) -> None:
        """Raise ValueError, on every rank alike, unless each shard can be quantized by itself."""
        quantizer.check_shape(whole.shape)
        per_index = math.prod(whole.shape[1:-1])
        chunk_rows, block = whole.chunk * per_index, quantizer.layout.block
        is_cut = whole.chunk < whole.shape[0] and chunk_rows % block != 0
        if quantizer.layout.scale_type is not None and is_cut:
            raise ValueError(
                f"shards of a {type(self.source).__name__} must have multiples of {block} rows, so "
                f"that no block lies on two ranks, got {chunk_rows} rows of shape {whole.shape}; "
                "use another number of ranks, or leave the layer in high precision"
            )

    def _storage(self, quantizer: Quantizer, fields: dict[str, Tensor]) -> Storage:
        """The inner tensors: shared fields where possible, new memory otherwise."""
        if unknown := fields.keys() - set(FIELDS):
            raise ValueError(
                f"fields of {class_name(type(self.source))} must be some of {', '.join(FIELDS)}, "
                f"got {', '.join(sorted(unknown))}; correct its adapter"
            )
        storage: dict[str, Tensor] = {}
        for name, (size, dtype) in quantizer.layout.shapes(self._rows, self._cols).items():
            own = torch.zeros(size, dtype=dtype, device=self.source.device)
            is_scale = name.endswith("_scale_inv")
            if name.endswith(("_data", "_gemm_scale_inv")):
                # Swizzled scales have the plain names in the source; the kernels write both.
                storage[name] = self._field(fields, name.replace("_gemm", ""), dtype, size)
            elif name == "amax":
                storage[name] = self._amax(quantizer, fields)
            elif name == "amax_history" or is_scale and quantizer.optimize_for_gemm:
                storage[name] = own
            elif name == "block_scale_inv":
                storage[name] = own
                self._copy_grid(quantizer, fields, own)
            else:
                storage[name] = self._scale(quantizer, fields, name, own)
        if quantizer.layout.shares_codes and quantizer.columnwise:
            codes = storage["rowwise_data"]
            field = self._field(fields, "columnwise_data", codes.dtype, tuple(codes.shape))
            if field.data_ptr() != codes.data_ptr():
                self.mirrors.append((field, codes))
        return Storage(**storage)

    def _amax(self, quantizer: Quantizer, fields: dict[str, Tensor]) -> Tensor:
        names = [n for n in ("amax_rowwise", "amax_columnwise") if n in fields]
        if not names and "per_tensor_scale" not in fields:
            raise ValueError(
                f"fields of {class_name(type(self.source))} must hold amax_rowwise, "
                f"amax_columnwise or per_tensor_scale, got {', '.join(sorted(fields))}; correct "
                "its adapter"
            )
        amaxes = [self._field(fields, name, torch.float32, (1,)) for name in names]
        shared = amaxes[0] if amaxes and _is_aligned(amaxes[0]) else None
        amax = torch.zeros(1, device=self.source.device) if shared is None else shared
        self.copies += [(other, amax) for other in amaxes if other is not amax]
        if "per_tensor_scale" in fields:
            self.per_tensor_scale = self._field(fields, "per_tensor_scale", torch.float32, (1,))
            if not amaxes:
                amax.copy_(_amax_of(quantizer, self.per_tensor_scale))
        return amax

    def _copy_grid(self, quantizer: Quantizer, fields: dict[str, Tensor], grid: Tensor) -> None:
        """Add the copies of the scales of square blocks, which the source may repeat per row."""
        for usage in quantizer.layout.kept:
            name, scales = f"{usage}_scale_inv", getattr(quantizer.layout, usage).scales
            field = self._field(fields, name, grid.dtype)
            blocks = grid.t() if scales.transposed else grid
            rows, cols = scales.extent(self._rows, self._cols)
            self._check(name, field, field.dim() == 2, "of two dimensions")
            self._check_extent(name, field, rows, cols)
            target = field[:rows, :cols]
            for dim, n in zip((1, 0), reversed(quantizer.layout.repeats(usage)), strict=True):
                target = target.unflatten(dim, (blocks.shape[dim], n))
            self.copies.append((target, blocks[:, None, :, None]))

    def _scale(
        self, quantizer: Quantizer, fields: dict[str, Tensor], name: str, own: Tensor
    ) -> Tensor:
        """The scales of one direction: the field itself if it fits, else ``own`` and a copy."""
        field = self._field(fields, name, own.dtype)
        if field.dim() == 2:
            rows, cols = quantizer.layout.inner[name].extent(self._rows, self._cols)
            self._check_extent(name, field, rows, cols)
            if field.is_contiguous() and field.shape[1] == own.shape[1] and _is_aligned(field):
                return field
            self.copies.append((field[:rows, :cols], own[:rows, :cols]))
        else:
            fits = field.dim() <= 5 and field.numel() == own.numel()
            rule = f"of at most five dimensions and as large as {tuple(own.shape)}"
            self._check(name, field, fits, rule)
            self.copies.append((field, own.view(field.shape)))
        return own

    def _field(
        self,
        fields: dict[str, Tensor],
        name: str,
        dtype: torch.dtype,
        size: tuple[int, ...] | None = None,
    ) -> Tensor:
        """A field of the adapter, checked; with a ``size`` contiguous and in that shape."""
        field = fields.get(name)
        kind = field.dtype if isinstance(field, Tensor) else type(field).__name__
        fits = isinstance(field, Tensor) and (field.dtype == dtype or dtype.itemsize == 1)
        if not fits or field.dtype.itemsize != dtype.itemsize or field.device != self.source.device:
            where = f" on {field.device}" if isinstance(field, Tensor) else ""
            raise ValueError(
                f"{name} of {class_name(type(self.source))} must be {dtype} on "
                f"{self.source.device}, got {kind}{where}; correct its adapter"
            )
        field = field.detach().view(dtype)
        if size is None:
            return field
        fits = field.is_contiguous() and field.numel() == math.prod(size)
        self._check(name, field, fits, f"contiguous and as large as {size}")
        return field.view(size)

    def _check(self, name: str, field: Tensor, condition: bool, rule: str) -> None:
        if not condition:
            raise ValueError(
                f"{name} of {class_name(type(self.source))} must be {rule}, got shape "
                f"{tuple(field.shape)} with strides {field.stride()}; make the tensor contiguous, "
                "or correct its adapter"
            )

    def _check_extent(self, name: str, field: Tensor, rows: int, cols: int) -> None:
        fits = field.shape[0] >= rows and field.shape[1] >= cols
        self._check(name, field, fits, f"at least [{rows}, {cols}]")

    def is_of(self, value: Tensor) -> bool:
        """Whether the tensor equals ``value``, a plain tensor of its shape, after quantization.

        Only the codes are compared if the scales depend on other ranks or on earlier values. Two
        encode scales may have one decode scale, so they may be off by 1 then.
        """
        if self.given is not None or self.tensor._shared.rows_share_scales:
            slack = int(self.per_tensor_scale is not None)
            return has_codes_of(self.tensor, value.to(self.source.device), slack)
        quantizer = dataclasses.replace(self.tensor.quantizer, optimize_for_gemm=False)
        wanted = quantizer.quantize(value).inner.existing()
        if self.per_tensor_scale is not None:
            # Compare scales: several amaxes round to the same per-tensor scale.
            scale = self.tensor.quantizer.per_tensor_scale(wanted.pop("amax"))
            if not torch.equal(scale, self.per_tensor_scale):
                return False
        for name, inner in wanted.items():
            actual = getattr(self.tensor.inner, name)
            if name.endswith("wise_scale_inv"):
                # Padding is the other package's business, so it is not compared.
                rows, cols = quantizer.layout.inner[name].extent(self._rows, self._cols)
                actual, inner = actual[:rows, :cols], inner[:rows, :cols]
            if not torch.equal(actual, inner):
                return False
        return True

    def value(self) -> Tensor:
        """The value that a master weight starts from, as a new float32 tensor."""
        value = self.adapter.get_high_precision_init_val(self.source)
        if value is not None:
            value = value.detach().to(self.source.device)
        # The initial value is stale if a checkpoint was loaded into the tensor since.
        if value is None or not self.is_of(value):
            value = self.adapter.dequantize(self.source)
        if value is None:
            return self.tensor.dequantize(torch.float32)
        return value.detach().to(torch.float32, copy=True).contiguous()

    def clear_high_precision_init_val(self) -> None:
        """Free the high-precision initial value."""
        self.adapter.clear_high_precision_init_val(self.source)

    def is_on(self, source: Tensor) -> bool:
        """Whether this is on the memory of ``source``, in its dtype."""
        if self.given is None:
            is_given = True
        else:
            is_given = all(map(is_, self.given_fields(), self._given_fields))
        return (
            source is self.source
            and source.dtype == self.tensor.dtype
            and all(map(is_, memory(source, self.adapter), self._memory))
            and is_given
        )

    def given_fields(self) -> tuple[Tensor | None, Tensor | None]:
        """The scale and the amax that the source has now, with delayed scaling."""
        return self.adapter.given(self.source)


_borrowed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def borrow(source: Tensor) -> BorrowedTensor:
    """The borrowed tensor for a whole tensor of another package, to write to.

    Cached until the memory changes. Scales that have another layout there may be outdated in it.

    Raises:
        TypeError, ValueError: As for :class:`BorrowedTensor`.
    """
    known = _borrowed.get(source)
    if known is None or not known.is_on(source):
        known = _borrowed[source] = BorrowedTensor(source)
    return known


def source_columns(
    pairs: Sequence[tuple[BorrowedTensor, Tensor]], prefix: str = ""
) -> list[tuple[Column, list[int]]]:
    """How to read, all at once, whether tensors are on the memory of their sources, unwritten.

    Args:
        pairs: The tensors, each with an object to read its source from.
        prefix: What leads from these objects to the sources, such as "_local_tensor.".

    Returns:
        Columns of a fingerprint, each with the indices of the pairs that it reads.
    """
    columns: list[tuple[Column, list[int]]] = []

    def add(which: Sequence[int], name: str, versioned: bool = False) -> None:
        path = (prefix + name).rstrip(".")
        objects, read = [pairs[i][1] for i in which], attrgetter(path) if path else None
        columns.append((Column(objects, read, same=True, versioned=versioned), [*which]))

    every = range(len(pairs))
    add(every, "", versioned=True)
    add(every, "dtype")
    alike: dict[tuple[int, str, bool], list[int]] = defaultdict(list)
    for i, (one, _) in enumerate(pairs):
        parts = zip(one.adapter.attributes, one._memory, strict=True)
        for number, (name, part) in enumerate(parts):
            alike[number, name, isinstance(part, Tensor)].append(i)
    for (_, name, is_tensor), which in sorted(alike.items()):  # in the order of attributes
        add(which, name, versioned=is_tensor)
    delayed = [i for i, (one, _) in enumerate(pairs) if one.given is not None]
    given = [pairs[i][0] for i in delayed]
    columns.append((Column(given, BorrowedTensor.given_fields, chained=True, same=True), delayed))
    return columns


class ScaleWriteback:
    """Copies scales from the kernels' buffers back to the source tensors.

    With delayed scaling, the source says what its next scale is. So call :meth:`read` before the
    tensors are written, and the object itself afterwards.

    Args:
        borrowed: The tensors and their sources.
    """

    def __init__(self, borrowed: Sequence[BorrowedTensor]) -> None:
        self._copies = StridedCopies(
            [pair for one in borrowed for pair in (*one.copies, *one.mirrors)]
        )
        alike: dict[tuple[Quantizer, torch.device], list[BorrowedTensor]] = defaultdict(list)
        for one in borrowed:
            if one.per_tensor_scale is not None:
                alike[one.tensor.quantizer, one.tensor.device].append(one)
        self._scales = [
            (
                quantizer,
                [one.tensor._amax for one in members],
                _Scatter([one.per_tensor_scale for one in members]),
            )
            for (quantizer, _), members in alike.items()
        ]
        given: dict[torch.device, list[BorrowedTensor]] = defaultdict(list)
        for one in borrowed:
            if one.given is not None:
                given[one.tensor.device].append(one)
        self._given = [_ExternalScales(members) for members in given.values()]

    def read(self) -> None:
        """Read the scales that sources give for the next write."""
        for given in self._given:
            given.read()

    def __call__(self) -> None:
        """Make all copies, in a few launches."""
        self._copies()
        for given in self._given:
            given.write()
        for quantizer, amaxes, scatter in self._scales:
            scatter(quantizer.per_tensor_scale(torch.cat(amaxes)))


class _Scatter:
    """Writes the entries of a vector to tensors of one element each.

    Args:
        targets: The tensors, on one device.
        write: The operator, in place, on the list of targets and the list of entries.
    """

    def __init__(
        self,
        targets: Sequence[Tensor],
        write: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = torch._foreach_copy_,
    ) -> None:
        self._targets, self._write = targets, write
        # Views made once: as many new ones at every call take longer than all operators.
        self._values = torch.empty(len(targets), device=targets[0].device)
        self._entries = self._values.split(1)

    def __call__(self, values: Tensor) -> None:
        self._values.copy_(values)
        self._write(self._targets, self._entries)


class _ExternalScales:
    """Delayed scaling by another package: its scale comes in, the largest magnitude goes out.

    The histories have two entries. Before a write, the first becomes an amax with the given scale.
    The write takes its scale from there; afterwards the first entry is its own amax, and the other
    one the former first. If the device skips the write, that entry stays 0.

    Args:
        members: Tensors on one device.
    """

    def __init__(self, members: Sequence[BorrowedTensor]) -> None:
        self._quantizer = members[0].tensor.quantizer
        self._scales, amaxes = zip(*(one.given for one in members), strict=True)
        self._histories = [one.tensor._amax_history for one in members]
        self._take_firsts = _Scatter([history[:1] for history in self._histories])
        self._raise_amaxes = _Scatter(amaxes, torch._foreach_maximum_)

    def read(self) -> None:
        scales = torch.cat(self._scales)
        amaxes = _solve(
            self._quantizer.encode_scale, scales, self._quantizer.largest_value / scales
        )
        torch._foreach_zero_(self._histories)
        self._take_firsts(amaxes)

    def write(self) -> None:
        histories = torch.stack(self._histories)
        found = torch.where(histories[:, 1] > 0, histories[:, 0], 0.0)
        self._raise_amaxes(found)


def _amax_of(quantizer: Quantizer, scale: Tensor) -> Tensor:
    """An amax with exactly this per-tensor scale in float32, or the nearest if none has."""
    return _solve(quantizer.per_tensor_scale, scale, scale * quantizer.largest_value)


def _solve(function: Callable[[Tensor], Tensor], target: Tensor, start: Tensor) -> Tensor:
    """Positive float32 numbers x with function(x) = target, at most two away from ``start``.

    ``start`` itself where there are none. One-dimensional.
    """
    offsets = torch.tensor([0, 1, -1, 2, -2], dtype=torch.int32, device=start.device)
    near = (start.view(torch.int32) + offsets[:, None]).view(torch.float32)
    first = (function(near) == target).int().argmax(0)
    return near.gather(0, first[None])[0]


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.is_meta or tensor.data_ptr() % ALIGNMENT == 0
