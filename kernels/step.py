"""The optimizer's step of quantized weights: load, update, encode, store.

One kernel serves all formats, and is the cast of values at fixed addresses as well: then it has
nothing to update. What differs between formats is in ``format.py``; here are only their tiles.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels import adam
from fp4adam.kernels.adam import (
    RATIO_UNIT,
    SIGNALS,
    Scales,
    Variant,
    load_scalars,
    load_scale_words,
    load_scales,
    scales_of,
    state_pointers,
    step_tile,
    store_scale_words,
    with_scales,
)
from fp4adam.kernels.amax_preview import PreviewedLaunch, report_amax
from fp4adam.kernels.factored import load_factors
from fp4adam.kernels.format import Format, Part, amax_of_blocks, encode, format_of, split_off
from fp4adam.kernels.launch.launch import Launch, compute_capability
from fp4adam.kernels.launch.tensor_table import (
    Form,
    field,
    load_tile,
    pointer,
    storage_pointers,
    takes_part,
    tile_offsets,
    tile_start,
)
from fp4adam.kernels.launch.tile_lists import BAND, tile_grid
from fp4adam.kernels.plain_step import updated_before
from fp4adam.kernels.store import (
    edge_mask,
    load_masters,
    row_scale_pointers,
    store_block_scales,
    store_codes,
)
from fp4adam.kernels.tiles.codes import capability, raise_amax, round_to, to_float32
from fp4adam.kernels.tiles.state import (
    OF_MASTERS,
    are_narrow,
    byte_of,
    dither_of,
    has_scales,
    load_state,
    max_registers,
    starts_from_codes,
)


@triton.jit
def insert_tile(tiles, tile, i):
    """The tiles [n, R, C] with tile ``i`` replaced by ``tile`` [R, C]."""
    number = tl.arange(0, tiles.shape[0])[:, None, None]
    # By a reshape, which every layout of the tile survives.
    return tl.where(number == i, tl.reshape(tile, (1, tile.shape[0], tile.shape[1])), tiles)


@triton.jit
def _joined(tiles, DOWN: tl.constexpr):
    """Tiles [n, R, C], one below the other (DOWN) or side by side, as one."""
    n: tl.constexpr = tiles.shape[0]
    R: tl.constexpr = tiles.shape[1]
    C: tl.constexpr = tiles.shape[2]
    if DOWN:
        tile = tl.reshape(tiles, (n * R, C))
    else:
        tile = tl.reshape(tl.permute(tiles, (1, 0, 2)), (R, n * C))
    return tile


@triton.jit
def _encode_part(
    kept, value, i, row, col, row_amax, column_amax, given, VARIANT: tl.constexpr, F: tl.constexpr,
    MASKED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The kept parts with part ``i``, at (row, col), inserted: the codes and scales of ``value``.

    value: float32 [BR, BC], or the bits of all parts, int32 [n, BR, BC].
    Stores its remainders, float32 scales, and codes in a mask, none of which are kept.
    """
    rows, cols, amax, epsilon, storage, remainders, constants = given
    SPLITS: tl.constexpr = VARIANT.value_codec == "int8"
    if value.dtype == tl.int32:
        of_part = tl.arange(0, value.shape[0])[:, None, None] == i
        value = tl.sum(tl.where(of_part, value, 0), 0).to(tl.float32, bitcast=True)
    x = to_float32(round_to(value, VARIANT.write_dtype))
    part, coded = encode(x, row_amax, column_amax, amax, epsilon, F, not MASKED)
    mask = edge_mask(row, col, rows, cols, MASKED, BR, BC)
    if SPLITS:
        start = tile_start(row, col, cols)
        dither = dither_of(start, cols, constants.dither, OF_MASTERS, BR, BC, VARIANT.lanes)
        remainder = split_off(value, coded, part.row_scale, amax, epsilon, dither, F)
        tl.store(remainders + start + tile_offsets(cols, BR, BC, VARIANT.lanes), remainder, mask)
    codes, row_scale, columns, column_scale = kept
    TWICE: tl.constexpr = F.columnwise and not F.square
    if F.scale == "float32":
        if not F.square or i == 0:
            store_block_scales(part, row, col, rows, cols, storage, F, BR, BC)
    elif F.scale != "":
        row_scale = insert_tile(row_scale, part.row_scale, i)
        if TWICE:
            column_scale = insert_tile(column_scale, part.column_scale, i)
    if MASKED:
        store_codes(part, row, col, rows, cols, mask, storage, F, BR, BC)
    else:
        codes = insert_tile(codes, part.rows, i)
        if TWICE:
            columns = insert_tile(columns, part.columns, i)
    return Part(codes, row_scale, columns, column_scale)


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def step_kernel(
    grad_scale_ptr, clip_ptr, found_inf_ptr, table, scalars, tiles, tile_amaxes, tile_ratios, slots,
    amaxes, next_amaxes, exceeding, stored_amaxes, epsilon, VARIANT: tl.constexpr,
    F: tl.constexpr, MASKED: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adam and re-quantization of one tile of one tensor; moves each byte once.

    Grid: (n_tiles,). Tile: [TR, TC], in parts of [BR, BC], all of them in one row or one column.
    table: int64 [n_tensors, 20]. scalars: float32 [n, 12]. tiles: int32 [n_tiles, 4]. MASKED: the
    tile may reach past an edge. epsilon: the lower bound of amaxes of float32 scales.

    Of formats with a preview: slots, int32 [n_tensors], the amax slot of each tensor; several may
    share one. amaxes, float32 [n_slots], of the updated weights. next_amaxes, float32 [n_slots],
    for the next step, set to zero. tile_amaxes, float32 [n_tiles], written: an upper bound of each
    tile's magnitudes. exceeding, float32 [n_slots], raised to the true amax of a tensor if that
    exceeds its entry in amaxes. tile_ratios: as in ``amax_preview``, written. stored_amaxes,
    float32 [n_tensors], of the codes before the step, for masters with remainders. Else None.

    Reads gradient (2 bytes if BF16) and three FP32 tensors, writes these three, codes and scales:
    27 bytes per element in both directions with codes of 4 bits, 28 with 8.
    """
    PREVIEWS: tl.constexpr = F.tensor_amax == "preview"
    REPORTS: tl.constexpr = PREVIEWS or F.tensor_amax == "history"
    # The scale of a block that is larger than a part is known after the last part.
    HOLDS: tl.constexpr = F.scale == "float32" and BR < F.block
    FROM_CODES: tl.constexpr = starts_from_codes(VARIANT.value_codec)
    SPLITS: tl.constexpr = VARIANT.value_codec == "int8"
    BOUNDS: tl.constexpr = PREVIEWS and SPLITS and F.scale != ""  # where blocks' amaxes will do
    FACTORED: tl.constexpr = VARIANT.exp_avg_sq_codec == "factored"
    LANES: tl.constexpr = VARIANT.lanes
    DOWN: tl.constexpr = TC == BC
    PARTS: tl.constexpr = (TR // BR) * (TC // BC)
    tl.static_assert(TR == BR or TC == BC)

    tensor, first_row, first_col = load_tile(tiles, min(TR, TC))
    is_first = (first_row == 0) & (first_col == 0)
    if PREVIEWS:
        if is_first:
            # Even without a gradient: the next preview raises every slot from zero.
            tl.store(next_amaxes + tl.load(slots + tensor), 0.0)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    MULTIPLE: tl.constexpr = 1 if MASKED else 16
    rows = field(table, tensor, "rows", tl.int32, MULTIPLE)
    cols = field(table, tensor, "cols", tl.int32, MULTIPLE)
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    states = state_pointers(table, tensor, VARIANT)
    SCALES: tl.constexpr = tl.float32 if F.scale == "float32" else tl.uint8
    storage = storage_pointers(table, tensor, tl.uint32, SCALES)
    amax, old_amax = 0.0, 0.0
    if PREVIEWS:
        # The preview has found it already, so no program has to wait for another.
        amax = tl.load(amaxes + tl.load(slots + tensor))
        if is_first:
            tl.store(pointer(table, tensor, "amax", tl.float32), amax)
    elif F.tensor_amax != "":
        amax = tl.load(pointer(table, tensor, "amax", tl.float32))
    if FROM_CODES and REPORTS:
        old_amax = tl.load(stored_amaxes + tensor)

    # The update takes registers for one part only. Codes and scales of all parts wait in words, so
    # that whole rows of the tile, transposed ones too, are written as long segments.
    # What the format does not have stays zero, and is removed by the compiler.
    DOWN_BLOCKS: tl.constexpr = max(BR // F.block, 1)
    ROWS: tl.constexpr = DOWN_BLOCKS if F.square else BR
    words = tl.zeros((PARTS, BR, BC * F.bits // 32), tl.uint32)
    row_scale = tl.zeros((PARTS, ROWS, max(BC // F.block, 1)), tl.uint8)
    kept = Part(words, row_scale, words, tl.zeros((PARTS, DOWN_BLOCKS, BC), tl.uint8))
    if HOLDS:
        held = tl.zeros((PARTS, BR, BC), tl.int32)
    # Reduced over each thread's neighbours, maxima take a fraction of the registers.
    ratio = tl.zeros((BR, BC // LANES), tl.float32)
    largest = tl.zeros((ROWS, BC // F.block), tl.float32) if BOUNDS else ratio
    VALUE: tl.constexpr = VARIANT.value_codec
    # Rows and columns from one part to the next.
    DR: tl.constexpr = BR if DOWN else 0
    DC: tl.constexpr = 0 if DOWN else BC
    first, apart = tile_start(first_row, first_col, cols), DR * cols + DC
    # Scales of all parts wait in words, a byte of a word each.
    IN_WORDS: tl.constexpr = PARTS <= 4 and not MASKED
    none = tl.zeros((BR, (BC + 31) // 32), tl.uint32)
    new_scales = Scales(none, none, none)
    if IN_WORDS:
        old_scales = load_scale_words(states, first, apart, cols, VARIANT, PARTS, BR, BC)
        scale_words = 0
        if FROM_CODES and F.scale != "" and F.scale != "float32":
            for i in tl.static_range(PARTS):
                row, col = first_row + i * DR, first_col + i * DC
                ptr = row_scale_pointers(storage.rowwise_scale, row, col, rows, cols, F, BR, BC)
                scale_words |= tl.load(ptr).to(tl.uint32) << (8 * i)
    given = rows, cols, amax, epsilon, storage, states.value, constants
    number = 0  # counted apart from ``i``, which the loop is ahead with when it prefetches
    # Unrolled, held parts are inserted by no instructions; masters of codes make that too long.
    UNROLL: tl.constexpr = PARTS if HOLDS and not FROM_CODES and not MASKED else 1
    for i in tl.range(0, PARTS, num_stages=STAGES, loop_unroll_factor=UNROLL):
        ahead = tile_start(first_row + i * DR, first_col + i * DC, cols)
        row, col = first_row + number * DR, first_col + number * DC
        start = tile_start(row, col, cols)
        mask = edge_mask(row, col, rows, cols, MASKED, BR, BC)
        master = None
        if FROM_CODES:
            remainders = states.value if SPLITS else None
            scale = None
            if IN_WORDS and F.scale != "" and F.scale != "float32":
                scale = byte_of(scale_words, i)
            master = load_masters(
                storage, remainders, ahead, row, col, rows, cols, mask, old_amax, epsilon, F, BR,
                BC, LANES, scale,
            )  # fmt: skip
        scales = scales_of(old_scales, i) if IN_WORDS else None
        if VARIANT.is_updated:
            if not IN_WORDS:
                scales = load_scales(states, ahead, cols, mask, VARIANT, BR, BC)
            value = load_state(
                states.value, states.value_extra, ahead, cols, mask, scales.value, VALUE, BR, BC
            )
        else:
            factors = None
            if FACTORED:
                at, beside = first_row + i * DR, first_col + i * DC
                factors = load_factors(states, at, beside, mask, rows, cols, BR, BC)
            value, scales, new_ratio = step_tile(
                states, ahead, start, cols, mask, constants, VARIANT, True, BR, BC, scales, master,
                factors,
            )  # fmt: skip
            if IN_WORDS:
                new_scales = with_scales(new_scales, scales, number)
            if PREVIEWS and SPLITS:
                new_ratio = tl.max(tl.reshape(new_ratio, (BR, BC // LANES, LANES)), 2)
                if FACTORED:
                    new_ratio *= factors[2][:, None]
                ratio = tl.maximum(ratio, new_ratio)
        if MASKED:
            value = tl.where(mask, value, 0.0)
        if HOLDS:
            held = insert_tile(held, value.to(tl.int32, bitcast=True), i)
        else:
            known = None
            FORM: tl.constexpr = F.form
            if REPORTS:
                x = to_float32(round_to(value, VARIANT.write_dtype))
            if BOUNDS:
                known = amax_of_blocks(x, F, FORM)
                largest = tl.maximum(largest, tl.where(known == known, known, float("inf")))
            elif REPORTS:
                if capability() == 0:
                    x = tl.where(x == x, x, 0.0)  # NumPy warns of NaN alone
                # NaN is no larger than any number for ``tl.maximum``.
                x = tl.max(tl.reshape(tl.abs(x), (BR, BC // LANES, LANES)), 2)
                largest = tl.maximum(largest, x)
            kept = _encode_part(
                kept, value, i, row, col, known, None, given, VARIANT, F, MASKED, BR, BC
            )
        number += 1
    if IN_WORDS and not VARIANT.is_updated:
        store_scale_words(states, first, apart, cols, new_scales, VARIANT, PARTS, BR, BC)
    # Pointers that are needed from here on are loaded again, to take no registers in the loop.
    storage = storage_pointers(table, tensor, tl.uint32, SCALES)
    if FROM_CODES:
        tl.debug_barrier()  # all codes and scales of the tile are read before any is written
    if HOLDS:
        block = tl.abs(to_float32(round_to(held.to(tl.float32, bitcast=True), VARIANT.write_dtype)))
        column_amax = tl.max(tl.max(block, 0), 0)[None, :]
        column_amax = tl.where(column_amax == column_amax, column_amax, 0.0)
        row_amax = tl.max(column_amax, 1)[:, None] if F.square else None
        given = rows, cols, amax, epsilon, storage, states.value, constants
        for i in (tl.range if MASKED else tl.static_range)(PARTS):
            kept = _encode_part(
                kept, held, i, first_row + i * DR, first_col + i * DC, row_amax, column_amax, given,
                VARIANT, F, MASKED, BR, BC,
            )  # fmt: skip
    if not MASKED:
        part = Part(
            _joined(kept.rows, DOWN),
            _joined(kept.row_scale, DOWN),
            _joined(kept.columns, DOWN),
            _joined(kept.column_scale, DOWN),
        )
        store_codes(part, first_row, first_col, rows, cols, None, storage, F, TR, TC)
        if F.scale != "float32":
            store_block_scales(part, first_row, first_col, rows, cols, storage, F, TR, TC)
    if REPORTS:
        tile_amax = tl.max(tl.max(largest, 1), 0)
    if F.tensor_amax == "history":
        raise_amax(pointer(table, tensor, "amax_history", tl.float32), tile_amax)
    if PREVIEWS:
        most = tl.max(tl.max(ratio, 1), 0) if SPLITS else None
        if FACTORED:
            # The next means are at least beta2 times these.
            most = tl.div_rn(most, constants.beta2 * RATIO_UNIT)
        slot = slots + tensor
        report_amax(
            tile_amax, amax, most, slot, tile_amaxes, exceeding, tile_ratios, VARIANT.write_dtype
        )


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _delayed_amax_kernel(
    grad_scale_ptr, clip_ptr, found_inf_ptr, table, stored_amaxes, factor, IS_MAX: tl.constexpr,
    LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take the amax of each tensor from its history, and make room there for the next one.

    Grid: (n_tensors,). table: int64 [n_tensors, 20]. factor: 2**margin. LENGTH: entries of a
    history; BLOCK: the power of two above. The entries move down by one, the first becomes the
    last; entry 0 is set to zero, for the pass to raise. stored_amaxes: float32 [n_tensors], set to
    the amaxes of the stored codes; or None.
    """
    tensor = tl.program_id(0)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    history = pointer(table, tensor, "amax_history", tl.float32)
    index = tl.arange(0, BLOCK)
    inside = index < LENGTH
    entries = tl.load(history + index, inside, 0.0)
    known = tl.max(entries, 0) if IS_MAX else tl.load(history)
    known = known * factor
    amax_ptr = pointer(table, tensor, "amax", tl.float32)
    if stored_amaxes is not None:
        tl.store(stored_amaxes + tensor, tl.load(amax_ptr))
    if (known > 0) & (known < float("inf")):
        tl.store(amax_ptr, known)
    # A barrier, because threads write entries that others read.
    tl.debug_barrier()
    target = tl.where(index == 0, LENGTH - 1, index - 1)
    tl.store(history + target, tl.where(target == 0, 0.0, entries), inside)


def lanes_of(F: Format, variant: Variant) -> int:
    """Neighbouring elements per thread: 16 bytes of FP32, or more of states in a byte each."""
    small = starts_from_codes(variant.value_codec) and variant.exp_avg_codec == "e4m3"
    small = small and variant.exp_avg_sq_codec in ("ue4m4", "factored")
    if not small or variant.amsgrad or variant.grad_dtype == tl.float32:
        return 4
    # MXFP8, and NVFP4 in blocks of one row, took longer with 16 than with 8 on an H200.
    return 8 if (F.scale, F.code) == ("e8m0", "e4m3") or F.scale == "e4m3" and not F.square else 16


def forms(F: Format, variant: Variant, sm: int) -> tuple[Form, Form]:
    """The form for most of a matrix, and that for its edges.

    The loop over parts prefetches. Edges are covered by small tiles with few warps, so that many
    of them wait for memory at once; those of Float8Block are masked. Tiles have the shapes that the
    preview's variant gives them, in a pass after the update, too. ``sm``: The compute capability
    without its point.
    """
    codecs = variant.codecs
    scaled = has_scales(*codecs) or variant.is_updated
    encodes = are_narrow(*codecs) and not has_scales(*codecs)
    has_lanes = variant.lanes > 4
    most = max_registers(*codecs)
    small = Form(16, 32, 16, 32, 2, 1, most) if scaled else Form(16, 16, 16, 16, 1, 1, most)
    if F.scale == "e4m3":
        is_roomy = sm == 90 or not has_lanes
        warps, stages = 4, 3
        if F.square:
            # With two warps, more elements per thread repeat less of what a block has in common.
            warps = 2 if is_roomy and (has_lanes or variant.is_updated) else 4
            stages = 3 if has_lanes else 4
        elif has_lanes:
            warps = 2 if sm == 90 else 4
        elif encodes:
            # Two stages take 128 registers instead of 168, for which ptxas spills on sm_100.
            stages = 2
        registers = 255 if codecs[0] == "int8" else None
        if F.square and sm == 90 and (has_lanes or variant.is_updated):
            # Six programs fit on each multiprocessor of an H200, or twelve after an update.
            registers = 168 if has_lanes else 80
        if encodes and registers is None:
            # With up to 128 registers, four programs fit on each multiprocessor of an H200.
            registers = 128 if F.square and sm == 90 else 168
        elif registers is None and sm != 90:
            registers = 168  # for sm_120 ptxas aims for 128 and spills
        return Form(64, 64, 16, 64, warps, stages, registers), small
    if F.scale == "e8m0":
        edge = Form(32, 32, 32, 32, 4, 1, 128)
        if F.code == "e2m1":
            return Form(32, 64, 32, 64, 4, 1, None), edge._replace(registers=None)
        part = 32 if encodes or (starts_from_codes(codecs[0]) and not has_lanes) else 64
        # ptxas aims for 168, and spills with masters; without them for sm_120 if it has no limit.
        registers = 168 if codecs[0] == "codes" else most
        return Form(32, 256, 32, part, 4, 3, registers if encodes else None), edge
    if F.scale == "float32":
        # Blocks that are held take 64 registers of a thread with 8 warps.
        masked = Form(128, 128, 8, 128, 8, 1, 255)
        if variant.is_updated:
            if not F.square or sm != 90:
                return Form(128, 128, 128, 128, 8, 1, 255), masked
            # Two programs fit on a multiprocessor: one loads while the other stores.
            whole = Form(128, 128, 128, 128, 16, 1, 64)
            return whole, masked if has_scales(codecs[0]) else whole._replace(registers=128)
        if are_narrow(*codecs):
            # For other targets ptxas spills; without masters the dither of codes takes registers.
            part = 32 if codecs[0] != "codes" and (sm == 90 or not has_lanes) else 16
            return Form(128, 128, part, 128, 8, 1, 255), masked
        return Form(128, 128, 32, 128, 16, 1, 128), masked
    return Form(64, 64, 16, 64, 2 if has_lanes else 4, 3, most), small


def is_ragged(F: Format, rows: int, cols: int) -> bool:
    """Whether vector accesses to the rows or columns of a matrix would be unaligned."""
    return F.scale == "float32" and bool(rows % 16 or cols % 16)


def tiles_of(
    shapes: list[tuple[int, int]], F: Format, large: Form, edge: Form
) -> tuple[Tensor, list[int]]:
    """The tiles of matrices: large ones, those at edges, and those of ragged matrices.

    Returns:
        int32 [n_tiles, 4], (tensor, first row, first column, rows << 16 | columns), and where each
        kind begins and the last one ends.
    """
    whole, rest, ragged = [], [], []
    # Short pieces of transposed rows meet their neighbours in L2.
    band = BAND if F.scale in ("e4m3", "") else None
    for i, (rows, cols) in enumerate(shapes):
        bottom, right = rows - rows % large.rows, cols - cols % large.cols
        if is_ragged(F, rows, cols):
            ragged.append(tile_grid((i, 0, rows, 0, cols), edge[:2]))
            continue
        whole.append(tile_grid((i, 0, bottom, 0, right), large[:2], band))
        rest.append(tile_grid((i, 0, bottom, right, cols), edge[:2]))
        rest.append(tile_grid((i, bottom, rows, 0, cols), edge[:2]))
    counts = [0]
    for lists, form in ((whole, large), (rest, edge), (ragged, edge)):
        for tiles in lists:
            tiles[:, 3] = form.rows << 16 | form.cols
        counts.append(counts[-1] + sum(map(len, lists)))
    return torch.cat(whole + rest + ragged), counts


def StepLaunch(key: Any, tensors: tuple) -> adam.StepLaunch:
    """The step of quantized tensors; arguments as for ``adam.StepLaunch``."""
    shapes, slots, table, scalars = tensors
    layout, variant = key.quantizer.layout, adam.step_variant(key)
    amax = {"current": "preview", "delayed": "history", None: ""}[layout.tensor_scale]
    F = format_of(layout, key.write_dtype, swizzled=layout.has_gemm_scales, tensor_amax=amax)
    epsilon = layout.scale_rule.amax_epsilon
    variant = variant._replace(lanes=lanes_of(F, variant))
    tiles, ends = tiles_of(shapes, F, *forms(F, variant, 90))
    tiles = tiles.to(table.device)
    updates, rest = [], variant
    if has_scales(*variant.codecs) and not starts_from_codes(variant.value_codec):
        # By launches of their own, and the pass reads the new masters: codecs with scales and a
        # format's conversion in one kernel leave too few registers for either.
        updates, rest = updated_before(table, scalars, shapes, variant)
    sm = compute_capability(table.device)
    kinds = [(rest, form) for form in forms(F, rest, sm)]
    kinds.append(kinds[1])
    ragged = [each if is_ragged(F, *each) else (0, 0) for each in shapes]
    if ends[3] > ends[2] and not (rest.is_updated or starts_from_codes(rest.value_codec)):
        # States are contiguous, whatever the rows of a matrix are.
        more, updated = updated_before(table, scalars, ragged, variant)
        updates, kinds[2] = [*updates, *more], (updated, forms(F, updated, sm)[1])

    def launches(per_tensor: tuple = (None,) * 5, per_tile: tuple = (None,) * 2) -> list[Launch]:
        """Those over large tiles, and those over the tiles at edges; given what previews need."""
        made = [*updates]
        for i, ((used, form), first) in enumerate(zip(kinds, ends[:-1], strict=True)):
            last = ends[i + 1]
            of_tiles = (each if each is None else each[first:last] for each in (tiles, *per_tile))
            given = table, scalars, *of_tiles, *per_tensor, epsilon
            constexprs = dict(
                VARIANT=used,
                F=F,
                MASKED=i > 0 and F.scale == "float32",
                TR=form.rows,
                TC=form.cols,
                BR=form.part_rows,
                BC=form.part_cols,
                STAGES=form.num_stages,
            )
            options = dict(num_warps=form.num_warps, maxnreg=form.registers)
            made.append(Launch(step_kernel, last - first, given, constexprs, **options))
        return made

    if amax == "preview":
        known = table, scalars, tiles, torch.tensor(slots, dtype=torch.int32, device=table.device)
        return PreviewedLaunch(known, variant, F, epsilon, bool(key.groups), launches)
    if amax == "history":
        stored_amaxes = torch.zeros(len(shapes), dtype=torch.float32, device=table.device)
        length = key.quantizer.amax_history_len
        shift = Launch(
            _delayed_amax_kernel,
            len(shapes),
            (table, stored_amaxes, 2.0**key.quantizer.margin),
            dict(
                IS_MAX=key.quantizer.amax_compute_algo == "max",
                LENGTH=length,
                BLOCK=triton.next_power_of_2(length),
            ),
        )
        return adam.StepLaunch([shift, *launches((None, None, None, None, stored_amaxes))])
    return adam.StepLaunch(launches())
