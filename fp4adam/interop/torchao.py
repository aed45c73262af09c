"""Adapters of torchao's NVFP4Tensor and MXTensor.

Both have rowwise codes, and scales that are either unpadded or swizzled. The step computes scales
as this package does: it rounds E8M0 scales of MXFP8 up, where torchao rounds down by default, and
keeps E4M3 scales below 2**-6, where torchao clamps to 2**-6. torchao decodes either kind correctly,
but multiplies in another order, so that the last bit of a float32 value may differ from a master's.
"""

import torch
from torch import Tensor

from fp4adam.formats.mxfp4 import MXFP4Quantizer
from fp4adam.formats.mxfp8 import MXFP8Quantizer
from fp4adam.formats.nvfp4 import NVFP4Quantizer
from fp4adam.interop.adapter import TensorAdapter, register_adapter
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.quantizer import Quantizer
from fp4adam.tensors.swizzle import row_by_row

ROUNDINGS = {"FLOOR": "floor", "EVEN": "even", "RCEIL": "up"}  # of MXFP4, by torchao's name


class NVFP4Adapter(TensorAdapter):
    attributes = ("qdata", "scale", "per_tensor_scale")

    def quantizer(self, tensor: Tensor) -> Quantizer:
        _check_codes(tensor)
        number = tensor.per_tensor_scale
        if number is None or number.numel() != 1:
            raise ValueError(
                "per_tensor_scale of a torchao NVFP4Tensor must be one number to be stepped, got "
                f"{getattr(number, 'shape', None)}; quantize with "
                "use_dynamic_per_tensor_scale=True, and experts one by one"
            )
        return NVFP4Quantizer(columnwise=False, two_dimensional=False)

    def fields(self, tensor: Tensor) -> dict[str, Tensor]:
        return {
            "rowwise_data": tensor.qdata,
            "rowwise_scale_inv": _scale(tensor),
            "per_tensor_scale": tensor.per_tensor_scale,
        }


class MXAdapter(TensorAdapter):
    attributes = ("qdata", "scale")

    def quantizer(self, tensor: Tensor) -> Quantizer:
        _check_codes(tensor)
        kind = tensor.elem_dtype, tensor.block_size
        if kind == (torch.float8_e4m3fn, 32):
            return MXFP8Quantizer(columnwise=False)
        if kind != (torch.float4_e2m1fn_x2, 32):
            raise ValueError(
                "elem_dtype and block_size of a torchao MXTensor must be torch.float8_e4m3fn or "
                f"torch.float4_e2m1fn_x2, and 32, to be stepped, got {kind[0]} and {kind[1]}; "
                "quantize it so, or to NVFP4"
            )
        # Of activations, which a configuration of torchao quantizes as weights.
        mode = getattr(getattr(tensor, "act_quant_kwargs", None), "scaling_mode", None)
        return MXFP4Quantizer(scale_rounding=ROUNDINGS.get(getattr(mode, "name", None), "floor"))

    def fields(self, tensor: Tensor) -> dict[str, Tensor]:
        return {"rowwise_data": tensor.qdata, "rowwise_scale_inv": _scale(tensor)}


def _check_codes(tensor: Tensor) -> None:
    if not tensor.qdata.is_contiguous():
        raise ValueError(
            f"qdata of a torchao {type(tensor).__name__} must be contiguous to be stepped, got "
            f"strides {tensor.qdata.stride()}; optimize the weight itself, not its transpose"
        )


def _scale(tensor: Tensor) -> Tensor:
    """The scales as a matrix, or a view of swizzled ones, with padding, in row-major order."""
    rows, cols = flat_shape(tuple(tensor.shape))
    n_blocks = cols // tensor.block_size
    if not tensor.is_swizzled_scales:
        return tensor.scale.view(rows, n_blocks)
    return row_by_row(tensor.scale, rows, n_blocks)


_MODULE = "torchao.prototype.mx_formats"
register_adapter(f"{_MODULE}.nvfp4_tensor.NVFP4Tensor", NVFP4Adapter())
register_adapter(f"{_MODULE}.mx_tensor.MXTensor", MXAdapter())
