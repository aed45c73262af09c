"""The fused Adam step of plain parameters, whose tensors are read flat."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels import adam
from fp4adam.kernels.adam import (
    SIGNALS,
    Scales,
    Variant,
    adam_step_tile,
    load_scalars,
    state_pointers,
    update_tile,
)
from fp4adam.kernels.launch.launch import Launch, compute_capability
from fp4adam.kernels.launch.tensor_table import (
    COLS,
    ROWS,
    ROWWISE_DATA,
    WIDTH,
    pointer,
    takes_part,
)
from fp4adam.kernels.tiles.bfloat16 import round_to
from fp4adam.kernels.tiles.layout import state_offsets
from fp4adam.kernels.tiles.state import (
    are_narrow,
    has_scales,
    load_scale_words,
    max_registers,
    starts_from_codes,
    store_scale_words,
)

# Elements of a program without a loop.
BLOCK = 512
# Tensors are read as rows of so many elements, four per thread. In a longer row Triton loses the
# hint of ``state_offsets``.
ROW = tl.constexpr(512)
# Of narrow states: rows per turn of a loop, turns, and stages. They take many instructions per
# byte, so that the loads of a turn have to overlap with the work on others.
LOOP_TILE = (1, 4, 4)


@triton.jit
def _load_scales(
    pointers,
    start,
    stride,
    VARIANT: tl.constexpr,
    LOOP: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """The :class:`Scales` of LOOP tiles of the state down the rows, in words; see
    :func:`load_scale_words`. ``start`` is that of the first tile.
    """
    ptr = pointers
    VALUE: tl.constexpr = VARIANT.value_codec
    FIRST: tl.constexpr = VARIANT.exp_avg_codec
    SECOND: tl.constexpr = VARIANT.exp_avg_sq_codec
    return Scales(
        load_scale_words(ptr.value_extra, start, BR * stride, stride, VALUE, LOOP, BR, BC),
        load_scale_words(ptr.exp_avg_scale, start, BR * stride, stride, FIRST, LOOP, BR, BC),
        load_scale_words(ptr.exp_avg_sq_scale, start, BR * stride, stride, SECOND, LOOP, BR, BC),
    )


@triton.jit
def _store_scales(
    pointers,
    start,
    stride,
    words,
    VARIANT: tl.constexpr,
    LOOP: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Store the :class:`Scales` that :func:`_load_scales` loads."""
    ptr, w = pointers, words
    VALUE: tl.constexpr = VARIANT.value_codec
    FIRST: tl.constexpr = VARIANT.exp_avg_codec
    SECOND: tl.constexpr = VARIANT.exp_avg_sq_codec
    store_scale_words(ptr.value_extra, start, stride, w.value, VALUE, LOOP, BR, BC)
    store_scale_words(ptr.exp_avg_scale, start, stride, w.exp_avg, FIRST, LOOP, BR, BC)
    store_scale_words(ptr.exp_avg_sq_scale, start, stride, w.exp_avg_sq, SECOND, LOOP, BR, BC)


@triton.jit
def _scales_of(words, i):
    """The :class:`Scales` of tile ``i``, out of words."""
    shift = 8 * i
    return Scales(
        ((words.value >> shift) & 0xFF).to(tl.uint8),
        ((words.exp_avg >> shift) & 0xFF).to(tl.uint8),
        ((words.exp_avg_sq >> shift) & 0xFF).to(tl.uint8),
    )


@triton.jit
def _insert_scales(words, scales, i):
    """Words of zeros with the :class:`Scales` of tile ``i`` inserted."""
    shift = 8 * i
    return Scales(
        words.value | (scales.value.to(tl.uint32) << shift),
        words.exp_avg | (scales.exp_avg.to(tl.uint32) << shift),
        words.exp_avg_sq | (scales.exp_avg_sq.to(tl.uint32) << shift),
    )


@triton.jit
def _no_scales(BR: tl.constexpr, BC: tl.constexpr):
    """Words of :class:`Scales` that are all zero, of tiles [BR, BC]."""
    zero = tl.zeros((BR, (BC + 31) // 32), tl.uint32)
    return Scales(zero, zero, zero)


@triton.jit
def _param_pointer(table, tensor, VARIANT: tl.constexpr):
    """Pointer to the parameter, if the value is not the parameter itself."""
    if VARIANT.write_dtype is None:
        ptr = pointer(table, tensor, ROWWISE_DATA, tl.uint8)  # unused
    else:
        ptr = pointer(table, tensor, ROWWISE_DATA, VARIANT.write_dtype)
    return ptr


@triton.jit
def _store_param(ptr, start, mask, value, VARIANT: tl.constexpr, BR: tl.constexpr):
    """Store the parameter of a tile [BR, ROW], if the value is not the parameter itself."""
    if VARIANT.write_dtype is not None:
        offs = state_offsets(ROW, BR, ROW)
        param = round_to(value, VARIANT.write_dtype)
        tl.store(ptr + start + offs, param, mask)


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _block_kernel(
    grad_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    table,
    scalars,
    tiles,
    VARIANT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adam on one block of one tensor, a matrix or with one column, read flat.

    Grid: (n_tiles,). Tile: BLOCK elements. grad_scale_ptr, clip_ptr, found_inf_ptr: float32 [1].
    table: int64 [n_tensors, 19]. scalars: float32 [n, 12]. tiles: int32 [n_tiles, 2], (tensor,
    block of that tensor).
    Reads gradient, value, exp_avg, exp_avg_sq, writes the last three and the parameter: 28 bytes
    per element, both with a BF16 gradient and parameter and an FP32 master, and in FP32 throughout.
    """
    tile = tiles + 2 * tl.program_id(0)
    tensor = tl.load(tile)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    start = tl.load(tile + 1).to(tl.int64) * BLOCK
    fields = table + tensor.to(tl.int64) * WIDTH
    numel = tl.load(fields + ROWS) * tl.load(fields + COLS)
    BR: tl.constexpr = BLOCK // ROW
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    pointers = state_pointers(table, tensor, VARIANT)
    param = _param_pointer(table, tensor, VARIANT)
    # A mask makes every access scalar, so only the last block of a tensor has one.
    if start + BLOCK <= numel:
        value = adam_step_tile(pointers, start, start, ROW, None, constants, VARIANT, True, BR, ROW)
        _store_param(param, start, None, value, VARIANT, BR)
    else:
        mask = start + state_offsets(ROW, BR, ROW) < numel
        value = adam_step_tile(pointers, start, start, ROW, mask, constants, VARIANT, True, BR, ROW)
        _store_param(param, start, mask, value, VARIANT, BR)


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _loop_kernel(
    grad_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    table,
    scalars,
    tiles,
    VARIANT: tl.constexpr,
    BR: tl.constexpr,
    LOOP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The step of :func:`_block_kernel` on whole blocks of LOOP * BR rows, in a prefetching loop.

    Grid: (n_tiles,). Tile: LOOP times [BR, ROW]. tiles: int32 [n_tiles, 2], (tensor, block of that
    tensor). The rest as there.
    """
    tile = tiles + 2 * tl.program_id(0)
    tensor = tl.load(tile)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    first = tl.load(tile + 1).to(tl.int64) * (LOOP * BR * ROW)
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    pointers = state_pointers(table, tensor, VARIANT)
    param = _param_pointer(table, tensor, VARIANT)
    old_scales = _load_scales(pointers, first, ROW, VARIANT, LOOP, BR, ROW)
    new_scales = _no_scales(BR, ROW)
    # Counted apart from ``i``, which the loop is ahead with when it prefetches.
    target = first
    for i in tl.range(0, LOOP, num_stages=STAGES):
        start = first + i * (BR * ROW)
        value, scales, _, _ = update_tile(
            pointers, start, target, ROW, None, _scales_of(old_scales, i), constants, VARIANT, True,
            BR, ROW,
        )  # fmt: skip
        new_scales = _insert_scales(new_scales, scales, i)
        _store_param(param, target, None, value, VARIANT, BR)
        target += BR * ROW
    _store_scales(pointers, first, ROW, new_scales, VARIANT, LOOP, BR, ROW)


def flat_tiles(numels: list[int], block: int, whole: int | None = None) -> list[Tensor]:
    """The blocks of all tensors: int32 [n_tiles, 2], (tensor, block of that tensor).

    Blocks have ``block`` elements, the last one of a tensor fewer. With ``whole``, a multiple of
    ``block``, two lists: blocks of just ``whole`` elements, and blocks of the rest.
    """
    n = torch.tensor(numels, dtype=torch.int64, device="cpu")
    if whole is None:
        return [_blocks(torch.zeros_like(n), -(-n // block))]
    n_whole = n // whole
    return [
        _blocks(torch.zeros_like(n), n_whole),
        _blocks(n_whole * (whole // block), -(-n // block)),
    ]


def _blocks(begin: Tensor, end: Tensor) -> Tensor:
    """(tensor, block), int32 [n, 2], of the blocks from ``begin`` to ``end`` of each tensor."""
    counts = end - begin
    tensors = torch.repeat_interleave(counts)
    skipped = counts.cumsum(0) - counts - begin
    numbers = torch.arange(len(tensors), device="cpu") - skipped[tensors]
    return torch.stack((tensors, numbers), dim=1).to(torch.int32)


def loop_registers(codecs: tuple[str, str, str], sm: int) -> int | None:
    """The register limit per thread of the loop, for half the warps of a multiprocessor at once.

    ``sm``: The compute capability without its point; some would spill.
    """
    return 64 if sm == 90 else max_registers(*codecs)


def update(
    table: Tensor, scalars: Tensor, shapes: list[tuple[int, int]], variant: Variant
) -> list[Launch]:
    """The launches of the step of tensors of these shapes; call each with ``grad_scale, clip,
    found_inf``.
    """
    forms: list[tuple[Any, dict, int | None]] = [
        (_block_kernel, dict(BLOCK=BLOCK), max_registers(*variant.codecs))
    ]
    whole = None
    if are_narrow(*variant.codecs):
        rows, loop, stages = LOOP_TILE
        whole = loop * rows * ROW.value
        sizes = dict(BR=rows, LOOP=loop, STAGES=stages)
        registers = loop_registers(variant.codecs, compute_capability(table.device))
        forms.insert(0, (_loop_kernel, sizes, registers))
    lists = flat_tiles([rows * cols for rows, cols in shapes], BLOCK, whole)
    return [
        Launch(
            kernel,
            tiles.shape[0],
            (table, scalars, tiles.to(table.device)),
            dict(VARIANT=variant, **sizes),
            num_warps=4,
            maxnreg=registers,
        )
        for (kernel, sizes, registers), tiles in zip(forms, lists, strict=True)
    ]


def update_scaled(
    table: Tensor, scalars: Tensor, shapes: list[tuple[int, int]], variant: Variant
) -> tuple[list[Launch], Variant]:
    """What comes before the pass of a format whose kind has this variant, and that pass's variant.

    States with scales are updated by launches of their own, and the pass reads the new masters:
    their codecs and a format's conversion in one kernel leave too few registers for either.
    """
    if not has_scales(*variant.codecs) or starts_from_codes(variant.value_codec):
        return [], variant
    rest = variant._replace(
        exp_avg_codec="float32", exp_avg_sq_codec="float32", amsgrad=False, is_updated=True
    )
    return update(table, scalars, shapes, variant._replace(write_dtype=None)), rest


class StepLaunch(adam.StepLaunch):
    """One pass over plain tensors."""

    def __init__(self, kind: Any, tensors: tuple) -> None:
        shapes, _, table, scalars = tensors
        self._launches = update(table, scalars, shapes, kind.variant())
