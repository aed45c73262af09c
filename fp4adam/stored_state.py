"""States of one parameter as they are stored: whole ones for checkpoints, pieces of them for steps.

What a codec makes of numbers is flat, in the order of memory; a state has the shape of its
parameter.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4adam.adam import Scalars, adam_
from fp4adam.state_codec import STATE_BLOCK, StateCodec, dither_bits

# Elements of which a step has FP32 copies at a time: per thread of a CPU, and on another device.
_CPU_PIECE = 2**16
_DEVICE_PIECE = 2**24


class StoredState(NamedTuple):
    """A state of a parameter.

    Attributes:
        codec: How it is stored.
        codes: In the shape of the parameter, dense.
        scales: uint8 [ceil(n / 32)], in the order of memory, or None.
    """

    codec: StateCodec
    codes: Tensor
    scales: Tensor | None

    @classmethod
    def of(cls, state: dict[str, Any], name: str, codec: StateCodec) -> "StoredState":
        """The state ``name`` of a parameter's state in the optimizer."""
        return cls(codec, state[name], state[f"{name}_scale"] if codec.scaled else None)

    def put_into(self, state: dict[str, Any], name: str) -> None:
        """Make it the state ``name``."""
        state[name] = self.codes
        state.pop(f"{name}_scale", None)
        if self.scales is not None:
            state[f"{name}_scale"] = self.scales

    def decode(self) -> Tensor:
        """The numbers, float32 in the layout of the codes; no copy of what is stored exactly."""
        if self.codec.exact:
            return self.codes
        order = memory_order(self.codes)
        codes = self.codes.permute(order)
        x = self.codec.decode(codes.reshape(-1), self.scales).view(codes.shape)
        return x.permute(_inverse(order))

    @classmethod
    def encode(cls, codec: StateCodec, x: Tensor) -> "StoredState":
        """Store float32 numbers, dense, each as the nearest code."""
        if codec.exact:
            return cls(codec, x, None)
        order = memory_order(x)
        codes, scales = codec.encode(x.permute(order).reshape(-1))
        codes = codes.view(x.permute(order).shape).permute(_inverse(order))
        return cls(codec, codes, scales)


def memory_order(tensor: Tensor) -> list[int]:
    """Dimensions, the one with the largest stride first."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def adam_stored_(
    value: Tensor,
    grad: Tensor,
    exp_avg: StoredState,
    exp_avg_sq: StoredState,
    max_exp_avg_sq: Tensor | None,
    scalars: Scalars,
    adam_w_mode: bool,
    grad_scale: Tensor | None = None,
    clip: Tensor | None = None,
) -> None:
    """:func:`fp4adam.adam.adam_` on stored moments, which exist in FP32 a piece at a time only."""
    if exp_avg.codec.exact and exp_avg_sq.codec.exact:
        return adam_(
            value,
            grad,
            exp_avg.codes,
            exp_avg_sq.codes,
            max_exp_avg_sq,
            scalars,
            adam_w_mode,
            grad_scale,
            clip,
        )
    order = memory_order(exp_avg.codes)
    plain = [value, grad] if max_exp_avg_sq is None else [value, grad, max_exp_avg_sq]
    tensors = [t.permute(order) for t in (exp_avg.codes, exp_avg_sq.codes, *plain)]
    if all(t.is_contiguous() for t in tensors):
        tensors = [t.view(-1) for t in tensors]
    first = 0
    for codes, codes_sq, value_piece, grad_piece, *max_piece in _pieces(tensors):
        shape, n = codes.shape, codes.numel()
        blocks = slice(first // STATE_BLOCK, -(-(first + n) // STATE_BLOCK))
        parts = [
            s._replace(
                codes=piece.reshape(-1), scales=None if s.scales is None else s.scales[blocks]
            )
            for s, piece in ((exp_avg, codes), (exp_avg_sq, codes_sq))
        ]
        m, v = (part.codec.decode(part.codes, part.scales) for part in parts)
        adam_(
            value_piece,
            grad_piece,
            m.view(shape),
            v.view(shape),
            *(max_piece or [None]),
            scalars,
            adam_w_mode,
            grad_scale,
            clip,
        )
        dither = dither_bits(first, n, int(scalars.dither_step), value.device)
        for part, piece, x in zip(parts, (codes, codes_sq), (m, v), strict=True):
            new_codes, new_scales = part.codec.encode(x, dither)
            piece.copy_(new_codes.view(shape))
            if part.scales is not None:
                part.scales.copy_(new_scales)
        first += n


def _pieces(tensors: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors of one shape alike, the first one contiguous, into views of whole blocks."""
    first = tensors[0]
    if first.dim() == 0 or first.numel() == 0:
        yield tuple(tensors)
        return
    per_row = first[0].numel()
    size = torch.get_num_threads() * _CPU_PIECE if first.is_cpu else _DEVICE_PIECE
    rows_per_block = STATE_BLOCK // math.gcd(STATE_BLOCK, per_row)
    rows = max(size // per_row // rows_per_block, 1) * rows_per_block
    yield from zip(*(t.split(rows) for t in tensors), strict=True)
