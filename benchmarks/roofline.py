"""The time that a training step of the example's GPT would take at a GPU's ceilings.

Operations of products over 0.78 of the peak of their dtype, plus bytes over 0.92 of the bandwidth,
as in torchao's ``float8_roofline.py``. Products and kernels between them do not overlap on one
stream, so their times add up. The host counts as free.
"""

from typing import NamedTuple

from gpt_training import GPTConfig

PRODUCTS, BANDWIDTH = 0.78, 0.92


class Ceilings(NamedTuple):
    """Peaks of a GPU: operations per second in BF16, dense, and bytes per second; FP8 is twice."""

    bf16: float
    memory: float


DEVICES = {
    "H100 80GB": Ceilings(989e12, 3.35e12),
    "H200": Ceilings(989e12, 4.8e12),
    "B200": Ceilings(2250e12, 8e12),
    "L40S": Ceilings(362e12, 0.864e12),
}


def predicted_ms(
    device: str, config: GPTConfig, tokens: int, is_fp8: bool, bytes_per_parameter: float
) -> float | None:
    """Milliseconds of a step without recomputation; None for a device without ceilings here.

    Args:
        device: The name that torch gives it.
        config: The shape of the model.
        tokens: Of one step, in sequences of the model's context.
        is_fp8: Whether linear layers of blocks multiply in FP8, all three products.
        bytes_per_parameter: What the optimizer reads and writes per parameter.
    """
    found = next((DEVICES[name] for name in DEVICES if name in device), None)
    if found is None:
        return None
    dim, hidden = config.dim, config.hidden
    linear, head = config.layers * (4 * dim**2 + 3 * dim * hidden), dim * config.vocabulary
    # Causal attention: forward 2 operations per pair and width, backward 2.5 times as many.
    attention = config.layers * 7 * tokens * config.context * dim
    rate = PRODUCTS * found.bf16
    seconds = 6 * tokens * linear / (rate * (2 if is_fp8 else 1))
    seconds += (6 * tokens * head + attention) / rate
    # BF16 values between products, read and written: norms, rotations, residuals and attention have
    # 18 of the width, SwiGLU three of the hidden width; the backward pass twice as many.
    moved = 2 * 3 * tokens * config.layers * (18 * dim + 3 * hidden)
    if is_fp8:
        # Inputs of four products and gradients of five are read and written in both directions.
        inputs, gradients = 3 * dim + hidden, 5 * dim + 2 * hidden
        moved += (2 + 1 + 1) * tokens * config.layers * (inputs + gradients)
    moved += bytes_per_parameter * (linear + head)
    return 1e3 * (seconds + moved / (BANDWIDTH * found.memory))
