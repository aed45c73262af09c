"""Functions on several ranks, each in a process of its own, that cannot hang.

Ranks are forked off servers: Python processes that have imported what tests need, so that a rank
starts in milliseconds in place of seconds. Each server hashes strings with a seed of its own, as
processes that torchrun starts do, and each rank begins with random seeds of its own: what depends
on the order of a set, or on equal random numbers, differs between ranks. All seeds follow from the
rank, so that failures can be repeated.
"""

import atexit
import contextlib
import faulthandler
import importlib
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fp4adam.tensors import backend

NIGHTLY = [pytest.mark.exhaustive, pytest.mark.nightly]
# One server each; more ranks than these share them, since each takes seconds to start.
_HASH_SEEDS = (1, 2)
_PRELOADED = [
    "pytest",
    "hypothesis",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "fp4adam.kernels.step",
]


def device_for(world_size: int) -> str:
    """Where ranks run: on GPUs where there are as many, else on the CPU."""
    return "cuda" if torch.cuda.device_count() >= world_size else "cpu"


class RankError(Exception):
    """A rank raised; the text is its traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    timeout: float = 120.0,
) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank, with the default process group initialized.

    Args:
        function: At the top of a module.
        args: Anything that pickles.
        device: "cpu" (gloo), or "cuda" (NCCL), where rank i gets the device i.
        timeout: Seconds after which all ranks are killed; collectives are given half of them.

    Returns:
        What each rank returned, tensors on the CPU. A test that a rank skips is skipped.

    Raises:
        RankError: If a rank raised, or died.
        TimeoutError: If one did not end in time.
    """
    servers = _servers(min(world_size, len(_HASH_SEEDS)))
    serving = [servers[rank % len(_HASH_SEEDS)] for rank in range(world_size)]
    codes: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = pickle.dumps((function, args))
        try:
            for rank, server in enumerate(serving):
                rest = (work, rank, world_size, device, timeout / 2, folder)
                server.send((rank, sys.path, rest))
            _collect(codes, serving, timeout)
        finally:
            late = [rank for rank in range(world_size) if rank not in codes]
            for rank in late:
                serving[rank].send((rank, None, None))
            _collect(codes, serving, 60)
        errors = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
        if errors:
            # Ranks that only waited for the one that failed say less.
            raise RankError("\n".join(sorted(errors, key=lambda text: "Connection" in text)))
        for path in Path(folder).glob("skipped*"):
            pytest.skip(path.read_text())
        results = [Path(folder, f"result{rank}") for rank in range(world_size)]
        missing = [rank for rank, path in enumerate(results) if not path.exists()]
        stacks = "\n".join(path.read_text() for path in sorted(Path(folder).glob("stack*")))
        if set(late) & set(missing):
            raise TimeoutError(f"ranks {missing} did not end within {timeout} s:\n{stacks}")
        if missing:
            died = {rank: codes[rank] for rank in missing}
            raise RankError(f"ranks died, with exit codes {died}:\n{stacks}")
        return [torch.load(path, weights_only=False, map_location="cpu") for path in results]


def run(function: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """:func:`run_ranks` on GPUs where there are as many, else on the CPU."""
    return run_ranks(function, world_size, *args, device=device_for(world_size), **options)


def run_cases(
    function: Callable[..., Any], world_size: int, cases: Iterable[tuple[Any, ...]]
) -> None:
    """:func:`run` of ``function(rank, *case)`` for each case, one after another on the same ranks.

    Cases that cannot run here are left out; if all are, the test is skipped.
    """
    run(_run_each, world_size, function, [*cases], timeout=400.0)


def _run_each(rank: int, function: Callable[..., Any], cases: list[tuple[Any, ...]]) -> None:
    uses_kernels, skipped = backend.uses_kernels, []
    for case in cases:
        try:
            function(rank, *case)
        except pytest.skip.Exception as reason:
            skipped.append(reason)
        except Exception as error:
            raise RankError(f"case {case}: {error}") from error
        finally:
            backend.uses_kernels = uses_kernels
    if cases and len(skipped) == len(cases):
        raise skipped[0]


def by_world_size(
    function: Callable[..., Any],
    rows: Iterable[tuple],
    nightly: Iterable[tuple],
    is_slow: bool = False,
) -> list[Any]:
    """Arguments for :func:`run_cases`, of cases that begin with the number of ranks."""
    params = []
    for group, is_more in ((rows, False), (nightly, True)):
        cases: dict[int, list[tuple]] = {}
        for world_size, *case in group:
            cases.setdefault(world_size, []).append(tuple(case))
        for n, each in sorted(cases.items()):
            later = NIGHTLY if is_more else pytest.mark.slow
            parts = [(", more" * is_more, each, later)]
            if not is_more and not is_slow and n in (2, 3):
                parts = [("", each[::2], ()), (", others", each[1::2], later)]
            for name, some, marks in parts:
                id = f"{function.__name__}, {n} ranks{name}"
                params.append(pytest.param(function, n, some, marks=marks, id=id))
    return params


def home() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda" if "nccl" in dist.get_backend_config() else "cpu")


def use_kernels() -> None:
    """Let this rank take kernels for everything; skips the test where it cannot run any."""
    if home().type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs as many GPUs as ranks, or Triton's interpreter")
    backend.uses_kernels = lambda device: True


def all_ranks() -> DeviceMesh:
    """A mesh of all ranks, where they compute; a default one is of GPUs wherever there are any."""
    return init_device_mesh(home().type, (dist.get_world_size(),))


_started: list[Connection] = []


def _servers(count: int) -> list[Connection]:
    """Connections to that many servers, which have been started then."""
    new = _HASH_SEEDS[len(_started) : count]
    _started.extend(map(_start_server, new))
    for server in _started[count - len(new) : count]:
        server.recv()  # it is ready
    return _started[:count]


def _start_server(hash_seed: int) -> Connection:
    connection, its_end = Pipe()
    environment = {
        **os.environ,
        "PYTHONHASHSEED": str(hash_seed),
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
    }
    command = f"import ranks; ranks._serve({its_end.fileno()})"
    process = subprocess.Popen(
        [sys.executable, "-c", command],
        env=environment,
        stdin=subprocess.DEVNULL,
        pass_fds=[its_end.fileno()],
    )
    its_end.close()

    def end() -> None:
        connection.close()
        process.wait()

    atexit.register(end)
    return connection


def _collect(codes: dict[int, int], serving: list[Connection], timeout: float) -> None:
    """Wait for the exit codes of all ranks, that long at most."""
    deadline = time.monotonic() + timeout
    while len(codes) < len(serving):
        ready = wait(set(serving), max(deadline - time.monotonic(), 0))
        if not ready:
            return
        codes.update(server.recv() for server in ready)


def _serve(fd: int) -> None:
    """Fork off what is asked for until the process that runs tests is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _PRELOADED:
        importlib.import_module(name)
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreter

        interpreter.install()
    requests = Connection(fd)
    requests.send("ready")
    # Rank and process, by a pipe that a child holds one end of as long as it lives.
    children: dict[int, tuple[int, int]] = {}
    try:
        while True:
            for ready in wait([requests, *children]):
                if ready is requests:
                    rank, path, work = requests.recv()
                    if work is None:
                        _kill(pid for other, pid in children.values() if other == rank)
                    else:
                        # The modules of a test file are imported here, once for all of its ranks.
                        sys.path[:] = path
                        with contextlib.suppress(Exception):  # the rank says what is wrong
                            pickle.loads(work[0])
                        pipe, pid = _fork(requests, work)
                        children[pipe] = rank, pid
                else:
                    rank, pid = children.pop(ready)
                    os.close(ready)
                    _, status = os.waitpid(pid, 0)
                    requests.send((rank, os.waitstatus_to_exitcode(status)))
    except (EOFError, ConnectionError):
        _kill(pid for _, pid in children.values())


def _fork(requests: Connection, work: tuple[Any, ...]) -> tuple[int, int]:
    """Start a rank: the pipe that ends with it, and its process."""
    pipe, held = os.pipe()
    pid = os.fork()
    if not pid:
        requests.close()
        _run_rank(*work)
    os.close(held)
    return pipe, pid


def _kill(processes: Iterable[int]) -> None:
    for pid in processes:
        os.kill(pid, signal.SIGKILL)


def _run_rank(
    work: bytes, rank: int, world_size: int, device: str, timeout: float, folder: str
) -> None:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = str(world_size)
    torch.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1000 + rank)
    stack = open(f"{folder}/stack{rank}", "w")
    faulthandler.enable(stack)
    faulthandler.dump_traceback_later(0.9 * 2 * timeout, file=stack)
    if device == "cuda":
        torch.cuda.set_device(rank)
    try:
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        # A rank that dies at once must not break connections that others are still making.
        store.set(f"connected{rank}", "")
        store.wait([f"connected{other}" for other in range(world_size)])
        function, args = pickle.loads(work)
        result = function(rank, *args)
        torch.save(result, f"{folder}/result{rank}.part")
        os.rename(f"{folder}/result{rank}.part", f"{folder}/result{rank}")
    except pytest.skip.Exception as skipped:
        Path(folder, f"skipped{rank}").write_text(str(skipped))
    except BaseException:
        Path(folder, f"error{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    # Who leaves first must not break a connection that another one still uses.
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    # Threads of a process group could keep the interpreter from ending.
    os._exit(0)
