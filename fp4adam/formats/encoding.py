"""Quantization in torch operators, for any layout: of whole matrices, and of spans of elements.

Matrices are processed in strips of whole rows of blocks, which stay in the cache. Formats without
an amax of the tensor read whole matrices once: each strip is measured and encoded.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fp4adam.formats import minifloat
from fp4adam.tensors import backend
from fp4adam.tensors.blocks import Span
from fp4adam.tensors.layout import Layout
from fp4adam.tensors.quantizer import Quantizer
from fp4adam.tensors.storage import Storage
from fp4adam.tensors.transpose import transpose_bytes, transpose_words, word_rows

# Flat memory for codes, and the index of the byte of a matrix that it starts at.
Target = tuple[Tensor, int]


def write(quantizer: Quantizer, x: Tensor, out: Storage, amax: Tensor | None = None) -> None:
    """:meth:`Quantizer.write`, by the format's kernels or by operators."""
    layout, grids = quantizer.layout, {}
    by_kernels = backend.uses_kernels(x.device) and layout.fits_kernels(*x.shape)
    if layout.tensor_scale is not None:
        if layout.scale_type is not None and not by_kernels:
            # Scales of blocks depend on the amax of the tensor, so all blocks are measured first.
            grids = new_grids(layout, tuple(x.shape), x.device)
            measure_blocks(layout, x, None, torch.float32, grids, None)
            amax = next(iter(grids.values())).amax() if amax is None else amax
        if amax is None:
            amax = out.amax if layout.tensor_scale == "current" else torch.zeros_like(out.amax)
            quantizer.measure(x, amax)
        if amax is not out.amax:
            quantizer.take_amax(out, amax)
    if by_kernels:
        return quantizer.launch(x, out)
    for rows, strip, *scratch in strips(x, (layout.block, layout.block), scratch=2):
        for usage, block in layout.blocks.items():
            if grids:
                grid = grids[usage][in_blocks(rows, block[0])]
            elif layout.scale_type is not None:
                grid = minifloat.amax(blocks_of(strip, block), (1, 3), scratch[0])
            else:
                grid = out.amax
            scales, factors = quantizer.scales_of_blocks(grid, out.amax, x.dtype)
            if layout.scale_type is not None:
                stored = stored_scales(layout, out, usage, tuple(x.shape))
                stored = stored[in_blocks(rows, block[0])]
                stored.copy_(scales[: stored.shape[0], : stored.shape[1]])
            _store(layout, usage, rows, x.shape[1], strip, factors, scratch, out)


def new_grids(
    layout: Layout, shape: tuple[int, int], device: torch.device | None
) -> dict[str, Tensor]:
    """Memory for the amaxes of all blocks of a matrix, float32, by direction."""
    sizes = {usage: grid_shape(block, shape) for usage, block in layout.blocks.items()}
    return {
        usage: torch.empty(size, dtype=torch.float32, device=device)
        for usage, size in sizes.items()
    }


def grid_shape(block: tuple[int, int], shape: tuple[int, int]) -> tuple[int, int]:
    """The number of block rows and block columns of a matrix."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def stored_scales(layout: Layout, tensors: Storage, usage: str, shape: tuple[int, int]) -> Tensor:
    """A view of the stored scales of a direction, [block rows, block columns]."""
    name = "block_scale_inv" if layout.is_square else f"{usage}_scale_inv"
    stored = getattr(tensors, name)
    stored = stored.t() if layout.inner[name].transposed else stored
    rows, cols = grid_shape(layout.blocks[usage], shape)
    return stored[:rows, :cols]


def measure(quantizer: Quantizer, x: Tensor, amax: Tensor) -> None:
    """:meth:`Quantizer.measure`, by the format's kernels or by operators."""
    if backend.uses_kernels(x.device):
        quantizer.kernels().measure(x, amax)
    else:
        measure_blocks(quantizer.layout, x, None, torch.float32, {}, amax.zero_())


def measure_blocks(
    layout: Layout,
    x: Tensor,
    span: Span | None,
    dtype: torch.dtype,
    grids: dict[str, Tensor],
    amax: Tensor | None,
) -> None:
    """Write the amaxes of blocks, and raise that of the tensor; arguments as for :func:`strips`.

    Args:
        layout: The layout of the matrix.
        x: The matrix, or the values of a span of it.
        span: See ``x``.
        dtype: The dtype that values are rounded to first.
        grids: The amaxes of all blocks by direction, float32; only those that overlap the span are
            written.
        amax: That of the tensor, float32 [1], or None.
    """
    for rows, strip, scratch in strips(x, (layout.block,) * 2, 1, span, dtype):
        for usage, grid in grids.items():
            block = layout.blocks[usage]
            found = minifloat.amax(blocks_of(strip, block), (1, 3), scratch)
            own = grid[in_blocks(rows, block[0])]
            own.copy_(found[: own.shape[0], : own.shape[1]])
        if amax is not None:
            torch.maximum(amax, minifloat.amax(strip, scratch=scratch), out=amax)


def write_codes(
    quantizer: Quantizer,
    x: Tensor,
    span: Span,
    dtype: torch.dtype,
    factors: dict[str, Tensor],
    targets: dict[str, Target],
) -> None:
    """Write the codes of a span, in the directions of ``targets``.

    Args:
        quantizer: The quantizer of the matrix.
        x: The values of the span.
        span: The span.
        dtype: The dtype that values are rounded to first.
        factors: The factors that map values to codes, of all blocks by direction.
        targets: By direction the memory for codes. Nibbles outside of the span are preserved.
    """
    layout, cols = quantizer.layout, span.shape[1]
    for rows, strip, *scratch in strips(x, (layout.block,) * 2, 2, span, dtype):
        top = rows.start * cols
        start, stop = max(span.start, top), min(span.stop, rows.stop * cols)
        for usage, (target, first_byte) in targets.items():
            block = layout.blocks[usage]
            own = factors[usage]
            if layout.scale_type is not None:
                own = own[in_blocks(rows, block[0])]
            codes = _encode(layout, strip, block, own, scratch)
            codes = codes[: rows.stop - rows.start, :cols].reshape(-1)[start - top : stop - top]
            if layout.code_bits == 4:
                _store_nibbles(codes, target, start - 2 * first_byte)
            else:
                target[start - first_byte : stop - first_byte] = codes


def recode(quantizer: Quantizer, x: Tensor, tensors: Storage) -> Tensor:
    """:meth:`Quantizer.recode`."""
    layout, shape = quantizer.layout, (x.shape[0], x.shape[1])
    usage, block = next(iter(layout.blocks.items()))
    scales = None
    if layout.scale_type is not None:
        scales = stored_scales(layout, tensors, usage, shape)
    factors = quantizer.factors(scales, tensors.amax)
    if scales is not None:
        # Strips have whole blocks in both directions.
        sizes = ((n + -n % layout.block) // side for n, side in zip(shape, block, strict=True))
        below, beside = (n - own for n, own in zip(sizes, factors.shape, strict=True))
        factors = torch.nn.functional.pad(factors, (0, beside, 0, below))
    codes = x.new_empty(shape, dtype=torch.uint8)
    for rows, strip, *scratch in strips(x, (layout.block,) * 2, scratch=2):
        own = factors
        if scales is not None:
            own = factors[rows.start // block[0] :][: len(strip) // block[0]]
        codes[rows] = _encode(layout, strip, block, own, scratch)[
            : rows.stop - rows.start, : shape[1]
        ]
    if not quantizer.rowwise and layout.columnwise.codes.transposed:
        codes = codes.t().contiguous()
    return minifloat.pack_e2m1(codes) if layout.code_bits == 4 else codes


def decode(quantizer: Quantizer, tensors: Storage, dtype: torch.dtype) -> Tensor:
    """:meth:`Quantizer.decode`, by the format's kernels or by operators."""
    layout, shape = quantizer.layout, quantizer.decoded_shape(tensors)
    usage = "rowwise" if tensors.rowwise_data is not None else "columnwise"
    codes = getattr(tensors, f"{usage}_data")
    if backend.uses_kernels(codes.device):
        out = codes.new_empty(shape, dtype=dtype)
        quantizer.kernels().dequantize(*quantizer.stored(tensors), out)
        return out
    values = minifloat.unpack_e2m1(codes) if layout.code_bits == 4 else minifloat.e4m3_value(codes)
    transposed = getattr(layout, usage).codes.transposed
    if layout.scale_type is None:
        values *= quantizer.decode_factors(None, tensors.amax)
    else:
        usage = "rowwise" if layout.is_square else usage
        block, scales = layout.blocks[usage], stored_scales(layout, tensors, usage, shape)
        factors = quantizer.decode_factors(scales.contiguous(), tensors.amax)
        if transposed:
            block, factors = block[::-1], factors.t()
        (rows, cols), blocks = values.shape, blocks_of(values, block)
        values = blocks.mul_(factors[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :cols]
    matrix = values.to(dtype)
    return (matrix.t() if transposed else matrix).contiguous()


def _encode(
    layout: Layout,
    strip: Tensor,
    block: tuple[int, int],
    factors: Tensor,
    scratch: Sequence[Tensor],
) -> Tensor:
    """The codes of a strip: uint8, or int16 in the memory of ``scratch``."""
    if layout.scale_type is None:
        scaled = torch.mul(strip, factors, out=scratch[0])
    else:
        scaled = times_factors(blocks_of(strip, block), factors, out=scratch[0]).view(strip.shape)
    if layout.code_type == "e2m1":
        return minifloat.e2m1_words(scaled, scratch[1])
    memory = scratch[1].view(-1).view(torch.uint8)[: strip.numel()]
    return minifloat.e4m3_code(scaled, out=memory.view(strip.shape))


def _store(
    layout: Layout,
    usage: str,
    rows: slice,
    cols: int,
    strip: Tensor,
    factors: Tensor,
    scratch: Sequence[Tensor],
    out: Storage,
) -> None:
    """Write the codes of a strip of a whole matrix, in both directions if blocks are square."""
    codes = _encode(layout, strip, layout.blocks[usage], factors, scratch)
    codes = codes[: rows.stop - rows.start, :cols]
    packs = layout.code_bits == 4
    if usage == "rowwise" and out.rowwise_data is not None:
        if packs:
            minifloat.pack_e2m1(codes, out=out.rowwise_data[rows])
        else:
            out.rowwise_data[rows] = codes
    if out.columnwise_data is not None and (usage == "columnwise" or layout.is_square):
        if not layout.columnwise.codes.transposed:
            out.columnwise_data[rows] = codes
        elif packs:
            _pack_columns(codes, out.columnwise_data[:, in_blocks(rows, 2)])
        else:
            transpose_bytes(codes, out.columnwise_data[:, rows])


def _pack_columns(codes: Tensor, out: Tensor) -> None:
    """Pack int16 codes [rows, cols] along columns into uint8 [cols, rows / 2]."""
    # Four rows become one of words.
    words = word_rows(codes[0::4], torch.int16)
    torch.add(codes[0::4], codes[1::4], alpha=1 << 4, out=words)
    words.add_(codes[2::4], alpha=1 << 8).add_(codes[3::4], alpha=1 << 12)
    transpose_words(words, out)


def _store_nibbles(codes: Tensor, target: Tensor, first: int) -> None:
    """Overwrite nibbles ``first``, ``first + 1``, ... of ``target``, low nibbles first."""
    if first % 2 and len(codes):
        target[first // 2] = (target[first // 2] & 0x0F) | codes[0] << 4
        codes, first = codes[1:], first + 1
    pairs, byte = len(codes) // 2, first // 2
    # Cloned for alignment, because pack_e2m1 reads pairs as words.
    target[byte : byte + pairs] = minifloat.pack_e2m1(codes[: 2 * pairs].clone())
    if len(codes) % 2:
        target[byte + pairs] = (target[byte + pairs] & 0xF0) | codes[-1]


def strips(
    x: Tensor,
    block: tuple[int, int],
    scratch: int = 0,
    span: Span | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple]:
    """Cut a matrix, or a span of one, into strips of whole blocks that fit into a CPU's cache.

    Args:
        x: The contiguous matrix, of any floating dtype; the values of the span if there is one.
        block: Rows and columns of a block.
        scratch: Number of tensors to work in. All strips share their memory, because what was
            used last is still in the cache.
        span: The elements of a matrix that ``x`` holds; None for all.
        dtype: The dtype that values are rounded to.

    Yields:
        For each strip its rows as a slice; their values, float32, padded with zeros to whole
        blocks and outside of the span, which are valid until the next strip; and ``scratch``
        float32 tensors of that shape.
    """
    (rows, cols), start, stop = (x.shape, 0, x.numel()) if span is None else span
    if start == stop:
        return
    first = start // cols // block[0] * block[0]
    last = -(-stop // cols)  # then the end of its block
    last = min(last + -last % block[0], rows)
    height = max(1, backend.cpu_chunk_numel() // (block[0] * cols)) * block[0]
    height = min(height, last - first + -(last - first) % block[0])
    width, flat = cols + -cols % block[1], x.detach().reshape(-1)
    memory = [x.new_empty(height, width, dtype=torch.float32) for _ in range(scratch)]
    padded = None
    for top in range(first, last, height):
        here = slice(top, min(top + height, last))
        begin, end = max(start, top * cols), min(stop, here.stop * cols)
        values, n = flat[begin - start : end - start], here.stop - top
        if dtype not in (torch.float32, x.dtype):
            values = values.to(dtype)
        shape = n + -n % block[0], width
        if values.dtype == torch.float32 and len(values) == math.prod(shape):
            strip = values.view(shape)
        else:
            if padded is None:
                padded = x.new_zeros(height, width, dtype=torch.float32)
            strip = padded[: shape[0]]
            if len(values) < n * cols:
                around = values.new_zeros(n * cols)
                around[begin - top * cols : end - top * cols] = values
                values = around
            strip[:n, :cols] = values.view(n, cols)
            strip[n:] = 0
        yield here, strip, *(each[: shape[0]] for each in memory)


def blocks_of(x: Tensor, block: tuple[int, int]) -> Tensor:
    """View [rows, cols] as [block row, row, block column, column]; edges are padded with zeros."""
    below, beside = -x.shape[0] % block[0], -x.shape[1] % block[1]
    if below or beside:
        x = torch.nn.functional.pad(x, (0, beside, 0, below))
    return x.view(x.shape[0] // block[0], block[0], x.shape[1] // block[1], block[1])


def times_factors(blocks: Tensor, factors: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply [block row, row, block column, column] by one factor per block.

    ``out``: Contiguous memory for the products, of any shape.
    """
    out = torch.empty_like(blocks) if out is None else out.view(blocks.shape)
    height, width = blocks.shape[1], blocks.shape[3]
    if height == 1 or width == 1:
        return torch.mul(blocks, factors[:, None, :, None], out=out)
    # Torch multiplies whole rows by rows several times faster than pieces of them by a number.
    rows = factors.repeat_interleave(width, dim=1)[:, None]
    torch.mul(blocks.flatten(2), rows, out=out.flatten(2))
    return out


def in_blocks(span: slice, block: int) -> slice:
    """The slice of blocks that covers the rows ``span``, which starts at a block boundary."""
    return slice(span.start // block, -(-span.stop // block))
