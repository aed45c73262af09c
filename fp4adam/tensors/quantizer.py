"""The base class of block-scaled formats: their properties, and their encode and decode steps."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fp4adam.tensors import backend
from fp4adam.tensors.blocks import blocks_of_parts, flat_shape
from fp4adam.tensors.storage import Storage
from fp4adam.tensors.te_names import QuantizerNames

if TYPE_CHECKING:
    from fp4adam.tensors.quantized_tensor import QuantizedTensor

HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Operands(NamedTuple):
    """The operands that a linear layer quantizes besides its weight; see :class:`fp4adam.Recipe`.

    Attributes:
        activations: Whether activations are quantized.
        gradients: Whether output gradients are quantized.
        emulate: Whether matmuls multiply decoded operands in FP32 on every device.
    """

    activations: bool = False
    gradients: bool = False
    emulate: bool = False


@dataclasses.dataclass(frozen=True)
class Quantizer(QuantizerNames):
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

    tensor_class: ClassVar[type["QuantizedTensor"]]
    # The name of the format in kernels that serve several formats.
    name: ClassVar[str]
    # Bits of a code: 8, or 4 with two codes per byte, the first one in the low nibble.
    code_bits: ClassVar[int]
    # Side of a square block, and length of a block within a row or column.
    block_rows: ClassVar[int]
    # Whether the amax of the whole tensor is part of its scales.
    scales_tensor: ClassVar[bool] = False
    # The largest value of a tensor whose per-tensor scale is 1.
    largest_value: ClassVar[float] = 0.0
    # Whether blocks have scales of their own, which are stored.
    scales_blocks: ClassVar[bool] = True
    # Whether GEMMs read scales in a swizzled layout rather than as in ``rowwise_scale_inv``.
    swizzles_scales: ClassVar[bool] = True
    # Whether step kernels take shards that share blocks with other ranks.
    steps_cut_blocks: ClassVar[bool] = False
    # Number of rows of ``rowwise_scale_inv`` per row of square blocks.
    rows_per_square: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not (self.rowwise or self.columnwise):
            raise ValueError(
                "rowwise and columnwise must not both be False, got rowwise=False, "
                "columnwise=False; keep at least one direction"
            )

    def storage_layout(
        self, rows: int, cols: int
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each inner tensor of a [rows, cols] matrix."""
        raise NotImplementedError

    @property
    def is_square(self) -> bool:
        """Whether blocks are square, so that columnwise codes are the transposed rowwise ones."""
        return False

    @property
    def block_shapes(self) -> dict[str, tuple[int, int]]:
        """Block shapes by the direction of their scales; square blocks count as rowwise."""
        shapes = {"rowwise": (1, self.block_rows), "columnwise": (self.block_rows, 1)}
        return {usage: shape for usage, shape in shapes.items() if getattr(self, usage)}

    @property
    def scale_options(self) -> dict[str, Any]:
        """Options for computing scales from amaxes, for kernels that serve several formats."""
        return {"force_pow_2_scales": False, "amax_epsilon": 0.0}

    @property
    def rows_per_entry(self) -> dict[str, int]:
        """The inner tensors that can be cut along rows, with the matrix rows per entry of each.

        All other inner tensors, except the tensor's amax, can be derived from these. Empty if the
        tensor cannot be cut along rows, because of how its scales are laid out.
        """
        return {}

    @property
    def casts_in_shards(self) -> bool:
        """Whether ranks can quantize parts of a tensor that each of them stores in full."""
        return bool(self.rows_per_entry)

    @property
    def has_history(self) -> bool:
        """Whether the bytes of a tensor also depend on values that it had before."""
        return False

    @property
    def cols_per_entry(self) -> dict[str, int]:
        """For the inner tensors of ``rows_per_entry``, the matrix columns per entry of each.

        Empty if the tensor cannot be cut along columns.
        """
        return {}

    def without_derived(self) -> "Quantizer":
        """The same quantizer without the inner tensors that can be derived."""
        return self.with_compact_scales()

    def with_compact_scales(self) -> "Quantizer":
        """The same quantizer without swizzled scales."""
        return dataclasses.replace(self, optimize_for_gemm=False)

    def check_matrix(self, rows: int, cols: int) -> str | None:
        """The rule of the format that a [rows, cols] matrix violates, or None."""
        return None

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError if the format cannot hold a tensor of ``shape``."""
        name = self.tensor_class.__name__
        if len(shape) < 2:
            raise ValueError(
                f"shape must have at least 2 dimensions for {name}, got {tuple(shape)}; "
                "keep vectors such as biases and norms in high precision"
            )
        rows, cols = flat_shape(shape)
        if problem := self.check_matrix(rows, cols):
            raise ValueError(
                f"{problem}, got shape {tuple(shape)}, that is a matrix [{rows}, {cols}]; pad the "
                "weight to such a size or leave this layer in high precision (filter=...)"
            )

    def make_empty(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "QuantizedTensor":
        """Allocate a tensor of this format, filled with zeros.

        Args:
            shape: Logical shape, at least 2 dimensions.
            dtype: Nominal dtype, as seen by autograd and other code.
            device: Device to allocate on; None is the default device.

        Raises:
            ValueError: If the format cannot hold the shape.
            TypeError: If ``dtype`` is not float32, bfloat16 or float16.
        """
        shape = tuple(shape)
        self.check_shape(shape)
        check_dtype("dtype", dtype)
        return self.tensor_class(shape, dtype, self, self.zeros(*flat_shape(shape), device))

    def zeros(self, rows: int, cols: int, device: torch.device | str | None = None) -> Storage:
        """New inner tensors for a [rows, cols] matrix, all zero."""
        layout = self.storage_layout(rows, cols)
        return Storage.of(
            {
                name: torch.zeros(size, dtype=kind, device=device)
                for name, (size, kind) in layout.items()
            }
        )

    def quantize(self, x: Tensor) -> "QuantizedTensor":
        """Quantize ``x`` (float32, bfloat16 or float16, at least 2 dimensions) to a new tensor.

        The result has the shape and device of ``x``; its nominal dtype is the dtype of ``x``.
        Gradients pass straight through.

        Raises:
            ValueError: If the format cannot hold the shape.
            TypeError: If ``x`` is not a dense tensor, or not of these dtypes.
        """
        check_tensor(x)
        if x.requires_grad and torch.is_grad_enabled():
            return _Quantize.apply(x, self)
        return self._quantize(x)

    def _quantize(self, x: Tensor) -> "QuantizedTensor":
        return self.make_empty(x.shape, dtype=x.dtype, device=x.device).quantize_(x)

    def scale_inv(self, tensors: Storage, usage: str) -> Tensor | None:
        """The scales of one direction in Transformer Engine's layout; None if it is not kept."""
        return getattr(tensors, f"{usage}_scale_inv")

    def scale_extent(self, usage: str, rows: int, cols: int) -> tuple[int, int]:
        """The shape of :meth:`scale_inv` without padding, for blocks that are not square."""
        raise NotImplementedError

    def gemm_scale_rows(self, tensors: Storage, usage: str) -> tuple[Tensor, int]:
        """The scales of a direction as a GEMM operand, [rows / n, blocks per row], and n."""
        return getattr(tensors, f"{usage}_scale_inv"), 1

    def scales_of_blocks(
        self, amaxes: Tensor, tensor_amax: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The stored block scales, and the float32 factors that map values to codes.

        Args:
            amaxes: Amax of each block, float32.
            tensor_amax: Amax of the tensor, float32 [1], if ``scales_tensor`` is true.
            dtype: The dtype that the values were rounded to.
        """
        raise NotImplementedError

    def codes(self, x: Tensor) -> Tensor:
        """The codes of float32 values already multiplied by their factors; uint8, one per byte."""
        raise NotImplementedError

    def measure(self, x: Tensor, amax: Tensor) -> None:
        """Overwrite ``amax``, float32 [1], with the largest magnitude in the contiguous matrix.

        Only for formats that store an amax.
        """
        raise NotImplementedError

    def take_amax(self, tensors: Storage, amax: Tensor) -> None:
        """Make ``amax``, float32 [1], that of the values about to be written to ``tensors``.

        Afterwards ``tensors.amax`` is the one to quantize them with. Only for formats that store
        an amax.
        """
        tensors.amax.copy_(amax)

    def take_amaxes(self, tensors: Sequence[Storage], amaxes: Sequence[Tensor]) -> None:
        """:meth:`take_amax` for several tensors on one device."""
        for each, amax in zip(tensors, amaxes, strict=True):
            self.take_amax(each, amax)

    def per_tensor_scale(self, amax: Tensor) -> Tensor:
        """The decode scales of tensors with these amaxes, which other packages store instead.

        Only for formats that store an amax.
        """
        raise NotImplementedError

    def write(self, x: Tensor, out: Storage) -> None:
        """Quantize the contiguous matrix ``x`` into ``out``; swizzled scales are not written.

        Formats with ``scales_tensor`` also take ``amax`` (float32 [1]), to use instead of the amax
        of ``x``.
        """
        raise NotImplementedError

    def recode(self, x: Tensor, tensors: Storage) -> Tensor:
        """The codes of the float32 matrix ``x`` under the scales of ``tensors``.

        Only if ``rows_per_entry`` is not empty. The direction is the one that :meth:`read` reads.
        """
        raise NotImplementedError

    @property
    def recodes_exactly(self) -> bool:
        """Whether :meth:`recode` gives the exact codes of :meth:`write`; else off by at most 1."""
        return True

    def read(self, tensors: Storage, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
        """Decode ``tensors`` to a plain [rows, cols] matrix of ``dtype``.

        ``after`` is not read. It is a false dependency, which keeps torch.compile from decoding
        before ``after`` has been computed.
        """
        stored = self.stored(tensors)
        decode, operator = self.decoders()
        return (decode if backend.runs_eagerly(stored[0]) else operator)(*stored, dtype, after)

    def decoder(self, tensors: Storage, out: Tensor) -> Callable[[], None]:
        """A function that decodes ``tensors`` into ``out``, a contiguous [rows, cols] matrix.

        Each call decodes anew, and the memory of ``out`` and of codes and scales may have been
        reallocated in between. Codes and scales of square or rowwise blocks may be stacks [parts,
        ...] of consecutive parts of the rows, such as gathered shards; a block that is cut has a
        scale in both. Rows past the end of ``out`` are ignored.
        """
        decode = None
        # A format of one's own may decode in another way.
        if backend.uses_kernels(out.device) and type(self).read is Quantizer.read:
            decode = self.kernels().decoder(*self.stored(tensors), out)
        return decode or functools.partial(self._read_into, tensors, out)

    def _read_into(self, tensors: Storage, out: Tensor) -> None:
        whole = {}
        for name, inner in tensors.existing().items():
            if inner.dim() == 3:
                part = tensors.rowwise_data.shape[1], inner.shape[1]
                index = blocks_of_parts(len(out), self.rows_per_entry[name], *part, inner.device)
                inner = inner.flatten(0, 1)[index]
            whole[name] = inner
        out.copy_(self.read(Storage(**whole), out.dtype))

    def stored(self, tensors: Storage) -> tuple:
        """What decoding takes: codes, scales, and how these are laid out."""
        raise NotImplementedError

    @staticmethod
    def decoders() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """Functions of what is ``stored``, dtype and ``after``: a plain one, a custom operator."""
        raise NotImplementedError

    @staticmethod
    def kernels() -> ModuleType:
        """The module of ``fp4adam.kernels`` for the format; it imports Triton."""
        raise NotImplementedError

    @staticmethod
    def step_kernels() -> ModuleType:
        """The module of ``fp4adam.kernels`` whose ``StepLaunch`` steps weights of the format.

        Optional: plain operators step formats that do not define it themselves.
        """
        raise NotImplementedError

    @property
    def multiplies_codes(self) -> bool:
        """Whether matmuls read a weight's codes rather than its decoded values."""
        operands = self.operands
        return operands.activations or operands.gradients or self.optimize_for_gemm


@dataclasses.dataclass(frozen=True)
class SquareBlockQuantizer(Quantizer):
    """A format with optional square blocks, for which both directions share codes and scales.

    Args:
        two_dimensional: Whether blocks are square.
    """

    two_dimensional: bool = True

    @property
    def is_square(self) -> bool:
        return self.two_dimensional

    @property
    def block_shapes(self) -> dict[str, tuple[int, int]]:
        if self.two_dimensional:
            return {"rowwise": (self.block_rows, self.block_rows)}
        return super().block_shapes

    def expand_grid(self, grid: Tensor) -> Tensor:
        """Expand a grid with one scale per square block to Transformer Engine's layout."""
        raise NotImplementedError

    def scale_inv(self, tensors: Storage, usage: str) -> Tensor | None:
        if not (self.two_dimensional and getattr(self, usage)):
            return super().scale_inv(tensors, usage)
        grid = tensors.block_scale_inv
        return self.expand_grid(grid if usage == "rowwise" else grid.t())

    def gemm_scale_rows(self, tensors: Storage, usage: str) -> tuple[Tensor, int]:
        if not self.two_dimensional:
            return super().gemm_scale_rows(tensors, usage)
        grid = tensors.block_scale_inv
        return grid if usage == "rowwise" else grid.t(), self.block_rows

    @property
    def rows_per_entry(self) -> dict[str, int]:
        if not (self.two_dimensional and self.rowwise):
            return {}
        return {"rowwise_data": 1, "block_scale_inv": self.block_rows}

    @property
    def cols_per_entry(self) -> dict[str, int]:
        if not self.rows_per_entry:
            return {}
        return {"rowwise_data": 8 // self.code_bits, "block_scale_inv": self.block_rows}

    def without_derived(self) -> Quantizer:
        compact = self.with_compact_scales()
        return dataclasses.replace(compact, columnwise=False) if self.rows_per_entry else compact


class _Quantize(torch.autograd.Function):
    """Quantization whose gradient is that of the values (a straight-through estimator)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer) -> "QuantizedTensor":
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
