"""The tensor subclass behind every block-scaled format."""

import copy
import dataclasses
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fp4adam.tensors import row_window
from fp4adam.tensors.quantizer import (
    HIGH_PRECISION_DTYPES,
    Operands,
    Quantizer,
    check_dtype,
    check_tensor,
)
from fp4adam.tensors.row_window import Origin

# Inner tensors, named as in Transformer Engine. Scales of square blocks are the same for both
# directions and are kept once, one per block, in _block_scale_inv. The last two repeat the scales
# for GEMMs alone, and are derived from those that everything else reads.
STORAGE_NAMES = (
    "_rowwise_data",
    "_rowwise_scale_inv",
    "_columnwise_data",
    "_columnwise_scale_inv",
    "_block_scale_inv",
    "_amax",
    "_rowwise_gemm_scale_inv",
    "_columnwise_gemm_scale_inv",
)

_FUNCTIONS: dict[Callable, Callable] = {}
_OPERATORS: dict[Callable, Callable] = {}


class _Storage:
    """An attribute that counts when it is exchanged; to read it takes no longer than others."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __set__(self, tensor: "QuantizedTensor", value: Any) -> None:
        attributes = tensor.__dict__
        if attributes.get(self.name, value) is not value:
            QuantizedTensor.storage_generation += 1
        attributes[self.name] = value


class _NoStorage(torch.UntypedStorage):
    def data_ptr(self) -> int:
        raise RuntimeError(
            "a tensor must be plain to have one storage, got a quantized one; export "
            "tensor.dequantize(), or save it with torch.save"
        )


class QuantizedTensor(torch.Tensor):
    """A tensor whose values live as 4- or 8-bit codes with block scales.

    To autograd and to modules it looks like a dense tensor of its nominal ``dtype``: gradients are
    plain tensors, and operators that do not know the format see the dequantized values. Build one
    with ``quantizer.quantize(x)``; write to it with :meth:`quantize_`, ``copy_`` or another full
    overwrite such as ``normal_``. Pieces that ``split``, ``narrow`` and slices cut off along the
    first dimension stay quantized and share memory with it, if the quantizer's ``row_pitch`` says
    how; all other views are copies: writing to one changes nothing.

    Attributes:
        quantizer: The :class:`Quantizer` that made it.
    """

    # How often an inner tensor of any of them has been exchanged for another one.
    storage_generation = 0
    # One for all, since storages are told apart by their identity.
    _no_storage = _NoStorage(0)
    quantizer = _Storage()
    _rowwise_data = _Storage()
    _rowwise_scale_inv = _Storage()
    _columnwise_data = _Storage()
    _columnwise_scale_inv = _Storage()
    _block_scale_inv = _Storage()
    _amax = _Storage()
    _rowwise_gemm_scale_inv = _Storage()
    _columnwise_gemm_scale_inv = _Storage()

    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        quantizer: Quantizer,
        storage: dict[str, Tensor],
        requires_grad: bool = False,
    ) -> "QuantizedTensor":
        device = next(iter(storage.values())).device
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        quantizer: Quantizer,
        storage: dict[str, Tensor],
        requires_grad: bool = False,
    ) -> None:
        self.quantizer = quantizer
        self._origin = Origin()
        # Of its rows, counted from the first one of the origin.
        self._start = 0
        # Shape of the pieces that it has been split into.
        self._piece: tuple[int, ...] | None = None
        self._adopt(storage)

    def _adopt(self, storage: dict[str, Tensor]) -> None:
        for name in STORAGE_NAMES:
            setattr(self, name, storage.get(name))

    def storage_tensors(self) -> dict[str, Tensor]:
        """The inner tensors that exist, by name."""
        return {
            name: getattr(self, name) for name in STORAGE_NAMES if getattr(self, name) is not None
        }

    @property
    def rowwise_data(self) -> Tensor | None:
        """uint8 codes with blocks along the last dimension, or None without rowwise usage."""
        return self.settled()._rowwise_data

    @property
    def columnwise_data(self) -> Tensor | None:
        """uint8 codes with blocks along the first dimension, or None without columnwise usage.

        A tensor that FSDP2 has gathered derives them from the rowwise ones, if asked.
        """
        data = self.settled()._columnwise_data
        if data is None and self.quantizer.columnwise:
            from fp4adam.tensors.transpose import derived_columnwise

            data = derived_columnwise(self)
        return data

    @property
    def rowwise_scale_inv(self) -> Tensor | None:
        """Decode scales of ``rowwise_data`` in Transformer Engine's layout, padding zero."""
        return self.settled()._rowwise_scale_inv

    @property
    def columnwise_scale_inv(self) -> Tensor | None:
        """Decode scales of ``columnwise_data`` in Transformer Engine's layout, padding zero."""
        return self.settled()._columnwise_scale_inv

    @property
    def rowwise_gemm_scale_inv(self) -> Tensor | None:
        """Scales of ``rowwise_data`` as the block-scaled GEMM reads them.

        NVFP4 and MXFP8: uint8 [rows to 128, blocks per row to 4], whose memory is in tiles of 128x4
        (cuBLAS; ``SWIZZLE_32_4_4`` in torch), padding zero. With ``optimize_for_gemm`` they are
        stored and stay where they are; else this is a new tensor, which takes a launch.
        Float8Block: ``rowwise_scale_inv``.
        """
        return self._gemm_scale_inv("rowwise")

    @property
    def columnwise_gemm_scale_inv(self) -> Tensor | None:
        """The same for the transposed matrix and its blocks: [cols to 128, blocks to 4]."""
        return self._gemm_scale_inv("columnwise")

    def _gemm_scale_inv(self, usage: str) -> Tensor | None:
        stored = getattr(self.settled(), f"_{usage}_gemm_scale_inv")
        if stored is not None or not getattr(self.quantizer, usage):
            return stored
        from fp4adam.tensors.swizzle import new_gemm_scale

        return new_gemm_scale(self, usage)

    @property
    def nbytes_stored(self) -> int:
        """Bytes of all inner tensors."""
        return sum(t.numel() * t.element_size() for t in self.storage_tensors().values())

    def quantize_(self, x: Tensor) -> "QuantizedTensor":
        """Overwrite the values with ``x``; storage addresses stay.

        Args:
            x: float32, bfloat16 or float16 tensor of the same shape, any device. A quantized one of
                the same format is copied byte for byte.

        Raises:
            ValueError: If the shape differs.
            TypeError: If the dtype is not one of the three, or ``x`` is no dense tensor.
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

    def _write(self, x: Tensor, non_blocking: bool = False, amax: Tensor | None = None) -> None:
        if self._origin.refills is not None:
            # Its amax is that of the shard.
            raise RuntimeError(
                f"a weight must be sharded to be written to, got a {type(self).__name__} of shape "
                f"{tuple(self.shape)} that FSDP2 has gathered, which would lose the values; call "
                "reshard() of its module first"
            )
        plain, is_new = not isinstance(x, QuantizedTensor), self._origin.first_row is None
        if not plain and x._origin is self._origin and x._start == self._start:
            return  # what state_dict() handed out is loaded again
        with torch.no_grad():
            value = x.detach() if plain else x.pending_value()
            if plain or not row_window.copy_bytes(self, x, non_blocking):
                source = (x._read() if value is None else value).to(self.device)
                row_window.write(self, source, amax)
            if self._origin.init_val is not None and not is_new and row_window.is_all(self):
                # A value loaded before the first step is what the master weights start from.
                self._origin.init_val = None if value is None else value.to(self.device, copy=True)
        self._origin.writes += not is_new
        torch.autograd.graph.increment_version(self)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values as a plain float32, bfloat16 or float16 tensor; differentiable."""
        check_dtype("dtype", dtype)
        return Dequantize.apply(self, dtype)

    def _read(self, dtype: torch.dtype | None = None, after: Tensor | None = None) -> Tensor:
        """The values as a plain tensor of any dtype, below autograd."""
        dtype = self.dtype if dtype is None else dtype
        direct = dtype if dtype in HIGH_PRECISION_DTYPES else torch.float32
        return row_window.read(self, direct, after).view(self.shape).to(dtype)

    def settled(self) -> "QuantizedTensor":
        """The tensor, after rows that were written one after the other have been quantized.

        Rows of a shard stay as they are if their scales depend on other ranks, until these join in:
        at the next all-gather, or step of the optimizer.
        """
        if self._origin.pending is not None:
            row_window.settle(self)
        return self

    @property
    def _high_precision_init_val(self) -> Tensor | None:
        return self._origin.init_val

    @_high_precision_init_val.setter
    def _high_precision_init_val(self, value: Tensor | None) -> None:
        self._origin.init_val = value

    def get_high_precision_init_val(self) -> Tensor | None:
        """The value before quantization, if it was kept for the optimizer and not yet used."""
        # On the meta device it only says that the first value that is written has to be kept.
        value = self._high_precision_init_val
        return None if value is None or value.is_meta else value

    def pending_value(self) -> Tensor | None:
        """What has been written and cannot be quantized before other ranks join in, or None."""
        pending = self.settled()._origin.pending
        return None if pending is None else row_window.rows_of(self, pending).view(self.shape)

    def clear_high_precision_init_val(self) -> None:
        """Free the value before quantization."""
        self._high_precision_init_val = None

    def data_ptr(self) -> int:
        """Address of the codes; a wrapper of its own would report 0 for every parameter."""
        data = self._rowwise_data if self._rowwise_data is not None else self._columnwise_data
        return data.data_ptr()

    # The next three would otherwise work on the wrapper's own memory, which does not exist.
    def is_shared(self) -> bool:
        """Whether the inner tensors are in shared memory."""
        return all(inner.is_shared() for inner in self.storage_tensors().values())

    def share_memory_(self) -> "QuantizedTensor":
        """Move the inner tensors to shared memory."""
        for inner in self.storage_tensors().values():
            inner.share_memory_()
        return self

    # Asynchronous checkpoints copy the storage of a tensor that has an address, then attributes.
    # These, the inner tensors among them, are all that there is.
    def untyped_storage(self) -> torch.UntypedStorage:
        """An empty storage; the inner tensors have some."""
        return self._no_storage

    def set_(self, *args: Any) -> "QuantizedTensor":
        """Refused, but for the empty storage."""
        if not (isinstance(args[0], torch.UntypedStorage) and args[0].nbytes() == 0):
            raise _refusal("set_", self)
        return self

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise BufferError(
            f"a tensor must be plain to be exported through DLPack, got a {type(self).__name__}; "
            "export tensor.dequantize()"
        )

    @property
    def data(self) -> "QuantizedTensor":
        """The tensor without autograd, sharing storage.

        Assigning a tensor of the same format swaps the storage; any other is quantized in place.
        """
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape:
            raise ValueError(
                f"data must have the shape of the tensor, {tuple(self.shape)}, got "
                f"{tuple(value.shape)}; make a new parameter instead"
            )
        check_dtype("data of a quantized tensor", value.dtype)
        if not same_format(self, value):
            return self._write(value)
        value = value.to(self.device)
        self._adopt(value.storage_tensors())
        self._origin, self._start = value._origin, value._start
        torch.autograd.graph.increment_version(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _refusal("item assignment", self)

    def _alias(self, shape: tuple[int, ...] | None = None, start: int = 0) -> "QuantizedTensor":
        """A tensor on the same storage; ``start``: its first row, counted from the own one."""
        shape = tuple(self.shape) if shape is None else shape
        with torch.inference_mode(False):  # an inference tensor could not be versioned
            alias = type(self)(shape, self.dtype, self.quantizer, self.storage_tensors())
        alias._origin, alias._start = self._origin, self._start + start
        return alias

    def _map_storage(
        self, fn: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> "QuantizedTensor":
        """A tensor with storage of its own, that of its own blocks mapped by ``fn``."""
        source = row_window.own_blocks(self.settled())
        storage = {name: fn(inner) for name, inner in source.storage_tensors().items()}
        new = type(self)(tuple(self.shape), dtype or self.dtype, source.quantizer, storage)
        pending = source._origin.pending
        new._origin = dataclasses.replace(
            source._origin, init_val=None, pending=None if pending is None else fn(pending)
        )
        return new

    @property
    def _first_row(self) -> int:
        """Where its rows begin in the matrix that the inner tensors hold."""
        return (self._origin.first_row or 0) + self._start

    # FSDP2 passes more than the mesh to a hook that takes it, and then refuses uneven shards.
    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """What FSDP2 gathers of a shard; see :mod:`fp4adam.distributed.fsdp`."""
        from fp4adam.distributed import fsdp

        return fsdp.pre_all_gather(self, mesh)

    # FSDP2 asks for it each time, and it takes longer to find out than the hook takes to run.
    fsdp_pre_all_gather.__signature__ = inspect.signature(fsdp_pre_all_gather)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: "QuantizedTensor | None" = None,
    ) -> "tuple[QuantizedTensor, tuple[Tensor, ...]] | None":
        """The whole tensor from what has been gathered; see :mod:`fp4adam.distributed.fsdp`."""
        from fp4adam.distributed import fsdp

        return fsdp.post_all_gather(self, all_gather_outputs, metadata, param_dtype, out)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        usages = [u for u in ("rowwise", "columnwise") if getattr(self.quantizer, u)]
        stored, numel = self.nbytes_stored, self.numel()
        # Symbols of torch.compile are no numbers to divide and to format.
        bits = f"{8 * stored / max(numel, 1):.2f}" if type(stored) is type(numel) is int else "?"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, {' + '.join(usages)}, "
            f"{bits} bits per element, dtype={self.dtype}, device='{self.device}'{grad})"
        )

    # torch.compile, FSDP2 and swap_tensors take a subclass apart with these two.
    def __tensor_flatten__(self) -> tuple[list[str], tuple[Quantizer, torch.dtype, Operands]]:
        # The operands for torch.compile to compare, which quantizers leave out.
        context = (self.quantizer, self.dtype, self.quantizer.operands)
        return list(self.storage_tensors()), context

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner: dict[str, Tensor],
        context: tuple[Quantizer, torch.dtype, Operands],
        outer_size: tuple[int, ...],
        outer_stride: tuple[int, ...],
    ) -> "QuantizedTensor":
        quantizer, dtype, _ = context
        return cls(outer_size, dtype, quantizer, inner)

    def _stable_hash_for_caching(self) -> str:
        """For the key of a compiled graph on disk: what tells graphs apart, and no values."""
        names, context = self.__tensor_flatten__()
        inner = [getattr(self, name) for name in names]
        looks = [(x.shape, x.stride(), x.dtype, x.device) for x in inner]
        parts = type(self).__name__, self.shape, self.requires_grad, names, looks, context
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    # torch's own two assume that a tensor with an address owns a storage of its logical size.
    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedTensor":
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "only leaf tensors can be deep-copied, got the result of an operation; "
                "call detach() first"
            )
        new = type(self)(
            tuple(self.shape),
            self.dtype,
            self.quantizer,
            self.storage_tensors(),
            self.requires_grad,
        )
        memo[id(self)] = new
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        return new

    def __reduce_ex__(self, protocol: int) -> tuple[Callable, tuple]:
        stored = row_window.own_blocks(self.settled())
        if stored is not self.settled():
            stored = stored._map_storage(torch.clone)
        attributes = {**self.__dict__, **stored.__dict__}
        if not isinstance(self, torch.nn.Parameter):
            # What state_dict() hands out goes into checkpoints, where bytes count.
            attributes["_origin"] = dataclasses.replace(stored._origin, init_val=None)
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


def same_format(a: Tensor, b: Tensor) -> bool:
    """Whether both are quantized tensors whose storages can be copied byte for byte."""
    return type(a) is type(b) and a.quantizer == b.quantizer and a.shape == b.shape


def _rebuild_quantized_tensor(
    cls: type[QuantizedTensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> QuantizedTensor:
    names = [name for name in STORAGE_NAMES if attributes[name] is not None]
    storage = {name: attributes[name] for name in names}
    tensor = cls(shape, dtype, attributes["quantizer"], storage, requires_grad)
    tensor.__dict__.update(attributes)
    return tensor


class Dequantize(torch.autograd.Function):
    """The values in a dtype, as a differentiable function; ``after`` as in ``Quantizer.read``."""

    # One function, because autograd inspects the signature at every call of two.
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
        "away. Train with FP4Adam, initialize inside quantized_init() or before quantize_model(), "
        "or call tensor.quantize_(new_values)"
    )


def _refuse_in_place(func: Callable, args: tuple, kwargs: dict) -> None:
    """Rounding a weight to 4 bits at every in-place operator would lose training silently."""
    name = func._schema.name
    for i, argument in enumerate(func._schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        # Schemas of collectives do not tell that they write into their first argument.
        writes |= i == 0 and name.startswith("c10d::") and name.endswith("_")
        if not writes:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, QuantizedTensor):
                raise _refusal(func, tensor)


def implements_function(function: Callable) -> Callable:
    """Register what a torch function does when a quantized tensor is among its arguments."""

    def register(fn: Callable) -> Callable:
        _FUNCTIONS[function] = fn
        return fn

    return register


def implements_operator(*operators: Callable) -> Callable:
    """Register what aten operators do when a quantized tensor is among their arguments."""

    def register(fn: Callable) -> Callable:
        _OPERATORS.update(dict.fromkeys(operators, fn))
        return fn

    return register


torch.serialization.add_safe_globals([_rebuild_quantized_tensor])
