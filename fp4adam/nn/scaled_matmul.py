"""Products of two quantized operands, on the block-scaled units of a GPU or emulated.

Every product is ``a @ b.T`` of two :class:`Operand`: forward x [tokens, K] with W [N, K]; input
gradient dy [tokens, N] with W^T [K, N]; weight gradient dy^T [N, tokens] with x^T [K, tokens].
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4adam.nn.operand import Operand, format_of, padded_tokens
from fp4adam.tensors.backend import runs_eagerly


def matmul(a: Operand, b: Operand, dtype: torch.dtype, native: bool) -> Tensor:
    """``a @ b.T`` [rows of a, rows of b] in ``dtype``, accumulated in float32.

    Args:
        native: Multiply on the block-scaled units, or decode both and multiply in FP32. Codes and
            scales are the same; sums are taken in another order.
    """
    if native:
        return _multiply(a, b, dtype)
    run = _emulated if runs_eagerly(a.codes) else _emulated_op
    return run(*a, *b, dtype)


def without_padding(product: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The first rows of a new product in its memory, as ``shape``.

    Autograd does not see a view: writing in place to a view that a function returns is refused.
    """
    rows = math.prod(shape[:-1])
    # Not product.shape[0]: torch 2.11 cannot trace sizes of an autograd function's results if some
    # are dynamic.
    first, _ = torch.unsafe_split_with_sizes(product, (rows, padded_tokens(rows) - rows))
    return torch.ops.aten._unsafe_view(first, shape)


def _multiply(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    parts = (format_of(operand).for_torch(operand) for operand in (a, b))
    codes, scales, recipes, swizzles = zip(*parts, strict=True)
    return F.scaled_mm(
        codes[0],
        codes[1].t(),
        scales[0],
        recipes[0],
        scales[1],
        recipes[1],
        swizzles[0],
        swizzles[1],
        output_dtype=dtype,
    )


def _emulated(
    a_codes: Tensor,
    a_scales: Tensor,
    a_kind: str,
    a_amax: Tensor | None,
    b_codes: Tensor,
    b_scales: Tensor,
    b_kind: str,
    b_amax: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    a = decode(Operand(a_codes, a_scales, a_kind, a_amax))
    b = decode(Operand(b_codes, b_scales, b_kind, b_amax))
    with torch.autocast(a.device.type, enabled=False):  # which would multiply in fewer bits
        return (a @ b.t()).to(dtype)


_emulated_op = torch.library.custom_op("fp4adam::emulated_scaled_mm", mutates_args=())(_emulated)


@_emulated_op.register_fake
def _(
    a_codes: Tensor,
    a_scales: Tensor,
    a_kind: str,
    a_amax: Tensor | None,
    b_codes: Tensor,
    b_scales: Tensor,
    b_kind: str,
    b_amax: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return a_codes.new_empty(a_codes.shape[0], b_codes.shape[0], dtype=dtype)


def decode(operand: Operand) -> Tensor:
    """The values of an operand, float32 [rows, k]."""
    return format_of(operand).decode(operand)
