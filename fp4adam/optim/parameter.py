"""The parameters of an optimizer: what a step updates, where its states are, and how it is written.

A :class:`Parameter` is made when a tensor joins an optimizer, and lives as long as the tensor stays
what it is; :class:`Parameters` keeps them. How a master weight is stored is decided here, together
with ``state_codec``.
"""

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
from fp4adam.optim.memory_layout import is_dense
from fp4adam.optim.options import Options
from fp4adam.optim.remainder import (
    CodeRemainder,
    belongs_to,
    digest,
    is_completed,
    split_off,
)
from fp4adam.optim.state_codec import (
    CODES,
    FLOAT32,
    INT8,
    PLAIN,
    REMAINDER,
    STATE_BLOCK,
    StateCodec,
    dither_bits,
    join_master,
    split_master,
)
from fp4adam.optim.state_tensor import SCALES, StateTensor, adam_stored_, state_like
from fp4adam.optim.step_kernels import Kind
from fp4adam.tensors import rows
from fp4adam.tensors.fingerprint import Mark
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.rows import is_whole_blocks, matrix_shape

HALF_DTYPES = (torch.bfloat16, torch.float16)
# In bytes, for the kernels' vector accesses. torch's allocators align to more; views into flat
# buffers may not.
ALIGNMENT = 16

State = dict[str, Any]
ReadGrad = Callable[[Tensor], Tensor | None]


class Parameter:
    """A plain parameter, or this rank's part of one.

    Args:
        owner: The parameter in its group; it may be a DTensor.
        options: The options of the optimizer.

    Attributes:
        param: The local tensor that is written.
        codecs: The codecs of master and moments, by the name of the state.
        has_master: Whether the optimizer keeps a separate master weight.
        has_remainder: Whether the parameter itself is the upper half of its master.
        rounds_codes: Whether a quantized weight has no master, so that updates round its codes.
        write_dtype: The dtype that a master is rounded to on its way to the parameter.
        borrowed: The owner of ``param``'s memory in another package, or None.
        mark: What the optimizer's last write left, or None.

    An engine that steps it sets these with :meth:`bind`:

    Attributes:
        group: Its parameter group.
        state: Its state in the optimizer.
        tensors: This rank's part of the state.
        updates: Whether the value can change; with lr = 0 only the moments do.
        shards: The positions of a shard that shares scales with others, if it can change.
        first_element: Index of its first element in the flattened parameter.
        quantized_after_step: Whether it is quantized after all values have been updated, instead of
            by the launch that updates it.
        new_master: The FP32 master between the two, and the update that it comes from, if at most
            a remainder of it is kept.
    """

    rounds_codes = False
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
        self.has_remainder = options.store_param_remainders and owner.dtype == torch.bfloat16
        self.has_master = (
            options.master_weights and owner.dtype in HALF_DTYPES and not self.has_remainder
        )
        self.write_dtype = self.param.dtype
        if self.codecs["master_param"] is INT8:
            # Of quantized weights; BF16 and FP16 parameters beside them have whole masters.
            self.codecs["master_param"] = FLOAT32

    def is_current(self, options: Options) -> bool:
        """Whether it still describes its owner, under these options."""
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

    # Who has written it

    def current_mark(self) -> Mark:
        """The memory and versions of the value now."""
        return Mark.of(self.param, self.owner)

    def record(self) -> None:
        """Record that the parameter equals its rounded master now."""
        self.mark = self.current_mark()

    def is_unwritten(self) -> bool:
        """Whether the parameter is certainly as the optimizer's last write left it."""
        return self.mark is not None and self.mark.is_same(self.current_mark())

    # Its states

    @property
    def value_codec(self) -> StateCodec:
        """The codec of the value that Adam updates."""
        if self.has_remainder:
            return REMAINDER
        if self.completes:
            return INT8
        if self.rounds_codes:
            return CODES
        codec = self.codecs["master_param"]
        return codec if self.has_master and not codec.exact else PLAIN

    @property
    def completes(self) -> bool:
        """Whether the master is an int8 remainder, which belongs to the codes of the weight."""
        return isinstance(self.codecs["master_param"], CodeRemainder)

    @property
    def starts_from_codes(self) -> bool:
        """Whether a step decodes the weight, as nothing else has its value."""
        return self.completes or self.rounds_codes

    @property
    def is_written(self) -> bool:
        """Whether a step writes the parameter from a value that is not stored in it."""
        return self.has_master or self.rounds_codes

    @property
    def step_codecs(self) -> tuple[StateCodec, StateCodec, StateCodec]:
        """The codecs of the value and the two moments."""
        return self.value_codec, self.codecs["exp_avg"], self.codecs["exp_avg_sq"]

    @property
    def is_dithered(self) -> bool:
        """Whether any state is rounded with dither, which depends on the index of an element."""
        return not all(codec.exact for codec in self.step_codecs)

    def master(self, state: State) -> Tensor | None:
        """The local part of a master weight in FP32, on the parameter's device; None without one.

        Models move without the states, which follow when they are loaded.
        """
        if "master_param" not in state:
            return None
        stored = StateTensor.of(state, "master_param", self.codecs["master_param"])
        return stored.decode().to(self.param.device)

    def store_master(self, state: State, master: Tensor) -> None:
        """Put an FP32 master into a state, in the form in which it is stored."""
        state.pop(DIGEST, None)
        StateTensor.encode(self.codecs["master_param"], master).store(
            state, "master_param", self.owner
        )

    def completed(
        self, state: State, amsgrad: bool, restart: bool, device: torch.device | None = None
    ) -> State:
        """A state with all that a step needs; what is missing is made.

        Args:
            state: The state so far; it is not changed.
            amsgrad: Whether it needs the largest second moments.
            restart: Whether the master restarts from the parameter.
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
        if self.has_remainder:
            self._complete_remainder(state)
        else:
            state.pop("param_remainder", None)
        if not self.has_master:
            # The parameter is FP32 itself, or its remainder completes the master.
            state.pop("master_param", None)
            state.pop(SCALES["master_param"], None)
        elif restart or "master_param" not in state:
            self.store_master(state, self.value())
        elif local(state["master_param"]).dtype != self.codecs["master_param"].dtype:
            master = self.master(state).contiguous()
            if self.completes and not belongs_to(self.param, master):
                self.write(master)  # set by other code, whatever the weight was
            self.store_master(state, master)
        state.pop(DIGEST, None)
        return state

    def owns(self, state: State) -> bool | None:
        """Whether the master in a state certainly is, or is not, that of the weight's codes.

        A remainder says nothing without its codes, so it is saved with their digest. None if values
        have to be compared.
        """
        if not self.completes:
            return None
        master = local(state["master_param"])
        if master.dtype == torch.int8:
            known = state.get(DIGEST)
            return known is not None and torch.equal(known.cpu(), digest(self.param))
        return belongs_to(self.param, master.to(self.param.device)) or None

    def rounds(self, state: State) -> bool:
        """Whether an FP32 master that was loaded has more than a remainder can keep."""
        master = local(state.get("master_param"))
        if not self.completes or master is None or master.dtype == torch.int8:
            return False
        return not is_completed(self.param, master.to(self.param.device).view(self.param.shape))

    def hold_master(self, master: Tensor, step: int) -> None:
        """Keep an FP32 master until its codes are written, if no state does.

        Without a master, it is rounded in place to what codes can be.
        """
        if self.starts_from_codes:
            self.new_master = master, step
        if self.rounds_codes:
            CODES.round_(master, self._dither_of_master(master, step))

    def settle_master(self) -> None:
        """Keep of a master that has just been quantized what its codes lack."""
        if self.new_master is None:
            return
        (master, step), self.new_master = self.new_master, None
        if self.completes:
            remainder = split_off(self.param, master, self._dither_of_master(master, step))
            self.tensors["master_param"].copy_(remainder)

    def _dither_of_master(self, master: Tensor, step: int) -> Tensor:
        bits = dither_bits(self.first_element, master.numel(), step, master.device).master
        return bits.view(master.shape)

    def _complete_remainder(self, state: State) -> None:
        """Make a remainder if there is none; also repair one that does not fit.

        Any parameter value with any remainder gives a master within half a BF16 step of that value.
        The exceptions are next to zero and infinity, where a stale remainder could give a NaN, so
        it is zeroed there.
        """
        param = self.param.detach()
        if "param_remainder" not in state:
            remainder = torch.zeros_like(param, dtype=torch.int16)
            if "master_param" in state:
                master = local(state["master_param"])
                if self.is_rounded(master):
                    remainder = split_master(master)[1]
            state["param_remainder"] = like(self.owner, remainder)
        elif not self.is_unwritten():
            remainder = local(state["param_remainder"])
            upper, _ = split_master(join_master(param, remainder))
            remainder.masked_fill_(upper.view(torch.int16) != param.view(torch.int16), 0)

    # Those of the state that it is bound to

    @property
    def stepped(self) -> Tensor:
        """The tensor that Adam updates: the master weight, or the parameter itself."""
        return self.tensors["master_param"] if self.has_master else self.param

    @property
    def max_exp_avg_sq(self) -> Tensor | None:
        """The largest second moment so far, or None without AMSGrad."""
        return self.tensors["max_exp_avg_sq"] if self.group["amsgrad"] else None

    @property
    def remainder(self) -> Tensor | None:
        """The int16 remainder that completes a BF16 parameter to its FP32 master, or None."""
        return self.tensors["param_remainder"] if self.has_remainder else None

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the state tensors that the step reads and writes."""
        names = ["exp_avg", "exp_avg_sq"]
        if self.group["amsgrad"]:
            names.append("max_exp_avg_sq")
        if self.has_master:
            names.append("master_param")
        if self.has_remainder:
            names.append("param_remainder")
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
        """A moment or the master in its stored form."""
        return StateTensor(self.codecs[name], self.tensors[name], self.tensors.get(SCALES[name]))

    def stored_value(self) -> StateTensor:
        """The value in its stored form."""
        codec = self.value_codec
        if codec is REMAINDER:
            return StateTensor(codec, self.param, self.tensors["param_remainder"])
        if self.starts_from_codes:
            if self.new_master is not None:
                master = self.new_master[0]
            elif self.completes:
                master = self.master(self.tensors)
            else:
                master = self.param.dequantize(torch.float32)
            return StateTensor(PLAIN, master, None)
        scales = self.tensors[SCALES["master_param"]] if codec.scaled else None
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

    def kind(self, grad: Tensor | None) -> Kind:
        """The properties that the parameters of one launch have in common."""
        # With lr = 0 the value does not change, so the bytes are not written.
        writes = self.updates and self.is_written and not self.quantized_after_step
        quantized = isinstance(self.param, QuantizedTensor) and writes
        value_codec, exp_avg_codec, exp_avg_sq_codec = self.step_codecs
        return Kind(
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

    def launch_key(self, grad: Tensor | None) -> Hashable:
        """A key that is equal for parameters that can share a launch."""
        return self.param.device, self.kind(grad), self.state_names


# Where the digest of the codes is saved that a remainder belongs to.
DIGEST = "weight_digest"
# The states that may have scales, in the order of ``Parameter.step_codecs``.
SCALED = ("master_param", "exp_avg", "exp_avg_sq")


class QuantizedParameter(Parameter):
    """A :class:`QuantizedTensor`, or a shard of one."""

    param: QuantizedTensor

    def __init__(self, owner: Tensor, options: Options) -> None:
        super().__init__(owner, options)
        if options.quantize_from == "master":
            self.write_dtype = torch.float32
        _set_master(self)

    @property
    def scales(self) -> Hashable:
        return scales_of(self.owner, self.param)

    def shard_infos(self) -> tuple[ShardInfo, ...]:
        return ShardInfo.of(self.owner)

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
        return not self.param.numel() or self.param.has_bytes_of(twin)

    def write(self, master: Tensor) -> None:
        self.param._write(master.to(self.write_dtype))

    def free_initial_value(self, updates: bool) -> None:
        self.param._shared.rounded_master = None
        if updates:
            self.param.clear_high_precision_init_val()
        elif self.param._high_precision_init_val is not None:
            # Steps do not change the bytes, so keep the next value that is written instead.
            self.param._high_precision_init_val = self.param._high_precision_init_val.to("meta")


class BorrowedParameter(Parameter):
    """Another package's quantized tensor, which is stepped in its own memory."""

    def __init__(self, owner: Tensor, options: Options) -> None:
        super().__init__(owner, options)
        chunk = shard_size(owner)
        whole = None if chunk is None else Whole(tuple(owner.shape), chunk)
        self.borrowed = BorrowedTensor(self.param, whole)
        self.param = self.borrowed.tensor
        master = options.quantize_from == "master"
        self.write_dtype = torch.float32 if master else self.param.dtype
        _set_master(self)
        self._first_mark = self.current_mark()

    def is_current(self, options: Options) -> bool:
        """Whether the tensor is also where it was, and unwritten by others."""
        if not (super().is_current(options) and self.borrowed.is_on(self._source)):
            return False
        now = self.current_mark()
        return now.is_same(self.mark) or now.is_same(self._first_mark)

    def shard_infos(self) -> tuple[ShardInfo, ...]:
        # A shard without a specification has scales of its own.
        has_peers = self.param._shared.global_spec is not None
        return ShardInfo.of(self.owner, self.param) if has_peers else ()

    def current_mark(self) -> Mark:
        return Mark(self.borrowed, (self._source, *self.borrowed.memory))

    def value(self) -> Tensor:
        return self.borrowed.value()

    def is_rounded(self, master: Tensor) -> bool:
        value = master.to(self.write_dtype)
        if self.borrowed.is_of(value):
            return True
        if self.borrowed.given is not None or self.shard_infos():
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


def _set_master(parameter: QuantizedParameter | BorrowedParameter) -> None:
    """Set what keeps the value of a quantized weight between steps."""
    options = parameter.options
    parameter.has_master, parameter.has_remainder = options.master_weights, False
    parameter.rounds_codes = not options.master_weights
    if options.master_weights and options.master_weight_dtype == torch.int8:
        parameter.codecs["master_param"] = CodeRemainder(parameter.param)


def is_own_master(owner: Tensor) -> bool:
    """Whether a parameter is a plain FP32 one, which is stepped itself."""
    own = local(owner)
    is_plain = not isinstance(own, QuantizedTensor) and not is_foreign(own)
    return is_plain and own.dtype == torch.float32


def make_parameter(owner: Tensor, options: Options) -> Parameter:
    """The parameter of a tensor in the groups."""
    own = local(owner)
    if isinstance(own, QuantizedTensor):
        return QuantizedParameter(owner, options)
    return (BorrowedParameter if is_foreign(own) else Parameter)(owner, options)


class Parameters:
    """The parameters of an optimizer and of all its engines, by the tensors in its groups.

    Attributes:
        options: The options that they have in common.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._known: dict[Tensor, Parameter] = {}

    def __getitem__(self, owner: Tensor) -> Parameter:
        known = self._known.get(owner)
        if known is None or not known.is_current(self.options):
            new = make_parameter(owner, self.options)
            new.mark = None if known is None else known.mark
            known = self._known[owner] = new
        return known

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
            parameter.mark = None

    def grad_reader(self, owners: Iterable[Tensor]) -> ReadGrad:
        """A function that returns the local part of a gradient of one of these, or None."""
        read = _decoupled_grad if self.options.use_decoupled_grad else attrgetter("grad")
        kind = dtensor_class()
        if any(isinstance(owner, kind) for owner in owners):
            return lambda owner: local(read(owner))
        return read


def scales_of(owner: Tensor, own: Tensor | None = None) -> Hashable:
    """A key that is equal for tensors that share scales; see ``Parameter.scales``.

    ``own``: The local tensor, if it is known.
    """
    own = local(owner) if own is None else own
    if not isinstance(own, QuantizedTensor):
        return owner
    shared = own._shared
    if shared.scale_group is not None:
        return shared.scale_group
    return owner


def written_value(param: QuantizedTensor) -> Tensor | None:
    """The unrounded value of a parameter that no step has used yet, or None."""
    pending = param.pending_value()
    return param._high_precision_init_val if pending is None else pending


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Like ``torch.equal``, but NaN equals NaN, because uninitialized memory may hold NaN."""
    alike = (a.dtype, a.shape) == (b.dtype, b.shape)
    return alike and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _decoupled_grad(param: Tensor) -> Tensor | None:
    return getattr(param, "decoupled_grad", None)
