"""Flat shards of weights, as in ZeRO, and the memory that their codes and scales are written to."""

import dataclasses

import torch
from torch import Tensor

from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer

# Memory for codes outside of the weight: one direction, or (rowwise, columnwise).
Out = Tensor | tuple[Tensor | None, Tensor | None] | None


@dataclasses.dataclass
class Shard:
    """The elements [start, stop) of the row-major matrix of a weight.

    ``dtype``: the dtype that values are rounded to first. ``amax``: float32 [1], or None for
    formats that store none. ``grids``: float32 block amaxes by direction, of formats whose blocks
    have scales. ``amax`` and ``grids`` are views of one buffer. ``cut``: for adaptive scales, 1 for
    rows of blocks that a boundary of shards cuts, else 0, float32. ``choices``: 1 for blocks whose
    amax maps to 4, else 0, float32. ``strips``: by row of blocks, the magnitudes in those that are
    cut.
    """

    weight: QuantizedTensor
    start: int
    stop: int
    dtype: torch.dtype
    amax: Tensor | None = None
    grids: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    cut: Tensor | None = None
    choices: Tensor | None = None
    strips: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer of the weight."""
        return self.weight.quantizer

    @property
    def is_adaptive(self) -> bool:
        """Whether the scale of a block depends on all of its values."""
        return self.quantizer.layout.scale_rule.adaptive is not None

    @property
    def strip_numel(self) -> int:
        """Number of elements in a row of blocks."""
        return self.quantizer.layout.block * self.matrix_shape[1]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix that the weight is quantized as."""
        return flat_shape(tuple(self.weight.shape))

    @property
    def blocks(self) -> dict[str, tuple[int, int]]:
        """Block shapes by the direction of the codes that are written."""
        return self.quantizer.layout.blocks

    def grid_shape(self, usage: str) -> tuple[int, int]:
        """The number of block rows and block columns."""
        rows, cols = self.matrix_shape
        height, width = self.blocks[usage]
        return -(-rows // height), -(-cols // width)

    def scale_inv(self, usage: str) -> Tensor | None:
        """The inner tensor with the scales of blocks; it may be larger than the grid, by padding.

        None for formats without such scales.
        """
        tensors = self.weight._shared.tensors
        if self.quantizer.layout.is_square:
            return tensors.block_scale_inv
        return getattr(tensors, f"{usage}_scale_inv")

    def byte(self, element: int) -> int:
        """Index of the byte that holds the code of an element."""
        return element * self.quantizer.layout.code_bits // 8

    @property
    def nbytes(self) -> int:
        """Number of bytes that hold codes of the shard, in one direction."""
        per_byte = 8 // self.quantizer.layout.code_bits
        return -(-self.stop // per_byte) - self.start // per_byte if self.stop > self.start else 0

    def targets(self, out: Out) -> dict[str, tuple[Tensor, int]]:
        """By direction, the flat memory to write codes to, and the code byte that it starts at."""
        given = dict(zip(("rowwise", "columnwise"), as_pair(out), strict=True))
        tensors = self.weight._shared.tensors
        return {
            usage: (getattr(tensors, f"{usage}_data").view(-1), 0)
            if given[usage] is None
            else (given[usage].view(-1), self.byte(self.start))
            for usage in self.blocks
        }


def as_pair(out: Out) -> tuple[Tensor | None, Tensor | None]:
    """The memory for rowwise and for columnwise codes."""
    return tuple(out) if isinstance(out, tuple | list) else (out, None)
