"""Which model fits on which card: bytes of full fine-tuning on one GPU, computed and not measured.

Weights and states are counted on the meta device with the package's own storage; activations and
the rest are estimates, which the table states.
"""

from typing import NamedTuple

import torch

from fp4adam.formats.mxfp8 import MXFP8Quantizer
from fp4adam.formats.nvfp4 import NVFP4Quantizer
from fp4adam.optim.options import STATES, Options
from fp4adam.tensors.quantizer import Quantizer

CARDS = (24, 32, 48, 80, 141, 180)  # in GB
CARD_NAMES = "24 GB RTX 3090, 4090; 32 RTX 5090; 48 L40S, A6000; 80 A100, H100; 141 H200; 180 B200"
TOKENS, VOCABULARY = 2048, 128256
# Of a block that is recomputed, per token and unit of width: inputs of its matmuls, and gradients.
BLOCK_BYTES = 60
# Of the head, per token and entry of the vocabulary: logits in BF16, in FP32, and their gradient.
LOGIT_BYTES = 2 + 4 + 4
RESERVED = 1.5e9  # CUDA, kernels, tables, fragments


class Setup(NamedTuple):
    """A way to train: with ``states`` FP4Adam, else AdamW with both moments in so many bytes."""

    name: str
    states: str = ""
    quantizer: Quantizer | None = None
    dtype: torch.dtype = torch.bfloat16
    moments: float = 4.0
    masters: bool = True


_NVFP4, _MXFP8 = NVFP4Quantizer(columnwise=False), MXFP8Quantizer(columnwise=False)
SETUPS = (
    Setup("torch AdamW, FP32", dtype=torch.float32, moments=8.0),
    Setup("torch AdamW, BF16 without masters"),
    Setup("AdamW8bit, BF16 without masters", moments=2.03),  # a scale per 256
    Setup("FP4Adam, NVFP4, 32bit states", "32bit", _NVFP4),
    Setup("FP4Adam, NVFP4, 16bit states", "16bit", _NVFP4),
    Setup("FP4Adam, MXFP8, 8bit states", "8bit", _MXFP8),
    Setup("FP4Adam, MXFP8, 8bit, no masters", "8bit", _MXFP8, masters=False),
    Setup("FP4Adam, MXFP8, factored, no masters", "factored", _MXFP8, masters=False),
    Setup("FP4Adam, NVFP4, factored", "factored", _NVFP4),
    Setup("FP4Adam, NVFP4, 8bit states", "8bit", _NVFP4),
)


def bytes_per_parameter(setup: Setup) -> tuple[float, float]:
    """Bytes of weight and state per parameter: of quantized ones, and of plain ones."""
    if setup.quantizer is None:
        return (setup.dtype.itemsize + setup.moments,) * 2
    side, options = 4096, Options(**STATES[setup.states])
    shape, both = torch.Size((side, side)), (options.codecs(setup.dtype, f) for f in (True, False))
    sizes = [[codec.nbytes(shape) / side**2 for codec in codecs.values()] for codecs in both]
    (master, *moments), (_, *plain) = sizes
    weight = sum(t.nbytes for t in setup.quantizer.zeros(side, side, "meta").present) / side**2
    # A BF16 parameter has an FP32 or FP16 master, or the 16 bits that it lacks of one.
    beside = 2.0 if options.store_param_remainders else master
    master = master if setup.masters else 0.0
    return weight + master + sum(moments), setup.dtype.itemsize + beside + sum(plain)


def needed(setup: Setup, parameters: float) -> float:
    """Bytes on one GPU for a model like Llama: 13 width**2 per block, a block per 128 of width."""
    plain, width = 0.0, 0  # embedding and head, which depend on the width
    for _ in range(20):
        width = max(128, round((128 / 13 * (parameters - plain)) ** (1 / 3) / 128) * 128)
        tables = 1 if parameters < 4e9 else 2  # small models tie embedding and head
        plain = min(VOCABULARY * width * tables, parameters / 2)
    per_quantized, per_plain = bytes_per_parameter(setup)
    total = per_quantized * (parameters - plain) + per_plain * plain + RESERVED
    # Of released gradients the largest one is alive.
    total += max(VOCABULARY * width, 3.5 * width**2) * setup.dtype.itemsize
    kept = (parameters - plain) / (13 * width**2) * width * 2  # inputs of blocks
    return total + TOKENS * (kept + BLOCK_BYTES * width + LOGIT_BYTES * VOCABULARY)


def largest(setup: Setup, card: int) -> float:
    """Parameters of the largest model that fits on a card of so many GB."""
    low, high = 1e7, 1e13
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if needed(setup, middle) <= card * 1e9 else (low, middle)
    return low


def table(parameters: float | None = None) -> str:
    """What a model of so many parameters takes, or without a number the largest model per card.

    ValueError if ``parameters`` is not between a million and 10**13.
    """
    if parameters is not None and not 1e6 <= parameters <= 1e13:
        raise ValueError(
            f"the number of parameters must be between 1e6 and 1e13, got {parameters}; write 8e9 "
            "for 8 billion"
        )
    what = "the largest model, in billions of parameters"
    if parameters is not None:
        what = f"{parameters / 1e9:.2f} billion parameters"
    heads = "".join(f"{f'{size} GB':>8}" for size in CARDS)
    lines = [f"Full fine-tuning on one GPU: {what}", f"{'':36}{'bytes per weight':>18}   {heads}"]
    for setup in SETUPS:
        cells = [f"{largest(setup, card) / 1e9:.1f}" for card in CARDS]
        if parameters is not None:
            size = needed(setup, parameters)
            cells = ["yes" if size <= card * 1e9 else "-" for card in CARDS]
            cells.append(f"{size / 1e9:9.1f} GB")
        row = "".join(f"{cell:>8}" for cell in cells)
        lines.append(f"{setup.name:36}{bytes_per_parameter(setup)[0]:>18.2f}   {row}")
    lines.append(
        f"Computed, not measured. Assumed: shapes like Llama's, one sequence of {TOKENS:,} tokens, "
        "blocks recomputed in the backward pass, embedding and head in BF16, gradients released "
        f"for everyone, {RESERVED / 1e9:.1f} GB for CUDA and fragments. Bytes per weight are those "
        f"of a weight with its states, without its gradient. Cards: {CARD_NAMES}."
    )
    return "\n".join(lines)
