"""Ctrl-C at a chosen operator or launch."""

from __future__ import annotations

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
