"""One view per kind of parameter: what Adam updates of it, and how a master weight becomes it.

A plain parameter, a :class:`QuantizedTensor` and a quantized tensor of another package answer the
same questions. Nothing here knows a state, a step or a plan.
"""

import weakref
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fp4adam.distributed.dtensor import local
from fp4adam.interop.adapter import is_foreign
from fp4adam.interop.borrowed_tensor import BorrowedTensor, ScaleWriteback
from fp4adam.optim.memory_note import WriteNote, storage_address, version
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
    """How an optimizer stores values: its options that hold for all groups."""

    master_weights: bool
    exp_avg_dtype: torch.dtype
    exp_avg_sq_dtype: torch.dtype
    master_weight_dtype: torch.dtype
    store_param_remainders: bool
    quantize_from: str = "master"

    def codecs(self, param_dtype: torch.dtype) -> dict[str, StateCodec]:
        """The codecs of the states that can be stored in several ways."""
        if param_dtype == torch.float64:
            return dict.fromkeys(("exp_avg", "exp_avg_sq", "master_param"), FLOAT64)
        return {
            "master_param": state_codec("master_weight", self.master_weight_dtype),
            "exp_avg": state_codec("exp_avg", self.exp_avg_dtype),
            "exp_avg_sq": state_codec("exp_avg_sq", self.exp_avg_sq_dtype),
        }


class ParamView:
    """A plain parameter, or this rank's part of one.

    Args:
        owner: The parameter in its group; it may be a DTensor.
        storing: How the optimizer stores values.

    Attributes:
        param: The local tensor that is written.
        has_master: Whether the optimizer keeps an FP32 master weight beside it.
        has_remainder: Whether the parameter itself is the upper half of its master.
        write_dtype: The dtype that a master passes through on its way to the parameter.
        borrowed: Where ``param`` has its memory from, if another package owns it.
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
        """How the value that Adam updates is stored."""
        if self.has_remainder:
            return REMAINDER
        codec = self.codecs["master_param"]
        return codec if self.has_master and not codec.exact else PLAIN

    @property
    def scales(self) -> Hashable:
        """Equal for parameters that share the amax of the tensor."""
        return self.owner

    def note(self) -> WriteNote:
        """Where the value lies and how often it has been written; see :class:`WriteNote`."""
        # What is done to a DTensor raises its own version, and not that of the local tensor.
        held = (self.param,) if self.owner is self.param else (self.owner, self.param)
        alive = StorageWeakRef(self.param.untyped_storage())
        return WriteNote(storage_address(self.param), tuple(map(version, held)), alive)

    def value(self) -> Tensor:
        """The FP32 value that a master weight starts from, in memory of its own."""
        return self.param.detach().to(torch.float32, copy=True)

    def was_written(self, master: Tensor) -> bool:
        """Whether the parameter still has the value before quantization, and that is ``master``."""
        return False

    def is_rounded(self, master: Tensor) -> bool:
        """Whether the parameter is what the FP32 ``master`` rounds to."""
        rounded = split_master(master)[0] if self.has_remainder else master.to(self.param.dtype)
        return are_equal(self.param, rounded)

    def write(self, master: Tensor) -> None:
        """Round the FP32 ``master`` to the parameter."""
        self.param.copy_(master)

    def free_initial_value(self, updates: bool) -> None:
        """Free the value before quantization, which the master weight has taken over."""


class QuantizedView(ParamView):
    """A :class:`QuantizedTensor`, or a shard of one."""

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
        """Whether ``master``, rounded to 16 bits perhaps, is the value before quantization."""
        written = written_value(self.param)
        return written is not None and are_equal(
            written.to(self.param.device), master.to(written.dtype).view(written.shape)
        )

    def is_rounded(self, master: Tensor) -> bool:
        """Whether the codes are those of ``master`` with the scales that are there.

        All that one rank can tell of a shard whose scales depend on others.
        """
        return rows.is_of(self.param, master.to(self.write_dtype))

    def holds(self, twin: QuantizedTensor) -> bool:
        """Whether the parameter has the bytes of ``twin``; a shard of no rows has no say."""
        return not self.param.numel() or self.param.flush().has_bytes_of(twin)

    def write(self, master: Tensor) -> None:
        self.param.quantize_(master.to(self.write_dtype))

    def free_initial_value(self, updates: bool) -> None:
        self.param._shared.rounded_master = None
        if updates:
            self.param.clear_high_precision_init_val()
        elif self.param._shared.init_val is not None:
            # The bytes stay as they are, so that the next value written is kept instead.
            self.param._high_precision_init_val = self.param._high_precision_init_val.to("meta")


class BorrowedView(ParamView):
    """A quantized tensor of another package, stepped in its own memory."""

    def __init__(self, owner: Tensor, storing: Storing, borrowed: BorrowedTensor) -> None:
        super().__init__(owner, storing)
        self.param, self.borrowed = borrowed.tensor, borrowed
        self.has_master, self.has_remainder = True, False
        master = storing.quantize_from == "master"
        self.write_dtype = torch.float32 if master else self.param.dtype

    def note(self) -> WriteNote:
        # Whatever has been exchanged or written since makes another BorrowedTensor.
        return WriteNote(self.borrowed, (self.borrowed.writes,))

    def value(self) -> Tensor:
        return self.borrowed.value()

    def is_rounded(self, master: Tensor) -> bool:
        value = master.to(self.write_dtype)
        if self.borrowed.is_of(value):
            return True
        rounded = self.param.quantizer.quantize(value).dequantize(self.param.dtype)
        return self.borrowed.is_of(rounded)

    def write(self, master: Tensor) -> None:
        self.param.quantize_(master.to(self.write_dtype))
        ScaleWriteback([self.borrowed])()
        torch.autograd.graph.increment_version([self.borrowed.source])

    def free_initial_value(self, updates: bool) -> None:
        self.borrowed.clear_high_precision_init_val()


def view_of(owner: Tensor, storing: Storing, borrowed: dict[Tensor, BorrowedTensor]) -> ParamView:
    """The view of a parameter; ``borrowed`` keeps the tensors of other packages between calls."""
    own = local(owner)
    if isinstance(own, QuantizedTensor):
        return QuantizedView(owner, storing)
    if not is_foreign(own):
        return ParamView(owner, storing)
    known = borrowed.get(owner)
    if known is None or not known.is_current():
        known = borrowed[owner] = BorrowedTensor(own)
    return BorrowedView(owner, storing, known)


def written_value(param: QuantizedTensor) -> Tensor | None:
    """The unrounded value of a parameter that no step has taken over yet, or None."""
    pending = param.flush().pending_value()
    return param.get_high_precision_init_val() if pending is None else pending


def are_equal(a: Tensor, b: Tensor) -> bool:
    """As ``torch.equal``, but NaN, which uninitialized memory may hold, equals itself."""
    alike = (a.dtype, a.shape) == (b.dtype, b.shape)
    return alike and bool(((a == b) | (a.isnan() & b.isnan())).all())
