"""Quantized tensors on the memory of other packages' tensors.

The step works on a tensor of this package that shares the codes of the other tensor, and its scales
if both use the same layout. If the layouts differ (scales repeated for the rows of a block,
transposed, unpadded or swizzled), the kernels write scales to a buffer, which torch then copies
back: at most an eighth of a byte per element, and the kernels need to know only one layout.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, is_
from typing import NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fp4adam.interop.adapter import adapter_of, class_name
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.fingerprint import Column
from fp4adam.tensors.layout import Layout
from fp4adam.tensors.quantizer import Quantizer, check_dtype
from fp4adam.tensors.rows import is_of as has_codes_of
from fp4adam.tensors.storage import GlobalSpec, SharedStorage, Storage
from fp4adam.tensors.swizzle import read_gemm_scales


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
        memory: The attributes of the source that hold its memory.
    """

    def __init__(self, source: Tensor, whole: tuple[tuple[int, ...], int] | None = None) -> None:
        """Borrow the memory of ``source``.

        Args:
            source: The tensor, or a shard of one.
            whole: Of a shard, the shape of the whole tensor, and how many rows each shard has.

        Raises:
            TypeError: If its class has no adapter, or its dtype is not supported.
            ValueError: If it has no supported format, if shards cut its blocks, or if its adapter
                returns wrong or too few fields.
        """
        # Weak, so that `borrow` keeps no tensor alive.
        self._source = weakref.ref(source)
        self.adapter = adapter_of(source)
        quantizer = self.adapter.quantizer(source)
        shape, layout = tuple(source.shape), quantizer.layout
        if whole is None:
            quantizer.check_shape(shape)
        else:
            self._check_shards(quantizer, *whole)
        check_dtype(f"the dtype of a {class_name(type(source))}", source.dtype)
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.mirrors: list[tuple[Tensor, Tensor]] = []
        self._fields = self.adapter.fields(source)
        self._memory = [getattr(source, name) for name in self.adapter.attributes]
        self.memory = [part for part in self._memory if isinstance(part, Tensor)]
        self.per_tensor_scale: Tensor | None = None
        if "per_tensor_scale" in self._fields:
            self.per_tensor_scale = self._scalar("per_tensor_scale")
        self.given: tuple[Tensor, Tensor] | None = None
        if layout.tensor_scale == "delayed":
            self.given = self._scalar("scale"), self._scalar("amax")
            self._given_fields = self.given_fields()
        shared = SharedStorage(self._storage(quantizer, *flat_shape(shape)))
        if whole is not None and layout.tensor_scale == "current":
            shared.global_spec = GlobalSpec(whole[0], quantizer, whole[1])
        self.tensor = quantizer.tensor_class(shape, source.dtype, quantizer, shared)
        with torch.no_grad():
            for target, own in self.copies:
                own.copy_(target[tuple(map(slice, own.shape))])
            read_gemm_scales(self.tensor)

    @property
    def source(self) -> Tensor:
        """The other package's tensor; it must be alive."""
        return self._source()

    def _check_shards(self, quantizer: Quantizer, shape: tuple[int, ...], chunk: int) -> None:
        """Raise ValueError, on every rank alike, unless each shard can be quantized by itself."""
        quantizer.check_shape(shape)
        rows, block = chunk * math.prod(shape[1:-1]), quantizer.layout.block
        is_cut = chunk < shape[0] and rows % block != 0
        if quantizer.layout.scale_type is not None and is_cut:
            raise ValueError(
                f"shards of a {type(self.source).__name__} must have multiples of {block} rows, so "
                f"that no block lies on two ranks, got {rows} rows of shape {shape}; use "
                "another number of ranks, or leave the layer in high precision"
            )

    def _storage(self, quantizer: Quantizer, rows: int, cols: int) -> Storage:
        """The inner tensors: shared fields where possible, new memory otherwise."""
        layout, storage = quantizer.layout, {}
        for name, (size, dtype) in layout.shapes(rows, cols).items():
            if name.endswith(("_data", "_gemm_scale_inv")):
                # Swizzled scales have the plain names in the source; the kernels write both.
                storage[name] = self._field(name.replace("_gemm", ""), dtype, size)
                continue
            own = storage[name] = torch.zeros(size, dtype=dtype, device=self.source.device)
            if name == "amax":
                self._copy_amaxes(quantizer, own)
            elif name == "block_scale_inv" and not layout.has_gemm_scales:
                storage[name] = self._grid(layout, rows, cols, own)
            elif name.endswith("_scale_inv") and not layout.has_gemm_scales:
                storage[name] = self._scale(name, own, layout.inner[name].extent(rows, cols))
        if layout.shares_codes and quantizer.columnwise:
            codes = storage["rowwise_data"]
            field = self._field("columnwise_data", codes.dtype, tuple(codes.shape))
            if field.data_ptr() != codes.data_ptr():
                self.mirrors.append((field, codes))
        return Storage(**storage)

    def _copy_amaxes(self, quantizer: Quantizer, amax: Tensor) -> None:
        """Add the copies of an amax, which the source may have twice, or as a scale instead."""
        names = [n for n in ("amax_rowwise", "amax_columnwise") if n in self._fields]
        if not names and self.per_tensor_scale is None:
            self._refuse("amax_rowwise", "given, or amax_columnwise or per_tensor_scale")
        self.copies += [(self._scalar(name), amax) for name in names]
        if not names:
            scale = self.per_tensor_scale
            amax.copy_(_solve(quantizer.per_tensor_scale, scale, scale * quantizer.largest_value))

    def _grid(self, layout: Layout, rows: int, cols: int, grid: Tensor) -> Tensor:
        """The scales of square blocks: the field of rows if it fits, else ``grid``; and copies."""
        for usage in layout.kept:
            scales, name = getattr(layout, usage).scales, f"{usage}_scale_inv"
            if not scales.transposed and self._fits(field := self._field(name, grid.dtype), grid):
                grid = field
                continue
            blocks = grid.t() if scales.transposed else grid
            target = self._field(name, grid.dtype, extent=scales.extent(rows, cols))
            # It may repeat them per row.
            for dim, n in zip((1, 0), reversed(layout.repeats(usage)), strict=True):
                target = target.unflatten(dim, (blocks.shape[dim], n))
            self.copies.append((target, blocks[:, None, :, None]))
        return grid

    @staticmethod
    def _fits(field: Tensor, own: Tensor) -> bool:
        """Whether kernels can write this field themselves."""
        is_aligned = field.data_ptr() % 16 == 0
        return field.shape == own.shape and field.is_contiguous() and is_aligned

    def _scale(self, name: str, own: Tensor, extent: tuple[int, int]) -> Tensor:
        """The scales of one direction: the field itself if it fits, else ``own`` and a copy."""
        field = self._field(name, own.dtype)
        if self._fits(field, own):
            return field
        if field.dim() == 2:
            inside = self._field(name, own.dtype, extent=extent)
            self.copies.append((inside, own[tuple(map(slice, extent))]))
        elif field.numel() == own.numel():
            self.copies.append((field, own.view(field.shape)))
        else:
            self._refuse(name, f"a matrix, or as large as {tuple(own.shape)}")
        return own

    def _field(
        self,
        name: str,
        dtype: torch.dtype,
        size: tuple[int, ...] | None = None,
        extent: tuple[int, int] | None = None,
    ) -> Tensor:
        """A field of the adapter: contiguous in the shape ``size``, or cut to ``extent``."""
        field, device = self._fields.get(name), self.source.device
        fits = isinstance(field, Tensor) and field.dtype.itemsize == dtype.itemsize
        if not fits or dtype.is_floating_point and field.dtype != dtype or field.device != device:
            self._refuse(name, f"{dtype} on {device}")
        field = field.detach().view(dtype)
        if size is not None:
            if not field.is_contiguous() or field.numel() != math.prod(size):
                self._refuse(name, f"contiguous and as large as {size}")
            return field.view(size)
        if extent is not None:
            if field.dim() != 2 or field.shape[0] < extent[0] or field.shape[1] < extent[1]:
                self._refuse(name, f"of two dimensions and at least {[*extent]}")
            return field[tuple(map(slice, extent))]
        return field

    def _scalar(self, name: str) -> Tensor:
        return self._field(name, torch.float32, (1,))

    def _refuse(self, name: str, rule: str) -> NoReturn:
        field = self._fields.get(name)
        got = type(field).__name__
        if isinstance(field, Tensor):
            got = f"{field.dtype} {tuple(field.shape)} on {field.device}, strides {field.stride()}"
        raise ValueError(
            f"{name} of {class_name(type(self.source))} must be {rule}, got {got}; make the tensor "
            "contiguous, or correct its adapter"
        )

    def is_of(self, value: Tensor) -> bool:
        """Whether the tensor has the codes of ``value``, a plain tensor, under its own scales."""
        slack = int(self.per_tensor_scale is not None)  # two encode scales may have this one
        return has_codes_of(self.tensor, value.to(self.tensor.device), slack)

    def value(self) -> Tensor:
        """The value that a master weight starts from, as a new float32 tensor."""
        value = getattr(self.source, "get_high_precision_init_val", lambda: None)()
        # The initial value is stale if a checkpoint was loaded into the tensor since.
        if value is None or not self.is_of(value):
            return self.tensor.dequantize(torch.float32)
        return value.detach().to(self.tensor.device, torch.float32, copy=True).contiguous()

    def clear_high_precision_init_val(self) -> None:
        """Free the high-precision initial value."""
        getattr(self.source, "clear_high_precision_init_val", lambda: None)()

    def is_on(self, source: Tensor) -> bool:
        """Whether this is on the memory of ``source``, in its dtype."""
        memory = (getattr(source, name) for name in self.adapter.attributes)
        return (
            source is self.source
            and source.dtype == self.tensor.dtype
            and all(map(is_, memory, self._memory))
            and (self.given is None or all(map(is_, self.given_fields(), self._given_fields)))
        )

    def given_fields(self) -> tuple[Tensor | None, Tensor | None]:
        """The scale and the amax that the source has now, with delayed scaling."""
        return self.adapter.given(self.source)


_borrowed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def borrow(source: Tensor) -> BorrowedTensor:
    """The borrowed tensor for a whole tensor of another package, to write to.

    Cached until the memory changes. Scales that have another layout there may be outdated in it.
    """
    known = _borrowed.get(source)
    if known is None or not known.is_on(source):
        known = _borrowed[source] = BorrowedTensor(source)
    return known


def source_columns(
    pairs: Sequence[tuple[BorrowedTensor, Tensor]], is_sharded: bool
) -> list[tuple[Column, list[int]]]:
    """How to read, all at once, whether tensors are on the memory of their sources, unwritten.

    ``pairs`` are tensors with their parameters, which are DTensors of the sources if
    ``is_sharded``. Returns columns of a fingerprint, each with the indices of the pairs it reads.
    """
    alike: dict[tuple, list[int]] = defaultdict(list)
    for i, (one, _) in enumerate(pairs):
        named = zip(one.adapter.attributes, one._memory, strict=True)
        tensors = tuple(name for name, part in named if isinstance(part, Tensor))
        alike[one.adapter.attributes, tensors].append(i)
    prefix = "_local_tensor." if is_sharded else ""
    source = attrgetter("_local_tensor") if is_sharded else None
    columns: list[tuple[Column, list[int]]] = []
    for (names, tensors), which in alike.items():
        owners = [pairs[i][1] for i in which]
        read = attrgetter(*(prefix + name for name in ("dtype", *names)))
        several = dict(chained=len(tensors) > 1, versioned=True)
        columns += [
            (Column(owners, source, same=True, versioned=True), which),
            (Column(owners, read, chained=True, same=True), which),
            (Column(owners, attrgetter(*(prefix + name for name in tensors)), **several), which),
        ]
    delayed = [i for i, (one, _) in enumerate(pairs) if one.given is not None]
    given = [pairs[i][0] for i in delayed]
    columns.append((Column(given, BorrowedTensor.given_fields, chained=True, same=True), delayed))
    return columns


class ScaleWriteback:
    """Copies scales from the kernels' buffers back to the source tensors.

    With delayed scaling, the source says what its next scale is. So call :meth:`read` before the
    tensors are written, and the object itself afterwards; or write in a ``with`` block.
    """

    def __init__(self, borrowed: Sequence[BorrowedTensor]) -> None:
        pairs = [pair for one in borrowed for pair in (*one.copies, *one.mirrors)]
        # torch copies numbers in one launch, and views of other layouts one by one.
        views = [pair for pair in pairs if pair[0].numel() > 1]
        numbers = [pair for pair in pairs if pair[0].numel() <= 1]
        self._copies = [[*zip(*alike, strict=True)] for alike in (numbers, views) if alike]
        self._scaled = _alike(one for one in borrowed if one.per_tensor_scale is not None)
        self._delayed = _alike(one for one in borrowed if one.given is not None)

    def read(self) -> None:
        """Read the scales that sources give for the next write.

        Histories have two entries. The first becomes an amax with the given scale, which the write
        takes. Afterwards the first is its own amax, and the other one the former first; if the
        device skips the write, that entry stays 0.
        """
        for members in self._delayed:
            quantizer = members[0].tensor.quantizer
            scales = torch.cat([one.given[0] for one in members])
            amaxes = _solve(quantizer.encode_scale, scales, quantizer.largest_value / scales)
            histories = [one.tensor._amax_history for one in members]
            torch._foreach_zero_(histories)
            torch._foreach_copy_([history[:1] for history in histories], [*amaxes.split(1)])

    def __enter__(self) -> None:
        self.read()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self()

    def __call__(self) -> None:
        """Make all copies."""
        for targets, sources in self._copies:
            torch._foreach_copy_(targets, sources)
        for members in self._delayed:
            histories = torch.stack([one.tensor._amax_history for one in members])
            found = torch.where(histories[:, 1] > 0, histories[:, 0], 0.0)
            torch._foreach_maximum_([one.given[1] for one in members], [*found.split(1)])
        for members in self._scaled:
            amaxes = torch.cat([one.tensor._amax for one in members])
            scales = members[0].tensor.quantizer.per_tensor_scale(amaxes)
            torch._foreach_copy_([one.per_tensor_scale for one in members], [*scales.split(1)])


def _alike(borrowed: Iterable[BorrowedTensor]) -> list[list[BorrowedTensor]]:
    """Tensors by quantizer and device."""
    alike: dict[tuple, list[BorrowedTensor]] = defaultdict(list)
    for one in borrowed:
        alike[one.tensor.quantizer, one.tensor.device].append(one)
    return [*alike.values()]


def _solve(function: Callable[[Tensor], Tensor], target: Tensor, start: Tensor) -> Tensor:
    """Positive float32 x [n] with function(x) = target at most one from ``start``, or this."""
    offsets = torch.tensor([0, 1, -1], dtype=torch.int32, device=start.device)
    near = (start.view(torch.int32) + offsets[:, None]).view(torch.float32)
    first = (function(near) == target).int().argmax(0)
    return near.gather(0, first[None])[0]
