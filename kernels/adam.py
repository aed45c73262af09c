"""The Adam update on a tile of a parameter and its state; the formats' steps build on it."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.launch.launch import Launch
from fp4adam.kernels.launch.schema import SCALAR_COLUMNS
from fp4adam.kernels.launch.tensor_table import TRITON_DTYPES, field, pointer, tile_offsets
from fp4adam.kernels.tiles.codes import capability, to_float32
from fp4adam.kernels.tiles.state import (
    OF_EXP_AVG,
    OF_EXP_AVG_SQ,
    OF_MASTERS,
    byte_of,
    codec_of,
    dither_of,
    load_scale,
    load_state,
    store_scale,
    store_state,
    store_words,
)

SCALARS_WIDTH = tl.constexpr(len(SCALAR_COLUMNS))
# Arguments that may be a different tensor, of any alignment, at every call.
SIGNALS = ("grad_scale_ptr", "clip_ptr", "found_inf_ptr")


class Variant(NamedTuple):
    """The compile-time options of a step, as one argument of its kernels and tile functions.

    Attributes:
        grad_dtype: Dtype of the gradients.
        value_dtype: Dtype of the parameter if Adam updates it directly; None for a master weight.
        write_dtype: Dtype that the updated value is rounded to on its way to the parameter; None if
            the value is the parameter.
        value_codec: Codec of the value; see :func:`load_state`.
        exp_avg_codec: Codec of the first moment.
        exp_avg_sq_codec: Codec of the second moment.
        adam_w: Whether decay shrinks the value (AdamW) or is added to the gradient (L2).
        amsgrad: Whether to divide by the largest second moment so far.
        is_updated: Whether an earlier launch has updated the state, so that the new value is only
            read. The moments' codecs are unused then (set to "float32").
        lanes: Neighbouring elements per thread.
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
    lanes: int = 4

    @property
    def codecs(self) -> tuple[str, str, str]:
        """The codecs of the value and the two moments."""
        return self.value_codec, self.exp_avg_codec, self.exp_avg_sq_codec


def step_variant(key: Any) -> Variant:
    """The :class:`Variant` of a launch, for the ``LaunchKey`` of an optimizer."""
    dtypes = key.grad_dtype, key.value_dtype if key.quantizer is None else None, key.write_dtype
    found = (None if dtype is None else TRITON_DTYPES[dtype] for dtype in dtypes)
    return Variant(*found, *(codec.name for codec in key.codecs), key.adam_w, key.amsgrad)


class Scalars(NamedTuple):
    """The scalars of an update, float32; ``dither`` is the dither origin, uint32."""

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
def load_scales(
    pointers, start, stride, mask, VARIANT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """The :class:`Scales` of a tile."""
    # As constexprs, because Triton 3.6 accepts no plain strings as arguments of tile functions.
    VALUE: tl.constexpr = VARIANT.value_codec
    FIRST: tl.constexpr = VARIANT.exp_avg_codec
    SECOND: tl.constexpr = VARIANT.exp_avg_sq_codec
    return Scales(
        load_scale(pointers.value_extra, start, stride, mask, VALUE, BR, BC),
        load_scale(pointers.exp_avg_scale, start, stride, mask, FIRST, BR, BC),
        load_scale(pointers.exp_avg_sq_scale, start, stride, mask, SECOND, BR, BC),
    )


@triton.jit
def scales_of(words, i):
    """The :class:`Scales` of tile ``i``, from words."""
    return Scales(byte_of(words[0], i), byte_of(words[1], i), byte_of(words[2], i))


@triton.jit
def with_scales(words, scales, i):
    """The words with the scales of tile ``i``, whose bytes were zero."""
    return Scales(
        words[0] | (scales[0].to(tl.uint32) << (8 * i)),
        words[1] | (scales[1].to(tl.uint32) << (8 * i)),
        words[2] | (scales[2].to(tl.uint32) << (8 * i)),
    )


@triton.jit
def load_scale_words(
    pointers, start, step, stride, VARIANT: tl.constexpr, LOOP: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """The :class:`Scales` of up to four tiles, ``step`` elements apart, a byte of a word each.

    For a pipelined loop over the tiles. Bytes are too short for asynchronous copies, so the loop
    would wait for the scales in every turn.
    """
    none = tl.zeros((BR, (BC + 31) // 32), tl.uint32)
    words = Scales(none, none, none)
    for i in tl.static_range(LOOP):
        scales = load_scales(pointers, start + i * step, stride, None, VARIANT, BR, BC)
        words = with_scales(words, scales, i)
    return words


@triton.jit
def store_scale_words(
    pointers, start, step, stride, words, VARIANT: tl.constexpr, LOOP: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store what :func:`load_scale_words` loads."""
    VALUE: tl.constexpr = VARIANT.value_codec
    FIRST: tl.constexpr = VARIANT.exp_avg_codec
    SECOND: tl.constexpr = VARIANT.exp_avg_sq_codec
    ptr = pointers
    store_words(ptr.value_extra, start, step, stride, words.value, VALUE, LOOP, BR, BC)
    store_words(ptr.exp_avg_scale, start, step, stride, words.exp_avg, FIRST, LOOP, BR, BC)
    store_words(ptr.exp_avg_sq_scale, start, step, stride, words.exp_avg_sq, SECOND, LOOP, BR, BC)


@triton.constexpr_function
def scalar(name):
    return {each: i for i, each in enumerate(SCALAR_COLUMNS)}[name]


@triton.jit
def load_scalars(table, scalars, tensor, grad_scale_ptr, clip_ptr):
    """The :class:`Scalars` of a tensor's update; ``factor`` includes clip / grad_scale.

    scalars: float32 [n, 12], with the columns of ``launch.schema``. grad_scale_ptr, clip_ptr:
    float32 [1].
    """
    row = scalars + field(table, tensor, "scalars") * SCALARS_WIDTH
    factor = tl.div_rn(1.0, tl.load(grad_scale_ptr)) * tl.load(row) * tl.load(clip_ptr)
    upper, lower = tl.load(row + scalar("dither_upper")), tl.load(row + scalar("dither_lower"))
    start = field(table, tensor, "dither_start")
    return Scalars(
        factor,
        tl.load(row + 1),
        tl.load(row + 2),
        tl.load(row + 3),
        tl.load(row + 4),
        tl.load(row + 5),
        tl.load(row + 6),
        tl.load(row + 7),
        (upper.to(tl.uint32) << 16) + lower.to(tl.uint32) + start.to(tl.uint32),
    )


@triton.jit
def state_pointers(table, tensor, VARIANT: tl.constexpr):
    """The :class:`Pointers` of a tensor; load them before a loop, not in it."""
    if VARIANT.value_dtype is None:
        value = pointer(table, tensor, "value", codec_of(VARIANT.value_codec, "dtype"))
    else:
        value = pointer(table, tensor, "value", VARIANT.value_dtype)
    EXTRA: tl.constexpr = tl.int16 if VARIANT.value_codec == "remainder" else tl.uint8
    SCALE: tl.constexpr = tl.float32 if VARIANT.exp_avg_sq_codec == "factored" else tl.uint8
    return Pointers(
        pointer(table, tensor, "grad", VARIANT.grad_dtype),
        value,
        pointer(table, tensor, "value_extra", EXTRA),
        pointer(table, tensor, "exp_avg", codec_of(VARIANT.exp_avg_codec, "dtype")),
        pointer(table, tensor, "exp_avg_scale", tl.uint8),
        pointer(table, tensor, "exp_avg_sq", codec_of(VARIANT.exp_avg_sq_codec, "dtype")),
        pointer(table, tensor, "exp_avg_sq_scale", SCALE),
        pointer(table, tensor, "max_exp_avg_sq", tl.float32),
    )


# The fast path computes with a * 2^LIFT_A and v * 2^LIFT_V, and c and eps to match, so that what it
# takes is what has bit 30 set and does not overflow: |a| from 2^(1 - LIFT_A) to 2^(128 - LIFT_A),
# and v likewise. It takes c from 1/2 to 2^MOST_C, and eps up to 2^MOST_EPS. Then no root,
# denominator, quotient or remainder is subnormal or too large.
LIFT_A, LIFT_V, MOST_C, MOST_EPS = 79, 94, 26, 40
_LIFTS = tl.constexpr((2.0**LIFT_A, 2.0 ** (LIFT_A - LIFT_V // 2), 2.0**MOST_C, 2.0**MOST_EPS))
# What the ratio of :func:`update_quotient` is in units of.
RATIO_UNIT = tl.constexpr(2.0 ** (LIFT_V // 2))


# Elements per instance of the assembly, which a thread has side by side: their operations overlap.
PACK = tl.constexpr(4)


def _quotient_assembly(PACK: int) -> str:
    """PTX for PACK elements of :func:`update_quotient`.

    Operands are quotients, ratios, m, v, the lifted step, c and eps, and these as they are.

    The fast path is what ptxas itself makes of ``sqrt.rn.f32`` and ``div.rn.f32``: an approximation
    corrected by its exact remainder. ptxas adds a check and a branch to every one of them. Here one
    check of all operands decides about all elements: the bits that all of them have, and a sum that
    is not finite if a quotient is not.
    """
    lines = [".reg .pred outside, other;", ".reg .b32 common;", ".reg .f32 a, w, r, s, h, n, e, b;"]
    lines += [".reg .f32 sum;", "mov.b32 common, 0x40000000;", "mov.b32 sum, 0;"]
    slow = []
    for i in range(PACK):
        out, ratio, m, v, *lifted, step, c, eps = (
            f"${i + PACK * operand}" for operand in range(10)
        )
        lines += [
            f"mul.rn.f32 a, {m}, {lifted[0]};",
            f"mul.rn.f32 w, {v}, 0f{127 + LIFT_V << 23:08X};",
            "and.b32 common, common, a;",
            "and.b32 common, common, w;",
            "rsqrt.approx.ftz.f32 r, w;",
            f"abs.f32 e, {m};",
            f"mul.rn.f32 {ratio}, e, r;",
            "mul.rn.f32 s, w, r;",
            "mul.rn.f32 h, r, 0f3F000000;",
            "neg.f32 n, s;",
            "fma.rn.f32 e, n, s, w;",
            "fma.rn.f32 s, e, h, s;",
            f"mul.rn.f32 b, s, {lifted[1]};",
            f"add.rn.f32 b, b, {lifted[2]};",
            "rcp.approx.ftz.f32 r, b;",
            "neg.f32 n, b;",
            "fma.rn.f32 e, n, r, 0f3F800000;",
            "fma.rn.f32 r, r, e, r;",
            "mul.rn.f32 s, a, r;",
            "fma.rn.f32 e, n, s, a;",
            f"fma.rn.f32 {out}, r, e, s;",
        ]
        if i % 2:
            lines.append(f"fma.rn.f32 sum, ${i - 1}, {out}, sum;")
        slow += [
            f"max.f32 w, {v}, 0f00800000;",
            f"mul.rn.f32 w, w, 0f{127 + LIFT_V << 23:08X};",
            "rsqrt.approx.ftz.f32 r, w;",
            f"abs.f32 e, {m};",
            f"mul.rn.f32 {ratio}, e, r;",
            f"mul.rn.f32 a, {m}, {step};",
            f"sqrt.rn.f32 s, {v};",
            f"mul.rn.f32 b, s, {c};",
            f"add.rn.f32 b, b, {eps};",
            f"div.rn.f32 {out}, a, b;",
        ]
    lines += [
        "setp.eq.u32 outside, common, 0;",
        "abs.f32 sum, sum;",
        "setp.geu.f32 other, sum, 0f7F800000;",
        "or.pred outside, outside, other;",
        "@!outside bra DONE;",
    ]
    return "{ " + " ".join([*lines, *slow, "DONE:"]) + " }"


_QUOTIENT = tl.constexpr(_quotient_assembly(PACK.value))
_OPERANDS = tl.constexpr(",".join(["=f"] * 2 * PACK.value + ["f"] * 8 * PACK.value))


@triton.jit
def update_quotient(m, step, v, c, eps):
    """m * step / (sqrt(v) * c + eps), each operation correctly rounded; and |m| / sqrt(v), nearly.

    m, v: float32 tiles. step, c, eps: float32 scalars.
    The second number is divided by RATIO_UNIT, and is NaN at most where m is or both are zero.
    """
    if capability() > 0:
        inside = (c >= 0.5) & (c <= _LIFTS[2]) & (eps <= _LIFTS[3])
        # NaN in c makes that of the quotients, for which nothing else has to be checked.
        lifted = tl.where(inside, c * _LIFTS[1], float("nan"))
        quotient, ratio = tl.inline_asm_elementwise(
            _QUOTIENT,
            _OPERANDS,
            [m, v, step * _LIFTS[0], lifted, eps * _LIFTS[0], step, c, eps],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=PACK,
        )
    else:
        quotient = tl.div_rn(m * step, tl.sqrt_rn(v) * c + eps)
        least = tl.full((), 1.1754943508222875e-38, tl.float32)
        ratio = tl.div_rn(tl.abs(m), tl.sqrt_rn(tl.maximum(v, least))) * (1.0 / RATIO_UNIT)
        ratio = tl.where(ratio == ratio, ratio, 0.0)  # NumPy warns of NaN alone
    return quotient, ratio


@triton.jit
def adam_tile(grad, value, exp_avg, exp_avg_sq, max_exp_avg_sq, scalars, VARIANT: tl.constexpr):
    """One Adam update; each operation is a separate, correctly rounded FP32 operation.

    grad, value, exp_avg, exp_avg_sq, max_exp_avg_sq: float32 tiles (the last is read only with
    AMSGrad). scalars: from :func:`load_scalars`. Returns the value before its update
    by :func:`update_quotient`, first moment, second moment and largest second moment.
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
    return p, m, v, largest


@triton.jit
def step_tile(
    pointers, ahead, start, stride, mask, constants, VARIANT: tl.constexpr, STORE: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, scales=None, master=None, factors=None,
):  # fmt: skip
    """Load a tile of a tensor's state, update it, and store it if STORE.

    pointers: from :func:`state_pointers`. start: int64 offset of the tile [BR, BC], whose rows are
    ``stride`` apart. ahead: the same offset, for loads; where a pipelined loop computes both from
    one number, the addresses wait in registers from the load to the store. constants: from
    :func:`load_scalars`. scales: of the tile, if the caller loads and stores them. master: the
    value, float32, if the caller has decoded it and stores it. factors: of the second moment, if it
    has them. start, stride and BC must be multiples of 32 if a codec has scales.
    Returns the new value, float32: decoded if its codec has scales, else unrounded; the new scales;
    and |exp_avg| / sqrt(exp_avg_sq) in the unit of :func:`update_quotient`. With factors it has no
    unit, and is |exp_avg| over the root of the loaded mean by column.
    """
    ptr = pointers
    VALUE: tl.constexpr = VARIANT.value_codec
    FIRST: tl.constexpr = VARIANT.exp_avg_codec
    SECOND: tl.constexpr = VARIANT.exp_avg_sq_codec
    LANES: tl.constexpr = VARIANT.lanes
    offs = tile_offsets(stride, BR, BC, LANES)
    old = scales
    if scales is None:
        old = load_scales(pointers, ahead, stride, mask, VARIANT, BR, BC)
    value = master
    if master is None:
        value = load_state(
            ptr.value, ptr.value_extra, ahead, stride, mask, old.value, VALUE, BR, BC
        )
    grad = to_float32(tl.load(ptr.grad + ahead + offs, mask))
    m = load_state(ptr.exp_avg, None, ahead, stride, mask, old.exp_avg, FIRST, BR, BC, LANES)
    if factors is None:
        v = load_state(
            ptr.exp_avg_sq, None, ahead, stride, mask, old.exp_avg_sq, SECOND, BR, BC, LANES
        )
    else:
        v = factors[0] * factors[1]
    largest = tl.load(ptr.max_exp_avg_sq + ahead + offs, mask) if VARIANT.amsgrad else v

    decayed, m, v, largest = adam_tile(grad, value, m, v, largest, constants, VARIANT)

    # If no codec uses a dither, the compiler removes it.
    dither = dither_of(start, stride, constants.dither, OF_EXP_AVG, BR, BC, LANES)
    _, scale = store_state(
        ptr.exp_avg, None, start, stride, mask, m, dither, FIRST, BR, BC, STORE, LANES
    )
    dither = dither_of(start, stride, constants.dither, OF_EXP_AVG_SQ, BR, BC, LANES)
    scale_sq = old.exp_avg_sq
    if factors is None:
        _, scale_sq = store_state(
            ptr.exp_avg_sq, None, start, stride, mask, v, dither, SECOND, BR, BC, STORE, LANES
        )
    # Last, because it takes most registers.
    quotient, ratio = update_quotient(
        m, constants.step_size, largest, constants.rsqrt_bias_correction2, constants.eps
    )
    if VARIANT.amsgrad:
        _, ratio = update_quotient(m, 1.0, v, 1.0, 0.0)
    if factors is not None:
        # Means forget the element's own square, so the next step may start from no more than this.
        ratio = tl.abs(m) * factors[3][None, :]
    # A zero step leaves the value alone: no decay, and the sign of a zero stays.
    value = tl.where(constants.step_size != 0, decayed - quotient, value)
    value_scale = old.value
    if master is None:
        dither = dither_of(start, stride, constants.dither, OF_MASTERS, BR, BC, LANES)
        value, value_scale = store_state(
            ptr.value, ptr.value_extra, start, stride, mask, value, dither, VALUE, BR, BC, STORE
        )
    if STORE and VARIANT.amsgrad:
        tl.store(ptr.max_exp_avg_sq + start + offs, largest, mask)
    if STORE and scales is None:
        store_scale(ptr.value_extra, start, stride, mask, value_scale, VALUE, BR, BC)
        store_scale(ptr.exp_avg_scale, start, stride, mask, scale, FIRST, BR, BC)
        store_scale(ptr.exp_avg_sq_scale, start, stride, mask, scale_sq, SECOND, BR, BC)
    if VALUE == "codes":
        # Without masters, values get the four significant bits of E4M3 by dither.
        dither = dither_of(start, stride, constants.dither, OF_MASTERS, BR, BC, LANES)
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + (dither >> 12).to(tl.int32)) & -(1 << 20)
        bits = tl.where(tl.abs(value) < float("inf"), rounded, bits)
        value = bits.to(tl.float32, bitcast=True)
    return value, Scales(value_scale, scale, scale_sq), ratio


class StepLaunch:
    """The step of tensors with one ``LaunchKey``: launches one after the other.

    ``step.StepLaunch`` and ``plain_step.StepLaunch`` make it from that key, and from shapes (plain
    tensors have one column), amax slots (tensors with the same slot share an amax), a part of the
    table, and the scalars that its rows refer to.
    """

    amaxes: Tensor  # float32 [n_slots], of formats whose shards share an amax

    def __init__(self, launches: list[Launch]) -> None:
        self._launches = launches

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
