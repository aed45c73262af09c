"""The scalars of a step, computed on the device from step counts and hyper-parameters there.

Does what ``fp4adam.optim.adam.adam_scalars`` does, in the same float64 operations and in the same
order, so both give the same bits.
"""

import triton
import triton.language as tl
from torch import Tensor

from fp4adam.kernels.adam import SCALARS_WIDTH, scalar
from fp4adam.kernels.launch.launch import Launch
from fp4adam.kernels.launch.schema import HYPER_COLUMNS
from fp4adam.kernels.launch.tensor_table import field

HYPER_WIDTH = tl.constexpr(len(HYPER_COLUMNS))
# The last step of a float32 counter.
LAST_STEP = tl.constexpr(2**24)
STEP_BITS = tl.constexpr(25)
# The smallest float32 above zero: a smaller learning rate changes no parameter.
SMALLEST = tl.constexpr(2.0**-149)
BLOCK = 128
# Of the hash of steps in ``fp4adam.optim.state_codec``.
FACTOR_1 = tl.constexpr(0x7FEB352D)
FACTOR_2 = tl.constexpr(0x846CA68B)


@triton.jit
def mixed(x):
    """The hash of uint32 step numbers that ``dither_origin`` uses."""
    x = (x ^ (x >> 16)) * FACTOR_1
    x = (x ^ (x >> 15)) * FACTOR_2
    return x ^ (x >> 16)


@triton.jit
def power(base, exponent):
    """``base ** exponent``, float64 tiles, for int32 exponents of STEP_BITS bits.

    Like ``fp4adam.optim.adam.power``, by squaring: a sequence of products that rounds alike
    everywhere.
    """
    result = tl.full(base.shape, 1.0, tl.float64)
    for bit in tl.static_range(STEP_BITS):
        result = tl.where((exponent >> bit) & 1 != 0, result * base, result)
        base = base * base
    return result


@triton.jit(do_not_specialize_on_alignment=("found_inf_ptr",))
def _step_scalars_kernel(
    found_inf_ptr, table, hyper, groups, steps, scalars, n, BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts the step of each tensor that takes part, and writes its row of scalars.

    Grid: (ceil(n / BLOCK),). Tile: BLOCK tensors. found_inf_ptr: float32 [1]; if it is not 0, no
    step is counted. table: int64 [n, 20]. hyper: float64 [n_groups, 8], with HYPER_COLUMNS. groups:
    int32 [n], the row of each tensor in ``hyper``. steps: int64 [n], addresses of the step
    counts, one float32 each, updated. scalars: float32 [n, 12], with SCALAR_COLUMNS; the bounds for
    amax previews are set to 0.
    """
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tensor < n
    tensor = tl.where(mask, tensor, 0)
    grad = field(table, tensor, "grad")
    # Read as a tile, because Triton's interpreter combines no tile of truth values with a scalar.
    counts = mask & (grad != 0) & (tl.load(found_inf_ptr + 0 * tensor) == 0)
    step_ptr = tl.load(steps + tensor).to(tl.pointer_type(tl.float32))
    step = tl.minimum(tl.load(step_ptr) + 1.0, LAST_STEP)
    tl.store(step_ptr, step, counts)

    row = hyper + tl.load(groups + tensor) * HYPER_WIDTH
    lr, beta1, beta2 = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    eps, weight_decay, grad_factor = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    corrects_bias, decouples = tl.load(row + 6) != 0, tl.load(row + 7) != 0
    one = tl.full((BLOCK,), 1.0, tl.float64)
    number = step.to(tl.int32)
    bias_correction1 = tl.where(corrects_bias, one - power(beta1, number), one)
    bias_correction2 = tl.where(corrects_bias, one - power(beta2, number), one)
    # Infinite lr times zero decay would be NaN.
    shrinks = tl.where(weight_decay != 0, one - lr * weight_decay, one)
    weight = one - beta1
    # Divisions and roots of float64 are correctly rounded.
    step_size = tl.where(tl.abs(lr) > SMALLEST, lr / bias_correction1, 0.0)
    dither = mixed(number.to(tl.uint32))

    out = scalars + tensor * SCALARS_WIDTH
    tl.store(out, grad_factor.to(tl.float32), counts)
    tl.store(out + 1, tl.where(decouples, shrinks, weight_decay).to(tl.float32), counts)
    tl.store(out + 2, tl.where(weight < 0.5, weight, -beta1).to(tl.float32), counts)
    tl.store(out + 3, beta2.to(tl.float32), counts)
    tl.store(out + 4, (one - beta2).to(tl.float32), counts)
    tl.store(out + 5, eps.to(tl.float32), counts)
    tl.store(out + 6, step_size.to(tl.float32), counts)
    tl.store(out + 7, (one / tl.sqrt(bias_correction2)).to(tl.float32), counts)
    tl.store(out + scalar("dither_upper"), (dither >> 16).to(tl.float32), counts)
    tl.store(out + scalar("dither_lower"), (dither & 0xFFFF).to(tl.float32), counts)
    tl.store(out + scalar("largest_update"), 0.0, counts)
    tl.store(out + scalar("largest_decay"), 0.0, counts)


def step_scalars(
    table: Tensor,
    hyper: Tensor,
    groups: Tensor,
    steps: Tensor,
    scalars: Tensor,
) -> Launch:
    """The launch that counts a step and writes its scalars; call it with ``found_inf``.

    The tensors are those of :func:`_step_scalars_kernel`.
    """
    n = len(steps)
    given = table, hyper, groups, steps, scalars, n
    return Launch(_step_scalars_kernel, triton.cdiv(n, BLOCK), given, dict(BLOCK=BLOCK))
