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


def orders_and_numbers(rank: int) -> tuple[list[str], tuple[float, ...]]:
    names = list({"exp_avg", "exp_avg_sq"})
    return names, (random.random(), np.random.rand(), torch.rand(()).item())


def test_ranks_hash_and_draw_differently_and_repeatably():
    results = run_ranks(orders_and_numbers, 4)
    (first, _), (second, _), *_ = results
    assert first == second[::-1]
    for draws in zip(*(numbers for _, numbers in results), strict=True):
        assert len({*draws}) == 4
    assert run_ranks(orders_and_numbers, 4) == results


def process(rank: int) -> tuple[int, int]:
    dist.barrier()
    return os.getpid(), os.getppid()


def test_ranks_are_processes_of_more_than_one_parent():
    ranks, parents = zip(*run_ranks(process, 5), strict=True)
    assert len({*ranks}) == 5 and os.getpid() not in ranks
    assert len({*parents}) == 3


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


def test_a_rank_may_die():
    assert run_ranks(fail, 2, "die", survives=True) == [0, None]


def skip(rank: int) -> None:
    pytest.skip(f"rank {rank} cannot")


def test_a_rank_skips_its_test():
    with pytest.raises(pytest.skip.Exception, match=r"rank [01] cannot"):
        run_ranks(skip, 2)
