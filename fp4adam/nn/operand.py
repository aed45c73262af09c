"""Quantized matmuls: operands made from activations, gradients and weights, and their products.

A class per format has all that differs between formats; ``FORMATS`` lists them. Casts of
activations and gradients are plain operators that ``torch.compile`` fuses with what is around them;
eager code on a GPU takes the kernels of the formats instead, which give the same bits. Float8Block
has its kernel in compiled graphs as well.

Every product is ``a @ b.T`` of two :class:`Operand`: forward x [tokens, K] with W [N, K]; input
gradient dy [tokens, N] with W^T [K, N]; weight gradient dy^T [N, tokens] with x^T [K, tokens].
"""

import dataclasses
import functools
import math
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4adam.formats import minifloat, nvfp4_gradients
from fp4adam.formats.float8 import Float8Quantizer
from fp4adam.formats.float8_block import Float8BlockQuantizer
from fp4adam.formats.mxfp8 import MXFP8Quantizer
from fp4adam.formats.nvfp4 import NVFP4Quantizer
from fp4adam.tensors import backend, rows
from fp4adam.tensors.blocks import round_up
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import BY_KEY, Quantizer, check_dtype
from fp4adam.tensors.storage import Storage
from fp4adam.tensors.swizzle import row_by_row, swizzle_padded
from fp4adam.tensors.transpose import transposed_codes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The largest value of both is 1.75 times 2 to the power of this.
_EXPONENTS = {E4M3: 8, E5M2: 15}
_INFINITY = 0x7F800000
_SCALING, _ORDER = F.ScalingType, F.SwizzleType
# Codes and scales in torch's dtypes, their blocks, and the orders of scales.
ForTorch = tuple[Tensor, list[Tensor], list, list]


class Operand(NamedTuple):
    """One side of a product, contracted along the last dimension of its codes.

    Attributes:
        codes: [rows, k] of E4M3 or E5M2, contiguous, or uint8 [rows, k / 2] of packed E2M1.
        scales: What codes are multiplied by, as the GEMM reads it. Float8: float32 [1].
            Float8Block: float32 [k / 128, rows]; weights with square blocks [rows / 128, k / 128 to
            4]. MXFP8 and NVFP4: uint8 [rows to 128, blocks to 4] in tiles (``tensors/swizzle.py``).
        amax: float32 [1] of NVFP4: 2688 times what multiplies codes and block scales.
    """

    codes: Tensor
    scales: Tensor
    amax: Tensor | None = None


class OperandFormat:
    """The operands of one format.

    Besides what is here, each has ``quantize`` for :func:`quantize`, with whole blocks of tokens;
    ``of_weight`` for :func:`weight_operand`; ``for_torch``, the arguments of ``scaled_mm`` for an
    operand; and ``decode``, the values of an operand, float32 [rows, k].
    """

    capability: ClassVar[tuple[int, int]]  # the first one whose GPUs multiply them
    is_only: ClassVar[bool] = False  # whether later ones do not
    multiple: ClassVar[int] = 32  # of both sides of a weight
    tokens: ClassVar[int] = 128  # are padded with zeros to a multiple of it
    has_weight_gradient: ClassVar[bool] = True  # whether there are blocks along the tokens
    is_swizzled: ClassVar[bool] = False  # whether GEMMs read scales in another order

    def is_met_by(self, capability: tuple[int, int]) -> bool:
        """Whether GPUs of this compute capability have these products."""
        return capability == self.capability if self.is_only else capability >= self.capability

    @property
    def capabilities(self) -> str:
        """The text for errors: "9.0", or "10.0 or later"."""
        first = ".".join(map(str, self.capability))
        return first if self.is_only else f"{first} or later"

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """See :func:`matmul`, on the units of a GPU."""
        (of_a, *a_scales), (of_b, *b_scales) = map(self.for_torch, (a, b))
        pairs = (each for pair in zip(a_scales, b_scales, strict=True) for each in pair)
        scale_a, scale_b, block_a, block_b, *orders = pairs
        return F.scaled_mm(
            of_a, of_b.t(), scale_a, block_a, scale_b, block_b, *orders, output_dtype=dtype
        )


class Float8Operands(OperandFormat):
    """E4M3 codes with one scale, a power of two for activations; gradients are E5M2.

    The scale is that of the largest magnitude, which torch.compile finds in the kernel before.
    """

    capability = (8, 9)
    multiple = tokens = 16
    gradient_codes = E5M2

    def quantize(
        self, x: Tensor, quantizer: Quantizer, rowwise: bool, columnwise: bool, is_gradient: bool
    ) -> list[Operand | None]:
        kind = self.gradient_codes if is_gradient else E4M3
        amax = _amax_bits(x).amax().view(1)
        scale, inverse = _power_of_2(amax, _EXPONENTS[kind])
        codes = _float8(x.float() * scale, kind)
        across = Operand(_transposed(codes), inverse) if columnwise else None
        return [Operand(codes, inverse) if rowwise else None, across]

    def of_weight(self, weight: QuantizedTensor, usage: str) -> Operand:
        codes = getattr(weight, f"{usage}_data").view(E4M3)
        return Operand(codes, weight.quantizer.per_tensor_scale(weight._amax))

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        # Not F.scaled_mm, for which compiled graphs go through Python's dispatcher in torch 2.11.
        # Sums of outputs may be taken in fewer bits, which is 4 % faster; of gradients, E5M2, not.
        is_output = a.codes.dtype == E4M3
        return torch._scaled_mm(
            a.codes, b.codes.t(), a.scales, b.scales, out_dtype=dtype, use_fast_accum=is_output
        )

    def decode(self, operand: Operand) -> Tensor:
        return operand.codes.float() * operand.scales


class Float8BlockOperands(OperandFormat):
    """E4M3 codes in 1x128 blocks; weights may have 128x128 blocks."""

    # cuBLAS has 128x128 blocks for compute capability 9.0 alone, from CUDA 12.9 on.
    capability = (9, 0)
    is_only = True
    multiple = 128

    def quantize(
        self, x: Tensor, quantizer: Quantizer, rowwise: bool, columnwise: bool, is_gradient: bool
    ) -> list[Operand | None]:
        make = _vectors if backend.runs_eagerly(x) else _traced_vectors
        made = iter(make(x, quantizer._key, rowwise, columnwise))
        return [
            Operand(next(made).view(E4M3), next(made)) if is_wanted else None
            for is_wanted in (rowwise, columnwise)
        ]

    def of_weight(self, weight: QuantizedTensor, usage: str) -> Operand:
        codes = getattr(weight, f"{usage}_data").view(E4M3)
        if not weight.quantizer.two_dimensional:
            return Operand(codes, getattr(weight, f"_{usage}_scale_inv"))
        grid = weight._block_scale_inv
        grid = grid if usage == "rowwise" else _transposed(grid)
        return Operand(codes, F.pad(grid, (0, -grid.shape[1] % 4)))

    def _is_square(self, operand: Operand) -> bool:
        rows, cols = operand.codes.shape
        return tuple(operand.scales.shape) != (cols // 128, rows)

    def for_torch(self, operand: Operand) -> ForTorch:
        square = self._is_square(operand)
        block = _SCALING.BlockWise128x128 if square else _SCALING.BlockWise1x128
        return operand.codes, [operand.scales.t()], [block], [_ORDER.NO_SWIZZLE]

    def decode(self, operand: Operand) -> Tensor:
        values = operand.codes.float().unflatten(1, (-1, 128))
        if self._is_square(operand):
            scales = operand.scales[:, : values.shape[1]].repeat_interleave(128, 0)
        else:
            scales = operand.scales.t()
        return (values * scales.unsqueeze(2)).flatten(1)


class SwizzledOperands(OperandFormat):
    """Scales of 1-byte dtypes in the tiles that block-scaled GEMMs read."""

    capability = (10, 0)
    is_swizzled = True
    block: ClassVar[int]
    per_byte: ClassVar[int] = 1

    def of_weight(self, weight: QuantizedTensor, usage: str) -> Operand:
        codes = weight.rowwise_data if usage == "rowwise" else self.columns_of(weight)
        return Operand(codes, getattr(weight, f"{usage}_gemm_scale_inv"), weight._amax)

    def columns_of(self, weight: QuantizedTensor) -> Tensor:
        """Columnwise codes, those of the transposed matrix row by row."""
        return weight.columnwise_data

    def scales_of(self, operand: Operand) -> Tensor:
        """The scales row by row, without padding, uint8 [rows, blocks]."""
        rows = operand.codes.shape[0]
        blocks = operand.codes.shape[1] * self.per_byte // self.block
        scales = row_by_row(operand.scales, *operand.scales.shape)
        return scales.reshape(-1).view(operand.scales.shape)[:rows, :blocks]


class MXFP8Operands(SwizzledOperands):
    """E4M3 codes in 1x32 blocks with E8M0 scales."""

    has_weight_gradient = False
    block = 32
    quantizer = MXFP8Quantizer(columnwise=False)

    def quantize(
        self, x: Tensor, quantizer: Quantizer, rowwise: bool, columnwise: bool, is_gradient: bool
    ) -> list[Operand | None]:
        if _takes_kernels(x):
            return [self.of_weight(self.quantizer.quantize(x), "rowwise"), None]
        blocks = x.unflatten(1, (-1, self.block))
        amax = _amax_bits(blocks).amax(2).view(torch.float32)
        scales, factors = self.quantizer.encode(amax, None, torch.float32)
        codes = _float8(blocks.float() * factors.unsqueeze(2), E4M3).flatten(1)
        scales = F.pad(scales, (0, -scales.shape[1] % 4))
        return [Operand(codes, swizzle_padded(scales)), None]

    def columns_of(self, weight: QuantizedTensor) -> Tensor:
        # Both directions lie as the matrix does; torch takes the contracted one last alone.
        return transposed_codes(weight.columnwise_data, 8)

    def for_torch(self, operand: Operand) -> ForTorch:
        scales = operand.scales.view(torch.float8_e8m0fnu)
        codes = operand.codes.view(E4M3)
        return codes, [scales], [_SCALING.BlockWise1x32], [_ORDER.SWIZZLE_32_4_4]

    def decode(self, operand: Operand) -> Tensor:
        values = operand.codes.view(E4M3).float().unflatten(1, (-1, self.block))
        return (values * minifloat.e8m0_value(self.scales_of(operand)).unsqueeze(2)).flatten(1)


class NVFP4Operands(SwizzledOperands):
    """Packed E2M1 codes in 1x16 blocks with E4M3 scales, and an amax.

    As in Transformer Engine's recipe, gradients are rounded at random, and both operands of the
    gradient of a weight are transformed along the tokens; see ``nvfp4_gradients``.
    """

    block, per_byte = 16, 2
    quantizer = NVFP4Quantizer(two_dimensional=False, columnwise=False)

    def quantize(
        self, x: Tensor, quantizer: Quantizer, rowwise: bool, columnwise: bool, is_gradient: bool
    ) -> list[Operand | None]:
        along = self._quantized(x, is_gradient) if rowwise else None
        if not columnwise:
            return [along, None]
        return [along, self._quantized(nvfp4_gradients.hadamard(_transposed(x)), is_gradient)]

    def _quantized(self, x: Tensor, is_gradient: bool) -> Operand:
        if _takes_kernels(x) and not is_gradient:
            return self.of_weight(self.quantizer.quantize(x), "rowwise")
        codes, scales, amax = nvfp4_gradients.quantize(x, at_random=is_gradient)
        return Operand(codes, swizzle_padded(scales), amax)

    def for_torch(self, operand: Operand) -> ForTorch:
        scale = operand.amax * (1 / self.quantizer.largest_value)
        return (
            operand.codes.view(torch.float4_e2m1fn_x2),
            [operand.scales.view(E4M3), scale],
            [_SCALING.BlockWise1x16, _SCALING.TensorWise],
            [_ORDER.SWIZZLE_32_4_4, _ORDER.NO_SWIZZLE],
        )

    def decode(self, operand: Operand) -> Tensor:
        scales = self.scales_of(operand).view(E4M3).float()
        factors = (scales * operand.amax) * (1 / self.quantizer.largest_value)
        values = minifloat.unpack_e2m1(operand.codes).unflatten(1, (-1, self.block))
        return (values * factors.unsqueeze(2)).flatten(1)


FORMATS: dict[type[Quantizer], OperandFormat] = {
    Float8Quantizer: Float8Operands(),
    Float8BlockQuantizer: Float8BlockOperands(),
    MXFP8Quantizer: MXFP8Operands(),
    NVFP4Quantizer: NVFP4Operands(),
}


@functools.lru_cache
def _of_vectors(key: str, rowwise: bool, columnwise: bool) -> Quantizer:
    usages = dict(rowwise=rowwise, columnwise=columnwise)
    return dataclasses.replace(BY_KEY[key], two_dimensional=False, **usages)


def _vectors(x: Tensor, key: str, rowwise: bool, columnwise: bool) -> list[Tensor]:
    """Codes and scales of 1x128 blocks in each direction, for a weight's quantizer of this key.

    In compiled graphs one operator: torch.compile would read x up to four times.
    """
    quantizer, made = (
        _of_vectors(key, rowwise, columnwise),
        _no_vectors(x, key, rowwise, columnwise),
    )
    quantizer.write(x, Storage(**dict(zip(quantizer.layout.inner, made, strict=True))))
    return made


def _no_vectors(x: Tensor, key: str, rowwise: bool, columnwise: bool) -> list[Tensor]:
    (rows, cols), made = x.shape, []
    for is_wanted, m, n in ((rowwise, rows, cols), (columnwise, cols, rows)):
        if is_wanted:
            made.append(x.new_empty((m, n), dtype=torch.uint8))
            made.append(x.new_empty((n // 128, m), dtype=torch.float32))
    return made


_traced_vectors = backend.operator("quantize_vectors", _vectors, _no_vectors)


def _takes_kernels(x: Tensor) -> bool:
    return backend.runs_eagerly(x) and backend.uses_kernels(x.device)


def _transposed(x: Tensor) -> Tensor:
    return x.t().clone(memory_format=torch.contiguous_format)


def _amax_bits(x: Tensor) -> Tensor:
    """Magnitudes as int32, in the order of their bits; those of NaN are 0."""
    bits = x.float().abs().view(torch.int32)
    return torch.where(bits > _INFINITY, 0, bits)


def _power_of_2(bits: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
    """The largest power of two that maps magnitudes to at most 1.75 * 2**exponent; its reciprocal.

    Exact on every device. It is 1 for magnitudes of 0 and infinity. ``bits``: as int32.
    """
    # Adding makes exponents of mantissas above 1.75 one larger.
    biased = (254 + exponent - ((bits + 0x1FFFFF) >> 23)).clamp(max=254)
    biased = torch.where((bits == 0) | (bits >= _INFINITY), 127, biased)
    inverse = ((254 - biased) << 23).clamp(min=0x400000)
    return (biased << 23).view(torch.float32), inverse.view(torch.float32)


def _float8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 to nearest, saturating; every NaN becomes the same."""
    top = torch.finfo(dtype).max
    return torch.where(x.isnan(), torch.nan, x.clamp(-top, top)).to(dtype)


def has_quantized_operands(quantizer: Quantizer) -> bool:
    """Whether activations or gradients are quantized for products with such a weight."""
    return quantizer.operands.activations or quantizer.operands.gradients


def has_weight_gradient(quantizer: Quantizer) -> bool:
    """Whether the gradient of such a weight is a product of two quantized operands."""
    operands = quantizer.operands
    is_wanted = operands.activations and operands.gradients and operands.weight_gradients
    return is_wanted and FORMATS[type(quantizer)].has_weight_gradient


def check_shape(quantizer: Quantizer, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a weight can be an operand in both directions."""
    multiple, name = FORMATS[type(quantizer)].multiple, quantizer.tensor_class.__name__
    if len(shape) == 3:
        raise ValueError(
            "a stack of experts must be quantized alone, got one for quantized activations or "
            f"gradients, {tuple(shape)}; quantize stacks with Recipe(weights) in a call of "
            "their own (filter=lambda module, name: not isinstance(module, nn.Linear))"
        )
    if any(n % multiple for n in shape):
        raise ValueError(
            f"out_features and in_features must be multiples of {multiple} for matmuls of "
            f"{name} with quantized activations or gradients, got {tuple(shape)}; weights alone "
            "take other shapes: Recipe(weights) in a call of its own (filter=...)"
        )


def check_weight(weight: QuantizedTensor) -> None:
    """Raise ValueError unless a weight is whole and can be an operand in both directions."""
    check_shape(weight.quantizer, weight.shape)
    if not rows.is_all(weight) or weight.pending_value() is not None:
        raise ValueError(
            "weight must be a whole tensor for matmuls with quantized activations or gradients, "
            f"got rows of one, {tuple(weight.shape)}; multiply by weight.dequantize(), or quantize "
            "its rows as a weight of their own"
        )


def quantize(
    x: Tensor,
    quantizer: Quantizer,
    rowwise: bool,
    columnwise: bool = False,
    *,
    is_gradient: bool = False,
) -> list[Operand | None]:
    """Activations or gradients as operands, for products with a weight of ``quantizer``.

    Args:
        x: [tokens, n], float32, bfloat16 or float16; tokens are padded with 0.
        is_gradient: Whether they are gradients, which NVFP4 rounds at random and Float8 to E5M2.

    Returns:
        The rowwise operand [tokens, n], and the columnwise one [n, tokens], which MXFP8 does not
        have; None for one that was not asked for.
    """
    check_dtype("input of a linear layer with quantized operands", x.dtype)
    form, x = FORMATS[type(quantizer)], x.detach().contiguous()
    if missing := padded_tokens(quantizer, x.shape[0]) - x.shape[0]:
        x = F.pad(x, (0, 0, 0, missing))
    return form.quantize(x, quantizer, rowwise, columnwise, is_gradient)


def padded_tokens(quantizer: Quantizer, n: int) -> int:
    """Number of tokens with padding; at least one multiple of it."""
    return round_up(max(n, 1), FORMATS[type(quantizer)].tokens)


def weight_operand(weight: QuantizedTensor, usage: str) -> Operand:
    """A weight as an operand: "rowwise" [N, K] or "columnwise" [K, N]."""
    return FORMATS[type(weight.quantizer)].of_weight(weight, usage)


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
        f"{'.'.join(map(str, found))} ({device}); quantize the weights alone with "
        'Recipe(weights), pass activations="fake", or set emulate=True'
    )


_cached_capability = functools.lru_cache(torch.cuda.get_device_capability)


def _capability(device: torch.device) -> tuple[int, int]:
    return _cached_capability(device)


# All that torch.compiler.assume_constant_result does, which imports torch._dynamo first.
_capability._dynamo_marked_constant = True


def matmul(a: Operand, b: Operand, quantizer: Quantizer, dtype: torch.dtype) -> Tensor:
    """``a @ b.T`` [rows of a, rows of b] in ``dtype``, for a weight of ``quantizer``.

    Sums of outputs may be taken in fewer bits than FP32. Emulated products decode both operands and
    multiply in FP32, which takes sums in another order.
    """
    form = FORMATS[type(quantizer)]
    if runs_natively(quantizer, a.codes.device):
        return form.multiply(a, b, dtype)
    with torch.autocast(a.codes.device.type, enabled=False):  # it would multiply in fewer bits
        return (form.decode(a) @ form.decode(b).t()).to(dtype)


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
