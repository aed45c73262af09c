import gc
import importlib.util
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

# Without a GPU the kernels run in Triton's interpreter, chosen before triton is first imported.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETS = DEVICE == "cpu" and importlib.util.find_spec("triton") is not None
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
if INTERPRETS:
    import interpreter

    interpreter.install()

QUICK = "not exhaustive"  # as in pyproject.toml

# The tensors are small, and parallel tests share the cores.
torch.set_num_threads(1)


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on ``device`` goes through the kernels, everything else through torch operators."""
    from fp4adam.tensors import backend  # after TRITON_INTERPRET

    monkeypatch.setattr(backend, "uses_kernels", lambda d: d.type == DEVICE)


@pytest.fixture(params=["torch", "kernel"])
def path_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: str
) -> Iterator[str]:
    """Where the path under test runs: torch operators on the CPU, or the kernels on ``device``."""
    from fp4adam.tensors import backend

    kernel = request.param == "kernel"
    monkeypatch.setattr(backend, "uses_kernels", lambda d: kernel and d.type == device)
    # The interpreter divides by zero and reduces NaN in NumPy, which warns of it.
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
        yield device if kernel else "cpu"


@pytest.fixture(autouse=DEVICE == "cuda")
def memory_for_others() -> Iterator[None]:
    """What a test of huge tensors leaves in torch's cache would be missing in parallel tests."""
    yield
    if torch.cuda.memory_reserved() > 2**30:
        gc.collect()
        torch.cuda.empty_cache()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--few", action="store_true", help="two variants of each test at most")
    parser.addoption("--fewer", action="store_true", help="and every third row of tables")
    parser.addoption("--more", action="store_true", help="others of each test, 60 at most")


def pytest_configure(config: pytest.Config) -> None:
    # pytest would compile all of it anew, as the package of a plugin: a second in each worker.
    getattr(config.pluginmanager.rewrite_hook, "_must_rewrite", set()).discard("hypothesis")
    if INTERPRETS and config.option.markexpr != QUICK:
        interpreter.sanitize_overflow(True)


def pytest_collection_finish() -> None:
    """Tests and modules live to the end: gc.collect() need not visit them each time."""
    gc.collect()
    gc.freeze()


# What compiles ahead of time takes minutes a test, and comes first, so that nobody waits for it at
# the end. What starts processes takes seconds, and comes last.
SLOWEST, SLOW = "test_aot", ("test_example", "test_benchmarks", "distributed")


@pytest.hookimpl(trylast=True)  # after those that are not asked for have been left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    fewer = config.option.fewer
    if config.option.few or fewer or config.option.more:
        variants = defaultdict(lambda: ([], []))  # quick and others
        for item in items:
            is_other = any(map(item.get_closest_marker, ("exhaustive", "slow")))
            variants[item.parent, getattr(item, "originalname", item.name)][is_other].append(item)
        items.clear()
        for quick, others in variants.values():
            # Parameters differ most between the first and the last. Rows of a table are tests each.
            is_table = quick and quick[0].get_closest_marker("table")
            few = quick[:: 3 if fewer else 1] if is_table else quick[:1] + quick[1:][-1:]
            more = [item for item in quick + others if item not in few]
            each = -(-len(more) // (200 if is_table else 60)) or 1
            items += more[::each] if config.option.more else few

    def order(item: pytest.Item) -> int:
        name = str(item.path.relative_to(here))
        if SLOWEST in name:
            return -1
        return next((i for i, slow in enumerate(SLOW, 1) if slow in name), 0)

    items.sort(key=order)  # stable: the order within files, and of files, stays
