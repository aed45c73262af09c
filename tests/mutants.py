"""Changes one line at a time, and sees that a test fails: what the tests would not notice.

    python tests/mutants.py --minutes 60 --jobs 2 [--seed 1] [--coverage FILE] [folders]

1. The quick tests run once under ``coverage``, which tells the lines that each test reaches, on
   ranks too, for half of the minutes at most. ``build/mutants/coverage.json.gz`` keeps that; test
   files run again when they or files that they reach have changed. ``--record FILE`` does this
   alone; ``--coverage FILE`` takes what another machine has recorded, without what has changed.
2. Of all mutants of the folders, a sample is drawn: one per line, so each folder has its share.
3. Each mutant gets tests that reach its line, the fastest of each kind first, and more of files
   that belong to the changed one, until one fails or ``--seconds`` of tests have passed. Tests that
   fail without a mutant, too, do not count.

``--matrix`` runs all tests of a mutant, where one failure would do, and reports what each test
function kills, alone too, and a greedy cover: what is in none and kills nothing alone may go.
``--json`` takes the verdicts; a run that is repeated continues there. Survivors that change nothing
are listed in ``equivalent_mutants.txt``.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import copy
import dataclasses
import gzip
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import py_compile
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "mutants"
# Other people's packages, whole programs, and what compiles: not among the quick tests, or slow.
NOT_RECORDED = re.compile(r"/(integrations|engines)/|test_(aot|docs|example|benchmarks|package)")
# Forked processes need not import it again. Nothing of the tree, which mutants change.
PRELOADED = """
    torch torch._dynamo torch.distributed.checkpoint.state_dict torch.distributed.fsdp
    torch.distributed.tensor torch.testing._internal.common_optimizers numpy
    triton.runtime.interpreter coverage safetensors.torch
""".split()
PARTS = "optim nn distributed tensors formats interop checkpoints".split()
FOLDERS = [*(f"fp4adam/{part}" for part in PARTS), "kernels/tiles"]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
TREE = "fp4adam kernels tests examples benchmarks docs pyproject.toml README.md".split()

SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add,
    ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}  # fmt: skip
FUNCTIONS = {"max": "min", "min": "max", "any": "all", "all": "any"}
FUNCTIONS |= {"maximum": "minimum", "minimum": "maximum", "amax": "amin", "sorted": "list"}
COPIES = ("clone", "contiguous", "detach")
# What no test can see: words for people, speed, and checks of the code by itself; without a GPU
# neither PTX nor what a kernel does for a capability of its target: the interpreter has 0.
UNSEEN_FUNCTIONS = re.compile("__(repr|str)__|extra_repr|compile|.*_assembly")
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


class Mutations:
    """Collects the mutants of one file."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source, self.found = path, source, []
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._visit(ast.parse(source), (), False)

    def _at(self, line: int, column: int) -> int:
        # Columns of the parser count bytes.
        text = self.source[self._starts[line - 1] : self._starts[line]]
        return self._starts[line - 1] + len(text.encode()[:column].decode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        stop = self._at(node.end_lineno, node.end_col_offset)
        return self._at(node.lineno, node.col_offset), stop

    def _text(self, node: ast.AST) -> str:
        return self.source[slice(*self._span(node))]

    def _visit(self, node: ast.AST, lines: tuple[int, ...], in_function: bool) -> None:
        if is_unseen(node):
            return
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno
            lines = tuple(range(node.lineno, max(last, node.lineno) + 1))
        for changed, text in self._changes(node) if in_function else ():
            self._replace(changed, text, lines)
        children, in_function = ast.iter_child_nodes(node), in_function or is_function(node)
        if is_function(node) or isinstance(node, ast.ClassDef):
            children = node.body
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            children = [node.value] if node.value else []
        elif isinstance(node, ast.If) and is_unseen(node.test):
            children = node.orelse
        for child in children:
            self._visit(child, lines, in_function)

    def _replace(self, node: ast.AST, text: str, lines: tuple[int, ...]) -> None:
        start, stop = self._span(node)
        with contextlib.suppress(SyntaxError):
            ast.parse(self.source[:start] + text + self.source[stop:])
            first, last = self.source.rfind("\n", 0, start) + 1, self.source.find("\n", stop)
            before = self.source[first:last]
            after = self.source[first:start] + text + self.source[stop:last]
            one_line = (" ".join(x.split()) for x in (before, after))
            self.found.append(Mutant(self.path, start, stop, text, lines, *one_line))

    def _changes(self, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
        """Nodes, this one or in it, and what replaces them."""
        match node:
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Break():
                yield node, "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
                yield node, "pass"
            case ast.Continue():
                yield node, "break"
            case ast.If(test=ast.Compare() | ast.BoolOp() | ast.UnaryOp()):
                pass  # changed by itself
            case ast.If(test=test) | ast.IfExp(test=test):
                yield test, f"not ({self._text(test)})"
            case ast.For(iter=items) | ast.comprehension(iter=items):
                text = self._text(items)
                if "tl." not in text and not self.path.startswith("kernels"):
                    yield items, f"[*({text})][:1]"
            case ast.BinOp(left=ast.Constant(value=str()) | ast.JoinedStr()):
                pass
            case ast.Compare(ops=[operator, *more]) if type(operator) in SWAPS:
                yield node, unparsed(node, ops=[SWAPS[type(operator)](), *more])
            case ast.BoolOp(op=operator) | ast.BinOp(op=operator) if type(operator) in SWAPS:
                yield node, unparsed(node, op=SWAPS[type(operator)]())
            case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
                yield node, f"({self._text(operand)})"
            case ast.Constant(value=bool(value)):
                yield node, str(not value)
            case ast.Constant(value=int(value)):
                yield node, repr(value + 1)
            case ast.Constant(value=float(value)):
                yield node, repr(2 * value if value else value + 1)
            case ast.Call(func=ast.Attribute(value=copied, attr=name), args=[]) if name in COPIES:
                yield node, self._text(copied)
            case ast.Call(args=[number]) if name_of(node) == "abs":
                yield node, f"({self._text(number)})"
            case ast.Call(func=function) if (name := name_of(node)) in FUNCTIONS:
                yield function, self._text(function).removesuffix(name) + FUNCTIONS[name]


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def is_unseen(node: ast.AST) -> bool:
    """Errors, assertions, text, imports, and what the lists above name."""
    match node:
        case ast.Compare() | ast.BoolOp():
            asked = ast.unparse(node)
            return "capability()" in asked and "capability() == 0" not in asked
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Expr(value=ast.Call() as call) | (ast.Call() as call):
            return name_of(call) in UNSEEN_CALLS
        case ast.keyword(arg=name):
            return name in UNSEEN_KEYWORDS
    return is_function(node) and UNSEEN_FUNCTIONS.fullmatch(node.name) is not None


def unparsed(node: ast.AST, **changed: Any) -> str:
    other = copy.copy(node)
    vars(other).update(changed)
    return ast.unparse(other)


def name_of(node: ast.AST) -> str:
    """What is called, without what it belongs to."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", ""))


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
        lines: dict[str, dict[int, list]] = defaultdict(lambda: defaultdict(list))
        for path, test, line in set(self._reached()):
            if test in numbers:
                lines[path][line].append(numbers[test])
        record = {"tests": [[test, round(self._times[test], 3)] for test in tests], "lines": lines}
        (self._folder / "record" / "tests.json").write_text(json.dumps(record))

    def _reached(self) -> Iterator[tuple[str, str, int]]:
        import coverage

        for database in (self._folder / "record").glob("coverage*"):
            data = coverage.CoverageData(str(database))
            data.read()
            for file in data.measured_files():
                path = file.removeprefix(f"{self._folder}/")
                path = path.replace("fp4adam/kernels/", "kernels/")
                for line, tests in data.contexts_by_lineno(file).items():
                    yield from ((path, test, line) for test in tests)


class Record:
    """Which tests reach a line, by test files; kept in one file.

    What follows from a file is dropped when its text is no longer the recorded one.
    """

    def __init__(self, file: Path) -> None:
        patterns = ("fp4adam/**/*.py", "kernels/**/*.py", "tests/**/test_*.py")
        paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
        digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
        self.digests = {str(p.relative_to(ROOT)): x for p, x in zip(paths, digests, strict=True)}
        kept = json.loads(gzip.decompress(file.read_bytes())) if file.exists() else {}
        digests, tests = kept.get("digests", {}), kept.get("tests", {})
        self.stale = {path for path in digests if digests[path] != self.digests.get(path)}
        self.tests = {path: tests[path] for path in tests if path not in self.stale}

    def lacking(self, chosen: list[str] | None) -> list[str]:
        """The test files to run, the largest first; what reached files that have changed goes."""
        kept = self.tests.items()
        self.tests = {p: each for p, each in kept if not self.stale & {*each["lines"]}}
        self.stale = set()
        every = [p for p in self.digests if p.startswith("tests/")]
        every = [p for p in every if not NOT_RECORDED.search(p)] if chosen is None else chosen
        lacking = [path for path in every if path not in self.tests]
        return sorted(lacking, key=lambda path: -(ROOT / path).stat().st_size)

    def write(self, file: Path) -> None:
        text = json.dumps({"digests": self.digests, "tests": self.tests})
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(text.encode()))

    def reached(self) -> tuple[dict[tuple[str, int], list[str]], dict[str, float]]:
        """By file and line, tests; and seconds by test.

        Tests of a line begin with the fastest of each kind: a function with the first of its
        parameters, such as a scenario or a misuse. Then follow the second fastest; of the same
        folder 4 at a time, of a file with the same name 16.
        """
        times: dict[str, float] = {}
        ranked: dict[tuple[str, int], list] = defaultdict(list)
        for file, record in self.tests.items():
            times.update(record["tests"])
            for path, lines in record["lines"].items():
                names = path.removeprefix("fp4adam/").split("/")
                most = 16 if file.endswith(f"_{names[-1]}") else 4 if f"/{names[0]}/" in file else 1
                for line, numbers in {} if path in self.stale else lines.items():
                    some = sorted((record["tests"][n] for n in numbers), key=lambda test: test[1])
                    turns = defaultdict(itertools.count)
                    for test, s in some:
                        turn = next(turns[test.split("-")[0]]) // most
                        ranked[path, int(line)].append((turn, s, test))
        return {at: [test for *_, test in sorted(some)] for at, some in ranked.items()}, times


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
        self._failed.write_text("")

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


def run_pytest(folder: Path, arguments: list[str], plugin: Any, deadline: float) -> str:
    """Run pytest in a copy of the tree: "passed", "failed", "no tests" or "timeout".

    It runs in a process forked off this one, which has imported torch.
    """
    pid = os.fork()
    if not pid:
        status = 3
        try:
            os.setsid()
            os.chdir(folder)
            os.environ |= {"PYTHONPATH": str(folder), "MUTANTS_FOLDER": str(folder)}
            sys.path[:] = [place for place in sys.path if not place.startswith(f"{ROOT}/tests")]
            sys.path[:0] = [str(folder), str(folder / "tests")]
            log = os.open(folder / "log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            options = ["-q", "-p", "no:cacheprovider", "-W", "ignore:Module already imported"]
            status = pytest.main([*options, *arguments], plugins=[plugin])
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status))
    done, status = os.waitpid(pid, os.WNOHANG)
    while not done and time.monotonic() < deadline:
        time.sleep(0.02)
        done, status = os.waitpid(pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # the servers of ranks, too
    if not done:
        os.waitpid(pid, 0)
        return "timeout"
    return {0: "passed", 5: "no tests"}.get(os.waitstatus_to_exitcode(status), "failed")


def in_copies(
    function: Callable[[Path, Any], Any], work: list, folders: list[Path], deadline: float
) -> Iterator:
    """What a function makes of each item in one of the folders, as many at a time; not None."""
    global _job
    _job = function, work, folders, deadline
    with multiprocessing.get_context("fork").Pool(len(folders)) as pool:
        yield from (x for x in pool.imap_unordered(_do, range(len(work))) if x is not None)


def _do(number: int) -> Any:
    function, work, folders, deadline = _job
    if time.monotonic() > deadline:
        return None
    worker = int(multiprocessing.current_process().name.rpartition("-")[2])  # they are numbered
    return function(folders[worker % len(folders)], work[number])


class Judge:
    """Judges mutants, and keeps the verdicts in a file."""

    def __init__(self, options: argparse.Namespace, record: Record, deadline: float) -> None:
        self.options, self.stale, self.deadline = options, record.stale, deadline
        self.reached, self.times = record.reached()
        results = json.loads(options.json.read_text()) if options.json.exists() else {}
        self.verdicts: list[dict[str, Any]] = results.get("verdicts", [])
        # Tests that have failed, and files that could not be collected: whether they pass without
        # a mutant.
        self.passes: dict[str, bool] = {}
        paths = [path for each in options.folders for path in sorted((ROOT / each).rglob("*.py"))]
        names = [name for path in paths if (name := str(path.relative_to(ROOT))) not in self.stale]
        every = [m for name in names for m in Mutations(name, (ROOT / name).read_text()).found]
        found = [m for m in every if self.tests_of(m)]
        self.unreached = Counter(folder_of(m.path) for m in every if not self.tests_of(m))
        done = {each["key"] for each in self.verdicts}
        drawn = {m.key: m for m in sample(found, options.count, options.seed)}
        self.work = [mutant for key, mutant in drawn.items() if key not in done]

    def tests_of(self, mutant: Mutant) -> list[str]:
        reached = (self.reached.get((mutant.path, line), ()) for line in mutant.lines)
        return [*dict.fromkeys(itertools.chain.from_iterable(reached))]

    def chosen(self, mutant: Mutant) -> list[str]:
        """Tests that reach the lines of a mutant, as many as fit into its time."""
        chosen, total = [], 0.0
        for test in self.tests_of(mutant):
            if total + self.times[test] <= self.options.seconds or not chosen:
                chosen.append(test)
                total += self.times[test]
        return chosen[:600]

    def run(self, folder: Path, tests: list[str], *options: str) -> tuple[str, list[str]]:
        """How a run of tests ends, and what has failed: tests, or files without any."""
        files = dict.fromkeys(test.split("::")[0] for test in tests)
        seconds = 30 + 4 * sum(self.times[test] for test in tests)
        plugin, deadline = Chosen(folder, tests), time.monotonic() + seconds
        end = run_pytest(folder, [*options, *files], plugin, min(deadline, self.deadline))
        return end, [*dict.fromkeys((folder / "failed").read_text().splitlines())]

    def judge(self, folder: Path, mutant: Mutant) -> dict[str, Any] | None:
        """Run tests until one fails, or all; those that fail without the mutant, too, go."""
        begin, failed = time.monotonic(), []
        path, stops = folder / mutant.path, () if self.options.matrix else ("-x",)
        original = path.read_text()
        tests = [test for test in self.chosen(mutant) if self.passes.get(test, True)]
        while tests:
            path.write_text(original[: mutant.start] + mutant.text + original[mutant.stop :])
            end, failed = self.run(folder, tests, *stops)
            path.write_text(original)
            unknown = tuple(test for test in failed if test not in self.passes)
            if unknown:
                bad = self.run(folder, [test for test in tests if test.startswith(unknown)])[1]
                self.passes |= {test: test not in bad for test in unknown}
            wrong = tuple(test for test in failed if not self.passes[test])
            failed = [test for test in failed if self.passes[test]]
            tests = [test for test in tests if not test.startswith(wrong)]
            if failed or not wrong:
                break
        if time.monotonic() > self.deadline:
            return None
        end = "failed" if failed else "passed" if not tests else end
        verdict = {"passed": "survived", "failed": "killed"}.get(end, end)
        if verdict == "survived" and mutant.key in known_equivalents():
            verdict = "equivalent"
        seconds, ran = round(time.monotonic() - begin, 1), [*dict.fromkeys(map(function_of, tests))]
        found = dict(key=mutant.key, verdict=verdict, failed=failed, ran=ran, seconds=seconds)
        return dataclasses.asdict(mutant) | found

    def judge_all(self, folders: list[Path]) -> None:
        for entry in in_copies(self.judge, self.work, folders, self.deadline):
            self.verdicts.append(entry)
            place = f"{entry['path']}:{entry['lines'][0]}"
            print(f"{entry['verdict']:11}{place}  {entry['after']}", flush=True)
            self.write()

    def write(self) -> None:
        results = {"seed": self.options.seed, "changed_since_recorded": sorted(self.stale)}
        results["verdicts"] = self.verdicts
        part = self.options.json.with_suffix(".part")
        part.write_text(json.dumps(results, indent=1) + "\n")
        part.replace(self.options.json)

    def report(self) -> Iterator[str]:
        """The survivors, and a table of verdicts by folder."""
        for each in self.verdicts:
            if each["verdict"] == "survived":
                place = f"{each['path']}:{each['lines'][0]}"
                yield f"{place}\n  - {each['before']}\n  + {each['after']}"
        if self.options.matrix:
            yield from self.cover()
        counts = Counter((folder_of(each["path"]), each["verdict"]) for each in self.verdicts)
        counts.update({(folder, "not reached"): n for folder, n in self.unreached.items()})
        for (folder, verdict), n in sorted(counts.items()):
            yield f"{folder:24}{verdict:>12}{n:8}"

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
        ran = Counter(test for each in self.verdicts for test in each["ran"])
        yield f"{'kills':>7}{'alone':>7}{'ran':>7}{'s':>7}"
        for test in sorted(ran, key=lambda test: (-total[test], test)):
            numbers = f"{total[test]:7}{alone[test]:7}{ran[test]:7}{seconds[test]:7.1f}"
            yield f"{numbers} {'+' if test in taken else ' '} {test}"


def function_of(test: str) -> str:
    """The name of a test without its parameters."""
    return test.split("[")[0]


def sample(mutants: Iterable[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """At most one mutant per line, with each folder's share of the lines."""
    generator = random.Random(seed)
    lines: dict[tuple[str, tuple[int, ...]], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        lines[mutant.path, mutant.lines].append(mutant)
    one_each = [generator.choice(same) for same in lines.values()]
    return generator.sample(one_each, min(count or len(one_each), len(one_each)))


def folder_of(path: str) -> str:
    return next((folder for folder in FOLDERS if path.startswith(f"{folder}/")), "others")


def known_equivalents() -> set[str]:
    lines = EQUIVALENT.read_text().splitlines()
    return {line.rsplit(" | ", 1)[0] for line in lines if not line.startswith("#")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    parser.add_argument("--count", type=int, help="most mutants, those of earlier runs with them")
    parser.add_argument("--minutes", type=float, default=600.0, help="for all of it (600)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of tests per mutant (30)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--matrix", action="store_true", help="run all tests of each mutant")
    parser.add_argument("--record", type=Path, metavar="FILE", help="record, and no more")
    parser.add_argument("--coverage", type=Path, metavar="FILE", help="what --record has written")
    parser.add_argument("--json", type=Path, default=OUT / "result.json", help="takes the verdicts")
    parser.add_argument("--tests", nargs="*", help="files to record, in place of all")
    options = parser.parse_args()
    if options.coverage is not None and not options.coverage.exists():
        parser.error(f"there is no file {options.coverage}; --record writes it")
    begin, seconds = time.monotonic(), 60 * options.minutes
    deadline = begin + seconds

    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    folders = [OUT / f"copy{number}" for number in range(options.jobs)]
    for folder in folders:
        copy_tree(folder)

    record_file = options.coverage or options.record or OUT / "coverage.json.gz"
    record = Record(record_file)
    if options.coverage is None:
        half = deadline if options.record else begin + seconds / 2

        def recorded(folder: Path, path: str) -> tuple[str, Any] | None:
            run_pytest(folder, [path], Recorder(folder), half)
            result = folder / "record" / "tests.json"
            return (path, json.loads(result.read_text())) if result.exists() else None

        lacking = record.lacking(options.tests)
        print(f"recording the tests of {len(lacking)} files", flush=True)
        for path, reached in in_copies(recorded, lacking, folders, half):
            record.tests[path] = reached
            print(f"{len(reached['tests']):5} tests of {path}", flush=True)
            record.write(record_file)
        if options.record:
            return
    options.json.parent.mkdir(parents=True, exist_ok=True)
    judge = Judge(options, record, deadline)
    judge.judge_all(folders)
    judge.write()
    print(*judge.report(), sep="\n")


if __name__ == "__main__":
    main()
