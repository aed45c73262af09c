"""A kernel that applies one tile function, for tests of the tile functions alone."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# In the interpreter a program costs half a millisecond, whatever its size.
BLOCK = 4096 if torch.cuda.is_available() else 65536


@triton.jit
def _elementwise_kernel(x_ptr, y_ptr, numel, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    """y = FUNCTION(x), which must return the dtype of y. Grid: (cdiv(numel, BLOCK),)."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < numel
    y = FUNCTION(tl.load(x_ptr + offs, mask))
    tl.static_assert(y.dtype == y_ptr.dtype.element_ty, "FUNCTION must return the dtype of y")
    tl.store(y_ptr + offs, y, mask)


@triton.jit
def inexact(x):
    """What must not be: approximations, and a sum of a product where fusion is on."""
    return tl.sqrt(x * x + 1.0) / x


def elementwise(function: triton.JITFunction, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply a tile function to every element of ``x``."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    _elementwise_kernel[(triton.cdiv(x.numel(), BLOCK),)](
        x, y, x.numel(), FUNCTION=function, BLOCK=BLOCK, enable_fp_fusion=False
    )
    return y
