"""Matmuls of the tokens of each expert by its weight in one launch, both operands quantized.

They are what ``torch.nn.functional.scaled_grouped_mm`` takes: tokens sorted by expert, a matrix
without gaps whose scales are tiles of each expert (``swizzle_groups``), and a stack of weights with
the scales of each. Where an expert's tokens end is read on the device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4adam.formats.float8_block import Float8BlockQuantizer
from fp4adam.formats.nvfp4 import NVFP4Quantizer
from fp4adam.nn import scaled_matmul
from fp4adam.nn.kept_weights import keep
from fp4adam.nn.scaled_matmul import Operand
from fp4adam.tensors.backend import runs_eagerly
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer
from fp4adam.tensors.swizzle import unswizzle_groups
from fp4adam.tensors.transpose import transposed_codes


def runs_natively(quantizer: Quantizer, x: Tensor) -> bool:
    """Whether products with ``x`` run on the block-scaled units of its device, or are emulated.

    Raises:
        RuntimeError: If they have to and cannot: the GPU has no such units.
        TypeError: If they run natively and ``x`` is not bfloat16.
    """
    is_native = scaled_matmul.runs_natively(quantizer, x.device, grouped=True)
    if is_native and x.dtype != torch.bfloat16:
        raise TypeError(
            "input must be bfloat16 for grouped matmuls of quantized operands on a GPU, got "
            f"{x.dtype}; convert it first, or run under torch.autocast"
        )
    return is_native


def check_stack(stack: QuantizedTensor) -> None:
    """Raise unless the stack can be an operand in both directions.

    Raises:
        NotImplementedError: If torch has no grouped matmul of the format.
        ValueError: If sides of the weights are no multiples of 128, or rows have been cut off.
    """
    if isinstance(stack.quantizer, Float8BlockQuantizer):
        raise NotImplementedError(
            "stack must be MXFP8 or NVFP4 for grouped matmuls of quantized operands, got "
            "Float8Block, whose 128x128 blocks torch.nn.functional.scaled_grouped_mm does not "
            "have; quantize the weights alone with Recipe(weights)"
        )
    scaled_matmul.check_weight(stack)


def stack_operand(stack: QuantizedTensor, usage: str) -> Operand:
    """A stack [experts, N, K] as operand, one weight after the other.

    Args:
        usage: "rowwise" for weights [N, K], "columnwise" for [K, N].

    Returns:
        codes: uint8 [experts, rows, k] of E4M3, or [experts, rows, k / 2] of packed E2M1.
        scales: uint8 [experts, rows * blocks], each weight's in tiles. amax: float32 [experts].
    """
    return keep(stack, usage, lambda: _stack_operand(stack, usage))


def _stack_operand(stack: QuantizedTensor, usage: str) -> Operand:
    experts, rows, cols = stack.shape
    is_nvfp4 = isinstance(stack.quantizer, NVFP4Quantizer)
    codes = stack.rowwise_data if usage == "rowwise" else stack.columnwise_data
    scales = getattr(stack, f"{usage}_gemm_scale_inv")
    if usage == "rowwise":
        codes, scales = codes.view(experts, rows, -1), scales.view(experts, -1)
    else:
        # What lies side by side in the matrix has to be brought one behind the other.
        if is_nvfp4:
            codes = codes.view(cols, experts, -1).transpose(0, 1)
            codes = codes.clone(memory_format=torch.contiguous_format)
        else:
            codes = transposed_codes(codes.view(experts, rows, cols), 8)
        scales = scales.view(cols // 128, experts, -1).transpose(0, 1).reshape(experts, -1)
    if not is_nvfp4:
        return Operand(codes, scales, "mxfp8")
    # Some versions of torch read a scale per expert, whatever is given.
    return Operand(codes, scales, "nvfp4", stack._amax.expand(experts))


def grouped_matmul(
    tokens: Operand, stack: Operand, offsets: Tensor, dtype: torch.dtype, native: bool
) -> Tensor:
    """``tokens[e] @ stack[e].T`` of all experts [rows of tokens, rows of a weight] in ``dtype``.

    Rows behind the last offset are left undefined.

    Args:
        tokens: As :func:`fp4adam.nn.scaled_matmul.quantize` makes them for these ``offsets``.
        native: Multiply on the block-scaled units, or decode both and multiply in FP32. Codes and
            scales are the same; sums are taken in another order.
    """
    run = _multiply if runs_eagerly(tokens.codes) else _multiply_op
    parts = (part for operand in (tokens, stack) for part in operand[:2] + operand[3:])
    return run(*parts, tokens.kind, offsets, dtype, native)


def _multiply(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor | None,
    stack_codes: Tensor,
    stack_scales: Tensor,
    stack_amax: Tensor | None,
    kind: str,
    offsets: Tensor,
    dtype: torch.dtype,
    native: bool,
) -> Tensor:
    tokens = Operand(codes, scales, kind, amax)
    stack = Operand(stack_codes, stack_scales, kind, stack_amax)
    if native:
        product = F.scaled_grouped_mm
        return scaled_matmul.scaled_product(product, tokens, stack, torch.bfloat16, offs=offsets)
    weights = decode_stack(stack).transpose(1, 2)
    return F.grouped_mm(decode_tokens(tokens, offsets), weights, offs=offsets).to(dtype)


# torch cannot trace scaled_grouped_mm, which has no fake kernel.
_multiply_op = torch.library.custom_op("fp4adam::grouped_matmul", mutates_args=())(_multiply)


@_multiply_op.register_fake
def _(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor | None,
    stack_codes: Tensor,
    stack_scales: Tensor,
    stack_amax: Tensor | None,
    kind: str,
    offsets: Tensor,
    dtype: torch.dtype,
    native: bool,
) -> Tensor:
    return codes.new_empty(codes.shape[0], stack_codes.shape[1], dtype=dtype)


def decode_tokens(tokens: Operand, offsets: Tensor) -> Tensor:
    """The values of tokens, float32 [rows, k]."""
    scales = unswizzle_groups(tokens.scales, offsets, len(tokens.codes))
    return scaled_matmul.decode_rows(tokens.codes, scales, tokens.kind, tokens.amax)


def decode_stack(stack: Operand) -> Tensor:
    """The values of a stack, float32 [experts, rows, k]."""
    experts, rows, _ = stack.codes.shape
    amax = None if stack.amax is None else stack.amax[:1]
    scales = stack.scales.view(experts * rows, -1)
    one = Operand(stack.codes.flatten(0, 1), scales, stack.kind, amax)
    return scaled_matmul.decode(one).view(experts, rows, -1)
