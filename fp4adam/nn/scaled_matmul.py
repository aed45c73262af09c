"""Matmuls whose two operands are quantized: what they are made of, and where which one runs.

Those of a stack of weights, each for its own tokens, are in ``grouped_matmul.py``.

Every product is ``a @ b.T`` of two :class:`Operand`: forward x [tokens, K] with W [N, K]; input
gradient dy [tokens, N] with W^T [K, N]; weight gradient dy^T [N, tokens] with x^T [K, tokens].
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4adam.formats import float8_block, mxfp8, nvfp4
from fp4adam.formats.float8_block import Float8BlockQuantizer
from fp4adam.formats.mxfp8 import MXFP8Quantizer
from fp4adam.formats.nvfp4 import NVFP4Quantizer
from fp4adam.nn.kept_weights import keep
from fp4adam.tensors import backend
from fp4adam.tensors.backend import runs_eagerly
from fp4adam.tensors.blocks import round_up
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer, check_dtype
from fp4adam.tensors.rows import is_all
from fp4adam.tensors.swizzle import groups_shape, swizzle_groups, unswizzle_scales
from fp4adam.tensors.transpose import transposed_codes

# Tokens are padded with zeros to a multiple: blocks of a weight gradient lie along them, scales
# come in tiles of so many rows, and units multiply no fewer at a time.
TOKENS = 128


class Requirement(NamedTuple):
    """What the products of a format need.

    Attributes:
        capability: Of the GPU, the first one.
        is_only: Whether no later one will do.
        multiple: That both sides of a weight must be of.
    """

    capability: tuple[int, int]
    is_only: bool
    multiple: int

    def is_met_by(self, capability: tuple[int, int]) -> bool:
        """Whether GPUs of this compute capability have these products."""
        is_later = capability > self.capability and not self.is_only
        return capability == self.capability or is_later

    @property
    def capabilities(self) -> str:
        """In words: "9.0", or "10.0 or later"."""
        first = ".".join(map(str, self.capability))
        return first if self.is_only else f"{first} or later"


REQUIREMENTS: dict[type[Quantizer], Requirement] = {
    # cuBLAS has 128x128 blocks for compute capability 9.0 alone, from CUDA 12.9 on.
    Float8BlockQuantizer: Requirement((9, 0), True, 128),
    MXFP8Quantizer: Requirement((10, 0), False, 32),
    # Rows of packed codes must be multiples of 16 bytes.
    NVFP4Quantizer: Requirement((10, 0), False, 32),
}

# torch has products of stacks for 10.x alone: neither for 9.0, where scales are per row, nor for
# 12.0.
GROUPED_MAJOR = 10


class Operand(NamedTuple):
    """One side of a product, contracted along the last dimension of its codes.

    Attributes:
        codes: uint8, contiguous: [rows, k] of E4M3, or [rows, k / 2] of packed E2M1.
        scales: As the GEMM reads them. "float8_block": float32 [k / 128, rows]; its weights with
            square blocks, "float8_block_2d": float32 [rows / 128, k / 128 to 4]; "mxfp8" and
            "nvfp4": uint8 [rows to 128, blocks to 4] in tiles (``swizzle_scales``).
        kind: One of these four.
        amax: float32 [1] of NVFP4.
    """

    codes: Tensor
    scales: Tensor
    kind: str
    amax: Tensor | None = None


def has_quantized_operands(quantizer: Quantizer) -> bool:
    """Whether something else than such a weight is quantized for its products."""
    return quantizer.operands.activations or quantizer.operands.gradients


def has_weight_gradient(quantizer: Quantizer) -> bool:
    """Whether the gradient of such a weight is a product of two quantized operands.

    That takes codes with blocks along the tokens, transposed, which Float8Block alone has.
    """
    operands = quantizer.operands
    return (
        operands.activations and operands.gradients and isinstance(quantizer, Float8BlockQuantizer)
    )


def runs_natively(quantizer: Quantizer, device: torch.device, grouped: bool = False) -> bool:
    """Whether products of a format run on the block-scaled units of ``device``, or are emulated.

    Args:
        grouped: Those of a stack of weights, ``torch.nn.functional.scaled_grouped_mm``.

    Raises:
        RuntimeError: If they have to and cannot: the GPU has no such units.
    """
    if quantizer.operands.emulate or not backend.uses_kernels(device):
        return False
    needed = REQUIREMENTS[type(quantizer)]
    found = _capability(device)
    fits, wanted = needed.is_met_by(found), needed.capabilities
    if grouped:
        fits, wanted = found[0] == GROUPED_MAJOR, f"{GROUPED_MAJOR}.x"
    if fits:
        return True
    name = quantizer.tensor_class.__name__.removesuffix("Tensor")
    raise RuntimeError(
        f"{'grouped ' * grouped}matmuls of {name} operands need CUDA compute "
        f"capability {wanted}, got {'.'.join(map(str, found))} ({device}); quantize the weights "
        "alone with Recipe(weights), or set emulate=True"
    )


_cached_capability = functools.lru_cache(torch.cuda.get_device_capability)


@torch.compiler.assume_constant_result
def _capability(device: torch.device) -> tuple[int, int]:
    return _cached_capability(device)


def check_shape(quantizer: Quantizer, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a weight, or each one of a stack, can be an operand both ways."""
    # A stack is quantized as one matrix: each weight's scales are to be whole tiles of its own.
    is_stack = len(shape) == 3
    multiple = 128 if is_stack else REQUIREMENTS[type(quantizer)].multiple
    if any(n % multiple for n in shape[-2:]):
        name = f"{'grouped ' * is_stack}matmuls of {quantizer.tensor_class.__name__}"
        raise ValueError(
            f"out_features and in_features must be multiples of {multiple} for {name} with "
            f"quantized activations or gradients, got {tuple(shape)}; leave this layer to "
            "weight-only quantization (filter=...)"
        )


def check_weight(weight: QuantizedTensor) -> None:
    """Raise ValueError unless a weight has such a shape, and no rows have been cut off."""
    check_shape(weight.quantizer, weight.shape)
    if not is_all(weight) or weight.pending_value() is not None:
        raise ValueError(
            "weight must be a whole tensor for matmuls with quantized activations or gradients, "
            f"got rows of one, {tuple(weight.shape)}; multiply by weight.dequantize(), or quantize "
            "its rows as a weight of their own"
        )


# Operands


def padded_tokens(n: int) -> int:
    """How many tokens are multiplied; without any, those of the padding."""
    return round_up(max(n, 1), TOKENS)


def quantize(
    x: Tensor,
    quantizer: Quantizer,
    rowwise: bool,
    columnwise: bool = False,
    offsets: Tensor | None = None,
) -> list[Operand | None]:
    """Activations or gradients as operands, in one pass over them.

    Args:
        x: [tokens, n], float32, bfloat16 or float16.
        quantizer: That of the weight to multiply with.
        rowwise: Make the operand [tokens to 128, n].
        columnwise: Make the operand [n, tokens to 128], which only Float8Block has.
        offsets: int32 [groups], where groups of tokens end that are multiplied by weights of their
            own: their scales are then as in ``swizzle_groups``. Not for Float8Block.

    Returns:
        The two operands, or None for one that is not asked for. Padding is zero.
    """
    check_dtype("input of a linear layer with quantized operands", x.dtype)
    if isinstance(quantizer, Float8BlockQuantizer):
        run = _quantize_float8_block if runs_eagerly(x) else _quantize_float8_block_op
        pow_2, epsilon = quantizer.force_pow_2_scales, quantizer.amax_epsilon
        made = run(x.contiguous(), rowwise, columnwise, pow_2, epsilon)
        return [
            Operand(*made[at : at + 2], "float8_block") if wanted else None
            for at, wanted in ((0, rowwise), (2 if rowwise else 0, columnwise))
        ]
    run = _quantize_swizzled if runs_eagerly(x) else _quantize_swizzled_op
    kind = "nvfp4" if isinstance(quantizer, NVFP4Quantizer) else "mxfp8"
    codes, scales, *amax = run(x.contiguous(), kind, offsets)
    return [Operand(codes, scales, kind, *amax), None]


def weight_operand(weight: QuantizedTensor, usage: str) -> Operand:
    """A weight as operand: "rowwise" [N, K] or "columnwise" [K, N]."""
    return keep(weight, usage, lambda: _weight_operand(weight, usage))


def _weight_operand(weight: QuantizedTensor, usage: str) -> Operand:
    codes = weight.rowwise_data if usage == "rowwise" else weight.columnwise_data
    if isinstance(weight.quantizer, Float8BlockQuantizer):
        if not weight.quantizer.two_dimensional:
            return Operand(codes, getattr(weight, f"_{usage}_scale_inv"), "float8_block")
        grid = weight._block_scale_inv if usage == "rowwise" else weight._block_scale_inv.t()
        if grid.shape[1] % 4:
            grid = F.pad(grid, (0, -grid.shape[1] % 4))
        elif usage == "columnwise":
            grid = grid.clone(memory_format=torch.contiguous_format)
        return Operand(codes, grid, "float8_block_2d")
    scales = getattr(weight, f"{usage}_gemm_scale_inv")
    if isinstance(weight.quantizer, NVFP4Quantizer):
        return Operand(codes, scales, "nvfp4", weight._amax)
    # MXFP8 keeps both directions as the matrix lies; torch takes the contracted one last alone.
    return Operand(codes if usage == "rowwise" else transposed_codes(codes, 8), scales, "mxfp8")


def _quantize_float8_block(
    x: Tensor, rowwise: bool, columnwise: bool, force_pow_2_scales: bool, amax_epsilon: float
) -> list[Tensor]:
    """Codes and scales per 1x128 block of the matrix, and of the transposed one, as wanted."""
    options = dict(force_pow_2_scales=force_pow_2_scales, amax_epsilon=amax_epsilon)
    if backend.uses_kernels(x.device):
        from fp4adam.kernels import float8_block as kernels

        made = _room_for_float8_block(x, rowwise, columnwise)
        along = made[:2] if rowwise else (None, None)
        across = made[-2:] if columnwise else (None, None)
        kernels.quantize_vectors(
            x,
            rowwise_data=along[0],
            columnwise_data=across[0],
            rowwise_scale=along[1],
            columnwise_scale=across[1],
            rows=padded_tokens(x.shape[0]),
            **options,
        )
        return made
    quantizer = Float8BlockQuantizer(rowwise, columnwise, two_dimensional=False, **options)
    padding = padded_tokens(x.shape[0]) - x.shape[0]
    made = quantizer.quantize(F.pad(x.detach(), (0, 0, 0, padding)))
    parts = made._rowwise_data, made._rowwise_scale_inv
    parts += made._columnwise_data, made._columnwise_scale_inv
    return [part for part in parts if part is not None]


def _room_for_float8_block(x: Tensor, rowwise: bool, columnwise: bool) -> list[Tensor]:
    rows, cols = padded_tokens(x.shape[0]), x.shape[1]
    room = []
    for wanted, m, k in ((rowwise, rows, cols), (columnwise, cols, rows)):
        if wanted:
            room.append(x.new_empty(m, k, dtype=torch.uint8))
            room.append(x.new_empty(k // float8_block.BLOCK, m, dtype=torch.float32))
    return room


_quantize_float8_block_op = torch.library.custom_op(
    "fp4adam::quantize_float8_block_operands", mutates_args=()
)(_quantize_float8_block)


@_quantize_float8_block_op.register_fake
def _(
    x: Tensor, rowwise: bool, columnwise: bool, force_pow_2_scales: bool, amax_epsilon: float
) -> list[Tensor]:
    return _room_for_float8_block(x, rowwise, columnwise)


def _quantize_swizzled(x: Tensor, kind: str, offsets: Tensor | None) -> list[Tensor]:
    """Codes, scales in the GEMM's order, and the amax of NVFP4, of a matrix with padded rows."""
    options = dict(columnwise=False, optimize_for_gemm=offsets is None)
    if kind == "nvfp4":
        quantizer = NVFP4Quantizer(two_dimensional=False, **options)
    else:
        quantizer = MXFP8Quantizer(**options)
    rows = padded_tokens(x.shape[0])
    made = quantizer.quantize(F.pad(x.detach(), (0, 0, 0, rows - x.shape[0])))
    scales = made._rowwise_gemm_scale_inv
    if offsets is not None:
        scales = swizzle_groups(made._rowwise_scale_inv, offsets)
    tensors = [made._rowwise_data, scales, made._amax]
    return [tensor for tensor in tensors if tensor is not None]


_quantize_swizzled_op = torch.library.custom_op(
    "fp4adam::quantize_swizzled_operand", mutates_args=()
)(_quantize_swizzled)


@_quantize_swizzled_op.register_fake
def _(x: Tensor, kind: str, offsets: Tensor | None) -> list[Tensor]:
    rows, cols = padded_tokens(x.shape[0]), x.shape[1]
    per_byte, block = (2, nvfp4.BLOCK) if kind == "nvfp4" else (1, mxfp8.BLOCK)
    blocks = round_up(cols // block, 4)
    scales = (rows, blocks) if offsets is None else groups_shape(rows, blocks, offsets)
    made = [
        x.new_empty(rows, cols // per_byte, dtype=torch.uint8),
        x.new_empty(scales, dtype=torch.uint8),
    ]
    return made + [x.new_empty(1, dtype=torch.float32)] * (kind == "nvfp4")


# Products


def matmul(a: Operand, b: Operand, dtype: torch.dtype, native: bool) -> Tensor:
    """``a @ b.T`` [rows of a, rows of b] in ``dtype``, accumulated in float32.

    Args:
        native: Multiply on the block-scaled units, or decode both and multiply in FP32. Codes and
            scales are the same; sums are taken in another order.
    """
    if native:
        return scaled_product(F.scaled_mm, a, b, dtype)
    run = _emulated if runs_eagerly(a.codes) else _emulated_op
    return run(*a, *b, dtype)


def without_padding(product: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The first rows of a new product in its memory, as ``shape``.

    It is no view to autograd, which lets nobody write in place to a view that a function returns.
    """
    rows = math.prod(shape[:-1])
    # Not product.shape[0]: torch 2.11 cannot trace sizes of what an autograd function has computed
    # where some are dynamic.
    first, _ = torch.unsafe_split_with_sizes(product, (rows, padded_tokens(rows) - rows))
    return torch.ops.aten._unsafe_view(first, shape)


def scaled_product(
    product: Callable[..., Tensor], a: Operand, b: Operand, dtype: torch.dtype, **options: Tensor
) -> Tensor:
    """``a @ b.T`` by torch's ``scaled_mm`` or ``scaled_grouped_mm``."""
    codes, scales, recipes, swizzles = zip(_for_torch(a), _for_torch(b), strict=True)
    return product(
        codes[0],
        codes[1].mT,
        scales[0],
        recipes[0],
        scales[1],
        recipes[1],
        swizzles[0],
        swizzles[1],
        output_dtype=dtype,
        **options,
    )


def _for_torch(operand: Operand) -> tuple[Tensor, list[Tensor], list, list]:
    """Codes and scales in torch's dtypes, what blocks they are of, and the orders of scales."""
    codes, scales, kind, amax = operand
    blocks, orders = F.ScalingType, F.SwizzleType
    if kind == "nvfp4":
        # Codes and block scales are for an amax of 2688.
        scale = amax * (1 / nvfp4.RANGE)
        return (
            codes.view(torch.float4_e2m1fn_x2),
            [scales.view(torch.float8_e4m3fn), scale],
            [blocks.BlockWise1x16, blocks.TensorWise],
            [orders.SWIZZLE_32_4_4, orders.NO_SWIZZLE],
        )
    codes = codes.view(torch.float8_e4m3fn)
    if kind == "mxfp8":
        scales = scales.view(torch.float8_e8m0fnu)
        return codes, [scales], [blocks.BlockWise1x32], [orders.SWIZZLE_32_4_4]
    block = blocks.BlockWise1x128 if kind == "float8_block" else blocks.BlockWise128x128
    return codes, [scales.t()], [block], [orders.NO_SWIZZLE]


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
    codes, scales, kind, amax = operand
    if kind.startswith("float8_block"):
        square = kind == "float8_block_2d"
        scales = scales[:, : -(-codes.shape[1] // float8_block.BLOCK)] if square else scales
        return float8_block._decode(codes, scales, square, False, torch.float32)
    (scales,) = unswizzle_scales([scales])
    return decode_rows(codes, scales, kind, amax)


def decode_rows(codes: Tensor, scales: Tensor, kind: str, amax: Tensor | None) -> Tensor:
    """The values of "mxfp8" or "nvfp4" codes whose scales are row by row, float32 [rows, k]."""
    if kind == "mxfp8":
        return mxfp8._decode(codes, scales, True, torch.float32)
    return nvfp4._decode(codes, scales, amax, False, False, torch.float32)
