"""Scales in the order of the block-scaled GEMM: their bytes, and who brings them up to date."""

import dataclasses

import numpy as np
import torch
from torch import Tensor

import format_reference as reference
from fp4adam import FP4Adam, MXFP8Quantizer, QuantizedTensor
from fp4adam.tensors.swizzle import ScalePair, write_scales
from quantizer_table import every, randn

USAGES = ("rowwise", "columnwise")

names = ("nvfp4", "nvfp4-1d", "nvfp4-columnwise", "mxfp8", "mxfp8-2d", "mxfp8-rowwise")
every_quantizer = every(*(f"{name}-swizzled" for name in names))


def pairs_of(scales: list[Tensor]) -> list[ScalePair]:
    """Scales with room for the swizzled ones, which write_scales swizzles."""
    sizes = [(s.shape[0] + -s.shape[0] % 128, s.shape[1] + -s.shape[1] % 4) for s in scales]
    return [ScalePair(s, s.new_empty(size)) for s, size in zip(scales, sizes, strict=True)]


def expected_swizzle(scale: Tensor) -> Tensor:
    scale = scale.cpu().numpy()
    padding = [(0, -scale.shape[0] % 128), (0, -scale.shape[1] % 4)]
    return torch.from_numpy(reference.swizzle(np.pad(scale, padding)))


def assert_gemm_scales_are_up_to_date(tensor: QuantizedTensor) -> None:
    for usage in USAGES:
        scale = getattr(tensor, f"{usage}_scale_inv")
        actual = getattr(tensor, f"{usage}_gemm_scale_inv")
        assert (actual is None) == (scale is None)
        if scale is not None:
            if isinstance(tensor.quantizer, MXFP8Quantizer) and usage == "columnwise":
                scale = scale.t()
            assert torch.equal(actual.cpu(), expected_swizzle(scale))


def test_tails_are_padded_with_zeros(path_device):
    shapes = [(5, 3), (130, 37), (128, 4), (1, 65), (300, 1), (0, 8)]
    plain = []
    for i, (rows, blocks) in enumerate(shapes):
        wide = torch.arange(rows * blocks * 2).add(i).to(torch.uint8)
        # Any strides, and any dtype of one byte.
        scale = wide.view(blocks, 2 * rows).t()[::2] if i % 2 else wide.view(rows, -1)[:, :blocks]
        plain.append(scale.to(path_device).view(torch.float8_e8m0fnu if i > 3 else torch.uint8))
    write_scales(pairs := pairs_of(plain))
    for scale, swizzled, _ in pairs:
        expected = expected_swizzle(scale.view(torch.uint8))
        assert torch.equal(swizzled.view(torch.uint8).cpu(), expected)
    back = [pair._replace(plain=torch.empty_like(pair.plain)) for pair in pairs]
    write_scales(back, undo=True)
    for scale, pair in zip(plain, back, strict=True):
        assert torch.equal(pair.plain.view(torch.uint8), scale.view(torch.uint8))


@every_quantizer
def test_all_that_writes_a_tensor_writes_both_orders(quantizer, path_device):
    tensor = quantizer.quantize(randn(seed=0, device=path_device))
    assert_gemm_scales_are_up_to_date(tensor)
    storage = {name: inner.data_ptr() for name, inner in tensor.storage_tensors().items()}
    stored = {name for name in storage if "gemm" in name}
    assert stored == {f"_{usage}_gemm_scale_inv" for usage in USAGES if getattr(quantizer, usage)}
    compact = dataclasses.replace(quantizer, optimize_for_gemm=False).quantize(
        randn(seed=1, device=path_device)
    )
    weight = torch.nn.Parameter(tensor)
    weight.grad = torch.ones_like(weight)
    writes = [
        lambda: FP4Adam([weight], lr=0.1).step(),
        lambda: tensor.quantize_(randn(seed=1, device=path_device)),
        lambda: tensor.copy_(randn(seed=2, device=path_device)),
        lambda: tensor.copy_(compact),  # from a checkpoint of a model without
        lambda: tensor.copy_(quantizer.quantize(randn(seed=3, device=path_device))),
    ]
    for write in writes:
        write()
        assert_gemm_scales_are_up_to_date(tensor)
        assert {name: t.data_ptr() for name, t in tensor.storage_tensors().items()} == storage
    compact.copy_(tensor)
    for name, inner in compact.storage_tensors().items():
        assert torch.equal(inner, tensor.storage_tensors()[name]), name
    # Those that are not stored are made when someone asks for them.
    assert_gemm_scales_are_up_to_date(compact)
    assert torch.equal(compact.dequantize(torch.float32), tensor.dequantize(torch.float32))
