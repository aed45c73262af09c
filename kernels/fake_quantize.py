"""Fake quantization: values rounded to what a format can hold, without codes in memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels import nvfp4
from fp4adam.kernels.float8 import tensor_scale
from fp4adam.kernels.float8_block import float8_scale
from fp4adam.kernels.launch.launch import on_its_device
from fp4adam.kernels.launch.tensor_table import tile_offsets, tile_start
from fp4adam.kernels.mxfp8 import scale_blocks
from fp4adam.kernels.nvfp4 import nvfp4_scale
from fp4adam.kernels.tiles.bfloat16 import round_to, to_float32
from fp4adam.kernels.tiles.e2m1 import e2m1_code, e2m1_value
from fp4adam.kernels.tiles.e4m3 import e4m3_code, e4m3_value
from fp4adam.kernels.tiles.e8m0 import e8m0_value

# Formats whose scales depend on the amax of the whole tensor.
SCALES_TENSOR = ("nvfp4", "float8")
TILE_ROWS, TILE_COLS = 16, 128


@triton.jit
def _amax(x):
    """Largest magnitudes of the last dimension, ignoring NaN; 0 if all elements are NaN."""
    amax = tl.max(tl.abs(x), 2)
    return tl.where(amax == amax, amax, 0.0)[:, :, None]


@triton.jit
def _e4m3(x):
    """The nearest E4M3 values; in software, because of the ptxas error in :func:`e4m3_code`."""
    return e4m3_value(e4m3_code(x, HARDWARE=False))


@triton.jit
def _fake_quantize_kernel(
    x_ptr,
    amax_ptr,
    out_ptr,
    rows,
    cols,
    epsilon,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    POW_2: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Quantize and decode x [rows, cols], with blocks along the columns.

    Grid: (n_tiles,). Tile: [BR, BC], whole blocks, masked at the edges. Reads and writes 2 or 4
    bytes per element. amax_ptr: float32 [1], the amax of x, for NVFP4 and Float8.
    """
    tile, tiles_per_row = tl.program_id(0), tl.cdiv(cols, BC)
    row, col = tile // tiles_per_row * BR, tile % tiles_per_row * BC
    mask = (row + tl.arange(0, BR) < rows)[:, None] & (col + tl.arange(0, BC) < cols)[None, :]
    offs = tile_start(row, col, cols) + tile_offsets(cols, BR, BC)
    x = to_float32(tl.load(x_ptr + offs, mask, 0.0))
    if FORMAT == "nvfp4":
        amax = tl.load(amax_ptr)
        blocks = tl.reshape(x, (BR, BC // 16, 16))
        scale, factor = nvfp4_scale(_amax(blocks), amax)
        decode = (e4m3_value(scale) * amax) * (1.0 / (6.0 * 448))
        value = e2m1_value(e2m1_code(blocks * factor)) * decode
    elif FORMAT == "mxfp8":
        scaled, scale = scale_blocks(tl.reshape(x, (BR, BC // 32, 32)), 2)
        value = _e4m3(scaled) * e8m0_value(scale)[:, :, None]
    elif FORMAT == "float8_block":
        blocks = tl.reshape(x, (BR, BC // 128, 128))
        scale = float8_scale(_amax(blocks), epsilon, LARGEST, POW_2)
        value = _e4m3(blocks * scale) * tl.div_rn(1.0, scale)
    else:
        scale = tensor_scale(tl.load(amax_ptr), epsilon, POW_2)
        value = _e4m3(x * scale) * tl.div_rn(1.0, scale)
    value = tl.reshape(value, (BR, BC))
    tl.store(out_ptr + offs, round_to(value, out_ptr.dtype.element_ty), mask)


@on_its_device
def fake_quantize(
    x: Tensor, weight_format: str, force_pow_2_scales: bool, amax_epsilon: float
) -> Tensor:
    """Quantize the contiguous matrix ``x`` and decode it to its dtype.

    ``weight_format``: The name of a ``Quantizer``; blocks are 1x16, 1x32, 1x128 or all of ``x``.
    """
    rows, cols = x.shape
    out, amax = torch.empty_like(x), None
    if weight_format in SCALES_TENSOR:
        amax = x.new_empty(1, dtype=torch.float32)
        nvfp4.measure(x, amax)
    _fake_quantize_kernel[(triton.cdiv(rows, TILE_ROWS) * triton.cdiv(cols, TILE_COLS),)](
        x,
        amax,
        out,
        rows,
        cols,
        amax_epsilon,
        FORMAT=weight_format,
        LARGEST=torch.finfo(x.dtype).max,
        POW_2=force_pow_2_scales,
        BR=TILE_ROWS,
        BC=TILE_COLS,
        enable_fp_fusion=False,
    )
    return out
