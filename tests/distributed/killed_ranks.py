"""Kills ranks of a training at random moments, and resumes from the last complete checkpoint.

    PYTHONPATH=.:tests:tests/distributed python -m killed_ranks --times 20

Each time one rank, chosen at random, is ended by SIGKILL while it loads, steps or saves. The others
have to end with an error before the timeout of their collectives is over, and new ranks that load
the last complete checkpoint have to end with the bits of a run that nothing has interrupted.
"""

import argparse
import collections
import contextlib
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fp4adam import QuantizedTensor
from fp4adam.distributed.dtensor import local
from ranks import run_ranks
from test_parallel_checkpoints import Pair, load, make, state_of
from test_tensor_parallel import loss_of

STAGES = ("load", "step", "save")
LAYOUTS = (("sharded", 3), ("parallel", 2), ("parallel", 4))
LAST_STEP = 6
# Of collectives, and how much later a rank may notice on a busy machine.
TIMEOUT, SLACK = 15.0, 5.0


class Kill(NamedTuple):
    """Which rank ends itself: when it is in a stage for the ``count``-th time, after a delay."""

    rank: int
    stage: str
    count: int
    delay: float


class Outcome(NamedTuple):
    """How a run ended on one rank.

    Attributes:
        error: The error that ended it, or None.
        seconds: How long after the kill that was.
        state: Bytes of parameters and states, if it came to its end.
        stages: The duration of each stage.
    """

    error: str | None
    seconds: float
    state: list[Tensor]
    stages: dict[str, list[float]]


def train(rank: int, folder: Path, layout: str, source: Path | None, kill: Kill | None) -> Outcome:
    """Steps with a checkpoint after each second one, which gets its name when it is complete."""
    stages: dict[str, list[float]] = collections.defaultdict(list)

    @contextlib.contextmanager
    def stage(name: str) -> Iterator[None]:
        (folder / f"stage{rank}").write_text(name)
        begin = time.monotonic()
        if kill is not None and (rank, name, len(stages[name])) == kill[:3]:
            threading.Timer(kill.delay, end_here).start()
        yield
        stages[name].append(time.monotonic() - begin)

    def end_here() -> None:
        (folder / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        pair = make("nvfp4", layout)
        with stage("load"):
            if source is not None:
                load(pair, source)
        model, optimizer = pair
        for step in range(int(source.name) if source else 0, LAST_STEP):
            with stage("step"):
                loss_of(model, 32, False, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            if step % 2:
                with stage("save"):
                    save(rank, folder, pair, step + 1)
    except Exception as error:
        killed = float((folder / "killed").read_text())
        return Outcome(f"{type(error).__name__}: {error}", time.time() - killed, [], stages)
    return Outcome(None, 0.0, state_of_rank(pair), stages)


def save(rank: int, folder: Path, pair: Pair, step: int) -> None:
    unfinished = folder / f"unfinished{step}"
    dcp.save(state_of(pair), checkpoint_id=unfinished)
    if rank == 0:
        unfinished.rename(folder / str(step))


def state_of_rank(pair: Pair) -> list[Tensor]:
    found = []
    for param, state in pair[1].state.items():
        own = local(param).detach()
        inner = own.storage_tensors().values() if isinstance(own, QuantizedTensor) else [own]
        found += [*inner, *(local(value) for _, value in sorted(state.items()))]
    return [x.clone() for x in found]


def assert_same(actual: list[Outcome], expected: list[Outcome]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.error is None and len(a.state) == len(b.state) > 0
        assert all(map(torch.equal, a.state, b.state))


def complete(folder: Path) -> Path:
    """The last checkpoint that is complete."""
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
    return folder / str(max(steps))


def folder_beginning_with(checkpoint: Path) -> Path:
    """A new folder for checkpoints, with one from before."""
    folder = Path(tempfile.mkdtemp(dir=checkpoint.parents[1]))
    (folder / checkpoint.name).symlink_to(checkpoint)
    return folder


def campaign(stages: list[str], seed: int) -> list[dict[str, Any]]:
    """One kill per entry of ``stages``: where each hit and what the other ranks said."""
    chance = random.Random(seed)
    rehearsed: dict[tuple[str, int], list[Outcome]] = {}
    found = []
    with tempfile.TemporaryDirectory() as root:
        while len(found) < len(stages):
            stage = stages[len(found)]
            layout, world_size = chance.choice(LAYOUTS)
            base = Path(root, f"{layout}{world_size}")
            if not base.exists():
                base.mkdir()
                whole = run_ranks(train, world_size, base, layout, None, None)
                folder = folder_beginning_with(base / "2")
                args = (world_size, folder, layout, folder / "2", None)
                rehearsed[layout, world_size] = expected = run_ranks(train, *args)
                assert_same(expected, whole)
            expected = rehearsed[layout, world_size]
            folder = folder_beginning_with(base / "2")
            kill = Kill(
                rank=chance.randrange(world_size),
                stage=stage,
                # The run goes on after two of its steps and its first checkpoint.
                count=chance.randrange({"load": 1, "step": 4, "save": 2}[stage]),
                delay=chance.random() * min(expected[0].stages[stage]),
            )
            args = (world_size, folder, layout, folder / "2", kill)
            options = dict(survives=True, timeout=2 * TIMEOUT)
            outcomes = run_ranks(train, *args, **options)
            if not (folder / "killed").exists():
                continue  # it had ended before
            assert outcomes[kill.rank] is None
            others = [outcome for outcome in outcomes if outcome is not None]
            assert len(others) == world_size - 1
            for outcome in others:
                # A rank may have come to its end before the last one was killed.
                assert outcome.error is None or outcome.seconds < TIMEOUT + SLACK, outcome
            killed_in = (folder / f"stage{kill.rank}").read_text()
            last = complete(folder)
            resumed = run_ranks(train, world_size, folder, layout, last, None)
            assert_same(resumed, expected)
            found.append(
                {
                    "layout": f"{layout}, {world_size} ranks",
                    "killed in": killed_in or "between two",
                    "resumed from step": int(last.name),
                    "seconds until the last error": max(o.seconds for o in others),
                    "errors": sorted({str(o.error).split("]")[-1][:100] for o in others}),
                }
            )
            found[-1]["error of each"] = [o.error for o in others]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=20, help="number of kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = campaign([STAGES[i % 3] for i in range(options.times)], options.seed)
    for row in found:
        print({key: value for key, value in row.items() if key not in ("error of each",)})
    where = collections.Counter(row["killed in"] for row in found)
    errors = sum(error is not None for row in found for error in row["error of each"])
    slowest = max(row["seconds until the last error"] for row in found)
    print(
        f"{len(found)} kills ({dict(where)}): {errors} errors on other ranks, the last after "
        f"{slowest:.1f} s of {TIMEOUT:.0f}; {len(found)} resumed with the same bits"
    )


if __name__ == "__main__":
    import killed_ranks  # what __main__ defines could not be sent to ranks

    killed_ranks.main()
