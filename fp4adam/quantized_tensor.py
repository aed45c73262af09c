"""The tensor subclass behind every block-scaled format, and the operators that it implements."""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

aten = torch.ops.aten

HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Inner tensors, named as in Transformer Engine. Scales of square blocks are the same for both
# directions and are kept once, one per block, in _block_scale_inv.
STORAGE_NAMES = (
    "_rowwise_data",
    "_rowwise_scale_inv",
    "_columnwise_data",
    "_columnwise_scale_inv",
    "_block_scale_inv",
    "_amax",
)

_FUNCTIONS: dict[Callable, Callable] = {}
_OPERATORS: dict[Callable, Callable] = {}


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``n``."""
    return -(-n // multiple) * multiple


def flat_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the matrix that a weight is quantized as: [product of leading dimensions, last]."""
    return math.prod(shape[:-1]), shape[-1]


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """How tensors become one block-scaled format.

    Args:
        rowwise: Keep codes with blocks along the last dimension (what the forward GEMM reads).
        columnwise: Keep codes with blocks along the first dimension (what the backward GEMM reads).
    """

    rowwise: bool = True
    columnwise: bool = True

    tensor_class: ClassVar[type["QuantizedTensor"]]

    def __post_init__(self) -> None:
        if not (self.rowwise or self.columnwise):
            raise ValueError(
                "rowwise and columnwise must not both be False, got rowwise=False, "
                "columnwise=False; keep at least one direction"
            )

    def storage_layout(
        self, rows: int, cols: int
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each inner tensor of a [rows, cols] matrix."""
        raise NotImplementedError

    def check_matrix(self, rows: int, cols: int) -> str | None:
        """Say which rule of the format a [rows, cols] matrix breaks, or None."""
        return None

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError if the format cannot hold a tensor of ``shape``."""
        name = self.tensor_class.__name__
        if len(shape) < 2:
            raise ValueError(
                f"shape must have at least 2 dimensions for {name}, got {tuple(shape)}; "
                "keep vectors such as biases and norms in high precision"
            )
        rows, cols = flat_shape(shape)
        if problem := self.check_matrix(rows, cols):
            raise ValueError(
                f"{problem}, got shape {tuple(shape)}, that is a matrix [{rows}, {cols}]; pad the "
                "weight to such a size or leave this layer in high precision (filter=...)"
            )

    def make_empty(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "QuantizedTensor":
        """Allocate a tensor of this format; it holds zeros.

        Args:
            shape: Logical shape, at least 2 dimensions.
            dtype: Nominal dtype, the one that autograd and other code sees.
            device: Where to allocate, the default device if None.

        Raises:
            ValueError: If the format cannot hold the shape.
            TypeError: If ``dtype`` is not float32, bfloat16 or float16.
        """
        shape = tuple(shape)
        self.check_shape(shape)
        check_dtype("dtype", dtype)
        storage = {
            name: torch.zeros(size, dtype=kind, device=device)
            for name, (size, kind) in self.storage_layout(*flat_shape(shape)).items()
        }
        return self.tensor_class(shape, dtype, self, storage)

    def quantize(self, x: Tensor) -> "QuantizedTensor":
        """Quantize ``x`` (float32, bfloat16 or float16, at least 2 dimensions) to a new tensor.

        The result has the shape, device and, as its nominal dtype, the dtype of ``x``.
        """
        return self.make_empty(x.shape, dtype=x.dtype, device=x.device).quantize_(x)

    def write(self, x: Tensor, out: "QuantizedTensor") -> None:
        """Quantize the contiguous matrix ``x`` into the storage of ``out``."""
        raise NotImplementedError

    def read(
        self, tensor: "QuantizedTensor", dtype: torch.dtype, after: Tensor | None = None
    ) -> Tensor:
        """Decode ``tensor`` to a plain [rows, cols] matrix of ``dtype``.

        ``after`` is never read: a graph of torch.compile just cannot decode before it exists.
        """
        raise NotImplementedError


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError unless ``dtype`` is one that quantized tensors convert from and to."""
    if dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"{name} must be float32, bfloat16 or float16, got {dtype}; convert the tensor first"
        )


class QuantizedTensor(torch.Tensor):
    """A tensor whose values live as 4- or 8-bit codes with block scales.

    To autograd and to modules it looks like a dense tensor of its nominal ``dtype``: gradients are
    plain tensors, and operators that do not know the format see the dequantized values. Build one
    with ``quantizer.quantize(x)``; write to it with :meth:`quantize_`, ``copy_`` or another full
    overwrite such as ``normal_``. Views and slices are copies: writing to one changes nothing.

    Attributes:
        quantizer: The :class:`Quantizer` that made it.
    """

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
        # A list, because all tensors on this storage (.data, detach(), a Parameter) share it.
        self._init_val: list[Tensor | None] = [None]
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
        return self._rowwise_data

    @property
    def columnwise_data(self) -> Tensor | None:
        """uint8 codes with blocks along the first dimension, or None without columnwise usage."""
        return self._columnwise_data

    @property
    def rowwise_scale_inv(self) -> Tensor | None:
        """Decode scales of ``rowwise_data`` in Transformer Engine's layout, padding zero."""
        return self._rowwise_scale_inv

    @property
    def columnwise_scale_inv(self) -> Tensor | None:
        """Decode scales of ``columnwise_data`` in Transformer Engine's layout, padding zero."""
        return self._columnwise_scale_inv

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
            TypeError: If the dtype is not one of the three.
        """
        if x.shape != self.shape:
            raise ValueError(
                f"x must have the shape of the tensor, {tuple(self.shape)}, got {tuple(x.shape)}; "
                "reshape it, or make a new tensor with quantizer.quantize(x)"
            )
        check_dtype("x", x.dtype)
        self._write(x)
        return self

    def _write(self, x: Tensor, non_blocking: bool = False) -> None:
        with torch.no_grad():
            if same_format(self, x):
                for name, inner in self.storage_tensors().items():
                    inner.copy_(getattr(x, name), non_blocking)
            elif self.numel() and not self.is_meta:
                value = x._read() if isinstance(x, QuantizedTensor) else x.detach()
                matrix = value.to(self.device).reshape(flat_shape(self.shape))
                self.quantizer.write(matrix.contiguous(), self)
        if self._init_val[0] is not None:
            # A value loaded before the first step is what the master weights have to start from.
            plain = not isinstance(x, QuantizedTensor)
            self._init_val[0] = x.detach().to(self.device, copy=True) if plain else None
        torch.autograd.graph.increment_version(self)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values as a plain float32, bfloat16 or float16 tensor; differentiable."""
        check_dtype("dtype", dtype)
        return Dequantize.apply(self, dtype)

    def _read(self, dtype: torch.dtype | None = None, after: Tensor | None = None) -> Tensor:
        """The values as a plain tensor of any dtype, below autograd."""
        dtype = self.dtype if dtype is None else dtype
        direct = dtype if dtype in HIGH_PRECISION_DTYPES else torch.float32
        return self.quantizer.read(self, direct, after).view(self.shape).to(dtype)

    @property
    def _high_precision_init_val(self) -> Tensor | None:
        return self._init_val[0]

    @_high_precision_init_val.setter
    def _high_precision_init_val(self, value: Tensor | None) -> None:
        self._init_val[0] = value

    def get_high_precision_init_val(self) -> Tensor | None:
        """The value before quantization, if it was kept for the optimizer and not yet used."""
        # On the meta device it only says that the first value that is written has to be kept.
        value = self._high_precision_init_val
        return None if value is None or value.is_meta else value

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
        self._init_val = value._init_val
        torch.autograd.graph.increment_version(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _refusal("item assignment", self)

    def _like(
        self, storage: dict[str, Tensor], dtype: torch.dtype | None = None
    ) -> "QuantizedTensor":
        return type(self)(tuple(self.shape), dtype or self.dtype, self.quantizer, storage)

    def _map_storage(
        self, fn: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> "QuantizedTensor":
        return self._like({name: fn(t) for name, t in self.storage_tensors().items()}, dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        usages = [u for u in ("rowwise", "columnwise") if getattr(self.quantizer, u)]
        bits = 8 * self.nbytes_stored / max(self.numel(), 1)
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, {' + '.join(usages)}, "
            f"{bits:.2f} bits per element, dtype={self.dtype}, device='{self.device}'{grad})"
        )

    # torch.compile, FSDP2 and swap_tensors take a subclass apart with these two.
    def __tensor_flatten__(self) -> tuple[list[str], tuple[Quantizer, torch.dtype]]:
        return list(self.storage_tensors()), (self.quantizer, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner: dict[str, Tensor],
        context: tuple[Quantizer, torch.dtype],
        outer_size: tuple[int, ...],
        outer_stride: tuple[int, ...],
    ) -> "QuantizedTensor":
        quantizer, dtype = context
        return cls(outer_size, dtype, quantizer, inner)

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
        attributes = dict(self.__dict__)
        if not isinstance(self, torch.nn.Parameter):
            # What state_dict() hands out goes into checkpoints, where bytes count.
            attributes["_init_val"] = [None]
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

    @staticmethod
    def forward(tensor: QuantizedTensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
        return tensor._read(dtype, after)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.nominal_dtype = inputs[0].dtype

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


def _implements(*operators: Callable) -> Callable:
    def register(fn: Callable) -> Callable:
        _OPERATORS.update(dict.fromkeys(operators, fn))
        return fn

    return register


# nn.Parameter, state_dict and .data share the storage of the tensor that they wrap.
@_implements(aten.detach.default, aten.alias.default)
def _detach(func: Callable, tensor: QuantizedTensor) -> QuantizedTensor:
    with torch.inference_mode(False):  # a detached inference tensor could not be versioned
        detached = tensor._like(tensor.storage_tensors())
    detached._init_val = tensor._init_val
    return detached


@_implements(aten.clone.default)
def _clone(
    func: Callable, tensor: QuantizedTensor, memory_format: torch.memory_format | None = None
) -> QuantizedTensor:
    return tensor._map_storage(torch.clone)


# Module.to, .cuda, .cpu, .bfloat16: bytes move, the nominal dtype changes, nothing is rounded.
@_implements(aten._to_copy.default)
def _to_copy(
    func: Callable,
    tensor: QuantizedTensor,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool = False,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    if dtype is not None and dtype not in HIGH_PRECISION_DTYPES:
        return tensor._read(dtype).to(device=device)

    def move(inner: Tensor) -> Tensor:
        return inner.to(device=device, non_blocking=non_blocking, copy=True)

    moved = tensor._map_storage(move, dtype)
    kept = tensor._high_precision_init_val
    if kept is not None:
        moved._high_precision_init_val = kept if kept.is_meta else move(kept)
    return moved


# Module.to_empty; an explicit dtype asks for a plain tensor, as for optimizer state.
@_implements(aten.empty_like.default)
def _empty_like(
    func: Callable,
    tensor: QuantizedTensor,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **kwargs: Any,
) -> Tensor:
    device = tensor.device if device is None else device
    if dtype is not None:
        return torch.empty(tensor.shape, dtype=dtype, device=device)
    empty = tensor.quantizer.make_empty(tuple(tensor.shape), tensor.dtype, device)
    if tensor._high_precision_init_val is not None:
        empty._high_precision_init_val = tensor._high_precision_init_val.to("meta")
    return empty


# Optimizer state and gradients are made like the parameter, and are plain tensors.
@_implements(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
)
def _plain_like(func: Callable, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Tensor:
    return func(
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), *args, **kwargs
    )


# load_state_dict, in both directions and between formats.
@_implements(aten.copy_.default)
def _copy_(func: Callable, out: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(out, QuantizedTensor):
        return out.copy_(source._read(out.dtype), non_blocking)
    if source.dtype not in HIGH_PRECISION_DTYPES:
        source = source.float()
    out._write(source.expand(out.shape) if source.shape != out.shape else source, non_blocking)
    return out


@_implements(aten._foreach_copy_.default)
def _foreach_copy_(
    func: Callable, outs: list[Tensor], sources: list[Tensor], non_blocking: bool = False
) -> None:
    for out, source in zip(outs, sources, strict=True):
        out.copy_(source, non_blocking)


# torch.nn.init on a quantized parameter: a full overwrite, rounded once.
@_implements(
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.normal_.default,
    aten.uniform_.default,
)
def _overwrite(func: Callable, out: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    values = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    func(values, *args, **kwargs)
    return _copy_(aten.copy_.default, out, values)


# torch.load and data loaders ask; FSDP2 CPU offload pins.
@_implements(aten.is_pinned.default)
def _is_pinned(func: Callable, tensor: QuantizedTensor, device: torch.device | None = None) -> bool:
    return all(inner.is_pinned() for inner in tensor.storage_tensors().values())


@_implements(aten._pin_memory.default)
def _pin_memory(
    func: Callable, tensor: QuantizedTensor, device: torch.device | None = None
) -> QuantizedTensor:
    return tensor._map_storage(torch.Tensor.pin_memory)


torch.serialization.add_safe_globals([_rebuild_quantized_tensor])
