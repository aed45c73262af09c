"""Steps that decode weights, to masters with remainders or to all there is: kernels, operators."""

import math
from types import SimpleNamespace

import pytest
import torch

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from fp4adam.kernels.launch.schema import SCALARS_WIDTH
from fp4adam.optim.adam import adam_, adam_scalars
from fp4adam.optim.remainder import complete, split_off
from fp4adam.optim.state_codec import dither_bits, dither_origin, round_to_codes_, state_codec

pytest.importorskip("triton", reason="kernels need Triton")

FP8 = torch.float8_e4m3fn
GROUP = dict(
    lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
    decoupled_weight_decay=True, bias_correction=True, maximize=False,
)  # fmt: skip
QUANTIZERS = {
    "nvfp4": NVFP4Quantizer(),
    "nvfp4 1d": NVFP4Quantizer(two_dimensional=False),
    "nvfp4 rowwise": NVFP4Quantizer(columnwise=False),
    "mxfp8": MXFP8Quantizer(),
    "mxfp8 rowwise": MXFP8Quantizer(columnwise=False),
    "mxfp8 2d": MXFP8Quantizer(two_dimensional=True),
    "mxfp4": MXFP4Quantizer(),
    "mxfp4 floor": MXFP4Quantizer(scale_rounding="floor"),
    "float8 block": Float8BlockQuantizer(),
    "float8 block, any scale": Float8BlockQuantizer(force_pow_2_scales=False),
    "float8 block 1d": Float8BlockQuantizer(two_dimensional=False),
    "float8 block 1d rowwise": Float8BlockQuantizer(two_dimensional=False, columnwise=False),
    "float8": Float8Quantizer(),
    "float8 delayed": Float8Quantizer(scaling="delayed", amax_history_len=4),
}


WITHOUT = [name for name in QUANTIZERS if name.startswith(("mxfp8", "float8 block"))]
WITHOUT.remove("float8 block, any scale")


class Weight:
    """A quantized weight with its remainders, or without, and moments, all zero."""

    def __init__(self, values, quantizer, dtype, value_codec):
        self.param = quantizer.quantize(values)
        self.value_codec = value_codec
        self.remainder = split_off(self.param, values) if value_codec == "int8" else None
        self.codecs = [state_codec(name, dtype) for name in ("exp_avg", "exp_avg_sq")]
        self.moments = [codec.zeros_like(values) for codec in self.codecs]

    def table_row(self, grad, index):
        p, (exp_avg, exp_avg_sq) = self.param, self.moments
        square = p._block_scale_inv
        scale = p._rowwise_scale_inv if square is None else square
        state = self.remainder, exp_avg[0], exp_avg_sq[0], None
        storage = p._rowwise_data, scale, p._columnwise_data, p._columnwise_scale_inv, p._amax
        rest = None, exp_avg[1], exp_avg_sq[1], None, None, p._amax_history
        addresses = [
            [0 if t is None else t.data_ptr() for t in part] for part in (state, storage, rest)
        ]
        return [grad.data_ptr(), index, *addresses[0], *addresses[1], *p.shape, *addresses[2], 0]

    def tensors(self):
        moments = {f"moment {i}": t for i, t in enumerate(sum(map(list, self.moments), []))}
        every = {**self.param.inner.existing(), "remainder": self.remainder, **moments}
        return {name: t.view(torch.uint8) for name, t in every.items() if t is not None}

    def step(self, grad, scalars):
        """The step in torch operators."""
        if self.remainder is None:
            master = self.param.dequantize(torch.float32)
        else:
            master = complete(self.param, self.remainder)
        pairs = zip(self.codecs, self.moments, strict=True)
        m, v = (c.decode(codes.view(-1), s).view(grad.shape).clone() for c, (codes, s) in pairs)
        adam_(master, grad, m, v, None, scalars, True)
        dither = dither_bits(0, master.numel(), scalars.dither_step, grad.device)
        for x, codec, (codes, scales), bits in zip(
            (m, v), self.codecs, self.moments, dither[1:], strict=True
        ):
            new_codes, new_scales = codec.encode(x.view(-1), bits)
            codes.copy_(new_codes.view(codes.shape))
            if scales is not None:
                scales.copy_(new_scales)
        bits = dither.master.view(master.shape)
        if self.remainder is None:
            round_to_codes_(master, bits)
            self.param.quantize_(master)
            return
        self.param.quantize_(master)
        self.remainder.copy_(split_off(self.param, master, bits))


class Launched:
    """The same weights, stepped by kernels."""

    def __init__(self, weights, grads, quantizer, device):
        from fp4adam.kernels.adam import step_variant

        codecs = [codec.name for codec in weights[0].codecs]
        variant = step_variant(
            grad_dtype=grads[0].dtype, value_dtype=None, write_dtype=torch.float32,
            value_codec=weights[0].value_codec, exp_avg_codec=codecs[0], exp_avg_sq_codec=codecs[1],
            adam_w=True, amsgrad=False,
        )  # fmt: skip
        kind = SimpleNamespace(
            quantizer=quantizer, groups=(), write_dtype=torch.float32,
            variant=lambda: variant,
        )  # fmt: skip
        rows = [w.table_row(g, i) for i, (w, g) in enumerate(zip(weights, grads, strict=True))]
        table = torch.tensor(rows, dtype=torch.int64, device=device)
        self.scalars = torch.zeros(len(weights), SCALARS_WIDTH, device=device)
        shapes = [tuple(w.param.shape) for w in weights]
        listed = shapes, [*range(len(weights))], table, self.scalars.view(-1)
        from fp4adam.kernels import step

        self.launch = step.StepLaunch(kind, listed)
        self.signals = [torch.full((1,), x, device=device) for x in (1.0, 1.0, 0.0)]

    def step(self, scalars):
        origin = dither_origin(0, scalars.dither_step)
        row = [*scalars[:8], origin >> 16, math.inf, scalars.decay, origin & 0xFFFF]
        self.scalars.copy_(torch.tensor(row, dtype=torch.float64))
        self.launch(*self.signals)


def run(
    quantizer, dtype, shapes, device, gradients, grad_dtype=torch.bfloat16, groups=None,
    values=None, value_codec="int8",
):  # fmt: skip
    """Step two copies of weights with ``gradients(step)``; compare all bytes after each step."""
    generator = torch.Generator().manual_seed(1)
    if values is None:
        values = [torch.randn(s, generator=generator) * 0.02 for s in shapes]
    values = [v.to(device) for v in values]
    expected, actual = (
        [Weight(v, quantizer, dtype, value_codec) for v in values] for _ in range(2)
    )
    grads = [torch.zeros(s, dtype=grad_dtype, device=device) for s in shapes]
    launched = Launched(actual, grads, quantizer, device)
    for step, group in enumerate(groups or [GROUP] * 3, 1):
        scalars = adam_scalars(group, step)
        for grad, new in zip(grads, gradients(step, generator), strict=True):
            grad.copy_(new)
        for weight, grad in zip(expected, grads, strict=True):
            weight.step(grad, scalars)
        launched.step(scalars)
        for a, b in zip(actual, expected, strict=True):
            for name, bits in b.tensors().items():
                assert torch.equal(a.tensors()[name], bits), (step, name)
    return launched


def random_gradients(shapes):
    def gradients(step, generator):
        return [
            torch.randn(s, generator=generator) * torch.rand(s[0], 1, generator=generator)
            for s in shapes
        ]

    return gradients


@pytest.mark.parametrize("dtype", [FP8, torch.float32], ids=str)
@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
def test_kernels_and_operators_step_remainders_alike(quantizer, dtype, device):
    # One for whole tiles, one for edges.
    large = (128, 128) if isinstance(quantizer, Float8BlockQuantizer) else (64, 64)
    shapes = (large, (32, 96)) if dtype is FP8 else ((32, 96),)
    run(quantizer, dtype, shapes, device, random_gradients(shapes))


@pytest.mark.parametrize(
    "dtype", [FP8, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)], ids=str
)
@pytest.mark.parametrize("name", WITHOUT)
def test_kernels_and_operators_step_weights_without_masters_alike(name, dtype, device):
    quantizer = QUANTIZERS[name]
    large = (128, 128) if isinstance(quantizer, Float8BlockQuantizer) else (32, 256)
    # The first weights of the second one are NaN, infinite, and small beside others of their block.
    values = [
        torch.randn(s, generator=torch.Generator().manual_seed(3)) * 0.02 for s in (large, (32, 96))
    ]
    values[1][0, :2] = torch.tensor([math.nan, math.inf])
    values[1][1] *= 1e-5
    shapes = large, (32, 96)
    run(
        quantizer, dtype, shapes, device, random_gradients(shapes), values=values,
        value_codec="codes",
    )  # fmt: skip


def test_gradients_of_four_bytes(device):
    shapes = ((64, 64),)
    run(NVFP4Quantizer(), FP8, shapes, device, random_gradients(shapes), torch.float32)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize(
    "quantizer", [NVFP4Quantizer(), Float8Quantizer()], ids=["nvfp4", "float8"]
)
def test_previews_find_every_amax(quantizer, device):
    # Three tiles. Steady gradients build up moments; then one step shrinks the largest weights by a
    # tenth and grows others beyond them. In the step after that, the largest ones become NaN.
    sizes = torch.tensor([0.05, 0.041, 0.02]).repeat_interleave(64)[:, None]
    signs = torch.randn(192, 64, generator=torch.Generator().manual_seed(2)).sign()
    idle = {**GROUP, "lr": 1e-9}

    def gradients(step, generator):
        grad = signs.clone()
        grad[64:] *= -1
        if step == 10:
            grad[64:128] = math.nan
        return [grad]

    groups = [*[idle] * 8, {**GROUP, "lr": 0.005}, idle]
    shapes, values = ((192, 64),), [sizes * signs]
    run(quantizer, FP8, shapes, device, gradients, groups=groups, values=values)


def test_gradients_after_none(device):
    shapes = ((192, 64),)
    small = {**GROUP, "lr": 1e-5}
    groups = [small, small, {**GROUP, "lr": 0.3}, {**GROUP, "lr": 0.2, "betas": (0.5, 0.9)}, small]

    def gradients(step, generator):
        grad = torch.randn(shapes[0], generator=generator) * 1e-3
        tile = (step % 3) * 64
        grad[tile : tile + 64, 3:9] *= 10.0**step
        return [grad]

    run(NVFP4Quantizer(), FP8, shapes, device, gradients, groups=groups)
