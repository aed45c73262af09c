"""Matmuls of the tokens of each expert by its weight in one launch, both operands quantized.

Operands are laid out for ``torch.nn.functional.scaled_grouped_mm``: tokens sorted by expert, a
matrix without gaps whose scales are tiles of each expert (``swizzle_groups``), and a stack of
weights with the scales of each. Where an expert's tokens end is read on the device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4adam.nn import hardware
from fp4adam.nn.kept_weights import keep
from fp4adam.nn.operand import FORMATS, Operand, check_weight, format_of
from fp4adam.nn.scaled_matmul import decode, scaled_product
from fp4adam.tensors.backend import runs_eagerly
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer
from fp4adam.tensors.swizzle import unswizzle_groups


def runs_natively(quantizer: Quantizer, x: Tensor) -> bool:
    """Whether products with ``x`` run on the block-scaled units of its device; else emulated.

    Raises:
        RuntimeError: If the GPU has no such units and emulation is not asked for.
        TypeError: If they run natively and ``x`` is not bfloat16.
    """
    is_native = hardware.runs_natively(quantizer, x.device, grouped=True)
    if is_native and x.dtype != torch.bfloat16:
        raise TypeError(
            "input must be bfloat16 for grouped matmuls of quantized operands on a GPU, got "
            f"{x.dtype}; convert it first, or run under torch.autocast"
        )
    return is_native


def check_stack(stack: QuantizedTensor, transposed: bool) -> None:
    """Raise unless the stack can be an operand in both directions.

    Args:
        transposed: Whether it is [experts, in_features, out_features].

    Raises:
        NotImplementedError: If torch has no grouped matmul of the format.
        ValueError: If sides of the weights are not multiples of 128, the stack is a slice, or it
            lacks the codes that a matmul reads.
    """
    if not FORMATS[type(stack.quantizer)].has_stacks:
        fitting = [_name(kind) for kind, form in FORMATS.items() if form.has_stacks]
        raise NotImplementedError(
            f"stack must be {' or '.join(fitting)} for grouped matmuls of quantized operands, got "
            f"{_name(type(stack.quantizer))}, whose blocks torch.nn.functional.scaled_grouped_mm "
            "does not have; quantize the weights alone with Recipe(weights)"
        )
    check_weight(stack)
    quantizer = stack.quantizer
    usages = ("columnwise", "rowwise") if transposed else ("rowwise", "columnwise")
    operands = quantizer.operands.activations, quantizer.operands.gradients
    for is_wanted, usage in zip(operands, usages, strict=True):
        if is_wanted and not getattr(quantizer, usage):
            raise ValueError(
                f"stack must have {usage} codes for grouped matmuls of its quantized operands, got "
                f"{quantizer}; quantize it by a Recipe whose weights are a quantizer with "
                f"{usage}=True"
            )


def _name(kind: type[Quantizer]) -> str:
    return kind.tensor_class.__name__.removesuffix("Tensor")


def stack_operand(stack: QuantizedTensor, usage: str) -> Operand:
    """A stack [experts, N, K] as an operand, one weight after the other.

    Args:
        usage: "rowwise" for weights [N, K], "columnwise" for [K, N].

    Returns:
        codes: uint8 [experts, rows, k] of E4M3, or [experts, rows, k / 2] of packed E2M1.
        scales: uint8 [experts, rows * blocks], each weight's in tiles. amax: float32 [experts].
    """
    return keep(stack, usage, lambda: _stack_operand(stack, usage))


def _stack_operand(stack: QuantizedTensor, usage: str) -> Operand:
    experts, rows, cols = stack.shape
    form = FORMATS[type(stack.quantizer)]
    scales = getattr(stack, f"{usage}_gemm_scale_inv")
    if usage == "rowwise":
        codes, scales = stack.rowwise_data.view(experts, rows, -1), scales.view(experts, -1)
    else:
        # Columns of all experts lie side by side; the operand has one expert after the other.
        codes = form.columns_of_stack(stack)
        scales = scales.view(cols // 128, experts, -1).transpose(0, 1).reshape(experts, -1)
    # Some versions of torch read a scale per expert, whatever is given.
    amax = form.amax_of(stack)
    amax = None if amax is None else amax.expand(experts)
    return Operand(codes, scales, form.kinds[0], amax)


def grouped_matmul(
    tokens: Operand, stack: Operand, offsets: Tensor, dtype: torch.dtype, native: bool
) -> Tensor:
    """``tokens[e] @ stack[e].T`` of all experts [rows of tokens, rows of a weight] in ``dtype``.

    Rows behind the last offset are left undefined.

    Args:
        tokens: As :func:`fp4adam.nn.operand.quantize` makes them for these ``offsets``.
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
        return scaled_product(product, tokens, stack, torch.bfloat16, offs=offsets)
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
    return format_of(tokens).decode_rows(tokens.codes, scales, tokens.amax)


def decode_stack(stack: Operand) -> Tensor:
    """The values of a stack, float32 [experts, rows, k]."""
    experts, rows, _ = stack.codes.shape
    amax = None if stack.amax is None else stack.amax[:1]
    scales = stack.scales.view(experts * rows, -1)
    one = Operand(stack.codes.flatten(0, 1), scales, stack.kind, amax)
    return decode(one).view(experts, rows, -1)
