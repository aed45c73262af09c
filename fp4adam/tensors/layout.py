"""The layout of a format: which codes and scales it stores for a matrix, and where they lie."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

USAGES = ("rowwise", "columnwise")
SCALE_DTYPES = {"e4m3": torch.uint8, "e8m0": torch.uint8, "float32": torch.float32}


class CodeType(NamedTuple):
    """A number format of codes: a sign, an exponent and a mantissa.

    Attributes:
        name: What kernels know it by, if they do.
        bits: Bits of a code.
        largest: The code of the largest magnitude.
        per_power: Number of codes from a power of two to the next.
        has_nan: Whether a code means NaN; a block's scale does where none does.
        encode: Rounds float32 values to codes, uint8 with one code per byte.
        pack: Puts codes along the last dimension into bytes, the first one into the low bits.
        decode: float32 values of bytes.
    """

    name: str
    bits: int
    largest: int
    per_power: int
    has_nan: bool
    encode: Callable[[Tensor], Tensor]
    pack: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]


class Inner(NamedTuple):
    """An inner tensor over the matrix that it belongs to.

    Attributes:
        rows, cols: Rows and columns of the matrix per entry.
        transposed: Whether its first dimension runs along the columns of the matrix.
        padding: Its own rows and columns are padded to multiples of these.
    """

    rows: int
    cols: int
    transposed: bool = False
    padding: tuple[int, int] = (1, 1)

    def extent(self, rows: int, cols: int) -> tuple[int, int]:
        """Its shape for a [rows, cols] matrix, without padding."""
        extent = -(-rows // self.rows), -(-cols // self.cols)
        return extent[::-1] if self.transposed else extent

    def shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Its shape for a [rows, cols] matrix."""
        height, width = self.extent(rows, cols)
        below, beside = self.padding
        return height + -height % below, width + -width % beside


class Direction(NamedTuple):
    """One direction of a matrix: its codes, and their scales in Transformer Engine's layout."""

    codes: Inner
    scales: Inner | None = None


class ScaleRule(NamedTuple):
    """Options for computing scales from amaxes.

    Attributes:
        force_pow_2_scales: Round scales down to powers of two.
        amax_epsilon: Lower bound of amaxes.
        rounding: What is added to the bits of an amax of MXFP4 before its exponent is taken.
    """

    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0
    rounding: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """What a format stores for a matrix.

    Attributes:
        block: Side of a square block, or length of a block within a row or column.
        code_type: The number format of codes.
        scale_type: The number format of block scales; None if blocks have none.
        rowwise, columnwise: The directions, whose blocks lie along rows or columns.
        is_square: Whether both share square blocks. Columnwise codes are the transposed rowwise
            ones then, or the rowwise ones themselves (:attr:`shares_codes`).
        tensor_scale: The amax of the tensor that is part of its scales: none, that of the "current"
            values, or "delayed" ones, of earlier values, of which ``history`` are kept.
        scale_rule: How scales follow from amaxes.
        multiple: Rows and columns of a matrix must be multiples of this.
        kernel_multiple: The same for kernels; operators take other matrices.
        kept: The directions that are stored.
        has_gemm_scales: Whether swizzled scales are stored too.
    """

    block: int
    code_type: CodeType
    scale_type: Literal["e4m3", "e8m0", "float32"] | None
    rowwise: Direction
    columnwise: Direction
    is_square: bool
    tensor_scale: Literal["current", "delayed"] | None = None
    scale_rule: ScaleRule = ScaleRule()
    multiple: int = 1
    kernel_multiple: int = 1
    history: int = 0
    kept: tuple[str, ...] = USAGES
    has_gemm_scales: bool = False

    def fits_kernels(self, rows: int, cols: int) -> bool:
        """Whether kernels quantize and step a [rows, cols] matrix."""
        multiple = max(self.multiple, self.kernel_multiple)
        return not (rows % multiple or cols % multiple)

    @property
    def shares_codes(self) -> bool:
        """Whether one copy of codes serves both directions."""
        return self.is_square and not self.columnwise.codes.transposed

    @functools.cached_property
    def inner(self) -> dict[str, Inner]:
        """The inner tensors with codes and scales that are stored, by name."""
        inner = {}
        if self.is_square and self.scale_type is not None:
            inner["block_scale_inv"] = Inner(self.block, self.block)
        for usage in self.kept:
            codes, scales = getattr(self, usage)
            if usage == "rowwise" or not self.shares_codes:
                inner[f"{usage}_data"] = codes
            if scales is not None and not self.is_square:
                inner[f"{usage}_scale_inv"] = scales
            if self.has_gemm_scales:
                across = (1, self.block) if usage == "rowwise" else (self.block, 1)
                inner[f"{usage}_gemm_scale_inv"] = Inner(*across, usage != "rowwise", (128, 4))
        return inner

    def scales_of(self, usage: str) -> str:
        """The name of the inner tensor with the scales of a direction."""
        return "block_scale_inv" if self.is_square else f"{usage}_scale_inv"

    @functools.cached_property
    def blocks(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of blocks by the direction of their scales; rowwise if square."""
        if self.is_square:
            return {"rowwise": (self.block, self.block)}
        return {usage: getattr(self, usage).scales[:2] for usage in self.kept}

    @functools.cached_property
    def rows_per_entry(self) -> dict[str, int]:
        """The inner tensors that can be cut along rows, with the matrix rows per entry of each.

        The others but the amax and its history can be derived from these. Empty if the tensor
        cannot be cut along rows: columnwise codes with scales of their own need whole columns.
        """
        if self.is_square:
            names = ("rowwise_data", "block_scale_inv") if "rowwise" in self.kept else ()
        else:
            names = () if self.columnwise.codes.transposed else tuple(self.inner)
        cut = [name for name in names if name in self.inner and "gemm" not in name]
        return {name: self.inner[name].rows for name in cut}

    def shapes(self, rows: int, cols: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each inner tensor of a [rows, cols] matrix."""
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.tensor_scale is not None:
            shapes["amax"] = (1,), torch.float32
        if self.tensor_scale == "delayed":
            shapes["amax_history"] = (self.history,), torch.float32
        for name, inner in self.inner.items():
            dtype = torch.uint8 if name.endswith("_data") else SCALE_DTYPES[self.scale_type]
            shapes[name] = inner.shape(rows, cols), dtype
        return shapes

    def repeats(self, usage: str) -> tuple[int, int]:
        """Rows and columns of the scales of a direction per square block."""
        scales = getattr(self, usage).scales
        repeats = self.block // scales.rows, self.block // scales.cols
        return repeats[::-1] if scales.transposed else repeats

    def expand(self, grid: Tensor, usage: str) -> Tensor:
        """Expand a grid with one scale per square block to Transformer Engine's layout."""
        scales = getattr(self, usage).scales
        grid = grid.t() if scales.transposed else grid
        for dim, n in enumerate(self.repeats(usage)):
            grid = grid.repeat_interleave(n, dim) if n > 1 else grid
        below, beside = (-n % pad for n, pad in zip(grid.shape, scales.padding, strict=True))
        return torch.nn.functional.pad(grid, (0, beside, 0, below))
