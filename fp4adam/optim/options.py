"""The options of a whole optimizer, which hold for all of its parameter groups."""

import dataclasses
from typing import Any

import torch

from fp4adam.optim.state_codec import FLOAT64, StateCodec, state_codec

# The storage options that one word chooses; see ``FusedAdam``.
STATES: dict[str, dict[str, Any]] = {
    "32bit": {
        "exp_avg_dtype": torch.float32,
        "exp_avg_sq_dtype": torch.float32,
        "master_weight_dtype": torch.float32,
        "store_param_remainders": False,
    },
    "16bit": {
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
        "master_weight_dtype": torch.float16,
        "store_param_remainders": False,
    },
    "8bit": {
        "exp_avg_dtype": torch.float8_e4m3fn,
        "exp_avg_sq_dtype": torch.float8_e4m3fn,
        "master_weight_dtype": torch.int8,
        "store_param_remainders": True,
    },
}


def storage(states: str, master_weights: bool, **given: Any) -> dict[str, Any]:
    """The storage options that ``states`` stands for, with those that are ``given`` (not None).

    BF16 parameters without masters keep remainders, or small updates would never move them. There
    are none beside FP16 masters, as in Transformer Engine.

    Raises:
        ValueError: If there is no such word.
    """
    if states not in STATES:
        raise ValueError(
            f"states must be one of {', '.join(map(repr, STATES))}, got {states!r}; '32bit' is the "
            "default, and single options such as exp_avg_dtype choose anything between"
        )
    own = {name: value for name, value in given.items() if value is not None}
    chosen = STATES[states] | own
    if not master_weights:
        chosen["store_param_remainders"] = own.get("store_param_remainders", True)
    elif chosen["master_weight_dtype"] == torch.float16:
        chosen["store_param_remainders"] = False
    return chosen


@dataclasses.dataclass(frozen=True)
class Options:
    """What an optimizer was made with; its parameters and engines share one object.

    Attributes:
        name: The optimizer's class, for error messages.
        capturable: Whether step counts and scalars stay on the device, for CUDA graphs.

    The others are arguments of :class:`FP4Adam`.
    """

    name: str = "FusedAdam"
    capturable: bool = False
    master_weights: bool = True
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    master_weight_dtype: torch.dtype = torch.float32
    store_param_remainders: bool = False
    use_decoupled_grad: bool = False
    offload_states: bool = False
    set_grad_none: bool | None = None
    quantize_from: str = "master"

    def codecs(self, param_dtype: torch.dtype) -> dict[str, StateCodec]:
        """The codecs of master and moments, by the name of the state."""
        if param_dtype == torch.float64:
            return dict.fromkeys(("exp_avg", "exp_avg_sq", "master_param"), FLOAT64)
        return {
            "master_param": state_codec("master_weight", self.master_weight_dtype),
            "exp_avg": state_codec("exp_avg", self.exp_avg_dtype),
            "exp_avg_sq": state_codec("exp_avg_sq", self.exp_avg_sq_dtype),
        }

    @property
    def hides_states(self) -> bool:
        """True if states may have entries that a checkpoint lacks, such as scales."""
        codecs = self.codecs(torch.float32).values()
        return self.store_param_remainders or any(codec.scaled for codec in codecs)

    def describe(self) -> str:
        """How and where states are stored, in lines for people."""
        names = ("exp_avg", "exp_avg_sq", "master_weight")
        dtypes = (str(getattr(self, f"{name}_dtype")).removeprefix("torch.") for name in names)
        stored = ", ".join(f"{n} {dtype}" for n, dtype in zip(names, dtypes, strict=True))
        masters = "" if self.master_weights else " (no masters)"
        return f"States: {stored}{masters}\nOffloaded to the host: {self.offload_states}\n"
