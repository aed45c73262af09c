"""Changes one line at a time, and sees that a test fails: what the tests would not notice.

    python tests/mutants.py --minutes 60 --jobs 2 [--seed 1] [--coverage FILE] [folders]

1. The quick tests run once under ``coverage``, which tells the lines that each test reaches, in
   processes of ranks too. ``build/mutants/coverage.json.gz`` keeps that; test files run again when
   they or lines that they reach have changed. ``--record FILE`` does this alone, and ``--coverage
   FILE`` takes what has been recorded, also on another machine: changed files are left out then.
   It takes half of the minutes at most.
2. Of all mutants of the folders, a sample is drawn: one per line, as many per folder as it has
   lines. ``--seed`` draws another.
3. Each mutant gets tests that reach its line, the fastest of each file first, until one fails or
   ``--seconds`` of tests have passed. ``--jobs`` copies of the tree are tested at a time, by
   processes that fork off this one, which has imported torch. Tests that fail without a mutant,
   too, do not count.

``--matrix`` runs all tests of a mutant that fit into ``--seconds``, where one failure would do, and
keeps which of them fail. The report has, for each test function, how many mutants it kills and how
many it alone, and a greedy cover: what is in no cover and kills nothing alone may go.

``--json`` takes the verdicts; a run that is repeated continues there, and after ``--minutes`` all
ends. Survivors that change nothing are listed in ``equivalent_mutants.txt``, with the reason.
mutmut and cosmic-ray do neither: one wraps functions, which Triton compiles from their source, the
other runs all tests.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import importlib
import json
import os
import platform
import py_compile
import random
import re
import shutil
import signal
import sqlite3
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "mutants"
# Other people's packages, whole programs, and what compiles: not among the quick tests, or slow.
NOT_RECORDED = re.compile(r"/(integrations|engines)/|test_(aot|docs|example|benchmarks|package)")
# Forked processes need not import it again. Nothing of the tree, which mutants change.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.testing._internal.common_optimizers",
    "numpy",
    "triton.runtime.interpreter",
    "coverage",
    "safetensors.torch",
)
FOLDERS = [
    "fp4adam/optim",
    "fp4adam/nn",
    "fp4adam/distributed",
    "fp4adam/tensors",
    "fp4adam/formats",
    "fp4adam/interop",
    "fp4adam/checkpoints",
    "kernels/tiles",
]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
TREE = (
    "fp4adam",
    "kernels",
    "tests",
    "examples",
    "benchmarks",
    "docs",
    "pyproject.toml",
    "README.md",
)

SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
    "and": "or", "or": "and",
    "+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "//", "**": "*",
    "&": "|", "|": "&", "^": "|", "<<": ">>", ">>": "<<",
}  # fmt: skip
SYMBOLS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
    ast.And: "and", ast.Or: "or",
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.Pow: "**", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<",
    ast.RShift: ">>",
}  # fmt: skip
FUNCTIONS = {"max": "min", "min": "max", "any": "all", "all": "any"}
FUNCTIONS |= {"maximum": "minimum", "minimum": "maximum", "amax": "amin", "sorted": "list"}
COPIES = ("clone", "contiguous", "detach")
# What no test can see: words for people, speed, and checks of the code by itself.
UNSEEN_FUNCTIONS = ("__repr__", "__str__", "extra_repr", "compile")
UNSEEN_CALLS = ("static_assert", "warn", "record_function", "max_constancy", "multiple_of")
UNSEEN_KEYWORDS = ("num_warps", "num_stages", "maxnreg", "sem", "non_blocking", "strict")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change: ``text`` in place of the characters [start, stop) of a file."""

    path: str
    start: int
    stop: int
    text: str
    lines: tuple[int, ...]
    before: str
    after: str

    @property
    def key(self) -> str:
        return f"{self.path} | {self.before} | {self.after}"


class Mutations(ast.NodeVisitor):
    """Collects the mutants of one file."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source, self.found = path, source, []
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._in_function = False
        self._lines: tuple[int, ...] = ()
        self.visit(ast.parse(source))

    def _at(self, line: int, column: int) -> int:
        # Columns of the parser count bytes.
        text = self.source[self._starts[line - 1] : self._starts[line]]
        return self._starts[line - 1] + len(text.encode()[:column].decode())

    def _start(self, node: ast.AST) -> int:
        return self._at(node.lineno, node.col_offset)

    def _stop(self, node: ast.AST) -> int:
        return self._at(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.AST) -> str:
        return self.source[self._start(node) : self._stop(node)]

    def _add(self, start: int, stop: int, text: str) -> None:
        if not self._in_function:
            return
        first = self.source.rfind("\n", 0, start) + 1
        last = self.source.find("\n", stop)
        before = self.source[first:last]
        after = self.source[first:start] + text + self.source[stop:last]
        try:
            ast.parse(self.source[:start] + text + self.source[stop:])
        except SyntaxError:
            return
        one_line = (" ".join(x.split()) for x in (before, after))
        self.found.append(Mutant(self.path, start, stop, text, self._lines, *one_line))

    def _replace(self, node: ast.AST, text: str) -> None:
        self._add(self._start(node), self._stop(node), text)

    def _swap_between(self, left: ast.AST, right: ast.AST, operator: ast.AST) -> None:
        symbol = SYMBOLS.get(type(operator))
        if symbol is None:
            return
        start, stop = self._stop(left), self._start(right)
        between = self.source[start:stop]
        pattern = r"\b" + symbol.replace(" ", r"\s+") + r"\b" if symbol.isalpha() else None
        pattern = pattern or re.escape(symbol).replace(r"\ ", r"\s+")
        match = re.search(pattern, between)
        if match:
            self._add(start + match.start(), start + match.end(), SWAPS[symbol])

    # Where nothing is changed

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in UNSEEN_FUNCTIONS:
            return
        outer, self._in_function = self._in_function, True
        for statement in node.body:
            self.visit(statement)
        self._in_function = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def _skip(self, node: ast.AST) -> None:
        """Errors, assertions, text and imports."""

    visit_Raise = visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = _skip

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in UNSEEN_KEYWORDS:
            self.visit(node.value)

    # Statements

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno
            outer, self._lines = self._lines, tuple(range(node.lineno, max(last, node.lineno) + 1))
            super().visit(node)
            self._lines = outer
        else:
            super().visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call):
            function = node.value.func
            if getattr(function, "attr", getattr(function, "id", "")) in UNSEEN_CALLS:
                return
            self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
            self._replace(node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass")
        self.visit(node.value)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "break")

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "pass")

    def visit_If(self, node: ast.If) -> None:
        if self._text(node.test) != "TYPE_CHECKING":
            if not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
                self._replace(node.test, f"not ({self._text(node.test)})")
            self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._first_only(node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._first_only(node.iter)
        self.generic_visit(node)

    def _first_only(self, node: ast.AST) -> None:
        if "tl." not in self._text(node) and not self.path.startswith("kernels"):
            self._replace(node, f"[*({self._text(node)})][:1]")

    # Expressions

    def visit_Compare(self, node: ast.Compare) -> None:
        self._swap_between(node.left, node.comparators[0], node.ops[0])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._swap_between(node.values[0], node.values[1], node.op)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not isinstance(node.left, (ast.Constant, ast.JoinedStr)) or not isinstance(
            getattr(node.left, "value", 0), str
        ):
            self._swap_between(node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.Invert)):
            self._replace(node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._replace(node.test, f"not ({self._text(node.test)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace(node, str(not value))
        elif isinstance(value, int):
            self._replace(node, str(value + 1))
        elif isinstance(value, float):
            self._replace(node, repr(2 * value if value else 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        name = getattr(function, "attr", getattr(function, "id", ""))
        if name in UNSEEN_CALLS:
            return
        if isinstance(function, ast.Attribute) and name in COPIES and not node.args:
            self._replace(node, self._text(function.value))
        elif name == "abs" and len(node.args) == 1:
            self._replace(node, f"({self._text(node.args[0])})")
        elif name in FUNCTIONS:
            stop = self._stop(function)
            self._add(stop - len(name), stop, FUNCTIONS[name])
        self.generic_visit(node)


def mutants_of(root: Path, folders: list[str]) -> list[Mutant]:
    """All mutants of the files below folders of a tree."""
    found: list[Mutant] = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            found += Mutations(str(path.relative_to(root)), path.read_text()).found
    return found


# The record


def _coverage(folder: str, name: str) -> Any:
    import coverage

    places = [str(Path(folder, place)) for place in ("fp4adam", "kernels")]
    file = str(Path(folder, "record", name))
    return coverage.Coverage(file, config_file=False, source=places, messages=False)


def on_a_rank(rank: int, function: Callable[..., Any], test: str, *args: Any) -> Any:
    """Call a function of a test on a rank, and record its lines."""
    measured = _coverage(os.environ["MUTANTS_FOLDER"], f"coverage.{os.getpid()}")
    measured.start()
    measured.switch_context(test)
    try:
        return function(rank, *args)
    finally:
        measured.stop()
        measured.save()


class Recorder:
    """A plugin of pytest that writes lines and times of tests that pass to record/tests.json."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.rmtree(folder / "record", ignore_errors=True)
        (folder / "record").mkdir()
        self._measured = _coverage(str(folder), "coverage")
        self._times: dict[str, float] = defaultdict(float)
        self._passed: set[str] = set()

    def pytest_configure(self) -> None:
        import mutants
        import ranks

        original = ranks.run_ranks

        def run_ranks(function: Callable, world_size: int, *args: Any, **options: Any) -> Any:
            test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0]
            return original(mutants.on_a_rank, world_size, function, test, *args, **options)

        ranks.run_ranks = run_ranks
        self._measured.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._measured.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._times[report.nodeid] += report.duration
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_unconfigure(self) -> None:
        self._measured.stop()
        self._measured.save()
        tests = [test for test in self._times if test in self._passed]
        numbers = {test: number for number, test in enumerate(tests)}
        lines: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for path, test, line in set(self._reached()):
            if test in numbers:
                lines[path][line].append(numbers[test])
        record = {"tests": [[test, round(self._times[test], 3)] for test in tests], "lines": lines}
        (self._folder / "record" / "tests.json").write_text(json.dumps(record))

    def _reached(self) -> Iterator[tuple[str, str, int]]:
        from coverage.numbits import numbits_to_nums

        for database in (self._folder / "record").glob("coverage*"):
            rows = sqlite3.connect(database).execute(
                "select path, context, numbits from line_bits"
                " join file on file.id = file_id join context on context.id = context_id"
            )
            for path, test, numbits in rows:
                path = path.removeprefix(f"{self._folder}/")
                path = path.replace("fp4adam/kernels/", "kernels/")
                for line in numbits_to_nums(numbits):
                    yield path, test, line


class Record:
    """Which tests reach a line, by test files; kept in one file.

    What follows from a file is dropped when its text is no longer the recorded one.
    """

    def __init__(self, file: Path) -> None:
        patterns = ("fp4adam/**/*.py", "kernels/**/*.py", "tests/**/test_*.py")
        self.digests = {
            str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()
            for pattern in patterns
            for path in ROOT.glob(pattern)
        }
        kept = json.loads(gzip.decompress(file.read_bytes())) if file.exists() else {}
        digests = kept.get("digests", {})
        self.stale = {path for path in digests if digests[path] != self.digests.get(path)}
        tests = kept.get("tests", {})
        self.tests = {path: tests[path] for path in tests if path not in self.stale}

    def drop_stale(self, chosen: list[str] | None) -> list[str]:
        """Drop what reached files that have changed; the test files to run, the largest first."""
        self.tests = {
            p: each for p, each in self.tests.items() if not self.stale & {*each["lines"]}
        }
        self.stale = set()
        every = [p for p in self.digests if p.startswith("tests/")]
        every = [p for p in every if not NOT_RECORDED.search(p)] if chosen is None else chosen
        lacking = [path for path in every if path not in self.tests]
        return sorted(lacking, key=lambda path: -(ROOT / path).stat().st_size)

    def write(self, file: Path) -> None:
        text = json.dumps({"digests": self.digests, "tests": self.tests})
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(text.encode()))

    def reached(self) -> tuple[dict[str, dict[int, list[str]]], dict[str, float]]:
        """By file and line, tests; and seconds by test.

        Tests of a line begin with the fastest of each test file, then follow the second fastest.
        """
        times: dict[str, float] = {}
        ranked: dict[str, dict[int, list[tuple[int, float, str]]]] = {}
        for record in self.tests.values():
            times.update(record["tests"])
            for path, lines in record["lines"].items():
                if path in self.stale:
                    continue
                for line, numbers in lines.items():
                    some = sorted((record["tests"][n] for n in numbers), key=lambda test: test[1])
                    entries = ranked.setdefault(path, {}).setdefault(int(line), [])
                    entries += [(i, time, test) for i, (test, time) in enumerate(some)]
        reached = {
            path: {line: [test for _, _, test in sorted(some)] for line, some in lines.items()}
            for path, lines in ranked.items()
        }
        return reached, times


# Runs


def copy_tree(folder: Path) -> None:
    """A copy of the tree, with compiled files that follow the text of their sources."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    (folder / "fp4adam" / "kernels").unlink(missing_ok=True)
    (folder / "fp4adam" / "kernels").symlink_to("../kernels")
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    for name in ("fp4adam", "kernels", "tests"):
        compileall.compile_dir(folder / name, quiet=1, invalidation_mode=mode)


class Chosen:
    """A plugin of pytest that runs some tests in their order, and notes what has failed."""

    def __init__(self, folder: Path, tests: list[str]) -> None:
        self._order = {test: i for i, test in enumerate(tests)}
        self._failed = folder / "failed"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # What leads to a test may be named as well: a file that cannot be collected.
        chosen = [item for item in items if item.nodeid in self._order]
        items[:] = sorted(chosen, key=lambda item: self._order[item.nodeid])

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            with self._failed.open("a") as file:
                print(report.nodeid, file=file)

    pytest_runtest_logreport = pytest_collectreport = _note


@dataclasses.dataclass
class Run:
    """Pytest in a copy of the tree, in a process forked off this one."""

    folder: Path
    arguments: list[str]
    plugin: Any
    seconds: float

    def start(self) -> None:
        self.begin = time.monotonic()
        self.pid = os.fork()
        if self.pid:
            return
        status = 3
        try:
            os.setsid()
            os.chdir(self.folder)
            os.environ |= {"PYTHONPATH": str(self.folder), "MUTANTS_FOLDER": str(self.folder)}
            sys.path[:] = [place for place in sys.path if not place.startswith(f"{ROOT}/tests")]
            sys.path[:0] = [str(self.folder), str(self.folder / "tests")]
            log = os.open(self.folder / "log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            options = ["-q", "-p", "no:cacheprovider", "-W", "ignore:Module already imported"]
            status = pytest.main([*options, *self.arguments], plugins=[self.plugin])
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status))

    def end(self) -> str | None:
        """ "passed", "failed", "no tests" or "timeout"; None while it runs."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if not done and time.monotonic() - self.begin <= self.seconds:
            return None
        self.kill(waits=not done)
        if not done:
            return "timeout"
        code = os.waitstatus_to_exitcode(status)
        names = {pytest.ExitCode.OK: "passed", pytest.ExitCode.NO_TESTS_COLLECTED: "no tests"}
        return names.get(code, "failed")

    def kill(self, waits: bool = True) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # the servers of ranks, too
        if waits:
            os.waitpid(self.pid, 0)


# A job runs pytest in a folder as often as it needs: it yields runs, and is sent how they end.
Job = Callable[[Path], Generator[Run, str, None]]


def run_jobs(jobs: Iterable[Job], folders: list[Path], deadline: float) -> bool:
    """Run jobs, one per folder at a time; whether all have ended before a deadline."""
    waiting = iter(jobs)

    def worker(folder: Path) -> Generator[Run, str, None]:
        for job in waiting:
            yield from job(folder)

    def proceed(worker: Generator[Run, str, None], end: str | None) -> None:
        run = next(worker, None) if end is None else worker.send(end)
        if run is not None:
            run.start()
            running.append((run, worker))

    running: list[tuple[Run, Generator[Run, str, None]]] = []
    for folder in folders:
        proceed(worker(folder), None)
    while running and time.monotonic() < deadline:
        time.sleep(0.02)
        for each in [*running]:
            end = each[0].end()
            if end is not None:
                running.remove(each)
                with contextlib.suppress(StopIteration):
                    proceed(each[1], end)
    for run, job in running:
        run.kill()
        job.close()
    return not running


def recording(record: Record, path: str, folder: Path) -> Generator[Run, str, None]:
    """Record the tests of a file."""
    begin = time.monotonic()
    yield Run(folder, [path], Recorder(folder), 3600)
    result = folder / "record" / "tests.json"
    if result.exists():
        record.tests[path] = json.loads(result.read_text())
    n_tests = len(record.tests.get(path, {}).get("tests", ()))
    print(f"{time.monotonic() - begin:7.1f} s {n_tests:5} tests of {path}", flush=True)


class Judge:
    """Judges mutants, and keeps the verdicts in a file."""

    def __init__(self, options: argparse.Namespace, record: Record) -> None:
        self.options, self.stale = options, record.stale
        self.begin = time.monotonic()
        self.reached, self.times = record.reached()
        results = json.loads(options.json.read_text()) if options.json.exists() else {}
        self.verdicts: list[dict[str, Any]] = results.get("verdicts", [])
        survivors = {v["key"] for v in self.verdicts if v["verdict"] == "survived"}
        if options.again:
            self.verdicts = [each for each in self.verdicts if each["key"] not in survivors]
        self.spent = results.get("seconds", 0.0)
        # Tests that have failed, and files that could not be collected: whether they pass without
        # a mutant.
        self.passes: dict[str, bool] = {}
        # On how many mutants a test function ran.
        self.ran = Counter(results.get("ran", {}))
        every = [m for m in mutants_of(ROOT, options.folders) if m.path not in self.stale]
        found = [m for m in every if self.tests_of(m)]
        self.unreached = Counter(folder_of(m.path) for m in every)
        self.unreached -= Counter(folder_of(m.path) for m in found)
        done = {each["key"] for each in self.verdicts}
        drawn = [m for m in found if m.key in survivors]
        drawn += sample(found, options.count, options.seed)
        self.work = [*{m.key: m for m in drawn if m.key not in done}.values()]

    def tests_of(self, mutant: Mutant) -> list[str]:
        lines = self.reached.get(mutant.path, {})
        return [*dict.fromkeys(test for n in mutant.lines for test in lines.get(n, ()))]

    def chosen(self, mutant: Mutant) -> list[str]:
        """Tests that reach the lines of a mutant, as many as fit into its time."""
        chosen, total = [], 0.0
        for test in self.tests_of(mutant):
            if total + self.times[test] <= self.options.seconds or not chosen:
                chosen.append(test)
                total += self.times[test]
        return chosen[:400]

    def run(self, folder: Path, tests: list[str], *options: str) -> Run:
        (folder / "failed").unlink(missing_ok=True)
        files = dict.fromkeys(test.split("::")[0] for test in tests)
        seconds = 30 + 4 * sum(self.times[test] for test in tests)
        return Run(folder, [*options, *files], Chosen(folder, tests), seconds)

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant, folder: Path) -> Iterator[None]:
        path = folder / mutant.path
        original = path.read_text()
        try:
            path.write_text(original[: mutant.start] + mutant.text + original[mutant.stop :])
            yield
        finally:
            path.write_text(original)

    def job(self, mutant: Mutant, folder: Path) -> Generator[Run, str, None]:
        """Run tests until one fails, or all; those that fail without the mutant, too, go."""
        begin, failed, end = time.monotonic(), [], "failed"
        stops = () if self.options.matrix else ("-x",)
        tests = [test for test in self.chosen(mutant) if self.passes.get(test, True)]
        while end == "failed" and not failed and tests:
            with self.mutated(mutant, folder):
                end = yield self.run(folder, tests, *stops)
            failed = failures(folder)
            unknown = tuple(test for test in failed if test not in self.passes)
            if unknown:  # tests, or whole files
                yield self.run(folder, [test for test in tests if test.startswith(unknown)])
                bad = failures(folder)
                self.passes |= {test: test not in bad for test in unknown}
            wrong = tuple(test for test in failed if not self.passes[test])
            failed = [test for test in failed if self.passes[test]]
            if not wrong:
                break
            tests = [test for test in tests if not test.startswith(wrong)]
        self.ran.update(map(function_of, tests))
        end = "failed" if failed else "passed" if not tests else end
        self.keep(mutant, end, failed, len(tests), time.monotonic() - begin)

    def keep(
        self, mutant: Mutant, end: str, failed: list[str], n_tests: int, seconds: float
    ) -> None:
        verdict = {"passed": "survived", "failed": "killed"}.get(end, end)
        if verdict == "survived" and mutant.key in known_equivalents():
            verdict = "equivalent"
        place = dict(key=mutant.key, path=mutant.path, line=mutant.lines[0])
        text = dict(before=mutant.before, after=mutant.after)
        found = dict(verdict=verdict, failed=failed, tests=n_tests, seconds=round(seconds, 1))
        entry = {**place, **text, **found}
        self.verdicts.append(entry)
        self.write()
        print(f"{verdict:11}{mutant.path}:{mutant.lines[0]}  {mutant.after}", flush=True)

    def table(self) -> dict[str, Counter]:
        """Numbers of verdicts, by folder."""
        table: dict[str, Counter] = defaultdict(Counter)
        for each in self.verdicts:
            table[folder_of(each["path"])][each["verdict"]] += 1
        for folder, count in self.unreached.items():
            table[folder]["not reached"] = count
        return table

    def write(self) -> None:
        results = {
            "seed": self.options.seed,
            "python": platform.python_version(),
            "torch": sys.modules["torch"].__version__,
            "seconds": round(self.spent + time.monotonic() - self.begin, 1),
            "folders": self.table(),
            "ran": self.ran,
            "changed_since_recorded": sorted(self.stale),
            "fail_without_mutants": [test for test, passes in self.passes.items() if not passes],
            "verdicts": self.verdicts,
        }
        part = self.options.json.with_suffix(".part")
        part.write_text(json.dumps(results, indent=1) + "\n")
        part.replace(self.options.json)

    def report(self) -> Iterator[str]:
        """The survivors, and a table of verdicts by folder."""
        for each in self.verdicts:
            if each["verdict"] == "survived":
                yield f"{each['path']}:{each['line']}\n  - {each['before']}\n  + {each['after']}"
        if self.options.matrix:
            yield from self.cover()
        columns = ("killed", "timeout", "survived", "equivalent", "no tests", "not reached")
        yield f"{'':24}" + "".join(f"{column:>12}" for column in columns)
        for folder, counts in sorted(self.table().items()):
            yield f"{folder:24}" + "".join(f"{counts[column]:12}" for column in columns)

    def cover(self) -> Iterator[str]:
        """Test functions by what they kill; those that a greedy cover takes have a plus."""
        kills = [{*map(function_of, each["failed"])} for each in self.verdicts if each["failed"]]
        seconds: Counter = Counter()
        for test, time_of_test in self.times.items():
            seconds[function_of(test)] += time_of_test
        total = Counter(test for killers in kills for test in killers)
        alone = Counter(test for killers in kills if len(killers) == 1 for test in killers)
        taken, left = [], kills
        while left:
            gain = Counter(test for killers in left for test in killers)
            best = max(gain, key=lambda test: (gain[test], -seconds[test]))
            taken.append(best)
            left = [killers for killers in left if best not in killers]
        yield f"{'kills':>7}{'alone':>7}{'ran':>7}{'s':>7}"
        for test, ran in sorted(self.ran.items(), key=lambda item: (-total[item[0]], item[0])):
            numbers = f"{total[test]:7}{alone[test]:7}{ran:7}{seconds[test]:7.1f}"
            yield f"{numbers} {'+' if test in taken else ' '} {test}"


def function_of(test: str) -> str:
    """The name of a test without its parameters."""
    return test.split("[")[0]


def failures(folder: Path) -> list[str]:
    """What has failed in the last run: tests, or files that could not be collected."""
    note = folder / "failed"
    return [*dict.fromkeys(note.read_text().splitlines())] if note.exists() else []


def sample(mutants: list[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """At most one mutant per line, with each folder's share of the lines."""
    generator = random.Random(seed)
    lines: dict[tuple[str, tuple[int, ...]], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        lines[mutant.path, mutant.lines].append(mutant)
    one_each = [generator.choice(same) for same in lines.values()]
    n = len(one_each)
    return generator.sample(one_each, n if count is None else min(count, n))


def folder_of(path: str) -> str:
    return next((folder for folder in FOLDERS if path.startswith(f"{folder}/")), "others")


@functools.cache
def known_equivalents() -> set[str]:
    lines = EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []
    return {line.rsplit(" | ", 1)[0] for line in lines if line and not line.startswith("#")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    parser.add_argument("--count", type=int, help="most mutants, those of earlier runs with them")
    parser.add_argument("--minutes", type=float, default=600.0, help="for all of it (600)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of tests per mutant (30)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--matrix", action="store_true", help="run all tests of each mutant")
    parser.add_argument("--again", action="store_true", help="judge earlier survivors again, first")
    parser.add_argument("--record", type=Path, metavar="FILE", help="record, and no more")
    parser.add_argument("--coverage", type=Path, metavar="FILE", help="what --record has written")
    parser.add_argument("--json", type=Path, default=OUT / "result.json", help="takes the verdicts")
    parser.add_argument("--tests", nargs="*", help="files to record, in place of all")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    for name in ("record", "coverage", "json"):
        if getattr(options, name) is not None:
            setattr(options, name, getattr(options, name).absolute())
    if options.coverage is not None and not options.coverage.exists():
        parser.error(f"there is no file {options.coverage}; --record writes it")

    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    folders = [OUT / f"copy{number}" for number in range(options.jobs)]
    copy_tree(folders[0])
    for folder in folders[1:]:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(folders[0], folder, symlinks=True)

    record_file = options.coverage or options.record or OUT / "coverage.json.gz"
    record = Record(record_file)
    if options.coverage is None:
        lacking = record.drop_stale(options.tests)
        print(f"recording the tests of {len(lacking)} files", flush=True)
        jobs = (functools.partial(recording, record, path) for path in lacking)
        half = time.monotonic() + 30 * options.minutes
        complete = run_jobs(jobs, folders, deadline if options.record else half)
        record.write(record_file)
        if not complete:
            print("the time was too short to record all; a repeated run goes on with it")
        if options.record:
            return
    options.json.parent.mkdir(parents=True, exist_ok=True)
    judge = Judge(options, record)
    run_jobs((functools.partial(judge.job, mutant) for mutant in judge.work), folders, deadline)
    judge.write()
    print(*judge.report(), sep="\n")


if __name__ == "__main__":
    main()
