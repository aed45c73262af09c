"""The tensor subclass behind every block-scaled format."""

import copy
import functools
import hashlib
import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fp4adam.tensors import rows, swizzle, transpose
from fp4adam.tensors.quantizer import HIGH_PRECISION_DTYPES, Quantizer, check_dtype, check_tensor
from fp4adam.tensors.storage import STORAGE_NAMES, SharedStorage, Storage
from fp4adam.tensors.te_names import TensorNames

_FUNCTIONS: dict[Callable, Callable] = {}
_OPERATORS: dict[Callable, Callable] = {}


def _inner(name: str) -> property:
    """An inner tensor as an attribute; assignment exchanges it for all aliases."""

    def exchange(tensor: "QuantizedTensor", value: Tensor | None) -> None:
        tensor.inner = tensor.inner.exchange(**{name: value})

    doc = f"The inner tensor ``{name}``, or None."
    return property(lambda tensor: getattr(tensor.inner, name), exchange, doc=doc)


def _of_storage(name: str, doc: str) -> property:
    """What all aliases share, as an attribute."""
    return property(
        lambda tensor: getattr(tensor._shared, name),
        lambda tensor, value: setattr(tensor._shared, name, value),
        doc=doc,
    )


class _NoStorage(torch.UntypedStorage):
    def data_ptr(self) -> int:
        raise RuntimeError("a quantized tensor has no storage; export tensor.dequantize()")


class QuantizedTensor(TensorNames, torch.Tensor):
    """A tensor whose values are stored as 4- or 8-bit codes with block scales.

    To autograd and modules it looks like a dense tensor of its nominal ``dtype``: gradients are
    plain tensors, and operators that do not know the format see the dequantized values. Create one
    with ``quantizer.quantize(x)``; write to it with :meth:`quantize_`, ``copy_`` or another full
    overwrite such as ``normal_``. Slices along the first dimension, and of whole blocks along the
    last one, stay quantized and share memory with it, if the format's ``rows_per_entry`` is not
    empty; they can be read, not written. All other views are dequantized copies.
    """

    exists = False  # whether this process has made any
    # One object for all tensors, since torch tells storages apart by identity.
    _no_storage = _NoStorage(0)
    inner = _of_storage("tensors", "The ``Storage``; the inner tensors are attributes, too.")
    global_spec = _of_storage("global_spec", "The tensor that this is a shard of, or None.")
    parameter_name = _of_storage("name", "Its name in the model, for error messages, or None.")
    scale_group = _of_storage("scale_group", "The ``ScaleGroup`` that shares its amax, or None.")

    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        quantizer: Quantizer,
        storage: Storage | SharedStorage,
        requires_grad: bool = False,
    ) -> "QuantizedTensor":
        shared = storage if isinstance(storage, SharedStorage) else SharedStorage(storage)
        device = shared.tensors.codes.device
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        tensor.quantizer, tensor._shared = quantizer, shared
        # Index of the first row, relative to the storage's first row of values, and of the first
        # column.
        tensor._start = tensor._start_col = 0
        QuantizedTensor.exists = True
        quantizer.register()
        return tensor

    def storage_tensors(self) -> dict[str, Tensor]:
        """The inner tensors that exist, by attribute name."""
        return {f"_{name}": inner for name, inner in self.inner.existing().items()}

    @property
    def rowwise_data(self) -> Tensor | None:
        """Codes with blocks along the last dimension, uint8; None without rowwise usage."""
        return self.inner.rowwise_data

    @property
    def columnwise_data(self) -> Tensor | None:
        """Codes with blocks along the first dimension, uint8; None without columnwise usage.

        Those of a tensor gathered by FSDP2 are transposed on access.
        """
        stored, layout = self.inner.columnwise_data, self.quantizer.layout
        if stored is not None or not self.quantizer.columnwise:
            return stored
        if layout.shares_codes:
            return self.rowwise_data
        return transpose.transposed_codes(self.rowwise_data, layout.code_type.bits)

    @property
    def rowwise_scale_inv(self) -> Tensor | None:
        """Decode scales of ``rowwise_data`` in Transformer Engine's layout; padding is 0."""
        return self.quantizer.scale_inv(self.inner, "rowwise")

    @property
    def columnwise_scale_inv(self) -> Tensor | None:
        """Decode scales of ``columnwise_data`` in Transformer Engine's layout; padding is 0."""
        return self.quantizer.scale_inv(self.inner, "columnwise")

    @property
    def rowwise_gemm_scale_inv(self) -> Tensor | None:
        """Scales of ``rowwise_data`` in the layout that the block-scaled GEMM reads.

        NVFP4 and MXFP8: uint8 [rows padded to 128, blocks per row padded to 4], swizzled in tiles
        of 128x4 (``SWIZZLE_32_4_4`` in torch), padded with 0; stored with ``optimize_for_gemm``,
        else made at each access. Float8Block: ``rowwise_scale_inv``.
        """
        return self._gemm_scale_inv("rowwise")

    @property
    def columnwise_gemm_scale_inv(self) -> Tensor | None:
        """The same for the transposed matrix: [cols padded to 128, blocks padded to 4]."""
        return self._gemm_scale_inv("columnwise")

    def _gemm_scale_inv(self, usage: str) -> Tensor | None:
        stored = getattr(self.inner, f"{usage}_gemm_scale_inv")
        if stored is not None or not getattr(self.quantizer, usage):
            return stored
        if self.quantizer.layout.scale_type in ("e4m3", "e8m0"):
            return swizzle.new_gemm_scale(self, usage)
        return self.quantizer.scale_inv(self.inner, usage)

    @property
    def nbytes_stored(self) -> int:
        """Total size of all inner tensors in bytes."""
        return sum(inner.numel() * inner.element_size() for inner in self.inner.present)

    def quantize_(self, x: Tensor) -> "QuantizedTensor":
        """Overwrite the values with those of a tensor of the same shape; storage addresses stay.

        One of the same format is copied byte for byte, in the directions that both have.

        Raises:
            ValueError: If the shape differs.
            TypeError: If ``x`` is not a dense tensor of float32, bfloat16 or float16.
            RuntimeError: If FSDP2 has gathered this tensor.
        """
        check_tensor(x)
        if x.shape != self.shape:
            raise ValueError(
                f"x must have the shape of the tensor, {tuple(self.shape)}, got {tuple(x.shape)}; "
                "reshape it, or make a new tensor with quantizer.quantize(x)"
            )
        check_dtype("x", x.dtype)
        self._write(x)
        return self

    def _write(
        self,
        x: Tensor,
        non_blocking: bool = False,
        amax: Tensor | None = None,
        by_step: bool = False,
    ) -> None:
        """Overwrite the values; only a step drops what they were before quantization."""
        shared, plain = self._shared, not isinstance(x, QuantizedTensor)
        if shared.is_gathered:
            # Its amax is the shard's own tensor, so a write would corrupt the shard.
            raise RuntimeError(
                f"a weight must be sharded to be written to, got a {type(self).__name__} of shape "
                f"{tuple(self.shape)} that FSDP2 has gathered; call reshard() of its module first"
            )
        shared.unsettled |= shared.rows_share_scales  # ranks settle together, whatever each got
        if not plain and x._window() == self._window():
            return  # loading an alias of itself, such as a tensor from state_dict()
        is_new = shared.first_row is None
        with torch.no_grad():
            if not by_step:
                rows.keep_left(self)
            value = x.detach() if plain else x.pending_value()
            # Before the first step, the same bytes keep the value that they were quantized from.
            is_same = self._high_precision_init_val is not None and value is None
            is_same = is_same and self.has_bytes_of(x)
            if plain or not rows.copy_bytes(self, x, non_blocking):
                source = (x._read() if value is None else value).to(self.device)
                rows.write(self, source, amax)
            is_kept = not by_step or shared.init_val is not None
            if is_kept and not (is_new or is_same):
                # Master weights start from a value that is written before a step.
                rows.replace_init_val(self, value)
        mark_written([self])

    def has_bytes_of(self, other: "QuantizedTensor") -> bool:
        """Whether both have the same format, device and bytes; of shards those of their rows."""
        own, others = rows.own_entries(self), rows.own_entries(other)
        looks = ([(n, x.shape, x.device) for n, x in inner.items()] for inner in (own, others))
        if self.quantizer != other.quantizer or next(looks) != next(looks):
            return False
        same = [(x.view(torch.uint8) == others[n].view(torch.uint8)).all() for n, x in own.items()]
        return bool(torch.stack(same).all())

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor; differentiable.

        ``dtype`` is float32, bfloat16 or float16, else TypeError; None for the nominal one.
        """
        dtype = self.dtype if dtype is None else dtype
        check_dtype("dtype", dtype)
        return Dequantize.apply(self, dtype)

    def _read(self, dtype: torch.dtype | None = None, after: Tensor | None = None) -> Tensor:
        """The values as a plain tensor of any dtype, below autograd."""
        dtype = self.dtype if dtype is None else dtype
        direct = dtype if dtype in HIGH_PRECISION_DTYPES else torch.float32
        return rows.read(self, direct, after).view(self.shape).to(dtype)

    @property
    def _high_precision_init_val(self) -> Tensor | None:
        value = self._shared.init_val
        if value is None or value.is_meta:
            return None
        return value if value.shape == self.shape else rows.rows_of(self, value).view(self.shape)

    @_high_precision_init_val.setter
    def _high_precision_init_val(self, value: Tensor | None) -> None:
        if value is not self._shared.init_val and rows.is_all(self):
            self._shared.init_val = value  # that of a slice belongs to the other rows too

    @property
    def get_high_precision_init_val(self) -> Callable[[], Tensor]:
        """Returns the high-precision initial value; only tensors that keep one have this method."""
        value = self._high_precision_init_val
        if value is None:
            raise AttributeError(
                f"get_high_precision_init_val: a {type(self).__name__} keeps no value before "
                "quantization now; ask hasattr first, or take tensor.dequantize()"
            )
        return lambda: value

    def pending_value(self) -> Tensor | None:
        """The written value that cannot be quantized without the other ranks, or None."""
        pending = self._shared.pending
        return None if pending is None else rows.rows_of(self, pending).view(self.shape)

    def written_value(self) -> Tensor | None:
        """The value before quantization, where that is kept until a step uses it."""
        pending = self.pending_value()
        return self._high_precision_init_val if pending is None else pending

    def clear_high_precision_init_val(self) -> None:
        """Free the high-precision initial value; a slice frees none, as other rows may need it."""
        self._high_precision_init_val = None

    def data_ptr(self) -> int:
        return self.inner.codes.data_ptr()

    def is_shared(self) -> bool:
        return all(inner.is_shared() for inner in self.inner.present)

    def share_memory_(self) -> "QuantizedTensor":
        self.inner = self.inner.map(torch.Tensor.share_memory_)
        return self

    # Asynchronous checkpoints copy the storage, then the attributes, which are the inner tensors.
    def untyped_storage(self) -> torch.UntypedStorage:
        """An empty storage; the inner tensors have their own."""
        return self._no_storage

    def set_(self, *args: Any) -> "QuantizedTensor":
        if not (isinstance(args[0], torch.UntypedStorage) and args[0].nbytes() == 0):
            raise _refusal("set_", self)
        return self

    def __dlpack__(self, **kwargs: Any) -> Any:
        name = type(self).__name__
        raise BufferError(f"a tensor must be plain, got a {name}; export tensor.dequantize()")

    @property
    def data(self) -> "QuantizedTensor":
        """The detached tensor; one of the same format can be assigned, others are quantized."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape:
            raise ValueError(
                f"data must have the shape of the tensor, {tuple(self.shape)}, got "
                f"{tuple(value.shape)}; make a new parameter instead"
            )
        check_dtype("data of a quantized tensor", value.dtype)
        if getattr(value, "quantizer", None) != self.quantizer:
            warnings.warn(
                f"values assigned to .data of a {type(self).__name__} are rounded to its format; "
                "to merge adapters of PEFT, make the weights plain first: dequantize_model(model). "
                "Overwrite weights with copy_ or quantize_",
                stacklevel=2,
            )
            return self._write(value)
        value = value.to(self.device)
        kept = self._high_precision_init_val
        if kept is not None and value._shared.init_val is None and self.has_bytes_of(value):
            value._high_precision_init_val = kept
        value._shared.stepped_by = value._shared.stepped_by or self._shared.stepped_by
        self._shared, self._start, self._start_col = value._window()
        torch.autograd.graph.increment_version(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _refusal("item assignment", self)

    def _alias(
        self, shape: tuple[int, ...] | None = None, start: int = 0, start_col: int = 0
    ) -> "QuantizedTensor":
        """A tensor on the same storage; first row and column are relative to this tensor's."""
        shape = tuple(self.shape) if shape is None else shape
        with torch.inference_mode(False):  # an inference tensor could not be versioned
            alias = type(self)(shape, self.dtype, self.quantizer, self._shared)
        alias._start, alias._start_col = self._start + start, self._start_col + start_col
        return alias

    def _window(self) -> tuple[SharedStorage, int, int]:
        return self._shared, self._start, self._start_col

    def _map_storage(
        self,
        fn: Callable[[Tensor], Tensor],
        dtype: torch.dtype | None = None,
        keeps_init_val: bool = False,
    ) -> "QuantizedTensor":
        """A tensor on a new storage: ``fn`` applied to the blocks that hold its rows."""
        source, kept = rows.own_blocks(self), self._high_precision_init_val
        pending = source._shared.pending
        changes = {"pending": None if pending is None else fn(pending)}
        if keeps_init_val:
            changes["init_val"] = self._shared.init_val if kept is None else fn(kept)
            changes["stepped_by"] = self._shared.stepped_by  # whatever is written there next
        new = source._shared.on(source.inner.map(fn), **changes)
        return type(self)(tuple(self.shape), dtype or self.dtype, source.quantizer, new)

    def twin(self) -> "QuantizedTensor":
        """The same rows on a copy of the whole storage; writing to it leaves this tensor alone."""
        twin = self._alias()
        twin._shared = self._shared.on(self.inner.map(torch.clone))
        return twin

    @property
    def _first_row(self) -> int:
        """Index of its first row in the stored matrix."""
        return (self._shared.first_row or 0) + self._start

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        usages = [u for u in ("rowwise", "columnwise") if getattr(self.quantizer, u)]
        stored, numel = self.nbytes_stored, self.numel()
        # torch.compile's symbolic sizes cannot be formatted as numbers.
        bits = f"{8 * stored / max(numel, 1):.2f}" if type(stored) is type(numel) is int else "?"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, {' + '.join(usages)}, "
            f"{bits} bits per element, dtype={self.dtype}, device='{self.device}'{grad})"
        )

    # Used by torch.compile, FSDP2 and swap_tensors.
    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        # torch.compile has to compare operands too; quantizers exclude them from ==.
        spec = self.global_spec
        is_parallel = spec is not None and spec.is_parallel and spec.chunk == spec.shape[0]
        context = (self.quantizer, self.dtype, self.quantizer.operands, is_parallel)
        return list(self.storage_tensors()), context

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple, outer_size: tuple, outer_stride: tuple
    ) -> "QuantizedTensor":
        quantizer, dtype, _, is_parallel = context
        if is_parallel:
            raise NotImplementedError(
                "layers whose weights parallelize_module has distributed must not be compiled, got "
                f"a {cls.__name__} of shape {tuple(outer_size)}; leave them eager "
                "(torch.compiler.disable), or use fully_shard as well and a recipe for weights "
                "alone, which are gathered as plain ones"
            )
        tensors = Storage(**{name.removeprefix("_"): value for name, value in inner.items()})
        return cls(outer_size, dtype, quantizer, tensors)

    def _stable_hash_for_caching(self) -> str:
        """The part in the key of torch.compile's disk cache: metadata, but no values."""
        looks = [(x.shape, x.stride(), x.dtype, x.device) for x in self.inner.present]
        own = type(self).__name__, self.shape, self.requires_grad, *self.__tensor_flatten__()
        # Graphs that call operators of another version of this package would not run.
        parts = ("fp4adam::dequantize", *own, looks)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    # torch's implementation assumes that a tensor with an address owns storage of its logical size.
    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedTensor":
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "only leaf tensors can be deep-copied, got the result of an operation; detach() it"
            )
        shape = tuple(self.shape)
        new = type(self)(shape, self.dtype, self.quantizer, self._shared, self.requires_grad)
        memo[id(self)] = new
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        new._shared.init_val = copy.deepcopy(self._shared.init_val, memo)
        new._shared.is_copy = True
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        return new

    def __reduce_ex__(self, protocol: int) -> tuple[Callable, tuple]:
        stored = rows.own_blocks(self)
        if stored is not self:
            stored = stored._map_storage(torch.clone)
        attributes = {**self.__dict__, **stored.__dict__}
        if isinstance(self, torch.nn.Parameter):
            # Checkpoints leave it out: their tensors come from state_dict() and are no Parameters.
            attributes["_high_precision_init_val"] = self._high_precision_init_val
        shape, grad = tuple(self.shape), self.requires_grad
        return _rebuild_quantized_tensor, (type(self), shape, self.dtype, grad, attributes)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _FUNCTIONS.get(func, func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OPERATORS:
            return _OPERATORS[func](func, *args, **kwargs)
        _refuse_in_place(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(QuantizedTensor, lambda t: t._read(), (args, kwargs))
        return func(*args, **kwargs)


def mark_written(tensors: Sequence[QuantizedTensor]) -> None:
    """Raise the versions of tensors and their inner tensors, which kernels do not do."""
    inner = chain.from_iterable(tensor.inner.versioned for tensor in tensors)
    torch.autograd.graph.increment_version([*tensors, *inner])


def _rebuild_quantized_tensor(
    cls: type, shape: tuple, dtype: torch.dtype, requires_grad: bool, attributes: dict
) -> QuantizedTensor:
    attributes = dict(attributes)
    init_val = attributes.pop("_high_precision_init_val", None)
    tensor = cls(shape, dtype, attributes["quantizer"], attributes["_shared"], requires_grad)
    tensor.__dict__.update(attributes)
    if init_val is not None:
        tensor._high_precision_init_val = init_val
    return tensor


class Dequantize(torch.autograd.Function):
    """Differentiable dequantization; for ``after`` see ``Quantizer.read``."""

    # Without setup_context: autograd would inspect signatures at every call.
    @staticmethod
    def forward(
        ctx: Any, tensor: QuantizedTensor, dtype: torch.dtype, after: Tensor | None = None
    ) -> Tensor:
        ctx.nominal_dtype = tensor.dtype
        return tensor._read(dtype, after)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(ctx.nominal_dtype), None, None


def _refusal(what: object, tensor: QuantizedTensor) -> NotImplementedError:
    return NotImplementedError(
        f"{what} must not write into a {type(tensor).__name__}: small changes would be rounded "
        "away. Train with FP4Adam, or any optimizer in MasterWeightOptimizer; initialize inside "
        "quantized_init() or before quantize_model(), call tensor.quantize_(new_values), or, to "
        "merge adapters for example, make the weights plain with dequantize_model(model)"
    )


def _refuse_in_place(func: Callable, args: tuple, kwargs: dict) -> None:
    # Rounding after each one would silently lose small updates.
    name = func._schema.name
    for i, argument in enumerate(func._schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        # Schemas of collectives do not mark their first argument as written.
        writes |= i == 0 and name.startswith("c10d::") and name.endswith("_")
        if not writes:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, QuantizedTensor):
                raise _refusal(func, tensor)


def _implements(registry: dict[Callable, Callable], *names: Callable) -> Callable:
    def register(fn: Callable) -> Callable:
        registry.update(dict.fromkeys(names, fn))
        return fn

    return register


# Decorators of what torch functions and aten operators do if an argument is a quantized tensor.
implements_function = functools.partial(_implements, _FUNCTIONS)
implements_operator = functools.partial(_implements, _OPERATORS)


for _name in STORAGE_NAMES:
    setattr(QuantizedTensor, f"_{_name}", _inner(_name))

torch.serialization.add_safe_globals([_rebuild_quantized_tensor])
