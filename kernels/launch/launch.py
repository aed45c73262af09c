"""Kernel launches: repeatable ones with cached arguments, and launches on the tensors' device."""

import contextvars
import functools
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import triton
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_logger = logging.getLogger("fp4adam")
_data_ptr = torch._C.TensorBase.data_ptr


class Launch:
    """A repeatable launch of ``kernel`` on a grid of ``n_programs``, with fixed arguments.

    The first call goes through Triton's front end, which specializes and compiles the kernel.
    Later calls pass the arguments straight to the compiled kernel, in a tenth of the time.

    Args:
        kernel: A ``triton.jit`` function whose arguments are, in this order, the arguments of each
            call, ``fixed``, and ``constexprs``.
        n_programs: Size of the grid; 0 launches nothing.
        fixed: Tensors and numbers that are the same at every call.
        constexprs: Compile-time constants by name, in the order of the kernel's arguments.
        options: Triton's launch options, such as ``num_warps``.
    """

    def __init__(
        self,
        kernel: Any,
        n_programs: int,
        fixed: tuple,
        constexprs: dict[str, Any],
        **options: Any,
    ) -> None:
        self._kernel = kernel
        self._grid = (n_programs, 1, 1)
        self._fixed = fixed  # keeps the tensors alive
        self._constexprs = constexprs
        self._options = dict(enable_fp_fusion=False, **options)
        self._compiled: Any = None
        self._arguments: tuple = ()

    def __call__(self, *leading: Tensor) -> None:
        """Launch with ``leading`` before the fixed arguments.

        Their alignment may change between calls only if the kernel does not specialize on it.
        """
        if self._compiled is None:
            if self._grid[0]:
                self._launch_first(leading)
            return
        addresses = map(_data_ptr, leading)
        hooks = triton.knobs.runtime
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # of a profiler
            self._compiled[self._grid](*addresses, *self._arguments)
        else:
            stream = self._current_stream(self._device)
            self._run(*self._grid, stream, *self._handles, *addresses, *self._arguments)

    def compile(self, *leading: Tensor) -> None:
        """Compile for ``leading`` without launching."""
        if self._grid[0]:
            arguments = (*leading, *self._fixed)
            self._kernel.warmup(*arguments, grid=self._grid, **self._constexprs, **self._options)

    def _launch_first(self, leading: tuple[Tensor, ...]) -> None:
        compiled = self._kernel[self._grid](
            *leading, *self._fixed, **self._constexprs, **self._options
        )
        if compiled is None:
            return  # the interpreter compiles nothing that could be reused
        driver = triton.runtime.driver.active
        self._current_stream, self._device = driver.get_current_stream, driver.get_current_device()
        # The last three are metadata for hooks and the hooks before and after a launch: none here.
        self._handles = (compiled.function, compiled.packed_metadata, None, None, None)
        self._compiled, self._run = compiled, compiled.run
        # Addresses instead of tensors, because a launch queries the driver for every tensor.
        fixed = (x.data_ptr() if isinstance(x, Tensor) else x for x in self._fixed)
        self._arguments = (*fixed, *self._constexprs.values())


def compile_together(compiles: Iterable[Callable[[], Any]]) -> None:
    """Call functions that compile kernels; these are compiled on several threads."""

    def compile_all() -> None:
        with ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads):
            for compile_kernels in compiles:
                compile_kernels()

    start = time.perf_counter()
    # Triton's mode stays on where a kernel cannot be compiled, so it is that of a context alone.
    contextvars.copy_context().run(compile_all)
    seconds = time.perf_counter() - start
    if seconds > 1:
        _logger.info("compiled the kernels of this step in %.1f s; Triton keeps them", seconds)


def alignment(*tensors: Tensor) -> tuple[bool, ...]:
    """Which tensors are aligned to 16 bytes; a cache key, as Triton specializes on it."""
    return tuple(_data_ptr(tensor) % 16 == 0 for tensor in tensors)


def kind_of(*tensors: Tensor) -> tuple[Any, ...]:
    """What the kernels for these tensors depend on, but for dtypes that follow from the first."""
    return tensors[0].dtype, tensors[0].get_device(), alignment(*tensors)


@functools.lru_cache(maxsize=4096)
def launch_of(
    kernel: Any, n_programs: int, fixed: tuple, constants: tuple, num_warps: int, *key: Any
) -> Launch:
    """The launch with these numbers; ``constants`` are the kernel's last arguments.

    ``key``: all else that needs another kernel, such as what :func:`kind_of` returns.
    """
    constexprs = dict(zip(kernel.arg_names[-len(constants) :], constants, strict=True))
    return Launch(kernel, n_programs, fixed, constexprs, num_warps=num_warps)


def is_on_current_device(tensor: Tensor) -> bool:
    """Whether a launch needs no other GPU than the current one; tensors on a CPU have none."""
    return not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device()


def compute_capability(device: torch.device) -> int:
    """The compute capability without its point; that of a Hopper GPU for an interpreted kernel."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def on_its_device(
    launch: Callable[Concatenate[Tensor, P], R],
) -> Callable[Concatenate[Tensor, P], R]:
    """Wrap ``launch`` to make its first argument's GPU the current one, where Triton launches."""

    @functools.wraps(launch)
    def launch_there(tensor: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_on_current_device(tensor):
            return launch(tensor, *args, **kwargs)
        with torch.cuda.device_of(tensor):
            return launch(tensor, *args, **kwargs)

    return launch_there


@on_its_device
def launch_all(tensor: Tensor, launches: Iterable[Launch], *leading: Tensor) -> None:
    """Launch kernels on the GPU of ``tensor``, with ``leading`` before their fixed arguments."""
    for launch in launches:
        launch(*leading)
