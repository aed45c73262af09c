"""Hints that decide how Triton spreads a tile over threads."""

import triton
import triton.language as tl


@triton.jit
def state_offsets(stride, BR: tl.constexpr, BC: tl.constexpr):
    """Offsets [BR, BC] of a tile of gradient and state, of which a thread takes four neighbours.

    That is 16 bytes of FP32. Left alone, Triton would take 16 bytes of a BF16 gradient too, eight
    neighbours, and then compute the moments twice, once in either layout.
    """
    offs = tl.arange(0, BR)[:, None] * stride + tl.arange(0, BC)[None, :]
    return tl.max_contiguous(offs, (1, 4))
