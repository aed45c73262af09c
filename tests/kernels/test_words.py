"""Codes in words: packed and transposed as plain torch does it."""

import pytest
import torch
import triton
import triton.language as tl

from fp4adam.formats import minifloat
from fp4adam.kernels.tiles.codes import e4m3_words, pack_words, transpose_words


@triton.jit
def _words_kernel(
    code_ptr, out_ptr, transposed_ptr, BITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    code = tl.load(code_ptr + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :])
    words = pack_words(code, BITS, R, C)
    width: tl.constexpr = C * BITS // 32
    tl.store(out_ptr + tl.arange(0, R)[:, None] * width + tl.arange(0, width)[None, :], words)
    height: tl.constexpr = R * BITS // 32
    ptr = transposed_ptr + tl.arange(0, C)[:, None] * height + tl.arange(0, height)[None, :]
    tl.store(ptr, transpose_words(words, BITS, R, C))


@triton.jit
def _e4m3_words_kernel(x_ptr, out_ptr, R: tl.constexpr, C: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :])
    out = out_ptr + tl.arange(0, R)[:, None] * (C // 4) + tl.arange(0, C // 4)[None, :]
    tl.store(out, e4m3_words(x, R, C))


def packed(code, bits):
    """Bytes of codes, the first in the low bits."""
    return code if bits == 8 else code[:, ::2] | code[:, 1::2] << 4


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "cols"), [(16, 16), (64, 64), (128, 32)])
def test_words_hold_codes_of_neighbouring_columns_and_rows(bits, rows, cols, device):
    generator = torch.Generator().manual_seed(0)
    code = torch.randint(0, 1 << bits, (rows, cols), dtype=torch.uint8, generator=generator)
    words = torch.empty(rows, cols * bits // 32, dtype=torch.int32, device=device)
    transposed = torch.empty(cols, rows * bits // 32, dtype=torch.int32, device=device)
    _words_kernel[(1,)](
        code.to(device), words.view(torch.uint32), transposed.view(torch.uint32), bits, rows, cols
    )
    assert torch.equal(words.view(torch.uint8).cpu(), packed(code, bits))
    assert torch.equal(transposed.view(torch.uint8).cpu(), packed(code.T.contiguous(), bits))


def test_e4m3_words_hold_the_codes(device):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (64, 256), dtype=torch.int32, generator=generator)
    # Any bit pattern in one half, values within the format's range in the other.
    x = torch.cat((bits.view(torch.float32), torch.randn(64, 256, generator=generator) * 64))
    expected, x = minifloat.e4m3_code(x), x.to(device)
    words = torch.empty(128, 64, dtype=torch.int32, device=device)
    _e4m3_words_kernel[(1,)](x, words.view(torch.uint32), 128, 256)
    assert torch.equal(words.view(torch.uint8).cpu(), expected)
