"""Parameters of one kind that one launch steps, and whether it still can."""

from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import reduce
from itertools import chain, compress, repeat
from operator import attrgetter, is_, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4adam.distributed.scale_exchange import ShardInfo
from fp4adam.interop.borrowed_tensor import BorrowedTensor
from fp4adam.optim.memory_layout import is_dense
from fp4adam.optim.state_codec import STATE_BLOCK, StateCodec
from fp4adam.optim.step_kernels import LAUNCHES, FusedLaunch, Kind
from fp4adam.optim.stored_state import StoredState
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.rows import is_whole_blocks, matrix_shape

# Vector accesses of the kernels; torch's allocators give more, views into flat buffers may not.
ALIGNMENT = 16

# Builtins, which map() calls without a Python frame.
_data_ptr = torch._C.TensorBase.data_ptr
_numel = torch._C.TensorBase.numel
_stride = torch._C.TensorBase.stride
_is_contiguous = torch._C.TensorBase.is_contiguous
_dtype = attrgetter("dtype")
_size_and_place = attrgetter("shape", "device")


class Member(NamedTuple):
    """A parameter that the step updates whenever it has a gradient.

    Attributes:
        group: Its parameter group.
        owner: The parameter, which may be a DTensor.
        param: What this rank has of it; the parameter itself if that is no DTensor.
        state: Its state in the optimizer.
        tensors: What this rank has of the state.
        place: Of a shard that shares scales with others; else None.
        scales: Members with the same one share the amax of the tensor, if their formats have one.
        first_element: Index of its first element in the flattened parameter.
        casts_apart: Whether it is quantized from its value after the update, and not by that.
        borrowed: What ``param`` is the tensor of, if the owner is one of another package.
        value: What Adam reads and writes: the FP32 master weight, or the parameter itself.
        moves: Whether the value can change; with lr = 0 only the moments do.
        write_dtype: What a master weight is rounded to before the parameter is written.
        value_codec: How the value is stored.
        exp_avg_codec: How its first moment is stored.
        exp_avg_sq_codec: How its second moment is stored.
    """

    group: dict[str, Any]
    owner: Tensor
    param: Tensor
    state: dict[str, Any]
    tensors: dict[str, Any]
    place: ShardInfo | None
    scales: Hashable
    value: Tensor
    moves: bool
    write_dtype: torch.dtype
    value_codec: StateCodec
    exp_avg_codec: StateCodec
    exp_avg_sq_codec: StateCodec
    first_element: int = 0
    casts_apart: bool = False
    borrowed: BorrowedTensor | None = None

    @property
    def has_master(self) -> bool:
        """Whether there is more of the value than the parameter holds."""
        return self.value is not self.param or self.remainder is not None

    @property
    def max_exp_avg_sq(self) -> Tensor | None:
        """The largest second moment so far, or None without AMSGrad."""
        return self.tensors["max_exp_avg_sq"] if self.group["amsgrad"] else None

    @property
    def is_dithered(self) -> bool:
        """Whether its rounding depends on where its elements are."""
        return not all(
            codec.exact for codec in (self.value_codec, self.exp_avg_codec, self.exp_avg_sq_codec)
        )

    @property
    def state_names(self) -> tuple[str, ...]:
        """The tensors of the state that the step reads and writes."""
        names = ["exp_avg", "exp_avg_sq"]
        if self.exp_avg_codec.scaled:
            names.append("exp_avg_scale")
        if self.exp_avg_sq_codec.scaled:
            names.append("exp_avg_sq_scale")
        if self.group["amsgrad"]:
            names.append("max_exp_avg_sq")
        if self.value is not self.param:
            names.append("master_param")
        if self.value_codec.scaled:
            names.append("master_param_scale")
        if self.value_codec.name == "remainder":
            names.append("param_remainder")
        return tuple(names)

    @property
    def remainder(self) -> Tensor | None:
        """What the BF16 parameter lacks of its FP32 master, if that is how it is stored."""
        return self.tensors["param_remainder"] if self.value_codec.name == "remainder" else None

    @property
    def state_scales(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Scales of the value and the two moments, where these have some."""
        state = self.tensors
        return (
            state["master_param_scale"] if self.value_codec.scaled else None,
            state["exp_avg_scale"] if self.exp_avg_codec.scaled else None,
            state["exp_avg_sq_scale"] if self.exp_avg_sq_codec.scaled else None,
        )

    def whole_value(self) -> Tensor:
        """The value in FP32."""
        extra = self.state_scales[0] if self.remainder is None else self.remainder
        return StoredState(self.value_codec, self.value, extra).decode().contiguous()

    def kind(self, grad: Tensor | None) -> Kind:
        """What must be equal among members of a batch."""
        # Where the value cannot move, the bytes are left alone.
        writes = self.moves and self.value is not self.param and not self.casts_apart
        quantized = isinstance(self.param, QuantizedTensor) and writes
        return Kind(
            quantizer=self.param.quantizer if quantized else None,
            group=self.place.group if quantized and self.place is not None else None,
            grad_dtype=self.param.dtype if grad is None else grad.dtype,
            value_dtype=self.value.dtype,
            write_dtype=self.write_dtype if writes else None,
            value_codec=self.value_codec,
            exp_avg_codec=self.exp_avg_codec,
            exp_avg_sq_codec=self.exp_avg_sq_codec,
            adam_w_mode=self.group["adam_w_mode"],
            amsgrad=self.group["amsgrad"],
            is_contiguous=self.value.is_contiguous(),
        )

    def fits_a_launch(self, grad: Tensor | None) -> bool:
        """Whether the kernels can step it: no FP64; dense, aligned tensors of one layout."""
        value, param = self.value, self.param
        tensors = [value, self.tensors["exp_avg"], self.tensors["exp_avg_sq"]]
        tensors += [t for t in (grad, self.max_exp_avg_sq, self.remainder) if t is not None]
        quantized = isinstance(param, QuantizedTensor) and not self.casts_apart
        if not isinstance(param, QuantizedTensor):
            tensors.append(param)
        if value.dtype == torch.float64 or value.numel() == 0:
            return False
        if quantized and not (type(param.quantizer) in LAUNCHES and is_whole_blocks(param)):
            return False
        if quantized and param.flush().pending_value() is not None:
            return False
        if not all(t.is_contiguous() for t in tensors):
            alike = all(t.stride() == value.stride() for t in tensors)
            if quantized or not (alike and is_dense(value)):
                return False
        scales = [t for t in self.state_scales if t is not None]
        if quantized:
            if scales and param.shape[-1] % STATE_BLOCK:
                return False  # blocks would reach from row to row
            tensors.extend(param.storage_tensors().values())
        tensors.extend(scales)
        return not any(t.data_ptr() % ALIGNMENT for t in tensors)


class FusedBatch:
    """Members of one kind on one device.

    Args:
        kind: What they have in common.
        members: They share ``kind`` and ``state_names`` as well.
        read_grad: Gives a parameter's gradient or None.
        grads_vary: Whether gradients may be of other shapes and devices than their parameters.

    Attributes:
        launch: What steps them; set once the tables exist.
        slots: A number for each, the same for members that share an amax.
        grads: Addresses of the gradients when :meth:`fits` was last called, 0 where there is none.
        present: Which have a gradient; None if all.
    """

    launch: FusedLaunch

    def __init__(
        self,
        kind: Kind,
        members: list[Member],
        read_grad: Callable[[Tensor], Tensor | None],
        grads_vary: bool,
    ) -> None:
        self.kind = kind
        self.members = members
        self.shapes = [self._table_shape(m) for m in members]
        mates: dict[Hashable, list[int]] = defaultdict(list)
        for i, member in enumerate(members):
            mates[member.scales].append(i)
        slots = {scales: slot for slot, scales in enumerate(mates)}
        self.slots = [slots[m.scales] for m in members]
        # Members that the launch steps together, or not at all.
        self._mates = [m for m in mates.values() if len(m) > 1 and kind.quantizer is not None]
        self.grads: list[int] = []
        self.present: list[bool] | None = None
        self._read_grad = read_grad
        self._params = [m.param for m in members]
        self._owners = [m.owner for m in members]
        self._states = [m.state for m in members]
        names = members[0].state_names
        self._state_tensors = [m.tensors[name] for m in members for name in names]
        values = [m.value for m in members]
        # torch sees to it that .grad is like its parameter, until someone resizes it.
        self._size_of = _size_and_place if grads_vary else _numel
        self._sizes = list(map(self._size_of, values))
        self._layout_of = _is_contiguous if kind.is_contiguous else _stride
        self._layouts = list(map(self._layout_of, values))
        self.hold()

    def hold(self) -> None:
        """Take the tensors of the state for what the launch is made for."""
        self._held = list(chain.from_iterable(map(dict.values, self._states)))
        plain = [param for param in self._params if not isinstance(param, QuantizedTensor)]
        self._watched = [*self._state_tensors, *plain]
        self._addresses = list(map(_data_ptr, self._watched))

    def _holds(self) -> bool:
        """Whether the state consists of the same tensors, at the same addresses."""
        now = list(chain.from_iterable(map(dict.values, self._states)))
        return (
            len(now) == len(self._held)
            and all(map(is_, now, self._held))
            and list(map(_data_ptr, self._watched)) == self._addresses
        )

    def fits(self) -> bool:
        """Whether the launch is made for the state and gradients as they are; notes the latter."""
        try:
            if not self._holds():
                return False
            grads = list(map(self._read_grad, self._owners))
            sizes, layouts, self.present = self._sizes, self._layouts, None
            try:
                self.grads = list(map(_data_ptr, grads))
            except TypeError:  # where there is no gradient
                self.present = [grad is not None for grad in grads]
                self.grads = [0 if grad is None else _data_ptr(grad) for grad in grads]
                grads, sizes, layouts = (
                    list(compress(x, self.present)) for x in (grads, sizes, layouts)
                )
        except (TypeError, RuntimeError):  # something has no address
            return False
        return (
            self.grads.count(0) == len(self._params) - len(grads)
            and (self.present is None or all(map(self._are_alike, self._mates)))
            and not reduce(or_, self.grads) % ALIGNMENT
            and all(map(is_, map(_dtype, grads), repeat(self.kind.grad_dtype)))
            and list(map(self._size_of, grads)) == sizes
            and list(map(self._layout_of, grads)) == layouts
        )

    def _are_alike(self, mates: list[int]) -> bool:
        """Whether all of some members have a gradient, or none of them."""
        return len({self.present[i] for i in mates}) == 1

    def table_rows(self) -> list[list[int]]:
        """Rows of the table of tensors; those of gradient and scalars are 0."""
        return [self._row(m, *shape) for m, shape in zip(self.members, self.shapes, strict=True)]

    def _table_shape(self, member: Member) -> tuple[int, int]:
        """Rows and columns in the table; plain tensors are read flat."""
        if self.kind.quantizer is None:
            return member.value.numel(), 1
        return matrix_shape(member.param)

    def _row(self, member: Member, rows: int, cols: int) -> list[int]:
        state, param = member.tensors, member.param
        moments = (state["exp_avg"], state["exp_avg_sq"], member.max_exp_avg_sq)
        written: tuple[Tensor | None, ...] = (None,) * 5
        gemm_scales: tuple[Tensor | None, ...] = (None,) * 2
        if self.kind.quantizer is not None:
            square, rowwise = param._block_scale_inv, param._rowwise_scale_inv
            scale = rowwise if square is None else square
            columnwise = (param._columnwise_data, param._columnwise_scale_inv)
            written = (param._rowwise_data, scale, *columnwise, param._amax)
            gemm_scales = (param._rowwise_gemm_scale_inv, param._columnwise_gemm_scale_inv)
        elif self.kind.write_dtype is not None:
            written = (param, None, None, None, None)
        tensors = map(_address, (member.value, *moments, *written))
        extra, *scales = member.state_scales
        if member.remainder is not None:
            extra = member.remainder
        return [0, 0, *tensors, rows, cols, *map(_address, (extra, *scales, *gemm_scales))]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
