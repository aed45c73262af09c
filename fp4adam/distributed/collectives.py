"""Collectives that copy quantized tensors between ranks, bit for bit.

The sender transmits its inner tensors unchanged, and the high-precision initial value if it still
has one. Decoding and quantizing again could change the codes, and masters would start from other
values. Only the sender knows whether it has an initial value, so each call begins with a small
all-reduce, which also detects differing formats. All ranks have to pass quantized tensors, just as
any collective needs the same size and dtype on all ranks.

Broadcasts and all-gathers work like this. A scatter sends decoded values, because DTensor pads
shorter parts, which makes them plain tensors without the other ranks knowing.
"""

import hashlib
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp4adam.distributed.torch_patches import is_loading_from_rank_0, wrap_broadcast_coalesced
from fp4adam.tensors import rows
from fp4adam.tensors.quantized_tensor import QuantizedTensor, implements_operator
from fp4adam.tensors.quantizer import HIGH_PRECISION_DTYPES

# Announced by the sender: the dtype of its high-precision initial value, as an index, or that its
# codes are not written yet.
_INIT_DTYPES = (None, *HIGH_PRECISION_DTYPES)
_UNSETTLED = len(_INIT_DTYPES)


class _Slot:
    """One tensor of a collective on this rank, which sends it or receives it.

    Attributes:
        parts: The plain tensors to send or to receive into, once :func:`_agree` has returned.
    """

    def __init__(self, tensor: Tensor, sends: bool) -> None:
        self.tensor, self.sends, self.parts = tensor, sends, [tensor]
        self._received = self._init_val = None

    def state(self) -> int:
        """What the sender announces."""
        if not (self.sends and isinstance(self.tensor, QuantizedTensor)):
            return 0
        if self.tensor.pending_value() is not None:
            return _UNSETTLED
        value = self.tensor._high_precision_init_val if rows.is_all(self.tensor) else None
        return 0 if value is None else _INIT_DTYPES.index(value.dtype)

    def prepare(self, init_dtype: torch.dtype | None) -> None:
        """Make the parts, with a high-precision initial value if the sender has one."""
        tensor, value = self.tensor, None
        if not isinstance(tensor, QuantizedTensor):
            return
        if self.sends:
            own = rows.own_blocks(tensor)
            if init_dtype is not None:
                value = tensor._high_precision_init_val.to(tensor.device)
        else:
            own = self._received = tensor._map_storage(torch.empty_like)
            if init_dtype is not None:
                value = torch.empty(tensor.shape, dtype=init_dtype, device=tensor.device)
        self._init_val = value
        parts = [*own.storage_tensors().values()]
        parts += [] if value is None else [value.reshape(tensor.shape)]
        # .data has a version of its own; sending must not count as a write.
        self.parts = [part.data.contiguous() for part in parts] if self.sends else parts

    def take(self) -> None:
        """Write what has been received to the tensor."""
        if self._received is not None:
            self.tensor._write(self._received)
            if rows.is_all(self.tensor):
                self.tensor._high_precision_init_val = self._init_val


def _agree(group: dist.ProcessGroup, slots: Sequence[_Slot]) -> None:
    """Prepare slots, once all ranks know what is sent.

    Raises:
        RuntimeError: On every rank, if formats differ between ranks, or a sender has no codes yet.
    """
    local_info = [(slot.state(), look := _format_hash(slot.tensor), -look) for slot in slots]
    table = torch.tensor(local_info, dtype=torch.int64, device=slots[0].tensor.device)
    dist.all_reduce(table, dist.ReduceOp.MAX, group)
    found = table.tolist()
    for slot, (state, most, least) in zip(slots, found, strict=True):
        if most != -least:
            raise RuntimeError(
                "a quantized tensor must have the same shape, dtype and quantizer on all ranks of "
                f"a collective, got {_name_of(slot.tensor)} on rank {group.rank()} and another one "
                "on another rank; quantize the model the same way on all ranks"
            )
        if state == _UNSETTLED:
            raise RuntimeError(
                f"a {type(slot.tensor).__name__} must have been quantized to be sent, got one of "
                f"shape {tuple(slot.tensor.shape)} with values that are not quantized yet; run a "
                "forward pass or a step first"
            )
    for slot, (state, *_) in zip(slots, found, strict=True):
        slot.prepare(_INIT_DTYPES[state])


def _name_of(tensor: Tensor) -> str:
    kind = tensor.quantizer if isinstance(tensor, QuantizedTensor) else "plain values"
    return f"{kind} of shape {tuple(tensor.shape)} in {tensor.dtype}"


def _format_hash(tensor: Tensor) -> int:
    """A hash of everything that has to match between ranks; stable across processes."""
    look = [_name_of(tensor)]
    if isinstance(tensor, QuantizedTensor):
        part = rows.own_blocks(tensor)
        inner = [(name, x.shape, x.dtype) for name, x in part.storage_tensors().items()]
        look += [part._first_row, inner]
    return int.from_bytes(hashlib.blake2b(repr(look).encode(), digest_size=7).digest(), "big")


def _send(group: Any, slot: _Slot, root: int) -> Any:
    """Broadcast each part, wait for it, and return the last work."""
    for part in slot.parts:
        work = _run_collective(torch.ops.c10d.broadcast_.default, [part], group, root, 0, True, -1)
    slot.take()
    return work


# dist.broadcast, which ZeroRedundancyOptimizer calls for each parameter after a step.
@implements_operator(torch.ops.c10d.broadcast_.default)
def _broadcast_(
    func: Callable, outs: list[Tensor], group: Any, root: int, *args: Any
) -> tuple[list[Tensor], Any]:
    if is_loading_from_rank_0():
        return outs, _run_collective(func, _values(outs), group, root, *args)
    process_group = dist.ProcessGroup.unbox(group)
    slot = _Slot(*outs, process_group.rank() == root)
    _agree(process_group, [slot])
    return outs, _send(group, slot, root)


# dist.all_gather into quantized tensors; plain tensors receive decoded values.
@implements_operator(torch.ops.c10d.allgather_.default)
def _allgather_(
    func: Callable, outs: list[list[Tensor]], inputs: list[Tensor], group: Any, *args: Any
) -> tuple[list[list[Tensor]], Any]:
    (own,), (received,) = inputs, outs
    if not any(isinstance(out, QuantizedTensor) for out in received):
        return outs, _run_collective(func, outs, _values(inputs), group, *args)
    process_group = dist.ProcessGroup.unbox(group)
    rank = process_group.rank()
    slots = [_Slot(out, False) for out in received]
    slots[rank] = _Slot(own, True)
    _agree(process_group, slots)
    for root, slot in enumerate(slots):
        work = _send(group, slot, root)
    received[rank].copy_(own)
    if isinstance(received[rank], QuantizedTensor):
        received[rank]._high_precision_init_val = slots[rank]._init_val
    return outs, work


# DTensor scatters a tensor from one rank to all.
@implements_operator(torch.ops.c10d.scatter_.default)
def _scatter_(
    func: Callable, outs: list[Tensor], parts: list[list[Tensor]], group: Any, root: int, *args: Any
) -> tuple[list[Tensor], Any]:
    values, rank = _values(outs), dist.ProcessGroup.unbox(group).rank()
    work = _run_collective(func, values, [*map(_values, parts)], group, root, *args)
    torch._foreach_copy_(outs, [own[rank] for own in parts] if rank == root else values)
    return outs, work


def _run_collective(func: Callable, *args: Any) -> Any:
    """Run a c10d operator, wait for its result, and return its work.

    Always with async_op=True: otherwise NCCL returns a null work, which cannot be waited for.
    """
    parameters = func._schema.arguments
    given = {parameter.name: value for parameter, value in zip(parameters, args, strict=False)}
    # The name of the async flag differs between versions of torch, but it is the only bool.
    (flag,) = (parameter.name for parameter in parameters if str(parameter.type) == "bool")
    _, work = func(**given | {flag: True})
    work.wait()
    return work


def _values(tensors: list[Tensor]) -> list[Tensor]:
    return [t._read() if isinstance(t, QuantizedTensor) else t for t in tensors]


# DistributedDataParallel copies rank 0's parameters to all replicas.
def _broadcast_coalesced(
    broadcast: Callable[..., None],
    process_group: dist.ProcessGroup,
    tensors: Sequence[Tensor],
    buffer_size: int,
    src: int = 0,
) -> None:
    if not any(isinstance(tensor, QuantizedTensor) for tensor in tensors):
        return broadcast(process_group, tensors, buffer_size, src)
    slots = [_Slot(tensor, process_group.rank() == src) for tensor in tensors]
    _agree(process_group, slots)
    broadcast(process_group, [*chain.from_iterable(s.parts for s in slots)], buffer_size, src)
    for slot in slots:
        slot.take()


wrap_broadcast_coalesced(_broadcast_coalesced)
