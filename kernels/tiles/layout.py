"""Hints that decide how Triton distributes a tile over threads."""

import triton
import triton.language as tl


@triton.jit
def state_offsets(stride, BR: tl.constexpr, BC: tl.constexpr, LANES: tl.constexpr = 4):
    """Offsets [BR, BC] of a tile of gradient or state, with LANES neighbours per thread.

    Four are 16 bytes of FP32. Without the hint, Triton would also load 16 bytes of a BF16 gradient
    per thread, eight neighbours, and then compute the moments twice, once in each layout.
    """
    offs = tl.arange(0, BR)[:, None] * stride + tl.arange(0, BC)[None, :]
    return tl.max_contiguous(offs, (1, LANES))
