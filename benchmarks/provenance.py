"""Where results come from: what was run, on what, and when."""

import importlib.metadata
import platform
import shlex
import sys
import time
from typing import Any

import torch
from peers import PACKAGES

import fp4adam


def about(device: str) -> dict[str, Any]:
    """What was run, on what, and when."""
    gpu = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else None
    return {
        "command": shlex.join(["python", *sys.argv]),
        "device": gpu or platform.processor() or "CPU",
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
    }


def versions() -> dict[str, str]:
    """What is measured and what runs it, with versions, as far as it is installed."""
    found = {"torch": torch.__version__, "fp4adam": fp4adam.__version__}
    for name in ("triton", *PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
