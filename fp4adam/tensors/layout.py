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
    """A number format of codes: a sign, which is the highest bit, an exponent and a mantissa."""

    name: str  # what kernels know it by, if they do
    bits: int  # of a code
    largest: int  # the code of the largest magnitude
    per_power: int  # number of codes from a power of two to the next
    has_nan: bool  # whether a code means NaN; a block's scale does where none does
    encode: Callable[[Tensor], Tensor]  # rounds float32 to codes, uint8 with one code per byte
    pack: Callable[[Tensor], Tensor]  # puts codes of the last dimension into bytes, low bits first
    decode: Callable[[Tensor], Tensor]  # float32 values of bytes


class Inner(NamedTuple):
    """An inner tensor over the matrix that it belongs to."""

    rows: int  # of the matrix per entry
    cols: int  # of the matrix per entry
    transposed: bool = False  # whether its first dimension runs along the columns of the matrix
    padding: tuple[int, int] = (1, 1)  # its own rows and columns are padded to multiples of these

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
    """Options for computing scales from amaxes."""

    force_pow_2_scales: bool = False  # round scales down to powers of two
    amax_epsilon: float = 0.0  # lower bound of amaxes
    rounding: int = 0  # added to the bits of an amax of MXFP4 before its exponent is taken


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """What a format stores for a matrix.

    With square blocks, columnwise codes are the transposed rowwise ones, or the same. The amax of
    the "current" values, or a "delayed" one, of earlier values, may be part of the scales.
    """

    block: int  # side of a square block, or length of a block within a row or column
    code_type: CodeType
    scale_type: Literal["e4m3", "e8m0", "float32"] | None  # None if blocks have no scales
    rowwise: Direction  # with blocks along rows
    columnwise: Direction  # with blocks along columns
    is_square: bool
    tensor_scale: Literal["current", "delayed"] | None = None
    scale_rule: ScaleRule = ScaleRule()
    multiple: int = 1  # rows and columns of a matrix must be multiples of it
    kernel_multiple: int = 1  # the same for kernels; operators take other matrices
    history: int = 0  # number of amaxes that are kept for a delayed scale
    kept: tuple[str, ...] = USAGES  # the directions that are stored
    has_gemm_scales: bool = False  # whether swizzled scales are stored too

    def fits_kernels(self, rows: int, cols: int) -> bool:
        """Whether kernels quantize and step a [rows, cols] matrix."""
        return not (rows % self.kernel_multiple or cols % self.kernel_multiple)

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
    def blocks(self) -> dict[str, Inner]:
        """The scales of blocks by direction; rowwise if square."""
        if self.is_square:
            return {"rowwise": Inner(self.block, self.block)}
        return {usage: getattr(self, usage).scales for usage in self.kept}

    @functools.cached_property
    def rows_per_entry(self) -> dict[str, int]:
        """The inner tensors that can be cut along rows, with the matrix rows per entry of each.

        Other codes and scales can be derived from these. Empty if nothing can be cut: columnwise
        codes with scales of their own need whole columns.
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
            grid = grid.repeat_interleave(n, dim)
        below, beside = (-n % pad for n, pad in zip(grid.shape, scales.padding, strict=True))
        return torch.nn.functional.pad(grid, (0, beside, 0, below))
