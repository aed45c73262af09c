"""What collectives move: bytes and calls, counted beneath FSDP2 and DTensor."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp4adam import QuantizedTensor


class Traffic(TorchDispatchMode):
    """Counts what collectives move inside, those of FSDP2's hooks and of DTensor included.

    ``bytes`` says for each kind of collective what this process receives from the others (gather),
    sends to them (scatter) or hands in (reduce), by the sizes of the tensors that it works on;
    ``calls`` is the number of these collectives;
    ``reduced`` has the shape and dtype of each tensor that is handed in to be reduced.
    """

    KINDS = {
        "allgather": "all_gather",
        "reducescatter": "reduce_scatter",
        "allreduce": "all_reduce",
    }

    def __init__(self) -> None:
        super().__init__()
        self.bytes = dict.fromkeys(self.KINDS.values(), 0)
        self.calls = 0
        self.reduced: list[tuple[torch.Size, torch.dtype]] = []

    def __torch_dispatch__(
        self, func: Any, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(issubclass(kind, (DTensor, QuantizedTensor)) for kind in types):
            return NotImplemented  # they are taken apart first, and what they call comes here
        result = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace:
            name = func.__name__.replace("_", "")
            for start, kind in self.KINDS.items():
                if name.startswith(start):
                    self._count(kind, *args[:2], result)
        return result

    def _count(self, kind: str, *involved: Any) -> None:
        self.calls += 1
        # Some collectives write into an argument, others return what they have made.
        tensors = [[t for t in tree_leaves(part) if isinstance(t, Tensor)] for part in involved]
        sizes = sorted(sum(t.nbytes for t in part) for part in tensors if part)
        if kind == "all_reduce":
            self.bytes[kind] += sizes[0]
            self.reduced += [(t.shape, t.dtype) for t in tensors[0]]
        else:
            self.bytes[kind] += sizes[-1] - sizes[0]
