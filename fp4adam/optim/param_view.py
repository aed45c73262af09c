"""Views of parameters: one interface to plain, quantized and borrowed tensors.

A view knows what Adam updates and how a master weight is written to its parameter. It knows nothing
of states, steps or plans.
"""

import weakref
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fp4adam.distributed.dtensor import local, shard_size
from fp4adam.distributed.scale_exchange import ShardInfo
from fp4adam.interop.adapter import is_foreign
from fp4adam.interop.borrowed_tensor import BorrowedTensor, ScaleWriteback, Whole
from fp4adam.optim.memory_note import WriteNote, version
from fp4adam.optim.state_codec import (
    FLOAT64,
    PLAIN,
    REMAINDER,
    StateCodec,
    split_master,
    state_codec,
)
from fp4adam.tensors import rows
from fp4adam.tensors.quantized_tensor import QuantizedTensor

HALF_DTYPES = (torch.bfloat16, torch.float16)


class Storing(NamedTuple):
    """The storage options of an optimizer, which hold for all parameter groups."""

    master_weights: bool
    exp_avg_dtype: torch.dtype
    exp_avg_sq_dtype: torch.dtype
    master_weight_dtype: torch.dtype
    store_param_remainders: bool
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


class ParamView:
    """The view of a plain parameter, or of this rank's part of one.

    Args:
        owner: The parameter in its group; it may be a DTensor.
        storing: The storage options of the optimizer.

    Attributes:
        param: The local tensor that is written.
        has_master: Whether the optimizer keeps a separate FP32 master weight.
        has_remainder: Whether the parameter itself is the upper half of its master.
        write_dtype: The dtype that a master is rounded to on its way to the parameter.
        borrowed: The owner of ``param``'s memory in another package, or None.
    """

    borrowed: BorrowedTensor | None = None

    def __init__(self, owner: Tensor, storing: Storing) -> None:
        self.owner = owner
        self.param = local(owner)
        self.codecs = storing.codecs(self.param.dtype)
        self.has_remainder = storing.store_param_remainders and owner.dtype == torch.bfloat16
        self.has_master = (
            storing.master_weights and owner.dtype in HALF_DTYPES and not self.has_remainder
        )
        self.write_dtype = self.param.dtype

    @property
    def value_codec(self) -> StateCodec:
        """The codec of the value that Adam updates."""
        if self.has_remainder:
            return REMAINDER
        codec = self.codecs["master_param"]
        return codec if self.has_master and not codec.exact else PLAIN

    @property
    def scales(self) -> Hashable:
        """A key that is equal for parameters that share a per-tensor amax."""
        return self.owner

    @property
    def shards(self) -> tuple[ShardInfo, ...]:
        """The positions of this rank's part among others that it shares scales with."""
        return ()

    def note(self) -> WriteNote:
        """The current memory and versions of the value; see :class:`WriteNote`."""
        # An operation on a DTensor raises its own version, but not the local tensor's.
        held = (self.param,) if self.owner is self.param else (self.owner, self.param)
        alive, x = StorageWeakRef(self.param.untyped_storage()), self.param
        memory = alive.cdata, x.storage_offset(), x.shape, x.stride(), x.dtype
        return WriteNote(memory, tuple(map(version, held)), alive)

    def value(self) -> Tensor:
        """The value that a master weight starts from, as a new float32 tensor."""
        return self.param.detach().to(torch.float32, copy=True)

    def was_written(self, master: Tensor) -> bool:
        """Whether the parameter still has its unrounded value, and it equals ``master``."""
        return False

    def is_rounded(self, master: Tensor) -> bool:
        """Whether the parameter equals the rounded FP32 ``master``."""
        rounded = split_master(master)[0] if self.has_remainder else master.to(self.param.dtype)
        return are_equal(self.param, rounded)

    def write(self, master: Tensor) -> None:
        """Round the FP32 ``master`` into the parameter."""
        self.param.copy_(master)

    def free_initial_value(self, updates: bool) -> None:
        """Free the high-precision initial value, which the master weight has replaced.

        ``updates``: Whether steps change the parameter.
        """


class QuantizedView(ParamView):
    """The view of a :class:`QuantizedTensor`, or of a shard of one."""

    param: QuantizedTensor

    def __init__(self, owner: Tensor, storing: Storing) -> None:
        super().__init__(owner, storing)
        self.has_master, self.has_remainder = True, False
        if storing.quantize_from == "master":
            self.write_dtype = torch.float32

    @property
    def scales(self) -> Hashable:
        group = self.param._shared.scale_group
        return self.owner if group is None else group

    @property
    def shards(self) -> tuple[ShardInfo, ...]:
        return ShardInfo.of(self.owner)

    def note(self) -> WriteNote:
        storage = self.param.flush()._shared.tensors
        return WriteNote(weakref.ref(storage), tuple(map(version, storage.versioned)))

    def value(self) -> Tensor:
        written = written_value(self.param)
        if written is None:
            return self.param.detach().dequantize(torch.float32)
        # A copy, since a state_dict taken before quantize_model may hold the same storage.
        return written.to(self.param.device, torch.float32, copy=True).contiguous()

    def was_written(self, master: Tensor) -> bool:
        """Whether ``master`` equals the unrounded value, in the dtype of the latter."""
        written = written_value(self.param)
        return written is not None and are_equal(
            written.to(self.param.device), master.to(written.dtype).view(written.shape)
        )

    def is_rounded(self, master: Tensor) -> bool:
        """Whether the codes are those of ``master`` under the stored scales.

        One rank cannot check more than that if the scales depend on other ranks.
        """
        return rows.is_of(self.param, master.to(self.write_dtype))

    def holds(self, twin: QuantizedTensor) -> bool:
        """Whether the parameter has the bytes of ``twin``; always true for a shard without rows."""
        return not self.param.numel() or self.param.flush().has_bytes_of(twin)

    def write(self, master: Tensor) -> None:
        self.param.quantize_(master.to(self.write_dtype))

    def free_initial_value(self, updates: bool) -> None:
        self.param._shared.rounded_master = None
        if updates:
            self.param.clear_high_precision_init_val()
        elif self.param._shared.init_val is not None:
            # Steps do not change the bytes, so keep the next value that is written instead.
            self.param._high_precision_init_val = self.param._high_precision_init_val.to("meta")


class BorrowedView(ParamView):
    """The view of another package's quantized tensor, which is stepped in its own memory."""

    def __init__(self, owner: Tensor, storing: Storing, borrowed: BorrowedTensor) -> None:
        super().__init__(owner, storing)
        self.param, self.borrowed = borrowed.tensor, borrowed
        self.has_master, self.has_remainder = True, False
        master = storing.quantize_from == "master"
        self.write_dtype = torch.float32 if master else self.param.dtype

    @property
    def shards(self) -> tuple[ShardInfo, ...]:
        # A shard without a specification has scales of its own.
        has_peers = self.param._shared.global_spec is not None
        return ShardInfo.of(self.owner, self.param) if has_peers else ()

    def note(self) -> WriteNote:
        # After a foreign write or exchange, `view_of` makes a new BorrowedTensor.
        return WriteNote(self.borrowed, (self.borrowed.writes,))

    def value(self) -> Tensor:
        return self.borrowed.value()

    def is_rounded(self, master: Tensor) -> bool:
        value = master.to(self.write_dtype)
        if self.borrowed.is_of(value):
            return True
        if self.borrowed.given is not None or self.shards:
            return False
        rounded = self.param.quantizer.quantize(value).dequantize(self.param.dtype)
        return self.borrowed.is_of(rounded)

    def write(self, master: Tensor) -> None:
        scales = ScaleWriteback([self.borrowed])
        scales.read()
        self.param.quantize_(master.to(self.write_dtype))
        scales()
        torch.autograd.graph.increment_version([self.borrowed.source])

    def free_initial_value(self, updates: bool) -> None:
        self.borrowed.clear_high_precision_init_val()


def view_of(owner: Tensor, storing: Storing, borrowed: dict[Tensor, BorrowedTensor]) -> ParamView:
    """The view of a parameter; ``borrowed`` caches tensors of other packages between calls."""
    own = local(owner)
    if isinstance(own, QuantizedTensor):
        return QuantizedView(owner, storing)
    if not is_foreign(own):
        return ParamView(owner, storing)
    known = borrowed.get(owner)
    if known is None or not known.is_current(own):
        chunk = shard_size(owner)
        whole = None if chunk is None else Whole(tuple(owner.shape), chunk)
        known = borrowed[owner] = BorrowedTensor(own, whole)
    return BorrowedView(owner, storing, known)


def written_value(param: QuantizedTensor) -> Tensor | None:
    """The unrounded value of a parameter that no step has used yet, or None."""
    pending = param.flush().pending_value()
    return param._high_precision_init_val if pending is None else pending


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Like ``torch.equal``, but NaN equals NaN, because uninitialized memory may hold NaN."""
    alike = (a.dtype, a.shape) == (b.dtype, b.shape)
    return alike and bool(((a == b) | (a.isnan() & b.isnan())).all())
