"""The targets of an optimizer: what a step updates, where its states are, and how it is written.

A :class:`Target` is made when a parameter joins an optimizer, and lives as long as the tensor stays
what it is; :class:`Targets` keeps them. How its master is stored is one of four strategies, see
``masters``.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import (
    dtensor_class,
    first_element,
    is_dtensor,
    like,
    local,
    shard_size,
)
from fp4adam.distributed.scale_exchange import ShardInfo, groups_of
from fp4adam.interop.adapter import is_foreign
from fp4adam.interop.borrowed_tensor import BorrowedTensor, ScaleWriteback, Whole
from fp4adam.optim.adam import Scalars
from fp4adam.optim.launch_key import LaunchKey
from fp4adam.optim.masters import (
    DIGEST,
    MASTER,
    REST,
    CodeRemainder,
    HighHalf,
    NoMaster,
    State,
    WholeMaster,
)
from fp4adam.optim.memory_layout import is_dense
from fp4adam.optim.options import Options
from fp4adam.optim.remainder import split_off
from fp4adam.optim.state_codec import (
    CODES,
    FLOAT32,
    INT8,
    PLAIN,
    STATE_BLOCK,
    StateCodec,
    dither_bits,
    split_master,
)
from fp4adam.optim.state_tensor import SCALES, StateTensor, adam_stored_, state_like
from fp4adam.tensors import backend, rows
from fp4adam.tensors.fingerprint import Mark
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.rows import is_whole_blocks, matrix_shape

HALF_DTYPES = (torch.bfloat16, torch.float16)
# In bytes, for the kernels' vector accesses. torch's allocators align to more; views into flat
# buffers may not.
ALIGNMENT = 16
# The states that may have scales, in the order of ``Target.step_codecs``.
SCALED = (MASTER, "exp_avg", "exp_avg_sq")

ReadGrad = Callable[[Tensor], Tensor | None]


class Target:
    """A plain parameter, or this rank's part of one.

    Args:
        owner: The parameter in its group; it may be a DTensor.
        options: The options of the optimizer.

    Attributes:
        param: The local tensor that is written.
        master: Where its FP32 value is between steps.
        codecs: The codecs of the moments, by the name of the state.
        write_dtype: The dtype that a master is rounded to on its way to the parameter.
        borrowed: The owner of ``param``'s memory in another package, or None.
        mark: What the optimizer's last write left, or None.

    An engine that steps it sets these with :meth:`bind`:

    Attributes:
        group: Its parameter group.
        state: Its state in the optimizer.
        tensors: This rank's part of the state.
        updates: False if only the moments can change, as with lr = 0.
        shards: The positions of a shard that shares scales with others, if it can change.
        first_element: Index of its first element in the flattened parameter.
        quantized_after_step: True if it is quantized after all values have been updated, instead of
            by the launch that updates it.
        new_master: The FP32 value between the two, and the update that it comes from, where the
            weight itself is decoded.
    """

    new_master: tuple[Tensor, int] | None = None
    borrowed: BorrowedTensor | None = None
    mark: Mark | None = None
    group: dict[str, Any]
    state: State
    tensors: State
    updates: bool
    shards: tuple[ShardInfo, ...]
    first_element: int
    quantized_after_step: bool

    def __init__(self, owner: Tensor, options: Options) -> None:
        self.owner, self.options = owner, options
        self.param = self._source = local(owner)
        self.state, self.tensors = {}, {}
        self._kind = type(self.param), self.param.dtype
        self.codecs = options.codecs(self.param.dtype)
        self.write_dtype = self.param.dtype
        self.master = self._make_master(self.codecs.pop(MASTER))

    def _make_master(self, codec: StateCodec) -> NoMaster:
        options, dtype = self.options, self.owner.dtype
        if dtype == torch.bfloat16 and options.store_param_remainders:
            return HighHalf(self.owner, self.param)
        if dtype in HALF_DTYPES and options.master_weights:
            # int8 masters are of quantized weights.
            return WholeMaster(self.owner, self.param, FLOAT32 if codec is INT8 else codec)
        return NoMaster(self.owner, self.param)

    def is_current(self, options: Options) -> bool:
        """True if it still describes its owner, under these options."""
        own = local(self.owner)
        is_same = own is self._source and (type(own), own.dtype) == self._kind
        return is_same and options is self.options

    def bind(self, group: dict[str, Any], state: State, updates: bool) -> None:
        """Set what a step works on."""
        self.group, self.state, self.updates = group, state, updates
        self.new_master = None  # of a step that was interrupted
        self.tensors, self.first_element = dict(state), 0
        if is_dtensor(self.owner):
            self.tensors = {name: local(value) for name, value in state.items()}
            self.first_element = first_element(self.owner)
        self.shards = self.shard_infos() if updates else ()
        self.quantized_after_step = False

    @property
    def scales(self) -> Hashable:
        """A key that is equal for parameters that share a per-tensor amax."""
        return self.owner

    def shard_infos(self) -> tuple[ShardInfo, ...]:
        """The positions of this rank's part among others that it shares scales with."""
        return ()

    # Its value

    @property
    def is_kept(self) -> bool:
        """True if a state holds the master, or a part of it."""
        return self.master.name is not None

    @property
    def has_master(self) -> bool:
        """True if a state holds ``master_param``."""
        return self.master.name == MASTER

    @property
    def has_remainder(self) -> bool:
        """True if the parameter itself is the upper half of its master."""
        return self.master.name == REST

    @property
    def starts_from_codes(self) -> bool:
        """True if a step decodes the weight, as nothing else has its value."""
        return self.master.codec in (INT8, CODES)

    @property
    def is_written(self) -> bool:
        """True if a step writes the parameter from a value that is not stored in it."""
        return self.has_master or self.master.codec is CODES

    @property
    def start_value(self) -> Tensor | None:
        """The value before rounding, where that is kept until a step uses it."""
        return None

    def value(self) -> Tensor:
        """The value that a master starts from, as a new float32 tensor."""
        return self.param.detach().to(torch.float32, copy=True)

    def write(self, master: Tensor) -> None:
        """Round the FP32 ``master`` into the parameter."""
        self.param.copy_(master)

    def free_initial_value(self, updates: bool = True) -> None:
        """Free the value before quantization, which the master has replaced.

        ``updates``: False if steps leave the parameter as it is.
        """

    # Who has written it

    def current_mark(self) -> Mark:
        """The memory and versions of the value now."""
        return Mark.of(self.param, self.owner)

    def record(self) -> None:
        """Record that the parameter equals its rounded master now."""
        self.mark = self.current_mark()

    def forget(self) -> None:
        """Forget who has written it: a loaded master has to belong to it."""
        self.mark = None

    def is_unwritten(self) -> bool:
        """True if the parameter is certainly as the optimizer's last write left it."""
        return self.mark is not None and self.mark.is_same(self.current_mark())

    def stands(self, state: State) -> bool:
        """True if the master in a state is that of a parameter that may have been written.

        Written by other code since a step, it has to be the rounded master again. A master from
        elsewhere has to belong to it.
        """
        if self.has_master and local(state[MASTER]).dtype == torch.int8:
            return self.master.is_of_codes(state)
        master = self.master.read(state)
        return self.master.belongs(master) if self.mark is None else self.is_rounded(master)

    def is_rounded(self, master: Tensor) -> bool:
        """True if the parameter is the rounded FP32 ``master``."""
        rounded = split_master(master)[0] if self.has_remainder else master.to(self.param.dtype)
        return torch.equal(self.param, rounded)

    # Its states

    @property
    def step_codecs(self) -> tuple[StateCodec, StateCodec, StateCodec]:
        """The codecs of the value and the two moments."""
        return self.master.codec, self.codecs["exp_avg"], self.codecs["exp_avg_sq"]

    @property
    def is_dithered(self) -> bool:
        """True if any state is rounded with dither, which depends on the index of an element."""
        return not all(codec.exact for codec in self.step_codecs)

    def completed(
        self, state: State, amsgrad: bool, restart: bool, device: torch.device | None = None
    ) -> State:
        """A state with all that a step needs; what is missing is made.

        Args:
            state: The state so far; it is not changed.
            amsgrad: True if it needs the largest second moments.
            restart: True if the master restarts from the parameter.
            device: Where steps are counted if not on the host.
        """
        state = dict(state)
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=device or "cpu")
        elif device is not None:
            state["step"] = state["step"].to(device, torch.float32).reshape(())
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                StateTensor.zeros(self.codecs[name], self.param).store(state, name, self.owner)
        if amsgrad and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = like(self.owner, state_like(self.param))
        if restart or not self.master.is_stored(state):
            master = None if restart else self.master.read(state)
            if master is not None and isinstance(self.master, CodeRemainder):
                if not self.master.can_reach(master):
                    self.write(master)  # set by other code, whatever the weight was
            if self.is_kept and master is None:
                master = self.value()
            self.master.store(state, master)
        elif self.has_remainder and not self.is_unwritten():
            self.master.repair(state)
        state.pop(DIGEST, None)
        return state

    def hold_master(self, master: Tensor, step: int) -> None:
        """Keep an FP32 value until its codes are written, if no state does.

        Without a master, it is rounded in place to what codes can be.
        """
        if self.starts_from_codes:
            self.new_master = master, step
        if self.master.codec is CODES:
            CODES.round_(master, self._dither_of_master(master, step))

    def settle_master(self) -> None:
        """Store the remainder of a master that was just quantized."""
        if self.new_master is None:
            return
        (master, step), self.new_master = self.new_master, None
        if self.master.codec is INT8:
            remainder = split_off(self.param, master, self._dither_of_master(master, step))
            self.tensors[MASTER].copy_(remainder)

    def _dither_of_master(self, master: Tensor, step: int) -> Tensor:
        bits = dither_bits(self.first_element, master.numel(), step, master.device).master
        return bits.view(master.shape)

    # Those of the state that it is bound to

    @property
    def stepped(self) -> Tensor:
        """The tensor that Adam updates: the master, or the parameter itself."""
        return self.tensors[MASTER] if self.has_master else self.param

    @property
    def max_exp_avg_sq(self) -> Tensor | None:
        """The largest second moment so far, or None without AMSGrad."""
        return self.tensors["max_exp_avg_sq"] if self.group["amsgrad"] else None

    @property
    def remainder(self) -> Tensor | None:
        """The int16 remainder that completes a BF16 parameter to its FP32 master, or None."""
        return self.tensors[REST] if self.has_remainder else None

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the state tensors that the step reads and writes."""
        names = ["exp_avg", "exp_avg_sq"]
        if self.group["amsgrad"]:
            names.append("max_exp_avg_sq")
        if self.is_kept:
            names.append(self.master.name)
        scaled = zip(SCALED, self.step_codecs, strict=True)
        return (*names, *(SCALES[name] for name, codec in scaled if codec.scaled))

    @property
    def state_scales(self) -> tuple[Tensor | None, ...]:
        """The scales of the value and the two moments; None where a codec has none."""
        return tuple(
            self.tensors[SCALES[name]] if codec.scaled else None
            for name, codec in zip(SCALED, self.step_codecs, strict=True)
        )

    def stored(self, name: str) -> StateTensor:
        """A moment in its stored form."""
        return StateTensor(self.codecs[name], self.tensors[name], self.tensors.get(SCALES[name]))

    def stored_value(self) -> StateTensor:
        """The value in its stored form."""
        codec = self.master.codec
        if self.has_remainder:
            return StateTensor(codec, self.param, self.tensors[REST])
        if self.starts_from_codes:
            if self.new_master is not None:
                master = self.new_master[0]
            elif codec is INT8:
                master = self.master.read(self.tensors)
            else:
                master = self.param.dequantize(torch.float32)
            return StateTensor(PLAIN, master, None)
        scales = self.tensors[SCALES[MASTER]] if codec.scaled else None
        return StateTensor(codec, self.stepped, scales)

    def whole_value(self) -> Tensor:
        """The decoded value, contiguous; FP32 unless the parameter itself is the value."""
        return self.stored_value().decode().contiguous()

    def update(
        self, grad: Tensor, scalars: Scalars, grad_scale: Tensor | None, clip: Tensor | None
    ) -> None:
        """Step value and state in torch operators, with the same bits as the kernels.

        Args:
            grad: The gradient, of any floating dtype and strides.
            scalars: The scalars of this step.
            grad_scale: One-element tensor that divides the gradient, or None.
            clip: One-element tensor that multiplies it after that, or None.
        """
        value = self.stored_value()
        adam_stored_(
            value,
            grad,
            self.stored("exp_avg"),
            self.stored("exp_avg_sq"),
            self.max_exp_avg_sq,
            scalars,
            self.group["adam_w_mode"],
            None if grad_scale is None else grad_scale.to(grad.device),
            clip,
            self.first_element,
        )
        if self.is_written and self.updates:
            self.hold_master(value.codes, scalars.dither_step)
            if not self.quantized_after_step:
                self.write(value.decode())
                self.settle_master()

    # Its launch

    def launch_key(self, grad: Tensor | None) -> LaunchKey:
        """The properties that the parameters of one launch have in common."""
        # With lr = 0 the value does not change, so the bytes are not written.
        writes = self.updates and self.is_written and not self.quantized_after_step
        quantized = isinstance(self.param, QuantizedTensor) and writes
        value_codec, exp_avg_codec, exp_avg_sq_codec = self.step_codecs
        return LaunchKey(
            device=self.param.device,
            quantizer=self.param.quantizer if quantized else None,
            groups=groups_of(self.shards) if quantized else (),
            grad_dtype=self.param.dtype if grad is None else grad.dtype,
            value_dtype=self.stepped.dtype,
            write_dtype=self.write_dtype if writes else None,
            value_codec=value_codec,
            exp_avg_codec=exp_avg_codec,
            exp_avg_sq_codec=exp_avg_sq_codec,
            adam_w_mode=self.group["adam_w_mode"],
            amsgrad=self.group["amsgrad"],
            is_contiguous=self.stepped.is_contiguous(),
        )

    def fits_a_launch(self, grad: Tensor | None) -> bool:
        """Whether kernels can step it: not FP64, not empty, dense, aligned, one layout for all."""
        value, param = self.stepped, self.param
        if self.group["fused"] is False or not backend.uses_kernels(param.device):
            return False
        tensors = [value, self.tensors["exp_avg"], self.tensors["exp_avg_sq"]]
        tensors += [t for t in (grad, self.max_exp_avg_sq, self.remainder) if t is not None]
        is_quantized = isinstance(param, QuantizedTensor)
        quantized = is_quantized and not self.quantized_after_step
        if self.starts_from_codes and not (quantized and self.updates and param.quantizer.rowwise):
            return False  # kernels decode weights where they quantize rowwise codes
        if not is_quantized:
            tensors.append(param)
        if value.dtype == torch.float64 or value.numel() == 0:
            return False
        if quantized and not (
            param.quantizer.has_kernels
            and is_whole_blocks(param)
            and param.quantizer.layout.fits_kernels(*matrix_shape(param))
        ):
            return False
        if quantized and param.pending_value() is not None:
            return False
        if quantized and self.shards and param.quantizer.layout.tensor_scale == "delayed":
            return False  # the launch that takes an amax from others is for current scaling
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


class QuantizedTarget(Target):
    """A :class:`QuantizedTensor`, or a shard of one."""

    param: QuantizedTensor

    def __init__(self, owner: Tensor, options: Options) -> None:
        super().__init__(owner, options)
        if options.quantize_from == "master":
            self.write_dtype = torch.float32
        self.tell_weight()

    def _make_master(self, codec: StateCodec) -> NoMaster:
        return _master_of_codes(self.owner, self.param, self.options, codec)

    def tell_weight(self) -> None:
        """Let the weight keep what other code writes until a step uses it."""
        if self.is_kept:
            shared = self.param._shared
            shared.stepped_by = shared.stepped_by or weakref.WeakSet()
            shared.stepped_by.add(self)

    def is_current(self, options: Options) -> bool:
        """True if the weight also knows of it, wherever it has moved."""
        if not super().is_current(options):
            return False  # and may be no quantized tensor any more
        return not self.is_kept or self in (self.param._shared.stepped_by or ())

    @property
    def scales(self) -> Hashable:
        return scales_of(self.owner, self.param)

    def shard_infos(self) -> tuple[ShardInfo, ...]:
        return ShardInfo.of(self.owner)

    @property
    def start_value(self) -> Tensor | None:
        return self.param.written_value()

    def value(self) -> Tensor:
        written = self.start_value
        if written is None:
            return self.param.detach().dequantize(torch.float32)
        # A copy, since a state_dict taken before quantize_model may hold the same storage.
        return written.to(self.param.device, torch.float32, copy=True).contiguous()

    def write(self, master: Tensor) -> None:
        self.param._write(master.to(self.write_dtype), by_step=True)

    def record(self) -> None:
        self.tell_weight()
        self.param._shared.left = None
        super().record()

    def stands(self, state: State) -> bool:
        left = None if self.mark is None else self.param._shared.left
        if left is not None:
            return self.param.pending_value() is None and self.param.has_bytes_of(left)
        return super().stands(state)

    def is_rounded(self, master: Tensor) -> bool:
        # The scales may depend on other ranks or members of a group.
        return rows.is_of(self.param, master.to(self.write_dtype))

    def forget(self) -> None:
        super().forget()
        self.param._shared.left = None

    def holds(self, state: State) -> bool:
        """True if the weight need not be written for the loaded master in a state.

        It has to be if it was loaded as plain values, or if no remainder reaches the master.
        """
        if local(state[MASTER]).dtype == torch.int8:
            return True
        master, start = self.master.read(state), self.start_value
        if isinstance(self.master, CodeRemainder):
            # It completes the codes that are there, and would not give the same scales again.
            return self.master.can_reach(master) and start is None
        if self.param._shared.next_init_val is not None:
            return False  # no step has changed it since it was loaded
        return start is None or torch.equal(start.to(master).view(master.shape), master)

    def free_initial_value(self, updates: bool = True) -> None:
        kept = self.param._high_precision_init_val
        self.param._shared.left = None
        if updates or kept is None:
            self.param.clear_high_precision_init_val()
        else:
            self.param._high_precision_init_val = kept.to("meta")  # that there was one


class BorrowedTarget(Target):
    """Another package's quantized tensor, which is stepped in its own memory."""

    def __init__(self, owner: Tensor, options: Options) -> None:
        chunk = shard_size(owner)
        whole = None if chunk is None else Whole(tuple(owner.shape), chunk)
        self.borrowed = BorrowedTensor(local(owner), whole)
        super().__init__(owner, options)
        self.param = self.borrowed.tensor
        master = options.quantize_from == "master"
        self.write_dtype = torch.float32 if master else self.param.dtype
        self._first_mark = self.current_mark()

    def _make_master(self, codec: StateCodec) -> NoMaster:
        return _master_of_codes(self.owner, self.borrowed.tensor, self.options, codec)

    def is_current(self, options: Options) -> bool:
        """True if the tensor is also where it was, and unwritten by others."""
        if not (super().is_current(options) and self.borrowed.is_on(self._source)):
            return False
        now = self.current_mark()
        return now.is_same(self.mark) or now.is_same(self._first_mark)

    @property
    def scales(self) -> Hashable:
        return self.owner

    def shard_infos(self) -> tuple[ShardInfo, ...]:
        # A shard without a specification has scales of its own.
        has_peers = self.param.global_spec is not None
        return ShardInfo.of(self.owner, self.param) if has_peers else ()

    def current_mark(self) -> Mark:
        return Mark(self.borrowed, (self._source, *self.borrowed.memory))

    def value(self) -> Tensor:
        return self.borrowed.value()

    def is_rounded(self, master: Tensor) -> bool:
        return self.borrowed.is_of(master.to(self.write_dtype))

    def write(self, master: Tensor) -> None:
        scales = ScaleWriteback([self.borrowed])
        scales.read()
        self.param.quantize_(master.to(self.write_dtype))
        scales()
        torch.autograd.graph.increment_version([self.borrowed.source])

    def free_initial_value(self, updates: bool = True) -> None:
        self.borrowed.clear_high_precision_init_val()


def _master_of_codes(
    owner: Tensor, param: QuantizedTensor, options: Options, codec: StateCodec
) -> NoMaster:
    if not options.master_weights:
        return NoMaster(owner, param)
    return CodeRemainder(owner, param) if codec is INT8 else WholeMaster(owner, param, codec)


def is_own_master(owner: Tensor) -> bool:
    """True if a parameter is a plain FP32 one, which is stepped itself."""
    own = local(owner)
    is_plain = not isinstance(own, QuantizedTensor) and not is_foreign(own)
    return is_plain and own.dtype == torch.float32


def make_target(owner: Tensor, options: Options) -> Target:
    """The parameter of a tensor in the groups."""
    own = local(owner)
    if isinstance(own, QuantizedTensor):
        return QuantizedTarget(owner, options)
    return (BorrowedTarget if is_foreign(own) else Target)(owner, options)


class Targets:
    """The parameters of an optimizer and of all its engines, by the tensors in its groups.

    Attributes:
        options: The options that they have in common.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._known: dict[Tensor, Target] = {}

    def __getitem__(self, owner: Tensor) -> Target:
        known = self._known.get(owner)
        if known is None or not known.is_current(self.options):
            new = make_target(owner, self.options)
            new.mark = None if known is None else known.mark
            known = self._known[owner] = new
        return known

    def meet(self, owners: Iterable[Tensor]) -> None:
        """Let weights know that an optimizer keeps masters of them."""
        for owner in owners:
            if not owner.is_meta:
                self[owner]

    def keep_only(self, owners: Iterable[Tensor]) -> None:
        """Forget all others, which may have been taken out of the groups."""
        self._known = {owner: self._known[owner] for owner in owners if owner in self._known}

    def unbind(self, states: dict[Tensor, State]) -> None:
        """Let go of the memory of these states, until an engine binds others."""
        for owner, state in states.items():
            known = self._known.get(owner)
            if known is not None and known.state is state:
                known.state, known.tensors = {}, {}

    def forget_marks(self) -> None:
        """Compare every parameter with its master at the next step."""
        for parameter in self._known.values():
            parameter.forget()

    def grad_reader(self, owners: Iterable[Tensor]) -> ReadGrad:
        """A function that returns the local part of a gradient of one of these, or None."""
        read = _decoupled_grad if self.options.use_decoupled_grad else attrgetter("grad")
        kind = dtensor_class()
        if any(isinstance(owner, kind) for owner in owners):
            return lambda owner: local(read(owner))
        return read


def scales_of(owner: Tensor, own: Tensor | None = None) -> Hashable:
    """A key that is equal for tensors that share scales; see ``Target.scales``.

    ``own``: The local tensor, if it is known.
    """
    own = local(owner) if own is None else own
    if not isinstance(own, QuantizedTensor):
        return owner
    shared = own._shared
    if shared.scale_group is not None:
        return shared.scale_group
    return owner


def _decoupled_grad(param: Tensor) -> Tensor | None:
    return getattr(param, "decoupled_grad", None)
