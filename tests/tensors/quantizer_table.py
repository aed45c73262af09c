"""The quantizers that tests of tensors run with, and their values."""

import dataclasses

import pytest
import torch
from torch import Tensor

import helpers
from fp4adam import MXFP8Quantizer

SHAPE = (64, 96)
TABLE = helpers.QUANTIZERS | {
    "mxfp8-2d": MXFP8Quantizer(two_dimensional=True),
    "mxfp8-columnwise": MXFP8Quantizer(rowwise=False),
}
TABLE |= {
    f"{name}-swizzled": dataclasses.replace(quantizer, optimize_for_gemm=True)
    for name, quantizer in TABLE.items()
    if not name.startswith("float8")
}


def every(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("quantizer", [TABLE[name] for name in names], ids=names)


def randn(shape=SHAPE, dtype=torch.float32, device="cpu", seed=0) -> Tensor:
    return helpers.randn(*shape, seed=seed, device=device, dtype=dtype)
