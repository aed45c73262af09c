"""What every block-scaled format has to say about itself, and what it can hold."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.storage import Storage

if TYPE_CHECKING:
    from fp4adam.tensors.quantized_tensor import QuantizedTensor

HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def runs_eagerly(tensor: Tensor) -> bool:
    """Whether nobody traces what is done to a tensor: then a function is as good as an operator."""
    return type(tensor) is Tensor and not torch.compiler.is_compiling()


class Operands(NamedTuple):
    """What a linear layer quantizes beside its weight; see :class:`fp4adam.Recipe`."""

    activations: bool = False
    gradients: bool = False
    emulate: bool = False


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """How tensors become one block-scaled format.

    Args:
        rowwise: Keep codes with blocks along the last dimension (what the forward GEMM reads).
        columnwise: Keep codes with blocks along the first dimension (what the backward GEMM reads).
        optimize_for_gemm: Keep the scales of both in the order of the block-scaled GEMM as well.
        operands: What linear layers with such a weight quantize beside it. It changes no byte of
            the tensor, so quantizers that differ in it alone are equal.
    """

    rowwise: bool = True
    columnwise: bool = True
    optimize_for_gemm: bool = dataclasses.field(default=False, kw_only=True)
    operands: Operands = dataclasses.field(
        default=Operands(), kw_only=True, compare=False, repr=False
    )

    tensor_class: ClassVar[type["QuantizedTensor"]]
    # Rows that a block spans.
    block_rows: ClassVar[int]
    # Whether one number scales the whole tensor.
    scales_tensor: ClassVar[bool] = False

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
    def rows_per_entry(self) -> dict[str, int]:
        """The inner tensors that rows can be cut off from, with the rows per entry of each.

        What is not among them, but for the scale of the tensor, can be derived from these. Empty if
        rows cannot be cut off: scales of single rows lie otherwise.
        """
        return {}

    def without_derived(self) -> "Quantizer":
        """The quantizer of a tensor that consists of what ``rows_per_entry`` names."""
        return self.with_compact_scales()

    def with_compact_scales(self) -> "Quantizer":
        """The quantizer of a tensor without scales in the order of the GEMM."""
        return dataclasses.replace(self, optimize_for_gemm=False)

    def check_matrix(self, rows: int, cols: int) -> str | None:
        """Say which rule of the format a [rows, cols] matrix breaks, or None."""
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
        """Allocate a tensor of this format; it holds zeros.

        Args:
            shape: Logical shape, at least 2 dimensions.
            dtype: Nominal dtype, the one that autograd and other code sees.
            device: Where to allocate, the default device if None.

        Raises:
            ValueError: If the format cannot hold the shape.
            TypeError: If ``dtype`` is not float32, bfloat16 or float16.
        """
        shape = tuple(shape)
        self.check_shape(shape)
        check_dtype("dtype", dtype)
        return self.tensor_class(shape, dtype, self, self.zeros(*flat_shape(shape), device))

    def zeros(self, rows: int, cols: int, device: torch.device | str | None = None) -> Storage:
        """The inner tensors of a [rows, cols] matrix."""
        layout = self.storage_layout(rows, cols)
        return Storage(
            **{
                name: torch.zeros(size, dtype=kind, device=device)
                for name, (size, kind) in layout.items()
            }
        )

    def quantize(self, x: Tensor) -> "QuantizedTensor":
        """Quantize ``x`` (float32, bfloat16 or float16, at least 2 dimensions) to a new tensor.

        The result has the shape, device and, as its nominal dtype, the dtype of ``x``.
        """
        check_tensor(x)
        return self.make_empty(x.shape, dtype=x.dtype, device=x.device).quantize_(x)

    def write(self, x: Tensor, out: "QuantizedTensor") -> None:
        """Quantize the contiguous matrix ``x`` into the storage of ``out``.

        A format that ``scales_tensor`` takes an ``amax`` (float32 [1]) in place of that of ``x``.
        """
        raise NotImplementedError

    def recode(self, x: Tensor, tensor: "QuantizedTensor") -> Tensor:
        """The codes that the float32 matrix ``x`` has with the scales of ``tensor``.

        For tensors that rows can be cut off from, in the direction that :meth:`read` reads.
        """
        raise NotImplementedError

    @property
    def recodes_exactly(self) -> bool:
        """Whether :meth:`recode` gives the codes of :meth:`write`, or may be off by one."""
        return True

    def read(
        self, tensor: "QuantizedTensor", dtype: torch.dtype, after: Tensor | None = None
    ) -> Tensor:
        """Decode ``tensor`` to a plain [rows, cols] matrix of ``dtype``.

        ``after`` is never read: a graph of torch.compile just cannot decode before it exists.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class SquareBlockQuantizer(Quantizer):
    """A format whose blocks may be square; both directions then share codes and scales.

    Args:
        two_dimensional: Whether they are square.
    """

    two_dimensional: bool = True

    @property
    def rows_per_entry(self) -> dict[str, int]:
        if not (self.two_dimensional and self.rowwise):
            return {}
        return {"rowwise_data": 1, "block_scale_inv": self.block_rows}

    def without_derived(self) -> Quantizer:
        compact = self.with_compact_scales()
        return dataclasses.replace(compact, columnwise=False) if self.rows_per_entry else compact


def check_tensor(x: Tensor) -> None:
    """Raise TypeError unless ``x`` is a tensor whose values lie in memory one by one."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        kind = f"one of layout {x.layout}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise TypeError(
            f"x must be a dense tensor, got {kind}; pass torch.tensor(x), or x.to_dense()"
        )


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError unless ``dtype`` is one that quantized tensors convert from and to."""
    if dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"{name} must be float32, bfloat16 or float16, got {dtype}; convert the tensor first"
        )


torch.serialization.add_safe_globals([Operands])
