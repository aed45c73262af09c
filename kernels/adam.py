"""The Adam update on a tile of a parameter and its state; the formats' steps build on it."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.launch.launch import Launch
from fp4adam.kernels.launch.schema import SCALAR_COLUMNS
from fp4adam.kernels.launch.schema import SCALARS_WIDTH as N_SCALARS
from fp4adam.kernels.launch.tensor_table import (
    EXP_AVG,
    EXP_AVG_SCALE,
    EXP_AVG_SQ,
    EXP_AVG_SQ_SCALE,
    GRAD,
    MAX_EXP_AVG_SQ,
    SCALARS,
    TRITON_DTYPES,
    WIDTH,
    pointer,
)
from fp4adam.kernels.tiles.bfloat16 import round_to, to_float32
from fp4adam.kernels.tiles.layout import state_offsets
from fp4adam.kernels.tiles.state import (
    OF_EXP_AVG,
    OF_EXP_AVG_SQ,
    OF_MASTERS,
    element_hash,
    load_scale,
    load_state,
    load_value,
    master_pointers,
    round_to_e4m3,
    split_master,
    starts_from_codes,
    state_pointer,
    store_scale,
    store_state,
    value_pointers,
)
from fp4adam.kernels.tiles.update import update_quotient

# Columns of a row of scalars.
SCALARS_WIDTH = tl.constexpr(N_SCALARS)
DITHER_UPPER = tl.constexpr(SCALAR_COLUMNS.index("dither_upper"))
LARGEST_UPDATE = tl.constexpr(SCALAR_COLUMNS.index("largest_update"))
LARGEST_DECAY = tl.constexpr(SCALAR_COLUMNS.index("largest_decay"))
DITHER_LOWER = tl.constexpr(SCALAR_COLUMNS.index("dither_lower"))

# Arguments that may be a different tensor, of any alignment, at every call.
SIGNALS = ("grad_scale_ptr", "clip_ptr", "found_inf_ptr")


class Variant(NamedTuple):
    """The compile-time options of a step, as one argument of its kernels and tile functions.

    Attributes:
        grad_dtype: Dtype of the gradients.
        value_dtype: Dtype of the parameter if Adam updates it directly; None for a master weight.
        write_dtype: Dtype that the updated value is rounded to on its way to the parameter; None if
            the value is the parameter.
        value_codec: Codec of the value; see :func:`load_value`.
        exp_avg_codec: Codec of the first moment.
        exp_avg_sq_codec: Codec of the second moment.
        adam_w: Whether decay shrinks the value (AdamW) or is added to the gradient (L2).
        amsgrad: Whether to divide by the largest second moment so far.
        is_updated: Whether an earlier launch has updated the state, so that the new value is only
            read. The moments' codecs are "float32" then, and stand for nothing.
    """

    grad_dtype: tl.dtype
    value_dtype: tl.dtype | None
    write_dtype: tl.dtype | None
    value_codec: str
    exp_avg_codec: str
    exp_avg_sq_codec: str
    adam_w: bool
    amsgrad: bool
    is_updated: bool = False

    @property
    def codecs(self) -> tuple[str, str, str]:
        """The codecs of the value and the two moments."""
        return self.value_codec, self.exp_avg_codec, self.exp_avg_sq_codec


def lanes_of_states(variant: Variant) -> int:
    """Neighbouring elements per thread in the tiles of a step.

    Where states take a byte each and gradients two, eight; else four, 16 bytes of FP32.
    """
    # By position: Triton 3.6 hands a constexpr function a plain tuple.
    grad_dtype, _, _, *codecs, _, amsgrad, _ = variant
    value_codec, *moments = codecs
    small = starts_from_codes(value_codec) and tuple(moments) == ("e4m3", "ue4m4")
    small = small and grad_dtype != tl.float32
    return 8 if small and not amsgrad else 4


# For kernels alone.
state_lanes = triton.constexpr_function(lanes_of_states)


def step_variant(
    *,
    grad_dtype: torch.dtype,
    value_dtype: torch.dtype | None,
    write_dtype: torch.dtype | None,
    **others: Any,
) -> Variant:
    """A :class:`Variant` from torch dtypes."""
    dtypes = (None if d is None else TRITON_DTYPES[d] for d in (value_dtype, write_dtype))
    return Variant(TRITON_DTYPES[grad_dtype], *dtypes, **others)


class Scalars(NamedTuple):
    """The scalars of an update, float32; ``dither`` is the dither origin, int32."""

    factor: Any
    decay: Any
    lerp_weight: Any
    beta2: Any
    one_minus_beta2: Any
    eps: Any
    step_size: Any
    rsqrt_bias_correction2: Any
    dither: Any


class Pointers(NamedTuple):
    """Pointers to the gradient and the state of a tensor."""

    grad: Any
    value: Any
    value_extra: Any
    exp_avg: Any
    exp_avg_scale: Any
    exp_avg_sq: Any
    exp_avg_sq_scale: Any
    max_exp_avg_sq: Any


class Scales(NamedTuple):
    """Scales of a tile of the state, uint8, or of several tiles, in words; zeros where none are."""

    value: Any
    exp_avg: Any
    exp_avg_sq: Any


@triton.jit
def scalars_row(table, scalars, tensor):
    """Pointer to the row of scalars of a tensor."""
    return scalars + tl.load(table + tensor.to(tl.int64) * WIDTH + SCALARS) * SCALARS_WIDTH


@triton.jit
def load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr):
    """The :class:`Scalars` of a tensor's update; ``factor`` includes clip / grad_scale.

    scalars: float32 [n, 12], with the columns of ``launch.schema``. grad_scale_ptr, clip_ptr:
    float32 [1].
    """
    row = scalars_row(table, scalars, tensor)
    factor = tl.div_rn(1.0, tl.load(grad_scale_ptr)) * tl.load(row) * tl.load(clip_ptr)
    upper, lower = tl.load(row + DITHER_UPPER), tl.load(row + DITHER_LOWER)
    return Scalars(
        factor,
        tl.load(row + 1),
        tl.load(row + 2),
        tl.load(row + 3),
        tl.load(row + 4),
        tl.load(row + 5),
        tl.load(row + 6),
        tl.load(row + 7),
        (upper.to(tl.int32) << 16) + lower.to(tl.int32),
    )


@triton.jit
def adam_tile(grad, value, exp_avg, exp_avg_sq, max_exp_avg_sq, scalars, VARIANT: tl.constexpr):
    """One Adam update; each operation is a separate, correctly rounded FP32 operation.

    grad, value, exp_avg, exp_avg_sq, max_exp_avg_sq: float32 tiles (the last is read only with
    AMSGrad). scalars: from :func:`load_scalars`. Returns the updated value, first moment, second
    moment and largest second moment.
    ``fp4adam.optim.adam.adam_`` has the same operations in the same order, so that the bits are the
    same: change both or neither.
    """
    g = grad * scalars.factor
    p = value
    if VARIANT.adam_w:
        p = p * scalars.decay
    else:
        # Infinite values times zero decay would be NaN.
        g = tl.where(scalars.decay != 0, g + p * scalars.decay, g)
    # Interpolate from the nearer end, as torch.lerp does: exact for beta1 = 0.
    base = tl.where(scalars.lerp_weight > 0, exp_avg, g)
    m = base + (g - exp_avg) * scalars.lerp_weight
    v = exp_avg_sq * scalars.beta2 + (g * scalars.one_minus_beta2) * g
    largest = v
    if VARIANT.amsgrad:
        # Keeps a NaN on either side, since comparisons with NaN are False.
        largest = tl.where((v > max_exp_avg_sq) | (v != v), v, max_exp_avg_sq)
    p = p - update_quotient(
        m * scalars.step_size, largest, scalars.rsqrt_bias_correction2, scalars.eps
    )
    # A zero step leaves the value alone: no decay, and the sign of a zero stays.
    p = tl.where(scalars.step_size != 0, p, value)
    return p, m, v, largest


@triton.jit
def store_value(
    ptr, extra_ptr, start, stride, mask, x, dither, CODEC: tl.constexpr, STORE: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store a float32 tile of updated values in the form that ``load_value`` reads.

    STORE: False stores nothing. Returns the tile that the parameter is rounded from, which is ``x``
    or the decoded codes if the codec has scales, and the scales.
    """
    offs = state_offsets(stride, BR, BC)
    scale = tl.zeros((BR, (BC + 31) // 32), tl.uint8)
    if CODEC == "remainder":
        if STORE:
            upper, remainder = split_master(x)
            tl.store(extra_ptr + start + offs, remainder, mask)
            tl.store(ptr + start + offs, upper, mask)
    elif CODEC == "plain":
        if STORE:
            tl.store(ptr + start + offs, round_to(x, ptr.dtype.element_ty), mask)
    else:
        x, scale = store_state(ptr, start, stride, mask, x, dither, CODEC, BR, BC, STORE)
    return x, scale


@triton.jit
def state_pointers(table, tensor, VARIANT: tl.constexpr):
    """The :class:`Pointers` of a tensor; load them before a loop, not in it."""
    # As constexprs, because Triton 3.6 accepts no plain strings as arguments of tile functions.
    VALUE: tl.constexpr = VARIANT.value_codec
    FIRST: tl.constexpr = VARIANT.exp_avg_codec
    SECOND: tl.constexpr = VARIANT.exp_avg_sq_codec
    if VARIANT.value_dtype is None:
        value, extra = master_pointers(table, tensor, VALUE)
    else:
        value, extra = value_pointers(table, tensor, VARIANT.value_dtype, VALUE)
    return Pointers(
        pointer(table, tensor, GRAD, VARIANT.grad_dtype),
        value,
        extra,
        state_pointer(table, tensor, EXP_AVG, FIRST),
        pointer(table, tensor, EXP_AVG_SCALE, tl.uint8),
        state_pointer(table, tensor, EXP_AVG_SQ, SECOND),
        pointer(table, tensor, EXP_AVG_SQ_SCALE, tl.uint8),
        pointer(table, tensor, MAX_EXP_AVG_SQ, tl.float32),
    )


@triton.jit
def update_tile(
    pointers, ahead, start, stride, mask, scales, scalars, VARIANT: tl.constexpr,
    STORE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, master=None,
):  # fmt: skip
    """Load a tile of a tensor's state, update it, and store it if STORE, scales excepted.

    pointers: from :func:`state_pointers`. start: int64 offset of the tile [BR, BC], whose rows are
    ``stride`` apart. ahead: the same offset, for loads; where a pipelined loop computes both from
    one number, the addresses wait in registers from the load to the store. scales: of the tile.
    scalars: from :func:`load_scalars`. master: the value, float32, if the caller has decoded it.
    start, stride and BC must be multiples of 32 if a codec has scales.
    Returns the new value, float32: decoded if its codec has scales, else unrounded; the new scales;
    and the new moments, float32, before they are rounded.
    """
    ptr = pointers
    VALUE: tl.constexpr = VARIANT.value_codec
    FIRST: tl.constexpr = VARIANT.exp_avg_codec
    SECOND: tl.constexpr = VARIANT.exp_avg_sq_codec
    LANES: tl.constexpr = state_lanes(VARIANT)
    offs = state_offsets(stride, BR, BC, LANES)

    value = master
    if master is None:
        value = load_value(
            ptr.value, ptr.value_extra, ahead, stride, mask, scales.value, VALUE, BR, BC
        )
    grad = to_float32(tl.load(ptr.grad + ahead + offs, mask))
    exp_avg = load_state(ptr.exp_avg, ahead, stride, mask, scales.exp_avg, FIRST, BR, BC, LANES)
    exp_avg_sq = load_state(
        ptr.exp_avg_sq, ahead, stride, mask, scales.exp_avg_sq, SECOND, BR, BC, LANES
    )
    largest = tl.load(ptr.max_exp_avg_sq + ahead + offs, mask) if VARIANT.amsgrad else exp_avg_sq

    value, exp_avg, exp_avg_sq, largest = adam_tile(
        grad, value, exp_avg, exp_avg_sq, largest, scalars, VARIANT
    )

    # One hash serves all states of an element. If no codec uses it, the compiler removes it.
    dither = element_hash(start, stride, scalars.dither, BR, BC, LANES)
    value_scale = scales.value
    if master is None:
        value, value_scale = store_value(
            ptr.value, ptr.value_extra, start, stride, mask, value, dither * OF_MASTERS, VALUE,
            STORE, BR, BC,
        )  # fmt: skip
    _, scale = store_state(
        ptr.exp_avg, start, stride, mask, exp_avg, dither * OF_EXP_AVG, FIRST, BR, BC, STORE, LANES
    )
    _, scale_sq = store_state(
        ptr.exp_avg_sq, start, stride, mask, exp_avg_sq, dither * OF_EXP_AVG_SQ, SECOND, BR, BC,
        STORE, LANES,
    )  # fmt: skip
    if STORE and VARIANT.amsgrad:
        tl.store(ptr.max_exp_avg_sq + start + offs, largest, mask)
    return value, Scales(value_scale, scale, scale_sq), exp_avg, exp_avg_sq


@triton.jit
def step_tile(
    pointers, ahead, start, stride, mask, scalars, VARIANT: tl.constexpr, STORE: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, master=None, value_scale=None,
):  # fmt: skip
    """:func:`update_tile` of one tile with its scales; if VARIANT.is_updated, only its value.

    value_scale: that of the tile, if the caller has loaded it. Returns the new value; and, of a
    decoded master, the dither of its remainder, or by which it has been rounded to codes, and int32
    numbers that grow with |exp_avg| / sqrt(exp_avg_sq), for ``report_completed``.
    """
    ptr = pointers
    VALUE: tl.constexpr = VARIANT.value_codec
    FIRST: tl.constexpr = VARIANT.exp_avg_codec
    SECOND: tl.constexpr = VARIANT.exp_avg_sq_codec
    if value_scale is None:
        value_scale = load_scale(ptr.value_extra, ahead, stride, mask, VALUE, BR, BC)
    if VARIANT.is_updated:
        value = load_value(
            ptr.value, ptr.value_extra, ahead, stride, mask, value_scale, VALUE, BR, BC
        )
        dither, ratio = value, value  # Triton 3.6 takes no None in a tuple
    else:
        scales = Scales(
            value_scale,
            load_scale(ptr.exp_avg_scale, ahead, stride, mask, FIRST, BR, BC),
            load_scale(ptr.exp_avg_sq_scale, ahead, stride, mask, SECOND, BR, BC),
        )
        value, new, exp_avg, exp_avg_sq = update_tile(
            pointers, ahead, start, stride, mask, scales, scalars, VARIANT, STORE, BR, BC, master
        )
        if STORE:
            store_scale(ptr.value_extra, start, stride, mask, new.value, VALUE, BR, BC)
            store_scale(ptr.exp_avg_scale, start, stride, mask, new.exp_avg, FIRST, BR, BC)
            store_scale(ptr.exp_avg_sq_scale, start, stride, mask, new.exp_avg_sq, SECOND, BR, BC)
        dither, ratio = value, value
        if master is not None:
            LANES: tl.constexpr = state_lanes(VARIANT)
            dither = element_hash(start, stride, scalars.dither, BR, BC, LANES) * OF_MASTERS
            if VALUE == "codes":
                value = round_to_e4m3(value, dither)
            # The bits of a positive float are its logarithm, nearly.
            ratio = exp_avg.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            ratio -= exp_avg_sq.to(tl.int32, bitcast=True) >> 1
    return value, dither, ratio


class StepLaunch:
    """The step of tensors with one ``LaunchKey``; each format has one, which makes the launches.

    It is made of that key, and of shapes (plain tensors have one column), amax slots (tensors with
    the same slot share an amax), a part of the table, and the scalars that its rows refer to.
    """

    amaxes: Tensor  # float32 [n_slots], of formats whose shards share an amax
    _launches: list[Launch]

    def compile(self, *signals: Tensor) -> None:
        """Compile all kernels of a step, for ``signals`` as for the call."""
        for launch in self._launches:
            launch.compile(*signals)

    def prepare(self, *signals: Tensor) -> None:
        """Compute ``amaxes``, which ranks exchange before the call; ``signals`` as for the call."""

    def __call__(self, *signals: Tensor) -> None:
        """Step the tensors; ``signals`` are grad_scale, clip and found_inf, float32 [1] each."""
        for launch in self._launches:
            launch(*signals)
