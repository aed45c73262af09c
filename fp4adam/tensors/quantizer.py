"""The base class of block-scaled formats: their properties, and their encode and decode steps."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fp4adam.tensors import backend, encoding
from fp4adam.tensors.blocks import blocks_of_parts, flat_shape
from fp4adam.tensors.layout import USAGES, Layout
from fp4adam.tensors.storage import Storage
from fp4adam.tensors.te_names import QuantizerNames

T = TypeVar("T", bound=Tensor)  # the class of a format's tensors

HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What a class derived from one with kernels must leave as it is, to be run by them.
ARITHMETIC = {"encode", "decode", "factors", "measure", "take_amaxes"}


class Operands(NamedTuple):
    """The operands that a layer quantizes besides its weight; see :class:`fp4adam.Recipe`."""

    activations: bool = False
    gradients: bool = False
    emulate: bool = False
    fake_activations: bool = False
    weight_gradients: bool = True


@dataclasses.dataclass(frozen=True)
class Quantizer(QuantizerNames, Generic[T]):
    """Quantizes tensors to one block-scaled format.

    Args:
        rowwise: Keep codes with blocks along the last dimension (read by the forward GEMM).
        columnwise: Keep codes with blocks along the first dimension (read by the backward GEMM).
        optimize_for_gemm: Also keep the scales of both directions in the swizzled GEMM layout.
        operands: Operands that linear layers quantize besides the weight. They do not affect the
            bytes of the tensor, so quantizers that differ only in them are equal.
    """

    rowwise: bool = True
    columnwise: bool = True
    optimize_for_gemm: bool = dataclasses.field(default=False, kw_only=True)
    operands: Operands = dataclasses.field(
        default=Operands(), kw_only=True, compare=False, repr=False
    )

    tensor_class: ClassVar[type[Tensor]]
    kernels: ClassVar[bool] = False  # whether there are some with the arithmetic of this very class
    largest_value: ClassVar[float] = 0.0  # of a tensor whose per-tensor scale is 1

    def __post_init__(self) -> None:
        if not (self.rowwise or self.columnwise):
            raise ValueError(
                "rowwise and columnwise must not both be False, got False, False; keep one of them"
            )

    # Copies and files hold the arguments alone.
    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def layout(self) -> Layout:
        """The codes and scales that a tensor stores."""
        kept = tuple(usage for usage in USAGES if getattr(self, usage))
        stored = dict(kept=kept, has_gemm_scales=self.optimize_for_gemm)
        return dataclasses.replace(self.full_layout(), **stored)

    def full_layout(self) -> Layout:
        """The layout of the format with both directions."""
        raise NotImplementedError

    def without_derived(self) -> "Quantizer":
        """The same quantizer without the inner tensors that can be derived."""
        columnwise = self.columnwise and not (self.layout.is_square and self.rowwise)
        return dataclasses.replace(self, columnwise=columnwise, optimize_for_gemm=False)

    def writes_codes_of(self, other: "Quantizer") -> bool:
        """Whether both write the same codes and scales in each direction that both have."""
        names = {field.name for field in dataclasses.fields(self) if field.compare}
        names -= {*USAGES, "optimize_for_gemm"}
        is_alike = type(self) is type(other)
        return is_alike and all(getattr(self, name) == getattr(other, name) for name in names)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError if the format cannot hold a tensor of ``shape``."""
        name = self.tensor_class.__name__
        if len(shape) < 2:
            raise ValueError(
                f"shape must have at least 2 dimensions for {name}, got {tuple(shape)}; "
                "keep vectors such as biases and norms in high precision"
            )
        (rows, cols), multiple = flat_shape(shape), self.layout.multiple
        if rows % multiple or cols % multiple:
            raise ValueError(
                f"rows and columns of {name.removesuffix('Tensor')} must be multiples of "
                f"{multiple}, got shape {tuple(shape)}, that is a matrix [{rows}, {cols}]; pad the "
                "weight to such a size or leave this layer in high precision (filter=...)"
            )

    def make_empty(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> T:
        """A tensor of this format, filled with zeros.

        ``dtype`` is its nominal dtype: float32, bfloat16 or float16.

        Raises:
            ValueError: If the format cannot hold the shape, of at least 2 dimensions.
            TypeError: If ``dtype`` is none of these.
        """
        self.check_shape(shape)
        check_dtype("dtype", dtype)
        return self.tensor_class(tuple(shape), dtype, self, self.zeros(*flat_shape(shape), device))

    def zeros(self, rows: int, cols: int, device: torch.device | str | None = None) -> Storage:
        """New inner tensors for a [rows, cols] matrix, all zero."""
        backend.check_device(torch.get_default_device() if device is None else torch.device(device))
        shapes = self.layout.shapes(rows, cols).items()
        return Storage.of({n: torch.zeros(s, dtype=kind, device=device) for n, (s, kind) in shapes})

    def quantize(self, x: Tensor) -> T:
        """A new tensor like ``x``, with its values; gradients pass straight through.

        Raises:
            ValueError: If the format cannot hold the shape, of at least 2 dimensions.
            TypeError: If ``x`` is not a dense tensor of float32, bfloat16 or float16.
        """
        check_tensor(x)
        if x.requires_grad:
            return _Quantize.apply(x, self)
        return self._quantize(x)

    def _quantize(self, x: Tensor) -> T:
        return self.make_empty(x.shape, dtype=x.dtype, device=x.device).quantize_(x)

    def scale_inv(self, tensors: Storage, usage: str) -> Tensor | None:
        """The scales of one direction in Transformer Engine's layout; None if it is not kept."""
        if not self.layout.is_square:
            return getattr(tensors, f"{usage}_scale_inv")
        grid = tensors.block_scale_inv
        return self.layout.expand(grid, usage) if getattr(self, usage) else None

    def encode(
        self, amaxes: Tensor, tensor_amax: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The stored scales of blocks with these amaxes, and the factors from values to codes.

        All are float32 but the scales. ``tensor_amax`` is [1], if it is part of the scales;
        ``dtype`` the one that values were rounded to.
        """
        raise NotImplementedError

    def decode(self, scales: Tensor | None, tensor_amax: Tensor | None) -> Tensor:
        """The float32 factors from codes to values in blocks with these stored scales."""
        raise NotImplementedError

    def factors(self, scales: Tensor | None, tensor_amax: Tensor | None) -> Tensor:
        """The float32 factors from values to codes in blocks with these stored scales."""
        raise NotImplementedError

    @functools.cached_property
    def has_kernels(self) -> bool:
        """Whether kernels give the bits of this class: not where it has arithmetic of its own."""
        for base in type(self).__mro__:  # from the class to its bases
            if "kernels" in vars(base):
                return self.kernels
            if not vars(base).keys().isdisjoint(ARITHMETIC):
                return False
        return False

    def uses_kernels(self, device: torch.device) -> bool:
        return self.has_kernels and backend.uses_kernels(device)

    def measure(self, x: Tensor) -> Tensor:
        """The largest magnitude in the contiguous matrix, float32 [1]."""
        if not x.numel():
            return x.new_zeros(1, dtype=torch.float32)
        if not self.uses_kernels(x.device):
            return encoding.amax_over(x.float(), (0, 1)).view(1)
        from fp4adam.kernels import cast  # Triton is slow to import

        return cast.measure(x)

    def take_amaxes(self, tensors: Sequence[Storage], amaxes: Sequence[Tensor]) -> None:
        """Set the amaxes to quantize values with these amaxes, float32 [1], with; on one device."""
        for each, amax in zip(tensors, amaxes, strict=True):
            each.amax.copy_(amax)

    def per_tensor_scale(self, amax: Tensor) -> Tensor:
        """The decode scales of tensors with these amaxes, which other packages store instead."""
        raise NotImplementedError

    def write(self, x: Tensor, out: Storage, amax: Tensor | None = None) -> None:
        """Quantize the contiguous matrix ``x`` into ``out``; swizzled scales are not written.

        ``amax``, float32 [1], takes the place of that of ``x`` in formats that store one.
        """
        if self.layout.tensor_scale is not None:
            self.take_amaxes([out], [self.measure(x) if amax is None else amax])
        if self.uses_kernels(x.device) and self.layout.fits_kernels(*x.shape):
            from fp4adam.kernels import cast

            cast.quantize(x, out, self.layout)
        else:
            encoding.write(self, x, out)

    def read(self, tensors: Storage, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
        """Decode ``tensors`` to a plain [rows, cols] matrix of ``dtype``.

        ``after`` is not read: it keeps torch.compile from decoding before it has been computed.
        """
        if backend.runs_eagerly(tensors.codes):
            return self._read(tensors, dtype)
        names = f"{tensors.usage}_data", self.layout.scales_of(tensors.usage), "amax"
        names = [name for name in names if getattr(tensors, name) is not None]
        inner = [getattr(tensors, name) for name in names]
        return _dequantize(inner, ",".join(names), self._key, dtype, after)

    def _read(self, tensors: Storage, dtype: torch.dtype) -> Tensor:
        if not self.uses_kernels(tensors.codes.device):
            return encoding.read(self, tensors, dtype)
        from fp4adam.kernels.dequantize import dequantize

        out = tensors.codes.new_empty(self.decoded_shape(tensors), dtype=dtype)
        dequantize(out, tensors, self.layout)
        return out

    @functools.cached_property
    def _key(self) -> str:
        return f"{type(self).__module__}.{self!r}"

    def register(self) -> None:
        """Make the quantizer known to compiled graphs, before they are traced."""
        BY_KEY.setdefault(self._key, self)

    def decoded_shape(self, tensors: Storage) -> tuple[int, int]:
        """Rows and columns of the matrix that ``tensors`` hold."""
        inner, shape = getattr(self.layout, tensors.usage).codes, tensors.codes.shape
        rows, cols = reversed(shape) if inner.transposed else shape
        return rows * inner.rows, cols * inner.cols

    def decoder(self, tensors: Storage, out: Tensor) -> Callable[[], None]:
        """A function that decodes ``tensors``, whose memory may change, into a contiguous matrix.

        Codes and scales may be stacks of consecutive parts of the rows, such as gathered shards; a
        block that is cut has a scale in both parts.
        """
        if not self.uses_kernels(out.device):
            return functools.partial(self._read_into, tensors, out)
        from fp4adam.kernels.dequantize import decoder

        return decoder(out, tensors, self.layout)

    def _read_into(self, tensors: Storage, out: Tensor) -> None:
        whole = tensors.existing()
        for name, inner in whole.items():
            if inner.dim() == 3:
                rows = self.layout.rows_per_entry[name]
                part = tensors.rowwise_data.shape[1], inner.shape[1]
                index = blocks_of_parts(len(out), rows, *part, inner.device)
                whole[name] = inner.flatten(0, 1)[index]
        out.copy_(self.read(Storage(**whole), out.dtype))

    @property
    def multiplies_codes(self) -> bool:
        """Whether layers need the quantized weight rather than its decoded values."""
        operands = self.operands
        are_quantized = operands.activations or operands.gradients or operands.fake_activations
        return are_quantized or self.optimize_for_gemm


BY_KEY: dict[str, Quantizer] = {}  # those that compiled graphs name


def _traced_read(
    inner: list[Tensor], names: str, key: str, dtype: torch.dtype, after: Tensor | None = None
) -> Tensor:
    return BY_KEY[key]._read(Storage(**dict(zip(names.split(","), inner, strict=True))), dtype)


def _fake_read(
    inner: list[Tensor], names: str, key: str, dtype: torch.dtype, after: Tensor | None = None
) -> Tensor:
    tensors = Storage(**dict(zip(names.split(","), inner, strict=True)))
    return tensors.codes.new_empty(BY_KEY[key].decoded_shape(tensors), dtype=dtype)


_dequantize = backend.operator("dequantize", _traced_read, _fake_read)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer) -> Tensor:
        return quantizer._quantize(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def check_tensor(x: Tensor) -> None:
    """Raise TypeError unless ``x`` is a dense (strided) tensor."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        kind = f"one of layout {x.layout}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise TypeError(
            f"x must be a dense tensor, got {kind}; pass torch.tensor(x), or x.to_dense()"
        )


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError unless quantized tensors can convert from and to ``dtype``."""
    if dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"{name} must be float32, bfloat16 or float16, got {dtype}; convert the tensor first"
        )


torch.serialization.add_safe_globals([Operands])
