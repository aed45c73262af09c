"""Quantized tensors on the memory of other packages' tensors.

The step works on a tensor of this package that shares the codes of the other tensor, and its scales
if both use the same layout. If the layouts differ (scales repeated for the rows of a block,
transposed, unpadded or swizzled), the kernels write scales to a buffer, which is then copied back.
That costs at most an eighth of a byte per element, of the 27 that a step moves, and the kernels
need to know only one layout.
"""

from collections import defaultdict
from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor

from fp4adam.interop.adapter import FIELDS, adapter_of, class_name, count_writes, memory
from fp4adam.interop.strided_copy import StridedCopies
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.quantizer import Quantizer, check_dtype
from fp4adam.tensors.storage import Storage

ALIGNMENT = 16  # in bytes, of everything that kernels read and write
USAGES = ("rowwise", "columnwise")


class BorrowedTensor:
    """A quantized tensor that uses the memory of another package's tensor.

    Attributes:
        source: The other package's tensor.
        tensor: This package's tensor on the same memory.
        copies: Pairs of views of the same scales: (in the source, in the tensor).
        per_tensor_scale: The scale that the source has instead of an amax, or None.
    """

    def __init__(self, source: Tensor) -> None:
        """Borrow the memory of ``source``.

        Raises:
            TypeError: If its class has no adapter, or its dtype is not supported.
            ValueError: If it has no supported format, or its adapter returns wrong or too few
                fields.
        """
        self.source = source
        self._adapter = adapter_of(source)
        self._memory = memory(source, self._adapter)
        quantizer = self._adapter.quantizer(source)
        shape = tuple(source.shape)
        quantizer.check_shape(shape)
        check_dtype(f"the dtype of a {class_name(type(source))}", source.dtype)
        self._rows, self._cols = flat_shape(shape)
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.per_tensor_scale: Tensor | None = None
        storage = self._storage(quantizer, dict(self._adapter.fields(source)))
        self.tensor = quantizer.tensor_class(shape, source.dtype, quantizer, storage)
        with torch.no_grad():
            for target, own in self.copies:
                own.copy_(target[tuple(map(slice, own.shape))])
        self.note()

    def _storage(self, quantizer: Quantizer, fields: dict[str, Tensor]) -> Storage:
        """The inner tensors: shared fields where possible, new memory otherwise."""
        if unknown := fields.keys() - set(FIELDS):
            raise ValueError(
                f"fields of {class_name(type(self.source))} must be some of {', '.join(FIELDS)}, "
                f"got {', '.join(sorted(unknown))}; correct its adapter"
            )
        layout = quantizer.storage_layout(self._rows, self._cols)
        storage = {}
        for name, (size, dtype) in layout.items():
            if name.endswith("_data"):
                field = self._field(fields, name, dtype)
                self._check(name, field, field.is_contiguous(), "contiguous")
                self._check_numel(name, field, size)
                storage[name] = field.view(size)
            elif name == "amax":
                storage[name] = self._amax(quantizer, fields)
            elif name == "block_scale_inv":
                grid = torch.zeros(size, dtype=dtype, device=self.source.device)
                storage[name] = grid
                self._copy_grid(quantizer, fields, grid)
            else:
                storage[name] = self._scale(quantizer, fields, name, size, dtype)
        return Storage(**storage)

    def _amax(self, quantizer: Quantizer, fields: dict[str, Tensor]) -> Tensor:
        names = [n for n in ("amax_rowwise", "amax_columnwise") if n in fields]
        if not names and "per_tensor_scale" not in fields:
            raise ValueError(
                f"fields of {class_name(type(self.source))} must hold amax_rowwise, "
                f"amax_columnwise or per_tensor_scale, got {', '.join(sorted(fields))}; correct "
                "its adapter"
            )
        amaxes = [self._number(fields, name) for name in names]
        shared = amaxes[0] if amaxes and _is_aligned(amaxes[0]) else None
        amax = torch.zeros(1, device=self.source.device) if shared is None else shared
        self.copies += [(other, amax) for other in amaxes if other is not amax]
        if "per_tensor_scale" in fields:
            self.per_tensor_scale = self._number(fields, "per_tensor_scale")
            if not amaxes:
                amax.copy_(_amax_of(quantizer, self.per_tensor_scale))
        return amax

    def _copy_grid(self, quantizer: Quantizer, fields: dict[str, Tensor], grid: Tensor) -> None:
        """Add the copies of the scales of square blocks, which the source may repeat per row."""
        for usage, blocks in zip(USAGES, (grid, grid.t()), strict=True):
            if not getattr(quantizer, usage):
                continue
            name = f"{usage}_scale_inv"
            field = self._field(fields, name, grid.dtype)
            repeats = quantizer.rows_per_square
            rows, cols = blocks.shape[0] * repeats, blocks.shape[1]
            self._check(name, field, field.dim() == 2, "of two dimensions")
            self._check_extent(name, field, rows, cols)
            target = field[:rows, :cols].unflatten(0, (blocks.shape[0], repeats))
            self.copies.append((target, blocks[:, None]))

    def _scale(
        self,
        quantizer: Quantizer,
        fields: dict[str, Tensor],
        name: str,
        size: tuple[int, int],
        dtype: torch.dtype,
    ) -> Tensor:
        """The scales of one direction: the field itself if it fits, else new memory and a copy."""
        field = self._field(fields, name, dtype)
        if field.dim() == 2:
            usage = name.removesuffix("_scale_inv")
            rows, cols = quantizer.scale_extent(usage, self._rows, self._cols)
            self._check_extent(name, field, rows, cols)
            if field.is_contiguous() and field.shape[1] == size[1] and _is_aligned(field):
                return field
        else:
            self._check(name, field, field.dim() <= 5, "of at most five dimensions")
            self._check_numel(name, field, size)
        scale = torch.zeros(size, dtype=dtype, device=self.source.device)
        if field.dim() == 2:
            self.copies.append((field[:rows, :cols], scale[:rows, :cols]))
        else:
            self.copies.append((field, scale.view(field.shape)))
        return scale

    def _field(self, fields: dict[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
        field = fields.get(name)
        kind = field.dtype if isinstance(field, Tensor) else type(field).__name__
        fits = isinstance(field, Tensor) and (field.dtype == dtype or dtype.itemsize == 1)
        if not fits or field.dtype.itemsize != dtype.itemsize or field.device != self.source.device:
            where = f" on {field.device}" if isinstance(field, Tensor) else ""
            raise ValueError(
                f"{name} of {class_name(type(self.source))} must be {dtype} on "
                f"{self.source.device}, got {kind}{where}; correct its adapter"
            )
        return field.detach().view(dtype)

    def _number(self, fields: dict[str, Tensor], name: str) -> Tensor:
        field = self._field(fields, name, torch.float32)
        self._check_numel(name, field, (1,))
        return field.view(1)

    def _check(self, name: str, field: Tensor, condition: bool, rule: str) -> None:
        if not condition:
            raise ValueError(
                f"{name} of {class_name(type(self.source))} must be {rule}, got shape "
                f"{tuple(field.shape)} with strides {field.stride()}; make the tensor contiguous, "
                "or correct its adapter"
            )

    def _check_numel(self, name: str, field: Tensor, size: tuple[int, ...]) -> None:
        numel = torch.Size(size).numel()
        self._check(name, field, field.numel() == numel, f"as large as {size}")

    def _check_extent(self, name: str, field: Tensor, rows: int, cols: int) -> None:
        fits = field.shape[0] >= rows and field.shape[1] >= cols
        self._check(name, field, fits, f"at least [{rows}, {cols}]")

    def is_of(self, value: Tensor) -> bool:
        """Whether the tensor equals ``value``, a plain tensor of its shape, after quantization."""
        wanted = self.tensor.quantizer.quantize(value)._shared.tensors.existing()
        if self.per_tensor_scale is not None:
            # Compare scales: several amaxes round to the same per-tensor scale.
            scale = self.tensor.quantizer.per_tensor_scale(wanted.pop("amax"))
            if not torch.equal(scale, self.per_tensor_scale):
                return False
        for name, inner in wanted.items():
            actual = getattr(self.tensor._shared.tensors, name)
            if name.endswith("wise_scale_inv"):
                # Padding is the other package's business, so it is not compared.
                usage = name.removesuffix("_scale_inv")
                rows, cols = self.tensor.quantizer.scale_extent(usage, self._rows, self._cols)
                actual, inner = actual[:rows, :cols], inner[:rows, :cols]
            if not torch.equal(actual, inner):
                return False
        return True

    def value(self) -> Tensor:
        """The value that a master weight starts from, as a new float32 tensor."""
        value = self._adapter.get_high_precision_init_val(self.source)
        if value is not None:
            value = value.detach().to(self.source.device)
        # The initial value is stale if a checkpoint was loaded into the tensor since.
        if value is None or not self.is_of(value):
            value = self._adapter.dequantize(self.source)
        if value is None:
            return self.tensor.dequantize(torch.float32)
        return value.detach().to(torch.float32, copy=True).contiguous()

    def clear_high_precision_init_val(self) -> None:
        """Free the high-precision initial value."""
        self._adapter.clear_high_precision_init_val(self.source)

    def is_current(self) -> bool:
        """Whether the source has the same dtype and memory, unwritten since :meth:`note`."""
        now = memory(self.source, self._adapter)
        return (
            self.source.dtype == self.tensor.dtype
            and all(map(is_, now, self._memory))
            and count_writes(self.source, now) == self.writes
        )

    def note(self) -> None:
        """Count all writes so far as the optimizer's own."""
        self.writes = count_writes(self.source, self._memory)


class ScaleWriteback:
    """Copies scales from the kernels' buffers back to the source tensors.

    Args:
        borrowed: The tensors and their sources.
    """

    def __init__(self, borrowed: Sequence[BorrowedTensor]) -> None:
        self._copies = StridedCopies([pair for one in borrowed for pair in one.copies])
        alike: dict[tuple[Quantizer, torch.device], list[BorrowedTensor]] = defaultdict(list)
        for one in borrowed:
            if one.per_tensor_scale is not None:
                alike[one.tensor.quantizer, one.tensor.device].append(one)
        self._scales = [
            (
                quantizer,
                [one.tensor._amax for one in members],
                [one.per_tensor_scale for one in members],
            )
            for (quantizer, _), members in alike.items()
        ]

    def __call__(self) -> None:
        """Make all copies, in a few launches."""
        self._copies()
        for quantizer, amaxes, targets in self._scales:
            scales = quantizer.per_tensor_scale(torch.cat(amaxes))
            torch._foreach_copy_(targets, [*scales.split(1)])


def _amax_of(quantizer: Quantizer, scale: Tensor) -> Tensor:
    """An amax with exactly this per-tensor scale in float32, or the nearest if none has."""
    middle = scale * quantizer.largest_value
    candidates = [middle]
    for end in (torch.inf, -torch.inf):
        limit = torch.full_like(middle, end)
        near = middle.nextafter(limit)
        candidates += [near, near.nextafter(limit)]
    for candidate in reversed(candidates):
        is_exact = quantizer.per_tensor_scale(candidate) == scale
        middle = torch.where(is_exact, candidate, middle)
    return middle


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.is_meta or tensor.data_ptr() % ALIGNMENT == 0
