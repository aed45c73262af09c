"""MXFP8: E4M3 codes with one power-of-two (E8M0) scale per 32 elements of each direction."""

import dataclasses
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from fp4adam.formats import encoding, minifloat
from fp4adam.tensors import backend
from fp4adam.tensors.layout import Direction, Inner, Layout
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer
from fp4adam.tensors.storage import Storage

BLOCK = 32


class MXFP8Tensor(QuantizedTensor):
    """A tensor in MXFP8, 8.25 bits per element and direction.

    ``rowwise_data``, ``columnwise_data``: uint8 (E4M3) [rows, cols]; neither is transposed.
    ``rowwise_scale_inv``: uint8 (E8M0) [rows padded to 128, cols / 32 padded to 4].
    ``columnwise_scale_inv``: uint8 (E8M0) [rows / 32 padded to 4, cols padded to 128].
    ``rowwise_gemm_scale_inv``: ``rowwise_scale_inv``, swizzled for the GEMM.
    ``columnwise_gemm_scale_inv``: uint8 (E8M0) [cols padded to 128, rows / 32 padded to 4],
    swizzled for the GEMM.

    Padding of scales is 0.
    """


@dataclasses.dataclass(frozen=True)
class MXFP8Quantizer(Quantizer):
    """Quantize to :class:`MXFP8Tensor`; rows and columns must be multiples of 32.

    Scale = 2**ceil(log2(block_amax / 448)), so no code saturates; code = E4M3(x / scale).

    Args:
        rowwise: Keep codes with blocks of 1x32.
        columnwise: Keep codes with blocks of 32x1.
        optimize_for_gemm: Keep ``rowwise_gemm_scale_inv`` and ``columnwise_gemm_scale_inv``, which
            are written with the tensor and take 1/32 byte per weight and direction.

    Source: OCP Microscaling Formats (MX) v1.0; the scale rounds up as in Transformer Engine.
    """

    tensor_class = MXFP8Tensor
    name = "mxfp8"

    def full_layout(self) -> Layout:
        return Layout(
            block=BLOCK,
            code_type="e4m3",
            scale_type="e8m0",
            rowwise=Direction(Inner(1, 1), Inner(1, BLOCK, padding=(128, 4))),
            columnwise=Direction(Inner(1, 1), Inner(BLOCK, 1, padding=(4, 128))),
            is_square=False,
            multiple=BLOCK,
        )

    def scales_of_blocks(
        self,
        amaxes: Tensor,
        tensor_amax: Tensor | None,
        dtype: torch.dtype,
        four: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        scales = minifloat.e8m0_code_up(amaxes * (1 / minifloat.E4M3_MAX))
        return scales, self.factors(scales, tensor_amax)

    def factors(self, scales: Tensor, tensor_amax: Tensor | None) -> Tensor:
        return minifloat.e8m0_reciprocal(scales)

    write, recode = encoding.write, encoding.recode

    def launch(self, x: Tensor, out: Storage) -> None:
        self.kernels().quantize(
            x,
            rowwise_data=out.rowwise_data,
            columnwise_data=out.columnwise_data,
            rowwise_scale=out.rowwise_scale_inv,
            columnwise_scale=out.columnwise_scale_inv,
        )

    @staticmethod
    def decoders() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        return _decode, _dequantize

    @staticmethod
    def kernels() -> ModuleType:
        from fp4adam.kernels import mxfp8

        return mxfp8

    @staticmethod
    def step_kernels() -> ModuleType:
        from fp4adam.kernels import mxfp8_step

        return mxfp8_step

    def stored(self, tensors: Storage) -> tuple[Tensor, Tensor, bool]:
        """Codes, scales, and whether blocks lie along the last dimension."""
        rowwise = tensors.rowwise_data is not None
        data = tensors.rowwise_data if rowwise else tensors.columnwise_data
        scale = tensors.rowwise_scale_inv if rowwise else tensors.columnwise_scale_inv
        return data, scale, rowwise


def _decode(
    data: Tensor, scale: Tensor, rowwise: bool, dtype: torch.dtype, after: Tensor | None = None
) -> Tensor:
    """Decode E4M3 codes [rows, cols] with scales per 1x32 (``rowwise``) or 32x1 block.

    ``after``: see :meth:`Quantizer.read`.
    """
    if backend.uses_kernels(data.device):
        out = torch.empty_like(data, dtype=dtype)
        MXFP8Quantizer.kernels().dequantize(data, scale, rowwise, out)
        return out
    rows, cols = data.shape
    block = (1, BLOCK) if rowwise else (BLOCK, 1)
    factor = minifloat.e8m0_value(scale[: rows // block[0], : cols // block[1]])
    values = minifloat.e4m3_value(data)
    blocks = values.view(rows // block[0], block[0], cols // block[1], block[1])
    blocks.mul_(factor[:, None, :, None])
    return values.to(dtype)


_dequantize = torch.library.custom_op("fp4adam::dequantize_mxfp8", mutates_args=())(_decode)


@_dequantize.register_fake
def _(
    data: Tensor, scale: Tensor, rowwise: bool, dtype: torch.dtype, after: Tensor | None = None
) -> Tensor:
    return torch.empty_like(data, dtype=dtype)


torch.serialization.add_safe_globals([MXFP8Tensor, MXFP8Quantizer])
