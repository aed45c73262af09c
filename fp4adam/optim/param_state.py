"""A parameter of a step: its view, its state, and whether kernels can step it."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4adam.distributed.scale_exchange import ShardInfo, groups_of, own_cut_blocks
from fp4adam.interop.borrowed_tensor import BorrowedTensor
from fp4adam.kernels.launch.schema import Cut
from fp4adam.optim.memory_layout import is_dense
from fp4adam.optim.param_view import ParamView
from fp4adam.optim.state_codec import REMAINDER, STATE_BLOCK, StateCodec
from fp4adam.optim.step_kernels import Kind, has_step_kernels
from fp4adam.optim.stored_state import StoredState
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.rows import is_all, is_whole_blocks, matrix_shape

# In bytes, for the kernels' vector accesses. torch's allocators align to more; views into flat
# buffers may not.
ALIGNMENT = 16


class ParamState(NamedTuple):
    """A parameter that the step updates whenever it has a gradient.

    Attributes:
        group: Its parameter group.
        view: The parameter.
        state: Its state in the optimizer.
        tensors: This rank's part of the state.
        shards: The positions of a shard that shares scales with others, as by ``ShardInfo.of``.
        updates: Whether the value can change; with lr = 0 only the moments do.
        first_element: Index of its first element in the flattened parameter.
        quantized_after_step: Whether it is quantized after all values have been updated, instead of
            by the launch that updates it.
    """

    group: dict[str, Any]
    view: ParamView
    state: dict[str, Any]
    tensors: dict[str, Any]
    shards: tuple[ShardInfo, ...]
    updates: bool
    first_element: int = 0
    quantized_after_step: bool = False

    @property
    def owner(self) -> Tensor:
        """The parameter in its group, which may be a DTensor."""
        return self.view.owner

    @property
    def param(self) -> Tensor:
        """This rank's part of the parameter."""
        return self.view.param

    @property
    def scales(self) -> Hashable:
        """A key that is equal for parameters that share a per-tensor amax."""
        return self.view.scales

    @property
    def borrowed(self) -> BorrowedTensor | None:
        """The owner of the parameter's memory in another package, or None."""
        return self.view.borrowed

    @property
    def value(self) -> Tensor:
        """The tensor that Adam updates: the master weight, or the parameter itself."""
        return self.tensors["master_param"] if self.view.has_master else self.param

    @property
    def codecs(self) -> tuple[StateCodec, StateCodec, StateCodec]:
        """The codecs of the value and the two moments."""
        codecs = self.view.codecs
        return self.view.value_codec, codecs["exp_avg"], codecs["exp_avg_sq"]

    @property
    def max_exp_avg_sq(self) -> Tensor | None:
        """The largest second moment so far, or None without AMSGrad."""
        return self.tensors["max_exp_avg_sq"] if self.group["amsgrad"] else None

    @property
    def is_dithered(self) -> bool:
        """Whether any state is rounded with dither, which depends on the index of an element."""
        return not all(codec.exact for codec in self.codecs)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the state tensors that the step reads and writes."""
        value, exp_avg, exp_avg_sq = self.codecs
        names = ["exp_avg", "exp_avg_sq"]
        if exp_avg.scaled:
            names.append("exp_avg_scale")
        if exp_avg_sq.scaled:
            names.append("exp_avg_sq_scale")
        if self.group["amsgrad"]:
            names.append("max_exp_avg_sq")
        if self.view.has_master:
            names.append("master_param")
        if value.scaled:
            names.append("master_param_scale")
        if value is REMAINDER:
            names.append("param_remainder")
        return tuple(names)

    @property
    def remainder(self) -> Tensor | None:
        """The int16 remainder that completes a BF16 parameter to its FP32 master, or None."""
        return self.tensors["param_remainder"] if self.view.has_remainder else None

    @property
    def state_scales(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The scales of the value and the two moments; None where a codec has none."""
        names = ("master_param_scale", "exp_avg_scale", "exp_avg_sq_scale")
        return tuple(
            self.tensors[name] if codec.scaled else None
            for name, codec in zip(names, self.codecs, strict=True)
        )

    def stored(self, name: str) -> StoredState:
        """A moment in its stored form."""
        return StoredState.of(self.tensors, name, self.view.codecs[name])

    def stored_value(self) -> StoredState:
        """The value in its stored form."""
        extra = self.state_scales[0] if self.remainder is None else self.remainder
        return StoredState(self.view.value_codec, self.value, extra)

    def whole_value(self) -> Tensor:
        """The decoded value, contiguous; FP32 unless the parameter itself is the value."""
        return self.stored_value().decode().contiguous()

    def kind(self, grad: Tensor | None) -> Kind:
        """The properties that the parameters of one launch have in common."""
        # With lr = 0 the value does not change, so the bytes are not written.
        writes = self.updates and self.view.has_master and not self.quantized_after_step
        quantized = isinstance(self.param, QuantizedTensor) and writes
        value_codec, exp_avg_codec, exp_avg_sq_codec = self.codecs
        return Kind(
            quantizer=self.param.quantizer if quantized else None,
            groups=groups_of(self.shards) if quantized else (),
            grad_dtype=self.param.dtype if grad is None else grad.dtype,
            value_dtype=self.value.dtype,
            write_dtype=self.view.write_dtype if writes else None,
            value_codec=value_codec,
            exp_avg_codec=exp_avg_codec,
            exp_avg_sq_codec=exp_avg_sq_codec,
            adam_w_mode=self.group["adam_w_mode"],
            amsgrad=self.group["amsgrad"],
            is_contiguous=self.value.is_contiguous(),
        )

    def fits_a_launch(self, grad: Tensor | None) -> bool:
        """Whether kernels can step it: not FP64, not empty, dense, aligned, one layout for all."""
        value, param = self.value, self.param
        tensors = [value, self.tensors["exp_avg"], self.tensors["exp_avg_sq"]]
        tensors += [t for t in (grad, self.max_exp_avg_sq, self.remainder) if t is not None]
        is_quantized = isinstance(param, QuantizedTensor)
        quantized = is_quantized and not self.quantized_after_step
        if not is_quantized:
            tensors.append(param)
        if value.dtype == torch.float64 or value.numel() == 0:
            return False
        if quantized and not (
            has_step_kernels(param.quantizer) and (is_whole_blocks(param) or self._cuts_fit())
        ):
            return False
        if quantized and param.quantizer.check_matrix(*matrix_shape(param)):
            return False  # a shard of another package
        if quantized and param.pending_value() is not None:
            return False
        if not all(t.is_contiguous() for t in tensors):
            alike = all(t.stride() == value.stride() for t in tensors)
            if quantized or not (alike and is_dense(value)):
                return False
        scales = [t for t in self.state_scales if t is not None]
        if quantized:
            if scales and param.shape[-1] % STATE_BLOCK:
                return False  # blocks would span two rows
            tensors.extend(param.storage_tensors().values())
        tensors.extend(scales)
        return not any(t.data_ptr() % ALIGNMENT for t in tensors)

    def _cuts_fit(self) -> bool:
        """Whether kernels can step it though it shares blocks with other ranks."""
        param = self.param
        return (
            param.quantizer.steps_cut_blocks
            and bool(self.shards)
            and is_all(param)
            and not self.is_dithered
            and param.shape[-1] % ALIGNMENT == 0
        )

    def cut(self) -> Cut:
        """The blocks of a quantized parameter that it shares with other ranks."""
        spec = self.param._shared.global_spec
        if spec is None or not spec.is_cut:
            return Cut()
        return Cut(self.param._first_row, own_cut_blocks(spec, self.shards[0]))

    def launch_key(self, grad: Tensor | None) -> Hashable:
        """A key that is equal for parameters that can share a launch."""
        return self.param.device, self.kind(grad), self.state_names
