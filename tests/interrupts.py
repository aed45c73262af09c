"""Ctrl-C at a chosen operator, line or launch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from fp4adam.kernels.launch.launch import Launch


class InterruptOperators(TorchDispatchMode):
    """Raises KeyboardInterrupt in place of the operator number ``at``."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


class InterruptLines:
    """Raises KeyboardInterrupt in place of a line of the package, or of torch's optimizers.

    Python also announces a line where a ``with`` block ends, at which its ``__exit__`` would be
    lost. Ctrl-C never comes there: Python looks for signals after it has called ``__exit__``. So
    only a line that begins counts.
    """

    def __init__(self, at: int) -> None:
        self.left = at

    def __enter__(self) -> None:
        self.trace = sys.gettrace()
        sys.settrace(self._call)

    def __exit__(self, *args: object) -> None:
        sys.settrace(self.trace)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        places = ("/fp4adam/", "/torch/optim/optimizer.py")
        return self._line if any(x in frame.f_code.co_filename for x in places) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and frame.f_lasti == _beginnings(frame.f_code)[frame.f_lineno]:
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def interrupted(change: Callable[[], object], at: int) -> bool:
    """Call ``change``, with Ctrl-C at a line; whether it has come to that line."""
    try:
        with InterruptLines(at):
            change()
    except KeyboardInterrupt:
        return True
    return False


def count_lines(change: Callable[[], object]) -> int:
    """How many lines a call begins at which ``InterruptLines`` could interrupt it."""
    lines = InterruptLines(sys.maxsize)
    with lines:
        change()
    return sys.maxsize - lines.left


@functools.cache
def _beginnings(code: CodeType) -> dict[int | None, int]:
    """The first instruction of each line."""
    return {line: start for start, _, line in reversed([*code.co_lines()])}


class InterruptLaunches:
    """Raises KeyboardInterrupt after the launch number ``at``."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __enter__(self) -> None:
        self.launch = launch = Launch.__call__

        def interrupted(this: Launch, *args: Any) -> None:
            launch(this, *args)
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt

        Launch.__call__ = interrupted

    def __exit__(self, *args: object) -> None:
        Launch.__call__ = self.launch
