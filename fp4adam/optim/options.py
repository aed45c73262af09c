"""The options of a whole optimizer, which hold for all of its parameter groups."""

import dataclasses
from typing import Any

import torch

from fp4adam.optim.state_codec import FLOAT64, StateCodec, state_codec

_STORAGE = ("exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype", "store_param_remainders")
_FP8 = torch.float8_e4m3fn
# The storage options that one word chooses; see ``FusedAdam``.
STATES: dict[str, dict[str, Any]] = {
    word: dict(zip(_STORAGE, chosen, strict=True))
    for word, chosen in {
        "32bit": (torch.float32, torch.float32, torch.float32, False),
        "16bit": (torch.bfloat16, torch.bfloat16, torch.float16, False),
        "8bit": (_FP8, _FP8, torch.int8, True),
        "factored": (_FP8, "factored", torch.int8, True),
    }.items()
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What an optimizer was made with: the ``name`` of its class, and arguments of it."""

    name: str = "FusedAdam"
    capturable: bool = False
    master_weights: bool = True
    states: str = "32bit"
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype | str = torch.float32
    master_weight_dtype: torch.dtype = torch.float32
    store_param_remainders: bool = False
    use_decoupled_grad: bool = False
    offload_states: bool = False
    set_grad_none: bool | None = None
    quantize_from: str = "master"

    @classmethod
    def of(cls, states: str, given: dict[str, Any]) -> "Options":
        """The options that ``states`` stands for, with those that are given (not None)."""
        if states not in STATES:
            raise ValueError(
                f"states must be one of {', '.join(map(repr, STATES))}, got {states!r}; '32bit' is "
                "the default, and single options such as exp_avg_dtype choose anything between"
            )
        given = {name: value for name, value in given.items() if value is not None}
        chosen = STATES[states] | given
        if not chosen["master_weights"]:  # or small updates would never move BF16 parameters
            chosen["store_param_remainders"] = given.get("store_param_remainders", True)
        elif chosen["master_weight_dtype"] == torch.float16:  # as in Transformer Engine
            chosen["store_param_remainders"] = False
        return cls(states=states, **chosen)

    def codecs(self, param_dtype: torch.dtype, factors: bool = True) -> dict[str, StateCodec]:
        """The codecs of master and moments, by the name of the state.

        ``factors``: Whether the second moment can be factored; else it is stored like the first.
        """
        second = self.exp_avg_sq_dtype
        if second == "factored" and not factors:
            second = self.exp_avg_dtype
        dtypes = self.master_weight_dtype, self.exp_avg_dtype, second
        stored = dict(zip(("master_param", "exp_avg", "exp_avg_sq"), dtypes, strict=True))
        if param_dtype == torch.float64:
            return dict.fromkeys(stored, FLOAT64)
        return {state: state_codec(state, dtype) for state, dtype in stored.items()}

    @property
    def hides_states(self) -> bool:
        """True if states may have entries that a checkpoint lacks, such as scales."""
        codecs = self.codecs(torch.float32).values()
        return self.store_param_remainders or any(codec.scaled for codec in codecs)
