"""Matrices quantized with the usual options and decoded again, to recognize such values."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fp4adam.formats.float8 import Float8Quantizer
from fp4adam.formats.float8_block import Float8BlockQuantizer
from fp4adam.formats.mxfp4 import ROUNDINGS, MXFP4Quantizer
from fp4adam.formats.mxfp8 import MXFP8Quantizer
from fp4adam.formats.nvfp4 import NVFP4Quantizer
from fp4adam.tensors.quantizer import HIGH_PRECISION_DTYPES, Quantizer

_USUAL: tuple[Quantizer, ...] = (
    NVFP4Quantizer(columnwise=False),
    NVFP4Quantizer(columnwise=False, two_dimensional=False),
    MXFP8Quantizer(columnwise=False),
    *(MXFP4Quantizer(scale_rounding=rounding) for rounding in ROUNDINGS),
    Float8BlockQuantizer(columnwise=False),
    Float8BlockQuantizer(columnwise=False, two_dimensional=False),
    Float8BlockQuantizer(columnwise=False, force_pow_2_scales=False),
    Float8Quantizer(columnwise=False),
    Float8Quantizer(columnwise=False, force_pow_2_scales=True),
)


def known_roundings(x: Tensor) -> Iterator[Tensor]:
    """The values of ``x`` after a round trip through each format that can hold its shape.

    Args:
        x: float32, at least 2 dimensions.

    Yields:
        float32 tensors in the shape of ``x``, one per format and dtype that it was decoded to.
    """
    for quantizer in _USUAL:
        try:
            quantizer.check_shape(tuple(x.shape))
        except ValueError:
            continue
        rounded = quantizer.quantize(x)
        for dtype in HIGH_PRECISION_DTYPES:
            yield rounded.dequantize(dtype).to(torch.float32)
