"""The targets of an optimizer: what a step updates, where its states are, and how it is written.

A :class:`Target` is made when a parameter joins an optimizer, and lives as long as the tensor stays
what it is. How its master is stored is one of four strategies, see ``masters``.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp4adam.distributed.dtensor import (
    first_element,
    is_dtensor,
    like,
    local,
    shard_size,
)
from fp4adam.distributed.scale_exchange import ShardInfo
from fp4adam.interop.adapter import is_foreign
from fp4adam.interop.borrowed_tensor import BorrowedTensor, ScaleWriteback
from fp4adam.optim.adam import Scalars, adam_
from fp4adam.optim.checks import is_factored, is_quantized
from fp4adam.optim.masters import DIGEST, MASTER, REST, State, strategy
from fp4adam.optim.options import Options
from fp4adam.optim.remainder import split_off
from fp4adam.optim.state_codec import (
    CODES,
    INT8,
    PLAIN,
    STATE_BLOCK,
    StateCodec,
    dither_bits,
    round_to_codes_,
    split_master,
)
from fp4adam.optim.state_tensor import SCALES, StateTensor, is_dense, state_like, step_count
from fp4adam.tensors import backend, rows
from fp4adam.tensors.fingerprint import Mark
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer
from fp4adam.tensors.rows import is_whole_blocks, matrix_shape
from fp4adam.tensors.storage import SharedStorage

# In bytes, for the kernels' vector accesses. torch's allocators align to more; views into flat
# buffers may not.
ALIGNMENT = 16
# The fractional part of the golden ratio, whose multiples are far from each other.
_SALT = 0x9E3779B9
# The states that may have scales, in the order of ``Target.step_codecs``.
_SCALED = (MASTER, "exp_avg", "exp_avg_sq")

ReadGrad = Callable[[Tensor], Tensor | None]


class LaunchKey(NamedTuple):
    """What the parameters of one launch have in common.

    ``quantizer``: None for plain parameters. ``groups``: the ranks with the other shards of tensors
    that share a scale; () if no exchange is needed. ``write_dtype``: the dtype that the updated
    value is rounded to on its way to the parameter; None if only the value itself is written.
    """

    device: torch.device
    quantizer: Quantizer | None
    groups: tuple[dist.ProcessGroup, ...]
    grad_dtype: torch.dtype
    value_dtype: torch.dtype
    write_dtype: torch.dtype | None
    codecs: tuple[StateCodec, ...]
    adam_w: bool
    amsgrad: bool
    is_contiguous: bool


class Target:
    """A plain parameter, or this rank's part of one.

    Attributes:
        owner, param: The parameter in its group, maybe a DTensor, and the local tensor to write.
        codecs, step_codecs: Those of the moments by name, and of the value and the two moments.
        write_dtype: The dtype that a master is rounded to on its way to the parameter.
        mark: What the optimizer's last write left, or None.
        start_value: The value before rounding, where that is kept until a step uses it.
        has_lost_start: True if another optimizer's step has used it.

    An engine that steps it sets these with :meth:`bind`:

    Attributes:
        state, tensors: Its state, and this rank's part of that.
        stepped: The tensor that Adam updates: the master, or the parameter itself.
        state_scales: The scales of the value and the two moments, or the value's remainder; None
            where a codec has none.
        updates: False if only the moments can change, as with lr = 0.
        shards: The positions of a shard that shares scales with others, if it can change.
        dither_start: Index of its first element for the dither: in the flattened parameter, after
            a salt of its own, so that parameters of one shape are rounded independently.
        quantized_after_step: True if it is quantized after all values have been updated, instead of
            by the launch that updates it.
        new_master: The FP32 value between the two, where the weight itself is decoded.
    """

    borrowed: BorrowedTensor | None = None
    mark: Mark | None = None
    start_value: Tensor | None = None
    has_lost_start = False

    def __init__(self, owner: Tensor, options: Options, param: Tensor | None = None) -> None:
        self.owner, self.options, self._source = owner, options, local(owner)
        self._type = type(self._source), self._source.dtype
        self.param = self._source if param is None else param
        self.master = strategy(owner, self.param, options)
        self.codecs = options.codecs(self.param.dtype, is_factored(owner))
        del self.codecs[MASTER]
        self.step_codecs = self.master.codec, *self.codecs.values()
        # A step decodes the weight, as nothing else has its value.
        self._starts_from_codes = self.master.codec in (INT8, CODES)
        # A step writes the parameter from a value that is not stored in it.
        self._is_written = self.master.name == MASTER or self.master.codec is CODES
        self.write_dtype = self.param.dtype
        if isinstance(self.param, QuantizedTensor) and options.quantize_from == "master":
            self.write_dtype = torch.float32

    def is_current(self) -> bool:
        own = local(self.owner)
        return own is self._source and (type(own), own.dtype) == self._type

    def bind(self, group: dict[str, Any], state: State, updates: bool, place: int) -> None:
        """Set what a step works on; ``place``: That among the parameters of the optimizer."""
        self.group, self.state, self.updates = group, state, updates
        self.new_master = None  # of a step that was interrupted
        self.tensors, first = dict(state), 0
        if is_dtensor(self.owner):
            self.tensors = {name: local(value) for name, value in state.items()}
            first = first_element(self.owner)
        self.dither_start = first + place * _SALT
        tensors, name = self.tensors, self.master.name
        self.stepped = tensors[MASTER] if name == MASTER else self.param
        self.max_exp_avg_sq = tensors["max_exp_avg_sq"] if group["amsgrad"] else None
        pairs = zip(_SCALED, self.step_codecs, strict=True)
        scales = [SCALES[state] if codec.scaled else None for state, codec in pairs]
        if name == REST:
            name, scales[0] = None, REST
        self.state_scales = tuple(scale and tensors[scale] for scale in scales)
        largest = "max_exp_avg_sq" if group["amsgrad"] else None
        self.state_names = tuple(filter(None, ("exp_avg", "exp_avg_sq", largest, name, *scales)))
        self.shards = self.shard_infos() if updates else ()
        self.quantized_after_step = False

    def unbind(self) -> None:
        self.state: State = {}
        self.tensors: State = {}
        self.stepped, self.state_scales = self.param, ()
        self.max_exp_avg_sq = None

    @property
    def scales(self) -> Hashable:
        """A key that is equal for parameters that share a per-tensor amax."""
        return scales_of(self.owner)

    def shard_infos(self) -> tuple[ShardInfo, ...]:
        return ShardInfo.of(self.owner, self.param)

    # Its value

    def value(self) -> Tensor:
        """The value that a master starts from, as a new float32 tensor."""
        return self.param.detach().float()  # narrower ones alone have masters

    def write(self, master: Tensor) -> None:
        self.param.copy_(split_master(master)[0] if self.master.name == REST else master)

    def free_initial_value(self, updates: bool = True) -> None:
        """Free the value before quantization, if there is one and the step ``updates`` anything."""

    # Who has written it: is its master its own?

    def current_mark(self) -> Mark:
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

        Since a step, the rounded master has to be back; one from elsewhere has to belong to it.
        """
        if self.mark is None or self.master.codec is INT8:
            return self.master.belongs(state)
        return self._is_rounded(self.master.read(state))

    def _is_rounded(self, master: Tensor) -> bool:
        return torch.equal(self.param, master.to(self.param.dtype))

    # Its states

    def state_nbytes(self, amsgrad: bool) -> int:
        codecs = [*self.codecs.values(), *filter(None, [self.master.stored])]
        codecs += [self.codecs["exp_avg_sq"]] * amsgrad
        return sum(codec.nbytes(self.param.shape) for codec in codecs)

    def completed(self, state: State, amsgrad: bool, restart: bool = False) -> State:
        """A new state with all that a step needs; what is missing is made.

        ``restart``: Whether the master restarts from the parameter.
        """
        state = dict(state)
        state["step"] = step_count(state.get("step", 0.0), self.param, self.options.capturable)
        for name, codec in self.codecs.items():
            if name not in state:
                zeros = StateTensor(codec, *codec.zeros_like(self.param))
                zeros.store(state, name, self.owner)
        if amsgrad and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = like(self.owner, state_like(self.param))
        if restart or not self.master.is_stored(state):
            given = None if restart else self.master.read(state)
            if given is None:
                self.master.store(state, self.value() if self.master.name else None)
            else:
                self.take_master(state, given)
        elif self.master.name == REST and not self.is_unwritten():
            self.master.repair(state)
        state.pop(DIGEST, None)
        return state

    def take_master(self, state: State, value: Tensor) -> None:
        """Store a master from elsewhere; the parameter is written if it could not have it."""
        if not self.master.can_hold(value):
            self.write(value)
        self.master.store(state, value)

    def hold_master(self, master: Tensor) -> None:
        """Keep an FP32 value until its codes are written; rounded to them without a master."""
        if self._starts_from_codes:
            self.new_master = master
        if self.master.codec is CODES:
            round_to_codes_(master, self._dither_of_master(master))

    def settle_master(self) -> None:
        """Store the remainder of a master that was just quantized."""
        master, self.new_master = self.new_master, None
        if master is not None and self.master.codec is INT8:
            remainder = split_off(self.param, master, self._dither_of_master(master))
            self.tensors[MASTER].copy_(remainder)

    def _dither_of_master(self, master: Tensor) -> Tensor:
        step = int(self.state["step"])  # which has been counted
        bits = dither_bits(self.dither_start, master.numel(), step, master.device).master
        return bits.view(master.shape)

    # Its step by torch operators

    def _stored_value(self) -> StateTensor:
        if self._starts_from_codes:
            value = (
                self.new_master if self.new_master is not None else self.master.read(self.tensors)
            )
            value = self.param.dequantize(torch.float32) if value is None else value
            return StateTensor(PLAIN, value, None)
        return StateTensor(self.master.codec, self.stepped, self.state_scales[0])

    def whole_value(self) -> Tensor:
        """The decoded value, contiguous; FP32 unless the parameter itself is the value."""
        return self._stored_value().decode().contiguous()

    def update(self, grad: Tensor, scalars: Scalars, factor: float | Tensor) -> None:
        """Step value and state in torch operators, with the bits of kernels; see :func:`adam_`."""
        value = self._stored_value()
        moments = zip(self.codecs.items(), self.state_scales[1:], strict=True)
        stored = value, *(StateTensor(codec, self.tensors[n], s) for (n, codec), s in moments)
        numbers = [each.decode() for each in stored]
        options = self.max_exp_avg_sq, scalars, self.group["decoupled_weight_decay"], factor
        adam_(numbers[0], grad, *numbers[1:], *options)
        if not all(each.codec.exact for each in stored):
            dither = dither_bits(self.dither_start, grad.numel(), scalars.dither_step, grad.device)
            for each, x, bits in zip(stored, numbers, dither, strict=True):
                each.replace(x, bits)
        if self._is_written and self.updates:
            self.hold_master(value.codes)
            if not self.quantized_after_step:
                self.write(value.decode())
                self.settle_master()

    # Its launch

    def launch_key(self, grad: Tensor | None) -> LaunchKey:
        # With lr = 0 the value does not change, so the bytes are not written.
        writes = self.updates and self._is_written and not self.quantized_after_step
        quantized = isinstance(self.param, QuantizedTensor) and writes
        return LaunchKey(
            self.param.device,
            self.param.quantizer if quantized else None,
            tuple(info.group for info in self.shards) if quantized else (),
            self.param.dtype if grad is None else grad.dtype,
            self.stepped.dtype,
            self.write_dtype if writes else None,
            self.step_codecs,
            adam_w=self.group["decoupled_weight_decay"],
            amsgrad=self.group["amsgrad"],
            is_contiguous=self.stepped.is_contiguous(),
        )

    def fits_a_launch(self, grad: Tensor | None) -> bool:
        """Whether kernels can step it: not FP64, not empty, dense, aligned, one layout for all."""
        value, param = self.stepped, self.param
        if self.group["fused"] is False or not backend.uses_kernels(param.device):
            return False
        tensors = [value, self.tensors["exp_avg"], self.tensors["exp_avg_sq"]]
        remainder = self.state_scales[0] if self.master.name == REST else None
        tensors += [t for t in (grad, self.max_exp_avg_sq, remainder) if t is not None]
        scales = [t for t in self.state_scales if t is not None]
        is_quantized = isinstance(param, QuantizedTensor)
        quantized = is_quantized and not self.quantized_after_step
        if self._starts_from_codes and not (quantized and self.updates and param.quantizer.rowwise):
            return False  # kernels decode weights where they quantize rowwise codes
        if value.dtype == torch.float64 or not value.numel():
            return False
        if quantized and not self._fits_quantizing_kernels(bool(scales)):
            return False
        if not is_quantized:
            tensors.append(param)
        if not all(t.is_contiguous() for t in tensors):
            alike = all(t.stride() == value.stride() for t in tensors)
            if quantized or not (alike and is_dense(value)):
                return False
        if quantized:
            tensors += param.storage_tensors().values()
        return not any(t.data_ptr() % ALIGNMENT for t in (*tensors, *scales))

    def _fits_quantizing_kernels(self, has_scales: bool) -> bool:
        param, layout = self.param, self.param.quantizer.layout
        return (
            param.quantizer.has_kernels
            and is_whole_blocks(param)
            and layout.fits_kernels(*matrix_shape(param))
            and param.pending_value() is None
            # The launch that takes an amax from others is for current scaling.
            and not (self.shards and layout.tensor_scale == "delayed")
            # Blocks of states would span two rows.
            and not (has_scales and param.shape[-1] % STATE_BLOCK)
        )


class QuantizedTarget(Target):
    param: QuantizedTensor

    def __init__(self, owner: Tensor, options: Options) -> None:
        super().__init__(owner, options)
        if self.master.name:
            shared = self.param._shared
            shared.stepped_by = shared.stepped_by or weakref.WeakSet()
            shared.stepped_by.add(self)

    def is_current(self) -> bool:
        if not super().is_current():
            return False  # and may be no quantized tensor any more
        # The weight has to know of it, wherever it has moved.
        return not self.master.name or self in (self.param._shared.stepped_by or ())

    @property
    def start_value(self) -> Tensor | None:
        return self.param.written_value()

    @property
    def has_lost_start(self) -> bool:
        shared, is_stored = self.param._shared, self.master.name is not None
        return is_stored and shared.was_stepped and self.start_value is None

    def value(self) -> Tensor:
        written = self.start_value
        if written is None:
            return self.param.dequantize(torch.float32)
        # A copy: a state_dict taken before quantize_model may hold the same storage.
        return written.to(self.param.device, torch.float32, copy=True).contiguous()

    def write(self, master: Tensor) -> None:
        self.param._write(master.to(self.write_dtype), by_step=True)

    def has_left(self, shared: SharedStorage) -> bool:
        """True if a storage is as a step has left it, or the state that was loaded for it."""
        return self.param._shared is shared and (self.mark is None or self.is_unwritten())

    def record(self) -> None:
        self.param._shared.left = None
        super().record()

    def stands(self, state: State) -> bool:
        left = None if self.mark is None else self.param._shared.left
        if left is not None:
            return self.param.pending_value() is None and self.param.has_bytes_of(left)
        return super().stands(state)

    def _is_rounded(self, master: Tensor) -> bool:
        # The scales may depend on other ranks or members of a group.
        return rows.is_of(self.param, master.to(self.write_dtype))

    def free_initial_value(self, updates: bool = True) -> None:
        kept = self.param._high_precision_init_val
        self.param._shared.left = None
        if updates or kept is None:
            self.param._shared.was_stepped |= kept is not None
            self.param.clear_high_precision_init_val()
        else:
            self.param._high_precision_init_val = kept.to("meta")  # that there was one


class BorrowedTarget(Target):
    """Another package's quantized tensor, which is stepped in its own memory."""

    def __init__(self, owner: Tensor, options: Options) -> None:
        chunk = shard_size(owner)
        whole = None if chunk is None else (tuple(owner.shape), chunk)
        self.borrowed = BorrowedTensor(local(owner), whole)
        super().__init__(owner, options, self.borrowed.tensor)
        self._first_mark = self.current_mark()

    def is_current(self) -> bool:
        if not (super().is_current() and self.borrowed.is_on(self._source)):
            return False
        now = self.current_mark()
        return now.is_same(self.mark) or now.is_same(self._first_mark)

    def shard_infos(self) -> tuple[ShardInfo, ...]:
        # A shard without a specification has scales of its own.
        return () if self.param.global_spec is None else super().shard_infos()

    def current_mark(self) -> Mark:
        return Mark(self.borrowed, (self._source, *self.borrowed.memory))

    def value(self) -> Tensor:
        return self.borrowed.value()

    def _is_rounded(self, master: Tensor) -> bool:
        return self.borrowed.is_of(master.to(self.write_dtype))

    def write(self, master: Tensor) -> None:
        with ScaleWriteback([self.borrowed]):
            self.param.quantize_(master.to(self.write_dtype))
        torch.autograd.graph.increment_version([self.borrowed.source])

    def free_initial_value(self, updates: bool = True) -> None:
        self.borrowed.clear_high_precision_init_val()


def is_own_master(owner: Tensor) -> bool:
    """Whether a parameter is a plain FP32 one, which is stepped itself."""
    return owner.dtype == torch.float32 and not is_quantized(owner)


class Targets:
    """The parameters of an optimizer and of all its engines, by the tensors in its groups.

    ``places``: Those of parameters in the groups, equal on all ranks and in runs that go on.
    ``are_shown``: Whether code other than steps may hold their states, and so may change them.
    """

    are_shown = True  # until all are known to be new

    def __init__(self, options: Options) -> None:
        self.options = options
        self.places: dict[Tensor, int] = {}
        self._known: dict[Tensor, Target] = {}

    def __getitem__(self, owner: Tensor) -> Target:
        known = self._known.get(owner)
        if known is None or not known.is_current():
            own, kind = local(owner), Target
            if isinstance(own, QuantizedTensor):
                kind = QuantizedTarget
            elif is_foreign(own):
                kind = BorrowedTarget
            new = kind(owner, self.options)
            new.mark = None if known is None else known.mark
            known = self._known[owner] = new
        return known

    def meet(self, owners: Iterable[Tensor]) -> None:
        for owner in owners:
            if not owner.is_meta:
                self[owner]  # now the weight knows that an optimizer keeps a master of it

    def keep_only(self, owners: Sequence[Tensor]) -> None:
        """Forget all others, which may have been taken out of the groups."""
        shapes = {owner.shape for owner in filter(is_quantized, self._known)}
        if shapes and {*owners} - {*self._known} and not shapes & {p.shape for p in owners}:
            raise RuntimeError(
                "quantized parameters must stay in their groups, got plain ones in the place of "
                "all of them, as from DeepSpeed, which decodes weights to flat memory; use "
                "fully_shard, or create a new optimizer if that is intended"
            )
        self.places = {owner: i for i, owner in enumerate(owners)}
        self._known = {owner: self._known[owner] for owner in owners if owner in self._known}

    def grad_reader(self, owners: Iterable[Tensor]) -> ReadGrad:
        """A function that returns the local part of a gradient of one of these, or None."""
        read: ReadGrad = attrgetter("grad")
        if self.options.use_decoupled_grad:
            read = lambda owner: getattr(owner, "decoupled_grad", None)  # noqa: E731
        if any(map(is_dtensor, owners)):
            return lambda owner: local(read(owner))
        return read


def together(each: Iterable[Any], key: Callable = attrgetter("scales")) -> list[list]:
    """Items by a key: targets by the scales that they share, parameters with :func:`scales_of`."""
    found: dict[Hashable, list] = defaultdict(list)
    for one in each:
        found[key(one)].append(one)
    return [*found.values()]


def scales_of(owner: Tensor) -> Hashable:
    shared = getattr(local(owner), "_shared", None)
    return getattr(shared, "scale_group", None) or owner
