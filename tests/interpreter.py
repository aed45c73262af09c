"""Triton's interpreter, several times as fast, and with a GPU's maximum.

It spends its time on Python objects that describe types and shapes, not on arithmetic. What is
replaced here computes nothing else than before: it remembers, or does not repeat itself.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang
_patch_lang_tensor = interpreter._patch_lang_tensor
_new_block_type = tl.block_type.__init__
_with_element_ty = tl.block_type.with_element_ty
_unwrap_if_constexpr = tl.core._unwrap_if_constexpr
_validate_np_data_size = interpreter._validate_np_data_size
_semantic = interpreter.interpreter_semantic
_binary_operands = _semantic.binary_op_type_checking_impl
_broadcast = _semantic.broadcast_impl_value
_scalar_constant = _semantic.scalar_constant
_block_types: dict[tuple, tl.block_type] = {}
_scalars: dict[tuple, tl.tensor] = {}
_beside: dict[tuple, tl.tensor] = {}
_common: dict[tuple, tl.block_type] = {}
_cast = _semantic.cast
_NOTHING_PATCHED = interpreter._LangPatchScope()


def _patch_lang_once(function: Callable) -> Any:
    """Without what is done again for each function that a kernel calls."""
    if any(tl.core.is_builtin(module.load) for module in _language(function)):
        return _patch_lang(function)
    return _NOTHING_PATCHED


@functools.cache
def _language(function: Callable) -> list:
    return [m for m in function.__globals__.values() if m is tl or m is tl.core]


def _patch_attr(target: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A member of the language that is called at once, not through a check of ``_semantic``."""
    member = getattr(member, "__wrapped__", member)

    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = _semantic
        return member(*args, **options)

    scope.set_attr(target, name, call)


def _patch_lang_tensor_of_numpy_2_4(tensor: type, scope: Any) -> None:
    """Numbers that a kernel counts to: Triton 3.6 takes them in a way that NumPy 2.4 refuses."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _identity_first(equal: Callable) -> Callable:
    return lambda a, b: a is b or equal(a, b)


def _known_block_type(cls: type, element_ty: tl.dtype, shape: Sequence) -> tl.block_type:
    """One object per type: they are made for every operation, and never changed."""
    if element_ty.is_ptr():
        return object.__new__(cls)
    key = (element_ty.name, *_numbers(shape))
    if key not in _block_types:
        _block_types[key] = object.__new__(cls)
    return _block_types[key]


def _known_with_element_ty(self: tl.block_type, element_ty: tl.dtype) -> tl.block_type:
    if type(element_ty) is not tl.dtype:
        return _with_element_ty(self, element_ty)
    key = (element_ty.name, *self.numbers)
    return _block_types.get(key) or _with_element_ty(self, element_ty)


def _init_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Sequence) -> None:
    if "name" not in vars(self):
        _new_block_type(self, element_ty, shape)
        self.numbers = _numbers(self.shape)
        self.extent = _extent(self.numbers)


def _numbers(shape: Iterable) -> tuple[int, ...]:
    return tuple([n.value if isinstance(n, tl.constexpr) else n for n in shape])


@functools.cache
def _extent(shape: tuple[int, ...]) -> tuple[tl.constexpr, tl.tuple]:
    """One object per shape, so that equal shapes are known by identity."""
    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(n) for n in shape])


_SCALAR = _extent(())


def _init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.extent if type.is_block() else _SCALAR


def _known_operands(lhs: Any, rhs: Any, *rest: bool, **named: bool) -> tuple:
    """Operands of one dtype, which need no cast, only quotients of halves would; known numbers."""
    is_left, divides = type(lhs) is tl.tensor, rest[3:] == (True,)
    if is_left is (type(rhs) is tl.tensor):
        if is_left and not divides and lhs.dtype is rhs.dtype and type(lhs.dtype) is tl.dtype:
            return _of_common_shape(lhs, rhs)
        return _binary_operands(lhs, rhs, *rest, **named)
    tensor, number = (lhs, rhs) if is_left else (rhs, lhs)
    key = is_left, tensor.dtype.name, id(tensor.shape), type(number), number, rest, *named.items()
    if key not in _beside:
        found = _binary_operands(lhs, rhs, *rest, **named)
        if found[not is_left] is not tensor:  # the number asks for another dtype
            return found
        _beside[key] = found[is_left]
    return (tensor, _beside[key]) if is_left else (_beside[key], tensor)


def _known_broadcast(lhs: tl.tensor, rhs: tl.tensor) -> tuple:
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast(lhs, rhs)


def _of_common_shape(lhs: tl.tensor, rhs: tl.tensor) -> tuple:
    """Operands of one type, whose numbers NumPy repeats as it computes the result."""
    if lhs.shape is rhs.shape:
        return lhs, rhs
    key = lhs.dtype.name, id(lhs.shape), id(rhs.shape)
    if key not in _common:
        _common[key] = _broadcast(lhs, rhs)[0].type
    # Results are of the type of the first.
    return (lhs if lhs.type is _common[key] else tl.tensor(lhs.handle, _common[key])), rhs


def _known_cast(value: tl.tensor, dtype: tl.dtype, *rounding: Any, **named: Any) -> tl.tensor:
    return value if value.dtype is dtype else _cast(value, dtype, *rounding, **named)


def _known_scalar_constant(value: Any, dtype: tl.dtype) -> tl.tensor:
    """One object per number and dtype; nothing writes to one. Triton makes -0.0 a 0.0 itself."""
    key = (type(value), value, dtype.name)
    if key not in _scalars:
        _scalars[key] = _scalar_constant(value, dtype)
    return _scalars[key]


def _splat(block: tl.block_type, scalar: Any) -> Any:
    value = scalar.data[0] if isinstance(scalar.dtype, tl.block_type) else scalar.data
    data = np.empty(block.numbers, _get_np_dtype(scalar.dtype))
    data[...] = value
    return interpreter.TensorHandle(data, scalar.dtype.scalar)


# What is no constexpr and holds none.
_PLAIN = {tl.tensor, tl.dtype, tl.block_type, int, float, bool, str, type(None)}


def _unwrap_if_any(value: Any) -> Any:
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    return value if kind in _PLAIN else _unwrap_if_constexpr(value)


def _fits(data: np.ndarray, dtype: tl.dtype) -> bool:
    if type(dtype) is not tl.dtype:
        return _validate_np_data_size(data, dtype)
    return data.itemsize == 1 or 8 * data.itemsize <= dtype.primitive_bitwidth


_POINTER = np.dtype(np.uint64)
_scalar_np_dtype = functools.cache(interpreter._get_np_dtype)


def _get_np_dtype(dtype: tl.dtype) -> np.dtype:
    scalar = dtype.scalar
    return _POINTER if scalar.is_ptr() else _scalar_np_dtype(scalar)


def _elementwise(operation: Callable) -> Callable:
    return lambda builder, a, b: builder.binary_op(a, b, operation)


def sanitize_overflow(on: bool) -> None:
    """Whether sums and products of integers are computed once more in 64 bits, to find overflows.

    Triton's interpreter does so by default; no GPU does. It takes a third of the time.
    """
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=on)


def install() -> None:
    """Change the interpreter of this process."""
    interpreter._patch_lang = _patch_lang_once
    interpreter._patch_attr = _patch_attr
    interpreter._patch_lang_tensor = _patch_lang_tensor_of_numpy_2_4
    interpreter._get_np_dtype = _get_np_dtype
    interpreter._validate_np_data_size = _fits
    interpreter.InterpreterBuilder.create_splat = lambda _, *args: _splat(*args)
    _semantic.binary_op_type_checking_impl = _known_operands
    _semantic.broadcast_impl_value = _known_broadcast
    _semantic.cast = _known_cast
    _semantic.scalar_constant = _known_scalar_constant
    tl.core._unwrap_if_constexpr = _unwrap_if_any
    tl.block_type.with_element_ty = _known_with_element_ty
    tl.block_type.__new__ = _known_block_type
    tl.block_type.__init__ = _init_block_type
    tl.tensor.__init__ = _init_tensor
    for cls in (tl.dtype, tl.block_type):
        cls.__eq__ = _identity_first(cls.__eq__)
    sanitize_overflow(False)
    # On a GPU the larger one of a number and NaN is the number; the interpreter says NaN.
    interpreter.InterpreterBuilder.create_maxnumf = _elementwise(np.fmax)
    interpreter.InterpreterBuilder.create_minnumf = _elementwise(np.fmin)
