"""Training on several GPUs: torchrun starts a process for each, and FSDP2 shards the model.

A process that torchrun has not started calls the same functions, which then do not communicate.
"""

import contextlib
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

EXTRA = (
    "extra.pt"  # the file beside the shards of a checkpoint, for what is not a part of the model
)


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ["RANK"]) if dist.is_torchelastic_launched() else 0


def world_size() -> int:
    """How many processes train together."""
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


@contextlib.contextmanager
def process_group(device_type: str) -> Iterator[None]:
    """Connects the processes inside the ``with`` block; only the first one prints.

    Args:
        device_type: "cpu", or "cuda", where each process takes the GPU of its local rank.
    """
    if not dist.is_torchelastic_launched():
        yield
        return
    gpu = None
    if device_type == "cuda":
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(gpu)
    dist.init_process_group("gloo" if gpu is None else "nccl", device_id=gpu)
    with contextlib.ExitStack() as stack:
        if rank() > 0:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        yield
    # Not after an error: the other processes do not know of it, and torchrun ends them.
    dist.barrier()
    dist.destroy_process_group()


def leave() -> None:
    """Ends a process that torchrun started, without the shutdown of Python.

    Caches of DTensor keep process groups alive, and with them threads of gloo. Once in a while such
    a thread needs Python after its shutdown, and aborts.
    """
    if dist.is_torchelastic_launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def shard(model: nn.Module, **options: Any) -> None:
    """Shards every parameter over the processes, in place; build the optimizer after this.

    Every process has built the whole model from the same seed, so that starting weights do not
    depend on how many there are.

    Args:
        model: The weights of one of its ``blocks`` at a time will be gathered.
        options: Options of ``fully_shard``.
    """
    if dist.is_initialized():
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)


def local_part(batch: Tensor) -> Tensor:
    """The rows of a batch that this process computes."""
    return batch.chunk(world_size())[rank()]


def total(value: Tensor) -> Tensor:
    """The sum of all processes' values."""
    value = value.clone()
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def of_first(value: Any) -> Any:
    """The first process's value, on every process."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def mean(value: Tensor) -> Tensor:
    """The mean of all processes' values."""
    return total(value) / world_size()


def save(path: Path, model: nn.Module, optimizer: Optimizer, extra: dict[str, Any]) -> None:
    """Writes a checkpoint, a folder that appears complete or not at all.

    Any number of processes can :func:`load` it.

    Args:
        path: The folder; one from an earlier run is replaced.
        model: Each process writes its part of the parameters.
        optimizer: Each process writes its part of the state.
        extra: Other values to save, written by the first process; for :func:`load_extra`.
    """
    unfinished, previous = (path.with_name(path.name + end) for end in (".unfinished", ".previous"))
    if rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    _barrier()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    with _one_process_is_fine():
        dcp.save(state, checkpoint_id=unfinished)
    if rank() == 0:
        torch.save(extra, unfinished / EXTRA)
        shutil.rmtree(previous, ignore_errors=True)
        if path.exists():
            path.rename(previous)
        unfinished.rename(path)
        shutil.rmtree(previous, ignore_errors=True)
    _barrier()


def load(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Loads a checkpoint into the model and the optimizer of this run."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    with _one_process_is_fine():
        dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def load_extra(path: Path) -> dict[str, Any]:
    """The values of a checkpoint besides model and optimizer."""
    return torch.load(path / EXTRA, map_location="cpu", weights_only=True)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextlib.contextmanager
def _one_process_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
