"""Functions on several ranks, each in a process of its own, that cannot hang."""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Imported once, before processes are forked off, which then takes milliseconds in place of seconds.
_PRELOADED = [
    "pytest",
    "hypothesis",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "fp4adam.kernels.nvfp4",
]


class RankError(Exception):
    """A rank raised; the text is its traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    timeout: float = 120.0,
    survives: bool = False,
) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank, with the default process group initialized.

    Args:
        function: At the top of a module.
        world_size: Number of ranks.
        args: Anything that pickles.
        device: "cpu" (gloo), or "cuda" (NCCL), where rank i gets the device i.
        timeout: Seconds after which all ranks are killed; collectives are given half of them.
        survives: A rank that dies without an exception has the result None.

    Returns:
        What each rank returned, tensors on the CPU.

    Raises:
        RankError: If a rank raised.
        TimeoutError: If one did not end in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        work = pickle.dumps((function, args))
        processes = [
            context.Process(
                target=_run_rank,
                args=(work, rank, world_size, device, timeout / 2, folder),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        errors = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
        if errors:
            # Ranks that only waited for the one that failed say less.
            raise RankError("\n".join(sorted(errors, key=lambda text: "Connection" in text)))
        results = [Path(folder, f"result{rank}") for rank in range(world_size)]
        missing = [rank for rank, path in enumerate(results) if not path.exists()]
        stacks = "\n".join(path.read_text() for path in sorted(Path(folder).glob("stack*")))
        if late and set(late) & set(missing):
            raise TimeoutError(f"ranks {missing} did not end within {timeout} s:\n{stacks}")
        if missing and not survives:
            codes = [processes[rank].exitcode for rank in missing]
            raise RankError(f"ranks {missing} died with exit codes {codes}:\n{stacks}")
        return [
            torch.load(path, weights_only=False, map_location="cpu") if path.exists() else None
            for path in results
        ]


def home() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda" if "nccl" in dist.get_backend_config() else "cpu")


def all_ranks() -> DeviceMesh:
    """A mesh of all ranks, where they compute; a default one is of GPUs wherever there are any."""
    return init_device_mesh(home().type, (dist.get_world_size(),))


def _run_rank(
    work: bytes, rank: int, world_size: int, device: str, timeout: float, folder: str
) -> None:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = str(world_size)
    torch.set_num_threads(1)
    stack = open(f"{folder}/stack{rank}", "w")
    faulthandler.enable(stack)
    faulthandler.dump_traceback_later(0.9 * 2 * timeout, file=stack)
    if device == "cuda":
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=dist.FileStore(f"{folder}/store", world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        function, args = pickle.loads(work)
        result = function(rank, *args)
        torch.save(result, f"{folder}/result{rank}.part")
        os.rename(f"{folder}/result{rank}.part", f"{folder}/result{rank}")
    except BaseException:
        Path(folder, f"error{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    # Who leaves first must not break a connection that another one still uses.
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    # Threads of a process group could keep the interpreter from ending.
    os._exit(0)
