"""Whether masters are NaN, of weights whose codes cannot say so, without a wait for the device.

E2M1 has no NaN, and a block's scale passes over NaN, as in Transformer Engine: a weight whose
master is NaN throughout decodes to zeros, and the loss stays finite. So masters are looked at after
each step. On the CPU all are. On a GPU it is one weight per step in turn, whose answer is read at a
later step; a loss that is NaN makes all gradients NaN, so it shows in whichever weight is next.
"""

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp4adam.optim.remainder import NAN
from fp4adam.optim.state_codec import NAN_SCALE
from fp4adam.optim.state_tensor import StateTensor
from fp4adam.tensors import backend
from fp4adam.tensors.quantized_tensor import QuantizedTensor

# Multiples of these, modulo 1, are spread evenly, so that the turn comes to each part, and in each
# part to each weight.
_OF_PARTS, _OF_WEIGHTS = (math.sqrt(5) - 1) / 2, math.sqrt(2)
# A weight, and what returns its master as it is stored.
Master = tuple[QuantizedTensor, Callable[[], StateTensor]]


def hides_nan(param: Tensor) -> bool:
    """Whether the codes of a local tensor have no NaN, so that only its master shows one."""
    is_quantized = isinstance(param, QuantizedTensor) and param.numel()
    return bool(is_quantized) and param.quantizer.layout.code_type == "e2m1"


def telling(master: StateTensor) -> Tensor:
    """The one of a master's stored numbers that says whether any of its elements is NaN."""
    if master.scales is not None:
        return master.scales.amax()
    return master.codes.amin() if master.codes.dtype == torch.int8 else master.codes.amax()


def described(param: QuantizedTensor) -> str:
    """What a warning calls a weight whose master is NaN; it does not keep the weight alive."""
    name = param._shared.name
    weight = "a weight" if name is None else f"weight {name!r}"
    return f"{weight} has become NaN, which the codes of a {type(param).__name__}"


class Answer:
    """A number on its way from a GPU to the host."""

    def __init__(self, value: Tensor) -> None:
        self.value = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
        self.value.copy_(value, non_blocking=True)
        self._arrival = torch.cuda.Event()
        self._arrival.record(torch.cuda.current_stream(value.device))

    def is_here(self) -> bool:
        """Whether ``value`` can be read."""
        return self._arrival.query()


class NanWatch:
    """Warns once, of the first master that it finds to be NaN."""

    def __init__(self) -> None:
        self._calls = self._looks = 0
        self._answer: tuple[Answer, str] | None = None
        self._is_done = False

    def look(self, masters: Sequence[Master], n_parts: int = 1) -> None:
        """Look at masters after a step, of parameters that :func:`hides_nan` is true of.

        ``n_parts``: If a step has several such calls, each for some of the parameters, how many.
        """
        if self._is_done or not masters or backend.is_capturing():
            return
        if masters[0][0].device.type == "cpu":
            for param, master in masters:
                self._judge(telling(master()).item(), described(param))
            return
        if self._answer is not None:
            answer, weight = self._answer
            if not answer.is_here():
                return
            self._answer = None
            self._judge(answer.value.item(), weight)
        self._calls += 1
        if self._calls * _OF_PARTS % 1 >= 1 / n_parts:
            return
        self._looks += 1
        param, master = masters[int(self._looks * _OF_WEIGHTS % 1 * len(masters))]
        self._answer = Answer(telling(master())), described(param)

    def _judge(self, number: float | int, weight: str) -> None:
        is_code = isinstance(number, int)
        if self._is_done or not (number in (NAN, NAN_SCALE) if is_code else math.isnan(number)):
            return
        self._is_done = True
        warnings.warn(
            f"the master of {weight} cannot hold: the model goes on with other numbers in its "
            "place, and its loss may stay finite. Load a checkpoint from before; clip gradients, "
            "or lower the learning rate",
            stacklevel=2,
        )
