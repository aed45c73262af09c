"""NVFP4: E2M1 codes, an E4M3 scale per 16 elements or 16x16 block, an FP32 amax per tensor."""

import dataclasses

import torch
from torch import Tensor

from fp4adam.formats import minifloat
from fp4adam.tensors import backend
from fp4adam.tensors.blocks import blocks_of, in_blocks, round_up, strips
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import SquareBlockQuantizer, runs_eagerly

BLOCK = 16
# The largest code times the largest block scale: what the tensor's amax is mapped to.
RANGE = minifloat.E2M1_MAX * minifloat.E4M3_MAX


class NVFP4Tensor(QuantizedTensor):
    """A tensor in NVFP4, 4.5 bits per element and direction (4 + 1/32 with 16x16 blocks).

    ``rowwise_data``: uint8 [rows, cols / 2], even elements in the low nibble.
    ``columnwise_data``: uint8 [cols, rows / 2], the transposed matrix packed the same way.
    ``rowwise_scale_inv``: uint8 (E4M3) [rows to 128, cols / 16 to 4], and
    ``columnwise_scale_inv``: uint8 (E4M3) [cols to 128, rows / 16 to 4], padding zero.
    ``rowwise_gemm_scale_inv``, ``columnwise_gemm_scale_inv``: the same in the GEMM's order.
    """

    @property
    def amax_rowwise(self) -> Tensor | None:
        """Largest magnitude of the quantized value, float32 [1], or None without rowwise usage."""
        return self._amax if self.quantizer.rowwise else None

    @property
    def amax_columnwise(self) -> Tensor | None:
        """Equal to ``amax_rowwise``, or None without columnwise usage."""
        return self._amax if self.quantizer.columnwise else None

    @property
    def rowwise_scale_inv(self) -> Tensor | None:
        """E4M3 scales of ``rowwise_data``; square blocks repeat theirs on 16 rows."""
        if self.quantizer.two_dimensional and self.quantizer.rowwise:
            return _expand_block_scale(self._block_scale_inv)
        return self._rowwise_scale_inv

    @property
    def columnwise_scale_inv(self) -> Tensor | None:
        """E4M3 scales of ``columnwise_data``; square blocks repeat theirs on 16 rows."""
        if self.quantizer.two_dimensional and self.quantizer.columnwise:
            return _expand_block_scale(self._block_scale_inv.t())
        return self._columnwise_scale_inv


@dataclasses.dataclass(frozen=True)
class NVFP4Quantizer(SquareBlockQuantizer):
    """Quantize to :class:`NVFP4Tensor`; rows and columns must be multiples of 16.

    Block scale = E4M3(block_amax * S / 6) with S = 2688 / amax(tensor); code = E2M1(x / decoded
    scale), every step one float32 operation in the order of Transformer Engine's kernels.

    Args:
        rowwise: Keep codes with blocks along the last dimension.
        columnwise: Keep transposed codes with blocks along the first dimension.
        two_dimensional: One scale per 16x16 block, the same for both directions (the recipe for
            weights), instead of one per 16 elements of each direction.
        optimize_for_gemm: Keep ``rowwise_gemm_scale_inv`` and ``columnwise_gemm_scale_inv``, 1/16
            byte per weight and direction, which whatever writes the tensor then writes as well.

    Source: "Pretraining Large Language Models with NVFP4", arXiv:2509.25149, section 4.
    """

    tensor_class = NVFP4Tensor
    block_rows = BLOCK
    scales_tensor = True

    def check_matrix(self, rows: int, cols: int) -> str | None:
        if rows % BLOCK or cols % BLOCK:
            return "rows and columns of NVFP4 must be multiples of 16"
        return None

    def storage_layout(
        self, rows: int, cols: int
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        byte = torch.uint8
        layout = {"amax": ((1,), torch.float32)}
        if self.two_dimensional:
            layout["block_scale_inv"] = ((rows // BLOCK, cols // BLOCK), byte)
        for usage, m, k in (("rowwise", rows, cols), ("columnwise", cols, rows)):
            if getattr(self, usage):
                layout[f"{usage}_data"] = ((m, k // 2), byte)
                scale_shape = (round_up(m, 128), round_up(k // BLOCK, 4))
                if not self.two_dimensional:
                    layout[f"{usage}_scale_inv"] = (scale_shape, byte)
                if self.optimize_for_gemm:
                    layout[f"{usage}_gemm_scale_inv"] = (scale_shape, byte)
        return layout

    def measure(self, x: Tensor, amax: Tensor) -> None:
        """Overwrite ``amax``, float32 [1], with the largest magnitude in the contiguous matrix."""
        if backend.uses_kernels(x.device):
            from fp4adam.kernels import nvfp4

            nvfp4.measure(x, amax)
        else:
            amax.copy_(torch.stack([minifloat.amax(strip) for _, strip in strips(x, BLOCK)]).amax())

    def write(self, x: Tensor, out: NVFP4Tensor, amax: Tensor | None = None) -> None:
        if amax is None:
            self.measure(x, out._amax)
        else:
            out._amax.copy_(amax)
        if backend.uses_kernels(x.device):
            from fp4adam.kernels import nvfp4

            return nvfp4.quantize(
                x,
                rowwise_data=out._rowwise_data,
                columnwise_data=out._columnwise_data,
                rowwise_scale=out._block_scale_inv
                if self.two_dimensional
                else out._rowwise_scale_inv,
                columnwise_scale=out._columnwise_scale_inv,
                amax=out._amax,
                two_dimensional=self.two_dimensional,
            )
        amax, cols = out._amax, x.shape[1]
        for rows, strip in strips(x, BLOCK):
            blocks = in_blocks(rows, BLOCK)
            if self.two_dimensional:
                codes, out._block_scale_inv[blocks] = _encode(strip, amax, (BLOCK, BLOCK))
            if out._rowwise_data is not None:
                if not self.two_dimensional:
                    codes, scale = _encode(strip, amax, (1, BLOCK))
                    out._rowwise_scale_inv[rows, : cols // BLOCK] = scale
                out._rowwise_data[rows] = minifloat.pack_e2m1(codes)
            if out._columnwise_data is not None:
                if not self.two_dimensional:
                    codes, scale = _encode(strip, amax, (BLOCK, 1))
                    out._columnwise_scale_inv[:cols, blocks] = scale.t()
                # Packing rows before transposing moves half the bytes.
                packed = codes[0::2] | codes[1::2] << 4
                out._columnwise_data[:, in_blocks(rows, 2)] = packed.t()

    def recode(self, x: Tensor, tensor: NVFP4Tensor) -> Tensor:
        factor = _factors(tensor._block_scale_inv, tensor._amax)
        blocks = blocks_of(x, (BLOCK, BLOCK)) * factor[:, None, :, None]
        return minifloat.pack_e2m1(minifloat.e2m1_code(blocks).view(x.shape))

    def read(self, tensor: NVFP4Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
        transposed = tensor._rowwise_data is None
        data = tensor._columnwise_data if transposed else tensor._rowwise_data
        scale = tensor._columnwise_scale_inv if transposed else tensor._rowwise_scale_inv
        if self.two_dimensional:
            scale = tensor._block_scale_inv
        decode = _decode if runs_eagerly(data) else _dequantize
        return decode(data, scale, tensor._amax, self.two_dimensional, transposed, dtype, after)


def _encode(x: Tensor, amax: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes [rows, cols] and E4M3 scales [rows / block[0], cols / block[1]] of float32 rows."""
    blocks = blocks_of(x, block)
    scale, factor = block_scales(minifloat.amax(blocks, (1, 3)), amax)
    return minifloat.e2m1_code(blocks * factor[:, None, :, None]).view(x.shape), scale


def block_scales(block_amax: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 scales (uint8) and the float32 factors that take values to codes.

    ``block_amax``: float32, of each block. ``amax``: float32 with one element, of the whole tensor.
    """
    scale = minifloat.e4m3_code(block_amax * (_encode_scale(amax) * (1 / 6)))
    return scale, _factors(scale, amax)


def _encode_scale(amax: Tensor) -> Tensor:
    # A Python number over a tensor would be computed as number * (1 / tensor).
    encode = torch.full_like(amax, RANGE) / amax
    return torch.where((amax == 0) | (encode == 0), 1.0, encode.clamp(max=minifloat.FP32_MAX))


def _factors(scale: Tensor, amax: Tensor) -> Tensor:
    """The factors that take values to codes in blocks with these scales."""
    decode = 1.0 / _encode_scale(amax)
    return (1.0 / (minifloat.e4m3_value(scale) * decode)).clamp(max=minifloat.FP32_MAX)


def _decode(
    data: Tensor,
    scale: Tensor,
    amax: Tensor,
    two_dimensional: bool,
    transposed: bool,
    dtype: torch.dtype,
    after: Tensor | None = None,
) -> Tensor:
    """Decode packed codes to [rows, cols]; ``transposed`` codes are those of the transposed matrix.

    ``scale`` is the grid of 16x16 blocks of the untransposed matrix, or holds one per 16 codes.
    ``after``: see :meth:`Quantizer.read`.
    """
    if backend.uses_kernels(data.device):
        from fp4adam.kernels import nvfp4

        return nvfp4.dequantize(data, scale, amax, two_dimensional, transposed, dtype)
    rows, cols = data.shape[0], data.shape[1] * 2
    if two_dimensional:
        grid = scale.t() if transposed else scale
    else:
        grid = scale[:rows, : cols // BLOCK]
    factor = (minifloat.e4m3_value(grid.contiguous()) * amax) * (1 / RANGE)
    values = minifloat.unpack_e2m1(data)
    block_rows = BLOCK if two_dimensional else 1
    blocks = values.view(rows // block_rows, block_rows, cols // BLOCK, BLOCK)
    blocks.mul_(factor[:, None, :, None])
    matrix = values.to(dtype)
    return matrix.t().contiguous() if transposed else matrix


_dequantize = torch.library.custom_op("fp4adam::dequantize_nvfp4", mutates_args=())(_decode)


@_dequantize.register_fake
def _(
    data: Tensor,
    scale: Tensor,
    amax: Tensor,
    two_dimensional: bool,
    transposed: bool,
    dtype: torch.dtype,
    after: Tensor | None = None,
) -> Tensor:
    rows, cols = data.shape[0], data.shape[1] * 2
    return data.new_empty((cols, rows) if transposed else (rows, cols), dtype=dtype)


def _expand_block_scale(grid: Tensor) -> Tensor:
    """Repeat each block's scale on its 16 rows and pad as the GEMM expects."""
    rows, cols = grid.shape[0] * BLOCK, grid.shape[1]
    scale = grid.new_zeros(round_up(rows, 128), round_up(cols, 4))
    scale[:rows, :cols] = grid.repeat_interleave(BLOCK, dim=0)
    return scale


torch.serialization.add_safe_globals([NVFP4Tensor, NVFP4Quantizer])
