"""Which model fits on which card: bytes of full fine-tuning on one GPU, computed and not measured.

``python -m fp4adam --plan 8e9`` prints the table. Weights and states are counted on the meta device
with the package's own storage; activations and the rest are estimates, which the table states.
"""

import argparse
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fp4adam.formats.mxfp8 import MXFP8Quantizer
from fp4adam.formats.nvfp4 import NVFP4Quantizer
from fp4adam.optim.options import STATES, Options
from fp4adam.tensors.quantizer import Quantizer

CARDS = {
    24: "RTX 3090, 4090",
    32: "RTX 5090",
    48: "L40S, A6000",
    80: "A100, H100",
    141: "H200",
    180: "B200",
}
TOKENS, VOCABULARY = 2048, 128256
# Of a block that is recomputed, per token and unit of width: inputs of its matmuls, and gradients.
BLOCK_BYTES = 60
# Of the head, per token and entry of the vocabulary: logits in BF16, in FP32, and their gradient.
LOGIT_BYTES = 2 + 4 + 4
RESERVED = 1.5e9  # CUDA, kernels, tables, fragments


class Setup(NamedTuple):
    """A way to train; without ``states`` it is torch's AdamW, without masters in BF16."""

    name: str
    states: str = ""
    quantizer: Quantizer | None = None
    dtype: torch.dtype = torch.bfloat16


SETUPS = (
    Setup("torch AdamW, FP32", dtype=torch.float32),
    Setup("torch AdamW, BF16 without masters"),
    Setup("FP4Adam, NVFP4, 32bit states", "32bit", NVFP4Quantizer(columnwise=False)),
    Setup("FP4Adam, NVFP4, 16bit states", "16bit", NVFP4Quantizer(columnwise=False)),
    Setup("FP4Adam, MXFP8, 8bit states", "8bit", MXFP8Quantizer(columnwise=False)),
    Setup("FP4Adam, NVFP4, 8bit states", "8bit", NVFP4Quantizer(columnwise=False)),
)


class Shape(NamedTuple):
    """A model like Llama: 13 width**2 parameters per block, a block per 128 of width."""

    width: int
    layers: float
    quantized: float  # parameters of linear layers but the head
    plain: float  # of embedding and head


def shape_of(parameters: float) -> Shape:
    """The shape of a model with so many parameters."""
    plain, width = 0.0, 0
    for _ in range(20):  # embedding and head depend on the width
        width = max(128, round((128 / 13 * (parameters - plain)) ** (1 / 3) / 128) * 128)
        tables = 1 if parameters < 4e9 else 2  # small models tie embedding and head
        plain = min(VOCABULARY * width * tables, parameters / 2)
    quantized = parameters - plain
    return Shape(width, quantized / (13 * width**2), quantized, plain)


def bytes_per_parameter(setup: Setup) -> tuple[float, float]:
    """Bytes of weight and state per parameter: of quantized ones, and of plain ones."""
    side = 1024
    plain = torch.empty(side, side, dtype=setup.dtype, device="meta")
    if setup.quantizer is None:
        each = 3.0 * setup.dtype.itemsize
        return each, each
    options = Options(**STATES[setup.states])
    moments = 0.0
    for name, codec in options.codecs(setup.dtype).items():
        nbytes = sum(t.nbytes for t in codec.zeros_like(plain) if t is not None) / side**2
        if name == "master_param":
            master = nbytes
        else:
            moments += nbytes
    storage = setup.quantizer.zeros(side, side, "meta").present
    weight = sum(t.nbytes for t in storage) / side**2
    # A BF16 parameter has an FP32 or FP16 master, or the 16 bits that it lacks of one.
    beside = 2.0 if options.store_param_remainders else master
    return weight + master + moments, setup.dtype.itemsize + beside + moments


def activation_bytes(shape: Shape, tokens: int) -> float:
    """Of one sequence, with each block recomputed in the backward pass."""
    kept = shape.layers * shape.width * 2
    return tokens * (kept + BLOCK_BYTES * shape.width + LOGIT_BYTES * VOCABULARY)


def needed(setup: Setup, shape: Shape, tokens: int = TOKENS, releases: bool = True) -> float:
    """Bytes on one GPU."""
    quantized, plain = bytes_per_parameter(setup)
    total = quantized * shape.quantized + plain * shape.plain
    largest = max(VOCABULARY * shape.width, 3.5 * shape.width**2)
    # torch's AdamW keeps all gradients; with gradient release the largest one is alive.
    gradients = largest if releases and setup.states else shape.quantized + shape.plain
    total += gradients * setup.dtype.itemsize
    return total + activation_bytes(shape, tokens) + RESERVED


def largest(setup: Setup, card: int, tokens: int = TOKENS) -> float:
    """Parameters of the largest model that fits on a card of so many GB."""
    low, high = 1e7, 1e13
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        fits = needed(setup, shape_of(middle), tokens) <= card * 1e9
        low, high = (middle, high) if fits else (low, middle)
    return low


def table(parameters: float | None = None, tokens: int = TOKENS) -> str:
    """What a model of so many parameters takes, or without a number the largest model per card.

    Raises:
        ValueError: If ``parameters`` is not between a million and 10**13, or ``tokens`` not
            positive.
    """
    if parameters is not None and not 1e6 <= parameters <= 1e13:
        raise ValueError(
            f"the number of parameters must be between 1e6 and 1e13, got {parameters}; write 8e9 "
            "for 8 billion"
        )
    if tokens < 1:
        raise ValueError(f"tokens must be positive, got {tokens}; the default is {TOKENS}")
    lines = _largest(tokens) if parameters is None else _fitting(shape_of(parameters), tokens)
    return "\n".join((*lines, *_assumptions(tokens)))


def _fitting(shape: Shape, tokens: int) -> Iterator[str]:
    total = shape.quantized + shape.plain
    yield (
        f"Full fine-tuning of {total / 1e9:.2f} B parameters on one GPU: width {shape.width:,}, "
        f"{shape.layers:.0f} blocks, {100 * shape.quantized / total:.0f} % quantized, "
        f"{activation_bytes(shape, tokens) / 1e9:.1f} GB of activations"
    )
    yield f"{'':36}{'bytes per weight':>18}{'GB':>8}   " + _heads()
    for setup in SETUPS:
        size = needed(setup, shape, tokens)
        fits = "".join(f"{'yes' if size <= card * 1e9 else '-':>8}" for card in CARDS)
        each = bytes_per_parameter(setup)[0]
        yield f"{setup.name:36}{each:>18.2f}{size / 1e9:>8.1f}   {fits}"


def _largest(tokens: int) -> Iterator[str]:
    yield "Full fine-tuning on one GPU: the largest model, in billions of parameters"
    yield f"{'':36}{'bytes per weight':>18}   " + _heads()
    for setup in SETUPS:
        sizes = "".join(f"{largest(setup, card, tokens) / 1e9:>8.1f}" for card in CARDS)
        yield f"{setup.name:36}{bytes_per_parameter(setup)[0]:>18.2f}   {sizes}"


def _heads() -> str:
    return "".join(f"{f'{size} GB':>8}" for size in CARDS)


def _assumptions(tokens: int) -> Iterator[str]:
    cards = ", ".join(f"{size} GB {name}" for size, name in CARDS.items())
    yield (
        f"Computed, not measured. Assumed: shapes like Llama's, one sequence of {tokens:,} tokens, "
        "blocks recomputed in the backward pass, embedding and head in BF16, gradient release for "
        f"FP4Adam, {RESERVED / 1e9:.1f} GB for CUDA and fragments. Bytes per weight are those of a "
        f"weight with its states, without its gradient. Cards: {cards}."
    )


def parse_count(text: str) -> float:
    """8e9, 8B or 8b as a number (argparse type)."""
    units = {"m": 1e6, "b": 1e9, "t": 1e12}
    scale = units.get(text[-1:].lower(), 1.0)
    try:
        value = float(text if scale == 1.0 else text[:-1]) * scale
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number such as 8e9 or 8B, got {text!r}")
    return value
