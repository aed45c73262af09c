"""The quotient of an Adam update, without a branch per element."""

import triton
import triton.language as tl

from fp4adam.kernels.tiles.target import is_compiled_for_cuda

# Elements per instance of the assembly: their dependent operations overlap.
PACK = 4
# The fast path takes |a| from 2^LEAST_A and v from 2^LEAST_V up to 2^SPAN times as much, c from 1/2
# to 2^MOST_C, and eps up to 2^MOST_EPS. Then no root, denominator, quotient or remainder is
# subnormal or too large.
LEAST_A, LEAST_V, SPAN, MOST_C, MOST_EPS = -78, -100, 138, 26, 40


def _quotient_assembly() -> str:
    """PTX for PACK elements of :func:`update_quotient`; operands are outputs, a, v, c and eps.

    The fast path is what ptxas itself makes of ``sqrt.rn.f32`` and ``div.rn.f32``: an approximation
    corrected by its exact remainder. ptxas adds a check and a branch to every one of them. Here one
    check of all operands decides about all elements.
    """
    lines = [
        ".reg .pred outside, other;",
        ".reg .b32 bits, largest;",
        ".reg .f32 r, s, h, n, e, b, q;",
        "mov.b32 largest, 0;",
    ]
    slow = []
    for i in range(PACK):
        out, a, v, c, eps = (f"${i + PACK * operand}" for operand in range(5))
        lines += [
            f"rsqrt.approx.ftz.f32 r, {v};",
            f"mul.rn.f32 s, {v}, r;",
            "mul.rn.f32 h, r, 0f3F000000;",
            "neg.f32 n, s;",
            f"fma.rn.f32 e, n, s, {v};",
            "fma.rn.f32 s, e, h, s;",
            f"mul.rn.f32 b, s, {c};",
            f"add.rn.f32 b, b, {eps};",
            "rcp.approx.ftz.f32 r, b;",
            "neg.f32 n, b;",
            "fma.rn.f32 e, n, r, 0f3F800000;",
            "fma.rn.f32 r, r, e, r;",
            f"mul.rn.f32 q, {a}, r;",
            f"fma.rn.f32 e, n, q, {a};",
            f"fma.rn.f32 {out}, r, e, q;",
        ]
        # Twice the bits: without the sign. Below the least, the difference wraps to large numbers.
        for x, least in ((a, LEAST_A), (v, LEAST_V)):
            lines += [
                f"mov.b32 bits, {x};",
                f"mad.lo.u32 bits, bits, 2, {2**32 - (127 + least << 24)};",
                "max.u32 largest, largest, bits;",
            ]
        slow += [
            f"sqrt.rn.f32 s, {v};",
            f"mul.rn.f32 b, s, {c};",
            f"add.rn.f32 b, b, {eps};",
            f"div.rn.f32 {out}, {a}, b;",
        ]
    c, eps = f"${3 * PACK}", f"${4 * PACK}"
    lines.append(f"setp.gt.u32 outside, largest, {SPAN << 24};")
    # Unordered comparisons, which NaN fulfils.
    for x, relation, bound in ((c, "ltu", -1), (c, "gtu", MOST_C), (eps, "gtu", MOST_EPS)):
        lines += [
            f"setp.{relation}.f32 other, {x}, 0f{127 + bound << 23:08X};",
            "or.pred outside, outside, other;",
        ]
    lines.append("@!outside bra DONE;")
    return "{ " + " ".join([*lines, *slow, "DONE:"]) + " }"


_QUOTIENT = tl.constexpr(_quotient_assembly())
_OPERANDS = tl.constexpr(",".join(["=f"] * PACK + ["f"] * 4 * PACK))
_PACK = tl.constexpr(PACK)


@triton.jit
def update_quotient(a, v, c, eps):
    """a / (sqrt(v) * c + eps), each operation correctly rounded.

    a, v: float32 tiles. c, eps: float32 scalars.
    """
    if is_compiled_for_cuda():
        quotient = tl.inline_asm_elementwise(
            _QUOTIENT, _OPERANDS, [a, v, c, eps], dtype=tl.float32, is_pure=True, pack=_PACK
        )
    else:
        quotient = tl.div_rn(a, tl.sqrt_rn(v) * c + eps)
    return quotient
