"""The fused kernels against the plain torch path: every bit of weights, masters and moments."""

import contextlib

import pytest
import torch

import fp4adam
from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
)
from fp4adam.tensors import backend
from helpers import assert_identical, written

# Whole tiles, edges in both directions, and the smallest matrix of each format.
QUANTIZERS = {
    "nvfp4": (NVFP4Quantizer(), [(64, 64), (144, 80), (16, 16)]),
    "nvfp4-rowwise": (NVFP4Quantizer(columnwise=False), [(48, 80)]),
    "nvfp4-columnwise": (NVFP4Quantizer(rowwise=False, optimize_for_gemm=True), [(48, 80)]),
    "nvfp4-swizzled": (NVFP4Quantizer(optimize_for_gemm=True), [(64, 64), (144, 16)]),
    "nvfp4-1d": (NVFP4Quantizer(two_dimensional=False), [(64, 128), (48, 80)]),
    "nvfp4-1d-swizzled": (
        NVFP4Quantizer(two_dimensional=False, optimize_for_gemm=True),
        [(64, 80)],
    ),
    "mxfp8": (MXFP8Quantizer(), [(32, 256), (64, 288)]),
    "mxfp8-rowwise": (MXFP8Quantizer(columnwise=False), [(32, 288)]),
    "mxfp8-columnwise": (MXFP8Quantizer(rowwise=False, optimize_for_gemm=True), [(32, 288)]),
    "mxfp8-swizzled": (MXFP8Quantizer(optimize_for_gemm=True), [(32, 256), (160, 32)]),
    "mxfp8-2d": (MXFP8Quantizer(two_dimensional=True), [(32, 256), (64, 288)]),
    "mxfp8-2d-swizzled": (
        MXFP8Quantizer(two_dimensional=True, optimize_for_gemm=True),
        [(32, 256), (160, 32)],
    ),
    "float8block": (Float8BlockQuantizer(), [(128, 128), (130, 20), (5, 3)]),
    "float8block-fp32": (
        Float8BlockQuantizer(force_pow_2_scales=False, amax_epsilon=1e-3),
        [(128, 128), (20, 48)],
    ),
    "float8block-1d": (Float8BlockQuantizer(two_dimensional=False), [(128, 128), (130, 20)]),
    "float8block-columnwise": (Float8BlockQuantizer(rowwise=False), [(30, 48)]),
    "float8": (Float8Quantizer(), [(64, 64), (144, 80), (16, 16)]),
    "float8-pow2": (Float8Quantizer(force_pow_2_scales=True, amax_epsilon=1e-3), [(64, 80)]),
    "float8-rowwise": (Float8Quantizer(columnwise=False), [(80, 64)]),
    "float8-columnwise": (Float8Quantizer(rowwise=False), [(48, 80)]),
    "float8-delayed": (
        Float8Quantizer(scaling="delayed", amax_history_len=3, margin=1),
        [(64, 64), (144, 80), (16, 16)],
    ),
    "float8-delayed-1": (
        Float8Quantizer(scaling="delayed", amax_history_len=1, amax_compute_algo="most_recent"),
        [(64, 80)],
    ),
}


@contextlib.contextmanager
def taking(kernels, device):
    """The device of tensors that go through the kernels, or through torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "uses_kernels", lambda d: kernels and d.type == device)
        yield device if kernels else "cpu"


def assert_same_bits(quantizer, shapes, device, dtype=torch.bfloat16, **options):
    """Both ways write the same."""
    results = []
    for kernels in (True, False):
        with taking(kernels, device) as where:
            params = make_params(quantizer, shapes, dtype, where)
            results.append(written(train(params, **options)))
    assert_identical(*results)


def make_params(quantizer, shapes, dtype, device):
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in shapes:
        value = torch.randn(shape, generator=generator) * 0.02
        if quantizer is None:
            params.append(torch.nn.Parameter(value.to(dtype).to(device)))
        else:
            param = torch.nn.Parameter(quantizer.quantize(value.to(dtype).to(device)))
            param._high_precision_init_val = value.to(device)
            params.append(param)
    return params


def train(
    params, grad_dtype=torch.bfloat16, steps=2, scale=1e-2, grad_scale=None, lr=1e-2, **options
):
    generator = torch.Generator().manual_seed(1)
    optimizer = FP4Adam(params, lr=lr, weight_decay=0.1, use_decoupled_grad=True, **options)
    for _ in range(steps):
        for param in params:
            grad = torch.randn(param.shape, generator=generator) * scale
            param.decoupled_grad = grad.to(grad_dtype).to(param.device)
        if grad_scale is not None:
            optimizer.grad_scale = torch.tensor([grad_scale], device=params[0].device)
        optimizer.step()
    return optimizer


@pytest.mark.table
@pytest.mark.parametrize("name", QUANTIZERS)
def test_fused_step_gives_the_bits_of_the_torch_path(name, device):
    assert_same_bits(*QUANTIZERS[name], device)


# Columns of codes begin at every byte of a word, in the first block of rows and in the next one;
# blocks have one part or all of them, with less than a word left at the end or none. A step that
# changes little keeps most scales, the first ones change many.
@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 7), (2, 3), (3, 130), (6, 5), (9, 6), (126, 9)],
        [(129, 5), (130, 3), (131, 4)],
        pytest.param([(257, 131), (255, 130), (128, 129)], marks=pytest.mark.exhaustive),
    ],
    ids=["short", "tall", "blocks"],
)
@pytest.mark.parametrize("lr", [1e-2, 1e-6])
def test_float8_blocks_of_odd_sizes_have_the_bits_of_the_torch_path(shapes, lr, device):
    assert_same_bits(Float8BlockQuantizer(), shapes, device, steps=3, lr=lr)


@pytest.mark.parametrize("two_dimensional", [True, False])
def test_a_tensor_with_a_narrow_master_is_written_again(two_dimensional, device):
    """Its largest weight grows in a tile of small ones, where the preview does not look."""
    results = []
    for kernels in (True, False):
        with taking(kernels, device) as where:
            quantizer = NVFP4Quantizer(two_dimensional=two_dimensional)
            params = make_params(quantizer, [(80, 96)], torch.bfloat16, where)
            params[0]._high_precision_init_val[64:] *= 0.01
            optimizer = FP4Adam(params, lr=1e-4, master_weight_dtype=torch.float16)
            for step in range(3):
                if step == 2:
                    optimizer.state[params[0]]["master_param_scale"][70 * 3 + 1] += 12
                params[0].grad = torch.full_like(params[0], 0.01 * step)
                optimizer.step()
                if kernels:
                    launch = optimizer._whole.plan._groups[0].launch
                    assert (launch._exceeding > 0).tolist() == [step == 2]
            results.append(written(optimizer))
    assert_identical(*results)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-1d", "mxfp8", "float8block", "float8block-1d"])
def test_extreme_gradients_give_the_bits_of_the_torch_path(name, device):
    """NaN, infinities, subnormals and huge values: the codes agree wherever they end up."""
    specials = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e-42, 0.0, -0.0])
    grads = torch.zeros(2, 64, 64)
    grads[0].view(-1)[: 7 * 555 : 555] = specials
    grads[1].view(-1)[::1001] = 1e-30
    results = []
    for kernels in (True, False):
        with taking(kernels, device) as where:
            params = make_params(QUANTIZERS[name][0], [(64, 64)] * 2, torch.float32, where)
            params[1]._high_precision_init_val.zero_()
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.to(where)
            FP4Adam(params, lr=1e-2).step()
        tensors = [t.cpu() for param in params for t in param.storage_tensors().values()]
        results.append([t for t in tensors if t.dtype == torch.uint8])
    assert_identical(*results)


def test_default_path_follows_the_device():
    assert not backend.uses_kernels(torch.device("cpu"))
    assert backend.uses_kernels(torch.device("cuda"))
    assert fp4adam.QuantizedTensor is QuantizedTensor
