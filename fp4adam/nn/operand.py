"""Operands of quantized matmuls, made from activations, gradients and weights.

A class per format has all that differs between formats; ``FORMATS`` lists them. Code that makes or
multiplies operands asks that class, and knows no format.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4adam.formats import float8_block, nvfp4_gradients
from fp4adam.formats.float8_block import Float8BlockQuantizer
from fp4adam.formats.mxfp8 import MXFP8Quantizer
from fp4adam.formats.nvfp4 import NVFP4Quantizer
from fp4adam.nn.hardware import check_shape
from fp4adam.nn.kept_weights import keep
from fp4adam.tensors import backend, rows
from fp4adam.tensors.backend import runs_eagerly
from fp4adam.tensors.blocks import round_up
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer, check_dtype
from fp4adam.tensors.storage import Storage
from fp4adam.tensors.swizzle import swizzle_padded, unswizzle_scales
from fp4adam.tensors.transpose import transposed_codes

# Tokens are padded with zeros to a multiple of this: blocks of a weight gradient lie along them,
# scales come in tiles of as many rows, and the units multiply as many at a time.
TOKENS = 128


class Operand(NamedTuple):
    """One side of a product, contracted along the last dimension of its codes.

    Attributes:
        codes: uint8, contiguous: [rows, k] of E4M3, or [rows, k / 2] of packed E2M1.
        scales: As the GEMM reads them. "float8_block": float32 [k / 128, rows]; its weights with
            square blocks, "float8_block_2d": float32 [rows / 128, k / 128 to 4]; "mxfp8" and
            "nvfp4": uint8 [rows to 128, blocks to 4] in tiles (``swizzle_scales``).
        kind: One of these four, a string so that operators of ``torch.library`` can take it.
        amax: float32 [1] of NVFP4: 2688 times what multiplies codes and block scales.
    """

    codes: Tensor
    scales: Tensor
    kind: str
    amax: Tensor | None = None


_ROWS = True, False  # the directions of an operand along rows alone

# Codes and scales in torch's dtypes, their blocks, and the orders of scales.
ForTorch = tuple[Tensor, list[Tensor], list, list]


class OperandFormat:
    """The operands of one format: the operators that make them, and how torch reads them.

    Attributes:
        kinds: Those of its operands; activations and gradients are of the first one.
        has_weight_gradient: Whether it has codes with blocks along the tokens, transposed.
        is_swizzled: Whether the scales of weights lie in another order for GEMMs.
    """

    kinds: ClassVar[tuple[str, ...]]
    has_weight_gradient: ClassVar[bool] = False
    is_swizzled: ClassVar[bool] = True

    def quantize(
        self,
        x: Tensor,
        quantizer: Quantizer,
        rowwise: bool,
        columnwise: bool,
        is_gradient: bool,
    ) -> list[Operand | None]:
        """See :func:`quantize`."""
        raise NotImplementedError

    def of_weight(self, weight: QuantizedTensor, usage: str) -> Operand:
        """See :func:`weight_operand`."""
        raise NotImplementedError

    def for_torch(self, operand: Operand) -> ForTorch:
        """The arguments of ``scaled_mm`` for an operand."""
        raise NotImplementedError

    def decode(self, operand: Operand) -> Tensor:
        """The values of an operand, float32 [rows, k]."""
        raise NotImplementedError

    def decode_rows(self, codes: Tensor, scales: Tensor, amax: Tensor | None) -> Tensor:
        """The values of codes whose scales lie row by row, float32 [rows, k]."""
        raise NotImplementedError


class Float8BlockOperands(OperandFormat):
    """E4M3 codes in 1x128 blocks; weights may have 128x128 blocks."""

    kinds = ("float8_block", "float8_block_2d")
    has_weight_gradient = True
    is_swizzled = False

    def quantize(
        self,
        x: Tensor,
        quantizer: Quantizer,
        rowwise: bool,
        columnwise: bool,
        is_gradient: bool,
    ) -> list[Operand | None]:
        run = _quantize_float8_block if runs_eagerly(x) else _quantize_float8_block_op
        pow_2, epsilon = quantizer.force_pow_2_scales, quantizer.amax_epsilon
        made = run(x.contiguous(), rowwise, columnwise, pow_2, epsilon)
        return [
            Operand(*made[at : at + 2], "float8_block") if wanted else None
            for at, wanted in ((0, rowwise), (2 if rowwise else 0, columnwise))
        ]

    def of_weight(self, weight: QuantizedTensor, usage: str) -> Operand:
        codes = weight.rowwise_data if usage == "rowwise" else weight.columnwise_data
        if not weight.quantizer.two_dimensional:
            return Operand(codes, getattr(weight, f"_{usage}_scale_inv"), "float8_block")
        grid = weight._block_scale_inv if usage == "rowwise" else weight._block_scale_inv.t()
        if grid.shape[1] % 4:
            grid = F.pad(grid, (0, -grid.shape[1] % 4))
        elif usage == "columnwise":
            grid = grid.clone(memory_format=torch.contiguous_format)
        return Operand(codes, grid, "float8_block_2d")

    def for_torch(self, operand: Operand) -> ForTorch:
        square = operand.kind == "float8_block_2d"
        block = F.ScalingType.BlockWise128x128 if square else F.ScalingType.BlockWise1x128
        codes = operand.codes.view(torch.float8_e4m3fn)
        return codes, [operand.scales.t()], [block], [F.SwizzleType.NO_SWIZZLE]

    def decode(self, operand: Operand) -> Tensor:
        square = operand.kind == "float8_block_2d"
        codes, scales = operand.codes, operand.scales
        scales = scales[:, : -(-codes.shape[1] // float8_block.BLOCK)] if square else scales
        name = "block_scale_inv" if square else "rowwise_scale_inv"
        tensors = Storage(rowwise_data=codes, **{name: scales})
        return Float8BlockQuantizer(two_dimensional=square).read(tensors, torch.float32)


class SwizzledOperands(OperandFormat):
    """Codes along one dimension, and scales in the tiles that block-scaled GEMMs read.

    Attributes:
        quantizer: That of activations and gradients.
    """

    quantizer: ClassVar[Quantizer]

    def quantize(
        self,
        x: Tensor,
        quantizer: Quantizer,
        rowwise: bool,
        columnwise: bool,
        is_gradient: bool,
    ) -> list[Operand | None]:
        run = _quantize_swizzled if runs_eagerly(x) else _quantize_swizzled_op
        (kind,) = self.kinds
        codes, scales, *amax = run(x.contiguous(), kind)
        return [Operand(codes, scales, kind, *amax), None]

    def of_weight(self, weight: QuantizedTensor, usage: str) -> Operand:
        codes = weight.rowwise_data if usage == "rowwise" else self.columns_of(weight)
        scales = getattr(weight, f"{usage}_gemm_scale_inv")
        return Operand(codes, scales, *self.kinds, self.amax_of(weight))

    def amax_of(self, weight: QuantizedTensor) -> Tensor | None:
        """The amax of a weight as an operand."""
        return weight._amax

    def columns_of(self, weight: QuantizedTensor) -> Tensor:
        """Columnwise codes, those of the transposed matrix row by row."""
        return weight.columnwise_data

    def decode(self, operand: Operand) -> Tensor:
        (scales,) = unswizzle_scales([operand.scales])
        return self.decode_rows(operand.codes, scales, operand.amax)


class MXFP8Operands(SwizzledOperands):
    """E4M3 codes in 1x32 blocks with E8M0 scales."""

    kinds = ("mxfp8",)
    quantizer = MXFP8Quantizer(columnwise=False)

    def columns_of(self, weight: QuantizedTensor) -> Tensor:
        # Both directions lie as the matrix does; torch takes the contracted one last alone.
        return transposed_codes(weight.columnwise_data, 8)

    def for_torch(self, operand: Operand) -> ForTorch:
        codes = operand.codes.view(torch.float8_e4m3fn)
        scales = operand.scales.view(torch.float8_e8m0fnu)
        return codes, [scales], [F.ScalingType.BlockWise1x32], [F.SwizzleType.SWIZZLE_32_4_4]

    def decode_rows(self, codes: Tensor, scales: Tensor, amax: Tensor | None) -> Tensor:
        tensors = Storage(rowwise_data=codes, rowwise_scale_inv=scales)
        return MXFP8Quantizer(two_dimensional=False).read(tensors, torch.float32)


class NVFP4Operands(SwizzledOperands):
    """Packed E2M1 codes in 1x16 blocks with E4M3 scales, and an amax.

    As in Transformer Engine's recipe, gradients are rounded at random, and both operands of the
    gradient of a weight are transformed along the tokens; see ``nvfp4_gradients``.
    """

    kinds = ("nvfp4",)
    has_weight_gradient = True
    quantizer = NVFP4Quantizer(two_dimensional=False, columnwise=False)

    def quantize(
        self,
        x: Tensor,
        quantizer: Quantizer,
        rowwise: bool,
        columnwise: bool,
        is_gradient: bool,
    ) -> list[Operand | None]:
        operands: list[Operand | None] = [None, None]
        if rowwise and not is_gradient:
            operands, rowwise = super().quantize(x, quantizer, *_ROWS, is_gradient), False
        if rowwise or columnwise:
            run = _quantize_for_gradients if runs_eagerly(x) else _quantize_for_gradients_op
            made = run(x.contiguous(), rowwise, columnwise, is_gradient)
            for i, wanted in enumerate((rowwise, columnwise)):
                if wanted:
                    (codes, scales, amax), made = made[:3], made[3:]
                    operands[i] = Operand(codes, scales, "nvfp4", amax)
        return operands

    def amax_of(self, weight: QuantizedTensor) -> Tensor | None:
        return weight._amax

    def for_torch(self, operand: Operand) -> ForTorch:
        blocks, orders = F.ScalingType, F.SwizzleType
        scale = operand.amax * (1 / self.quantizer.largest_value)
        return (
            operand.codes.view(torch.float4_e2m1fn_x2),
            [operand.scales.view(torch.float8_e4m3fn), scale],
            [blocks.BlockWise1x16, blocks.TensorWise],
            [orders.SWIZZLE_32_4_4, orders.NO_SWIZZLE],
        )

    def decode_rows(self, codes: Tensor, scales: Tensor, amax: Tensor | None) -> Tensor:
        tensors = Storage(rowwise_data=codes, rowwise_scale_inv=scales, amax=amax)
        own = dataclasses.replace(self.quantizer, two_dimensional=False)
        return own.read(tensors, torch.float32)


FORMATS: dict[type[Quantizer], OperandFormat] = {
    Float8BlockQuantizer: Float8BlockOperands(),
    MXFP8Quantizer: MXFP8Operands(),
    NVFP4Quantizer: NVFP4Operands(),
}
_BY_KIND = {kind: form for form in FORMATS.values() for kind in form.kinds}


def format_of(operand: Operand) -> OperandFormat:
    """The format of an operand."""
    return _BY_KIND[operand.kind]


def has_quantized_operands(quantizer: Quantizer) -> bool:
    """Whether activations or gradients are quantized for products with such a weight."""
    return quantizer.operands.activations or quantizer.operands.gradients


def has_weight_gradient(quantizer: Quantizer) -> bool:
    """Whether the gradient of such a weight is a product of two quantized operands."""
    operands = quantizer.operands
    is_wanted = operands.activations and operands.gradients
    return is_wanted and FORMATS[type(quantizer)].has_weight_gradient


def check_weight(weight: QuantizedTensor) -> None:
    """Raise ValueError unless a weight is whole and can be an operand in both directions."""
    check_shape(weight.quantizer, weight.shape)
    if not rows.is_all(weight) or weight.pending_value() is not None:
        raise ValueError(
            "weight must be a whole tensor for matmuls with quantized activations or gradients, "
            f"got rows of one, {tuple(weight.shape)}; multiply by weight.dequantize(), or quantize "
            "its rows as a weight of their own"
        )


def padded_tokens(n: int) -> int:
    """Number of tokens with padding; at least one multiple of it."""
    return round_up(max(n, 1), TOKENS)


def quantize(
    x: Tensor,
    quantizer: Quantizer,
    rowwise: bool,
    columnwise: bool = False,
    *,
    is_gradient: bool = False,
) -> list[Operand | None]:
    """Activations or gradients as operands, in one pass over them.

    Args:
        x: [tokens, n], float32, bfloat16 or float16.
        quantizer: That of the weight to multiply with.
        rowwise: Make the operand [tokens to 128, n].
        columnwise: Make the operand [n, tokens to 128], which Float8Block and NVFP4 have.
        is_gradient: Whether they are gradients, which NVFP4 rounds at random.

    Returns:
        The rowwise and the columnwise operand, None for one that was not asked for. Padding is 0.
    """
    check_dtype("input of a linear layer with quantized operands", x.dtype)
    form = FORMATS[type(quantizer)]
    return form.quantize(x, quantizer, rowwise, columnwise, is_gradient)


def weight_operand(weight: QuantizedTensor, usage: str) -> Operand:
    """A weight as an operand: "rowwise" [N, K] or "columnwise" [K, N]."""
    return keep(weight, usage, lambda: _weight_operand(weight, usage))


def _weight_operand(weight: QuantizedTensor, usage: str) -> Operand:
    return FORMATS[type(weight.quantizer)].of_weight(weight, usage)


# Operators that make operands from activations and gradients


def _padded(x: Tensor) -> Tensor:
    """The matrix with rows of zeros up to :func:`padded_tokens`; itself if it has as many."""
    missing = padded_tokens(x.shape[0]) - x.shape[0]
    return F.pad(x.detach(), (0, 0, 0, missing)) if missing else x.detach()


def _quantize_float8_block(
    x: Tensor, rowwise: bool, columnwise: bool, force_pow_2_scales: bool, amax_epsilon: float
) -> list[Tensor]:
    """Codes and scales per 1x128 block of the matrix, of its transpose, or of both."""
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
    made = quantizer.quantize(_padded(x))
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


def _quantize_swizzled(x: Tensor, kind: str) -> list[Tensor]:
    """Codes, scales in the GEMM's order, and the amax of NVFP4, of a matrix with padded rows."""
    made = _BY_KIND[kind].quantizer.quantize(_padded(x))
    plain = made._rowwise_scale_inv
    # Not by a table of addresses: those of activations are new each time, and CUDA graphs capture
    # copies on the device alone.
    tensors = [made._rowwise_data, swizzle_padded(plain), made._amax]
    return [tensor for tensor in tensors if tensor is not None]


_quantize_swizzled_op = torch.library.custom_op(
    "fp4adam::quantize_swizzled_operand", mutates_args=()
)(_quantize_swizzled)


@_quantize_swizzled_op.register_fake
def _(x: Tensor, kind: str) -> list[Tensor]:
    rows, cols = padded_tokens(x.shape[0]), x.shape[1]
    layout = _BY_KIND[kind].quantizer.layout.shapes(rows, cols)
    made = {name: x.new_empty(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}
    tensors = [made["rowwise_data"], made["rowwise_scale_inv"], made.get("amax")]
    return [tensor for tensor in tensors if tensor is not None]


def _quantize_for_gradients(
    x: Tensor, rowwise: bool, columnwise: bool, is_gradient: bool
) -> list[Tensor]:
    """Codes, scales in the GEMM's order, and amax of NVFP4, of the matrix and of its transpose.

    The transpose is transformed along the tokens. Gradients are rounded at random.
    """
    padded, made = _padded(x), []
    matrices = [padded] if rowwise else []
    if columnwise:
        matrices.append(nvfp4_gradients.hadamard(padded.t().contiguous()))
    for matrix in matrices:
        if is_gradient:
            codes, plain, amax = nvfp4_gradients.quantize_stochastically(matrix)
        else:
            tensor = NVFP4Operands.quantizer.quantize(matrix)
            codes, plain, amax = tensor._rowwise_data, tensor._rowwise_scale_inv, tensor._amax
        made += [codes, swizzle_padded(plain), amax]
    return made


_quantize_for_gradients_op = torch.library.custom_op(
    "fp4adam::quantize_nvfp4_for_gradients", mutates_args=()
)(_quantize_for_gradients)


@_quantize_for_gradients_op.register_fake
def _(x: Tensor, rowwise: bool, columnwise: bool, is_gradient: bool) -> list[Tensor]:
    rows, cols = padded_tokens(x.shape[0]), x.shape[1]
    room = []
    for wanted, m, k in ((rowwise, rows, cols), (columnwise, cols, rows)):
        if wanted:
            shapes = NVFP4Operands.quantizer.layout.shapes(m, k)
            room.append(x.new_empty(shapes["rowwise_data"][0], dtype=torch.uint8))
            room.append(x.new_empty(shapes["rowwise_scale_inv"][0], dtype=torch.uint8))
            room.append(x.new_empty(1, dtype=torch.float32))
    return room
