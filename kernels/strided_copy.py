"""Copy between any number of pairs of views with any strides."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.launch.launch import Launch

RANK = tl.constexpr(5)  # of all views; smaller ranks are padded with leading sizes of 1
# A row of the table: addresses of source and target, sizes, strides of the source and the target.
WIDTH = tl.constexpr(2 + 3 * RANK.value)
# Elements per program.
CHUNK = 1024


@triton.jit
def _strided_copy_kernel(table, chunks, DTYPE: tl.constexpr, CHUNK: tl.constexpr):
    """Copy one chunk of a view of fewer than 2**31 elements.

    Grid: (n_chunks,). table: int64 [n_views, 17]. chunks: int32 [n_chunks, 2], (view, first
    element). Reads and writes one DTYPE per element.
    """
    view = tl.load(chunks + 2 * tl.program_id(0))
    columns = table + view.to(tl.int64) * WIDTH
    rest = tl.load(chunks + 2 * tl.program_id(0) + 1) + tl.arange(0, CHUNK)
    source = tl.load(columns).to(tl.pointer_type(DTYPE)) + tl.zeros((CHUNK,), tl.int64)
    target = tl.load(columns + 1).to(tl.pointer_type(DTYPE)) + tl.zeros((CHUNK,), tl.int64)
    columns += 2
    for dim in tl.static_range(RANK - 1, -1, -1):
        size = tl.load(columns + dim).to(tl.int32)
        position = (rest % size).to(tl.int64)
        source += position * tl.load(columns + RANK + dim)
        target += position * tl.load(columns + 2 * RANK + dim)
        rest = rest // size
    mask = rest == 0  # a remainder means past the end
    tl.store(target, tl.load(source, mask), mask)


def strided_copy(table: Tensor, chunks: Tensor, dtype: torch.dtype) -> Launch:
    """The launch that copies all views of a table; ``dtype`` has one or four bytes."""
    kind = {1: tl.uint8, 4: tl.float32}[dtype.itemsize]
    return Launch(
        _strided_copy_kernel, len(chunks), (table, chunks), {"DTYPE": kind, "CHUNK": CHUNK}
    )
