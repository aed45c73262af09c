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
from fp4adam.optim import remainder
from fp4adam.optim.options import Options
from fp4adam.optim.state_codec import (
    CODES,
    FLOAT32,
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


def strategy(owner: Tensor, param: Tensor, options: Options) -> "NoMaster":
    """How the master of a parameter is stored; ``param``: its local tensor."""
    codec = options.codecs(param.dtype)[MASTER]
    if isinstance(param, QuantizedTensor):
        if not options.master_weights:
            return NoMaster(owner, param)
        return CodeRemainder(owner, param) if codec is INT8 else WholeMaster(owner, param, codec)
    if param.dtype == torch.bfloat16 and options.store_param_remainders:
        return HighHalf(owner, param)
    if param.dtype in (torch.bfloat16, torch.float16) and options.master_weights:
        # int8 masters are of quantized weights.
        return WholeMaster(owner, param, FLOAT32 if codec is INT8 else codec)
    return NoMaster(owner, param)


class NoMaster:
    """The parameter is its own value: a plain one, or a quantized one whose codes are rounded.

    Attributes:
        name: The entry of a state that holds the master, or None.
        codec: How a step decodes and encodes the value.
        stored: How the entry is encoded, or None.
    """

    name: str | None = None
    codec: StateCodec = PLAIN
    stored: StateCodec | None = None

    def __init__(self, owner: Tensor, param: Tensor) -> None:
        self.owner, self.param = owner, param
        if isinstance(param, QuantizedTensor):
            self.codec = CODES

    def read(self, state: State) -> Tensor | None:
        """The local part of the master, FP32 on the parameter's device; None if there is none."""
        return None

    def store(self, state: State, value: Tensor | None) -> None:
        """Keep an FP32 value that :meth:`can_hold` in a state, in place of what it holds."""
        for name in ENTRIES:
            state.pop(name, None)

    def can_hold(self, value: Tensor) -> bool:
        """True if the parameter need not be written to have this value as its master."""
        return True

    def is_stored(self, state: State) -> bool:
        """True if a state holds the master as this strategy stores it."""
        return not any(name in state for name in ENTRIES)

    def saved(self, state: State, compact: bool, as_te: bool) -> State:
        """The entries of a checkpoint: an FP32 ``master_param``, or what is stored if compact.

        ``as_te``: Keep int16 remainders as they are, as Transformer Engine does.
        """
        value = self.read(state)
        if value is None:
            return {}
        kept = next(state[name] for name in ENTRIES if name in state)  # may be on the host
        return {MASTER: like(self.owner, value.to(local(kept).device))}

    def belongs(self, state: State) -> bool:
        """True if every element of the master in a state is within one gap of the parameter."""
        return _is_near(self.param, self.read(state))


class WholeMaster(NoMaster):
    name = MASTER

    def __init__(self, owner: Tensor, param: Tensor, codec: StateCodec) -> None:
        super().__init__(owner, param)
        self.stored = codec
        self.codec = PLAIN if codec.exact else codec

    def read(self, state: State) -> Tensor | None:
        if MASTER not in state:
            return None
        # Models move without the states, which follow when they are loaded.
        return StateTensor.of(state, MASTER, self.stored).decode().to(self.param.device)

    def store(self, state: State, value: Tensor | None) -> None:
        super().store(state, value)
        StateTensor.encode(self.stored, value).store(state, MASTER, self.owner)

    def is_stored(self, state: State) -> bool:
        return MASTER in state and local(state[MASTER]).dtype == self.stored.dtype

    def saved(self, state: State, compact: bool, as_te: bool) -> State:
        if compact or self.stored.exact:
            return {name: state[name] for name in ENTRIES if name in state}
        return super().saved(state, compact, as_te)


class HighHalf(NoMaster):
    """A BF16 parameter that is the upper half of its master; ``param_remainder`` completes it."""

    name = REST
    codec = stored = REMAINDER

    def read(self, state: State) -> Tensor | None:
        if MASTER in state:  # loaded
            return local(state[MASTER]).to(self.param.device)
        if REST not in state:
            return None
        return join_master(self.param.detach(), local(state[REST]).to(self.param.device))

    def store(self, state: State, value: Tensor | None) -> None:
        super().store(state, value)
        state[REST] = like(self.owner, split_master(value)[1])

    def can_hold(self, value: Tensor) -> bool:
        return False  # the parameter is a half of it

    def is_stored(self, state: State) -> bool:
        return REST in state

    def repair(self, state: State) -> None:
        """Zero remainders that another value of the parameter has turned into a NaN.

        Any other parameter with any remainder gives a master within half a BF16 step.
        """
        param, rest = self.param, local(state[REST])
        upper, _ = split_master(join_master(param, rest))
        rest.masked_fill_(upper.view(torch.int16) != param.view(torch.int16), 0)

    def saved(self, state: State, compact: bool, as_te: bool) -> State:
        if REST in state and (compact or as_te):
            return {REST: state[REST]}
        return super().saved(state, compact, as_te)


class CodeRemainder(WholeMaster):
    """An int8 remainder, which completes the codes of a quantized weight to its master."""

    def __init__(self, owner: Tensor, param: QuantizedTensor) -> None:
        super().__init__(owner, param, INT8)
        code = param.quantizer.layout.code_type
        if code.bits != 8 and code.name != "e2m1":
            raise ValueError(
                f"master_weight_dtype must not be int8 for codes of {code.name}, whose gaps may "
                "not be those of a float: it takes E2M1 and codes of 8 bits; pass torch.float16"
            )

    def read(self, state: State) -> Tensor | None:
        if not self.is_stored(state):
            return super().read(state)
        return remainder.complete(self.param, local(state[MASTER]).to(self.param.device))

    def store(self, state: State, value: Tensor | None) -> None:
        NoMaster.store(self, state, value)
        rest = remainder.split_off(self.param, value.view(self.param.shape))
        state[MASTER] = like(self.owner, rest)

    def can_hold(self, value: Tensor) -> bool:
        return remainder.is_in_reach(self.param, value)

    def saved(self, state: State, compact: bool, as_te: bool) -> State:
        own = super().saved(state, compact, as_te)
        if self.is_stored(own):
            own[DIGEST] = remainder.digest(self.param)
        return own

    def belongs(self, state: State) -> bool:
        if not self.is_stored(state):
            return super().belongs(state)
        known = state.get(DIGEST)
        return known is not None and torch.equal(known.cpu(), remainder.digest(self.param))


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
        largest = remainder.largest_values(param)
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
    return param.detach().float()  # a copy, as FP32 is its own master


def _gaps(param: Tensor) -> Tensor:
    """The gap from each value to the next larger magnitude, float32."""
    if isinstance(param, QuantizedTensor):
        return remainder.units(param).mul_(remainder.UNITS_PER_GAP)
    info = torch.finfo(param.dtype)
    power = _decoded(param).view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32)
    return power.clamp_(info.smallest_normal, info.max).mul_(info.eps)
