"""The target of the current compilation, as compile-time constants in ``@triton.jit`` code.

Triton calls a builtin with the code generator's ``_semantic``, whose options describe the target of
this compilation, not the GPU of this machine. The interpreter calls it as plain Python, without
``_semantic``. ``triton.language.target_info`` asks the driver instead, so it knows neither the
target of an ahead-of-time compilation nor whether the kernel is interpreted.

Triton's cache key does not include builtins: after a change here, clear Triton's cache.
"""

from typing import Any

import triton.language as tl


def is_compiled(_semantic: Any = None) -> bool | tl.constexpr:
    """Whether the kernel is compiled, for any GPU, rather than interpreted."""
    return False if _semantic is None else tl.constexpr(True)


def is_compiled_for_cuda(_semantic: Any = None) -> bool | tl.constexpr:
    """Whether the kernel is compiled for an NVIDIA GPU."""
    if _semantic is None:
        return False
    return tl.constexpr(_semantic.builder.options.backend_name == "cuda")


def is_compiled_for_sm90(_semantic: Any = None) -> bool | tl.constexpr:
    """Whether the kernel is compiled for CUDA compute capability 9.0 or higher."""
    if _semantic is None:
        return False
    options = _semantic.builder.options
    return tl.constexpr(
        options.backend_name == "cuda" and int(options.arch.removeprefix("sm")) >= 90
    )


# The attribute that Triton's code generator looks for. The decorator `triton.language.core.builtin`
# would set it too, but it refuses calls from the interpreter.
is_compiled.__triton_builtin__ = True
is_compiled_for_cuda.__triton_builtin__ = True
is_compiled_for_sm90.__triton_builtin__ = True
