"""The Adam update on a tile, and the step of plain parameters."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.launch.launch import Launch
from fp4adam.kernels.launch.tensor_table import (
    EXP_AVG,
    EXP_AVG_SCALE,
    EXP_AVG_SQ,
    EXP_AVG_SQ_SCALE,
    GRAD,
    MAX_EXP_AVG_SQ,
    ROWS,
    ROWWISE_DATA,
    SCALARS,
    TRITON_DTYPES,
    WIDTH,
    pointer,
    takes_part,
)
from fp4adam.kernels.tiles.bfloat16 import round_to_bfloat16, to_float32
from fp4adam.kernels.tiles.layout import state_offsets
from fp4adam.kernels.tiles.state import (
    dither_tile,
    exp_avg_sq_dither,
    load_state,
    load_value,
    master_dither,
    master_pointers,
    most_registers,
    split_master,
    state_pointer,
    store_state,
    value_pointers,
)

# Four elements per thread: with more, a BF16 gradient is laid out otherwise than FP32 state.
BLOCK = 512
# Columns of a row of scalars: those of ``fp4adam.optim.adam.Scalars``, then what bounds the update.
LARGEST_UPDATE = tl.constexpr(9)
LARGEST_DECAY = tl.constexpr(10)
SCALARS_WIDTH = tl.constexpr(12)

# Arguments that may be another tensor at every call, with any alignment.
SIGNALS = ("grad_scale_ptr", "clip_ptr", "found_inf_ptr")


@triton.jit
def scalars_row(table, scalars, tensor):
    """Where the scalars of a tensor's update are."""
    return scalars + tl.load(table + tensor.to(tl.int64) * WIDTH + SCALARS) * SCALARS_WIDTH


@triton.jit
def load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr):
    """The scalars of a tensor's update; the gradient's factor includes clip / grad_scale.

    The last one is the origin of the dither, int32. scalars: float32 [n, 12]. grad_scale_ptr,
    clip_ptr: float32 [1].
    """
    row = scalars_row(table, scalars, tensor)
    factor = tl.div_rn(1.0, tl.load(grad_scale_ptr)) * tl.load(row) * tl.load(clip_ptr)
    decay = tl.load(row + 1)
    lerp_weight = tl.load(row + 2)
    beta2 = tl.load(row + 3)
    one_minus_beta2 = tl.load(row + 4)
    eps = tl.load(row + 5)
    step_size = tl.load(row + 6)
    rsqrt_bias_correction2 = tl.load(row + 7)
    dither = (tl.load(row + 8).to(tl.int32) << 16) + tl.load(row + 11).to(tl.int32)
    return (
        factor,
        decay,
        lerp_weight,
        beta2,
        one_minus_beta2,
        eps,
        step_size,
        rsqrt_bias_correction2,
        dither,
    )


@triton.jit
def adam_tile(
    grad,
    value,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq,
    scalars,
    ADAM_W: tl.constexpr,
    AMSGRAD: tl.constexpr,
):
    """One Adam update; every operation is a separate correctly rounded FP32 one.

    grad, value, exp_avg, exp_avg_sq, max_exp_avg_sq: float32 tiles (the last is read with AMSGRAD
    only). scalars: from :func:`load_scalars`. Returns the four updated tiles.
    The order is that of ``fp4adam.optim.adam.adam_``: change both or neither.
    """
    factor, decay, lerp_weight, beta2, one_minus_beta2, eps, step_size, rsqrt_bias2, _ = scalars
    g = grad * factor
    p = value
    if ADAM_W:
        p = p * decay
    else:
        # Infinite values would make NaN of no decay.
        g = tl.where(decay != 0, g + p * decay, g)
    base = tl.where(lerp_weight > 0, exp_avg, g)
    m = base + (g - exp_avg) * lerp_weight
    v = exp_avg_sq * beta2 + (g * one_minus_beta2) * g
    largest = v
    if AMSGRAD:
        # A comparison with NaN is False: a NaN on either side stays.
        largest = tl.where((v > max_exp_avg_sq) | (v != v), v, max_exp_avg_sq)
    denominator = tl.sqrt_rn(largest) * rsqrt_bias2 + eps
    p = p - tl.div_rn(m * step_size, denominator)
    p = tl.where(step_size != 0, p, value)
    return p, m, v, largest


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Round a float32 tile to DTYPE, to nearest even."""
    if DTYPE == tl.bfloat16:
        y = round_to_bfloat16(x)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def round_through(x, DTYPE: tl.constexpr):
    """Round a float32 tile to DTYPE and widen it again."""
    return to_float32(round_to(x, DTYPE))


@triton.jit
def store_value(
    ptr,
    extra_ptr,
    start,
    stride,
    mask,
    x,
    dither,
    CODEC: tl.constexpr,
    STORE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Store a float32 tile of what Adam has updated, as ``load_value`` loads it.

    STORE: False stores nothing. Returns what a parameter is to be rounded from: the tile, or what
    is left of it in a codec with scales.
    """
    offs = state_offsets(stride, BR, BC)
    if CODEC == "remainder":
        if STORE:
            upper, remainder = split_master(x)
            tl.store(extra_ptr + start + offs, remainder, mask)
            tl.store(ptr + start + offs, upper, mask)
    elif CODEC == "plain":
        if STORE:
            tl.store(ptr + start + offs, round_to(x, ptr.dtype.element_ty), mask)
    else:
        x = store_state(ptr, extra_ptr, start, stride, mask, x, dither, CODEC, BR, BC, STORE)
    return x


@triton.jit
def state_pointers(
    table,
    tensor,
    GRAD_DTYPE: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    VALUE_CODEC: tl.constexpr,
    EXP_AVG_CODEC: tl.constexpr,
    EXP_AVG_SQ_CODEC: tl.constexpr,
):
    """Pointers to gradient, value and moments of a tensor; load them before a loop, not in it.

    VALUE_DTYPE: None for a master weight.
    """
    grad_ptr = pointer(table, tensor, GRAD, GRAD_DTYPE)
    if VALUE_DTYPE is None:
        value_ptr, value_extra = master_pointers(table, tensor, VALUE_CODEC)
    else:
        value_ptr, value_extra = value_pointers(table, tensor, VALUE_DTYPE, VALUE_CODEC)
    return (
        grad_ptr,
        value_ptr,
        value_extra,
        state_pointer(table, tensor, EXP_AVG, EXP_AVG_CODEC),
        pointer(table, tensor, EXP_AVG_SCALE, tl.uint8),
        state_pointer(table, tensor, EXP_AVG_SQ, EXP_AVG_SQ_CODEC),
        pointer(table, tensor, EXP_AVG_SQ_SCALE, tl.uint8),
        pointer(table, tensor, MAX_EXP_AVG_SQ, tl.float32),
    )


@triton.jit
def adam_step_tile(
    pointers,
    start,
    stride,
    mask,
    scalars,
    VALUE_CODEC: tl.constexpr,
    EXP_AVG_CODEC: tl.constexpr,
    EXP_AVG_SQ_CODEC: tl.constexpr,
    ADAM_W: tl.constexpr,
    AMSGRAD: tl.constexpr,
    STORE: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Load a tile of a tensor's state, update it, store it if STORE is set; returns the value.

    pointers: from :func:`state_pointers`. start: int64 offset of the tile [BR, BC], whose rows are
    ``stride`` apart: multiples of 32, as BC, if a codec has scales. scalars: from
    :func:`load_scalars`. The value is float32: what is stored if its codec has scales, else
    unrounded.
    """
    grad_ptr, value_ptr, value_extra, exp_avg_ptr, exp_avg_scale = pointers[:5]
    exp_avg_sq_ptr, exp_avg_sq_scale, max_exp_avg_sq_ptr = pointers[5:]
    offs = state_offsets(stride, BR, BC)
    grad_ptr = grad_ptr + start + offs
    max_exp_avg_sq_ptr = max_exp_avg_sq_ptr + start + offs

    value = load_value(value_ptr, value_extra, start, stride, mask, VALUE_CODEC, BR, BC)
    grad = to_float32(tl.load(grad_ptr, mask))
    exp_avg = load_state(exp_avg_ptr, exp_avg_scale, start, stride, mask, EXP_AVG_CODEC, BR, BC)
    exp_avg_sq = load_state(
        exp_avg_sq_ptr, exp_avg_sq_scale, start, stride, mask, EXP_AVG_SQ_CODEC, BR, BC
    )
    max_exp_avg_sq = tl.load(max_exp_avg_sq_ptr, mask) if AMSGRAD else exp_avg_sq

    value, exp_avg, exp_avg_sq, max_exp_avg_sq = adam_tile(
        grad, value, exp_avg, exp_avg_sq, max_exp_avg_sq, scalars, ADAM_W, AMSGRAD
    )

    dither = dither_tile(start, stride, scalars[8], BR, BC)
    value = store_value(
        value_ptr, value_extra, start, stride, mask, value, master_dither(dither), VALUE_CODEC,
        STORE, BR, BC,
    )  # fmt: skip
    if STORE:
        store_state(
            exp_avg_ptr, exp_avg_scale, start, stride, mask, exp_avg, dither, EXP_AVG_CODEC, BR, BC
        )
        store_state(
            exp_avg_sq_ptr, exp_avg_sq_scale, start, stride, mask, exp_avg_sq,
            exp_avg_sq_dither(dither), EXP_AVG_SQ_CODEC, BR, BC,
        )  # fmt: skip
        if AMSGRAD:
            tl.store(max_exp_avg_sq_ptr, max_exp_avg_sq, mask)
    return value


@triton.jit(do_not_specialize_on_alignment=SIGNALS)
def _adam_step_kernel(
    grad_scale_ptr,
    clip_ptr,
    found_inf_ptr,
    table,
    scalars,
    tiles,
    GRAD_DTYPE: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    PARAM_DTYPE: tl.constexpr,
    VALUE_CODEC: tl.constexpr,
    EXP_AVG_CODEC: tl.constexpr,
    EXP_AVG_SQ_CODEC: tl.constexpr,
    ADAM_W: tl.constexpr,
    AMSGRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adam on one block of one tensor, read flat; ``rows`` of the table is its number of elements.

    Grid: (n_tiles,). Tile: BLOCK elements. grad_scale_ptr, clip_ptr, found_inf_ptr: float32 [1].
    table: int64 [n_tensors, 18]. scalars: float32 [n, 12]. tiles: int32 [n_tiles, 2], (tensor,
    block of that tensor).
    PARAM_DTYPE: dtype of the parameter that is rounded from the value, None if it is the value.
    Reads gradient, value, exp_avg, exp_avg_sq, writes the last three and the parameter: with a BF16
    gradient and parameter and an FP32 master 28 bytes per element, FP32 throughout 28.
    """
    tile = tiles + 2 * tl.program_id(0)
    tensor = tl.load(tile)
    if not takes_part(table, tensor, found_inf_ptr):
        return
    start = tl.load(tile + 1).to(tl.int64) * BLOCK
    numel = tl.load(table + tensor.to(tl.int64) * WIDTH + ROWS)
    offs = state_offsets(0, 1, BLOCK)
    constants = load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr)
    pointers = state_pointers(
        table, tensor, GRAD_DTYPE, VALUE_DTYPE, VALUE_CODEC, EXP_AVG_CODEC, EXP_AVG_SQ_CODEC
    )
    # A mask makes every access scalar, so only the last block of a tensor has one.
    if start + BLOCK <= numel:
        value = adam_step_tile(
            pointers, start, 0, None, constants, VALUE_CODEC, EXP_AVG_CODEC, EXP_AVG_SQ_CODEC,
            ADAM_W, AMSGRAD, True, 1, BLOCK,
        )  # fmt: skip
        if PARAM_DTYPE is not None:
            param_ptr = pointer(table, tensor, ROWWISE_DATA, PARAM_DTYPE) + start + offs
            tl.store(param_ptr, round_to(value, PARAM_DTYPE))
    else:
        mask = start + offs < numel
        value = adam_step_tile(
            pointers, start, 0, mask, constants, VALUE_CODEC, EXP_AVG_CODEC, EXP_AVG_SQ_CODEC,
            ADAM_W, AMSGRAD, True, 1, BLOCK,
        )  # fmt: skip
        if PARAM_DTYPE is not None:
            param_ptr = pointer(table, tensor, ROWWISE_DATA, PARAM_DTYPE) + start + offs
            tl.store(param_ptr, round_to(value, PARAM_DTYPE), mask)


def flat_tiles(numels: list[int]) -> Tensor:
    """Blocks of all tensors: int32 [n_tiles, 2], (tensor, block of that tensor)."""
    blocks = torch.tensor([-(-n // BLOCK) for n in numels], dtype=torch.int64, device="cpu")
    tensors = torch.repeat_interleave(blocks)
    first = blocks.cumsum(0) - blocks
    numbers = torch.arange(len(tensors), device="cpu") - first[tensors]
    return torch.stack((tensors, numbers), dim=1).to(torch.int32)


def adam_step(
    table: Tensor,
    scalars: Tensor,
    tiles: Tensor,
    *,
    grad_dtype: torch.dtype,
    value_dtype: torch.dtype,
    write_dtype: torch.dtype | None,
    value_codec: str,
    exp_avg_codec: str,
    exp_avg_sq_codec: str,
    adam_w_mode: bool,
    amsgrad: bool,
) -> Launch:
    """The step of plain tensors, to be called with ``grad_scale, clip, found_inf``.

    ``tiles``: from :func:`flat_tiles`.
    """
    return Launch(
        _adam_step_kernel,
        tiles.shape[0],
        (table, scalars, tiles),
        dict(
            GRAD_DTYPE=TRITON_DTYPES[grad_dtype],
            VALUE_DTYPE=TRITON_DTYPES[value_dtype],
            PARAM_DTYPE=None if write_dtype is None else TRITON_DTYPES[write_dtype],
            VALUE_CODEC=value_codec,
            EXP_AVG_CODEC=exp_avg_codec,
            EXP_AVG_SQ_CODEC=exp_avg_sq_codec,
            ADAM_W=adam_w_mode,
            AMSGRAD=amsgrad,
            BLOCK=BLOCK,
        ),
        num_warps=4,
        maxnreg=most_registers(value_codec, exp_avg_codec, exp_avg_sq_codec),
    )
