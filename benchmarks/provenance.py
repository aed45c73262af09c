"""Where results come from: what was run, on what, and when."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
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
        "commit": commit(),
    }


def commit() -> str | None:
    """The commit that is measured: of FP4ADAM_COMMIT, or else of the checkout."""
    if "FP4ADAM_COMMIT" in os.environ:
        return os.environ["FP4ADAM_COMMIT"] or None
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str]:
    """What is measured and what runs it, with versions, as far as it is installed."""
    found = {"torch": torch.__version__, "fp4adam": fp4adam.__version__}
    for name in ("triton", *PACKAGES, "gefen-x", "trl"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
