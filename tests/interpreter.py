"""Triton's interpreter, faster, and with a GPU's maximum."""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang


def _patch_lang_once(function: Callable) -> Any:
    """Without what is done again for each function that a kernel calls: half of the time."""
    modules = [m for m in function.__globals__.values() if m is tl or m is tl.core]
    if any(tl.core.is_builtin(module.load) for module in modules):
        return _patch_lang(function)
    return interpreter._LangPatchScope()


def _elementwise(operation: Callable) -> Callable:
    return lambda builder, a, b: builder.binary_op(a, b, operation)


def install() -> None:
    """Change the interpreter of this process."""
    interpreter._patch_lang = _patch_lang_once
    # On a GPU the larger one of a number and NaN is the number; the interpreter says NaN.
    interpreter.InterpreterBuilder.create_maxnumf = _elementwise(np.fmax)
    interpreter.InterpreterBuilder.create_minnumf = _elementwise(np.fmin)
