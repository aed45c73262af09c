"""What notices that the host waits for a GPU."""

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def refusing_waits() -> Iterator[None]:
    """Inside, an operation that makes the host wait for the GPU raises RuntimeError."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
