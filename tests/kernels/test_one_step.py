"""The step kernel against torch operators: every format, storage of states, and edge."""

import pytest
import torch

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from fp4adam.tensors import backend
from helpers import assert_identical, random, written

pytestmark = pytest.mark.usefixtures("through_the_kernels")

FP8 = torch.float8_e4m3fn
# By name a quantizer and shapes, which have whole tiles and edges.
FORMATS = {
    "nvfp4": (NVFP4Quantizer(), [(80, 96)]),
    "nvfp4 swizzled": (NVFP4Quantizer(optimize_for_gemm=True), [(64, 128)]),
    "nvfp4 1d": (NVFP4Quantizer(two_dimensional=False), [(80, 96)]),
    "nvfp4 1d swizzled": (
        NVFP4Quantizer(two_dimensional=False, optimize_for_gemm=True), [(64, 64), (16, 32)],
    ),
    "nvfp4 rowwise": (NVFP4Quantizer(columnwise=False), [(64, 64)]),
    "nvfp4 1d rowwise": (
        NVFP4Quantizer(two_dimensional=False, columnwise=False), [(64, 64), (16, 32)],
    ),
    "nvfp4 columnwise": (NVFP4Quantizer(rowwise=False, optimize_for_gemm=True), [(48, 80)]),
    "mxfp8": (MXFP8Quantizer(), [(64, 288)]),
    "mxfp8 swizzled": (MXFP8Quantizer(optimize_for_gemm=True), [(32, 256)]),
    "mxfp8 2d": (MXFP8Quantizer(two_dimensional=True), [(64, 288)]),
    "mxfp8 2d swizzled": (
        MXFP8Quantizer(two_dimensional=True, optimize_for_gemm=True), [(32, 256)],
    ),
    "mxfp8 rowwise": (MXFP8Quantizer(columnwise=False), [(32, 256)]),
    "mxfp8 columnwise": (MXFP8Quantizer(rowwise=False, optimize_for_gemm=True), [(32, 288)]),
    "mxfp4": (MXFP4Quantizer(), [(64, 96)]),
    "mxfp4 floor": (MXFP4Quantizer(scale_rounding="floor"), [(32, 64)]),
    "float8": (Float8Quantizer(), [(80, 96)]),
    "float8 pow 2": (Float8Quantizer(force_pow_2_scales=True, columnwise=False), [(64, 64)]),
    "float8 columnwise": (Float8Quantizer(rowwise=False, amax_epsilon=1e-3), [(48, 80)]),
    "float8 delayed": (
        Float8Quantizer(scaling="delayed", amax_history_len=3, margin=1), [(80, 96), (16, 16)],
    ),
    "float8 delayed by the last": (
        Float8Quantizer(scaling="delayed", amax_history_len=1, amax_compute_algo="most_recent"),
        [(64, 80)],
    ),
    "float8 block": (Float8BlockQuantizer(), [(128, 256)]),
    "float8 block rowwise": (Float8BlockQuantizer(columnwise=False), [(128, 128)]),
    "float8 block columnwise": (Float8BlockQuantizer(rowwise=False), [(30, 48)]),
    "float8 block any scale": (
        Float8BlockQuantizer(force_pow_2_scales=False, amax_epsilon=1e-3), [(128, 128), (20, 48)],
    ),
    # Columns of codes begin at every byte of a word, in the first block of rows and in the next
    # one; blocks have one part or all of them, with less than a word left at the end or none.
    "float8 block odd": (
        Float8BlockQuantizer(), [(1, 7), (2, 3), (3, 130), (6, 5), (9, 6), (126, 9), (129, 5)],
    ),
    "float8 block ragged": (Float8BlockQuantizer(), [(200, 150), (130, 7)]),
    "float8 block ragged of 32": (Float8BlockQuantizer(), [(160, 96)]),
    "float8 block 1d": (Float8BlockQuantizer(two_dimensional=False), [(128, 128)]),
    "float8 block 1d ragged": (Float8BlockQuantizer(two_dimensional=False), [(200, 150)]),
    "float8 block 1d rowwise": (
        Float8BlockQuantizer(two_dimensional=False, columnwise=False), [(160, 128)],
    ),
}  # fmt: skip
STATES = {
    "amsgrad": dict(amsgrad=True),
    "32bit": {},
    "16bit": dict(states="16bit"),
    "8bit": dict(states="8bit"),
    "FP8 moments": dict(exp_avg_dtype=FP8, exp_avg_sq_dtype=FP8),
    "BF16 moments, rounded": dict(
        quantize_from="param_dtype", exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16,
    ),
    "int8 masters, amsgrad": dict(master_weight_dtype=torch.int8, amsgrad=True),
    "no masters": dict(master_weights=False, exp_avg_dtype=FP8, exp_avg_sq_dtype=FP8),
}  # fmt: skip
# In the quick run: the usual states of each format, and all states of these.
EVERY_STATE = ("nvfp4", "mxfp8", "float8 block")


def cases():
    for name, (quantizer, shapes) in FORMATS.items():
        for states in STATES:
            if states == "no masters" and not name.startswith(("mxfp8", "float8 block")):
                continue
            if states == "no masters" and "any scale" in name:
                continue
            is_quick = states in ("amsgrad", "8bit") or name in EVERY_STATE
            marks = () if is_quick else pytest.mark.exhaustive
            yield pytest.param(quantizer, shapes, STATES[states], id=f"{name}, {states}",
                               marks=marks)  # fmt: skip


def large_then_small(shapes):
    """Gradients of three steps, of which the second ones are large, with blocks of NaN."""
    generator = torch.Generator().manual_seed(1)
    for scale in (1, 10, 1):
        grads = [torch.randn(shape, generator=generator) * scale for shape in shapes]
        if scale == 10:
            for grad in grads:
                grad[min(3, len(grad) - 1), 1:64] = torch.nan
        yield 1e-2, grads


def train(quantizer, values, steps, device, **options):
    """All inner tensors and states after steps with these learning rates and gradients."""
    params = [torch.nn.Parameter(quantizer.quantize(value.to(device))) for value in values]
    for param, value in zip(params, values, strict=True):
        param._high_precision_init_val = value.to(device)
    optimizer = FP4Adam(params, betas=(0.9, 0.95), weight_decay=0.1, **options)
    for optimizer.param_groups[0]["lr"], grads in steps:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.to(device, p.dtype)
        optimizer.step()
    return written(optimizer)


@pytest.mark.parametrize("quantizer, shapes, options", [*cases()])
def test_kernels_and_operators_step_alike(quantizer, shapes, options, device, monkeypatch):
    values = [random(shape, 0, scale=0.1) for shape in shapes]
    if options.get("exp_avg_dtype") is FP8 or options.get("states") == "8bit":
        values = [value.bfloat16() for value in values]  # and gradients, for wider accesses
    if options.get("master_weights") is False:
        # NaN, infinite, and small beside others of their block.
        values[-1][0, :2], values[-1][1] = torch.tensor([torch.nan, torch.inf]), 1e-7
    steps = [*large_then_small(shapes)]
    assert_alike(quantizer, values, steps, device, monkeypatch, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize(
    "quantizer", [NVFP4Quantizer(), Float8Quantizer()], ids=["nvfp4", "float8"]
)
def test_previews_of_int8_masters_find_every_amax(quantizer, device, monkeypatch):
    # Three tiles. Steady gradients build up moments; then one step shrinks the largest weights by a
    # tenth and grows others beyond them. In the step after that, the largest ones become NaN.
    sizes = torch.tensor([0.05, 0.041, 0.02]).repeat_interleave(64)[:, None]
    signs = random((192, 64), 2).sign()
    grad = torch.cat([signs[:64], -signs[64:]])
    last = grad.clone()
    last[64:128] = torch.nan
    steps = [*[(1e-9, [grad])] * 8, (0.005, [grad]), (1e-9, [last])]
    values = [(sizes * signs).bfloat16()]
    assert_alike(quantizer, values, steps, device, monkeypatch, states="8bit")


@pytest.mark.slow
def test_large_gradients_after_small_ones(device, monkeypatch):
    generator, steps = torch.Generator().manual_seed(1), []
    for i, lr in enumerate((1e-5, 1e-5, 0.3, 0.2, 1e-5), 1):
        grad = torch.randn(192, 64, generator=generator) * 1e-3
        grad[i % 3 * 64 : i % 3 * 64 + 64, 3:9] *= 10.0**i
        steps.append((lr, [grad]))
    values = [torch.randn(192, 64, generator=generator) * 0.02]  # and gradients of four bytes
    assert_alike(NVFP4Quantizer(), values, steps, device, monkeypatch, states="8bit")


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4 1d", "mxfp8", "float8 block", "float8 block 1d"])
def test_extreme_gradients(name, device, monkeypatch):
    """NaN, infinities, subnormals and huge values, and small ones of weights of zeros."""
    specials = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e-42, 0.0, -0.0])
    grads = torch.zeros(2, 64, 64)
    grads[0].view(-1)[: 7 * 555 : 555] = specials
    grads[1].view(-1)[::1001] = 1e-30
    values = [random((64, 64), 0), torch.zeros(64, 64)]
    assert_alike(FORMATS[name][0], values, [(1e-2, [*grads])], device, monkeypatch)


def assert_alike(quantizer, values, steps, device, monkeypatch, **options):
    """Kernels and operators leave the same bytes."""
    actual = train(quantizer, values, steps, device, **options)
    monkeypatch.setattr(backend, "uses_kernels", lambda device: False)
    expected = train(quantizer, values, steps, device, **options)
    assert_identical(actual, expected, any_nan=True)  # NaN of a plain number has many bits
