"""States in 8 and 16 bits: codecs have the bits of a reference, and kernels those of the codecs."""

import itertools
import math

import numpy as np
import pytest
import torch

import step_reference
from fp4adam.optim.state_codec import (
    BFLOAT16,
    E4M3,
    FACTORED,
    FLOAT16,
    FLOAT32,
    REMAINDER,
    UE4M4,
    UE5M11,
    dither_bits,
    dither_origin,
)
from fp4adam.tensors.sums import sums
from helpers import bits_equal

SIGNED = (FLOAT16, E4M3)
SQUARES = (UE4M4, UE5M11)
SCALED = (*SIGNED, *SQUARES)
NARROW = (BFLOAT16, *SCALED)
by_name = pytest.mark.parametrize("codec", NARROW, ids=lambda codec: codec.name)


def numbers(codec, n=32 * 64, spread=5.0, seed=0):
    """Magnitudes over many binades and blocks; with signs where the codec has them."""
    generator = torch.Generator().manual_seed(seed)
    of_block = torch.randn(-(-n // 32), 1, generator=generator).mul_(20).expand(-1, 32).flatten()
    x = (torch.randn(n, generator=generator) * spread + of_block[:n]).exp2_()
    return x if codec in SQUARES else x * torch.randn(n, generator=generator).sign()


def any_bits(n=32 * 512, seed=0):
    """float32 of random bit patterns: subnormal numbers, Inf and NaN are among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (n,), generator=generator).int()
    # All exponents in some blocks, and special ones in others, most of which stay finite.
    bits[: n // 4] &= 0x007FFFFF | -(2**31)
    special = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, -1, 0x7F7FFFFF, 0x007FFFFF, 1, 0])
    where = torch.randint(n, (n // 200,), generator=generator)
    bits[where] = special.int()[torch.arange(len(where)) % len(special)]
    bits[-n // 8 :] = 0
    return bits.view(torch.float32)


def near_carries():
    """A number per block whose mantissa is some ones above zeros: dither may double the scale."""
    x = torch.zeros(24, 32)
    x[:, 3] = torch.tensor([0x3F800000 | 0x7FFFFF >> d << d for d in range(24)]).int().view(x.dtype)
    return x.flatten()


def random_dither(n, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (n,), generator=generator).int()


REFERENCES = {
    "float32": step_reference.FLOAT32,
    "bfloat16": step_reference.BFLOAT16,
    "float16": step_reference.FLOAT16,
    "e4m3": step_reference.E4M3,
    "ue4m4": step_reference.SQUARES8,
    "ue5m11": step_reference.SQUARES16,
}


@by_name
@pytest.mark.table
@pytest.mark.parametrize("n", [1, 77, 2048])
@pytest.mark.parametrize("kind", ["nearest", "dither", "down", "up"])
def test_codes_scales_and_numbers_are_those_of_the_reference(codec, n, kind):
    """Whole blocks and short ones; zeros, numbers near carries, and of many binades."""
    halves = 0.5 ** torch.arange(32)  # of which some are the smallest numbers
    known = torch.cat([numbers(codec, 1024), torch.zeros(32), near_carries(), halves])
    x = torch.cat([known.abs() if codec in SQUARES else known, numbers(codec, 2048)])[:n]
    fill = {"nearest": None, "down": 0, "up": -1}.get(kind, 1)
    dither = fill if fill is None else torch.full((n,), fill, dtype=torch.int32)
    dither = random_dither(n) if kind == "dither" else dither
    random = None if dither is None else dither.numpy().astype(np.int64) % 2**32
    stored, value = REFERENCES[codec.name].encode(x, random)
    codes, scales = codec.encode(x, dither)
    assert bits_equal(codes, stored[""])
    assert not codec.scaled or torch.equal(scales, stored["_scale"])
    assert bits_equal(codec.decode(codes, scales), value)
    # What has been decoded is encoded to itself, whatever the dither.
    again = codec.encode(value, random_dither(n, seed=2))
    assert bits_equal(codec.decode(*again), value)


def test_dither_of_any_step_is_its_own():
    late = [2**24 - 1, 2**24, 2**24 + 1, 2**25 + 1, 2**32 - 1, 2**32, 2**32 + 1, 2**33 + 1]
    steps = [*range(1, 5000), *late]
    assert len({dither_origin(0, step) for step in steps}) == len(steps)


def covariance(x, y):
    """In standard errors, of numbers that are uniform in [-1/2, 1/2)."""
    return ((x * y).mean() * 12 * math.sqrt(x.numel())).abs()


def test_dithers_are_uniform_and_independent():
    steps = [dither_bits(2**31 - 500, 1000, step) for step in range(1, 401)]
    states = [torch.stack(state).double() / 2**32 for state in zip(*steps, strict=True)]
    for x in states:
        assert (x.mean() * math.sqrt(12 * x.numel())).abs() < 4
        counts = torch.histc(x.float(), bins=256, min=-0.5, max=0.5)
        chi_squared = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert abs(chi_squared - 255) < 4 * math.sqrt(2 * 255)
        for lag in (1, 2, 3, 4, 8, 10, 16, 17, 32, 64, 128, 256):
            assert covariance(x[lag:], x[:-lag]) < 4.5, f"{lag} steps apart"
            assert covariance(x[:, lag:], x[:, :-lag]) < 4.5, f"{lag} elements apart"
            assert covariance(x[lag:, lag:], x[:-lag, :-lag]) < 4.5
            assert covariance(x[lag:, :-lag], x[:-lag, lag:]) < 4.5
    for i, j in itertools.permutations(range(3), 2):
        assert covariance(states[i], states[j]) < 4.5, "two states of an element"
        assert covariance(states[i][1:], states[j][:-1]) < 4.5


@pytest.mark.parametrize("codec", SCALED, ids=lambda codec: codec.name)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_with_nan_or_inf_is_nan_throughout(codec, bad):
    x = torch.rand(96)
    x[40] = bad
    codes, scales = codec.encode(x, random_dither(96))
    assert scales.tolist()[1] == 255 != scales.tolist()[0]
    y = codec.decode(codes, scales)
    assert y[32:64].isnan().all() and y[:32].isfinite().all() and y[64:].isfinite().all()


@pytest.mark.parametrize(("x", "found"), [(3.0, 3.0), (math.inf, math.nan), (2.0**-140, 0.0)])
def test_factors_are_of_normal_numbers(x, found):
    (codes, scales), squares = FACTORED.zeros_like(torch.ones(3, 300)), torch.full((3, 300), x)
    FACTORED.add_rows(codes, squares)
    FACTORED.add_columns(scales, sums(squares), 3)
    decoded = FACTORED.decode(codes, scales)
    assert torch.equal(decoded.nan_to_num(7.0), torch.full((3, 300), found).nan_to_num(7.0))
    assert (scales[-1] == 0) == (found == 0)


def test_bfloat16_keeps_nan_and_inf_to_themselves():
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    x = torch.cat([x, torch.tensor([-1, 0x7F800001]).int().view(torch.float32)])
    y, _ = BFLOAT16.encode(x, torch.full((6,), -1, dtype=torch.int32))
    assert y.view(torch.int16).tolist() == [0x7F80, -0x80, 0x7FFF, 0x3F80, 0x7FFF, 0x7FFF]


triton = pytest.importorskip("triton", reason="the tile functions need Triton")
tl = pytest.importorskip("triton.language")

from fp4adam.kernels.tiles import state  # noqa: E402


@triton.jit
def _recode_kernel(
    x_ptr, codes_ptr, scales_ptr, stored_ptr, decoded_ptr, origin, rows, cols,
    CODEC: tl.constexpr, MASKED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Encode x into a state and decode it again. Grid: (rows / BR, cols / BC), rounded up."""
    row, col = tl.program_id(0) * BR, tl.program_id(1) * BC
    start = row.to(tl.int64) * cols + col
    offs = tl.arange(0, BR)[:, None] * cols + tl.arange(0, BC)[None, :]
    mask = None
    if MASKED:
        mask = (row + tl.arange(0, BR) < rows)[:, None] & (col + tl.arange(0, BC) < cols)[None, :]
    x = tl.load(x_ptr + start + offs, mask)
    dither = state.dither_of(start, cols, origin, state.OF_EXP_AVG, BR, BC)
    stored, scale = state.store_state(
        codes_ptr, scales_ptr, start, cols, mask, x, dither, CODEC, BR, BC
    )
    state.store_scale(scales_ptr, start, cols, mask, scale, CODEC, BR, BC)
    tl.store(stored_ptr + start + offs, stored, mask)
    tl.debug_barrier()
    scale = state.load_scale(scales_ptr, start, cols, mask, CODEC, BR, BC)
    decoded = state.load_state(codes_ptr, scales_ptr, start, cols, mask, scale, CODEC, BR, BC)
    tl.store(decoded_ptr + start + offs, decoded, mask)


def kernel_view(codes):
    return codes.view(torch.uint16) if codes.dtype == torch.int16 else codes


@pytest.mark.table
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("codec", [FLOAT32, REMAINDER, *NARROW], ids=lambda codec: codec.name)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_tile_functions_give_the_bits_of_the_codecs(codec, masked, device):
    # Masked: more than one tile in each direction, of which the last ones reach past the edge.
    rows, cols = (70, 96) if masked else (64, 256)
    n = rows * cols
    n_any = n // 64 * 32
    known = near_carries()
    x = torch.cat([any_bits(n_any), numbers(codec, n - n_any - len(known)), known])
    if codec in SQUARES:
        x = x.abs()
    step = 123456
    codes, scales = codec.encode(x, dither_bits(0, n, step).exp_avg)
    decoded = codec.decode(codes, scales)
    out, out_scales = codec.zeros_like(x.to(device))
    if codec is REMAINDER:
        out_scales = torch.zeros(n, dtype=torch.int16, device=device)
    results = [torch.zeros(n, device=device) for _ in range(2)]
    _recode_kernel[(triton.cdiv(rows, 16), triton.cdiv(cols, 64))](
        x.to(device), kernel_view(out), out_scales, *results, dither_origin(0, step), rows, cols,
        CODEC=codec.name, MASKED=masked, BR=16, BC=64, enable_fp_fusion=False,
    )  # fmt: skip
    nan = decoded.isnan()
    if scales is not None:
        assert torch.equal(out_scales.cpu(), scales)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[codes.element_size()]
    assert torch.equal(out.cpu().view(bits), codes.view(bits))
    if codec is REMAINDER:  # what is stored is the parameter, not the master
        results.pop(0)
        assert not scales[nan].any() and codes.view(bits)[nan].eq(0x7FC0).all()
    for result in results:
        assert torch.equal(result.cpu().isnan(), nan)
        assert bits_equal(result.cpu()[~nan], decoded[~nan])


@triton.jit(do_not_specialize=["origin"])
def _dither_kernel(out_ptr, start, origin):
    offs = tl.arange(0, 4)[:, None] * 32 + tl.arange(0, 32)[None, :]
    of: tl.constexpr = (state.OF_MASTERS, state.OF_EXP_AVG, state.OF_EXP_AVG_SQ)
    for i in tl.static_range(3):
        dither = state.dither_of(start, 32, origin, of[i], 4, 32)
        tl.store(out_ptr + 128 * i + offs, dither.to(tl.int32, bitcast=True))


@pytest.mark.parametrize("start", [2**20, 2**33 + 96])
@pytest.mark.parametrize("step", [1, 2**24 + 1, 2**40])
def test_tile_dither_is_that_of_the_codecs(start, step, device):
    out = torch.zeros(3, 128, dtype=torch.int32, device=device)
    for first in (0, 2**34 + 7):
        _dither_kernel[(1,)](out, start, dither_origin(first, step))
        assert torch.equal(out.cpu(), torch.stack(dither_bits(first + start, 128, step)))
