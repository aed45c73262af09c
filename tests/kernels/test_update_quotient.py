"""The quotient of an Adam update has the bits of its operations, one by one."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fp4adam.kernels import adam

# Of c and eps: usual ones, and both sides of the bounds of the fast path.
SCALARS = [
    (1.0, 0.0),
    (4.4721, 1e-8),
    (31.6, 1e-30),
    (0.5, 2.0**40),
    (2.0**26, 0.0),
    (2.0**26, 2.0**40),
    (0.49, 1e-8),
    (2.0**30, 1e-8),
    (1.0, 2.0**41),
    (1.0, float("inf")),
]


@triton.jit
def _quotient_kernel(a_ptr, v_ptr, scalars_ptr, out_ptr, N: tl.constexpr):
    """Grid: (numel / N,)."""
    offs = tl.program_id(0) * N + tl.arange(0, N)
    c, eps = tl.load(scalars_ptr), tl.load(scalars_ptr + 1)
    a, v = tl.load(a_ptr + offs), tl.load(v_ptr + offs)
    quotient, _ = adam.update_quotient(a, 1.0, v, c, eps)
    tl.store(out_ptr + offs, quotient)


def random_floats(n: int, exponents: tuple[int, int], signed: bool, seed: int) -> np.ndarray:
    """Random significands, with exponents from the first to before the second."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 23, n, dtype=np.uint32)
    bits |= rng.integers(exponents[0] + 127, exponents[1] + 127, n, dtype=np.uint32) << 23
    if signed:
        bits |= rng.integers(0, 2, n, dtype=np.uint32) << 31
    return bits.view(np.float32)


@pytest.mark.parametrize(("c", "eps"), SCALARS)
@pytest.mark.parametrize("range_of", ["all", "fast", "edge"])
def test_every_operation_is_correctly_rounded(c, eps, range_of, device):
    n = 1 << (24 if device == "cuda" else 14)
    low, high = 1 - adam.LIFT_A, 128 - adam.LIFT_A
    low_v, high_v = 1 - adam.LIFT_V, 128 - adam.LIFT_V
    exponents = {
        "all": ((-127, 129), (-127, 129)),
        "fast": ((low, high), (low_v, high_v)),
        "edge": ((low - 1, low + 1), (high_v - 1, high_v + 1)),
    }[range_of]
    a = random_floats(n, exponents[0], True, 0)
    v = random_floats(n, exponents[1], False, 1)
    special = np.array([0, 1e-45, np.inf, np.nan, 2.0**high, 2.0**low, 1.0, -0.0], dtype=np.float32)
    a[:64], v[:64] = np.repeat(special, 8), np.tile(special, 8)
    with np.errstate(all="ignore"):
        expected = a / (np.sqrt(v) * np.float32(c) + np.float32(eps))

    out = torch.empty(n, device=device)
    operands = [torch.from_numpy(x).to(device) for x in (a, v)]
    scalars = torch.tensor([c, eps], device=device)
    _quotient_kernel[(n // 1024,)](*operands, scalars, out, N=1024, enable_fp_fusion=False)

    np.testing.assert_array_equal(out.cpu().numpy(), expected)
    zero = expected == 0
    assert np.array_equal(np.signbit(out.cpu().numpy()[zero]), np.signbit(expected[zero]))


def test_the_fast_path_takes_nothing_that_leaves_the_normal_numbers():
    """In powers of two; a GPU alone takes it."""
    lift = adam.LIFT_A - adam.LIFT_V // 2  # of c
    least, most = lift - 1, max(64 + lift + adam.MOST_C, adam.LIFT_A + adam.MOST_EPS) + 1
    # Denominators, their reciprocals and the quotients of 2 to 2^128, with a bit to spare.
    assert adam.LIFT_V % 2 == 0 and -126 + 1 <= min(least, -most, 1 - most)
    assert max(most, -least, 128 - least) <= 127 - 1
    # What is not lifted is not subnormal either.
    assert min(1 - adam.LIFT_A, 1 - adam.LIFT_V, least - adam.LIFT_A) >= -126 + 1
    assert 1 - adam.LIFT_A - (most - adam.LIFT_A) >= -126 + 1
