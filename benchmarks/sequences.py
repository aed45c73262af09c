"""Random programs of what users do around FP4Adam, each compared with an exact model at every step.

    python benchmarks/sequences.py [--device cuda] [--path kernels] [--programs 1000 | --minutes 60]

A program is some twenty calls: steps, overwritten weights, copies, checkpoints, moves, casts, and
interrupts, on a model of all formats. What they are, and what has to be true of them, is in
tests/references/training_programs.py. A failing program is shortened and printed. Programs run in
processes of a hundred, each with a seed of its own, so that one that crashes is found as well, by
the calls that it wrote down. --json keeps how much has been run, and what failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = ("operators", "kernels")
PER_PROCESS = 100


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--path", choices=PATHS, default="operators", help="what steps: plain operators or kernels"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where; kernels on the CPU run in Triton's interpreter",
    )
    parser.add_argument("--programs", type=int, help="how many (default: one process of 100)")
    parser.add_argument("--minutes", type=float, help="how long, in place of --programs")
    parser.add_argument("--length", type=int, default=20, help="most calls of a program")
    parser.add_argument("--seed", type=int, default=0, help="of the first process; others follow")
    parser.add_argument("--without", default="", help="calls to leave out, joined by commas")
    parser.add_argument("--json", type=Path, help="where results are written")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.programs is not None and args.minutes is not None:
        parser.error("--programs and --minutes must not be given together; leave one out")
    if min(args.programs or 1, args.minutes or 1, args.length) <= 0:
        parser.error("--programs, --minutes and --length must be positive")
    return args


def work(args: argparse.Namespace) -> None:
    """Run programs in this process; the folder ``args.worker`` takes what happened."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "references")]
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        import interpreter

        interpreter.install()

    import hypothesis
    import torch
    from hypothesis.stateful import run_state_machine_as_test

    from training_programs import Training

    torch.set_num_threads(1)

    class Program(Training):
        device = args.device
        kernels = args.path == "kernels"
        without = frozenset(filter(None, args.without.split(",")))
        trace = Trace(args.worker / "calls")

    hypothesis.seed(args.seed)(Program)
    failure = None
    try:
        run_state_machine_as_test(
            Program,
            settings=hypothesis.settings(
                max_examples=args.programs,
                stateful_step_count=args.length,
                database=None,
                deadline=None,
                print_blob=False,
                report_multiple_bugs=False,
                phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
                suppress_health_check=[*hypothesis.HealthCheck],
            ),
        )
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        failure = {"error": f"{type(error).__name__}: {error}", "program": "\n".join(notes)}
    result = {"counts": Program.counts, "failure": failure}
    (args.worker / "result.json").write_text(json.dumps(result))


class Trace:
    """The calls of the program that runs, in a file that a crash leaves behind."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w")

    def start(self) -> None:
        """Forget the program before."""
        self.file.seek(0)
        self.file.truncate()

    def append(self, call: str) -> None:
        print(call, file=self.file, flush=True)


def run_process(args: argparse.Namespace, seed: int, programs: int) -> dict[str, Any]:
    """Run programs in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker", folder, "--seed", str(seed)]
        command += ["--path", args.path, "--device", args.device, "--programs", str(programs)]
        command += ["--length", str(args.length), "--without", args.without]
        finished = subprocess.run(command, capture_output=True, text=True)
        result = Path(folder) / "result.json"
        if result.exists():
            return {"seed": seed, **json.loads(result.read_text())}
        calls = Path(folder) / "calls"
        return {
            "seed": seed,
            "counts": {},
            "failure": {
                "error": f"the process ended with {finished.returncode}\n{finished.stderr[-3000:]}",
                "program": calls.read_text() if calls.exists() else "",
            },
        }


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.worker is not None:
        work(args)
        return 0
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from provenance import about

    start, results = time.monotonic(), []
    total: dict[str, int] = {}
    left = args.programs or PER_PROCESS
    while True:
        programs = PER_PROCESS if args.minutes else min(left, PER_PROCESS)
        result = run_process(args, args.seed + len(results), programs)
        results.append(result)
        for name, count in result["counts"].items():
            total[name] = total.get(name, 0) + count
        left -= programs
        counts = ", ".join(f"{count} {name}" for name, count in total.items())
        print(f"{time.monotonic() - start:6.0f} s  {counts}", flush=True)
        if result["failure"] is not None:
            print(f"seed {result['seed']}: {result['failure']['error']}", flush=True)
            print(result["failure"]["program"], flush=True)
        if args.minutes and time.monotonic() - start >= 60 * args.minutes:
            break
        if not args.minutes and left <= 0:
            break
    failures = [result for result in results if result["failure"] is not None]
    print(f"{len(failures)} of {len(results)} processes found a failure")
    if args.json is not None:
        summary = {
            "about": about(args.device),
            "path": args.path,
            "length": args.length,
            "first_seed": args.seed,
            "processes": len(results),
            "counts": total,
            "seconds": round(time.monotonic() - start, 1),
            "failures": failures,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
