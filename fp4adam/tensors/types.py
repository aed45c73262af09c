"""What the parts of a quantized tensor need of each other, for annotations."""

from typing import Any, Protocol

import torch
from torch import Tensor

from fp4adam.tensors.layout import Layout


class Format(Protocol):
    """A quantizer."""

    rowwise: bool
    columnwise: bool
    optimize_for_gemm: bool
    layout: Layout

    def without_derived(self) -> "Format":
        """The same without the inner tensors that can be derived."""

    def writes_codes_of(self, other: "Format") -> bool:
        """Whether both write the same codes in each direction that both have."""

    def with_compact_scales(self) -> "Format":
        """The same without swizzled scales."""


class StoredTensor(Protocol):
    """A quantized tensor: a window on a storage.

    Attributes:
        quantizer: Its format.
        shape: Its shape.
        dtype: Its nominal dtype.
        device: The device of its inner tensors.
    """

    quantizer: Any
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    _shared: Any  # the ``SharedStorage``
    _start: int  # index of its first row and column in the storage
    _start_col: int

    def dim(self) -> int:
        """The number of dimensions."""

    def numel(self) -> int:
        """The number of elements."""

    def dequantize(self, dtype: torch.dtype = ...) -> Tensor:
        """The values as a plain tensor."""
