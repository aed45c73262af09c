"""Where the FP32 value of a parameter is between steps: four strategies.

===============  ============================================  =========================
strategy         the value                                     bytes per element
===============  ============================================  =========================
NoMaster         the parameter itself                          0
WholeMaster      ``master_param``, in FP32 or FP16             4, or 2 + 1/32
HighHalf         a BF16 parameter and its ``param_remainder``  2
CodeRemainder    a quantized weight and its ``master_param``   1
===============  ============================================  =========================

A master that comes from somewhere else, such as a checkpoint, stands if it belongs to the weight:
every element is within a gap between codes of the decoded weight, under the weight's own scales.
Then it is the value that the weight was rounded from, however it was rounded since: saved as plain
values, cast to another dtype, quantized in a scale group or with the scales of earlier steps. A
remainder belongs to any codes, so it is saved with a digest of its own.
"""

from typing import Any

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import like, local
from fp4adam.optim.remainder import (
    UNITS_PER_GAP,
    CodeRemainderCodec,
    digest,
    is_in_reach,
    largest_values,
    units,
)
from fp4adam.optim.state_codec import (
    CODES,
    INT8,
    PLAIN,
    REMAINDER,
    StateCodec,
    join_master,
    split_master,
)
from fp4adam.optim.state_tensor import SCALES, StateTensor
from fp4adam.tensors.quantized_tensor import QuantizedTensor

State = dict[str, Any]

# Where the digest of the codes is saved that a remainder belongs to.
DIGEST = "weight_digest"
MASTER, REST = "master_param", "param_remainder"
# The entries of a state that hold a master, whichever way.
ENTRIES = (MASTER, SCALES[MASTER], REST, DIGEST)
# A gap and a half, as a weight may have been rounded twice, with scales of its own after those of a
# group, and gaps above a power of two are twice as large.
_GAPS = 1.5


class NoMaster:
    """The parameter is its own value: a plain one, or a quantized one whose codes are rounded.

    Args:
        owner: The parameter in its group.
        param: The local tensor.

    Attributes:
        name: The entry of a state that holds the master, or None.
        codec: How a step decodes and encodes the value.
    """

    name: str | None = None
    codec: StateCodec = PLAIN

    def __init__(self, owner: Tensor, param: Tensor) -> None:
        self.owner, self.param = owner, param
        if isinstance(param, QuantizedTensor):
            self.codec = CODES

    def read(self, state: State) -> Tensor | None:
        """The local part of the master, FP32 on the parameter's device; None if there is none."""
        return None

    def store(self, state: State, value: Tensor) -> None:
        """Keep an FP32 value in a state, in place of what it holds."""
        _drop(state)

    def is_stored(self, state: State) -> bool:
        """True if a state holds the master as this strategy stores it."""
        return not any(name in state for name in ENTRIES)

    def saved(self, state: State, compact: bool, as_te: bool) -> State:
        """The entries of a checkpoint: an FP32 ``master_param``, or what is stored if compact.

        ``as_te``: Keep int16 remainders as they are, as Transformer Engine does.
        """
        return {}

    def belongs(self, value: Tensor) -> bool:
        """True if every element of an FP32 value is within one gap of the parameter."""
        return _is_near(self.param, value)


class WholeMaster(NoMaster):
    """``master_param`` in the state, in the format of a codec."""

    name = MASTER

    def __init__(self, owner: Tensor, param: Tensor, codec: StateCodec) -> None:
        super().__init__(owner, param)
        self.stored_codec = codec
        self.codec = PLAIN if codec.exact else codec

    def read(self, state: State) -> Tensor | None:
        return _whole(state, self.stored_codec, self.param)

    def store(self, state: State, value: Tensor) -> None:
        _drop(state)
        StateTensor.encode(self.stored_codec, value).store(state, MASTER, self.owner)

    def is_stored(self, state: State) -> bool:
        return MASTER in state and local(state[MASTER]).dtype == self.stored_codec.dtype

    def saved(self, state: State, compact: bool, as_te: bool) -> State:
        own = {name: state[name] for name in ENTRIES[:2] if name in state}
        if MASTER in own and not compact:
            stored = StateTensor.of(own, MASTER, self.stored_codec)
            StateTensor(PLAIN, stored.decode(), None).store(own, MASTER, self.owner)
        return own


class HighHalf(NoMaster):
    """A BF16 parameter that is the upper half of its master; ``param_remainder`` completes it."""

    name = REST
    codec = REMAINDER

    def read(self, state: State) -> Tensor | None:
        if REST not in state:
            return _whole(state, PLAIN, self.param)
        rest = local(state[REST])
        return join_master(self.param.detach().to(rest.device), rest)

    def store(self, state: State, value: Tensor) -> None:
        """Keep the remainder; as near as int16 gets if the parameter is another rounding."""
        _drop(state)
        bits = split_master(value)[0].view(torch.int16).to(torch.int32) << 16
        bits += split_master(value)[1]
        own = self.param.detach().view(torch.int16).to(torch.int32)
        rest = (bits - (own << 16)).clamp_(-(2**15), 2**15 - 1)
        # Bits are no distances between numbers of different signs.
        rest.masked_fill_((bits >> 31) != (own >> 31), 0)
        rest.masked_fill_(value.isnan(), 0)
        state[REST] = like(self.owner, rest.to(torch.int16))

    def is_stored(self, state: State) -> bool:
        return REST in state and MASTER not in state

    def repair(self, state: State) -> None:
        """Zero remainders that another value of the parameter has turned into a NaN.

        Any other parameter with any remainder gives a master within half a BF16 step.
        """
        param, rest = self.param.detach(), local(state[REST])
        upper, _ = split_master(join_master(param, rest))
        rest.masked_fill_(upper.view(torch.int16) != param.view(torch.int16), 0)

    def saved(self, state: State, compact: bool, as_te: bool) -> State:
        if REST in state and (compact or as_te):
            return {REST: state[REST]}
        value = self.read(state)
        return {} if value is None else {MASTER: like(self.owner, value)}


class CodeRemainder(WholeMaster):
    """An int8 remainder, which completes the codes of a quantized weight to its master."""

    def __init__(self, owner: Tensor, param: QuantizedTensor) -> None:
        super().__init__(owner, param, CodeRemainderCodec(param))
        self.codec = INT8

    def saved(self, state: State, compact: bool, as_te: bool) -> State:
        own = super().saved(state, compact, as_te)
        if MASTER in own and local(own[MASTER]).dtype == torch.int8:
            own[DIGEST] = digest(self.param)
        return own

    def is_of_codes(self, state: State) -> bool:
        """True if a stored remainder was saved with the codes that the weight has."""
        known = state.get(DIGEST)
        return known is not None and torch.equal(known.cpu(), digest(self.param))

    def can_reach(self, value: Tensor) -> bool:
        """True if a remainder can complete the codes to a value."""
        return is_in_reach(self.param, value)


def _drop(state: State) -> None:
    for name in ENTRIES:
        state.pop(name, None)


def _whole(state: State, codec: StateCodec, param: Tensor) -> Tensor | None:
    """A ``master_param``; models move without the states, which follow when they are loaded."""
    if MASTER not in state:
        return None
    return StateTensor.of(state, MASTER, codec).decode().to(param.device)


def _is_near(param: Tensor, value: Tensor) -> bool:
    value = value.to(param.device, torch.float32).view(param.shape)
    gap = _gaps(param)
    distance = _decoded(param).sub_(value).abs_()
    near = distance <= gap.mul_(_GAPS)
    if near.all():
        return True
    # What is rounded to the largest code may be larger: by less than two gaps with scales of its
    # own, by any factor with those of earlier values.
    if isinstance(param, QuantizedTensor):
        largest = largest_values(param)
        is_delayed = param.quantizer.layout.tensor_scale == "delayed"
    else:
        largest, is_delayed = torch.finfo(param.dtype).max, True
    decoded = _decoded(param)
    beyond = (decoded.abs() >= largest) & (value * decoded.sign() >= largest)
    if not is_delayed:
        beyond &= distance <= gap.mul_(2 / _GAPS)
    return bool((near | beyond).all())


def _decoded(param: Tensor) -> Tensor:
    if isinstance(param, QuantizedTensor):
        return param.detach().dequantize(torch.float32)
    return param.detach().to(torch.float32, copy=True)


def _gaps(param: Tensor) -> Tensor:
    """The gap from each value to the next larger magnitude, float32."""
    if isinstance(param, QuantizedTensor):
        return units(param).mul_(UNITS_PER_GAP)
    info = torch.finfo(param.dtype)
    power = _decoded(param).view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32)
    return power.clamp_(info.smallest_normal, info.max).mul_(info.eps)
