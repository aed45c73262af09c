"""A state of a parameter with its scales.

A codec works on flat tensors in memory order; a state has the shape of its parameter.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import like, local
from fp4adam.optim.state_codec import FACTORED, INT8, PLAIN, REMAINDER, StateCodec, codec_of_codes

# Where the scales of a state are kept, beside its codes.
SCALES = {
    name: f"{name}_scale" for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param")
}
# Whether the elements of a tensor fill a block of memory without gaps or overlaps, in any order.
is_dense = torch.ops.aten.is_non_overlapping_and_dense


class StateTensor(NamedTuple):
    """One state of a parameter: the rank's own codes, in the parameter's shape, and their scales.

    These are uint8 [ceil(n / 32)] in memory order; for remainders, int16 in the parameter's shape.
    """

    codec: StateCodec
    codes: Tensor
    scales: Tensor | None

    @classmethod
    def of(cls, state: dict[str, Any], name: str, codec: StateCodec) -> "StateTensor":
        codes, scales = local(state[name]), state.get(SCALES[name])
        # A master that was just loaded is FP32 until the next step encodes it.
        return cls(codec if codes.dtype == codec.dtype else PLAIN, codes, scales)

    @classmethod
    def of_saved(cls, saved: dict[str, Any], name: str) -> "StateTensor":
        """The entry ``name`` of a saved state: codes with scales, or plain numbers."""
        codes, scales = saved[name], saved.get(SCALES[name])
        codec = INT8 if name == "master_param" and codes.dtype == torch.int8 else PLAIN
        return cls(codec if scales is None else codec_of_codes(name, codes.dtype), codes, scales)

    def store(self, state: dict[str, Any], name: str, owner: Tensor) -> None:
        """Put it into a state under ``name``; as a DTensor if its parameter ``owner`` is one."""
        state[name] = self.codes if self.codec is FACTORED else like(owner, self.codes)
        state.pop(SCALES[name], None)
        if self.scales is not None:  # in each rank's memory order: no DTensor
            state[SCALES[name]] = self.scales

    def decode(self) -> Tensor:
        """The values as float32; codes of an exact codec as they are, without a copy."""
        if self.codec.exact:
            return self.codes
        if self.codec is FACTORED:
            return FACTORED.decode(self.codes, self.scales)
        scales = _flat(self.scales) if self.codec is REMAINDER else self.scales
        return _like(self.codes, self.codec.decode(_flat(self.codes), scales))

    def replace(self, x: Tensor, dither: Tensor) -> None:
        """Encode float32 values in place; ``dither``: int32 [n] in memory order."""
        if self.codec.exact or self.codec is FACTORED:
            return  # they are the codes, or renewed when the step is done
        codes, scales = self.codec.encode(_flat(x), dither)
        self.codes.copy_(_like(self.codes, codes))
        if self.codec is REMAINDER:
            scales = _like(self.scales, scales)
        if scales is not None:
            self.scales.copy_(scales)

    @classmethod
    def encode(cls, codec: StateCodec, x: Tensor) -> "StateTensor":
        """Round each value of a dense float32 tensor to the nearest code."""
        if codec.exact:
            return cls(codec, x, None)
        codes, scales = codec.encode(_flat(x))
        return cls(codec, _like(x, codes), scales)


def restored(saved: StateTensor, codec: StateCodec, param: Tensor) -> StateTensor:
    """A copy of a saved state of ``param``, converted to ``codec``."""
    if saved.codec.name == codec.name:
        codes, scales = codec.zeros_like(param)
        if codec is FACTORED or saved.codes.stride() == codes.stride():
            codes.copy_(saved.codes)
            if scales is not None:
                scales.copy_(saved.scales)
            return StateTensor(codec, codes, scales)
    return StateTensor.encode(codec, state_like(param).copy_(saved.decode()))


def state_like(param: Tensor) -> Tensor:
    """Zeros in the layout of ``param``: float32, or float64 for a float64 parameter."""
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def step_count(step: Any, param: Tensor, capturable: bool) -> Tensor:
    """A count of steps as a state has it: float32 (), which captured steps read on the device."""
    device = param.device if capturable else "cpu"
    return torch.as_tensor(step, dtype=torch.float32, device=device).reshape(())


def _memory_order(x: Tensor) -> list[int]:
    return sorted(range(x.dim()), key=x.stride, reverse=True)


def _flat(x: Tensor) -> Tensor:
    return x.permute(_memory_order(x)).reshape(-1)


def _like(x: Tensor, flat: Tensor) -> Tensor:
    order = _memory_order(x)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.view(x.permute(order).shape).permute(inverse)
