"""The quantizers that tests of tensors run with, and their values."""

import pytest
import torch
from torch import Tensor

from fp4adam import Float8BlockQuantizer, Float8Quantizer, MXFP8Quantizer, NVFP4Quantizer

SHAPE = (64, 96)
TABLE = {
    "nvfp4": NVFP4Quantizer(),
    "nvfp4-1d": NVFP4Quantizer(two_dimensional=False),
    "nvfp4-columnwise": NVFP4Quantizer(rowwise=False),
    "nvfp4-swizzled": NVFP4Quantizer(optimize_for_gemm=True),
    "nvfp4-1d-swizzled": NVFP4Quantizer(two_dimensional=False, optimize_for_gemm=True),
    "nvfp4-columnwise-swizzled": NVFP4Quantizer(rowwise=False, optimize_for_gemm=True),
    "mxfp8": MXFP8Quantizer(),
    "mxfp8-2d": MXFP8Quantizer(two_dimensional=True),
    "mxfp8-columnwise": MXFP8Quantizer(rowwise=False),
    "mxfp8-swizzled": MXFP8Quantizer(optimize_for_gemm=True),
    "mxfp8-2d-swizzled": MXFP8Quantizer(two_dimensional=True, optimize_for_gemm=True),
    "mxfp8-rowwise-swizzled": MXFP8Quantizer(columnwise=False, optimize_for_gemm=True),
    "float8block": Float8BlockQuantizer(),
    "float8block-1d": Float8BlockQuantizer(two_dimensional=False),
    "float8": Float8Quantizer(),
    "float8-delayed": Float8Quantizer(scaling="delayed", amax_history_len=3),
}


def every(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("quantizer", [TABLE[name] for name in names], ids=names)


def randn(shape=SHAPE, dtype=torch.float32, device="cpu", seed=0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)
