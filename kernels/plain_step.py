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
    load_scalars,
    load_scale_words,
    scales_of,
    state_pointers,
    step_tile,
    store_scale_words,
    with_scales,
)
from fp4adam.kernels.launch.launch import Launch, compute_capability
from fp4adam.kernels.launch.tensor_table import field, pointer, takes_part, tile_offsets
from fp4adam.kernels.tiles.codes import round_to
from fp4adam.kernels.tiles.state import are_narrow, max_registers

# Tensors are read as rows of so many elements, four per thread. In a longer row Triton loses the
# hint of ``tile_offsets``.
ROW = tl.constexpr(512)
# Of narrow states: rows and stages of the loop. They take many instructions per byte, so that the
# loads of a turn have to overlap with the work on others.
LOOP, STAGES = 4, 4


@triton.jit
def _store_param(ptr, start, mask, value, VARIANT: tl.constexpr):
    """Store a row of the parameter, if the value is not the parameter itself."""
    if VARIANT.write_dtype is not None:
        param = round_to(value, VARIANT.write_dtype)
        tl.store(ptr + start + tile_offsets(ROW, 1, ROW, 4), param, mask)


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _plain_kernel(
    grad_scale_ptr, clip_ptr, found_inf_ptr, table, scalars, tiles, VARIANT: tl.constexpr,
    LOOP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adam on a run of elements of one tensor, a matrix or with one column, read flat.

    Grid: (n_tiles,). Tile: LOOP rows of ROW elements, whole ones in a prefetching loop if LOOP > 1.
    grad_scale_ptr, clip_ptr, found_inf_ptr: float32 [1]. table: int64 [n_tensors, 20]. scalars:
    float32 [n, 12]. tiles: int32 [n_tiles, 2], (tensor, tile of that tensor).
    Reads gradient, value, exp_avg, exp_avg_sq, writes the last three and the parameter: 28 bytes
    per element, both with a BF16 gradient and parameter and an FP32 master, and in FP32 throughout.
    """
    tile = tiles + 2 * tl.program_id(0)
    tensor = tl.load(tile)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    first = tl.load(tile + 1).to(tl.int64) * (LOOP * ROW)
    numel = field(table, tensor, "rows") * field(table, tensor, "cols")
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    pointers = state_pointers(table, tensor, VARIANT)
    PARAM: tl.constexpr = tl.uint8 if VARIANT.write_dtype is None else VARIANT.write_dtype
    param = pointer(table, tensor, "rowwise_data", PARAM)
    # A mask makes every access scalar, so only the last tile of a tensor has one.
    if LOOP > 1:
        old = load_scale_words(pointers, first, ROW, ROW, VARIANT, LOOP, 1, ROW)
        none = tl.zeros((1, ROW // 32), tl.uint32)
        new = Scales(none, none, none)
        start = first  # counted apart from ``i``, which the loop is ahead with when it prefetches
        for i in tl.range(0, LOOP, num_stages=STAGES):
            value, scales, _ = step_tile(
                pointers, first + i * ROW, start, ROW, None, constants, VARIANT, True, 1, ROW,
                scales_of(old, i),
            )  # fmt: skip
            new = with_scales(new, scales, i)
            _store_param(param, start, None, value, VARIANT)
            start += ROW
        store_scale_words(pointers, first, ROW, ROW, new, VARIANT, LOOP, 1, ROW)
    elif first + ROW <= numel:
        value, _, _ = step_tile(pointers, first, first, ROW, None, constants, VARIANT, True, 1, ROW)
        _store_param(param, first, None, value, VARIANT)
    else:
        mask = first + tile_offsets(ROW, 1, ROW, 4) < numel
        value, _, _ = step_tile(pointers, first, first, ROW, mask, constants, VARIANT, True, 1, ROW)
        _store_param(param, first, mask, value, VARIANT)


def _tiles(begin: Tensor, end: Tensor) -> Tensor:
    """(tensor, tile), int32 [n, 2], of the tiles from ``begin`` to ``end`` of each tensor."""
    counts = end - begin
    tensors = torch.repeat_interleave(counts)
    skipped = counts.cumsum(0) - counts - begin
    numbers = torch.arange(len(tensors), device="cpu") - skipped[tensors]
    return torch.stack((tensors, numbers), dim=1).to(torch.int32)


def update(
    table: Tensor, scalars: Tensor, shapes: list[tuple[int, int]], variant: Variant
) -> list[Launch]:
    """The launches of the step of tensors of these shapes; call each with ``grad_scale, clip,
    found_inf``.
    """
    numels = torch.tensor([rows * cols for rows, cols in shapes], dtype=torch.int64, device="cpu")
    loops = torch.zeros_like(numels)
    if are_narrow(*variant.codecs):
        loops = numels // (LOOP * ROW.value)
    rest = _tiles(loops * LOOP, -(-numels // ROW.value))
    most = max_registers(*variant.codecs)
    # For half the warps of a multiprocessor at once; for other targets some would spill.
    of_loop = 64 if compute_capability(table.device) == 90 else most
    forms = (_tiles(torch.zeros_like(loops), loops), LOOP, of_loop), (rest, 1, most)
    return [
        Launch(
            _plain_kernel,
            len(tiles),
            (table, scalars, tiles.to(table.device)),
            dict(VARIANT=variant, LOOP=loop, STAGES=STAGES),
            maxnreg=registers,
        )
        for tiles, loop, registers in forms
        if len(tiles)
    ]


def updated_before(
    table: Tensor, scalars: Tensor, shapes: list[tuple[int, int]], variant: Variant
) -> tuple[list[Launch], Variant]:
    """The launches that update states, flat, and the variant of a pass that reads new masters."""
    rest = variant._replace(
        exp_avg_codec="float32", exp_avg_sq_codec="float32", amsgrad=False, is_updated=True
    )
    return update(table, scalars, shapes, variant._replace(write_dtype=None)), rest


def StepLaunch(key: Any, tensors: tuple) -> adam.StepLaunch:
    """One pass over plain tensors; arguments as for ``adam.StepLaunch``."""
    shapes, _, table, scalars = tensors
    return adam.StepLaunch(update(table, scalars, shapes, adam.step_variant(key)))
