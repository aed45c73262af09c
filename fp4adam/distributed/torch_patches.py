"""Every place where torch is patched or its call stack is read.

torch has no hook at these places. Each function says what it waits for. Read in torch 2.11 to 2.13.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp4adam.tensors.quantized_tensor import implements_function


def wrap_broadcast_coalesced(wrapper: Callable[..., None]) -> None:
    """Replace the function by which DistributedDataParallel copies parameters to all replicas.

    It flattens values in C++, before an operator could see that tensors are quantized, but is
    looked up by name in ``torch.distributed`` at each call. Waits for an operator in its place:
    https://github.com/pytorch/pytorch/issues/79469

    The wrapper gets torch's function and its arguments.
    """
    own = dist._broadcast_coalesced
    dist._broadcast_coalesced = functools.wraps(own)(functools.partial(wrapper, own))


def wrap_shard_tensor(kind: Any, wrapper: Callable[..., Any]) -> None:
    """Replace ``_shard_tensor`` of torch's class Shard, once.

    ``distribute_tensor`` calls it to scatter and pad values, which makes plain tensors of quantized
    weights. Waits for a hook of tensor subclasses, as FSDP2 has them; no thread asks for it yet.
    The wrapper gets torch's function and its arguments.

    Raises:
        NotImplementedError: If this torch has no such function; parts would silently be plain.
    """
    own = getattr(kind, "_shard_tensor", None)
    if own is None:
        raise NotImplementedError(
            "Shard must have a method _shard_tensor for quantized weights to be distributed, got "
            f"none in torch {torch.__version__}; use torch 2.11 to 2.13, or leave the layer in "
            "high precision (filter=...)"
        )
    if not hasattr(own, "__wrapped__"):
        kind._shard_tensor = functools.wraps(own)(lambda *args, **kw: wrapper(own, *args, **kw))


_FLATTENED_BY = {
    "torch.distributed.fsdp._flat_param": (
        "quantized weights must be sharded by fully_shard, got FullyShardedDataParallel, which "
        "would decode them for good; call torch.distributed.fsdp.fully_shard, or choose it in "
        "your trainer (in Accelerate fsdp_version=2)"
    ),
    "torch.distributed.optim.zero_redundancy_optimizer": (
        "parameters_as_bucket_view must be False for quantized parameters, got True: they cannot "
        "be views of a flat buffer; leave it out, each is broadcast as it is"
    ),
}


@implements_function(torch.flatten)
@implements_function(Tensor.flatten)
def _flatten(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Refuse what moves parameters to flat buffers, which would decode quantized ones.

    FullyShardedDataParallel and ZeroRedundancyOptimizer have no hooks for tensor subclasses.
    """
    caller = sys._getframe(2).f_globals.get("__name__")  # of __torch_function__
    if caller in _FLATTENED_BY:
        raise NotImplementedError(_FLATTENED_BY[caller])
    return torch.flatten(tensor, *args, **kwargs)


def is_loading_from_rank_0() -> bool:
    """Whether the caller is torch.distributed.checkpoint's ``broadcast_from_rank0``.

    There rank 0 sends its tensor, which may be quantized, and the other ranks receive into plain
    tensors of its nominal dtype. Only the call stack shows this, and the module takes a second to
    import, too long to patch it. Waits for receivers like the sent tensor; no thread asks for it.
    """
    module = sys.modules.get("torch.distributed._state_dict_utils")
    frame = None if module is None else sys._getframe(1)
    while frame is not None and frame.f_globals is not vars(module):
        frame = frame.f_back
    return frame is not None
