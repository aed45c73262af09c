"""Changes one line at a time, and sees that a test fails: what the tests would not notice.

    python tests/mutants.py --count 600 --jobs 2

1. The quick tests run once under ``coverage``, which tells the lines that each test reaches, in
   processes of ranks too. The record stays in ``build/mutants``, with the tree that it is of, until
   ``--record`` renews it.
2. Of all mutants of the folders, a sample is drawn: one per line, as many per folder as it has
   lines. ``--seed`` draws another.
3. Each mutant gets the tests that reach its line, the fastest first, until one fails or
   ``--seconds`` of tests have passed. Workers have copies of the tree and fork from a process that
   has imported torch.

Results are added to ``build/mutants/results.jsonl``; a run that is repeated continues. Survivors
that change nothing are listed in ``equivalent_mutants.txt``, with the reason. mutmut and cosmic-ray
do neither: one wraps functions, which Triton compiles from their source, the other runs all tests.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "mutants"
FOLDERS = [
    "fp4adam/optim",
    "fp4adam/distributed",
    "fp4adam/tensors",
    "fp4adam/formats",
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
    """A plugin of pytest that records lines and times of each test."""

    def __init__(self, folder: str) -> None:
        self._measured = _coverage(folder, "coverage")
        self._times: dict[str, float] = defaultdict(float)
        self._passed: set[str] = set()
        self._file = Path(folder, "record", "times.json")

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
        times = {test: time for test, time in self._times.items() if test in self._passed}
        self._file.write_text(json.dumps(times))


def read_record(folder: Path) -> tuple[dict[str, dict[int, list[str]]], dict[str, float]]:
    """The tests that reach a line, by file and line; and their times in seconds."""
    from coverage.numbits import numbits_to_nums

    times = json.loads((folder / "record" / "times.json").read_text())
    reached: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for database in (folder / "record").glob("coverage*"):
        rows = sqlite3.connect(database).execute(
            "select path, context, numbits from line_bits"
            " join file on file.id = file_id join context on context.id = context_id"
        )
        for path, test, numbits in rows:
            if test in times:
                path = path.removeprefix(f"{folder}/").replace("fp4adam/kernels/", "kernels/")
                for line in numbits_to_nums(numbits):
                    reached[path][line].add(test)
    by_time = {
        path: {n: sorted(tests, key=times.get) for n, tests in lines.items()}
        for path, lines in reached.items()
    }
    return by_time, times


# Runs


def copy_tree(root: Path, folder: Path) -> None:
    """A copy of the tree, with compiled files that follow the text of their sources."""
    import compileall
    import py_compile

    for name in TREE:
        source = root / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(folder / "fp4adam", quiet=1, invalidation_mode=mode)
    compileall.compile_dir(folder / "kernels", quiet=1, invalidation_mode=mode)


def run_tests(folder: Path, arguments: list[str], timeout: float, records: bool = False) -> int:
    """The exit status of pytest in a copy of the tree, in a process forked off this one."""
    pid = os.fork()
    if not pid:
        os.setsid()
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": str(folder), "MUTANTS_FOLDER": str(folder)}
        sys.path[:0] = [str(folder), str(folder / "tests")]
        sys.path[:] = [place for place in sys.path if not place.startswith(f"{ROOT}/tests")]
        log = os.open(folder / "log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        plugins = [Recorder(str(folder))] if records else []
        status = pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=plugins)
        sys.stdout.flush()
        os._exit(int(status))
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        time.sleep(0.02)
    else:
        status = signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # the servers of ranks, too
    if not done:
        os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def judge(mutant: Mutant, folder: Path, tests: list[str], times: dict[str, float]) -> str:
    """ "killed", "survived" or "timeout", by the tests given."""
    path = folder / mutant.path
    original = path.read_text()
    path.write_text(original[: mutant.start] + mutant.text + original[mutant.stop :])
    try:
        expected = sum(times[test] for test in tests)
        status = run_tests(folder, ["-x", "-m", "", *tests], 60 + 4 * expected)
    finally:
        path.write_text(original)
    if status < 0:
        return "timeout"
    return "survived" if status == pytest.ExitCode.OK else "killed"


def chosen_tests(
    mutant: Mutant,
    reached: dict[str, dict[int, list[str]]],
    times: dict[str, float],
    seconds: float,
) -> list[str]:
    """The fastest tests that reach the lines of a mutant."""
    lines = reached.get(mutant.path, {})
    tests = sorted({t for n in mutant.lines for t in lines.get(n, ())}, key=times.get)
    chosen, total = [], 0.0
    for test in tests[:400]:
        total += times[test]
        if chosen and total > seconds:
            break
        chosen.append(test)
    return chosen


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """At most one mutant per line, with each folder's share of the lines."""
    generator = random.Random(seed)
    lines: dict[tuple[str, tuple[int, ...]], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        lines[mutant.path, mutant.lines].append(mutant)
    one_each = [generator.choice(same) for same in lines.values()]
    return generator.sample(one_each, min(count, len(one_each)))


def folder_of(path: str) -> str:
    return next(folder for folder in FOLDERS if path.startswith(f"{folder}/"))


def known_equivalents() -> set[str]:
    lines = EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []
    return {line.rsplit(" | ", 1)[0] for line in lines if line and not line.startswith("#")}


def report(results: list[dict[str, Any]], n_unreached: int) -> Iterator[str]:
    """The survivors, and a table of verdicts by folder."""
    equivalent = known_equivalents()
    table: dict[str, Counter] = defaultdict(Counter)
    for each in results:
        if each["verdict"] == "survived" and each["key"] in equivalent:
            each["verdict"] = "equivalent"
        elif each["verdict"] == "survived":
            yield f"{each['path']}:{each['line']}\n  - {each['before']}\n  + {each['after']}"
        table[folder_of(each["path"])][each["verdict"]] += 1
    verdicts = ("killed", "timeout", "survived", "equivalent")
    yield f"{'':24}" + "".join(f"{verdict:>12}" for verdict in verdicts)
    for folder, counts in sorted(table.items()):
        yield f"{folder:24}" + "".join(f"{counts[verdict]:12}" for verdict in verdicts)
    yield f"{n_unreached} mutants are on lines that no quick test reaches on this machine"


def worker(number: int, jobs: int, work: list[Mutant], seconds: float) -> None:
    """Judge each ``jobs``-th mutant, in a copy of the tree."""
    reached, times = read_record(OUT / "recorded")
    folder = OUT / f"copy{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    copy_tree(OUT / "recorded", folder)
    for mutant in work[number::jobs]:
        tests = chosen_tests(mutant, reached, times, seconds)
        begin = time.monotonic()
        verdict = judge(mutant, folder, tests, times)
        entry = dict(
            key=mutant.key,
            path=mutant.path,
            line=mutant.lines[0],
            before=mutant.before,
            after=mutant.after,
            verdict=verdict,
            tests=len(tests),
            seconds=round(time.monotonic() - begin, 1),
        )
        with (OUT / "results.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(f"{verdict:9}{mutant.path}:{mutant.lines[0]}  {mutant.after}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    parser.add_argument("--count", type=int, default=600, help="mutants (600)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of tests per mutant (30)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--record", action="store_true", help="run the tests first, once more")
    parser.add_argument("--tests", nargs="*", default=[], help="files to record, in place of all")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)

    os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in ("torch", "torch.distributed", "numpy"):
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    recorded = OUT / "recorded"
    if options.record or not (recorded / "record" / "times.json").exists():
        shutil.rmtree(recorded, ignore_errors=True)
        (recorded / "record").mkdir(parents=True)
        (OUT / "results.jsonl").unlink(missing_ok=True)
        copy_tree(ROOT, recorded)
        print("recording the lines of all quick tests", flush=True)
        run_tests(recorded, options.tests, 4 * 3600, records=True)
    reached, _ = read_record(recorded)
    every = mutants_of(recorded, options.folders)
    found = [m for m in every if any(reached.get(m.path, {}).get(n) for n in m.lines)]
    results_file = OUT / "results.jsonl"
    lines = results_file.read_text().splitlines() if results_file.exists() else []
    done = {json.loads(line)["key"] for line in lines}
    work = [m for m in sample(found, options.count, options.seed) if m.key not in done]
    pids = []
    for number in range(options.jobs):
        pid = os.fork()
        if not pid:
            worker(number, options.jobs, work, options.seconds)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    results = [json.loads(line) for line in results_file.read_text().splitlines()]
    print(*report(results, len(every) - len(found)), sep="\n")


if __name__ == "__main__":
    main()
