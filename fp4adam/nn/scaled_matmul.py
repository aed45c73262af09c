"""Products of two quantized operands, on the units of a GPU for them or emulated.

Every product is ``a @ b.T`` of two :class:`Operand`: forward x [tokens, K] with W [N, K]; input
gradient dy [tokens, N] with W^T [K, N]; weight gradient dy^T [N, tokens] with x^T [K, tokens].
"""

import functools
import math

import torch
from torch import Tensor

from fp4adam.nn.operand import FORMATS, Operand, padded_tokens
from fp4adam.tensors import backend
from fp4adam.tensors.quantizer import Quantizer


def runs_natively(quantizer: Quantizer, device: torch.device) -> bool:
    """Whether products of a format run on units of ``device`` for them; else emulated.

    Raises:
        RuntimeError: If the GPU has no such units and emulation is not asked for.
    """
    if quantizer.operands.emulate or not backend.uses_kernels(device):
        return False
    needed, found = FORMATS[type(quantizer)], _capability(device)
    if needed.is_met_by(found):
        return True
    name = quantizer.tensor_class.__name__.removesuffix("Tensor")
    raise RuntimeError(
        f"matmuls of {name} operands need CUDA compute capability {needed.capabilities}, got "
        f"{'.'.join(map(str, found))} ({device}); quantize the weights "
        'alone with Recipe(weights), pass activations="fake", or set emulate=True'
    )


_cached_capability = functools.lru_cache(torch.cuda.get_device_capability)


def _capability(device: torch.device) -> tuple[int, int]:
    return _cached_capability(device)


# All that torch.compiler.assume_constant_result does, which imports torch._dynamo first.
_capability._dynamo_marked_constant = True


def matmul(
    a: Operand,
    b: Operand,
    quantizer: Quantizer,
    dtype: torch.dtype,
    native: bool,
    is_forward: bool = False,
) -> Tensor:
    """``a @ b.T`` [rows of a, rows of b] in ``dtype``, accumulated in float32.

    Args:
        quantizer: That of the weight.
        native: Multiply on the units for it, or decode both and multiply in FP32. Codes and
            scales are the same; sums are taken in another order.
        is_forward: Whether sums may be taken in fewer bits, as those of outputs are on Hopper GPUs.
    """
    form = FORMATS[type(quantizer)]
    if not native:
        with torch.autocast(a.codes.device.type, enabled=False):  # it would multiply in fewer bits
            return (form.decode(a) @ form.decode(b).t()).to(dtype)
    return form.multiply(a, b, dtype, is_forward)


def without_padding(product: Tensor, quantizer: Quantizer, shape: tuple[int, ...]) -> Tensor:
    """The first rows of a new product in its memory, as ``shape``.

    Autograd does not see a view: writing in place to a view that a function returns is refused.
    """
    rows = math.prod(shape[:-1])
    # Not product.shape[0]: torch 2.11 cannot trace sizes of an autograd function's results if some
    # are dynamic.
    sizes = rows, padded_tokens(quantizer, rows) - rows
    first, _ = torch.unsafe_split_with_sizes(product, sizes)
    return torch.ops.aten._unsafe_view(first, shape)
