"""A state of a parameter with its scales: converted whole for checkpoints, in pieces by a step.

A codec works on flat tensors in memory order; a state has the shape of its parameter.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import like, local
from fp4adam.optim.adam import Scalars, adam_
from fp4adam.optim.memory_layout import memory_order
from fp4adam.optim.state_codec import (
    INT8,
    PLAIN,
    REMAINDER,
    STATE_BLOCK,
    StateCodec,
    codec_of_codes,
    dither_bits,
)

# Elements that a step widens to FP32 at a time: per CPU thread, and on any other device.
_CPU_PIECE = 2**16
_DEVICE_PIECE = 2**24


# Where the scales of a state are kept, beside its codes.
SCALES = {
    name: f"{name}_scale" for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param")
}


class StateTensor(NamedTuple):
    """One state of a parameter: the rank's own codes and their scales.

    Attributes:
        codec: The storage format.
        codes: Dense tensor in the shape of the parameter, of the codec's dtype.
        scales: uint8 [ceil(n / 32)] in memory order; for remainders, int16 in the shape of the
            parameter; otherwise None.
    """

    codec: StateCodec
    codes: Tensor
    scales: Tensor | None

    @classmethod
    def of(cls, state: dict[str, Any], name: str, codec: StateCodec) -> "StateTensor":
        """The entry ``name`` of a parameter's optimizer state.

        A master that was just loaded is FP32 until the next step encodes it.
        """
        codes, scales = local(state[name]), state.get(SCALES[name])
        return cls(codec if codes.dtype == codec.dtype else PLAIN, codes, scales)

    @classmethod
    def of_saved(cls, saved: dict[str, Any], name: str) -> "StateTensor":
        """The entry ``name`` of a saved state: codes with scales, or plain numbers."""
        codes, scales = saved[name], saved.get(SCALES[name])
        codec = INT8 if name == "master_param" and codes.dtype == torch.int8 else PLAIN
        return cls(codec if scales is None else codec_of_codes(name, codes.dtype), codes, scales)

    @classmethod
    def zeros(cls, codec: StateCodec, param: Tensor) -> "StateTensor":
        """Zeros in the layout of ``param``."""
        return cls(codec, *codec.zeros_like(param))

    def store(self, state: dict[str, Any], name: str, owner: Tensor) -> None:
        """Put it into a state under ``name``; as a DTensor if its parameter ``owner`` is one.

        Scales follow each rank's memory order, not the shape of the parameter: no DTensors.
        """
        state[name] = like(owner, self.codes)
        state.pop(SCALES[name], None)
        if self.scales is not None:
            state[SCALES[name]] = self.scales

    def decode(self) -> Tensor:
        """The values as float32, in the layout of the codes.

        An exact codec returns its codes as they are, in their own dtype and without a copy.
        """
        if self.codec.exact:
            return self.codes
        order = memory_order(self.codes)
        codes = self.codes.permute(order)
        x = self.codec.decode(codes.reshape(-1), self.scales).view(codes.shape)
        return x.permute(_inverse(order))

    @classmethod
    def encode(cls, codec: StateCodec, x: Tensor) -> "StateTensor":
        """Encode a dense float32 tensor, rounding each value to the nearest code."""
        if codec.exact:
            return cls(codec, x, None)
        order = memory_order(x)
        codes, scales = codec.encode(x.permute(order).reshape(-1))
        codes = codes.view(x.permute(order).shape).permute(_inverse(order))
        return cls(codec, codes, scales)


def restored(saved: StateTensor, codec: StateCodec, param: Tensor) -> StateTensor:
    """A copy of a saved state of ``param``, converted to ``codec``."""
    if saved.codec.name == codec.name:
        _, codes, scales = zeros = StateTensor.zeros(codec, param)
        if saved.codes.stride() == codes.stride():
            codes.copy_(saved.codes)
            if scales is not None:
                scales.copy_(saved.scales)
            return zeros
    return StateTensor.encode(codec, state_like(param).copy_(saved.decode()))


def state_like(param: Tensor) -> Tensor:
    """Zeros in the layout of ``param``: float32, or float64 for a float64 parameter."""
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def adam_stored_(
    value: StateTensor,
    grad: Tensor,
    exp_avg: StateTensor,
    exp_avg_sq: StateTensor,
    max_exp_avg_sq: Tensor | None,
    scalars: Scalars,
    adam_w_mode: bool,
    grad_scale: Tensor | None = None,
    clip: Tensor | None = None,
    first_element: int = 0,
) -> None:
    """:func:`fp4adam.optim.adam.adam_` on stored states, which it decodes to FP32 piece by piece.

    ``first_element``: Index of the first element within the whole parameter; seeds the dither, so
    that shards round as the whole would.
    """
    stored = (value, exp_avg, exp_avg_sq)
    options = (scalars, adam_w_mode, grad_scale, clip)
    if all(s.codec.exact for s in stored):
        codes = (s.codes for s in stored[1:])
        return adam_(value.codes, grad, *codes, max_exp_avg_sq, *options)
    order = memory_order(exp_avg.codes)
    # A remainder has one entry per element, so it is cut like the codes and not like scales.
    remainder = value.scales if value.codec is REMAINDER else None
    tensors = [
        None if t is None else t.permute(order)
        for t in (*(s.codes for s in stored), grad, max_exp_avg_sq, remainder)
    ]
    first = 0
    for *codes, g, largest, rest in _pieces(tensors):
        shape, n = g.shape, g.numel()
        blocks = slice(first // STATE_BLOCK, -(-(first + n) // STATE_BLOCK))
        scales = [s.scales[blocks] if s.codec.scaled else None for s in stored]
        if rest is not None:
            scales[0] = rest.reshape(-1)
        numbers = [
            piece if s.codec.exact else s.codec.decode(piece.reshape(-1), scale).view(shape)
            for s, piece, scale in zip(stored, codes, scales, strict=True)
        ]
        adam_(numbers[0], g, *numbers[1:], largest, *options)
        dither = dither_bits(first_element + first, n, scalars.dither_step, g.device)
        for s, piece, scale, x, bits in zip(stored, codes, scales, numbers, dither, strict=True):
            if not s.codec.exact:
                new_codes, new_scales = s.codec.encode(x.view(-1), bits)
                piece.copy_(new_codes.view(shape))
                if s is value and rest is not None:
                    rest.copy_(new_scales.view(shape))
                elif scale is not None:
                    scale.copy_(new_scales)
        first += n


def _pieces(tensors: list[Tensor | None]) -> Iterator[tuple[Tensor | None, ...]]:
    """Cut tensors of one shape into matching views of whole blocks; None stays None."""
    given = [t for t in tensors if t is not None]
    if not given[0].numel():
        return  # this rank has no rows
    if all(t.is_contiguous() for t in given):
        tensors = [None if t is None else t.view(-1) for t in tensors]
    first = next(t for t in tensors if t is not None)
    per_row = first[0].numel() if first.numel() else 1
    size = torch.get_num_threads() * _CPU_PIECE if first.is_cpu else _DEVICE_PIECE
    rows_per_block = STATE_BLOCK // math.gcd(STATE_BLOCK, per_row)
    rows = max(size // per_row // rows_per_block, 1) * rows_per_block
    n_pieces = -(-first.shape[0] // rows)
    yield from zip(
        *([None] * n_pieces if t is None else t.split(rows) for t in tensors), strict=True
    )
