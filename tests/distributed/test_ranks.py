"""Ranks of tests are as different as those that torchrun starts, and end in every case."""

import os
import random
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ranks import RankError, run_ranks


def orders_and_numbers(rank: int) -> tuple[list[str], tuple[float, ...], tuple[int, int]]:
    dist.barrier()
    names = list({"exp_avg", "exp_avg_sq"})
    numbers = random.random(), np.random.rand(), torch.rand(()).item()
    return names, numbers, (os.getpid(), os.getppid())


def test_ranks_are_processes_that_hash_and_draw_differently_and_repeatably():
    results = run_ranks(orders_and_numbers, 5)
    orders, numbers, processes = zip(*results, strict=True)
    assert orders[0] == orders[1][::-1]
    for drawn in zip(*numbers, strict=True):
        assert len({*drawn}) == 5
    ranks, parents = map(set, zip(*processes, strict=True))
    assert len(ranks) == 5 and os.getpid() not in ranks and len(parents) == 2
    assert [each[:2] for each in run_ranks(orders_and_numbers, 5)] == [each[:2] for each in results]


def fail(rank: int, how: str) -> int:
    if rank == 1 and how == "raise":
        raise ValueError("of rank 1")
    if rank == 1 and how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "hang":
        time.sleep(1000)
    return rank


@pytest.mark.parametrize(
    "how, timeout, error, text",
    [
        ("raise", 60.0, RankError, "ValueError: of rank 1"),
        ("die", 60.0, RankError, r"exit codes \{1: -9\}"),
        pytest.param(
            "hang",
            10.0,
            TimeoutError,
            r"ranks \[1\] did not end within 10.0 s",
            marks=pytest.mark.exhaustive,  # it waits
        ),
    ],
)
def test_a_rank_that_fails_is_named_and_the_next_call_works(how, timeout, error, text):
    with pytest.raises(error, match=text):
        run_ranks(fail, 2, how, timeout=timeout)
    assert run_ranks(fail, 2, "") == [0, 1]


def skip(rank: int) -> None:
    pytest.skip(f"rank {rank} cannot")


def test_a_rank_skips_its_test():
    with pytest.raises(pytest.skip.Exception, match=r"rank [01] cannot"):
        run_ranks(skip, 2)
